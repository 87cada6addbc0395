// test_ablate.c: the ablation laboratory: its statistics, bad experiment files, and that a laboratory killed again and
// again ends with the tables of one that was left alone.
//
//   make build/test_ablate && build/test_ablate     ROOT=dir: the repository (default .); TRAIN=path: another train_gpt2
//
// The laboratory runs in children of this process, on models so small that a run takes a fraction of a second.
#define TESTING_ABLATE
#include "../ablate/ablate.c"

#include <criterion/criterion.h>

// Criterion's own leaks, and what the laboratory keeps until it ends, would fail every sanitized run.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static char root[4096], train[4096], scripts[4200], folder[64];

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

static void setup(void) {
    const char *given_root = getenv("ROOT"), *given_train = getenv("TRAIN");
    cr_assert(realpath(given_root ? given_root : ".", root));
    char path[4200];
    snprintf(path, sizeof path, "%s/train_gpt2", root);
    cr_assert(realpath(given_train ? given_train : path, train), "%s: cannot find it (make)", path);
    snprintf(scripts, sizeof scripts, "%s/dev/ablate", root);
    strcpy(folder, "/tmp/test_ablate_XXXXXX");
    cr_assert(mkdtemp(folder) && chdir(folder) == 0);
    setenv("OMP_NUM_THREADS", "1", 1);
    cr_assert(mkdir("data", 0777) == 0);
    shell("%s/data/synth --tokens 6000 --val-tokens 2000 --vocab 512 --shards 1 --out data/synthetic >/dev/null", root);
}
static void teardown(void) {
    if (chdir("/") == 0 && folder[0]) { shell("rm -rf %s", folder); }
}
TestSuite(ablate, .init = setup, .fini = teardown, .timeout = 120);

static int has_gnuplot(void) { return system("command -v gnuplot >/dev/null 2>&1") == 0; }
static const char *maybe_scripts(void) { return has_gnuplot() ? scripts : "none"; }

