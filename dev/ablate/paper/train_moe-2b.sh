#!/bin/sh
# The paper's moe-2b, unified: 1998911581 parameters, 29603 steps, 6.21e+10 tokens.
#
#   dev/ablate/paper/train_moe-2b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed at an assumed MFU of 25%: the model of make scaling is of dense models, memory from --estimate):
#   1 H100      64895 tokens/s     266 hours   54.0 GiB a GPU  (--batch 4)
#   8 H100     519160 tokens/s      33 hours   54.1 GiB a GPU  (--batch 8, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/moe-2b.
set -eu
gpus=${1:?usage: train_moe-2b.sh GPUS [flags]}
shift
case $gpus in 1) batch=4 zero=0 ;; 8) batch=8 zero=1 ;; *) echo "train_moe-2b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model moe-2b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/moe-2b" "$@"
