# make            train_gpt2 and the data programs
# make demo       the paper's idea in a few minutes: baseline against unified on a synthetic language
# make train_gpt2cu  the program for NVIDIA GPUs, where nvcc is
# make test       all tests          make test-sanitize   the same under AddressSanitizer and UBSan, and valgrind
# make check-export  exported models against Transformers, where it is installed (PYTHON=python3)
# make test-emu   the CUDA file and dev/emu's own tests, without a GPU (dev/emu/README.md); part of make test
# make test-gpu   the same tests on a GPU           make ptxas-report  registers and spills of its kernels, where nvcc is
# make test-mutants  does a test fail when a kernel is broken on purpose?
# make test-multi several GPUs and processes in all combinations, and 30 faults at random moments (minutes)
# make labs       the kernel labs of dev/cuda in the emulation: each version of each kernel against the CPU
# make bench      speed against OpenBLAS and PyTorch, parts of a step, memory (BENCH_FLAGS=--quick: about a minute)
# make roofline   what a training step must cost on an H100 and an H200, kernel by kernel: arithmetic, no GPU needed
# make scaling    what several GPUs and machines must send, how much of it hides behind the backward, and what is left of the speed
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

.PHONY: all demo ablate theory data test bench roofline check-export test-sanitize sanitized-tests clean
.PHONY: test-emu labs
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
EMU_TESTS = $(BUILD)/emu/test_emu $(BUILD)/emu/test_kernels $(BUILD)/emu/test_attention $(BUILD)/emu/test_cuda \
            $(BUILD)/emu/test_multi
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

test: all $(TESTS) $(EMU_TESTS)
	@dev/test/run.sh $(TESTS) $(EMU_TESTS)

