#!/usr/bin/env bash
# Do the tests of the kernels notice a mistake? Breaks train_gpt2.cu on purpose, in one way at a time, and runs the pair of
# tests of dev/test/test_kernels.cu that guards the place (multi/NAME: a test of test_multi.cu); for each mutant one must fail.
# Prints a table.
#
#   make test-mutants            or some of them:  dev/test/mutate.sh barrier rope
#
# A mutant is a text that occurs exactly once in train_gpt2.cu, and what stands there instead. It is built in
# $BUILD/mutants/NAME. The control is the file as it is, and must pass; a mutant that doesn't compile is an error.
set -euo pipefail
cd "$(dirname "$0")/../.."

root=$PWD
out=${BUILD:-build}/mutants
jobs=${JOBS:-$(nproc)}
CXX=${CXX:-c++}
FLAGS=${FLAGS:--std=c++20 -Wno-unknown-pragmas -Wno-unused-function -fno-math-errno -fno-trapping-math -DCUDA_EMU -Idev/emu/include -iquote . -fopenmp -O1 -march=native}
LIBS=${LIBS:--lcriterion -lboost_context -lcjson -lpcre2-8 -lz -lm}
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
wanted=" $* "
names=()

# mutant NAME TEST FROM TO
mutant() {
    [[ $wanted == "  " || $wanted == *" $1 "* || $1 == control ]] || return 0
    names+=("$1")
    local dir=$out/$1
    rm -rf "$dir"
    mkdir -p "$dir"
    ln -s "$root/train_gpt2.c" "$root/dev" "$root/data" "$dir/"
    printf '%s' "$2" >"$dir/test"
    FROM=$3 TO=$4 NAME=$1 awk '
        { text = text $0 "\n" }
        END {
            from = ENVIRON["FROM"]
            at = from == "" ? 0 : index(text, from)
            if (from != "" && (!at || index(substr(text, at + 1), from))) {
                print "mutate.sh: " ENVIRON["NAME"] ": found \"" from "\" " (at ? "several times" : "nowhere") " in train_gpt2.cu, expected it once" > "/dev/stderr"
                exit 1
            }
            printf "%s", at ? substr(text, 1, at - 1) ENVIRON["TO"] substr(text, at + length(from)) : text
        }' train_gpt2.cu >"$dir/train_gpt2.cu"
}

