// Tests of train_gpt2.c, one section a room, in the order of the rooms.
//
// The file is built twice: with -DREAL=double, where finite differences and comparisons have their digits, and in
// float, the type of real runs. What only double can decide is compiled only there.
//
// The heart of it is the naive model of the second section. train_gpt2.c folds scale vectors into effective weights,
// computes attention in tiles and logits in chunks, and has its derivatives written by hand; the naive model scales
// activations one by one as the paper's formulas are written, and gets its derivatives from a tape. They share the
// configuration and the names of the parameters, and no arithmetic.
#define TESTING
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // the program uses them all; the tests need only some
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wformat-truncation" // what is inlined here is another matter than in the program
#endif
#include "train_gpt2.c"
#pragma GCC diagnostic pop

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <float.h>
#include <sys/wait.h>

// REAL is a macro that holds a type's name: pasted to a prefix it can be asked about in #if.
#define PASTE(a, b) a##b
#define IS_DOUBLE(type) PASTE(IS_DOUBLE_, type)
#define IS_DOUBLE_double 1
#define IS_DOUBLE_float 0
#if IS_DOUBLE(REAL)
#define IN(in_double, in_float) (in_double)
#else
#define IN(in_double, in_float) (in_float)
#endif

// Criterion's own leaks, and the models that live until their test's process ends, would fail every sanitized run.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

// ----------------------------------------------------------------------------------------------------
// Helpers: random numbers, comparisons, models from a line of flags, folders, children

static uint64_t noise_state = 0x2545F4914F6CDD1Du; // each test is a process of its own and begins here
static double noise(void) { // uniform in (-1, 1): xorshift64*
    noise_state ^= noise_state >> 12;
    noise_state ^= noise_state << 25;
    noise_state ^= noise_state >> 27;
    return (double)(int64_t)(noise_state * 0x2545F4914F6CDD1Du) / 9223372036854775808.0;
}
static double gaussian(void) { // a sum of twelve uniforms is close enough
    double sum = 0;
    for (int i = 0; i < 12; i++) { sum += noise(); }
    return sum / 2;
}
static int noise_int(int n) { return (int)((noise() + 1) / 2 * n) % n; }

static void *array(int64_t count, size_t size) { // zeroed; most live until the test's process ends
    void *a = calloc((size_t)(count > 0 ? count : 1), size);
    cr_assert(a, "out of memory");
    return a;
}
static real *reals(int64_t n) { return (real *)array(n, sizeof(real)); }
static double *doubles(int64_t n) { return (double *)array(n, sizeof(double)); }
static real *random_reals(int64_t n) {
    real *a = reals(n);
    for (int64_t i = 0; i < n; i++) { a[i] = (real)noise(); }
    return a;
}
static double *as_doubles(const real *a, int64_t n) {
    double *d = doubles(n);
    for (int64_t i = 0; i < n; i++) { d[i] = (double)a[i]; }
    return d;
}

// Largest difference over the largest expected value; infinite where anything is NaN, which fmax would pass over.
static double worst(const real *found, const double *expected, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)found[i] - expected[i]);
        if (!(d <= DBL_MAX)) { return INFINITY; }
        difference = fmax(difference, d);
        size = fmax(size, fabs(expected[i]));
    }
    return difference == 0 ? 0 : difference / size;
}
#define CLOSE(found, expected, n, tolerance, ...) do { \
    double error_ = worst(found, expected, n); \
    cr_log_info("%s:%d worst %.2e of %.0e", __func__, __LINE__, error_, (double)(tolerance)); \
    cr_assert(error_ <= (tolerance), "relative error %g, allowed %g: " #found ", %s", error_, (double)(tolerance), text_format(__VA_ARGS__)); \
} while (0)

static void threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}
static void one_thread(void) { threads(1); } // Criterion runs tests side by side: teams would only wait for each other

static char folder[64]; // of the running test
static void make_folder(void) {
    one_thread();
    strcpy(folder, "/tmp/test_gpt2.XXXXXX");
    cr_assert(mkdtemp(folder), "cannot make %s", folder);
}
static void remove_folder(void) { // files, and folders of checkpoints
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (e->d_name[0] == '.') { continue; }
        char *path = text_format("%s/%s", folder, e->d_name);
        if (unlink(path) != 0) { remove_dir(path); }
        free(path);
    }
    if (dir) { closedir(dir); }
    rmdir(folder);
}

static void config_from(Config *cfg, const char *flags) {
    const char *argv[96] = {"test"};
    int argc = 1;
    char *text = text_format("%s", flags), *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) { argv[argc++] = word; }
    config_defaults(cfg);
    config_parse_flags(cfg, argc, argv);
    presets_apply(cfg);
    config_resolve(cfg);
    free(text);
}

// The tables of a model, without memory for its values: also the paper's largest costs nothing.
static GPT *model_tables(const char *flags) {
    Config cfg;
    GPT *m = (GPT *)array(1, sizeof(GPT));
    config_from(&cfg, flags);
    gpt_build(m, &cfg);
    return m;
}
static GPT *model_new(const char *flags) {
    GPT *m = model_tables(flags);
    gpt_allocate(m, m->cfg.batch, m->cfg.seq_len);
    gpt_init(m);
    reparameterize_forward(m);
    return m;
}

// Moves all of theta away from its initial values: a mistake that vanishes at gamma = 1 or beta = 0 must show.
// Also fills the batch with random tokens.
static void model_randomize(GPT *m) {
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        int vector = strstr(p->name, "gamma") != NULL, exponent = m->cfg.reparam == REPARAM_ER;
        for (int64_t j = 0; j < p->rows * p->cols; j++) {
            m->theta[p->offset + j] = (real)(!vector ? 0.6 * noise() : exponent ? 0.5 * noise() : 1.2 + 0.5 * noise());
        }
    }
    for (int64_t n = 0; n < (int64_t)m->cfg.batch * m->cfg.seq_len; n++) {
        m->inputs[n] = noise_int(m->cfg.vocab);
        m->targets[n] = noise_int(m->cfg.vocab);
    }
    reparameterize_forward(m);
}

static double model_loss(GPT *m) {
    reparameterize_forward(m);
    return gpt_forward(m, m->inputs, m->targets, m->cfg.batch, m->cfg.seq_len, 0);
}
static double model_gradients(GPT *m) {
    gpt_zero_grad(m);
    reparameterize_forward(m);
    double loss = gpt_forward(m, m->inputs, m->targets, m->cfg.batch, m->cfg.seq_len, 1.0 / ((double)m->cfg.batch * m->cfg.seq_len));
    gpt_backward(m, m->inputs);
    reparameterize_backward(m);
    return loss;
}

// The gradient of a step over the sequences of `data` from number `first` on, as training computes it.
static double gradient_of(GPT *m, const DataLoader *data, int64_t first) {
    Run run;
    memset(&run, 0, sizeof run);
    run.data = *data;
    run.state.sequences = first;
    return train_gradient(m, &run);
}

static const Param *param_named(const GPT *m, const char *name) {
    for (int i = 0; i < m->num_params; i++) { if (strcmp(m->params[i].name, name) == 0) { return &m->params[i]; } }
    return NULL;
}
static int ends_with(const char *text, const char *end) {
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}
static double norm_of(const real *a, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) { sum += (double)a[i] * (double)a[i]; }
    return sqrt(sum);
}

