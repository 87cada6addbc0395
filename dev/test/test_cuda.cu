// test_cuda.cu: whole models and optimizer steps of train_gpt2.cu against train_gpt2.c, in fp32 and bf16. make test-emu runs it
// in the emulation, make test-gpu on a GPU. Sizes are odd on purpose: T 37, C 72, H 101, V 259.
#define TESTING
#include "../../train_gpt2.cu"
#include <criterion/criterion.h>

TestSuite(gradients_fp32, .timeout = 1800);
TestSuite(gradients_bf16, .timeout = 1800);
TestSuite(steps, .timeout = 1800);
TestSuite(model, .timeout = 1800);

static void config_from(Config *cfg, const char *flags) {
    const char *argv[96] = {"test"};
    int argc = 1;
    char *text = text_format("%s", flags), *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) { argv[argc++] = word; }
    config_defaults(cfg);
    config_parse_flags(cfg, argc, argv);
    presets_apply(cfg);
    config_resolve(cfg);
    free(text);
}

// A model on the CPU and the same one on the GPU.
template <typename F> struct Pair {
    Config cfg;
    GPT cpu;
    gpu::Gpu device;
    gpu::Model<F> *model;
    std::vector<int32_t> inputs, targets;

    Pair(const char *flags) {
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        char *all = text_format("--precision %s --seq-len 37 --batch 2 --vocab 259 --layers 2 %s", sizeof(F) == 2 ? "bf16" : "fp32", flags);
        config_from(&cfg, all);
        free(all);
        gpt_build(&cpu, &cfg);
        ::gpt_allocate(&cpu, cfg.batch, cfg.seq_len);
        gpt_init(&cpu);
        for (int64_t i = 0; i < cpu.num_theta; i++) { cpu.theta[i] += 0.02f * (float)(random_uniform((uint64_t)i + 99) - 0.5); } // scale vectors other than 1
        gpu::gpu_open(&device, 0, 0, 1);
        model = gpu::gpt_allocate<F>(&cpu, &device, cfg.batch, cfg.seq_len);
        gpu::copy_state(model, 1);
        ::reparameterize_forward(&cpu);
        gpu::reparameterize_forward(model);
        batch(0);
    }
    ~Pair() {
        gpu::gpt_free(model);
        gpu::gpu_close(&device);
    }
    void batch(uint64_t number) {
        int64_t N = (int64_t)cfg.batch * cfg.seq_len;
        inputs.resize((size_t)N);
        targets.resize((size_t)N);
        for (int64_t n = 0; n < N; n++) { // small ids come often, as words do
            double u = random_uniform(number * 1000003 + 2 * (uint64_t)n), w = random_uniform(number * 1000003 + 2 * (uint64_t)n + 1);
            inputs[(size_t)n] = (int32_t)(u * u * cfg.vocab);
            targets[(size_t)n] = (int32_t)(w * cfg.vocab);
        }
    }
    double weight() const { return 1.0 / ((double)cfg.batch * cfg.seq_len); }
    void gpu_gradient() {
        gpu::gpt_zero_grad(model);
        gpu::gpt_forward(model, inputs.data(), targets.data(), cfg.batch, cfg.seq_len, weight());
        gpu::gpt_backward(model);
        gpu::reparameterize_backward(model);
        gpu::gradient_norm(model);
        gpu::read_stats(model);
    }
    double cpu_gradient() {
        memset(cpu.expert_tokens, 0, (size_t)cfg.layers * (size_t)cfg.experts * sizeof(int64_t));
        ::gpt_zero_grad(&cpu);
        double loss = ::gpt_forward(&cpu, inputs.data(), targets.data(), cfg.batch, cfg.seq_len, weight());
        ::gpt_backward(&cpu, inputs.data());
        ::reparameterize_backward(&cpu);
        return loss;
    }
    std::vector<float> tensor(const float *from, int param) { // of the GPU, without pads
        std::vector<float> values((size_t)(cpu.params[param].rows * cpu.params[param].cols)), turn;
        gpu::copy_tensor(&device, values.data(), (float *)from + model->places[(size_t)param].at, &cpu.params[param], &model->places[(size_t)param], 0, turn);
        return values;
    }
    std::vector<float> all(const float *from) {
        std::vector<float> values;
        for (int i = 0; i < cpu.num_params; i++) { for (float x : tensor(from, i)) { values.push_back(x); } }
        return values;
    }
    // Worst error of a tensor of the gradient, by role, as --check measures it.
    void gradient_errors(double worst[NUM_ROLES]) {
        double alpha = 0;
        for (int r = 0; r < NUM_ROLES; r++) { worst[r] = 0; }
        for (int i = 0; i < cpu.num_params; i++) {
            const Param *p = &cpu.params[i];
            const float *theirs = cpu.grads + p->offset;
            std::vector<float> ours = tensor(model->grads, i);
            double error = gpu::gradient_error(ours.data(), theirs, p->rows * p->cols, alpha), size = gpu::norm_of(theirs, p->rows * p->cols);
            if (!(error <= worst[p->role])) { worst[p->role] = error; }
            alpha = p->beta < 0 ? 0 : size * size;
        }
    }
};

