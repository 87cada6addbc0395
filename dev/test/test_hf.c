// test_hf.c: export to and import from Hugging Face checkpoints, without Python (dev/hf/check_export.py has that).
//
// Checkpoints are made by hand here, from values that F32, BF16 and F16 all hold exactly. What a Llama computes from
// them is known from Transformers (golden_logits); that a variant's export computes the same as the variant itself is
// seen by importing it again as a baseline.
#define TESTING
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wformat-truncation"
#endif
#include "../../train_gpt2.c"
#pragma GCC diagnostic pop

#include <criterion/criterion.h>
#include <sys/wait.h>

static char train_path[4096], folder[64];

// ----------------------------------------------------------------------------------------------------
// Running the program

static int run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int run(const char *format, ...) { // "train" begins a command; output goes to the files out and err
    char *command = NULL, *full = NULL;
    va_list args;
    va_start(args, format);
    cr_assert(vasprintf(&command, format, args) > 0);
    va_end(args);
    cr_assert(asprintf(&full, "train() { '%s' \"$@\"; }\n{ %s ; } >out 2>err", train_path, command) > 0);
    int status = system(full);
    free(command);
    free(full);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static char *contents(const char *path, size_t *size) {
    static char empty[1];
    FILE *file = fopen(path, "rb");
    if (!file) { if (size) { *size = 0; } return empty; }
    char *data = calloc(1 << 20, 1);
    size_t n = fread(data, 1, (1 << 20) - 1, file);
    cr_assert(n < (1 << 20) - 1, "%s is larger than this test expects", path);
    fclose(file);
    if (size) { *size = n; }
    return data;
}

#define OK(...) do { int status_ = run(__VA_ARGS__); cr_assert(status_ == 0, "status %d: %s", status_, contents("err", NULL)); } while (0)

static int exists(const char *path) { return access(path, F_OK) == 0; }

// ----------------------------------------------------------------------------------------------------
// Checkpoints made by hand

enum { L = 2, C = 16, NH = 4, KVH = 2, H = 24, V = 32, T = 16 };
typedef struct Made {
    const char *type;    // F32, BF16, F16
    int tied;            // tie_word_embeddings
    int no_embedding, no_head;
    int shards;          // 0: one file
} Made;
static const Made plain = {"F32", 0, 0, 0, 0};

static float made_value(const char *name, int vector, int64_t i) { // eight significant bits
    uint32_t h = (uint32_t)crc32(0, (const unsigned char *)name, (unsigned)strlen(name)) + (uint32_t)i * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    h ^= h >> 13;
    return vector ? (float)(128 + h % 128) / 128 : (float)((int)(h % 255) - 127) / 256;
}

static void made_bytes(FILE *file, const char *type, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t half = (uint16_t)(bits >> 16);
    if (strcmp(type, "F32") == 0) { cr_assert(fwrite(&value, 4, 1, file) == 1); return; }
    if (strcmp(type, "F16") == 0) { // all made values are 0 or normal ones
        half = value == 0 ? 0 : (uint16_t)((bits >> 31) << 15 | ((bits >> 23 & 255) - 127 + 15) << 10 | (bits >> 13 & 1023));
    }
    cr_assert(fwrite(&half, 2, 1, file) == 1);
}

typedef struct Shape { char name[96]; int rows, cols; } Shape; // rows 0: a vector

static int made_shapes(const Made *made, Shape *shapes) {
    int n = 0;
#define ADD(r, c, ...) do { snprintf(shapes[n].name, sizeof shapes[n].name, __VA_ARGS__); shapes[n].rows = r; shapes[n++].cols = c; } while (0)
    if (!made->no_head) { ADD(V, C, "lm_head.weight"); } // not in our own order
    if (!made->no_embedding) { ADD(V, C, "model.embed_tokens.weight"); }
    for (int l = L - 1; l >= 0; l--) {
        ADD(0, C, "model.layers.%d.input_layernorm.weight", l);
        ADD(C, H, "model.layers.%d.mlp.down_proj.weight", l);
        ADD(H, C, "model.layers.%d.mlp.gate_proj.weight", l);
        ADD(H, C, "model.layers.%d.mlp.up_proj.weight", l);
        ADD(0, C, "model.layers.%d.post_attention_layernorm.weight", l);
        ADD(KVH * C / NH, C, "model.layers.%d.self_attn.k_proj.weight", l);
        ADD(C, C, "model.layers.%d.self_attn.o_proj.weight", l);
        ADD(C, C, "model.layers.%d.self_attn.q_proj.weight", l);
        ADD(KVH * C / NH, C, "model.layers.%d.self_attn.v_proj.weight", l);
    }
    ADD(0, C, "model.norm.weight");
    return n;
}

static void made_file(const char *path, const Shape *shapes, int count, const char *type) {
    char *header = text_format("%s", "{\"__metadata__\":{\"format\":\"pt\"}");
    int64_t offset = 0, bytes = strcmp(type, "F32") == 0 ? 4 : 2;
    for (int i = 0; i < count; i++) {
        int64_t n = (int64_t)(shapes[i].rows ? shapes[i].rows : 1) * shapes[i].cols;
        char size[32], *longer;
        snprintf(size, sizeof size, shapes[i].rows ? "%d,%d" : "%d", shapes[i].rows ? shapes[i].rows : shapes[i].cols, shapes[i].cols);
        longer = text_format("%s,\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", header, shapes[i].name, type, size,
                             (long long)offset, (long long)(offset + n * bytes));
        free(header);
        header = longer;
        offset += n * bytes;
    }
    char *text = text_format("%s}", header);
    uint64_t length = strlen(text);
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(&length, 8, 1, file) == 1 && fwrite(text, length, 1, file) == 1);
    for (int i = 0; i < count; i++) {
        int64_t n = (int64_t)(shapes[i].rows ? shapes[i].rows : 1) * shapes[i].cols;
        for (int64_t k = 0; k < n; k++) { made_bytes(file, type, made_value(shapes[i].name, shapes[i].rows == 0, k)); }
    }
    cr_assert(fclose(file) == 0);
    free(header);
    free(text);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void make_checkpoint(const char *dir, const Made *made) {
    Shape shapes[64];
    int count = made_shapes(made, shapes), shards = made->shards ? made->shards : 1;
    char path[256];
    cr_assert(mkdir(dir, 0777) == 0);
    char *config = text_format("{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n  \"attention_bias\": false,\n  \"hidden_act\": \"silu\",\n"
        "  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n  \"num_hidden_layers\": %d,\n  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n"
        "  \"vocab_size\": %d,\n  \"max_position_embeddings\": %d,\n  \"rms_norm_eps\": 1e-05,\n  \"rope_theta\": 10000.0,\n  \"rope_scaling\": null,\n"
        "  \"bos_token_id\": 1,\n  \"pretraining_tp\": 1,\n  \"tie_word_embeddings\": %s,\n  \"transformers_version\": \"4.40.2\"\n}\n", C, H, L, NH, KVH, V, T, made->tied ? "true" : "false");
    snprintf(path, sizeof path, "%s/config.json", dir);
    write_file(path, config);
    free(config);
    char *index = text_format("%s", "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (int s = 0; s < shards; s++) {
        char name[64];
        int from = count * s / shards, to = count * (s + 1) / shards;
        if (made->shards) { snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", s + 1, shards); } else { strcpy(name, "model.safetensors"); }
        snprintf(path, sizeof path, "%s/%s", dir, name);
        made_file(path, shapes + from, to - from, made->type);
        for (int i = from; i < to; i++) {
            char *longer = text_format("%s%s\n\"%s\":\"%s\"", index, i ? "," : "", shapes[i].name, name);
            free(index);
            index = longer;
        }
    }
    char *whole = text_format("%s}}", index);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (made->shards) { write_file(path, whole); }
    free(index);
    free(whole);
}

static void setup(void) {
    const char *root = getenv("ROOT"), *other = getenv("TRAIN");
    char joined[4096];
    snprintf(joined, sizeof joined, "%s%s%s", other ? "" : root ? root : ".", other ? "" : "/", other ? other : "train_gpt2");
    cr_assert(realpath(joined, train_path), "%s: cannot find it (make all)", joined);
    strcpy(folder, "/tmp/test_hf_XXXXXX");
    cr_assert(mkdtemp(folder) && chdir(folder) == 0);
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0);
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, 700, V};
    FILE *file = fopen("train.bin", "wb");
    cr_assert(file && fwrite(header, sizeof header, 1, file) == 1);
    for (int i = 0; i < 700; i++) {
        uint16_t token = (uint16_t)((i * i / 3 + i) % V);
        cr_assert(fwrite(&token, 2, 1, file) == 1);
    }
    cr_assert(fclose(file) == 0);
    make_checkpoint("A", &plain);
    if (getenv("TEST_HF_KEEP")) { cr_assert(system("cp -r A \"$TEST_HF_KEEP\"") == 0); }
}

