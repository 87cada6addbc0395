// test_cli.c: drives train_gpt2, data/tokenize and data/synth from outside, as a user and a shell script would.
//
//   make build/test_cli && build/test_cli          ROOT=dir: where the programs are (default .)
//   TRAIN=path build/test_cli                      another build of train_gpt2, e.g. a sanitized one
//
// Every test works in a folder of its own, on models so small that a step takes well under a millisecond.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

// The model of nearly all tests. A command says "@" for these flags; those that it names itself are left out, and
// --hidden where it says --experts.
#define SMALL "--data train_1.bin,train_2.bin,train_3.bin --val-data none --layers 1 --channels 16 --heads 2 --hidden 24 " \
              "--seq-len 16 --vocab 64 --batch 2 --steps 4 --out out"

// Three shards of 728 tokens in all, 45 windows of 16: with two sequences a step, 40 steps cross an epoch's border.
static const int shard_tokens[] = {301, 277, 150};

// ----------------------------------------------------------------------------------------------------
// Programs and folders

static char train_path[4096], tokenize_path[4096], synth_path[4096], folder[64];

static void find_program(char *path, const char *root, const char *name) {
    char joined[4096];
    snprintf(joined, sizeof joined, "%s%s%s", root, *root ? "/" : "", name);
    cr_assert(realpath(joined, path), "%s: cannot find it: %s (make all)", joined, strerror(errno));
}

__attribute__((format(printf, 1, 2)))
static void shell(const char *format, ...) {
    char *command = NULL;
    va_list args;
    va_start(args, format);
    cr_assert(vasprintf(&command, format, args) > 0);
    va_end(args);
    cr_assert(system(command) == 0, "the test's own command failed: %s", command);
    free(command);
}

// A token shard of seeded random tokens below `vocab`.
static void write_shard(const char *path, unsigned seed, int count, int vocab) {
    int32_t header[256] = {20240520, 1, count, vocab};
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(header, sizeof header, 1, file) == 1);
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        uint16_t token = (uint16_t)((seed >> 16) % (unsigned)vocab);
        cr_assert(fwrite(&token, sizeof token, 1, file) == 1);
    }
    cr_assert(fclose(file) == 0);
}

static void setup(void) {
    const char *root = getenv("ROOT"), *other = getenv("TRAIN");
    find_program(train_path, other ? "" : root ? root : ".", other ? other : "train_gpt2");
    find_program(tokenize_path, root ? root : ".", "data/tokenize");
    find_program(synth_path, root ? root : ".", "data/synth");
    strcpy(folder, "/tmp/test_cli_XXXXXX");
    cr_assert(mkdtemp(folder));
    cr_assert(chmod(folder, 0755) == 0 && chdir(folder) == 0); // 0755: some programs run without privileges
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0); // what lives as long as the program isn't freed
    for (int i = 0; i < COUNT(shard_tokens); i++) {
        char name[32];
        snprintf(name, sizeof name, "train_%d.bin", i + 1);
        write_shard(name, (unsigned)i + 1, shard_tokens[i], 64);
    }
    write_shard("val.bin", 9, 200, 64);
}

static void teardown(void) {
    cr_assert(chdir("/") == 0);
    if (folder[0]) { shell("chmod -R u+rwx %s; rm -rf %s", folder, folder); }
}

TestSuite(cli, .init = setup, .fini = teardown);

// ----------------------------------------------------------------------------------------------------
// Running a program

typedef struct Limits {
    rlim_t file_size, memory; // bytes; 0: none
    int unprivileged;         // 1: as the user nobody
    const char *stdout_path;  // instead of a pipe: a device
} Limits;

typedef struct Result {
    int status;               // exit status; minus the signal's number if one ended the program
    char out[32768], err[8192];
} Result;

// Splits a command into words at spaces; '...' keeps its spaces. Expands "@". Returns the number of words.
static int split(const char *command, char **argv, int most) {
    int argc = 0;
    for (const char *at = command; *at;) {
        if (*at == ' ') { at++; continue; }
        cr_assert(argc < most - 40, "too many words: %s", command);
        if (*at == '@') {
            for (const char *flag = SMALL; *flag;) { // pairs of a name and a value
                int name = (int)strcspn(flag, " "), value = (int)strcspn(flag + name + 1, " ");
                char spaced[64], equals[64];
                snprintf(spaced, sizeof spaced, "%.*s ", name, flag);
                snprintf(equals, sizeof equals, "%.*s=", name, flag);
                int moe = strcmp(spaced, "--hidden ") == 0 && strstr(command, "--experts");
                if (!strstr(command, spaced) && !strstr(command, equals) && !moe) {
                    argv[argc++] = strndup(flag, (size_t)name);
                    argv[argc++] = strndup(flag + name + 1, (size_t)value);
                }
                flag += name + 1 + value;
                flag += *flag == ' ';
            }
            at++;
            continue;
        }
        char *word = calloc(strlen(at) + 1, 1);
        for (int quoted = 0, n = 0; *at && (quoted || *at != ' '); at++) {
            if (*at == '\'') { quoted = !quoted; } else { word[n++] = *at; }
        }
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    return argc;
}

enum { CANNOT_LIMIT = 99, CANNOT_START = 98 }; // statuses of a child that didn't get as far as the program

// In the child: what the parent may not change about itself.
static void apply_limits(const Limits *limits) {
    alarm(60); // survives exec: a program that hangs is ended by SIGALRM
    if (limits->file_size) {
        struct rlimit limit = {limits->file_size, limits->file_size};
        signal(SIGXFSZ, SIG_IGN); // so that the program sees EFBIG, as it would see ENOSPC
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) { _exit(CANNOT_LIMIT); }
    }
    if (limits->memory) {
        struct rlimit limit = {limits->memory, limits->memory};
        if (setrlimit(RLIMIT_AS, &limit) != 0) { _exit(CANNOT_LIMIT); }
    }
    if (limits->unprivileged && geteuid() == 0) {
        if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0) { _exit(CANNOT_LIMIT); }
    }
}

// Starts "train ...", "tokenize ..." or "synth ..." with its output on the given descriptors.
static pid_t start(const char *command, const Limits *limits, int out, int err) {
    char **argv = calloc(4096, sizeof(char *));
    int argc = split(command, argv, 4096);
    const char *path = strcmp(argv[0], "train") == 0 ? train_path : strcmp(argv[0], "tokenize") == 0 ? tokenize_path : synth_path;
    if (limits->unprivileged) { // the program itself may be in a folder closed to others
        shell("cp %s program && chmod 755 program", path);
        path = "./program";
    }
    pid_t child = fork();
    cr_assert(child >= 0);
    if (child == 0) {
        int null = open("/dev/null", O_RDONLY);
        if (dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) { _exit(CANNOT_LIMIT); }
        for (int fd = 3; fd < 64; fd++) { close(fd); }
        apply_limits(limits);
        execv(path, argv);
        _exit(CANNOT_START);
    }
    for (int i = 0; i < argc; i++) { free(argv[i]); }
    free(argv);
    return child;
}

static int wait_for(pid_t child) {
    int status;
    cr_assert(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void read_all(int fd, char *text, size_t room) {
    size_t length = 0;
    for (ssize_t n; length < room - 1 && (n = read(fd, text + length, room - 1 - length)) > 0;) { length += (size_t)n; }
    text[length] = '\0';
    close(fd);
}

// Runs a command to its end. The result lives until the next call.
static const Result *run_limited(const Limits *limits, const char *command) {
    static Result r;
    int out[2], err[2];
    cr_assert(pipe(out) == 0 && pipe(err) == 0);
    int device = limits->stdout_path ? open(limits->stdout_path, O_WRONLY) : -1;
    pid_t child = start(command, limits, device >= 0 ? device : out[1], err[1]);
    close(out[1]);
    close(err[1]);
    if (device >= 0) { close(device); }
    read_all(out[0], r.out, sizeof r.out);
    read_all(err[0], r.err, sizeof r.err);
    r.status = wait_for(child);
    return &r;
}

__attribute__((format(printf, 1, 2)))
static const Result *run(const char *format, ...) {
    static const Limits none;
    char *command = NULL;
    va_list args;
    va_start(args, format);
    cr_assert(vasprintf(&command, format, args) > 0);
    va_end(args);
    const Result *r = run_limited(&none, command);
    free(command);
    return r;
}

// Runs a command that must succeed and say nothing on stderr; returns its standard output.
#define GOOD(...) good(run(__VA_ARGS__), __LINE__)
static const char *good(const Result *r, int line) {
    cr_assert(r->status == 0 && !r->err[0], "line %d: status %d, stderr: %s", line, r->status, r->err);
    return r->out;
}

static int exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

// ----------------------------------------------------------------------------------------------------
// Comparing folders: a listing names each file with the CRC and size of its bytes.

static char *slurp(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) { return NULL; }
    size_t room = 1 << 16, n = 0;
    char *bytes = malloc(room + 1);
    for (size_t got; (got = fread(bytes + n, 1, room - n, file)) > 0;) {
        n += got;
        if (n == room) { bytes = realloc(bytes, (room *= 2) + 1); }
    }
    fclose(file);
    bytes[n] = '\0';
    if (size) { *size = n; }
    return bytes;
}

static void list_folder(FILE *to, const char *root, const char *below, const char *skip) {
    struct dirent **entries;
    char path[8192];
    snprintf(path, sizeof path, "%s%s", root, below);
    int count = scandir(path, &entries, NULL, alphasort);
    cr_assert(count >= 0, "%s: cannot list: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        const char *name = entries[i]->d_name;
        char inner[4096];
        struct stat info;
        snprintf(inner, sizeof inner, "%s/%s", below, name);
        snprintf(path, sizeof path, "%s%s", root, inner);
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !(skip && strstr(skip, name)) && lstat(path, &info) == 0) {
            size_t size = 0;
            char *bytes = S_ISREG(info.st_mode) ? slurp(path, &size) : NULL;
            fprintf(to, "%s %o %zu %08lx\n", inner, (unsigned)info.st_mode, size, crc32(0, (const unsigned char *)bytes, (unsigned)size));
            free(bytes);
            if (S_ISDIR(info.st_mode)) { list_folder(to, root, inner, skip); }
        }
        free(entries[i]);
    }
    free(entries);
}

// The caller frees it. `skip` holds names of files to leave out.
static char *listing(const char *root, const char *skip) {
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    list_folder(to, root, "", skip);
    fclose(to);
    return text;
}

// Two runs must have left the same checkpoints and metrics, byte for byte, and nothing else but these two files.
static void expect_same_runs(const char *a, const char *b, const char *what) {
    const char *skip = "config.txt timing.csv"; // the one names the folder, the other holds times
    char *of_a = listing(a, skip), *of_b = listing(b, skip);
    cr_expect(strcmp(of_a, of_b) == 0, "%s: %s and %s differ:\n%s--\n%s", what, a, b, of_a, of_b);
    free(of_a);
    free(of_b);
}

// ----------------------------------------------------------------------------------------------------
// 1. Bad input. Each case must end with its status and exactly one line on stderr that holds all the words, and
//    must change nothing on disk.

enum {
    SEAL = 1,         // after the setup, the manifest is made to fit, so that what is wrong inside is found
    UNPRIVILEGED = 2, // run as another user, where the test itself is root
    LEAVES = 4,       // found in the middle of a run: may leave its folder, but no checkpoint in it
};