static double relative(double a, double b) { return fabs(a - b) / fabs(b); }

static void gradients_fp32(const char *flags) {
    Pair<float> p(flags);
    double loss = p.cpu_gradient(), norm = gradient_norm(&p.cpu), worst[NUM_ROLES];
    std::vector<int64_t> tokens(p.cpu.expert_tokens, p.cpu.expert_tokens + p.cfg.layers * p.cfg.experts);
    p.gpu_gradient();
    const gpu::Stats *s = p.model->host_stats;
    cr_expect(relative(s->loss, loss) <= 1e-6, "loss: found %.9g, expected %.9g", s->loss, loss);
    cr_expect(relative(s->norm, norm) <= 1e-5, "norm: found %.9g, expected %.9g", s->norm, norm);
    p.gradient_errors(worst);
    for (int r = 0; r < NUM_ROLES; r++) {
        cr_log_info("%s: %.2e", role_table[r].name, worst[r]);
        cr_expect(worst[r] <= 1e-4, "gradient of %s: error %.2e", role_table[r].name, worst[r]);
    }
    if (p.cfg.experts) {
        cr_expect(relative(s->balance_loss, p.cpu.balance_loss) <= 1e-5, "balance loss: found %.9g, expected %.9g", s->balance_loss, p.cpu.balance_loss);
        cr_expect(relative(s->z_loss, p.cpu.z_loss) <= 1e-5, "z-loss: found %.9g, expected %.9g", s->z_loss, p.cpu.z_loss);
        for (size_t i = 0; i < tokens.size(); i++) { cr_expect(p.cpu.expert_tokens[i] == tokens[i], "tokens of expert %zu: found %lld, expected %lld", i, (long long)p.cpu.expert_tokens[i], (long long)tokens[i]); }
    }
}

// bf16 has 8 significant bits, so that each value that is stored is off by up to 2^-9, and a gradient by what its layers add up:
// tolerances are at most 3 times what was seen, loss first, then by role: embedding, matrix, residual, router, head, gamma_b,
// gamma_a, gamma_norm (SHOW_ERRORS=1 prints twice what it sees). The loss, whose errors cancel by luck, is allowed twice the worst
// of all cases, with Output-Norms and without. A norm divides by a sum of rounded values, so errors grow where
// there are more of them. Of a mixture of experts the seed is one for which no token changes its expert by rounding.
struct Allowed { double loss, role[NUM_ROLES]; };
static void gradients_bf16(const char *flags, Allowed allowed) {
    Pair<gpu::bf16> p(flags);
    double loss = p.cpu_gradient(), worst[NUM_ROLES];
    p.gpu_gradient();
    double error = relative(p.model->host_stats->loss, loss);
    p.gradient_errors(worst);
    if (getenv("SHOW_ERRORS")) {
        fprintf(stderr, "SHOW %s: {%.0e, {", flags, 2 * error);
        for (int r = 0; r < NUM_ROLES; r++) { fprintf(stderr, "%s%.0e", r ? ", " : "", 2 * worst[r]); }
        fprintf(stderr, "}}\n");
    }
    cr_expect(error <= allowed.loss, "loss: error %.2e, allowed %.0e", error, allowed.loss);
    for (int r = 0; r < NUM_ROLES; r++) { cr_expect(worst[r] <= allowed.role[r], "gradient of %s: error %.2e, allowed %.0e", role_table[r].name, worst[r], allowed.role[r]); }
}