static void teardown(void) {
    cr_assert(chdir("/") == 0);
    char *command = text_format("rm -rf '%s'", folder);
    if (folder[0]) { cr_assert(system(command) == 0); }
    free(command);
}

TestSuite(hf, .init = setup, .fini = teardown);

// The flags of a small model to train
#define DATA "--data train.bin --val-data none --batch 2"
#define SIZES DATA " --layers 2 --channels 16 --heads 4 --seq-len 16 --steps 12 --lr 5e-2"
#define SMALL SIZES " --vocab 32"

// ----------------------------------------------------------------------------------------------------
// What is in the files

static const float *tensor_of(const SafeFile *f, const char *name, int64_t *bytes) {
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(f->header, name), *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    cr_assert(entry, "%s: no tensor %s", f->path, name);
    cr_assert_str_eq(cJSON_GetObjectItemCaseSensitive(entry, "dtype")->valuestring, "F32");
    int64_t begin = (int64_t)cJSON_GetArrayItem(offsets, 0)->valuedouble, end = (int64_t)cJSON_GetArrayItem(offsets, 1)->valuedouble;
    *bytes = end - begin;
    return (const float *)(const void *)(f->values + begin);
}

static void expect_made(const SafeFile *f, const char *name, const char *made_as, int vector, int64_t n) {
    int64_t bytes;
    const float *values = tensor_of(f, name, &bytes);
    cr_assert(bytes == 4 * n, "%s: %s has %lld bytes, expected %lld", f->path, name, (long long)bytes, (long long)(4 * n));
    for (int64_t i = 0; i < n; i++) { cr_assert(values[i] == made_value(made_as, vector, i), "%s: %s[%lld] is %g, expected %g", f->path, name, (long long)i, values[i], made_value(made_as, vector, i)); }
}

