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

enum { MAX_N = 16, MAX_WIDTH = 32, MAX_SITES = 64, MAX_LAYERS = 3, MAX_EXPERTS = 6 };

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
typedef struct NaiveSite { char *prefix; int rows, cols, norm_groups; Var weight, *before, *after, *of_norm; } NaiveSite;

static char *site_prefix(int site, int layer, int expert) { // "head", "layers.3.gate" or "layers.3.experts.2.gate"
    static const char *const names[NUM_SITES + 1] = {"q", "k", "v", "o", "gate", "up", "down", "head", "router"};
    return site == SITE_HEAD ? text_format("head") : expert < 0 ? text_format("layers.%d.%s", layer, names[site])
                             : text_format("layers.%d.experts.%d.%s", layer, expert, names[site]);
}

// Reads the definitions off the flags: which vectors a site has, who shares them, over what its norm goes.
// The router is a branch of the FFN, with the usual gamma before it whatever --placement says; the norm of --post-norm
// goes over the sum of the experts, which is no site.
static void naive_site(const GPT *m, NaiveSite *s, int site, int layer, int expert, int rows, int cols) {
    const Config *cfg = &m->cfg;
    int place = site == SITE_ROUTER ? (int)PLACE_INPUT : cfg->placement[site], attention = site == SITE_Q || site == SITE_K || site == SITE_V;
    int branch = attention || site == SITE_GATE || site == SITE_UP || site == SITE_ROUTER; // shares its input with other sites
    int norm = place == PLACE_DNP || (cfg->qk_norm && (site == SITE_Q || site == SITE_K))
            || (cfg->post_norm && (site == SITE_O || (site == SITE_DOWN && cfg->experts == 0)));
    char *prefix = site_prefix(site, layer, expert), *shared = text_format("layers.%d.%s", layer, attention ? "attn" : "ffn");
    memset(s, 0, sizeof *s);
    s->prefix = prefix;
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

// The sites of a layer in the program's order: q k v o, gate up down of the dense FFN or of the shared expert, the
// router, gate up down of each expert. The head is the last site of all.
static int naive_has_dense(const Config *cfg) { return cfg->experts == 0 || cfg->shared_hidden > 0; }
static int naive_layer_sites(const Config *cfg) { return 4 + 3 * naive_has_dense(cfg) + (cfg->experts ? 1 + 3 * cfg->experts : 0); }

// down( silu(gate(x)) * up(x) ), silu(z) = z / (1 + e^-z)
static void naive_ffn(const NaiveSite *sites, Var *y, const Var *x) {
    Var gate[MAX_WIDTH], up[MAX_WIDTH];
    naive_linear(&sites[0], gate, x);
    naive_linear(&sites[1], up, x);
    for (int i = 0; i < sites[0].rows; i++) { gate[i] = mul(quotient(gate[i], plus(exponential(times(gate[i], -1)), 1)), up[i]); }
    naive_linear(&sites[2], y, gate);
}

// What the losses of a layer's router need of all tokens
typedef struct NaiveRouter { Var probability[MAX_EXPERTS], z; int count[MAX_EXPERTS], tokens; Var *norm; } NaiveRouter;

// sum over the K experts with the largest logits of softmax(their logits) * expert(x), and the shared expert
static void naive_moe(const Config *cfg, const NaiveSite *sites, NaiveRouter *router, Var *y, const Var *x) {
    int E = cfg->experts, K = cfg->top_k, C = cfg->channels, dense = naive_has_dense(cfg), chosen = 0;
    Var logits[MAX_EXPERTS], e_to[MAX_EXPERTS], sum = -1, sum_of_all = -1, z[MAX_WIDTH];
    naive_linear(&sites[3 * dense], logits, x);
    for (int e = 0; e < E; e++) {
        e_to[e] = exponential(logits[e]);
        sum_of_all = e ? add(sum_of_all, e_to[e]) : e_to[e];
    }
    for (int e = 0; e < E; e++) {
        Var p = quotient(e_to[e], sum_of_all);
        router->probability[e] = router->tokens ? add(router->probability[e], p) : p;
    }
    Var lse = logarithm(sum_of_all), squared = mul(lse, lse);
    router->z = router->tokens ? add(router->z, squared) : squared;
    router->tokens++;
    int in[MAX_EXPERTS];
    for (int e = 0; e < E; e++) { // in: fewer than K come before it
        int before = 0;
        for (int other = 0; other < E; other++) { before += value(logits[other]) > value(logits[e]) || (value(logits[other]) == value(logits[e]) && other < e); }
        in[e] = before < K;
        if (!in[e]) { continue; }
        router->count[e]++;
        sum = chosen++ ? add(sum, e_to[e]) : e_to[e];
    }
    cr_assert_eq(chosen, K);
    if (dense) { naive_ffn(sites, y, x); } else { for (int c = 0; c < C; c++) { y[c] = leaf(0); } }
    for (int e = 0; e < E; e++) {
        if (!in[e]) { continue; }
        naive_ffn(sites + 3 * dense + 1 + 3 * e, z, x);
        Var weight = quotient(e_to[e], sum);
        for (int c = 0; c < C; c++) { y[c] = add(y[c], mul(weight, z[c])); }
    }
    if (cfg->post_norm) {
        naive_norm(y, y, C);
        if (router->norm) { naive_scale(y, router->norm, C); }
    }
}

// x += attention(x), then x += ffn(x), for one sequence
static void naive_block(const Config *cfg, const NaiveSite *sites, NaiveRouter *router, Var (*x)[MAX_WIDTH], int T) {
    int C = cfg->channels, HS = C / cfg->heads;
    Var unit[MAX_WIDTH], y[MAX_WIDTH];
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
        if (cfg->experts) { naive_moe(cfg, sites + 4, router, y, unit); } else { naive_ffn(sites + 4, y, unit); }
        for (int c = 0; c < C; c++) { x[t][c] = add(x[t][c], y[c]); }
    }
}