#define CASE(name, flags, ...) \
    Test(gradients_fp32, name) { gradients_fp32(flags); } \
    Test(gradients_bf16, name) { gradients_bf16(flags, Allowed __VA_ARGS__); }
#define DENSE "--channels 72 --heads 6 --hidden 101 "
#define MOE "--channels 72 --heads 6 --experts 5 --top-k 2 --expert-hidden 44 "
CASE(baseline, DENSE, {1e-4, {1e-2, 2e-2, 2e-2, 0, 9e-3, 2e-2, 0, 0}})
CASE(noscale, DENSE "--variant noscale", {1e-4, {1e-2, 2e-2, 2e-2, 0, 9e-3, 0, 0, 0}})
CASE(hg, DENSE "--variant hg", {1e-4, {1e-2, 2e-2, 1e-2, 0, 9e-3, 2e-2, 0, 0}})
CASE(ap, DENSE "--variant ap", {1e-4, {1e-2, 2e-2, 1e-2, 0, 9e-3, 0, 2e-2, 0}})
CASE(dp, DENSE "--variant dp", {1e-4, {1e-2, 2e-2, 1e-2, 0, 9e-3, 1e-2, 2e-2, 0}})
CASE(dnp, DENSE "--variant dnp", {1e-3, {4e-2, 5e-2, 4e-2, 0, 2e-2, 5e-2, 0, 4e-2}})
CASE(reparam_or, DENSE "--variant or", {1e-4, {1e-2, 2e-2, 2e-2, 0, 9e-3, 2e-2, 0, 0}})
CASE(reparam_er, DENSE "--variant er", {1e-4, {1e-2, 2e-2, 1e-2, 0, 9e-3, 2e-2, 0, 0}})
CASE(hg_dp_or, DENSE "--variant hg+dp+or", {1e-4, {1e-2, 2e-2, 1e-2, 0, 9e-3, 2e-2, 2e-2, 0}})
CASE(unified, DENSE "--variant unified", {1e-3, {4e-2, 5e-2, 3e-2, 0, 3e-2, 5e-2, 0, 5e-2}})
CASE(unified_er, DENSE "--variant unified --reparam er", {1e-3, {4e-2, 5e-2, 3e-2, 0, 2e-2, 5e-2, 0, 5e-2}})
CASE(unified_all_norms, DENSE "--variant unified --qk-norm on --post-norm on", {1e-3, {4e-2, 5e-2, 4e-2, 0, 2e-2, 6e-2, 0, 6e-2}})
CASE(norms_without_vectors, DENSE "--norm-scale off --qk-norm on --post-norm on --placement dnp", {1e-3, {4e-2, 5e-2, 4e-2, 0, 2e-2, 0, 0, 0}})
CASE(sites, DENSE "--placement q=dnp,o=dnp,down=dnp,gate=dp,up=dnp,v=ap --hg on --reparam er", {1e-3, {2e-2, 3e-2, 2e-2, 0, 2e-2, 5e-2, 2e-2, 4e-2}})
CASE(gqa, DENSE "--kv-heads 2", {1e-4, {1e-2, 2e-2, 1e-2, 0, 1e-2, 2e-2, 0, 0}})
CASE(gqa_unified, DENSE "--kv-heads 3 --variant unified", {1e-3, {4e-2, 5e-2, 3e-2, 0, 2e-2, 5e-2, 0, 5e-2}})
CASE(tied, DENSE "--tie-embeddings on", {1e-4, {1e-2, 2e-2, 1e-2, 0, 0, 2e-2, 0, 0}})
CASE(tied_plain, DENSE "--tie-embeddings on --variant noscale", {1e-4, {1e-2, 2e-2, 2e-2, 0, 0, 0, 0, 0}})
CASE(tied_unified, DENSE "--tie-embeddings on --variant unified", {1e-3, {4e-2, 5e-2, 4e-2, 0, 0, 7e-2, 0, 6e-2}})
CASE(head_64, "--channels 128 --heads 2 --hidden 101 --variant unified", {1e-3, {4e-2, 5e-2, 3e-2, 0, 2e-2, 4e-2, 0, 6e-2}})
CASE(head_2, "--channels 8 --heads 4 --hidden 5 --variant unified", {1e-3, {8e-2, 1e-1, 6e-2, 0, 2e-2, 2e-1, 0, 8e-2}})
CASE(head_of_odd_pairs, "--channels 70 --heads 5 --hidden 31 --variant unified", {1e-3, {4e-2, 4e-2, 3e-2, 0, 2e-2, 4e-2, 0, 5e-2}})
CASE(hidden_beyond_shared_memory, "--channels 16 --heads 2 --hidden 6100 --variant unified", {1e-3, {4e-2, 5e-2, 3e-2, 0, 2e-2, 5e-2, 0, 5e-2}})
CASE(moe, MOE "--seed 24", {1e-4, {1e-2, 2e-2, 2e-2, 2e-2, 1e-2, 2e-2, 0, 0}})
CASE(moe_unified, MOE "--variant unified --seed 8", {1e-3, {4e-2, 5e-2, 4e-2, 4e-2, 3e-2, 5e-2, 0, 6e-2}})
CASE(moe_all_norms, MOE "--variant unified --qk-norm on --post-norm on --router-z-loss 0.01 --seed 19", {1e-3, {3e-2, 5e-2, 3e-2, 4e-2, 2e-2, 5e-2, 0, 5e-2}})
CASE(moe_down, MOE "--placement down=dnp,gate=dnp --hg on --reparam or --seed 24", {1e-3, {3e-2, 3e-2, 3e-2, 3e-2, 2e-2, 4e-2, 0, 4e-2}})
CASE(moe_experts_only, MOE "--shared-hidden 0 --variant dnp --router-z-loss 0.1 --seed 24", {1e-3, {3e-2, 5e-2, 3e-2, 3e-2, 2e-2, 4e-2, 0, 5e-2}})
CASE(moe_few_rows, "--channels 16 --heads 2 --experts 4 --top-k 1 --expert-hidden 44 --shared-hidden 0 --variant unified", {1e-3, {5e-2, 7e-2, 5e-2, 1e-2, 2e-2, 7e-2, 0, 7e-2}})
CASE(moe_one_of_many, "--channels 72 --heads 6 --experts 37 --top-k 1 --expert-hidden 8 --variant hg --seed 1", {1e-4, {1e-2, 4e-2, 3e-2, 1e-2, 1e-2, 5e-2, 0, 0}})

