// make bench: how fast is train_gpt2.c, and against what?
//
// It includes the program itself and times its functions on random tokens, so it needs no files. Whatever is compared
// is interleaved in one run (A B A B ...), because machines drift: clocks change, neighbours come and go. Each ratio
// is the median of the ratios of neighbouring measurements.
//
// OpenBLAS and PyTorch run as child processes that sleep in a read until they are asked for one measurement. Thread
// pools of different libraries in one process would get in each other's way; and OpenBLAS chooses its kernels from
// OPENBLAS_CORETYPE only once, at load. Threads spin for a while after their last work: before each measurement the
// bench waits until the process that worked before has stopped using the CPU.
//
// Run it from the root of the repository (for torch_step.py):
//   bench [--quick] [--smoke] [--threads N] [--only gemm,attention,steps,variants,threads,parts,memory] [--profile FILE]
//     --quick    fewer rounds, and some tables shorter   --smoke   tiny models: checks the bench, not the speed
//     --profile  the same file built with -DBENCH_PROFILE -finstrument-functions; default: FILE of bench + "_profile"
// The environment variable PYTHON names the Python to try first for PyTorch.
#define TESTING // leaves out main
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // data, checkpoints and sampling aren't used here
#include "../../train_gpt2.c"
#pragma GCC diagnostic pop
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

static struct Settings {
    int quick, smoke, threads;
    const char *only;        // sections to run, or NULL for all
    const char *self;        // this program, to start as a child
    char profile[4096];      // its twin with instrumented functions
    char coretype[64];       // "OPENBLAS_CORETYPE=..." of the faster OpenBLAS, or "" for unset: PyTorch gets the same
} settings;

// ----------------------------------------------------------------------------------------------------
// Results: the figures that the output ends with.

typedef struct Headline { const char *name, *meaning; char value[160]; } Headline;
enum { GEMM_VS_OPENBLAS, STEP_VS_PYTORCH, SMALL_VS_PYTORCH, HG_DP_OR, SPEEDUP_2, NUM_HEADLINES };
static Headline headlines[NUM_HEADLINES] = {
    {"gemm_vs_openblas_min",    "GFLOP/s, ours / the best OpenBLAS setting, lowest of the counted shapes; more is better", "not measured: left out"},
    {"step_124m_vs_pytorch",    "seconds a step of the 124M shape, ours / PyTorch's; less is better", "not measured: left out"},
    {"small_tokens_vs_pytorch", "tokens/s of the small model, ours / PyTorch's; more is better", "not measured: left out"},
    {"hg_dp_or_vs_baseline",    "seconds a step, HG+DP+OR / baseline, higher of both models; less is better", "not measured: left out"},
    {"speedup_2_threads",       "seconds a step on 1 thread / on 2 threads, lower of both models; more is better", "not measured: left out"},
};

__attribute__((format(printf, 2, 3)))
static void set_headline(int which, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(headlines[which].value, sizeof headlines[which].value, format, args);
    va_end(args);
}

// What the project promises, beside what was found.
typedef struct Check { char what[120]; double value, bound; int at_most; } Check;
static Check checks[48];
static int num_checks;

__attribute__((format(printf, 4, 5)))
static void add_check(double value, int at_most, double bound, const char *format, ...) {
    if (settings.smoke || num_checks == COUNT(checks)) { return; }
    Check *c = &checks[num_checks++];
    c->value = value;
    c->bound = bound;
    c->at_most = at_most;
    va_list args;
    va_start(args, format);
    vsnprintf(c->what, sizeof c->what, format, args);
    va_end(args);
}

static void print_results(double began) {
    if (num_checks > 0) { printf("\n== Targets\n%-78s %9s  %9s\n", "", "measured", "target"); }
    for (int i = 0; i < num_checks; i++) {
        const Check *c = &checks[i];
        int met = c->at_most ? c->value <= c->bound : c->value >= c->bound;
        printf("%-78s %9.3f  %s %6.3g  %s\n", c->what, c->value, c->at_most ? "<=" : ">=", c->bound, met ? "met" : "MISSED");
    }
    printf("\n== Headline figures, and their direction\n");
    for (int i = 0; i < NUM_HEADLINES; i++) { printf("%-24s %s\n", headlines[i].name, headlines[i].meaning); }
    printf("\ntotal time %.0f s\n", seconds() - began);
    for (int i = 0; i < NUM_HEADLINES; i++) { printf("bench: %s %s\n", headlines[i].name, headlines[i].value); }
}

static int section(const char *name, const char *title) {
    const char *found = settings.only ? strstr(settings.only, name) : name;
    if (found) { printf("\n== %s\n", title); fflush(stdout); }
    return found != NULL;
}

typedef struct Series { double values[64]; int count; } Series;
static void add(Series *s, double value) { if (s->count < COUNT(s->values)) { s->values[s->count++] = value; } }
static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(const Series *s) {
    Series sorted = *s;
    int n = s->count;
    if (n == 0) { return NAN; }
    qsort(sorted.values, (size_t)n, sizeof(double), ascending);
    return n % 2 ? sorted.values[n / 2] : (sorted.values[n / 2 - 1] + sorted.values[n / 2]) / 2;
}
// median of a[i] / b[i]: measurements of the same round lie next to each other in time
static double median_ratio(const Series *a, const Series *b) {
    Series ratios = {{0}, 0};
    for (int i = 0; i < a->count && i < b->count; i++) { add(&ratios, a->values[i] / b->values[i]); }
    return median(&ratios);
}

static void use_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

// ----------------------------------------------------------------------------------------------------
// Child processes that measure when they are told to.

typedef struct Child { pid_t pid; FILE *to, *from; } Child;

