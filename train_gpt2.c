// scale-vector GPT: a readable CPU reference of "Negligible in Size, Significant in Effect:
// On Scale Vectors in Large Language Models" (arXiv 2605.26895).
//
// Read it top to bottom. One idea shapes it: every scale vector is a reparameterization of a linear
// map. What is trained is theta = (W, gamma, ...); what the model computes with is theta~, the
// *effective* weights W~ = diag(gamma_a) W diag(gamma_b):
//
//     theta   --reparameterize_forward-->   theta~  --gpt_forward-->   loss        once a step | once a micro-batch
//     dtheta  <--reparameterize_backward--  dtheta~ <--gpt_backward--
//
// so the model in section 5 is a plain Llama-style GPT. All variants live in section 3, but for the one thing that can't
// be folded into a matrix: a norm after it (DNP, QK-norm, post-norm), which the model applies with its effective scale.
//
//   1 configuration   2 parameters   3 scale vectors   4 layers    5 the model
//   6 optimizers      7 data         8 checkpoints     9 sampling  10 main
//
// Letters: B batch, T time (sequence length), C channels, L layers, V vocabulary, H hidden size of the FFN,
// NH query heads, KVH key/value heads, HS head size, E experts, K of them chosen a token.
// Matrices are row-major; a linear map y = W x has W (rows, cols).
// The file is C11 in the subset that is also C++20, so that CUDA sources can include it.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>          // crc32_z: checksums of checkpoints
#include <cjson/cJSON.h>   // the JSON header of safetensors files
#ifdef _OPENMP
#include <omp.h>
#endif
#include "data/tokenizer.h" // Tokenizer, SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS

// float in use; double in tests, where finite differences need the digits
#ifndef REAL
#define REAL float
#endif
typedef REAL real;

#define NORM_EPS 1e-5 // Norm(x) = x / sqrt(mean(x^2) + NORM_EPS)  (ours: the paper gives no value)

// ----------------------------------------------------------------------------------------------------
// Errors: one line on stderr that names the thing, what was found and what was expected.
// Exit status 2: the command line is wrong. Exit status 1: a file, the environment or the training is.

static char fail_cleanup_dir[4096]; // an unfinished checkpoint that a failure must not leave behind
static void remove_dir(const char *path);
static void (*before_failure)(void), (*after_failure)(int status); // where several threads or processes train together (train_gpt2.cu)

__attribute__((noreturn, format(printf, 4, 5)))
static void fail_at(int status, const char *file, int line, const char *format, ...) {
    va_list args;
    if (before_failure) { before_failure(); }
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "train_gpt2: ");
    vfprintf(stderr, format, args);
    if (status == 1) { fprintf(stderr, " (%s:%d)", file, line); }
    fprintf(stderr, "\n");
    va_end(args);
    if (fail_cleanup_dir[0]) { remove_dir(fail_cleanup_dir); }
    if (after_failure) { after_failure(status); }
    exit(status);
}
#define FAIL(...)  fail_at(1, __FILE__, __LINE__, __VA_ARGS__)
#define USAGE(...) fail_at(2, __FILE__, __LINE__, __VA_ARGS__)
#define BAD_VALUE(source, ...) fail_at((source) == FROM_CHECKPOINT ? 1 : 2, __FILE__, __LINE__, __VA_ARGS__)

// printf into memory of the right size; the caller frees it
__attribute__((format(printf, 1, 2)))
static char *text_format(const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0) { FAIL("out of memory"); }
    va_end(args);
    return text;
}

// ----------------------------------------------------------------------------------------------------
// 1. Configuration: one struct, and one options table that drives parsing, --help, the printed
//    configuration and what a checkpoint stores.

// A site is a kind of linear map; a scale vector belongs to a site.
// The router of a mixture of experts is a map too, but --placement doesn't move its vector.
enum { SITE_Q, SITE_K, SITE_V, SITE_O, SITE_GATE, SITE_UP, SITE_DOWN, SITE_HEAD, NUM_SITES, SITE_ROUTER = NUM_SITES };
static const char *const site_names[NUM_SITES + 1] = {"q", "k", "v", "o", "gate", "up", "down", "head", "router"};

// Where a site's scale vectors stand, eq. 5-7. INPUT is the usual gamma of a Pre-Norm.
enum { PLACE_NONE, PLACE_INPUT, PLACE_AP, PLACE_DP, PLACE_DNP };
#define PLACE_CHOICES "none|input|ap|dp|dnp"

enum { OFF, ON };
enum { REPARAM_NONE, REPARAM_OR, REPARAM_ER };          // eq. 8, eq. 9
enum { WD_ALL, WD_NONE, WD_INPUT, WD_OUTPUT };          // which scale vectors decay; IWD is WD_INPUT
enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON, OPTIMIZER_SGD };
enum { SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_LINEAR, SCHEDULE_CONSTANT };
enum { PRECISION_AUTO, PRECISION_FP32, PRECISION_BF16 };

#define MAX_OPTIONS 96
typedef struct Config {
    const char *model, *variant;                        // presets over the fields below
    int layers, channels, heads, kv_heads, hidden, seq_len, vocab, tie_embeddings, qk_norm, post_norm;
    int experts, top_k, expert_hidden, shared_hidden;
    double balance_loss, router_z_loss;
    int norm_scale, hg, placement[NUM_SITES], reparam, wd_scale;
    int optimizer, schedule, batch, total_batch;
    int64_t steps, seed;
    double lr, warmup, decay_frac, final_lr_frac, scale_lr, weight_decay, beta1, beta2, eps;
    double muon_momentum, sgd_momentum, grad_clip, tokens_per_param;
    const char *data, *val_data, *tokenizer, *out, *resume, *prompt, *export_dir, *import_dir;
    int64_t save_every, keep, val_every, val_batches, sample_every, sample, stop_at;
    double temperature;
    int sample_top_k, log_norms, threads, estimate, help;
    int precision, gpus, zero, timeout, recompute, check;
    unsigned char source[MAX_OPTIONS];                  // who set each option: enum Source
} Config;
enum Source { FROM_DEFAULT, FROM_CHECKPOINT, FROM_MODEL, FROM_VARIANT, FROM_FLAG };

typedef enum { TYPE_INT, TYPE_LONG, TYPE_REAL, TYPE_CHOICE, TYPE_TEXT, TYPE_PLACEMENT, TYPE_SWITCH, TYPE_FORMAT_DIR } OptionType;
// What resuming does with an option: a checkpoint's FIXED options can't be changed, its KEPT ones hold
// unless a flag says otherwise, LOCAL ones belong to the run at hand and aren't stored.
typedef enum { FIXED, KEPT, LOCAL } OptionScope;

typedef struct Option {
    const char *group, *name;
    OptionType type;
    OptionScope scope;
    size_t offset;                 // of the field in Config
    const char *initial;
    double low, high;              // range of a number, both ends allowed
    const char *choices, *help;
} Option;
#define AT(field) offsetof(Config, field)
#define AUTO (-1)                  // a real whose default depends on another option

static const Option options[] = {
    {"Model", "model", TYPE_TEXT, LOCAL, AT(model), "", 0, 0, NULL, "preset over the flags of this group: see the list below"},
    {NULL, "layers", TYPE_INT, FIXED, AT(layers), "4", 1, 1024, NULL, "transformer blocks, L"},
    {NULL, "channels", TYPE_INT, FIXED, AT(channels), "128", 2, 65536, NULL, "width of the residual stream, C"},
    {NULL, "heads", TYPE_INT, FIXED, AT(heads), "2", 1, 1024, NULL, "query heads, NH"},
    {NULL, "kv-heads", TYPE_INT, FIXED, AT(kv_heads), "0", 0, 1024, NULL, "key/value heads, KVH; 0: as many as query heads"},
    {NULL, "hidden", TYPE_INT, FIXED, AT(hidden), "0", 0, 1048576, NULL, "hidden size of the FFN, H; 0: int(8 C / 3)"},
    {NULL, "seq-len", TYPE_INT, FIXED, AT(seq_len), "256", 1, 1048576, NULL, "tokens in a sequence, T"},
    {NULL, "vocab", TYPE_INT, FIXED, AT(vocab), "0", 0, 65536, NULL, "vocabulary, V; 0: the data's, rounded up to a multiple of 64"},
    {NULL, "tie-embeddings", TYPE_CHOICE, FIXED, AT(tie_embeddings), "off", 0, 0, "off|on", "lm_head uses the embedding matrix"},
    {NULL, "qk-norm", TYPE_CHOICE, FIXED, AT(qk_norm), "off", 0, 0, "off|on", "Output-Norm on the heads of q and k"},
    {NULL, "post-norm", TYPE_CHOICE, FIXED, AT(post_norm), "off", 0, 0, "off|on", "Output-Norm on the attention and FFN outputs, as in Gemma"},
    {NULL, "experts", TYPE_INT, FIXED, AT(experts), "0", 0, 1024, NULL, "mixture of experts: their number, E; 0: a dense FFN"},
    {NULL, "top-k", TYPE_INT, FIXED, AT(top_k), "0", 0, 1024, NULL, "experts that a token goes to, K; 0: 4, or all where there are fewer; with 1 its weight is always 1, and only the two losses below train the router"},
    {NULL, "expert-hidden", TYPE_INT, FIXED, AT(expert_hidden), "0", 0, 1048576, NULL, "hidden size of an expert; 0: int(2 C / 3)"},
    {NULL, "shared-hidden", TYPE_INT, FIXED, AT(shared_hidden), "-1", -1, 1048576, NULL, "hidden size of the shared expert; -1: int(8 C / 3), 0: no shared expert"},
    {NULL, "balance-loss", TYPE_REAL, KEPT, AT(balance_loss), "0.01", 0, 100, NULL, "weight of the loss that balances the experts' loads"},
    {NULL, "router-z-loss", TYPE_REAL, KEPT, AT(router_z_loss), "0", 0, 100, NULL, "weight of the loss that keeps router logits small"},

    {"Scale vectors", "variant", TYPE_TEXT, LOCAL, AT(variant), "", 0, 0, NULL, "presets over the flags of this group, joined by '+': see the list below"},
    {NULL, "norm-scale", TYPE_CHOICE, FIXED, AT(norm_scale), "on", 0, 0, "off|on", "off: no scale vector at all (section 2)"},
    {NULL, "hg", TYPE_CHOICE, FIXED, AT(hg), "off", 0, 0, "off|on", "heterogeneity: a gamma_b for each branch (eq. 4)"},
    {NULL, "placement", TYPE_PLACEMENT, FIXED, AT(placement), "input", 0, 0, PLACE_CHOICES, "where the scale vectors stand (eq. 5-7): one value, or a list like q=dnp,k=dnp,head=input over q k v gate up head and o down; a router's is always input"},
    {NULL, "reparam", TYPE_CHOICE, FIXED, AT(reparam), "none", 0, 0, "none|or|er", "how a scale vector is made (eq. 8, 9)"},
    {NULL, "wd-scale", TYPE_CHOICE, KEPT, AT(wd_scale), "all", 0, 0, "all|none|input|output", "which scale vectors decay: those of Input-Norms (gamma_b, and gamma_a of ap and dp), those of Output-Norms; with or and er, alpha and beta alike"},

    {"Training", "optimizer", TYPE_CHOICE, FIXED, AT(optimizer), "adamw", 0, 0, "adamw|muon|sgd", "muon: for the matrices of the blocks, AdamW for the rest"},
    {NULL, "lr", TYPE_REAL, KEPT, AT(lr), "4e-3", 0, 100, NULL, "peak learning rate"},
    {NULL, "schedule", TYPE_CHOICE, KEPT, AT(schedule), "cosine", 0, 0, "cosine|wsd|linear|constant", "course of the learning rate after warm-up"},
    {NULL, "warmup", TYPE_REAL, KEPT, AT(warmup), "0.02", 0, 1, NULL, "share of the steps with linear warm-up"},
    {NULL, "decay-frac", TYPE_REAL, KEPT, AT(decay_frac), "0.2", 0, 1, NULL, "wsd: share of the steps in the final decay"},
    {NULL, "final-lr-frac", TYPE_REAL, KEPT, AT(final_lr_frac), "auto", 0, 1, NULL, "last rate over peak; auto: 0.05 for cosine, 0 for wsd and linear"},
    {NULL, "scale-lr", TYPE_REAL, KEPT, AT(scale_lr), "1", 0, 1e6, NULL, "learning rate of scale vectors over that of all else"},
    {NULL, "weight-decay", TYPE_REAL, KEPT, AT(weight_decay), "0.1", 0, 100, NULL, "decoupled weight decay"},
    {NULL, "beta1", TYPE_REAL, KEPT, AT(beta1), "0.9", 0, 0.999999, NULL, "AdamW: decay of the first moment"},
    {NULL, "beta2", TYPE_REAL, KEPT, AT(beta2), "0.95", 0, 0.999999, NULL, "AdamW: decay of the second moment"},
    {NULL, "eps", TYPE_REAL, KEPT, AT(eps), "1e-8", 1e-30, 1, NULL, "AdamW: added to the root of the second moment"},
    {NULL, "muon-momentum", TYPE_REAL, KEPT, AT(muon_momentum), "0.95", 0, 0.999999, NULL, "Muon: Nesterov momentum"},
    {NULL, "sgd-momentum", TYPE_REAL, FIXED, AT(sgd_momentum), "0", 0, 0.999999, NULL, "SGD: heavy-ball momentum"},
    {NULL, "grad-clip", TYPE_REAL, KEPT, AT(grad_clip), "1", 0, 1e30, NULL, "largest global gradient norm; 0: no clipping"},
    {NULL, "batch", TYPE_INT, KEPT, AT(batch), "8", 1, 65536, NULL, "sequences in a micro-batch, B"},
    {NULL, "total-batch", TYPE_INT, KEPT, AT(total_batch), "0", 0, 1048576, NULL, "sequences in a step, a multiple of --batch; 0: --batch"},
    {NULL, "steps", TYPE_LONG, KEPT, AT(steps), "300", 1, 1e12, NULL, "optimizer steps"},
    {NULL, "tokens-per-param", TYPE_REAL, KEPT, AT(tokens_per_param), "0", 0, 1e6, NULL, "instead of --steps: train on this many tokens per parameter that a token uses"},
    {NULL, "seed", TYPE_LONG, FIXED, AT(seed), "1", 0, 1e15, NULL, "of initial weights and data order"},

    {"Run", "data", TYPE_TEXT, KEPT, AT(data), "data/synthetic/synth_train_*.bin", 0, 0, NULL, "token shards: a file, a list a.bin,b.bin or a quoted glob"},
    {NULL, "val-data", TYPE_TEXT, KEPT, AT(val_data), "auto", 0, 0, NULL, "validation shards; auto: --data with 'train...' replaced by 'val_*.bin'; none"},
    {NULL, "tokenizer", TYPE_TEXT, KEPT, AT(tokenizer), "auto", 0, 0, NULL, "rank file (.tiktoken), or bytes; auto: a .tiktoken file beside --data, else bytes where V is 256"},
    {NULL, "out", TYPE_TEXT, LOCAL, AT(out), "runs/default", 0, 0, NULL, "folder of this run: checkpoints, metrics.csv, timing.csv, config.txt"},
    {NULL, "resume", TYPE_TEXT, LOCAL, AT(resume), "", 0, 0, NULL, "go on from a run's last checkpoint, or from one checkpoint folder"},
    {NULL, "save-every", TYPE_LONG, KEPT, AT(save_every), "100", 0, 1e12, NULL, "steps between checkpoints; 0: only at the end"},
    {NULL, "keep", TYPE_LONG, KEPT, AT(keep), "2", 0, 1e6, NULL, "checkpoints kept; 0: all"},
    {NULL, "val-every", TYPE_LONG, KEPT, AT(val_every), "50", 0, 1e12, NULL, "steps between validations; 0: only at the end"},
    {NULL, "val-batches", TYPE_LONG, KEPT, AT(val_batches), "20", 1, 1e9, NULL, "micro-batches in a validation, or as many as there are"},
    {NULL, "log-norms", TYPE_CHOICE, KEPT, AT(log_norms), "off", 0, 0, "off|on", "norms.csv: norms of all weights and effective scale vectors, at each validation"},
    {NULL, "sample-every", TYPE_LONG, LOCAL, AT(sample_every), "0", 0, 1e12, NULL, "steps between printed samples; 0: none"},
    {NULL, "sample", TYPE_LONG, LOCAL, AT(sample), "0", 0, 1e6, NULL, "don't train: print this many tokens from --resume or --import"},
    {NULL, "prompt", TYPE_TEXT, LOCAL, AT(prompt), "", 0, 0, NULL, "text that samples go on from"},
    {NULL, "temperature", TYPE_REAL, LOCAL, AT(temperature), "0.8", 0, 100, NULL, "of samples; 0: always the likeliest token"},
    {NULL, "sample-top-k", TYPE_INT, LOCAL, AT(sample_top_k), "0", 0, 65536, NULL, "sample among the k likeliest tokens; 0: all"},
    {NULL, "export", TYPE_FORMAT_DIR, LOCAL, AT(export_dir), "", 0, 0, NULL, "don't train: write the model of --resume or --import as a Hugging Face checkpoint to a new folder"},
    {NULL, "import", TYPE_FORMAT_DIR, LOCAL, AT(import_dir), "", 0, 0, NULL, "begin with the weights of a Hugging Face Llama checkpoint: a baseline to train, or to --sample from"},
    {NULL, "stop-at", TYPE_LONG, LOCAL, AT(stop_at), "0", 0, 1e12, NULL, "save and stop at this step of the schedule; 0: at its end"},
    {NULL, "threads", TYPE_INT, LOCAL, AT(threads), "0", 0, 4096, NULL, "OpenMP threads; 0: all cores"},
    {NULL, "estimate", TYPE_SWITCH, LOCAL, AT(estimate), "off", 0, 0, "off|on", "print parameters, memory and FLOPs, and stop before anything is allocated"},
    {NULL, "help", TYPE_SWITCH, LOCAL, AT(help), "off", 0, 0, "off|on", "print this help"},

    {"GPU: flags of train_gpt2cu", "precision", TYPE_CHOICE, KEPT, AT(precision), "auto", 0, 0, "auto|fp32|bf16", "of effective weights and activations; auto: bf16 on a GPU, fp32 on a CPU"},
    {NULL, "gpus", TYPE_INT, LOCAL, AT(gpus), "1", 1, 1024, "all", "GPUs of this machine to train on, or all"},
    {NULL, "zero", TYPE_INT, LOCAL, AT(zero), "0", 0, 1, NULL, "1: each GPU owns a part of theta and of the optimizer's state"},
    {NULL, "timeout", TYPE_INT, LOCAL, AT(timeout), "600", 1, 1000000, NULL, "seconds without a sign of life from a GPU or another process that end the run"},
    {NULL, "recompute", TYPE_INT, LOCAL, AT(recompute), "0", 0, 2, NULL, "activations made again in the backward pass instead of kept; 1: norms and SwiGLU, 2: all of a block but its input"},
    {NULL, "check", TYPE_SWITCH, LOCAL, AT(check), "off", 0, 0, "off|on", "don't train: compare one step with the CPU's, tensor by tensor"},
};
enum { NUM_OPTIONS = sizeof options / sizeof options[0] };

// Presets are flags under a name; a flag of the command line wins over a preset.
typedef struct Preset { const char *name, *flags, *paper; } Preset; // paper: its size there, total/active
#define PAPER " vocab=50304 total-batch=512 tokens-per-param=100"
static const Preset model_presets[] = { // the paper's models, batch and peak rates
    {"tiny",       "layers=4 channels=128 heads=2 seq-len=256", NULL},
    {"0.12b",      "layers=6 channels=768 heads=12 seq-len=1024 lr=4e-3" PAPER, "0.12B"},
    {"0.25b",      "layers=12 channels=1024 heads=16 seq-len=1024 lr=2e-3" PAPER, "0.25B"},
    {"0.5b",       "layers=18 channels=1280 heads=20 seq-len=4096 lr=2e-3" PAPER, "0.5B"},
    {"0.75b",      "layers=21 channels=1536 heads=24 seq-len=4096 lr=2e-3" PAPER, "0.75B"},
    {"1b",         "layers=22 channels=1792 heads=28 seq-len=4096 lr=1e-3" PAPER, "1B"},
    {"gemma-0.5b", "layers=18 channels=1280 heads=20 seq-len=4096 lr=2e-3 qk-norm=on post-norm=on" PAPER, "0.5B"},
    {"moe-0.25b",  "layers=6 channels=640 heads=10 seq-len=1024 lr=3e-3 experts=32 top-k=4" PAPER, "0.25B/0.11B"},
    {"moe-0.5b",   "layers=9 channels=768 heads=12 seq-len=1024 lr=2e-3 experts=32 top-k=4" PAPER, "0.5B/0.18B"},
    {"moe-0.8b",   "layers=10 channels=960 heads=15 seq-len=4096 lr=2e-3 experts=32 top-k=4" PAPER, "0.8B/0.28B"},
    {"moe-1b",     "layers=12 channels=1024 heads=16 seq-len=4096 lr=1e-3 experts=32 top-k=4" PAPER, "1B/0.38B"},
    {"moe-2b",     "layers=15 channels=1280 heads=20 seq-len=4096 lr=6e-4 experts=32 top-k=4" PAPER, "2B/0.62B"},
};
static const Preset variant_presets[] = {
    {"noscale",  "norm-scale=off", NULL},
    {"baseline", "", NULL},
    {"hg",       "hg=on", NULL},
    {"ap",       "placement=ap", NULL},
    {"dp",       "placement=dp", NULL},
    {"dnp",      "placement=dnp", NULL},
    {"or",       "reparam=or", NULL},
    {"er",       "reparam=er", NULL},
    {"iwd",      "wd-scale=input", NULL},
    {"unified",  "hg=on placement=dnp reparam=or wd-scale=input", NULL},
};
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

// Edit distance between two names, to suggest the nearest one for a typo; half off where one begins the other.
static int edit_distance(const char *a, const char *b) {
    int row[64] = {0}, nb = (int)strlen(b);
    if (nb > 62) { return 1000; }
    for (int j = 0; j <= nb; j++) { row[j] = j; }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) { best = row[j] + 1; }
            if (row[j - 1] + 1 < best) { best = row[j - 1] + 1; }
            row[j] = best;
        }
    }
    size_t shorter = strlen(a) < strlen(b) ? strlen(a) : strlen(b);
    return strncmp(a, b, shorter) == 0 ? row[nb] / 2 : row[nb];
}

static int find_option(const char *name) {
    for (int i = 0; i < NUM_OPTIONS; i++) { if (strcmp(options[i].name, name) == 0) { return i; } }
    return -1;
}

// Index of word (n characters) in "a|b|c", or -1.
static int find_choice(const char *choices, const char *word, size_t n) {
    for (int i = 0;; i++) {
        size_t length = strcspn(choices, "|");
        if (length == n && strncmp(choices, word, n) == 0) { return i; }
        if (!choices[length]) { return -1; }
        choices += length + 1;
    }
}

// A copy of text that lives as long as the program, like argv: Configs are copied freely and share it.
static const char *config_text(const char *text) {
    typedef struct Copy { struct Copy *next; char text[]; } Copy;
    static Copy *copies;
    Copy *copy = (Copy *)malloc(sizeof(Copy) + strlen(text) + 1);
    if (!copy) { FAIL("out of memory"); }
    strcpy(copy->text, text);
    copy->next = copies;
    copies = copy;
    return copy->text;
}

static void *option_field(const Option *o, const Config *cfg) { return (char *)(uintptr_t)cfg + o->offset; }

// "dp" for the sites that a Pre-Norm feeds, or "q=dnp,o=dp": other sites keep input (o and down: none).
static void placement_parse(int *placement, const char *text, enum Source source, const char *where) {
    for (int s = 0; s < NUM_SITES; s++) { placement[s] = (s == SITE_O || s == SITE_DOWN) ? PLACE_NONE : PLACE_INPUT; }
    if (!strchr(text, '=')) {
        int place = find_choice(PLACE_CHOICES, text, strlen(text));
        if (place < 0) { BAD_VALUE(source, "%s: found \"%s\", expected one of " PLACE_CHOICES ", or a list like q=dnp,o=dp", where, text); }
        for (int s = 0; s < NUM_SITES; s++) { if (s != SITE_O && s != SITE_DOWN) { placement[s] = place; } }
        return;
    }
    unsigned seen = 0;
    for (const char *item = text;;) {
        size_t n = strcspn(item, ","), key = strcspn(item, "=");
        int site = find_choice("q|k|v|o|gate|up|down|head", item, key);
        int place = key < n ? find_choice(PLACE_CHOICES, item + key + 1, n - key - 1) : -1;
        if (site < 0 || place < 0 || (seen >> site & 1)) {
            BAD_VALUE(source, "%s: found \"%.*s\" in the list, expected SITE=PLACE, each site once, SITE one of q k v o gate up down head, PLACE one of " PLACE_CHOICES, where, (int)n, item);
        }
        seen |= 1u << site;
        placement[site] = place;
        if (!item[n]) { break; }
        item += n + 1;
    }
}

// Sets one option from text; `where` names the source in messages, e.g. "--lr".
static void option_set(Config *cfg, int index, const char *text, enum Source source, const char *where) {
    const Option *o = &options[index];
    void *field = option_field(o, cfg);
    char *end = NULL;
    cfg->source[index] = (unsigned char)source;
    errno = 0;
    switch (o->type) {
    case TYPE_INT:
    case TYPE_LONG: {
        long long value = strtoll(text, &end, 10);
        int word = o->choices && strcmp(text, o->choices) == 0; // stands for 0
        if (!word && (end == text || *end || errno || (double)value < o->low || (double)value > o->high)) {
            BAD_VALUE(source, "%s: found \"%s\", expected a whole number from %.0f to %.0f%s%s", where, text, o->low, o->high, o->choices ? ", or " : "", o->choices ? o->choices : "");
        }
        if (o->type == TYPE_INT) { *(int *)field = (int)value; } else { *(int64_t *)field = value; }
        break;
    }
    case TYPE_REAL: {
        int automatic = strcmp(o->initial, "auto") == 0;
        if (automatic && strcmp(text, "auto") == 0) { *(double *)field = AUTO; break; }
        double value = strtod(text, &end);
        if (end == text || *end || !isfinite(value) || value < o->low || value > o->high) {
            BAD_VALUE(source, "%s: found \"%s\", expected a number from %g to %g%s", where, text, o->low, o->high, automatic ? ", or auto" : "");
        }
        *(double *)field = value;
        break;
    }
    case TYPE_SWITCH:
    case TYPE_CHOICE: {
        int value = find_choice(o->choices, text, strlen(text));
        if (value < 0) { BAD_VALUE(source, "%s: found \"%s\", expected one of %s", where, text, o->choices); }
        *(int *)field = value;
        break;
    }
    case TYPE_PLACEMENT: placement_parse((int *)field, text, source, where); break;
    case TYPE_FORMAT_DIR: // "hf DIR": the field is DIR
        if (text[0] && (strncmp(text, "hf ", 3) != 0 || !text[3])) { BAD_VALUE(source, "%s: found \"%s\", expected a format and a folder: hf DIR", where, text); }
        *(const char **)field = config_text(text[0] ? text + 3 : text);
        break;
    case TYPE_TEXT: {
        *(const char **)field = config_text(text);
        break;
    }
    }
}

// Writes an option's value so that option_set reads the same value back. Returns `out`.
static const char *option_text(const Config *cfg, int index, char *out, size_t size) {
    const Option *o = &options[index];
    const void *field = option_field(o, cfg);
    switch (o->type) {
    case TYPE_INT:
        if (o->choices && *(const int *)field == 0) { snprintf(out, size, "%s", o->choices); break; } // the word that stands for 0
        snprintf(out, size, "%d", *(const int *)field);
        break;
    case TYPE_LONG: snprintf(out, size, "%lld", (long long)*(const int64_t *)field); break;
    case TYPE_TEXT: snprintf(out, size, "%s", *(const char *const *)field); break;
    case TYPE_FORMAT_DIR: snprintf(out, size, "%s%s", **(const char *const *)field ? "hf " : "", *(const char *const *)field); break;
    case TYPE_REAL: {
        double value = *(const double *)field;
        if (value == AUTO && strcmp(o->initial, "auto") == 0) { snprintf(out, size, "auto"); break; }
        snprintf(out, size, "%.15g", value);
        if (strtod(out, NULL) != value) { snprintf(out, size, "%.17g", value); }
        break;
    }
    case TYPE_SWITCH:
    case TYPE_CHOICE:
    case TYPE_PLACEMENT: {
        int sites = o->type == TYPE_PLACEMENT ? NUM_SITES : 1;
        const int *values = (const int *)field;
        size_t used = 0;
        for (int s = 0; s < sites; s++) {
            const char *word = o->choices;
            for (int v = 0; v < values[s]; v++) { word += strcspn(word, "|") + 1; }
            used += (size_t)snprintf(out + used, size - used, "%s%s%s%.*s", s ? "," : "", sites > 1 ? site_names[s] : "",
                                     sites > 1 ? "=" : "", (int)strcspn(word, "|"), word);
        }
        break;
    }
    }
    return out;
}

// Applies the flags of one preset: "a=1 b=2". What a flag of the command line has set stays.
static void preset_apply(Config *cfg, const Preset *preset, enum Source source, const char *where) {
    char *flags = text_format("%s", preset->flags), *save = NULL;
    for (char *item = strtok_r(flags, " ", &save); item; item = strtok_r(NULL, " ", &save)) {
        char *value = strchr(item, '=');
        *value++ = '\0';
        int index = find_option(item);
        if (cfg->source[index] == FROM_FLAG) { continue; }
        int twice = cfg->source[index] == source; // by two parts of --variant
        char before[256], after[256];
        option_text(cfg, index, before, sizeof before);
        option_set(cfg, index, value, source, where);
        if (twice && strcmp(before, option_text(cfg, index, after, sizeof after)) != 0) {
            USAGE("%s: its parts contradict each other: one sets --%s %s, another %s; expected parts that agree, or the flag itself", where, item, before, after);
        }
    }
    free(flags);
}

