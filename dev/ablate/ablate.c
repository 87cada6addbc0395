// ablate.c: the ablation laboratory. Trains every row of an experiment file with every seed, and compares.
//
//     build/ablate dev/ablate/small/steps.exp
//
// An experiment file is a list of lines; # begins a comment:
//     title: TEXT                what the table is called
//     base: FLAGS                flags of train_gpt2 that all runs have; several such lines add up
//     seeds: 1 2 3 4 5
//     row NAME: FLAGS            one variant; its flags win over those of base
//     row NAME vs OTHER: FLAGS   the same, and also compared with the row OTHER
//     baseline: NAME             what rows are compared with; the first row if nothing else is said
//     sweep FLAG: VALUE...       every row at every value of this flag
//     setting NAME: FLAGS        the same for several flags at a time: a line a setting
//     curves: NAME...            rows drawn in figures of curves; the first seven if nothing else is said
//     law: FLOOR                 fit loss = FLOOR + A N^-a over the settings, N parameters that a token uses; "free": fit FLOOR too
//     keep: on                   keep the checkpoints of finished runs
//
// All rows run with seed 1, then all with seed 2, and so on: what disturbs the machine for a while disturbs all rows alike.
// Rows with the same seed start from the same matrices and see the same data, so their differences are taken in pairs.
// Kill it at any time: the same command goes on. Runs that are finished are not run again.
//
//   1 small things  2 statistics  3 the experiment file  4 runs  5 the scheduler  6 results  7 tables  8 figures  9 main
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

// ----------------------------------------------------------------------------------------------------
// 1. Small things. Exit status 2: the command line or the experiment file is wrong; 1: anything else.

__attribute__((noreturn, format(printf, 2, 3)))
static void fail(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "ablate: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(status);
}
#define FAIL(format, ...)  fail(1, format " (%s:%d)", __VA_ARGS__, __FILE__, __LINE__)
#define USAGE(...) fail(2, __VA_ARGS__)

static void *get_memory(void *old, size_t size) {
    void *memory = realloc(old, size ? size : 1);
    if (!memory) { FAIL("out of memory: %zu bytes", size); }
    return memory;
}

__attribute__((format(printf, 1, 2)))
static char *text_format(const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0) { FAIL("out of memory for %s", format); }
    va_end(args);
    return text;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void make_dirs(const char *path) {
    char *copy = text_format("%s", path);
    for (char *at = copy + 1;; at++) {
        if (*at != '/' && *at != '\0') { continue; }
        char end = *at;
        *at = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST) { FAIL("%s: cannot make this folder: %s", copy, strerror(errno)); }
        if (!end) { break; }
        *at = end;
    }
    free(copy);
}

static int exists(const char *dir, const char *name) {
    char *path = text_format("%s/%s", dir, name);
    int found = access(path, F_OK) == 0;
    free(path);
    return found;
}

// The whole of a file, or NULL where there is none.
static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        if (errno == ENOENT) { return NULL; }
        FAIL("%s: cannot open: %s", path, strerror(errno));
    }
    size_t size = 0, room = 4096, n;
    char *text = get_memory(NULL, room + 1);
    while ((n = fread(text + size, 1, room - size, file)) > 0) {
        size += n;
        if (size == room) { text = get_memory(text, (room *= 2) + 1); }
    }
    if (ferror(file)) { FAIL("%s: cannot read: %s", path, strerror(errno)); }
    fclose(file);
    text[size] = '\0';
    return text;
}

// Whole or absent, whenever the program is killed.
static void write_file(const char *path, const char *text) {
    char *part = text_format("%s.tmp", path);
    FILE *file = fopen(part, "wb");
    if (!file || fputs(text, file) < 0 || fflush(file) != 0 || fsync(fileno(file)) != 0 || fclose(file) != 0 || rename(part, path) != 0) {
        FAIL("%s: cannot write: %s", path, strerror(errno));
    }
    free(part);
}

static char *memory_stream_text; // what the last memory stream was closed with
static size_t memory_stream_size;
static FILE *open_text(void) {
    FILE *file = open_memstream(&memory_stream_text, &memory_stream_size);
    if (!file) { FAIL("out of memory: %s", strerror(errno)); }
    return file;
}
static char *close_text(FILE *file) {
    if (fclose(file) != 0) { FAIL("out of memory: %s", strerror(errno)); }
    return memory_stream_text;
}

static void format_duration(double s, char *out, size_t size) {
    long t = s > 0 ? (long)(s + 0.5) : 0;
    if (t < 3600) { snprintf(out, size, "%ld:%02ld", t / 60, t % 60); }
    else { snprintf(out, size, "%ld:%02ld:%02ld", t / 3600, t / 60 % 60, t % 60); }
}

// ----------------------------------------------------------------------------------------------------
// 2. Statistics. A handful of seeds: Student's t, and pairs.

// c * P(0 < T < sqrt(df) tan(angle)) = integral of cos^(df-1) from 0 to angle, by Simpson's rule
static double t_integral(int df, double angle) {
    const int parts = 2000;
    double sum = 0;
    for (int i = 0; i <= parts; i++) {
        sum += (i == 0 || i == parts ? 1 : i % 2 ? 4 : 2) * pow(cos(angle * i / parts), df - 1);
    }
    return sum * angle / parts / 3;
}

// The t that Student's distribution of df degrees of freedom exceeds, either side, with probability 5%.
static double t_quantile(int df) {
    if (df < 1) { return NAN; }
    double all = t_integral(df, M_PI / 2), low = 0, high = M_PI / 2;
    for (int i = 0; i < 60; i++) {
        double middle = (low + high) / 2;
        if (t_integral(df, middle) < 0.95 * all) { low = middle; } else { high = middle; }
    }
    return sqrt(df) * tan(low);
}

typedef struct Summary { int n; double mean, se, low, high; } Summary; // se and the 95% interval: NAN of one value

static Summary summarize(const double *x, int n) {
    Summary s = {n, 0, NAN, NAN, NAN};
    double squares = 0;
    for (int i = 0; i < n; i++) { s.mean += x[i] / n; }
    for (int i = 0; i < n; i++) { squares += (x[i] - s.mean) * (x[i] - s.mean); }
    if (n < 2) { return s; }
    s.se = sqrt(squares / (n - 1) / n);
    s.low = s.mean - t_quantile(n - 1) * s.se;
    s.high = s.mean + t_quantile(n - 1) * s.se;
    return s;
}

static int compare_doubles(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }
static double quantile(double *x, int n, double share) { // sorts x
    if (n == 0) { return NAN; }
    qsort(x, (size_t)n, sizeof(double), compare_doubles);
    double at = share * (n - 1), rest = at - floor(at);
    int i = (int)at;
    return x[i] + (i + 1 < n ? rest * (x[i + 1] - x[i]) : 0);
}

// Where a curve that mostly falls first reaches `loss`: linear between its points; NAN if it never does.
static double tokens_to_reach(const double *tokens, const double *losses, int n, double loss) {
    for (int i = 0; i < n; i++) {
        if (losses[i] > loss) { continue; }
        if (i == 0) { return tokens[0]; }
        return tokens[i - 1] + (tokens[i] - tokens[i - 1]) * (losses[i - 1] - loss) / (losses[i - 1] - losses[i]);
    }
    return NAN;
}

// loss = floor + A N^-a: a straight line of ln(loss - floor) over ln N, by least squares. Returns its squared error.
typedef struct Law { double floor, factor, power; } Law;
static double law_line(const double *n, const double *loss, int count, double floor, Law *law) {
    double x = 0, y = 0, xx = 0, xy = 0, error = 0;
    for (int i = 0; i < count; i++) {
        double lx = log(n[i]), ly = log(loss[i] - floor);
        x += lx / count; y += ly / count; xx += lx * lx / count; xy += lx * ly / count;
    }
    double slope = (xy - x * y) / (xx - x * x);
    *law = (Law){floor, exp(y - slope * x), -slope};
    for (int i = 0; i < count; i++) {
        double off = log(loss[i] - floor) - (y + slope * (log(n[i]) - x));
        error += off * off;
    }
    return error;
}

static Law law_fit(const double *n, const double *loss, int count, double floor) {
    Law best = {NAN, NAN, NAN}, law;
    if (!isnan(floor)) { law_line(n, loss, count, floor, &best); return best; }
    double least = loss[0], error = INFINITY;
    for (int i = 1; i < count; i++) { if (loss[i] < least) { least = loss[i]; } }
    for (int i = 0; i < 1000; i++) { // every thousandth of the least loss
        double e = law_line(n, loss, count, least * i / 1000, &law);
        if (e < error) { error = e; best = law; }
    }
    return best;
}