// Exit status of action(argument) in a child, 0 where it returns. Its stderr is thrown away, so that an expected
// refusal doesn't look like a failure in the log.
static int status_of(void (*action)(const void *), const void *argument) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) { _exit(99); }
        action(argument);
        _exit(0);
    }
    int status = -1;
    cr_assert(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
static void parse_action(const void *flags) {
    Config cfg;
    config_from(&cfg, (const char *)flags);
}
static int parse_status(const char *flags) { return status_of(parse_action, flags); }

// ----------------------------------------------------------------------------------------------------
// The naive model, part 1: a tape. Every number that depends on theta is a node that knows the numbers it
// was made from (two at most) and its derivative with respect to them; gradients flow back along the tape.

typedef int Var; // index of a node
typedef struct Node { double value, grad, da, db; Var a, b; } Node;
static Node *tape;
static int tape_size, tape_room;

static Var node(double value, Var a, double da, Var b, double db) {
    if (tape_size == tape_room) {
        tape_room = tape_room ? 2 * tape_room : 1 << 16;
        tape = (Node *)realloc(tape, (size_t)tape_room * sizeof(Node));
        cr_assert(tape, "out of memory");
    }
    tape[tape_size] = (Node){value, 0, da, db, a, b};
    return tape_size++;
}
static double value(Var x) { return tape[x].value; }
static Var leaf(double x) { return node(x, -1, 0, -1, 0); }
static Var add(Var a, Var b) { return node(value(a) + value(b), a, 1, b, 1); }
static Var sub(Var a, Var b) { return node(value(a) - value(b), a, 1, b, -1); }
static Var mul(Var a, Var b) { return node(value(a) * value(b), a, value(b), b, value(a)); }
static Var quotient(Var a, Var b) { return node(value(a) / value(b), a, 1 / value(b), b, -value(a) / (value(b) * value(b))); }
static Var times(Var a, double k) { return node(value(a) * k, a, k, -1, 0); }
static Var plus(Var a, double k) { return node(value(a) + k, a, 1, -1, 0); }
static Var exponential(Var a) { double e = exp(value(a)); return node(e, a, e, -1, 0); }
static Var logarithm(Var a) { return node(log(value(a)), a, 1 / value(a), -1, 0); }
static Var root(Var a) { double r = sqrt(value(a)); return node(r, a, 0.5 / r, -1, 0); }

static void tape_backward(Var from) {
    tape[from].grad = 1;
    for (Var i = from; i >= 0; i--) {
        const Node n = tape[i];
        if (n.a >= 0) { tape[n.a].grad += n.da * n.grad; }
        if (n.b >= 0) { tape[n.b].grad += n.db * n.grad; }
    }
}

// ----------------------------------------------------------------------------------------------------
// The naive model, part 2: the formulas of the paper, on activations

enum { MAX_N = 16, MAX_WIDTH = 32, MAX_SITES = 32 };

// Norm(x) = x / sqrt(mean(x^2) + eps)
static void naive_norm(Var *y, const Var *x, int n) {
    Var squares = mul(x[0], x[0]);
    for (int i = 1; i < n; i++) { squares = add(squares, mul(x[i], x[i])); }
    Var size = root(plus(times(squares, 1.0 / n), 1e-5));
    for (int i = 0; i < n; i++) { y[i] = quotient(x[i], size); }
}
static void naive_scale(Var *x, const Var *gamma, int n) {
    for (int i = 0; i < n; i++) { x[i] = mul(gamma[i], x[i]); }
}

// First of the n leaves of a tensor of theta. Leaves come first on the tape: leaf i is theta[i].
static char naive_used[8192]; // which numbers of theta a formula has asked for
static Var naive_tensor(const GPT *m, const char *name, int n) {
    const Param *p = param_named(m, name);
    cr_assert(p, "expected a parameter %s", name);
    cr_assert(p->rows * p->cols == n, "%s: found %d numbers, expected %d", name, (int)(p->rows * p->cols), n);
    memset(naive_used + p->offset, 1, (size_t)n);
    return (Var)p->offset;
}

// The scale vector of a name: gamma, or eq. 8: beta * Norm(alpha), or eq. 9: e^beta * e^(alpha - mean(alpha)).
static Var *naive_gamma(const GPT *m, const char *prefix, const char *kind, int n) {
    Var alpha[MAX_WIDTH], *gamma = (Var *)array(n, sizeof(Var));
    char *name = text_format("%s.%s%s", prefix, kind, m->cfg.reparam == REPARAM_NONE ? "" : ".alpha");
    for (int i = 0; i < n; i++) { gamma[i] = alpha[i] = naive_tensor(m, name, n) + i; }
    if (m->cfg.reparam == REPARAM_NONE) { return gamma; }
    Var beta = naive_tensor(m, text_format("%s.%s.beta", prefix, kind), 1);
    if (m->cfg.reparam == REPARAM_OR) {
        naive_norm(gamma, alpha, n);
        for (int i = 0; i < n; i++) { gamma[i] = mul(beta, gamma[i]); }
    } else {
        Var sum = alpha[0];
        for (int i = 1; i < n; i++) { sum = add(sum, alpha[i]); }
        for (int i = 0; i < n; i++) { gamma[i] = mul(exponential(beta), exponential(sub(alpha[i], times(sum, 1.0 / n)))); }
    }
    return gamma;
}

// One linear map with whatever stands around it; NULL for a vector that the site hasn't.
typedef struct NaiveSite { int rows, cols, norm_groups; Var weight, *before, *after, *of_norm; } NaiveSite;

static char *site_prefix(int site, int layer) { // "head", or "layers.3.gate"
    static const char *const names[NUM_SITES] = {"q", "k", "v", "o", "gate", "up", "down", "head"};
    return site == SITE_HEAD ? text_format("head") : text_format("layers.%d.%s", layer, names[site]);
}

// Reads the definitions off the flags: which vectors a site has, who shares them, over what its norm goes.
static void naive_site(const GPT *m, NaiveSite *s, int site, int layer, int rows, int cols) {
    const Config *cfg = &m->cfg;
    int place = cfg->placement[site], attention = site == SITE_Q || site == SITE_K || site == SITE_V;
    int branch = attention || site == SITE_GATE || site == SITE_UP; // shares its input with other sites
    int norm = place == PLACE_DNP || (cfg->qk_norm && (site == SITE_Q || site == SITE_K))
            || (cfg->post_norm && (site == SITE_O || site == SITE_DOWN));
    char *prefix = site_prefix(site, layer), *shared = text_format("layers.%d.%s", layer, attention ? "attn" : "ffn");
    memset(s, 0, sizeof *s);
    s->rows = rows;
    s->cols = cols;
    s->weight = naive_tensor(m, site == SITE_HEAD && cfg->tie_embeddings ? "embedding.weight" : text_format("%s.weight", prefix), rows * cols);
    s->norm_groups = !norm ? 0 : attention ? rows / (cfg->channels / cfg->heads) : 1; // Q, K, V per head, else over all
    if (!cfg->norm_scale) { return; }
    if (place == PLACE_INPUT || place == PLACE_DP || place == PLACE_DNP) { s->before = naive_gamma(m, branch && !cfg->hg ? shared : prefix, "gamma_b", cols); }
    if (place == PLACE_AP || place == PLACE_DP) { s->after = naive_gamma(m, prefix, "gamma_a", rows); }
    if (norm) { s->of_norm = naive_gamma(m, prefix, "gamma_norm", rows); }
}

// y = gamma_norm * Norm(gamma_a * (W (gamma_b * x)))
static void naive_linear(const NaiveSite *s, Var *y, const Var *x) {
    Var scaled[MAX_WIDTH];
    memcpy(scaled, x, (size_t)s->cols * sizeof(Var));
    if (s->before) { naive_scale(scaled, s->before, s->cols); }
    for (int r = 0; r < s->rows; r++) {
        y[r] = mul(s->weight + r * s->cols, scaled[0]);
        for (int c = 1; c < s->cols; c++) { y[r] = add(y[r], mul(s->weight + r * s->cols + c, scaled[c])); }
    }
    if (s->after) { naive_scale(y, s->after, s->rows); }
    for (int g = 0, n = s->norm_groups ? s->rows / s->norm_groups : 0; g < s->norm_groups; g++) { naive_norm(y + g * n, y + g * n, n); }
    if (s->of_norm) { naive_scale(y, s->of_norm, s->rows); }
}

static void naive_rope(Var *head, int t, int HS) {
    for (int i = 0; i < HS / 2; i++) {
        double angle = t / pow(10000, 2.0 * i / HS);
        Var x = head[i], y = head[i + HS / 2];
        head[i] = sub(times(x, cos(angle)), times(y, sin(angle)));
        head[i + HS / 2] = add(times(x, sin(angle)), times(y, cos(angle)));
    }
}

// out (T, NH HS) of one sequence: for each query a softmax over the keys up to its own, one by one
static void naive_attention(Var (*out)[MAX_WIDTH], Var (*q)[MAX_WIDTH], Var (*k)[MAX_WIDTH], Var (*v)[MAX_WIDTH], int T, int NH, int KVH, int HS) {
    for (int h = 0; h < NH; h++) {
        int qh = h * HS, kh = h / (NH / KVH) * HS;
        for (int t = 0; t < T; t++) {
            Var weight[MAX_N], sum = -1;
            for (int s = 0; s <= t; s++) {
                Var score = mul(q[t][qh], k[s][kh]);
                for (int d = 1; d < HS; d++) { score = add(score, mul(q[t][qh + d], k[s][kh + d])); }
                weight[s] = exponential(times(score, 1 / sqrt(HS)));
                sum = s ? add(sum, weight[s]) : weight[s];
            }
            for (int d = 0; d < HS; d++) {
                Var o = mul(weight[0], v[0][kh + d]);
                for (int s = 1; s <= t; s++) { o = add(o, mul(weight[s], v[s][kh + d])); }
                out[t][qh + d] = quotient(o, sum);
            }
        }
    }
}

// x += attention(x), then x += ffn(x), for one sequence
static void naive_block(const Config *cfg, const NaiveSite *sites, Var (*x)[MAX_WIDTH], int T) {
    int C = cfg->channels, H = cfg->hidden, HS = C / cfg->heads;
    Var unit[MAX_WIDTH], y[MAX_WIDTH], gate[MAX_WIDTH], up[MAX_WIDTH];
    Var q[MAX_N][MAX_WIDTH], k[MAX_N][MAX_WIDTH], v[MAX_N][MAX_WIDTH], att[MAX_N][MAX_WIDTH];
    for (int t = 0; t < T; t++) {
        naive_norm(unit, x[t], C);
        naive_linear(&sites[SITE_Q], q[t], unit);
        naive_linear(&sites[SITE_K], k[t], unit);
        naive_linear(&sites[SITE_V], v[t], unit);
        for (int h = 0; h < cfg->heads; h++) { naive_rope(q[t] + h * HS, t, HS); }
        for (int h = 0; h < cfg->kv_heads; h++) { naive_rope(k[t] + h * HS, t, HS); }
    }
    naive_attention(att, q, k, v, T, cfg->heads, cfg->kv_heads, HS);
    for (int t = 0; t < T; t++) {
        naive_linear(&sites[SITE_O], y, att[t]);
        for (int c = 0; c < C; c++) { x[t][c] = add(x[t][c], y[c]); }
        naive_norm(unit, x[t], C);
        naive_linear(&sites[SITE_GATE], gate, unit);
        naive_linear(&sites[SITE_UP], up, unit);
        for (int i = 0; i < H; i++) { // silu(gate) * up, silu(z) = z / (1 + e^-z)
            gate[i] = mul(quotient(gate[i], plus(exponential(times(gate[i], -1)), 1)), up[i]);
        }
        naive_linear(&sites[SITE_DOWN], y, gate);
        for (int c = 0; c < C; c++) { x[t][c] = add(x[t][c], y[c]); }
    }
}

// Starts a tape with theta as its leaves, and reads all sites off the flags.
static void naive_begin(const GPT *m, NaiveSite *sites) {
    const Config *cfg = &m->cfg;
    int C = cfg->channels, H = cfg->hidden, HS = C / cfg->heads, Q = cfg->heads * HS, KV = cfg->kv_heads * HS;
    tape_size = 0;
    cr_assert(m->num_theta <= (int64_t)sizeof naive_used && cfg->layers * 7 < MAX_SITES && cfg->vocab <= MAX_WIDTH && H <= MAX_WIDTH && C <= MAX_WIDTH);
    memset(naive_used, 0, sizeof naive_used);
    for (int64_t i = 0; i < m->num_theta; i++) { leaf((double)m->theta[i]); }
    for (int l = 0; l < cfg->layers; l++) {
        const int rows[7] = {Q, KV, KV, C, H, H, C}, cols[7] = {C, C, C, Q, C, C, H};
        for (int s = 0; s < 7; s++) { naive_site(m, &sites[7 * l + s], s, l, rows[s], cols[s]); }
    }
    naive_site(m, &sites[7 * cfg->layers], SITE_HEAD, -1, cfg->vocab, C);
    naive_tensor(m, "embedding.weight", cfg->vocab * C);
    for (int64_t i = 0; i < m->num_theta; i++) { cr_assert(naive_used[i], "theta[%d] belongs to no formula of the paper", (int)i); }
}

// Mean cross-entropy over the model's batch of B sequences of T; logits (B T, V) receives the logits.
static Var naive_forward(const GPT *m, const NaiveSite *sites, double *logits, int B, int T) {
    const Config *cfg = &m->cfg;
    int C = cfg->channels, V = cfg->vocab;
    Var total = leaf(0), embedding = naive_tensor(m, "embedding.weight", V * C);
    cr_assert(B * T <= MAX_N);
    for (int b = 0; b < B; b++) {
        Var x[MAX_N][MAX_WIDTH], unit[MAX_WIDTH], z[MAX_WIDTH];
        for (int t = 0; t < T; t++) { for (int c = 0; c < C; c++) { x[t][c] = embedding + m->inputs[b * T + t] * C + c; } }
        for (int l = 0; l < cfg->layers; l++) { naive_block(cfg, sites + 7 * l, x, T); }
        for (int t = 0; t < T; t++) {
            naive_norm(unit, x[t], C);
            naive_linear(&sites[7 * cfg->layers], z, unit);
            Var sum = exponential(z[0]);
            for (int v = 1; v < V; v++) { sum = add(sum, exponential(z[v])); }
            for (int v = 0; v < V; v++) { logits[(b * T + t) * V + v] = value(z[v]); }
            total = add(total, sub(logarithm(sum), z[m->targets[b * T + t]])); // -log softmax(z)[target]
        }
    }
    return times(total, 1.0 / (B * T));
}

// ----------------------------------------------------------------------------------------------------
// The models that the naive model, the finite differences and the folding are tried on. Sizes are odd where they
// may be, so that nothing fits a vector register or a tile.

#define SMALL "--layers 2 --channels 12 --heads 2 --hidden 7 --vocab 13 --seq-len 6 --batch 2"
#define GQA1  "--layers 2 --channels 16 --heads 4 --kv-heads 1 --hidden 7 --vocab 11 --seq-len 5 --batch 2"
#define GQA2  "--layers 2 --channels 16 --heads 4 --kv-heads 2 --hidden 9 --vocab 17 --seq-len 7 --batch 2"
#define DEEP  "--layers 3 --channels 8 --heads 2 --hidden 5 --vocab 11 --seq-len 7 --batch 1"
#define SHORT "--layers 1 --channels 10 --heads 1 --hidden 11 --vocab 12 --seq-len 1 --batch 3"

typedef struct Case { const char *shape, *flags; } Case;
static const Case cases[] = {
    {SMALL, "--variant noscale"},
    {SMALL, "--variant baseline"},
    {SMALL, "--variant hg"},
    {SMALL, "--variant ap"},
    {SMALL, "--variant dp"},
    {SMALL, "--variant dnp"},
    {SMALL, "--variant or"},
    {SMALL, "--variant er"},
    {SMALL, "--variant iwd"},
    {SMALL, "--variant unified"},
    // combinations
    {SMALL, "--variant unified --qk-norm on --post-norm on"},
    {GQA1,  "--variant baseline"},
    {GQA1,  "--variant unified"},
    {GQA2,  "--variant hg+dp+er"},
    {GQA2,  "--variant unified --qk-norm on"},
    {SMALL, "--variant baseline --tie-embeddings on"},
    {SMALL, "--variant noscale --tie-embeddings on"},
    {SMALL, "--variant dp --tie-embeddings on"},
    {GQA1,  "--variant unified --tie-embeddings on"},
    {SMALL, "--variant er --tie-embeddings on --placement head=ap,q=dp"},
    {SMALL, "--variant noscale --tie-embeddings on --placement dnp"},
    {SMALL, "--placement o=input,down=input"},
    {SMALL, "--placement o=ap,down=ap --variant hg"},
    {SMALL, "--placement o=dp,down=dp --variant or"},
    {SMALL, "--placement o=dnp,down=dnp --variant hg+er"},
    {DEEP,  "--placement o=dnp,down=dp,q=dnp,k=ap --variant or"},
    {SMALL, "--variant noscale --placement dnp"},
    {SMALL, "--variant noscale --qk-norm on --post-norm on"},
    {SMALL, "--variant dp --qk-norm on"},             // two vectors after one map
    {GQA2,  "--variant ap+or --qk-norm on --post-norm on"},
    {SMALL, "--placement q=none,k=dp,v=ap,gate=dnp,up=none,head=dp"},
    {GQA2,  "--placement q=none,k=none,v=none,gate=input,up=ap,head=none --variant er"},
    {GQA1,  "--placement q=dnp,k=dnp,v=input,head=dnp --variant hg+or"},
    {DEEP,  "--placement none"},
    {SMALL, "--variant ap+or"},
    {SMALL, "--variant dnp+er"},
    {SMALL, "--variant dnp+or --post-norm on"},
    {SMALL, "--post-norm on --placement down=dnp,o=dp"},
    {DEEP,  "--variant unified --post-norm on"},
    {SHORT, "--variant unified"},
};

// A test with a parameter runs once for each index, in a process of its own.
static struct criterion_test_params indices(int count) {
    static int index[64];
    for (int i = 0; i < count; i++) { index[i] = i; }
    return cr_make_param_array(int, index, (size_t)count);
}
static GPT *case_model(int index) {
    GPT *m = model_new(text_format("%s %s", cases[index].shape, cases[index].flags));
    model_randomize(m);
    return m;
}

// ----------------------------------------------------------------------------------------------------
// 1. Configuration

TestSuite(configuration, .init = one_thread, .timeout = 60);

// Sets an option from text, writes it, reads what was written, and writes it again.
static void check_round_trip(int index, const char *text) {
    Config first, second;
    char once[4400], twice[4400];
    const Option *o = &options[index];
    config_defaults(&first);
    config_defaults(&second);
    option_set(&first, index, text, FROM_FLAG, o->name);
    option_text(&first, index, once, sizeof once);
    option_set(&second, index, once, FROM_FLAG, o->name);
    option_text(&second, index, twice, sizeof twice);
    cr_assert_str_eq(once, twice, "--%s %s", o->name, text);
    if (o->type == TYPE_TEXT) { cr_assert_str_eq(once, text); return; }
    size_t size = o->type == TYPE_PLACEMENT ? sizeof first.placement : o->type == TYPE_LONG || o->type == TYPE_REAL ? 8 : sizeof(int);
    cr_assert(memcmp(option_field(o, &first), option_field(o, &second), size) == 0, "--%s %s reads back another value", o->name, text);
}

static void round_trips(int index) { // of values all over the option's range
    const Option *o = &options[index];
    static const char *const places[] = {"none", "input", "ap", "dp", "dnp"};
    char text[256];
    check_round_trip(index, o->initial);
    for (int k = 0; k <= 100; k++) {
        text[0] = '\0';
        if (o->type == TYPE_INT || o->type == TYPE_LONG) { snprintf(text, sizeof text, "%.0f", floor(o->low + (o->high - o->low) * k / 100)); }
        if (o->type == TYPE_REAL) { snprintf(text, sizeof text, "%.17g", k == 100 ? o->high : o->low + (fmin(o->high, 1e3) - o->low) * (noise() + 1) / 2); }
        if (o->type == TYPE_TEXT) { snprintf(text, sizeof text, "path %d with spaces, commas = signs*", k); }
        for (int s = 0; o->type == TYPE_PLACEMENT && s < NUM_SITES; s++) {
            if (noise() < 0 && (text[0] || s < NUM_SITES - 1)) { continue; }
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s=%s", text[0] ? "," : "", site_names[s], places[noise_int(5)]);
        }
        if (text[0]) { check_round_trip(index, text); }
    }
    for (const char *word = o->choices; word && o->type != TYPE_PLACEMENT; word += strcspn(word, "|") + 1) {
        snprintf(text, sizeof text, "%.*s", (int)strcspn(word, "|"), word);
        check_round_trip(index, text);
        if (!word[strcspn(word, "|")]) { break; }
    }
}

Test(configuration, every_option_reads_back_what_it_writes) {
    for (int i = 0; i < NUM_OPTIONS; i++) { round_trips(i); }
    Config cfg; // and a short number stays short
    char text[64];
    config_from(&cfg, "--lr 0.1 --final-lr-frac 1e-3");
    cr_assert_str_eq(option_text(&cfg, find_option("lr"), text, sizeof text), "0.1");
    cr_assert_str_eq(option_text(&cfg, find_option("final-lr-frac"), text, sizeof text), "0.001");
}

static void check_placement(const char *text, const int *expected) {
    int placement[NUM_SITES];
    placement_parse(placement, text, FROM_FLAG, "test");
    for (int s = 0; s < NUM_SITES; s++) {
        cr_assert_eq(placement[s], expected[s], "%s: site %s has place %d, expected %d", text, site_names[s], placement[s], expected[s]);
    }
}

Test(configuration, placement_is_one_value_or_a_list_by_site) {
    enum { N = PLACE_NONE, I = PLACE_INPUT, A = PLACE_AP, D = PLACE_DP, M = PLACE_DNP };
    //                                                       q  k  v  o  ga up do head
    check_placement("input",                  (const int[]){I, I, I, N, I, I, N, I});
    check_placement("none",                   (const int[]){N, N, N, N, N, N, N, N});
    check_placement("ap",                     (const int[]){A, A, A, N, A, A, N, A});
    check_placement("dnp",                    (const int[]){M, M, M, N, M, M, N, M});
    check_placement("q=dnp,k=dnp",            (const int[]){M, M, I, N, I, I, N, I});
    check_placement("o=dp,down=ap",           (const int[]){I, I, I, D, I, I, A, I});
    check_placement("head=none,up=ap,q=none", (const int[]){N, I, I, N, I, A, N, N});
    check_placement("q=ap,k=dp,v=dnp,o=input,gate=none,up=input,down=dnp,head=dp", (const int[]){A, D, M, I, N, I, M, D});
    static const char *const wrong[] = {"", "dq", "q", "q=", "q=xp", "x=dp", "q=dp,q=dp", "q=dp,", ",q=dp", "q=dp k=dp", "Q=dp", "q=dpx", "dp,ap"};
    for (int i = 0; i < COUNT(wrong); i++) {
        cr_assert_eq(parse_status(text_format("--placement=%s", wrong[i])), 2, "--placement \"%s\" must be refused", wrong[i]);
    }
}

static void check_variant(const char *flags, int norm_scale, int hg, int place, int reparam, int wd_scale) {
    Config cfg;
    config_from(&cfg, flags);
    cr_assert(cfg.norm_scale == norm_scale && cfg.hg == hg && cfg.reparam == reparam && cfg.wd_scale == wd_scale, "%s", flags);
    for (int s = 0; s < NUM_SITES; s++) {
        cr_assert_eq(cfg.placement[s], s == SITE_O || s == SITE_DOWN ? PLACE_NONE : place, "%s: site %s", flags, site_names[s]);
    }
}

Test(configuration, presets_combine) {
    check_variant("--variant noscale",         OFF, OFF, PLACE_INPUT, REPARAM_NONE, WD_ALL);
    check_variant("--variant baseline",        ON,  OFF, PLACE_INPUT, REPARAM_NONE, WD_ALL);
    check_variant("",                          ON,  OFF, PLACE_INPUT, REPARAM_NONE, WD_ALL);
    check_variant("--variant hg",              ON,  ON,  PLACE_INPUT, REPARAM_NONE, WD_ALL);
    check_variant("--variant ap",              ON,  OFF, PLACE_AP,    REPARAM_NONE, WD_ALL);
    check_variant("--variant iwd",             ON,  OFF, PLACE_INPUT, REPARAM_NONE, WD_INPUT);
    check_variant("--variant hg+dp+er+iwd",    ON,  ON,  PLACE_DP,    REPARAM_ER,   WD_INPUT);
    check_variant("--variant unified",         ON,  ON,  PLACE_DNP,   REPARAM_OR,   WD_INPUT);
    check_variant("--variant iwd+or+dnp+hg",   ON,  ON,  PLACE_DNP,   REPARAM_OR,   WD_INPUT); // what unified stands for
    check_variant("--variant unified+hg+or",   ON,  ON,  PLACE_DNP,   REPARAM_OR,   WD_INPUT); // parts that agree
    check_variant("--variant noscale+iwd+dnp", OFF, OFF, PLACE_DNP,   REPARAM_NONE, WD_INPUT);
    Config cfg;
    config_from(&cfg, "--model gemma-0.5b --variant unified");
    cr_assert(cfg.channels == 1280 && cfg.qk_norm == ON && cfg.post_norm == ON && cfg.hg == ON && cfg.hidden == 3413 && cfg.lr == 2e-3);
    static const char *const wrong[] = {"--variant dp+dnp", "--variant or+er", "--variant unified+ap", "--variant noscale+or", "--variant noscale+hg",
        "--variant noscale+dp", "--variant hg+", "--variant dpp", "--variant +hg", "--model 2b", "--variant noscale --placement q=ap"};
    for (int i = 0; i < COUNT(wrong); i++) { cr_assert_eq(parse_status(wrong[i]), 2, "%s must be refused", wrong[i]); }
}

Test(configuration, a_flag_beats_a_preset_on_either_side_of_it) {
    static const char *const lines[] = {
        "--variant unified --hg off --placement dp --model 0.25b --layers 3 --lr 0.5",
        "--hg off --placement dp --layers 3 --lr 0.5 --model 0.25b --variant unified",
        "--lr=0.5 --hg=off --variant=unified --layers=3 --placement=dp --model=0.25b",
    };
    Config cfg;
    for (int i = 0; i < COUNT(lines); i++) {
        config_from(&cfg, lines[i]);
        cr_assert(cfg.hg == OFF && cfg.placement[SITE_Q] == PLACE_DP && cfg.layers == 3 && cfg.lr == 0.5, "the flags must win: %s", lines[i]);
        cr_assert(cfg.reparam == REPARAM_OR && cfg.wd_scale == WD_INPUT && cfg.channels == 1024 && cfg.vocab == 50304, "the presets must set the rest: %s", lines[i]);
    }
    config_from(&cfg, "--variant dp+dnp --placement ap"); // a flag also settles what two parts of --variant disagree on
    cr_assert_eq(cfg.placement[SITE_Q], PLACE_AP);
}

Test(configuration, values_that_follow_from_others_and_contradictions) {
    Config cfg;
    config_from(&cfg, "--channels 96 --heads 3 --batch 5");
    cr_assert(cfg.hidden == 256 && cfg.kv_heads == 3 && cfg.total_batch == 5 && cfg.final_lr_frac == AUTO);
    config_from(&cfg, "--schedule wsd --warmup 0.8");
    cr_assert_eq(cfg.final_lr_frac, AUTO);
    static const char *const wrong[] = {"--channels 10 --heads 3", "--channels 6 --heads 2", "--channels 1024 --heads 2", "--heads 2 --kv-heads 3",
        "--batch 3 --total-batch 8", "--schedule wsd --warmup 0.9 --decay-frac 0.2", "--decay-frac 0.1", "--norm-scale off --reparam or",
        "--norm-scale off --hg on", "--steps 3 --tokens-per-param 2", "--layers", "--layers 0", "--layers 2x", "--lr nan", "--lr -1", "--lay 2",
        "--layers 2 --layers 2", "layers 2", "--seed 1e3", "--tie-embeddings yes", "--estimate=on", "--sample 5"};
    for (int i = 0; i < COUNT(wrong); i++) { cr_assert_eq(parse_status(wrong[i]), 2, "%s must be refused", wrong[i]); }
    cr_assert_eq(parse_status("--layers 2"), 0); // a refusal and its absence can be told apart
}

// ----------------------------------------------------------------------------------------------------
// 2. Parameters

TestSuite(parameters, .init = one_thread, .timeout = 60);

static int64_t count_role(const GPT *m, Role role) {
    int64_t n = 0;
    for (int i = 0; i < m->num_params; i++) { if (m->params[i].role == role) { n += m->params[i].rows * m->params[i].cols; } }
    return n;
}
static int64_t count_vectors(const GPT *m) { return count_role(m, ROLE_GAMMA_B) + count_role(m, ROLE_GAMMA_A) + count_role(m, ROLE_GAMMA_NORM); }

Test(parameters, counts_of_the_papers_models) {
    cr_assert_eq(model_tables("--model 0.12b")->num_theta, 119744256);
    cr_assert_eq(model_tables("--model 0.12b --variant unified")->num_theta, 119846846);
    GPT *m = model_tables("--model 1b");
    cr_assert_eq(m->num_theta, 1028065024);
    cr_assert_eq(count_vectors(m), 80640);
    cr_assert_eq(model_tables("--model 1b --variant noscale")->num_theta, 1028065024 - 80640);
}

// L=1, C=8, two heads of 4, one key/value head, H=6, V=10. By hand: embedding and head 10*8; q 8*8, k and v 4*8,
// gate and up 6*8; o 8*8, down 8*6.
#define BY_HAND "--layers 1 --channels 8 --heads 2 --kv-heads 1 --hidden 6 --vocab 10 "
static void check_counts(const char *flags, int embedding, int matrix, int residual, int head, int gamma_b, int gamma_a, int gamma_norm) {
    GPT *m = model_tables(flags);
    const int expected[NUM_ROLES] = {embedding, matrix, residual, 0 /* no router */, head, gamma_b, gamma_a, gamma_norm};
    int64_t total = 0;
    for (int role = 0; role < NUM_ROLES; role++) {
        int found = (int)count_role(m, (Role)role);
        cr_assert_eq(found, expected[role], "%s: %s: found %d, expected %d", flags, role_table[role].name, found, expected[role]);
        total += expected[role];
    }
    cr_assert_eq(m->num_theta, total);
}

Test(parameters, counts_by_role_of_a_small_model) {
    check_counts(BY_HAND "--variant noscale",                 80, 224, 112, 80,  0,  0,  0);
    check_counts(BY_HAND,                                     80, 224, 112, 80, 24,  0,  0); // attn, ffn, head: 8 each
    check_counts(BY_HAND "--tie-embeddings on",               80, 224, 112,  0, 24,  0,  0);
    check_counts(BY_HAND "--variant hg",                      80, 224, 112, 80, 48,  0,  0); // q k v gate up head
    check_counts(BY_HAND "--variant ap",                      80, 224, 112, 80,  0, 38,  0); // 8 + 4 + 4 + 6 + 6 + 10
    check_counts(BY_HAND "--variant dp",                      80, 224, 112, 80, 24, 38,  0);
    check_counts(BY_HAND "--variant dnp",                     80, 224, 112, 80, 24,  0, 38);
    check_counts(BY_HAND "--variant or",                      80, 224, 112, 80, 27,  0,  0); // a beta each
    check_counts(BY_HAND "--variant unified",                 80, 224, 112, 80, 54,  0, 44);
    check_counts(BY_HAND "--qk-norm on --post-norm on",       80, 224, 112, 80, 24,  0, 28); // q 8, k 4, o 8, down 8
    check_counts(BY_HAND "--placement o=dp,down=dp,q=none",   80, 224, 112, 80, 38, 16,  0); // o 8, down 6 before, 8 each after
    check_counts(BY_HAND "--variant dp --qk-norm on",         80, 224, 112, 80, 24, 38, 12);
    check_counts(BY_HAND "--variant noscale --placement dnp", 80, 224, 112, 80,  0,  0,  0); // the norms stay, without vectors
}

// What AP and DP put after a map can be absorbed by it, and counts as an Input-Norm's. A vector's alpha and beta
// both follow it.
Test(parameters, decay_by_class) {
    static const struct { const char *wd; int weights, gamma_b, gamma_a, gamma_norm; } table[] = {
        {"all", 1, 1, 1, 1}, {"none", 1, 0, 0, 0}, {"input", 1, 1, 1, 0}, {"output", 1, 0, 0, 1},
    };
    static const char *const models[] = {"--variant baseline", "--variant dp", "--variant ap+or", "--variant dnp", "--variant dnp+or+hg", "--variant dnp+er",
        "--variant dp+er --qk-norm on --post-norm on", "--placement o=dp,down=dnp,q=ap,k=dnp", "--variant noscale", "--tie-embeddings on"};
    int seen[4] = {0};
    for (int w = 0; w < COUNT(table); w++) {
        for (int k = 0; k < COUNT(models); k++) {
            const GPT *m = model_tables(text_format(BY_HAND "%s --wd-scale %s", models[k], table[w].wd));
            for (int i = 0; i < m->num_params; i++) {
                const Param *p = &m->params[i];
                int kind = strstr(p->name, ".gamma_b") ? 1 : strstr(p->name, ".gamma_a") ? 2 : strstr(p->name, ".gamma_norm") ? 3 : 0;
                int expected = kind == 0 ? table[w].weights : kind == 1 ? table[w].gamma_b : kind == 2 ? table[w].gamma_a : table[w].gamma_norm;
                cr_assert(kind > 0 || ends_with(p->name, ".weight"), "%s", p->name);
                cr_assert_eq(param_decays(m, p), expected, "--wd-scale %s: %s: found %d, expected %d", table[w].wd, p->name, param_decays(m, p), expected);
                seen[kind]++;
            }
        }
    }
    for (int kind = 0; kind < 4; kind++) { cr_assert(seen[kind] > 0); }
}

// Mean and standard deviation of a tensor are within five standard errors of 0 and std.
static void check_initial(const GPT *m, const Param *p, double std) {
    double sum = 0, squares = 0, n = (double)(p->rows * p->cols);
    for (int64_t i = 0; i < p->rows * p->cols; i++) {
        double w = (double)m->theta[p->offset + i];
        sum += w;
        squares += w * w;
    }
    cr_assert(fabs(sum / n) < 5 * std / sqrt(n), "%s: mean %g", p->name, sum / n);
    cr_assert(fabs(sqrt(squares / n) / std - 1) < 5 / sqrt(2 * n), "%s: std %g, expected %g", p->name, sqrt(squares / n), std);
}

#define INIT_SHAPE "--layers 3 --channels 48 --heads 2 --vocab 300 --seq-len 8 "
Test(parameters, initial_matrices_depend_on_seed_and_name_alone) {
    GPT *baseline = model_new(INIT_SHAPE "--seed 5"), *unified = model_new(INIT_SHAPE "--seed 5 --variant unified"), *other = model_new(INIT_SHAPE "--seed 6");
    int matrices = 0;
    for (int i = 0; i < baseline->num_params; i++) {
        const Param *p = &baseline->params[i], *q = param_named(unified, p->name);
        if (!ends_with(p->name, ".weight")) { continue; }
        size_t bytes = (size_t)(p->rows * p->cols) * sizeof(real);
        const real *w = baseline->theta + p->offset;
        cr_assert(q && memcmp(w, unified->theta + q->offset, bytes) == 0, "%s must not depend on the variant", p->name);
        cr_assert(memcmp(w, other->theta + p->offset, bytes) != 0, "%s must depend on the seed", p->name);
        int residual = ends_with(p->name, ".o.weight") || ends_with(p->name, ".down.weight");
        check_initial(baseline, p, residual ? 0.02 / sqrt(2 * 3) : 0.02);
        for (int j = 0; j < i; j++) { // no two tensors begin with the same number
            cr_assert(w[0] != baseline->theta[baseline->params[j].offset], "%s begins as %s", p->name, baseline->params[j].name);
        }
        matrices++;
    }
    cr_assert_eq(matrices, 2 + 3 * 7);
}

Test(parameters, initial_scale_vectors_are_one) {
    static const struct { const char *flags; double alpha, beta; } vectors[] = {{"--variant dp", 1, 1}, {"--variant unified", 1, 1}, {"--variant dnp+er", 0, 0}};
    for (int k = 0; k < COUNT(vectors); k++) {
        GPT *m = model_new(text_format(INIT_SHAPE "%s", vectors[k].flags));
        for (int i = 0; i < m->num_params; i++) {
            const Param *p = &m->params[i];
            double expected = ends_with(p->name, ".beta") ? vectors[k].beta : vectors[k].alpha;
            for (int64_t j = 0; j < p->cols && strstr(p->name, "gamma"); j++) { cr_assert_eq((double)m->theta[p->offset + j], expected, "%s", p->name); }
        }
        cr_assert(m->num_gamma > 0);
        for (int64_t j = 0; j < m->num_gamma; j++) { cr_assert(fabs((double)m->gamma[j] - 1) < 1e-5); } // OR: but for NORM_EPS
    }
}

// ----------------------------------------------------------------------------------------------------
// 3. Scale vectors: three independent witnesses for each case of the table above

TestSuite(scale_vectors, .init = one_thread, .timeout = 300);

#if IS_DOUBLE(REAL)
// dL/dtheta[at] from five points: the error of the formula is of order h^4, that of rounding of order 1e-16 / h.
static double finite_difference(GPT *m, int64_t at) {
    const double h = 3e-4, x = m->theta[at];
    double f[4];
    for (int i = 0; i < 4; i++) {
        m->theta[at] = x + (double[]){-2, -1, 1, 2}[i] * h;
        f[i] = model_loss(m);
    }
    m->theta[at] = x;
    return (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
}

// Every tensor is probed: a small one at every element, a larger one at a dozen. The error is relative to the tensor's
// own gradient, with a floor: some gradients all but vanish (beta of a vector whose map a norm follows changes the
// loss by way of NORM_EPS alone), and there the rounding of the loss, about 1e-13, would be all that's compared.
ParameterizedTestParameters(scale_vectors, gradients_agree_with_finite_differences) { return indices(COUNT(cases)); }
ParameterizedTest(int *index, scale_vectors, gradients_agree_with_finite_differences) {
    GPT *m = case_model(*index);
    model_gradients(m);
    double *grads = as_doubles(m->grads, m->num_theta), floor_ = 1e-5 * norm_of(m->grads, m->num_theta), largest = 0;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        int64_t n = p->rows * p->cols, probes = n <= 24 ? n : 12;
        double difference = 0, size = 0;
        for (int64_t k = 0; k < probes; k++) {
            int64_t at = p->offset + (n <= 24 ? k : (n * k + noise_int((int)n)) / probes);
            double numeric = finite_difference(m, at);
            difference += (numeric - grads[at]) * (numeric - grads[at]);
            size += numeric * numeric;
        }
        double error = sqrt(difference) / fmax(sqrt(size), floor_);
        cr_assert(error < 1e-6, "%s %s: %s: relative error %g of norm %g", cases[*index].shape, cases[*index].flags, p->name, error, sqrt(size));
        largest = fmax(largest, error);
    }
    cr_log_info("FD %.2e %s", largest, cases[*index].flags);
}
#endif

// Loss, logits, and every number of dL/dtheta
ParameterizedTestParameters(scale_vectors, agree_with_the_naive_model) { return indices(COUNT(cases)); }
ParameterizedTest(int *index, scale_vectors, agree_with_the_naive_model) {
    static NaiveSite sites[MAX_SITES];
    const double tolerance = IN(1e-10, 3e-4);
    GPT *m = case_model(*index);
    int B = m->cfg.batch, T = m->cfg.seq_len, N = B * T, V = m->cfg.vocab;
    double loss = model_gradients(m), *logits = doubles(N * V);
    naive_begin(m, sites);
    Var naive_loss = naive_forward(m, sites, logits, B, T);
    tape_backward(naive_loss);
    real *found = reals(N * V);
    gpt_logits(m, found, N);
    cr_assert(fabs(loss / value(naive_loss) - 1) < tolerance, "loss %.15g, the naive model's %.15g", loss, value(naive_loss));
    CLOSE(found, logits, N * V, tolerance, "%s", cases[*index].flags);
    double largest = 0, floor_ = IN(1e-4, 1e-3) * norm_of(m->grads, m->num_theta); // a gradient that all but vanishes: see above
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        double difference = 0, size = floor_;
        for (int64_t at = p->offset; at < p->offset + p->rows * p->cols; at++) {
            double d = fabs((double)m->grads[at] - tape[at].grad);
            cr_assert(isfinite(d));
            difference = fmax(difference, d);
            size = fmax(size, fabs(tape[at].grad));
        }
        cr_assert(difference / size < tolerance, "%s %s: %s: relative error %g", cases[*index].shape, cases[*index].flags, p->name, difference / size);
        largest = fmax(largest, difference / size);
    }
    cr_log_info("naive %.2e %s", largest, cases[*index].flags);
}

