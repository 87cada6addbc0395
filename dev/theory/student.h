// A linear student and its linear teacher, the setting of the paper's theorems.
//
// Teacher y = W* x, student y = W~ x, x ~ N(0, I), squared loss. As E[x x^T] = I the expectation has a closed form:
//
//     L = 1/2 E |(W~ - W*) x|^2 = 1/2 tr((W~ - W*) E[x x^T] (W~ - W*)^T) = 1/2 |W~ - W*|_F^2,    G = dL/dW~ = W~ - W*
//
// Everything between theta and W~ is the trainer's: the student is a GPT without blocks, whose lm_head (rows = V,
// cols = C) is the linear map. reparameterize_forward gives W~, and reparameterize_backward turns G into dL/dtheta.
// So what the programs of this folder measure is train_gpt2.c; a mistake in its room 3 shows here.
//
// student.h is included once, by a program of this folder or by dev/test/test_theory.c, which includes them all.
#ifndef STUDENT_H
#define STUDENT_H
#define TESTING
#ifndef REAL
#define REAL double
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // the trainer uses them all; a theorem needs only some
#ifndef _OPENMP
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // built without OpenMP, these small programs are several times faster
#endif
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wformat-truncation"
#endif
#include "../../train_gpt2.c"

_Static_assert(sizeof(real) == sizeof(double), "the theorems are checked in double: build with -DREAL=double");

enum { MAX_THETA = 256 };           // numbers in theta of a student, its idle embedding included

typedef struct Student {
    GPT gpt;
    LinearMap *map;                 // lm_head: W (rows, cols) and its scale vectors
    int rows, cols;
    const double *teacher;          // W* (rows, cols)
    double G[MAX_THETA];            // W~ - W* of the last student_gradient
} Student;

// ---- random numbers: Box-Muller on the trainer's counter-based generator
typedef struct Random { uint64_t stream, count; } Random;
static Random random_from(uint64_t seed) { return (Random){random_u64(seed), 0}; }
static double gaussian_next(Random *r) {
    double radius = sqrt(-2 * log(random_uniform(r->stream + r->count))), turn = random_uniform(r->stream + r->count + 1);
    r->count += 2;
    return radius * cos(2 * M_PI * turn);
}
static void gaussians(double *out, int n, double std, Random *r) {
    for (int i = 0; i < n; i++) { out[i] = std * gaussian_next(r); }
}

// ---- sums and extremes; what is not a number stays so, that no check passes by it
static double larger(double a, double b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
static double smaller(double a, double b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
static double dot_of(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}
static double squares(const double *a, int n) { return dot_of(a, a, n); }
static double largest_difference(const double *a, const double *b, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++) { worst = larger(worst, fabs(a[i] - b[i])); }
    return worst;
}

// ---- models
static void config_from_flags(Config *cfg, const char *flags) {
    const char *argv[64] = {"theory"};
    int argc = 1;
    char *text = text_format("%s", flags), *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word && argc < 64; word = strtok_r(NULL, " ", &save)) { argv[argc++] = word; }
    config_defaults(cfg);
    config_parse_flags(cfg, argc, argv);
    presets_apply(cfg);
    config_resolve(cfg);
    free(text);
#ifdef _OPENMP
    omp_set_num_threads(1); // a handful of numbers: a team would only wait for each other
#endif
}

// Starts at the theorems' initial values: scale vectors 1, W = 0. cols must be even (the trainer's head size).
static void student_new(Student *s, const char *flags, int rows, int cols, const double *teacher) {
    Config cfg;
    char *all = text_format("--layers 1 --heads 1 --hidden 1 --seq-len 1 --batch 1 --vocab %d --channels %d %s", rows, cols, flags);
    config_from_flags(&cfg, all);
    free(all);
    memset(s, 0, sizeof *s);
    cfg.layers = 0;
    gpt_build(&s->gpt, &cfg);
    if (s->gpt.num_theta > MAX_THETA) { FAIL("found a student of %d numbers, expected at most %d", (int)s->gpt.num_theta, MAX_THETA); }
    s->gpt.acts = (LayerActs *)calloc(1, sizeof(LayerActs));
    gpt_allocate(&s->gpt, 1, 1);
    s->map = gpt_head(&s->gpt);
    s->rows = rows;
    s->cols = cols;
    s->teacher = teacher;
    gpt_init(&s->gpt);
    memset(s->gpt.theta, 0, (size_t)(2 * rows * cols) * sizeof(double)); // the embedding and W come first
    reparameterize_forward(&s->gpt);
}