// ----------------------------------------------------------------------------------------------------
// 3. The experiment file

#define MAX_FLAGS 80
typedef struct Flags { int count; char *name[MAX_FLAGS], *value[MAX_FLAGS]; } Flags;
typedef struct Row { char *name, *versus; int line, reference; Flags flags; } Row;     // reference: index of versus, or -1
typedef struct Setting { char *name; int line; Flags flags; } Setting;

typedef struct Experiment {
    const char *path;
    char *title, *baseline_name, *swept; // swept: the flag of sweep, or NULL
    Flags base;
    int64_t *seeds;
    Row *rows;
    Setting *settings;                 // at least one; a file without sweep and settings has one without a name
    int num_seeds, num_rows, num_settings, baseline, law, keep;
    double floor;                      // of the law; NAN: to be fitted
    int *curves, num_curves;
    char *curve_names;
    int curve_line, baseline_line;
} Experiment;

static const char *const own_flags[] = {"seed", "threads", "out", "resume", "log-norms", "estimate", "help", "sample", "export", "import", "stop-at"};

static int flag_index(const Flags *flags, const char *name) {
    for (int i = 0; i < flags->count; i++) { if (strcmp(flags->name[i], name) == 0) { return i; } }
    return -1;
}

// Sets one flag; a later value wins.
static void flag_set(Flags *flags, const char *name, const char *value) {
    int i = flag_index(flags, name);
    if (i < 0) {
        if (flags->count == MAX_FLAGS) { USAGE("found more than %d flags in one run, expected fewer", MAX_FLAGS); }
        i = flags->count++;
        flags->name[i] = text_format("%s", name);
    }
    flags->value[i] = text_format("%s", value);
}