// The same architecture with nothing left that can be folded: no scale vector where no norm stands between it and its
// map; where one does (norms of DNP, QK-norm, post-norm) only the vector after the norm.
static GPT *folded_model(const GPT *m, const char *shape) {
    const Config *cfg = &m->cfg;
    char list[128] = "";
    int vectors_after_norms = 0;
    for (int s = 0; s < NUM_SITES; s++) {
        int dnp = cfg->placement[s] == PLACE_DNP;
        vectors_after_norms |= cfg->norm_scale && (dnp || cfg->qk_norm || cfg->post_norm);
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s=%s", s ? "," : "", site_names[s], dnp ? "dnp" : "none");
    }
    return model_new(text_format("%s --qk-norm %s --post-norm %s --norm-scale %s --placement %s", shape, cfg->qk_norm ? "on" : "off",
                                 cfg->post_norm ? "on" : "off", vectors_after_norms ? "on" : "off", list));
}

// Writes diag(after) W diag(before) of one site of `m` into `folded`, and what stands after its norm.
static void fold_site(GPT *folded, const GPT *m, const NaiveSite *s, const char *prefix) {
    const Param *w = param_named(folded, text_format("%s.weight", prefix));
    const Param *before = param_named(folded, text_format("%s.gamma_b", prefix)), *norm = param_named(folded, text_format("%s.gamma_norm", prefix));
    for (int r = 0; r < s->rows; r++) {
        for (int c = 0; c < s->cols; c++) {
            double u = s->after ? value(s->after[r]) : 1, v = s->before ? value(s->before[c]) : 1;
            folded->theta[w->offset + r * s->cols + c] = (real)(u * (double)m->theta[s->weight + r * s->cols + c] * v);
        }
        cr_assert_eq(norm != NULL, s->of_norm != NULL, "%s", prefix);
        if (norm) { folded->theta[norm->offset + r] = (real)value(s->of_norm[r]); }
    }
    for (int c = 0; before && c < s->cols; c++) { folded->theta[before->offset + c] = 1; } // DNP's own gamma_b: nothing left to do
}