static int tensor_count(const SafeFile *f) { return cJSON_GetArraySize(f->header) - cJSON_HasObjectItem(f->header, "__metadata__"); }

// Two files have the same tensors, byte for byte; the order may differ.
static void expect_same_tensors(const char *a, const char *b) {
    SafeFile x, y;
    safetensors_open(&x, a);
    safetensors_open(&y, b);
    cr_assert(tensor_count(&x) == tensor_count(&y), "%d tensors in %s, %d in %s", tensor_count(&x), a, tensor_count(&y), b);
    for (const cJSON *item = x.header->child; item; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) { continue; }
        int64_t of_x, of_y;
        const float *u = tensor_of(&x, item->string, &of_x), *v = tensor_of(&y, item->string, &of_y);
        cr_assert(of_x == of_y && memcmp(u, v, (size_t)of_x) == 0, "%s and %s differ in %s", a, b, item->string);
        cr_assert(cJSON_Compare(cJSON_GetObjectItemCaseSensitive(item, "shape"), cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(y.header, item->string), "shape"), 1));
    }
    safetensors_close(&x);
    safetensors_close(&y);
}

// theta of a run that began with import and trained a step at rate 0
static void expect_theta(const char *dir, const Made *made) {
    static const char *const maps[][2] = {{"q", "self_attn.q_proj"}, {"k", "self_attn.k_proj"}, {"v", "self_attn.v_proj"}, {"o", "self_attn.o_proj"}, {"gate", "mlp.gate_proj"}, {"up", "mlp.up_proj"}, {"down", "mlp.down_proj"}};
    static const int sizes[] = {C * C, C * C / 2, C * C / 2, C * C, H * C, H * C, H * C};
    OK("rm -rf run; train --import hf %s " DATA " --steps 1 --lr 0 --out run", dir);
    SafeFile f;
    safetensors_open(&f, "run/step_00000001/model.safetensors");
    expect_made(&f, "embedding.weight", made->no_embedding ? "lm_head.weight" : "model.embed_tokens.weight", 0, V * C);
    if (!made->tied) { expect_made(&f, "head.weight", "lm_head.weight", 0, V * C); }
    expect_made(&f, "head.gamma_b", "model.norm.weight", 1, C);
    for (int l = 0; l < L; l++) {
        char ours[96], theirs[96];
        for (int i = 0; i < COUNT(maps); i++) {
            snprintf(ours, sizeof ours, "layers.%d.%s.weight", l, maps[i][0]);
            snprintf(theirs, sizeof theirs, "model.layers.%d.%s.weight", l, maps[i][1]);
            expect_made(&f, ours, theirs, 0, sizes[i]);
        }
        snprintf(ours, sizeof ours, "layers.%d.attn.gamma_b", l);
        snprintf(theirs, sizeof theirs, "model.layers.%d.input_layernorm.weight", l);
        expect_made(&f, ours, theirs, 1, C);
        snprintf(ours, sizeof ours, "layers.%d.ffn.gamma_b", l);
        snprintf(theirs, sizeof theirs, "model.layers.%d.post_attention_layernorm.weight", l);
        expect_made(&f, ours, theirs, 1, C);
    }
    cr_assert(tensor_count(&f) == 2 - made->tied + 1 + L * 9, "%d tensors", tensor_count(&f));
    safetensors_close(&f);
}

Test(hf, import_reads_every_kind_of_checkpoint) {
    static const Made kinds[] = {
        {"F32", 0, 0, 0, 0}, {"BF16", 0, 0, 0, 0}, {"F16", 0, 0, 0, 0},
        {"F32", 0, 0, 0, 3}, {"BF16", 0, 0, 0, 5},                      // shards
        {"F32", 1, 0, 1, 0}, {"F32", 1, 1, 0, 0}, {"F16", 1, 1, 0, 2},  // tied: only the embedding; only lm_head.weight
    };
    for (int i = 0; i < COUNT(kinds); i++) {
        char dir[16];
        snprintf(dir, sizeof dir, "kind%d", i);
        make_checkpoint(dir, &kinds[i]);
        expect_theta(dir, &kinds[i]);
    }
}

Test(hf, import_takes_what_means_the_same) {
    static const char *const edits[] = {
        "/num_attention_heads/s/$/ \"head_dim\": 4,/", "/attention_bias/d", "/hidden_act/d", "/rope_theta/d", "s/\"rope_scaling\": null/\"rope_scaling\": {\"type\": \"default\"}/",
        "s/\"rope_theta\": 10000.0/\"rope_parameters\": {\"rope_theta\": 10000.0, \"rope_type\": \"default\"}/", "/rope_theta/s/$/ \"head_dim\": null, \"mlp_bias\": false,/",
    };
    for (int i = 0; i < COUNT(edits); i++) {
        OK("rm -rf E; cp -r A E; sed -i '%s' E/config.json; cmp -s A/config.json E/config.json && exit 9; train --import hf E --export hf E/back", edits[i]);
        expect_same_tensors("A/model.safetensors", "E/back/model.safetensors");
    }
}