// Reads "--name value --name=value ...".
static void flags_parse(Flags *flags, const char *text, const char *path, int line) {
    char *copy = text_format("%s", text), *save = NULL;
    for (char *word = strtok_r(copy, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
        if (strncmp(word, "--", 2) != 0) { USAGE("%s:%d: found \"%s\", expected a flag of train_gpt2 that begins with --", path, line, word); }
        char *name = word + 2, *value = strchr(name, '=');
        if (value) { *value++ = '\0'; }
        else { value = strtok_r(NULL, " \t", &save); }
        if (!value || strncmp(value, "--", 2) == 0) { USAGE("%s:%d: found --%s without a value, expected --%s VALUE", path, line, name, name); }
        for (size_t i = 0; i < sizeof own_flags / sizeof own_flags[0]; i++) {
            if (strcmp(name, own_flags[i]) == 0) { USAGE("%s:%d: found --%s, expected other flags: the laboratory sets this one%s", path, line, name, strcmp(name, "seed") ? "" : " (seeds: 1 2 3)"); }
        }
        flag_set(flags, name, value);
    }
    free(copy);
}

static int row_index(const Experiment *e, const char *name) {
    for (int i = 0; i < e->num_rows; i++) { if (strcmp(e->rows[i].name, name) == 0) { return i; } }
    return -1;
}

// Names become folders.
static void check_name(const char *name, const char *path, int line) {
    size_t good = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-_.=");
    if (!name[0] || name[good] || name[0] == '.' || name[0] == '-') { USAGE("%s:%d: found the name \"%s\", expected letters, digits and + - _ . =, not beginning with . or -", path, line, name); }
}

static void add_setting(Experiment *e, const char *name, int line, const char *flags) {
    for (int i = 0; i < e->num_settings; i++) {
        if (strcmp(e->settings[i].name, name) == 0) { USAGE("%s:%d: found the setting \"%s\" twice, expected it once", e->path, line, name); }
    }
    e->settings = get_memory(e->settings, sizeof(Setting) * (size_t)(e->num_settings + 1));
    Setting *s = &e->settings[e->num_settings++];
    *s = (Setting){.name = text_format("%s", name), .line = line};
    flags_parse(&s->flags, flags, e->path, line);
}

static void parse_seeds(Experiment *e, char *value, int line) {
    char *save = NULL;
    for (char *word = strtok_r(value, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
        char *end;
        errno = 0;
        long long seed = strtoll(word, &end, 10);
        if (*end || errno || seed < 0) { USAGE("%s:%d: found the seed \"%s\", expected whole numbers from 0", e->path, line, word); }
        for (int i = 0; i < e->num_seeds; i++) { if (e->seeds[i] == seed) { USAGE("%s:%d: found the seed %lld twice, expected it once", e->path, line, seed); } }
        e->seeds = get_memory(e->seeds, sizeof(int64_t) * (size_t)(e->num_seeds + 1));
        e->seeds[e->num_seeds++] = seed;
    }
}

static void parse_row(Experiment *e, char *key, const char *value, int line) {
    char *name = strtok(key + 3, " \t"), *word = name ? strtok(NULL, " \t") : NULL, *versus = word ? strtok(NULL, " \t") : NULL;
    if (!name || (word && (strcmp(word, "vs") != 0 || !versus || strtok(NULL, " \t")))) { USAGE("%s:%d: found \"row\" with another head, expected row NAME: FLAGS or row NAME vs OTHER: FLAGS", e->path, line); }
    check_name(name, e->path, line);
    if (row_index(e, name) >= 0) { USAGE("%s:%d: found the row \"%s\" twice, expected it once", e->path, line, name); }
    e->rows = get_memory(e->rows, sizeof(Row) * (size_t)(e->num_rows + 1));
    Row *row = &e->rows[e->num_rows++];
    *row = (Row){.name = text_format("%s", name), .versus = versus ? text_format("%s", versus) : NULL, .line = line, .reference = -1};
    flags_parse(&row->flags, value, e->path, line);
}

static void parse_line(Experiment *e, char *key, char *value, int line) {
    const char *path = e->path;
    if (strcmp(key, "title") == 0) {
        if (strpbrk(value, "'\"")) { USAGE("%s:%d: found a quotation mark in the title, expected none (it goes to gnuplot)", path, line); }
        e->title = text_format("%s", value);
    } else if (strcmp(key, "base") == 0) { flags_parse(&e->base, value, path, line); }
    else if (strcmp(key, "seeds") == 0) { parse_seeds(e, value, line); }
    else if (strcmp(key, "baseline") == 0) { e->baseline_name = text_format("%s", value); e->baseline_line = line; }
    else if (strcmp(key, "curves") == 0) { e->curve_names = text_format("%s", value); e->curve_line = line; }
    else if (strncmp(key, "row", 3) == 0 && isspace((unsigned char)key[3])) { parse_row(e, key, value, line); }
    else if (strncmp(key, "sweep ", 6) == 0) {
        if (e->num_settings) { USAGE("%s:%d: found sweep after %s, expected one sweep, or settings", path, line, e->settings[0].name); }
        char *save = NULL;
        e->swept = text_format("%s", key + 6 + strspn(key + 6, " -"));
        for (char *word = strtok_r(value, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
            char *name = text_format("%s=%s", e->swept, word), *flags = text_format("--%s", name);
            check_name(name, path, line);
            add_setting(e, name, line, flags);
        }
        if (!e->num_settings) { USAGE("%s:%d: found sweep without values, expected sweep FLAG: VALUE...", path, line); }
    } else if (strncmp(key, "setting ", 8) == 0) {
        if (e->swept) { USAGE("%s:%d: found setting beside sweep, expected one of them", path, line); }
        char *name = key + 8 + strspn(key + 8, " ");
        check_name(name, path, line);
        add_setting(e, name, line, value);
    } else if (strcmp(key, "law") == 0) {
        char *end;
        e->law = 1;
        e->floor = strcmp(value, "free") == 0 ? NAN : strtod(value, &end);
        if (!isnan(e->floor) && (end == value || *end)) { USAGE("%s:%d: found law: %s, expected a number or free", path, line, value); }
    } else if (strcmp(key, "keep") == 0) {
        if (strcmp(value, "on") != 0) { USAGE("%s:%d: found keep: %s, expected keep: on", path, line, value); }
        e->keep = 1;
    } else { USAGE("%s:%d: found \"%s:\", expected one of title, base, seeds, row NAME, baseline, sweep FLAG, setting NAME, curves, law, keep", path, line, key); }
}

enum { MAX_CURVES = 7 }; // colours that can be told apart
static void experiment_resolve(Experiment *e) {
    if (!e->num_rows) { USAGE("%s: found no row, expected row NAME: FLAGS", e->path); }
    if (!e->num_seeds) { USAGE("%s: found no seeds, expected seeds: 1 2 3", e->path); }
    if (e->baseline_name && (e->baseline = row_index(e, e->baseline_name)) < 0) { USAGE("%s:%d: found baseline: %s, expected the name of a row", e->path, e->baseline_line, e->baseline_name); }
    for (int i = 0; i < e->num_rows; i++) {
        Row *row = &e->rows[i];
        if (row->versus && ((row->reference = row_index(e, row->versus)) < 0 || row->reference == i)) { USAGE("%s:%d: found vs %s, expected the name of another row", e->path, row->line, row->versus); }
        for (int s = 0; s < e->num_settings; s++) {
            for (int f = 0; f < e->settings[s].flags.count; f++) {
                if (flag_index(&row->flags, e->settings[s].flags.name[f]) >= 0) { USAGE("%s:%d: found --%s in the row %s, expected it only in the %s of line %d", e->path, row->line, e->settings[s].flags.name[f], row->name, e->swept ? "sweep" : "setting", e->settings[s].line); }
            }
        }
    }
    if (e->law && e->num_settings < 3) { USAGE("%s: found law with %d settings, expected at least 3 sizes to fit it to", e->path, e->num_settings); }
    if (!e->num_settings) { add_setting(e, "", 0, ""); }
    if (!e->title) { e->title = text_format("%s", e->path); }
    e->curves = get_memory(NULL, sizeof(int) * MAX_CURVES);
    if (!e->curve_names) { for (int i = 0; i < e->num_rows && i < MAX_CURVES; i++) { e->curves[e->num_curves++] = i; } return; }
    char *save = NULL;
    for (char *word = strtok_r(e->curve_names, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
        int row = row_index(e, word);
        if (row < 0 || e->num_curves == MAX_CURVES) { USAGE("%s:%d: found \"%s\" among curves, expected at most %d names of rows", e->path, e->curve_line, word, MAX_CURVES); }
        e->curves[e->num_curves++] = row;
    }
}

static void experiment_read(Experiment *e, const char *path) {
    *e = (Experiment){.path = path};
    char *text = read_file(path);
    if (!text) { USAGE("%s: found no such file, expected an experiment (dev/ablate/small/*.exp)", path); }
    int line = 0;
    for (char *at = text, *next; at; at = next) {
        line++;
        next = strchr(at, '\n');
        if (next) { *next++ = '\0'; }
        at[strcspn(at, "#\r")] = '\0';
        at += strspn(at, " \t");
        size_t n = strlen(at);
        while (n && isspace((unsigned char)at[n - 1])) { at[--n] = '\0'; }
        if (!n) { continue; }
        char *colon = strchr(at, ':');
        if (!colon) { USAGE("%s:%d: found \"%s\", expected KEY: VALUE", path, line, at); }
        *colon = '\0';
        parse_line(e, at, colon + 1 + strspn(colon + 1, " \t"), line);
    }
    free(text);
    experiment_resolve(e);
}

// ----------------------------------------------------------------------------------------------------
// 4. Runs. One is a row in a setting with a seed; its folder OUT/runs/ROW[@SETTING]/seed-S holds what train_gpt2 writes,
//    and   command.txt   the flags that made it: an edited experiment file never mixes with old results
//          log.txt       what train_gpt2 said
//          done          written when the run is finished: "finished", or "diverged" where the loss was no longer finite

typedef struct Estimate { int64_t parameters, scales, active, steps; double memory, token_flops, run_flops; } Estimate;

enum { WAITING, RUNNING, FINISHED, DIVERGED };
typedef struct Run {
    int row, setting, seed, state;
    char *folder;
    Flags flags;
    pid_t pid;
    double share;                    // of its steps that are done
    // results
    int points;                      // validations
    double *tokens, *losses, ms;     // ms: of a step that nothing disturbed, the first decile
} Run;

typedef struct Lab {
    Experiment e;
    const char *train, *out, *scripts; // scripts: folder of the gnuplot files, or none
    int jobs, threads, estimate_only;
    Estimate *estimates;             // (rows, settings)
    Run *runs;                       // (seeds, settings, rows): the order they are started in
    int num_runs;
    double began, share_at_start;
    int terminal;
} Lab;

static Run *lab_run(const Lab *lab, int row, int setting, int seed) {
    return &lab->runs[((int64_t)seed * lab->e.num_settings + setting) * lab->e.num_rows + row];
}
static Estimate *lab_estimate(const Lab *lab, int row, int setting) { return &lab->estimates[row * lab->e.num_settings + setting]; }

static Flags run_flags(const Experiment *e, int row, int setting) {
    Flags flags = {0};
    const Flags *parts[] = {&e->base, &e->settings[setting].flags, &e->rows[row].flags};
    for (int p = 0; p < 3; p++) { for (int i = 0; i < parts[p]->count; i++) { flag_set(&flags, parts[p]->name[i], parts[p]->value[i]); } }
    return flags;
}

// The NULL-terminated arguments of train_gpt2: flags, then `more`, which ends with NULL.
static char **arguments(const Lab *lab, const Flags *flags, const char *const *more) {
    char **argv = get_memory(NULL, sizeof(char *) * (2 * MAX_FLAGS + 16));
    int n = 0;
    argv[n++] = text_format("%s", lab->train);
    for (int i = 0; i < flags->count; i++) {
        argv[n++] = text_format("--%s", flags->name[i]);
        argv[n++] = text_format("%s", flags->value[i]);
    }
    for (; *more; more++) { argv[n++] = text_format("%s", *more); }
    argv[n] = NULL;
    return argv;
}
static void arguments_free(char **argv) {
    for (char **word = argv; *word; word++) { free(*word); }
    free(argv);
}

static const char *last_line(char *text) {
    size_t n = strlen(text);
    while (n && isspace((unsigned char)text[n - 1])) { text[--n] = '\0'; }
    char *line = strrchr(text, '\n');
    return line ? line + 1 : text;
}

// What train_gpt2 --estimate says of a row. Its checks of the flags come before the first run is started.
static void estimate_row(Lab *lab, int row, int setting) {
    Flags flags = run_flags(&lab->e, row, setting);
    static const char *const more[] = {"--estimate", NULL};
    char **argv = arguments(lab, &flags, more), *text = get_memory(NULL, 16384);
    int ends[2], status;
    if (pipe(ends) != 0) { FAIL("pipe: %s", strerror(errno)); }
    pid_t pid = fork();
    if (pid < 0) { FAIL("fork: %s", strerror(errno)); }
    if (pid == 0) {
        if (dup2(ends[1], 1) < 0 || dup2(ends[1], 2) < 0) { _exit(127); }
        close(ends[0]);
        execv(lab->train, argv);
        _exit(127);
    }
    close(ends[1]);
    size_t size = 0;
    for (ssize_t n; size < 16383 && (n = read(ends[0], text + size, 16383 - size)) > 0;) { size += (size_t)n; }
    text[size] = '\0';
    close(ends[0]);
    if (waitpid(pid, &status, 0) < 0) { FAIL("waitpid: %s", strerror(errno)); }
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 127) { FAIL("%s: cannot run it, expected the program train_gpt2 (make)", lab->train); }
    if (WEXITSTATUS(status) != 0) { fail(WEXITSTATUS(status) == 2 ? 2 : 1, "%s:%d: row %s: %s", lab->e.path, lab->e.rows[row].line, lab->e.rows[row].name, last_line(text)); }
    Estimate *s = lab_estimate(lab, row, setting);
    long long total = 0, scales = 0, active = 0, steps = 0;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        sscanf(line, "total %lld of which in scale vectors: %lld", &total, &scales);
        sscanf(line, "active %lld", &active);
        sscanf(line, "memory, MiB %lf", &s->memory);
        sscanf(line, "FLOPs %lf", &s->token_flops);
        sscanf(line, "run %*s tokens in %lld steps: %lf", &steps, &s->run_flops);
    }
    if (total == 0 || steps == 0 || s->memory == 0 || s->run_flops == 0) { FAIL("%s --estimate: found no line that begins with total, memory, FLOPs or run, expected all", lab->train); }
    s->parameters = total;
    s->scales = scales;
    s->active = active ? active : total;
    s->steps = steps;
    arguments_free(argv);
    free(text);
}

static char *run_name(const Lab *lab, const Run *run) {
    const char *setting = lab->e.settings[run->setting].name;
    return text_format("%s%s%s, seed %lld", lab->e.rows[run->row].name, setting[0] ? ", " : "", setting, (long long)lab->e.seeds[run->seed]);
}

// Does this folder hold a whole checkpoint?
static int has_checkpoint(const char *folder) {
    DIR *dir = opendir(folder);
    int found = 0;
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        found |= strncmp(entry->d_name, "step_", 5) == 0 && !strstr(entry->d_name, ".tmp");
    }
    if (dir) { closedir(dir); }
    return found;
}

static void remove_checkpoints(const char *folder) {
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (strncmp(entry->d_name, "step_", 5) != 0) { continue; }
        char *checkpoint = text_format("%s/%s", folder, entry->d_name);
        DIR *inside = opendir(checkpoint);
        for (struct dirent *file; inside && (file = readdir(inside));) {
            char *path = text_format("%s/%s", checkpoint, file->d_name);
            if (file->d_name[0] != '.' && unlink(path) != 0) { FAIL("%s: cannot remove: %s", path, strerror(errno)); }
            free(path);
        }
        if (inside) { closedir(inside); }
        if (rmdir(checkpoint) != 0) { FAIL("%s: cannot remove: %s", checkpoint, strerror(errno)); }
        free(checkpoint);
    }
    if (dir) { closedir(dir); }
}