// A model with scale vectors computes nothing that the plain model couldn't: what they add is in how it trains.
ParameterizedTestParameters(scale_vectors, add_no_expressivity) { return indices(COUNT(cases)); }
ParameterizedTest(int *index, scale_vectors, add_no_expressivity) {
    static NaiveSite sites[MAX_SITES];
    GPT *m = case_model(*index), *folded = folded_model(m, cases[*index].shape);
    int N = m->cfg.batch * m->cfg.seq_len, V = m->cfg.vocab, C = m->cfg.channels;
    naive_begin(m, sites);
    for (int i = 0; i < m->num_maps; i++) {
        fold_site(folded, m, &sites[i], site_prefix(i == m->num_maps - 1 ? SITE_HEAD : i % 7, i / 7));
    }
    memcpy(folded->theta + param_named(folded, "embedding.weight")->offset, m->theta + param_named(m, "embedding.weight")->offset, (size_t)(V * C) * sizeof(real));
    memcpy(folded->inputs, m->inputs, (size_t)N * sizeof(int32_t));
    memcpy(folded->targets, m->targets, (size_t)N * sizeof(int32_t));
    for (int i = 0; i < folded->num_params; i++) {
        const Param *p = &folded->params[i];
        if (strstr(p->name, ".gamma_b")) { for (int c = 0; c < p->cols; c++) { folded->theta[p->offset + c] = 1; } } // also a shared one
        cr_assert(p->role != ROLE_GAMMA_A);
    }
    model_loss(m);
    model_loss(folded);
    real *with = reals(N * V), *without = reals(N * V);
    gpt_logits(m, with, N);
    gpt_logits(folded, without, N);
    CLOSE(without, as_doubles(with, N * V), N * V, IN(1e-10, 1e-4), "%s", cases[*index].flags);
}

// ----------------------------------------------------------------------------------------------------
// 4. Layers, each against its formula in plain loops over doubles

TestSuite(layers, .init = one_thread, .timeout = 120);

typedef struct Product { int64_t M, N, K, ras, cas, rbs, cbs, ldc; int accumulate; } Product;

// A and B lie in any order of rows and columns, C has `ldc - N` numbers after each row that must stay as they are.
static void check_product(Product p) {
    real *A = random_reals(p.M * p.ras + p.K * p.cas + 1), *B = random_reals(p.K * p.rbs + p.N * p.cbs + 1), *C = random_reals(p.M * p.ldc);
    double *expected = as_doubles(C, p.M * p.ldc), error = 0;
    for (int64_t i = 0; i < p.M; i++) {
        for (int64_t j = 0; j < p.N; j++) {
            double sum = p.accumulate ? expected[i * p.ldc + j] : 0;
            for (int64_t k = 0; k < p.K; k++) { sum += (double)A[i * p.ras + k * p.cas] * (double)B[k * p.rbs + j * p.cbs]; }
            expected[i * p.ldc + j] = sum;
        }
    }
    real *before = reals(p.M * p.ldc);
    memcpy(before, C, (size_t)(p.M * p.ldc) * sizeof(real));
    matmul(C, p.ldc, A, p.ras, p.cas, B, p.rbs, p.cbs, p.M, p.N, p.K, p.accumulate);
    for (int64_t i = 0; i < p.M; i++) {
        for (int64_t j = 0; j < p.ldc; j++) {
            if (j >= p.N) { cr_assert_eq(C[i * p.ldc + j], before[i * p.ldc + j], "written past the end of row %d", (int)i); continue; }
            double d = fabs((double)C[i * p.ldc + j] - expected[i * p.ldc + j]);
            error = d >= 0 ? fmax(error, d) : INFINITY;
        }
    }
    double allowed = IN(1e-15, 6e-7) * (2 + sqrt((double)p.K) * 4);
    cr_assert(error < allowed, "(%d,%d,%d) strides %d %d, %d %d, accumulate %d: error %g, allowed %g", (int)p.M, (int)p.N, (int)p.K,
              (int)p.ras, (int)p.cas, (int)p.rbs, (int)p.cbs, p.accumulate, error, allowed);
    free(A), free(B), free(C), free(expected), free(before);
}

Test(layers, matmul_agrees_with_the_triple_loop) {
    for (int i = 0; i < 600; i++) {
        int64_t M = 1 + noise_int(i % 3 ? 40 : 130), N = 1 + noise_int(i % 5 ? 40 : 150), K = 1 + noise_int(i % 7 ? 30 : 500);
        if (i % 11 == 0) { M = 1; }
        if (i % 13 == 0) { N = 1; }
        if (i % 17 == 0) { K = 0; } // an empty sum
        int64_t wa = noise_int(3), wb = noise_int(3); // rows may be wider than what's used: a slice of a matrix
        Product p = {M, N, K, K + wa, 1, N + wb, 1, N + noise_int(4), noise() < 0};
        if (noise() < 0) { p.ras = 1; p.cas = M + wa; } // A transposed
        if (noise() < 0) { p.rbs = 1; p.cbs = K + wb; } // B transposed
        check_product(p);
    }
    check_product((Product){2100, 9, 5, 5, 1, 9, 1, 9, 0}); // past the sizes of the blocks, in each direction
    check_product((Product){9, 2100, 5, 5, 1, 1, 5, 2100, 1});
    check_product((Product){30, 40, 1700, 1, 30, 40, 1, 41, 1});
    check_product((Product){300, 70, 410, 820, 2, 140, 2, 70, 0}); // every second column
}

// T x T matrices and all. q, k, v lie in rows as the model has them; gradients of all three, given those of out.
static void plain_attention(double *out, double *lse, double *dqkv, const double *qkv, const double *dout, int B, int T, int NH, int KVH, int HS) {
    int W = (NH + 2 * KVH) * HS;
    double *P = doubles(T), *dP = doubles(T);
    for (int row = 0; row < B * NH * T; row++) {
        int b = row / (NH * T), h = row / T % NH, t = row % T, kv = h / (NH / KVH);
        int64_t at_q = ((int64_t)b * T + t) * W + h * HS, at_k = (int64_t)b * T * W + (NH + kv) * HS, at_v = at_k + KVH * HS;
        int64_t at_o = ((int64_t)b * T + t) * NH * HS + h * HS;
        double top = -INFINITY, sum = 0, mean = 0;
        for (int s = 0; s <= t; s++) {
            P[s] = 0;
            for (int d = 0; d < HS; d++) { P[s] += qkv[at_q + d] * qkv[at_k + (int64_t)s * W + d] / sqrt(HS); }
            top = fmax(top, P[s]);
        }
        for (int s = 0; s <= t; s++) { sum += exp(P[s] - top); }
        lse[row] = top + log(sum);
        for (int s = 0; s <= t; s++) {
            P[s] = exp(P[s] - lse[row]);
            dP[s] = 0;
            for (int d = 0; d < HS; d++) {
                out[at_o + d] += P[s] * qkv[at_v + (int64_t)s * W + d];
                dP[s] += dout[at_o + d] * qkv[at_v + (int64_t)s * W + d];
                dqkv[at_v + (int64_t)s * W + d] += P[s] * dout[at_o + d];
            }
            mean += P[s] * dP[s];
        }
        for (int s = 0; s <= t; s++) {
            for (int d = 0; d < HS; d++) {
                double score = P[s] * (dP[s] - mean) / sqrt(HS);
                dqkv[at_q + d] += score * qkv[at_k + (int64_t)s * W + d];
                dqkv[at_k + (int64_t)s * W + d] += score * qkv[at_q + d];
            }
        }
    }
    free(P), free(dP);
}