static double *student_W(const Student *s) { return s->gpt.theta + s->gpt.params[s->map->weight].offset; }
static double *student_gamma_b(const Student *s) { return gpt_gamma(&s->gpt, s->map->gamma_b); } // effective values
static double *student_gamma_a(const Student *s) { return gpt_gamma(&s->gpt, s->map->gamma_a); }
static double *vector_theta(const Student *s, int param) { return s->gpt.theta + s->gpt.params[param].offset; }

// dL/dtheta into gpt.grads, with `extra` (rows x cols, or NULL) added to G: the noise of a stochastic gradient.
static double student_gradient(Student *s, const double *extra) {
    int n = s->rows * s->cols;
    reparameterize_forward(&s->gpt);
    for (int i = 0; i < n; i++) { s->G[i] = s->map->w_eff[i] - s->teacher[i]; }
    gpt_zero_grad(&s->gpt);
    for (int i = 0; i < n; i++) { s->map->dw_eff[i] = s->G[i] + (extra ? extra[i] : 0); }
    reparameterize_backward(&s->gpt);
    return 0.5 * squares(s->G, n);
}

// Under gradient flow dtheta/dt = -dL/dtheta the loss falls at the rate -dL/dt = |dL/dtheta|^2.
static double loss_fall(Student *s) {
    student_gradient(s, NULL);
    return squares(s->gpt.grads, (int)s->gpt.num_theta);
}

// Gradient flow by `steps` steps dt of the classical Runge-Kutta method: the error is of order dt^4.
static void student_flow(Student *s, double dt, int steps) {
    int n = (int)s->gpt.num_theta;
    double *theta = s->gpt.theta, start[MAX_THETA], sum[MAX_THETA];
    static const double at[4] = {0, 0.5, 0.5, 1}, weight[4] = {1 / 6.0, 1 / 3.0, 1 / 3.0, 1 / 6.0};
    for (int step = 0; step < steps; step++) {
        double slope[MAX_THETA] = {0};
        memcpy(start, theta, (size_t)n * sizeof(double));
        memset(sum, 0, sizeof sum);
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < n; i++) { theta[i] = start[i] + at[k] * dt * slope[i]; }
            student_gradient(s, NULL);
            for (int i = 0; i < n; i++) { slope[i] = -s->gpt.grads[i]; sum[i] += weight[k] * slope[i]; }
        }
        for (int i = 0; i < n; i++) { theta[i] = start[i] + dt * sum[i]; }
    }
    reparameterize_forward(&s->gpt);
}

// The standard model (one gamma before W, flags "") placed at the effective weights M with a given gamma: w = M / gamma.
static void standard_place(Student *standard, const double *M, const double *gamma) {
    double *W = student_W(standard), *b = vector_theta(standard, standard->map->gamma_b);
    for (int j = 0; j < standard->cols; j++) {
        b[j] = gamma[j];
        for (int i = 0; i < standard->rows; i++) { W[i * standard->cols + j] = M[i * standard->cols + j] / gamma[j]; }
    }
}

// The gamma with which the standard model passes M if it came from gamma = 1, W = 0: gamma_j^2 - |w_j|^2 = 1 and
// gamma_j |w_j| = |M_j| give gamma_j^2 = (1 + sqrt(1 + 4 |M_j|^2)) / 2.
static void invariant_gamma(double *gamma, const double *M, int rows, int cols) {
    for (int j = 0; j < cols; j++) {
        double size = 0;
        for (int i = 0; i < rows; i++) { size += M[i * cols + j] * M[i * cols + j]; }
        gamma[j] = sqrt((1 + sqrt(1 + 4 * size)) / 2);
    }
}

#pragma GCC diagnostic pop
#endif