// Share of a run's steps in its metrics.csv: the first number of the last whole line.
static double run_share(const Lab *lab, const Run *run) {
    char *path = text_format("%s/metrics.csv", run->folder), tail[4096];
    FILE *file = fopen(path, "rb");
    free(path);
    if (!file) { return 0; }
    fseek(file, 0, SEEK_END);
    long size = ftell(file), from = size > 4095 ? size - 4095 : 0;
    fseek(file, from, SEEK_SET);
    size_t n = fread(tail, 1, 4095, file);
    fclose(file);
    tail[n] = '\0';
    char *end = strrchr(tail, '\n');
    if (!end) { return 0; }
    *end = '\0';
    char *line = strrchr(tail, '\n');
    return line ? (double)atoll(line + 1) / (double)lab_estimate(lab, run->row, run->setting)->steps : 0;
}

// Prepares the list of runs and finds out which are finished.
static void lab_prepare(Lab *lab) {
    Experiment *e = &lab->e;
    lab->num_runs = e->num_seeds * e->num_settings * e->num_rows;
    lab->runs = get_memory(NULL, sizeof(Run) * (size_t)lab->num_runs);
    for (int i = 0; i < lab->num_runs; i++) {
        Run *run = &lab->runs[i];
        *run = (Run){.row = i % e->num_rows, .setting = i / e->num_rows % e->num_settings, .seed = i / e->num_rows / e->num_settings};
        const char *setting = e->settings[run->setting].name;
        run->flags = run_flags(e, run->row, run->setting);
        char *seed = text_format("%lld", (long long)e->seeds[run->seed]);
        flag_set(&run->flags, "seed", seed);
        flag_set(&run->flags, "log-norms", "on");
        run->folder = text_format("%s/runs/%s%s%s/seed-%s", lab->out, e->rows[run->row].name, setting[0] ? "@" : "", setting, seed);
        free(seed);
        FILE *words = open_text();
        for (int f = 0; f < run->flags.count; f++) { fprintf(words, "--%s %s\n", run->flags.name[f], run->flags.value[f]); }
        char *command = close_text(words), *path = text_format("%s/command.txt", run->folder), *old = read_file(path);
        if (old && strcmp(old, command) != 0) { FAIL("%s: found the flags of another run there, expected those of %s now: remove that folder, or name another with --out", path, e->path); }
        make_dirs(run->folder);
        if (!old) { write_file(path, command); }
        free(command); free(path); free(old);
        char *done_path = text_format("%s/done", run->folder), *done = read_file(done_path);
        if (done) {
            run->state = strncmp(done, "diverged", 8) == 0 ? DIVERGED : FINISHED;
            if (!e->keep) { remove_checkpoints(run->folder); } // it may have been killed between the two
        }
        run->share = done ? 1 : 0;
        free(done); free(done_path);
    }
}

// ----------------------------------------------------------------------------------------------------
// 5. The scheduler: up to --jobs processes at a time, each in a process group of its own, so that Ctrl-C reaches this
//    program alone, which then asks them to save and waits.

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// Waits until no process writes this folder: one whose laboratory was killed may need a moment to die.
static void wait_unlocked(const char *folder) {
    int fd = open(folder, O_RDONLY | O_CLOEXEC);
    if (fd < 0) { FAIL("%s: cannot open: %s", folder, strerror(errno)); }
    for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; tries++) {
        if (tries == 300) { FAIL("%s: found another run at work in it for 30 seconds, expected none", folder); }
        usleep(100000);
    }
    close(fd);
}

static void run_start(const Lab *lab, Run *run) {
    wait_unlocked(run->folder);
    char *threads = text_format("%d", lab->threads), *log_path = text_format("%s/log.txt", run->folder);
    int resume = has_checkpoint(run->folder);
    const char *const fresh[] = {"--threads", threads, "--out", run->folder, NULL};
    const char *const again[] = {"--threads", threads, "--resume", run->folder, NULL};
    Flags none = {0};
    char **argv = arguments(lab, resume ? &none : &run->flags, resume ? again : fresh);
    int log = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log < 0) { FAIL("%s: cannot open: %s", log_path, strerror(errno)); }
    pid_t parent = getpid();
    run->pid = fork();
    if (run->pid < 0) { FAIL("fork: %s", strerror(errno)); }
    if (run->pid == 0) {
        setpgid(0, 0);
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        signal(SIGHUP, SIG_DFL);
#ifdef __linux__
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) { _exit(127); } // dies with the laboratory
#endif
        int null = open("/dev/null", O_RDONLY);
        if (null < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0) { _exit(127); }
        execv(lab->train, argv);
        _exit(127);
    }
    (void)parent;
    close(log);
    run->state = RUNNING;
    arguments_free(argv);
    free(threads);
    free(log_path);
}

// A process has ended: was that the end of the run? Returns 0 if it failed.
static int run_ended(const Lab *lab, Run *run, int status) {
    char *log_path = text_format("%s/log.txt", run->folder), *done = text_format("%s/done", run->folder);
    char *log = read_file(log_path);
    const char *last = log ? last_line(log) : "";
    int good = 1;
    run->pid = 0;
    run->state = WAITING;
    run->share = run_share(lab, run);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && run->share >= 1) { run->state = FINISHED; }
    else if (WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(last, "expected finite numbers")) { run->state = DIVERGED; }
    else if (!stop_signal) {
        char *name = run_name(lab, run), *how = WIFSIGNALED(status) ? text_format("signal %d", WTERMSIG(status)) : text_format("status %d", WEXITSTATUS(status));
        fprintf(stderr, "%sablate: %s: ended with %s: %s (%s)\n", lab->terminal ? "\n" : "", name, how, last, log_path);
        good = 0;
    }
    if (run->state != WAITING) {
        write_file(done, run->state == FINISHED ? "finished\n" : "diverged\n");
        if (!lab->e.keep) { remove_checkpoints(run->folder); }
        run->share = 1;
    }
    free(log); free(log_path); free(done);
    return good;
}

// How much of all FLOPs is done.
static double lab_share(Lab *lab) {
    double all = 0, done = 0;
    for (int i = 0; i < lab->num_runs; i++) {
        Run *run = &lab->runs[i];
        double flops = lab_estimate(lab, run->row, run->setting)->run_flops;
        if (run->state < FINISHED) { run->share = run_share(lab, run); }
        all += flops;
        done += flops * run->share;
    }
    return done / all;
}

// One line: how far it is, and when it will be over.
static void print_progress(Lab *lab, const Run *ended) {
    int finished = 0;
    FILE *words = open_text();
    for (int i = 0; i < lab->num_runs; i++) {
        finished += lab->runs[i].state >= FINISHED;
        if (lab->runs[i].state != RUNNING) { continue; }
        char *name = run_name(lab, &lab->runs[i]);
        fprintf(words, " | %s", name);
        free(name);
    }
    char *running = close_text(words), time[32], eta[32] = "-";
    double share = lab_share(lab), elapsed = seconds() - lab->began;
    format_duration(elapsed, time, sizeof time);
    if (share > lab->share_at_start) { format_duration(elapsed * (1 - share) / (share - lab->share_at_start), eta, sizeof eta); }
    if (lab->terminal) { printf("\r\033[K%d/%d runs | %.0f%% | %s | ETA %s%.80s", finished, lab->num_runs, 100 * share, time, eta, running); }
    else if (ended) {
        char *name = run_name(lab, ended);
        printf("%d/%d runs | %.0f%% | %s | ETA %s | %s: %s\n", finished, lab->num_runs, 100 * share, time, eta, name, ended->state == DIVERGED ? "diverged" : "finished");
        free(name);
    }
    fflush(stdout);
    free(running);
}

