// Theorem 2.3: with weight decay on W, an Input-Norm scale vector needs decay as well, or it and the Hessian grow.
//
//     dtheta = -(dL/dtheta + lambda theta) dt + sqrt(eta) dN      SGD of learning rate eta as an SDE
//
// In own words: gamma_j -> c gamma_j, w_j -> w_j / c changes nothing in W~, so the loss does not hold gamma back.
// Decay on w alone shrinks w, and what is left of the gradient then makes gamma grow. With noise N on G = dL/dW~
//
//     d E(|gamma|^2 - |W|^2)/dt = 2 lambda E|W|^2 + eta E sum_j ( var(w_j . N_j) - gamma_j^2 tr var(N_j) )       (*)
//
// (the martingale parts cancel; with decay on gamma, - 2 lambda E|gamma|^2 is added.) Without noise, |w_j| -> s_j / gamma_j
// with s_j = |w*_j|, so d gamma_j^2/dt = 2 lambda s_j^2 / gamma_j^2: gamma_j^2 -> 2 s_j sqrt(lambda t), twice as large for
// four times the time, forever. The Hessian of column j has gamma_j^2 I on its diagonal and follows. With decay on gamma,
// |gamma|^2 + |W|^2 <= max(its start, |W*|^2 / (2 lambda)), as -4 <W~, W~ - W*> <= |W*|^2.
//
// The noise decides. A minibatch of one has gradient G x x^T + xi x^T:
//     minibatch  N = G Z, Z symmetric Gaussian with the covariance of x x^T - I. It dies with G, so the growth stays, as
//                long as gamma_j^2 is well below 2 / (eta (d + 1)): there E|G|^2 stops to shrink, SGD becomes unstable.
//     label      the noise xi of the labels adds sigma Xi, which never dies: the last term of (*), about
//                -eta sigma^2 rows gamma_j^2, pulls gamma back, and decay on W alone does NOT make it diverge.
// The program checks the theorem under the first, and shows where it ends: at a larger eta, and under the second.
//
// Measured over seeds by Euler-Maruyama, each step being the trainer's own SGD step with --wd-scale all or none:
// E|gamma|^2; lambda_max (power iteration), trace and Frobenius norm of the Hessian of the loss; both sides of (*).
//
//   cc -O2 -std=gnu11 -Wall -Wextra dev/theory/theorem_2_3.c -o build/theorem_2_3 -lcjson -lpcre2-8 -lz -lm
#include "student.h"

enum { T23_RIGHT, T23_WRONG_SIGN, T23_NO_DECAY_OF_GAMMA }; // the mistakes that the test makes on purpose
enum { T23_ROWS = 3, T23_COLS = 4, T23_SEEDS = 6, T23_TIMES = 4 };
static const double t23_times[T23_TIMES] = {4, 16, 64, 256};
static const double t23_dt = 0.01, t23_lambda = 0.2;

// What a run is made of: decay of gamma (--wd-scale all or none), of W; eta 0: no noise at all; label noise.
typedef struct T23Case { const char *title; int decay; double eta, sigma, lambda; } T23Case;

typedef struct T23Row { double gamma2, W2, max, trace, frobenius; } T23Row; // means over seeds
typedef struct T23Run { T23Row at[T23_TIMES]; double left, right, gross; } T23Run; // both sides of (*), integrated; gross: its terms by size

// Hessian of the loss by central differences of the trainer's gradient, over the numbers of W and gamma.
static void t23_hessian(Student *s, T23Row *row, Random *random) {
    enum { N = T23_ROWS * T23_COLS + T23_COLS };
    double H[N][N], v[N], Hv[N], *theta = s->gpt.theta, *first = student_W(s), trace = 0, frobenius = 0, max = 0;
    const double h = 1e-4;
    double *grads = s->gpt.grads + (first - theta);                        // gamma follows W in theta
    for (int i = 0; i < N; i++) {
        double keep = first[i];
        first[i] = keep + h;
        student_gradient(s, NULL);
        for (int j = 0; j < N; j++) { H[i][j] = grads[j]; }
        first[i] = keep - h;
        student_gradient(s, NULL);
        for (int j = 0; j < N; j++) { H[i][j] = (H[i][j] - grads[j]) / (2 * h); frobenius += H[i][j] * H[i][j]; }
        trace += H[i][i];
        first[i] = keep;
    }
    gaussians(v, N, 1, random);
    for (int iteration = 0; iteration < 300; iteration++) {                // power iteration: v <- Hv / |Hv|
        double size = sqrt(squares(v, N));
        for (int i = 0; i < N; i++) { v[i] /= size; }
        for (int i = 0; i < N; i++) { Hv[i] = dot_of(H[i], v, N); }
        max = dot_of(v, Hv, N);                                            // Rayleigh quotient
        memcpy(v, Hv, sizeof v);
    }
    row->max += max / T23_SEEDS;
    row->trace += trace / T23_SEEDS;
    row->frobenius += sqrt(frobenius) / T23_SEEDS;
}