// Seconds of CPU time that a process (0: this one) has used, all its threads together.
static double cpu_seconds(pid_t pid) {
    struct timespec used = {0, 0};
    clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
#ifdef __linux__
    if (pid && clock_getcpuclockid(pid, &clock) != 0) { return 0; }
#else
    (void)pid;
#endif
    clock_gettime(clock, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

// Waits until the threads of a process have stopped spinning: below a tenth of a core, but at most half a second.
static void settle(pid_t pid) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    for (int i = 0; i < 50; i++) {
        double begin = seconds(), used = cpu_seconds(pid);
        nanosleep(&pause, NULL);
        if (cpu_seconds(pid) - used < 0.1 * (seconds() - begin)) { return; }
    }
}

// Starts argv with changes to the environment: "NAME=VALUE" sets, "NAME=" unsets. Returns 0 if it cannot.
static int child_start(Child *child, const char *const *argv, const char *const *changes) {
    int down[2], up[2], count = 0;
    char **env;
    while (environ[count]) { count++; }
    env = (char **)calloc((size_t)count + 32, sizeof(char *));
    if (!env || pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) { FAIL("cannot make pipes: %s", strerror(errno)); }
    count = 0;
    for (char **e = environ; *e; e++) {
        int changed = 0;
        for (const char *const *c = changes; *c; c++) { changed |= strncmp(*e, *c, strcspn(*c, "=") + 1) == 0; }
        if (!changed) { env[count++] = *e; }
    }
    for (const char *const *c = changes; *c; c++) {
        if ((*c)[strcspn(*c, "=") + 1]) { env[count++] = (char *)(uintptr_t)*c; }
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, down[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, up[1], STDOUT_FILENO);
    fflush(stdout);
    int error = posix_spawnp(&child->pid, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, env);
    posix_spawn_file_actions_destroy(&actions);
    free(env);
    close(down[0]);
    close(up[1]);
    if (error) { close(down[1]); close(up[0]); return 0; }
    child->to = fdopen(down[1], "w");
    child->from = fdopen(up[0], "r");
    return child->to && child->from;
}

// Reads one line of a child; 0 at its end.
static int child_line(Child *child, char *line, size_t size) {
    if (!fgets(line, (int)size, child->from)) { return 0; }
    line[strcspn(line, "\n")] = '\0';
    return 1;
}

// Sends a line and waits for the answer: a line that begins with up to three numbers. Returns how many it has.
__attribute__((format(printf, 3, 4)))
static int child_ask(Child *child, double *answer, const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    vfprintf(child->to, format, args);
    va_end(args);
    fputc('\n', child->to);
    fflush(child->to);
    if (!child_line(child, line, sizeof line)) { return 0; }
    int found = sscanf(line, "%lf %lf %lf", &answer[0], &answer[1], &answer[2]);
    settle(child->pid);
    return found;
}

// Ends a child by the end of its input, and waits for it. Returns its exit status.
static int child_end(Child *child) {
    int status = 0;
    fclose(child->to);
    fclose(child->from);
    waitpid(child->pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

// Runs argv to its end, with changes to the environment, echoes its output, and picks up the numbers of its line "result A B C".
static const char *const same_environment[] = {NULL};
static int child_run(const char *const *argv, const char *const *changes, double *result) {
    Child child;
    char line[512];
    int found = 0;
    if (!child_start(&child, argv, changes)) { return 0; }
    while (child_line(&child, line, sizeof line)) {
        if (strncmp(line, "result ", 7) == 0) { found = sscanf(line + 7, "%lf %lf %lf", &result[0], &result[1], &result[2]); }
        else { printf("%s\n", line); fflush(stdout); }
    }
    return child_end(&child) == 0 ? found : 0;
}

// ----------------------------------------------------------------------------------------------------
// Models and their steps.

typedef struct Shape { const char *name; int layers, channels, heads, hidden, vocab, batch, seq_len; } Shape;
// GPT-2 124M has an FFN of two matrices of 768 x 3072; SwiGLU has three, so 2048 wide it has the same FLOPs.
static Shape shape_124m = {"124M shape", 12, 768, 12, 2048, 50257, 4, 64};
static Shape shape_small = {"small model", 6, 384, 6, 1024, 256, 8, 256};
#define BENCH_LR "1e-4"

static void use_smoke_shapes(void) {
    shape_124m = (Shape){"124M shape", 2, 64, 2, 160, 1000, 2, 32};
    shape_small = (Shape){"small model", 2, 64, 2, 160, 256, 2, 64};
}

typedef struct Model { GPT gpt; size_t bytes; int64_t step; double first_loss, loss; } Model;

static void model_config(Config *cfg, const Shape *s, const char *variant) {
    char numbers[7][16];
    const int values[7] = {s->layers, s->channels, s->heads, s->hidden, s->vocab, s->batch, s->seq_len};
    for (int i = 0; i < 7; i++) { snprintf(numbers[i], sizeof numbers[i], "%d", values[i]); }
    const char *const argv[] = {"bench", "--layers", numbers[0], "--channels", numbers[1], "--heads", numbers[2], "--hidden", numbers[3],
                                "--vocab", numbers[4], "--batch", numbers[5], "--seq-len", numbers[6], "--variant", variant,
                                "--lr", BENCH_LR, "--schedule", "constant", "--warmup", "0"};
    config_defaults(cfg);
    config_parse_flags(cfg, COUNT(argv), argv);
    presets_apply(cfg);
    config_resolve(cfg);
}

static void model_build(Model *model, const Shape *s, const char *variant) {
    Config cfg;
    memset(model, 0, sizeof *model);
    model_config(&cfg, s, variant);
    gpt_build(&model->gpt, &cfg);
    model->bytes = gpt_estimate_memory(&model->gpt, cfg.batch, cfg.seq_len).total;
    gpt_allocate(&model->gpt, cfg.batch, cfg.seq_len);
    gpt_init(&model->gpt);
    reparameterize_forward(&model->gpt);
    for (int i = 0; i < s->batch * s->seq_len; i++) { // the same batch in every step, so that the loss must fall
        model->gpt.inputs[i] = (int32_t)(random_u64((uint64_t)i) % (uint64_t)s->vocab);
        model->gpt.targets[i] = (int32_t)(random_u64((uint64_t)i + 1) % (uint64_t)s->vocab);
    }
}

static void model_free(Model *model) {
    munmap(model->gpt.theta, model->bytes); // theta is the first tensor of the one block of memory
    free(model->gpt.params);
    free(model->gpt.maps);
    free(model->gpt.acts);
}

// What train_step does, without reading data and writing logs. Returns seconds.
static double model_step(Model *model) {
    GPT *m = &model->gpt;
    const Config *cfg = &m->cfg;
    double begin = seconds();
    gpt_zero_grad(m);
    model->loss = gpt_forward(m, m->inputs, m->targets, cfg->batch, cfg->seq_len, 1.0 / ((double)cfg->batch * cfg->seq_len));
    gpt_backward(m, m->inputs);
    reparameterize_backward(m);
    double norm = gradient_norm(m), lr = learning_rate(cfg, model->step);
    optimizer_step(m, ++model->step, lr, cfg->grad_clip > 0 && norm > cfg->grad_clip ? cfg->grad_clip / norm : 1);
    reparameterize_forward(m);
    double took = seconds() - begin;
    if (model->step == 1) { model->first_loss = model->loss; }
    if (!isfinite(model->loss)) { FAIL("%lld steps: found loss %g, expected a finite one", (long long)model->step, model->loss); }
    return took;
}

static double tokens_per_step(const Shape *s) { return (double)s->batch * s->seq_len; }

// ----------------------------------------------------------------------------------------------------
// Matrix products against OpenBLAS.

typedef enum { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT } GemmKind;
typedef struct Gemm { const char *name; GemmKind kind; int64_t M, N, K; int counted; } Gemm;
static Gemm gemms[] = {
    {"forward          256 x  3072, K   768", FORWARD,          256,  3072,   768, 1},
    {"forward          256 x   768, K  3072", FORWARD,          256,   768,  3072, 1},
    {"weight gradient 3072 x   768, K   256", WEIGHT_GRADIENT, 3072,   768,   256, 1},
    {"LM head          256 x 50257, K   768", FORWARD,          256, 50257,   768, 1},
    {"forward         1024 x  1024, K  1024", FORWARD,         1024,  1024,  1024, 1},
    {"forward         2048 x   384, K   384", FORWARD,         2048,   384,   384, 1},
    {"LM head, input   256 x   768, K 50257", INPUT_GRADIENT,   256,   768, 50257, 0},
    {"LM head, weight 50257 x  768, K   256", WEIGHT_GRADIENT, 50257,  768,   256, 0},
};

typedef struct GemmBuffers { float *a, *b, *c; } GemmBuffers;

// Random numbers in (-0.5, 0.5), or zeros without a seed. huge: in large pages, as the memory of a model.
static real *random_numbers(int64_t count, uint64_t seed, int huge) {
    const size_t unit = huge ? 1 << 21 : 64, bytes = ((size_t)count * sizeof(real) + unit - 1) / unit * unit;
    real *x = (real *)aligned_alloc(unit, bytes);
    if (!x) { FAIL("out of memory"); }
#ifdef MADV_HUGEPAGE
    if (huge) { madvise(x, bytes, MADV_HUGEPAGE); }
#endif
    for (int64_t i = 0; i < count; i++) { x[i] = seed ? (real)(random_u64(seed + (uint64_t)i) >> 40) * 0x1p-24f - 0.5f : 0; }
    return x;
}
static GemmBuffers gemm_buffers(const Gemm *g) {
    GemmBuffers x = {random_numbers(g->M * g->K, 1, 1), random_numbers(g->K * g->N, 1000000007, 1), random_numbers(g->M * g->N, 0, 1)};
    return x;
}
static void gemm_free(GemmBuffers *x) { free(x->a); free(x->b); free(x->c); }

// Row-major cblas_sgemm: order, transpositions, M N K, alpha, A, B, beta, C.
typedef void (*Sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

// One product as training does it: y = x W^T, dx = dy W, or dW += dy^T x. sgemm NULL: ours.
static void gemm_run(Sgemm sgemm, const Gemm *g, GemmBuffers x) {
    int64_t M = g->M, N = g->N, K = g->K;
    int ta = g->kind == WEIGHT_GRADIENT, tb = g->kind == FORWARD, accumulate = g->kind == WEIGHT_GRADIENT;
    if (sgemm) {
        sgemm(ROW_MAJOR, ta ? TRANS : NO_TRANS, tb ? TRANS : NO_TRANS, (int)M, (int)N, (int)K, 1, x.a, (int)(ta ? M : K),
              x.b, (int)(tb ? K : N), (float)accumulate, x.c, (int)N);
    } else {
        matmul(x.c, N, x.a, ta ? 1 : K, ta ? M : 1, x.b, tb ? 1 : N, tb ? K : 1, M, N, K, accumulate);
    }
}

// Seconds of one call: the mean over some calls, after one that wakes up the threads.
static double gemm_time(Sgemm sgemm, const Gemm *g, GemmBuffers x, int calls) {
    gemm_run(sgemm, g, x);
    double begin = seconds();
    for (int i = 0; i < calls; i++) { gemm_run(sgemm, g, x); }
    return (seconds() - begin) / calls;
}

// A number that shows that two programs have computed the same product: weights break the symmetry.
static double gemm_checksum(const Gemm *g, GemmBuffers x) {
    double sum = 0;
    for (int64_t i = 0; i < g->M * g->N; i++) { sum += x.c[i] * (1 + (double)(i % 7)); }
    return sum;
}

// The child: answers "load I" by the checksum of product I, and "time I N" by the seconds of one call, over N.
static int openblas_server(int threads) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW);
    if (!library) { library = dlopen("libopenblas.so", RTLD_NOW); }
    if (!library) { return 1; }
    Sgemm sgemm = (Sgemm)(uintptr_t)dlsym(library, "cblas_sgemm");
    void (*set_threads)(int) = (void (*)(int))(uintptr_t)dlsym(library, "openblas_set_num_threads");
    char *(*core)(void) = (char *(*)(void))(uintptr_t)dlsym(library, "openblas_get_corename");
    char *(*config)(void) = (char *(*)(void))(uintptr_t)dlsym(library, "openblas_get_config");
    if (!sgemm || !set_threads) { return 1; }
    set_threads(threads);
    printf("kernels for %s (%s)\n", core ? core() : "?", config ? config() : "?");
    fflush(stdout);
    char line[128];
    int index, calls;
    GemmBuffers x = {NULL, NULL, NULL};
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "load %d", &index) == 1) {
            gemm_free(&x);
            x = gemm_buffers(&gemms[index]);
            gemm_run(sgemm, &gemms[index], x);
            printf("%.17g\n", gemm_checksum(&gemms[index], x));
        } else if (sscanf(line, "time %d %d", &index, &calls) == 2) {
            printf("%.9g\n", gemm_time(sgemm, &gemms[index], x, calls));
        }
        fflush(stdout);
    }
    return 0;
}

