#!/bin/sh
# The paper's 0.25b, unified: 254208234 parameters, 48446 steps, 2.54e+10 tokens.
#
#   dev/ablate/paper/train_0.25b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed from make scaling, memory from --estimate):
#   1 H100     356451 tokens/s      20 hours   30.9 GiB a GPU  (--batch 64)
#   8 H100    2821489 tokens/s     2.5 hours   28.4 GiB a GPU  (--batch 64, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/0.25b.
set -eu
gpus=${1:?usage: train_0.25b.sh GPUS [flags]}
shift
case $gpus in 1) batch=64 zero=0 ;; 8) batch=64 zero=1 ;; *) echo "train_0.25b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model 0.25b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/0.25b" "$@"