Test(hf, equal_copies_of_a_tied_matrix_are_taken_and_other_ones_refused) {
    static const Made both = {"F32", 1, 0, 0, 0};
    make_checkpoint("T", &both); // their made values differ
    cr_assert(run("train --import hf T --export hf B") == 1);
    cr_assert(strstr(contents("err", NULL), "lm_head.weight other than"), "%s", contents("err", NULL));
    SafeFile f;
    safetensors_open(&f, "T/model.safetensors"); // both begin the file, one after the other
    int64_t bytes, at = f.values - f.map;
    cr_assert((const char *)tensor_of(&f, "lm_head.weight", &bytes) == f.values);
    safetensors_close(&f);
    OK("dd if=T/model.safetensors of=T/model.safetensors bs=1 conv=notrunc skip=%lld seek=%lld count=%lld; train --import hf T --export hf B", (long long)at, (long long)(at + bytes), (long long)bytes);
}

Test(hf, an_import_exported_again_is_the_same_tensors) {
    static const Made shared = {"F32", 1, 0, 1, 0};
    make_checkpoint("T", &shared);
    OK("train --import hf A --export hf B; train --import hf T --export hf U; train --import hf B --export hf B2");
    expect_same_tensors("A/model.safetensors", "B/model.safetensors");
    expect_same_tensors("T/model.safetensors", "U/model.safetensors");
    OK("cmp B/model.safetensors B2/model.safetensors && cmp B/config.json B2/config.json && test ! -e B/modeling_scale_gpt.py");
    OK("train --import hf A " DATA " --steps 1 --lr 0 --out run && train --resume run --export hf C/ && cmp B/model.safetensors C/model.safetensors"); // through a run, too
    cJSON *config = read_json("B/config.json");
    cr_assert_str_eq(cJSON_GetObjectItem(config, "model_type")->valuestring, "llama");
    cr_assert(cJSON_GetObjectItem(config, "num_key_value_heads")->valueint == KVH && cJSON_GetObjectItem(config, "rms_norm_eps")->valuedouble == 1e-5);
    cr_assert(cJSON_IsFalse(cJSON_GetObjectItem(config, "tie_word_embeddings")) && cJSON_IsNull(cJSON_GetObjectItem(config, "eos_token_id")));
}

Test(hf, halves) {
    static const struct { uint16_t bits; float value; } known[] = {
        {0x0000, 0}, {0x3c00, 1}, {0xc000, -2}, {0x7bff, 65504}, {0x0400, 6.103515625e-5f}, {0x03ff, 6.097555160522461e-5f},
        {0x0001, 5.960464477539063e-8f}, {0x3555, 0.333251953125f}, {0x7c00, INFINITY}, {0xfc00, -INFINITY},
    };
    for (int i = 0; i < COUNT(known); i++) { cr_assert(half_value(known[i].bits) == known[i].value, "%04x is %g, expected %g", known[i].bits, half_value(known[i].bits), known[i].value); }
    cr_assert(isnan(half_value(0x7e01)));
    cr_assert(signbit(half_value(0x8000)) && half_value(0x8000) == 0);
}

// ----------------------------------------------------------------------------------------------------
// What is computed

// Logits (n,V) of a prompt; source: "--resume", "run" or "--import", "hf", "DIR"
static void logits_of(int argc, const char *const *argv, const int32_t *tokens, int n, real *logits) {
    Config cfg;
    GPT m;
    SafeFile f;
    TrainState state;
    char checkpoint[4400], run_folder[4400];
    config_defaults(&cfg);
    config_parse_flags(&cfg, argc, argv);
    if (cfg.resume[0]) {
        checkpoint_find(cfg.resume, checkpoint, sizeof checkpoint, run_folder, sizeof run_folder);
        checkpoint_open(&f, checkpoint, "model.safetensors");
        checkpoint_read_config(&f, &cfg, &state);
    } else { hf_read_config(&cfg); }
    config_resolve(&cfg);
    gpt_build(&m, &cfg);
    gpt_allocate(&m, 1, n);
    if (cfg.resume[0]) { checkpoint_load(&m, checkpoint, &f, 0); } else { hf_import(&m, cfg.import_dir); }
    reparameterize_forward(&m);
    gpt_forward(&m, tokens, NULL, 1, n, 0);
    gpt_logits(&m, logits, n);
}
static void logits_of_run(const char *dir, const int32_t *tokens, int n, real *logits) {
    const char *const argv[] = {"train", "--resume", dir};
    logits_of(3, argv, tokens, n, logits);
}
static void logits_of_import(const char *dir, const int32_t *tokens, int n, real *logits) {
    const char *const argv[] = {"train", "--import", "hf", dir};
    logits_of(4, argv, tokens, n, logits);
}

static const int32_t prompt[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 31, 0, 17};
enum { PROMPT = COUNT(prompt) };

// LlamaForCausalLM of Transformers, loaded from the folder A of this test: logits after the last token of the prompt.
// TEST_HF_KEEP=DIR build/test_hf --filter hf/halves copies A to DIR.
static const float golden_logits[V] = {
    0.486936, 1.022455, -3.141417, 0.519619, -2.903895, -2.099234, 1.856215, 2.140364, 3.222655, 1.797493,
    -4.105894, 2.045998, 2.262521, 1.504770, -3.479687, 2.846217, 0.340705, 0.502508, 1.637569, 0.053333, -2.582340,
    -0.391981, -0.439408, -4.254447, -2.695708, 0.251136, 3.046054, 4.341752, 1.469975, 1.977457, 0.846488, 0.269712,
};