// The value of OPENBLAS_CORETYPE that names this CPU's best kernels, or NULL where we know none.
static const char *openblas_coretype(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f")) { return "OPENBLAS_CORETYPE=SKYLAKEX"; }
    if (__builtin_cpu_supports("avx2")) { return __builtin_cpu_is("amd") ? "OPENBLAS_CORETYPE=ZEN" : "OPENBLAS_CORETYPE=HASWELL"; }
#endif
    return NULL;
}

// One shape: ours against each OpenBLAS child, interleaved. ratios[i]: our GFLOP/s over those of child i.
static void gemm_compare(int index, Child *blas, int num_blas, int rounds, double *rates, double *ratios) {
    const Gemm *g = &gemms[index];
    GemmBuffers x = gemm_buffers(g);
    double flops = 2.0 * (double)g->M * (double)g->N * (double)g->K, answer[3];
    gemm_run(NULL, g, x);
    double sum = gemm_checksum(g, x);
    for (int b = 0; b < num_blas; b++) {
        if (child_ask(&blas[b], answer, "load %d", index) < 1) { FAIL("OpenBLAS stopped"); }
        if (fabs(answer[0] - sum) > 1e-4 * sqrt((double)g->M * (double)g->N * (double)g->K)) {
            FAIL("%s: found checksum %g by OpenBLAS and %g by us, expected the same", g->name, answer[0], sum);
        }
    }
    int calls = (int)(0.04 / gemm_time(NULL, g, x, 1)); // measurements of about 40 ms
    calls = calls < 1 ? 1 : calls > 1000 ? 1000 : calls;
    Series ours = {{0}, 0}, theirs[2] = {{{0}, 0}, {{0}, 0}};
    for (int r = 0; r < rounds; r++) {
        add(&ours, gemm_time(NULL, g, x, calls));
        settle(0);
        for (int b = 0; b < num_blas; b++) {
            if (child_ask(&blas[b], answer, "time %d %d", index, calls) < 1) { FAIL("OpenBLAS stopped"); }
            add(&theirs[b], answer[0]);
        }
    }
    rates[0] = flops / median(&ours) * 1e-9;
    for (int b = 0; b < num_blas; b++) {
        rates[1 + b] = flops / median(&theirs[b]) * 1e-9;
        ratios[b] = median_ratio(&theirs[b], &ours);
    }
    gemm_free(&x);
}