typedef struct Case {
    const char *what, *setup, *command, *words; // setup: for /bin/sh, with the functions below; words: joined by '|'
    int status, flags;
} Case;

// $S: a checkpoint. put FILE OFFSET BYTES: overwrite; cut FILE SIZE: shorten; edit FILE FROM TO: replace text.
#define PRELUDE "set -e; S=run/step_00000004; " \
    "put() { printf \"$3\" | dd of=\"$1\" bs=1 seek=\"$2\" conv=notrunc status=none; }; " \
    "cut() { head -c \"$2\" \"$1\" >cut.tmp; mv cut.tmp \"$1\"; }; " \
    "edit() { grep -aq \"$2\" \"$1\"; LC_ALL=C sed \"s/$2/$3/\" \"$1\" >edit.tmp; mv edit.tmp \"$1\"; }; "

static void seal(const char *checkpoint) {
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors"};
    char path[256];
    snprintf(path, sizeof path, "%s/manifest.txt", checkpoint);
    FILE *manifest = fopen(path, "wb");
    cr_assert(manifest);
    for (int i = 0; i < COUNT(files); i++) {
        size_t size = 0;
        snprintf(path, sizeof path, "%s/%s", checkpoint, files[i]);
        char *bytes = slurp(path, &size);
        if (bytes) { fprintf(manifest, "%08lx %zu %s\n", crc32(0, (const unsigned char *)bytes, (unsigned)size), size, files[i]); }
        free(bytes);
    }
    fclose(manifest);
}

static int holds_all(const char *text, const char *words) {
    for (const char *word = words; *word;) {
        size_t n = strcspn(word, "|");
        if (!memmem(text, strlen(text), word, n)) { return 0; }
        word += n + (word[n] == '|');
    }
    return 1;
}

static void check_case(const Case *c) {
    // messages of data/tokenizer.h begin with the name of the part at fault: "tokenizer: ", "shard: "
    const char *newline, *wrong = NULL, *program = strncmp(c->command, "train", 5) == 0 && !strstr(c->command, "--tokenizer") ? "train_gpt2: " : "";
    shell("chmod -R u+rwx case 2>/dev/null; rm -rf case && mkdir -m 777 case && cp *.bin case");
    if (strstr(c->command, "run") || (c->setup && strstr(c->setup, "run"))) { shell("cp -r run case/run"); }
    cr_assert(chdir("case") == 0);
    if (c->setup) { shell(PRELUDE "%s", c->setup); }
    if (c->flags & SEAL) { seal("run/step_00000004"); }
    char *before = listing(".", "program"), *after;
    const Result *r = run_limited(&(Limits){.unprivileged = c->flags & UNPRIVILEGED}, c->command);
    after = listing(".", "program");
    newline = strchr(r->err, '\n');
    if (c->flags & UNPRIVILEGED && r->status == CANNOT_LIMIT) { fprintf(stderr, "SKIPPED, can't become another user: %s\n", c->what); }
    else if (r->status != c->status) { wrong = "its status"; }
    else if (!newline || newline[1] || newline == r->err) { wrong = "the number of lines on stderr"; }
    else if (strncmp(r->err, program, strlen(program)) != 0) { wrong = "the program's name"; }
    else if (!holds_all(r->err, c->words)) { wrong = "the words of the message"; }
    else if (c->flags & LEAVES ? strstr(after, "/step_") != NULL : strcmp(before, after) != 0) { wrong = "what it left on disk"; }
    cr_expect(!wrong, "%s: %s\n  wrong: %s\n  expected status %d, one line of %s with %s\n  found status %d, \"%s\", files\n%s", c->what, c->command, wrong,
              c->status, program, c->words, r->status, r->err, after);
    free(before);
    free(after);
    cr_assert(chdir("..") == 0);
}

static void check_cases(const Case *cases, int count) {
    GOOD("train @ --out run"); // the checkpoint that cases damage, $S
    for (int i = 0; i < count; i++) { check_case(&cases[i]); }
}

Test(cli, bad_flags) {
    static const Case cases[] = {
        {"unknown flag", NULL, "train @ --frobnicate 1", "--frobnicate|--help", 2, 0},
        {"a typo", NULL, "train @ --warmpu 0.1", "--warmpu|nearest|--warmup", 2, 0},
        {"a hyphen forgotten", NULL, "train @ --seqlen 8", "--seqlen|--seq-len", 2, 0},
        {"British spelling", NULL, "train @ --optimiser muon", "--optimiser|--optimizer", 2, 0},
        {"a typo with =", NULL, "train @ --schedul=wsd", "--schedul,|--schedule", 2, 0},
        {"a very long flag", NULL, "train @ --aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1", "unknown flag", 2, 0},
        {"only hyphens", NULL, "train @ --", "unknown flag", 2, 0},
        {"positional argument", NULL, "train @ data.bin", "data.bin|--help", 2, 0},
        {"one hyphen", NULL, "train @ -lr 1", "-lr|--", 2, 0},
        {"empty argument", NULL, "train @ ''", "\"\"|--help", 2, 0},
        {"value forgotten at the end", NULL, "train @ --lr", "--lr|no value|learning rate", 2, 0},
        {"value forgotten before a flag", NULL, "train @ --lr --seed 3", "--lr|no value", 2, 0},
        {"given twice", NULL, "train @ --lr 1e-3 --lr 2e-3", "--lr|twice|once", 2, 0},
        {"given twice, spelt both ways", NULL, "train @ --lr=1e-3 --lr 1e-3", "--lr|twice", 2, 0},
        {"switch twice", NULL, "train @ --estimate --estimate", "--estimate|twice", 2, 0},
        {"a value to a switch", NULL, "train @ --estimate=on", "--estimate|\"on\"|none", 2, 0},
        {"another word after a switch", NULL, "train @ --estimate on", "\"on\"|expected a flag", 2, 0},

        {"too small", NULL, "train @ --layers 0", "--layers|\"0\"|1 to 1024", 2, 0},
        {"too large", NULL, "train @ --layers 1025", "--layers|\"1025\"|1 to 1024", 2, 0},
        {"channels too large", NULL, "train @ --channels 65537", "--channels|\"65537\"|65536", 2, 0},
        {"vocabulary too large for 16 bits", NULL, "train @ --vocab 65537", "--vocab|\"65537\"|65536", 2, 0},
        {"negative vocabulary", NULL, "train @ --vocab -1", "--vocab|\"-1\"", 2, 0},
        {"no heads", NULL, "train @ --heads 0", "--heads|\"0\"|1 to", 2, 0},
        {"fewer than no experts", NULL, "train @ --experts -1", "--experts|\"-1\"|0 to 1024", 2, 0},
        {"a fraction of an expert", NULL, "train @ --experts 2.5", "--experts|\"2.5\"|whole number", 2, 0},
        {"fewer than no top-k", NULL, "train @ --experts 4 --top-k -1", "--top-k|\"-1\"|0 to", 2, 0},
        {"a negative expert", NULL, "train @ --experts 4 --expert-hidden -1", "--expert-hidden|\"-1\"", 2, 0},
        {"a negative shared expert", NULL, "train @ --experts 4 --shared-hidden -2", "--shared-hidden|\"-2\"|-1 to", 2, 0},
        {"a negative balance loss", NULL, "train @ --experts 4 --balance-loss -0.1", "--balance-loss|\"-0.1\"|0 to", 2, 0},
        {"a z-loss that is no number", NULL, "train @ --experts 4 --router-z-loss nan", "--router-z-loss|\"nan\"|a number", 2, 0},
        {"a name near an option's", NULL, "train @ --expert 4", "--expert,|--experts", 2, 0},
        {"no batch", NULL, "train @ --batch 0", "--batch|\"0\"|1 to", 2, 0},
        {"no sequence", NULL, "train @ --seq-len 0", "--seq-len|\"0\"|1 to", 2, 0},
        {"no steps", NULL, "train @ --steps 0", "--steps|\"0\"|1 to", 2, 0},
        {"negative keep", NULL, "train @ --keep -1", "--keep|\"-1\"|0 to", 2, 0},
        {"negative seed", NULL, "train @ --seed -1", "--seed|\"-1\"|0 to", 2, 0},
        {"negative threads", NULL, "train @ --threads -1", "--threads|\"-1\"|0 to", 2, 0},
        {"negative rate", NULL, "train @ --lr -0.001", "--lr|\"-0.001\"|0 to", 2, 0},
        {"a rate above its range", NULL, "train @ --lr 101", "--lr|\"101\"|to 100", 2, 0},
        {"a share above 1", NULL, "train @ --warmup 1.5", "--warmup|\"1.5\"|0 to 1", 2, 0},
        {"beta of 1", NULL, "train @ --beta1 1", "--beta1|\"1\"|0.999999", 2, 0},
        {"eps of 0", NULL, "train @ --eps 0", "--eps|\"0\"", 2, 0},
        {"negative temperature", NULL, "train @ --temperature -1", "--temperature|\"-1\"", 2, 0},
        {"no validation batches", NULL, "train @ --val-batches 0", "--val-batches|\"0\"|1 to", 2, 0},
        {"norms without validation", NULL, "train @ --log-norms on", "--log-norms|no validation data|expected some", 2, 0},

        {"a word for a number", NULL, "train @ --lr abc", "--lr|\"abc\"|a number from", 2, 0},
        {"half an exponent", NULL, "train @ --lr 1e", "--lr|\"1e\"|a number", 2, 0},
        {"nothing", NULL, "train @ --lr ''", "--lr|\"\"|a number", 2, 0},
        {"nothing after =", NULL, "train @ --lr=", "--lr|\"\"|a number", 2, 0},
        {"nan", NULL, "train @ --lr nan", "--lr|\"nan\"|a number", 2, 0},
        {"inf", NULL, "train @ --grad-clip inf", "--grad-clip|\"inf\"|a number", 2, 0},
        {"half a hexadecimal number", NULL, "train @ --lr 0x", "--lr|\"0x\"|a number", 2, 0},
        {"something after the number", NULL, "train @ --lr 1e-3s", "--lr|\"1e-3s\"|a number", 2, 0},
        {"decimal comma", NULL, "train @ --lr 0,1", "--lr|\"0,1\"|a number", 2, 0},
        {"too large for a double", NULL, "train @ --grad-clip 1e999", "--grad-clip|\"1e999\"", 2, 0},
        {"auto where there is none", NULL, "train @ --lr auto", "--lr|\"auto\"|a number", 2, 0},
        {"a word near auto", NULL, "train @ --final-lr-frac automatic", "--final-lr-frac|\"automatic\"|or auto", 2, 0},
        {"a word for a whole number", NULL, "train @ --layers two", "--layers|\"two\"|whole number", 2, 0},
        {"a fraction for a whole number", NULL, "train @ --layers 1.5", "--layers|\"1.5\"|whole number", 2, 0},
        {"an exponent in a whole number", NULL, "train @ --steps 1e3", "--steps|\"1e3\"|whole number", 2, 0},
        {"nothing for a whole number", NULL, "train @ --layers ''", "--layers|\"\"|whole number", 2, 0},
        {"too large for 32 bits", NULL, "train @ --layers 4294967297", "--layers|\"4294967297\"|1024", 2, 0},
        {"too large for 64 bits", NULL, "train @ --steps 18446744073709551617", "--steps|\"18446744073709551617\"", 2, 0},

        {"unknown optimizer", NULL, "train @ --optimizer adam", "--optimizer|\"adam\"|adamw|muon|sgd", 2, 0},
        {"unknown schedule", NULL, "train @ --schedule step", "--schedule|\"step\"|cosine|wsd", 2, 0},
        {"yes for on", NULL, "train @ --hg yes", "--hg|\"yes\"|off|on", 2, 0},
        {"choices are in small letters", NULL, "train @ --reparam OR", "--reparam|\"OR\"|none|or|er", 2, 0},
        {"part of a choice", NULL, "train @ --optimizer adam", "--optimizer|\"adam\"", 2, 0},
        {"two choices", NULL, "train @ --reparam 'or|er'", "--reparam|\"or|er\"", 2, 0},
        {"empty choice", NULL, "train @ --norm-scale ''", "--norm-scale|\"\"|off|on", 2, 0},
        {"unknown placement", NULL, "train @ --placement sideways", "--placement|\"sideways\"|none|input|ap|dp|dnp", 2, 0},
        {"empty placement", NULL, "train @ --placement ''", "--placement|\"\"|dnp", 2, 0},
        {"placement at an unknown site", NULL, "train @ --placement q=dnp,w=dnp", "--placement|\"w=dnp\"|q k v o", 2, 0},
        {"placement at a site twice", NULL, "train @ --placement q=dnp,k=ap,q=ap", "--placement|\"q=ap\"|once", 2, 0},
        {"a site without a place", NULL, "train @ --placement q=,k=dnp", "--placement|\"q=\"|SITE=PLACE", 2, 0},
        {"a site alone", NULL, "train @ --placement q=dnp,k", "--placement|\"k\"|SITE=PLACE", 2, 0},
        {"a place alone", NULL, "train @ --placement =dnp", "--placement|\"=dnp\"", 2, 0},
        {"an empty item in the list", NULL, "train @ --placement q=dnp,,k=dnp", "--placement|\"\"", 2, 0},
        {"a comma at the end", NULL, "train @ --placement q=dnp,", "--placement|\"\"", 2, 0},
        {"unknown model", NULL, "train @ --model 7b", "--model|\"7b\"|tiny|0.12b|1b", 2, 0},
        {"unknown variant", NULL, "train @ --variant best", "--variant|\"best\"|baseline|unified", 2, 0},
        {"unknown part of a variant", NULL, "train @ --variant hg+best", "--variant|\"best\"|dnp", 2, 0},
        {"empty part of a variant", NULL, "train @ --variant hg++or", "--variant|\"\"|dnp", 2, 0},
    };
    check_cases(cases, COUNT(cases));
}