static const Preset *find_preset(const Preset *presets, int count, const char *name, size_t n, const char *where) {
    char known[512] = "";
    for (int i = 0; i < count; i++) {
        if (strlen(presets[i].name) == n && strncmp(presets[i].name, name, n) == 0) { return &presets[i]; }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? " " : "", presets[i].name);
    }
    USAGE("%s: found \"%.*s\", expected one of: %s", where, (int)n, name, known);
}

static int given(const Config *cfg, const char *name) { return cfg->source[find_option(name)] == FROM_FLAG; }

static void presets_apply(Config *cfg) {
    if (given(cfg, "model")) {
        preset_apply(cfg, find_preset(model_presets, COUNT(model_presets), cfg->model, strlen(cfg->model), "--model"), FROM_MODEL, "--model");
    }
    if (!given(cfg, "variant")) { return; }
    static const char *const governed[] = {"norm-scale", "hg", "placement", "reparam", "wd-scale"};
    for (int i = 0; i < COUNT(governed); i++) { // a variant says it all: nothing of a checkpoint's shines through
        int index = find_option(governed[i]);
        if (cfg->source[index] != FROM_FLAG) { option_set(cfg, index, options[index].initial, FROM_DEFAULT, "--variant"); }
    }
    for (const char *part = cfg->variant;;) {
        size_t n = strcspn(part, "+");
        preset_apply(cfg, find_preset(variant_presets, COUNT(variant_presets), part, n, "--variant"), FROM_VARIANT, "--variant");
        if (!part[n]) { break; }
        part += n + 1;
    }
}

static void config_defaults(Config *cfg) {
    memset(cfg, 0, sizeof *cfg);
    for (int i = 0; i < NUM_OPTIONS; i++) { option_set(cfg, i, options[i].initial, FROM_DEFAULT, options[i].name); }
}

// Reads the flags: --name value or --name=value; a switch takes no value. Exits with status 2 on any error.
static void config_parse_flags(Config *cfg, int argc, const char *const *argv) {
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (strcmp(flag, "-h") == 0) { flag = "--help"; }
        if (strncmp(flag, "--", 2) != 0) { USAGE("found \"%s\", expected a flag that begins with -- (see --help)", flag); }
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(flag + 2, "="), flag + 2);
        const char *value = strchr(flag, '=');
        int index = find_option(name);
        if (index < 0) {
            int best = 0;
            for (int j = 1; j < NUM_OPTIONS; j++) {
                if (edit_distance(name, options[j].name) < edit_distance(name, options[best].name)) { best = j; }
            }
            USAGE("found unknown flag --%s, expected a flag of --help; the nearest is --%s", name, options[best].name);
        }
        const Option *o = &options[index];
        if (cfg->source[index] == FROM_FLAG) { USAGE("--%s: found twice, expected once", name); }
        if (o->type == TYPE_SWITCH) {
            if (value) { USAGE("--%s: found a value (\"%s\"), expected none", name, value + 1); }
            value = "on";
        } else if (value) {
            value++;
        } else {
            if (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0) { USAGE("--%s: found no value, expected one (--%s=VALUE where it begins with --): %s", name, name, o->help); }
            value = argv[++i];
        }
        if (o->type == TYPE_FORMAT_DIR && !value[0]) { USAGE("--%s: found \"\", expected a format and a folder: hf DIR", name); }
        char where[80], *words = NULL;
        snprintf(where, sizeof where, "--%s", name);
        if (o->type == TYPE_FORMAT_DIR && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) { value = words = text_format("%s %s", value, argv[++i]); }
        option_set(cfg, index, value, FROM_FLAG, where);
        free(words);
    }
}

// Fills in the values that depend on others and refuses contradictions. V may stay 0 until the data is open.
static void config_resolve(Config *cfg) {
    char text[64];
    if (given(cfg, "steps") && given(cfg, "tokens-per-param") && cfg->tokens_per_param > 0) {
        USAGE("--steps and --tokens-per-param: found both, expected one: each sets the length of the run");
    }
    if (given(cfg, "steps")) { cfg->tokens_per_param = 0; }
    if (cfg->kv_heads == 0) { cfg->kv_heads = cfg->heads; }
    if (cfg->experts > 0) {
        if (given(cfg, "hidden")) { USAGE("--hidden and --experts: found both, expected --expert-hidden and --shared-hidden for a mixture of experts"); }
        if (cfg->top_k == 0) { cfg->top_k = cfg->experts < 4 ? cfg->experts : 4; }
        if (cfg->top_k > cfg->experts) { USAGE("--top-k: found %d%s, expected at most --experts %d", cfg->top_k, given(cfg, "top-k") ? "" : " (from --model)", cfg->experts); }
        if (cfg->expert_hidden == 0) { cfg->expert_hidden = (int)(2 * (int64_t)cfg->channels / 3); }
        if (cfg->shared_hidden < 0) { cfg->shared_hidden = (int)(8 * (int64_t)cfg->channels / 3); }
        if (cfg->expert_hidden < 1) { USAGE("--expert-hidden: found int(2 * %d / 3) = 0, expected at least 1", cfg->channels); }
    } else if (given(cfg, "top-k") || given(cfg, "expert-hidden") || given(cfg, "shared-hidden")
               || given(cfg, "balance-loss") || given(cfg, "router-z-loss")) {
        USAGE("--top-k, --expert-hidden, --shared-hidden, --balance-loss, --router-z-loss: found without --experts, expected --experts E too (--sample-top-k is for samples)");
    }
    if (cfg->hidden == 0) { cfg->hidden = (int)(8 * (int64_t)cfg->channels / 3); }
    if (cfg->total_batch == 0) { cfg->total_batch = cfg->batch; }
    if (cfg->channels % cfg->heads != 0) { USAGE("--channels %d --heads %d: expected channels to be a multiple of heads", cfg->channels, cfg->heads); }
    int head_size = cfg->channels / cfg->heads;
    if (head_size % 2 != 0 || head_size > 256) { USAGE("--channels %d --heads %d: found a head size of %d, expected an even one up to 256 (RoPE turns pairs)", cfg->channels, cfg->heads, head_size); }
    if (cfg->heads % cfg->kv_heads != 0) { USAGE("--heads %d --kv-heads %d: expected heads to be a multiple of kv-heads", cfg->heads, cfg->kv_heads); }
    if (cfg->total_batch % cfg->batch != 0) { USAGE("--total-batch %d --batch %d: expected total-batch to be a multiple of batch", cfg->total_batch, cfg->batch); }
    if (cfg->schedule == SCHEDULE_WSD && cfg->warmup + cfg->decay_frac > 1) { USAGE("--warmup %g --decay-frac %g: expected shares that sum to at most 1", cfg->warmup, cfg->decay_frac); }
    if (given(cfg, "decay-frac") && cfg->schedule != SCHEDULE_WSD) { USAGE("--decay-frac: found with --schedule %s, expected --schedule wsd, the one that has a final decay", option_text(cfg, find_option("schedule"), text, sizeof text)); }
    static const struct { const char *flag, *optimizers; } of_optimizers[] = { // Muon leaves vectors to AdamW
        {"beta1", "adamw|muon"}, {"beta2", "adamw|muon"}, {"eps", "adamw|muon"}, {"muon-momentum", "muon"}, {"sgd-momentum", "sgd"},
    };
    option_text(cfg, find_option("optimizer"), text, sizeof text);
    for (int i = 0; i < COUNT(of_optimizers); i++) {
        if (given(cfg, of_optimizers[i].flag) && find_choice(of_optimizers[i].optimizers, text, strlen(text)) < 0) {
            USAGE("--%s: found with --optimizer %s, expected %s, whose flag it is", of_optimizers[i].flag, text, of_optimizers[i].optimizers);
        }
    }
    if (given(cfg, "final-lr-frac") && cfg->schedule == SCHEDULE_CONSTANT) { USAGE("--final-lr-frac: found with --schedule constant, expected another: this one keeps its rate"); }
    if (!cfg->norm_scale) {
        if (given(cfg, "scale-lr")) { USAGE("--norm-scale off and --scale-lr contradict each other: there is no scale vector to train"); }
        if (cfg->hg) { USAGE("--norm-scale off and --hg on contradict each other: there is no scale vector to make heterogeneous"); }
        if (cfg->reparam) { USAGE("--norm-scale off and --reparam or|er contradict each other: there is no scale vector to reparameterize"); }
        for (int s = 0; s < NUM_SITES; s++) {
            if (cfg->placement[s] == PLACE_AP || cfg->placement[s] == PLACE_DP) {
                USAGE("--norm-scale off and --placement %s=%s contradict each other: there is no scale vector to place (dnp keeps its norm)", site_names[s], cfg->placement[s] == PLACE_AP ? "ap" : "dp");
            }
        }
    }
    if (cfg->sample > 0 && !cfg->resume[0] && !cfg->import_dir[0]) { USAGE("--sample: found without --resume, expected --resume RUN or --import hf DIR, the model to sample from"); }
    if (cfg->export_dir[0] && !cfg->resume[0] && !cfg->import_dir[0]) { USAGE("--export: found without --resume, expected --resume RUN or --import hf DIR, the model to export"); }
    if (cfg->export_dir[0] && cfg->estimate) { USAGE("--export and --estimate: found both, expected one: an estimate loads no model"); }
    static const char *const of_samples[] = {"prompt", "temperature", "sample-top-k"}, *const of_training[] = {"stop-at", "sample-every"};
    for (int i = 0; i < COUNT(of_samples); i++) {
        if (given(cfg, of_samples[i]) && cfg->sample == 0 && cfg->sample_every == 0) { USAGE("--%s: found without --sample or --sample-every, expected one of them: only samples have it", of_samples[i]); }
    }
    const char *instead = cfg->sample > 0 ? "sample" : cfg->export_dir[0] ? "export" : cfg->estimate ? "estimate" : NULL;
    for (int i = 0; i < COUNT(of_training); i++) {
        if (given(cfg, of_training[i]) && instead) { USAGE("--%s and --%s: found both, expected one: the latter doesn't train", of_training[i], instead); }
    }
    if (cfg->export_dir[0] && cfg->sample > 0) { USAGE("--export and --sample: found both, expected one: neither trains"); }
    if (given(cfg, "threads") && cfg->threads > 1) {
#ifndef _OPENMP
        USAGE("--threads: found %d, expected 1: this program was built without OpenMP", cfg->threads);
#endif
    }
}

static void print_help(void) {
    printf("usage: train_gpt2 [--flag value]...\nTrains a GPT with the scale vectors of arXiv 2605.26895.\n");
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const Option *o = &options[i];
        if (o->group) { printf("\n%s\n", o->group); }
        char left[96];
        snprintf(left, sizeof left, "--%s %s", o->name, o->type == TYPE_SWITCH ? "" : o->type == TYPE_CHOICE || o->type == TYPE_PLACEMENT ? o->choices : o->type == TYPE_TEXT ? "TEXT" : o->type == TYPE_FORMAT_DIR ? "hf DIR" : "N");
        printf("  %-38s %s%s%s%s\n", left, o->help, o->type == TYPE_SWITCH || !o->initial[0] ? "" : " [", o->type == TYPE_SWITCH ? "" : o->initial, o->type == TYPE_SWITCH || !o->initial[0] ? "" : "]");
    }
    printf("\nPresets of --model (flags of the command line win)\n");
    for (int i = 0; i < COUNT(model_presets); i++) { printf("  %-11s %s\n", model_presets[i].name, model_presets[i].flags); }
    printf("\nPresets of --variant (join with '+', e.g. hg+dp+or)\n");
    for (int i = 0; i < COUNT(variant_presets); i++) { printf("  %-11s %s\n", variant_presets[i].name, variant_presets[i].flags); }
}

// ----------------------------------------------------------------------------------------------------
// 2. Parameters: one table, built from the Config. A parameter's role decides its weight decay, its
//    optimizer and its initial value, here and nowhere else.

typedef enum { ROLE_EMBEDDING, ROLE_MATRIX, ROLE_RESIDUAL, ROLE_ROUTER, ROLE_HEAD, ROLE_GAMMA_B, ROLE_GAMMA_A, ROLE_GAMMA_NORM, NUM_ROLES } Role;
typedef enum { DECAY_ALWAYS, DECAY_INPUT, DECAY_OUTPUT } DecayClass;

typedef struct RoleInfo { const char *name, *what; DecayClass decay; int muon; double init_std; } RoleInfo;
#define INIT_STD 0.02 // (ours)
static const RoleInfo role_table[NUM_ROLES] = {
    {"embedding",  "token embedding",                              DECAY_ALWAYS, 0, INIT_STD},
    {"matrix",     "W_q, W_k, W_v, W_gate, W_up",                  DECAY_ALWAYS, 1, INIT_STD},
    {"residual",   "W_o, W_down: init over sqrt(2 L)",             DECAY_ALWAYS, 1, INIT_STD},
    {"router",     "W_router of a mixture of experts",             DECAY_ALWAYS, 0, INIT_STD}, // (ours: AdamW)
    {"head",       "lm_head",                                      DECAY_ALWAYS, 0, INIT_STD},
    {"gamma_b",    "scale before a linear map (Input-Norm)",       DECAY_INPUT,  0, 0},
    {"gamma_a",    "scale after a map, foldable (as Input-Norm)",  DECAY_INPUT,  0, 0}, // (ours: it can be absorbed by its map)
    {"gamma_norm", "scale after an Output-Norm",                   DECAY_OUTPUT, 0, 0},
};

typedef struct Param {
    char name[80];         // e.g. "layers.3.q.weight", "layers.3.q.gamma_b", "layers.3.q.gamma_b.alpha"
    Role role;
    int layer;             // -1 outside the blocks
    int expert;            // -1 outside of experts
    int64_t rows, cols;    // a vector has one row
    int64_t offset;        // of its first element in theta and dtheta
    int beta;              // of an OR/ER vector alpha: the index of its scalar beta, else -1
    int64_t gamma;         // of a scale vector: offset of its effective values in GPT.gamma, else -1
    int64_t m, v;          // offsets of its moments in GPT.moments, or -1
} Param;

// A linear map and its scale vectors:  y = W~ x,  W~ = diag(gamma_a) W diag(gamma_b),  and where the site
// has an Output-Norm (DNP, --qk-norm, --post-norm):  y = gamma_norm * Norm(W~ x).
typedef struct LinearMap {
    int site, layer, expert;        // expert: -1 but for the maps of an expert
    int64_t rows, cols;
    int weight;                     // index of W in the table
    int gamma_a, gamma_b;           // indices of scale vectors in the table, or -1
    int gamma_norm, norm;           // norm: 1 where there is an Output-Norm, with or without a scale vector
    real *w_eff, *dw_eff;           // W~ and dL/dW~, (rows, cols)
    real *norm_eff, *dnorm_eff;     // effective gamma_norm, or NULL
} LinearMap;

// Maps of a layer, in order: q k v o, then gate up down of the dense FFN or of the shared expert (if there is one),
// then the router and gate up down of each expert. lm_head is the last map of all.
enum { FFN_MAPS = 3 };

typedef struct FfnActs {            // n rows through gate, up, down of hidden size H
    real *gu_raw, *gu_rstd, *gu;    // (n,2H) gate|up before and after Output-Norms; (n), (n)
    real *h;                        // (n,H) silu(gate) * up
    real *down_raw, *down_rstd;     // (n,C); (n): only with an Output-Norm at down
} FfnActs;

typedef struct MoeActs {            // rows of N K: a token once for each of its experts, sorted by expert
    real *probs, *lse;              // (N,E) softmax of the router's logits; (N) their log-sum-exp
    real *weights;                  // (N,K) softmax over the chosen logits
    int32_t *chosen, *row;          // (N,K) the experts; the row that holds this token for this expert
    int64_t *begin;                 // (E+1) first row of each expert
    real *x, *y;                    // (N K,C) what goes into the experts and comes out
    FfnActs experts;
    real *sum, *sum_rstd;           // (N,C), (N): only with --post-norm
} MoeActs;

typedef struct LayerActs {          // N = B T tokens; Q = (NH + 2 KVH) HS
    real *x, *ln1, *ln1_rstd;       // (N,C) input of the block; (N,C) Norm(x); (N)
    real *qkv_raw, *qkv_rstd, *qkv; // (N,Q) before and after Output-Norms and RoPE; (N, NH+2KVH)
    real *att, *lse;                // (N,NH*HS); (B,NH,T)
    real *o_raw, *o_rstd;           // (N,C); (N): only with an Output-Norm at o
    real *x2, *ln2, *ln2_rstd;      // (N,C) after attention; (N,C); (N)
    FfnActs ffn;                    // dense FFN or shared expert
    MoeActs moe;
} LayerActs;

typedef struct GPT {
    Config cfg;
    int head_size, qkv_width;
    Param *params;
    int num_params;
    LinearMap *maps;
    int num_maps, maps_per_layer;
    int *ffn_norm;                  // (L) mixture of experts with --post-norm: table index of its scale vector, else -1
    int64_t num_theta, num_gamma, num_moments;
    // buffers, each allocated once
    real *theta, *grads;            // theta and dL/dtheta; a W's place in grads holds dL/dW~ until reparameterize_backward
    real *moments;                  // of the optimizer
    real *gamma, *dgamma;           // effective scale vectors and their gradients
    real *partial;                  // NUM_BLOCKS partial sums of the widest vector
    real *muon;                     // work space of Newton-Schulz
    LayerActs *acts;                // one a layer
    real *x_final, *ln_final, *ln_final_rstd, *d_ln_final; // (N,C), (N,C), (N), (N,C)
    real *logits;                   // (head_chunk,V): the only logits that ever exist
    real *head_scratch;             // (NUM_BLOCKS,V), with a norm at the head
    double *losses;                 // (N)
    int32_t *inputs, *targets;      // (N) each
    real *rope_cos, *rope_sin;      // (T,HS/2)
    real *att_dot;                  // (B,NH,T) work space of attention_backward
    real *dx, *d_branch, *d_wide, *d_wide_raw, *d_att; // gradients of activations, reused by all layers
    real *d_rows, *d_logits, *d_weights, *d_sum, *d_shared; // mixture of experts: (N K,C), (N,E), (N,K), (N,C), (N,C)
    int64_t head_chunk;
    int B, T;                       // of the last forward
    int accumulate;                 // 0 in the first backward after gpt_zero_grad: gradients of matrices are written, then added to
    double grad_scale;              // of the last forward: the weight of a token's loss
    double balance_loss, z_loss;    // of the last forward: sums over layers, without their weights
    void *device;                   // what a GPU keeps of this model (train_gpt2.cu)
    int64_t *expert_tokens;         // (L,E) tokens that went to each expert since they were last set to 0
} GPT;

enum { NUM_BLOCKS = 16 }; // sums over rows are split in so many parts, whatever the threads: same bits for any number of them

static int gpt_param(GPT *m, Role role, int layer, int64_t rows, int64_t cols, const char *name) {
    if ((m->num_params & (m->num_params - 1)) == 0) { // room for twice as many at each power of two
        m->params = (Param *)realloc(m->params, (size_t)(m->num_params ? 2 * m->num_params : 1) * sizeof(Param));
        if (!m->params) { FAIL("out of memory"); }
    }
    Param *p = &m->params[m->num_params];
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", name);
    p->role = role;
    p->layer = layer;
    p->expert = -1;
    p->rows = rows;
    p->cols = cols;
    p->offset = m->num_theta;
    p->beta = -1;
    p->gamma = p->m = p->v = -1;
    m->num_theta += rows * cols;
    return m->num_params++;
}

// A scale vector: gamma itself, or alpha (n) and beta (1) of eq. 8 or 9.
static int gpt_scale_vector(GPT *m, Role role, int layer, int expert, int64_t n, const char *prefix) {
    char name[80];
    snprintf(name, sizeof name, "%s.%s%s", prefix, role_table[role].name, m->cfg.reparam ? ".alpha" : "");
    int index = gpt_param(m, role, layer, 1, n, name);
    m->params[index].gamma = m->num_gamma;
    m->params[index].expert = expert;
    m->num_gamma += n;
    if (m->cfg.reparam) {
        snprintf(name, sizeof name, "%s.%s.beta", prefix, role_table[role].name);
        int beta = gpt_param(m, role, layer, 1, 1, name);
        m->params[index].beta = beta;
        m->params[beta].expert = expert;
    }
    return index;
}

static void map_prefix(const LinearMap *map, char *out, size_t size) {
    if (map->layer < 0) { snprintf(out, size, "%s", site_names[map->site]); }
    else if (map->expert >= 0) { snprintf(out, size, "layers.%d.experts.%d.%s", map->layer, map->expert, site_names[map->site]); }
    else { snprintf(out, size, "layers.%d.%s", map->layer, site_names[map->site]); }
}

static int map_place(const GPT *m, const LinearMap *map) { return map->site == SITE_ROUTER ? (int)PLACE_INPUT : m->cfg.placement[map->site]; }

static void gpt_map(GPT *m, int site, int layer, int expert, Role role, int64_t rows, int64_t cols) {
    LinearMap *map = &m->maps[m->num_maps++];
    memset(map, 0, sizeof *map);
    map->site = site;
    map->layer = layer;
    map->expert = expert;
    map->rows = rows;
    map->cols = cols;
    map->gamma_a = map->gamma_b = map->gamma_norm = -1;
    char prefix[64], name[80];
    map_prefix(map, prefix, sizeof prefix);
    snprintf(name, sizeof name, "%s.weight", prefix);
    map->weight = site == SITE_HEAD && m->cfg.tie_embeddings ? 0 : gpt_param(m, role, layer, rows, cols, name);
    m->params[map->weight].expert = expert;
    map->norm = map_place(m, map) == PLACE_DNP || (m->cfg.qk_norm && (site == SITE_Q || site == SITE_K))
             || (m->cfg.post_norm && (site == SITE_O || (site == SITE_DOWN && m->cfg.experts == 0)));
}

// Scale vectors of a group of maps that read the same input: {q,k,v}, {gate,up}, {o}, {down}, {head}. With a mixture
// of experts the FFN group is gate and up of the shared expert and of every expert, and the router.
// Without --hg the group shares one gamma_b; what stands after a map is always that map's own.
static void gpt_group_scales(GPT *m, LinearMap *maps, int count, const char *group) {
    if (!m->cfg.norm_scale) { return; }
    int shared = -1;
    for (int i = 0; i < count; i++) {
        LinearMap *map = &maps[i];
        int place = map_place(m, map);
        if (map->site == SITE_DOWN && count > 1) { continue; } // reads another input; it comes as a group of its own
        char prefix[64];
        map_prefix(map, prefix, sizeof prefix);
        if (place == PLACE_INPUT || place == PLACE_DP || place == PLACE_DNP) {
            if (m->cfg.hg || count == 1) {
                map->gamma_b = gpt_scale_vector(m, ROLE_GAMMA_B, map->layer, map->expert, map->cols, prefix);
            } else {
                char name[64];
                snprintf(name, sizeof name, "layers.%d.%s", map->layer, group);
                if (shared < 0) { shared = gpt_scale_vector(m, ROLE_GAMMA_B, map->layer, -1, map->cols, name); }
                map->gamma_b = shared;
            }
        }
        if (place == PLACE_AP || place == PLACE_DP) { map->gamma_a = gpt_scale_vector(m, ROLE_GAMMA_A, map->layer, map->expert, map->rows, prefix); }
        if (map->norm) { map->gamma_norm = gpt_scale_vector(m, ROLE_GAMMA_NORM, map->layer, map->expert, map->rows, prefix); }
    }
}

// Builds the tables of parameters and maps. Nothing is allocated for the values yet.
static void gpt_build(GPT *m, const Config *cfg) {
    memset(m, 0, sizeof *m);
    m->cfg = *cfg;
    int64_t C = cfg->channels, V = cfg->vocab;
    char prefix[64];
    m->head_size = cfg->channels / cfg->heads;
    int64_t q_rows = (int64_t)cfg->heads * m->head_size, kv_rows = (int64_t)cfg->kv_heads * m->head_size;
    m->qkv_width = (int)(q_rows + 2 * kv_rows);
    int E = cfg->experts, dense = E == 0 || cfg->shared_hidden > 0;
    m->maps_per_layer = 4 + FFN_MAPS * dense + (E ? 1 + FFN_MAPS * E : 0);
    m->maps = (LinearMap *)calloc((size_t)cfg->layers * (size_t)m->maps_per_layer + 1, sizeof(LinearMap));
    m->ffn_norm = (int *)calloc((size_t)cfg->layers, sizeof(int));
    m->expert_tokens = (int64_t *)calloc((size_t)cfg->layers * (size_t)E + 1, sizeof(int64_t));
    if (!m->maps || !m->ffn_norm || !m->expert_tokens) { FAIL("out of memory"); }
    gpt_param(m, ROLE_EMBEDDING, -1, V, C, "embedding.weight");
    for (int l = 0; l < cfg->layers; l++) {
        LinearMap *map = m->maps + m->num_maps;
        gpt_map(m, SITE_Q, l, -1, ROLE_MATRIX, q_rows, C); // q, k, v lie side by side, so that one product serves all three
        gpt_map(m, SITE_K, l, -1, ROLE_MATRIX, kv_rows, C);
        gpt_map(m, SITE_V, l, -1, ROLE_MATRIX, kv_rows, C);
        gpt_map(m, SITE_O, l, -1, ROLE_RESIDUAL, C, q_rows);
        for (int e = dense ? -1 : 0; e < E; e++) {
            int64_t H = E == 0 ? cfg->hidden : e < 0 ? cfg->shared_hidden : cfg->expert_hidden;
            if (e == 0) { gpt_map(m, SITE_ROUTER, l, -1, ROLE_ROUTER, E, C); }
            gpt_map(m, SITE_GATE, l, e, ROLE_MATRIX, H, C); // and so do gate and up
            gpt_map(m, SITE_UP, l, e, ROLE_MATRIX, H, C);
            gpt_map(m, SITE_DOWN, l, e, ROLE_RESIDUAL, C, H);
        }
        gpt_group_scales(m, map + SITE_Q, 3, "attn");
        gpt_group_scales(m, map + SITE_O, 1, "o");
        gpt_group_scales(m, map + SITE_GATE, m->maps_per_layer - 4, "ffn");
        for (int i = 4; i < m->maps_per_layer; i++) { if (map[i].site == SITE_DOWN) { gpt_group_scales(m, map + i, 1, "down"); } }
        m->ffn_norm[l] = -1;
        if (E && cfg->post_norm && cfg->norm_scale) {
            snprintf(prefix, sizeof prefix, "layers.%d.ffn", l);
            m->ffn_norm[l] = gpt_scale_vector(m, ROLE_GAMMA_NORM, l, -1, C, prefix);
        }
    }
    LinearMap *head = m->maps + m->num_maps;
    gpt_map(m, SITE_HEAD, -1, -1, ROLE_HEAD, V, C);
    gpt_group_scales(m, head, 1, "head");
    for (int i = 0; i < m->num_params; i++) { // moments: AdamW m and v, Muon m, SGD m where it has momentum
        Param *p = &m->params[i];
        int muon = cfg->optimizer == OPTIMIZER_MUON && role_table[p->role].muon, sgd = cfg->optimizer == OPTIMIZER_SGD;
        if (!sgd || cfg->sgd_momentum > 0) { p->m = m->num_moments; m->num_moments += p->rows * p->cols; }
        if (!sgd && !muon) { p->v = m->num_moments; m->num_moments += p->rows * p->cols; }
    }
}

static LinearMap *gpt_layer_maps(const GPT *m, int layer) { return m->maps + (int64_t)layer * m->maps_per_layer; }
static int gpt_has_dense(const GPT *m) { return m->cfg.experts == 0 || m->cfg.shared_hidden > 0; } // a dense FFN or a shared expert
static LinearMap *gpt_router(const GPT *m, int layer) { return gpt_layer_maps(m, layer) + 4 + FFN_MAPS * gpt_has_dense(m); }
// gate, up and down of an expert; -1: of the dense FFN or shared expert
static LinearMap *gpt_ffn_maps(const GPT *m, int layer, int expert) {
    return expert < 0 ? gpt_layer_maps(m, layer) + 4 : gpt_router(m, layer) + 1 + FFN_MAPS * expert;
}
// Parameters that one token uses: of the experts only K in E.
static int64_t gpt_active_parameters(const GPT *m) {
    int64_t in_experts = 0;
    for (int i = 0; i < m->num_params; i++) { if (m->params[i].expert >= 0) { in_experts += m->params[i].rows * m->params[i].cols; } }
    return m->cfg.experts ? m->num_theta - in_experts + in_experts / m->cfg.experts * m->cfg.top_k : m->num_theta;
}

static LinearMap *gpt_head(const GPT *m) { return m->maps + m->num_maps - 1; }

// Does this parameter decay? All but scale vectors do; those by --wd-scale.
static int param_decays(const GPT *m, const Param *p) {
    DecayClass decay = role_table[p->role].decay;
    return decay == DECAY_ALWAYS || m->cfg.wd_scale == WD_ALL
        || (decay == DECAY_INPUT && m->cfg.wd_scale == WD_INPUT) || (decay == DECAY_OUTPUT && m->cfg.wd_scale == WD_OUTPUT);
}

// Learning rate of a parameter over that of the step.
static double param_rate(const GPT *m, const Param *p) { return p->role >= ROLE_GAMMA_B ? m->cfg.scale_lr : 1; }

