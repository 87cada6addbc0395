#!/bin/sh
# The paper's moe-0.5b, unified: 481816421 parameters, 35030 steps, 1.84e+10 tokens.
#
#   dev/ablate/paper/train_moe-0.5b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed at an assumed MFU of 25%: the model of make scaling is of dense models, memory from --estimate):
#   1 H100     270811 tokens/s      19 hours   37.8 GiB a GPU  (--batch 64)
#   8 H100    2166484 tokens/s     2.4 hours   33.1 GiB a GPU  (--batch 64, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/moe-0.5b.
set -eu
gpus=${1:?usage: train_moe-0.5b.sh GPUS [flags]}
shift
case $gpus in 1) batch=64 zero=0 ;; 8) batch=64 zero=1 ;; *) echo "train_moe-0.5b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model moe-0.5b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/moe-0.5b" "$@"
