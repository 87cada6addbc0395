#!/usr/bin/env bash
# Runs Criterion test programs one after the other and adds up what they found:
#
#   dev/test/run.sh build/test_gpt2_float build/test_cli ...
#
# Shows their output, then a line for each program, then "N passed, N failed, N skipped" alone on the last line.
# Exit status 1: a test failed or crashed, or a program ended with an error, printed no totals or ran no test.
set -euo pipefail

if (($# == 0)); then
    echo "usage: dev/test/run.sh PROGRAM..." >&2
    exit 2
fi

# Idle OpenMP threads sleep instead of spinning: tests run small models side by side.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

passed=0 failed=0 skipped=0 bad=0
lines=()
for program in "$@"; do
    [[ $program == */* ]] || program=./$program
    : >"$scratch/tap"
    echo "== $program"
    begin=$SECONDS status=0
    # Criterion prints no count of skipped tests; its TAP report names each of them.
    "$program" --tap="$scratch/tap" 2>&1 | tee "$scratch/log" || status=${PIPESTATUS[0]}
    seconds=$((SECONDS - begin))

    # The last such line counts: a test may print a child's totals. Failing includes crashing.
    pattern='Synthesis: Tested: ([0-9]+) \| Passing: ([0-9]+) \| Failing: ([0-9]+) \| Crashing: ([0-9]+)'
    totals=$(grep -aE "$pattern" "$scratch/log" | tail -n 1 || true)
    skips=$(grep -acE '^(not )?ok .*# SKIP' "$scratch/tap" || true)
    grep -aE '^(not )?ok .*# SKIP' "$scratch/tap" | sed -E 's/^(not )?ok - (.*)# SKIP/skipped: \2/' || true
    verdict=passed
    if [[ $totals =~ $pattern ]]; then
        passed=$((passed + BASH_REMATCH[2]))
        failed=$((failed + BASH_REMATCH[3]))
        skipped=$((skipped + skips))
        if ((BASH_REMATCH[3] > 0 || BASH_REMATCH[4] > 0)); then
            verdict="FAILED: ${BASH_REMATCH[3]} of ${BASH_REMATCH[1]} tests"
        elif ((status != 0)); then
            verdict="FAILED: exit status $status"
        elif ((BASH_REMATCH[1] == 0)); then
            verdict="FAILED: ran no test"
        fi
    else
        verdict="FAILED: no totals, exit status $status"
    fi
    [[ $verdict == passed ]] || bad=1
    # A program that fails outside of its tests counts as one failure, so that the last line never hides it.
    [[ $verdict == passed || $verdict == *tests ]] || failed=$((failed + 1))
    lines+=("$(printf '%-32s %s, %d s' "$program" "$verdict" "$seconds")")
done

echo
printf '%s\n' "${lines[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
exit "$bad"