Test(cli, bad_combinations) {
    static const Case cases[] = {
        {"two lengths of a run", NULL, "train @ --steps 4 --tokens-per-param 1", "--steps|--tokens-per-param|both", 2, 0},
        {"no scales, heterogeneous", NULL, "train @ --norm-scale off --hg on", "--norm-scale off|--hg on|contradict", 2, 0},
        {"no scales, a rate of their own", NULL, "train @ --norm-scale off --scale-lr 3", "--norm-scale off|--scale-lr|contradict", 2, 0},
        {"no GPU at all", NULL, "train @ --gpus 0", "--gpus|\"0\"|1 to 1024, or all", 2, 0},
        {"a tokenizer that isn't there", NULL, "train @ --tokenizer nowhere.tiktoken", "--tokenizer nowhere.tiktoken|No such file", 1, 0},
        {"no scales, OR", NULL, "train @ --norm-scale off --reparam or", "--norm-scale off|--reparam|contradict", 2, 0},
        {"no scales, ER", NULL, "train @ --reparam er --norm-scale off", "--norm-scale off|--reparam|contradict", 2, 0},
        {"no scales, AP", NULL, "train @ --norm-scale off --placement ap", "--norm-scale off|--placement|contradict", 2, 0},
        {"no scales, DP at one site", NULL, "train @ --norm-scale off --placement v=dp", "--norm-scale off|--placement v=|contradict", 2, 0},
        {"no scales by a preset, HG by a flag", NULL, "train @ --variant noscale --hg on", "--norm-scale off|--hg on", 2, 0},
        {"presets noscale+hg", NULL, "train @ --variant noscale+hg", "--norm-scale off|--hg on", 2, 0},
        {"presets or+er", NULL, "train @ --variant or+er", "--variant|contradict|--reparam or|er", 2, 0},
        {"presets ap+dp", NULL, "train @ --variant ap+dp", "--variant|contradict|--placement|ap|dp", 2, 0},
        {"presets unified+er", NULL, "train @ --variant unified+er", "--variant|contradict|--reparam", 2, 0},
        {"a decay that the schedule lacks", NULL, "train @ --decay-frac 0.3", "--decay-frac|--schedule wsd", 2, 0},
        {"a decay that linear lacks", NULL, "train @ --schedule linear --decay-frac 0.3", "--decay-frac|linear|--schedule wsd", 2, 0},
        {"warm-up and decay overlap", NULL, "train @ --schedule wsd --warmup 0.6 --decay-frac 0.5", "--warmup 0.6|--decay-frac 0.5|at most 1", 2, 0},
        {"more chosen than there are", NULL, "train @ --experts 4 --top-k 5", "--top-k|found 5|at most|--experts 4", 2, 0},
        {"top-k without experts", NULL, "train @ --top-k 2", "--top-k|--experts|--sample-top-k", 2, 0},
        {"expert-hidden without experts", NULL, "train @ --expert-hidden 8", "--expert-hidden|--experts", 2, 0},
        {"shared-hidden without experts", NULL, "train @ --shared-hidden 8", "--shared-hidden|--experts", 2, 0},
        {"shared-hidden with no experts", NULL, "train @ --experts 0 --shared-hidden 8 --hidden 8", "--shared-hidden|--experts", 2, 0},
        {"hidden with experts", NULL, "train @ --experts 4 --hidden 24", "--hidden|--experts|--expert-hidden|--shared-hidden", 2, 0},
        {"hidden with a mixture preset", NULL, "train --model moe-0.25b --hidden 24 --data train_1.bin --val-data none --out out", "--hidden|--expert-hidden", 2, 0},
        {"more chosen than a preset has", NULL, "train --model moe-0.25b --top-k 33 --data train_1.bin --val-data none --out out", "--top-k|33|32", 2, 0},
        {"mixture without scales, AP", NULL, "train @ --experts 4 --norm-scale off --placement gate=ap", "--norm-scale off|--placement gate=|contradict", 2, 0},
        {"a mixture too large for any memory", NULL, "train @ --experts 1024 --layers 1024 --channels 65536 --heads 256 --expert-hidden 1048576", "GiB|machine|--estimate", 1, 0},
        {"heads do not divide channels", NULL, "train @ --channels 16 --heads 3", "--channels 16|--heads 3|multiple", 2, 0},
        {"kv-heads do not divide heads", NULL, "train @ --heads 4 --kv-heads 3", "--heads 4|--kv-heads 3|multiple", 2, 0},
        {"more kv-heads than heads", NULL, "train @ --heads 2 --kv-heads 4", "--heads 2|--kv-heads 4|multiple", 2, 0},
        {"odd head size", NULL, "train @ --channels 6 --heads 2", "--channels 6|--heads 2|head size of 3|even", 2, 0},
        {"head size too large", NULL, "train @ --channels 1024 --heads 2", "head size of 512|256", 2, 0},
        {"total-batch not a multiple", NULL, "train @ --batch 2 --total-batch 3", "--total-batch 3|--batch 2|multiple", 2, 0},
        {"total-batch below batch", NULL, "train @ --batch 4 --total-batch 2", "--total-batch 2|--batch 4|multiple", 2, 0},
        {"vocabulary below the data's", NULL, "train @ --vocab 63", "--vocab|found 63|at least the 64|train_1.bin", 2, 0},
        {"a sample of no model", NULL, "train @ --sample 5", "--sample|--resume", 2, 0},
        {"too large for any memory", NULL, "train @ --layers 1024 --channels 65536 --heads 256 --hidden 1048576", "GiB|machine|--estimate", 1, 0},
        {"a momentum that AdamW lacks", NULL, "train @ --muon-momentum 0.9", "--muon-momentum|--optimizer adamw|expected muon", 2, 0},
        {"SGD's momentum with Muon", NULL, "train @ --optimizer muon --sgd-momentum 0.9", "--sgd-momentum|--optimizer muon", 2, 0},
        {"a beta that SGD lacks", NULL, "train @ --optimizer sgd --beta1 0.8", "--beta1|--optimizer sgd", 2, 0},
        {"temperature without samples", NULL, "train @ --temperature 1", "--temperature|--sample-every", 2, 0},
        {"sample-top-k without samples", NULL, "train @ --sample-top-k 5", "--sample-top-k|--sample-every", 2, 0},
        {"a stop beyond the end", NULL, "train @ --steps 3 --stop-at 4", "--stop-at|found 4|at most|3 steps", 2, 0},
        {"a stop without training", NULL, "train @ --estimate --stop-at 2", "--stop-at|--estimate|found both", 2, 0},
        {"samples of an estimate", NULL, "train @ --estimate --sample-every 2", "--sample-every|--estimate|found both", 2, 0},
        {"a last rate of a constant one", NULL, "train @ --schedule constant --final-lr-frac 0.5", "--final-lr-frac|--schedule constant", 2, 0},
        {"empty --import", NULL, "train @ --import ''", "--import|\"\"|hf DIR", 2, 0},
        {"empty --export", NULL, "train @ --export ''", "--export|\"\"|hf DIR", 2, 0},
        {"empty --tokenizer", NULL, "train @ --tokenizer ''", "--tokenizer|\"\"|bytes", 2, 0},
        {"empty --model", NULL, "train @ --model ''", "--model|\"\"|tiny", 2, 0},
        {"empty --variant", NULL, "train @ --variant ''", "--variant|\"\"|unified", 2, 0},
        {"empty --out", NULL, "train @ --out ''", "--out|folder", 2, 0},
        {"empty --resume", NULL, "train @ --resume ''", "--resume|run", 2, 0},
        {"empty --data", NULL, "train @ --data ''", "--data|\"\"|shards", 2, 0},
        {"empty --val-data", NULL, "train @ --val-data ''", "--val-data|\"\"|shards", 2, 0},
    };
    check_cases(cases, COUNT(cases));
}

