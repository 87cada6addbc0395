// What several GPUs and machines cost: the bytes that a step sends, collective by collective, how much of that time hides behind
// the backward pass, and the speed that is left. Arithmetic from the model's shapes on top of roofline.c, not measured.
//
//   make scaling                                          the paper's 0.12B and 1B on 1, 8 and 64 GPUs
//   build/scaling 8 4 --model 1b --batch 4 --zero 1       8 GPUs in each of 4 machines; any flags of train_gpt2
//
// Sums of a gradient of S bytes over W GPUs, by rings:
//   all-reduce (--zero 0)            2 (W-1)/W S      through each GPU's link
//   reduce to owners (--zero 1)        (W-1)/W S
//   broadcast of theta~ (--zero 1)     (W-1)/W S/2    bf16; not hidden: the next step begins with it
// over the slowest link of the ring. Assumed: NVLink of an H100 450 GB/s a direction, of which 0.8; InfiniBand 400 Gb/s for each
// machine, not for each GPU, of which 0.9; 20 microseconds a collective within a machine, 50 across.
// A layer's bucket goes as soon as its backward is done, on a stream of its own; it is taken to slow the kernels by
// nothing (NCCL's do take a few of the 132 multiprocessors: a few percent while they run).
#define SCALING
#include "roofline.c"

#define NVLINK (450e9 * 0.8)
#define INFINIBAND (50e9 * 0.9)

static double items_time(const char *with) { // of kernels with that in their name
    double sum = 0;
    for (int i = 0; i < num_items; i++) { if (!with || strstr(items[i].name, with)) { sum += item_time(&items[i], &hardware[0]); } }
    return sum;
}
static double update_time(const GPT *m) {
    num_items = 0;
    count_update(m);
    return items_time(NULL);
}

typedef struct Scaling { double step, sums, shared, hidden, exposed, small, gradients, effective, gamma; int micro, collectives; } Scaling;

static Scaling predict(const GPT *m, int gpus, int machines) {
    const Config *cfg = &m->cfg;
    int world = gpus * machines, L = cfg->layers;
    Scaling s;
    memset(&s, 0, sizeof s);
    s.micro = cfg->total_batch / (cfg->batch * world);
    num_items = 0;
    for (int i = 0; i < s.micro; i++) { count_micro_batch(m, cfg->batch, cfg->seq_len, i == 0); }
    double compute = items_time(NULL);
    num_items = 0;
    count_micro_batch(m, cfg->batch, cfg->seq_len, s.micro == 1);
    double backward = items_time("backward"), head = 0, update = update_time(m);
    const LinearMap *map = gpt_head(m);
    head = 2 * 2.0 * cfg->batch * cfg->seq_len * (double)map->rows * (double)map->cols / (hardware[0].flops * PRODUCT_EFFICIENCY); // done before
    double layer = (backward - head) / L, link = machines > 1 ? INFINIBAND : NVLINK, delay = machines > 1 ? 50e-6 : 20e-6;
    double factor = world > 1 ? (cfg->zero ? 1.0 : 2.0) * (world - 1) / world : 0, matrix = 0, table = (double)map->rows * (double)map->cols;
    double vectors = 0;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        double n = (double)p->rows * (double)p->cols;
        if (p->role >= ROLE_GAMMA_B) { vectors += n; } else if (p->layer == 0) { matrix += n; }
    }
    if (world > 1) {
        double now = 0; // since the last backward began
        for (int b = 0; b < L + 2; b++) {
            double ready = b == 0 ? 0 : b <= L ? b * layer : L * layer, bytes = 4 * (b == 0 ? (cfg->tie_embeddings ? 0 : table) : b <= L ? matrix : table);
            if (now < ready) { now = ready; }
            now += factor * bytes / link + delay;
            s.sums += factor * bytes / link + delay;
            s.gradients += bytes;
        }
        s.exposed = now - L * layer;
        s.hidden = s.sums - s.exposed;
        s.gamma = 4 * vectors;
        s.small = 2 * delay + 2 * s.gamma / link;
        s.collectives = L + 4;
        if (cfg->zero) {
            s.effective = s.gradients / 2;
            s.shared = factor * s.effective / link + delay;
            s.collectives++;
        } else if (cfg->optimizer == OPTIMIZER_MUON) { // theta of Muon's matrices, fp32
            s.effective = 4 * L * matrix;
            s.shared = s.effective * (world - 1) / world / link + delay;
            s.collectives++;
        }
    }
    if (cfg->zero) { update /= world; }
    s.step = compute + update + s.exposed + s.small + s.shared;
    return s;
}

static void scaling(int gpus, int machines, int argc, const char *const *argv) {
    Config cfg;
    GPT m;
    read_config(&cfg, "scaling", argc, argv);
    if (cfg.total_batch % (cfg.batch * gpus * machines)) { USAGE("scaling: found --total-batch %d, expected a multiple of --batch times %d GPUs", cfg.total_batch, gpus * machines); }
    gpt_build(&m, &cfg);
    settle_steps(&m);
    int zero = cfg.zero;
    m.cfg.zero = 0;
    double alone = predict(&m, 1, 1).step, tokens = (double)cfg.total_batch * cfg.seq_len;
    m.cfg.zero = zero;
    Scaling s = predict(&m, gpus, machines);
    printf("%-6s %-8s %d x %d  %d  %5d x %-3d %8.1f %8.1f %7.2f %8.2f %8.2f %8.2f %8.2f %9.1f %10.0f %6.1f%% %8.1f\n", cfg.model, cfg.optimizer == OPTIMIZER_MUON ? "muon" : "adamw", machines, gpus, zero, s.micro, cfg.batch,
           s.gradients / 1e6, s.effective / 1e6, s.gamma / 1e6, 1e3 * s.hidden, 1e3 * s.exposed, 1e3 * s.shared, 1e3 * s.small, 1e3 * s.step, tokens / s.step, 100 * alone / s.step / (gpus * machines), s.step * (double)m.cfg.steps / 3600);
}

int main(int argc, char **argv) {
    printf("model  update   M x G  Z  micro-batches  gradients  theta~  dgamma    ms: sums of gradients   sharing           ms of a            share of      hours\n");
    printf("                                                MB      MB      MB   hidden  exposed   theta~    small      step   tokens/s  ideal speed  a run\n");
    if (argc > 3) {

        scaling(atoi(argv[1]), atoi(argv[2]), argc - 2, (const char *const *)argv + 2);
        return finish();
    }
    static const struct { const char *model, *batch[3]; } models[] = {{"0.12b", {"64", "64", "8"}}, {"1b", {"4", "4", "4"}}};
    static const struct { int gpus, machines; } sizes[] = {{1, 1}, {8, 1}, {8, 8}};
    for (int i = 0; i < COUNT(models); i++) {
        for (int k = 0; k < COUNT(sizes); k++) {
            for (int zero = 0; zero < (k ? 2 : 1); zero++) {
                const char *flags[] = {"scaling", "--model", models[i].model, "--variant", "unified", "--batch", models[i].batch[k], "--zero", zero ? "1" : "0"};
                scaling(sizes[k].gpus, sizes[k].machines, COUNT(flags), flags);
            }
        }
    }
    const char *muon[] = {"scaling", "--model", "1b", "--variant", "unified", "--batch", "4", "--optimizer", "muon"};
    scaling(8, 1, COUNT(muon), muon);
    return finish();
}