static void lab_train(Lab *lab) {
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    setenv("OMP_WAIT_POLICY", "passive", 0);
    lab->began = seconds();
    int next = 0, running = 0, failed = 0, told = 0;
    double last_print = 0;
    for (int i = 0; i < lab->num_runs; i++) { told += lab->runs[i].state >= FINISHED; }
    lab->share_at_start = lab_share(lab);
    if (told) { printf("%d of %d runs are finished already\n", told, lab->num_runs); }
    told = 0;
    for (;;) {
        while (!stop_signal && !failed && running < lab->jobs && next < lab->num_runs) {
            if (lab->runs[next].state == WAITING) { run_start(lab, &lab->runs[next]); running++; }
            next++;
        }
        if (running == 0) { break; }
        if ((stop_signal || failed) && !told) { // saves, then leaves
            for (int i = 0; i < lab->num_runs; i++) { if (lab->runs[i].state == RUNNING) { kill(lab->runs[i].pid, SIGTERM); } }
            told = 1;
        }
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid < 0 && errno != EINTR) { FAIL("waitpid: %s", strerror(errno)); }
        for (int i = 0; pid > 0 && i < lab->num_runs; i++) {
            if (lab->runs[i].pid != pid) { continue; }
            running--;
            failed |= !run_ended(lab, &lab->runs[i], status);
            if (lab->runs[i].state >= FINISHED) { print_progress(lab, &lab->runs[i]); }
        }
        if (pid > 0) { continue; }
        if (lab->terminal && seconds() - last_print > 0.5) { print_progress(lab, NULL); last_print = seconds(); }
        usleep(20000);
    }
    if (lab->terminal) { printf("\n"); }
    struct rusage use;
    char wall[32], cpu[32];
    if (getrusage(RUSAGE_CHILDREN, &use) != 0) { FAIL("getrusage: %s", strerror(errno)); }
    format_duration(seconds() - lab->began, wall, sizeof wall);
    format_duration((double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec), cpu, sizeof cpu);
    printf("took %s, %s of one core\n", wall, cpu);
    if (stop_signal) { fail(130, "stopped by a signal; the same command goes on"); }
    if (failed) { fail(1, "a run failed (above); when that is mended the same command goes on"); }
}

// ----------------------------------------------------------------------------------------------------
// 6. Results: curves and times of runs, norms over training.

static void run_read(Run *run) {
    if (run->state != FINISHED) { return; }
    char *path = text_format("%s/metrics.csv", run->folder), *text = read_file(path), *save = NULL;
    if (!text) { FAIL("%s: found no such file, expected it in the folder of a finished run", path); }
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        double tokens, loss;
        if (sscanf(line, "%*d,%lf,%*f,%*f,%lf", &tokens, &loss) != 2) { continue; } // the header, or no validation
        run->tokens = get_memory(run->tokens, sizeof(double) * (size_t)(run->points + 1));
        run->losses = get_memory(run->losses, sizeof(double) * (size_t)(run->points + 1));
        run->tokens[run->points] = tokens;
        run->losses[run->points++] = loss;
    }
    if (run->points == 0) { FAIL("%s: found no validation loss, expected at least the last", path); }
    free(text); free(path);
    path = text_format("%s/timing.csv", run->folder);
    text = read_file(path);
    if (!text) { FAIL("%s: found no such file, expected it in the folder of a finished run", path); }
    double *ms = NULL;
    int count = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        double value;
        if (sscanf(line, "%*d,%lf", &value) != 1) { continue; }
        if ((count & (count - 1)) == 0) { ms = get_memory(ms, sizeof(double) * (size_t)(count ? 2 * count : 1)); }
        ms[count++] = value;
    }
    run->ms = quantile(ms, count, 0.1);
    free(ms); free(text); free(path);
}

// Runs of a row in a setting that ended with a loss: their number.
static int finished_seeds(const Lab *lab, int row, int setting) {
    int n = 0;
    for (int s = 0; s < lab->e.num_seeds; s++) { n += lab_run(lab, row, setting, s)->state == FINISHED; }
    return n;
}

// Loss at a validation (-1: the last) over the seeds; or less that of another row (in another setting), in pairs.
static Summary loss_at(const Lab *lab, int row, int setting, int other, int other_setting, int point) {
    double x[1024];
    int n = 0;
    for (int s = 0; s < lab->e.num_seeds && n < 1024; s++) {
        const Run *a = lab_run(lab, row, setting, s), *b = other < 0 ? a : lab_run(lab, other, other_setting, s);
        if (a->state != FINISHED || b->state != FINISHED) { continue; }
        int at = point < 0 ? a->points - 1 : point, bt = point < 0 ? b->points - 1 : point;
        if (at >= a->points || bt >= b->points) { continue; }
        x[n++] = a->losses[at] - (other < 0 ? 0 : b->losses[bt]);
    }
    return n ? summarize(x, n) : (Summary){0, NAN, NAN, NAN, NAN};
}

// Tokens that the baseline needs over those that ... see the header of the table. From the mean curves.
static double token_ratio(const Lab *lab, int row, int setting) {
    const Run *run = lab_run(lab, row, setting, 0);
    int base = lab->e.baseline, n = run->points;
    if (finished_seeds(lab, row, setting) < lab->e.num_seeds || finished_seeds(lab, base, setting) < lab->e.num_seeds || n != lab_run(lab, base, setting, 0)->points) { return NAN; }
    double *mine = get_memory(NULL, sizeof(double) * (size_t)n), *bases = get_memory(NULL, sizeof(double) * (size_t)n);
    for (int i = 0; i < n; i++) { mine[i] = loss_at(lab, row, setting, -1, 0, i).mean; bases[i] = loss_at(lab, base, setting, -1, 0, i).mean; }
    double all = run->tokens[n - 1];
    double ratio = mine[n - 1] <= bases[n - 1] ? tokens_to_reach(run->tokens, mine, n, bases[n - 1]) / all
                                               : all / tokens_to_reach(run->tokens, bases, n, mine[n - 1]);
    free(mine); free(bases);
    return ratio;
}

static double time_ratio(const Lab *lab, int row, int setting) {
    double x[1024];
    int n = 0;
    for (int s = 0; s < lab->e.num_seeds && n < 1024; s++) {
        const Run *a = lab_run(lab, row, setting, s), *b = lab_run(lab, lab->e.baseline, setting, s);
        if (a->state == FINISHED && b->state == FINISHED && b->ms > 0) { x[n++] = a->ms / b->ms; }
    }
    return quantile(x, n, 0.5);
}

// The setting with the least mean loss; one in which a seed diverged only if that happened in all.
static int best_setting(const Lab *lab, int row) {
    int best = 0;
    double least = INFINITY;
    for (int s = 0; s < lab->e.num_settings; s++) {
        int whole = finished_seeds(lab, row, s) == lab->e.num_seeds;
        double loss = loss_at(lab, row, s, -1, 0, -1).mean;
        if (whole && loss < least) { least = loss; best = s; }
    }
    return best;
}

// ----------------------------------------------------------------------------------------------------
// 7. Tables: as text, CSV and Markdown. table.* repeats bit by bit; what holds times is in cost.*.

enum { MAX_COLUMNS = 20 };
typedef struct Table { int columns, rows; char *(*cells)[MAX_COLUMNS]; } Table; // row 0: the header

__attribute__((format(printf, 3, 4)))
static void cell(Table *t, int column, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (column == 0) {
        t->cells = get_memory(t->cells, sizeof(t->cells[0]) * (size_t)(t->rows + 1));
        memset(t->cells[t->rows++], 0, sizeof(t->cells[0]));
    }
    if (column >= t->columns) { t->columns = column + 1; }
    if (vasprintf(&t->cells[t->rows - 1][column], format, args) < 0) { FAIL("out of memory for %s", format); }
    va_end(args);
}
static void cell_number(Table *t, int column, const char *format, double x) {
    char text[64];
    snprintf(text, sizeof text, format, x);
    cell(t, column, "%s", isfinite(x) ? text : "-");
}
static const char *cell_text(const Table *t, int row, int column) { return t->cells[row][column] ? t->cells[row][column] : ""; }