// Parameters after 10 steps, each on a batch of its own: |difference| / |theta|, and, which is stricter, over the distance that
// theta has moved.
struct StepError { double of_theta, of_distance; };
template <typename F> static StepError error_after_steps(const char *flags) {
    Pair<F> p(flags);
    std::vector<float> begin(p.cpu.theta, p.cpu.theta + p.cpu.num_theta);
    for (int step = 1; step <= 10; step++) {
        double lr = learning_rate(&p.cfg, step - 1);
        p.batch((uint64_t)step);
        p.gpu_gradient();
        gpu::optimizer_step(p.model, step, lr);
        gpu::reparameterize_forward(p.model);
        p.cpu_gradient();
        double norm = ::gradient_norm(&p.cpu), clip = p.cfg.grad_clip;
        ::optimizer_step(&p.cpu, step, lr, clip > 0 && norm > clip ? clip / norm : 1);
        ::reparameterize_forward(&p.cpu);
    }
    double difference = 0, moved = 0, squares = 0;
    for (int i = 0; i < p.cpu.num_params; i++) {
        std::vector<float> ours = p.tensor(p.model->theta, i);
        for (size_t k = 0; k < ours.size(); k++) {
            double expected = p.cpu.theta[p.cpu.params[i].offset + (int64_t)k], first = begin[(size_t)p.cpu.params[i].offset + k];
            difference += (ours[k] - expected) * (ours[k] - expected);
            moved += (expected - first) * (expected - first);
            squares += expected * expected;
        }
    }
    cr_assert(moved > 0);
    return {sqrt(difference / squares), sqrt(difference / moved)};
}
// With a norm after a vector its beta has a gradient of next to nothing, which AdamW blows up to full steps of either sign.
static void steps_agree(const char *flags, double allowed = 1e-4) {
    StepError error = error_after_steps<float>(flags);
    if (getenv("SHOW_ERRORS")) { fprintf(stderr, "SHOW %s: %.1e of theta, %.1e of the distance\n", flags, error.of_theta, error.of_distance); }
    cr_expect(error.of_theta <= 1e-4, "%s: error %.2e of theta after 10 steps", flags, error.of_theta);
    cr_expect(error.of_distance <= allowed, "%s: error %.2e of the distance moved in 10 steps", flags, error.of_distance);
}
Test(steps, every_variant) {
    static const char *const variants[] = {"noscale", "hg", "ap", "dp", "dnp", "or", "er", "iwd", "unified --qk-norm on --post-norm on"};
    for (const char *variant : variants) {
        for (const char *optimizer : {"adamw", "muon"}) {
            char flags[300];
            snprintf(flags, sizeof flags, "--channels 24 --heads 2 --hidden 31 --lr 1e-3 --steps 10 --optimizer %s --variant %s", optimizer, variant);
            steps_agree(flags, strstr(variant, "norm") ? 1e-3 : 1e-4);
        }
    }
}
Test(steps, adamw) { steps_agree(DENSE "--lr 1e-3 --steps 10"); }
Test(steps, adamw_unified) { steps_agree(DENSE "--lr 1e-3 --steps 10 --variant unified --grad-clip 0.1", 1e-3); }
Test(steps, adamw_tied) { steps_agree(DENSE "--lr 1e-3 --steps 10 --tie-embeddings on --schedule wsd --wd-scale output"); }
Test(steps, muon) { steps_agree(DENSE "--lr 1e-3 --steps 10 --optimizer muon"); }
Test(steps, muon_unified_gqa) { steps_agree(DENSE "--lr 1e-3 --steps 10 --optimizer muon --variant unified --kv-heads 2", 1e-3); }
Test(steps, muon_wide) { steps_agree("--channels 70 --heads 5 --hidden 31 --lr 1e-3 --steps 10 --optimizer muon"); }
Test(steps, sgd) { steps_agree(DENSE "--lr 0.1 --steps 10 --optimizer sgd"); }
Test(steps, sgd_momentum) { steps_agree(DENSE "--lr 0.1 --steps 10 --optimizer sgd --sgd-momentum 0.9 --variant hg"); }
Test(steps, moe_adamw) { steps_agree(MOE "--lr 1e-3 --steps 10"); }
Test(steps, moe_muon_unified) { steps_agree(MOE "--lr 1e-3 --steps 10 --optimizer muon --variant unified", 1e-3); }
Test(steps, bf16) { // in bf16 the small gradients of AdamW's first steps are divided by their own size: it shows rounding most
    double adamw = error_after_steps<gpu::bf16>(DENSE "--lr 1e-3 --steps 10").of_distance, muon = error_after_steps<gpu::bf16>(DENSE "--lr 1e-3 --steps 10 --optimizer muon").of_distance;
    cr_log_info("bf16: %.2e %.2e", adamw, muon);
    cr_expect(adamw <= 0.1, "AdamW: error %.2e", adamw);
    cr_expect(muon <= 0.1, "Muon: error %.2e", muon);
}

