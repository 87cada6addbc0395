#!/bin/sh
# The paper's 0.75b, unified: 749558612 parameters, 35719 steps, 7.49e+10 tokens.
#
#   dev/ablate/paper/train_0.75b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed from make scaling, memory from --estimate):
#   1 H100      87904 tokens/s     237 hours   46.2 GiB a GPU  (--batch 8)
#   8 H100     702108 tokens/s      30 hours   38.9 GiB a GPU  (--batch 8, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/0.75b.
set -eu
gpus=${1:?usage: train_0.75b.sh GPUS [flags]}
shift
case $gpus in 1) batch=8 zero=0 ;; 8) batch=8 zero=1 ;; *) echo "train_0.75b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model 0.75b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/0.75b" "$@"