Test(hf, an_import_computes_what_transformers_computes) {
    real logits[PROMPT * V];
    logits_of_import("A", prompt, PROMPT, logits);
    for (int v = 0; v < V; v++) {
        real found = logits[(PROMPT - 1) * V + v];
        cr_assert(fabs((double)found - golden_logits[v]) < 1e-4, "logit %d is %.6f, expected %.6f", v, (double)found, golden_logits[v]);
    }
}

Test(hf, variants_without_further_norms_are_llamas) {
    static const char *const variants[] = {
        "--variant noscale", "--variant baseline", "--variant iwd", "--variant hg", "--variant ap", "--variant dp", "--variant or", "--variant er", "--variant hg+dp+or",
        "--variant hg+dp+er --kv-heads 2", "--placement q=dp,k=none,o=dp,down=ap,head=none", "--tie-embeddings on", "--tie-embeddings on --variant hg", "--tie-embeddings on --variant noscale",
        "--tie-embeddings on --variant dp+or",
    };
    for (int i = 0; i < COUNT(variants); i++) {
        OK("rm -rf run E; train " SMALL " --out run %s; train --resume run --export hf E; test ! -e E/modeling_scale_gpt.py", variants[i]);
        real of_run[PROMPT * V], of_export[PROMPT * V], largest = 0, worst = 0;
        logits_of_run("run", prompt, PROMPT, of_run);
        logits_of_import("E", prompt, PROMPT, of_export);
        for (int k = 0; k < PROMPT * V; k++) {
            largest = fmaxf(largest, fabsf(of_run[k]));
            worst = fmaxf(worst, fabsf(of_run[k] - of_export[k]));
        }
        cr_assert(largest > 0.5f && worst < 1e-5f, "%s: logits up to %g differ by up to %g", variants[i], (double)largest, (double)worst);
    }
}

static void expect_names(const char *path, const char *names) { // "a b c": these and no others
    SafeFile f;
    safetensors_open(&f, path);
    char *copy = strdup(names), *save = NULL;
    int n = 0;
    for (char *name = strtok_r(copy, " ", &save); name; name = strtok_r(NULL, " ", &save), n++) { cr_assert(cJSON_HasObjectItem(f.header, name), "%s: no tensor %s", path, name); }
    if (tensor_count(&f) != n) { for (const cJSON *item = f.header->child; item; item = item->next) { if (!strstr(names, item->string)) { cr_log_error("%s: unexpected %s", path, item->string); } } }
    cr_assert(tensor_count(&f) == n, "%s: %d tensors, expected %d", path, tensor_count(&f), n);
    free(copy);
    safetensors_close(&f);
}

Test(hf, models_with_further_norms_bring_their_code) {
#define ONE DATA " --layers 1 --channels 16 --heads 4 --seq-len 16 --vocab 32 --steps 3"
#define ATTENTION(m) "model.layers.0.self_attn.q_proj." m " model.layers.0.self_attn.k_proj." m " "
#define DENSE(at) "model.layers.0.mlp." at "gate_proj.weight model.layers.0.mlp." at "up_proj.weight model.layers.0.mlp." at "down_proj.weight "
#define ALL "model.embed_tokens.weight lm_head.weight model.layers.0.self_attn.v_proj.weight model.layers.0.self_attn.o_proj.weight " ATTENTION("weight")
    static const struct { const char *flags, *sites, *tensors; } cases[] = {
        {"--qk-norm on", "[\"q\",\"k\"]", ALL DENSE("") ATTENTION("norm_weight")},
        {"--qk-norm on --post-norm on --tie-embeddings on --variant noscale", "[\"q\",\"k\",\"o\",\"down\"]", ALL DENSE("") ATTENTION("norm_weight")
            "model.layers.0.self_attn.o_proj.norm_weight model.layers.0.mlp.down_proj.norm_weight"},
        {"--variant unified", "[\"q\",\"k\",\"v\",\"gate\",\"up\",\"head\"]", ALL DENSE("") ATTENTION("norm_weight")
            "model.layers.0.self_attn.v_proj.norm_weight model.layers.0.mlp.gate_proj.norm_weight model.layers.0.mlp.up_proj.norm_weight lm_head.norm_weight"},
        {"--experts 2 --variant hg", "[]", ALL DENSE("shared.") DENSE("experts.0.") DENSE("experts.1.") "model.layers.0.mlp.router.weight"},
        {"--experts 1 --shared-hidden 0 --post-norm on", "[\"o\"]", ALL DENSE("experts.0.") "model.layers.0.mlp.router.weight model.layers.0.mlp.norm_weight model.layers.0.self_attn.o_proj.norm_weight"},
    };
    char *root = text_format("%s", train_path), *code = NULL;
    for (char *slash; !code && (slash = strrchr(root, '/'));) {
        *slash = '\0';
        char *path = text_format("%s/dev/hf/modeling_scale_gpt.py", root);
        if (exists(path)) { code = path; }
    }
    cr_assert(code);
    for (int i = 0; i < COUNT(cases); i++) {
        OK("rm -rf run E; train " ONE " --out run %s; train --resume run --export hf E; cmp '%s' E/modeling_scale_gpt.py", cases[i].flags, code);
        expect_names("E/model.safetensors", cases[i].tensors);
        cJSON *config = read_json("E/config.json");
        char *sites = cJSON_PrintUnformatted(cJSON_GetObjectItem(config, "normed_sites"));
        cr_assert_str_eq(sites, cases[i].sites);
        cr_assert_str_eq(cJSON_GetObjectItem(cJSON_GetObjectItem(config, "auto_map"), "AutoModelForCausalLM")->valuestring, "modeling_scale_gpt.ScaleGPTForCausalLM");
        cr_assert(run("train --import hf E --export hf F") == 1 && strstr(contents("err", NULL), "model_type \"scale_gpt\""), "%s", contents("err", NULL));
    }
    free(code);
    free(root);
}

