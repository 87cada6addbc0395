// The preconditioner in the real GPT (section 3.4): training theta is training W~ by preconditioned descent.
//
// A small SGD step theta - lr dL/dtheta changes theta~ = psi(theta) to first order by -lr (dpsi dpsi^T) dL/dtheta~. For a
// linear map W~ = diag(a) W diag(b), a = phi(alpha, beta) and likewise b, with G = dL/dW~:
//
//     -dW~_ij/lr = a_i^2 G_ij b_j^2   +  (da_i) W_ij b_j  +  a_i W_ij (db_j)          = (P G)_ij
//                  what W does           what a does          what b does
//
//     da = Phi_a ga,  ga_i = sum_j G_ij W_ij b_j              Phi = dphi dphi^T of how the vector is made:
//     db = Phi_b gb,  gb_j = sum_i a_i G_ij W_ij                none  I
//          summed over all maps that share b                    OR    d r u u^T + ...  (theorem_3_2.c)
//                                                               ER    g g^T + diag(g) (I - 1 1^T/n) diag(g)
//
// So the rows of the paper's table 1 differ in a, b and Phi alone: HG in who is summed over in gb, AP has b = 1, DP both.
//
// Measured: a tiny GPT at a generic point, G from gpt_backward, P G by the formula above, written out with no help of
// the trainer's backward; then the trainer's own SGD step and reparameterize_forward. The deviation
// |(W~_old - W~_new)/lr - P G| / |P G| must be of first order: half as large for half the lr, and of second order after
// Richardson's 2 D(lr/2) - D(lr). The loss must fall by lr <G, P G> summed over everything: that is |dL/dtheta|^2.
//
//   cc -O2 -std=gnu11 -Wall -Wextra dev/theory/preconditioner.c -o build/preconditioner -lcjson -lpcre2-8 -lz -lm
#include "student.h"

enum { PRE_RIGHT, PRE_ONE_BRANCH, PRE_MATRIX_ONLY, PRE_OR_AS_NONE }; // the mistakes that the test makes on purpose

static GPT *pre_model(const char *variant) {
    Config cfg;
    GPT *m = (GPT *)calloc(1, sizeof(GPT));
    if (!m) { FAIL("out of memory"); }
    char *flags = text_format("--layers 2 --channels 8 --heads 2 --hidden 6 --vocab 10 --seq-len 5 --batch 2 --optimizer sgd --weight-decay 0 --variant %s", variant);
    config_from_flags(&cfg, flags);
    free(flags);
    gpt_build(m, &cfg);
    gpt_allocate(m, cfg.batch, cfg.seq_len);
    Random random = random_from(34);
    for (int i = 0; i < m->num_params; i++) { // away from gamma = 1 and beta = 0, where mistakes hide
        const Param *p = &m->params[i];
        int vector = p->role >= ROLE_GAMMA_B, exponent = cfg.reparam == REPARAM_ER;
        for (int64_t j = 0; j < p->rows * p->cols; j++) {
            m->theta[p->offset + j] = (vector && !exponent ? 1.2 : 0) + (vector ? 0.3 : 0.4) * gaussian_next(&random);
        }
    }
    for (int n = 0; n < cfg.batch * cfg.seq_len; n++) {
        m->inputs[n] = (int32_t)(10 * random_uniform(random.stream + random.count++));
        m->targets[n] = (int32_t)(10 * random_uniform(random.stream + random.count++));
    }
    reparameterize_forward(m);
    return m;
}

// out = Phi g for the scale vector of a table index.
static void pre_vector(const GPT *m, int param, const double *g, double *out, int mistake) {
    const Param *p = &m->params[param];
    const double *gamma = m->gamma + p->gamma, *alpha = m->theta + p->offset;
    int n = (int)p->cols, reparam = m->cfg.reparam;
    if (reparam == REPARAM_NONE || (reparam == REPARAM_OR && mistake == PRE_OR_AS_NONE)) { memcpy(out, g, (size_t)n * sizeof(double)); return; }
    double beta = m->theta[m->params[p->beta].offset];
    if (reparam == REPARAM_OR) { // along alpha: n r + rho (1 - r)^2; across: rho
        double size = squares(alpha, n), r = size / (size + n * NORM_EPS), rho = beta * beta * n / (size + n * NORM_EPS);
        double dot = dot_of(alpha, g, n) / size;
        for (int i = 0; i < n; i++) { out[i] = rho * g[i] + (n * r + rho * (1 - r) * (1 - r) - rho) * dot * alpha[i]; }
    } else {
        double dot = dot_of(gamma, g, n);
        for (int i = 0; i < n; i++) { out[i] = gamma[i] * dot + gamma[i] * (gamma[i] * g[i] - dot / n); }
    }
}