Test(layers, attention_agrees_with_the_textbook) {
    static const struct { int B, T, NH, KVH, HS; } shapes[] = {
        {1, 1, 1, 1, 2}, {2, 3, 2, 2, 4}, {3, 7, 4, 2, 6}, {2, 33, 6, 1, 10}, {1, 95, 2, 1, 16}, {1, 96, 2, 2, 8}, {2, 97, 3, 3, 14},
        {1, 193, 4, 2, 6}, {1, 300, 2, 1, 64}, {2, 100, 1, 1, 256}, {1, 5, 1, 1, 254},
    };
    for (int i = 0; i < COUNT(shapes); i++) {
        int B = shapes[i].B, T = shapes[i].T, NH = shapes[i].NH, KVH = shapes[i].KVH, HS = shapes[i].HS;
        int64_t N = (int64_t)B * T, W = (NH + 2 * KVH) * HS, C = NH * HS;
        real *qkv = random_reals(N * W), *dout = random_reals(N * C), *out = reals(N * C), *lse = reals(N * NH), *D = reals(N * NH), *dqkv = random_reals(N * W);
        for (int64_t j = 0; j < N * W; j++) { qkv[j] *= 3; } // some softmaxes are sharp
        double *o = doubles(N * C), *l = doubles(N * NH), *g = doubles(N * W);
        plain_attention(o, l, g, as_doubles(qkv, N * W), as_doubles(dout, N * C), B, T, NH, KVH, HS);
        attention_forward(out, lse, qkv, B, T, NH, KVH, HS);
        attention_backward(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, HS);
        const char *what = text_format("B %d T %d NH %d KVH %d HS %d", B, T, NH, KVH, HS);
        CLOSE(out, o, N * C, IN(1e-13, 1e-5), "%s", what);
        CLOSE(lse, l, N * NH, IN(1e-14, 2e-6), "%s", what);
        CLOSE(dqkv, g, N * W, IN(1e-13, 2e-5), "%s", what);
        threads(4); // few heads and many threads: the work is split another way, with the same result
        real *again = reals(N * W);
        attention_backward(again, D, dout, qkv, out, lse, B, T, NH, KVH, HS);
        cr_assert(memcmp(again, dqkv, (size_t)(N * W) * sizeof(real)) == 0, "%s: other bits with 4 threads", what);
        one_thread();
    }
}

Test(layers, attention_is_steady_for_large_scores_and_passes_on_nan) {
    enum { T = 120, HS = 8 };
    real *qkv = random_reals(T * 3 * HS), *out = reals(T * HS), *lse = reals(T);
    for (int i = 0; i < T * 3 * HS; i++) { qkv[i] *= (real)100; } // scores of thousands: exp overflows unless the maximum is taken off
    double *o = doubles(T * HS), *l = doubles(T);
    plain_attention(o, l, doubles(T * 3 * HS), as_doubles(qkv, T * 3 * HS), doubles(T * HS), 1, T, 1, 1, HS);
    attention_forward(out, lse, qkv, 1, T, 1, 1, HS);
    CLOSE(out, o, T * HS, IN(1e-10, 1e-3), "large scores");
    qkv[50 * 3 * HS + HS] = NAN; // a key: every query from there on sees it
    attention_forward(out, lse, qkv, 1, T, 1, 1, HS);
    for (int t = 0; t < T; t++) { cr_assert_eq(isnan(out[t * HS]) != 0, t >= 50, "query %d", t); }
}

Test(layers, exp_fast) {
    double largest = 0;
    for (int i = 0; i <= 1000000; i++) {
        real x = (real)(-87.3 + (88.7 + 87.3) * i / 1e6);
        double expected = exp((double)x), ulp = (double)exp_fast(x) / expected - 1;
        largest = fmax(largest, isnan(ulp) ? INFINITY : fabs(ulp) / IN(DBL_EPSILON, FLT_EPSILON));
    }
    cr_log_info("exp_fast: %.2f epsilon", largest);
    cr_assert(largest <= IN(0, 1), "exp_fast is off by %g epsilon", largest); // in double it is the library's
    cr_assert_eq(exp_fast(0), 1);
    cr_assert_eq(exp_fast(-INFINITY), 0);
    cr_assert_eq(exp_fast(INFINITY), INFINITY);
    for (uint32_t bits = 0x7fc00000u; bits < 0x7fc00200u; bits++) { // a NaN's low bits, taken for an exponent, must not make it a number
        float nan;
        memcpy(&nan, &bits, 4);
        cr_assert(isnan(exp_fast((real)nan)) && isnan(exp_fast((real)-nan)));
    }
    for (int x = 88; x < 1000; x++) { cr_assert(exp_fast((real)-x) >= 0 && exp_fast((real)-x) < 1e-38); }
    for (int x = 89; x < 1000; x++) { cr_assert(exp_fast((real)x) > 3.4e38); }
    cr_assert_eq(exp_fast(-1000), 0);
    cr_assert_eq(exp_fast(1000), INFINITY);
    cr_assert_eq(exp_fast((real)-3.0e38), 0); // what attention takes off a row that has seen no score yet
    cr_assert(exp_fast((real)88.72) > 3e38 && exp_fast((real)88.72) < 3.5e38);
    cr_assert(exp_fast((real)-87.3) > 1e-38 && exp_fast((real)-87.3) < 1.3e-38);
}

// y = gamma x r with r = 1/sqrt(mean(x^2) + eps), and dx = (dy/dx)^T dout by the whole Jacobian
static void plain_norm(double *y, double *dx, double *dgamma, const double *x, const double *gamma, const double *dout, int D) {
    double squares = 0;
    for (int i = 0; i < D; i++) { squares += x[i] * x[i]; }
    double r = 1 / sqrt(squares / D + 1e-5);
    for (int i = 0; i < D; i++) {
        y[i] = gamma[i] * x[i] * r;
        dgamma[i] += dout[i] * x[i] * r;
        for (int j = 0; j < D; j++) { dx[j] += dout[i] * gamma[i] * ((i == j) * r - x[i] * x[j] * r * r * r / D); }
    }
}

Test(layers, rmsnorm) {
    for (int turn = 0; turn < 60; turn++) {
        int N = 1 + noise_int(40), G = 1 + noise_int(4), D = 1 + noise_int(37), stride = G * D + noise_int(5), with_gamma = turn % 2, accumulate = turn / 2 % 2;
        int64_t n = (int64_t)N * stride;
        real *x = random_reals(n), *gamma = random_reals(G * D), *dout = random_reals(n), *out = random_reals(n), *dx = random_reals(n);
        real *rstd = reals(N * G), *dgamma = random_reals(G * D), *partial = random_reals(NUM_BLOCKS * G * D);
        double *y = as_doubles(out, n), *g = as_doubles(dx, n), *dg = as_doubles(dgamma, G * D), ones[64];
        for (int i = 0; i < 64; i++) { ones[i] = 1; }
        double *xd = as_doubles(x, n), *dd = as_doubles(dout, n), *gd = as_doubles(gamma, G * D), ignored[64];
        for (int row = 0; row < N * G; row++) {
            int64_t at = (int64_t)(row / G) * stride + row % G * D;
            for (int d = 0; d < D && !accumulate; d++) { g[at + d] = 0; }
            plain_norm(y + at, g + at, with_gamma ? dg + row % G * D : ignored, xd + at, with_gamma ? gd + row % G * D : ones, dd + at, D);
        }
        rmsnorm_forward(out, rstd, x, with_gamma ? gamma : NULL, N, G, D, stride);
        rmsnorm_backward(dx, with_gamma ? dgamma : NULL, partial, dout, x, rstd, with_gamma ? gamma : NULL, N, G, D, stride, accumulate);
        CLOSE(out, y, n, IN(1e-14, 2e-6), "N %d G %d D %d", N, G, D); // what lies between the rows stays
        CLOSE(dx, g, n, IN(2e-13, 1e-4), "N %d G %d D %d accumulate %d", N, G, D, accumulate);
        CLOSE(dgamma, dg, G * D, IN(1e-13, 1e-5), "N %d G %d D %d", N, G, D);
    }
    real zeros[5] = {0}, out[5], rstd; // a vector of zeros stays one
    rmsnorm_forward(out, &rstd, zeros, NULL, 1, 1, 5, 5);
    for (int i = 0; i < 5; i++) { cr_assert_eq(out[i], 0); }
}

Test(layers, swiglu) {
    enum { N = 5, H = 23 };
    real *gu = random_reals(N * 2 * H), *dh = random_reals(N * H), *h = reals(N * H), *dgu = reals(N * 2 * H);
    double *expected = doubles(N * H), *g = doubles(N * 2 * H);
    for (int i = 0; i < N * 2 * H; i++) { gu[i] *= 8; }
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < H; i++) {
            double gate = gu[n * 2 * H + i], up = gu[n * 2 * H + H + i], e = exp(-gate);
            expected[n * H + i] = gate / (1 + e) * up;
            g[n * 2 * H + i] = dh[n * H + i] * up * (1 + e + gate * e) / ((1 + e) * (1 + e)); // quotient rule
            g[n * 2 * H + H + i] = dh[n * H + i] * gate / (1 + e);
        }
    }
    swiglu_forward(h, gu, N, H);
    swiglu_backward(dgu, dh, gu, N, H);
    CLOSE(h, expected, N * H, IN(1e-15, 1e-6), "forward");
    CLOSE(dgu, g, N * 2 * H, IN(1e-15, 1e-6), "backward");
    real far[4] = {(real)-2000, (real)2000, 3, 3}, out[2], dfar[4], ones[2] = {1, 1}; // gates far out: 0 and the identity, no NaN
    swiglu_forward(out, far, 1, 2);
    swiglu_backward(dfar, ones, far, 1, 2);
    cr_assert(out[0] == 0 && out[1] == 6000 && dfar[0] == 0 && dfar[1] == 3 && dfar[2] == 0 && dfar[3] == 2000);
}

// A rotation: lengths stay; scores depend on the distance between query and key alone; -1 undoes +1.
Test(layers, rope) {
    enum { T = 40, HS = 10, HEADS = 3, STRIDE = HEADS * HS + 7 };
    GPT *m = model_new("--layers 1 --channels 30 --heads 3 --vocab 16 --seq-len 40 --batch 2");
    real *x = random_reals(2 * T * STRIDE), *same = random_reals(HS);
    for (int t = 0; t < T; t++) { memcpy(x + t * STRIDE, same, sizeof(real) * HS); memcpy(x + t * STRIDE + HS, same, sizeof(real) * HS); }
    double *before = as_doubles(x, 2 * T * STRIDE), *expected = as_doubles(x, 2 * T * STRIDE);
    for (int n = 0; n < 2 * T; n++) {
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < HS / 2; i++) {
                double angle = n % T / pow(10000, 2.0 * i / HS), *a = expected + n * STRIDE + h * HS + i, *b = a + HS / 2, old = *a;
                *a = old * cos(angle) - *b * sin(angle);
                *b = old * sin(angle) + *b * cos(angle);
            }
        }
    }
    rope(x, m->rope_cos, m->rope_sin, 2 * T, T, HEADS, HS, STRIDE, 1);
    CLOSE(x, expected, 2 * T * STRIDE, IN(1e-14, 1e-6), "formula; the rest of a row stays");
    for (int n = 0; n < 2 * T; n++) {
        double size = 0, was = 0;
        for (int d = 0; d < HS; d++) { size += (double)x[n * STRIDE + d] * x[n * STRIDE + d]; was += before[n * STRIDE + d] * before[n * STRIDE + d]; }
        cr_assert_float_eq(size, was, IN(1e-13, 1e-5));
    }
    for (int distance = 0; distance < T; distance++) { // head 0 as query, head 1 as key, the same vector at all places
        double first = 0;
        for (int t = distance; t < T; t++) {
            double score = 0;
            for (int d = 0; d < HS; d++) { score += (double)x[t * STRIDE + d] * (double)x[(t - distance) * STRIDE + HS + d]; }
            if (t == distance) { first = score; }
            cr_assert_float_eq(score, first, IN(1e-13, 1e-5));
        }
    }
    rope(x, m->rope_cos, m->rope_sin, 2 * T, T, HEADS, HS, STRIDE, -1);
    CLOSE(x, before, 2 * T * STRIDE, IN(1e-14, 1e-6), "there and back");
}

Test(layers, embedding) {
    enum { V = 7, C = 19, N = 12 };
    real *table = random_reals(V * C), *dout = random_reals(N * C), *out = reals(N * C), *dtable = random_reals(V * C);
    double *expected = as_doubles(dtable, V * C);
    int32_t tokens[N];
    for (int n = 0; n < N; n++) {
        tokens[n] = noise_int(V - 1); // the last token never occurs: its gradient stays
        for (int c = 0; c < C; c++) { expected[tokens[n] * C + c] += dout[n * C + c]; }
    }
    embedding_forward(out, table, tokens, N, C);
    for (int n = 0; n < N; n++) { cr_assert(memcmp(out + n * C, table + tokens[n] * C, C * sizeof(real)) == 0); }
    embedding_backward(dtable, dout, tokens, N, C);
    CLOSE(dtable, expected, V * C, IN(1e-15, 1e-6), "backward");
}

static void plain_cross_entropy(double *loss, double *dz, const double *z, int target, int V) {
    double top = z[0], sum = 0;
    for (int v = 1; v < V; v++) { top = fmax(top, z[v]); }
    for (int v = 0; v < V; v++) { sum += exp(z[v] - top); }
    *loss = top + log(sum) - z[target];
    for (int v = 0; v < V; v++) { dz[v] = exp(z[v] - top) / sum - (v == target); }
}