static void bench_gemm(void) {
    char threads[16], line[512];
    snprintf(threads, sizeof threads, "%d", settings.threads);
    const char *const argv[] = {settings.self, "--openblas-server", threads, settings.smoke ? "--smoke" : NULL, NULL};
    const char *coretypes[2] = {"OPENBLAS_CORETYPE=", openblas_coretype()};
    Child blas[2];
    int num_blas = 0;
    for (int i = 0; i < 2 && coretypes[i]; i++) {
        const char *const changes[] = {coretypes[i], NULL};
        if (!child_start(&blas[num_blas], argv, changes)) { break; }
        if (!child_line(&blas[num_blas], line, sizeof line)) { child_end(&blas[num_blas]); break; }
        printf("OpenBLAS %c: OPENBLAS_CORETYPE %s, %s\n", 'A' + num_blas, i ? strchr(coretypes[i], '=') + 1 : "unset", line);
        num_blas++;
    }
    if (num_blas == 0) {
        printf("OpenBLAS is not installed (found neither libopenblas.so.0 nor libopenblas.so): ours alone\n");
        set_headline(GEMM_VS_OPENBLAS, "not measured: OpenBLAS is not installed");
    }
    int rounds = settings.smoke ? 1 : settings.quick ? 3 : 9;
    printf("%d threads, medians of %d rounds; ratio: ours / the best OpenBLAS, more is better; *: not counted\n", settings.threads, rounds);
    printf("%-39s %15s %15s %15s %7s\n", "GFLOP/s", "ours", num_blas > 0 ? "OpenBLAS A" : "", num_blas > 1 ? "OpenBLAS B" : "", "ratio");
    double lowest = INFINITY, wins[2] = {0, 0};
    for (int i = 0; i < COUNT(gemms); i++) {
        double rates[3] = {0, NAN, NAN}, ratios[2] = {INFINITY, INFINITY};
        if (settings.quick && !gemms[i].counted) { continue; }
        gemm_compare(i, blas, num_blas, rounds, rates, ratios);
        double ratio = fmin(ratios[0], ratios[1]);
        printf("%-38s%s %15.1f", gemms[i].name, gemms[i].counted ? " " : "*", rates[0]);
        for (int b = 0; b < num_blas; b++) { printf(" %15.1f", rates[1 + b]); wins[b] += log(rates[1 + b]); }
        if (num_blas > 0) { printf(" %*.2f", num_blas > 1 ? 7 : 23, ratio); }
        printf("\n");
        fflush(stdout);
        if (num_blas == 0 || !gemms[i].counted) { continue; }
        add_check(ratio, 0, 0.8, "GFLOP/s, ours / best OpenBLAS: %s", gemms[i].name);
        lowest = fmin(lowest, ratio);
    }
    if (num_blas > 0) { set_headline(GEMM_VS_OPENBLAS, "%.3f", lowest); }
    if (num_blas > 1 && wins[1] > wins[0]) { snprintf(settings.coretype, sizeof settings.coretype, "%s", coretypes[1]); }
    for (int b = 0; b < num_blas; b++) { child_end(&blas[b]); }
}

// ----------------------------------------------------------------------------------------------------
// Attention: does time follow T^2, and memory T?

typedef struct Attention { int T, NH, HS; real *qkv, *dqkv, *out, *dout, *lse, *D; } Attention;

static void attention_build(Attention *a, int T) {
    const int NH = settings.smoke ? 2 : 6, HS = settings.smoke ? 16 : 64;
    int64_t width = (int64_t)NH * HS;
    *a = (Attention){T, NH, HS, NULL, NULL, NULL, NULL, NULL, NULL};
    a->qkv = random_numbers(3 * width * T, 1, 0);
    a->dqkv = random_numbers(3 * width * T, 0, 0);
    a->out = random_numbers(width * T, 0, 0);
    a->dout = random_numbers(width * T, 1000000007, 0);
    a->lse = random_numbers((int64_t)NH * T, 0, 0);
    a->D = random_numbers((int64_t)NH * T, 0, 0);
}
static void attention_free(Attention *a) { free(a->qkv); free(a->dqkv); free(a->out); free(a->dout); free(a->lse); free(a->D); }

static void attention_time(Attention *a, int calls, double *forward, double *backward) {
    double begin = seconds();
    for (int i = 0; i < calls; i++) { attention_forward(a->out, a->lse, a->qkv, 1, a->T, a->NH, a->NH, a->HS); }
    double middle = seconds();
    for (int i = 0; i < calls; i++) { attention_backward(a->dqkv, a->D, a->dout, a->qkv, a->out, a->lse, 1, a->T, a->NH, a->NH, a->HS); }
    *forward = (middle - begin) / calls;
    *backward = (seconds() - middle) / calls;
}

// Largest resident memory of this process so far, in bytes; 0 where the system doesn't tell.
static double peak_memory(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    double kib = 0;
    while (status && fgets(line, sizeof line, status)) { sscanf(line, "VmHWM: %lf", &kib); }
    if (status) { fclose(status); }
    return kib * 1024;
}

// Child: what attention at length T adds to the peak, its inputs and outputs included.
static int attention_memory_child(int T) {
    Attention a;
    double before = peak_memory(), forward, backward;
    attention_build(&a, T);
    attention_time(&a, 1, &forward, &backward);
    printf("result %.0f\n", peak_memory() - before);
    attention_free(&a);
    return 0;
}