Test(hf, an_import_trains_and_samples) {
    OK("train --import hf A --data train.bin --val-data train.bin --batch 2 --seq-len 8 --steps 30 --lr 1e-2 --out run");
    OK("tail -n 1 run/metrics.csv | awk -F, '{ exit !($5 < 3.2) }'; grep -q -e '--import hf A' run/config.txt"); // ln 32 is 3.47
    OK("train --resume run --steps 31");
    OK("train " SIZES " --vocab 256 --out bytes; train --resume bytes --export hf E");
    OK("train --resume bytes --sample 20 --tokenizer bytes --prompt x >of_run; train --import hf E --sample 20 --tokenizer bytes --prompt x >of_import");
    OK("cmp of_run of_import && test $(wc -c <of_run) -gt 10");
    OK("train --import hf A --estimate");
    cr_assert(strstr(contents("out", NULL), "parameters"));
}

// ----------------------------------------------------------------------------------------------------
// What is refused

typedef struct Case { const char *what, *before, *command, *says; int status; } Case; // says: parts that the message must have, joined by '|'

static void refuse(const Case *cases, int count) {
    for (int i = 0; i < count; i++) {
        const Case *c = &cases[i];
        cr_assert(system("rm -rf E B B.export.tmp && cp -r A E") == 0);
        if (c->before) { OK("%s", c->before); }
        int status = run("%s", c->command);
        char *err = contents("err", NULL), *parts = strdup(c->says), *save = NULL, *newline = strchr(err, '\n');
        cr_expect(status == c->status, "%s: status %d, expected %d: %s", c->what, status, c->status, err);
        cr_expect(newline && !newline[1], "%s: expected one line, found: %s", c->what, err);
        for (char *part = strtok_r(parts, "|", &save); part; part = strtok_r(NULL, "|", &save)) { cr_expect(strstr(err, part), "%s: expected \"%s\" in: %s", c->what, part, err); }
        cr_expect(!exists("B") && !exists("B.export.tmp") && !exists("new"), "%s: left something behind", c->what);
        free(parts);
    }
}

#define SET(from, to) "sed -i 's/" from "/" to "/' E/config.json; cmp -s A/config.json E/config.json && exit 9 || true"
#define LIKE(key, value) "sed -i 's/\"rope_scaling\": null/\"" key "\": " value "/' E/config.json"
#define TAKE "train --import hf E --export hf B"

Test(hf, models_that_a_baseline_is_not_are_refused) {
    static const Case cases[] = {
        {"another kind of model", SET("llama", "mistral"), TAKE, "E/config.json|model_type \"mistral\"|expected \"llama\"", 1},
        {"no kind of model", SET(".*model_type.*", ""), TAKE, "model_type null|left out|expected \"llama\"", 1},
        {"attention bias", SET("\"attention_bias\": false", "\"attention_bias\": true"), TAKE, "attention_bias true|expected false|no bias", 1},
        {"FFN bias", LIKE("mlp_bias", "true"), TAKE, "mlp_bias true|expected false", 1},
        {"another activation", SET("silu", "gelu"), TAKE, "hidden_act \"gelu\"|expected \"silu\"", 1},
        {"another epsilon", SET("1e-05", "1e-06"), TAKE, "rms_norm_eps 1e-06|expected 1e-05|fixed", 1},
        {"no epsilon, which means another one", SET(".*rms_norm_eps.*", ""), TAKE, "rms_norm_eps 1e-06|left out|expected 1e-05", 1},
        {"another RoPE base", SET("10000.0", "500000.0"), TAKE, "rope_theta 500000|expected 10000", 1},
        {"another RoPE base, new style", LIKE("rope_parameters", "{\"rope_type\": \"default\", \"rope_theta\": 500000}"), TAKE, "rope_parameters.rope_theta 500000|expected 10000", 1},
        {"RoPE scaling", LIKE("rope_scaling", "{\"type\": \"linear\", \"factor\": 2.0}"), TAKE, "rope_scaling.type \"linear\"|default|not scaled", 1},
        {"RoPE scaling, new style", LIKE("rope_parameters", "{\"rope_type\": \"llama3\", \"factor\": 8}"), TAKE, "rope_parameters.rope_type \"llama3\"|not scaled", 1},
        {"half of each head turned", LIKE("partial_rotary_factor", "0.5"), TAKE, "partial_rotary_factor 0.5|expected 1", 1},
        {"quantized", LIKE("quantization_config", "{\"bits\": 4}"), TAKE, "quantization_config|bits|not quantized", 1},
        {"heads wider than their share", LIKE("head_dim", "8"), TAKE, "head_dim 8|expected 4|hidden_size 16", 1},
        {"heads that do not divide", SET("attention_heads\": 4", "attention_heads\": 3"), TAKE, "hidden_size 16|num_attention_heads 3|multiple", 1},
        {"kv heads that do not divide", SET("key_value_heads\": 2", "key_value_heads\": 3"), TAKE, "num_key_value_heads 3|multiple", 1},
        {"odd heads", SET("attention_heads\": 4", "attention_heads\": 16"), TAKE, "num_attention_heads 16|even", 1},
        {"too large a vocabulary", SET("vocab_size\": 32", "vocab_size\": 65537"), TAKE, "vocab_size 65537|1 to 65536|16 bits", 1},
        {"no size", SET(".*intermediate_size.*", ""), TAKE, "intermediate_size left out|whole number", 1},
        {"a size that is none", SET("hidden_size\": 16", "hidden_size\": \"16\""), TAKE, "hidden_size \"16\"|whole number", 1},
        {"a broken size", SET("layers\": 2", "layers\": 1.5"), TAKE, "num_hidden_layers 1.5|whole number", 1},
        {"no layers", SET("layers\": 2", "layers\": 0"), TAKE, "num_hidden_layers 0|whole number from 1", 1},
        {"no JSON", "echo hello >E/config.json", TAKE, "E/config.json|no JSON object", 1},
        {"a list", "echo '[1]' >E/config.json", TAKE, "E/config.json|no JSON object", 1},
        {"an empty config", ": >E/config.json", TAKE, "E/config.json|no JSON object", 1},
        {"no config", "rm E/config.json", TAKE, "E/config.json|No such file", 1},
        {"no folder", "rm -r E", TAKE, "E/config.json|No such file", 1},
    };
    refuse(cases, COUNT(cases));
}