Test(layers, classifier) {
    for (int turn = 0; turn < 40; turn++) {
        int rows = 1 + noise_int(37), V = 2 + noise_int(50), norm = turn % 2, with_gamma = norm && turn / 2 % 2, backward = turn % 5 != 0;
        real *logits = random_reals(rows * V), *gamma = random_reals(V), *dgamma = random_reals(V);
        real *work = reals(NUM_BLOCKS * V), *partial = random_reals(NUM_BLOCKS * V);
        double weight = 0.37, losses[64], *expected = doubles(rows), *dz = doubles(rows * V), *dg = as_doubles(dgamma, V);
        double *y = doubles(V), *dy = doubles(V), *ones = doubles(V);
        int32_t targets[64];
        for (int i = 0; i < rows * V; i++) { logits[i] *= turn % 3 ? 4 : 1000; } // far out: exp alone would overflow
        double *z = as_doubles(logits, rows * V), *gd = as_doubles(gamma, V), *ignored = doubles(V), *unused = doubles(V);
        for (int v = 0; v < V; v++) { ones[v] = 1; }
        for (int n = 0; n < rows; n++) {
            targets[n] = noise_int(V);
            const double *g = with_gamma ? gd : ones;
            memcpy(y, z + n * V, (size_t)V * sizeof(double));
            if (norm) { plain_norm(y, ignored, unused, z + n * V, g, dy, V); }
            plain_cross_entropy(&expected[n], dy, y, targets[n], V);
            for (int v = 0; v < V; v++) { dy[v] *= weight; }
            if (norm) { plain_norm(y, dz + n * V, with_gamma && backward ? dg : unused, z + n * V, g, dy, V); }
            else { memcpy(dz + n * V, dy, (size_t)V * sizeof(double)); }
        }
        classifier(logits, losses, targets, rows, V, (real)(backward ? weight : 0), norm, with_gamma ? gamma : NULL, with_gamma ? dgamma : NULL, work, partial);
        for (int n = 0; n < rows; n++) {
            cr_assert(fabs(losses[n] - expected[n]) < IN(1e-12, 2e-6) * (1 + fabs(expected[n])), "loss %g, expected %g", losses[n], expected[n]);
        }
        if (!backward) { CLOSE(logits, z, rows * V, 0, "the logits stay where no gradient follows"); }
        else if (!norm) { CLOSE(logits, dz, rows * V, IN(1e-13, 1e-5), "V %d", V); }
        else { CLOSE(logits, dz, rows * V, IN(1e-12, 1e-4), "norm, V %d", V); }
        CLOSE(dgamma, dg, V, IN(1e-13, 1e-5), "gamma %d V %d", with_gamma, V);
    }
}

// ----------------------------------------------------------------------------------------------------
// 5. The model

TestSuite(model, .init = make_folder, .fini = remove_folder, .timeout = 120);

// A shard of random tokens below `vocab`, or of the tokens given.
static const char *write_shard(const char *name, const uint16_t *tokens, int count, int vocab) {
    char *path = text_format("%s/%s", folder, name);
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, count, vocab};
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(header, sizeof header, 1, file) == 1);
    for (int i = 0; i < count; i++) {
        uint16_t token = tokens ? tokens[i] : (uint16_t)noise_int(vocab);
        cr_assert(fwrite(&token, sizeof token, 1, file) == 1);
    }
    cr_assert(fclose(file) == 0);
    return path;
}

// However few logits exist at a time, loss and gradients are the same.
Test(model, chunks_of_the_head_change_nothing) {
    static const char *const flags[] = {"--variant baseline", "--variant unified", "--variant dp --tie-embeddings on", "--variant noscale --placement dnp"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format(GQA2 " %s", flags[i]));
        model_randomize(m);
        cr_assert_eq(m->head_chunk, 14);
        double loss = model_gradients(m), *grads = as_doubles(m->grads, m->num_theta);
        for (int chunk = 1; chunk < 14; chunk += 4) {
            m->head_chunk = chunk;
            double again = model_gradients(m);
            cr_assert(fabs(again / loss - 1) < IN(1e-14, 1e-6), "%s, chunks of %d: loss %.17g, expected %.17g", flags[i], chunk, again, loss);
            CLOSE(m->grads, grads, m->num_theta, IN(1e-13, 1e-5), "%s, chunks of %d", flags[i], chunk);
        }
    }
}

Test(model, gradient_accumulation_adds_up) {
    write_shard("train.bin", NULL, 200, 17);
    static const char *const flags[] = {"--variant baseline", "--variant unified", "--variant dp+er --tie-embeddings on"};
    for (int i = 0; i < COUNT(flags); i++) {
        double *expected = NULL, expected_loss = 0;
        for (int batch = 8; batch >= 1; batch /= 2) {
            GPT *m = model_new(text_format("--layers 2 --channels 16 --heads 4 --kv-heads 2 --hidden 9 --vocab 17 --seq-len 7 "
                                           "--total-batch 8 --batch %d %s", batch, flags[i]));
            DataLoader data;
            loader_open(&data, text_format("%s/train.bin", folder), "--data", m->cfg.seq_len, 1, 1);
            noise_state = 99; // the same theta for each
            model_randomize(m);
            double loss = gradient_of(m, &data, 3);
            if (!expected) { expected = as_doubles(m->grads, m->num_theta); expected_loss = loss; }
            cr_assert(fabs(loss / expected_loss - 1) < IN(1e-14, 1e-6), "--batch %d: loss %.17g, expected %.17g", batch, loss, expected_loss);
            CLOSE(m->grads, expected, m->num_theta, IN(1e-13, 1e-5), "%s --batch %d", flags[i], batch);
            gradient_of(m, &data, 3); // and a second step starts from zero
            CLOSE(m->grads, expected, m->num_theta, IN(1e-13, 1e-5), "%s --batch %d, once more", flags[i], batch);
            loader_close(&data);
        }
    }
}

// A token's logits don't depend on what comes after it, nor on the other sequences, nor on the length asked for.
Test(model, is_causal) {
    GPT *m = model_new(GQA2 " --variant unified --qk-norm on --post-norm on");
    model_randomize(m);
    enum { T = 7, V = 17 };
    real *all = reals(2 * T * V), *changed = reals(2 * T * V), *prefix = reals(T * V);
    gpt_forward(m, m->inputs, NULL, 2, T, 0);
    gpt_logits(m, all, 2 * T);
    int32_t inputs[2 * T];
    memcpy(inputs, m->inputs, sizeof inputs);
    inputs[4] = (inputs[4] + 1) % V;
    gpt_forward(m, inputs, NULL, 2, T, 0);
    gpt_logits(m, changed, 2 * T);
    CLOSE(changed, as_doubles(all, 4 * V), 4 * V, IN(1e-14, 1e-6), "before the changed token");
    CLOSE(changed + T * V, as_doubles(all + T * V, T * V), T * V, IN(1e-14, 1e-6), "the other sequence");
    for (int t = 4; t < T; t++) { cr_assert(worst(changed + t * V, as_doubles(all + t * V, V), V) > 1e-4, "token %d must see the change", t); }
    gpt_forward(m, m->inputs, NULL, 1, 5, 0);
    gpt_logits(m, prefix, 5);
    CLOSE(prefix, as_doubles(all, 5 * V), 5 * V, IN(1e-13, 1e-5), "a prefix of 5");
    gpt_logits(m, prefix, 1);
    CLOSE(prefix, as_doubles(all + 4 * V, V), V, IN(1e-13, 1e-5), "the last of a prefix of 5");
}

#ifdef _OPENMP
// Forward, backward and three updates on a model large enough that all its loops are shared out
static void train_with_threads(GPT *m, int count, double *losses) {
    threads(count);
    gpt_init(m);
    memset(m->moments, 0, (size_t)m->num_moments * sizeof(real));
    for (int step = 0; step < 3; step++) {
        losses[step] = model_gradients(m);
        double norm = gradient_norm(m);
        losses[3 + step] = norm;
        optimizer_step(m, step + 1, 1e-2, 1 / norm);
    }
}
#endif

Test(model, same_bits_for_any_number_of_threads) {
#ifndef _OPENMP
    cr_skip_test("SKIPPED: built without OpenMP, so there is one thread only");
#else
    static const char *const flags[] = {"--variant unified --optimizer muon --qk-norm on --post-norm on", "--variant dp+er --tie-embeddings on",
        "--optimizer sgd --sgd-momentum 0.9 --variant noscale --placement dnp", "--variant baseline"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format("--layers 2 --channels 60 --heads 3 --kv-heads 1 --hidden 101 --vocab 130 --seq-len 101 --batch 2 %s", flags[i]));
        model_randomize(m);
        double expected[6], found[6];
        train_with_threads(m, 1, expected);
        double *theta = as_doubles(m->theta, m->num_theta), *grads = as_doubles(m->grads, m->num_theta);
        for (int count = 2; count <= 3; count++) {
            train_with_threads(m, count, found);
            cr_assert(memcmp(found, expected, sizeof found) == 0, "%s: other losses with %d threads", flags[i], count);
            CLOSE(m->grads, grads, m->num_theta, 0, "%s, %d threads", flags[i], count);
            CLOSE(m->theta, theta, m->num_theta, 0, "%s, %d threads", flags[i], count);
        }
    }
#endif
}

// The mean is over sequences, also where the last micro-batch is not full.
Test(model, validation_is_the_mean_over_sequences) {
    #define VAL_SHAPE "--layers 2 --channels 16 --heads 4 --kv-heads 2 --hidden 9 --vocab 17 --seq-len 7 --val-batches 3 --batch "
    GPT *m = model_new(VAL_SHAPE "4"), *one = model_new(VAL_SHAPE "1");
    DataLoader data;
    model_randomize(m);
    memcpy(one->theta, m->theta, (size_t)m->num_theta * sizeof(real));
    reparameterize_forward(one);
    loader_open(&data, write_shard("val.bin", NULL, 9 * 7 + 1, 17), "--val-data", 7, 0, 0);
    cr_assert_eq(data.windows, 9); // batches of 4, 4 and 1
    double sum = 0;
    for (int s = 0; s < 9; s++) {
        loader_read(&data, s, one->inputs, one->targets, 17);
        sum += gpt_forward(one, one->inputs, one->targets, 1, 7, 0);
    }
    cr_assert(fabs(validate(m, &data) / (sum / 9) - 1) < IN(1e-14, 1e-6));
    m->cfg.val_batches = 1; // of the nine, the first four
    double part = validate(m, &data);
    sum = 0;
    for (int s = 0; s < 4; s++) {
        loader_read(&data, s, one->inputs, one->targets, 17);
        sum += gpt_forward(one, one->inputs, one->targets, 1, 7, 0);
    }
    cr_assert(fabs(part / (sum / 4) - 1) < IN(1e-14, 1e-6));
    loader_close(&data);
}

Test(model, memory_estimate_is_the_sum_of_its_parts) {
    GPT *m = model_tables(GQA2 " --variant unified --qk-norm on");
    MemoryUse use = gpt_estimate_memory(m, 2, 7);
    cr_assert_eq(use.theta + use.effective + use.grads + use.moments + use.activations + use.work, use.total);
    cr_assert(use.moments >= (size_t)m->num_theta * 2 * sizeof(real) && use.theta >= (size_t)m->num_theta * sizeof(real));
    cr_assert(m->theta == NULL && m->logits == NULL, "an estimate allocates nothing");
}

// ----------------------------------------------------------------------------------------------------
// 6. Optimizers and schedules

TestSuite(optimizer, .init = one_thread, .timeout = 120);

// Orthogonalizes X (rows,cols) in plain loops: X <- a X + b (X X^T) X + c (X X^T)^2 X, five times, for any shape
// (the program transposes a tall one first). X X^T X, done twice, needs no matter which side is the smaller.
static void plain_newton_schulz(double *X, int rows, int cols) {
    double size = 0, *cube = doubles(rows * cols), *fifth = doubles(rows * cols), *gram = doubles(rows * rows);
    for (int i = 0; i < rows * cols; i++) { size += X[i] * X[i]; }
    for (int i = 0; i < rows * cols; i++) { X[i] /= sqrt(size) + 1e-7; }
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < rows; j++) {
                gram[i * rows + j] = 0;
                for (int k = 0; k < cols; k++) { gram[i * rows + j] += X[i * cols + k] * X[j * cols + k]; }
            }
        }
        for (int pass = 0; pass < 2; pass++) {
            const double *from = pass ? cube : X;
            for (int i = 0; i < rows; i++) {
                for (int k = 0; k < cols; k++) {
                    double sum = 0;
                    for (int j = 0; j < rows; j++) { sum += gram[i * rows + j] * from[j * cols + k]; }
                    (pass ? fifth : cube)[i * cols + k] = sum;
                }
            }
        }
        for (int i = 0; i < rows * cols; i++) { X[i] = 3.4445 * X[i] - 4.7750 * cube[i] + 2.0315 * fifth[i]; }
    }
    free(cube), free(fifth), free(gram);
}

// A second implementation of one update of one tensor, in doubles: w, and the moments m and v, of n = rows x cols.
// Which rule and whether it decays follow from the tensor's name, as a reader of the paper would say it.
static void plain_update(const Config *cfg, const Param *p, double *w, double *m, double *v, const double *g, int step, double lr) {
    int matrix = strncmp(p->name, "layers.", 7) == 0 && ends_with(p->name, ".weight");
    int input = strstr(p->name, ".gamma_a") || strstr(p->name, ".gamma_b"), output = strstr(p->name, ".gamma_norm") != NULL;
    int decays = (!input && !output) || cfg->wd_scale == WD_ALL || (input && cfg->wd_scale == WD_INPUT) || (output && cfg->wd_scale == WD_OUTPUT);
    int rows = (int)p->rows, cols = (int)p->cols, n = rows * cols;
    double *update = doubles(n), rate = lr;
    for (int i = 0; i < n; i++) {
        if (cfg->optimizer == OPTIMIZER_SGD) {
            m[i] = cfg->sgd_momentum * m[i] + g[i];
            update[i] = m[i];
        } else if (cfg->optimizer == OPTIMIZER_MUON && matrix) {
            m[i] = cfg->muon_momentum * m[i] + g[i];
            update[i] = g[i] + cfg->muon_momentum * m[i];
        } else {
            m[i] += (1 - cfg->beta1) * (g[i] - m[i]);
            v[i] += (1 - cfg->beta2) * (g[i] * g[i] - v[i]);
            update[i] = m[i] / (1 - pow(cfg->beta1, step)) / (sqrt(v[i] / (1 - pow(cfg->beta2, step))) + cfg->eps);
        }
    }
    if (cfg->optimizer == OPTIMIZER_MUON && matrix) {
        plain_newton_schulz(update, rows, cols);
        rate *= 0.2 * sqrt(rows > cols ? rows : cols);
    }
    for (int i = 0; i < n; i++) { w[i] -= lr * (decays ? cfg->weight_decay : 0) * w[i] + rate * update[i]; }
    free(update);
}

