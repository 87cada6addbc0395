#!/usr/bin/env bash
# What nvcc makes of the GPU code: registers, shared memory and spills of each kernel of train_gpt2.cu, for sm_80 and sm_90.
#
#   make ptxas-report            ARCHS="90" dev/ptxas_report.sh
#
# Compiles with all warnings as errors, prints the table, and leaves it in $BUILD/ptxas_report.txt. Fails if a kernel of
# attention, of a norm or of the classifier spills registers to memory. Without nvcc it says so and fails: CI asks first.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build}
NVCC=${NVCC:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)}
[[ -n $NVCC ]] || { echo "ptxas_report: found no nvcc in PATH or /usr/local/cuda/bin, expected the CUDA toolkit (or NVCC=path)" >&2; exit 1; }
must_not_spill='attention|norm|classifier|swiglu|qkv'
mkdir -p "$build"
report=$build/ptxas_report.txt
: >"$report"
for arch in ${ARCHS:-80 90}; do
    log=$build/ptxas_sm_$arch.log
    "$NVCC" -std=c++20 -O3 -arch="sm_$arch" -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Xptxas -v -c train_gpt2.cu -o "$build/ptxas_sm_$arch.o" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    # ptxas says of each kernel: its name, "N bytes stack frame, N bytes spill stores, N bytes spill loads", "Used N registers ..."
    awk -v arch="sm_$arch" '
        /Compiling entry function/ { split($0, part, "\047"); name = part[2]; order[++count] = name }
        /bytes stack frame/ { for (i = 2; i <= NF; i++) { if ($i == "bytes" && $(i + 1) == "stack") { stack[name] = $(i - 1) } if ($i == "bytes" && $(i + 1) == "spill") { spill[name] += $(i - 1) } } }
        /Used [0-9]+ registers/ {
            match($0, /Used [0-9]+/)
            registers[name] = substr($0, RSTART + 5, RLENGTH - 5)
            smem[name] = 0
            if (match($0, /[0-9]+ bytes smem/)) { smem[name] = substr($0, RSTART, RLENGTH); sub(/ .*/, "", smem[name]) }
        }
        END { for (i = 1; i <= count; i++) { n = order[i]; print arch, registers[n], smem[n], stack[n] + 0, spill[n] + 0, n } }' "$log" | c++filt >>"$report"
done
# names without namespaces, return type, arguments
sed -E 's/^((\S+ ){5})(void )?/\1/; s/gpu:://g; s/\(anonymous namespace\):://g; s/__nv_bfloat16/bf16/g; s/\(int\)//g; s/\(bool\)1/true/g; s/\(bool\)0/false/g; s/\([^()]*\)$//' "$report" | sort -k1,1 -k6 >"$report.names"
{
    printf '%-6s %9s %13s %11s %11s  %s\n' arch registers 'static shared' 'stack bytes' 'spill bytes' kernel
    while read -r arch registers smem stack spill name; do printf '%-6s %9s %13s %11s %11s  %s\n' "$arch" "$registers" "$smem" "$stack" "$spill" "$name"; done <"$report.names"
} >"$report"
rm "$report.names"
cat "$report"
spilling=$(awk -v hot="$must_not_spill" 'NR > 1 && $5 > 0 && $0 ~ hot' "$report")
if [[ -n $spilling ]]; then
    echo "ptxas_report: found spills, expected none in kernels of $must_not_spill:" >&2
    echo "$spilling" >&2
    exit 1
fi
echo "no spills in kernels of $must_not_spill; $(($(wc -l <"$report") - 1)) kernels in $report"
