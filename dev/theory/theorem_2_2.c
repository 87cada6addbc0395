// Theorem 2.2: a scale vector makes the linear student learn faster, though it adds nothing that W could not express.
//
//     with     W~ = W diag(gamma)      without     W~ = W            gradient flow from gamma = 1, W = 0
//
// In own words: column j of W~ moves by -P_j G_j with P_j = gamma_j^2 I + w_j w_j^T; without gamma, P is I. The flow
// keeps gamma_j^2 - |w_j|^2 at its initial 1, so gamma_j^2 >= 1 and P_j >= I: L_with(t) < L_without(t) for t > 0. (The
// teacher must not be 0.) As W~_j stays along w*_j, its length s obeys ds/dt = sqrt(1 + 4 s^2) (|w*_j| - s).
//
// Measured: both losses after every step dt, the drift of the invariant, P against a finite step of theta, and the
// error of the integrator against the exact L_without = 1/2 e^(-2t) |W*|^2.
//
//   cc -O2 -std=gnu11 -Wall -Wextra dev/theory/theorem_2_2.c -o build/theorem_2_2 -lcjson -lpcre2-8 -lz -lm
#include "student.h"

enum { T22_RIGHT, T22_NO_OUTER_PRODUCT, T22_FROZEN_GAMMA }; // the mistakes that the test makes on purpose

// Largest | dW~/dt + P G | over the largest |P G|. dW~/dt is a central difference along -dtheta, exact as W~ is quadratic.
static double t22_preconditioner_error(Student *s, int mistake) {
    const double h = 1e-4;
    int rows = s->rows, cols = s->cols, n = rows * cols, size = (int)s->gpt.num_theta;
    double ahead[MAX_THETA], moved[MAX_THETA], expected[MAX_THETA], start[MAX_THETA], largest = 0;
    student_gradient(s, NULL);
    const double *W = student_W(s), *gamma = student_gamma_b(s);
    for (int j = 0; j < cols; j++) {
        double along = 0; // w_j . G_j
        for (int i = 0; i < rows; i++) { along += W[i * cols + j] * s->G[i * cols + j]; }
        if (mistake == T22_NO_OUTER_PRODUCT) { along = 0; }
        for (int i = 0; i < rows; i++) {
            expected[i * cols + j] = -(gamma[j] * gamma[j] * s->G[i * cols + j] + W[i * cols + j] * along);
            largest = larger(largest, fabs(expected[i * cols + j]));
        }
    }
    memcpy(start, s->gpt.theta, (size_t)size * sizeof(double));
    for (int i = 0; i < size; i++) { s->gpt.theta[i] = start[i] - h * s->gpt.grads[i]; }
    reparameterize_forward(&s->gpt);
    memcpy(ahead, s->map->w_eff, (size_t)n * sizeof(double));
    for (int i = 0; i < size; i++) { s->gpt.theta[i] = start[i] + h * s->gpt.grads[i]; }
    reparameterize_forward(&s->gpt);
    for (int i = 0; i < n; i++) { moved[i] = (ahead[i] - s->map->w_eff[i]) / (2 * h); }
    memcpy(s->gpt.theta, start, (size_t)size * sizeof(double));
    reparameterize_forward(&s->gpt);
    return largest_difference(moved, expected, n) / largest;
}

// Largest | gamma_j^2 - |w_j|^2 - 1 |
static double t22_drift(const Student *s) {
    double worst = 0;
    for (int j = 0; j < s->cols; j++) {
        double q = student_gamma_b(s)[j] * student_gamma_b(s)[j] - 1;
        for (int i = 0; i < s->rows; i++) { q -= student_W(s)[i * s->cols + j] * student_W(s)[i * s->cols + j]; }
        worst = larger(worst, fabs(q));
    }
    return worst;
}

typedef struct T22Worst { double margin, drift, preconditioner, integrator; } T22Worst; // margin: least ln(L_without / L_with)

static void t22_teacher(uint64_t seed, int verbose, int mistake, T22Worst *worst) {
    enum { ROWS = 4, COLS = 6, STEPS = 800 };
    const double dt = 0.005;
    static const int shown[] = {1, 10, 50, 100, 200, 400, 800};
    double teacher[ROWS * COLS];
    Random random = random_from(seed);
    gaussians(teacher, ROWS * COLS, 0.7, &random);
    Student with, without;
    student_new(&with, "", ROWS, COLS, teacher);
    student_new(&without, "--variant noscale", ROWS, COLS, teacher);
    double start = student_gradient(&without, NULL);
    if (verbose) { printf("%8s %14s %14s %12s %14s %14s\n", "t", "L without", "L with", "with/without", "invariant err", "P err"); }
    for (int step = 1, next = 0; step <= STEPS; step++) {
        student_flow(&without, dt, 1);
        student_flow(&with, dt, 1);
        if (mistake == T22_FROZEN_GAMMA) {
            for (int j = 0; j < COLS; j++) { vector_theta(&with, with.map->gamma_b)[j] = 1; }
        }
        double exact = start * exp(-2 * dt * step), l0 = student_gradient(&without, NULL), l1 = student_gradient(&with, NULL);
        double drift = t22_drift(&with);
        worst->margin = smaller(worst->margin, log(l0 / l1));
        worst->integrator = larger(worst->integrator, fabs(l0 / exact - 1));
        worst->drift = larger(worst->drift, drift);
        if (step != shown[next]) { continue; }
        double error = step > 400 ? 0 : t22_preconditioner_error(&with, mistake); // later P G is lost in rounding
        worst->preconditioner = larger(worst->preconditioner, error);
        if (verbose) {
            printf("%8.3f %14.6e %14.6e %12.9f %14.1e ", dt * step, l0, l1, l1 / l0, drift);
            if (step > 400) { printf("%14s\n", "-"); } else { printf("%14.1e\n", error); }
        }
        if (next + 1 < COUNT(shown)) { next++; }
    }
}

// Returns 0 where the theorem holds in the numbers, 1 where it does not.
int theorem_2_2(int verbose, int mistake) {
    enum { TEACHERS = 8 };
    T22Worst worst = {INFINITY, 0, 0, 0};
    if (verbose) { printf("theorem 2.2: loss with and without a scale vector, gradient flow, W* 4x6, entries N(0, 0.7^2)\n"); }
    for (uint64_t seed = 1; seed <= TEACHERS; seed++) { t22_teacher(seed, verbose && seed == 1, mistake, &worst); }
    int holds = worst.margin > 10 * worst.integrator && worst.drift < 1e-7 && worst.preconditioner < 1e-6;
    if (verbose) {
        printf("%s: %d teachers, 800 steps each: least ln(L_without/L_with) %.1e (integrator error %.1e), invariant within %.1e, P within %.1e\n",
               holds ? "holds" : "FAILS", TEACHERS, worst.margin, worst.integrator, worst.drift, worst.preconditioner);
    }
    return !holds;
}

#ifndef TESTING_THEORY
int main(void) { return theorem_2_2(1, T22_RIGHT); }
#endif