// Twenty steps of training; the plain implementation is given the same gradients and keeps its own weights and
// moments. Half of the steps are clipped.
static void check_optimizer(const char *flags, double tolerance) {
    GPT *m = model_new(text_format("--layers 1 --channels 12 --heads 2 --hidden 7 --vocab 13 --seq-len 6 --batch 2 --weight-decay 0.3 %s", flags));
    model_randomize(m);
    double *w = as_doubles(m->theta, m->num_theta), *m1 = doubles(m->num_theta), *m2 = doubles(m->num_theta);
    int clipped = 0;
    for (int step = 1; step <= 20; step++) {
        model_gradients(m);
        double norm = gradient_norm(m), plain_norm_ = norm_of(m->grads, m->num_theta), lr = 0.01 * step;
        cr_assert(fabs(norm / plain_norm_ - 1) < 1e-12, "gradient norm %.17g, expected %.17g", norm, plain_norm_);
        double scale = step % 2 ? 0.5 / norm : 1; // as train_step clips, with a limit that every second step exceeds
        clipped += scale != 1;
        double *g = as_doubles(m->grads, m->num_theta);
        for (int64_t i = 0; i < m->num_theta; i++) { g[i] *= scale; }
        optimizer_step(m, step, lr, scale);
        for (int i = 0; i < m->num_params; i++) {
            const Param *p = &m->params[i];
            plain_update(&m->cfg, p, w + p->offset, m1 + p->offset, m2 + p->offset, g + p->offset, step, lr);
            CLOSE(m->theta + p->offset, w + p->offset, p->rows * p->cols, tolerance, "%s: %s after step %d", flags, p->name, step);
        }
        free(g);
    }
    cr_assert_eq(clipped, 10);
}

Test(optimizer, adamw) {
    check_optimizer("--variant baseline", IN(1e-12, 1e-4));
    check_optimizer("--variant unified --wd-scale output --eps 1e-3", IN(1e-12, 1e-4));
    check_optimizer("--variant dp+or --qk-norm on --wd-scale none --beta1 0 --beta2 0.999 --eps 1e-4", IN(1e-12, 1e-4));
    check_optimizer("--variant dp --tie-embeddings on --wd-scale input", IN(1e-12, 1e-4));
}
Test(optimizer, muon) {
    check_optimizer("--optimizer muon --variant baseline", IN(1e-9, 1e-3));
    check_optimizer("--optimizer muon --variant unified --muon-momentum 0.5 --eps 1e-3", IN(1e-9, 1e-3));
}
Test(optimizer, sgd) {
    check_optimizer("--optimizer sgd --variant unified", IN(1e-12, 2e-5));
    check_optimizer("--optimizer sgd --sgd-momentum 0.9 --variant dnp+er --wd-scale output", IN(1e-12, 2e-5));
}

// Eigenvalues of a symmetric matrix (n,n), by Jacobi's rotations, into its diagonal
static void eigenvalues(double *a, int n) {
    for (int sweep = 0; sweep < 30; sweep++) {
        for (int p = 0; p < n; p++) {
            for (int q = p + 1; q < n; q++) {
                if (fabs(a[p * n + q]) < 1e-15) { continue; }
                double theta = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
                double t = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1)), c = 1 / sqrt(t * t + 1), s = t * c;
                for (int i = 0; i < n; i++) {
                    double x = a[i * n + p], y = a[i * n + q];
                    a[i * n + p] = c * x - s * y;
                    a[i * n + q] = s * x + c * y;
                }
                for (int i = 0; i < n; i++) {
                    double x = a[p * n + i], y = a[q * n + i];
                    a[p * n + i] = c * x - s * y;
                    a[q * n + i] = s * x + c * y;
                }
            }
        }
    }
}

