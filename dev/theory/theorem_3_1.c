// Theorem 3.1: two scale vectors around W (dual placement, DP) make the loss fall at least as fast as one.
//
//     DP        W~ = diag(a) W diag(b)      from a = b = 1, W = 0, which keeps  a_i^2 - |row i of W|^2 = 1
//     standard  W~ = W diag(gamma)                                        and  b_j^2 - |column j of W|^2 = 1
//
// In own words: put the standard model at the same W~ with the same input vector, gamma = b, so that its W is
// diag(a) W. Then with G = dL/dW~
//
//     -dL/dt, standard = sum_ij b_j^2 G_ij^2       + sum_j (sum_i a_i W_ij G_ij)^2
//     -dL/dt, DP       = sum_ij a_i^2 b_j^2 G_ij^2 + sum_j (sum_i a_i W_ij G_ij)^2 + sum_i (sum_j W_ij b_j G_ij)^2
//
// and a_i^2 >= 1 does the rest: for every G, thus for every teacher and also off DP's own path.
//
// "The same effective state" matters. A standard model that came to the same W~ on its own, from gamma = 1 and W = 0,
// has another gamma, gamma_j^2 = (1 + sqrt(1 + 4 |W~_j|^2)) / 2 >= b_j^2, since nothing else shared the growth. Against
// that one DP is mostly faster but not always: once the large rows of a column are learned, a row that is still small
// has a_i = 1 and moves at b_j^2 < gamma_j^2. The program shows such a teacher: there even DP's loss itself ends above
// that of a standard model trained alone (*). So "at the same effective state" has to be read as above.
//
// Measured: -dL/dt = |dL/dtheta|^2 of the trainer's gradients for the three models, along DP's flow and at random states.
//
//   cc -O2 -std=gnu11 -Wall -Wextra dev/theory/theorem_3_1.c -o build/theorem_3_1 -lcjson -lpcre2-8 -lz -lm
#include "student.h"

enum { T31_RIGHT, T31_OWN_GAMMA, T31_SMALL_A }; // the mistakes that the test makes on purpose
enum { T31_ROWS = 4, T31_COLS = 6, T31_N = T31_ROWS * T31_COLS };

typedef struct T31Worst { double ratio, own, drift, by_hand, loss; } T31Worst;

// Largest drift of the two invariants of DP.
static double t31_drift(const Student *s) {
    double row[T31_ROWS] = {0}, column[T31_COLS] = {0}, worst = 0;
    for (int i = 0; i < T31_N; i++) {
        double w = student_W(s)[i];
        row[i / T31_COLS] += w * w;
        column[i % T31_COLS] += w * w;
    }
    for (int i = 0; i < T31_ROWS; i++) { worst = larger(worst, fabs(pow(student_gamma_a(s)[i], 2) - row[i] - 1)); }
    for (int j = 0; j < T31_COLS; j++) { worst = larger(worst, fabs(pow(student_gamma_b(s)[j], 2) - column[j] - 1)); }
    return worst;
}

// DP's -dL/dt by the formula above, for the state and G of the last gradient.
static double t31_formula(const Student *s) {
    const double *W = student_W(s), *a = student_gamma_a(s), *b = student_gamma_b(s);
    double sum = 0, row[T31_ROWS] = {0}, column[T31_COLS] = {0};
    for (int n = 0; n < T31_N; n++) {
        int i = n / T31_COLS, j = n % T31_COLS;
        sum += pow(a[i] * b[j] * s->G[n], 2);
        row[i] += W[n] * b[j] * s->G[n];
        column[j] += a[i] * W[n] * s->G[n];
    }
    return sum + squares(row, T31_ROWS) + squares(column, T31_COLS);
}

// Ratio of DP's fall to that of the standard model at the same W~: with gamma = b, and in `own` with its own gamma.
static double t31_ratio(Student *dp, Student *standard, double *own, double *by_hand) {
    double M[T31_N], gamma[T31_COLS], fall = loss_fall(dp);
    *by_hand = larger(*by_hand, fabs(t31_formula(dp) / fall - 1));
    memcpy(M, dp->map->w_eff, sizeof M);
    standard->teacher = dp->teacher;
    invariant_gamma(gamma, M, T31_ROWS, T31_COLS);
    standard_place(standard, M, gamma);
    *own = fall / loss_fall(standard);
    standard_place(standard, M, student_gamma_b(dp));
    return fall / loss_fall(standard);
}