# Builds and runs one mutant; leaves one word in NAME/verdict and what was said in NAME/message.
try() {
    local name=$1 dir=$out/$1 test pattern program=test_kernels
    test=$(<"$dir/test")
    local filter="kernels/${test}*"
    [[ $test != multi/* ]] || program=test_multi filter=$test
    echo broken >"$dir/verdict"
    (
        cd "$dir"
        dev/emu/transform dev/test/$program.cu src
        # shellcheck disable=SC2086
        $CXX $FLAGS -DONLY="\"$test\"" -x c++ "src/dev/test/$program.cu" -x none -o "$program" $LIBS
    ) >"$dir/build.log" 2>&1 || { grep -m 1 error "$dir/build.log" >"$dir/message" || true; return 0; }
    local status=0
    timeout 600 "$dir/$program" -j1 --filter "$filter" >"$dir/log" 2>&1 || status=$?
    pattern='Tested: ([0-9]+) \| Passing: ([0-9]+) \| Failing: ([0-9]+)'
    if ! [[ $(grep -a Synthesis "$dir/log") =~ $pattern ]] || ((BASH_REMATCH[1] == 0)); then
        echo "no totals, exit status $status" >"$dir/message"
        return 0
    fi
    if ((BASH_REMATCH[3] > 0 && status != 0)); then echo caught >"$dir/verdict"; else echo missed >"$dir/verdict"; fi
    grep -a -v neighbour_kernel "$dir/log" | grep -a -o -E -m 1 '(emu: .*|line [0-9]+, .*|.*other numbers.*|[a-z]+: [0-9.e-]+ (from one GPU|between) .*|.*timed out.*|.*Timeout.*)' >"$dir/message" || true
}

mutant control "" "" ""
# --- missing barriers
mutant barrier rmsnorm '    if (lane == 0) { scratch[warp] = x; }
    __syncthreads();' '    if (lane == 0) { scratch[warp] = x; }'
mutant barrier_of_parts embedding 'parts[warp][lane * W + k] = sum[k]; }
    __syncthreads();' 'parts[warp][lane * W + k] = sum[k]; }'
mutant barrier_not_by_all classifier '    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + top - at_target; }
    if (grad_scale == 0) { return; }' '    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + top - at_target; }
    else { __syncthreads(); }
    if (grad_scale == 0) { return; }'
# --- indices and strides
mutant wrong_stride column_sum 'sum += partial[r * ld + c];' 'sum += partial[r * cols + c];'
mutant wrong_leading_dimension matmul_layers 'key.trans_b ? key.N : key.K, key.ldb, key.stride_b' 'key.trans_b ? key.N : key.K, key.trans_b ? key.K : key.N, key.stride_b'
mutant swapped_index muon 'from_float<F>(w.flip ? tile[threadIdx.x][k] : tile[k][threadIdx.x])' 'from_float<F>(w.flip ? tile[k][threadIdx.x] : tile[threadIdx.x][k])'
mutant dropped_tail embedding 'c < C; c += blockDim.x * W) { store(out + n * C + c, load<W>(from + c)); }' 'c + W < C; c += blockDim.x * W) { store(out + n * C + c, load<W>(from + c)); }'
mutant pads_counted classifier 'y[i] = v + i < V ? x[i] : -INFINITY;' 'y[i] = x[i];'
mutant beyond_the_end rmsnorm 'd < D; d += blockDim.x * W) {
        auto v = load<W>(inp + n * D + d);' 'd < D + W; d += blockDim.x * W) {
        auto v = load<W>(inp + n * D + d);'
# --- formulas
mutant rope_sign qkv 'da[k][j] = dx[j] * c + dy[j] * s;' 'da[k][j] = dx[j] * c - dy[j] * s;'
mutant no_eps qkv 'r = 1 / sqrtf(sum / (float)HS + (float)NORM_EPS);' 'r = 1 / sqrtf(sum / (float)HS);'
mutant no_along swiglu 'd_up.set(i, r_up * db - along_up * u[i]);' 'd_up.set(i, r_up * db);'
mutant no_mend classifier '{ float fix = exp_of(s.top - top, F()); s.sum *= fix; s.dot *= fix; s.top = top; }' '{ s.top = top; }'
mutant no_bias_correction adamw '(sqrtf(v[k]) * s.root + s.eps)' '(sqrtf(v[k]) + s.eps)'
mutant a_forgotten_gamma reparameterize 'out.value[i] += a * g[i] * b[i];' 'out.value[i] += a * g[i];'
mutant tie_to_the_last moe 'other == best && other_at < at' 'other == best && other_at > at'
# --- sums
mutant overwritten_gradient matmul_layers 'accumulate ? 1.0f : 0.0f' '0.0f'
mutant wrong_width qkv '        sum = warp_sum(sum, lanes);' '        sum = warp_sum(sum);'
mutant half_a_warp rmsnorm 'for (int offset = width / 2; offset > 0; offset /= 2) { x = Op::combine' 'for (int offset = width / 4; offset > 0; offset /= 2) { x = Op::combine'
# --- attention, plain and on tensor cores
mutant no_mask attention '        if (s0 + lane > t) { score = -INFINITY; }
' ''
mutant no_mask_on_tensor_cores attention 'if (s0 + TC_STEP - 1 > w0) { ' 'if (false) { '
mutant no_wait attention '        cp_async_wait<0>();
        __syncthreads();                             // V is here' '        __syncthreads();                             // V is here'
mutant no_barrier_after_wait attention '        __syncthreads();                             // V is here' '        // V is here'
mutant no_swizzle attention '((lane / 16 ^ (lane & 7)) << 3) ^ column0' '((lane / 16) << 3) ^ column0'
mutant rows_past_the_end attention 'row + r < valid ? 16 : 0' '16'
mutant swapped_heads attention 'D[(n / T * NH + i % NH) * T + n % T]' 'D[(i % NH * NH + n / T) * T + n % T]'
# --- several GPUs
mutant first_rows_gamma_a multi/losses_tied 'if (map.gamma_a >= 0) { map.gamma_a += place.row; }' ''
mutant a_bucket_not_summed multi/losses_baseline '|| !m->last || m->buckets[bucket].empty()' '|| !m->last || bucket == 1 || m->buckets[bucket].empty()'

begin=$SECONDS
for name in "${names[@]}"; do
    while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
    try "$name" &
done
wait

bad=0 caught=0
printf '%-24s %-22s %-8s %s\n' mutant test verdict 'what the test said'
for name in "${names[@]}"; do
    verdict=$(<"$out/$name/verdict") test=$(<"$out/$name/test")
    if [[ $name == control ]]; then
        if [[ $verdict == missed ]]; then verdict=passes; else bad=1; fi
    elif [[ $verdict == caught ]]; then caught=$((caught + 1))
    else bad=1
    fi
    printf '%-24s %-22s %-8s %.110s\n' "$name" "${test:-all}" "$verdict" "$(head -n 1 "$out/$name/message" 2>/dev/null || true)"
done
echo "$caught of $((${#names[@]} - 1)) mutants caught, $((SECONDS - begin)) s"
exit $bad