static int ascending(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

// Singular values of a matrix, ascending: roots of the eigenvalues of X X^T, or X^T X, whichever is smaller.
static double *singular_values(const real *X, int rows, int cols) {
    int side = rows < cols ? rows : cols, longer = rows < cols ? cols : rows;
    double *gram = doubles(side * side), *values = doubles(side);
    for (int i = 0; i < side; i++) {
        for (int j = 0; j < side; j++) {
            for (int k = 0; k < longer; k++) {
                gram[i * side + j] += rows <= cols ? (double)X[i * cols + k] * (double)X[j * cols + k] : (double)X[k * cols + i] * (double)X[k * cols + j];
            }
        }
    }
    eigenvalues(gram, side);
    for (int i = 0; i < side; i++) { values[i] = sqrt(fmax(gram[i * side + i], 0)); }
    qsort(values, (size_t)side, sizeof(double), ascending);
    return values;
}

// The direction of a Muon update of a Gaussian gradient has its singular values near 1. Five steps multiply a small
// one by 3.4445^5 = 485 at most, so that one below 0.0014 of the Frobenius norm can't reach 0.6: the smallest of a
// square matrix sometimes is, those of other shapes never. Exact for all: a value s has become p(p(p(p(p(s / norm))))).
Test(optimizer, newton_schulz_orthogonalizes) {
    static const struct { int rows, cols; } shapes[] = {{16, 16}, {33, 33}, {8, 64}, {64, 24}, {1, 40}, {48, 100}};
    GPT *m = model_tables("--optimizer muon");
    for (int k = 0; k < COUNT(shapes); k++) {
        int rows = shapes[k].rows, cols = shapes[k].cols, n = rows * cols, side = rows < cols ? rows : cols, longer = rows < cols ? cols : rows, too_small = 0;
        double smallest = INFINITY, largest = 0, lowest = INFINITY;
        for (int draw = 0; draw < 20; draw++) {
            real *w = reals(n), *g = reals(n), *moment = reals(n), *work = reals(2 * n + 2 * side * side);
            for (int i = 0; i < n; i++) { g[i] = (real)gaussian(); }
            muon_update(w, g, moment, rows, cols, &m->cfg, 1 / (0.2 * sqrt(longer)), 0, 1, work); // leaves w = -direction
            double *found = singular_values(w, rows, cols), *expected = singular_values(g, rows, cols), norm = norm_of(g, n);
            int below = 0;
            for (int i = 0; i < side; i++) {
                double s = expected[i] / norm;
                below += s < 0.0014;
                for (int step = 0; step < 5; step++) { s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s; }
                expected[i] = s;
            }
            qsort(expected, (size_t)side, sizeof(double), ascending);
            lowest = fmin(lowest, found[0]);
            for (int i = 0; i < side; i++) {
                cr_assert(fabs(found[i] - expected[i]) < IN(1e-6, 1e-3), "%d x %d: singular value %g, expected %g", rows, cols, found[i], expected[i]);
                if (i < below) { continue; }
                cr_assert(found[i] >= 0.6 && found[i] <= 1.3, "%d x %d: singular value %g", rows, cols, found[i]);
                smallest = fmin(smallest, found[i]);
                largest = fmax(largest, found[i]);
            }
            cr_assert(below <= (rows == cols), "%d x %d: %d values too small to be lifted", rows, cols, below);
            too_small += below;
        }
        cr_log_info("NS %d x %d: %.4f to %.4f, and %d of %d began too small; the lowest %.4f", rows, cols, smallest, largest, too_small, 20 * side, lowest);
    }
}

static void check_rate(const char *flags, int64_t done, double expected) { // the rate of update number `done`, 1 the first
    Config cfg;
    config_from(&cfg, flags);
    double found = learning_rate(&cfg, done - 1);
    cr_assert(fabs(found - expected) < 1e-15, "%s: update %d: found %.17g, expected %.17g", flags, (int)done, found, expected);
}

Test(optimizer, schedules_at_their_landmarks) {
#define SPAN "--lr 1 --steps 100 --warmup 0.1 --schedule "
    static const char *const all[] = {"cosine", "wsd", "linear", "constant"};
    for (int i = 0; i < 4; i++) { // warm-up is the same for all: a tenth of the peak first, the peak at its end
        const char *flags = text_format(SPAN "%s", all[i]);
        check_rate(flags, 1, 0.1);
        check_rate(flags, 5, 0.5);
        check_rate(flags, 10, 1);
    }
    check_rate(SPAN "cosine", 55, 0.05 + 0.95 / 2);                              // half-way: the mean of peak and end
    check_rate(SPAN "cosine", 40, 0.05 + 0.95 * 0.75);                           // a third: cos(pi/3) = 1/2
    check_rate(SPAN "cosine", 100, 0.05);                                        // the paper's peak / 20
    check_rate(SPAN "cosine --final-lr-frac 0.5", 55, 0.75);
    check_rate(SPAN "cosine --final-lr-frac 0", 100, 0);
    check_rate(SPAN "wsd", 11, 1);
    check_rate(SPAN "wsd", 80, 1);                                               // stable to 80%
    check_rate(SPAN "wsd", 81, 0.95);
    check_rate(SPAN "wsd", 90, 0.5);
    check_rate(SPAN "wsd", 100, 0);
    check_rate(SPAN "wsd --final-lr-frac 0.2", 90, 0.6);
    check_rate(SPAN "wsd --decay-frac 0.5", 75, 0.5);
    check_rate(SPAN "wsd --decay-frac 0", 100, 1);
    check_rate(SPAN "wsd --decay-frac 0.9", 55, 0.5);                            // no stable part
    check_rate("--lr 1 --steps 100 --warmup 0.29 --schedule constant", 29, 1);   // 0.29 * 100 is 28.999999999999996
    check_rate("--lr 1 --steps 100 --warmup 0.29 --schedule constant", 28, 28.0 / 29);
    check_rate(SPAN "linear", 55, 0.5);
    check_rate(SPAN "linear", 100, 0);
    check_rate(SPAN "linear --final-lr-frac 0.1", 100, 0.1);
    check_rate(SPAN "constant", 11, 1);
    check_rate(SPAN "constant", 100, 1);
    // degenerate lengths
    check_rate("--lr 2 --steps 1 --warmup 0 --schedule cosine", 1, 0.1);
    check_rate("--lr 2 --steps 1 --warmup 0 --schedule linear", 1, 0);
    check_rate("--lr 2 --steps 1 --warmup 0 --schedule constant", 1, 2);
    check_rate("--lr 2 --steps 1 --warmup 0 --schedule wsd", 1, 0);
    check_rate("--lr 2 --steps 1 --warmup 1 --schedule cosine", 1, 2);           // all warm-up: the peak comes last
    check_rate("--lr 2 --steps 10 --warmup 1 --schedule linear", 3, 0.6);
    check_rate("--lr 2 --steps 10 --warmup 1 --schedule linear", 10, 2);
    check_rate("--lr 2 --steps 10 --warmup 0 --schedule linear", 1, 1.8);
    check_rate("--lr 2 --steps 10 --warmup 0.05 --schedule constant", 1, 2);     // half a step of warm-up is none
    check_rate("--lr 2 --steps 2 --warmup 0.5 --schedule cosine", 1, 2);
    check_rate("--lr 2 --steps 2 --warmup 0.5 --schedule cosine", 2, 0.1);
    for (int i = 0; i < 4; i++) { // up, then never up again
        Config cfg;
        config_from(&cfg, text_format("--steps 37 --warmup 0.2 --schedule %s", all[i]));
        for (int step = 1; step < 37; step++) {
            double change = learning_rate(&cfg, step) - learning_rate(&cfg, step - 1);
            cr_assert(step < 7 ? change > 0 : change <= 1e-18, "%s: from update %d on by %g", all[i], step, change);
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// 7. Data

TestSuite(data, .init = make_folder, .fini = remove_folder, .timeout = 120);

static void check_permutation(int64_t n, uint64_t key) {
    unsigned char *seen = (unsigned char *)array(n, 1);
    for (int64_t i = 0; i < n; i++) {
        int64_t place = shuffled(i, n, key);
        cr_assert(place >= 0 && place < n && !seen[place], "n = %lld: item %lld goes to place %lld, outside or taken", (long long)n, (long long)i, (long long)place);
        seen[place] = 1;
    }
    free(seen);
}

Test(data, shuffled_is_a_permutation) {
    for (int64_t n = 1; n <= 300; n++) { check_permutation(n, (uint64_t)n * 7919); }
    for (int k = 0; k < 3; k++) { check_permutation((const int64_t[]){65536, 65537, 1000003}[k], 12345); }
    int64_t same = 0, huge = (int64_t)1 << 40; // no table of a trillion items is needed for its places
    for (int64_t i = 0; i < 1000; i++) {
        same += shuffled(i, 1000, 1) == shuffled(i, 1000, 2);
        cr_assert(shuffled(i, huge, 1) >= 0 && shuffled(i, huge, 1) < huge);
    }
    cr_assert(same < 10, "two keys agree on %lld of 1000 places, expected about one", (long long)same);
}

// Three shards and an empty one, 26 tokens in all, in windows of 4 + 1: no token of a shard's tail is lost.
Test(data, windows_run_across_the_borders_of_shards) {
    uint16_t stream[26];
    for (int i = 0; i < 26; i++) { stream[i] = (uint16_t)(100 + i); }
    write_shard("a.bin", stream, 5, 0);
    write_shard("b.bin", stream + 5, 1, 200);
    write_shard("c.bin", stream + 6, 0, 0);
    write_shard("d.bin", stream + 6, 17, 130);
    write_shard("e.bin", stream + 23, 3, 0);
    const char *patterns[] = {text_format("%s/*.bin", folder), text_format("%s/a.bin,%s/[b-d].bin,%s/e.bin", folder, folder, folder)};
    for (int k = 0; k < 2; k++) {
        DataLoader d;
        loader_open(&d, patterns[k], "--data", 4, 0, 0);
        cr_assert(d.total == 26 && d.windows == 6 && d.num_shards == 5 && d.vocab == 200);
        for (int64_t s = 0; s < 15; s++) { // more than two epochs
            int32_t inputs[4], targets[4];
            loader_read(&d, s, inputs, targets, 200);
            for (int t = 0; t < 4; t++) {
                cr_assert_eq(inputs[t], stream[s % 6 * 4 + t]);
                cr_assert_eq(targets[t], stream[s % 6 * 4 + t + 1]);
            }
        }
        loader_close(&d);
    }
}

Test(data, every_epoch_visits_every_window_once_in_an_order_of_its_own) {
    enum { WINDOWS = 41, T = 3, EPOCHS = 3 };
    uint16_t stream[WINDOWS * T + 2]; // one token more than the windows need
    for (int i = 0; i < COUNT(stream); i++) { stream[i] = (uint16_t)i; }
    const char *path = write_shard("s.bin", stream, COUNT(stream), 0);
    int32_t order[3][EPOCHS * WINDOWS], inputs[T], targets[T];
    for (int k = 0; k < 3; k++) { // seeds 7, 7, 8
        DataLoader d;
        loader_open(&d, path, "--data", T, 1, k < 2 ? 7 : 8);
        cr_assert_eq(d.windows, WINDOWS);
        for (int s = 0; s < EPOCHS * WINDOWS; s++) {
            loader_read(&d, s, inputs, targets, 65536);
            cr_assert(inputs[0] % T == 0 && inputs[2] == inputs[0] + 2 && targets[0] == inputs[1] && targets[2] == inputs[0] + 3);
            order[k][s] = inputs[0] / T;
        }
        loader_close(&d);
    }
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int visits[WINDOWS] = {0}, in_place = 0;
        for (int w = 0; w < WINDOWS; w++) { visits[order[0][epoch * WINDOWS + w]]++; in_place += order[0][epoch * WINDOWS + w] == w; }
        for (int w = 0; w < WINDOWS; w++) { cr_assert_eq(visits[w], 1, "epoch %d visits window %d %d times", epoch, w, visits[w]); }
        cr_assert(in_place < WINDOWS / 2, "an epoch is shuffled");
    }
    cr_assert(memcmp(order[0], order[0] + WINDOWS, WINDOWS * sizeof(int32_t)) != 0, "epochs differ");
    cr_assert(memcmp(order[0], order[1], sizeof order[0]) == 0, "a seed decides the order");
    cr_assert(memcmp(order[0], order[2], sizeof order[0]) != 0, "another seed gives another order");
}

static void open_action(const void *path) {
    DataLoader d;
    int32_t inputs[3], targets[3];
    loader_open(&d, (const char *)path, "--data", 3, 0, 0);
    loader_read(&d, 0, inputs, targets, 100);
}
static void overwrite(const char *path, long at, const void *bytes, size_t n) {
    FILE *file = fopen(path, "r+b");
    cr_assert(file && fseek(file, at, SEEK_SET) == 0 && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
}

Test(data, what_is_not_a_shard_is_refused) {
    const int32_t zero = 0, eight = 8;
    cr_assert_eq(status_of(open_action, write_shard("good.bin", NULL, 9, 100)), 0);
    const char *magic = write_shard("magic.bin", NULL, 9, 100), *version = write_shard("version.bin", NULL, 9, 100), *count = write_shard("count.bin", NULL, 9, 100);
    overwrite(magic, 0, &zero, 4);
    overwrite(version, 4, &zero, 4);
    overwrite(count, 8, &eight, 4);
    cr_assert_eq(status_of(open_action, magic), 1);
    cr_assert_eq(status_of(open_action, version), 1);
    cr_assert_eq(status_of(open_action, count), 1, "a header that names another number of tokens");
    cr_assert_eq(status_of(open_action, write_shard("short.bin", NULL, 3, 100)), 1, "no whole window");
    cr_assert_eq(status_of(open_action, write_shard("token.bin", (const uint16_t[]){1, 2, 100, 3}, 4, 0)), 1, "a token outside of the vocabulary");
    cr_assert_eq(status_of(open_action, text_format("%s/none.bin", folder)), 1);
    cr_assert_eq(status_of(open_action, folder), 1);
}

// ----------------------------------------------------------------------------------------------------
// 8. Checkpoints

TestSuite(checkpoint, .init = make_folder, .fini = remove_folder, .timeout = 60);

static const char *const checkpoint_flags[] = {
    "--variant unified", "--variant dp+er --tie-embeddings on --lr 0.1", "--optimizer muon --variant baseline",
    "--optimizer sgd --variant noscale", "--optimizer sgd --sgd-momentum 0.9 --placement o=dnp,down=ap",
};

Test(checkpoint, gives_back_every_bit) {
    for (int i = 0; i < COUNT(checkpoint_flags); i++) {
        GPT *m = model_new(text_format(SMALL " --keep 0 --seed 11 %s", checkpoint_flags[i]));
        model_randomize(m);
        for (int64_t j = 0; j < m->num_moments; j++) { m->moments[j] = (real)noise(); }
        const real special[] = {NAN, INFINITY, -INFINITY, (real)-0.0, IN(DBL_TRUE_MIN, FLT_TRUE_MIN)}; // the bits, whatever they mean
        memcpy(m->theta + 3, special, sizeof special);
        if (m->num_moments) { memcpy(m->moments + 5, special, sizeof special); }
        TrainState saved = {1234 + i, ((int64_t)1 << 40) + 3, 4000000000u}, state = {0, 0, 0};
        checkpoint_save(m, folder, &saved);
        Config cfg;
        SafeFile file;
        char path[4400], run[4400];
        checkpoint_find(folder, path, sizeof path, run, sizeof run); // the newest of those in the folder
        cr_assert_str_eq(run, folder);
        cr_assert_str_eq(path, text_format("%s/step_%08d", folder, 1234 + i));
        config_defaults(&cfg);
        checkpoint_open(&file, path, "model.safetensors");
        checkpoint_read_config(&file, &cfg, &state);
        config_resolve(&cfg);
        checkpoint_check_config(&file, &cfg);
        cr_assert(state.step == saved.step && state.sequences == saved.sequences && state.fingerprint == saved.fingerprint);
        char before[4400], after[4400];
        for (int o = 0; o < NUM_OPTIONS; o++) {
            if (options[o].scope == LOCAL) { continue; }
            cr_assert_str_eq(option_text(&cfg, o, after, sizeof after), option_text(&m->cfg, o, before, sizeof before), "--%s", options[o].name);
        }
        GPT *copy = (GPT *)array(1, sizeof(GPT));
        gpt_build(copy, &cfg);
        gpt_allocate(copy, cfg.batch, cfg.seq_len);
        checkpoint_load(copy, path, &file, 1);
        safetensors_close(&file);
        cr_assert(copy->num_theta == m->num_theta && copy->num_moments == m->num_moments);
        cr_assert(memcmp(copy->theta, m->theta, (size_t)m->num_theta * sizeof(real)) == 0, "%s: other weights", checkpoint_flags[i]);
        cr_assert(m->num_moments == 0 || memcmp(copy->moments, m->moments, (size_t)m->num_moments * sizeof(real)) == 0, "%s: other moments", checkpoint_flags[i]);
    }
}

// Two steps, a checkpoint, two more: the same bits as four steps at a stretch.
Test(checkpoint, a_resumed_run_goes_on_bit_by_bit) {
    static const char *const flags[] = {"--variant unified --optimizer muon", "--variant dp+er --tie-embeddings on", "--optimizer sgd --sgd-momentum 0.9"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format(SMALL " %s", flags[i])), *copy = model_new(text_format(SMALL " %s", flags[i]));
        model_randomize(m);
        memcpy(copy->inputs, m->inputs, 12 * sizeof(int32_t));
        memcpy(copy->targets, m->targets, 12 * sizeof(int32_t));
        TrainState state = {2, 0, 0};
        SafeFile file;
        char *path = text_format("%s/step_00000002", folder);
        for (int step = 1; step <= 4; step++) {
            model_gradients(m);
            optimizer_step(m, step, 0.01, 1);
            if (step == 2) { checkpoint_save(m, folder, &state); }
        }
        checkpoint_open(&file, path, "model.safetensors");
        checkpoint_load(copy, path, &file, 1);
        safetensors_close(&file);
        for (int step = 3; step <= 4; step++) { model_gradients(copy); optimizer_step(copy, step, 0.01, 1); }
        cr_assert(memcmp(copy->theta, m->theta, (size_t)m->num_theta * sizeof(real)) == 0, "%s", flags[i]);
    }
}

Test(checkpoint, keeps_the_newest) {
    GPT *m = model_new(SMALL " --keep 3");
    for (int64_t step = 10; step <= 60; step += 10) {
        TrainState state = {step, 0, 0};
        checkpoint_save(m, folder, &state);
    }
    TrainState state = {60, 1, 0}; // the same step once more replaces it
    checkpoint_save(m, folder, &state);
    int64_t *steps;
    cr_assert_eq(checkpoint_list(folder, &steps), 3);
    cr_assert(steps[0] == 40 && steps[1] == 50 && steps[2] == 60);
}

static void load_action(const void *path) {
    SafeFile file;
    GPT *m = model_new(SMALL " --variant unified");
    checkpoint_open(&file, (const char *)path, "model.safetensors");
    checkpoint_load(m, (const char *)path, &file, 1);
}
static void load_other_action(const void *path) { // a model of another shape
    SafeFile file;
    GPT *m = model_new(GQA1 " --variant unified");
    checkpoint_open(&file, (const char *)path, "model.safetensors");
    checkpoint_load(m, (const char *)path, &file, 0);
}

Test(checkpoint, damage_is_found) {
    GPT *m = model_new(SMALL " --variant unified");
    static const struct { const char *file; long at; } places[] = {
        {"model.safetensors", 5000}, {"optimizer.safetensors", 20000}, {"model.safetensors", 60}, {"manifest.txt", 3},
    };
    TrainState state = {1, 0, 0};
    char *path = text_format("%s/step_00000001", folder);
    checkpoint_save(m, folder, &state);
    cr_assert_eq(status_of(load_action, path), 0);
    cr_assert_eq(status_of(load_other_action, path), 1);
    for (int i = 0; i < COUNT(places); i++) {
        checkpoint_save(m, folder, &state);
        overwrite(text_format("%s/%s", path, places[i].file), places[i].at, "\xA5", 1);
        cr_assert_eq(status_of(load_action, path), 1, "a byte of %s is wrong", places[i].file);
    }
    checkpoint_save(m, folder, &state);
    cr_assert(truncate(text_format("%s/model.safetensors", path), 9000) == 0);
    cr_assert_eq(status_of(load_action, path), 1, "cut short");
}

// ----------------------------------------------------------------------------------------------------
// 9. Sampling

TestSuite(sampling, .init = one_thread, .timeout = 60);

Test(sampling, tokens_come_as_often_as_their_probability_says) {
    enum { V = 5, DRAWS = 20000 };
    const real logits[V] = {1, 3, 2, -1, 3};
    real sorted[V];
    cr_assert_eq(sample_token(logits, sorted, V, 0, 0, 0.99), 1, "temperature 0: the first of the likeliest");
    for (int top_k = 0; top_k <= V; top_k += 2) {
        double temperature = 0.7, expected[V], sum = 0;
        int count[V] = {0};
        for (int v = 0; v < V; v++) { // of the likeliest two, or of four, or of all
            int in = top_k == 2 ? logits[v] == 3 : top_k == 4 ? logits[v] > 0 : 1;
            expected[v] = in ? exp((double)logits[v] / temperature) : 0;
            sum += expected[v];
        }
        for (int i = 0; i < DRAWS; i++) { count[sample_token(logits, sorted, V, temperature, top_k, (i + 0.5) / DRAWS)]++; }
        for (int v = 0; v < V; v++) { cr_assert_float_eq(count[v] / (double)DRAWS, expected[v] / sum, 2.0 / DRAWS, "top-k %d, token %d", top_k, v); }
    }
}

// ----------------------------------------------------------------------------------------------------
// 10. Training, as a whole: a pattern that repeats is soon known by heart

TestSuite(training, .init = make_folder, .fini = remove_folder, .timeout = 120);

// 0 1 4 9 0 9 4 1 0, over and over. Who knows how often each number comes is left with a loss of 1.37, who knows what
// follows each number with ln(3) / 3 + 2 ln(2) / 3 = 0.83; for less one must look further back, which takes attention.
static const struct { const char *flags; double bound; } training[] = {
    {"--lr 0.01 --variant baseline", 0.5}, {"--lr 0.01 --variant unified", 0.5}, {"--lr 0.01 --variant noscale", 0.5},
    {"--lr 0.01 --variant dp+er", 0.5}, {"--lr 0.01 --variant unified --optimizer muon", 0.1}, {"--lr 0.5 --optimizer sgd --sgd-momentum 0.9", 0.8},
};
ParameterizedTestParameters(training, fifty_steps_learn_a_pattern) { return indices(COUNT(training)); }
ParameterizedTest(int *index, training, fifty_steps_learn_a_pattern) {
    uint16_t pattern[1000];
    for (int i = 0; i < 1000; i++) { pattern[i] = (uint16_t)((i % 9) * (i % 9) % 16); }
    const char *path = write_shard("train.bin", pattern, 1000, 16), *flags = training[*index].flags;
    GPT *m = model_new(text_format("--layers 2 --channels 32 --heads 2 --vocab 16 --seq-len 24 --batch 4 --steps 50 %s", flags));
    DataLoader data;
    loader_open(&data, path, "--data", m->cfg.seq_len, 1, 1);
    double first = 0, loss = 0;
    for (int step = 0; step < 50; step++) { // what train_step does, without its logs
        loss = gradient_of(m, &data, (int64_t)step * m->cfg.total_batch);
        double norm = gradient_norm(m);
        optimizer_step(m, step + 1, learning_rate(&m->cfg, step), norm > m->cfg.grad_clip ? m->cfg.grad_clip / norm : 1);
        reparameterize_forward(m);
        if (step == 0) { first = loss; }
    }
    cr_log_info("%s: loss %.4f, after 50 steps %.4f", flags, first, loss);
    double ignorance = log(16) + (gpt_head(m)->norm ? 0.5 : 0); // normed logits are random numbers of variance 1 from the start
    cr_assert(fabs(first - ignorance) < 0.2, "a new model knows nothing: loss %g, expected about %g", first, ignorance);
    cr_assert(loss < training[*index].bound, "%s: loss %g after 50 steps, %g at first", flags, loss, first);
    double again = validate(m, &data);
    cr_assert(again < training[*index].bound, "%s: validation loss %g", flags, again);
    loader_close(&data);
}