static void bench_attention(void) {
    const int lengths[2] = {settings.smoke ? 128 : 1024, settings.smoke ? 512 : 4096};
    const int rounds = settings.smoke ? 1 : settings.quick ? 3 : 7;
    Attention a[2];
    Series times[2][2];
    memset(times, 0, sizeof times);
    for (int i = 0; i < 2; i++) {
        double forward, backward;
        attention_build(&a[i], lengths[i]);
        attention_time(&a[i], 1, &forward, &backward);
    }
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < 2; i++) {
            double forward, backward;
            attention_time(&a[i], i ? 1 : 8, &forward, &backward);
            add(&times[i][0], forward);
            add(&times[i][1], backward);
        }
    }
    printf("%d heads of %d, B=1, %d threads, medians of %d rounds; growth over T^2: 1 is proportional, less is better\n", a[0].NH, a[0].HS, settings.threads, rounds);
    printf("%-10s %10s %10s %10s %10s %18s\n", "", "ms", "", "GFLOP/s", "", "growth over T^2");
    printf("%-10s   T=%-7d   T=%-7d   T=%-7d   T=%-6d\n", "", lengths[0], lengths[1], lengths[0], lengths[1]);
    for (int pass = 0; pass < 2; pass++) { // products of (T^2 / 2) x HS a head: 2 forward, 5 backward
        double ms[2], rate[2], growth = median_ratio(&times[1][pass], &times[0][pass]) * lengths[0] * lengths[0] / lengths[1] / lengths[1];
        for (int i = 0; i < 2; i++) {
            ms[i] = 1000 * median(&times[i][pass]);
            rate[i] = (pass ? 5 : 2) * 1e-6 * a[i].NH * a[i].HS * (double)a[i].T * a[i].T / ms[i];
        }
        printf("%-10s %10.2f %10.2f %10.1f %10.1f %18.3f\n", pass ? "backward" : "forward", ms[0], ms[1], rate[0], rate[1], growth);
        add_check(growth, 1, 1.3, "attention %s, time over proportional to T^2, T=%d against T=%d", pass ? "backward" : "forward", lengths[1], lengths[0]);
    }
    double memory[2] = {0, 0}, result[3];
    for (int i = 0; i < 2; i++) {
        attention_free(&a[i]);
        char T[16];
        snprintf(T, sizeof T, "%d", lengths[i]);
        const char *const argv[] = {settings.self, "--attention-memory", T, settings.smoke ? "--smoke" : NULL, NULL};
        if (child_run(argv, same_environment, result) == 1) { memory[i] = result[0]; }
    }
    if (memory[0] <= 0 || memory[1] <= 0) { printf("memory: not measured: the system doesn't tell\n"); return; }
    double growth = memory[1] / memory[0] * lengths[0] / lengths[1];
    printf("%-10s %6.1f MiB %6.1f MiB; growth over T: %.3f (1 is proportional, less is better)\n", "memory", memory[0] / (1 << 20), memory[1] / (1 << 20), growth);
    add_check(growth, 1, 1.3, "attention, memory over proportional to T, T=%d against T=%d", lengths[1], lengths[0]);
}

// ----------------------------------------------------------------------------------------------------
// Steps against PyTorch.

// glibc gives large blocks of freed memory back to the system at once, and PyTorch then pays for fresh pages in every
// step. These keep what was freed: all from one heap (no mmap, no arenas of threads), never trimmed.
static const char *const malloc_settings[] = {"MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=68719476736", "MALLOC_TOP_PAD_=268435456", "MALLOC_ARENA_MAX=1"};

// Finds a Python that can import torch; NULL where there is none.
static const char *find_torch(void) {
    static const char *found;
    static int searched;
    const char *const candidates[] = {getenv("PYTHON"), "python3", "/usr/bin/python3"};
    for (int i = 0; i < COUNT(candidates) && !searched && !found; i++) {
        if (!candidates[i]) { continue; }
        double result[3];
        const char *const argv[] = {candidates[i], "-c", "import importlib.util as u; print('result %d' % (u.find_spec('torch') is not None))", NULL};
        if (child_run(argv, same_environment, result) == 1 && result[0] == 1) { found = candidates[i]; }
    }
    searched = 1;
    return found;
}

static int torch_start(Child *torch, const Shape *s, char *ready, size_t size) {
    char numbers[8][16];
    const int values[8] = {s->layers, s->channels, s->heads, s->hidden, s->vocab, s->batch, s->seq_len, settings.threads};
    for (int i = 0; i < 8; i++) { snprintf(numbers[i], sizeof numbers[i], "%d", values[i]); }
    const char *const argv[] = {find_torch(), "dev/bench/torch_step.py", "--layers", numbers[0], "--channels", numbers[1], "--heads", numbers[2], "--hidden", numbers[3],
                                "--vocab", numbers[4], "--batch", numbers[5], "--seq-len", numbers[6], "--threads", numbers[7], "--lr", BENCH_LR, NULL};
    char omp[40], blas[40];
    snprintf(omp, sizeof omp, "OMP_NUM_THREADS=%d", settings.threads);
    snprintf(blas, sizeof blas, "OPENBLAS_NUM_THREADS=%d", settings.threads);
    const char *const changes[] = {malloc_settings[0], malloc_settings[1], malloc_settings[2], malloc_settings[3], omp, blas,
                                   settings.coretype[0] ? settings.coretype : "OPENBLAS_CORETYPE=", NULL};
    if (!child_start(torch, argv, changes)) { return 0; }
    if (child_line(torch, ready, size) && strncmp(ready, "ready ", 6) == 0) { return 1; }
    child_end(torch);
    return 0;
}

// Steps of ours and of PyTorch's in turns. Returns our time over PyTorch's, or NAN without PyTorch.
static double steps_compare(const Shape *s, int rounds) {
    Child torch;
    char ready[512] = "";
    int has_torch = find_torch() && torch_start(&torch, s, ready, sizeof ready);
    Model model;
    model_build(&model, s, "baseline");
    model_step(&model);
    model_step(&model);
    Series ours = {{0}, 0}, theirs = {{0}, 0};
    double answer[3] = {0, 0, 0}, faults = 0, idle = 0;
    for (int r = 0; r < rounds; r++) {
        double before = has_torch ? cpu_seconds(torch.pid) : 0;
        add(&ours, model_step(&model));
        idle += has_torch ? cpu_seconds(torch.pid) - before : 0;
        settle(0);
        if (!has_torch) { continue; }
        if (child_ask(&torch, answer, "go") != 3) {
            printf("PyTorch stopped in the middle of its steps\n");
            child_end(&torch);
            has_torch = 0;
            continue;
        }
        add(&theirs, answer[0]);
        faults += answer[2];
    }
    double ratio = has_torch ? median_ratio(&ours, &theirs) : NAN, tokens = tokens_per_step(s);
    double flops = flops_per_token(&model.gpt) * tokens * 1e-9;
    printf("%s: %d layers, %d wide, %d heads, hidden %d, vocabulary %d, B=%d, T=%d; %.1fM parameters, %d threads, %d rounds\n",
           s->name, s->layers, s->channels, s->heads, s->hidden, s->vocab, s->batch, s->seq_len, 1e-6 * (double)model.gpt.num_theta, settings.threads, rounds);
    if (has_torch) {
        const char *version = ready + 6 + strcspn(ready + 6, " ") + 1;
        printf("  %s; %.0f page faults a step; while our steps ran it used %.1f ms of CPU time\n", version, faults / rounds, 1000 * idle);
    }
    printf("  %-10s %12s %12s %12s   %s\n", "", "s/step", "tokens/s", "GFLOP/s", "loss (ln V is where it must begin, about)");
    printf("  %-10s %12.4f %12.0f %12.1f   %.3f -> %.3f in %lld steps, ln V = %.3f\n", "ours", median(&ours), tokens / median(&ours),
           flops / median(&ours), model.first_loss, model.loss, (long long)model.step, log(s->vocab));
    if (has_torch) {
        printf("  %-10s %12.4f %12.0f %12.1f   %.3f -> %.3f\n", "PyTorch", median(&theirs), tokens / median(&theirs),
               flops / median(&theirs), atof(ready + 6), answer[1]);
        printf("  time, ours / PyTorch's: %.3f (less is better); speed, ours / PyTorch's: %.2f (more is better)\n", ratio, 1 / ratio);
        if (fabs(atof(ready + 6) - model.first_loss) > 0.05 * model.first_loss) {
            printf("  WARNING: the first losses differ by more than 5%%: are these the same models?\n");
        }
        child_end(&torch);
    }
    fflush(stdout);
    model_free(&model);
    return ratio;
}