Test(cli, bad_data) {
    static const Case cases[] = { // a header: magic, version, tokens, vocabulary, each an int32; tokens from byte 1024
        {"missing file", NULL, "train @ --data none.bin", "--data none.bin|No such file|shard", 1, 0},
        {"missing validation file", NULL, "train @ --val-data none.bin", "--val-data none.bin|No such file|shard", 1, 0},
        {"a glob of nothing", NULL, "train @ --data nothing_*.bin", "nothing_*.bin|No such file|shard", 1, 0},
        {"missing file in a list", NULL, "train @ --data train_1.bin,none.bin", "none.bin|No such file", 1, 0},
        {"empty item in a list", NULL, "train @ --data train_1.bin,,train_2.bin", "--data|train_1.bin,,train_2.bin|shard", 2, 0},
        {"comma at the end of a list", NULL, "train @ --data train_1.bin,", "--data|train_1.bin,|shard", 2, 0},
        {"empty file", ": >train_2.bin", "train @", "train_2.bin|found 0 bytes|1024", 1, 0},
        {"half a header", "cut train_2.bin 512", "train @", "train_2.bin|found 512 bytes|1024", 1, 0},
        {"wrong magic number", "put train_2.bin 0 '\\001'", "train @", "train_2.bin|magic|expected 20240520", 1, 0},
        {"wrong version", "put train_2.bin 4 '\\002'", "train @", "train_2.bin|version 2|expected 1", 1, 0},
        {"truncated by a token", "cut train_2.bin 1576", "train @", "train_2.bin|found 1576 bytes|expected 1578|277 tokens", 1, 0},
        {"truncated by a byte", "cut train_2.bin 1577", "train @", "train_2.bin|found 1577 bytes|expected 1578", 1, 0},
        {"longer than its header says", "printf xx >>train_2.bin", "train @", "train_2.bin|found 1580 bytes|expected 1578", 1, 0},
        {"negative number of tokens", "put train_2.bin 8 '\\377\\377\\377\\377'", "train @", "train_2.bin|-1 tokens", 1, 0},
        {"number of tokens past 31 bits", "put train_2.bin 11 '\\177'", "train @", "train_2.bin|found 1578 bytes|tokens", 1, 0},
        {"vocabulary of a header above 16 bits", "put train_2.bin 14 '\\002'", "train @", "train_2.bin|vocabulary size 131136|65536", 1, 0},
        {"negative vocabulary in a header", "put train_2.bin 12 '\\377\\377\\377\\377'", "train @", "train_2.bin|vocabulary size -1", 1, 0},
        {"a token beyond the vocabulary", "put train_1.bin 1024 '\\377\\000'", "train @ --data train_1.bin --batch 18", "train_1.bin|token 255|place 0|64", 1, LEAVES},
        {"the same, no vocabulary in the header", "put train_1.bin 12 '\\000'; put train_1.bin 1026 '\\100\\000'", "train @ --data train_1.bin --batch 18", "train_1.bin|token 64|place 1|64", 1, LEAVES},
        {"shorter than a sequence", NULL, "train @ --data train_3.bin --seq-len 150", "train_3.bin|found 150 tokens|--seq-len + 1 = 151", 1, 0},
        {"no tokens at all", "cut train_3.bin 1024; put train_3.bin 8 '\\000\\000'", "train @ --data train_3.bin", "train_3.bin|found 0 tokens|17", 1, 0},
        {"a folder", "mkdir shards", "train @ --data shards", "shards|directory|shard", 1, 0},
        {"a named pipe", "mkfifo pipe.bin", "train @ --data pipe.bin", "pipe.bin|shard", 1, 0},
        {"a text file", "for i in 1 2 3 4 5 6 7 8 9; do cat /dev/null; printf '%0200d' 7 >>text.bin; done", "train @ --data text.bin", "text.bin|magic|20240520", 1, 0},
        {"a file that may not be read", "chmod 000 train_2.bin", "train @", "train_2.bin|Permission denied", 1, UNPRIVILEGED},

        {"validation: missing", NULL, "train @ --val-data none.bin", "none.bin|No such file", 1, 0},
        {"validation: a glob of nothing", NULL, "train @ --val-data v*.none", "v*.none|No such file", 1, 0},
        {"validation: a folder", "mkdir shards", "train @ --val-data shards", "shards|directory", 1, 0},
        {"validation: wrong magic number", "put val.bin 0 '\\001'", "train @ --val-data val.bin", "val.bin|magic|20240520", 1, 0},
        {"validation: truncated", "cut val.bin 1100", "train @ --val-data val.bin", "val.bin|found 1100 bytes|expected 1424", 1, 0},
        {"validation: shorter than a sequence", NULL, "train @ --val-data val.bin --seq-len 200", "--val-data|val.bin|found 200 tokens|201", 1, 0},
        {"validation: a larger vocabulary", "put val.bin 12 '\\200'", "train @ --val-data val.bin", "--val-data|128|64", 2, 0},
        {"validation: a token beyond the vocabulary", "put val.bin 1024 '\\100\\000'", "train @ --val-data val.bin --val-every 1", "val.bin|token 64|place 0|64", 1, LEAVES},
        {"validation: empty item in a list", NULL, "train @ --val-data val.bin,,val.bin", "--val-data|val.bin,,val.bin", 2, 0},
    };
    check_cases(cases, COUNT(cases));
}

Test(cli, bad_checkpoint) {
#define RESUME "train --resume run --steps 8"
    static const Case cases[] = {
        {"no such folder", NULL, "train --resume none", "--resume none|No such file|run", 1, 0},
        {"a file", NULL, "train --resume train_1.bin", "--resume train_1.bin|file|folder", 1, 0},
        {"an empty folder", "mkdir empty", "train --resume empty", "--resume empty|no complete checkpoint|step_", 1, 0},
        {"only half a checkpoint", "mkdir half; mv run/step_00000004 half/step_00000004.tmp", "train --resume half", "--resume half|no complete checkpoint", 1, 0},
        {"another step", NULL, "train --resume run/step_00000003", "run/step_00000003|No such file", 1, 0},
        {"manifest missing", "rm $S/manifest.txt", RESUME, "run/step_00000004/manifest.txt|No such file|complete", 1, 0},
        {"manifest empty", ": >$S/manifest.txt", RESUME, "manifest.txt|no line for model.safetensors", 1, 0},
        {"manifest cut in its first line", "cut $S/manifest.txt 12", RESUME, "manifest.txt|no line for model.safetensors", 1, 0},
        {"manifest of junk", "head -c 4000 /dev/zero >$S/manifest.txt", RESUME, "manifest.txt|no line for model.safetensors", 1, 0},
        {"manifest without the optimizer", "head -n 1 $S/manifest.txt >m; mv m $S/manifest.txt", RESUME, "manifest.txt|no line for optimizer.safetensors", 1, 0},
        {"another CRC in the manifest", "put $S/manifest.txt 0 00000000", RESUME, "model.safetensors|CRC-32|expected 00000000", 1, 0},
        {"another size in the manifest", "edit $S/manifest.txt '\\(........\\) ' '\\1 1'", RESUME, "model.safetensors|bytes|damaged", 1, 0},
        {"model missing", "rm $S/model.safetensors", RESUME, "model.safetensors|No such file", 1, 0},
        {"optimizer missing", "rm $S/optimizer.safetensors", RESUME, "optimizer.safetensors|No such file", 1, 0},
        {"model truncated to nothing", ": >$S/model.safetensors", RESUME, "model.safetensors|found 0 bytes|damaged", 1, 0},
        {"model truncated to 4 bytes", "cut $S/model.safetensors 4", RESUME, "model.safetensors|found 4 bytes|damaged", 1, 0},
        {"model truncated to 8 bytes", "cut $S/model.safetensors 8", RESUME, "model.safetensors|found 8 bytes", 1, 0},
        {"model without half its header", "cut $S/model.safetensors 1000", RESUME, "model.safetensors|found 1000 bytes", 1, 0},
        {"model without half its values", "cut $S/model.safetensors 12000", RESUME, "model.safetensors|found 12000 bytes", 1, 0},
        {"model without its last byte", "cut $S/model.safetensors $(($(wc -c <$S/model.safetensors) - 1))", RESUME, "model.safetensors|bytes|damaged", 1, 0},
        {"a byte added to the model", "printf x >>$S/model.safetensors", RESUME, "model.safetensors|bytes|damaged", 1, 0},
        {"a flipped byte in the header", "put $S/model.safetensors 300 '\\001'", RESUME, "model.safetensors|CRC-32|damaged|older checkpoint", 1, 0},
        {"a flipped byte in the values", "put $S/model.safetensors 12000 '\\125\\252'", RESUME, "model.safetensors|CRC-32|damaged", 1, 0},
        {"a flipped byte in the optimizer", "put $S/optimizer.safetensors 12000 '\\125\\252'", RESUME, "optimizer.safetensors|CRC-32|damaged", 1, 0},
        {"optimizer truncated", "cut $S/optimizer.safetensors 12000", RESUME, "optimizer.safetensors|found 12000 bytes|damaged", 1, 0},

        {"sealed: an empty model", ": >$S/model.safetensors", RESUME, "model.safetensors|found 0 bytes|safetensors", 1, SEAL},
        {"sealed: 4 bytes", "cut $S/model.safetensors 4", RESUME, "model.safetensors|found 4 bytes|safetensors", 1, SEAL},
        {"sealed: 8 bytes", "cut $S/model.safetensors 8", RESUME, "model.safetensors|found 8 bytes|safetensors", 1, SEAL},
        {"sealed: half a header", "cut $S/model.safetensors 1000", RESUME, "model.safetensors|header of|1000", 1, SEAL},
        {"sealed: half the values", "cut $S/model.safetensors 12000", RESUME, "model.safetensors|tensor|bytes", 1, SEAL},
        {"sealed: last byte missing", "cut $S/model.safetensors $(($(wc -c <$S/model.safetensors) - 1))", RESUME, "model.safetensors|head.gamma_b|bytes", 1, SEAL},
        {"sealed: optimizer without its last byte", "cut $S/optimizer.safetensors $(($(wc -c <$S/optimizer.safetensors) - 1))", RESUME, "optimizer.safetensors|head.gamma_b.v|bytes", 1, SEAL},
        {"sealed: a huge header", "put $S/model.safetensors 0 '\\377\\377\\377\\377\\377\\377\\377\\377'", RESUME, "model.safetensors|header of 18446744073709551615 bytes", 1, SEAL},
        {"sealed: a header of nothing", "put $S/model.safetensors 0 '\\000\\000'", RESUME, "model.safetensors|not JSON", 1, SEAL},
        {"sealed: JSON broken", "put $S/model.safetensors 8 '['", RESUME, "model.safetensors|not JSON", 1, SEAL},
        {"sealed: a shard as the model", "cp train_1.bin $S/model.safetensors", RESUME, "model.safetensors|safetensors file", 1, SEAL},
        {"sealed: the optimizer as the model", "cp $S/optimizer.safetensors $S/model.safetensors", RESUME, "model.safetensors|scale-vector-gpt 1", 1, SEAL},
        {"sealed: the model as the optimizer", "cp $S/model.safetensors $S/optimizer.safetensors", RESUME, "optimizer.safetensors|no tensor embedding.weight.m", 1, SEAL},
        {"sealed: another format", "edit $S/model.safetensors 'gpt 1' 'gpt 9'", RESUME, "model.safetensors|scale-vector-gpt 9|scale-vector-gpt 1", 1, SEAL},
        {"sealed: an option missing", "edit $S/model.safetensors option.layers option.lagers", RESUME, "model.safetensors|option.layers|metadata", 1, SEAL},
        {"sealed: an option out of its range", "edit $S/model.safetensors 'option.layers\":\"1' 'option.layers\":\"0'", RESUME, "model.safetensors|option.layers|\"0\"|1 to 1024", 1, SEAL},
        {"sealed: options of another model", "edit $S/model.safetensors 'option.layers\":\"1' 'option.layers\":\"2'", RESUME, "model.safetensors|no tensor layers.1.q.weight", 1, SEAL},
        {"sealed: a step below 0", "edit $S/model.safetensors '\"step\":\"4' '\"step\":\"-'", RESUME, "model.safetensors|step", 1, SEAL},
        {"sealed: another type", "edit $S/model.safetensors F32 F16", RESUME, "model.safetensors|embedding.weight|F32", 1, SEAL},
        {"sealed: another shape", "edit $S/model.safetensors '\\[64,16\\]' '[32,16]'", RESUME, "model.safetensors|embedding.weight|(64, 16)", 1, SEAL},
        {"sealed: values before the file", "edit $S/model.safetensors '\\[0,4096\\]' '[-1,409]'", RESUME, "model.safetensors|embedding.weight|bytes -1 to 409", 1, SEAL},

        {"other layers", NULL, RESUME " --layers 2", "--layers|found 2|expected 1|run/step_00000004", 2, 0},
        {"other channels", NULL, RESUME " --channels 32", "--channels|found 32|expected 16", 2, 0},
        {"another variant", NULL, RESUME " --variant unified", "found|expected|run/step_00000004|resume", 2, 0},
        {"another model", NULL, RESUME " --model tiny", "found|expected|run/step_00000004", 2, 0},
        {"another seed", NULL, RESUME " --seed 2", "--seed|found 2|expected 1", 2, 0},
        {"another sequence length", NULL, RESUME " --seq-len 8", "--seq-len|found 8|expected 16", 2, 0},
        {"another optimizer", NULL, RESUME " --optimizer muon", "--optimizer|found muon|expected adamw", 2, 0},
        {"another vocabulary", NULL, RESUME " --vocab 128", "--vocab|found 128|expected 64", 2, 0},
        {"data changed", "put train_2.bin 1030 '\\001\\000\\002\\000'", RESUME, "--data|train_2.bin|other tokens|run/step_00000004", 1, 0},
        {"data in another order", NULL, RESUME " --data train_2.bin,train_1.bin,train_3.bin", "--data|other tokens|run/step_00000004", 1, 0},
        {"fewer shards", NULL, RESUME " --data train_1.bin", "--data|other tokens", 1, 0},
        {"a shard that is gone", "rm train_2.bin", RESUME, "train_2.bin|No such file", 1, 0},
    };
    check_cases(cases, COUNT(cases));
}