// splitmix64: a counter-based generator; the n-th number of a stream is random_u64(stream + n)
static uint64_t random_u64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static double random_uniform(uint64_t x) { return ((double)(random_u64(x) >> 11) + 0.5) / 9007199254740992.0; } // in (0,1)

// Initial values. A tensor's numbers depend on the seed and its name alone, so that variants that differ
// in their scale vectors start from the same matrices and can be compared in pairs.
static void gpt_init(GPT *m) {
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        real *w = m->theta + p->offset;
        int64_t n = p->rows * p->cols;
        double std = role_table[p->role].init_std;
        if (std == 0) { // a scale vector: gamma = 1, that is alpha = beta = 1 with OR and alpha = beta = 0 with ER
            for (int64_t j = 0; j < n; j++) { w[j] = m->cfg.reparam == REPARAM_ER ? (real)0 : (real)1; }
            continue;
        }
        if (p->role == ROLE_RESIDUAL) { std /= sqrt(2.0 * m->cfg.layers); }
        uint64_t stream = random_u64((uint64_t)m->cfg.seed) ^ crc32_z(0, (const unsigned char *)p->name, strlen(p->name));
        stream = random_u64(stream);
        #pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < n; j++) { // Box-Muller
            double radius = sqrt(-2 * log(random_uniform(stream + 2 * (uint64_t)j)));
            w[j] = (real)(std * radius * cos(2 * M_PI * random_uniform(stream + 2 * (uint64_t)j + 1)));
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// 3. Scale vectors: the paper. theta -> theta~ once a step, dtheta~ -> dtheta once a step.
//
// A scale vector gamma (n) is made from what is trained by one of
//     none   gamma = alpha
//     OR     gamma = beta * Norm(alpha)                     eq. 8: magnitude and direction apart
//     ER     gamma = e^beta * e^(alpha - mean(alpha))       eq. 9: the same in the exponent
// and enters a linear map as W~ = diag(gamma_a) W diag(gamma_b) (the paper's section 3.4: the unified view). A
// gamma_norm, which follows an Output-Norm, is made the same way and stays a vector of the model.

static void scale_vector_forward(real *gamma, const real *alpha, const real *beta, int64_t n, int reparam) {
    if (reparam == REPARAM_NONE) { memcpy(gamma, alpha, (size_t)n * sizeof(real)); return; }
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) { sum += alpha[i]; squares += (double)alpha[i] * alpha[i]; }
    if (reparam == REPARAM_OR) {
        double rstd = 1 / sqrt(squares / (double)n + NORM_EPS);
        for (int64_t i = 0; i < n; i++) { gamma[i] = (real)(*beta * rstd * alpha[i]); }
    } else {
        double mean = sum / (double)n;
        for (int64_t i = 0; i < n; i++) { gamma[i] = (real)exp((double)*beta + alpha[i] - mean); }
    }
}

// dalpha and dbeta (written, not accumulated) from dgamma.
static void scale_vector_backward(real *dalpha, real *dbeta, const real *dgamma, const real *gamma,
                                  const real *alpha, const real *beta, int64_t n, int reparam) {
    if (reparam == REPARAM_NONE) { memcpy(dalpha, dgamma, (size_t)n * sizeof(real)); return; }
    if (reparam == REPARAM_OR) { // unit = Norm(alpha): dbeta = <dgamma, unit>; dalpha is beta/rms times dgamma less its part along unit
        double squares = 0, dot = 0;
        for (int64_t i = 0; i < n; i++) { squares += (double)alpha[i] * alpha[i]; dot += (double)dgamma[i] * alpha[i]; }
        double rstd = 1 / sqrt(squares / (double)n + NORM_EPS);
        *dbeta = (real)(dot * rstd);
        for (int64_t i = 0; i < n; i++) { dalpha[i] = (real)(*beta * rstd * (dgamma[i] - alpha[i] * rstd * rstd * dot / (double)n)); }
    } else {                     // dbeta = <dgamma, gamma>; dalpha_i = dgamma_i gamma_i - <dgamma, gamma> / n
        double dot = 0;
        for (int64_t i = 0; i < n; i++) { dot += (double)dgamma[i] * gamma[i]; }
        *dbeta = (real)dot;
        for (int64_t i = 0; i < n; i++) { dalpha[i] = (real)((double)dgamma[i] * gamma[i] - dot / (double)n); }
    }
}

// Effective scale vector of a table index, or NULL for none.
static real *gpt_gamma(const GPT *m, int param) { return param < 0 ? NULL : m->gamma + m->params[param].gamma; }
static real *gpt_dgamma(const GPT *m, int param) { return param < 0 ? NULL : m->dgamma + m->params[param].gamma; }

static void reparameterize_forward(GPT *m) {
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        if (p->gamma < 0) { continue; }
        const real *beta = p->beta < 0 ? NULL : m->theta + m->params[p->beta].offset;
        scale_vector_forward(m->gamma + p->gamma, m->theta + p->offset, beta, p->cols, m->cfg.reparam);
    }
    for (int i = 0; i < m->num_maps; i++) {
        const LinearMap *map = &m->maps[i];
        const real *w = m->theta + m->params[map->weight].offset, *a = gpt_gamma(m, map->gamma_a), *b = gpt_gamma(m, map->gamma_b);
        if (map->w_eff == w) { continue; } // no scale vector: W~ is W itself
        #pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < map->rows; r++) {
            const real *from = w + r * map->cols, scale = a ? a[r] : (real)1;
            real *to = map->w_eff + r * map->cols;
            if (b) { for (int64_t c = 0; c < map->cols; c++) { to[c] = scale * from[c] * b[c]; } }
            else   { for (int64_t c = 0; c < map->cols; c++) { to[c] = scale * from[c]; } }
        }
    }
}

// With G = dL/dW~:  dW = a G b,  da_i = sum_j G_ij W_ij b_j,  db_j = sum_i a_i G_ij W_ij.  G and dW share
// their memory, but for a tied head, whose dW is added to that of the embedding.
static void map_backward(GPT *m, const LinearMap *map) {
    const real *w = m->theta + m->params[map->weight].offset, *a = gpt_gamma(m, map->gamma_a), *b = gpt_gamma(m, map->gamma_b);
    real *da = gpt_dgamma(m, map->gamma_a), *db = gpt_dgamma(m, map->gamma_b), *dw = m->grads + m->params[map->weight].offset;
    int64_t rows = map->rows, cols = map->cols;
    real tied = dw == map->dw_eff ? (real)0 : (real)1;
    #pragma omp parallel for schedule(static)
    for (int block = 0; block < NUM_BLOCKS; block++) {
        real *db_part = m->partial + block * cols;
        memset(db_part, 0, (size_t)cols * sizeof(real));
        for (int64_t r = rows * block / NUM_BLOCKS; r < rows * (block + 1) / NUM_BLOCKS; r++) {
            const real *g = map->dw_eff + r * cols, *wr = w + r * cols, scale = a ? a[r] : (real)1;
            real *out = dw + r * cols, dot = 0;
            #pragma omp simd reduction(+:dot)
            for (int64_t c = 0; c < cols; c++) {
                real gb = b ? g[c] * b[c] : g[c];
                dot += gb * wr[c];
                db_part[c] += scale * g[c] * wr[c];
                out[c] = tied * out[c] + scale * gb;
            }
            if (da) { da[r] += dot; }
        }
    }
    if (!db) { return; }
    for (int block = 0; block < NUM_BLOCKS; block++) { // in a fixed order: same bits for any number of threads
        for (int64_t c = 0; c < cols; c++) { db[c] += m->partial[block * cols + c]; }
    }
}

static void reparameterize_backward(GPT *m) {
    for (int i = 0; i < m->num_maps; i++) {
        const LinearMap *map = &m->maps[i];
        if (map->w_eff != m->theta + m->params[map->weight].offset) { map_backward(m, map); }
    }
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        if (p->gamma < 0) { continue; }
        const real *beta = p->beta < 0 ? NULL : m->theta + m->params[p->beta].offset;
        real *dbeta = p->beta < 0 ? NULL : m->grads + m->params[p->beta].offset;
        scale_vector_backward(m->grads + p->offset, dbeta, m->dgamma + p->gamma, m->gamma + p->gamma, m->theta + p->offset, beta, p->cols, m->cfg.reparam);
    }
}

// ----------------------------------------------------------------------------------------------------
// 4. Layers: forward/backward pairs. `d_x` stands for dL/dx. N = B T tokens.

// e^x. Float: write x = n*ln2 + r with n whole and |r| <= ln2/2, so e^x = 2^n * e^r, where e^r is a short Taylor series and
// 2^n is added straight into the exponent bits. There is no library call and no branch, so loops over it become SIMD code.
static inline real exp_fast(real xr) {
    if (sizeof(real) != sizeof(float)) { return (real)exp((double)xr); }
    const float x = (float)xr, magic = 12582912.0f;
    // Floats near magic = 1.5*2^23 are spaced 1 apart: adding it rounds to a whole n, and leaves n in the low bits.
    const float t = x * 1.44269504f + magic, n = t - magic;
    // ln2 in two parts; the first has few enough bits that n * part1 is exact, so r keeps full precision.
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;                          // Taylor, 1/7! down to 1/0!: the next term is < 6e-9, a tenth of an ulp
    p = p * r + 1.0f / 720;  p = p * r + 1.0f / 120;  p = p * r + 1.0f / 24;  p = p * r + 1.0f / 6;  p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;                     // exactly 1 for x = 0
    uint32_t tb, pb;
    memcpy(&tb, &t, 4);  memcpy(&pb, &p, 4);
    pb += tb << 23;                                 // the shift drops all of magic's bits: n is added to the exponent
    // Outside the range of a float n does not fit the exponent: 0 below log(FLT_MIN), infinity above log(FLT_MAX), and NaN
    // for NaN. By masks of all ones or zeros and not by ?:, which gcc would turn into branches.
    const uint32_t below = -(uint32_t)(x < -87.33654f), above = -(uint32_t)(x > 88.72283f), nan = -(uint32_t)(x != x);
    pb = (pb & ~(below | above)) | (above & 0x7f800000u) | nan;
    memcpy(&p, &pb, 4);
    return p;
}

// Matrix multiplication: C = A·B, or C += A·B.     C (M,N), A (M,K), B (K,N)
//
//     C[i][j] = sum over k of A[i][k] * B[k][j]
//
// A and B are read through a row stride and a column stride (in elements), so that a transposed
// matrix, or a column slice of a wider one, is the same memory with other strides. Training needs
//     forward          out (BT,OC) = inp (BT,C) · W (OC,C)^T
//     input gradient  dinp (BT,C)  = dout (BT,OC) · W (OC,C)
//     weight gradient   dW (OC,C) += dout (BT,OC)^T · inp (BT,C)    (= in a step's first backward)
//
// The plain triple loop loads two numbers for every multiply-add, and a core can do many more
// multiply-adds than loads. So (after Goto and van de Geijn, 2008) each load is made to count:
//   registers  kernel() keeps an MR x NR tile of C in registers; a step of k loads MR + NR numbers
//              for MR * NR multiply-adds.
//   packing    the kernel wants, for each k, MR numbers of A and NR of B side by side. Both are
//              copied into "panels" in just that order, whatever their strides were: the kernel
//              then reads straight ahead, with no cache line or page visited for one number only.
//   caches     the loops around the kernel are cut so that a panel of B stays in L1, a block of A
//              in L2, and everything packed in L3, each for as long as it is in use.
// Threads share the packed panels, and each computes whole tiles of C. No sum over k is ever split
// between threads, so the result is the same, bit for bit, for any number of threads.

#if defined(__AVX512F__)
#define VEC_BYTES 64
#elif defined(__AVX__)
#define VEC_BYTES 32
#else
#define VEC_BYTES 16 // SSE2, NEON
#endif
// GCC and Clang vectors: + and * work on VEC_BYTES / sizeof(real) numbers at once
typedef real vec __attribute__((vector_size(VEC_BYTES), may_alias));
typedef real vec_u __attribute__((vector_size(VEC_BYTES), aligned(sizeof(real)), may_alias)); // at any address
typedef real vec4_u __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));

// The tile is MR rows of NV vectors. It needs MR * NV registers for sums, NV for a row of B, 1 for
// a number of A copied to all lanes, and (where there is no fused multiply-add) 1 for the product.
// At least 8 to 10 sums must be in flight to hide the latency of two multiply-adds per cycle.
enum {
    NV = 2,
#if defined(__AVX512F__) || defined(__aarch64__)
    MR = 12, // 32 registers: 24 + 2 + 1
#else
    MR = 6,  // 16 registers: 12 + 2 + 1 + 1
#endif
    NR = NV * VEC_BYTES / (int)sizeof(real),
    KC = 24 * 1024 / (NV * VEC_BYTES),                     // a panel of B, KC x NR: 3/4 of an L1 of 32K
    MC = 224 * 1024 / (KC * (int)sizeof(real)) / MR * MR,  // a block of A, MC x KC: under half an L2 of 512K
    NC = 4 * NR,                                           // columns per task: few, so threads finish together
    GROUP = 8, DEPTH = 8,                                  // panels, or numbers of each line, packed by a task
    BIG = 2048                                             // rows, columns packed at once: BIG x KC twice, in L3
};

// Without this, gcc keeps the sums in memory before and after the loop over k.
#ifdef __CUDACC__
#define UNROLL // nvcc hands the host code on to gcc but knows no such pragma
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// One tile of C from one panel of A (kc x MR) and one of B (kc x NR).
static __attribute__((noinline)) void kernel(real *c, int64_t ldc, const real *a, const real *b, int64_t kc, int accumulate) {
    vec sum[MR][NV];
    const vec zero = {0};
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int j = 0; j < NV; j++) sum[i][j] = zero;
        __builtin_prefetch(c + i * ldc); // the tile of C is needed only after the loop: start fetching it now
        __builtin_prefetch(c + i * ldc + NR - 1);
    }
    for (int64_t k = 0; k < kc; k++, a += MR, b += NR) {
        const vec *row = (const vec *)b;
        UNROLL for (int i = 0; i < MR; i++)
            UNROLL for (int j = 0; j < NV; j++) sum[i][j] += a[i] * row[j];
    }
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int j = 0; j < NV; j++) {
            vec_u *out = (vec_u *)(c + i * ldc) + j;
            if (accumulate) sum[i][j] += *out;
            *out = sum[i][j];
        }
}

// A tile that sticks out of C is computed whole (panels are padded with zeros), and its m x n corner kept.
static void corner_tile(real *c, int64_t ldc, const real *a, const real *b, int64_t kc, int accumulate, int64_t m, int64_t n) {
    real tile[MR * NR];
    kernel(tile, NR, a, b, kc, 0);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * ldc + j] = accumulate ? c[i * ldc + j] + tile[i * NR + j] : tile[i * NR + j];
}

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Turn 4 lines of 4 numbers into 4 columns, in registers: dst[k * W + i] = src[i * line + k].
static inline void transpose4(real *dst, int64_t W, const real *src, int64_t line) {
    const vec4_u a = *(const vec4_u *)src, b = *(const vec4_u *)(src + line);
    const vec4_u c = *(const vec4_u *)(src + 2 * line), d = *(const vec4_u *)(src + 3 * line);
    const vec4_u ac0 = {a[0], c[0], a[1], c[1]}, bd0 = {b[0], d[0], b[1], d[1]};
    const vec4_u ac2 = {a[2], c[2], a[3], c[3]}, bd2 = {b[2], d[2], b[3], d[3]};
    const vec4_u k0 = {ac0[0], bd0[0], ac0[1], bd0[1]}, k1 = {ac0[2], bd0[2], ac0[3], bd0[3]};
    const vec4_u k2 = {ac2[0], bd2[0], ac2[1], bd2[1]}, k3 = {ac2[2], bd2[2], ac2[3], bd2[3]};
    *(vec4_u *)dst = k0, *(vec4_u *)(dst + W) = k1, *(vec4_u *)(dst + 2 * W) = k2, *(vec4_u *)(dst + 3 * W) = k3;
}

// Pack n lines of kc numbers, W lines to a panel, with zeros where the last panel has fewer. From line to line
// of src it is `line` numbers, from one number of a line to the next `step`. Panel p (from line p W on) lies at dst + p W kc:
//     panel[k * W + i] = src[(p * W + i) * line + k * step]
static inline __attribute__((always_inline)) void pack(real *dst, const real *src, int64_t line, int64_t step,
                                                       int64_t n, int64_t kc, const int W) {
    int64_t packed = 0;
    if (line == 1) { // the lines lie side by side: walk through all whole panels, a few k at a time
        packed = n / W * W;
        #pragma omp for schedule(dynamic) nowait
        for (int64_t k0 = 0; k0 < kc; k0 += DEPTH)
            for (int64_t p = 0; p < packed; p += W)
                for (int64_t k = k0; k < at_most(k0 + DEPTH, kc); k++)
                    for (int i = 0; i < W; i += 4) { // the last four may overlap those before
                        const int i4 = i < W - 4 ? i : W - 4;
                        *(vec4_u *)(dst + p * kc + k * W + i4) = *(const vec4_u *)(src + p + i4 + k * step);
                    }
    }
    #pragma omp for schedule(dynamic) nowait
    for (int64_t g = packed; g < n; g += GROUP * W)
        for (int64_t p = g; p < at_most(g + GROUP * W, n); p += W) {
            real *d = dst + p * kc;
            const real *s = src + p * line;
            int64_t k = 0;
            if (step == 1 && n - p >= W)
                for (int i = 0; i < W; i += 4) { // few lines at a time: when they are 4096 bytes apart, an L1 of 8 ways can hold but 8
                    const int i4 = i < W - 4 ? i : W - 4;
                    for (k = 0; k + 4 <= kc; k += 4) {
                        __builtin_prefetch(s + (W + i4 + k / 4 % 4) * line + k); // the next panel: one of 4 lines at a time, for a cache line holds 16 numbers
                        transpose4(d + k * W + i4, W, s + i4 * line + k, line);
                    }
                }
            for (; k < kc; k++)
                for (int i = 0; i < W; i++) d[k * W + i] = i < n - p ? s[i * line + k * step] : 0;
        }
}

// Memory for the panels, kept from call to call. Each calling thread has its own, so that matmul can
// also be called from inside a parallel region (where it then runs on one thread).
static real *panels(int64_t count) {
    static __thread real *memory;
    static __thread int64_t capacity;
    if (count > capacity) {
        free(memory);
        memory = (real *)aligned_alloc(64, (size_t)(count * (int64_t)sizeof(real) + 63) / 64 * 64);
        if (memory == NULL) {
            FAIL("matmul: cannot allocate %lld numbers for packing", (long long)count);
        }
        capacity = count;
    }
    return memory;
}

// Cut n into pieces of nearly the same size, at most max each, in whole units.
static int64_t piece(int64_t n, int64_t max, int64_t unit) {
    int64_t pieces = (n + max - 1) / max;
    int64_t size = (n + pieces - 1) / pieces;
    return (size + unit - 1) / unit * unit;
}

// C (M,N) = A (M,K) · B (K,N), plus C if accumulate. A[i][k] is A[i*ras + k*cas], B[k][j] is
// B[k*rbs + j*cbs], C[i][j] is C[i*ldc + j]. C must not overlap A or B.
static void matmul(real *C, int64_t ldc, const real *A, int64_t ras, int64_t cas,
                   const real *B, int64_t rbs, int64_t cbs, int64_t M, int64_t N, int64_t K, int accumulate) {
    if (M <= 0 || N <= 0) return;
    if (K <= 0) {
        for (int64_t i = 0; i < M && !accumulate; i++)
            for (int64_t j = 0; j < N; j++) C[i * ldc + j] = 0;
        return;
    }
    const int64_t mb = piece(M, BIG, MR), nb = piece(N, BIG, NR), kb = piece(K, KC, 1), mc = piece(at_most(M, mb), MC, MR);
    real *const pa = panels((mb + nb) * kb + 64), *const pb = pa + (mb * kb + 63) / 64 * 64;
    #pragma omp parallel if (M * N * K > 65536)
    for (int64_t jb = 0; jb < N; jb += nb)
        for (int64_t ib = 0; ib < M; ib += mb)
            for (int64_t k = 0; k < K; k += kb) {
                const int64_t m = at_most(mb, M - ib), n = at_most(nb, N - jb), kc = at_most(kb, K - k);
                const int add = accumulate || k > 0;
                pack(pa, A + ib * ras + k * cas, ras, cas, m, kc, MR);
                pack(pb, B + k * rbs + jb * cbs, cbs, rbs, n, kc, NR);
                #pragma omp barrier
                #pragma omp for schedule(dynamic) collapse(2)
                for (int64_t ic = 0; ic < m; ic += mc)
                    for (int64_t jc = 0; jc < n; jc += NC)
                        for (int64_t j = jc; j < at_most(jc + NC, n); j += NR)
                            for (int64_t i = ic; i < at_most(ic + mc, m); i += MR) {
                                real *c = C + (ib + i) * ldc + jb + j;
                                if (m - i >= MR && n - j >= NR) kernel(c, ldc, pa + i * kc, pb + j * kc, kc, add);
                                else corner_tile(c, ldc, pa + i * kc, pb + j * kc, kc, add, at_most(MR, m - i), at_most(NR, n - j));
                            }
            }
}

// out (N,OC) = inp (N,C) W^T, W (OC,C)
static void matmul_forward(real *out, const real *inp, const real *w, int64_t N, int64_t C, int64_t OC) {
    matmul(out, OC, inp, C, 1, w, 1, C, N, OC, C, 0);
}

// dinp (N,C) = dout (N,OC) W;  dw (OC,C) = or += dout^T inp
static void matmul_backward(real *dinp, real *dw, const real *dout, const real *inp, const real *w, int64_t N, int64_t C, int64_t OC, int accumulate) {
    matmul(dinp, C, dout, OC, 1, w, C, 1, N, C, OC, 0);
    matmul(dw, C, dout, 1, OC, inp, C, 1, OC, C, N, accumulate);
}

// out (N,C): row inputs[n] of the embedding (V,C)
static void embedding_forward(real *out, const real *embedding, const int32_t *inputs, int64_t N, int64_t C) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) { memcpy(out + n * C, embedding + inputs[n] * C, (size_t)C * sizeof(real)); }
}

// dembedding (V,C) += dout: threads share out the columns, since a token may occur many times
static void embedding_backward(real *dembedding, const real *dout, const int32_t *inputs, int64_t N, int64_t C) {
    #pragma omp parallel for schedule(static)
    for (int64_t strip = 0; strip < NUM_BLOCKS; strip++) {
        int64_t begin = C * strip / NUM_BLOCKS, end = C * (strip + 1) / NUM_BLOCKS;
        for (int64_t n = 0; n < N; n++) {
            real *to = dembedding + inputs[n] * C;
            for (int64_t c = begin; c < end; c++) { to[c] += dout[n * C + c]; }
        }
    }
}

// Norm(x) = x / sqrt(mean(x^2) + eps), then gamma where it isn't folded into the next map.
// Rows of G groups of D: inp, out (N,G,D) with `stride` from row to row; rstd (N,G); gamma (G,D) or NULL.
// A Pre-Norm has G = 1, D = C, gamma NULL; QK-norm and DNP on q, k, v norm each head: G heads, D = HS.
static void rmsnorm_forward(real *out, real *rstd, const real *inp, const real *gamma, int64_t N, int64_t G, int64_t D, int64_t stride) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t g = 0; g < G; g++) {
            const real *x = inp + n * stride + g * D;
            real *y = out + n * stride + g * D, sum = 0;
            #pragma omp simd reduction(+:sum)
            for (int64_t d = 0; d < D; d++) { sum += x[d] * x[d]; }
            real scale = (real)(1 / sqrt((double)sum / (double)D + NORM_EPS));
            rstd[n * G + g] = scale;
            if (gamma) { for (int64_t d = 0; d < D; d++) { y[d] = gamma[g * D + d] * (x[d] * scale); } }
            else       { for (int64_t d = 0; d < D; d++) { y[d] = x[d] * scale; } }
        }
    }
}

// unit = x rstd, dunit = gamma dout:  dinp (+)= rstd (dunit - unit mean(dunit unit)),  dgamma += sum_n dout unit.
// partial: (NUM_BLOCKS, G*D) work space for dgamma. accumulate: add to dinp instead of writing it.
static void rmsnorm_backward(real *dinp, real *dgamma, real *partial, const real *dout, const real *inp, const real *rstd,
                             const real *gamma, int64_t N, int64_t G, int64_t D, int64_t stride, int accumulate) {
    #pragma omp parallel for schedule(static)
    for (int block = 0; block < NUM_BLOCKS; block++) {
        real *part = partial + block * G * D;
        if (gamma) { memset(part, 0, (size_t)(G * D) * sizeof(real)); }
        for (int64_t n = N * block / NUM_BLOCKS; n < N * (block + 1) / NUM_BLOCKS; n++) {
            for (int64_t g = 0; g < G; g++) {
                const real *x = inp + n * stride + g * D, *dy = dout + n * stride + g * D, *scale = gamma ? gamma + g * D : NULL;
                real *dx = dinp + n * stride + g * D, *dscale = part + g * D, r = rstd[n * G + g], dot = 0;
                if (scale) {
                    #pragma omp simd reduction(+:dot)
                    for (int64_t d = 0; d < D; d++) { real t = dy[d] * x[d]; dot += scale[d] * t; dscale[d] += t * r; }
                } else {
                    #pragma omp simd reduction(+:dot)
                    for (int64_t d = 0; d < D; d++) { dot += dy[d] * x[d]; }
                }
                real along = r * r * r * dot / (real)D; // rstd * mean(dunit unit) / |x|: x carries one more rstd
                for (int64_t d = 0; d < D; d++) {
                    real dunit = scale ? scale[d] * dy[d] : dy[d];
                    dx[d] = (accumulate ? dx[d] : (real)0) + r * dunit - along * x[d];
                }
            }
        }
    }
    if (!gamma) { return; }
    for (int block = 0; block < NUM_BLOCKS; block++) {
        for (int64_t i = 0; i < G * D; i++) { dgamma[i] += partial[block * G * D + i]; }
    }
}

// RoPE: pair (i, i + HS/2) of each query and key head turns by the angle t * ROPE_THETA^(-2i/HS), in place.
// qkv (B,T,stride): `heads` heads from the row's start (queries and keys; values don't turn).
// direction +1 forward, -1 backward: the inverse of a rotation is its transpose.
#define ROPE_THETA 10000.0
static void rope(real *qkv, const real *cosines, const real *sines, int64_t N, int T, int heads, int HS, int64_t stride, real direction) {
    int half = HS / 2;
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const real *cosine = cosines + (n % T) * half, *sine = sines + (n % T) * half;
        for (int h = 0; h < heads; h++) {
            real *x = qkv + n * stride + (int64_t)h * HS, *y = x + half;
            for (int i = 0; i < half; i++) {
                real c = cosine[i], s = direction * sine[i], xi = x[i], yi = y[i];
                x[i] = xi * c - yi * s;
                y[i] = xi * s + yi * c;
            }
        }
    }
}

// Causal self-attention, blocked ("flash"), forward and backward.
//
// For one query head, with q_t, k_s, v_s vectors of HS numbers and a = 1/sqrt(HS):
//     S_ts = a * q_t . k_s  (only s <= t)     P_ts = exp(S_ts) / sum_s' exp(S_ts')     o_t = sum_s P_ts v_s
// The textbook code stores the T x T matrices S and P. FlashAttention (Dao et al. 2022, arXiv 2205.14135) showed that
// they are never needed whole: walk over the keys tile by tile and keep, per query, the largest score so far m, the sum
// so far l = sum exp(S - m), and the unnormalized output so far o = sum exp(S - m) v. When a tile brings a larger
// maximum m', everything gathered so far was measured against the wrong reference, and one factor mends it:
//     l <- l * exp(m - m') + sum_tile exp(S - m')        o <- o * exp(m - m') + sum_tile exp(S - m') v
// At the end out = o / l, and lse = m + log(l) is the only thing the backward pass needs to rebuild P = exp(S - lse).
// The backward recomputes each tile of P. With dP_ts = do_t . v_s and D_t = do_t . o_t (= sum_s P_ts dP_ts):
//     dS = P * (dP - D)    dv_s = sum_t P_ts do_t    dk_s = a * sum_t dS_ts q_t    dq_t = a * sum_s dS_ts k_s
//
// Everything expensive is a product of two small tiles, so the plan is: copy tiles out of the big strided tensors into
// per-thread scratch (contiguous, zero-padded, transposed where a product wants it), and run one fast kernel on them.

enum {
    ATT_VL = VEC_BYTES / sizeof(real),
    ATT_MR = 6,                                     // kernel block: 6 rows x 2 vectors = 12 running sums, which with 2
    ATT_NR = 2 * ATT_VL,                            // vectors of B and 1 of A just fit the 16 registers of AVX2
    ATT_TILE = 96,                                  // queries or keys per tile; a multiple of ATT_MR and ATT_NR
    ATT_MAX_HS = 256,                               // largest head size (config_resolve checks it): sets the size of the scratch
    ATT_LINE = 64 / sizeof(real),                   // one cache line of skew per row, see att_ld
    ATT_SCRATCH = 8 * ATT_TILE * (ATT_MAX_HS + ATT_LINE) + 2 * ATT_TILE * ATT_TILE + 2 * ATT_TILE
};
static __thread real att_scratch[ATT_SCRATCH] __attribute__((aligned(64)));

static inline int att_min(int a, int b) { return a < b ? a : b; }
static inline int att_max(int a, int b) { return a > b ? a : b; }
static inline int att_up(int n, int m) { return (n + m - 1) / m * m; }
// Row length of a (TILE, HS) scratch tile: HS padded to whole kernel blocks, plus one cache line, because rows a power
// of two apart would all compete for the same few cache sets.
static inline int att_ld(int HS) { return att_up(HS, ATT_NR) + ATT_LINE; }