static void bench_steps(void) {
    if (!find_torch()) {
        printf("*** PyTorch is NOT INSTALLED for $PYTHON, python3 or /usr/bin/python3 (Debian: apt-get install python3-torch): ours alone ***\n");
    } else {
        printf("PyTorch runs with");
        for (int i = 0; i < COUNT(malloc_settings); i++) { printf(" %s", malloc_settings[i]); }
        printf(" (so that it keeps freed memory\ninstead of paying page faults for it), OMP_NUM_THREADS=OPENBLAS_NUM_THREADS=%d, %s\n", settings.threads,
               settings.coretype[0] ? settings.coretype : "OPENBLAS_CORETYPE unset");
    }
    const char *why = find_torch() ? "not measured: PyTorch failed" : "not measured: PyTorch is not installed";
    double ratio = steps_compare(&shape_124m, settings.smoke ? 1 : settings.quick ? 2 : 7);
    if (isnan(ratio)) { set_headline(STEP_VS_PYTORCH, "%s", why); } else { set_headline(STEP_VS_PYTORCH, "%.3f", ratio); }
    ratio = steps_compare(&shape_small, settings.smoke ? 1 : settings.quick ? 2 : 7);
    if (isnan(ratio)) { set_headline(SMALL_VS_PYTORCH, "%s", why); } else { set_headline(SMALL_VS_PYTORCH, "%.3f", 1 / ratio); }
}

// ----------------------------------------------------------------------------------------------------
// What the scale vectors cost: baseline, HG+DP+OR and unified, steps interleaved.

enum { BASELINE, FOLDED, UNIFIED, NUM_COMPARED };
static const char *const compared[NUM_COMPARED] = {"baseline", "hg+dp+or", "unified"};

static double available_memory(void) {
    FILE *info = fopen("/proc/meminfo", "r");
    char line[256];
    double kib = 0;
    while (info && fgets(line, sizeof line, info)) { sscanf(line, "MemAvailable: %lf", &kib); }
    if (info) { fclose(info); }
    return kib > 0 ? kib * 1024 : (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 2;
}

// Returns HG+DP+OR over baseline, or NAN where three models don't fit.
static double variants_compare(const Shape *s, int rounds) {
    Model models[NUM_COMPARED];
    Series times[NUM_COMPARED];
    memset(times, 0, sizeof times);
    for (int v = 0; v < NUM_COMPARED; v++) {
        model_build(&models[v], s, compared[v]);
        if (v == 0 && NUM_COMPARED * 1.2 * (double)models[v].bytes > available_memory()) {
            printf("%s: not measured: three models of %.1f GiB don't fit\n", s->name, (double)models[v].bytes / (1 << 30));
            model_free(&models[v]);
            return NAN;
        }
        model_step(&models[v]);
    }
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < NUM_COMPARED; i++) { // every other round backwards, so that no variant always comes first
            int v = r % 2 ? NUM_COMPARED - 1 - i : i;
            add(&times[v], model_step(&models[v]));
        }
    }
    double folded = median_ratio(&times[FOLDED], &times[BASELINE]), unified = median_ratio(&times[UNIFIED], &times[BASELINE]);
    double base_bytes = (double)models[BASELINE].bytes;
    printf("%s, B=%d, T=%d, %d rounds\n", s->name, s->batch, s->seq_len, rounds);
    for (int v = 0; v < NUM_COMPARED; v++) {
        printf("  %-10s %10.4f s/step   over baseline: time %.4f, memory %.4f (less is better)\n", compared[v], median(&times[v]),
               median_ratio(&times[v], &times[BASELINE]), (double)models[v].bytes / base_bytes);
        model_free(&models[v]);
    }
    printf("  the extra norms of DNP alone (unified over hg+dp+or): time %.4f\n", median_ratio(&times[UNIFIED], &times[FOLDED]));
    fflush(stdout);
    add_check(folded, 1, 1.01, "%s: step time, hg+dp+or / baseline", s->name);
    add_check(unified, 1, 1.05, "%s: step time, unified / baseline", s->name);
    return folded;
}

static void bench_variants(void) {
    int rounds = settings.smoke ? 1 : settings.quick ? 3 : 15;
    double small = variants_compare(&shape_small, rounds), large = NAN;
    if (settings.quick) { printf("%s: left out by --quick\n", shape_124m.name); }
    else { large = variants_compare(&shape_124m, settings.smoke ? 1 : 11); }
    set_headline(HG_DP_OR, "%.4f", fmax(small, large)); // fmax passes over a NaN
}

// ----------------------------------------------------------------------------------------------------
// One thread against two.

static double threads_compare(const Shape *s, int rounds) {
    Model model;
    Series times[2];
    memset(times, 0, sizeof times);
    model_build(&model, s, "baseline");
    model_step(&model);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < 2; i++) {
            use_threads(1 + i);
            add(&times[i], model_step(&model));
            settle(0);
        }
    }
    double speedup = median_ratio(&times[0], &times[1]);
    printf("%-12s 1 thread %.4f s/step, 2 threads %.4f s/step, speed-up %.3f (more is better, 2 is perfect), %d rounds\n", s->name,
           median(&times[0]), median(&times[1]), speedup, rounds);
    fflush(stdout);
    add_check(speedup, 0, 1.8, "%s: step time, 1 thread / 2 threads", s->name);
    use_threads(settings.threads);
    model_free(&model);
    return speedup;
}