Test(cli, bad_output_and_samples) {
#define SAMPLE "train --resume run --sample 5"
    static const Case cases[] = {
        {"--out names a file", NULL, "train @ --out train_1.bin", "--out|train_1.bin|Not a directory", 1, 0},
        {"--out below a file", NULL, "train @ --out train_1.bin/run", "--out|train_1.bin|Not a directory", 1, 0},
        {"--out in a closed folder", "mkdir closed; chmod 555 closed", "train @ --out closed/run", "--out|closed/run|Permission denied", 1, UNPRIVILEGED},
        {"--out is a closed folder", "mkdir closed; chmod 555 closed", "train @ --out closed", "--out|closed|Permission denied", 1, UNPRIVILEGED},
        {"--out has a name too long", NULL, "train @ --out aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "--out|too long", 1, 0},
        {"--out holds an earlier run", NULL, "train @ --out run", "--out run|earlier run|--resume run", 1, 0},
        {"resuming into another run", "cp -r run other", "train --resume run --steps 8 --out other", "--out other|earlier run", 1, 0},
        {"resuming where nothing may be written", "chmod 555 run run/step_00000004", "train --resume run --steps 8", "run|Permission denied", 1, UNPRIVILEGED},

        {"samples without a tokenizer", NULL, SAMPLE, "--tokenizer|.tiktoken", 1, 0},
        {"samples in training without a tokenizer", NULL, "train @ --sample-every 2", "--tokenizer|.tiktoken", 1, 0},
        {"tokenizer missing", NULL, SAMPLE " --tokenizer none.tiktoken", "none.tiktoken|No such file", 1, 0},
        {"tokenizer a folder", "mkdir ranks", SAMPLE " --tokenizer ranks", "ranks|directory", 1, 0},
        {"tokenizer empty", ": >ranks", SAMPLE " --tokenizer ranks", "ranks|0 lines|expected", 1, 0},
        {"tokenizer of words", "echo hello >ranks", SAMPLE " --tokenizer ranks", "ranks:1|hello|base64", 1, 0},
        {"tokenizer of bad base64", "echo 'Y? 0' >ranks", SAMPLE " --tokenizer ranks", "ranks:1|base64", 1, 0},
        {"tokenizer with a rank twice", "printf 'YQ== 0\\nYg== 0\\n' >ranks", SAMPLE " --tokenizer ranks", "ranks:2|rank|once", 1, 0},
        {"tokenizer with a token twice", "printf 'YQ== 0\\nYQ== 1\\n' >ranks", SAMPLE " --tokenizer ranks", "ranks:2|once", 1, 0},
        {"tokenizer with a rank too large", "printf 'YQ== 7\\n' >ranks", SAMPLE " --tokenizer ranks", "ranks:1|7|0 to 0", 1, 0},
        {"tokenizer larger than the model", "i=0; while [ $i -lt 64 ]; do printf 'a%03d' $i | base64 | tr '\\n' ' ' >>ranks; echo $i >>ranks; i=$((i+1)); done", SAMPLE " --tokenizer ranks", "--tokenizer|64|vocabulary", 1, 0},
        {"a prompt that the ranks lack", "printf 'YQ== 0\\n' >ranks", SAMPLE " --tokenizer ranks --prompt ab", "ranks|0x62", 1, 0},
        {"a prompt beyond the model's vocabulary", NULL, SAMPLE " --tokenizer bytes --prompt z", "--prompt|122|64", 1, 0},
        {"a sample of a damaged model", "put $S/model.safetensors 12000 '\\125\\252'", SAMPLE " --tokenizer bytes", "model.safetensors|CRC-32", 1, 0},
    };
    check_cases(cases, COUNT(cases));
}

Test(cli, bad_input_of_the_data_programs) {
    static const Case cases[] = {
        {"tokenize: nothing", NULL, "tokenize", "--ranks|--bytes", 2, 0},
        {"tokenize: no input", NULL, "tokenize --bytes --out shards", "INPUT", 2, 0},
        {"tokenize: unknown flag", NULL, "tokenize --byte --out shards a.txt", "--byte|--bytes", 2, 0},
        {"tokenize: both vocabularies", NULL, "tokenize --bytes --ranks r --out shards a.txt", "--bytes|--ranks", 2, 0},
        {"tokenize: a word for a number", "echo hello >a.txt", "tokenize --bytes --out shards --shard-tokens many a.txt", "--shard-tokens|many|whole number", 2, 0},
        {"tokenize: unknown suffix", "echo hello >a.doc", "tokenize --bytes --out shards a.doc", "a.doc|.txt|.jsonl", 2, 0},
        {"tokenize: missing input", NULL, "tokenize --bytes --out shards none.txt", "none.txt|No such file", 1, 0},
        {"tokenize: --out names a file", "echo hello >a.txt", "tokenize --bytes --out train_1.bin a.txt", "train_1.bin", 1, 0},
        {"tokenize: not JSON", "echo hello >a.jsonl; mkdir shards", "tokenize --bytes --val-tokens 0 --out shards a.jsonl", "a.jsonl:1|JSON", 1, 0},
        {"tokenize: missing ranks", "echo hello >a.txt", "tokenize --ranks none --out shards a.txt", "none|No such file", 1, 0},
        {"tokenize: decoding what is no shard", "printf '%0999d' 1 >a.bin", "tokenize --bytes --decode a.bin", "a.bin|1024", 1, 0},
        {"synth: unknown flag", NULL, "synth --token 100", "--token|--tokens", 2, 0},
        {"synth: a word for a number", NULL, "synth --out shards --tokens many", "--tokens|many|whole number", 2, 0},
        {"synth: value forgotten", NULL, "synth --out", "--out|DIR", 2, 0},
        {"synth: no shards", NULL, "synth --out shards --shards 0", "--shards|\"0\"", 2, 0},
        {"synth: vocabulary too small", NULL, "synth --out shards --vocab 2", "--vocab|found 2|at least", 2, 0},
        {"synth: --out names a file", NULL, "synth --out train_1.bin --tokens 1000 --val-tokens 100", "train_1.bin", 1, 0},
        {"synth: --out in a closed folder", "mkdir closed; chmod 555 closed", "synth --out closed/shards --tokens 1000 --val-tokens 100", "closed/shards|Permission denied", 1, UNPRIVILEGED},
    };
    check_cases(cases, COUNT(cases));
}

// A full disk, by a limit on the size of files: each limit hits another file.
Test(cli, full_disk) {
    static const struct { const char *what, *words; rlim_t bytes; int save_every; } cases[] = {
        {"the configuration", "config.txt|File too large", 100, 1},
        {"the metrics", "metrics.csv|File too large", 1500, 0},
        {"the model", "model.safetensors|File too large", 10000, 1},
        {"the optimizer", "optimizer.safetensors|File too large", 30000, 1},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        shell("rm -rf new run && mkdir new");
        GOOD("train @ --out run");
        char *before = listing("run/step_00000004", NULL);
        Limits limits = {.file_size = cases[i].bytes};
        for (int resume = 0; resume < 2; resume++) {
            char command[128];
            snprintf(command, sizeof command, "train %s --steps 80 --save-every %d", resume ? "--resume run" : "@ --out new", cases[i].save_every);
            const Result *r = run_limited(&limits, command);
#ifdef __clang__ // LLVM's OpenMP keeps a mapped file of its own, and the smallest limit stops it before the program begins
            if (cases[i].bytes < 1024 && (r->status == -SIGBUS || strncmp(r->err, "OMP: ", 5) == 0)) {
                printf("SKIPPED: full disk, %s: the limit stops the OpenMP library before the program\n", cases[i].what);
                continue;
            }
#endif
            cr_expect(r->status == 1, "%s: found status %d, expected 1", cases[i].what, r->status);
            cr_expect(holds_all(r->err, cases[i].words), "%s: found \"%s\", expected %s", cases[i].what, r->err, cases[i].words);
            cr_expect(strchr(r->err, '\n') == r->err + strlen(r->err) - 1, "%s: found \"%s\", expected one line", cases[i].what, r->err);
            char *left = listing(resume ? "run" : "new", NULL), *step = strstr(left, "step_");
            cr_expect(resume ? step && !strstr(left, "step_00000005") : !step, "%s: a piece of a checkpoint is left:\n%s", cases[i].what, left);
            free(left);
        }
        char *after = listing("run/step_00000004", NULL);
        cr_expect_str_eq(after, before, "%s: the earlier checkpoint changed", cases[i].what);
        free(before);
        free(after);
        GOOD("train --resume run --steps 8"); // with room again, the run goes on
    }
}

// Output that can't be written is an error, not a success.
Test(cli, full_standard_output) {
    static const char *const commands[] = {"train --help", "train --model 0.12b --estimate", "train --resume run --sample 5 --tokenizer bytes", "synth --help", "tokenize --help"};
    GOOD("train @ --out run");
    if (!exists("/dev/full")) { cr_skip_test("no /dev/full here"); }
    for (int i = 0; i < COUNT(commands); i++) {
        const Result *r = run_limited(&(Limits){.stdout_path = "/dev/full"}, commands[i]);
        cr_expect(r->status == 1 && strstr(r->err, "No space left"), "%s: found status %d, \"%s\", expected 1 and a reason", commands[i], r->status, r->err);
    }
}

// What a failing run advises must work: a folder without a checkpoint can't be resumed.
Test(cli, a_run_without_a_checkpoint_is_no_dead_end) {
    GOOD("train @ --out run");
    shell("rm -r run/step_00000004");
    const Result *r = run("train @ --out run");
    cr_expect(r->status == 0 || !strstr(r->err, "--resume"), "found advice that can't be followed: %s", r->err);
}

// ----------------------------------------------------------------------------------------------------
// 2. Good input

static const char *const all_flags =
    "model layers channels heads kv-heads hidden seq-len vocab tie-embeddings qk-norm post-norm experts top-k expert-hidden shared-hidden balance-loss router-z-loss variant norm-scale hg placement reparam wd-scale "
    "optimizer lr schedule warmup decay-frac final-lr-frac scale-lr weight-decay beta1 beta2 eps muon-momentum sgd-momentum grad-clip batch total-batch steps "
    "tokens-per-param seed data val-data tokenizer out resume save-every keep val-every val-batches log-norms sample-every sample prompt temperature sample-top-k export import stop-at "
    "threads estimate help";

Test(cli, help_lists_every_option) {
    char flags[2048], *save = NULL;
    const char *help = GOOD("train --help");
    snprintf(flags, sizeof flags, "%s", all_flags);
    for (char *flag = strtok_r(flags, " ", &save); flag; flag = strtok_r(NULL, " ", &save)) {
        char line[64];
        snprintf(line, sizeof line, "\n  --%s ", flag);
        cr_expect(strstr(help, line), "--help doesn't list --%s", flag);
    }
    cr_expect(strstr(help, "unified") && strstr(help, "0.12b"), "--help doesn't list the presets");
    char *text = strdup(help);
    GOOD("train @"); // config.txt names every option with a value: none may be missing from the help
    char *config = slurp("out/config.txt", NULL);
    cr_assert(config);
    for (char *line = strtok_r(config, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char wanted[80];
        snprintf(wanted, sizeof wanted, "\n  %.*s ", (int)strcspn(line, " "), line);
        cr_expect(strstr(text, wanted), "config.txt has %s, --help doesn't", wanted);
    }
    free(text);
    free(config);
    cr_expect(strstr(GOOD("train --help --lr 1"), "usage:"), "--help with other flags");
    GOOD("tokenize --help");
    GOOD("synth --help");
}

// The counts that the README compares with the paper's, without memory for the model.
Test(cli, estimate_counts_without_allocating) {
    static const struct { const char *flags; const char *lines; } cases[] = {
        {"--model 0.12b", " 119744256 |"},
        {"--model 0.12b --variant unified", " 119846846 |"},
        {"--model 1b", " 1028065024 |scale vectors: 80640 "},
        {"--variant unified --model=0.12b --vocab=50304", " 119846846 |"},
        {"--model moe-0.25b", " 251044480 | 113633920 |4 of 32 experts"},
        {"--model moe-0.5b", " 480942336 | 183671040 "},
        {"--model moe-0.8b", " 797327040 | 281231040 "},
        {"--model moe-1b", " 1058931712 | 354976768 "},
        {"--model moe-2b", " 1996574720 | 620856320 "},
    };
    Limits limits = {.memory = 300 << 20};
    if (run_limited(&limits, "train --help")->status != 0) { // AddressSanitizer maps terabytes
        fprintf(stderr, "estimate: the program doesn't start in 300 MB, not even for --help: counts are checked without the limit\n");
        limits.memory = 0;
    }
    for (int i = 0; i < COUNT(cases); i++) {
        char command[256];
        snprintf(command, sizeof command, "train %s --estimate", cases[i].flags);
        const Result *r = run_limited(&limits, command);
        cr_expect(r->status == 0 && !r->err[0], "%s: status %d, %s", command, r->status, r->err);
        cr_expect(holds_all(r->out, cases[i].lines), "%s: found\n%sexpected %s", command, r->out, cases[i].lines);
    }
    cr_expect(!exists("runs"), "--estimate made the folder of a run");
    if (limits.memory) {
        const Result *r = run_limited(&limits, "train @ --layers 2 --channels 4096 --heads 32");
        cr_expect(r->status == 1 && strstr(r->err, "GiB") && !exists("out"), "not enough memory: status %d, %s", r->status, r->err);
    }
}

Test(cli, both_spellings_and_any_order_mean_the_same) {
    GOOD("train @ --lr 0.01 --variant hg+dnp --hidden 20 --out a");
    GOOD("train @ --variant=hg+dnp --lr=1e-2 --out b --hidden=20");
    GOOD("train @ --placement dnp --out=c --hidden=20 --lr=.01 --hg=on");
    expect_same_runs("a", "b", "--name=value");
    expect_same_runs("a", "c", "a preset and its flags");
    GOOD("train @ --hidden 20 --variant unified --reparam none --wd-scale all --out d --lr 0.01"); // a flag wins, before or after
    expect_same_runs("a", "d", "a flag over a preset");
    GOOD("train @ --seed 2 --out e --hidden 20 --hg on --placement dnp --lr 0.01");
    char *a = listing("a", NULL), *e = listing("e", NULL);
    cr_expect(strcmp(a, e) != 0, "another seed gave the same run");
    free(a);
    free(e);
}

// Every variant, some combinations, every optimizer with every schedule: three steps with finite losses.
Test(cli, every_variant_optimizer_and_schedule_trains) {
    static const char *const variants[] = {
        "--variant noscale", "--variant baseline", "--variant hg", "--variant ap", "--variant dp", "--variant dnp", "--variant or", "--variant er",
        "--variant iwd", "--variant unified", "--variant hg+dp+or", "--variant dnp+er+iwd", "--variant hg+ap", "--norm-scale off --placement dnp",
        "--placement q=dnp,o=dp,down=ap,head=dnp", "--placement none", "--qk-norm on --post-norm on", "--qk-norm on --variant unified",
        "--tie-embeddings on --variant hg+dp", "--heads 4 --kv-heads 2", "--wd-scale none", "--wd-scale output --variant dnp", "--total-batch 6",
        "--seq-len 1 --batch 1", "--vocab 0 --hidden 0", "--grad-clip 0", "--warmup 0", "--warmup 1",
        "--experts 4", "--experts 4 --top-k 1 --variant unified --optimizer muon", "--experts 3 --top-k 2 --shared-hidden 0 --variant hg+dp+or --post-norm on",
        "--experts 1 --top-k 1 --shared-hidden 0 --optimizer sgd", "--experts 64 --top-k 8 --expert-hidden 1 --variant dnp+er --router-z-loss 0.01",
    };
    static const char *const optimizers[] = {"adamw", "muon", "sgd", "sgd --sgd-momentum 0.9"};
    static const char *const schedules[] = {"cosine", "wsd", "linear", "constant"};
    char flags[COUNT(variants) + COUNT(optimizers) * COUNT(schedules)][128];
    int count = 0;
    for (int i = 0; i < COUNT(variants); i++) { snprintf(flags[count++], 128, "%s", variants[i]); }
    for (int i = 0; i < COUNT(optimizers) * COUNT(schedules); i++) {
        snprintf(flags[count++], 128, "--optimizer %s --schedule %s", optimizers[i / COUNT(schedules)], schedules[i % COUNT(schedules)]);
    }
    for (int i = 0; i < count; i++) {
        const Result *r = run("train @ --steps 3 --out %d %s", i, flags[i]);
        cr_expect(r->status == 0 && !r->err[0], "%s: status %d, %s", flags[i], r->status, r->err);
        char path[64];
        snprintf(path, sizeof path, "%d/metrics.csv", i);
        char *rows = slurp(path, NULL), *last = rows ? strstr(rows, "\n3,") : NULL;
        double loss = 0;
        cr_expect(last && sscanf(last, "\n3,%*d,%*g,%lf", &loss) == 1 && loss > 1 && loss < 20, "%s: found a loss of %g", flags[i], loss);
        free(rows);
    }
}

// ----------------------------------------------------------------------------------------------------
// 3. Resuming

// One run in one go and one in two halves must leave the same bytes.
Test(cli, halves_make_the_whole) {
    static const struct { const char *what, *flags; } cases[] = {
        {"AdamW", ""},
        {"Muon", "--optimizer muon --lr 0.01"},
        {"unified with AdamW", "--variant unified"},
        {"unified with Muon, two layers", "--variant unified --optimizer muon --layers 2"},
        {"ER, DP, HG", "--variant er+dp+hg"},
        {"plain SGD", "--optimizer sgd --lr 0.1"},
        {"SGD with momentum", "--optimizer sgd --lr 0.05 --sgd-momentum 0.9"},
        {"gradient accumulation", "--total-batch 6"},
        {"gradient accumulation with Muon", "--total-batch 4 --optimizer muon --variant unified"},
        {"WSD", "--schedule wsd --decay-frac 0.7"},
        {"tied embeddings, grouped heads", "--tie-embeddings on --heads 4 --kv-heads 2"},
        {"validation", "--val-data val.bin --val-every 7"},
        {"mixture of experts with AdamW", "--experts 4 --top-k 2 --val-data val.bin --val-every 7"},
        {"mixture of experts with Muon, unified", "--experts 4 --top-k 2 --variant unified --optimizer muon --layers 2 --router-z-loss 0.01"},
        {"mixture of experts, no shared one, accumulation", "--experts 5 --top-k 1 --shared-hidden 0 --balance-loss 0.3 --total-batch 6 --post-norm on"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        shell("rm -rf whole halves");
        GOOD("train @ --steps 40 --save-every 20 --out whole %s", cases[i].flags);
        GOOD("train @ --steps 40 --save-every 20 --stop-at 20 --out halves %s", cases[i].flags);
        GOOD("train --resume halves"); // no flag need be said again
        expect_same_runs("whole", "halves", cases[i].what);
    }
}

Test(cli, any_number_of_threads_gives_the_same_bits) {
#ifndef _OPENMP // as the program, which is built with the same flags
    cr_skip_test("SKIPPED: built without OpenMP, so there is one thread only");
#endif
    static const char *const models[] = {"--variant unified", "--variant unified --experts 4 --top-k 2 --channels 32"};
    for (int i = 0; i < COUNT(models); i++) {
        shell("rm -rf whole halves");
        GOOD("train @ --steps 40 --save-every 20 --out whole %s --threads 1", models[i]);
        GOOD("train @ --steps 40 --save-every 20 --stop-at 20 --out halves %s --threads 3", models[i]);
        GOOD("train --resume halves --threads 2");
        expect_same_runs("whole", "halves", models[i]);
    }
}

// The shape of a mixture belongs to the weights; the weights of its losses may change.
Test(cli, a_mixture_keeps_its_shape) {
    GOOD("train @ --experts 4 --top-k 2 --stop-at 2 --out run");
    static const char *const shape[] = {"--experts 5", "--top-k 3", "--expert-hidden 9", "--shared-hidden 0", "--experts 0"};
    for (int i = 0; i < COUNT(shape); i++) {
        const Result *r = run("train --resume run %s", shape[i]);
        cr_expect(r->status == 2 && holds_all(r->err, "--|checkpoint"), "%s: status %d, %s", shape[i], r->status, r->err);
    }
    GOOD("train --resume run --balance-loss 0.5 --router-z-loss 0.1");
    char *config = slurp("run/config.txt", NULL);
    cr_expect(config && holds_all(config, "--experts 4\n|--top-k 2\n|--balance-loss 0.5\n|--router-z-loss 0.1\n"), "%s", config);
    free(config);
}

Test(cli, length_by_tokens_is_kept) {
    // without "@", which names --steps
    GOOD("train --data train_1.bin,train_2.bin --val-data none --layers 1 --channels 16 --heads 2 --hidden 24 --seq-len 16 --vocab 64 --batch 2 "
         "--tokens-per-param 0.3 --out run --stop-at 5");
    GOOD("train --resume run");
    cr_expect(exists("run/step_00000040"), "4224 parameters beside scale vectors and 32 tokens a step: expected 40 steps");
}

// Every way to name a run, and a run that has come to its end.
Test(cli, resume_finds_the_run) {
    GOOD("train @ --steps 6 --stop-at 2 --out run");
    GOOD("train --resume run/ --stop-at 3");
    GOOD("train --resume ./run/step_00000003 --stop-at 4");
    GOOD("train --resume run/step_00000004/ --stop-at 5");
    cr_assert(chdir("run") == 0);
    shell("cp ../train_*.bin ."); // the data's names are relative to where the program runs
    GOOD("train --resume step_00000005");
    cr_expect(exists("step_00000006"), "a checkpoint named from inside its run");
    cr_expect(strstr(GOOD("train --resume ."), "nothing to do"), "a finished run has something to do");
    cr_assert(chdir("..") == 0);
    GOOD("train --resume run --steps 8"); // a longer run
    GOOD("train @ --steps 8 --out whole");
    cr_expect(exists("run/step_00000008"));
}

// The folder of a list is that of its first file: validation shards are looked for there.
Test(cli, a_list_in_a_folder) {
    shell("mkdir -p d/e && cp train_1.bin train_2.bin d && cp train_2.bin d/val_1.bin && cp train_2.bin d/e/train_3.bin");
    const char *out = GOOD("train @ --data d/train_1.bin,d/e/train_3.bin --val-data auto --steps 2 --val-every 2 --out run");
    cr_expect(!strstr(out, "validation: none"), "no validation beside a list: %s", out);
    out = GOOD("train @ --data d/val_1.bin,d/train_1.bin --val-data auto --steps 2 --out other");
    cr_expect(strstr(out, "validation: none"), "a name of the second file was taken for the first's: %s", out);
}

// The names of a thousand shards must come back whole from a checkpoint.
Test(cli, a_long_list_of_shards_is_kept) {
    char *list = calloc(1 << 16, 1);
    for (int i = 0; i < 300; i++) { sprintf(list + strlen(list), "%strain_1.bin,./train_2.bin", i ? "," : ""); }
    GOOD("train @ --out run --stop-at 2 --data %s", list);
    const Result *r = run("train --resume run");
    cr_expect(r->status == 0, "status %d: %s", r->status, r->err);
    free(list);
}

// From an older checkpoint, with newer ones in the way: they belong to steps that are done anew.
Test(cli, resume_from_an_older_checkpoint) {
    GOOD("train @ --steps 20 --save-every 5 --keep 0 --out whole");
    shell("cp -r whole again");
    const Result *r = run("train --resume again/step_00000005 --save-every 5 --keep 0");
    cr_expect(r->status == 0, "status %d: %s", r->status, r->err);
    expect_same_runs("whole", "again", "the same steps once more");
    shell("rm -rf again && cp -r whole again");
    r = run("train --resume again/step_00000010 --stop-at 12 --keep 2");
    cr_expect(r->status == 0, "status %d: %s", r->status, r->err);
    cr_expect(exists("again/step_00000012/manifest.txt"), "the checkpoint just saved is gone");
    cr_expect(strstr(GOOD("train --resume again --stop-at 13"), "at step 12"), "the newest checkpoint is not the one just saved");
}

// Into another folder: the old run stays as it is.
Test(cli, resume_into_another_folder) {
    GOOD("train @ --steps 8 --stop-at 4 --out old");
    char *before = listing("old", NULL), *after;
    const Result *r = run("train --resume old --out new/branch");
    cr_expect(r->status == 0, "status %d: %s", r->status, r->err);
    cr_expect(exists("new/branch/step_00000008"));
    after = listing("old", NULL);
    cr_expect_str_eq(after, before, "the old run changed");
    free(before);
    free(after);
}

// What numbers a run computes with belongs to the run: a GPU's fp32 mustn't turn into bf16 where nobody said so.
Test(cli, precision_lasts_across_a_resume) {
    GOOD("train @ --steps 4 --stop-at 2 --precision fp32 --out run");
    GOOD("train --resume run");
    shell("grep -qx -e '--precision fp32' run/config.txt");
}

Test(cli, keep_keeps_the_newest) {
    for (int keep = 0; keep <= 3; keep++) {
        GOOD("train @ --steps 7 --save-every 1 --keep %d --out %d", keep, keep);
        for (int step = 1; step <= 7; step++) {
            char path[64];
            snprintf(path, sizeof path, "%d/step_%08d", keep, step);
            cr_expect(exists(path) == (keep == 0 || step > 7 - keep), "--keep %d: step %d", keep, step);
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// 4. Kills and signals

static void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)(fmod(ms, 1000) * 1e6)};
    nanosleep(&t, NULL);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static pid_t start_quietly(const char *command) {
    int null = open("/dev/null", O_WRONLY);
    pid_t child = start(command, &(Limits){0}, null, STDERR_FILENO);
    close(null);
    return child;
}

// Killed at random moments, the run must always go on from a whole checkpoint and end with the same bytes.
Test(cli, kill_at_any_moment) {
    enum { KILLS = 50 };
    GOOD("train @ --steps 120 --out whole --variant unified --save-every 1");
    GOOD("train @ --steps 120 --stop-at 1 --save-every 1 --out run --variant unified");
    double begin = now_ms(), most; // a kill comes within the time of a start and a few steps, however fast the machine is
    GOOD("train --resume run --stop-at 2");
    most = fmin(30 + 2 * (now_ms() - begin), 300);
    srand(1);
    for (int kills = 0, rounds = 0; kills < KILLS; rounds++) {
        cr_assert(rounds < KILLS, "runs end before they can be killed");
        shell("rm -rf run");
        GOOD("train @ --steps 120 --stop-at 1 --save-every 1 --out run --variant unified");
        for (int ended = 0; !ended && kills < KILLS;) {
            // only up to step 110: after a kill at the very end, with the last step saved, nothing would tidy up any more
            pid_t child = start_quietly("train --resume run --stop-at 110");
            sleep_ms(most * rand() / RAND_MAX);
            kill(child, SIGKILL);
            int status = wait_for(child);
            cr_assert(status == 0 || status == -SIGKILL, "after %d kills: status %d", kills, status);
            kills += status == -SIGKILL;
            ended = status == 0;
        }
        GOOD("train --resume run");
        expect_same_runs("whole", "run", "after kills");
    }
}

// Waits until a file has more than `bytes` bytes, 10 seconds at most.
static void wait_for_bytes(const char *path, long long bytes) {
    struct stat info;
    for (int i = 0; i < 20000; i++) {
        if (stat(path, &info) == 0 && info.st_size > bytes) { return; }
        sleep_ms(0.5);
    }
    cr_assert_fail("%s: did not grow beyond %lld bytes", path, bytes);
}

// Starts a long run, signals it once it is under way and returns the step that it says it has saved.
static long long signal_run(const char *command, int number) {
    static char out[32768];
    int fds[2];
    long long step = -1;
    cr_assert(pipe(fds) == 0);
    pid_t child = start(command, &(Limits){0}, fds[1], STDERR_FILENO);
    close(fds[1]);
    wait_for_bytes("run/metrics.csv", 400);
    kill(child, number);
    read_all(fds[0], out, sizeof out);
    int status = wait_for(child);
    cr_assert(status == 0, "signal %d: found status %d, expected 0: %s", number, status, out);
    const char *line = strstr(out, "stopped by a signal");
    cr_assert(line && sscanf(line, "stopped by a signal, saved at step %lld", &step) == 1, "signal %d: found \"%s\"", number, out);
    return step;
}

Test(cli, a_signal_saves_and_ends) {
    static const int signals[] = {SIGTERM, SIGINT};
    GOOD("train @ --steps 6000 --keep 1 --out whole --variant unified");
    for (int i = 0; i < COUNT(signals); i++) {
        char path[64];
        shell("rm -rf run");
        long long step = signal_run("train @ --steps 6000 --keep 1 --out run --variant unified", signals[i]);
        cr_assert(step > 0 && step < 6000, "stopped at step %lld of 6000", step);
        snprintf(path, sizeof path, "run/step_%08lld", step);
        cr_assert(exists(path), "%s is missing", path);
        GOOD("train --resume run");
        expect_same_runs("whole", "run", "after a signal");
    }
}

// A second run in the folder of one at work is refused, and the first goes on unharmed.
Test(cli, one_run_in_a_folder) {
    pid_t first = start_quietly("train @ --steps 1000000 --out run");
    wait_for_bytes("run/metrics.csv", 400);
    const Result *r = run("train --resume run");
    cr_expect(r->status == 1, "while a run is at work: found status %d", r->status);
    r = run("train @ --out run");
    cr_expect(r->status == 1 && strstr(r->err, "another run"), "found status %d, \"%s\"", r->status, r->err);
    kill(first, SIGTERM);
    int status = wait_for(first);
    cr_expect(status == 0, "the first run: found status %d", status);
}

// In the middle of a printed sample, too: the step that is said to be saved must be there.
Test(cli, a_signal_while_sampling_saves) {
    for (int i = 0; i < 5; i++) {
        char path[64];
        shell("rm -rf run");
        long long step = signal_run("train @ --steps 6000 --out run --sample-every 1 --tokenizer bytes", SIGTERM);
        snprintf(path, sizeof path, "run/step_%08lld/manifest.txt", step);
        cr_expect(exists(path), "%s is missing, though the program says that it is saved", path);
    }
}

// ----------------------------------------------------------------------------------------------------
// 5. Numbers that are not finite

Test(cli, a_loss_that_is_not_finite_stops) {
    const char *wild = "train @ --optimizer sgd --schedule constant --warmup 0 --lr 100 --grad-clip 0 --steps 200";
    const Result *r = run("%s --out a", wild);
    cr_expect(r->status == 1 && holds_all(r->err, "loss|at step |finite|last good checkpoint|none"), "status %d: %s", r->status, r->err);
    char *left = listing("a", NULL), path[4096];
    cr_expect(!strstr(left, "step_"), "found a checkpoint after a loss that is not finite:\n%s", left);
    free(left);
    r = run("%s --out b --save-every 1 --keep 1", wild);
    const char *name = strstr(r->err, "last good checkpoint is ");
    cr_assert(r->status == 1 && name, "status %d: %s", r->status, r->err);
    cr_assert(sscanf(name, "last good checkpoint is %4000s", path) == 1);
    cr_expect(exists(path), "%s, which the message names, isn't there: %s", path, r->err);
    long long step = 0, saved = 0;
    cr_expect(sscanf(strstr(r->err, "at step "), "at step %lld", &step) == 1 && sscanf(path, "b/step_%lld", &saved) == 1 && saved == step - 1,
              "stopped at step %lld, last checkpoint %s", step, path);
}

// ----------------------------------------------------------------------------------------------------
// 6. Logs and the terminal

// Rows of a log must have `commas` commas and the steps 1, 2, ... up to `steps`.
static void check_csv(const char *path, const char *header, int commas, int steps) {
    char *text = slurp(path, NULL), *save = NULL;
    cr_assert(text, "%s is missing", path);
    cr_expect(strncmp(text, header, strlen(header)) == 0, "%s: found the header %.60s", path, text);
    cr_expect(text[strlen(text) - 1] == '\n', "%s: the last line has no end", path);
    int rows = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), rows++) {
        int found = 0;
        for (const char *c = line; *c; c++) { found += *c == ','; }
        cr_expect(found == commas && (rows == 0 || atoi(line) == rows), "%s: row %d: %s", path, rows, line);
    }
    cr_expect(rows == steps + 1, "%s: found %d rows, expected %d", path, rows - 1, steps);
    free(text);
}
static void check_logs(const char *run_folder, int steps) {
    char path[256];
    snprintf(path, sizeof path, "%s/metrics.csv", run_folder);
    check_csv(path, "step,tokens,lr,train_loss,val_loss,grad_norm\n", 5, steps);
    snprintf(path, sizeof path, "%s/timing.csv", run_folder);
    check_csv(path, "step,ms,tokens_per_second\n", 2, steps);
}

Test(cli, logs_have_a_row_for_each_step) {
    GOOD("train @ --steps 12 --stop-at 7 --val-data val.bin --val-every 5 --out run");
    check_logs("run", 7);
    GOOD("train --resume run --save-every 2 --keep 0");
    check_logs("run", 12);
    GOOD("train --resume run/step_00000008 --stop-at 9 --out run --keep 0"); // rows of steps that are done anew are dropped
    check_logs("run", 9);
    shell("printf '10,320,0.0' >>run/metrics.csv; printf '10,' >>run/timing.csv"); // what a power cut can leave
    GOOD("train --resume run/step_00000009 --stop-at 10 --out run --keep 0");
    check_logs("run", 10);
    char *text = slurp("run/metrics.csv", NULL), *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        int step = atoi(line), empty = strstr(line, ",,") != NULL, tokens = -1;
        if (step == 0) { continue; }
        cr_expect(empty == (step % 5 != 0), "the validation loss of step %d: %s", step, line);
        cr_expect(sscanf(line, "%*d,%d", &tokens) == 1 && tokens == 32 * step, "tokens at step %d: %s", step, line);
    }
    free(text);
    char *config = slurp("run/config.txt", NULL);
    cr_expect(config && strstr(config, "--layers 1\n") && strstr(config, "--lr 0.004\n"), "config.txt: %s", config);
    free(config);
}

// A mixture's columns: the losses of its routers, the largest load, and the tokens of each expert, of which no more and
// no fewer than K a token and layer.
Test(cli, logs_of_a_mixture) {
    GOOD("train @ --layers 2 --experts 4 --top-k 3 --total-batch 6 --steps 6 --stop-at 4 --val-data val.bin --val-every 2 --out run");
    GOOD("train --resume run");
    check_csv("run/metrics.csv", "step,tokens,lr,train_loss,val_loss,grad_norm,balance_loss,router_z_loss,max_load,expert_0,expert_1,expert_2,expert_3\n", 12, 6);
    char *text = slurp("run/metrics.csv", NULL), *save = NULL;
    strtok_r(text, "\n", &save);
    for (char *line; (line = strtok_r(NULL, "\n", &save));) {
        double balance, z, load;
        int e[4];
        const char *at = line;
        for (int commas = 0; commas < 6; at++) { commas += *at == ','; }
        cr_assert(sscanf(at, "%lf,%lf,%lf,%d,%d,%d,%d", &balance, &z, &load, &e[0], &e[1], &e[2], &e[3]) == 7, "%s", line);
        cr_expect(e[0] + e[1] + e[2] + e[3] == 6 * 16 * 3 * 2, "tokens of the experts: %s", line); // sequences, length, K, layers
        double most = 0;
        for (int i = 0; i < 4; i++) { most = e[i] > most ? e[i] : most; }
        cr_expect(load >= most / (6 * 16 * 3 * 2 / 4.0) - 1e-3 && load >= 1 && load <= 4 / 3.0 + 1e-3, "the largest load: %s", line);
        cr_expect(balance > 1 && balance < 4 && z > 2 * 1.5 && z < 2 * 3, "losses of two layers: %s", line); // near 2 and 2 ln(4)^2 = 3.8
    }
    free(text);
    const char *out = GOOD("train @ --experts 4 --top-k 3 --estimate");
    cr_expect(holds_all(out, "router|active|3 of 4 experts"), "%s", out);
    GOOD("train @ --out dense");
    check_logs("dense", 4); // without experts the log has none of it
}

Test(cli, quiet_where_no_one_watches) {
    const char *out = GOOD("train @ --steps 20");
    cr_expect(!strchr(out, '\r') && !strchr(out, '\033') && !strstr(out, "step 1"), "found a progress line: %s", out);
    out = GOOD("train @ --steps 20 --val-data val.bin --val-every 10 --out validated");
    cr_expect(!strchr(out, '\r') && !strchr(out, '\033'), "found a line for terminals: %s", out);
    cr_expect(strstr(out, "step 10/20 ") && strstr(out, "step 20/20 ") && !strstr(out, "step 11/20"), "expected a line for each validation: %s", out);
}

Test(cli, progress_on_a_terminal) {
    static char out[32768];
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        cr_skip_test("SKIPPED: this system has no pseudo-terminals (/dev/pts)");
    }
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    cr_assert(terminal >= 0);
    pid_t child = start("train @ --steps 5", &(Limits){0}, terminal, STDERR_FILENO);
    close(terminal);
    read_all(master, out, sizeof out); // ends when the child does
    cr_assert(wait_for(child) == 0);
    for (int step = 1; step <= 5; step++) {
        char line[32];
        snprintf(line, sizeof line, "step %d/5 ", step);
        const char *found = strstr(out, line);
        cr_assert(found, "no progress line for step %d: %s", step, out);
        const char *begin = found;
        while (begin > out && begin[-1] != '\r') { begin--; }
        cr_expect(begin > out && found - begin <= 8, "step %d doesn't begin with a carriage return", step);
        cr_expect(strstr(found, "loss ") && strstr(found, "tok/s") && strstr(found, "ETA "), "step %d: %s", step, found);
    }
}

