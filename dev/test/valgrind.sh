#!/bin/sh
# Five steps of training, a resume and a sample under valgrind: any error or leak ends with status 1.
set -eu
: "${BUILD:=build}"
command -v valgrind >/dev/null 2>&1 || { echo "valgrind: SKIPPED, not installed"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# valgrind knows no AVX-512, and each thread's library memory of OpenMP stays reachable: one plain thread
cc -O1 -g -std=gnu11 -Wno-unknown-pragmas train_gpt2.c -o "$work/train" -lcjson -lpcre2-8 -lz -lm
data/synth --out "$work/data" --tokens 20000 --val-tokens 2000 >/dev/null
check() { valgrind -q --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite "$@"; }
small="--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --val-batches 2 --variant unified --optimizer muon"
# shellcheck disable=SC2086
check "$work/train" $small --data "$work/data/synth_train_*.bin" --steps 5 --stop-at 3 --save-every 1 --out "$work/run" >/dev/null
check "$work/train" --resume "$work/run" >/dev/null
check "$work/train" --resume "$work/run" --sample 20 >/dev/null
echo "valgrind: training, resume and sample are clean"