static void bench_threads(void) {
    int cores = 1;
#ifdef _OPENMP
    cores = omp_get_num_procs();
#endif
    if (cores < 2) {
        printf("not measured: one core, or no OpenMP\n");
        set_headline(SPEEDUP_2, "not measured: one core, or no OpenMP");
        return;
    }
    int rounds = settings.smoke ? 1 : settings.quick ? 2 : 7;
    double large = threads_compare(&shape_124m, rounds), small = settings.quick ? large : threads_compare(&shape_small, rounds);
    set_headline(SPEEDUP_2, "%.3f", fmin(large, small));
}

// ----------------------------------------------------------------------------------------------------
// The parts of a step. The twin of this program, built with -finstrument-functions, has a call at the entry and the exit
// of every function. The two hooks below keep a stack of the functions of one table, and give the time between two calls
// to the innermost. Only the main thread counts: it takes part in all parallel regions and waits for their end.
//
// That a part doesn't speed up is no proof that it is serial: it may wait for memory. So the CPU time of all threads is
// taken as well. The twin runs with OMP_WAIT_POLICY=passive, where waiting threads sleep; then CPU time over time is the
// number of threads at work, w, and of N threads' time the share (N - w) / (N - 1) went by with one at work.

#ifdef BENCH_PROFILE
typedef struct Part { void *function; const char *name; double time[2], cpu[2]; Series times[2], cpus[2]; } Part;
#define NO_TIMES {0, 0}, {0, 0}, {{{0}, 0}, {{0}, 0}}, {{{0}, 0}, {{0}, 0}}
#define PART(function) {(void *)(uintptr_t)function, #function, NO_TIMES}
static Part parts[] = {
    {NULL, "the rest", NO_TIMES}, // bottom of the stack
    PART(matmul_forward), PART(matmul_backward), PART(attention_forward), PART(attention_backward),
    PART(rmsnorm_forward), PART(rmsnorm_backward), PART(site_norm_forward), PART(site_norm_backward),
    PART(rope), PART(swiglu_forward), PART(swiglu_backward), PART(residual_forward),
    PART(embedding_forward), PART(embedding_backward), PART(head_loss), PART(classifier),
    PART(reparameterize_forward), PART(reparameterize_backward), PART(gpt_zero_grad), PART(gradient_norm), PART(adamw_update),
};
static __thread int profiling;  // 1 in the main thread, while a step is timed
static int part_column;         // 0: one thread, 1: all threads
static int part_stack[64], part_depth;
static double part_since, part_cpu_since;

#define NOT_PROFILED __attribute__((no_instrument_function))
NOT_PROFILED static double profile_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
NOT_PROFILED static int find_part(const void *function) {
    for (int i = 1; i < COUNT(parts); i++) { if (parts[i].function == function) { return i; } }
    return 0;
}
NOT_PROFILED static void part_account(void) {
    double now = profile_clock(CLOCK_MONOTONIC), cpu_now = profile_clock(CLOCK_PROCESS_CPUTIME_ID);
    Part *part = &parts[part_stack[part_depth]];
    part->time[part_column] += now - part_since;
    part->cpu[part_column] += cpu_now - part_cpu_since;
    part_since = now;
    part_cpu_since = cpu_now;
}
NOT_PROFILED void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    if (!profiling) { return; }
    int part = find_part(function);
    if (!part || part_depth + 1 == COUNT(part_stack)) { return; }
    part_account();
    part_stack[++part_depth] = part;
}
NOT_PROFILED void __cyg_profile_func_exit(void *function, void *caller) {
    (void)caller;
    if (!profiling || !part_depth || find_part(function) != part_stack[part_depth]) { return; }
    part_account();
    part_depth--;
}

static void profile_step(Model *model, int column) {
    for (int i = 0; i < COUNT(parts); i++) { parts[i].time[column] = parts[i].cpu[column] = 0; }
    part_column = column;
    part_since = profile_clock(CLOCK_MONOTONIC);
    part_cpu_since = profile_clock(CLOCK_PROCESS_CPUTIME_ID);
    profiling = 1;
    model_step(model);
    profiling = 0;
    part_account();
    for (int i = 0; i < COUNT(parts); i++) {
        add(&parts[i].times[column], parts[i].time[column]);
        add(&parts[i].cpus[column], parts[i].cpu[column]);
    }
}

static int by_time(const void *a, const void *b) {
    double x = median(&((const Part *)a)->times[1]), y = median(&((const Part *)b)->times[1]);
    return (x < y) - (x > y);
}

// Child: the table of one shape. Its result: seconds a step on all threads, and the largest serial share of a part.
static int parts_child(const Shape *s, int threads, int rounds) {
    Model model;
    model_build(&model, s, "baseline");
    model_step(&model);
    for (int r = 0; r < rounds; r++) {
        for (int column = 0; column < 2; column++) {
            use_threads(column ? threads : 1);
            profile_step(&model, column);
        }
    }
    double total[2] = {0, 0}, worst = 0;
    const char *which = "none";
    for (int i = 0; i < COUNT(parts); i++) { for (int c = 0; c < 2; c++) { total[c] += median(&parts[i].times[c]); } }
    qsort(parts, COUNT(parts), sizeof parts[0], by_time);
    printf("%s, medians of %d steps; a part has the time of all that it calls but other parts\n", s->name, rounds);
    printf("  %-24s %10s %10s %9s %10s %10s %9s\n", "", "1 thread", "N threads", "", "", "threads", "serial");
    printf("  %-24s %10s %10s %9s %10s %10s %9s\n", "", "ms", "ms", "share", "speed-up", "at work", "share");
    for (int i = 0; i < COUNT(parts); i++) {
        double one = median(&parts[i].times[0]), all = median(&parts[i].times[1]), share = all / total[1];
        if (all < 1e-6) { continue; }
        double at_work = fmin(threads, fmax(1, median_ratio(&parts[i].cpus[1], &parts[i].times[1])));
        double serial = threads > 1 ? share * (threads - at_work) / (threads - 1) : share;
        printf("  %-24s %10.3f %10.3f %8.2f%% %10.2f %10.2f %8.2f%%\n", parts[i].name, 1000 * one, 1000 * all, 100 * share, one / all, at_work, 100 * serial);
        if (serial > worst) { worst = serial; which = parts[i].name; }
    }
    printf("  %-24s %10.3f %10.3f %8.2f%% %10.2f\n", "step", 1000 * total[0], 1000 * total[1], 100.0, total[0] / total[1]);
    printf("  largest serial share: %s, %.2f%% of a step\n", which, 100 * worst);
    printf("result %.9g %.9g\n", total[1], worst);
    return 0;
}
#endif