// C (6 x NR) = or += sum over k in [k0,k1) of A(i,k) * B(k,:). Each B vector loaded is used 6 times and each A number
// twice; the 12 independent sums hide the latency of the fused multiply-add.
static inline __attribute__((always_inline)) void att_block(real *__restrict__ c, int ldc, const real *__restrict__ a,
        int64_t ai, int64_t ak, const real *__restrict__ b, int ldb, int k0, int k1, int add) {
    vec_u acc[ATT_MR][2];  memset(acc, 0, sizeof(acc));
    for (int k = k0; k < k1; k++) {
        vec_u b0 = *(const vec_u *)(b + (int64_t)k * ldb);
        vec_u b1 = *(const vec_u *)(b + (int64_t)k * ldb + ATT_VL);
        for (int i = 0; i < ATT_MR; i++) {
            const real x = a[i * ai + k * ak];
            acc[i][0] += x * b0;  acc[i][1] += x * b1;
        }
    }
    for (int i = 0; i < ATT_MR; i++) {
        vec_u *ci = (vec_u *)(c + (int64_t)i * ldc);
        if (add) { acc[i][0] += ci[0]; acc[i][1] += ci[1]; }
        ci[0] = acc[i][0];  ci[1] = acc[i][1];
    }
}

// C (M x N) = or += A (M x K) * B (K x N) on scratch tiles. M is rounded up to ATT_MR and N to ATT_NR (tiles have room).
// A(i,k) is a[i*lda+k], or a[k*lda+i] if transA. On a diagonal tile half of P is zero, and `part` says which work to skip:
enum { ATT_ALL, ATT_UPPER, ATT_LOWER, ATT_K_TO_ROW, ATT_K_FROM_ROW };
// UPPER, LOWER: only blocks of C touching column >= row, column <= row. K_TO_ROW, K_FROM_ROW: only k <= row, k >= row.
static void att_mm(real *c, int ldc, const real *a, int lda, int transA, const real *b, int ldb,
        int M, int N, int K, int add, int part) {
    for (int j = 0; j < N; j += ATT_NR) {           // columns outside: this strip of B stays in the L1 cache
        for (int i = 0; i < M; i += ATT_MR) {
            if (part == ATT_UPPER && i > j + ATT_NR - 1) { break; }
            if (part == ATT_LOWER && j > i + ATT_MR - 1) { continue; }
            int k0 = part == ATT_K_FROM_ROW ? i : 0;
            int k1 = part == ATT_K_TO_ROW ? att_min(K, i + ATT_MR) : K;
            real *cc = c + (int64_t)i * ldc + j;
            if (transA) { att_block(cc, ldc, a + i, 1, lda, b + j, ldb, k0, k1, add); }
            else        { att_block(cc, ldc, a + (int64_t)i * lda, lda, 1, b + j, ldb, k0, k1, add); }
        }
    }
}

// dst (rows up to a multiple of ATT_MR, ld) = n rows of HS numbers, `stride` apart in src, padded with zeros.
static void att_load(real *__restrict__ dst, int ld, const real *__restrict__ src, int64_t stride, int n, int HS) {
    for (int i = 0; i < att_up(n, ATT_MR); i++) {
        real *d = dst + (int64_t)i * ld;
        if (i < n) { memcpy(d, src + i * stride, (size_t)HS * sizeof(real)); }
        else { memset(d, 0, (size_t)HS * sizeof(real)); }
        for (int j = HS; j < ld; j++) { d[j] = 0; }
    }
}

// dst (HS, TILE) = scale * transpose of n rows of HS numbers; columns padded with zeros to a multiple of ATT_NR.
static void att_load_t(real *__restrict__ dst, const real *__restrict__ src, int64_t stride, int n, int HS, real scale) {
    const int squares = HS % 4 == 0 ? n / 4 * 4 : 0;
    for (int i = 0; i < squares; i += 4) {
        for (int d = 0; d < HS; d += 4) { transpose4(dst + (int64_t)d * ATT_TILE + i, ATT_TILE, src + i * stride + d, stride); }
    }
    for (int d = 0; d < HS; d++) {
        real *to = dst + (int64_t)d * ATT_TILE;
        for (int i = 0; i < squares; i++) { to[i] *= scale; }
        for (int i = squares; i < att_up(n, ATT_NR); i++) { to[i] = i < n ? src[i * stride + d] * scale : 0; }
    }
}

// One tile of queries of one head against all earlier keys. Scores are kept transposed, st (keys, queries): then max and
// sum over the keys are plain elementwise operations between rows, and only q is transposed, once, not every key tile.
static void att_forward_tile(real *out, int64_t ostride, real *lse, const real *q, const real *k, const real *v,
        int64_t stride, int t0, int T, int HS) {
    const int ld = att_ld(HS), n = att_min(ATT_TILE, T - t0), nv = att_up(n, ATT_NR);
    real *qt = att_scratch, *st = qt + HS * ATT_TILE, *kk = st + ATT_TILE * ATT_TILE, *vv = kk + ATT_TILE * ld;
    real *o = vv + ATT_TILE * ld, *l = o + ATT_TILE * ld;   // qt (HS,TILE) st (TILE,TILE) kk, vv, o (TILE,ld) l (TILE)
    real m[ATT_TILE], fix[ATT_TILE];
    att_load_t(qt, q + t0 * stride, stride, n, HS, (real)(1 / sqrt((double)HS)));
    const real lowest = sizeof(real) == sizeof(float) ? (real)-3.0e38 : (real)-1.0e308; // finite: -inf - -inf is NaN
    for (int j = 0; j < nv; j++) { m[j] = lowest; l[j] = 0; }
    for (int s0 = 0; s0 <= t0; s0 += ATT_TILE) {
        const int diag = s0 == t0, ns = att_min(ATT_TILE, T - s0);
        att_load(kk, ld, k + s0 * stride, stride, ns, HS);
        att_load(vv, ld, v + s0 * stride, stride, ns, HS);
        att_mm(st, ATT_TILE, kk, ld, 0, qt, ATT_TILE, ns, n, HS, 0, diag ? ATT_UPPER : ATT_ALL);
        for (int j = 0; j < nv; j++) { fix[j] = m[j]; }
        for (int i = 0; i < ns; i++) {
            real *s = st + i * ATT_TILE;
            // The product P V reads P in blocks of ATT_MR queries, so that far left of the diagonal it must be masked.
            const int j0 = diag ? att_max(0, i - ATT_MR + 1) : 0;
            if (diag) { for (int j = j0; j < i; j++) { s[j] = -INFINITY; } }
            for (int j = j0; j < nv; j++) { m[j] = s[j] > m[j] ? s[j] : m[j]; }   // a NaN is passed over here, but not by exp
        }
        for (int j = 0; j < nv; j++) { fix[j] = exp_fast(fix[j] - m[j]); l[j] *= fix[j]; }
        for (int i = 0; i < ns; i++) {
            real *s = st + i * ATT_TILE;
            for (int j = diag ? att_max(0, i - ATT_MR + 1) : 0; j < nv; j++) {
                s[j] = exp_fast(s[j] - m[j]);  l[j] += s[j];
            }
        }
        if (s0 > 0) {
            for (int i = 0; i < n; i++) { for (int d = 0; d < ld; d++) { o[i * ld + d] *= fix[i]; } }
        }
        att_mm(o, ld, st, ATT_TILE, 1, vv, ld, n, HS, ns, s0 > 0, diag ? ATT_K_TO_ROW : ATT_ALL);
    }
    for (int i = 0; i < n; i++) {
        const real inv = 1 / l[i];
        for (int d = 0; d < HS; d++) { out[(t0 + i) * ostride + d] = o[i * ld + d] * inv; }
        lse[t0 + i] = m[i] + (real)log((double)l[i]);
    }
}

// qkv (B,T,(NH+2*KVH)*HS): per token NH query heads, then KVH key heads, then KVH value heads. out (B,T,NH*HS).
// lse (B,NH,T). Query head h uses key/value head h / (NH/KVH). Every (b, h, tile of queries) is an independent task.
static void attention_forward(real *out, real *lse, const real *qkv, int B, int T, int NH, int KVH, int HS) {
    const int64_t C = (int64_t)NH * HS, stride = (int64_t)(NH + 2 * KVH) * HS, tiles = (T + ATT_TILE - 1) / ATT_TILE;
    #pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < tiles * B * NH; task++) {
        const int t0 = (int)(tiles - 1 - task / (B * NH)) * ATT_TILE;  // longest rows first: short ones fill the gaps
        const int b = (int)(task % (B * NH)) / NH, h = (int)(task % NH);
        const real *x = qkv + (int64_t)b * T * stride, *k = x + (NH + h / (NH / KVH)) * (int64_t)HS;
        att_forward_tile(out + (int64_t)b * T * C + h * HS, C, lse + ((int64_t)b * NH + h) * T, x + h * HS, k,
                         k + (int64_t)KVH * HS, stride, t0, T, HS);
    }
}

// The tensors of the backward pass, to hand them around together.
typedef struct att_args {
    real *dqkv; const real *dout, *qkv, *lse, *D;   // D (B,NH,T)
    int B, T, NH, KVH, HS;
} att_args;

// Backward for key tiles [s0,s1) against query tiles [q0,q1) (in tokens) of one (b, key/value head) and its group of query
// heads. Writes dk and dv of the key tiles if do_kv, and adds to (first key tile: sets) dq of the queries if do_q.
static void att_backward_tiles(att_args A, int b, int kvh, int s0, int s1, int q0, int q1, int do_kv, int do_q) {
    const int HS = A.HS, T = A.T, G = A.NH / A.KVH, ld = att_ld(HS), TL = ATT_TILE;
    const int64_t C = (int64_t)A.NH * HS, stride = (int64_t)(A.NH + 2 * A.KVH) * HS, dv_off = (int64_t)A.KVH * HS;
    const int64_t row0 = (int64_t)b * T, koff = (A.NH + kvh) * (int64_t)HS;
    const real scale = (real)(1 / sqrt((double)HS));
    real *kt = att_scratch, *vt = kt + HS * TL, *kk = vt + HS * TL, *qq = kk + TL * ld, *go = qq + TL * ld;
    real *dk = go + TL * ld, *dv = dk + TL * ld, *dq = dv + TL * ld, *p = dq + TL * ld, *ds = p + TL * TL;
    for (; s0 < s1; s0 += TL) {                     // kt, vt (HS,TILE)   kk, qq, go, dk, dv, dq (TILE,ld)   p, ds (TILE,TILE)
        const int ns = att_min(TL, T - s0);
        const real *k = A.qkv + (row0 + s0) * stride + koff;
        att_load(kk, ld, k, stride, ns, HS);
        att_load_t(kt, k, stride, ns, HS, 1);
        att_load_t(vt, k + dv_off, stride, ns, HS, 1);
        memset(dk, 0, 2 * sizeof(real) * (size_t)(TL * ld));    // dk and dv are neighbours
        for (int h = kvh * G; h < (kvh + 1) * G; h++) {
            for (int t0 = att_max(s0, q0); t0 < q1; t0 += TL) {
                const int n = att_min(TL, T - t0), diag = t0 == s0;
                const real *lse = A.lse + ((int64_t)b * A.NH + h) * T + t0, *D = A.D + ((int64_t)b * A.NH + h) * T + t0;
                att_load(qq, ld, A.qkv + (row0 + t0) * stride + h * HS, stride, n, HS);
                att_load(go, ld, A.dout + (row0 + t0) * C + h * HS, C, n, HS);
                att_mm(p, TL, qq, ld, 0, kt, TL, n, ns, HS, 0, diag ? ATT_LOWER : ATT_ALL);     // scores
                att_mm(ds, TL, go, ld, 0, vt, TL, n, ns, HS, 0, diag ? ATT_LOWER : ATT_ALL);    // dP
                for (int i = 0; i < n; i++) {       // turn scores into P and dP into a * dS, in place
                    real *pi = p + i * TL, *di = ds + i * TL;
                    const real L = lse[i], Di = D[i];
                    const int m = diag ? i + 1 : ns;
                    for (int j = 0; j < m; j++) {
                        pi[j] = exp_fast(pi[j] * scale - L);
                        di[j] = pi[j] * (di[j] - Di) * scale;
                    }
                    if (diag) { for (int j = m; j < att_min(TL, m + ATT_MR); j++) { pi[j] = di[j] = 0; } }
                }
                if (do_kv) {
                    att_mm(dv, ld, p, TL, 1, go, ld, ns, HS, n, 1, diag ? ATT_K_FROM_ROW : ATT_ALL);
                    att_mm(dk, ld, ds, TL, 1, qq, ld, ns, HS, n, 1, diag ? ATT_K_FROM_ROW : ATT_ALL);
                }
                if (!do_q) { continue; }
                att_mm(dq, ld, ds, TL, 0, kk, ld, n, HS, ns, 0, diag ? ATT_K_TO_ROW : ATT_ALL);
                for (int i = 0; i < n; i++) {
                    real *dst = A.dqkv + (row0 + t0 + i) * stride + h * HS, *src = dq + i * ld;
                    for (int d = 0; d < HS; d++) { dst[d] = s0 > 0 ? dst[d] + src[d] : src[d]; }
                }
            }
        }
        for (int i = 0; do_kv && i < ns; i++) {
            real *dst = A.dqkv + (row0 + s0 + i) * stride + koff;
            for (int d = 0; d < HS; d++) { dst[d] = dk[i * ld + d];  dst[dv_off + d] = dv[i * ld + d]; }
        }
    }
}

// dqkv (same shape as qkv) is overwritten. Best is one task per (b, key/value head): it owns all gradients it adds to and
// computes every P tile once (5 tile products). With too few such units for the threads, split twice instead: dk, dv by
// tile of keys, then dq by tile of queries (2 + 5 products, P computed twice). Both add in the same order: same bits. D (B,NH,T) is work space.
static void attention_backward(real *dqkv, real *D, const real *dout, const real *qkv, const real *out, const real *lse,
        int B, int T, int NH, int KVH, int HS) {
    const att_args A = { dqkv, dout, qkv, lse, D, B, T, NH, KVH, HS };
    #pragma omp parallel for
    for (int64_t bt = 0; bt < (int64_t)B * T; bt++) {
        for (int h = 0; h < NH; h++) {
            const real *g = dout + (bt * NH + h) * HS, *o = out + (bt * NH + h) * HS;
            real sum = 0;
            for (int d = 0; d < HS; d++) { sum += g[d] * o[d]; }
            D[(bt / T * NH + h) * T + bt % T] = sum;
        }
    }
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
#else
    const int threads = 1;
#endif
    const int64_t units = (int64_t)B * KVH, tiles = (T + ATT_TILE - 1) / ATT_TILE;
    if ((units + threads - 1) / threads * threads * 5 <= units * 7) {   // idle threads cost less than 7/5 the work
        #pragma omp parallel for schedule(dynamic)
        for (int64_t u = 0; u < units; u++) { att_backward_tiles(A, (int)(u / KVH), (int)(u % KVH), 0, T, 0, T, 1, 1); }
    } else {
        #pragma omp parallel for schedule(dynamic)
        for (int64_t task = 0; task < 2 * units * tiles; task++) {      // the two halves alternate, longest tasks first
            const int64_t u = task / 2 % units, x = task / 2 / units;
            const int b = (int)(u / KVH), kvh = (int)(u % KVH);
            const int s = (int)x * ATT_TILE, t = (int)(tiles - 1 - x) * ATT_TILE;
            if (task % 2) { att_backward_tiles(A, b, kvh, s, s + 1, 0, T, 1, 0); }
            else          { att_backward_tiles(A, b, kvh, 0, t + 1, t, t + 1, 0, 1); }
        }
    }
}

// h (N,H) = silu(gate) * up, silu(z) = z / (1 + e^-z); gu (N,2H) holds gate | up
static void swiglu_forward(real *h, const real *gu, int64_t N, int64_t H) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const real *gate = gu + n * 2 * H, *up = gate + H;
        for (int64_t i = 0; i < H; i++) { h[n * H + i] = gate[i] / (1 + exp_fast(-gate[i])) * up[i]; }
    }
}

static void swiglu_backward(real *dgu, const real *dh, const real *gu, int64_t N, int64_t H) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const real *gate = gu + n * 2 * H, *up = gate + H, *d = dh + n * H;
        real *dgate = dgu + n * 2 * H, *dup = dgate + H;
        for (int64_t i = 0; i < H; i++) {
            real sigmoid = 1 / (1 + exp_fast(-gate[i])), silu = gate[i] * sigmoid;
            dgate[i] = d[i] * up[i] * (sigmoid + silu * (1 - sigmoid));
            dup[i] = d[i] * silu;
        }
    }
}

// out = a + b, n elements
static void residual_forward(real *out, const real *a, const real *b, int64_t n) {
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) { out[i] = a[i] + b[i]; }
}

// Cross-entropy of one row of logits z (V); turns z into grad_scale * dloss/dz in place unless grad_scale is 0.
static double cross_entropy_row(real *z, int32_t target, int64_t V, real grad_scale) {
    enum { LANES = 64 / sizeof(real) }; // a maximum a lane: without fast-math compilers don't vectorize one maximum
    real lanes[LANES], top = -INFINITY, sum = 0;
    for (int i = 0; i < LANES; i++) { lanes[i] = -INFINITY; }
    for (int64_t v = 0; v + LANES <= V; v += LANES) {
        for (int i = 0; i < LANES; i++) { lanes[i] = z[v + i] > lanes[i] ? z[v + i] : lanes[i]; }
    }
    for (int i = 0; i < LANES; i++) { top = lanes[i] > top ? lanes[i] : top; }
    for (int64_t v = V / LANES * LANES; v < V; v++) { top = z[v] > top ? z[v] : top; } // a NaN is passed over here, but not by exp
    double at_target = z[target];
    if (grad_scale == 0) {
        #pragma omp simd reduction(+:sum)
        for (int64_t v = 0; v < V; v++) { sum += exp_fast(z[v] - top); }
    } else {
        #pragma omp simd reduction(+:sum)
        for (int64_t v = 0; v < V; v++) { real e = exp_fast(z[v] - top); z[v] = e; sum += e; }
        real scale = grad_scale / sum;
        #pragma omp simd
        for (int64_t v = 0; v < V; v++) { z[v] *= scale; }
        z[target] -= grad_scale;
    }
    return log((double)sum) + (double)top - at_target;
}

// Cross-entropy of `rows` rows of logits (rows,V). With `norm` the logits are first normed over V and scaled by
// gamma (DNP at the head): then z holds the raw logits, and dgamma is accumulated. work: (NUM_BLOCKS,V), partial
// likewise, used only with norm. losses (rows) receives a loss a row.
static void classifier(real *logits, double *losses, const int32_t *targets, int64_t rows, int64_t V, real grad_scale,
                       int norm, const real *gamma, real *dgamma, real *work, real *partial) {
    #pragma omp parallel for schedule(dynamic, 1)
    for (int block = 0; block < NUM_BLOCKS; block++) {
        real *y = work + block * V, *part = partial + block * V;
        if (gamma && grad_scale != 0) { memset(part, 0, (size_t)V * sizeof(real)); }
        for (int64_t n = rows * block / NUM_BLOCKS; n < rows * (block + 1) / NUM_BLOCKS; n++) {
            real *z = logits + n * V;
            if (!norm) { losses[n] = cross_entropy_row(z, targets[n], V, grad_scale); continue; }
            real sum = 0, dot = 0;
            #pragma omp simd reduction(+:sum)
            for (int64_t v = 0; v < V; v++) { sum += z[v] * z[v]; }
            real r = (real)(1 / sqrt((double)sum / (double)V + NORM_EPS));
            for (int64_t v = 0; v < V; v++) { y[v] = gamma ? gamma[v] * (z[v] * r) : z[v] * r; }
            losses[n] = cross_entropy_row(y, targets[n], V, grad_scale);
            if (grad_scale == 0) { continue; }
            if (gamma) { // y is now dy: dgamma += dy unit, dunit = gamma dy
                for (int64_t v = 0; v < V; v++) { part[v] += y[v] * (z[v] * r); y[v] *= gamma[v]; }
            }
            #pragma omp simd reduction(+:dot)
            for (int64_t v = 0; v < V; v++) { dot += y[v] * z[v]; }
            real along = r * r * r * dot / (real)V;
            for (int64_t v = 0; v < V; v++) { z[v] = r * y[v] - along * z[v]; }
        }
    }
    if (!norm || !gamma || grad_scale == 0) { return; }
    for (int block = 0; block < NUM_BLOCKS; block++) {
        for (int64_t v = 0; v < V; v++) { dgamma[v] += partial[block * V + v]; }
    }
}

// ----------------------------------------------------------------------------------------------------
// 5. The model: a plain Llama-style GPT over effective weights. x -> x + attn(Norm(x)) -> x + ffn(Norm(x)).

// Takes tensors from one block of memory, which is mapped once. With base NULL it only counts.
// Under AddressSanitizer each tensor is an allocation of its own, so that overruns are caught.
typedef struct Arena { char *base; size_t used; int separate; } Arena;
#if defined(__SANITIZE_ADDRESS__)
#define ARENA_SEPARATE 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_SEPARATE 1
#endif
#endif
#ifndef ARENA_SEPARATE
#define ARENA_SEPARATE 0
#endif

static void *arena_bytes(Arena *arena, int64_t bytes) {
    size_t at = arena->used;
    arena->used += ((size_t)bytes + 63) / 64 * 64;
    if (!arena->base || bytes == 0) { return NULL; }
    if (!ARENA_SEPARATE) { return arena->base + at; }
    void *own = calloc(1, (size_t)bytes);
    if (!own) { FAIL("out of memory"); }
    return own;
}
static real *arena_take(Arena *arena, int64_t count) { return (real *)arena_bytes(arena, count * (int64_t)sizeof(real)); }

typedef struct MemoryUse { size_t theta, effective, grads, moments, activations, work, total; } MemoryUse; // bytes

// Does map i need a W~ of its own? q k v, and gate up, stay side by side, so they are copied together or not at all.
static int map_has_copy(const GPT *m, const LinearMap *map) {
    int side_by_side = map->site == SITE_Q || map->site == SITE_K || map->site == SITE_V || map->site == SITE_GATE || map->site == SITE_UP;
    return side_by_side ? m->cfg.norm_scale : (map->gamma_a >= 0 || map->gamma_b >= 0);
}

static int any_norm(const LinearMap *maps, int count) {
    for (int i = 0; i < count; i++) { if (maps[i].norm) { return 1; } }
    return 0;
}

static void layout_ffn(FfnActs *s, const LinearMap *maps, Arena *a, int64_t n) {
    int64_t H = maps[0].rows, C = maps[0].cols;
    int gu_norm = any_norm(maps, 2), down_norm = maps[2].norm;
    s->gu = arena_take(a, n * 2 * H);
    s->gu_raw = gu_norm ? arena_take(a, n * 2 * H) : s->gu;
    s->gu_rstd = arena_take(a, gu_norm ? 2 * n : 0);
    s->h = arena_take(a, n * H);
    s->down_raw = arena_take(a, down_norm ? n * C : 0);
    s->down_rstd = arena_take(a, down_norm ? n : 0);
}

static void layout_moe(const GPT *m, MoeActs *s, const LinearMap *expert_maps, Arena *a, int64_t N) {
    int64_t E = m->cfg.experts, K = m->cfg.top_k, C = m->cfg.channels, rows = N * K;
    s->probs = arena_take(a, N * E);
    s->lse = arena_take(a, N);
    s->weights = arena_take(a, rows);
    s->chosen = (int32_t *)arena_bytes(a, rows * (int64_t)sizeof(int32_t));
    s->row = (int32_t *)arena_bytes(a, rows * (int64_t)sizeof(int32_t));
    s->begin = (int64_t *)arena_bytes(a, (E + 1) * (int64_t)sizeof(int64_t));
    s->x = arena_take(a, rows * C);
    s->y = arena_take(a, rows * C);
    layout_ffn(&s->experts, expert_maps, a, rows);
    s->sum = arena_take(a, m->cfg.post_norm ? N * C : 0);
    s->sum_rstd = arena_take(a, m->cfg.post_norm ? N : 0);
}

static void layout_activations(GPT *m, Arena *a, int64_t B, int64_t T) {
    const Config *cfg = &m->cfg;
    int64_t N = B * T, C = cfg->channels, Q = m->qkv_width, att = (int64_t)cfg->heads * m->head_size, H = 0; // H: the widest
    for (int i = 0; i < m->num_maps - 1; i++) { if (m->maps[i].site == SITE_GATE && m->maps[i].rows > H) { H = m->maps[i].rows; } }
    for (int l = 0; l < cfg->layers; l++) {
        LayerActs *s = &m->acts[l];
        const LinearMap *maps = gpt_layer_maps(m, l);
        s->x = arena_take(a, N * C);
        s->ln1 = arena_take(a, N * C);
        s->ln1_rstd = arena_take(a, N);
        s->qkv = arena_take(a, N * Q);
        int qkv_norm = any_norm(maps + SITE_Q, 3);
        s->qkv_raw = qkv_norm ? arena_take(a, N * Q) : s->qkv;
        s->qkv_rstd = arena_take(a, qkv_norm ? N * (cfg->heads + 2 * cfg->kv_heads) : 0);
        s->att = arena_take(a, N * att);
        s->lse = arena_take(a, N * cfg->heads);
        s->o_raw = arena_take(a, maps[SITE_O].norm ? N * C : 0);
        s->o_rstd = arena_take(a, maps[SITE_O].norm ? N : 0);
        s->x2 = arena_take(a, N * C);
        s->ln2 = arena_take(a, N * C);
        s->ln2_rstd = arena_take(a, N);
        if (gpt_has_dense(m)) { layout_ffn(&s->ffn, gpt_ffn_maps(m, l, -1), a, N); }
        if (cfg->experts) { layout_moe(m, &s->moe, gpt_ffn_maps(m, l, 0), a, N); }
    }
    m->x_final = arena_take(a, N * C);
    m->ln_final = arena_take(a, N * C);
    m->ln_final_rstd = arena_take(a, N);
    m->d_ln_final = arena_take(a, N * C);
    int64_t wide = Q > 2 * H ? Q : 2 * H;
    m->att_dot = arena_take(a, N * cfg->heads);
    m->dx = arena_take(a, N * C);
    m->d_branch = arena_take(a, N * C);
    m->d_wide = arena_take(a, N * wide);
    m->d_wide_raw = any_norm(m->maps, m->num_maps - 1) ? arena_take(a, N * wide) : m->d_wide;
    m->d_att = arena_take(a, N * (att > H ? att : H));
    m->d_rows = arena_take(a, cfg->experts ? N * cfg->top_k * C : 0);
    m->d_logits = arena_take(a, N * cfg->experts);
    m->d_weights = arena_take(a, cfg->experts ? N * cfg->top_k : 0);
    m->d_sum = arena_take(a, cfg->experts && cfg->post_norm ? N * C : 0);
    m->d_shared = arena_take(a, cfg->experts && gpt_has_dense(m) ? N * C : 0);
}

// Lays out every buffer for micro-batches of up to B sequences of T. Called twice: to count, then to place.
static MemoryUse gpt_layout(GPT *m, Arena *a, int64_t B, int64_t T) {
    const Config *cfg = &m->cfg;
    MemoryUse use;
    int64_t N = B * T, V = cfg->vocab, C = cfg->channels, widest = V, biggest = 0, side = 0;
    LinearMap *head = gpt_head(m);
    m->theta = arena_take(a, m->num_theta);
    use.theta = a->used;
    m->gamma = arena_take(a, m->num_gamma);
    m->dgamma = arena_take(a, m->num_gamma);
    size_t before = a->used;
    m->grads = arena_take(a, m->num_theta);
    real *tied_dw = arena_take(a, cfg->tie_embeddings && map_has_copy(m, head) ? V * C : 0);
    use.grads = a->used - before;
    int64_t copies = 0;
    for (int i = 0; i < m->num_maps; i++) { if (map_has_copy(m, &m->maps[i])) { copies += m->maps[i].rows * m->maps[i].cols; } }
    real *copy = arena_take(a, copies);
    use.effective = a->used - use.theta - use.grads;
    for (int i = 0; i < m->num_maps && a->base; i++) { // point each map at its W~ and dL/dW~
        LinearMap *map = &m->maps[i];
        int64_t offset = m->params[map->weight].offset;
        map->w_eff = m->theta + offset;
        map->dw_eff = m->grads + offset;
        map->norm_eff = gpt_gamma(m, map->gamma_norm);
        map->dnorm_eff = gpt_dgamma(m, map->gamma_norm);
        if (!map_has_copy(m, map)) { continue; }
        map->w_eff = copy;
        copy += map->rows * map->cols;
        if (tied_dw && map == head) { map->dw_eff = tied_dw; }
    }
    before = a->used;
    m->moments = arena_take(a, m->num_moments);
    use.moments = a->used - before;
    before = a->used;
    layout_activations(m, a, B, T);
    use.activations = a->used - before;
    before = a->used;
    for (int i = 0; i < m->num_maps; i++) {
        const LinearMap *map = &m->maps[i];
        if (map->cols > widest) { widest = map->cols; }
        if (map->rows > widest) { widest = map->rows; }
        if (cfg->optimizer != OPTIMIZER_MUON || !role_table[m->params[map->weight].role].muon) { continue; }
        if (map->rows * map->cols > biggest) { biggest = map->rows * map->cols; }
        int64_t small = map->rows < map->cols ? map->rows : map->cols;
        if (small > side) { side = small; }
    }
    m->head_chunk = (int64_t)(1 << 24) / V / 16 * 16; // 64 MiB of float logits: large enough for a fast product
    if (m->head_chunk < 16) { m->head_chunk = 16; }
    if (m->head_chunk > N) { m->head_chunk = N; }
    m->logits = arena_take(a, m->head_chunk * V);
    m->head_scratch = arena_take(a, head->norm ? NUM_BLOCKS * V : 0);
    m->partial = arena_take(a, NUM_BLOCKS * widest);
    m->muon = arena_take(a, 2 * biggest + 2 * side * side);
    m->rope_cos = arena_take(a, T * m->head_size / 2);
    m->rope_sin = arena_take(a, T * m->head_size / 2);
    m->losses = (double *)arena_bytes(a, N * (int64_t)sizeof(double));
    m->inputs = (int32_t *)arena_bytes(a, N * (int64_t)sizeof(int32_t));
    m->targets = (int32_t *)arena_bytes(a, N * (int64_t)sizeof(int32_t));
    use.work = a->used - before;
    use.total = a->used;
    return use;
}