// ----------------------------------------------------------------------------------------------------
// 7. Samples

static char *sample(const char *flags) { return strdup(GOOD("train --resume run %s", flags)); }

// Two samples must be the same, or must not.
static void compare_samples(int same, const char *a, const char *b) {
    char *of_a = sample(a), *of_b = sample(b);
    cr_expect((strcmp(of_a, of_b) == 0) == same, "%s samples: \"%s\" and \"%s\":\n%s--\n%s", same ? "other" : "the same", a, b, of_a, of_b);
    free(of_a);
    free(of_b);
}

static void check_samples(const char *prompt) {
    char flags[256];
    char *text = sample("--sample 40");
    cr_expect(strlen(text) >= 20 && text[strlen(text) - 1] == '\n', "a sample of 40 tokens: \"%s\"", text);
    free(text);
    snprintf(flags, sizeof flags, "--sample 10 --prompt '%s'", prompt);
    text = sample(flags);
    cr_expect(strncmp(text, prompt, strlen(prompt)) == 0 && strlen(text) > strlen(prompt) + 1, "the prompt \"%s\" isn't said first: \"%s\"", prompt, text);
    free(text);
    compare_samples(1, "--sample 40", "--sample 40");
    compare_samples(1, "--sample 40 --temperature 0", "--sample 40 --temperature 0");
    compare_samples(1, "--sample 40 --sample-top-k 1 --temperature 2", "--sample 40 --temperature 0");
    compare_samples(0, "--sample 40 --temperature 2", "--sample 40 --temperature 0");
    compare_samples(1, "--sample 40 --sample-top-k 60000", "--sample 40 --sample-top-k 0");
}