static char *table_text(const Table *t) {
    size_t width[MAX_COLUMNS] = {0};
    for (int r = 0; r < t->rows; r++) { for (int c = 0; c < t->columns; c++) { size_t n = strlen(cell_text(t, r, c)); if (n > width[c]) { width[c] = n; } } }
    FILE *out = open_text();
    for (int r = 0; r < t->rows; r++) {
        for (int c = 0; c < t->columns; c++) { fprintf(out, c ? "  %*s" : "%-*s", (int)width[c], cell_text(t, r, c)); }
        fprintf(out, "\n");
    }
    return close_text(out);
}
static char *table_csv(const Table *t) { // no cell has a comma
    FILE *out = open_text();
    for (int r = 0; r < t->rows; r++) { for (int c = 0; c < t->columns; c++) { fprintf(out, "%s%s", cell_text(t, r, c), c + 1 < t->columns ? "," : "\n"); } }
    return close_text(out);
}
static char *table_markdown(const Table *t) {
    FILE *out = open_text();
    for (int r = 0; r < t->rows; r++) {
        for (int c = 0; c < t->columns; c++) { fprintf(out, "| %s %s", cell_text(t, r, c), c + 1 < t->columns ? "" : "|\n"); }
        for (int c = 0; r == 0 && c < t->columns; c++) { fprintf(out, "%s%s", c ? "---:|" : "|---|", c + 1 < t->columns ? "" : "\n"); }
    }
    return close_text(out);
}

// Prints a table and writes it in the three forms, with a note below (not in the CSV).
static void table_write(const Lab *lab, const Table *t, const char *name, const char *heading, const char *note) {
    char *text = table_text(t), *csv = table_csv(t), *markdown = table_markdown(t);
    char *whole[] = {text_format("%s\n\n%s\n%s", heading, text, note), csv, text_format("**%s**\n\n%s\n%s", heading, markdown, note)};
    static const char *const ends[] = {"txt", "csv", "md"};
    for (int i = 0; i < 3; i++) {
        char *path = text_format("%s/%s.%s", lab->out, name, ends[i]);
        write_file(path, whole[i]);
        free(path);
    }
    printf("\n%s", whole[0]);
}

static const char *verdict(Summary s) { return isnan(s.low) ? "-" : s.high < 0 ? "better" : s.low > 0 ? "worse" : "open"; }

static void write_loss_table(const Lab *lab) {
    const Experiment *e = &lab->e;
    Table t = {0};
    int versus = 0, swept = e->num_settings > 1;
    for (int r = 0; r < e->num_rows; r++) { versus |= e->rows[r].reference >= 0; }
    int c = 0;
    cell(&t, c++, "row");
    if (swept) { cell(&t, c++, "setting"); }
    static const char *const heads[] = {"seeds", "loss", "std err", "- baseline", "95% low", "95% high", "verdict", "tokens", "memory"};
    for (int i = 0; i < 9; i++) { cell(&t, c++, "%s", heads[i]); }
    if (versus) { cell(&t, c++, "vs"); cell(&t, c++, "- vs"); cell(&t, c++, "95%% low"); cell(&t, c++, "95%% high"); cell(&t, c++, "verdict"); }
    for (int s = 0; s < e->num_settings; s++) {
        for (int r = 0; r < e->num_rows; r++) {
            const Row *row = &e->rows[r];
            Summary loss = loss_at(lab, r, s, -1, 0, -1), off = loss_at(lab, r, s, e->baseline, s, -1);
            int n = finished_seeds(lab, r, s);
            c = 0;
            cell(&t, c++, "%s", row->name);
            if (swept) { cell(&t, c++, "%s", e->settings[s].name); }
            if (n < e->num_seeds) { cell(&t, c++, "%d of %d", n, e->num_seeds); } else { cell(&t, c++, "%d", n); }
            cell_number(&t, c++, "%.4f", loss.mean);
            cell_number(&t, c++, "%.4f", loss.se);
            int same = r == e->baseline;
            cell_number(&t, c++, "%+.4f", same ? NAN : off.mean);
            cell_number(&t, c++, "%+.4f", same ? NAN : off.low);
            cell_number(&t, c++, "%+.4f", same ? NAN : off.high);
            cell(&t, c++, "%s", n < e->num_seeds ? "diverged" : same ? "-" : verdict(off));
            cell_number(&t, c++, "%.2fx", same ? NAN : token_ratio(lab, r, s));
            cell_number(&t, c++, "%.3fx", lab_estimate(lab, r, s)->memory / lab_estimate(lab, e->baseline, s)->memory);
            if (row->reference < 0) { continue; }
            off = loss_at(lab, r, s, row->reference, s, -1);
            cell(&t, c++, "%s", row->versus);
            cell_number(&t, c++, "%+.4f", off.mean);
            cell_number(&t, c++, "%+.4f", off.low);
            cell_number(&t, c++, "%+.4f", off.high);
            cell(&t, c++, "%s", verdict(off));
        }
    }
    char *note = text_format(
        "loss: last validation, nats a token. std err: of the mean over seeds. - baseline: difference to %s, paired by seed, with\n"
        "its 95%% confidence interval (Student t). tokens: share of the tokens after which the row had reached the baseline's\n"
        "last loss; for a worse row the inverse, all tokens over those after which the baseline had reached the row's last\n"
        "loss (read off curves whose rate falls to nearly nothing, so closer to 1 than separate runs would be).\n"
        "memory: of --estimate, over the baseline's.\n", e->rows[e->baseline].name);
    table_write(lab, &t, "table", e->title, note);
}

// Each row at its own best setting.
static void write_best_table(const Lab *lab) {
    const Experiment *e = &lab->e;
    if (!e->swept) { return; }
    Table t = {0};
    int base = best_setting(lab, e->baseline);
    static const char *const heads[] = {"row", "best", "loss", "std err", "- baseline", "95% low", "95% high", "verdict"};
    for (int i = 0; i < 8; i++) { cell(&t, i, "%s", heads[i]); }
    for (int r = 0; r < e->num_rows; r++) {
        int s = best_setting(lab, r), same = r == e->baseline;
        Summary loss = loss_at(lab, r, s, -1, 0, -1), off = loss_at(lab, r, s, e->baseline, base, -1);
        int edge = e->num_settings > 1 && (s == 0 || s == e->num_settings - 1);
        cell(&t, 0, "%s", e->rows[r].name);
        cell(&t, 1, "%s%s", e->settings[s].name, edge ? " (edge)" : "");
        cell_number(&t, 2, "%.4f", loss.mean);
        cell_number(&t, 3, "%.4f", loss.se);
        cell_number(&t, 4, "%+.4f", same ? NAN : off.mean);
        cell_number(&t, 5, "%+.4f", same ? NAN : off.low);
        cell_number(&t, 6, "%+.4f", same ? NAN : off.high);
        cell(&t, 7, "%s", same ? "-" : verdict(off));
    }
    char *heading = text_format("%s: each row at its own best --%s", e->title, e->swept);
    table_write(lab, &t, "best", heading, "(edge): the best value is the first or last of the sweep, so a better one may lie outside.\n");
}

static void write_law_table(const Lab *lab) {
    const Experiment *e = &lab->e;
    if (!e->law) { return; }
    Table t = {0};
    static const char *const heads[] = {"row", "floor", "A", "power"};
    for (int i = 0; i < 4; i++) { cell(&t, i, "%s", heads[i]); }
    for (int r = 0; r < e->num_rows; r++) {
        double n[256], loss[256];
        int count = 0;
        for (int s = 0; s < e->num_settings && count < 256; s++) {
            if (finished_seeds(lab, r, s) == 0) { continue; }
            n[count] = (double)lab_estimate(lab, r, s)->active;
            loss[count++] = loss_at(lab, r, s, -1, 0, -1).mean;
        }
        Law law = {NAN, NAN, NAN};
        if (count >= 3) { law = law_fit(n, loss, count, e->floor); }
        cell(&t, 0, "%s", e->rows[r].name);
        cell_number(&t, 1, "%.4f", law.floor);
        cell_number(&t, 2, "%.4g", law.factor);
        cell_number(&t, 3, "%.4f", law.power);
    }
    table_write(lab, &t, "law", "loss = floor + A N^-power, N parameters that a token uses", isnan(e->floor) ? "floor fitted: it needs more sizes than it has numbers to be trusted.\n" : "floor given.\n");
}

static void write_cost_table(const Lab *lab) {
    const Experiment *e = &lab->e;
    Table t = {0};
    int swept = e->num_settings > 1, c = 0;
    cell(&t, c++, "row");
    if (swept) { cell(&t, c++, "setting"); }
    static const char *const heads[] = {"parameters", "in scales", "memory MiB", "memory", "ms a step", "time"};
    for (int i = 0; i < 6; i++) { cell(&t, c++, "%s", heads[i]); }
    for (int s = 0; s < e->num_settings; s++) {
        for (int r = 0; r < e->num_rows; r++) {
            const Estimate *m = lab_estimate(lab, r, s);
            double ms[1024];
            int n = 0;
            for (int i = 0; i < e->num_seeds && n < 1024; i++) { if (lab_run(lab, r, s, i)->state == FINISHED) { ms[n++] = lab_run(lab, r, s, i)->ms; } }
            c = 0;
            cell(&t, c++, "%s", e->rows[r].name);
            if (swept) { cell(&t, c++, "%s", e->settings[s].name); }
            cell(&t, c++, "%lld", (long long)m->parameters);
            cell(&t, c++, "%lld", (long long)m->scales);
            cell_number(&t, c++, "%.1f", m->memory);
            cell_number(&t, c++, "%.3fx", m->memory / lab_estimate(lab, e->baseline, s)->memory);
            cell_number(&t, c++, "%.2f", quantile(ms, n, 0.5));
            cell_number(&t, c++, "%.3fx", time_ratio(lab, r, s));
        }
    }
    table_write(lab, &t, "cost", "What it costs", "ms a step: the first decile of the steps of a run, median over seeds. time: ratio to the baseline's, median over seeds.\n");
}

