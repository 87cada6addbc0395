// tokenize: turns text files into token shards for training.
//
//   data/tokenize --ranks data/r50k_base.tiktoken --out data/mine text.txt more.jsonl
//
// writes mine/tokens_val_000000.bin, mine/tokens_train_000001.bin, ... Each
// document begins with end-of-text, as in the published FineWeb shards. The
// output appears only when all of it is complete.
#define _GNU_SOURCE
#include "tokenizer.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <signal.h>
#include <time.h>

#define WHO "tokenize"

// -----------------------------------------------------------------------------
// Options: one table drives parsing, checks and --help

enum { MODE_WRITE = 1, MODE_PRINT = 2, MODE_DECODE = 4, MODE_ALL = 7 };
static const char *mode_names[] = {[MODE_WRITE] = "writing shards", [MODE_PRINT] = "--print", [MODE_DECODE] = "--decode"};

static const char *opt_ranks, *opt_out, *opt_name = "tokens", *opt_format = "auto", *opt_field = "text";
static int64_t opt_bytes, opt_print, opt_decode, opt_overwrite, opt_help;
static int64_t opt_shard_tokens = 100000000, opt_val_tokens = 32768, opt_chunk_bytes = 1 << 20;

#define MAX_CHUNK_BYTES ((int64_t)1 << 28) // also the longest line, and the longest text without a safe cut

typedef struct Option {
    const char *name, *value;  // value: what --help calls it; NULL for a switch
    const char **string;       // where it goes: a string, or
    int64_t *number, min, max; // a number from min to max, or a switch (0 or 1)
    int modes;                 // in which it has a meaning
    const char *help;
    int given;
} Option;

static Option options[] = {
    {"--ranks", "FILE", &opt_ranks, NULL, 0, 0, MODE_ALL, "byte-pair ranks (.tiktoken), such as r50k_base.tiktoken of GPT-2", 0},
    {"--bytes", NULL, NULL, &opt_bytes, 0, 1, MODE_ALL, "instead of --ranks: one token a byte, end-of-text is 0", 0},
    {"--out", "DIR", &opt_out, NULL, 0, 0, MODE_WRITE, "where the shards go; created if missing", 0},
    {"--name", "NAME", &opt_name, NULL, 0, 0, MODE_WRITE, "shards are NAME_val_000000.bin, NAME_train_000001.bin, ... (default tokens)", 0},
    {"--shard-tokens", "N", NULL, &opt_shard_tokens, 1, INT32_MAX, MODE_WRITE, "tokens in a shard (default 100000000)", 0},
    {"--val-tokens", "N", NULL, &opt_val_tokens, 0, INT32_MAX, MODE_WRITE, "the first N tokens become the validation shard; 0: none (default 32768)", 0},
    {"--overwrite", NULL, NULL, &opt_overwrite, 0, 1, MODE_WRITE, "replace all shards of the same NAME in DIR", 0},
    {"--format", "F", &opt_format, NULL, 0, 0, MODE_WRITE | MODE_PRINT, "txt: a file is a document; jsonl: a line is; auto: by suffix, txt for - (default)", 0},
    {"--jsonl-field", "KEY", &opt_field, NULL, 0, 0, MODE_WRITE | MODE_PRINT, "the text in a line of .jsonl (default text)", 0},
    {"--chunk-bytes", "N", NULL, &opt_chunk_bytes, 1, MAX_CHUNK_BYTES, MODE_WRITE | MODE_PRINT, "read about this much at a time; never changes the tokens (default 1048576)", 0},
    {"--print", NULL, NULL, &opt_print, 0, 1, MODE_PRINT, "write ids to standard output, a document on a line, without end-of-text", 0},
    {"--decode", NULL, NULL, &opt_decode, 0, 1, MODE_DECODE, "write the text of the shards INPUT to standard output, without end-of-text", 0},
    {"--help", NULL, NULL, &opt_help, 0, 1, MODE_ALL, "this text", 0},
};
#define NUM_OPTIONS ((int)(sizeof(options) / sizeof(options[0])))

// A mistake in the command line: one line on stderr, status 2.
__attribute__((format(printf, 1, 2), noreturn)) static void usage_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs(WHO ": ", stderr);
    vfprintf(stderr, format, args);
    fputs(" (see --help)\n", stderr);
    va_end(args);
    exit(2);
}