// What --recompute makes again has the same bits as what would have been kept.
template <typename F> static void recompute_repeats(const char *flags) {
    std::vector<float> expected;
    for (int level = 0; level <= 2; level++) {
        char *all = text_format("%s --recompute %d", flags, level);
        Pair<F> p(all);
        p.gpu_gradient();
        std::vector<float> found = p.all(p.model->grads);
        if (level == 0) { expected = found; }
        cr_expect(memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0, "%s: other bits", all);
        free(all);
    }
}
Test(model, recompute) {
    recompute_repeats<float>(DENSE);
    recompute_repeats<gpu::bf16>(DENSE "--variant unified --post-norm on");
    recompute_repeats<gpu::bf16>(MOE "--variant unified --post-norm on");
    recompute_repeats<float>(MOE "--placement gate=dnp,down=dnp --shared-hidden 0");
}

Test(model, micro_batches_add_up) {
    Pair<float> p(DENSE "--variant unified");
    std::vector<float> sum;
    gpu::gpt_zero_grad(p.model);
    ::gpt_zero_grad(&p.cpu);
    for (int micro = 0; micro < 3; micro++) {
        p.batch((uint64_t)micro);
        gpu::gpt_forward(p.model, p.inputs.data(), p.targets.data(), 2, 37, p.weight() / 3);
        gpu::gpt_backward(p.model);
        ::gpt_forward(&p.cpu, p.inputs.data(), p.targets.data(), 2, 37, p.weight() / 3);
        ::gpt_backward(&p.cpu, p.inputs.data());
    }
    gpu::reparameterize_backward(p.model);
    ::reparameterize_backward(&p.cpu);
    double worst[NUM_ROLES];
    p.gradient_errors(worst);
    for (int r = 0; r < NUM_ROLES; r++) { cr_expect(worst[r] <= 1e-4, "gradient of %s: error %.2e", role_table[r].name, worst[r]); }
}

