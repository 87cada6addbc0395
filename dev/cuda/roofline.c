// What a step of train_gpt2.cu must cost on a GPU: for each kernel the bytes that it moves and the FLOPs that it does, the time
// that the machine's limits allow, and its share of a step; and from their sum a predicted MFU. It is arithmetic from the
// model's shapes, made before any GPU was at hand: a claim to be tested, and the yardstick for what a profile shows.
//
//   make roofline        the paper's 0.12B and 1B, baseline and unified, on H100 and H200
//   build/roofline --model 1b --variant unified --batch 16      any flags of train_gpt2 (vocabulary 50304 unless given)
//
// A kernel takes as long as the slower of its two resources:  time = max(FLOPs / rate, bytes / bandwidth) + launch.
// Nobody reaches the data sheet, so each resource has an efficiency; these are assumptions, printed with the result:
//   products     of 989 TFLOP/s (bf16, dense, H100 and H200): 0.70, where large products of cuBLASLt usually are
//   attention    350 TFLOP/s forward and 280 backward: somewhat under and at the level of FlashAttention-2 on an H100
//   bandwidth    of 3.35 TB/s (H100 SXM) and 4.8 TB/s (H200): 0.85
//   launch       2 microseconds a kernel, hidden where kernels are long
#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../train_gpt2.c"

typedef struct Hardware { const char *name; double flops, bandwidth; } Hardware;
static const Hardware hardware[] = {{"H100 SXM", 989e12, 3.35e12}, {"H200", 989e12, 4.8e12}};
enum { COUNT_HARDWARE = sizeof hardware / sizeof hardware[0] };
#define PRODUCT_EFFICIENCY 0.70
#define BANDWIDTH_EFFICIENCY 0.85
#define ATTENTION_FORWARD 350e12
#define ATTENTION_BACKWARD 280e12
#define LAUNCH 2e-6

enum Kind { PRODUCT, ATTENTION, MEMORY };
typedef struct Item { const char *name; enum Kind kind; double flops, bytes, launches; } Item;
static Item items[64];
static int num_items;

// Adds `times` calls of a kernel; calls of one name are one line.
static void add(const char *name, enum Kind kind, double times, double flops, double bytes) {
    int i = 0;
    while (i < num_items && strcmp(items[i].name, name) != 0) { i++; }
    if (i == num_items) { num_items++; items[i].name = name; items[i].kind = kind; items[i].flops = items[i].bytes = items[i].launches = 0; }
    items[i].flops += times * flops;
    items[i].bytes += times * bytes;
    items[i].launches += times;
}

// out (N,OC) = inp (N,C) W^T and its two gradients; numbers of 2 bytes, weight gradients of 4, read too after the first micro-batch
static void add_map(double times, double N, double C, double OC, int first) {
    double flops = 2 * N * C * OC, bytes = 2 * (N * C + N * OC + C * OC);
    add("matmul_forward", PRODUCT, times, flops, bytes);
    add("matmul_backward_input", PRODUCT, times, flops, bytes);
    add("matmul_backward_weight", PRODUCT, times, flops, 2 * (N * C + N * OC) + (first ? 4 : 8) * C * OC);
}

// One micro-batch of B sequences of T tokens.
static void count_micro_batch(const GPT *m, double B, double T, int first) {
    const Config *cfg = &m->cfg;
    double L = cfg->layers, N = B * T, C = cfg->channels, Q = m->qkv_width, A = (double)cfg->heads * m->head_size, H = cfg->hidden, V = cfg->vocab;
    const LinearMap *maps = gpt_layer_maps(m, 0);
    int qkv_norm = any_norm(maps + SITE_Q, 3), gu_norm = any_norm(maps + SITE_GATE, 2), head_norm = gpt_head(m)->norm;
    double pairs = B * T * (T + 1) / 2; // (query, key), causal
    add("embedding_forward", MEMORY, 1, 0, 4 * N * C);
    add("residual_rmsnorm_forward", MEMORY, 2 * L, 0, 2 * 4 * N * C);            // reads x and branch, writes their sum and its norm
    add_map(L, N, C, Q, first);
    add("qkv_forward", MEMORY, L, 0, 2 * 2 * N * Q);                             // Output-Norms and RoPE
    add("attention_forward", ATTENTION, L, 4 * pairs * A, 2 * N * (Q + A));      // two products
    add_map(L, N, A, C, first);
    add_map(L, N, C, 2 * H, first);
    add("swiglu_forward", MEMORY, L, 0, 2 * 3 * N * H);
    add_map(L, N, H, C, first);
    add_map(1, N, C, V, first);
    // reads the logits, writes their gradients; with a norm over V it needs a pass of its own for the row's sums
    add("classifier", MEMORY, head_norm ? 2 : 1, 0, head_norm ? 2 * 2 * N * V : 2 * 3 * N * V);
    add("swiglu_backward", MEMORY, L, 0, 2 * (gu_norm ? 7 : 5) * N * H);         // dh, gate|up; with norms gate|up twice; dgate|dup
    add("rmsnorm_backward", MEMORY, 2 * L + 1, 0, 2 * 4 * N * C);                // dout, inp, dinp in and out
    add("attention_backward", ATTENTION, L, 14 * pairs * A, 2 * N * (3 * Q + 2 * A)); // seven products: S and dP are made twice
    add("qkv_backward", MEMORY, L, 0, 2 * (qkv_norm ? 3 : 2) * N * Q);
    add("embedding_backward", MEMORY, 1, 0, 2 * N * C + 8 * N * C);
}