static void print_help(void) {
    printf("usage: tokenize (--ranks FILE | --bytes) --out DIR [option]... INPUT...\n"
           "       tokenize (--ranks FILE | --bytes) (--print | --decode) INPUT...\n\n"
           "Turns .txt and .jsonl files (- is standard input) into token shards.\n\n");
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char left[64];
        snprintf(left, sizeof(left), "%s %s", options[i].name, options[i].value ? options[i].value : "");
        printf("  %-20s %s\n", left, options[i].help);
    }
    if (fflush(stdout) != 0) tok_fail(WHO, "standard output: cannot write: %s", strerror(errno));
}

// Edits (insert, delete, replace a character) that turn a into b; both under 64 characters.
static int edit_distance(const char *a, const char *b) {
    int row[65], n = (int)strlen(b);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

static Option *find_option(const char *name) {
    int best = 1000, nearest = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (strcmp(options[i].name, name) == 0) return &options[i];
        int d = strlen(name) < 64 ? edit_distance(name, options[i].name) : 1000;
        if (d < best) best = d, nearest = i;
    }
    if (best <= 3 && 2 * best < (int)strlen(name)) usage_error("unknown option %s, did you mean %s?", name, options[nearest].name);
    usage_error("unknown option %s", name);
}

static void set_option(Option *o, const char *value) {
    if (o->given++) usage_error("%s: found twice, expected once", o->name);
    if (o->string) {
        if (!*value) usage_error("%s: found an empty value, expected %s", o->name, o->value);
        *o->string = value;
        return;
    }
    char *end;
    errno = 0;
    long long number = strtoll(value, &end, 10);
    int is_number = *value && *end == 0 && ((*value >= '0' && *value <= '9') || *value == '-');
    if (!is_number || errno || number < o->min || number > o->max)
        usage_error("%s: found %s, expected a whole number from %lld to %lld", o->name, value, (long long)o->min,
                    (long long)o->max);
    *o->number = number;
}

// Fills the options; moves the inputs to the front of argv and returns their number.
static int parse_command_line(int argc, char **argv) {
    int inputs = 0, only_inputs = 0;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        if (only_inputs || arg[0] != '-' || arg[1] == 0) {
            argv[inputs++] = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            only_inputs = 1;
            continue;
        }
        char *value = strchr(arg, '=');
        if (value) *value++ = 0; // --name=value
        Option *o = find_option(arg);
        if (!o->value && value) usage_error("%s: found the value %s, expected none", arg, value);
        if (!o->value) value = (char *)"1";
        if (!value && i + 1 < argc) value = argv[++i];
        if (!value) usage_error("%s: found no value, expected %s", arg, o->value);
        set_option(o, value);
    }
    return inputs;
}

// Whether the file is to be read as .jsonl; refuses suffixes that are neither.
static int is_jsonl(const char *path) {
    if (strcmp(opt_format, "auto") != 0) return strcmp(opt_format, "jsonl") == 0;
    if (strcmp(path, "-") == 0) return 0;
    const char *slash = strrchr(path, '/'), *suffix = strrchr(slash ? slash : path, '.');
    if (suffix && strcmp(suffix, ".jsonl") == 0) return 1;
    if (suffix && strcmp(suffix, ".txt") == 0) return 0;
    usage_error("%s: found the suffix %s, expected .txt or .jsonl, or --format", path, suffix ? suffix : "\"\"");
}