static MemoryUse gpt_estimate_memory(GPT *m, int64_t B, int64_t T) {
    Arena count = {NULL, 0, 0};
    if (!m->acts) { m->acts = (LayerActs *)calloc((size_t)m->cfg.layers, sizeof(LayerActs)); }
    if (!m->acts) { FAIL("out of memory"); }
    return gpt_layout(m, &count, B, T);
}

// Allocates everything for micro-batches of up to B sequences of T tokens.
static void gpt_allocate(GPT *m, int64_t B, int64_t T) {
    MemoryUse use = gpt_estimate_memory(m, B, T);
    double physical = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if ((double)use.total > physical) {
        FAIL("the model needs %.2f GiB, found a machine with %.2f GiB: expected a smaller model, --batch or --seq-len (see --estimate)", (double)use.total / (1 << 30), physical / (1 << 30));
    }
    void *block = mmap(NULL, use.total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) { FAIL("cannot allocate %.2f GiB: %s", (double)use.total / (1 << 30), strerror(errno)); }
#ifdef MADV_HUGEPAGE
    madvise(block, use.total, MADV_HUGEPAGE); // a hint: fewer page faults where the system grants it
#endif
    Arena arena = {(char *)block, 0, 0};
    gpt_layout(m, &arena, B, T);
    int half = m->head_size / 2;
    for (int64_t t = 0; t < T; t++) {
        for (int i = 0; i < half; i++) {
            double angle = (double)t * pow(ROPE_THETA, -(double)i / half);
            m->rope_cos[t * half + i] = (real)cos(angle);
            m->rope_sin[t * half + i] = (real)sin(angle);
        }
    }
}

// Output-Norm of one site on its slice of a wide activation: G groups of D from column `at` of rows of `stride`.
static void site_norm_forward(const LinearMap *map, real *out, real *rstd, const real *raw, int64_t N, int64_t G, int64_t D, int64_t at, int64_t stride) {
    if (map->norm) { rmsnorm_forward(out + at, rstd, raw + at, map->norm_eff, N, G, D, stride); return; }
    if (out == raw) { return; }
    for (int64_t n = 0; n < N; n++) { memcpy(out + n * stride + at, raw + n * stride + at, (size_t)(G * D) * sizeof(real)); }
}

static void site_norm_backward(GPT *m, const LinearMap *map, real *draw, const real *dout, const real *raw, const real *rstd, int64_t N, int64_t G, int64_t D, int64_t at, int64_t stride) {
    if (map->norm) { rmsnorm_backward(draw + at, map->dnorm_eff, m->partial, dout + at, raw + at, rstd, map->norm_eff, N, G, D, stride, 0); return; }
    if (draw == dout) { return; }
    for (int64_t n = 0; n < N; n++) { memcpy(draw + n * stride + at, dout + n * stride + at, (size_t)(G * D) * sizeof(real)); }
}

// x2 = x + norm_o( W_o attention(rope(norm_qkv( W_qkv Norm(x) ))) )
static void attention_block_forward(GPT *m, LayerActs *s, const LinearMap *maps) {
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels, Q = m->qkv_width;
    int NH = m->cfg.heads, KVH = m->cfg.kv_heads, HS = m->head_size;
    rmsnorm_forward(s->ln1, s->ln1_rstd, s->x, NULL, N, 1, C, C);
    matmul_forward(s->qkv_raw, s->ln1, maps[SITE_Q].w_eff, N, C, Q);
    if (s->qkv_raw != s->qkv) {
        site_norm_forward(&maps[SITE_Q], s->qkv, s->qkv_rstd, s->qkv_raw, N, NH, HS, 0, Q);
        site_norm_forward(&maps[SITE_K], s->qkv, s->qkv_rstd + N * NH, s->qkv_raw, N, KVH, HS, (int64_t)NH * HS, Q);
        site_norm_forward(&maps[SITE_V], s->qkv, s->qkv_rstd + N * (NH + KVH), s->qkv_raw, N, KVH, HS, (int64_t)(NH + KVH) * HS, Q);
    }
    rope(s->qkv, m->rope_cos, m->rope_sin, N, m->T, NH + KVH, HS, Q, 1);
    attention_forward(s->att, s->lse, s->qkv, m->B, m->T, NH, KVH, HS);
    real *o = maps[SITE_O].norm ? s->o_raw : s->x2; // x2 doubles as scratch for the branch before the sum
    matmul_forward(o, s->att, maps[SITE_O].w_eff, N, (int64_t)NH * HS, C);
    if (maps[SITE_O].norm) { rmsnorm_forward(s->x2, s->o_rstd, o, maps[SITE_O].norm_eff, N, 1, C, C); }
    residual_forward(s->x2, s->x, s->x2, N * C);
}

// dx holds dL/dx2 and leaves with dL/dx
static void attention_block_backward(GPT *m, LayerActs *s, const LinearMap *maps) {
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels, Q = m->qkv_width;
    int NH = m->cfg.heads, KVH = m->cfg.kv_heads, HS = m->head_size;
    const real *d_o = m->dx;
    if (maps[SITE_O].norm) {
        rmsnorm_backward(m->d_branch, maps[SITE_O].dnorm_eff, m->partial, m->dx, s->o_raw, s->o_rstd, maps[SITE_O].norm_eff, N, 1, C, C, 0);
        d_o = m->d_branch;
    }
    matmul_backward(m->d_att, maps[SITE_O].dw_eff, d_o, s->att, maps[SITE_O].w_eff, N, (int64_t)NH * HS, C, m->accumulate);
    attention_backward(m->d_wide, m->att_dot, m->d_att, s->qkv, s->att, s->lse, m->B, m->T, NH, KVH, HS);
    rope(m->d_wide, m->rope_cos, m->rope_sin, N, m->T, NH + KVH, HS, Q, -1);
    real *d_raw = m->d_wide;
    if (s->qkv_raw != s->qkv) {
        d_raw = m->d_wide_raw;
        site_norm_backward(m, &maps[SITE_Q], d_raw, m->d_wide, s->qkv_raw, s->qkv_rstd, N, NH, HS, 0, Q);
        site_norm_backward(m, &maps[SITE_K], d_raw, m->d_wide, s->qkv_raw, s->qkv_rstd + N * NH, N, KVH, HS, (int64_t)NH * HS, Q);
        site_norm_backward(m, &maps[SITE_V], d_raw, m->d_wide, s->qkv_raw, s->qkv_rstd + N * (NH + KVH), N, KVH, HS, (int64_t)(NH + KVH) * HS, Q);
    }
    matmul_backward(m->d_branch, maps[SITE_Q].dw_eff, d_raw, s->ln1, maps[SITE_Q].w_eff, N, C, Q, m->accumulate);
    rmsnorm_backward(m->dx, NULL, NULL, m->d_branch, s->x, s->ln1_rstd, NULL, N, 1, C, C, 1);
}

// out (n,C) = norm_down( W_down swiglu(norm_gu( W_gate|up inp )) ) for n rows; maps: gate, up, down
static void ffn_forward(const LinearMap *maps, const FfnActs *s, real *out, const real *inp, int64_t n) {
    int64_t H = maps[0].rows, C = maps[0].cols;
    const LinearMap *down = &maps[2];
    matmul_forward(s->gu_raw, inp, maps[0].w_eff, n, C, 2 * H);
    if (s->gu_raw != s->gu) {
        site_norm_forward(&maps[0], s->gu, s->gu_rstd, s->gu_raw, n, 1, H, 0, 2 * H);
        site_norm_forward(&maps[1], s->gu, s->gu_rstd + n, s->gu_raw, n, 1, H, H, 2 * H);
    }
    swiglu_forward(s->h, s->gu, n, H);
    matmul_forward(down->norm ? s->down_raw : out, s->h, down->w_eff, n, H, C);
    if (down->norm) { rmsnorm_forward(out, s->down_rstd, s->down_raw, down->norm_eff, n, 1, C, C); }
}

// dinp (n,C) is written; dout (n,C) and dinp may be one
static void ffn_backward(GPT *m, const LinearMap *maps, const FfnActs *s, real *dinp, const real *dout, const real *inp, int64_t n) {
    int64_t H = maps[0].rows, C = maps[0].cols;
    const LinearMap *down = &maps[2];
    if (down->norm) {
        rmsnorm_backward(dinp, down->dnorm_eff, m->partial, dout, s->down_raw, s->down_rstd, down->norm_eff, n, 1, C, C, 0);
        dout = dinp;
    }
    real *d_h = m->d_att, *d_raw = m->d_wide;
    matmul_backward(d_h, down->dw_eff, dout, s->h, down->w_eff, n, H, C, m->accumulate);
    swiglu_backward(m->d_wide, d_h, s->gu, n, H);
    if (s->gu_raw != s->gu) {
        d_raw = m->d_wide_raw;
        site_norm_backward(m, &maps[0], d_raw, m->d_wide, s->gu_raw, s->gu_rstd, n, 1, H, 0, 2 * H);
        site_norm_backward(m, &maps[1], d_raw, m->d_wide, s->gu_raw, s->gu_rstd + n, n, 1, H, H, 2 * H);
    }
    matmul_backward(dinp, maps[0].dw_eff, d_raw, inp, maps[0].w_eff, n, C, 2 * H, m->accumulate);
}

// Mixture of experts: out = sum over the K chosen experts e of weight_e * ffn_e(x), plus the shared expert.
//   x = Norm(x2);  logits = W_router x;  chosen = the K largest;  weights = softmax over the chosen logits (ours)
//   balance loss = E sum_e f_e P_e (ours), f_e: share of the rows that go to e, P_e: mean probability of e,
//     both over a micro-batch, so that --batch has a say in it;
//   z-loss = mean of log-sum-exp(logits)^2. Each layer adds both; no token is ever dropped.
// --post-norm norms the sum; a norm at down (--placement down=dnp) stands in each expert, before it (ours).
// Tokens are sorted by expert, so that each expert works on neighbouring rows.

static FfnActs ffn_rows(const FfnActs *s, const LinearMap *maps, int64_t row) { // the part from `row` on
    int64_t H = maps[0].rows, C = maps[0].cols;
    FfnActs part = {s->gu_raw + row * 2 * H, s->gu_rstd, s->gu + row * 2 * H, s->h + row * H, s->down_raw, s->down_rstd};
    if (s->gu_raw != s->gu) { part.gu_rstd += 2 * row; }
    if (maps[2].norm) { part.down_raw += row * C; part.down_rstd += row; }
    return part;
}

// probs (N,E) holds logits and leaves with their softmax; lse, chosen and weights are set.
static void router_choose(MoeActs *s, int64_t N, int E, int K) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        real *z = s->probs + n * E, *weights = s->weights + n * K, sum = 0, chosen_sum = 0;
        int32_t *chosen = s->chosen + n * K;
        for (int k = 0; k < K; k++) { // the k-th largest; of equals, the first
            int best = -1;
            for (int e = 0; e < E; e++) {
                int taken = 0;
                for (int j = 0; j < k; j++) { taken |= chosen[j] == e; }
                if (!taken && (best < 0 || z[e] > z[best])) { best = e; }
            }
            chosen[k] = best;
        }
        real top = z[chosen[0]];
        for (int k = 0; k < K; k++) { weights[k] = exp_fast(z[chosen[k]] - top); chosen_sum += weights[k]; }
        for (int k = 0; k < K; k++) { weights[k] /= chosen_sum; }
        for (int e = 0; e < E; e++) { z[e] = exp_fast(z[e] - top); sum += z[e]; }
        for (int e = 0; e < E; e++) { z[e] /= sum; }
        s->lse[n] = top + (real)log((double)sum);
    }
}

// Counting sort by expert, tokens in order within each: begin (E+1) and row (N,K).
static void router_sort(GPT *m, MoeActs *s, int64_t *tokens, int64_t N, int E, int K) {
    memset(s->begin, 0, (size_t)(E + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < N * K; i++) { s->begin[s->chosen[i] + 1]++; }
    double balance = 0, z = 0;
    for (int e = 0; e < E; e++) {
        double mean = 0;
        for (int64_t n = 0; n < N; n++) { mean += s->probs[n * E + e]; }
        balance += (double)s->begin[e + 1] / (double)(N * K) * (mean / (double)N);
        tokens[e] += s->begin[e + 1];
    }
    for (int64_t n = 0; n < N; n++) { z += (double)s->lse[n] * s->lse[n]; }
    m->balance_loss += E * balance;
    m->z_loss += z / (double)N;
    for (int e = 0; e < E; e++) { s->begin[e + 1] += s->begin[e]; }
    for (int64_t i = 0; i < N * K; i++) { s->row[i] = (int32_t)s->begin[s->chosen[i]]++; }
    for (int e = E; e > 0; e--) { s->begin[e] = s->begin[e - 1]; } // filling moved each begin to its end
    s->begin[0] = 0;
}

static void moe_forward(GPT *m, LayerActs *a, int layer, real *out) {
    MoeActs *s = &a->moe;
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels;
    int E = m->cfg.experts, K = m->cfg.top_k;
    matmul_forward(s->probs, a->ln2, gpt_router(m, layer)->w_eff, N, C, E);
    router_choose(s, N, E, K);
    router_sort(m, s, m->expert_tokens + (int64_t)layer * E, N, E, K);
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N * K; i++) { memcpy(s->x + s->row[i] * C, a->ln2 + i / K * C, (size_t)C * sizeof(real)); }
    for (int e = 0; e < E; e++) {
        const LinearMap *maps = gpt_ffn_maps(m, layer, e);
        FfnActs part = ffn_rows(&s->experts, maps, s->begin[e]);
        ffn_forward(maps, &part, s->y + s->begin[e] * C, s->x + s->begin[e] * C, s->begin[e + 1] - s->begin[e]);
    }
    real *sum = m->cfg.post_norm ? s->sum : out;
    int dense = gpt_has_dense(m);
    if (dense) { ffn_forward(gpt_ffn_maps(m, layer, -1), &a->ffn, sum, a->ln2, N); }
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t c = 0; c < C; c++) {
            real value = dense ? sum[n * C + c] : (real)0;
            for (int k = 0; k < K; k++) { value += s->weights[n * K + k] * s->y[s->row[n * K + k] * C + c]; }
            sum[n * C + c] = value;
        }
    }
    if (m->cfg.post_norm) { rmsnorm_forward(out, s->sum_rstd, sum, gpt_gamma(m, m->ffn_norm[layer]), N, 1, C, C); }
}

// d_logits (N,E) from the gradients of the weights, the balance loss and the z-loss
static void router_backward(GPT *m, const MoeActs *s, const real *d_weights, int64_t N, int E, int K) {
    double scale = m->grad_scale;
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const real *p = s->probs + n * E, *w = s->weights + n * K, *dw = d_weights + n * K;
        real *dz = m->d_logits + n * E, mean = 0, dot = 0;
        double weight = m->cfg.balance_loss * E / (double)(N * K) * scale; // times count_e: the gradient of p_e
        for (int e = 0; e < E; e++) { mean += p[e] * (real)(weight * (double)(s->begin[e + 1] - s->begin[e])); }
        for (int e = 0; e < E; e++) {
            real dp = (real)(weight * (double)(s->begin[e + 1] - s->begin[e]));
            dz[e] = p[e] * (dp - mean + (real)(2 * m->cfg.router_z_loss * scale) * s->lse[n]);
        }
        for (int k = 0; k < K; k++) { dot += w[k] * dw[k]; }
        for (int k = 0; k < K; k++) { dz[s->chosen[n * K + k]] += w[k] * (dw[k] - dot); }
    }
}

// dinp (N,C) is written; dout (N,C): the gradient of moe_forward's out
static void moe_backward(GPT *m, LayerActs *a, int layer, real *dinp, const real *dout) {
    MoeActs *s = &a->moe;
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels;
    int E = m->cfg.experts, K = m->cfg.top_k;
    if (m->cfg.post_norm) {
        int norm = m->ffn_norm[layer];
        rmsnorm_backward(m->d_sum, gpt_dgamma(m, norm), m->partial, dout, s->sum, s->sum_rstd, gpt_gamma(m, norm), N, 1, C, C, 0);
        dout = m->d_sum;
    }
    real *d_weights = m->d_weights;
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N * K; i++) { // row i/K of dout goes to each of its experts, by weight
        const real *d = dout + i / K * C, *y = s->y + s->row[i] * C;
        real *to = m->d_rows + s->row[i] * C, dot = 0, weight = s->weights[i];
        #pragma omp simd reduction(+:dot)
        for (int64_t c = 0; c < C; c++) { dot += d[c] * y[c]; to[c] = weight * d[c]; }
        d_weights[i] = dot;
    }
    for (int e = 0; e < E; e++) {
        const LinearMap *maps = gpt_ffn_maps(m, layer, e);
        FfnActs part = ffn_rows(&s->experts, maps, s->begin[e]);
        real *rows = m->d_rows + s->begin[e] * C;
        ffn_backward(m, maps, &part, rows, rows, s->x + s->begin[e] * C, s->begin[e + 1] - s->begin[e]);
    }
    const LinearMap *router = gpt_router(m, layer);
    router_backward(m, s, d_weights, N, E, K);
    real *d_shared = m->d_shared;
    if (gpt_has_dense(m)) { ffn_backward(m, gpt_ffn_maps(m, layer, -1), &a->ffn, d_shared, dout, a->ln2, N); }
    matmul_backward(dinp, router->dw_eff, m->d_logits, a->ln2, router->w_eff, N, C, E, m->accumulate);
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t c = 0; c < C; c++) {
            real value = dinp[n * C + c] + (gpt_has_dense(m) ? d_shared[n * C + c] : (real)0);
            for (int k = 0; k < K; k++) { value += m->d_rows[s->row[n * K + k] * C + c]; }
            dinp[n * C + c] = value;
        }
    }
}

// out = x2 + ffn( Norm(x2) )
static void ffn_block_forward(GPT *m, LayerActs *s, int layer, real *out) {
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels;
    rmsnorm_forward(s->ln2, s->ln2_rstd, s->x2, NULL, N, 1, C, C);
    if (m->cfg.experts) { moe_forward(m, s, layer, out); }
    else { ffn_forward(gpt_ffn_maps(m, layer, -1), &s->ffn, out, s->ln2, N); }
    residual_forward(out, s->x2, out, N * C);
}

// dx holds the gradient of the block's output and leaves with dL/dx2
static void ffn_block_backward(GPT *m, LayerActs *s, int layer) {
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels;
    if (m->cfg.experts) { moe_backward(m, s, layer, m->d_branch, m->dx); }
    else { ffn_backward(m, gpt_ffn_maps(m, layer, -1), &s->ffn, m->d_branch, m->dx, s->ln2, N); }
    rmsnorm_backward(m->dx, NULL, NULL, m->d_branch, s->x2, s->ln2_rstd, NULL, N, 1, C, C, 1);
}

// Mean cross-entropy of the head over all tokens, a chunk of logits at a time. With grad_scale it leaves
// d_ln_final and adds to the head's gradients, so that logits needn't be computed again in the backward.
static double head_loss(GPT *m, const int32_t *targets, real grad_scale) {
    const LinearMap *head = gpt_head(m);
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels, V = m->cfg.vocab;
    for (int64_t n = 0; n < N; n += m->head_chunk) {
        int64_t rows = N - n < m->head_chunk ? N - n : m->head_chunk;
        const real *x = m->ln_final + n * C;
        matmul_forward(m->logits, x, head->w_eff, rows, C, V);
        classifier(m->logits, m->losses + n, targets + n, rows, V, grad_scale, head->norm, head->norm_eff, head->dnorm_eff, m->head_scratch, m->partial);
        if (grad_scale != 0) { matmul_backward(m->d_ln_final + n * C, head->dw_eff, m->logits, x, head->w_eff, rows, C, V, m->accumulate || n > 0); }
    }
    double sum = 0;
    for (int64_t n = 0; n < N; n++) { sum += m->losses[n]; }
    return sum / (double)N;
}

// inputs, targets (B,T) with T at most --seq-len. Returns the mean loss; grad_scale 0: no gradients follow; else it
// is the weight of each token's loss, 1 / (tokens in the step). targets NULL: stop before the head, return 0.
// Needs an up-to-date reparameterize_forward.
static double gpt_forward(GPT *m, const int32_t *inputs, const int32_t *targets, int B, int T, double grad_scale) {
    int64_t N = (int64_t)B * T, C = m->cfg.channels;
    m->B = B;
    m->T = T;
    m->grad_scale = grad_scale;
    m->balance_loss = m->z_loss = 0;
    embedding_forward(m->acts[0].x, m->theta + m->params[0].offset, inputs, N, C);
    for (int l = 0; l < m->cfg.layers; l++) {
        LayerActs *s = &m->acts[l];
        attention_block_forward(m, s, gpt_layer_maps(m, l));
        ffn_block_forward(m, s, l, l + 1 < m->cfg.layers ? m->acts[l + 1].x : m->x_final);
    }
    rmsnorm_forward(m->ln_final, m->ln_final_rstd, m->x_final, NULL, N, 1, C, C);
    return targets ? head_loss(m, targets, (real)grad_scale) : 0;
}

// Adds to dtheta~ (after gpt_zero_grad: writes) the gradients of the last gpt_forward, which must have had a grad_scale and the same inputs.
static void gpt_backward(GPT *m, const int32_t *inputs) {
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels;
    rmsnorm_backward(m->dx, NULL, NULL, m->d_ln_final, m->x_final, m->ln_final_rstd, NULL, N, 1, C, C, 0);
    for (int l = m->cfg.layers - 1; l >= 0; l--) {
        ffn_block_backward(m, &m->acts[l], l);
        attention_block_backward(m, &m->acts[l], gpt_layer_maps(m, l));
    }
    embedding_backward(m->grads + m->params[0].offset, m->dx, inputs, N, C);
    m->accumulate = 1;
}

// Begins the gradient of a step. The first backward after it writes the gradients of matrices, so that they needn't
// be cleared; only what is always added to is.
static void gpt_zero_grad(GPT *m) {
    const Param *embedding = &m->params[0];
    m->accumulate = 0;
    #pragma omp parallel for schedule(static)
    for (int64_t v = 0; v < embedding->rows; v++) { memset(m->grads + embedding->offset + v * embedding->cols, 0, (size_t)embedding->cols * sizeof(real)); }
    if (m->num_gamma) { memset(m->dgamma, 0, (size_t)m->num_gamma * sizeof(real)); }
}

// Logits (rows,V) of the last `rows` tokens of the last gpt_forward, norm of the head included.
static void gpt_logits(GPT *m, real *logits, int64_t rows) {
    const LinearMap *head = gpt_head(m);
    int64_t N = (int64_t)m->B * m->T, C = m->cfg.channels, V = m->cfg.vocab;
    matmul_forward(logits, m->ln_final + (N - rows) * C, head->w_eff, rows, C, V);
    if (head->norm) { rmsnorm_forward(logits, m->ln_final_rstd, logits, head->norm_eff, rows, 1, V, V); }
}

// ----------------------------------------------------------------------------------------------------
// 6. Optimizers and schedules.

// Learning rate of update `step` (0 is the first) of cfg->steps: linear warm-up, then
//   cosine    from peak to final = final_lr_frac * peak along half a cosine (paper: final = peak / 20)
//   wsd       peak, then linear to final over the last decay_frac of the steps (paper: 20%, to 0)
//   linear    from peak to final
//   constant  peak
static double learning_rate(const Config *cfg, int64_t step) {
    const double rounding = 1e-9; // so that 0.29 of 100 steps are 29, not 28.999...
    double steps = (double)cfg->steps, warmup = floor(cfg->warmup * steps + rounding), done = (double)step + 1;
    double final_frac = cfg->final_lr_frac != AUTO ? cfg->final_lr_frac : cfg->schedule == SCHEDULE_COSINE ? 0.05 : 0;
    if (done <= warmup) { return cfg->lr * done / warmup; }
    double begin = cfg->schedule == SCHEDULE_WSD ? floor((1 - cfg->decay_frac) * steps + rounding) : warmup;
    if (cfg->schedule == SCHEDULE_CONSTANT || done <= begin) { return cfg->lr; }
    double progress = steps > begin ? (done - begin) / (steps - begin) : 1; // in (0, 1]
    if (cfg->schedule == SCHEDULE_COSINE) { return cfg->lr * (final_frac + (1 - final_frac) * 0.5 * (1 + cos(M_PI * progress))); }
    return cfg->lr * (1 - (1 - final_frac) * progress);
}

// Norm of the gradient of theta over all parameters. Summed in blocks of fixed size: same bits for any threads.
static double gradient_norm(const GPT *m) {
    enum { BLOCKS = 256 };
    double sums[BLOCKS], sum = 0;
    #pragma omp parallel for schedule(static)
    for (int block = 0; block < BLOCKS; block++) {
        int64_t begin = m->num_theta * block / BLOCKS, end = m->num_theta * (block + 1) / BLOCKS;
        double lanes[32] = {0}, s = 0; // many sums at a time: one would wait for itself at every addition
        for (; begin + 32 <= end; begin += 32) {
            for (int i = 0; i < 32; i++) { lanes[i] += (double)m->grads[begin + i] * m->grads[begin + i]; }
        }
        for (int i = 0; i < 32; i++) { s += lanes[i]; }
        for (; begin < end; begin++) { s += (double)m->grads[begin] * m->grads[begin]; }
        sums[block] = s;
    }
    for (int block = 0; block < BLOCKS; block++) { sum += sums[block]; }
    return sqrt(sum);
}

// AdamW (arXiv 1711.05101): moments of the scaled gradient, bias-corrected; decay decoupled from the gradient.
// step counts from 1. decay 0 for parameters that don't decay.
static void adamw_update(real *w, const real *grad, real *m, real *v, int64_t n, const Config *cfg, int64_t step, double lr, double decay, double grad_scale) {
    real b1 = (real)cfg->beta1, b2 = (real)cfg->beta2, scale = (real)grad_scale, eps = (real)cfg->eps, keep = (real)(1 - lr * decay);
    real rate = (real)(lr / (1 - pow(cfg->beta1, (double)step)));
    real root = (real)(1 / sqrt(1 - pow(cfg->beta2, (double)step)));
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        real g = grad[i] * scale;
        m[i] = b1 * m[i] + (1 - b1) * g;
        v[i] = b2 * v[i] + (1 - b2) * g * g;
        w[i] = keep * w[i] - rate * m[i] / ((real)sqrt(v[i]) * root + eps);
    }
}

// w <- (1 - lr decay) w - lr (grad + momentum * m); m is NULL without momentum
static void sgd_update(real *w, const real *grad, real *m, int64_t n, const Config *cfg, double lr, double decay, double grad_scale) {
    real keep = (real)(1 - lr * decay), rate = (real)lr, scale = (real)grad_scale, momentum = (real)cfg->sgd_momentum;
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        real g = grad[i] * scale;
        if (m) { g = m[i] = momentum * m[i] + g; }
        w[i] = keep * w[i] - rate * g;
    }
}

// Newton-Schulz: 5 steps X <- a X + (b A + c A^2) X, A = X X^T, drive the singular values of X towards 1
// without computing them. X (r,cols) with r <= cols, scaled by its Frobenius norm; work: r*cols + 2 r*r.
enum { NEWTON_SCHULZ_STEPS = 5 };
static void newton_schulz(real *x, int64_t r, int64_t cols, real *work) {
    const real a = (real)3.4445, b = (real)-4.7750, c = (real)2.0315;
    real *next = work, *gram = work + r * cols, *poly = gram + r * r;
    double squares = 0;
    for (int64_t i = 0; i < r * cols; i++) { squares += (double)x[i] * x[i]; }
    real scale = (real)(1 / (sqrt(squares) + 1e-7));
    for (int64_t i = 0; i < r * cols; i++) { x[i] *= scale; }
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        matmul(gram, r, x, cols, 1, x, 1, cols, r, r, cols, 0);
        matmul(poly, r, gram, r, 1, gram, r, 1, r, r, r, 0);
        for (int64_t i = 0; i < r * r; i++) { poly[i] = b * gram[i] + c * poly[i]; }
        matmul(next, cols, poly, r, 1, x, cols, 1, r, cols, r, 0);
        #pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < r * cols; i++) { x[i] = a * x[i] + next[i]; }
    }
}

// Muon: the Nesterov momentum of a matrix, orthogonalized, times 0.2 sqrt(max(rows, cols)), which gives an
// update the size of AdamW's. work: 2*rows*cols + 2*min(rows,cols)^2.
static void muon_update(real *w, const real *grad, real *m, int64_t rows, int64_t cols, const Config *cfg, double lr, double decay, double grad_scale, real *work) {
    real momentum = (real)cfg->muon_momentum, scale = (real)grad_scale, *x = work;
    int64_t n = rows * cols;
    int flip = rows > cols; // the smaller side first: cheaper products
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            real g = grad[r * cols + c] * scale, mi = momentum * m[r * cols + c] + g;
            m[r * cols + c] = mi;
            x[flip ? c * rows + r : r * cols + c] = g + momentum * mi;
        }
    }
    newton_schulz(x, flip ? cols : rows, flip ? rows : cols, work + n);
    real keep = (real)(1 - lr * decay), rate = (real)(lr * 0.2 * sqrt((double)(rows > cols ? rows : cols)));
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) { w[r * cols + c] = keep * w[r * cols + c] - rate * x[flip ? c * rows + r : r * cols + c]; }
    }
}

