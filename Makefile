# make            train_gpt2 and the data programs
# make demo       the paper's idea in a few minutes: baseline against unified on a synthetic language
# make test       all tests          make test-sanitize   the same under AddressSanitizer and UBSan, and valgrind
# make check-export  exported models against Transformers, where it is installed (PYTHON=python3)
# make bench      speed against OpenBLAS and PyTorch, parts of a step, memory (BENCH_FLAGS=--quick: about a minute)
# make ablate     the paper's step-by-step experiment, small, with 5 seeds: a table and figures in about 7 minutes of 2 free cores
#                 EXPERIMENT=dev/ablate/small/NAME.exp: another; ABLATE_FLAGS: flags of build/ablate --help
# make theory     the theorems of the paper, by numbers from this code
# make data       the synthetic corpus that train_gpt2 reads by default
# make clean      removes what make built; runs/ and data/ stay
#
# What must be installed: dev/setup.sh installs it on Debian and Ubuntu.

CC     ?= cc
BUILD  ?= build
# -fno-math-errno, -fno-trapping-math: vectorize sqrt and comparisons. Never -ffast-math: it hides NaNs.
CFLAGS ?= -O3 $(call accepts,-march=native,-mcpu=native)
override CFLAGS += -std=gnu11 -Wall -Wextra -fno-math-errno -fno-trapping-math
LDLIBS += -lcjson -lpcre2-8 -lz -lm

# the first of the flags that the compiler accepts on an empty program, or nothing
try     = $(shell echo 'int main(void){return 0;}' | $(CC) $(1) -x c - -o /dev/null 2>/dev/null && echo "$(1)")
accepts = $(firstword $(foreach flag,$(1) $(2),$(call try,$(flag))))

OPENMP := $(if $(NO_OMP),,$(call try,-fopenmp))
ifeq ($(OPENMP)$(NO_OMP),)
$(warning $(CC) has no OpenMP here: the programs will use one core)
endif
ifeq ($(OPENMP),)
override CFLAGS += -Wno-unknown-pragmas
endif
override CFLAGS += $(OPENMP)

HEADERS = data/tokenizer.h
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g

.PHONY: all demo ablate theory data test bench check-export test-sanitize sanitized-tests clean
.DELETE_ON_ERROR:
all: train_gpt2 data/tokenize data/synth

train_gpt2: train_gpt2.c $(HEADERS) Makefile
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)

data/tokenize data/synth: %: %.c $(HEADERS) Makefile
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)

data: data/synthetic/synth_val_000000.bin
data/synthetic/synth_val_000000.bin: | data/synth
	data/synth --out data/synthetic

demo: train_gpt2 data/synth
	@dev/demo.sh

EXPERIMENT ?= dev/ablate/small/steps.exp
ablate: train_gpt2 $(BUILD)/ablate data
	$(BUILD)/ablate $(ABLATE_FLAGS) $(EXPERIMENT)
$(BUILD)/ablate: dev/ablate/ablate.c Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) -lm

# Tests: one Criterion program a file. test_gpt2 runs in double, where finite differences have their digits, and
# again in float; the rest drive the programs from outside.
TESTS = $(BUILD)/test_gpt2_double $(BUILD)/test_gpt2_float $(BUILD)/test_cli $(BUILD)/test_tokenizer $(BUILD)/test_synth \
        $(BUILD)/test_theory $(BUILD)/test_hf $(BUILD)/test_ablate
$(BUILD):
	mkdir -p $@
$(BUILD)/test_gpt2_double: test_gpt2.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) -DREAL=double $< -o $@ $(LDFLAGS) -lcriterion $(LDLIBS)
$(BUILD)/test_gpt2_float: test_gpt2.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) -lcriterion $(LDLIBS)
# Theorems 2.2, 2.3, 3.1, 3.2 and the preconditioner, by numbers from this code. Without OpenMP: a handful of numbers
# is several times faster so.
THEOREMS = $(addprefix $(BUILD)/,theorem_2_2 theorem_2_3 theorem_3_1 theorem_3_2 preconditioner)
THEORY_FLAGS = $(if $(OPENMP),$(filter-out $(OPENMP),$(CFLAGS)) -Wno-unknown-pragmas,$(CFLAGS))
theory: $(THEOREMS)
	@for program in $(THEOREMS); do $$program && echo || exit 1; done
$(THEOREMS): $(BUILD)/%: dev/theory/%.c dev/theory/student.h train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(THEORY_FLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)
$(BUILD)/test_theory: dev/test/test_theory.c $(wildcard dev/theory/*.[ch]) train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(THEORY_FLAGS) $< -o $@ $(LDFLAGS) -lcriterion $(LDLIBS)
$(BUILD)/test_ablate: dev/test/test_ablate.c dev/ablate/ablate.c Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) -lcriterion -lm
$(BUILD)/test_%: dev/test/test_%.c train_gpt2.c data/synth.c data/tokenize.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) -lcriterion $(LDLIBS)

test: all $(TESTS)
	@dev/test/run.sh $(TESTS)

# AddressSanitizer and UBSan over the same tests, with a sanitized train_gpt2 under test_cli; then valgrind, where
# it is installed, on a short training run. Criterion's own leaks keep leak checking for valgrind.
test-sanitize: all
	$(MAKE) BUILD=$(BUILD)/sanitize CFLAGS="-O1 $(SANITIZE)" sanitized-tests
	ASAN_OPTIONS=detect_leaks=0 TRAIN=$(BUILD)/sanitize/train_gpt2 dev/test/run.sh $(TESTS:$(BUILD)/%=$(BUILD)/sanitize/%)
	BUILD=$(BUILD) dev/test/valgrind.sh
sanitized-tests: $(BUILD)/train_gpt2 $(TESTS)
$(BUILD)/train_gpt2: train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)

# Needs Python with Transformers and PyTorch; says so and does nothing without them. Not part of make test.
check-export: all $(BUILD)/hf_logits
	dev/hf/check_export.sh
$(BUILD)/hf_logits: dev/hf/logits.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)

# bench_profile calls a hook at the entry and exit of functions, but not of the hot small ones (gcc by name; clang of
# those it has inlined). The bench runs from the root of the repository.
HOT = kernel,corner_tile,pack,panels,piece,transpose4,at_most,att_,exp_fast,cross_entropy_row,random_
PROFILE = -DBENCH_PROFILE -finstrument-functions $(or $(call try,-finstrument-functions-exclude-function-list=$(HOT)),\
    -finline-hint-functions -finstrument-functions-after-inlining)
bench: $(BUILD)/bench $(BUILD)/bench_profile
	$(BUILD)/bench $(BENCH_FLAGS)
$(BUILD)/bench: dev/bench/bench.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS) -ldl
$(BUILD)/bench_profile: dev/bench/bench.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $(PROFILE) $< -o $@ $(LDFLAGS) $(LDLIBS) -ldl

clean:
	rm -rf $(BUILD) train_gpt2 data/tokenize data/synth