// Refuses combinations without a meaning; returns the mode.
static int check_options(int inputs, char **input) {
    if (opt_print && opt_decode) usage_error("--print: found with --decode, expected one of them");
    int mode = opt_decode ? MODE_DECODE : opt_print ? MODE_PRINT : MODE_WRITE;
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (options[i].given && !(options[i].modes & mode))
            usage_error("%s: has no meaning with %s", options[i].name, mode_names[mode]);
    if (opt_ranks && opt_bytes) usage_error("--bytes: found with --ranks, expected one of them");
    if (!opt_ranks && !opt_bytes) usage_error("found no vocabulary, expected --ranks FILE or --bytes");
    if (mode == MODE_WRITE && !opt_out) usage_error("found no --out, expected --out DIR, --print or --decode");
    if (inputs == 0) usage_error("found no INPUT, expected at least one file, or - for standard input");
    if (strchr(opt_name, '/')) usage_error("--name: found %s, expected a name without /", opt_name);
    if (strcmp(opt_format, "auto") && strcmp(opt_format, "txt") && strcmp(opt_format, "jsonl"))
        usage_error("--format: found %s, expected auto, txt or jsonl", opt_format);
    if (opt_val_tokens > opt_shard_tokens) {
        if (find_option("--val-tokens")->given)
            usage_error("--val-tokens: found %lld, expected at most the %lld of --shard-tokens",
                        (long long)opt_val_tokens, (long long)opt_shard_tokens);
        opt_val_tokens = opt_shard_tokens;
    }
    for (int i = 0, dashes = 0; i < inputs; i++) {
        if (mode != MODE_DECODE) (void)is_jsonl(input[i]);
        if (strcmp(input[i], "-") != 0) continue;
        if (mode == MODE_DECODE) usage_error("-: found standard input, expected the names of shards");
        if (dashes++) usage_error("-: found standard input twice, expected it once");
    }
    return mode;
}

// -----------------------------------------------------------------------------
// Input: a window onto a file of any size

// A signal only asks to stop; the program then ends through exit(), which removes
// the unfinished shards.
static volatile sig_atomic_t stop_signal;

static void ask_to_stop(int signal_number) {
    stop_signal = signal_number;
}

typedef struct Input {
    const char *path;
    int fd, at_end;
    char *data; // data[begin..end) is read and not yet used
    int64_t begin, end, room;
} Input;

static int64_t progress_done, progress_total; // bytes; total 0: unknown

// Percent and speed on stderr, twice a second, where someone can see it.
static void show_progress(void) {
    static double start, last;
    static int tty = -1;
    struct timespec now;
    if (tty < 0) tty = isatty(STDERR_FILENO);
    if (!tty || clock_gettime(CLOCK_MONOTONIC, &now) != 0) return;
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (start == 0) start = last = seconds;
    if (seconds - last < 0.5) return;
    last = seconds;
    double mb = (double)progress_done / 1e6;
    if (progress_total) fprintf(stderr, "%.1f%%, ", 100.0 * (double)progress_done / (double)progress_total);
    fprintf(stderr, "%.0f MB, %.1f MB/s\033[K\r", mb, mb / (seconds - start)); // \033[K: clear the rest
}

static void input_open(Input *in, const char *path) {
    memset(in, 0, sizeof(*in));
    in->path = strcmp(path, "-") == 0 ? "standard input" : path;
    in->fd = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (in->fd < 0) tok_fail(WHO, "%s: cannot open: %s", path, strerror(errno));
}

static void input_close(Input *in) {
    if (in->fd != STDIN_FILENO) close(in->fd); // opened for reading: nothing can be lost
    free(in->data);
}

// Reads until at least want bytes are at hand or the file ends; returns how many are.
static int64_t input_fill(Input *in, int64_t want) {
    if (in->begin > 0) {
        memmove(in->data, in->data + in->begin, (size_t)(in->end - in->begin));
        in->end -= in->begin;
        in->begin = 0;
    }
    if (want > in->room) {
        in->room = want;
        in->data = tok_realloc(in->data, in->room, 1);
    }
    while (in->end < want && !in->at_end) {
        ssize_t n = read(in->fd, in->data + in->end, (size_t)(in->room - in->end));
        if (stop_signal) {
            fprintf(stderr, WHO ": stopped by signal %d, nothing written\n", (int)stop_signal);
            exit(128 + stop_signal);
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) tok_fail(WHO, "%s: cannot read: %s", in->path, strerror(errno));
        if (n == 0) in->at_end = 1;
        in->end += n;
        progress_done += n;
        show_progress();
    }
    return in->end;
}

// -----------------------------------------------------------------------------
// Output: documents become ids, ids become shards or a printed line

typedef struct Output {
    const Tokenizer *tokenizer;
    int mode;
    ShardWriter *shards; // [num_shards] all but the last finished, none published
    int num_shards, has_val;
    int32_t *ids; // of one piece of text
    int64_t ids_room;
    int64_t documents, text_tokens, tokens;
} Output;