// FLOPs of the whole file and the hours of a GPU at a stated speed: before anything is run.
static void print_estimate(const Lab *lab) {
    const double peak = 989e12, mfu = 0.45;
    double all = 0;
    Table t = {0};
    static const char *const heads[] = {"row", "setting", "parameters", "steps", "FLOPs a run", "seeds", "H100 hours"};
    for (int i = 0; i < 7; i++) { cell(&t, i, "%s", heads[i]); }
    for (int s = 0; s < lab->e.num_settings; s++) {
        for (int r = 0; r < lab->e.num_rows; r++) {
            const Estimate *m = lab_estimate(lab, r, s);
            double hours = m->run_flops * lab->e.num_seeds / (peak * mfu) / 3600;
            all += hours;
            cell(&t, 0, "%s", lab->e.rows[r].name);
            cell(&t, 1, "%s", lab->e.settings[s].name);
            cell(&t, 2, "%lld", (long long)m->parameters);
            cell(&t, 3, "%lld", (long long)m->steps);
            cell(&t, 4, "%.3g", m->run_flops);
            cell(&t, 5, "%d", lab->e.num_seeds);
            cell(&t, 6, "%.3g", hours);
        }
    }
    printf("%s\n\n%s\nall: %.3g hours of one H100, assuming 45%% of its 989 TFLOP/s (bf16)\n", lab->e.title, table_text(&t), all);
}

// ----------------------------------------------------------------------------------------------------
// 8. Figures: data files for the gnuplot scripts beside this file, one block a row.

// Runs dev/ablate/NAME.gp on OUT/figures/NAME.dat; it writes NAME.png and NAME.svg there.
static void draw(const Lab *lab, const char *name, const char *data, const char *more) {
    char *path = text_format("%s/figures/%s.dat", lab->out, name), *script = text_format("%s/%s.gp", lab->scripts, name), *log_path = text_format("%s/figures/%s.log", lab->out, name);
    write_file(path, data);
    char *set = text_format("scripts='%s'; data='%s'; name='%s/figures/%s'; title_text='%s'; baseline='%s'; %s", lab->scripts, path, lab->out, name,
                            lab->e.title, lab->e.rows[lab->e.baseline].name, more);
    fflush(stdout);
    pid_t pid = fork();
    int status;
    if (pid < 0) { FAIL("fork: %s", strerror(errno)); }
    if (pid == 0) { // it warns of rows without points, those that diverged: shown only if it fails
        int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        if (log < 0 || dup2(log, 2) < 0) { _exit(127); }
        execlp("gnuplot", "gnuplot", "-e", set, script, (char *)NULL);
        _exit(127);
    }
    if (waitpid(pid, &status, 0) < 0) { FAIL("waitpid: %s", strerror(errno)); }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) { FAIL("gnuplot %s: ended with status %d, expected 0: %s", script, WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(log_path)); }
    printf("  %s/figures/%s.png and .svg\n", lab->out, name);
    unlink(log_path);
    free(path); free(script); free(set); free(log_path);
}

// Loss, or difference to the baseline, of each drawn row at each validation.
static char *curve_data(const Lab *lab, int setting, int relative) {
    const Experiment *e = &lab->e;
    FILE *out = open_text();
    fprintf(out, "# tokens mean low high: %s\n", relative ? "mean difference and its 95% interval" : "mean, least and greatest of the seeds");
    for (int i = 0; i < e->num_curves; i++) {
        int row = e->curves[i];
        const Run *run = NULL;
        for (int s = e->num_seeds - 1; s >= 0; s--) { if (lab_run(lab, row, setting, s)->state == FINISHED) { run = lab_run(lab, row, setting, s); } }
        fprintf(out, "\"%s\"\n", e->rows[row].name);
        for (int p = 0; run && p < run->points; p++) {
            Summary s = loss_at(lab, row, setting, relative ? e->baseline : -1, setting, p);
            double low = s.low, high = s.high;
            if (!relative) {
                low = INFINITY, high = -INFINITY;
                for (int seed = 0; seed < e->num_seeds; seed++) {
                    const Run *r = lab_run(lab, row, setting, seed);
                    if (r->state == FINISHED) { low = fmin(low, r->losses[p]); high = fmax(high, r->losses[p]); }
                }
            }
            if (s.n) { fprintf(out, "%.9g %.9g %.9g %.9g\n", run->tokens[p], s.mean, isnan(low) ? s.mean : low, isnan(high) ? s.mean : high); }
        }
        fprintf(out, "\n\n");
    }
    return close_text(out);
}

// Last loss of each row less the baseline's, with its interval.
static char *difference_data(const Lab *lab, int setting) {
    const Experiment *e = &lab->e;
    FILE *out = open_text();
    fprintf(out, "# row mean low high\n");
    for (int r = 0; r < e->num_rows; r++) {
        Summary s = loss_at(lab, r, setting, e->baseline, setting, -1);
        if (r == e->baseline || !s.n) { continue; }
        fprintf(out, "\"%s\" %.9g %.9g %.9g\n", e->rows[r].name, s.mean, isnan(s.low) ? s.mean : s.low, isnan(s.high) ? s.mean : s.high);
    }
    return close_text(out);
}

// Root mean square over all values of tensors of a kind, over layers and seeds; NAN where there is none.
enum { KIND_Q, KIND_K, KIND_V, KIND_INPUT, KIND_OUTPUT, NUM_KINDS };
static int norm_kind(const char *tensor) {
    static const char *const weights[] = {".q.weight", ".k.weight", ".v.weight"};
    for (int i = 0; i < 3; i++) { if (strstr(tensor, weights[i])) { return i; } }
    return strstr(tensor, ".gamma_norm") ? KIND_OUTPUT : strstr(tensor, ".gamma_") ? KIND_INPUT : -1;
}

static char *norm_data(const Lab *lab, int setting, char *kinds) { // kinds: 1 where a row has tensors of the kind, else 0
    const Experiment *e = &lab->e;
    FILE *out = open_text();
    fprintf(out, "# tokens, then the root mean square of W_q, W_k, W_v, scale vectors of Input-Norms, of Output-Norms\n");
    memset(kinds, '0', NUM_KINDS);
    for (int i = 0; i < e->num_curves; i++) {
        int row = e->curves[i], points = 0;
        double (*sums)[NUM_KINDS][2] = NULL, *tokens = NULL; // (validations): squares and number of values
        for (int s = 0; s < e->num_seeds; s++) {
            const Run *run = lab_run(lab, row, setting, s);
            if (run->state != FINISHED) { continue; }
            if (!sums) {
                points = run->points;
                tokens = run->tokens;
                sums = get_memory(NULL, sizeof(sums[0]) * (size_t)points);
                memset(sums, 0, sizeof(sums[0]) * (size_t)points);
            }
            char *path = text_format("%s/norms.csv", run->folder), *text = read_file(path), *save = NULL, tensor[96];
            if (!text) { FAIL("%s: found no such file, expected it in the folder of a finished run", path); }
            int point = -1;
            long long step, last = -1;
            for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
                double values, norm;
                if (sscanf(line, "%lld,%95[^,],%lf,%lf", &step, tensor, &values, &norm) != 4) { continue; }
                if (step != last) { point++; last = step; }
                int kind = norm_kind(tensor);
                if (kind < 0 || point >= points) { continue; }
                sums[point][kind][0] += norm * norm;
                sums[point][kind][1] += values;
            }
            free(text); free(path);
        }
        fprintf(out, "\"%s\"\n", e->rows[row].name);
        for (int p = 0; p < points; p++) {
            fprintf(out, "%.9g", tokens[p]);
            for (int k = 0; k < NUM_KINDS; k++) { if (sums[p][k][1] > 0) { kinds[k] = '1'; fprintf(out, " %.6g", sqrt(sums[p][k][0] / sums[p][k][1])); } else { fprintf(out, " NaN"); } }
            fprintf(out, "\n");
        }
        fprintf(out, "\n\n");
        free(sums);
    }
    return close_text(out);
}