# CUDA sources without a GPU: dev/emu/transform mirrors a .cu, and every .cu it includes, into $(BUILD)/emu/src, and a
# C++ compiler takes them from there. A test of the GPU code is a line in EMU_TESTS and a file dev/test/NAME.cu.
CXX      ?= c++
EMU_FLAGS = -std=c++20 -Wall -Wextra -Wno-unused-function -Wno-unknown-pragmas -fno-math-errno -fno-trapping-math -DCUDA_EMU -Idev/emu/include -iquote . $(OPENMP)
# -O1 without -g: compiling is most of the time that these tests take
EMU_OPT  ?= -O1 $(filter -march=% -mcpu=%,$(CFLAGS))
EMU_SOURCES = dev/emu/transform $(wildcard dev/emu/include/*.h *.cu dev/cuda/*.cu dev/cuda/*.cuh dev/test/*.cuh)
# every combination of model, GPUs and --zero, and 30 faults at random moments: some minutes
test-multi: $(BUILD)/emu/test_multi
	TEST_MULTI=full dev/test/run.sh $<
.PHONY: test-multi
test-emu: $(EMU_TESTS)
	@dev/test/run.sh $(EMU_TESTS)
$(BUILD)/emu/%: dev/test/%.cu $(EMU_SOURCES) train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	dev/emu/transform $< $(BUILD)/emu/src
	$(CXX) $(EMU_FLAGS) $(EMU_OPT) -x c++ $(BUILD)/emu/src/$< -x none -o $@ $(LDFLAGS) -lcriterion -lboost_context $(LDLIBS)

# The kernel labs (dev/cuda/lab.h), in the emulation: each version of each kernel against the CPU.
LABS = $(patsubst dev/cuda/%.cu,$(BUILD)/lab/%,$(wildcard dev/cuda/*.cu))
labs: $(LABS)
	@for lab in $(LABS); do $$lab || exit 1; done
$(BUILD)/lab/%: dev/cuda/%.cu dev/cuda/lab.h $(EMU_SOURCES) train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	@mkdir -p $(@D)
	dev/emu/transform $< $(BUILD)/emu/src
	$(CXX) $(EMU_FLAGS) $(EMU_OPT) -x c++ $(BUILD)/emu/src/$< -x none -o $@ $(LDFLAGS) -lboost_context $(LDLIBS)

# The program itself in the emulation, to test its command line.
train_gpt2emu: $(BUILD)/train_gpt2emu
$(BUILD)/train_gpt2emu: train_gpt2.cu $(EMU_SOURCES) train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	dev/emu/transform $< $(BUILD)/emu/src
	$(CXX) $(EMU_FLAGS) $(EMU_OPT) -x c++ $(BUILD)/emu/src/$< -x none -o $@ $(LDFLAGS) -lboost_context $(LDLIBS)

# On a GPU: sm_80 and sm_90, and PTX for what comes later. NCCL is for several GPUs; without it the program takes one.
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
GPU_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90
comma := ,
space := $(subst ,, )
# does a program with that header and library compile and link?
nvcc_has = $(shell t=$$(mktemp -d) && printf '\043include <$(1)>\nint main() { return 0; }\n' >$$t/t.cu && $(NVCC) $$t/t.cu -o $$t/t $(2) >/dev/null 2>&1 && echo yes; rm -rf $$t)
ifneq ($(filter train_gpt2cu test-gpu test-gpu-build labs-gpu ptxas-report nvcc-check $(BUILD)/gpu/%,$(MAKECMDGOALS)),)
NO_NCCL ?= $(if $(NVCC),$(if $(call nvcc_has,nccl.h,-lnccl),,yes))
# MPI tells several machines' processes who they are; without it their launcher's environment and a shared folder do
MPICXX ?= $(if $(NO_NCCL)$(NO_MPI),,$(firstword $(shell command -v mpicxx mpic++)))
MPI_FLAGS := $(if $(MPICXX),$(shell $(MPICXX) --showme:compile 2>/dev/null || $(MPICXX) -compile_info 2>/dev/null | cut -d' ' -f2-))
MPI_LIBS := $(if $(MPICXX),$(shell $(MPICXX) --showme:link 2>/dev/null || $(MPICXX) -link_info 2>/dev/null | cut -d' ' -f2-))
endif
NVCC_FLAGS = -std=c++20 -O3 $(GPU_ARCH) -Xcompiler $(subst $(space),$(comma),$(strip -Wall -Wextra -fno-math-errno -fno-trapping-math $(OPENMP) $(filter -march=% -mcpu=%,$(CFLAGS)))) $(if $(NO_NCCL),-DNO_NCCL) \
    $(if $(MPICXX),-DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(filter -I%,$(MPI_FLAGS)))
NVCC_LIBS = $(filter -L% -l%,$(MPI_LIBS)) -lcublasLt $(if $(NO_NCCL),,-lnccl) $(LDFLAGS) $(LDLIBS)
.PHONY: train_gpt2emu test-gpu test-gpu-build labs-gpu test-mutants ptxas-report nvcc-check have-nvcc
have-nvcc:
	@test -n "$(NVCC)" || { echo "train_gpt2cu: found no nvcc in PATH or /usr/local/cuda/bin, expected the CUDA toolkit (or NVCC=path); the CPU program needs none: make train_gpt2" >&2; exit 1; }
	@test "$(call nvcc_has,cublasLt.h,-lcublasLt)" = yes || { echo "train_gpt2cu: found $(NVCC) but no cuBLAS that compiles and links, expected cublasLt.h and libcublasLt of the CUDA toolkit" >&2; exit 1; }
	@echo "found $(NVCC) ($$($(NVCC) --version | sed -n 's/.*release \([^,]*\).*/\1/p')), cuBLAS, $(if $(NO_NCCL),no NCCL: one GPU only,NCCL and $(if $(MPICXX),MPI: $(MPICXX),no MPI: processes find each other by files))"
train_gpt2cu: train_gpt2.cu train_gpt2.c $(HEADERS) Makefile | have-nvcc
	$(NVCC) $(NVCC_FLAGS) $< -o $@ $(NVCC_LIBS)
GPU_TESTS = $(patsubst $(BUILD)/emu/%,$(BUILD)/gpu/%,$(filter-out %/test_emu %/test_multi,$(EMU_TESTS)))
test-gpu-build: $(GPU_TESTS)
test-gpu: $(GPU_TESTS)
	@ls /dev/nvidia[0-9]* /dev/dxg >/dev/null 2>&1 || { echo "test-gpu: built $(GPU_TESTS), but found no GPU, expected one to run them on (without: make test-emu)" >&2; exit 1; }
	@dev/test/run.sh $(GPU_TESTS)
$(BUILD)/gpu/test_%: dev/test/test_%.cu train_gpt2.cu train_gpt2.c $(HEADERS) Makefile | $(BUILD) have-nvcc
	mkdir -p $(dir $@)
	$(NVCC) $(NVCC_FLAGS) $< -o $@ -lcriterion $(NVCC_LIBS)
labs-gpu: $(patsubst dev/cuda/%.cu,$(BUILD)/gpu/lab_%,$(wildcard dev/cuda/*.cu)) # dev/gpu_check.sh runs them
$(BUILD)/gpu/lab_%: dev/cuda/%.cu dev/cuda/lab.h train_gpt2.cu train_gpt2.c $(HEADERS) Makefile | $(BUILD) have-nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $< -o $@ $(NVCC_LIBS)

# Breaks train_gpt2.cu on purpose, in one way after the other: a test must fail each time. Some minutes; not part of make test.
test-mutants: | $(BUILD)
	@CXX="$(CXX)" FLAGS="$(EMU_FLAGS) -O1 $(filter -march=% -mcpu=%,$(CFLAGS))" LIBS="$(LDFLAGS) -lcriterion -lboost_context $(LDLIBS)" BUILD=$(BUILD) dev/test/mutate.sh
# What nvcc makes of the kernels: registers, shared memory, spills; warnings are errors.
ptxas-report: | $(BUILD) have-nvcc
	@NVCC="$(NVCC)" BUILD=$(BUILD) dev/ptxas_report.sh
# Does nvcc take the tests and the labs without a warning? Compiles, doesn't run.
NVCC_CHECKED = $(patsubst %.cu,$(BUILD)/nvcc/%.o,$(patsubst $(BUILD)/gpu/%,dev/test/%.cu,$(GPU_TESTS)) $(wildcard dev/cuda/*.cu))
nvcc-check: $(NVCC_CHECKED)
$(BUILD)/nvcc/%.o: %.cu $(wildcard dev/cuda/*.h) train_gpt2.cu train_gpt2.c $(HEADERS) Makefile | $(BUILD) have-nvcc
	@mkdir -p $(@D)
	$(NVCC) -std=c++20 -O1 -arch=sm_90 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -c $< -o $@

# AddressSanitizer and UBSan over the same tests, with a sanitized train_gpt2 under test_cli; then valgrind, where
# it is installed, on a short training run. Criterion's own leaks keep leak checking for valgrind.
# Of test_multi it runs a shorter form, little more than half the work: TEST_MULTI=all make test-sanitize for all of it.
test-sanitize: all
	$(MAKE) BUILD=$(BUILD)/sanitize CFLAGS="-O1 $(SANITIZE)" EMU_OPT="-O1 $(SANITIZE) -g1" sanitized-tests
	TEST_MULTI=$${TEST_MULTI:-brief} ASAN_OPTIONS=detect_leaks=0 TRAIN=$(BUILD)/sanitize/train_gpt2 dev/test/run.sh $(patsubst $(BUILD)/%,$(BUILD)/sanitize/%,$(TESTS) $(EMU_TESTS))
	BUILD=$(BUILD) dev/test/valgrind.sh
sanitized-tests: $(BUILD)/train_gpt2 $(TESTS) $(EMU_TESTS)
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

roofline: $(BUILD)/roofline
	$(BUILD)/roofline
scaling: $(BUILD)/scaling
	$(BUILD)/scaling
.PHONY: scaling
$(BUILD)/scaling: dev/cuda/scaling.c dev/cuda/roofline.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)
$(BUILD)/roofline: dev/cuda/roofline.c train_gpt2.c $(HEADERS) Makefile | $(BUILD)
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LDLIBS)

clean:
	rm -rf $(BUILD) train_gpt2 train_gpt2cu data/tokenize data/synth