// One update of theta from dtheta. step counts from 1.
static void optimizer_step(GPT *m, int64_t step, double lr, double grad_scale) {
    const Config *cfg = &m->cfg;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        real *w = m->theta + p->offset, *g = m->grads + p->offset;
        real *m1 = p->m < 0 ? NULL : m->moments + p->m, *m2 = p->v < 0 ? NULL : m->moments + p->v;
        double decay = param_decays(m, p) ? cfg->weight_decay : 0;
        double rate = lr * param_rate(m, p);
        int64_t n = p->rows * p->cols;
        if (cfg->optimizer == OPTIMIZER_SGD) { sgd_update(w, g, m1, n, cfg, rate, decay, grad_scale); }
        else if (m2) { adamw_update(w, g, m1, m2, n, cfg, step, rate, decay, grad_scale); }
        else { muon_update(w, g, m1, p->rows, p->cols, cfg, rate, decay, grad_scale, m->muon); }
    }
}

// The machine that computes: what sections 8 to 10 call. This table is of the functions above, which work in the memory
// of the host; train_gpt2.cu brings its own. Files are read to and written from theta and moments of the host.
typedef struct Run Run;
typedef struct DataLoader DataLoader;
typedef struct Machine {
    void (*check_options)(const Config *cfg);                // refuses what it can't do
    MemoryUse (*estimate_memory)(GPT *m, int64_t B, int64_t T);
    void (*allocate)(GPT *m, int64_t B, int64_t T);
    void (*connect)(const GPT *m, int64_t step);             // where several GPUs or processes work together; after allocate
    void (*to_device)(GPT *m), (*to_host)(GPT *m);           // copy theta and moments, where it has a memory of its own
    void (*reparameterize_forward)(GPT *m);
    double (*forward)(GPT *m, const int32_t *inputs, const int32_t *targets, int B, int T, double grad_scale);
    void (*logits)(GPT *m, real *logits, int64_t rows);
    void (*update)(GPT *m, Run *run, int64_t step, double lr); // one step: gradient, its norm, new theta and theta~
    double (*validate)(GPT *m, const DataLoader *val);
    int (*check)(GPT *m, Run *run);                          // --check: 0 where it agrees with the CPU
} Machine;
static void cpu_options(const Config *cfg);
static void train_update(GPT *m, Run *run, int64_t step, double lr);
static double validate(GPT *m, const DataLoader *val);
static void host_is_device(GPT *m) { (void)m; }
static void nobody_else(const GPT *m, int64_t step) { (void)m; (void)step; }
static const Machine cpu_machine = {cpu_options, gpt_estimate_memory, gpt_allocate, nobody_else, host_is_device, host_is_device, reparameterize_forward, gpt_forward, gpt_logits, train_update, validate, NULL};
static const Machine *machine = &cpu_machine;
static int num_processes = 1, process_number; // that train one model together (train_gpt2.cu): number 0 alone writes files and standard output

// ----------------------------------------------------------------------------------------------------
// 7. Data: token shards as one long stream, cut into windows of T+1 tokens at a stride of T.
//
// The windows run across the borders of shards, so that no shard's tail is lost. Each epoch visits every
// window once, in an order that the seed and the epoch decide. So the state of the loader is one number,
// the count of sequences drawn: it doesn't depend on batch sizes or on the number of GPUs.

typedef struct Shard { char *path; const uint16_t *tokens; int64_t count, begin; } Shard; // begin: place in the stream
struct DataLoader {
    Shard *shards;
    int num_shards;
    int64_t total, windows;  // tokens in all; windows in an epoch
    int T, vocab;            // vocab: the largest named by a header, 0 for none
    int shuffle;
    uint64_t seed;
    uint32_t fingerprint;    // of the first tokens of each shard and their number
};

static void shard_map(Shard *shard, char *path, const char *flag, int64_t begin, int *vocab) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK); // O_NONBLOCK: don't wait for the writer of a named pipe
    if (fd < 0 || fstat(fd, &info) != 0) { FAIL("%s %s: cannot open: %s; expected a token shard (make data)", flag, path, strerror(errno)); }
    if (S_ISDIR(info.st_mode)) { FAIL("%s %s: found a directory, expected a token shard, a list or a quoted glob", flag, path); }
    if (info.st_size < SHARD_HEADER_BYTES) { FAIL("%s %s: found %lld bytes, expected a token shard with a header of %d bytes", flag, path, (long long)info.st_size, SHARD_HEADER_BYTES); }
    void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) { FAIL("%s %s: cannot map: %s", flag, path, strerror(errno)); }
    close(fd);
    const int32_t *header = (const int32_t *)map;
    if (header[0] != SHARD_MAGIC) { FAIL("%s %s: found magic number %d, expected %d, a token shard", flag, path, header[0], SHARD_MAGIC); }
    if (header[1] != SHARD_VERSION) { FAIL("%s %s: found version %d, expected %d", flag, path, header[1], SHARD_VERSION); }
    if (header[2] < 0 || info.st_size != SHARD_HEADER_BYTES + 2 * (int64_t)header[2]) {
        FAIL("%s %s: found %lld bytes, expected %lld for the %d tokens its header names", flag, path, (long long)info.st_size, SHARD_HEADER_BYTES + 2 * (long long)header[2], header[2]);
    }
    if (header[3] < 0 || header[3] > 65536) { FAIL("%s %s: found vocabulary size %d, expected 0 to 65536", flag, path, header[3]); }
    if (header[3] > *vocab) { *vocab = header[3]; }
    shard->path = path;
    shard->tokens = (const uint16_t *)map + SHARD_HEADER_BYTES / 2;
    shard->count = header[2];
    shard->begin = begin;
}

// Opens "a.bin", "a.bin,b.bin" or a glob, sorted by name.
static void loader_open(DataLoader *d, const char *pattern, const char *flag, int T, int shuffle, uint64_t seed) {
    memset(d, 0, sizeof *d);
    d->T = T;
    d->shuffle = shuffle;
    d->seed = seed;
    size_t end = strlen(pattern);
    if (end == 0 || pattern[0] == ',' || pattern[end - 1] == ',' || strstr(pattern, ",,")) {
        USAGE("%s: found \"%s\", expected a file, a list or a glob of token shards, with no empty item", flag, pattern);
    }
    char *list = text_format("%s", pattern), *save = NULL;
    for (char *item = strtok_r(list, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        glob_t found;
        int status = glob(item, GLOB_NOCHECK, NULL, &found);
        if (status != 0) { FAIL("%s %s: cannot list the files", flag, item); }
        for (size_t i = 0; i < found.gl_pathc; i++) {
            d->shards = (Shard *)realloc(d->shards, (size_t)(d->num_shards + 1) * sizeof(Shard));
            if (!d->shards) { FAIL("out of memory"); }
            Shard *shard = &d->shards[d->num_shards++];
            shard_map(shard, text_format("%s", found.gl_pathv[i]), flag, d->total, &d->vocab);
            d->total += shard->count;
            int64_t head = shard->count < 32768 ? shard->count : 32768;
            d->fingerprint = (uint32_t)crc32_z(d->fingerprint, (const unsigned char *)shard->tokens, (size_t)head * 2);
            d->fingerprint = (uint32_t)crc32_z(d->fingerprint, (const unsigned char *)&shard->count, sizeof shard->count);
        }
        globfree(&found);
    }
    free(list);
    d->windows = (d->total - 1) / T;
    if (d->windows < 1) { FAIL("%s %s: found %lld tokens, expected at least --seq-len + 1 = %d", flag, pattern, (long long)d->total, T + 1); }
}

static void loader_close(DataLoader *d) {
    for (int i = 0; i < d->num_shards; i++) {
        munmap((void *)(uintptr_t)((const char *)d->shards[i].tokens - SHARD_HEADER_BYTES), (size_t)(SHARD_HEADER_BYTES + 2 * d->shards[i].count));
        free(d->shards[i].path);
    }
    free(d->shards);
}

// The place of item i in a random order of n items: a Feistel network permutes the next power of four,
// and places outside of the n are walked past. No table, so 10 billion tokens need no memory.
static int64_t shuffled(int64_t i, int64_t n, uint64_t key) {
    int half = 1;
    while (((int64_t)1 << (2 * half)) < n) { half++; }
    uint64_t mask = ((uint64_t)1 << half) - 1, x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (random_u64(key ^ (round << 56) ^ right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// Copies sequence number `sequence` of the run: inputs (T) and the tokens that follow them, targets (T).
static void loader_read(const DataLoader *d, int64_t sequence, int32_t *inputs, int32_t *targets, int V) {
    int64_t epoch = sequence / d->windows, window = sequence % d->windows;
    if (d->shuffle) { window = shuffled(window, d->windows, random_u64(d->seed * 0x9E3779B97F4A7C15u + (uint64_t)epoch)); }
    int64_t at = window * d->T;
    int s = 0;
    while (at >= d->shards[s].begin + d->shards[s].count) { s++; }
    for (int t = 0; t <= d->T; t++, at++) {
        while (at >= d->shards[s].begin + d->shards[s].count) { s++; }
        int32_t token = d->shards[s].tokens[at - d->shards[s].begin];
        if (token >= V) { FAIL("%s: found token %d at place %lld, expected less than the vocabulary of %d", d->shards[s].path, token, (long long)(at - d->shards[s].begin), V); }
        if (t < d->T) { inputs[t] = token; }
        if (t > 0) { targets[t - 1] = token; }
    }
}

// ----------------------------------------------------------------------------------------------------
// 8. Checkpoints and logs. A checkpoint is a folder OUT/step_NNNNNNNN with
//      model.safetensors      theta by name; configuration and loader state as metadata
//      optimizer.safetensors  the moments
//      manifest.txt           CRC-32, size and name of both
// written under a temporary name, flushed and renamed, so that a kill at any moment leaves it whole or absent.

static void empty_dir(const char *path) {
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) { continue; }
        char file[4400];
        snprintf(file, sizeof file, "%s/%s", path, e->d_name);
        unlink(file);
    }
    if (dir) { closedir(dir); }
}
static void remove_dir(const char *path) {
    empty_dir(path);
    rmdir(path);
}

static void make_dirs(const char *path) {
    char part[4096];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = part + 1;; slash++) {
        if (*slash != '/' && *slash) { continue; }
        char end = *slash;
        *slash = '\0';
        struct stat info;
        if (mkdir(part, 0777) != 0 && (errno != EEXIST || stat(part, &info) != 0 || !S_ISDIR(info.st_mode))) {
            FAIL("--out %s: cannot create folder %s: %s", path, part, strerror(errno == EEXIST ? ENOTDIR : errno));
        }
        if (!end) { return; }
        *slash = '/';
    }
}

static void sync_dir(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fsync(fd) != 0) { FAIL("%s: cannot flush to disk: %s", path, strerror(errno)); }
    close(fd);
}

// A file being written, with the CRC of what has gone in.
typedef struct OutFile { FILE *file; char path[4400]; uint32_t crc; int64_t bytes; } OutFile;

static void out_open(OutFile *o, const char *path) {
    snprintf(o->path, sizeof o->path, "%s", path);
    o->crc = 0;
    o->bytes = 0;
    o->file = fopen(path, "wb");
    if (!o->file) { FAIL("%s: cannot create: %s", path, strerror(errno)); }
}
static void out_write(OutFile *o, const void *data, size_t n) {
    if (fwrite(data, 1, n, o->file) != n) { FAIL("%s: cannot write: %s", o->path, strerror(errno)); }
    o->crc = (uint32_t)crc32_z(o->crc, (const unsigned char *)data, n);
    o->bytes += (int64_t)n;
}
static void out_close(OutFile *o) { // to the disk, not just to the system
    if (fflush(o->file) != 0 || fsync(fileno(o->file)) != 0) { FAIL("%s: cannot write: %s", o->path, strerror(errno)); }
    if (fclose(o->file) != 0) { FAIL("%s: cannot close: %s", o->path, strerror(errno)); }
}
static void write_text_file(const char *path, const char *text) {
    char *temporary = text_format("%s.tmp", path);
    OutFile o;
    out_open(&o, temporary);
    out_write(&o, text, strlen(text));
    out_close(&o);
    if (rename(temporary, path) != 0) { FAIL("%s: cannot rename to %s: %s", temporary, path, strerror(errno)); }
    free(temporary);
}

// A tensor of a safetensors file: its name and where its values are.
typedef struct Tensor { char name[96]; int64_t rows, cols; int vector; real *data; } Tensor;
#define DTYPE (sizeof(real) == 8 ? "F64" : "F32")

// The tensors of one file of a checkpoint: theta, or the optimizer's moments. The caller frees them.
static Tensor *checkpoint_tensors(const GPT *m, int moments, int *count) {
    Tensor *tensors = (Tensor *)calloc((size_t)m->num_params * 2 + 1, sizeof(Tensor));
    if (!tensors) { FAIL("out of memory"); }
    *count = 0;
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        for (int k = 0; k < (moments ? 2 : 1); k++) {
            int64_t at = !moments ? p->offset : k ? p->v : p->m;
            if (at < 0) { continue; }
            Tensor *t = &tensors[(*count)++];
            snprintf(t->name, sizeof t->name, "%s%s", p->name, !moments ? "" : k ? ".v" : ".m");
            t->rows = p->rows;
            t->cols = p->cols;
            t->vector = p->role >= ROLE_GAMMA_B;
            t->data = (moments ? m->moments : m->theta) + at;
        }
    }
    return tensors;
}

// safetensors: uint64 size of the header, a JSON header {"__metadata__": {...}, name: {dtype, shape, data_offsets}},
// then the values. Takes ownership of metadata. Returns the finished file's CRC and size in *o.
static void safetensors_write(OutFile *o, const char *path, const Tensor *tensors, int count, cJSON *metadata) {
    cJSON *header = cJSON_CreateObject();
    cJSON_AddItemToObject(header, "__metadata__", metadata);
    int64_t offset = 0;
    for (int i = 0; i < count; i++) {
        const Tensor *t = &tensors[i];
        cJSON *entry = cJSON_AddObjectToObject(header, t->name);
        cJSON_AddStringToObject(entry, "dtype", DTYPE);
        cJSON *shape = cJSON_AddArrayToObject(entry, "shape"), *offsets;
        if (!t->vector) { cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->rows)); }
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->cols));
        offsets = cJSON_AddArrayToObject(entry, "data_offsets");
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
        offset += t->rows * t->cols * (int64_t)sizeof(real);
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
    }
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    if (!text) { FAIL("%s: out of memory for the header", path); }
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8; // values begin at a multiple of 8 bytes
    out_open(o, path);
    out_write(o, &padded, sizeof padded);
    out_write(o, text, length);
    out_write(o, "        ", padded - length);
    free(text);
    for (int i = 0; i < count; i++) { out_write(o, tensors[i].data, (size_t)(tensors[i].rows * tensors[i].cols) * sizeof(real)); }
    out_close(o);
}

// A safetensors file, mapped and with its header parsed.
typedef struct SafeFile { char path[4400]; const char *map; size_t size; const char *values; int64_t values_size; cJSON *header; } SafeFile;

static void safetensors_open(SafeFile *f, const char *path) {
    snprintf(f->path, sizeof f->path, "%s", path);
    struct stat info;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &info) != 0) { FAIL("%s: cannot open: %s", path, strerror(errno)); }
    uint64_t length = 0;
    f->size = (size_t)info.st_size;
    if (!S_ISREG(info.st_mode) || info.st_size < 16) { FAIL("%s: found %lld bytes, expected a safetensors file", path, (long long)info.st_size); }
    void *map = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) { FAIL("%s: cannot map: %s", path, strerror(errno)); }
    close(fd);
    f->map = (const char *)map;
    memcpy(&length, map, 8);
    if (length > f->size - 8) { FAIL("%s: found a header of %llu bytes in a file of %zu, expected a safetensors file", path, (unsigned long long)length, f->size); }
    f->header = cJSON_ParseWithLength(f->map + 8, (size_t)length);
    if (!cJSON_IsObject(f->header)) { FAIL("%s: found a header that is not JSON, expected a safetensors file", path); }
    f->values = f->map + 8 + length;
    f->values_size = (int64_t)(f->size - 8 - length);
}
static void safetensors_close(SafeFile *f) {
    munmap((void *)(uintptr_t)f->map, f->size);
    cJSON_Delete(f->header);
}

// Copies a tensor's values from the file; its dtype and shape must be as the table says.
static void safetensors_read(const SafeFile *f, const Tensor *t) {
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(f->header, t->name);
    if (!entry) { FAIL("%s: found no tensor %s, expected it for this configuration", f->path, t->name); }
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype"), *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    int dims = t->vector ? 1 : 2, same = cJSON_GetArraySize(shape) == dims && cJSON_IsString(dtype) && strcmp(dtype->valuestring, DTYPE) == 0;
    for (int i = 0; i < dims && same; i++) {
        const cJSON *size = cJSON_GetArrayItem(shape, i);
        same = cJSON_IsNumber(size) && (int64_t)size->valuedouble == (t->vector || i == 1 ? t->cols : t->rows);
    }
    const cJSON *begin = cJSON_GetArrayItem(offsets, 0), *end = cJSON_GetArrayItem(offsets, 1);
    int64_t bytes = t->rows * t->cols * (int64_t)sizeof(real);
    if (!same || !cJSON_IsNumber(begin) || !cJSON_IsNumber(end)) { FAIL("%s: found tensor %s of another type or shape, expected %s (%lld, %lld)", f->path, t->name, DTYPE, (long long)t->rows, (long long)t->cols); }
    int64_t from = (int64_t)begin->valuedouble, to = (int64_t)end->valuedouble;
    if (from < 0 || to - from != bytes || to > f->values_size) { FAIL("%s: found tensor %s at bytes %lld to %lld of %lld, expected %lld bytes", f->path, t->name, (long long)from, (long long)to, (long long)f->values_size, (long long)bytes); }
    memcpy(t->data, f->values + from, (size_t)bytes);
}

// What a run needs to go on, beside theta and the moments.
typedef struct TrainState { int64_t step, sequences; uint32_t fingerprint; } TrainState;

static cJSON *checkpoint_metadata(const GPT *m, const TrainState *state) {
    cJSON *meta = cJSON_CreateObject();
    char text[4400];
    cJSON_AddStringToObject(meta, "format", "scale-vector-gpt 1");
    snprintf(text, sizeof text, "%lld", (long long)state->step);
    cJSON_AddStringToObject(meta, "step", text);
    snprintf(text, sizeof text, "%lld", (long long)state->sequences);
    cJSON_AddStringToObject(meta, "sequences", text);
    snprintf(text, sizeof text, "%u", state->fingerprint);
    cJSON_AddStringToObject(meta, "data_fingerprint", text);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (options[i].scope == LOCAL) { continue; }
        char name[64];
        snprintf(name, sizeof name, "option.%s", options[i].name);
        const char *value = options[i].type == TYPE_TEXT ? *(const char *const *)option_field(&options[i], &m->cfg) : option_text(&m->cfg, i, text, sizeof text);
        cJSON_AddStringToObject(meta, name, value); // a list of shards can be of any length
    }
    return meta;
}

static int is_checkpoint_name(const char *name) { // "step_" and eight digits or more
    size_t digits = strspn(name + (strncmp(name, "step_", 5) == 0 ? 5 : strlen(name)), "0123456789");
    return digits >= 8 && name[5 + digits] == '\0';
}

// Steps of the checkpoints in a run's folder, ascending; the caller frees them. -1: no such folder.
static int checkpoint_list(const char *out, int64_t **steps) {
    DIR *dir = opendir(out);
    if (!dir) { return -1; }
    int count = 0;
    *steps = NULL;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (!is_checkpoint_name(e->d_name)) { continue; }
        *steps = (int64_t *)realloc(*steps, (size_t)(count + 1) * sizeof(int64_t));
        if (!*steps) { FAIL("out of memory"); }
        int64_t step = strtoll(e->d_name + 5, NULL, 10);
        int at = count++;
        for (; at > 0 && (*steps)[at - 1] > step; at--) { (*steps)[at] = (*steps)[at - 1]; }
        (*steps)[at] = step;
    }
    closedir(dir);
    return count;
}

// Removes an old checkpoint: first it loses its name, so that a kill can't leave half of one under it.
static void checkpoint_remove(const char *out, int64_t step) {
    char path[4200], doomed[4300];
    snprintf(path, sizeof path, "%s/step_%08lld", out, (long long)step);
    snprintf(doomed, sizeof doomed, "%s.old.tmp", path); // not step_N.tmp, which may be the new checkpoint of this very step
    remove_dir(doomed);
    if (rename(path, doomed) != 0) { FAIL("%s: cannot rename: %s", path, strerror(errno)); }
    remove_dir(doomed);
}

// Keeps the newest `keep` checkpoints; 0: all.
static void checkpoint_tidy(const char *out, int64_t keep) {
    int64_t *steps = NULL;
    int count = checkpoint_list(out, &steps);
    for (int i = 0; keep > 0 && i < count - keep; i++) { checkpoint_remove(out, steps[i]); }
    free(steps);
}

// Before a run goes on from `step`: removes what a kill has left half written, and the checkpoints of later steps.
// Those belong to another course of the run, as do the later rows of metrics.csv, and --resume would mix the two.
static void checkpoint_rewind(const char *out, int64_t step) {
    char *pattern = text_format("%s/step_*.tmp", out);
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) { remove_dir(found.gl_pathv[i]); }
        globfree(&found);
    }
    free(pattern);
    int64_t *steps = NULL;
    for (int count = checkpoint_list(out, &steps); count > 0 && steps[count - 1] > step; count--) {
        printf("removed %s/step_%08lld: the run goes on from step %lld\n", out, (long long)steps[count - 1], (long long)step);
        checkpoint_remove(out, steps[count - 1]);
    }
    free(steps);
}

static void checkpoint_save(const GPT *m, const char *out, const TrainState *state) {
    char path[4096], file[4400], manifest[512];
    snprintf(path, sizeof path, "%s/step_%08lld", out, (long long)state->step);
    snprintf(fail_cleanup_dir, sizeof fail_cleanup_dir, "%s/step_%08lld.tmp", out, (long long)state->step);
    remove_dir(fail_cleanup_dir);
    if (mkdir(fail_cleanup_dir, 0777) != 0) { FAIL("%s: cannot create: %s", fail_cleanup_dir, strerror(errno)); }
    manifest[0] = '\0';
    for (int part = 0; part < 2; part++) {
        const char *name = part ? "optimizer.safetensors" : "model.safetensors";
        int count;
        OutFile o;
        Tensor *tensors = checkpoint_tensors(m, part, &count);
        snprintf(file, sizeof file, "%s/%s", fail_cleanup_dir, name);
        cJSON *meta = part ? cJSON_CreateObject() : checkpoint_metadata(m, state);
        if (part) { cJSON_AddStringToObject(meta, "format", "scale-vector-gpt 1 optimizer"); }
        safetensors_write(&o, file, tensors, count, meta);
        snprintf(manifest + strlen(manifest), sizeof manifest - strlen(manifest), "%08x %lld %s\n", o.crc, (long long)o.bytes, name);
        free(tensors);
    }
    snprintf(file, sizeof file, "%s/manifest.txt", fail_cleanup_dir);
    write_text_file(file, manifest);
    sync_dir(fail_cleanup_dir);
    struct stat info;
    if (stat(path, &info) == 0) { checkpoint_remove(out, state->step); } // the same step once more, after a resume from an older one
    if (rename(fail_cleanup_dir, path) != 0) { FAIL("%s: cannot rename to %s: %s", fail_cleanup_dir, path, strerror(errno)); }
    fail_cleanup_dir[0] = '\0';
    sync_dir(out);
    checkpoint_tidy(out, m->cfg.keep);
}

// Finds the checkpoint that --resume means: PATH itself, or the newest in the run folder PATH.
static void checkpoint_find(const char *resume, char *path, size_t path_size, char *run, size_t run_size) {
    struct stat info;
    char manifest[8800];
    char *plain = resume[0] == '/' || resume[0] == '.' ? realpath(resume, NULL) : NULL; // "." and ".." have no folder to go up to
    snprintf(path, path_size, "%s", plain ? plain : resume);
    free(plain);
    while (strlen(path) > 1 && path[strlen(path) - 1] == '/') { path[strlen(path) - 1] = '\0'; }
    if (stat(path, &info) != 0) { FAIL("--resume %s: cannot open: %s; expected a run's folder or a checkpoint", resume, strerror(errno)); }
    if (!S_ISDIR(info.st_mode)) { FAIL("--resume %s: found a file, expected a run's folder or a checkpoint's", resume); }
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(manifest, sizeof manifest, "%s/manifest.txt", path);
    if (is_checkpoint_name(name) || stat(manifest, &info) == 0) {
        snprintf(run, run_size, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
        return;
    }
    int64_t *steps = NULL;
    int count = checkpoint_list(path, &steps);
    if (count <= 0) { FAIL("--resume %s: found no complete checkpoint, expected a folder step_NNNNNNNN in it", resume); }
    snprintf(run, run_size, "%s", path);
    snprintf(path + strlen(path), path_size - strlen(path), "/step_%08lld", (long long)steps[count - 1]);
    free(steps);
}

// Opens a file of a checkpoint after its size and CRC have been found as the manifest says.
static void checkpoint_open(SafeFile *f, const char *checkpoint, const char *name) {
    char path[4400], line[512];
    snprintf(path, sizeof path, "%s/manifest.txt", checkpoint);
    FILE *manifest = fopen(path, "rb");
    if (!manifest) { FAIL("%s: cannot open: %s; expected a complete checkpoint", path, strerror(errno)); }
    unsigned crc = 0;
    long long bytes = -1;
    while (fgets(line, sizeof line, manifest)) {
        char file[256];
        unsigned c;
        long long b;
        if (sscanf(line, "%8x %lld %255s", &c, &b, file) == 3 && strcmp(file, name) == 0) { crc = c; bytes = b; }
    }
    fclose(manifest);
    if (bytes < 0) { FAIL("%s: found no line for %s, expected its CRC-32, size and name", path, name); }
    snprintf(path, sizeof path, "%s/%s", checkpoint, name);
    struct stat info;
    if (stat(path, &info) != 0) { FAIL("%s: cannot open: %s", path, strerror(errno)); }
    if ((long long)info.st_size != bytes) { FAIL("%s: found %lld bytes, expected %lld: it is damaged; an older checkpoint can be named with --resume", path, (long long)info.st_size, bytes); }
    safetensors_open(f, path);
    uint32_t found = (uint32_t)crc32_z(0, (const unsigned char *)f->map, f->size);
    if (found != crc) { FAIL("%s: found CRC-32 %08x, expected %08x: it is damaged; an older checkpoint can be named with --resume", path, found, crc); }
}

static const char *metadata_text(const SafeFile *f, const char *name) {
    const cJSON *meta = cJSON_GetObjectItemCaseSensitive(f->header, "__metadata__");
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(meta, name);
    if (!cJSON_IsString(item)) { FAIL("%s: found no \"%s\" in its metadata, expected a checkpoint of this program", f->path, name); }
    return item->valuestring;
}

// First half of a resume: the stored options become the defaults of cfg. Flags already parsed stay.
static void checkpoint_read_config(const SafeFile *f, Config *cfg, TrainState *state) {
    char name[64], where[4500];
    if (strcmp(metadata_text(f, "format"), "scale-vector-gpt 1") != 0) { FAIL("%s: found format \"%s\", expected \"scale-vector-gpt 1\"", f->path, metadata_text(f, "format")); }
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (options[i].scope == LOCAL || cfg->source[i] == FROM_FLAG) { continue; }
        snprintf(name, sizeof name, "option.%s", options[i].name);
        snprintf(where, sizeof where, "%s: %s", f->path, name);
        option_set(cfg, i, metadata_text(f, name), FROM_CHECKPOINT, where);
    }
    state->step = strtoll(metadata_text(f, "step"), NULL, 10);
    state->sequences = strtoll(metadata_text(f, "sequences"), NULL, 10);
    const int64_t most = (int64_t)1 << 50; // far above what a run can reach, far below overflow
    if (state->step < 1 || state->step > most || state->sequences < 1 || state->sequences > most || cfg->vocab < 1) { FAIL("%s: found step \"%s\", sequences \"%s\" and vocabulary %d, expected numbers from 1 to 2^50", f->path, metadata_text(f, "step"), metadata_text(f, "sequences"), cfg->vocab); }
    state->fingerprint = (uint32_t)strtoul(metadata_text(f, "data_fingerprint"), NULL, 10);
}

// Second half, once presets and flags are resolved: what makes the model and the data order must be as stored.
static void checkpoint_check_config(const SafeFile *f, const Config *cfg) {
    char name[64], text[4400];
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (options[i].scope != FIXED || (cfg->sample > 0 && options[i].offset == AT(seed))) { continue; } // another seed, another sample
        snprintf(name, sizeof name, "option.%s", options[i].name);
        const char *stored = metadata_text(f, name);
        if (strcmp(stored, option_text(cfg, i, text, sizeof text)) != 0) {
            const char *from = cfg->source[i] == FROM_MODEL ? " (from --model)" : cfg->source[i] == FROM_FLAG ? "" : " (from --variant)";
            USAGE("--%s: found %s%s, expected %s as in the checkpoint %s; it can't change on resume", options[i].name, text, from, stored, f->path);
        }
    }
}