Test(cli, samples_of_bytes) {
    write_shard("bytes.bin", 5, 500, 256);
    GOOD("train @ --data bytes.bin --vocab 256 --out run");
    char *before = listing("run", NULL), *after;
    check_samples("Once upon");
    after = listing("run", NULL);
    cr_expect_str_eq(after, before, "sampling changed the run");
    free(before);
    free(after);
    const char *out = GOOD("train @ --data bytes.bin --vocab 256 --out another --sample-every 2");
    const char *first = strstr(out, "sample: ");
    cr_expect(first && strstr(first + 1, "sample: "), "--sample-every 2 of 4 steps printed %s", out);
}

Test(cli, samples_with_a_rank_file) {
    FILE *ranks = fopen("ab.tiktoken", "wb"); // a to z, the space and two pairs; found beside the data
    cr_assert(ranks);
    for (int i = 0; i < 27; i++) {
        static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        int byte = i < 26 ? 'a' + i : ' ';
        fprintf(ranks, "%c%c== %d\n", digits[byte >> 2], digits[(byte & 3) << 4], i);
    }
    fprintf(ranks, "dGg= 27\nYW4= 28\n"); // th, an
    fclose(ranks);
    write_shard("words.bin", 5, 500, 30);
    GOOD("train @ --data words.bin --vocab 30 --out run");
    check_samples("the man");
    char *text = sample("--sample 200");
    cr_expect(strspn(text, "abcdefghijklmnopqrstuvwxyz \n") == strlen(text), "found text that no token has: %s", text);
    free(text);
}