// Starts the laboratory on x.exp; its output goes to `name`.out and `name`.err.
static pid_t lab_start(const char *name, const char *drawing) {
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid > 0) { return pid; }
    char out[80], err[80];
    snprintf(out, sizeof out, "%s.out", name);
    snprintf(err, sizeof err, "%s.err", name);
    if (!freopen(out, "a", stdout) || !freopen(err, "a", stderr)) { _exit(99); }
    char *argv[] = {"ablate", "x.exp", "--out", (char *)name, "--jobs", "2", "--train", train, "--scripts", (char *)drawing};
    int status = lab_main(10, argv);
    fflush(NULL);
    _exit(status);
}
static int lab_wait(pid_t pid) {
    int status;
    cr_assert(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
static void write_experiment(const char *text) {
    FILE *file = fopen("x.exp", "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}
static char *slurp(const char *path) {
    char *text = read_file(path);
    cr_assert(text, "%s: no such file", path);
    return text;
}

#define SMALL "base: --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 4 --steps 60 --val-every 15 --val-batches 4 --save-every 10 --keep 1 --lr 0.01\n"

// ----------------------------------------------------------------------------------------------------
// Statistics

Test(statistics, student_t) { // from tables
    static const struct { int df; double t; } rows[] = {{1, 12.7062}, {2, 4.3027}, {3, 3.1824}, {4, 2.7764}, {9, 2.2622}, {30, 2.0423}, {1000, 1.9623}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) { cr_expect(fabs(t_quantile(rows[i].df) - rows[i].t) < 6e-5, "df %d: %.5f, expected %.4f", rows[i].df, t_quantile(rows[i].df), rows[i].t); }
    cr_expect(isnan(t_quantile(0)));
}

Test(statistics, mean_and_interval) { // 1..5: standard deviation sqrt(2.5), standard error sqrt(0.5), t 2.77645
    double x[] = {1, 2, 3, 4, 5};
    Summary s = summarize(x, 5);
    cr_expect(s.n == 5 && fabs(s.mean - 3) < 1e-12 && fabs(s.se - sqrt(0.5)) < 1e-12);
    cr_expect(fabs(s.low - (3 - 2.77645 * sqrt(0.5))) < 1e-4 && fabs(s.high - (3 + 2.77645 * sqrt(0.5))) < 1e-4);
    cr_expect(isnan(summarize(x, 1).se) && isnan(summarize(x, 1).low));
    double y[] = {9, 1, 4, 2};
    cr_expect(fabs(quantile(y, 4, 0.5) - 3) < 1e-12);
    cr_expect(strcmp(verdict((Summary){5, -1, 0, -2, -0.1}), "better") == 0 && strcmp(verdict((Summary){5, 1, 0, 0.1, 2}), "worse") == 0 && strcmp(verdict((Summary){5, 0, 0, -1, 1}), "open") == 0);
}

Test(statistics, tokens_to_reach_a_loss) {
    double tokens[] = {100, 200, 300, 400}, loss[] = {5, 4, 3.5, 3};
    cr_expect(fabs(tokens_to_reach(tokens, loss, 4, 3.75) - 250) < 1e-9);
    cr_expect(fabs(tokens_to_reach(tokens, loss, 4, 3) - 400) < 1e-9);
    cr_expect(tokens_to_reach(tokens, loss, 4, 6) == 100);
    cr_expect(isnan(tokens_to_reach(tokens, loss, 4, 2.9)));
}

Test(statistics, law_of_sizes) {
    double n[] = {1e5, 2e5, 4e5, 8e5}, loss[4];
    for (int i = 0; i < 4; i++) { loss[i] = 1.5 + 40 * pow(n[i], -0.35); }
    Law given = law_fit(n, loss, 4, 1.5), fitted = law_fit(n, loss, 4, NAN);
    cr_expect(fabs(given.power - 0.35) < 1e-9 && fabs(given.factor / 40 - 1) < 1e-7);
    cr_expect(fabs(fitted.floor - 1.5) < 0.01 && fabs(fitted.power - 0.35) < 0.01, "floor %g power %g", fitted.floor, fitted.power);
}

// ----------------------------------------------------------------------------------------------------
// Experiment files

// Each must end with status 2 and one line on stderr that has all the words.
Test(ablate, bad_experiments) {
    static const struct { const char *text, *words; } bad[] = {
        {"row a: --variant hg\n", "no seeds"},
        {"seeds: 1\n", "no row"},
        {"seeds: 1 x\nrow a:\n", "x.exp:1|\"x\""},
        {"seeds: 1 1\nrow a:\n", "x.exp:1|seed 1 twice"},
        {"seeds: -1\nrow a:\n", "\"-1\""},
        {"seeds: 1\nrow a:\nrow a:\n", "x.exp:3|\"a\" twice"},
        {"seeds: 1\nrow a:\nbaseline: b\n", "x.exp:3|b"},
        {"seeds: 1\nrow a vs b:\n", "x.exp:2|b"},
        {"seeds: 1\nrow a vs a:\n", "x.exp:2|another row"},
        {"seeds: 1\nrow a versus b:\n", "x.exp:2|row NAME vs OTHER"},
        {"seeds: 1\nrow a b c d:\n", "x.exp:2|row NAME"},
        {"seeds: 1\nrow ../a:\n", "x.exp:2|../a"},
        {"seeds: 1\nrow a: variant hg\n", "x.exp:2|\"variant\""},
        {"seeds: 1\nrow a: --variant\n", "x.exp:2|--variant"},
        {"seeds: 1\nrow a: --hg --qk-norm on\n", "x.exp:2|--hg"},
        {"seeds: 1\nrow a: --seed 3\n", "x.exp:2|--seed|seeds:"},
        {"seeds: 1\nrow a: --out b\n", "x.exp:2|--out"},
        {"seeds: 1\nrow a:\nspeed: 3\n", "x.exp:3|speed|sweep"},
        {"seeds: 1\nrow a:\nhello\n", "x.exp:3|hello|KEY"},
        {"seeds: 1\nrow a:\nsweep lr:\n", "x.exp:3|without values"},
        {"seeds: 1\nrow a:\nsweep lr: 1 1\n", "x.exp:3|lr=1|twice"},
        {"seeds: 1\nrow a: --lr 1\nsweep lr: 1 2\n", "x.exp:2|--lr|line 3"},
        {"seeds: 1\nrow a:\nsweep lr: 1 2\nsetting s: --layers 2\n", "x.exp:4|one of them"},
        {"seeds: 1\nrow a:\nlaw: x\n", "x.exp:3|law: x"},
        {"seeds: 1\nrow a:\nlaw: free\n", "at least 3"},
        {"seeds: 1\nrow a:\nkeep: off\n", "x.exp:3|keep"},
        {"seeds: 1\nrow a:\ncurves: a b\n", "x.exp:3|\"b\""},
        {"title: it's\nseeds: 1\nrow a:\n", "x.exp:1|quotation"},
        {SMALL "seeds: 1\nrow a:\nrow b: --varaint hg\n", "x.exp:4|row b|--variant"}, // what train_gpt2 refuses
        {SMALL "seeds: 1\nrow a: --variant noscale+hg\n", "x.exp:3|row a|contradict"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_experiment(bad[i].text);
        unlink("bad.err");
        int status = lab_wait(lab_start("bad", "none"));
        char *err = slurp("bad.err"), *words = strdup(bad[i].words), *save = NULL;
        cr_expect_eq(status, 2, "status %d, expected 2, of:\n%s%s", status, bad[i].text, err);
        cr_expect(strchr(err, '\n') == err + strlen(err) - 1, "found not exactly one line: %s", err);
        for (char *word = strtok_r(words, "|", &save); word; word = strtok_r(NULL, "|", &save)) { cr_expect(strstr(err, word), "found no \"%s\" in: %s", word, err); }
        cr_expect(access("bad/runs", F_OK) != 0, "a bad experiment has begun");
        free(err); free(words);
    }
}

// Every experiment of the repository: train_gpt2 takes every row.
Test(ablate, experiments_of_the_repository) {
    char command[8600];
    snprintf(command, sizeof command, "ls %s/small/*.exp %s/paper/*.exp", scripts, scripts);
    FILE *list = popen(command, "r");
    cr_assert(list);
    char path[4200];
    int count = 0;
    for (; fgets(path, sizeof path, list); count++) {
        path[strcspn(path, "\n")] = '\0';
        pid_t pid = fork();
        if (pid == 0) {
            char *argv[] = {"ablate", path, "--train", train, "--estimate"};
            if (!freopen("/dev/null", "w", stdout)) { _exit(99); }
            _exit(lab_main(5, argv));
        }
        cr_expect_eq(lab_wait(pid), 0, "%s --estimate failed", path);
        char twin[8600]; // small and paper have the same experiments
        const char *slash = strrchr(path, '/');
        int small = strncmp(slash - 5, "small", 5) == 0;
        snprintf(twin, sizeof twin, "%s/%s%s", scripts, small ? "paper" : "small", slash);
        if (!strstr(slash, "only_")) { cr_expect(access(twin, F_OK) == 0, "%s has no twin %s", path, twin); }
    }
    cr_assert(pclose(list) == 0 && count >= 20, "found %d experiments", count);
}

// ----------------------------------------------------------------------------------------------------
// Whole experiments

static const char experiment[] = "title: A test\n" SMALL "seeds: 3 1 2\nbaseline: base # a comment\nrow noscale: --variant noscale\nrow base:\n"
                                 "row unified vs noscale: --variant unified\n";

static void same_files(const char *a, const char *b, const char *name) {
    char pa[200], pb[200];
    snprintf(pa, sizeof pa, "%s/%s", a, name);
    snprintf(pb, sizeof pb, "%s/%s", b, name);
    char *ta = slurp(pa), *tb = slurp(pb);
    cr_expect_str_eq(ta, tb);
    cr_expect(strlen(ta) > 20);
    free(ta); free(tb);
}

// Killed at any time, this program or also its children by SIGTERM: the same tables and curves at the end.
Test(ablate, killed_and_gone_on) {
    write_experiment(experiment);
    cr_assert_eq(lab_wait(lab_start("whole", maybe_scripts())), 0, "%s", slurp("whole.err"));
    int kills = 0, terms = 0, status = 1;
    unsigned noise = 12345;
    for (int i = 0; i < 60 && status != 0; i++) {
        pid_t pid = lab_start("killed", maybe_scripts());
        noise = noise * 1664525u + 1013904223u;
        usleep(30000 + (noise >> 16) % 120000);
        kill(pid, i % 3 == 2 ? SIGTERM : SIGKILL);
        status = lab_wait(pid);
        cr_assert(status == 0 || status == -SIGKILL || status == 130 || status == -SIGTERM, "status %d: %s", status, slurp("killed.err"));
        kills += status == -SIGKILL;
        terms += status == 130;
        if (i > 20 && kills >= 3 && terms >= 1) { break; }
    }
    cr_assert_eq(lab_wait(lab_start("killed", maybe_scripts())), 0, "%s", slurp("killed.err"));
    cr_expect(kills >= 3 && terms >= 1, "%d kills, %d terminations: too few to show anything", kills, terms);
    static const char *const names[] = {"table.txt", "table.csv", "table.md"}, *const drawn[] = {"figures/loss.dat", "figures/relative.dat", "figures/norms.dat", "figures/difference.dat"};
    for (int i = 0; i < 3; i++) { same_files("whole", "killed", names[i]); }
    for (int i = 0; i < 4 && has_gnuplot(); i++) { same_files("whole", "killed", drawn[i]); }
    cr_expect(access("whole/runs/base/seed-1/done", F_OK) == 0 && access("whole/runs/base/seed-1/step_00000060", F_OK) != 0, "a finished run keeps its checkpoint");
}

// The numbers of the table are those of metrics.csv, in pairs by seed.
Test(ablate, table_and_progress) {
    write_experiment(experiment);
    cr_assert_eq(lab_wait(lab_start("out", maybe_scripts())), 0, "%s", slurp("out.err"));
    double off[3], sum = 0;
    for (int seed = 1; seed <= 3; seed++) {
        double last[2] = {0, 0};
        static const char *const rows[] = {"unified", "base"};
        for (int r = 0; r < 2; r++) {
            char path[100];
            snprintf(path, sizeof path, "out/runs/%s/seed-%d/metrics.csv", rows[r], seed);
            char *text = slurp(path), *save = NULL;
            for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) { sscanf(line, "%*d,%*d,%*f,%*f,%lf", &last[r]); }
            free(text);
        }
        off[seed - 1] = last[0] - last[1];
        sum += last[0];
    }
    Summary s = summarize(off, 3);
    char wanted[200], *csv = slurp("out/table.csv"), *out = slurp("out.out"), *line = strstr(csv, "\nunified,");
    snprintf(wanted, sizeof wanted, "%+.4f,%+.4f,%+.4f,%s,", s.mean, s.low, s.high, verdict(s));
    cr_assert(line && strstr(line, wanted), "found no %s in\n%s", wanted, csv);
    snprintf(wanted, sizeof wanted, "\nunified,3,%.4f,", sum / 3);
    cr_expect(strstr(csv, wanted), "found no %s in\n%s", wanted, csv);
    cr_expect(strstr(csv, "\nrow,seeds,loss") == NULL && strncmp(csv, "row,seeds,loss", 14) == 0);
    cr_expect(strstr(out, "ETA") && strstr(out, "9/9 runs | 100%") && strstr(out, "out/table.txt"), "%s", out);
    cr_expect(strstr(slurp("out/table.md"), "|---|---:|"));
    cr_expect(strstr(slurp("out/cost.txt"), "ms a step"));
    // rows take turns: the first seed of all rows comes before the second of any
    cr_expect(strstr(out, "1/9 runs") && strstr(out, "seed 3: finished") < strstr(out, "seed 1: finished"));
    cr_expect_eq(lab_wait(lab_start("out", "none")), 0);
    cr_expect(strstr(slurp("out.out"), "9 of 9 runs are finished already"));
    free(csv); free(out);
}

Test(ablate, figures) {
    if (!has_gnuplot()) { cr_skip_test("found no gnuplot"); }
    write_experiment("title: Sizes\n" SMALL "seeds: 1 2\nrow a: --variant baseline\nrow b: --variant noscale\nsetting s: --hidden 8\nsetting m: --hidden 16\nsetting l: --hidden 32\nlaw: free\n");
    cr_assert_eq(lab_wait(lab_start("sizes", scripts)), 0, "%s", slurp("sizes.err"));
    write_experiment(SMALL "seeds: 1 2\nrow a: --variant baseline\nrow b: --variant hg\nsweep weight-decay: 0 0.1 1\n");
    cr_assert_eq(lab_wait(lab_start("sweep", scripts)), 0, "%s", slurp("sweep.err"));
    static const char *const names[] = {"sizes/figures/loss", "sizes/figures/relative", "sizes/figures/difference", "sizes/figures/norms", "sizes/figures/law", "sweep/figures/sweep"};
    for (int i = 0; i < 6; i++) {
        char path[100], head[8] = "";
        snprintf(path, sizeof path, "%s.png", names[i]);
        FILE *png = fopen(path, "rb");
        cr_assert(png && fread(head, 1, 8, png) == 8 && memcmp(head, "\x89PNG\r\n\x1a\n", 8) == 0, "%s is no PNG", path);
        fclose(png);
        snprintf(path, sizeof path, "%s.svg", names[i]);
        char *svg = slurp(path);
        cr_expect(strstr(svg, "<svg") && strstr(svg, "</svg>"), "%s is no whole SVG", path);
        free(svg);
    }
    cr_expect(strstr(slurp("sweep/best.csv"), "weight-decay="));
    cr_expect(strstr(slurp("sizes/law.txt"), "power"));
}

// A run that diverges is a result; one that fails is told and can be gone on with.
Test(ablate, diverged_failed_edited) {
    write_experiment(SMALL "seeds: 1 2\nrow base:\nrow wild: --lr 100 --optimizer sgd --grad-clip 0 --variant noscale\n");
    cr_assert_eq(lab_wait(lab_start("wild", maybe_scripts())), 0, "%s", slurp("wild.err"));
    cr_expect(strstr(slurp("wild/table.csv"), "\nwild,0 of 2,-,-,-,-,-,diverged"), "%s", slurp("wild/table.csv"));
    write_experiment(SMALL "seeds: 1 2\nrow base: --lr 0.02\n");
    cr_expect_eq(lab_wait(lab_start("wild", "none")), 1);
    cr_expect(strstr(slurp("wild.err"), "flags of another run"), "%s", slurp("wild.err"));
    write_experiment(SMALL "seeds: 1 2\nrow base:\n");
    shell("mkdir -p failed && cp -r data kept && truncate -s 1500 data/synthetic/synth_train_000001.bin"); // --estimate reads only its head
    cr_expect_eq(lab_wait(lab_start("failed", "none")), 1);
    cr_expect(strstr(slurp("failed.err"), "synth_train_000001.bin"), "%s", slurp("failed.err"));
    shell("rm -r data && mv kept data");
    cr_expect_eq(lab_wait(lab_start("failed", "none")), 0, "%s", slurp("failed.err"));
}

// ----------------------------------------------------------------------------------------------------
// doc/scale_vectors.md says where the code is by the names of functions: each `name()` must be a function there.
Test(ablate, functions_that_the_documents_name) {
    static const char *const documents[] = {"scale_vectors.md", "reproduce.md"};
    char path[4200];
    snprintf(path, sizeof path, "%s/train_gpt2.c", root);
    char *source = slurp(path);
    int count = 0;
    for (int d = 0; d < 2; d++) {
        snprintf(path, sizeof path, "%s/doc/%s", root, documents[d]);
        char *text = slurp(path);
        for (char *at = strstr(text, "()`"); at; at = strstr(at + 1, "()`")) {
            char *begin = at, wanted[200];
            while (begin > text && (isalnum((unsigned char)begin[-1]) || begin[-1] == '_')) { begin--; }
            snprintf(wanted, sizeof wanted, "%.*s(", (int)(at - begin), begin);
            char *found = strstr(source, wanted);
            cr_expect(found && begin[-1] == '`', "%s names %s), which train_gpt2.c doesn't have", documents[d], wanted);
            count++;
        }
        free(text);
    }
    cr_expect(count >= 15, "found only %d names of functions", count);
    free(source);
}