// P G of one map into PG (rows x cols). G[k] is dL/dW~ of map k: maps that share b all push it.
static void pre_expected(const GPT *m, const LinearMap *map, double *const *G, double *PG, int mistake) {
    enum { WIDE = 32 };
    double ga[WIDE] = {0}, gb[WIDE] = {0}, da[WIDE] = {0}, db[WIDE] = {0};
    for (int k = 0; k < m->num_maps; k++) {
        const LinearMap *other = &m->maps[k];
        int shares_b = map->gamma_b >= 0 && other->gamma_b == map->gamma_b && (mistake != PRE_ONE_BRANCH || other == map);
        const double *W = m->theta + m->params[other->weight].offset, *a = gpt_gamma(m, other->gamma_a), *b = gpt_gamma(m, other->gamma_b);
        for (int64_t n = 0; n < other->rows * other->cols && (shares_b || other == map); n++) {
            int64_t i = n / other->cols, j = n % other->cols;
            if (shares_b) { gb[j] += (a ? a[i] : 1) * G[k][n] * W[n]; }
            if (other == map) { ga[i] += G[k][n] * W[n] * (b ? b[j] : 1); }
        }
    }
    if (map->gamma_a >= 0 && mistake != PRE_MATRIX_ONLY) { pre_vector(m, map->gamma_a, ga, da, mistake); }
    if (map->gamma_b >= 0 && mistake != PRE_MATRIX_ONLY) { pre_vector(m, map->gamma_b, gb, db, mistake); }
    const double *W = m->theta + m->params[map->weight].offset, *a = gpt_gamma(m, map->gamma_a), *b = gpt_gamma(m, map->gamma_b), *g = G[map - m->maps];
    for (int64_t n = 0; n < map->rows * map->cols; n++) {
        int64_t i = n / map->cols, j = n % map->cols;
        double ai = a ? a[i] : 1, bj = b ? b[j] : 1;
        PG[n] = ai * ai * g[n] * bj * bj + da[i] * W[n] * bj + ai * W[n] * db[j];
    }
}

static double *pre_copy(const double *from, int64_t n) {
    double *copy = (double *)malloc((size_t)n * sizeof(double));
    if (!copy) { FAIL("out of memory"); }
    memcpy(copy, from, (size_t)n * sizeof(double));
    return copy;
}

// (W~_old - W~_new)/lr of every map for one SGD step of the trainer from theta.
static void pre_step(GPT *m, const double *theta, double *const *old, double lr, double **moved) {
    memcpy(m->theta, theta, (size_t)m->num_theta * sizeof(double));
    optimizer_step(m, 1, lr, 1);
    reparameterize_forward(m);
    for (int k = 0; k < m->num_maps; k++) {
        int64_t n = m->maps[k].rows * m->maps[k].cols;
        moved[k] = pre_copy(m->maps[k].w_eff, n);
        for (int64_t i = 0; i < n; i++) { moved[k][i] = (old[k][i] - moved[k][i]) / lr; }
    }
}

typedef struct PreWorst { double first, least, most, second, loss; int rows; } PreWorst;

// Deviations of one map at lr, lr/2 and after Richardson; a map of which W~ is linear in theta has only rounding.
static void pre_compare(const GPT *m, int k, const double *PG, const double *d1, const double *d2, int verbose, const char *variant, PreWorst *worst) {
    int n = (int)(m->maps[k].rows * m->maps[k].cols);
    double size = sqrt(squares(PG, n)), e1 = 0, e2 = 0, e3 = 0;
    for (int i = 0; i < n; i++) {
        e1 += pow(d1[i] - PG[i], 2);
        e2 += pow(d2[i] - PG[i], 2);
        e3 += pow(2 * d2[i] - d1[i] - PG[i], 2);
    }
    e1 = sqrt(e1) / size, e2 = sqrt(e2) / size, e3 = sqrt(e3) / size;
    const LinearMap *map = &m->maps[k];
    int linear = map->gamma_a < 0 && map->gamma_b < 0;
    if (!linear) { worst->least = smaller(worst->least, e1 / e2); worst->most = larger(worst->most, e1 / e2); }
    worst->first = larger(worst->first, e1);
    worst->second = larger(worst->second, e3);
    worst->rows++;
    if (!verbose || map->layer > 0 || (map->site != SITE_Q && map->site != SITE_GATE && map->site != SITE_HEAD)) { return; }
    printf("%-12s %-6s %12.3e %12.3e ", variant, site_names[map->site], e1, e2);
    if (linear) { printf("%8s %14.1e\n", "exact", e3); } else { printf("%8.5f %14.1e\n", e1 / e2, e3); }
}