// A model gives more than one sample.
Test(cli, another_seed_gives_another_sample) {
    GOOD("train @ --out run");
    const Result *r = run("train --resume run --sample 40 --tokenizer bytes --seed 2");
    cr_expect(r->status == 0, "status %d: %s", r->status, r->err);
    if (r->status == 0) { compare_samples(0, "--sample 40 --tokenizer bytes --seed 2", "--sample 40 --tokenizer bytes --seed 3"); }
}

// ----------------------------------------------------------------------------------------------------
// 8. The data programs feed the trainer

Test(cli, from_text_to_samples) {
    shell("i=0; while [ $i -lt 60 ]; do echo \"It was a day like day $i, and the sun shone.\" >>a.txt; i=$((i+1)); done");
    GOOD("tokenize --bytes --val-tokens 300 --out corpus a.txt");
    const char *out = GOOD("train @ --data corpus/tokens_train_*.bin --val-data auto --vocab 0 --out run --steps 6");
    cr_expect(strstr(out, "--vocab 256 ") && strstr(out, "val "), "found %s", out);
    cr_expect(!strncmp(GOOD("train --resume run --sample 8 --prompt It"), "It", 2));
    GOOD("synth --out stories --tokens 3000 --val-tokens 500");
    GOOD("train @ --data stories/synth_train_*.bin --val-data auto --vocab 0 --out tale --steps 3");
    GOOD("train --resume tale --sample 8");
}