// Noise of one step, N sqrt(eta / dt), and the last term of (*).
static double t23_noise(Student *s, double *noise, double eta, double sigma, Random *random) {
    double Z[T23_COLS][T23_COLS], scale = sqrt(eta / t23_dt), term = 0, all = squares(s->G, T23_ROWS * T23_COLS);
    const double *G = s->G, *W = student_W(s), *gamma = student_gamma_b(s);
    for (int i = 0; i < T23_COLS; i++) { // off the diagonal of variance 1, on it of variance 2: as x x^T - I has them
        for (int j = 0; j <= i; j++) { Z[i][j] = Z[j][i] = (i == j ? M_SQRT2 : 1) * gaussian_next(random); }
    }
    for (int j = 0; j < T23_COLS; j++) {
        double Gj2 = 0, wj2 = 0, wG = 0, GW2 = 0;
        for (int i = 0; i < T23_ROWS; i++) {
            double sum = sigma > 0 ? sigma * gaussian_next(random) : 0;
            for (int k = 0; k < T23_COLS; k++) { sum += G[i * T23_COLS + k] * Z[k][j]; }
            noise[i * T23_COLS + j] = scale * sum;
            Gj2 += G[i * T23_COLS + j] * G[i * T23_COLS + j];
            wj2 += W[i * T23_COLS + j] * W[i * T23_COLS + j];
            wG += W[i * T23_COLS + j] * G[i * T23_COLS + j];
        }
        for (int k = 0; k < T23_COLS; k++) { // |G^T w_j|^2
            double sum = 0;
            for (int i = 0; i < T23_ROWS; i++) { sum += G[i * T23_COLS + k] * W[i * T23_COLS + j]; }
            GW2 += sum * sum;
        }
        double along = GW2 + wG * wG + sigma * sigma * wj2, total = all + Gj2 + sigma * sigma * T23_ROWS;
        term += eta * (along - gamma[j] * gamma[j] * total);
    }
    return term;
}

static void t23_simulate(T23Run *run, const double *teacher, const T23Case *c) {
    memset(run, 0, sizeof *run);
    for (int seed = 1; seed <= T23_SEEDS; seed++) {
        Student s;
        Random random = random_from((uint64_t)seed * 1000);
        student_new(&s, c->decay ? "--optimizer sgd --wd-scale all" : "--optimizer sgd --wd-scale none", T23_ROWS, T23_COLS, teacher);
        s.gpt.cfg.weight_decay = c->lambda;
        const double *gamma = student_gamma_b(&s), *W = student_W(&s);
        double noise[T23_ROWS * T23_COLS] = {0};
        int64_t step = 0;
        for (int at = 0; at < T23_TIMES; at++) {
            for (; step < (int64_t)(t23_times[at] / t23_dt + 0.5); step++) {
                double shrink_W = 2 * c->lambda * squares(W, T23_ROWS * T23_COLS), spread = 0;
                double shrink_gamma = c->decay ? 2 * c->lambda * squares(gamma, T23_COLS) : 0;
                student_gradient(&s, NULL);
                if (c->eta > 0) { spread = t23_noise(&s, noise, c->eta, c->sigma, &random); student_gradient(&s, noise); }
                run->right += (shrink_W - shrink_gamma + spread) * t23_dt / T23_SEEDS;
                run->gross += (fabs(shrink_W) + fabs(shrink_gamma) + fabs(spread)) * t23_dt / T23_SEEDS;
                optimizer_step(&s.gpt, step + 1, t23_dt, 1); // theta <- (1 - dt lambda) theta - dt dtheta
                reparameterize_forward(&s.gpt);
            }
            run->at[at].gamma2 += squares(gamma, T23_COLS) / T23_SEEDS;
            run->at[at].W2 += squares(W, T23_ROWS * T23_COLS) / T23_SEEDS;
            t23_hessian(&s, &run->at[at], &random);
        }
        run->left += (squares(gamma, T23_COLS) - squares(W, T23_ROWS * T23_COLS) - T23_COLS) / T23_SEEDS;
    }
}

static void t23_print(const char *title, const T23Run *run) {
    printf("%s\n%8s %12s %12s %12s %12s %12s\n", title, "t", "E|gamma|^2", "E|W|^2", "E lambda_max", "E trace", "E Frobenius");
    for (int at = 0; at < T23_TIMES; at++) {
        const T23Row *r = &run->at[at];
        printf("%8.0f %12.4f %12.4f %12.4f %12.4f %12.4f\n", t23_times[at], r->gamma2, r->W2, r->max, r->trace, r->frobenius);
    }
    printf("    both sides of (*), integrated to the end: %.3f and %.3f, terms of %.3f in all\n", run->left, run->right, run->gross);
}