// Along DP's flow from the initial state.
static void t31_flow(const double *teacher, int verbose, T31Worst *worst) {
    static const double times[] = {0.05, 0.2, 0.5, 1, 1.5, 2};
    Student dp, standard, alone;
    student_new(&dp, "--variant dp", T31_ROWS, T31_COLS, teacher);
    student_new(&standard, "", T31_ROWS, T31_COLS, teacher);
    student_new(&alone, "", T31_ROWS, T31_COLS, teacher);
    if (verbose) { printf("%6s %12s %12s %15s %15s %15s %14s\n", "t", "L of DP", "L standard*", "-dL/dt of DP", "DP/std, g = b", "DP/std, own g", "invariant err"); }
    for (int at = 0, step = 0; at < COUNT(times); at++) {
        double ratio = INFINITY, own = INFINITY;
        for (; step < (int)(times[at] / 0.0025 + 0.5); step++) {
            student_flow(&dp, 0.0025, 1);
            student_flow(&alone, 0.0025, 1);
            double other;
            ratio = t31_ratio(&dp, &standard, &other, &worst->by_hand);
            own = smaller(own, other);
            worst->ratio = smaller(worst->ratio, ratio);
            worst->own = smaller(worst->own, other);
        }
        double loss = student_gradient(&dp, NULL), drift = t31_drift(&dp), fall = loss_fall(&dp), lone = student_gradient(&alone, NULL);
        worst->drift = larger(worst->drift, drift);
        worst->loss = larger(worst->loss, loss / lone);
        ratio = t31_ratio(&dp, &standard, &own, &worst->by_hand);
        if (verbose) { printf("%6.2f %12.4e %12.4e %15.4e %15.4f %15.4f %14.1e\n", times[at], loss, lone, fall, ratio, own, drift); }
    }
}

// At random states that keep the invariants, under random teachers: every direction of G.
static double t31_random(int mistake, double *own, double *by_hand) {
    enum { STATES = 2000 };
    double teacher[T31_N] = {0}, least = INFINITY;
    Random random = random_from(31);
    Student dp, standard;
    student_new(&dp, "--variant dp", T31_ROWS, T31_COLS, teacher);
    student_new(&standard, "", T31_ROWS, T31_COLS, teacher);
    for (int state = 0; state < STATES; state++) {
        double row[T31_ROWS] = {0}, column[T31_COLS] = {0}, other, *W = student_W(&dp);
        gaussians(W, T31_N, 0.7, &random);
        for (int n = 0; n < T31_N; n++) { row[n / T31_COLS] += W[n] * W[n]; column[n % T31_COLS] += W[n] * W[n]; }
        for (int i = 0; i < T31_ROWS; i++) { vector_theta(&dp, dp.map->gamma_a)[i] = mistake == T31_SMALL_A ? 0.5 : sqrt(1 + row[i]); }
        for (int j = 0; j < T31_COLS; j++) { vector_theta(&dp, dp.map->gamma_b)[j] = sqrt(1 + column[j]); }
        reparameterize_forward(&dp.gpt);
        for (int n = 0; n < T31_N; n++) { teacher[n] = dp.map->w_eff[n] + gaussian_next(&random); }
        least = smaller(least, t31_ratio(&dp, &standard, &other, by_hand));
        *own = smaller(*own, other);
    }
    return least;
}

int theorem_3_1(int verbose, int mistake) {
    enum { TEACHERS = 6 };
    double teacher[T31_N] = {0}, random_own = INFINITY, by_hand = 0;
    T31Worst worst = {INFINITY, INFINITY, 0, 0, 0}, lopsided = {INFINITY, INFINITY, 0, 0, 0};
    if (verbose) { printf("theorem 3.1: fall of the loss at the same effective weights, DP over standard; *: standard from its own start\nW* 4x6, entries N(0, 0.5^2)\n"); }
    for (uint64_t seed = 1; seed <= TEACHERS; seed++) {
        Random random = random_from(seed);
        gaussians(teacher, T31_N, 0.5, &random);
        t31_flow(teacher, verbose && seed == 1, &worst);
    }
    for (int j = 0; j < T31_COLS; j++) { teacher[j] = j ? 0 : 6; teacher[T31_COLS + j] = j ? 0 : 0.1; teacher[2 * T31_COLS + j] = teacher[3 * T31_COLS + j] = 0; }
    if (verbose) { printf("a lopsided teacher: its first column is (6, 0.1, 0, 0), all else 0\n"); }
    t31_flow(teacher, verbose, &lopsided);
    double random_ratio = t31_random(mistake, &random_own, &by_hand);
    double least = smaller(smaller(worst.ratio, lopsided.ratio), random_ratio), drift = larger(worst.drift, lopsided.drift);
    if (mistake == T31_OWN_GAMMA) { least = smaller(smaller(worst.own, lopsided.own), random_own); }
    by_hand = larger(larger(by_hand, worst.by_hand), lopsided.by_hand);
    int holds = least >= 1 - 1e-9 && drift < 1e-6 && by_hand < 1e-9 && worst.loss < 1;
    if (verbose) {
        printf("least DP/std with g = b: %.4f on the flow of %d teachers, %.4f on the lopsided one, %.4f at 2000 random states\n"
               "least DP/std, own gamma: %.4f, %.4f, %.4f: may be below 1, so that reading is not the theorem's\n",
               worst.ratio, TEACHERS, lopsided.ratio, random_ratio, worst.own, lopsided.own, random_own);
        printf("%s: least ratio %.6f, not below 1; formula within %.1e, invariants within %.1e, largest L of DP / L standard %.4f\n",
               holds ? "holds" : "FAILS", least, by_hand, drift, worst.loss);
    }
    return !holds;
}

#ifndef TESTING_THEORY
int main(void) { return theorem_3_1(1, T31_RIGHT); }
#endif
