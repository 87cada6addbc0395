#!/bin/sh
# For the rare hour with a GPU: everything that only a GPU can show, in one run of under 6 minutes, ending in one table.
#
#   dev/gpu_check.sh [FOLDER]       FOLDER (default gpu_check) receives the full logs
#
# Parts, each bounded in time; one that fails doesn't stop the next, but the exit status is 1:
#   build      train_gpt2cu, the tests and the kernel labs, by nvcc                     150 s
#   tests      make test-gpu: every kernel and whole models against the CPU              60 s
#   labs       dev/cuda: each version of each kernel validated, then timed               60 s
#   sanitizer  compute-sanitizer (memcheck, racecheck) on a tiny model                   40 s
#   bench      0.12B in bf16, baseline and unified, one GPU: tokens/s, MFU, memory     2x20 s
#   kernels    share of each kernel in a step, by nsys where it is installed             20 s
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${1:-gpu_check}
JOBS=$(nproc 2>/dev/null || echo 4)
PEAK=${PEAK_TFLOPS:-989} # dense bf16 of an H100 or H200 in TFLOP/s; PEAK_TFLOPS=... for another GPU

fail() { echo "gpu_check: $1" >&2; exit 1; }
command -v nvidia-smi >/dev/null || fail "found no nvidia-smi, expected a machine with an NVIDIA GPU and its driver"
command -v nvcc >/dev/null || fail "found no nvcc, expected the CUDA toolkit in PATH"
mkdir -p "$OUT" || fail "$OUT: cannot make this folder"

failed=0
TABLE=$OUT/table.txt
GPU=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | head -1)
echo "gpu_check on $GPU" > "$TABLE"

# part NAME SECONDS COMMAND...: runs it with a limit, keeps its output, adds a line to the table
part() {
    name=$1 limit=$2
    shift 2
    echo "== $name (at most $limit s): $*"
    began=$(date +%s)
    timeout "$limit" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    took=$(($(date +%s) - began))
    case $status in
        0) word=passed ;;
        124) word="OUT OF TIME" failed=1 ;;
        *) word="FAILED ($status)" failed=1 ;;
    esac
    [ $status -eq 0 ] || tail -5 "$OUT/$name.log"
    printf '%-12s %-14s %4s s  %s\n' "$name" "$word" "$took" "$OUT/$name.log" >> "$TABLE"
    return $status
}

part build 150 make -j "$JOBS" train_gpt2cu test-gpu-build labs-gpu || { cat "$TABLE"; exit 1; }
part tests 60 make test-gpu
part labs 60 sh -c 'for lab in build/gpu/lab_*; do "$lab" || exit 1; done'

# tokens of a synthetic language; the vocabulary is the paper's, so the work of a step is the real one
[ -f data/synthetic/synth_val_000000.bin ] || make data > "$OUT/data.log" 2>&1 || fail "make data failed: see $OUT/data.log"
DATA='data/synthetic/synth_train_*.bin'
TINY="--layers 2 --channels 128 --heads 2 --seq-len 96 --batch 2 --total-batch 2 --vocab 1024 --variant unified --steps 2 --val-data none"
if command -v compute-sanitizer >/dev/null; then
    rm -rf "$OUT/tiny" "$OUT/tiny2"
    part memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 1 ./train_gpt2cu $TINY --data "$DATA" --out "$OUT/tiny"
    part racecheck 40 compute-sanitizer --tool racecheck --error-exitcode 1 ./train_gpt2cu $TINY --data "$DATA" --out "$OUT/tiny2"
else
    echo "sanitizer    not run: compute-sanitizer is not installed" >> "$TABLE"
fi

MODEL="--model 0.12b --vocab 50304 --precision bf16 --batch 64 --total-batch 64 --val-data none --save-every 0"
for variant in baseline unified; do
    rm -rf "$OUT/$variant"
    (while sleep 0.5; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i 0; done > "$OUT/$variant.memory" 2>/dev/null) &
    watcher=$!
    part "$variant" 25 ./train_gpt2cu $MODEL --variant $variant --steps 40 --data "$DATA" --out "$OUT/$variant"
    kill $watcher 2>/dev/null
    flops=$(./train_gpt2cu $MODEL --variant $variant --steps 40 --data "$DATA" --estimate | awk '$1 == "FLOPs" {print $2}')
    memory=$(sort -n "$OUT/$variant.memory" | tail -1)
    # the median of the steps after the first ten
    [ -f "$OUT/$variant/timing.csv" ] && tail -n +12 "$OUT/$variant/timing.csv" | cut -d, -f2 | sort -n | awk -v v=$variant -v f="$flops" -v p="$PEAK" -v m="$memory" \
        '{t[NR] = $1} END {if (NR == 0) {exit} ms = t[int((NR + 1) / 2)]; rate = 64 * 1024 / ms * 1000;
        printf "%-12s %.1f ms a step, %.0f tokens/s, MFU %.1f%% of %g TFLOP/s, %s MiB\n", v, ms, rate, 100 * rate * f / (p * 1e12), p, m}' >> "$TABLE"
done

if command -v nsys >/dev/null; then
    rm -rf "$OUT/profiled"
    part kernels 30 nsys profile --force-overwrite true -o "$OUT/profile" ./train_gpt2cu $MODEL --variant unified --steps 6 --data "$DATA" --out "$OUT/profiled" &&
        nsys stats --report cuda_gpu_kern_sum --format table "$OUT/profile.nsys-rep" 2>/dev/null | cut -c1-140 | head -30 >> "$TABLE"
else
    echo "kernels      not measured: nsys is not installed" >> "$TABLE"
fi
rm -rf "$OUT/tiny" "$OUT/tiny2" "$OUT/profiled" "$OUT/baseline" "$OUT/unified"
echo
cat "$TABLE"
exit $failed