// Tokens the current shard may hold.
static int64_t shard_limit(const Output *out) {
    return out->has_val && out->num_shards == 1 ? opt_val_tokens : opt_shard_tokens;
}

// The index in a shard's file name: validation is 0, training begins at 1.
static void next_shard(Output *out) {
    if (out->num_shards > 0) shard_finish(&out->shards[out->num_shards - 1]);
    out->has_val = opt_val_tokens > 0;
    int is_val = out->has_val && out->num_shards == 0;
    int index = out->has_val ? out->num_shards : out->num_shards + 1;
    if (index > 999999) tok_fail(WHO, "%s: found more than 999999 shards, expected a larger --shard-tokens", opt_out);
    size_t room = strlen(opt_out) + strlen(opt_name) + 32;
    char *path = tok_realloc(NULL, (int64_t)room, 1);
    snprintf(path, room, "%s/%s_%s_%06d.bin", opt_out, opt_name, is_val ? "val" : "train", index);
    out->shards = tok_realloc(out->shards, out->num_shards + 1, sizeof(ShardWriter));
    shard_open(&out->shards[out->num_shards++], path, out->tokenizer->vocab);
    free(path);
}

static void put_tokens(Output *out, const int32_t *ids, int64_t n) {
    uint16_t block[4096];
    while (n > 0) {
        if (out->num_shards == 0 || out->shards[out->num_shards - 1].tokens == shard_limit(out)) next_shard(out);
        ShardWriter *shard = &out->shards[out->num_shards - 1];
        int64_t room = shard_limit(out) - shard->tokens, count = n < 4096 ? n : 4096;
        if (count > room) count = room;
        for (int64_t i = 0; i < count; i++) block[i] = (uint16_t)ids[i];
        shard_append(shard, block, count);
        out->tokens += count;
        ids += count;
        n -= count;
    }
}

static void document_begin(Output *out) {
    int32_t eot = out->tokenizer->eot;
    if (out->mode == MODE_WRITE) put_tokens(out, &eot, 1);
    out->documents++;
}

// path and line say where text begins, for messages.
static void document_text(Output *out, const char *text, int64_t n, const char *path, int64_t line) {
    const char *nul = opt_bytes ? memchr(text, 0, (size_t)n) : NULL;
    if (nul) {
        for (const char *p = text; p < nul; p++) line += *p == '\n';
        tok_fail(WHO, "%s:%lld: found a byte 0, expected none, as --bytes has it for end-of-text", path, (long long)line);
    }
    int64_t count = tokenizer_encode(out->tokenizer, text, n, &out->ids, &out->ids_room);
    if (out->mode == MODE_WRITE) put_tokens(out, out->ids, count);
    else
        for (int64_t i = 0; i < count; i++) printf("%s%d", out->text_tokens || i ? " " : "", out->ids[i]);
    out->text_tokens += count;
}

static void document_end(Output *out) {
    if (out->mode != MODE_PRINT) return;
    if (putchar('\n') == EOF) tok_fail(WHO, "standard output: cannot write: %s", strerror(errno));
    out->text_tokens = 0; // of the line
}

// -----------------------------------------------------------------------------
// The two kinds of input

// A text file is one document, read in chunks that end where a cut changes no token.
static void tokenize_text(Output *out, Input *in) {
    document_begin(out);
    int64_t want = opt_chunk_bytes, line = 1;
    for (;;) {
        int64_t have = input_fill(in, want);
        int64_t cut = in->at_end ? have : tokenizer_safe_cut(in->data, have);
        if (cut == 0 && !in->at_end) {
            if (have >= MAX_CHUNK_BYTES)
                tok_fail(WHO, "%s:%lld: found %lld bytes in which text and white space do not alternate, expected less than %lld",
                         in->path, (long long)line, (long long)have, (long long)MAX_CHUNK_BYTES);
            want = 2 * have < MAX_CHUNK_BYTES ? 2 * have : MAX_CHUNK_BYTES;
            continue;
        }
        document_text(out, in->data, cut, in->path, line);
        for (int64_t i = 0; i < cut; i++) line += in->data[i] == '\n';
        in->begin = cut;
        want = opt_chunk_bytes;
        if (in->at_end) break;
    }
    document_end(out);
}