template <typename F> static void shorter_batch(const char *flags, double of_loss, double of_logits) { // as in sampling and in the last validation
    Pair<F> p(flags);
    double expected = ::gpt_forward(&p.cpu, p.inputs.data(), p.targets.data(), 1, 19, 0);
    gpu::gpt_forward(p.model, p.inputs.data(), p.targets.data(), 1, 19, 0);
    gpu::read_stats(p.model);
    cr_expect(relative(p.model->host_stats->eval, expected) <= of_loss, "loss: found %.9g, expected %.9g", p.model->host_stats->eval, expected);
    std::vector<float> theirs(2 * 259), ours(2 * 259);
    ::gpt_forward(&p.cpu, p.inputs.data(), NULL, 1, 19, 0);
    ::gpt_logits(&p.cpu, theirs.data(), 2);
    gpu::gpt_forward(p.model, p.inputs.data(), NULL, 1, 19, 0);
    gpu::gpt_logits(p.model, ours.data(), 2);
    cr_expect(gpu::gradient_error(ours.data(), theirs.data(), 2 * 259, 0) <= of_logits, "logits: error %.2e", gpu::gradient_error(ours.data(), theirs.data(), 2 * 259, 0));
}
Test(model, logits_and_loss_of_fewer_tokens) {
    shorter_batch<float>(DENSE, 1e-6, 1e-5);
    shorter_batch<float>(DENSE "--variant unified", 1e-6, 1e-5);
    shorter_batch<gpu::bf16>(DENSE "--variant unified", 1e-3, 3e-2);
    shorter_batch<float>(MOE, 1e-6, 1e-5);
}

// A chunked head gives what one chunk gives.
Test(model, head_in_chunks) {
    for (const char *flags : {DENSE, DENSE "--variant unified", DENSE "--tie-embeddings on --variant noscale"}) {
        Pair<float> p(flags);
        p.model->head_chunk = 13;
        double loss = p.cpu_gradient(), worst[NUM_ROLES];
        p.gpu_gradient();
        cr_expect(relative(p.model->host_stats->loss, loss) <= 1e-6, "%s: loss", flags);
        p.gradient_errors(worst);
        for (int r = 0; r < NUM_ROLES; r++) { cr_expect(worst[r] <= 1e-4, "%s: gradient of %s: error %.2e", flags, role_table[r].name, worst[r]); }
    }
}

