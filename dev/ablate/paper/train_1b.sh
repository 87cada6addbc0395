#!/bin/sh
# The paper's 1b, unified: 1028562326 parameters, 49019 steps, 1.03e+11 tokens.
#
#   dev/ablate/paper/train_1b.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured (speed from make scaling, memory from --estimate):
#   1 H100      67206 tokens/s     425 hours   58.2 GiB a GPU  (--batch 8)
#   8 H100     536776 tokens/s      53 hours   48.1 GiB a GPU  (--batch 8, --zero 1)
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/1b.
set -eu
gpus=${1:?usage: train_1b.sh GPUS [flags]}
shift
case $gpus in 1) batch=8 zero=0 ;; 8) batch=8 zero=1 ;; *) echo "train_1b.sh: found $gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " $* " in *" --resume "*) exec ./train_gpt2cu --gpus "$gpus" --zero "$zero" --batch "$batch" "$@" ;; esac
case " $* " in *" --variant "*) ;; *) set -- --variant unified "$@" ;; esac
exec ./train_gpt2cu --model 1b --gpus "$gpus" --zero "$zero" --batch "$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/1b" "$@"
