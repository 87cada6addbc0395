#!/bin/sh
# The paper's moe-1b, unified: 1060445430 parameters, 16926 steps, 3.55e+10 tokens.
#
#   dev/ablate/paper/train_moe-1b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed at an assumed MFU of 25%: the model of make scaling is of dense models, memory from --estimate):
#   1 H100     116627 tokens/s      85 hours   44.0 GiB a GPU  (--batch 8)
#   8 H100     933019 tokens/s      11 hours   59.1 GiB a GPU  (--batch 16, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/moe-1b.
set -eu
gpus=${1:?usage: train_moe-1b.sh GPUS [flags]}
shift
case $gpus in 1) batch=8 zero=0 ;; 8) batch=16 zero=1 ;; *) echo "train_moe-1b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model moe-1b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/moe-1b" "$@"