#define RENAME(from, to) "sed -i 's/" from "/" to "/' E/model.safetensors" // of the same length

Test(hf, damaged_weights_are_refused) {
    static const Case cases[] = {
        {"no weights", "rm E/model.safetensors", TAKE, "--import hf E|neither|model.safetensors.index.json", 1},
        {"weights of another format", "mv E/model.safetensors E/pytorch_model.bin", TAKE, "--import hf E|neither", 1},
        {"half a file", "head -c 9000 A/model.safetensors >E/model.safetensors", TAKE, "E/model.safetensors|bytes|within the file", 1},
        {"half a header", "head -c 900 A/model.safetensors >E/model.safetensors", TAKE, "E/model.safetensors|header", 1},
        {"an empty file", ": >E/model.safetensors", TAKE, "E/model.safetensors|found 0 bytes", 1},
        {"a tensor missing", RENAME("1.self_attn.o_proj.weight", "1.self_attn.o_projxweight"), TAKE, "model.layers.1.self_attn.o_proj.weight|expected it", 1},
        {"a bias", RENAME("\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":\\[16\\]", "\"model.norm.bias\":{\"dtype\":\"F32\",  \"shape\":\\[16\\]"), TAKE, "model.norm.weight|expected it", 1},
        {"a layer too many", SET("layers\": 2", "layers\": 1"), TAKE, "model.layers.1.|only those of a Llama", 1},
        {"a layer too few", SET("layers\": 2", "layers\": 3"), TAKE, "model.layers.2.|expected it", 1},
        {"another shape", SET("intermediate_size\": 24", "intermediate_size\": 23"), TAKE, "mlp|shape [24,16]|[23,16]", 1},
        {"whole numbers", RENAME("\"F32\"", "\"I32\""), TAKE, "I32|F32, BF16, F16", 1},
        {"untied without a head", RENAME("lm_head.weight", "lm_head_weight"), TAKE, "lm_head.weight|expected it", 1},
        {"offsets beyond the file", RENAME("\\[2048,4096\\]", "\\[9948,9996\\]"), TAKE, "embed_tokens|bytes", 1},
        {"an index of nothing", "rm E/model.safetensors; echo '{}' >E/model.safetensors.index.json", TAKE, "index.json|no weight_map", 1},
        {"an index that leads out", "mv E/model.safetensors .; echo '{\"weight_map\": {\"model.norm.weight\": \"../model.safetensors\"}}' >E/model.safetensors.index.json", TAKE, "index.json|model.norm.weight|same folder", 1},
        {"a shard missing", "rm E/model.safetensors; echo '{\"weight_map\": {\"model.norm.weight\": \"one.safetensors\"}}' >E/model.safetensors.index.json", TAKE, "E/one.safetensors|No such file", 1},
        {"an index that lacks a tensor", "mv E/model.safetensors E/one.safetensors; echo '{\"weight_map\": {\"model.norm.weight\": \"one.safetensors\"}}' >E/model.safetensors.index.json", TAKE, "model.embed_tokens.weight|expected it", 1},
    };
    refuse(cases, COUNT(cases));
}

