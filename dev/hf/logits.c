// logits.c: prints this program's logits, for dev/hf/check_export.py to compare with those of Transformers.
//
//   build/hf_logits --resume RUN <tokens        or --import hf DIR; a line of token ids is a prompt
//
// For each prompt it writes (tokens, V) values as raw numbers of type real to standard output.
#define TESTING
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../train_gpt2.c"
#pragma GCC diagnostic pop

int main(int argc, char **argv) {
    static Config cfg;
    static GPT model;
    static SafeFile file;
    TrainState state;
    char checkpoint[4400] = "", run[4400] = "", line[65536];
    config_defaults(&cfg);
    config_parse_flags(&cfg, argc, (const char *const *)argv);
    if (cfg.resume[0]) {
        checkpoint_find(cfg.resume, checkpoint, sizeof checkpoint, run, sizeof run);
        checkpoint_open(&file, checkpoint, "model.safetensors");
        checkpoint_read_config(&file, &cfg, &state);
    } else { hf_read_config(&cfg); }
    config_resolve(&cfg);
    gpt_build(&model, &cfg);
    gpt_allocate(&model, 1, cfg.seq_len);
    if (cfg.resume[0]) { checkpoint_load(&model, checkpoint, &file, 0); }
    else { hf_import(&model, cfg.import_dir); }
    reparameterize_forward(&model);
    real *logits = (real *)malloc((size_t)cfg.seq_len * (size_t)cfg.vocab * sizeof(real));
    while (logits && fgets(line, sizeof line, stdin)) {
        int n = 0;
        char *save = NULL;
        for (char *word = strtok_r(line, " \n", &save); word && n < cfg.seq_len; word = strtok_r(NULL, " \n", &save)) {
            model.inputs[n++] = (int32_t)(atoi(word) % cfg.vocab);
        }
        if (n == 0) { continue; }
        gpt_forward(&model, model.inputs, NULL, 1, n, 0);
        gpt_logits(&model, logits, n);
        fwrite(logits, sizeof(real), (size_t)n * (size_t)cfg.vocab, stdout);
    }
    free(logits);
    return fflush(stdout) == 0 ? 0 : 1;
}