// Whether the JSON text has \u0000. cJSON would end the string there, unseen.
static int has_escaped_nul(const char *s, int64_t n) {
    for (int64_t i = 0; i + 1 < n; i++) {
        if (s[i] != '\\') continue;
        if (n - i >= 6 && memcmp(s + i, "\\u0000", 6) == 0) return 1;
        i++; // the escaped character
    }
    return 0;
}

static void tokenize_json_line(Output *out, const char *s, int64_t n, const char *path, int64_t line) {
    if (memchr(s, 0, (size_t)n) || has_escaped_nul(s, n))
        tok_fail(WHO, "%s:%lld: found a NUL character, expected JSON without", path, (long long)line);
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(s, (size_t)n, &end, 0);
    while (json && end < s + n && strchr(" \t\r", *end)) end++;
    if (!cJSON_IsObject(json) || end != s + n) {
        int64_t column = cJSON_IsObject(json) || !json ? end - s + 1 : 1;
        tok_fail(WHO, "%s:%lld: found no JSON object (near column %lld), expected one on each line", path,
                 (long long)line, (long long)column);
    }
    const cJSON *field = cJSON_GetObjectItemCaseSensitive(json, opt_field);
    if (!cJSON_IsString(field))
        tok_fail(WHO, "%s:%lld: found %s, expected \"%s\" with a string (--jsonl-field)", path, (long long)line,
                 field ? "a value that is no string" : "no such key", opt_field);
    document_begin(out);
    document_text(out, field->valuestring, (int64_t)strlen(field->valuestring), path, line);
    document_end(out);
    cJSON_Delete(json);
}

// In a .jsonl file each line is an object, with a document under one key.
static void tokenize_jsonl(Output *out, Input *in) {
    int64_t scanned = 0, have = 0; // bytes after in->begin without a newline, and at hand
    for (int64_t line = 1;;) {
        const char *s = in->data + in->begin;
        const char *newline = have > scanned ? memchr(s + scanned, '\n', (size_t)(have - scanned)) : NULL;
        if (newline || (in->at_end && have > 0)) {
            int64_t n = newline ? newline - s : have, used = newline ? n + 1 : n;
            tokenize_json_line(out, s, n, in->path, line++);
            in->begin += used;
            have -= used;
            scanned = 0;
            continue;
        }
        if (in->at_end) break;
        if (have >= MAX_CHUNK_BYTES)
            tok_fail(WHO, "%s:%lld: found a line of more than %lld bytes, expected shorter ones", in->path,
                     (long long)line, (long long)MAX_CHUNK_BYTES);
        scanned = have;
        have = input_fill(in, have > opt_chunk_bytes ? 2 * have : have + opt_chunk_bytes);
    }
}

// -----------------------------------------------------------------------------
// The output folder

// Whether name is one that this run could write: NAME_val_000000.bin and so on.
static int is_shard_name(const char *name) {
    size_t n = strlen(opt_name);
    if (strncmp(name, opt_name, n) != 0) return 0;
    name += n;
    if (strncmp(name, "_val_", 5) == 0) name += 5;
    else if (strncmp(name, "_train_", 7) == 0) name += 7;
    else return 0;
    return strspn(name, "0123456789") == 6 && strcmp(name + 6, ".bin") == 0;
}

// Creates --out if it is missing. Shards of an earlier run under the same name
// would mix with the new ones: without remove they are an error, with it they go.
static void prepare_folder(int remove_old) {
    if (mkdir(opt_out, 0777) != 0 && errno != EEXIST) tok_fail(WHO, "%s: cannot create: %s", opt_out, strerror(errno));
    DIR *folder = opendir(opt_out);
    if (!folder) tok_fail(WHO, "%s: cannot open: %s", opt_out, strerror(errno));
    struct dirent *entry;
    while (errno = 0, (entry = readdir(folder)) != NULL) {
        if (!is_shard_name(entry->d_name)) continue;
        if (!opt_overwrite)
            tok_fail(WHO, "%s/%s: found shards of this name, expected none; --overwrite replaces them", opt_out,
                     entry->d_name);
        if (remove_old && unlinkat(dirfd(folder), entry->d_name, 0) != 0)
            tok_fail(WHO, "%s/%s: cannot remove: %s", opt_out, entry->d_name, strerror(errno));
    }
    if (errno) tok_fail(WHO, "%s: cannot read: %s", opt_out, strerror(errno));
    closedir(folder);
}