static void pre_variant(const char *variant, int verbose, int mistake, PreWorst *worst) {
    const double lr = 1e-5;
    GPT *m = pre_model(variant);
    enum { MAPS = 2 * (4 + FFN_MAPS) + 1 }; // two dense layers and the head
    double *G[MAPS], *PG[MAPS], *old[MAPS], *d1[MAPS], *d2[MAPS], *theta = pre_copy(m->theta, m->num_theta);
    int B = m->cfg.batch, T = m->cfg.seq_len;
    gpt_zero_grad(m);
    double start = gpt_forward(m, m->inputs, m->targets, B, T, 1.0 / (B * T));
    gpt_backward(m, m->inputs);
    for (int k = 0; k < MAPS; k++) { // before reparameterize_backward writes over G
        int64_t n = m->maps[k].rows * m->maps[k].cols;
        G[k] = pre_copy(m->maps[k].dw_eff, n);
        old[k] = pre_copy(m->maps[k].w_eff, n);
        PG[k] = pre_copy(G[k], n);
    }
    for (int k = 0; k < MAPS; k++) { pre_expected(m, &m->maps[k], G, PG[k], mistake); }
    reparameterize_backward(m);
    double fall = squares(m->grads, (int)m->num_theta), falls[2];
    pre_step(m, theta, old, lr, d1);
    falls[0] = (start - gpt_forward(m, m->inputs, m->targets, B, T, 0)) / lr;
    pre_step(m, theta, old, lr / 2, d2);
    falls[1] = (start - gpt_forward(m, m->inputs, m->targets, B, T, 0)) / (lr / 2);
    worst->loss = larger(worst->loss, fabs((2 * falls[1] - falls[0]) / fall - 1));
    for (int k = 0; k < MAPS; k++) {
        pre_compare(m, k, PG[k], d1[k], d2[k], verbose, variant, worst);
        free(G[k]); free(PG[k]); free(old[k]); free(d1[k]); free(d2[k]);
    }
    free(theta);
    free(m);
}

int preconditioner(int verbose, int mistake) {
    static const char *const variants[] = {"noscale", "baseline", "hg", "ap", "dp", "or", "er", "dnp", "hg+dp", "hg+dp+or", "hg+dp+er", "ap+or", "unified"};
    PreWorst worst = {0, INFINITY, 0, 0, 0, 0};
    if (verbose) {
        printf("preconditioner: (W~_old - W~_new)/lr of one SGD step on theta against P G, in a GPT of 2 layers, width 8; lr = 1e-5\n");
        printf("%-12s %-6s %12s %12s %8s %14s\n", "variant", "site", "dev. at lr", "at lr/2", "ratio", "Richardson");
    }
    for (int i = 0; i < COUNT(variants); i++) { pre_variant(variants[i], verbose, mistake, &worst); }
    int holds = worst.first < 1e-3 && worst.least > 1.97 && worst.most < 2.03 && worst.second < 1e-7 && worst.loss < 1e-4;
    if (verbose) {
        printf("%s: all %d maps (every layer and site) of %d variants: deviation at lr at most %.1e, ratio %.4f..%.4f, after Richardson at most %.1e;\n"
               "the loss falls by lr |dL/dtheta|^2 within %.1e (Richardson)\n",
               holds ? "holds" : "FAILS", worst.rows, COUNT(variants), worst.first, worst.least, worst.most, worst.second, worst.loss);
    }
    return !holds;
}

#ifndef TESTING_THEORY
int main(void) { return preconditioner(1, PRE_RIGHT); }
#endif