static void checkpoint_load(GPT *m, const char *checkpoint, const SafeFile *model, int moments) {
    for (int part = 0; part <= moments; part++) {
        int count;
        Tensor *tensors = checkpoint_tensors(m, part, &count);
        SafeFile optimizer;
        if (part) { checkpoint_open(&optimizer, checkpoint, "optimizer.safetensors"); }
        for (int i = 0; i < count; i++) { safetensors_read(part ? &optimizer : model, &tensors[i]); }
        if (part) { safetensors_close(&optimizer); }
        free(tensors);
    }
}

// metrics.csv holds only what the same flags give again bit by bit; times go to timing.csv beside it.
#define METRICS_HEADER "step,tokens,lr,train_loss,val_loss,grad_norm"
#define TIMING_HEADER "step,ms,tokens_per_second\n"
#define NORMS_HEADER "step,tensor,values,norm\n"
typedef struct CsvFile { FILE *file; char path[4400]; } CsvFile;

// Opens a log for rows after `step`: rows of later steps, left by a run that was killed, are dropped first.
static void csv_open(CsvFile *csv, const char *out, const char *name, const char *header, int64_t step) {
    snprintf(csv->path, sizeof csv->path, "%s/%s", out, name);
    if (process_number > 0) { // its rows are the same
        snprintf(csv->path, sizeof csv->path, "/dev/null");
        csv->file = fopen(csv->path, "ab");
        if (!csv->file) { FAIL("%s: cannot open: %s", csv->path, strerror(errno)); }
        return;
    }
    FILE *old = step > 0 ? fopen(csv->path, "rb") : NULL;
    char *kept = text_format("%s", header), *line = NULL;
    size_t capacity = 0, length = strlen(kept), room = length + 1;
    for (ssize_t n; old && (n = getline(&line, &capacity, old)) > 0;) {
        char *end;
        long long row = strtoll(line, &end, 10);
        if (end == line || *end != ',' || row > step || line[n - 1] != '\n') { continue; }
        while (length + (size_t)n + 1 > room) { room *= 2; }
        kept = (char *)realloc(kept, room);
        if (!kept) { FAIL("out of memory"); }
        memcpy(kept + length, line, (size_t)n + 1);
        length += (size_t)n;
    }
    free(line);
    if (old) { fclose(old); }
    write_text_file(csv->path, kept);
    free(kept);
    csv->file = fopen(csv->path, "ab");
    if (!csv->file) { FAIL("%s: cannot open: %s", csv->path, strerror(errno)); }
}
static void csv_flush(CsvFile *csv) {
    if (fflush(csv->file) != 0 || ferror(csv->file)) { FAIL("%s: cannot write: %s", csv->path, strerror(errno)); }
}
static void csv_close(CsvFile *csv) {
    if (fclose(csv->file) != 0) { FAIL("%s: cannot write: %s", csv->path, strerror(errno)); }
}

// A row a tensor: its number of values and its Euclidean norm. Of a scale vector the effective gamma, as the model feels it.
static void norms_log(const GPT *m, CsvFile *csv, int64_t step) {
    int64_t widest = 1;
    for (int i = 0; i < m->num_params; i++) { if (m->params[i].role >= ROLE_GAMMA_B && m->params[i].cols > widest) { widest = m->params[i].cols; } }
    real *gamma = (real *)malloc((size_t)widest * sizeof(real)); // made here again: m->gamma may be on a GPU
    if (!gamma) { FAIL("out of memory"); }
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        if (p->role >= ROLE_GAMMA_B && p->gamma < 0) { continue; } // a beta: its vector has it
        const real *w = m->theta + p->offset;
        if (p->gamma >= 0) {
            scale_vector_forward(gamma, w, p->beta < 0 ? NULL : m->theta + m->params[p->beta].offset, p->cols, m->cfg.reparam);
            w = gamma;
        }
        int64_t n = p->rows * p->cols;
        double squares = 0;
        for (int64_t j = 0; j < n; j++) { squares += (double)w[j] * w[j]; }
        int length = (int)strlen(p->name) - (p->beta < 0 ? 0 : (int)strlen(".alpha"));
        fprintf(csv->file, "%lld,%.*s,%lld,%.9g\n", (long long)step, length, p->name, (long long)n, sqrt(squares));
    }
    free(gamma);
    csv_flush(csv);
}

// ----------------------------------------------------------------------------------------------------
// Export and import: theta~ as a Hugging Face Llama checkpoint, and such a checkpoint as a baseline model.
//      config.json            sizes under Hugging Face's names
//      model.safetensors      tensors; those of others may be shards that model.safetensors.index.json lists
//      modeling_scale_gpt.py  only where a Llama has no place for an Output-Norm or for experts
// A Llama has one scale vector for each Pre-Norm. A baseline is written as it was trained, so that what is imported
// comes out again bit by bit; of all other variants W~ is written, and those vectors are 1.
// Rows of q and k keep their order: RoPE turns x[i] and x[i + HS/2] here and there.

static const struct HfSize { const char *key, *option, *why; } hf_sizes[] = {
    {"num_hidden_layers", "layers", ""}, {"hidden_size", "channels", ""}, {"num_attention_heads", "heads", ""}, {"num_key_value_heads", "kv-heads", ""},
    {"intermediate_size", "hidden", ""}, {"vocab_size", "vocab", ": tokens have 16 bits"}, {"max_position_embeddings", "seq-len", ""},
};

// What a Llama's config.json may say beside sizes. `missing`: what it means to leave the key out.
static const struct HfSetting { const char *key, *accepted, *missing, *why; } hf_settings[] = {
    {"model_type", "\"llama\"", "null", "the model is a Llama"},
    {"hidden_act", "\"silu\"", "\"silu\"", "the FFN is SwiGLU"},
    {"attention_bias", "false", "false", "linear maps have no bias"},
    {"mlp_bias", "false", "false", "linear maps have no bias"},
    {"rms_norm_eps", "1e-05", "1e-06", "it is fixed in this program"},
    {"rope_theta", "10000", "10000", "it is fixed in this program"},
    {"partial_rotary_factor", "1", "1", "RoPE turns whole heads"},
    {"rope_scaling", "null", "null", "RoPE is not scaled"},
    {"quantization_config", "null", "null", "weights are not quantized"},
};

// The first flag that makes a model other than a Llama with a scale vector for each Pre-Norm, or NULL.
static const char *beyond_baseline(const Config *cfg) {
    for (int s = 0; s < NUM_SITES; s++) {
        if (cfg->placement[s] != (s == SITE_O || s == SITE_DOWN ? (int)PLACE_NONE : (int)PLACE_INPUT)) { return "--placement other than input"; }
    }
    return !cfg->norm_scale ? "--norm-scale off" : cfg->hg ? "--hg on" : cfg->reparam ? "--reparam or|er" : cfg->qk_norm ? "--qk-norm on"
         : cfg->post_norm ? "--post-norm on" : cfg->experts ? "--experts" : NULL;
}

static int needs_own_code(const GPT *m) { return m->cfg.experts > 0 || any_norm(m->maps, m->num_maps); }
// Is lm_head still the embedding matrix, once its scale vector is where the export has it?
static int export_is_tied(const GPT *m) {
    return m->cfg.tie_embeddings && !needs_own_code(m) && (!beyond_baseline(&m->cfg) || gpt_head(m)->w_eff == m->theta + m->params[0].offset);
}

__attribute__((format(printf, 6, 7)))
static void hf_tensor(Tensor *list, int *count, int64_t rows, int64_t cols, real *data, const char *name, ...) { // rows 0: a vector
    Tensor *t = &list[(*count)++];
    va_list args;
    va_start(args, name);
    vsnprintf(t->name, sizeof t->name, name, args);
    va_end(args);
    t->vector = rows == 0;
    t->rows = rows ? rows : 1;
    t->cols = cols;
    t->data = data;
}

static void hf_map_name(const GPT *m, const LinearMap *map, char *out, size_t size) { // without its ".weight"
    static const char *const names[] = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "router"};
    if (map->layer < 0) { snprintf(out, size, "%s", names[map->site]); return; }
    char expert[32] = "";
    if (map->expert >= 0) { snprintf(expert, sizeof expert, "experts.%d.", map->expert); }
    else if (m->cfg.experts && map->site >= SITE_GATE && map->site <= SITE_DOWN) { snprintf(expert, sizeof expert, "shared."); }
    snprintf(out, size, "model.layers.%d.%s%s%s", map->layer, map->site <= SITE_O ? "self_attn." : "mlp.", expert, names[map->site]);
}

// The tensors of a Hugging Face checkpoint of this model, and where their values are. The caller frees the list; `ones`
// holds as many as the widest vector has.
static Tensor *hf_tensors(const GPT *m, real *ones, int *count) {
    int baseline = !beyond_baseline(&m->cfg), own_code = needs_own_code(m), C = m->cfg.channels, n = 0;
    Tensor *list = (Tensor *)calloc((size_t)m->num_maps * 3 + (size_t)m->cfg.layers + 1, sizeof(Tensor));
    if (!list) { FAIL("out of memory"); }
    hf_tensor(list, &n, m->cfg.vocab, C, m->theta + m->params[0].offset, "model.embed_tokens.weight");
    for (int i = 0; i < m->num_maps; i++) {
        const LinearMap *map = &m->maps[i];
        char name[72];
        hf_map_name(m, map, name, sizeof name);
        real *gamma = baseline && map->gamma_b >= 0 ? m->theta + m->params[map->gamma_b].offset : ones;
        if (own_code) { } // its Pre-Norms have no vectors
        else if (map->site == SITE_Q) { hf_tensor(list, &n, 0, C, gamma, "model.layers.%d.input_layernorm.weight", map->layer); }
        else if (map->site == SITE_GATE) { hf_tensor(list, &n, 0, C, gamma, "model.layers.%d.post_attention_layernorm.weight", map->layer); }
        else if (map->site == SITE_HEAD) { hf_tensor(list, &n, 0, C, gamma, "model.norm.weight"); }
        if (map->site == SITE_HEAD && export_is_tied(m)) { continue; }
        hf_tensor(list, &n, map->rows, map->cols, baseline ? m->theta + m->params[map->weight].offset : map->w_eff, "%s.weight", name);
        if (map->norm) { hf_tensor(list, &n, 0, map->rows, map->norm_eff ? map->norm_eff : ones, "%s.norm_weight", name); }
    }
    for (int l = 0; l < m->cfg.layers && m->cfg.experts && m->cfg.post_norm; l++) {
        hf_tensor(list, &n, 0, C, m->ffn_norm[l] < 0 ? ones : gpt_gamma(m, m->ffn_norm[l]), "model.layers.%d.mlp.norm_weight", l);
    }
    *count = n;
    return list;
}

static void hf_write_config(const GPT *m, const char *path) {
    const Config *cfg = &m->cfg;
    int own_code = needs_own_code(m);
    const char *name = own_code ? "ScaleGPTForCausalLM" : "LlamaForCausalLM";
    cJSON *json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "architectures", cJSON_CreateStringArray(&name, 1));
    cJSON_AddStringToObject(json, "model_type", own_code ? "scale_gpt" : "llama");
    if (own_code) {
        cJSON *map = cJSON_AddObjectToObject(json, "auto_map");
        cJSON_AddStringToObject(map, "AutoConfig", "modeling_scale_gpt.ScaleGPTConfig");
        cJSON_AddStringToObject(map, "AutoModelForCausalLM", "modeling_scale_gpt.ScaleGPTForCausalLM");
    }
    for (int i = 0; i < COUNT(hf_sizes); i++) {
        cJSON_AddNumberToObject(json, hf_sizes[i].key, *(const int *)option_field(&options[find_option(hf_sizes[i].option)], cfg));
    }
    cJSON_AddNumberToObject(json, "head_dim", m->head_size);
    for (int i = 1; i < COUNT(hf_settings) && !own_code; i++) { // from hidden_act on
        if (strcmp(hf_settings[i].accepted, "null") != 0) { cJSON_AddItemToObject(json, hf_settings[i].key, cJSON_Parse(hf_settings[i].accepted)); }
    }
    if (own_code) {
        cJSON_AddNumberToObject(json, "rms_norm_eps", NORM_EPS);
        cJSON_AddNumberToObject(json, "rope_theta", ROPE_THETA);
        cJSON *sites = cJSON_AddArrayToObject(json, "normed_sites");
        for (int s = 0; s < NUM_SITES; s++) {
            int normed = 0;
            for (int i = 0; i < m->num_maps; i++) { normed |= m->maps[i].site == s && m->maps[i].norm; }
            if (normed) { cJSON_AddItemToArray(sites, cJSON_CreateString(site_names[s])); }
        }
        cJSON_AddNumberToObject(json, "num_experts", cfg->experts);
        cJSON_AddNumberToObject(json, "num_experts_per_tok", cfg->top_k);
        cJSON_AddNumberToObject(json, "expert_size", cfg->expert_hidden);
        cJSON_AddNumberToObject(json, "shared_size", cfg->experts ? cfg->shared_hidden : 0);
        cJSON_AddBoolToObject(json, "moe_norm", cfg->experts && cfg->post_norm);
    }
    cJSON_AddBoolToObject(json, "tie_word_embeddings", export_is_tied(m));
    cJSON_AddNullToObject(json, "bos_token_id"); // a run needn't have a tokenizer
    cJSON_AddNullToObject(json, "eos_token_id");
    cJSON_AddStringToObject(json, "torch_dtype", sizeof(real) == 8 ? "float64" : "float32");
    char *text = cJSON_Print(json);
    if (!text) { FAIL("%s: out of memory", path); }
    write_text_file(path, text);
    free(text);
    cJSON_Delete(json);
}

// A whole text file; the caller frees it.
static char *read_text_file(const char *path) {
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file || fstat(fileno(file), &info) != 0) { FAIL("%s: cannot open: %s", path, strerror(errno)); }
    if (!S_ISREG(info.st_mode)) { FAIL("%s: found no regular file, expected one", path); }
    char *text = (char *)calloc((size_t)info.st_size + 1, 1);
    if (!text) { FAIL("%s: out of memory for its %lld bytes", path, (long long)info.st_size); }
    if (fread(text, 1, (size_t)info.st_size, file) != (size_t)info.st_size) { FAIL("%s: cannot read: %s", path, strerror(errno)); }
    fclose(file);
    return text;
}

// The text of dev/hf/modeling_scale_gpt.py, beside the program or some folders above it (build/sanitize).
static char *own_code_text(void) {
    char path[4400] = "", program[4096] = "./train_gpt2";
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) { strcpy(program, "./train_gpt2"); } // not Linux: from here
    for (char *slash; (slash = strrchr(program, '/')) != NULL;) {
        *slash = '\0';
        snprintf(path, sizeof path, "%s/dev/hf/modeling_scale_gpt.py", program);
        if (access(path, R_OK) == 0) { return read_text_file(path); }
    }
    FAIL("--export hf: found no dev/hf/modeling_scale_gpt.py in the program's folder or above, expected it: Transformers needs that code for this model's norms or experts");
}

// Writes DIR whole or not at all: under a temporary name, flushed, then renamed. Needs an up-to-date reparameterize_forward.
static void hf_export(const GPT *m, const char *where) {
    char *dir = text_format("%s", where), file[4400];
    for (size_t n = strlen(dir); n > 1 && dir[n - 1] == '/'; n--) { dir[n - 1] = '\0'; }
    if (strlen(dir) > sizeof fail_cleanup_dir - 20) { FAIL("--export hf %s: found a name of %zu bytes, expected less than %zu", dir, strlen(dir), sizeof fail_cleanup_dir - 20); }
    DIR *old = opendir(dir);
    if (!old && errno != ENOENT) { FAIL("--export hf %s: cannot open: %s", dir, strerror(errno)); }
    for (struct dirent *e; old && (e = readdir(old));) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) { FAIL("--export hf %s: found a folder with files in it (%s), expected a new or empty one", dir, e->d_name); }
    }
    if (old) { closedir(old); }
    char *code = needs_own_code(m) ? own_code_text() : NULL;
    snprintf(file, sizeof file, "%s.export.tmp", dir);
    if (mkdir(file, 0777) != 0 && errno != EEXIST) { FAIL("--export hf %s: cannot create %s: %s", dir, file, strerror(errno)); }
    int lock = open(file, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) { FAIL("--export hf %s: cannot open %s: %s", dir, file, strerror(errno)); }
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) { FAIL("--export hf %s: found another export at work on it, expected one at a time", dir); }
    empty_dir(file); // what a kill has left
    snprintf(fail_cleanup_dir, sizeof fail_cleanup_dir, "%s.export.tmp", dir);
    snprintf(file, sizeof file, "%s/config.json", fail_cleanup_dir);
    hf_write_config(m, file);
    snprintf(file, sizeof file, "%s/modeling_scale_gpt.py", fail_cleanup_dir);
    if (code) { write_text_file(file, code); }
    int64_t widest = m->cfg.channels;
    for (int i = 0; i < m->num_maps; i++) { if (m->maps[i].rows > widest) { widest = m->maps[i].rows; } }
    real *ones = (real *)malloc((size_t)widest * sizeof(real));
    if (!ones) { FAIL("out of memory"); }
    for (int64_t i = 0; i < widest; i++) { ones[i] = 1; }
    int count;
    Tensor *tensors = hf_tensors(m, ones, &count);
    cJSON *meta = cJSON_CreateObject();
    cJSON_AddStringToObject(meta, "format", "pt"); // Transformers asks for it
    OutFile o;
    snprintf(file, sizeof file, "%s/model.safetensors", fail_cleanup_dir);
    safetensors_write(&o, file, tensors, count, meta);
    sync_dir(fail_cleanup_dir);
    if (rename(fail_cleanup_dir, dir) != 0) { FAIL("--export hf %s: cannot rename %s to it: %s", dir, fail_cleanup_dir, strerror(errno)); }
    fail_cleanup_dir[0] = '\0';
    close(lock);
    char *slash = strrchr(dir, '/');
    snprintf(file, sizeof file, "%.*s", slash ? (int)(slash - dir) + 1 : 1, slash ? dir : ".");
    sync_dir(file);
    printf("exported to %s: %d tensors of a %s\n", dir, count, code ? "ScaleGPTForCausalLM (trust_remote_code=True)" : "LlamaForCausalLM");
    free(ones);
    free(tensors);
    free(code);
    free(dir);
}

static cJSON *read_json(const char *path) {
    char *text = read_text_file(path);
    cJSON *json = cJSON_Parse(text);
    if (!cJSON_IsObject(json)) { FAIL("%s: found no JSON object, expected one", path); }
    free(text);
    return json;
}

// One setting of config.json or of an object in it; one that is null counts as left out.
static void hf_check_setting(const char *path, const char *within, const cJSON *json, int setting) {
    const char *key = hf_settings[setting].key, *accepted = hf_settings[setting].accepted;
    cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key), *expected = cJSON_Parse(accepted);
    cJSON *missing = cJSON_Parse(hf_settings[setting].missing), *found = item && !cJSON_IsNull(item) ? item : missing;
    if (!cJSON_Compare(found, expected, 1)) {
        char *text = cJSON_PrintUnformatted(found);
        FAIL("%s: found %s%s %s%s, expected %s: %s", path, within, key, text ? text : "?", found == missing ? " (it is left out)" : "", accepted, hf_settings[setting].why);
    }
    cJSON_Delete(expected);
    cJSON_Delete(missing);
}

// Transformers 5 has RoPE's settings in an object of their own; an older rope_scaling may say that there is none.
static void hf_check_rope(const char *path, const char *within, const cJSON *rope) {
    if (!cJSON_IsObject(rope)) { return; }
    for (const cJSON *item = rope->child; item; item = item->next) {
        int known = 0;
        for (int i = 0; i < COUNT(hf_settings); i++) {
            if (strncmp(hf_settings[i].key, "rope_theta", 10) != 0 && strncmp(hf_settings[i].key, "partial_", 8) != 0) { continue; }
            if (strcmp(item->string, hf_settings[i].key) == 0) { hf_check_setting(path, within, rope, i); known = 1; }
        }
        known |= (strcmp(item->string, "rope_type") == 0 || strcmp(item->string, "type") == 0) && cJSON_IsString(item) && strcmp(item->valuestring, "default") == 0;
        char *text = known ? NULL : cJSON_PrintUnformatted(item);
        if (!known) { FAIL("%s: found %s%s %s, expected rope_type \"default\" alone: RoPE is not scaled", path, within, item->string, text ? text : "?"); }
    }
}

// First half of an import: the sizes of DIR/config.json become options. Flags and presets that say otherwise are refused.
static void hf_read_config(Config *cfg) {
    char path[4400], text[64], where[4500];
    snprintf(path, sizeof path, "%s/config.json", cfg->import_dir);
    cJSON *json = read_json(path);
    cJSON *scaling = cJSON_GetObjectItemCaseSensitive(json, "rope_scaling");
    hf_check_rope(path, "rope_scaling.", scaling);
    hf_check_rope(path, "rope_parameters.", cJSON_GetObjectItemCaseSensitive(json, "rope_parameters"));
    for (int i = 0; i < COUNT(hf_settings); i++) {
        if (strcmp(hf_settings[i].key, "rope_scaling") != 0 || !cJSON_IsObject(scaling)) { hf_check_setting(path, "", json, i); }
    }
    int size[COUNT(hf_sizes)], tied = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "tie_word_embeddings"));
    for (int i = 0; i < COUNT(hf_sizes); i++) {
        int index = find_option(hf_sizes[i].option), is_length = strcmp(hf_sizes[i].option, "seq-len") == 0;
        const char *key = hf_sizes[i].key;
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
        if ((!item || cJSON_IsNull(item)) && strcmp(key, "num_key_value_heads") == 0) { key = "num_attention_heads"; item = cJSON_GetObjectItemCaseSensitive(json, key); }
        double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (value != floor(value) || value < 1 || value > options[index].high) {
            char *found = item ? cJSON_PrintUnformatted(item) : NULL;
            FAIL("%s: found %s %s, expected a whole number from 1 to %.0f%s", path, key, found ? found : "left out", options[index].high, hf_sizes[i].why);
        }
        size[i] = (int)value;
        snprintf(text, sizeof text, "%d", size[i]);
        snprintf(where, sizeof where, "%s: %s", path, key);
        int now = *(int *)option_field(&options[index], cfg);
        if (cfg->source[index] < FROM_MODEL) { option_set(cfg, index, text, FROM_CHECKPOINT, where); }
        else if (is_length ? now > size[i] : now != size[i]) {
            USAGE("--%s: found %d%s, expected %s%d, %s of %s", hf_sizes[i].option, now, cfg->source[index] == FROM_MODEL ? " (from --model)" : "", is_length ? "at most " : "", size[i], key, path);
        }
    }
    int C = size[1], NH = size[2], KVH = size[3], head_size = C / NH;
    if (C % NH || NH % KVH || head_size % 2 || head_size > ATT_MAX_HS) {
        FAIL("%s: found hidden_size %d, num_attention_heads %d and num_key_value_heads %d, expected each to be a multiple of the next, and heads of an even size up to %d", path, C, NH, KVH, (int)ATT_MAX_HS);
    }
    const cJSON *head_dim = cJSON_GetObjectItemCaseSensitive(json, "head_dim");
    if (cJSON_IsNumber(head_dim) && head_dim->valuedouble != head_size) {
        FAIL("%s: found head_dim %g, expected %d: heads divide hidden_size %d among them", path, head_dim->valuedouble, head_size, C);
    }
    int tie = find_option("tie-embeddings");
    if (cfg->source[tie] >= FROM_MODEL && cfg->tie_embeddings != tied) { USAGE("--tie-embeddings: found %s, expected %s, tie_word_embeddings of %s", tied ? "off" : "on", tied ? "on" : "off", path); }
    option_set(cfg, tie, tied ? "on" : "off", FROM_CHECKPOINT, path);
    const char *other = beyond_baseline(cfg);
    if (other) { USAGE("--import hf: found %s, expected a baseline: a Llama checkpoint has one scale vector for each Pre-Norm, and nothing to start others from", other); }
    cJSON_Delete(json);
}

typedef struct HfWeights { SafeFile *files; int count; cJSON *index; } HfWeights; // index: NULL for a single file

static void hf_open(HfWeights *w, const char *dir) {
    char path[4400];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    w->index = NULL;
    w->count = 1;
    if (access(path, F_OK) == 0) {
        w->files = (SafeFile *)calloc(1, sizeof(SafeFile));
        if (!w->files) { FAIL("out of memory"); }
        safetensors_open(&w->files[0], path);
        return;
    }
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (access(path, F_OK) != 0) { FAIL("--import hf %s: found neither model.safetensors nor model.safetensors.index.json, expected one of them", dir); }
    w->index = read_json(path);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(w->index, "weight_map");
    w->count = 0;
    w->files = (SafeFile *)calloc((size_t)cJSON_GetArraySize(map) + 1, sizeof(SafeFile));
    if (!w->files) { FAIL("out of memory"); }
    for (const cJSON *item = map ? map->child : NULL; item; item = item->next) {
        if (!cJSON_IsString(item) || strchr(item->valuestring, '/')) { FAIL("%s: found no file name for %s in weight_map, expected one of the same folder", path, item->string); }
        char *shard = text_format("%s/%s", dir, item->valuestring);
        int known = 0;
        for (int i = 0; i < w->count; i++) { known |= strcmp(w->files[i].path, shard) == 0; }
        if (!known) { safetensors_open(&w->files[w->count++], shard); }
        free(shard);
    }
    if (w->count == 0) { FAIL("%s: found no weight_map, expected one that names a file for each tensor", path); }
}

// The file that has a tensor, or NULL.
static const SafeFile *hf_find(const HfWeights *w, const char *name) {
    if (!w->index) { return cJSON_GetObjectItemCaseSensitive(w->files[0].header, name) ? &w->files[0] : NULL; }
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(w->index, "weight_map"), name);
    for (int i = 0; item && i < w->count; i++) {
        if (strcmp(strrchr(w->files[i].path, '/') + 1, item->valuestring) == 0) { return &w->files[i]; }
    }
    return NULL;
}

static float half_value(uint16_t bits) { // sign, 5 bits of exponent, 10 of fraction
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    return bits >> 15 ? -value : value;
}

// Reads a tensor of any float type that Hugging Face writes.
static void hf_read(const SafeFile *f, const Tensor *t) {
    static const struct Type { const char *name; int bytes; } types[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}};
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(f->header, t->name), *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(entry, "dtype"), *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    if (!entry) { FAIL("%s: found no tensor %s, expected it: the index says so", f->path, t->name); }
    int type = -1, dims = t->vector ? 1 : 2;
    for (int i = 0; i < COUNT(types); i++) { if (cJSON_IsString(dtype) && strcmp(dtype->valuestring, types[i].name) == 0) { type = i; } }
    const cJSON *rows = cJSON_GetArrayItem(shape, 0), *cols = cJSON_GetArrayItem(shape, dims - 1);
    int same = type >= 0 && cJSON_GetArraySize(shape) == dims && cJSON_IsNumber(cols) && cols->valuedouble == (double)t->cols && (t->vector || (cJSON_IsNumber(rows) && rows->valuedouble == (double)t->rows));
    if (!same) {
        char *found = cJSON_PrintUnformatted(shape), size[64];
        snprintf(size, sizeof size, t->vector ? "%lld" : "%lld,%lld", (long long)(t->vector ? t->cols : t->rows), (long long)t->cols);
        FAIL("%s: found tensor %s of type %s and shape %s, expected F32, BF16, F16 or F64 and [%s]", f->path, t->name, cJSON_IsString(dtype) ? dtype->valuestring : "?", found ? found : "?", size);
    }
    int64_t n = t->rows * t->cols, bytes = n * types[type].bytes;
    const cJSON *begin = cJSON_GetArrayItem(offsets, 0), *end = cJSON_GetArrayItem(offsets, 1);
    double from = cJSON_IsNumber(begin) ? begin->valuedouble : -1, to = cJSON_IsNumber(end) ? end->valuedouble : -1;
    if (!(from >= 0) || to - from != (double)bytes || to > (double)f->values_size) { FAIL("%s: found tensor %s at bytes %.0f to %.0f of %lld, expected %lld bytes within the file", f->path, t->name, from, to, (long long)f->values_size, (long long)bytes); }
    const char *values = f->values + (int64_t)from;
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float single;
        double full;
        uint16_t half;
        uint32_t word;
        if (type == 0) { memcpy(&single, values + 4 * i, 4); t->data[i] = (real)single; }
        else if (type == 3) { memcpy(&full, values + 8 * i, 8); t->data[i] = (real)full; }
        else {
            memcpy(&half, values + 2 * i, 2);
            word = (uint32_t)half << 16; // BF16 is the upper half of a float
            memcpy(&single, &word, 4);
            t->data[i] = (real)(type == 1 ? single : half_value(half));
        }
    }
}