// Once a step: 4-byte theta, gradients and moments; 2-byte theta~.
static void count_update(const GPT *m) {
    double P = (double)m->num_theta;
    int scaled = 0;
    for (int i = 0; i < m->num_maps; i++) { scaled |= m->maps[i].gamma_a >= 0 || m->maps[i].gamma_b >= 0; }
    if (scaled) { add("reparameterize_backward", MEMORY, 2, 0, 12 * P / 2); }    // in two launches
    add("gradient_norm", MEMORY, 1, 0, 4 * P);
    if (m->cfg.optimizer != OPTIMIZER_MUON) { add("adamw_update", MEMORY, 1, 0, 28 * P); }
    else {
        double steps = NEWTON_SCHULZ_STEPS;
        for (int i = 0; i < m->num_params; i++) {
            const Param *p = &m->params[i];
            double n = (double)p->rows * (double)p->cols, side = p->rows < p->cols ? (double)p->rows : (double)p->cols;
            if (p->v >= 0) { add("adamw_update", MEMORY, 1, 0, 28 * n); }
            else { add("newton_schulz", PRODUCT, 3 * steps, 2 * (2 * n * side + side * side * side) / 3, 2 * (4 * n + 4 * side * side) / 3); add("muon_update", MEMORY, 2, 0, 12 * n); }
        }
    }
    add("reparameterize_forward", MEMORY, 1, 0, 6 * P);
}

static double item_time(const Item *item, const Hardware *gpu) {
    double rate = item->kind == ATTENTION ? (strcmp(item->name, "attention_forward") == 0 ? ATTENTION_FORWARD : ATTENTION_BACKWARD) : gpu->flops * PRODUCT_EFFICIENCY;
    double busy = item->flops / rate, moving = item->bytes / (gpu->bandwidth * BANDWIDTH_EFFICIENCY);
    return (busy > moving ? busy : moving) + item->launches * LAUNCH;
}

// The flags of train_gpt2; V is 50304 unless given.
static void read_config(Config *cfg, const char *program, int argc, const char *const *argv) {
    config_defaults(cfg);
    config_parse_flags(cfg, argc, argv);
    presets_apply(cfg);
    config_resolve(cfg);
    if (cfg->vocab == 0) { cfg->vocab = 50304; }
    if (cfg->experts) { USAGE("%s: found --experts %d, expected a dense model", program, cfg->experts); }
}

// One model: a line a kernel, and the sum on each machine.
static void roofline(int argc, const char *const *argv) {
    Config cfg;
    GPT m;
    read_config(&cfg, "roofline", argc, argv);
    gpt_build(&m, &cfg);
    int micro = cfg.total_batch / cfg.batch;
    num_items = 0;
    for (int i = 0; i < micro; i++) { count_micro_batch(&m, cfg.batch, cfg.seq_len, i == 0); }
    count_update(&m);
    double sums[COUNT_HARDWARE] = {0}, tokens = (double)cfg.total_batch * cfg.seq_len, useful = tokens * flops_per_token(&m);
    for (int i = 0; i < num_items; i++) { for (int h = 0; h < COUNT_HARDWARE; h++) { sums[h] += item_time(&items[i], &hardware[h]); } }
    printf("--model %s --variant %s: %lld parameters, %d micro-batches of %d sequences of %d tokens in bf16\n", cfg.model, cfg.variant, (long long)m.num_theta, micro, cfg.batch, cfg.seq_len);
    printf("%-26s %9s %9s %10s", "kernel", "calls", "GFLOP", "GB");
    for (int h = 0; h < COUNT_HARDWARE; h++) { printf("  %8s ms  share", hardware[h].name); }
    printf("\n");
    for (int i = 0; i < num_items; i++) {
        printf("%-26s %9.0f %9.0f %10.2f", items[i].name, items[i].launches, items[i].flops / 1e9, items[i].bytes / 1e9);
        for (int h = 0; h < COUNT_HARDWARE; h++) { double t = item_time(&items[i], &hardware[h]); printf("  %11.2f %5.1f%%", 1e3 * t, 100 * t / sums[h]); }
        printf("\n");
    }
    printf("%-26s %9s %9s %10s", "step", "", "", "");
    for (int h = 0; h < COUNT_HARDWARE; h++) { printf("  %11.2f %5.1f%%", 1e3 * sums[h], 100.0); }
    printf("\n");
    for (int h = 0; h < COUNT_HARDWARE; h++) {
        printf("predicted on %-9s %8.0f tokens/s, MFU %.1f%% (%.3g FLOPs a token, %.0f TFLOP/s)\n", hardware[h].name, tokens / sums[h], 100 * useful / sums[h] / hardware[h].flops,
               flops_per_token(&m), hardware[h].flops / 1e12);
    }
    printf("\n");
}

#ifndef SCALING // dev/cuda/scaling.c takes the counts above
int main(int argc, char **argv) {
    printf("assumed: products at %.0f%% of the data sheet, attention at %.0f and %.0f TFLOP/s, bandwidth at %.0f%%, %.0f microseconds a launch\n\n",
           100 * PRODUCT_EFFICIENCY, ATTENTION_FORWARD / 1e12, ATTENTION_BACKWARD / 1e12, 100 * BANDWIDTH_EFFICIENCY, 1e6 * LAUNCH);
    if (argc > 1) { roofline(argc, (const char *const *)argv); return finish(); }
    static const char *const runs[][9] = { // micro-batches that fit in 80 GB
        {"roofline", "--model", "0.12b", "--variant", "baseline", "--batch", "64"}, {"roofline", "--model", "0.12b", "--variant", "unified", "--batch", "64"},
        {"roofline", "--model", "1b", "--variant", "baseline", "--batch", "4"}, {"roofline", "--model", "1b", "--variant", "unified", "--batch", "4"},
    };
    for (int i = 0; i < COUNT(runs); i++) { roofline(7, runs[i]); }
    return finish();
}
#endif