static void bench_parts(void) {
    char threads[16], rounds[16];
    snprintf(threads, sizeof threads, "%d", settings.threads);
    snprintf(rounds, sizeof rounds, "%d", settings.smoke ? 1 : settings.quick ? 2 : 7);
    if (access(settings.profile, X_OK) != 0) { printf("not measured: found no %s, the bench with instrumented functions\n", settings.profile); return; }
    const char *const changes[] = {"OMP_WAIT_POLICY=passive", NULL};
    printf("baseline, N = %d; serial share: of a step, while one thread works and the others wait (also for a\n"
           "core that other programs use, and at a part's uneven end); clocks and sleeping threads cost a little: compare the last lines with the step times above\n", settings.threads);
    for (int i = 0; i < (settings.quick ? 1 : 2); i++) {
        const Shape *s = i ? &shape_small : &shape_124m;
        double result[3];
        const char *const argv[] = {settings.profile, "--parts", i ? "small" : "124m", threads, rounds, settings.smoke ? "--smoke" : NULL, NULL};
        if (child_run(argv, changes, result) != 2) { printf("%s: not measured: %s failed\n", s->name, settings.profile); continue; }
        if (settings.threads > 1) { add_check(100 * result[1], 1, 3, "%s: largest serial share of a part, %% of a step", s->name); }
    }
}

// ----------------------------------------------------------------------------------------------------
// Peak memory of a process that trains, against what --estimate says.

static int memory_child(const Shape *s, const char *variant) {
    Model model;
    model_build(&model, s, variant);
    model_step(&model);
    model_step(&model);
    printf("result %.0f %.0f\n", peak_memory(), (double)model.bytes);
    model_free(&model);
    return 0;
}

static void bench_memory(void) {
    printf("%-24s %14s %14s %22s\n", "MiB", "measured peak", "--estimate", "estimate / measured");
    for (int i = 0; i < 4; i++) {
        const Shape *s = i / 2 ? &shape_small : &shape_124m;
        const char *variant = compared[i % 2 ? UNIFIED : BASELINE];
        double result[3];
        if (settings.quick && i > 0) { continue; }
        const char *const argv[] = {settings.self, "--memory", i / 2 ? "small" : "124m", variant, settings.smoke ? "--smoke" : NULL, NULL};
        if (child_run(argv, same_environment, result) != 2 || result[0] <= 0) { printf("%s: not measured: the system doesn't tell\n", s->name); continue; }
        printf("%-11s %-12s %14.1f %14.1f %22.3f\n", s->name, variant, result[0] / (1 << 20), result[1] / (1 << 20), result[1] / result[0]);
        add_check(100 * fabs(result[1] / result[0] - 1), 1, 10, "%s, %s: --estimate off from measured peak memory, %%", s->name, variant);
    }
}

// ----------------------------------------------------------------------------------------------------

static void print_machine(void) {
    FILE *info = fopen("/proc/cpuinfo", "r");
    char line[512], cpu[256] = "unknown CPU";
    double load[3] = {0, 0, 0};
    while (info && fgets(line, sizeof line, info)) { if (sscanf(line, "model name : %255[^\n]", cpu) == 1) { break; } }
    if (info) { fclose(info); }
    printf("machine: %s, %ld cores, vectors of %d bits, %.1f GiB; compiler %s; %d threads\n", cpu, sysconf(_SC_NPROCESSORS_ONLN), 8 * (int)VEC_BYTES,
           (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / (1 << 30), __VERSION__, settings.threads);
    if (getloadavg(load, 3) > 0) {
        printf("load average before the bench: %.2f%s\n", load[0], load[0] > 0.5 ? " *** other work may be running: the figures below suffer from it ***" : "");
    }
}

// Runs what a child is started for. Returns its exit status, or -1 if this isn't a child.
static int child_main(int argc, char **argv) {
    const char *what = argc > 2 ? argv[1] : "";
    if (strcmp(what, "--openblas-server") == 0) { return openblas_server(atoi(argv[2])); }
    if (strcmp(what, "--attention-memory") == 0) { return attention_memory_child(atoi(argv[2])); }
    const Shape *s = argc > 2 && strcmp(argv[2], "small") == 0 ? &shape_small : &shape_124m;
    if (strcmp(what, "--memory") == 0 && argc > 3) { return memory_child(s, argv[3]); }
#ifdef BENCH_PROFILE
    if (strcmp(what, "--parts") == 0 && argc > 4) { return parts_child(s, atoi(argv[3]), atoi(argv[4])); }
    fprintf(stderr, "bench: this is the instrumented twin, which bench starts\n");
    return 2;
#endif
    return -1;
}

static void parse_flags(int argc, char **argv) {
    settings.self = argv[0];
    snprintf(settings.profile, sizeof settings.profile, "%s_profile", argv[0]);
    settings.threads = 1;
#ifdef _OPENMP
    settings.threads = omp_get_max_threads();
#endif
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(flag, "--quick") == 0) { settings.quick = 1; }
        else if (strcmp(flag, "--smoke") == 0) { continue; } // main has seen it
        else if (strcmp(flag, "--threads") == 0 && atoi(value) > 0) { settings.threads = atoi(value); i++; }
        else if (strcmp(flag, "--only") == 0 && *value) { settings.only = value; i++; }
        else if (strcmp(flag, "--profile") == 0 && *value) { snprintf(settings.profile, sizeof settings.profile, "%s", value); i++; }
        else { USAGE("bench: found \"%s\", expected --quick, --smoke, --threads N, --only SECTIONS or --profile FILE", flag); }
    }
}

int main(int argc, char **argv) {
    double began = seconds();
    signal(SIGPIPE, SIG_IGN); // a child that died is noticed when it doesn't answer
    for (int i = 1; i < argc; i++) { if (strcmp(argv[i], "--smoke") == 0) { settings.smoke = 1; } } // also of a child
    if (settings.smoke) {
        use_smoke_shapes();
        for (int i = 0; i < COUNT(gemms); i++) { gemms[i].M = (gemms[i].M + 15) / 16; gemms[i].N = (gemms[i].N + 15) / 16; }
    }
    int status = child_main(argc, argv);
    if (status >= 0) { return status; }
    parse_flags(argc, argv);
    use_threads(settings.threads);
    print_machine();
    if (settings.smoke) { printf("*** --smoke: tiny models and products under the names of the real ones: the figures mean nothing ***\n"); }
    if (section("gemm", "Matrix products, against OpenBLAS")) { bench_gemm(); }
    if (section("attention", "Attention: time against T^2, memory against T")) { bench_attention(); }
    if (section("steps", "Training steps, against PyTorch")) { bench_steps(); }
    if (section("variants", "What scale vectors cost")) { bench_variants(); }
    if (section("threads", "One thread against two")) { bench_threads(); }
    if (section("parts", "The parts of a step")) { bench_parts(); }
    if (section("memory", "Peak memory")) { bench_memory(); }
    print_results(began);
    return 0;
}