// Second half of an import: theta from the tensors. Each must be there, and none that this model has no place for.
static void hf_import(GPT *m, const char *dir) {
    HfWeights w;
    int count;
    Tensor *tensors = hf_tensors(m, NULL, &count), head = tensors[0]; // tensors[0]: the embedding
    hf_open(&w, dir);
    snprintf(head.name, sizeof head.name, "lm_head.weight");
    int tied = m->cfg.tie_embeddings, head_alone = tied && !hf_find(&w, tensors[0].name); // which of two shared tensors is stored is up to the writer
    if (head_alone) { tensors[0] = head; }
    for (int i = 0; i < count; i++) {
        const SafeFile *f = hf_find(&w, tensors[i].name);
        if (!f) { FAIL("--import hf %s: found no tensor %s, expected it for this config.json", dir, head_alone && i == 0 ? "model.embed_tokens.weight or lm_head.weight" : tensors[i].name); }
        hf_read(f, &tensors[i]);
    }
    const SafeFile *second = tied && !head_alone ? hf_find(&w, head.name) : NULL;
    if (second) { // both: they must agree
        real *embedding = head.data;
        size_t bytes = (size_t)(head.rows * head.cols) * sizeof(real);
        head.data = (real *)malloc(bytes);
        if (!head.data) { FAIL("out of memory"); }
        hf_read(second, &head);
        if (memcmp(head.data, embedding, bytes) != 0) { FAIL("%s: found lm_head.weight other than model.embed_tokens.weight, expected equal ones: config.json says tie_word_embeddings", second->path); }
        free(head.data);
    }
    for (int i = 0; i < w.count; i++) {
        for (const cJSON *item = w.files[i].header->child; item; item = item->next) {
            size_t length = strlen(item->string);
            int known = strcmp(item->string, "__metadata__") == 0 || (second && strcmp(item->string, head.name) == 0);
            known |= length > 19 && strcmp(item->string + length - 19, "rotary_emb.inv_freq") == 0; // old checkpoints store these constants
            for (int k = 0; k < count && !known; k++) { known = strcmp(item->string, tensors[k].name) == 0; }
            if (!known) { FAIL("%s: found tensor %s, expected only those of a Llama without biases or further norms", w.files[i].path, item->string); }
        }
    }
    for (int i = 0; i < w.count; i++) { safetensors_close(&w.files[i]); }
    cJSON_Delete(w.index);
    free(w.files);
    free(tensors);
}

// ----------------------------------------------------------------------------------------------------
// 9. Sampling.

static int compare_descending(const void *a, const void *b) {
    real x = *(const real *)a, y = *(const real *)b;
    return (x < y) - (x > y);
}

// Draws a token from softmax(logits / temperature) among the top_k likeliest; uniform in (0,1) decides.
static int sample_token(const real *logits, real *sorted, int V, double temperature, int top_k, double uniform) {
    int best = 0;
    for (int v = 1; v < V; v++) { if (logits[v] > logits[best]) { best = v; } }
    if (!isfinite(logits[best])) { FAIL("sampling: found logits that are not finite, expected a trained model"); }
    if (temperature == 0) { return best; }
    real least = -INFINITY;
    if (top_k > 0 && top_k < V) {
        memcpy(sorted, logits, (size_t)V * sizeof(real));
        qsort(sorted, (size_t)V, sizeof(real), compare_descending);
        least = sorted[top_k - 1];
    }
    double sum = 0, running = 0;
    for (int v = 0; v < V; v++) { if (logits[v] >= least) { sum += exp((logits[v] - logits[best]) / temperature); } }
    for (int v = 0; v < V; v++) {
        if (logits[v] < least) { continue; }
        running += exp((logits[v] - logits[best]) / temperature);
        if (running >= uniform * sum) { return v; }
    }
    return best;
}

// End-of-text (a document begins) and the tokens of --prompt, which the caller frees; returns their number.
static int64_t prompt_tokens(const Config *cfg, const Tokenizer *tokenizer, int64_t room, int32_t **tokens) {
    if (tokenizer->eot >= cfg->vocab) { FAIL("--tokenizer: found end-of-text %d, expected less than the model's vocabulary of %d", tokenizer->eot, cfg->vocab); }
    int64_t capacity = 0, n = 1 + tokenizer_encode(tokenizer, cfg->prompt, (int64_t)strlen(cfg->prompt), tokens, &capacity);
    *tokens = (int32_t *)realloc(*tokens, (size_t)(n + room) * sizeof(int32_t));
    if (!*tokens) { FAIL("out of memory"); }
    memmove(*tokens + 1, *tokens, (size_t)(n - 1) * sizeof(int32_t));
    (*tokens)[0] = tokenizer->eot;
    for (int64_t i = 1; i < n; i++) {
        if ((*tokens)[i] >= cfg->vocab) { FAIL("--prompt: found token %d, expected less than the model's vocabulary of %d", (*tokens)[i], cfg->vocab); }
    }
    return n;
}

// Prints --prompt and `count` more tokens. Each token costs a forward over the last T tokens at most.
static void sample_print(GPT *m, const Tokenizer *tokenizer, int64_t count, uint64_t stream) {
    const Config *cfg = &m->cfg;
    int32_t *tokens = NULL;
    int64_t n = prompt_tokens(cfg, tokenizer, count, &tokens);
    real *logits = (real *)malloc((size_t)cfg->vocab * 2 * sizeof(real));
    if (!logits) { FAIL("out of memory"); }
    printf("%s", cfg->prompt);
    for (int64_t i = 0; i < count; i++, n++) {
        int T = n < cfg->seq_len ? (int)n : cfg->seq_len, length = 0;
        machine->forward(m, tokens + n - T, NULL, 1, T, 0);
        machine->logits(m, logits, 1);
        tokens[n] = sample_token(logits, logits + cfg->vocab, cfg->vocab, cfg->temperature, cfg->sample_top_k, random_uniform(stream + (uint64_t)i));
        if (tokens[n] == tokenizer->eot) { printf("\n"); continue; }
        const char *text = tokenizer_decode(tokenizer, tokens[n], &length);
        fwrite(text, 1, (size_t)length, stdout);
        fflush(stdout);
    }
    printf("\n");
    free(tokens);
    free(logits);
}

// Length of the folder's name, with its slash, in --data; of a list in its first item.
static int data_folder(const Config *cfg) {
    int length = (int)strcspn(cfg->data, ",");
    while (length > 0 && cfg->data[length - 1] != '/') { length--; }
    return length;
}

// The tokenizer of --tokenizer. auto: the one *.tiktoken file beside the data, else bytes where V is 256.
// Returns 0 where there is none.
static int tokenizer_open(Tokenizer *tokenizer, const Config *cfg) {
    if (strcmp(cfg->tokenizer, "bytes") == 0) { tokenizer_bytes(tokenizer); return 1; }
    if (strcmp(cfg->tokenizer, "auto") != 0) { tokenizer_load(tokenizer, cfg->tokenizer); return 1; }
    char *pattern = text_format("%.*s*.tiktoken", data_folder(cfg), cfg->data);
    glob_t found;
    int one = glob(pattern, 0, NULL, &found) == 0 && found.gl_pathc == 1;
    if (one) { tokenizer_load(tokenizer, found.gl_pathv[0]); globfree(&found); }
    else if (cfg->vocab == 256) { tokenizer_bytes(tokenizer); one = 1; }
    free(pattern);
    return one;
}

// ----------------------------------------------------------------------------------------------------
// 10. main: train, resume, sample, export, estimate.

static int finish(void) {
    if (fflush(stdout) != 0 || ferror(stdout)) { FAIL("standard output: cannot write: %s", strerror(errno)); }
    return 0;
}

static volatile sig_atomic_t stop_signal; // SIGINT, SIGTERM or SIGHUP: finish the step, save, leave; a second one kills
static void on_signal(int number) {
    static const char message[] = "\ntrain_gpt2: finishing this step, then saving; once more to quit at once\n";
    stop_signal = number;
    signal(number, SIG_DFL);
    if (write(STDERR_FILENO, message, sizeof message - 1) < 0) { return; } // nowhere to say it
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// FLOPs a token of forward and backward: 6 for each weight of a linear map that it uses, and 6 L C T for causal attention.
static double flops_per_token(const GPT *m) {
    double weights = 0, attention = (double)m->cfg.layers * m->cfg.heads * m->head_size * m->cfg.seq_len;
    for (int i = 0; i < m->num_maps; i++) { // an expert works for K tokens in E
        double share = m->maps[i].expert < 0 ? 1 : (double)m->cfg.top_k / m->cfg.experts;
        weights += share * (double)m->maps[i].rows * (double)m->maps[i].cols;
    }
    return 6 * weights + 6 * attention;
}

static void print_estimate(GPT *m) {
    printf("%-12s %14s  %s\n", "role", "parameters", "");
    int64_t vectors = 0;
    for (int role = 0; role < NUM_ROLES; role++) {
        int64_t n = 0;
        for (int i = 0; i < m->num_params; i++) { if ((int)m->params[i].role == role) { n += m->params[i].rows * m->params[i].cols; } }
        if (role >= ROLE_GAMMA_B) { vectors += n; }
        printf("%-12s %14lld  %s\n", role_table[role].name, (long long)n, role_table[role].what);
    }
    printf("%-12s %14lld  of which in scale vectors: %lld (%.4f%%)\n", "total", (long long)m->num_theta, (long long)vectors, 100.0 * (double)vectors / (double)m->num_theta);
    int64_t active = gpt_active_parameters(m);
    if (m->cfg.experts) { printf("%-12s %14lld  used by a token: %d of %d experts\n", "active", (long long)active, m->cfg.top_k, m->cfg.experts); }
    const char *model = m->cfg.model, *paper = model[0] ? find_preset(model_presets, COUNT(model_presets), model, strlen(model), "--model")->paper : NULL;
    if (paper && !given(&m->cfg, "layers") && !given(&m->cfg, "channels") && !given(&m->cfg, "experts")) { printf("%-12s %14s  the size of this model there, rounded%s\n", "paper", paper, m->cfg.experts ? ": total/active" : ""); }
    MemoryUse use = machine->estimate_memory(m, m->cfg.batch, m->cfg.seq_len);
    const double MiB = 1 << 20;
    printf("memory, MiB  %14.1f  %stheta %.1f, theta~ %.1f, gradients %.1f, optimizer %.1f, activations %.1f, work space %.1f\n", (double)use.total / MiB, m->cfg.gpus == 1 ? "" : "on each GPU: ",
           (double)use.theta / MiB, (double)use.effective / MiB, (double)use.grads / MiB, (double)use.moments / MiB, (double)use.activations / MiB, (double)use.work / MiB);
    printf("FLOPs        %14.3g  a token, forward and backward\n", flops_per_token(m));
    double tokens = (double)m->cfg.steps * m->cfg.total_batch * m->cfg.seq_len;
    printf("run          %14.3g  tokens in %lld steps: %.3g FLOPs, %.2f tokens a parameter used\n", tokens, (long long)m->cfg.steps, tokens * flops_per_token(m), tokens / (double)active);
}

// Every option with its value, as flags, with a separator between them.
static char *config_listing(const Config *cfg, const char *separator) {
    char *all = text_format("%s", ""), value[4400];
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (options[i].type == TYPE_SWITCH) { continue; }
        const char *text = options[i].type == TYPE_TEXT ? *(const char *const *)option_field(&options[i], cfg) : option_text(cfg, i, value, sizeof value);
        if (!text[0]) { continue; }
        char *longer = text_format("%s--%s %s%s", all, options[i].name, text, separator);
        free(all);
        all = longer;
    }
    return all;
}

// Mean loss over the first --val-batches micro-batches of the validation stream, always the same ones.
static double validate(GPT *m, const DataLoader *val) {
    int64_t B = m->cfg.batch, T = m->cfg.seq_len, sequences = m->cfg.val_batches * B;
    if (sequences > val->windows) { sequences = val->windows; }
    double sum = 0;
    for (int64_t at = 0; at < sequences; at += B) {
        int64_t rows = sequences - at < B ? sequences - at : B;
        for (int64_t b = 0; b < rows; b++) { loader_read(val, at + b, m->inputs + b * T, m->targets + b * T, m->cfg.vocab); }
        sum += machine->forward(m, m->inputs, m->targets, (int)rows, (int)T, 0) * (double)rows;
    }
    return sum / (double)sequences;
}

struct Run {
    DataLoader data, val;
    int has_val, has_tokenizer, terminal;
    Tokenizer tokenizer;
    TrainState state;
    CsvFile metrics, timing, norms;
    double loss, norm;       // of the last step, and of its gradient
    double balance_loss, z_loss; // likewise: means over micro-batches
    double last_ms;          // smoothed time of a step, for the ETA
    int stop;                // of several processes: one has got a signal, and all know
};

// Gradient of one step over --total-batch sequences, in micro-batches. Returns the mean loss.
static double train_gradient(GPT *m, Run *run) {
    int B = m->cfg.batch, T = m->cfg.seq_len, micro = m->cfg.total_batch / B;
    double loss = 0;
    run->balance_loss = run->z_loss = 0;
    memset(m->expert_tokens, 0, (size_t)m->cfg.layers * (size_t)m->cfg.experts * sizeof(int64_t));
    gpt_zero_grad(m);
    for (int i = 0; i < micro; i++) {
        for (int b = 0; b < B; b++) {
            loader_read(&run->data, run->state.sequences + (int64_t)i * B + b, m->inputs + (int64_t)b * T, m->targets + (int64_t)b * T, m->cfg.vocab);
        }
        loss += gpt_forward(m, m->inputs, m->targets, B, T, 1.0 / ((double)m->cfg.total_batch * T)) / micro;
        gpt_backward(m, m->inputs);
        run->balance_loss += m->balance_loss / micro;
        run->z_loss += m->z_loss / micro;
    }
    reparameterize_backward(m);
    return loss;
}

// One step. A loss or norm that isn't finite leaves theta as it was.
static void train_update(GPT *m, Run *run, int64_t step, double lr) {
    double clip = m->cfg.grad_clip;
    run->loss = train_gradient(m, run);
    run->norm = gradient_norm(m);
    if (!isfinite(run->loss) || !isfinite(run->norm)) { return; }
    optimizer_step(m, step, lr, clip > 0 && run->norm > clip ? clip / run->norm : 1);
    reparameterize_forward(m);
}

static void format_duration(double s, char *out, size_t size) {
    long t = (long)(s + 0.5);
    if (t < 3600) { snprintf(out, size, "%ld:%02ld", t / 60, t % 60); }
    else if (t < 48 * 3600) { snprintf(out, size, "%ld:%02ld:%02ld", t / 3600, t / 60 % 60, t % 60); }
    else { snprintf(out, size, "%.1f days", s / 86400); }
}

// One line a step, rewritten in place on a terminal; elsewhere only steps with a validation print.
static void print_progress(const GPT *m, const Run *run, double loss, double val_loss, double lr, double norm, double tokens_per_second) {
    int validated = !isnan(val_loss);
    if (!run->terminal && !validated) { return; }
    char eta[32], val[32] = "";
    format_duration(run->last_ms / 1000 * (double)(m->cfg.steps - run->state.step), eta, sizeof eta);
    if (validated) { snprintf(val, sizeof val, " | val %.4f", val_loss); }
    printf("%sstep %lld/%lld | loss %.4f%s | lr %.2e | norm %.3f | %.0f tok/s | ETA %s%s", run->terminal ? "\r\033[K" : "", (long long)run->state.step,
           (long long)m->cfg.steps, loss, val, lr, norm, tokens_per_second, eta, run->terminal && !validated ? "" : "\n");
    fflush(stdout);
}

// Columns of metrics.csv for a mixture of experts, "" without: losses summed over layers, the largest share that one
// expert of one layer took of its layer's rows over the fair share, and each expert's tokens summed over layers.
static char *moe_text(const GPT *m, const Run *run) {
    int E = m->cfg.experts, L = m->cfg.layers;
    if (E == 0) { return text_format("%s", ""); }
    int64_t most = 0;
    for (int i = 0; i < L * E; i++) { if (m->expert_tokens[i] > most) { most = m->expert_tokens[i]; } }
    double fair = (double)m->cfg.total_batch * m->cfg.seq_len * m->cfg.top_k / E;
    char *text = text_format(",%.9g,%.9g,%.4g", run->balance_loss, run->z_loss, (double)most / fair);
    for (int e = 0; e < E; e++) {
        int64_t tokens = 0;
        for (int l = 0; l < L; l++) { tokens += m->expert_tokens[(int64_t)l * E + e]; }
        char *longer = text_format("%s,%lld", text, (long long)tokens);
        free(text);
        text = longer;
    }
    return text;
}

static void train_step(GPT *m, Run *run) {
    const Config *cfg = &m->cfg;
    int64_t step = run->state.step + 1, tokens = (int64_t)cfg->total_batch * cfg->seq_len;
    double begin = seconds(), lr = learning_rate(cfg, step - 1);
    machine->update(m, run, step, lr);
    double loss = run->loss, norm = run->norm;
    char *moe_columns = moe_text(m, run); // before a validation counts tokens too
    if (!isfinite(loss) || !isfinite(norm)) {
        int64_t *steps = NULL;
        int count = checkpoint_list(cfg->out, &steps);
        FAIL("found loss %g and gradient norm %g at step %lld, expected finite numbers; the last good checkpoint is %s", fabs(loss), fabs(norm), (long long)step,
             count > 0 ? text_format("%s/step_%08lld", cfg->out, (long long)steps[count - 1]) : "none");
    }
    run->state.step = step;
    run->state.sequences += cfg->total_batch;
    double ms = 1000 * (seconds() - begin), val_loss = NAN;
    run->last_ms = run->last_ms == 0 ? ms : 0.9 * run->last_ms + 0.1 * ms;
    if (run->has_val && (step == cfg->steps || (cfg->val_every > 0 && step % cfg->val_every == 0))) { val_loss = machine->validate(m, &run->val); }
    fprintf(run->metrics.file, "%lld,%lld,%.9g,%.9g,", (long long)step, (long long)(run->state.sequences * cfg->seq_len), lr, loss);
    if (!isnan(val_loss)) { fprintf(run->metrics.file, "%.9g", val_loss); }
    fprintf(run->metrics.file, ",%.9g%s\n", norm, moe_columns);
    free(moe_columns);
    fprintf(run->timing.file, "%lld,%.3f,%.1f\n", (long long)step, ms, (double)tokens / ms * 1000);
    csv_flush(&run->metrics);
    csv_flush(&run->timing);
    if (cfg->log_norms && !isnan(val_loss)) { machine->to_host(m); norms_log(m, &run->norms, step); }
    print_progress(m, run, loss, val_loss, lr, norm, (double)tokens / ms * 1000);
}

static void train(GPT *m, Run *run) {
    const Config *cfg = &m->cfg;
    int64_t end = cfg->stop_at > 0 ? cfg->stop_at : cfg->steps;
    if (run->state.step >= end) {
        printf("nothing to do: the run stands at step %lld, its end is %lld (set by --%s)\n", (long long)run->state.step, (long long)end, end == cfg->steps ? "steps" : "stop-at");
        return;
    }
    if (process_number == 0) {
        checkpoint_rewind(cfg->out, run->state.step);
        char *listing = config_listing(cfg, "\n");
        char *path = text_format("%s/config.txt", cfg->out);
        write_text_file(path, listing);
        free(listing);
        free(path);
    }
    char *header = text_format(METRICS_HEADER "%s", cfg->experts ? ",balance_loss,router_z_loss,max_load" : "");
    for (int e = 0; e <= cfg->experts; e++) {
        char *longer = e < cfg->experts ? text_format("%s,expert_%d", header, e) : text_format("%s\n", header);
        free(header);
        header = longer;
    }
    csv_open(&run->metrics, cfg->out, "metrics.csv", header, run->state.step);
    free(header);
    csv_open(&run->timing, cfg->out, "timing.csv", TIMING_HEADER, run->state.step);
    if (cfg->log_norms) { csv_open(&run->norms, cfg->out, "norms.csv", NORMS_HEADER, run->state.step); }
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    signal(SIGHUP, on_signal);
    while (run->state.step < end) {
        train_step(m, run);
        int64_t step = run->state.step;
        int last = step == end || (num_processes > 1 ? run->stop : stop_signal);
        if (last || (cfg->save_every > 0 && step % cfg->save_every == 0)) {
            machine->to_host(m);
            if (process_number == 0) { checkpoint_save(m, cfg->out, &run->state); }
        }
        if (process_number == 0 && cfg->sample_every > 0 && step % cfg->sample_every == 0) {
            printf("%ssample: ", run->terminal ? "\n" : "");
            sample_print(m, &run->tokenizer, 100, random_u64((uint64_t)cfg->seed + ((uint64_t)step << 20)));
        }
        if (last) { break; } // not stop_signal: it may have come since the save was decided
    }
    csv_close(&run->metrics);
    csv_close(&run->timing);
    if (cfg->log_norms) { csv_close(&run->norms); }
    printf("%s%s at step %lld: %s/step_%08lld\n", run->terminal ? "\n" : "", stop_signal || run->stop ? "stopped by a signal, saved" : "saved", (long long)run->state.step, cfg->out, (long long)run->state.step);
}

// Opens the training and validation data and settles V.
static void open_data(Config *cfg, Run *run) {
    loader_open(&run->data, cfg->data, "--data", cfg->seq_len, 1, (uint64_t)cfg->seed);
    int named = run->data.vocab;
    if (cfg->vocab == 0) { cfg->vocab = named ? (named + 63) / 64 * 64 : 50304; } // no vocabulary named: GPT-2's 50257, padded
    if (cfg->vocab > 65536) { cfg->vocab = 65536; }
    if (named > cfg->vocab) { USAGE("--vocab: found %d, expected at least the %d of %s", cfg->vocab, named, cfg->data); }
    char *pattern = NULL;
    if (strcmp(cfg->val_data, "none") == 0) { return; }
    if (strcmp(cfg->val_data, "auto") == 0) {
        const char *name = cfg->data + data_folder(cfg), *word = strstr(name, "train");
        if (word && memchr(name, ',', (size_t)(word - name))) { word = NULL; } // that of another file in the list
        pattern = text_format("%.*sval_*.bin", word ? (int)(word - cfg->data) : 0, cfg->data);
        glob_t found;
        int missing = !word || glob(pattern, 0, NULL, &found) != 0;
        if (missing) {
            printf("validation: none (found no %s beside --data; --val-data names it)\n", word ? pattern : "file with val for train in its name");
            free(pattern);
            return;
        }
        globfree(&found);
    }
    loader_open(&run->val, pattern ? pattern : cfg->val_data, "--val-data", cfg->seq_len, 0, 0);
    free(pattern);
    if (run->val.vocab > cfg->vocab) { USAGE("--val-data: found a vocabulary of %d, expected at most the model's %d", run->val.vocab, cfg->vocab); }
    run->has_val = 1;
}

static int same_folder(const char *a, const char *b) {
    struct stat of_a, of_b;
    return stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

// Two runs must not write one folder: the lock on it lasts until this process ends, however it ends.
static void lock_out(const char *out) {
    int fd = open(out, O_RDONLY | O_CLOEXEC);
    if (fd < 0) { FAIL("--out %s: cannot open: %s", out, strerror(errno)); }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) { FAIL("--out %s: found another run at work in it, expected a folder of its own for each run", out); }
}

// The folder of a new run must not hold another run's files.
static void prepare_out(const Config *cfg) {
    int64_t *steps = NULL;
    make_dirs(cfg->out);
    lock_out(cfg->out);
    if (checkpoint_list(cfg->out, &steps) > 0) { // logs alone are of a run that ended before its first checkpoint
        FAIL("--out %s: found an earlier run in it, expected a new or empty folder; --resume %s goes on with it", cfg->out, cfg->out);
    }
    if (access(cfg->out, W_OK) != 0) { FAIL("--out %s: cannot write: %s", cfg->out, strerror(errno)); }
}

static void settle_steps(GPT *m) {
    Config *cfg = &m->cfg;
    if (cfg->tokens_per_param == 0) { return; }
    int64_t vectors = 0; // not counted, so that all variants of a model train equally long
    for (int i = 0; i < m->num_params; i++) {
        const Param *p = &m->params[i];
        if (p->role >= ROLE_GAMMA_B && p->expert <= 0) { vectors += p->cols * (p->expert < 0 ? 1 : cfg->top_k); } // all experts are alike
    }
    double steps = ceil(cfg->tokens_per_param * (double)(gpt_active_parameters(m) - vectors) / ((double)cfg->total_batch * cfg->seq_len));
    const Option *o = &options[find_option("steps")];
    if (steps > o->high) { USAGE("--tokens-per-param: found %g, which makes %g steps, expected at most %g", cfg->tokens_per_param, steps, o->high); }
    cfg->steps = steps < 1 ? 1 : (int64_t)steps;
}

static void cpu_options(const Config *cfg) {
    static const char *const of_gpus[] = {"precision", "gpus", "zero", "timeout", "recompute", "check"};
    for (int i = 0; i < COUNT(of_gpus); i++) {
        int index = find_option(of_gpus[i]);
        char text[64];
        if (!given(cfg, of_gpus[i]) || strcmp(option_text(cfg, index, text, sizeof text), options[index].initial) == 0) { continue; }
        if (options[index].offset == AT(precision) && cfg->precision == PRECISION_FP32) { continue; } // what this program does
        USAGE("--%s: found %s, expected %s: this program computes on the CPU, and other values need train_gpt2cu", of_gpus[i], text, options[index].initial);
    }
}

static int train_main(int argc, char **argv) {
    static Config cfg;
    static GPT model;
    static Run run;
    static SafeFile model_file;
    char checkpoint[4400] = "", run_folder[4400] = "";
    config_defaults(&cfg);
    config_parse_flags(&cfg, argc, (const char *const *)argv);
    if (cfg.help) { print_help(); return finish(); }
    if (!cfg.out[0]) { USAGE("--out: found \"\", expected a folder"); }
    if (!cfg.tokenizer[0]) { USAGE("--tokenizer: found \"\", expected a rank file, bytes or auto"); }
    if (given(&cfg, "resume") && !cfg.resume[0]) { USAGE("--resume: found \"\", expected a run's folder or a checkpoint"); }
    if (cfg.resume[0] && cfg.import_dir[0]) { USAGE("--resume and --import: found both, expected one: each says which model to begin with"); }
    if (cfg.resume[0]) {
        checkpoint_find(cfg.resume, checkpoint, sizeof checkpoint, run_folder, sizeof run_folder);
        checkpoint_open(&model_file, checkpoint, "model.safetensors");
        checkpoint_read_config(&model_file, &cfg, &run.state);
        if (!given(&cfg, "out")) { cfg.out = run_folder; }
    }
    presets_apply(&cfg);
    if (cfg.import_dir[0]) { hf_read_config(&cfg); }
    config_resolve(&cfg);
    machine->check_options(&cfg);
    int training = cfg.sample == 0 && !cfg.export_dir[0];
    if (cfg.export_dir[0]) { machine = &cpu_machine; } // it reads theta~ in the memory of the host
    if (cfg.resume[0]) { checkpoint_check_config(&model_file, &cfg); }
#ifdef _OPENMP
    if (cfg.threads > 0) { omp_set_num_threads(cfg.threads); }
#endif
    run.terminal = isatty(STDOUT_FILENO);
    if (training && !(cfg.estimate && cfg.vocab > 0)) { open_data(&cfg, &run); }
    if (training && cfg.log_norms && !cfg.estimate && !run.has_val) { USAGE("--log-norms: found no validation data, expected some: norms are logged at validations"); }
    gpt_build(&model, &cfg);
    settle_steps(&model);
    if (cfg.stop_at > model.cfg.steps) { USAGE("--stop-at: found %lld, expected at most the %lld steps of the schedule", (long long)cfg.stop_at, (long long)model.cfg.steps); }
    if (cfg.estimate) { print_estimate(&model); return finish(); }
    if (given(&cfg, "tokenizer") && strcmp(cfg.tokenizer, "auto") != 0 && strcmp(cfg.tokenizer, "bytes") != 0 && access(cfg.tokenizer, R_OK) != 0) {
        FAIL("--tokenizer %s: cannot read: %s", cfg.tokenizer, strerror(errno)); // now, not at a sample hours later
    }
    if (cfg.sample > 0 || (training && cfg.sample_every > 0)) {
        run.has_tokenizer = tokenizer_open(&run.tokenizer, &model.cfg);
        int32_t *prompt = NULL; // a prompt that can't be encoded should stop the run now, not at its first sample
        if (run.has_tokenizer) { prompt_tokens(&model.cfg, &run.tokenizer, 0, &prompt); }
        free(prompt);
        if (!run.has_tokenizer) { FAIL("--tokenizer auto: found no single .tiktoken file beside --data %s, expected --tokenizer FILE for samples", cfg.data); }
    }
    if (training && cfg.resume[0] && run.state.fingerprint != run.data.fingerprint) {
        FAIL("--data %s: found other tokens than the checkpoint %s was trained on, expected the same: the data order would change", cfg.data, checkpoint);
    }
    machine->allocate(&model, training ? cfg.batch : 1, cfg.export_dir[0] ? 1 : cfg.seq_len);
    if (training && !cfg.check && process_number == 0) {
        if (same_folder(cfg.out, run_folder)) { lock_out(cfg.out); } else { prepare_out(&cfg); }
    }
    if (cfg.resume[0]) { checkpoint_load(&model, checkpoint, &model_file, training); safetensors_close(&model_file); }
    else if (cfg.import_dir[0]) { hf_import(&model, cfg.import_dir); }
    else { gpt_init(&model); }
    if (training) { machine->connect(&model, run.state.step); }
    machine->to_device(&model);
    machine->reparameterize_forward(&model);
    if (cfg.check) { int differs = machine->check(&model, &run); finish(); return differs; }
    if (cfg.export_dir[0]) { hf_export(&model, cfg.export_dir); return finish(); }
    if (cfg.sample > 0) { sample_print(&model, &run.tokenizer, cfg.sample, random_u64((uint64_t)cfg.seed)); return finish(); }
    run.state.fingerprint = run.data.fingerprint;
    char *listing = config_listing(&model.cfg, " ");
    printf("%s\n%lld parameters | %lld tokens in %d shard%s, %lld sequences an epoch\n", listing, (long long)model.num_theta,
           (long long)run.data.total, run.data.num_shards, run.data.num_shards == 1 ? "" : "s", (long long)run.data.windows);
    free(listing);
    if (cfg.resume[0]) { printf("resumed from %s at step %lld\n", checkpoint, (long long)run.state.step); }
    train(&model, &run);
    loader_close(&run.data);
    loader_close(&run.val);
    return finish();
}

#ifndef TESTING
int main(int argc, char **argv) { return train_main(argc, argv); }
#endif