Test(model, a_gradient_that_is_not_finite_changes_nothing) {
    for (const char *flags : {DENSE, DENSE "--optimizer muon", DENSE "--optimizer sgd --sgd-momentum 0.5"}) {
        Pair<float> p(flags);
        p.gpu_gradient();
        std::vector<float> theta = p.all(p.model->theta), m = p.all(p.model->m);
        float bad = NAN;
        CUDA_CHECK(cudaMemcpy(p.model->grads + p.model->places[2].at, &bad, sizeof bad, cudaMemcpyHostToDevice));
        gpu::gradient_norm(p.model);
        gpu::optimizer_step(p.model, 1, 1e-3);
        gpu::read_stats(p.model);
        cr_expect(isnan(p.model->host_stats->norm), "%s: norm %g", flags, p.model->host_stats->norm);
        cr_expect(memcmp(theta.data(), p.all(p.model->theta).data(), theta.size() * sizeof(float)) == 0, "%s: theta has changed", flags);
        cr_expect(memcmp(m.data(), p.all(p.model->m).data(), m.size() * sizeof(float)) == 0, "%s: a moment has changed", flags);
    }
}

Test(model, theta_and_moments_travel) {
    Pair<float> p(MOE "--variant unified --optimizer muon");
    p.gpu_gradient();
    gpu::optimizer_step(p.model, 1, 1e-2);
    gpu::copy_state(p.model, 0);
    std::vector<float> theta(p.cpu.theta, p.cpu.theta + p.cpu.num_theta), moments(p.cpu.moments, p.cpu.moments + p.cpu.num_moments);
    CUDA_CHECK(cudaMemset(p.model->theta, 0, (size_t)p.model->num_theta * sizeof(float)));
    CUDA_CHECK(cudaMemset(p.model->m, 0, (size_t)p.model->num_theta * sizeof(float)));
    CUDA_CHECK(cudaMemset(p.model->v, 0, (size_t)p.model->num_v * sizeof(float)));
    gpu::copy_state(p.model, 1);
    memset(p.cpu.theta, 0, theta.size() * sizeof(float));
    memset(p.cpu.moments, 0, moments.size() * sizeof(float));
    gpu::copy_state(p.model, 0);
    cr_expect(memcmp(theta.data(), p.cpu.theta, theta.size() * sizeof(float)) == 0);
    cr_expect(memcmp(moments.data(), p.cpu.moments, moments.size() * sizeof(float)) == 0);
    double size = gpu::norm_of(moments.data(), (int64_t)moments.size());
    cr_expect(size > 0);
}

// Pads stay zeros through steps: products and norms rely on it.
Test(model, pads_stay_zero) {
    for (const char *flags : {DENSE "--variant unified --reparam er", "--channels 70 --heads 5 --hidden 31 --optimizer muon --variant dnp"}) {
        Pair<gpu::bf16> p(flags);
        for (int step = 1; step <= 2; step++) {
            p.gpu_gradient();
            gpu::optimizer_step(p.model, step, 1e-2);
            gpu::reparameterize_forward(p.model);
        }
        std::vector<float> theta((size_t)p.model->num_theta), grads(theta.size());
        std::vector<gpu::bf16> eff(theta.size());
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(theta.data(), p.model->theta, theta.size() * sizeof(float), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(grads.data(), p.model->grads, theta.size() * sizeof(float), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(eff.data(), p.model->theta_eff, theta.size() * sizeof(gpu::bf16), cudaMemcpyDeviceToHost));
        for (int i = 0; i < p.cpu.num_params; i++) {
            const gpu::Place *place = &p.model->places[(size_t)i];
            for (int64_t r = 0; r < place->rows; r++) {
                for (int64_t c = 0; c < place->ld; c++) {
                    size_t at = (size_t)(place->at + r * place->ld + c);
                    if (r < p.cpu.params[i].rows && c < place->cols) { continue; }
                    cr_assert(theta[at] == 0 && grads[at] == 0 && gpu::to_float(eff[at]) == 0, "%s (%lld,%lld): %g, gradient %g, effective %g", p.cpu.params[i].name, (long long)r, (long long)c, theta[at], grads[at], gpu::to_float(eff[at]));
                }
            }
        }
    }
}