// Starts a tape with theta as its leaves, and reads all sites off the flags. Returns the number of sites.
static NaiveRouter naive_routers[MAX_LAYERS];
static int naive_begin(const GPT *m, NaiveSite *sites) {
    const Config *cfg = &m->cfg;
    int C = cfg->channels, HS = C / cfg->heads, Q = cfg->heads * HS, KV = cfg->kv_heads * HS, count = 0;
    tape_size = 0;
    cr_assert(m->num_theta <= (int64_t)sizeof naive_used && cfg->layers * naive_layer_sites(cfg) < MAX_SITES && cfg->layers <= MAX_LAYERS && cfg->experts <= MAX_EXPERTS);
    cr_assert(cfg->vocab <= MAX_WIDTH && C <= MAX_WIDTH && cfg->hidden <= MAX_WIDTH && cfg->shared_hidden <= MAX_WIDTH && cfg->expert_hidden <= MAX_WIDTH);
    memset(naive_used, 0, sizeof naive_used);
    memset(naive_routers, 0, sizeof naive_routers);
    for (int64_t i = 0; i < m->num_theta; i++) { leaf((double)m->theta[i]); }
    for (int l = 0; l < cfg->layers; l++) {
        const int rows[4] = {Q, KV, KV, C}, cols[4] = {C, C, C, Q};
        for (int s = 0; s < 4; s++) { naive_site(m, &sites[count++], s, l, -1, rows[s], cols[s]); }
        for (int e = naive_has_dense(cfg) ? -1 : 0; e < cfg->experts; e++) {
            int H = cfg->experts == 0 ? cfg->hidden : e < 0 ? cfg->shared_hidden : cfg->expert_hidden;
            if (e == 0) { naive_site(m, &sites[count++], SITE_ROUTER, l, -1, cfg->experts, C); }
            naive_site(m, &sites[count++], SITE_GATE, l, e, H, C);
            naive_site(m, &sites[count++], SITE_UP, l, e, H, C);
            naive_site(m, &sites[count++], SITE_DOWN, l, e, C, H);
        }
        if (cfg->experts && cfg->post_norm && cfg->norm_scale) { naive_routers[l].norm = naive_gamma(m, text_format("layers.%d.ffn", l), "gamma_norm", C); }
    }
    naive_site(m, &sites[count++], SITE_HEAD, -1, -1, cfg->vocab, C);
    naive_tensor(m, "embedding.weight", cfg->vocab * C);
    for (int64_t i = 0; i < m->num_theta; i++) { cr_assert(naive_used[i], "theta[%d] belongs to no formula of the paper", (int)i); }
    return count;
}

// loss: mean cross-entropy. balance: sum over layers of E sum_e f_e P_e, f_e the share of the rows that went to expert
// e, P_e the mean of its probability. z: sum over layers of the mean of log-sum-exp(logits)^2. objective: their sum, by weight.
typedef struct NaiveLosses { Var loss, balance, z, objective; } NaiveLosses;

// For the model's batch of B sequences of T; logits (B T, V) receives the logits.
static NaiveLosses naive_forward(const GPT *m, const NaiveSite *sites, double *logits, int B, int T) {
    const Config *cfg = &m->cfg;
    int C = cfg->channels, V = cfg->vocab, layer_sites = naive_layer_sites(cfg), E = cfg->experts, N = B * T;
    Var total = leaf(0), embedding = naive_tensor(m, "embedding.weight", V * C);
    cr_assert(N <= MAX_N);
    for (int b = 0; b < B; b++) {
        Var x[MAX_N][MAX_WIDTH], unit[MAX_WIDTH], z[MAX_WIDTH];
        for (int t = 0; t < T; t++) { for (int c = 0; c < C; c++) { x[t][c] = embedding + m->inputs[b * T + t] * C + c; } }
        for (int l = 0; l < cfg->layers; l++) { naive_block(cfg, sites + layer_sites * l, &naive_routers[l], x, T); }
        for (int t = 0; t < T; t++) {
            naive_norm(unit, x[t], C);
            naive_linear(&sites[layer_sites * cfg->layers], z, unit);
            Var sum = exponential(z[0]);
            for (int v = 1; v < V; v++) { sum = add(sum, exponential(z[v])); }
            for (int v = 0; v < V; v++) { logits[(b * T + t) * V + v] = value(z[v]); }
            total = add(total, sub(logarithm(sum), z[m->targets[b * T + t]])); // -log softmax(z)[target]
        }
    }
    NaiveLosses losses = {times(total, 1.0 / N), leaf(0), leaf(0), -1};
    for (int l = 0; l < cfg->layers && E; l++) {
        const NaiveRouter *router = &naive_routers[l];
        cr_assert_eq(router->tokens, N);
        losses.z = add(losses.z, times(router->z, 1.0 / N));
        for (int e = 0; e < E; e++) {
            double share = router->count[e] / ((double)N * cfg->top_k); // a count: no gradient flows through it
            losses.balance = add(losses.balance, times(router->probability[e], E * share / N));
        }
    }
    losses.objective = add(losses.loss, add(times(losses.balance, cfg->balance_loss), times(losses.z, cfg->router_z_loss)));
    return losses;
}

// ----------------------------------------------------------------------------------------------------
// The models that the naive model, the finite differences and the folding are tried on. Sizes are odd where they
// may be, so that nothing fits a vector register or a tile.

#define SMALL "--layers 2 --channels 12 --heads 2 --hidden 7 --vocab 13 --seq-len 6 --batch 2"
#define GQA1  "--layers 2 --channels 16 --heads 4 --kv-heads 1 --hidden 7 --vocab 11 --seq-len 5 --batch 2"
#define GQA2  "--layers 2 --channels 16 --heads 4 --kv-heads 2 --hidden 9 --vocab 17 --seq-len 7 --batch 2"
#define DEEP  "--layers 3 --channels 8 --heads 2 --hidden 5 --vocab 11 --seq-len 7 --batch 1"
#define SHORT "--layers 1 --channels 10 --heads 1 --hidden 11 --vocab 12 --seq-len 1 --batch 3"
// mixtures of experts: 2 of 4; with both losses of the router, or to be given them
#define EXPERTS  "--layers 2 --channels 12 --heads 2 --vocab 13 --seq-len 6 --batch 2 --experts 4 --top-k 2 --expert-hidden 5"
#define LOSSES   " --balance-loss 0.3 --router-z-loss 0.2"
#define MOE      EXPERTS " --shared-hidden 0" LOSSES
#define SHARED   EXPERTS " --shared-hidden 9" LOSSES
#define MOE1     "--layers 2 --channels 12 --heads 2 --vocab 13 --seq-len 6 --batch 2 --experts 3 --top-k 1 --expert-hidden 6 --shared-hidden 4" LOSSES
#define MOE_ALL  "--layers 3 --channels 8 --heads 2 --kv-heads 1 --vocab 11 --seq-len 7 --batch 1 --experts 3 --top-k 3 --expert-hidden 5 --shared-hidden 0" LOSSES

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
    // mixtures of experts
    {MOE,    "--variant noscale"},
    {SHARED, "--variant noscale"},
    {MOE,    "--variant baseline"},
    {SHARED, "--variant baseline"},
    {MOE,    "--variant hg"},
    {SHARED, "--variant hg"},
    {MOE,    "--variant ap"},
    {SHARED, "--variant ap"},
    {MOE,    "--variant dp"},
    {SHARED, "--variant dp"},
    {MOE,    "--variant dnp"},
    {SHARED, "--variant dnp"},
    {MOE,    "--variant or"},
    {SHARED, "--variant or"},
    {MOE,    "--variant er"},
    {SHARED, "--variant er"},
    {MOE,    "--variant iwd"},
    {SHARED, "--variant iwd"},
    {MOE,    "--variant unified"},
    {SHARED, "--variant unified"},
    {MOE,    "--variant unified --qk-norm on --post-norm on"},
    {SHARED, "--variant unified --post-norm on"},
    {SHARED, "--variant noscale --post-norm on"},
    {MOE,    "--variant er --post-norm on"},
    {SHARED, "--variant hg+dp+or"},
    {MOE,    "--variant hg+dp+or --qk-norm on"},
    {MOE,    "--variant hg+ap+er"},
    {SHARED, "--variant dp --tie-embeddings on"},
    {MOE,    "--variant unified --tie-embeddings on"},
    {SHARED, "--placement o=dnp,down=dnp --variant hg+or"},
    {MOE,    "--placement o=dp,down=dp --variant er"},
    {SHARED, "--placement o=ap,down=dp --variant hg"},
    {MOE,    "--placement down=input --variant or"},
    {SHARED, "--post-norm on --placement down=dnp,o=dp"},
    {MOE,    "--placement gate=dnp,up=ap"},
    {SHARED, "--placement none"},
    {SHARED, "--variant noscale --placement dnp"},
    {MOE1,   "--variant unified"},
    {MOE1,   "--variant dp"},
    {MOE_ALL, "--variant unified"},
    {MOE_ALL, "--variant baseline"},
    {EXPERTS, "--variant unified --balance-loss 0"},
    {EXPERTS " --shared-hidden 0", "--variant dp --balance-loss 0"},
    {EXPERTS, "--variant hg --balance-loss 0 --router-z-loss 0.5"},
    {EXPERTS " --shared-hidden 0", "--variant baseline --balance-loss 2 --router-z-loss 0"},
};

