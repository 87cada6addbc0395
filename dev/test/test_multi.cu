// test_multi.cu: several GPUs and processes train as one GPU does, and end cleanly when one of them doesn't.
// The GPUs are virtual ones of dev/emu; each run is a process of its own, forked from here: the program itself, with flags.
//
//   make test-emu                         about a minute
//   TEST_MULTI=brief ...                  under sanitizers: one number of GPUs for each model, 4 pairs of numbers to resume with
//   TEST_MULTI=full build/emu/test_multi  every combination of model, number of GPUs and --zero; 30 faults instead of 5
#include <cuda_runtime.h>
static cudaError_t planted_error();
#define cudaGetLastError planted_error // asked after each launch: see planted_error
#define TESTING
#include "../../train_gpt2.cu"
#undef cudaGetLastError
#include <criterion/criterion.h>
#include <sys/wait.h>

TestSuite(multi, .timeout = 1800); // a busy machine, or sanitizers: what may not take long has limits of its own

// The thread of GPU `planted_gpu` fails at its launch number `planted_launch`, or stands still for ever.
static int planted_gpu = -1, planted_stall;
static int64_t planted_launch;
static cudaError_t planted_error() {
    static std::atomic<int64_t> launches{0};
    int gpu = 0;
    if (planted_gpu < 0 || cudaGetDevice(&gpu) != cudaSuccess || gpu != planted_gpu || ++launches != planted_launch) { return cudaGetLastError(); }
    while (planted_stall) { pause(); }
    return cudaErrorUnknown;
}

// ----------------------------------------------------------------------------------------------------
// Runs

static std::string root; // a folder for what a test writes
static void make_root() {
    char name[] = "/tmp/test_multi_XXXXXX";
    cr_assert(mkdtemp(name) != NULL);
    root = name;
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, 0, 64};
    for (int val = 0; val < 2; val++) { // tokens that follow from the one before, but for a little noise
        std::vector<uint16_t> tokens((size_t)(val ? 200 : 6000));
        for (size_t i = 1; i < tokens.size(); i++) { tokens[i] = (uint16_t)((5 * tokens[i - 1] + random_u64(i + (size_t)val * 10000) % 3) % 64); }
        header[2] = (int32_t)tokens.size();
        FILE *file = fopen((root + (val ? "/val_0.bin" : "/train_0.bin")).c_str(), "wb");
        cr_assert(file && fwrite(header, sizeof header, 1, file) == 1 && fwrite(tokens.data(), 2, tokens.size(), file) == tokens.size() && fclose(file) == 0);
    }
}
static void remove_root() {
    std::string command = "rm -rf " + root;
    cr_assert(system(command.c_str()) == 0);
}

static const char *const MODEL = "--layers 2 --channels 16 --heads 1 --seq-len 4 --vocab 64 --batch 1 --precision fp32 --warmup 0 --lr 1e-3 --val-every 0 --steps 20 --save-every 0 --keep 0";
static int launcher = -1; // processes and which, in the environment of a launcher; -1: none
static int launcher_size;

