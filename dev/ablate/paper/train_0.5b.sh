#!/bin/sh
# The paper's 0.5b, unified: 483008554 parameters, 23015 steps, 4.83e+10 tokens.
#
#   dev/ablate/paper/train_0.5b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed from make scaling, memory from --estimate):
#   1 H100     131148 tokens/s     102 hours   56.3 GiB a GPU  (--batch 16)
#   8 H100    1047468 tokens/s      13 hours   51.6 GiB a GPU  (--batch 16, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/0.5b.
set -eu
gpus=${1:?usage: train_0.5b.sh GPUS [flags]}
shift
case $gpus in 1) batch=16 zero=0 ;; 8) batch=16 zero=1 ;; *) echo "train_0.5b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model 0.5b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/0.5b" "$@"