// Last loss of each drawn row over the values of a sweep, or over parameters.
static char *sweep_data(const Lab *lab, int by_size) {
    const Experiment *e = &lab->e;
    FILE *out = open_text();
    fprintf(out, "# %s mean mean-se mean+se\n", by_size ? "parameters" : e->swept);
    for (int i = 0; i < e->num_curves; i++) {
        int row = e->curves[i];
        fprintf(out, "\"%s\"\n", e->rows[row].name);
        for (int s = 0; s < e->num_settings; s++) {
            Summary loss = loss_at(lab, row, s, -1, 0, -1);
            if (finished_seeds(lab, row, s) < e->num_seeds) { continue; } // it diverged
            double x = by_size ? (double)lab_estimate(lab, row, s)->active : atof(strchr(e->settings[s].name, '=') + 1), se = isnan(loss.se) ? 0 : loss.se;
            fprintf(out, "%.9g %.9g %.9g %.9g\n", x, loss.mean, loss.mean - se, loss.mean + se);
        }
        fprintf(out, "\n\n");
    }
    return close_text(out);
}

static void write_figures(const Lab *lab) {
    const Experiment *e = &lab->e;
    if (strcmp(lab->scripts, "none") == 0) { return; }
    char *path = text_format("%s/figures", lab->out);
    make_dirs(path);
    int setting = e->num_settings > 1 && e->law ? e->num_settings - 1 : best_setting(lab, e->baseline); // the largest, or the baseline's best
    char *numeric = e->swept, *end = NULL;
    if (numeric) { (void)strtod(strchr(e->settings[0].name, '=') + 1, &end); }
    char *more = text_format("rows=%d; bars=%d; setting='%s'; flag='%s'", e->num_curves, e->num_rows - 1, e->settings[setting].name, e->swept ? e->swept : "");
    printf("\nfigures%s%s:\n", e->settings[setting].name[0] ? " (curves at " : "", e->settings[setting].name[0] ? text_format("%s)", e->settings[setting].name) : "");
    int some = 0; // a row of which nothing is finished leaves an empty figure
    for (int r = 0; r < e->num_rows; r++) { some |= r != e->baseline && loss_at(lab, r, setting, e->baseline, setting, -1).n > 0; }
    int any = 0;
    for (int i = 0; i < e->num_curves; i++) { any |= loss_at(lab, e->curves[i], setting, -1, 0, -1).n > 0; }
    if (!any) { printf("  none: all runs of these rows diverged\n"); return; }
    draw(lab, "loss", curve_data(lab, setting, 0), more);
    if (some) { draw(lab, "relative", curve_data(lab, setting, 1), more); draw(lab, "difference", difference_data(lab, setting), more); }
    char kinds[NUM_KINDS + 1] = "", *norms = norm_data(lab, setting, kinds), *with_kinds = text_format("%s; kinds='%s'", more, kinds);
    if (strchr(kinds, '1')) { draw(lab, "norms", norms, with_kinds); }
    if (end && *end == '\0' && e->num_settings > 1) { draw(lab, "sweep", sweep_data(lab, 0), more); }
    if (e->law) { draw(lab, "law", sweep_data(lab, 1), more); }
}

// ----------------------------------------------------------------------------------------------------
// 9. main

static const char help[] =
    "usage: ablate [--flag value]... EXPERIMENT\n"
    "Trains all rows of an experiment file with all its seeds and compares them. Run it again to go on after a kill.\n\n"
    "  --jobs N        runs at a time [cores over --threads]\n"
    "  --threads N     OpenMP threads of each [1]\n"
    "  --out DIR       results [runs/ablate/NAME, NAME being the path of the file below dev/ablate]\n"
    "  --train PATH    the program [./train_gpt2]\n"
    "  --scripts DIR   gnuplot scripts of the figures; none: no figures [dev/ablate]\n"
    "  --estimate      print parameters, FLOPs and hours of a GPU for each row, and stop\n"
    "  --help          print this\n";

static int whole_number(const char *flag, const char *text) {
    char *end;
    long n = strtol(text, &end, 10);
    if (end == text || *end || n < 1 || n > 4096) { USAGE("%s: found \"%s\", expected a whole number from 1 to 4096", flag, text); }
    return (int)n;
}

static char *default_out(const char *path) {
    const char *below = strstr(path, "dev/ablate/"), *slash = strrchr(path, '/');
    const char *name = below ? below + strlen("dev/ablate/") : slash ? slash + 1 : path, *dot = strrchr(name, '.');
    return text_format("runs/ablate/%.*s", dot ? (int)(dot - name) : (int)strlen(name), name);
}

static void parse_command(Lab *lab, int argc, char **argv, const char **path) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) { printf("%s", help); exit(0); }
        if (strcmp(argv[i], "--estimate") == 0) { lab->estimate_only = 1; continue; }
        if (argv[i][0] != '-') {
            if (*path) { USAGE("found %s and %s, expected one experiment file", *path, argv[i]); }
            *path = argv[i];
            continue;
        }
        static const char *const known[] = {"--jobs", "--threads", "--out", "--train", "--scripts"};
        int which = 0;
        while (which < 5 && strcmp(argv[i], known[which]) != 0) { which++; }
        if (which == 5) { USAGE("found unknown flag %s, expected one of --help", argv[i]); }
        if (i + 1 >= argc) { USAGE("%s: found no value, expected one", argv[i]); }
        const char *value = argv[++i];
        if (which == 0) { lab->jobs = whole_number("--jobs", value); }
        if (which == 1) { lab->threads = whole_number("--threads", value); }
        if (which == 2) { lab->out = value; }
        if (which == 3) { lab->train = value; }
        if (which == 4) { lab->scripts = value; }
    }
    if (!*path) { USAGE("found no experiment file, expected one (dev/ablate/small/*.exp)"); }
}

static void check_gnuplot(const Lab *lab) {
    if (strcmp(lab->scripts, "none") == 0) { return; }
    if (!exists(lab->scripts, "style.gp")) { FAIL("--scripts %s: found no style.gp, expected the folder of the gnuplot scripts, or none", lab->scripts); }
    if (system("command -v gnuplot >/dev/null 2>&1") != 0) { FAIL("%s", "found no gnuplot, expected it for the figures (dev/setup.sh installs it), or --scripts none"); }
}

static int lab_main(int argc, char **argv) {
    static Lab lab;
    const char *path = NULL;
    lab = (Lab){.train = "./train_gpt2", .scripts = "dev/ablate", .threads = 1, .terminal = isatty(1)};
    parse_command(&lab, argc, argv, &path);
    experiment_read(&lab.e, path);
    if (access(lab.train, X_OK) != 0) { FAIL("%s: found no such program, expected train_gpt2 (make)", lab.train); }
    if (!lab.jobs) { lab.jobs = (int)(sysconf(_SC_NPROCESSORS_ONLN) / lab.threads); }
    if (lab.jobs < 1) { lab.jobs = 1; }
    if (!lab.out) { lab.out = default_out(path); }
    lab.estimates = get_memory(NULL, sizeof(Estimate) * (size_t)(lab.e.num_rows * lab.e.num_settings));
    memset(lab.estimates, 0, sizeof(Estimate) * (size_t)(lab.e.num_rows * lab.e.num_settings));
    for (int r = 0; r < lab.e.num_rows; r++) { for (int s = 0; s < lab.e.num_settings; s++) { estimate_row(&lab, r, s); } }
    if (lab.estimate_only) { print_estimate(&lab); return 0; }
    check_gnuplot(&lab);
    make_dirs(lab.out);
    int lock = open(lab.out, O_RDONLY | O_CLOEXEC);
    if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0) { FAIL("--out %s: found another laboratory at work in it, expected a folder of its own for each", lab.out); }
    lab_prepare(&lab);
    printf("%s: %d rows, %d settings, %d seeds: %d runs, %d at a time, in %s\n", path, lab.e.num_rows, lab.e.num_settings, lab.e.num_seeds, lab.num_runs, lab.jobs, lab.out);
    fflush(stdout);
    lab_train(&lab);
    for (int i = 0; i < lab.num_runs; i++) { run_read(&lab.runs[i]); }
    write_loss_table(&lab);
    write_best_table(&lab);
    write_law_table(&lab);
    write_cost_table(&lab);
    printf("\ntables: %s/table.txt, .csv, .md; cost.* beside it\n", lab.out);
    write_figures(&lab);
    if (fflush(stdout) != 0) { FAIL("standard output: %s", strerror(errno)); }
    return 0;
}

#ifndef TESTING_ABLATE
int main(int argc, char **argv) { return lab_main(argc, argv); }
#endif