// A test with a parameter runs once for each index, in a process of its own.
static struct criterion_test_params indices(int count) {
    static int index[128];
    for (int i = 0; i < count; i++) { index[i] = i; }
    return cr_make_param_array(int, index, (size_t)count);
}

// Over all tokens and layers of the last forward, the smallest gap between two probabilities of which one is of a
// chosen expert and the other isn't. At a gap of 0 the model is not differentiable.
static double routing_margin(const GPT *m) {
    int E = m->cfg.experts, K = m->cfg.top_k;
    double margin = INFINITY;
    for (int l = 0; l < m->cfg.layers && E > K; l++) {
        const MoeActs *s = &m->acts[l].moe;
        for (int64_t n = 0; n < (int64_t)m->B * m->T; n++) {
            double in = INFINITY, out = -INFINITY;
            for (int e = 0; e < E; e++) {
                int chosen = 0;
                for (int k = 0; k < K; k++) { chosen |= s->chosen[n * K + k] == e; }
                if (chosen) { in = fmin(in, s->probs[n * E + e]); } else { out = fmax(out, s->probs[n * E + e]); }
            }
            margin = fmin(margin, in - out);
        }
    }
    return margin;
}
// Random, but with no token near a tie between experts: rounding or a finite difference must not move it over.
static void randomize_away_from_ties(GPT *m) {
    int draws = 0;
    do { model_randomize(m); model_loss(m); } while (routing_margin(m) < 0.01 && ++draws < 500);
    cr_assert(draws < 500, "found no theta away from ties");
    if (m->cfg.experts > m->cfg.top_k) { cr_log_info("routing margin %.3f after %d draws", routing_margin(m), draws); }
}
static GPT *case_model(int index) {
    GPT *m = model_new(text_format("%s %s", cases[index].shape, cases[index].flags));
    randomize_away_from_ties(m);
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
    if (o->type == TYPE_TEXT || o->type == TYPE_FORMAT_DIR) { cr_assert_str_eq(once, text); return; }
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
        if (o->type == TYPE_FORMAT_DIR) { snprintf(text, sizeof text, "hf path %d with spaces", k); }
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
    config_from(&cfg, "--channels 100 --heads 2 --experts 9");
    cr_assert(cfg.top_k == 4 && cfg.expert_hidden == 66 && cfg.shared_hidden == 266);
    config_from(&cfg, "--experts 3 --shared-hidden 0");
    cr_assert(cfg.top_k == 3 && cfg.shared_hidden == 0);
    config_from(&cfg, "--schedule wsd --warmup 0.8");
    cr_assert_eq(cfg.final_lr_frac, AUTO);
    static const char *const wrong[] = {"--channels 10 --heads 3", "--channels 6 --heads 2", "--channels 1024 --heads 2", "--heads 2 --kv-heads 3",
        "--batch 3 --total-batch 8", "--schedule wsd --warmup 0.9 --decay-frac 0.2", "--decay-frac 0.1", "--norm-scale off --reparam or",
        "--norm-scale off --hg on", "--steps 3 --tokens-per-param 2", "--layers", "--layers 0", "--layers 2x", "--lr nan", "--lr -1", "--lay 2",
        "--experts 4 --top-k 5", "--top-k 2", "--expert-hidden 8", "--shared-hidden 0", "--experts 4 --hidden 9",
        "--experts 2 --channels 2 --heads 1 --expert-hidden -1", "--experts -1", "--experts 4 --balance-loss -1", "--layers 2 --layers 2", "layers 2", "--seed 1e3", "--tie-embeddings yes", "--estimate=on", "--sample 5"};
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

// By hand: embedding and head V C each and the head's gamma; a layer has two gammas, q k v o, three matrices for the
// shared expert and for each of the experts, and a router; a token passes by all experts but K.
Test(parameters, counts_of_the_papers_mixtures) {
    static const struct { const char *model; int64_t C, L, total, active; } models[] = {
        {"moe-0.25b", 640, 6, 251044480, 113633920}, {"moe-0.5b", 768, 9, 480942336, 183671040}, {"moe-0.8b", 960, 10, 797327040, 281231040},
        {"moe-1b", 1024, 12, 1058931712, 354976768}, {"moe-2b", 1280, 15, 1996574720, 620856320},
    };
    const int64_t V = 50304, E = 32, K = 4;
    for (int i = 0; i < COUNT(models); i++) {
        int64_t C = models[i].C, L = models[i].L, H = 2 * C / 3, S = 8 * C / 3;
        int64_t total = 2 * V * C + C + L * (2 * C + 4 * C * C + 3 * C * S + E * 3 * C * H + E * C), active = total - L * (E - K) * 3 * C * H;
        cr_assert(total == models[i].total && active == models[i].active, "%s: the formula gives %lld and %lld", models[i].model, (long long)total, (long long)active);
        GPT *m = model_tables(text_format("--model %s", models[i].model));
        cr_assert_eq(m->num_theta, total, "%s: found %lld", models[i].model, (long long)m->num_theta);
        cr_assert_eq(gpt_active_parameters(m), active, "%s: found %lld", models[i].model, (long long)gpt_active_parameters(m));
        // unified: a vector has a beta too. Before q k v, gate and up of the shared expert, the router, each expert's gate and up, the head;
        // after q k v (C each), gate and up, and the head.
        int64_t expert = 2 * (C + 1) + 2 * (H + 1), vectors = C + 1 + V + 1 + L * (9 * (C + 1) + 2 * (S + 1) + E * expert);
        m = model_tables(text_format("--model %s --variant unified", models[i].model));
        cr_assert_eq(count_vectors(m), vectors, "%s unified: found %lld, expected %lld", models[i].model, (long long)count_vectors(m), (long long)vectors);
        cr_assert_eq(m->num_theta, total - C - L * 2 * C + vectors);
        cr_assert_eq(gpt_active_parameters(m), m->num_theta - L * (E - K) * (3 * C * H + expert));
    }
    cr_assert_eq(gpt_active_parameters(model_tables("--model 0.12b")), 119744256); // a dense model uses all
}

// L=1, C=8, two heads of 4, one key/value head, H=6, V=10. By hand: embedding and head 10*8; q 8*8, k and v 4*8,
// gate and up 6*8; o 8*8, down 8*6.
#define BY_HAND "--layers 1 --channels 8 --heads 2 --kv-heads 1 --hidden 6 --vocab 10 "
// The same with 3 experts of 5: gate and up 5*8, down 8*5 each, and a router of 3*8; a shared expert has the H=6 above.
#define EXPERTS_BY_HAND "--layers 1 --channels 8 --heads 2 --kv-heads 1 --vocab 10 --experts 3 --top-k 2 --expert-hidden 5 "
static void check_counts(const char *flags, int embedding, int matrix, int residual, int head, int gamma_b, int gamma_a, int gamma_norm) {
    GPT *m = model_tables(flags);
    const int expected[NUM_ROLES] = {embedding, matrix, residual, m->cfg.experts * 8, head, gamma_b, gamma_a, gamma_norm};
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
    check_counts(EXPERTS_BY_HAND "--shared-hidden 0",                        80, 128 + 240, 64 + 120,  80, 24,  0,  0); // attn, ffn, head
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6",                        80, 224 + 240, 112 + 120, 80, 24,  0,  0);
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6 --variant noscale",      80, 224 + 240, 112 + 120, 80,  0,  0,  0);
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6 --variant hg",           80, 224 + 240, 112 + 120, 80, 104, 0,  0); // q k v, 2 + 2*3 of the experts, router, head
    check_counts(EXPERTS_BY_HAND "--shared-hidden 0 --variant ap",           80, 128 + 240, 64 + 120,  80,  8, 56,  0); // router; 16 + 2*3*5 + 10
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6 --variant dp",           80, 224 + 240, 112 + 120, 80, 24, 68,  0);
    check_counts(EXPERTS_BY_HAND "--shared-hidden 0 --variant unified",      80, 128 + 240, 64 + 120,  80, 99,  0, 66); // 11 vectors of 8 and 10 after, a beta each
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6 --post-norm on",         80, 224 + 240, 112 + 120, 80, 24,  0, 16); // o, and the sum of the experts
    check_counts(EXPERTS_BY_HAND "--shared-hidden 6 --placement down=dp",    80, 224 + 240, 112 + 120, 80, 45, 32,  0); // 6 + 3*5 before, 4*8 after
}

// What AP and DP put after a map can be absorbed by it, and counts as an Input-Norm's. A vector's alpha and beta
// both follow it.
Test(parameters, decay_by_class) {
    static const struct { const char *wd; int weights, gamma_b, gamma_a, gamma_norm; } table[] = {
        {"all", 1, 1, 1, 1}, {"none", 1, 0, 0, 0}, {"input", 1, 1, 1, 0}, {"output", 1, 0, 0, 1},
    };
    static const char *const models[] = {"--variant baseline", "--variant dp", "--variant ap+or", "--variant dnp", "--variant dnp+or+hg", "--variant dnp+er",
        "--variant dp+er --qk-norm on --post-norm on", "--placement o=dp,down=dnp,q=ap,k=dnp", "--variant noscale", "--tie-embeddings on",
        "--experts 3 --variant dnp+or+hg", "--experts 3 --variant dp+er --post-norm on --shared-hidden 6", "--experts 3 --placement down=dnp,gate=ap"};
    int seen[4] = {0};
    for (int w = 0; w < COUNT(table); w++) {
        for (int k = 0; k < COUNT(models); k++) {
            const GPT *m = model_tables(text_format("--layers 1 --channels 8 --heads 2 --kv-heads 1 --vocab 10 %s %s --wd-scale %s", strstr(models[k], "--experts") ? "" : "--hidden 6", models[k], table[w].wd));
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
static void check_initial_matrices(const char *shape, int count) {
    GPT *baseline = model_new(text_format("%s --seed 5", shape)), *unified = model_new(text_format("%s --seed 5 --variant unified", shape)), *other = model_new(text_format("%s --seed 6", shape));
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
    cr_assert_eq(matrices, count);
}
Test(parameters, initial_matrices_depend_on_seed_and_name_alone) {
    check_initial_matrices(INIT_SHAPE, 2 + 3 * 7);
    check_initial_matrices(INIT_SHAPE "--experts 5", 2 + 3 * (4 + 3 + 1 + 5 * 3));
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
// What a mixture of experts trains on: the loss and, by their weights, the losses of its routers. gpt_forward returns
// the first alone.
static double model_objective(GPT *m) {
    double loss = model_loss(m);
    return loss + m->cfg.balance_loss * m->balance_loss + m->cfg.router_z_loss * m->z_loss;
}

// (layers, tokens, E): 1 where the token goes to the expert.
static char *chosen_sets(const GPT *m) {
    int E = m->cfg.experts, K = m->cfg.top_k, N = m->B * m->T;
    char *sets = (char *)array((int64_t)m->cfg.layers * N * E, 1);
    for (int l = 0; l < m->cfg.layers && E; l++) {
        for (int i = 0; i < N * K; i++) { sets[(l * N + i / K) * E + m->acts[l].moe.chosen[i]] = 1; }
    }
    return sets;
}

// dL/dtheta[at] from five points: the error of the formula is of order h^4, that of rounding of order 1e-16 / h.
// routes: of a mixture of experts the chosen sets, which must stay, else NULL.
static double finite_difference(GPT *m, int64_t at, const char *routes) {
    const double h = 3e-4, x = m->theta[at];
    double f[4];
    for (int i = 0; i < 4; i++) {
        m->theta[at] = x + (double[]){-2, -1, 1, 2}[i] * h;
        f[i] = model_objective(m);
        if (!routes) { continue; }
        char *now = chosen_sets(m);
        cr_assert(memcmp(now, routes, (size_t)m->cfg.layers * (size_t)(m->B * m->T * m->cfg.experts)) == 0, "theta[%d]: the perturbation moves a token to other experts", (int)at);
        free(now);
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
    char *routes = m->cfg.experts ? chosen_sets(m) : NULL;
    double *grads = as_doubles(m->grads, m->num_theta), floor_ = 1e-5 * norm_of(m->grads, m->num_theta), largest = 0;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        int64_t n = p->rows * p->cols, probes = n <= 24 ? n : 12;
        double difference = 0, size = 0;
        for (int64_t k = 0; k < probes; k++) {
            int64_t at = p->offset + (n <= 24 ? k : (n * k + noise_int((int)n)) / probes);
            double numeric = finite_difference(m, at, routes);
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
    NaiveLosses naive = naive_forward(m, sites, logits, B, T);
    tape_backward(naive.objective);
    real *found = reals(N * V);
    gpt_logits(m, found, N);
    cr_assert(fabs(loss / value(naive.loss) - 1) < tolerance, "loss %.15g, the naive model's %.15g", loss, value(naive.loss));
    cr_assert(fabs(m->balance_loss - value(naive.balance)) <= tolerance * value(naive.balance), "balance loss %.15g, the naive model's %.15g", m->balance_loss, value(naive.balance));
    cr_assert(fabs(m->z_loss - value(naive.z)) <= tolerance * value(naive.z), "z-loss %.15g, the naive model's %.15g", m->z_loss, value(naive.z));
    for (int l = 0; l < m->cfg.layers; l++) {
        for (int e = 0; e < m->cfg.experts; e++) { cr_assert_eq(m->acts[l].moe.begin[e + 1] - m->acts[l].moe.begin[e], naive_routers[l].count[e]); }
    }
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
static void fold_site(GPT *folded, const GPT *m, const NaiveSite *s) {
    const char *prefix = s->prefix;
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
    cr_assert_eq(naive_begin(m, sites), m->num_maps);
    for (int i = 0; i < m->num_maps; i++) { fold_site(folded, m, &sites[i]); }
    for (int l = 0; l < m->cfg.layers; l++) { // the norm over the sum of experts stands behind no map
        const Param *norm = param_named(folded, text_format("layers.%d.ffn.gamma_norm", l));
        cr_assert_eq(norm != NULL, naive_routers[l].norm != NULL);
        for (int c = 0; norm && c < C; c++) { folded->theta[norm->offset + c] = (real)value(naive_routers[l].norm[c]); }
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
static void check_causal(const char *flags) {
    GPT *m = model_new(flags);
    randomize_away_from_ties(m);
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
Test(model, is_causal) {
    check_causal(GQA2 " --variant unified --qk-norm on --post-norm on");
    // that no other token can take a token's place at an expert is part of it
    check_causal("--layers 2 --channels 16 --heads 4 --kv-heads 2 --vocab 17 --seq-len 7 --batch 2 --experts 4 --top-k 2 --variant unified --post-norm on");
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
        "--optimizer sgd --sgd-momentum 0.9 --variant noscale --placement dnp", "--variant baseline",
        "--experts 5 --top-k 2 --expert-hidden 37 --router-z-loss 0.1 --variant unified --optimizer muon --post-norm on",
        "--experts 5 --top-k 3 --expert-hidden 61 --shared-hidden 0 --balance-loss 0.5 --variant dp --placement down=dnp,gate=ap"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format("--layers 2 --channels 60 --heads 3 --kv-heads 1 --vocab 130 --seq-len 101 --batch 2 %s %s", strstr(flags[i], "--experts") ? "" : "--hidden 101", flags[i]));
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
// 5b. Mixture of experts. Gradients, the naive model and folding are tried with the others, in section 3.

TestSuite(experts, .init = make_folder, .fini = remove_folder, .timeout = 120);

static int part_of_expert(const Param *p) { return strstr(p->name, ".experts.") != NULL; } // by name, as a reader would see it
static const real *grad_named(const GPT *m, const char *name) { return m->grads + param_named(m, name)->offset; }

// The name without "experts.0.": what the dense model calls it. The norm over the sum of experts is the dense FFN's norm.
static char *dense_name(const char *name) {
    char *text = text_format("%s", name), *at = strstr(text, "experts.0."), *sum = strstr(text, ".ffn.gamma_norm");
    if (at) { memmove(at, at + 10, strlen(at + 10) + 1); }
    return sum ? text_format("%.*s.down%s", (int)(sum - text), text, sum + 4) : text;
}

// One expert that every token goes to, of the dense FFN's size, is the dense FFN: loss, logits and gradients, bit for bit.
// (Not with DNP at down and --post-norm both: the dense FFN has one norm there, an expert's output and the sum each have theirs.)
Test(experts, one_of_one_is_the_dense_model) {
    static const char *const flags[] = {"noscale", "baseline", "hg", "ap", "dp", "dnp", "or", "er", "iwd", "unified", "unified --post-norm on --qk-norm on",
        "er --post-norm on", "hg+dp+or --tie-embeddings on", "hg --placement o=dp,down=dp", "or --placement down=dnp", "noscale --placement dnp"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *dense = model_new(text_format(GQA2 " --variant %s", flags[i]));
        GPT *m = model_new(text_format("--layers 2 --channels 16 --heads 4 --kv-heads 2 --vocab 17 --seq-len 7 --batch 2 --experts 1 --top-k 1 --expert-hidden 9 "
                                       "--shared-hidden 0 --balance-loss 0 --variant %s", flags[i]));
        model_randomize(dense);
        model_randomize(m); // the router's numbers mustn't matter
        int N = 14, V = 17, shared = 0, of_router = 0;
        for (int k = 0; k < m->num_params; k++) {
            const Param *p = &m->params[k], *q = param_named(dense, dense_name(p->name));
            if (!q) { // where gate and up have no gamma_b, the block's is the router's alone
                cr_assert(strstr(p->name, ".router.") || strstr(p->name, ".ffn.gamma_b"), "%s has no counterpart", p->name);
                of_router++;
                continue;
            }
            cr_assert(p->rows == q->rows && p->cols == q->cols, "%s", p->name);
            memcpy(m->theta + p->offset, dense->theta + q->offset, (size_t)(p->rows * p->cols) * sizeof(real));
            shared++;
        }
        cr_assert(shared == dense->num_params && of_router > 0, "%s: %d of %d", flags[i], shared, dense->num_params);
        memcpy(m->inputs, dense->inputs, (size_t)N * sizeof(int32_t));
        memcpy(m->targets, dense->targets, (size_t)N * sizeof(int32_t));
        double expected = model_gradients(dense), found = model_gradients(m);
        cr_assert_eq(found, expected, "%s: loss %.17g, expected %.17g", flags[i], found, expected);
        real *of_dense = reals(N * V), *logits = reals(N * V);
        gpt_logits(dense, of_dense, N);
        gpt_logits(m, logits, N);
        cr_assert(memcmp(logits, of_dense, (size_t)(N * V) * sizeof(real)) == 0, "%s: other logits", flags[i]);
        for (int k = 0; k < m->num_params; k++) {
            const Param *p = &m->params[k], *q = param_named(dense, dense_name(p->name));
            for (int64_t j = 0; j < p->rows * p->cols; j++) { // == and not memcmp: a sum that begins with 0 has no -0
                cr_assert(m->grads[p->offset + j] == (q ? dense->grads[q->offset + j] : 0), "%s: %s: another gradient", flags[i], p->name);
            }
        }
    }
}

// Experts in another order, with all that is theirs: the same loss and logits bit for bit, since a token's experts are
// summed in the order of its logits, not of their numbers. Sums over all experts (softmax, balance loss, the router's
// gradient with respect to its input) change their order, so that the permuted gradients agree to rounding; of the last
// layer's experts, which no such sum reaches, bit for bit.
Test(experts, order_does_not_matter) {
    static const char *const flags[] = {SHARED " --variant unified", MOE " --variant dp+er", SHARED " --variant baseline --post-norm on --placement down=dnp", MOE1 " --variant hg+dnp", MOE " --variant noscale"};
    const int order[2][4] = {{2, 0, 3, 1}, {1, 2, 0, 3}}; // of 4; of 3
    double largest = 0;
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(flags[i]), *other = model_new(flags[i]);
        int E = m->cfg.experts, N = m->cfg.batch * m->cfg.seq_len, V = m->cfg.vocab;
        const int *to = order[E == 3];
        randomize_away_from_ties(m);
        char *names = (char *)array(m->num_params, 80);
        for (int k = 0; k < m->num_params; k++) {
            const Param *p = &m->params[k];
            char *renamed = names + 80 * k;
            strcpy(renamed, p->name);
            const char *at = strstr(p->name, ".experts.");
            if (at) { snprintf(renamed, 80, "%.*s.experts.%d%s", (int)(at - p->name), p->name, to[at[9] - '0'], at + 10); }
            const Param *q = param_named(other, renamed);
            int router = ends_with(p->name, ".router.weight");
            for (int64_t r = 0; r < p->rows; r++) {
                memcpy(other->theta + q->offset + (router ? to[r] : r) * p->cols, m->theta + p->offset + r * p->cols, (size_t)p->cols * sizeof(real));
            }
        }
        memcpy(other->inputs, m->inputs, (size_t)N * sizeof(int32_t));
        memcpy(other->targets, m->targets, (size_t)N * sizeof(int32_t));
        double loss = model_gradients(m), again = model_gradients(other);
        cr_assert_eq(again, loss, "%s: loss %.17g, expected %.17g", flags[i], again, loss);
        cr_assert(fabs(other->balance_loss / m->balance_loss - 1) < IN(1e-14, 1e-6) && fabs(other->z_loss / m->z_loss - 1) < IN(1e-13, 1e-5));
        real *logits = reals(N * V), *of_other = reals(N * V);
        gpt_logits(m, logits, N);
        gpt_logits(other, of_other, N);
        cr_assert(memcmp(logits, of_other, (size_t)(N * V) * sizeof(real)) == 0, "%s: other logits", flags[i]);
        double floor_ = 1e-4 * norm_of(m->grads, m->num_theta);
        for (int k = 0; k < m->num_params; k++) {
            const Param *p = &m->params[k], *q = param_named(other, names + 80 * k);
            int router = ends_with(p->name, ".router.weight");
            // with a shared gamma_b nothing changes either: it isn't part of the expert
            double tolerance = part_of_expert(p) && p->layer == m->cfg.layers - 1 ? 0 : IN(1e-12, 5e-4), size = floor_;
            for (int64_t j = 0; j < p->rows * p->cols; j++) { size = fmax(size, fabs((double)m->grads[p->offset + j])); }
            for (int64_t j = 0; j < p->rows * p->cols; j++) {
                int64_t at = router ? to[j / p->cols] * p->cols + j % p->cols : j;
                double error = fabs((double)other->grads[q->offset + at] - (double)m->grads[p->offset + j]) / size;
                cr_assert(error <= tolerance, "%s: %s: relative error %g", flags[i], p->name, error);
                largest = fmax(largest, error);
            }
        }
    }
    cr_log_info("permuted %.2e", largest);
}

// Routing alone, on logits with ties: a table of what the router must choose, and where it must put it.
Test(experts, every_token_reaches_its_experts) {
    static const struct { int N, E, K; } shapes[] = {{1, 1, 1}, {40, 4, 2}, {33, 7, 7}, {200, 32, 4}, {3, 16, 1}, {64, 5, 3}};
    for (int i = 0; i < COUNT(shapes); i++) {
        for (int levels = 1; levels <= 1000; levels *= 10) { // so many different logits: ties of all experts, many, few
            int N = shapes[i].N, E = shapes[i].E, K = shapes[i].K;
            GPT m;
            MoeActs s;
            memset(&m, 0, sizeof m);
            memset(&s, 0, sizeof s);
            s.probs = reals(N * E), s.lse = reals(N), s.weights = reals(N * K);
            s.chosen = (int32_t *)array(N * K, sizeof(int32_t)), s.row = (int32_t *)array(N * K, sizeof(int32_t));
            s.begin = (int64_t *)array(E + 1, sizeof(int64_t));
            int64_t *tokens = (int64_t *)array(E, sizeof(int64_t)), *count = (int64_t *)array(E, sizeof(int64_t));
            for (int j = 0; j < N * E; j++) { s.probs[j] = (real)(noise_int(levels) * 4.0 / levels - 1); }
            double *z = as_doubles(s.probs, N * E), balance = 0, squares = 0;
            tokens[0] = 100; // counts are added to what is there
            router_choose(&s, N, E, K);
            router_sort(&m, &s, tokens, N, E, K);
            for (int n = 0; n < N; n++) {
                double sum = 0, of_chosen = 0;
                for (int e = 0; e < E; e++) { sum += exp(z[n * E + e]); }
                for (int k = 0; k < K; k++) { of_chosen += exp(z[n * E + s.chosen[n * K + k]]); }
                squares += log(sum) * log(sum) / N;
                cr_assert(fabs((double)s.lse[n] - log(sum)) < IN(1e-13, 1e-5));
                for (int e = 0; e < E; e++) {
                    int rank = 0, at = -1; // of equals, the lower number comes first
                    for (int o = 0; o < E; o++) { rank += z[n * E + o] > z[n * E + e] || (z[n * E + o] == z[n * E + e] && o < e); }
                    for (int k = 0; k < K; k++) { if (s.chosen[n * K + k] == e) { cr_assert(at < 0, "chosen twice"); at = k; } }
                    cr_assert_eq(at, rank < K ? rank : -1, "token %d, expert %d of rank %d: found at %d", n, e, rank, at);
                    cr_assert(fabs((double)s.probs[n * E + e] - exp(z[n * E + e]) / sum) < IN(1e-15, 1e-6));
                    if (at >= 0) { cr_assert(fabs((double)s.weights[n * K + at] - exp(z[n * E + e]) / of_chosen) < IN(1e-15, 1e-6)); count[e]++; }
                }
            }
            int64_t begin = 0;
            for (int e = 0; e < E; e++) {
                double mean = 0;
                cr_assert(s.begin[e] == begin && tokens[e] == count[e] + (e == 0 ? 100 : 0), "expert %d", e);
                begin += count[e];
                for (int n = 0; n < N; n++) { mean += exp(z[n * E + e]) / N / exp((double)s.lse[n]); }
                balance += E * (double)count[e] / (N * K) * mean;
            }
            cr_assert(begin == (int64_t)N * K && s.begin[E] == begin, "%lld rows of %d", (long long)begin, N * K);
            cr_assert(fabs(m.balance_loss / balance - 1) < IN(1e-13, 1e-5) && fabs(m.z_loss - squares) < IN(1e-13, 1e-5) * (1 + squares));
            unsigned char *taken = (unsigned char *)array(N * K, 1);
            for (int j = 0; j < N * K; j++) { // each row once, in its expert's part, tokens in order
                int e = s.chosen[j];
                cr_assert(s.row[j] >= s.begin[e] && s.row[j] < s.begin[e + 1] && !taken[s.row[j]]++, "token %d, expert %d: row %d", j / K, e, s.row[j]);
                for (int o = 0; o < j; o++) { cr_assert(s.chosen[o] != e || s.row[o] < s.row[j]); }
            }
        }
    }
}

// Three tokens to one of eight experts each: five or more are idle. Their gradients are 0, also where they are written
// over garbage, and an update with any optimizer leaves finite numbers.
Test(experts, an_idle_expert_has_no_gradient) {
    static const char *const flags[] = {"--variant unified --optimizer muon", "--variant baseline", "--variant dp+er --placement down=dnp", "--variant noscale --shared-hidden 0 --optimizer muon",
        "--variant hg --shared-hidden 0 --post-norm on", "--optimizer sgd"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format("--layers 2 --channels 10 --heads 1 --vocab 12 --seq-len 3 --batch 1 --experts 8 --top-k 1 --expert-hidden 4 --balance-loss 0.1 --router-z-loss 0.1 %s", flags[i]));
        model_randomize(m);
        for (int pass = 0; pass < 2; pass++) { // a second micro-batch is added
            if (pass == 0) {
                for (int64_t j = 0; j < m->num_theta; j++) { m->grads[j] = NAN; }
                gpt_zero_grad(m);
            }
            gpt_forward(m, m->inputs, m->targets, 1, 3, 1.0 / 6);
            gpt_backward(m, m->inputs);
        }
        reparameterize_backward(m);
        int idle = 0, busy = 0;
        for (int k = 0; k < m->num_params; k++) {
            const Param *p = &m->params[k];
            double size = norm_of(m->grads + p->offset, p->rows * p->cols);
            cr_assert(isfinite(size), "%s %s", flags[i], p->name);
            if (!part_of_expert(p)) { continue; }
            int tokens = (int)m->expert_tokens[p->layer * 8 + (strstr(p->name, ".experts.")[9] - '0')];
            cr_assert_eq(size > 0, tokens > 0, "%s %s: gradient %g with %d tokens", flags[i], p->name, size, tokens);
            if (tokens) { busy++; } else { idle++; }
        }
        cr_assert(idle > busy && busy > 0);
        optimizer_step(m, 1, 0.01, 1);
        for (int64_t j = 0; j < m->num_theta; j++) { cr_assert(isfinite(m->theta[j])); }
    }
}

// A router that has no preference sends every token to the first K; the balance loss then is E times the mean
// probability of those, 1, and its gradient falls on the router, which must learn to prefer the others.
Test(experts, the_balance_loss_is_one_where_nothing_is_preferred) {
    GPT *m = model_new(EXPERTS " --balance-loss 0.5");
    model_randomize(m);
    for (int l = 0; l < 2; l++) { memset(m->theta + param_named(m, text_format("layers.%d.router.weight", l))->offset, 0, 4 * 12 * sizeof(real)); }
    memset(m->expert_tokens, 0, 8 * sizeof(int64_t));
    model_gradients(m);
    cr_assert(fabs(m->balance_loss - 2) < IN(1e-14, 1e-6) && fabs(m->z_loss - 2 * log(4) * log(4)) < IN(1e-13, 1e-5), "balance %g, z %g: sums over two layers", m->balance_loss, m->z_loss);
    for (int i = 0; i < 8; i++) { cr_assert_eq(m->expert_tokens[i], i % 4 < 2 ? 12 : 0); }
    cr_assert(norm_of(grad_named(m, "layers.0.router.weight"), 4 * 12) > 0);
}

// The z-loss is a mean over tokens and adds up over micro-batches like the loss. The balance loss is of a micro-batch:
// its shares f_e are counted there, so a step's gradient is the mean of the gradients of its micro-batches, and depends
// on --batch.
Test(experts, gradient_accumulation_adds_up_but_for_the_balance_loss) {
    #define ACCUMULATED "--layers 2 --channels 16 --heads 4 --kv-heads 2 --vocab 17 --seq-len 7 --experts 5 --top-k 2 --expert-hidden 6 --router-z-loss 0.2"
    static const char *const flags[] = {"--variant baseline", "--variant unified --post-norm on", "--variant dp+er --tie-embeddings on --shared-hidden 0"};
    DataLoader data;
    loader_open(&data, write_shard("train.bin", NULL, 200, 17), "--data", 7, 1, 1);
    for (int i = 0; i < COUNT(flags); i++) {
        double *expected = NULL, expected_loss = 0, expected_z = 0;
        int64_t expected_tokens[10];
        for (int batch = 8; batch >= 1; batch /= 2) {
            GPT *m = model_new(text_format(ACCUMULATED " --balance-loss 0 --total-batch 8 --batch %d %s", batch, flags[i]));
            noise_state = 99;
            model_randomize(m);
            Run run;
            memset(&run, 0, sizeof run);
            run.data = data;
            train_gradient(m, &run);
            double loss = train_gradient(m, &run); // counts and losses are of the last step alone
            if (!expected) {
                expected = as_doubles(m->grads, m->num_theta), expected_loss = loss, expected_z = run.z_loss;
                memcpy(expected_tokens, m->expert_tokens, sizeof expected_tokens);
            }
            cr_assert(fabs(loss / expected_loss - 1) < IN(1e-14, 1e-6) && fabs(run.z_loss / expected_z - 1) < IN(1e-13, 1e-5));
            cr_assert(memcmp(m->expert_tokens, expected_tokens, sizeof expected_tokens) == 0, "counts are of the whole step");
            for (int l = 0; l < 2; l++) {
                int64_t sum = 0;
                for (int e = 0; e < 5; e++) { sum += m->expert_tokens[l * 5 + e]; }
                cr_assert_eq(sum, 8 * 7 * 2);
            }
            CLOSE(m->grads, expected, m->num_theta, IN(1e-13, 1e-5), "%s --batch %d", flags[i], batch);
        }
        GPT *whole = model_new(text_format(ACCUMULATED " --balance-loss 0.7 --batch 8 %s", flags[i]));
        GPT *step = model_new(text_format(ACCUMULATED " --balance-loss 0.7 --total-batch 8 --batch 2 %s", flags[i]));
        GPT *micro = model_new(text_format(ACCUMULATED " --balance-loss 0.7 --batch 2 %s", flags[i]));
        GPT *const models[] = {whole, step, micro};
        double *mean = doubles(step->num_theta), balance = 0;
        for (int k = 0; k < 3; k++) { noise_state = 99; model_randomize(models[k]); }
        for (int k = 0; k < 4; k++) {
            gradient_of(micro, &data, 2 * k);
            for (int64_t j = 0; j < step->num_theta; j++) { mean[j] += (double)micro->grads[j] / 4; }
            balance += micro->balance_loss / 4;
        }
        Run run;
        memset(&run, 0, sizeof run);
        run.data = data;
        train_gradient(step, &run);
        cr_assert(fabs(run.balance_loss / balance - 1) < IN(1e-14, 1e-6));
        CLOSE(step->grads, mean, step->num_theta, IN(1e-13, 1e-5), "%s: the mean of micro-batches", flags[i]);
        gradient_of(whole, &data, 0);
        cr_assert(worst(whole->grads, mean, step->num_theta) > 1e-4, "the balance loss of the whole batch is another");
    }
    loader_close(&data);
}

// Muon has one moment for a matrix, AdamW two.
Test(experts, muon_is_for_experts_and_adamw_for_the_router) {
    GPT *m = model_tables(EXPERTS " --optimizer muon --variant unified");
    int matrices = 0, routers = 0;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        if (part_of_expert(p) && ends_with(p->name, ".weight")) { cr_assert(p->m >= 0 && p->v < 0, "%s", p->name); matrices++; }
        if (part_of_expert(p) && !ends_with(p->name, ".weight")) { cr_assert(p->m >= 0 && p->v >= 0, "%s", p->name); }
        if (strstr(p->name, ".router.")) { cr_assert(p->m >= 0 && p->v >= 0, "%s", p->name); routers++; }
    }
    cr_assert(matrices == 2 * 4 * 3 && routers == 2 * 3); // weight, alpha, beta
}

// FLOPs by hand: an expert counts for the share of tokens that go to it.
Test(experts, flops_count_the_experts_used) {
    GPT *m = model_tables(EXPERTS " --shared-hidden 9");
    double layer = 4 * 12 * 12 + 3 * 12 * 9 + 4 * 12 + 2 * 3 * 12 * 5;
    cr_assert_float_eq(flops_per_token(m), 6 * (2 * layer + 13 * 12) + 6 * 2 * 12 * 6, 1e-9);
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
    int matrix = strncmp(p->name, "layers.", 7) == 0 && ends_with(p->name, ".weight") && !ends_with(p->name, ".router.weight");
    int input = strstr(p->name, ".gamma_a") || strstr(p->name, ".gamma_b"), output = strstr(p->name, ".gamma_norm") != NULL;
    int decays = (!input && !output) || cfg->wd_scale == WD_ALL || (input && cfg->wd_scale == WD_INPUT) || (output && cfg->wd_scale == WD_OUTPUT);
    int rows = (int)p->rows, cols = (int)p->cols, n = rows * cols;
    if (input || output) { lr *= cfg->scale_lr; }
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
    GPT *m = model_new(text_format("--layers 1 --channels 12 --heads 2 --vocab 13 --seq-len 6 --batch 2 --weight-decay 0.3 %s %s", strstr(flags, "--experts") ? "" : "--hidden 7", flags));
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
    check_optimizer("--variant unified --scale-lr 2.5 --eps 1e-3", IN(1e-12, 1e-4));
    check_optimizer("--variant hg+dp --scale-lr 0", IN(1e-12, 1e-4));
    check_optimizer("--experts 4 --top-k 2 --variant hg+dp --wd-scale output --eps 1e-4", IN(1e-12, 1e-4));
}
Test(optimizer, muon) {
    check_optimizer("--optimizer muon --variant baseline", IN(1e-9, 1e-3));
    check_optimizer("--optimizer muon --variant unified --muon-momentum 0.5 --eps 1e-3", IN(1e-9, 1e-3));
    check_optimizer("--optimizer muon --experts 4 --top-k 2 --expert-hidden 7 --shared-hidden 0", IN(1e-9, 1e-3)); // each expert's matrices on their own
    check_optimizer("--optimizer muon --experts 3 --top-k 2 --variant unified --eps 1e-3", IN(1e-9, 1e-3));
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
    static const struct { int rows, cols; } shapes[] = {{16, 16}, {33, 33}, {8, 64}, {64, 24}, {1, 40}, {48, 100}, {24, 96}, {100, 20}};
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
    "--shared-hidden 9 --variant unified --optimizer muon --post-norm on", "--shared-hidden 0 --balance-loss 0.3 --router-z-loss 0.1",
};
static const char *small_shape(const char *flags) { return strstr(flags, "--shared-hidden") ? EXPERTS : SMALL; }

Test(checkpoint, gives_back_every_bit) {
    for (int i = 0; i < COUNT(checkpoint_flags); i++) {
        GPT *m = model_new(text_format("%s --keep 0 --seed 11 %s", small_shape(checkpoint_flags[i]), checkpoint_flags[i]));
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
    static const char *const flags[] = {"--variant unified --optimizer muon", "--variant dp+er --tie-embeddings on", "--optimizer sgd --sgd-momentum 0.9",
        "--shared-hidden 9 --variant unified --optimizer muon", "--shared-hidden 0 --variant baseline"};
    for (int i = 0; i < COUNT(flags); i++) {
        GPT *m = model_new(text_format("%s %s", small_shape(flags[i]), flags[i])), *copy = model_new(text_format("%s %s", small_shape(flags[i]), flags[i]));
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

// norms.csv: every tensor, and of scale vectors gamma as the formulas of the paper make it, not alpha and beta.
Test(checkpoint, norms_are_those_of_effective_scale_vectors) {
    static const char *const variants[] = {"dp", "unified", "dp+er"};
    for (int v = 0; v < COUNT(variants); v++) {
        GPT *m = model_new(text_format("--layers 1 --channels 12 --heads 2 --hidden 7 --vocab 13 --seq-len 6 --batch 2 --variant %s", variants[v]));
        model_randomize(m);
        reparameterize_forward(m);
        CsvFile csv = {0};
        csv_open(&csv, folder, "norms.csv", NORMS_HEADER, 0);
        norms_log(m, &csv, 7);
        csv_close(&csv);
        FILE *file = fopen(csv.path, "r");
        char line[200], name[100];
        long long step, values;
        double norm;
        int found = 0, wanted = 0;
        cr_assert(file && fgets(line, sizeof line, file));
        while (fscanf(file, "%lld,%99[^,],%lld,%lf\n", &step, name, &values, &norm) == 4) {
            double squares = 0;
            int64_t n = 0;
            for (int i = 0; i < m->num_params; i++) {
                const Param *p = &m->params[i];
                char *plain = text_format("%s", p->name), *alpha = strstr(plain, ".alpha");
                if (alpha) { *alpha = '\0'; }
                if (strcmp(plain, name) != 0) { continue; }
                const real *w = m->theta + p->offset;
                n = p->rows * p->cols;
                double beta = alpha ? (double)m->theta[m->params[p->beta].offset] : 1, mean = 0, rms = 0;
                for (int64_t j = 0; j < n; j++) { mean += (double)w[j] / (double)n; rms += (double)w[j] * (double)w[j] / (double)n; }
                for (int64_t j = 0; j < n; j++) {
                    double g = !alpha ? (double)w[j] : m->cfg.reparam == REPARAM_OR ? beta * (double)w[j] / sqrt(rms + NORM_EPS) : exp(beta + (double)w[j] - mean);
                    squares += g * g;
                }
            }
            cr_expect(step == 7 && values == n && n > 0 && fabs(norm / sqrt(squares) - 1) < IN(1e-8, 1e-5), "%s: %s: norm %.9g of %lld values, expected %.9g of %lld", variants[v], name, norm, values, sqrt(squares), (long long)n);
            found++;
        }
        for (int i = 0; i < m->num_params; i++) { wanted += !ends_with(m->params[i].name, ".beta"); }
        cr_expect_eq(found, wanted);
        fclose(file);
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
    {"--lr 0.01 --experts 4 --top-k 2", 0.5}, {"--lr 0.01 --experts 4 --top-k 2 --variant unified", 0.5}, {"--lr 0.01 --experts 8 --top-k 2 --shared-hidden 0 --variant unified --optimizer muon", 0.3},
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
    double chance = gpt_head(m)->norm ? 0.5 : 0.2; // the mean of few of them: numbers that four different tokens see
    cr_assert(fabs(first - ignorance) < chance, "a new model knows nothing: loss %g, expected about %g", first, ignorance);
    cr_assert(loss < training[*index].bound, "%s: loss %g after 50 steps, %g at first", flags, loss, first);
    double again = validate(m, &data);
    cr_assert(again < training[*index].bound, "%s: validation loss %g", flags, again);
    loader_close(&data);
}