static pid_t start(const std::string &name, const std::string &flags, const std::string &log_suffix = "") {
    fflush(NULL);
    pid_t child = fork();
    if (child != 0) { return child; }
    std::string log = root + "/" + name + log_suffix + ".log";
    if (!freopen((log + ".out").c_str(), "w", stdout) || !freopen(log.c_str(), "w", stderr)) { _exit(99); }
    setvbuf(stderr, NULL, _IONBF, 0); // as it was before: nothing is lost when a thread ends the process
    setenv("CUDA_EMU_DEVICES", "8", 1);
    setenv("CUDA_EMU_NCCL_TIMEOUT", "120", 0); // a busy machine may leave a thread alone for long
    if (launcher >= 0) {
        setenv("PMI_SIZE", std::to_string(launcher_size).c_str(), 1);
        setenv("PMI_RANK", std::to_string(launcher).c_str(), 1);
    }
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    std::vector<std::string> words = {"train_gpt2cu"};
    std::string all = std::string(MODEL) + " --data " + root + "/train_0.bin --out " + root + "/" + name + " " + flags, word;
    std::vector<std::string> given_words;
    for (size_t at = 0; at < all.size();) { // of flags that are there twice the last counts
        size_t end = all.find(' ', at);
        if (end == std::string::npos) { end = all.size(); }
        if (end > at) { given_words.push_back(all.substr(at, end - at)); }
        at = end + 1;
    }
    for (size_t i = 0; i + 1 < given_words.size(); i += 2) {
        bool again = false;
        for (size_t k = i + 2; k + 1 < given_words.size(); k += 2) { again = again || given_words[k] == given_words[i]; }
        if (!again) { words.push_back(given_words[i]); words.push_back(given_words[i + 1]); }
    }
    std::vector<char *> argv;
    for (std::string &w : words) { argv.push_back(&w[0]); }
    argv.push_back(NULL);
    gpu::job_begin();
    int status = train_main((int)words.size(), argv.data());
    gpu::job_end();
    fflush(NULL);
    _exit(status);
}
// Exit status; 128 + a signal; -1: still running after `limit` seconds, and killed.
static int finish_of(pid_t child, double limit = 300) {
    double begin = seconds();
    int status;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (seconds() - begin > limit) { kill(child, SIGKILL); waitpid(child, &status, 0); return -1; }
        usleep(5000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
static std::string read_text(const std::string &path) {
    FILE *file = fopen(path.c_str(), "rb");
    std::string text;
    char piece[4096];
    for (size_t n; file && (n = fread(piece, 1, sizeof piece, file)) > 0;) { text.append(piece, n); }
    if (file) { fclose(file); }
    return text;
}
static std::string log_of(const std::string &name) { return read_text(root + "/" + name + ".log"); }
static void run(const std::string &name, const std::string &flags) {
    int status = finish_of(start(name, flags));
    cr_assert_eq(status, 0, "%s: status %d: %s", flags.c_str(), status, log_of(name).c_str());
}
// Column `column` of metrics.csv, by step - 1; NaN where it is empty
static std::vector<double> column_of(const std::string &name, int column) {
    std::vector<double> values;
    std::string text = read_text(root + "/" + name + "/metrics.csv");
    for (size_t at = text.find('\n'); at != std::string::npos && at + 1 < text.size(); at = text.find('\n', at + 1)) {
        size_t cell = at + 1;
        for (int i = 0; i < column; i++) { cell = text.find(',', cell) + 1; }
        values.push_back(text[cell] == ',' ? NAN : strtod(text.c_str() + cell, NULL));
    }
    return values;
}
enum { COLUMN_LOSS = 3, COLUMN_VAL = 4, COLUMN_NORM = 5 };
static double worst_difference(const std::string &a, const std::string &b, int column = COLUMN_LOSS) {
    std::vector<double> x = column_of(a, column), y = column_of(b, column);
    double worst = 0;
    cr_assert(!x.empty() && x.size() == y.size(), "%s has %zu steps, %s %zu", a.c_str(), x.size(), b.c_str(), y.size());
    for (size_t i = 0; i < x.size(); i++) { if (!isnan(x[i]) || !isnan(y[i])) { worst = fmax(worst, isfinite(x[i] - y[i]) ? fabs(x[i] - y[i]) : INFINITY); } }
    return worst;
}
static std::string checkpoint(const std::string &name, int step) {
    char text[64];
    snprintf(text, sizeof text, "/step_%08d", step);
    return root + "/" + name + text;
}
static int asked_for(const char *what) { return getenv("TEST_MULTI") && strcmp(getenv("TEST_MULTI"), what) == 0; }
static int full() { return asked_for("full"); }
static int brief() { return asked_for("brief"); }

// ----------------------------------------------------------------------------------------------------
// Who owns what

static void build(::GPT *m, std::string flags) {
    static Config cfg;
    std::vector<std::string> words = {"train_gpt2cu"};
    for (char *w = strtok(&flags[0], " "); w; w = strtok(NULL, " ")) { words.push_back(w); }
    std::vector<const char *> argv;
    for (std::string &w : words) { argv.push_back(w.c_str()); }
    config_defaults(&cfg);
    config_parse_flags(&cfg, (int)argv.size(), argv.data());
    presets_apply(&cfg);
    config_resolve(&cfg);
    gpt_build(m, &cfg);
}

Test(multi, every_row_has_one_owner) {
    for (const char *model : {"0.12b", "moe-0.25b"}) {
        for (int world : {1, 2, 3, 8}) {
            static ::GPT host;
            build(&host, std::string("--variant unified --model ") + model);
            gpu::Model<gpu::bf16> m = {};
            m.host = &host;
            gpu::layout_places(&m);
            std::vector<gpu::Piece> pieces = gpu::share_out(&host, m.places, world);
            std::vector<int64_t> rows((size_t)host.num_params, 0), load((size_t)world, 0);
            int64_t total = 0;
            for (const gpu::Piece &p : pieces) {
                cr_assert(p.owner >= 0 && p.owner < world && p.row == rows[(size_t)p.param], "rows in order, without gaps");
                rows[(size_t)p.param] += p.rows;
                load[(size_t)p.owner] += p.rows * m.places[(size_t)p.param].ld;
            }
            for (int i = 0; i < host.num_params; i++) {
                int64_t expected = host.params[i].role >= ROLE_GAMMA_B ? 0 : m.places[(size_t)i].rows;
                cr_assert_eq(rows[(size_t)i], expected, "%s", host.params[i].name);
                total += expected * m.places[(size_t)i].ld;
            }
            for (int64_t l : load) { cr_assert((double)l < 1.04 * (double)total / world && (double)l > 0.96 * (double)total / world, "%s on %d: %lld of %lld", model, world, (long long)l, (long long)total); }
        }
    }
}

// theta, moments and, in what Linux counts as virtual GPUs' memory, all that is allocated: 1/N, but for scale vectors
Test(multi, optimizer_memory_falls) {
    static ::GPT host;
    build(&host, "--model 0.12b --variant unified --zero 1");
    MemoryUse one = gpu::gpt_estimate_memory<gpu::bf16>(&host, 8, 1024, 1);
    for (int world : {2, 3, 4, 8}) {
        MemoryUse use = gpu::gpt_estimate_memory<gpu::bf16>(&host, 8, 1024, world);
        double theta = (double)use.theta / (double)one.theta * world, moments = (double)use.moments / (double)one.moments * world;
        cr_assert(theta < 1.05 && moments < 1.05 && theta > 0.99 && moments > 0.99, "%d GPUs: theta %.3f, moments %.3f of their share", world, theta, moments);
        cr_assert_eq(use.grads, one.grads);
        cr_assert_eq(use.effective, one.effective);
        cr_log_info("%d GPUs: theta %.1f MiB, moments %.1f MiB", world, (double)use.theta / (1 << 20), (double)use.moments / (1 << 20));
    }
    setenv("CUDA_EMU_DEVICES", "4", 1);
    static ::GPT small;
    build(&small, "--layers 2 --channels 64 --heads 2 --vocab 512 --seq-len 4 --zero 1 --precision fp32");
    size_t before, after, all;
    CUDA_CHECK(cudaMemGetInfo(&before, &all));
    gpu::Gpu g = {};
    gpu::gpu_open(&g, 0, 1, 4);
    gpu::Model<float> *m = gpu::gpt_allocate<float>(&small, &g, 1, 4);
    CUDA_CHECK(cudaMemGetInfo(&after, &all));
    MemoryUse use = gpu::gpt_estimate_memory<float>(&small, 1, 4, 4);
    int64_t slack = 4096 * 256; // rounding of each tensor
    cr_assert((int64_t)(before - after) <= (int64_t)use.total + slack, "%zu bytes taken, %zu estimated", before - after, (size_t)use.total);
    cr_assert_lt(m->num_theta, small.num_theta / 3);
    gpu::gpt_free(m);
    gpu::gpu_close(&g);
}

// ----------------------------------------------------------------------------------------------------
// The same losses

// 20 steps of 24 sequences on 1, 2, 3, 4 and 8 GPUs; else `groups`: sequences, and the numbers of GPUs. Learning rates
// are moderate: training is chaotic, and at high ones sums in another order grow to differences that say nothing.
static void losses_agree(const char *name, const std::string &flags, std::vector<std::pair<int, std::vector<int>>> groups) {
    double by_world = 0, by_zero = 0;
    if (full()) { groups = {{24, {2, 3, 4, 8}}}; }
    if (brief()) { groups = {groups.back()}; }
    for (auto &[total, worlds] : groups) {
        std::string of = flags + " --val-every 10 --val-batches 7 --total-batch " + std::to_string(total), one = std::string(name) + std::to_string(total);
        run(one, of + " --gpus 1");
        for (int world : worlds) {
            std::string here = one + "on" + std::to_string(world);
            run(here + "z0", of + " --gpus " + std::to_string(world) + " --zero 0");
            run(here + "z1", of + " --gpus " + std::to_string(world) + " --zero 1");
            for (int column : {COLUMN_LOSS, COLUMN_VAL}) {
                by_world = fmax(by_world, fmax(worst_difference(one, here + "z0", column), worst_difference(one, here + "z1", column)));
                by_zero = fmax(by_zero, worst_difference(here + "z0", here + "z1", column));
            }
            std::vector<double> losses = column_of(here + "z1", COLUMN_VAL);
            cr_assert_eq(losses.size(), 20);
            cr_assert_lt(losses[19], losses[9], "it learns");
        }
    }
    cr_assert(by_world <= 1e-5, "%s: %.2e from one GPU to several", name, by_world);
    cr_assert(by_zero <= 1e-6, "%s: %.2e between --zero 0 and 1", name, by_zero);
    printf("%s: worst difference of a loss %.1e, of --zero 0 and 1 %.1e\n", name, by_world, by_zero);
    remove_root();
}
Test(multi, losses_baseline, .init = make_root) { losses_agree("baseline", "--variant baseline", {{8, {2, 4, 8}}, {3, {3}}}); }
Test(multi, losses_unified, .init = make_root) { losses_agree("unified", "--variant unified", {{4, {2, 4}}, {3, {3}}}); }
Test(multi, losses_unified_muon, .init = make_root) { losses_agree("muon", "--variant unified --optimizer muon --lr 5e-4", {{8, {8}}, {3, {3}}}); }
Test(multi, losses_moe, .init = make_root) { losses_agree("moe", "--variant unified --experts 3 --top-k 2 --expert-hidden 8 --shared-hidden 8 --router-z-loss 0.01", {{2, {2}}}); }
Test(multi, losses_tied, .init = make_root) { losses_agree("tied", "--variant hg+dp --tie-embeddings on", {{3, {3}}}); } // dW~ of a tied head lies apart; its gamma_a goes by rows

static void same_file(const std::string &a, const std::string &b) {
    std::string x = read_text(a), y = read_text(b);
    cr_assert(!x.empty() && x == y, "%s and %s: %zu and %zu bytes, expected the same", a.c_str(), b.c_str(), x.size(), y.size());
}

Test(multi, same_number_same_bits, .init = make_root) {
    const std::string flags = "--variant unified --optimizer muon --experts 3 --top-k 2 --expert-hidden 8 --shared-hidden 0 --total-batch 6 --stop-at 4";
    for (const char *zero : {"0", "1"}) {
        for (const char *name : {"a", "b"}) { run(std::string(name) + zero, flags + " --gpus 3 --zero " + zero); }
        for (const char *file : {"/model.safetensors", "/optimizer.safetensors"}) { same_file(checkpoint(std::string("a") + zero, 4) + file, checkpoint(std::string("b") + zero, 4) + file); }
        same_file(root + "/a" + zero + "/metrics.csv", root + "/b" + zero + "/metrics.csv");
    }
    remove_root();
}

// Saved by N, continued by M: the unbroken run's losses
Test(multi, resume_with_other_numbers, .init = make_root) {
    const std::string flags = "--variant unified --optimizer muon --total-batch 24 ";
    run("unbroken", flags + "--stop-at 4 --gpus 1");
    int odd = 0;
    const std::vector<int> numbers = brief() ? std::vector<int>{2, 3} : std::vector<int>{1, 2, 3, 8};
    for (int n : numbers) {
        std::string from = "from" + std::to_string(n);
        run(from, flags + "--stop-at 2 --gpus " + std::to_string(n) + (n == 1 ? "" : n % 2 ? " --zero 0" : " --zero 1"));
        for (int to : numbers) {
            std::string name = from + "to" + std::to_string(to);
            std::string copy = "cp -r " + root + "/" + from + " " + root + "/" + name;
            cr_assert(system(copy.c_str()) == 0);
            std::string more = "--resume " + root + "/" + name + " --stop-at 4 --gpus " + std::to_string(to) + (++odd % 2 ? " --zero 1" : " --zero 0");
            int status = finish_of(start(name, more));
            cr_assert_eq(status, 0, "%s: %s", more.c_str(), log_of(name).c_str());
            cr_assert_eq(column_of(name, COLUMN_LOSS).size(), 4);
            double worst = worst_difference("unbroken", name);
            cr_assert(worst <= 1e-5, "%d to %d: %.2e", n, to, worst);
        }
    }
    int status = finish_of(start("sample", "--resume " + root + "/from2 --sample 3 --gpus 2"));
    cr_assert(status == 2 && log_of("sample").find("one GPU") != std::string::npos, "%d: %s", status, log_of("sample").c_str());
    remove_root();
}

// ----------------------------------------------------------------------------------------------------
// Several processes

static std::vector<pid_t> start_processes(int count, const std::string &name, const std::string &flags, const std::vector<std::string> &more = {}) {
    std::vector<pid_t> children;
    launcher_size = count;
    for (launcher = 0; launcher < count; launcher++) {
        children.push_back(start(name, flags + (launcher < (int)more.size() ? " " + more[(size_t)launcher] : ""), launcher ? std::to_string(launcher) : ""));
    }
    launcher = -1;
    return children;
}

Test(multi, processes_are_ranks, .init = make_root) { // 2 of 2 GPUs are one of 4, bit for bit
    const std::string flags = "--variant unified --optimizer muon --total-batch 8 --stop-at 3 --val-every 2 --timeout 100";
    for (const char *zero : {"0", "1"}) {
        std::string one = std::string("one") + zero, two = std::string("two") + zero;
        run(one, flags + " --gpus 4 --zero " + zero);
        for (int again = 0; again < 2; again++) { // the second time into the folder that still has the first one's files
            std::vector<pid_t> children = start_processes(2, two, flags + " --gpus 2 --zero " + zero);
            for (pid_t child : children) { int status = finish_of(child); cr_assert_eq(status, 0, "status %d: %s%s", status, log_of(two).c_str(), log_of(two + "1").c_str()); }
            for (const char *file : {"/model.safetensors", "/optimizer.safetensors"}) { same_file(checkpoint(one, 3) + file, checkpoint(two, 3) + file); }
            same_file(root + "/" + one + "/metrics.csv", root + "/" + two + "/metrics.csv");
            std::string remove = "rm -rf " + root + "/" + two + "/step_*";
            cr_assert(system(remove.c_str()) == 0);
        }
        cr_assert_eq(read_text(root + "/" + two + "1.log.out"), "", "only process 0 speaks");
    }
    remove_root();
}

Test(multi, processes_that_differ, .init = make_root) {
    struct { const char *more, *expected; } cases[] = {{"--lr 0.002", "other flags or another checkpoint"}, {"--gpus 2", "another number of GPUs"}};
    for (auto &c : cases) {
        std::vector<pid_t> children = start_processes(2, "differ", "--total-batch 12 --stop-at 2 --timeout 60 --gpus 1", {"", c.more});
        std::string statuses;
        for (pid_t child : children) { statuses += " " + std::to_string(finish_of(child, 100)); }
        std::string text = log_of("differ") + log_of("differ1");
        cr_assert(statuses == " 1 1", "%s:%s: %s", c.more, statuses.c_str(), text.c_str());
        cr_assert(text.find(c.expected) != std::string::npos, "%s", text.c_str());
    }
    remove_root();
}

Test(multi, a_process_that_never_comes, .init = make_root) {
    launcher_size = 2;
    launcher = 0;
    pid_t child = start("alone", "--total-batch 8 --timeout 1");
    launcher = -1;
    cr_assert_eq(finish_of(child, 60), 1);
    cr_assert(log_of("alone").find("no sign of process 1 of 2 (rank 1)") != std::string::npos, "%s", log_of("alone").c_str());
    remove_root();
}

Test(multi, wrong_flags, .init = make_root) {
    struct { const char *flags; int status; const char *expected; } cases[] = {
        {"--gpus 3 --total-batch 8", 2, "--total-batch: found 8, expected a multiple of --batch 1 times 3 GPUs, such as 6 or 9"},
        {"--gpus 8 --total-batch 4", 2, "such as 8"},
        {"--gpus all --total-batch 12", 2, "8 GPUs, such as 8 or 16"},
        {"--gpus 9 --total-batch 9", 1, "expected at most the 8"},
        {"--gpus some --total-batch 8", 2, "whole number from 1 to 1024, or all"},
        {"--gpus 2 --total-batch 8 --zero 2", 2, "--zero"},
    };
    for (auto &c : cases) {
        int status = finish_of(start("wrong", c.flags), 100);
        cr_assert_eq(status, c.status, "%s: %d: %s", c.flags, status, log_of("wrong").c_str());
        cr_assert(log_of("wrong").find(c.expected) != std::string::npos, "%s: %s", c.flags, log_of("wrong").c_str());
    }
    remove_root();
}

// ----------------------------------------------------------------------------------------------------
// Faults at random moments: all of the run ends within 30 s, with a line that says why; and from what it saved a run goes on.

static uint64_t fault_seed;
static double drawn() { return random_uniform(fault_seed++); }

static void fault(int number) {
    enum { THREAD_FAILS, PEER_KILLED, PROCESS_KILLED, THREAD_STALLS, STOPPED, KINDS };
    static const char *const names[] = {"a thread fails", "a peer is killed", "a process is killed", "a thread stands still", "a process is told to stop"};
    int kind = number % KINDS;
    const std::string name = "fault" + std::to_string(number), flags = "--variant unified --total-batch 4 --steps 100000 --save-every 1 --keep 2 --schedule constant --timeout 8 --zero " + std::to_string(number / KINDS % 2);
    std::vector<pid_t> children;
    if (kind == THREAD_FAILS || kind == THREAD_STALLS) {
        planted_gpu = (int)(drawn() * 4);
        planted_launch = 30 + (int64_t)(drawn() * 1500);
        planted_stall = kind == THREAD_STALLS;
        setenv("CUDA_EMU_NCCL_TIMEOUT", "8", 1);
        children.push_back(start(name, flags + " --gpus 4"));
        planted_gpu = -1;
        unsetenv("CUDA_EMU_NCCL_TIMEOUT");
    } else {
        children = kind == PROCESS_KILLED ? std::vector<pid_t>{start(name, flags + " --gpus 4")} : start_processes(2, name, flags + " --gpus 2");
        if (kind != STOPPED) { usleep((useconds_t)(drawn() * 3e6)); }
        while (kind == STOPPED && column_of(name, COLUMN_LOSS).empty()) { usleep(20000); } // before its first step a signal just ends it
        size_t who = (size_t)(drawn() * (double)children.size());
        cr_assert(kill(children[who], kind == STOPPED ? SIGTERM : SIGKILL) == 0);
    }
    double begin = seconds();
    std::string logs, ends;
    for (size_t k = 0; k < children.size(); k++) {
        int status = finish_of(children[k], 30);
        cr_assert_neq(status, -1, "%s: process %zu still runs after 30 s: %s", names[kind], k, log_of(name + (k ? std::to_string(k) : "")).c_str());
        if (kind == STOPPED) { cr_assert_eq(status, 0, "%s: status %d", names[kind], status); }
        else { cr_assert(status == 1 || status == 128 + SIGKILL, "%s: status %d", names[kind], status); }
        logs += log_of(name + (k ? std::to_string(k) : ""));
        ends += " " + std::to_string(status);
    }
    if (kind == THREAD_FAILS) { cr_assert(logs.find("cudaErrorUnknown") != std::string::npos && logs.find("train_gpt2: ") == logs.rfind("train_gpt2: "), "its own message alone: %s", logs.c_str()); }
    if (kind == PEER_KILLED) { cr_assert(logs.find("process ") != std::string::npos && (logs.find("is lost") != std::string::npos || logs.find("no sign of") != std::string::npos || logs.find("not there") != std::string::npos), "%s", logs.c_str()); }
    if (kind == THREAD_STALLS) { cr_assert(logs.find("for rank") != std::string::npos, "%s", logs.c_str()); }
    int64_t *steps = NULL;
    int count = checkpoint_list((root + "/" + name).c_str(), &steps);
    printf("fault %d: %s:%s, %.1f s, last checkpoint %lld\n", number, names[kind], ends.c_str(), seconds() - begin, count > 0 ? (long long)steps[count - 1] : 0);
    if (kind == STOPPED) { cr_assert_gt(count, 0); }
    if (count > 0) { // it holds the state of an unbroken run
        int step = (int)steps[count - 1];
        int status = finish_of(start(name, flags + " --gpus 1 --resume " + root + "/" + name + " --stop-at " + std::to_string(step + 1), "again"));
        cr_assert_eq(status, 0, "%s", log_of(name + "again").c_str());
        run(name + "unbroken", flags + " --gpus 1 --stop-at " + std::to_string(step + 1));
        double worst = worst_difference(name + "unbroken", name);
        cr_assert(worst < 1e-4, "%s: %.2e", names[kind], worst);
    }
}
Test(multi, faults, .init = make_root) {
    int count = full() ? 30 : 5;
    fault_seed = full() ? (uint64_t)time(NULL) : 7;
    for (int i = 0; i < count; i++) { fault(i); }
    remove_root();
}