// Gives all shards their names, now that nothing more can go wrong with the text.
static void publish(Output *out) {
    if (out->text_tokens == 0) tok_fail(WHO, "found no text in the input, expected some");
    if (out->tokens <= opt_val_tokens)
        tok_fail(WHO, "found %lld tokens, expected more than the %lld of --val-tokens, so that some are left for training",
                 (long long)out->tokens, (long long)opt_val_tokens);
    shard_finish(&out->shards[out->num_shards - 1]);
    prepare_folder(1);
    for (int i = 0; i < out->num_shards; i++) {
        printf("%s: %lld tokens\n", out->shards[i].path, (long long)out->shards[i].tokens);
        shard_publish(&out->shards[i]);
    }
    const char *plural = out->documents == 1 ? "" : "s";
    printf("%lld tokens of text in %lld document%s, + %lld end-of-text = %lld tokens, vocabulary %d\n",
           (long long)out->text_tokens, (long long)out->documents, plural, (long long)out->documents,
           (long long)out->tokens, out->tokenizer->vocab);
}

// -----------------------------------------------------------------------------
// main

static void tokenize_inputs(const Tokenizer *t, int mode, int inputs, char **input) {
    Output out = {.tokenizer = t, .mode = mode};
    for (int i = 0, known = 1; i < inputs; i++) {
        struct stat info;
        int is_stdin = strcmp(input[i], "-") == 0;
        if (!is_stdin && stat(input[i], &info) != 0) tok_fail(WHO, "%s: cannot open: %s", input[i], strerror(errno));
        known = known && !is_stdin && S_ISREG(info.st_mode);
        progress_total = known ? progress_total + info.st_size : 0;
    }
    if (mode == MODE_WRITE) prepare_folder(0);

    struct sigaction action = {.sa_handler = ask_to_stop};
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    signal(SIGPIPE, mode == MODE_WRITE ? SIG_IGN : SIG_DFL); // shards matter more than the report on them
    for (int i = 0; i < 3; i++)
        if (sigaction(signals[i], &action, NULL) != 0) tok_fail(WHO, "cannot catch signals: %s", strerror(errno));

    for (int i = 0; i < inputs; i++) {
        Input in;
        input_open(&in, input[i]);
        if (is_jsonl(input[i])) tokenize_jsonl(&out, &in);
        else tokenize_text(&out, &in);
        input_close(&in);
    }
    if (isatty(STDERR_FILENO)) fputs("\033[K", stderr); // clears the progress
    if (mode == MODE_WRITE) publish(&out);
    free(out.shards);
    free(out.ids);
}

static void decode_shard(const Tokenizer *t, const char *path) {
    uint16_t *tokens;
    int64_t n = shard_read(path, t->vocab, &tokens);
    for (int64_t i = 0; i < n; i++) {
        int length;
        const char *bytes = tokenizer_decode(t, tokens[i], &length);
        if (tokens[i] != t->eot && fwrite(bytes, 1, (size_t)length, stdout) != (size_t)length)
            tok_fail(WHO, "standard output: cannot write: %s", strerror(errno));
    }
    free(tokens);
}

int main(int argc, char **argv) {
    int inputs = parse_command_line(argc, argv);
    if (opt_help) {
        print_help();
        return 0;
    }
    int mode = check_options(inputs, argv);
    Tokenizer tokenizer;
    if (opt_bytes) tokenizer_bytes(&tokenizer);
    else tokenizer_load(&tokenizer, opt_ranks);
    if (tokenizer.vocab > SHARD_MAX_VOCAB)
        tok_fail(WHO, "%s: found a vocabulary of %d, expected at most %d, as shards hold uint16", opt_ranks,
                 tokenizer.vocab, SHARD_MAX_VOCAB);
    if (mode == MODE_DECODE)
        for (int i = 0; i < inputs; i++) decode_shard(&tokenizer, argv[i]);
    else tokenize_inputs(&tokenizer, mode, inputs, argv);
    if (fflush(stdout) != 0 || ferror(stdout)) tok_fail(WHO, "standard output: cannot write: %s", strerror(errno));
    tokenizer_free(&tokenizer);
    return 0;
}