Test(hf, flags_are_refused) {
    OK("train " SMALL " --out run --variant hg");
    static const Case cases[] = {
        {"no format", NULL, "train --export", "--export|no value", 2},
        {"no folder", NULL, "train --resume run --export hf", "--export|\"hf\"|a format and a folder: hf DIR", 2},
        {"a flag for a folder", NULL, "train --export hf --resume run", "--export|\"hf\"|hf DIR", 2},
        {"an empty folder name", NULL, "train --import hf ''", "--import|\"hf \"|hf DIR", 2},
        {"another format", NULL, "train --resume run --export gguf B", "--export|\"gguf B\"|hf DIR", 2},
        {"only a folder", NULL, "train --import E", "--import|\"E\"|hf DIR", 2},
        {"twice", NULL, "train --export hf B --export hf B", "--export|twice", 2},
        {"export of nothing", NULL, "train --export hf B", "--export|--resume RUN|--import hf DIR", 2},
        {"export and sample", NULL, "train --resume run --export hf B --sample 5", "--export and --sample|both", 2},
        {"resume and import", NULL, "train --resume run --import hf E", "--resume and --import|both", 2},
        {"export of no run", NULL, "train --resume none --export hf B", "--resume none|No such file", 1},
        {"other layers", NULL, "train --import hf E --layers 3 " DATA " --out new", "--layers|found 3|expected 2|num_hidden_layers|E/config.json", 2},
        {"other channels", NULL, "train --import hf E --channels 32 " DATA " --out new", "--channels|found 32|expected 16", 2},
        {"other kv heads", NULL, "train --import hf E --kv-heads 4 " DATA " --out new", "--kv-heads|found 4|expected 2", 2},
        {"a preset", NULL, "train --import hf E --model tiny " DATA " --out new", "--layers|found 4|expected 2", 2},
        {"sequences too long", NULL, "train --import hf E --seq-len 17 " DATA " --out new", "--seq-len|found 17|at most 16|max_position_embeddings", 2},
        {"tied by a flag", NULL, "train --import hf E --tie-embeddings on " DATA " --out new", "--tie-embeddings|found on|expected off", 2},
        {"a vocabulary below the data's", SET("vocab_size\": 32", "vocab_size\": 31"), "train --import hf E " DATA " --out new", "--vocab|31|32", 2},
        {"HG", NULL, "train --import hf E --variant hg " DATA " --out new", "--import hf|--hg on|baseline", 2},
        {"unified", NULL, "train --import hf E --variant unified " DATA " --out new", "--import hf|expected a baseline", 2},
        {"no scales", NULL, "train --import hf E --norm-scale off " DATA " --out new", "--norm-scale off|baseline", 2},
        {"OR", NULL, "train --import hf E --reparam or " DATA " --out new", "--reparam|baseline", 2},
        {"QK-norm", NULL, "train --import hf E --qk-norm on " DATA " --out new", "--qk-norm on|baseline", 2},
        {"post-norm", NULL, "train --import hf E --post-norm on " DATA " --out new", "--post-norm on|baseline", 2},
        {"experts", NULL, "train --import hf E --experts 2 " DATA " --out new", "--experts|baseline", 2},
        {"a folder with files", NULL, "train --resume run --export hf E", "--export hf E|files in it|new or empty", 1},
        {"a file", NULL, "train --resume run --export hf train.bin", "--export hf train.bin|Not a directory", 1},
        {"no parent folder", NULL, "train --resume run --export hf nowhere/B", "nowhere/B|No such file", 1},
    };
    refuse(cases, COUNT(cases));
}

// ----------------------------------------------------------------------------------------------------
// Whole or not at all

Test(hf, export_is_whole_or_absent) {
    OK("train --import hf A --export hf B && mkdir empty && train --import hf A --export hf empty && cmp B/model.safetensors empty/model.safetensors");
    OK("mkdir B2.export.tmp && echo junk >B2.export.tmp/junk && train --import hf A --export hf B2 && test ! -e B2/junk"); // what a kill has left
    cr_assert(run("ulimit -f 8; trap '' XFSZ; train --import hf A --export hf C") == 1);
    cr_assert(strstr(contents("err", NULL), "cannot write") && !exists("C") && !exists("C.export.tmp"), "%s", contents("err", NULL));
    OK("mkdir away && cp '%s' away/train_gpt2 && train " SMALL " --qk-norm on --out run", train_path); // a program without its Python file
    cr_assert(run("away/train_gpt2 --resume run --export hf D") == 1);
    cr_assert(strstr(contents("err", NULL), "dev/hf/modeling_scale_gpt.py") && !exists("D") && !exists("D.export.tmp"), "%s", contents("err", NULL));
    OK("away/train_gpt2 --import hf A --export hf D"); // which a Llama doesn't need
}

Test(hf, a_kill_leaves_no_half_export) {
    OK("train " DATA " --layers 2 --channels 256 --heads 4 --seq-len 16 --vocab 4096 --steps 1 --out run; train --resume run --export hf whole");
    int killed = 0;
    for (int i = 0; i < 40; i++) {
        OK("rm -rf B");
        pid_t child = fork();
        if (child == 0) {
            if (!freopen("/dev/null", "w", stdout)) { _exit(9); }
            execl(train_path, train_path, "--resume", "run", "--export", "hf", "B", (char *)NULL);
            _exit(9);
        }
        struct timespec wait = {0, 1000000L + 2000000L * i};
        nanosleep(&wait, NULL);
        kill(child, SIGKILL);
        int status;
        cr_assert(waitpid(child, &status, 0) == child);
        killed += WIFSIGNALED(status);
        if (exists("B")) { OK("cmp B/model.safetensors whole/model.safetensors && cmp B/config.json whole/config.json"); }
    }
    cr_expect(killed > 0);
    OK("rm -rf B; train --resume run --export hf B && test ! -e B.export.tmp");
}