// Least and largest factor between two times of a run, over the four measures.
static void t23_factors(const T23Run *run, int from, int to, double *least, double *largest) {
    const T23Row *a = &run->at[from], *b = &run->at[to];
    const double factors[4] = {b->gamma2 / a->gamma2, b->max / a->max, b->trace / a->trace, b->frobenius / a->frobenius};
    for (int i = 0; i < 4; i++) { *least = smaller(*least, factors[i]); *largest = larger(*largest, factors[i]); }
}

static double t23_mismatch(const T23Run *run) { return fabs(run->left - run->right) / run->gross; }

enum { T23_WITH, T23_WITHOUT, T23_STILL, T23_EDGE, T23_LABEL, T23_CASES };

int theorem_2_3(int verbose, int mistake) {
    T23Case cases[T23_CASES] = {
        {"decay on W and gamma, minibatch noise, eta 0.001", 1, 0.001, 0, t23_lambda},
        {"decay on W only, minibatch noise, eta 0.001", 0, 0.001, 0, t23_lambda},
        {"decay on W only, no noise (gradient flow)", 0, 0, 0, t23_lambda},
        {"beyond the theorem: decay on W only, minibatch noise, eta 0.02: unstable beyond gamma_j^2 = 20", 0, 0.02, 0, t23_lambda},
        {"beyond the theorem: decay on W only, minibatch and label noise, eta 0.001, sigma 5", 0, 0.001, 5, t23_lambda},
    };
    double teacher[T23_ROWS * T23_COLS];
    Random random = random_from(23);
    gaussians(teacher, T23_ROWS * T23_COLS, 1, &random);
    if (mistake == T23_NO_DECAY_OF_GAMMA) { cases[T23_WITH].decay = 0; }
    T23Run runs[T23_CASES];
    if (verbose) { printf("theorem 2.3: SGD as an SDE, W* %dx%d, lambda %g, dt %g, means of %d seeds\n", T23_ROWS, T23_COLS, t23_lambda, t23_dt, T23_SEEDS); }
    for (int i = 0; i < T23_CASES; i++) {
        if (mistake == T23_WRONG_SIGN) { cases[i].lambda = -t23_lambda / 40; }
        t23_simulate(&runs[i], teacher, &cases[i]);
        if (verbose) { t23_print(cases[i].title, &runs[i]); }
    }
    const T23Run *with = &runs[T23_WITH], *without = &runs[T23_WITHOUT], *still = &runs[T23_STILL];
    double bound = larger(T23_COLS, squares(teacher, T23_ROWS * T23_COLS) / (2 * t23_lambda)), size = 0, limit = 0;
    for (int at = 0; at < T23_TIMES; at++) { size = larger(size, with->at[at].gamma2 + with->at[at].W2); }
    for (int j = 0; j < T23_COLS; j++) { // 2 s_j sqrt(lambda t)
        double s2 = 0;
        for (int i = 0; i < T23_ROWS; i++) { s2 += teacher[i * T23_COLS + j] * teacher[i * T23_COLS + j]; }
        limit += 2 * sqrt(s2 * t23_lambda * t23_times[T23_TIMES - 1]);
    }
    double grows = INFINITY, settles = 0, unused = 0, least = INFINITY, balance = 0;
    for (int at = 2; at < T23_TIMES; at++) { t23_factors(without, at - 1, at, &grows, &unused); t23_factors(still, at - 1, at, &grows, &unused); }
    t23_factors(with, 2, 3, &least, &settles);
    for (int i = 0; i < T23_CASES; i++) { if (i != T23_EDGE) { balance = larger(balance, t23_mismatch(&runs[i])); } }
    double label = runs[T23_LABEL].at[3].gamma2 / runs[T23_LABEL].at[2].gamma2, off = fabs(still->at[3].gamma2 / limit - 1);
    int holds = grows > 1.6 && settles < 1.05 && least > 0.95 && size <= bound && off < 0.05 && label < 1.1 && balance < 0.05;
    if (verbose) {
        printf("%s: with decay on gamma the last 4x of time changes all measures by x%.3f..%.3f, |gamma|^2 + |W|^2 <= %.2f (bound %.2f); without, each 4x of time\n"
               "multiplies them by x%.2f or more, |gamma|^2 ends %.1f%% off sum 2 s sqrt(lambda t) = %.2f; with label noise x%.3f; (*) within %.2f%% of its terms\n",
               holds ? "holds" : "FAILS", least, settles, size, bound, grows, 100 * off, limit, label, 100 * balance);
    }
    return !holds;
}

#ifndef TESTING_THEORY
int main(void) { return theorem_2_3(1, T23_RIGHT); }
#endif
