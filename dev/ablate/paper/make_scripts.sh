#!/usr/bin/env bash
# Writes train_MODEL.sh beside itself, a script for each of the paper's models, headed by what it is expected to take:
# memory from --estimate, speed from the model of doc/performance.md (make scaling), hours from both.
#
#   make train_gpt2emu build/scaling && dev/ablate/paper/make_scripts.sh
#
# Batches are the largest power of two up to 64 whose estimate stays under LIMIT GiB of a GPU's 80.
set -euo pipefail
cd "$(dirname "$0")/../../.."
program=${PROGRAM:-build/train_gpt2emu} limit=${LIMIT:-68} assumed=25

gib() { # model batch gpus zero
    "$program" --model "$1" --variant unified --batch "$2" --gpus "$3" --zero "$4" --estimate | awk '/^memory/ { printf "%.1f", $3 / 1024 }'
}
figure() { # model row-name
    "$program" --model "$1" --variant unified --estimate | awk -v row="$2" '$1 == row { print $2 }'
}
rounded() { awk -v x="$1" 'BEGIN { if (x < 10) printf "%.1f", x; else printf "%.0f", x }'; }

for model in 0.12b 0.25b 0.5b 0.75b 1b gemma-0.5b moe-0.25b moe-0.5b moe-0.8b moe-1b moe-2b; do
    script=dev/ablate/paper/train_$model.sh lines="" batches=""
    for gpus in 1 8; do
        zero=$((gpus > 1)) batch=64
        while ! awk -v need="$(gib $model $batch $gpus $zero)" -v limit="$limit" 'BEGIN { exit !(need < limit) }'; do batch=$((batch / 2)); done
        if [[ $model == moe-* ]]; then
            read -r speed hours < <("$program" --model $model --variant unified --batch $batch --estimate | awk -v gpus=$gpus -v mfu=$assumed '
                /^FLOPs/ { flops = $2 } /^run/ { speed = gpus * 989e12 * mfu / 100 / flops; printf "%.0f %.1f\n", speed, $2 / speed / 3600 }')
        else
            read -r speed hours < <(build/scaling $gpus 1 --model $model --variant unified --batch $batch --zero $zero | awk 'END { print $(NF - 2), $NF }')
        fi
        lines+=$(printf '#   %d H100  %9s tokens/s  %6s hours  %5s GiB a GPU  (--batch %d%s)' $gpus "$speed" "$(rounded "$hours")" "$(gib $model $batch $gpus $zero)" $batch "$([ $zero = 1 ] && echo ', --zero 1')")$'\n'
        batches+=" $batch"
    done
    steps=$("$program" --model $model --variant unified --estimate | awk '/^run/ { for (i = 1; i < NF; i++) if ($i == "in") print $(i + 1), $2 }')
    how="speed from make scaling"
    [[ $model == moe-* ]] && how="speed at an assumed MFU of $assumed%: the model of make scaling is of dense models"
    set -- $batches
    cat >"$script" <<END
#!/bin/sh
# The paper's $model, unified: $(figure $model total) parameters, ${steps% *} steps, ${steps#* } tokens.
#
#   dev/ablate/paper/train_$model.sh GPUS [more flags of train_gpt2cu]      GPUS: 1 or 8
#
# Expected, not measured ($how, memory from --estimate):
${lines%$'\n'}
# Written by make_scripts.sh; data: data/fineweb.sh. Continue after an interruption with --resume runs/$model.
set -eu
gpus=\${1:?usage: train_$model.sh GPUS [flags]}
shift
case \$gpus in 1) batch=$1 zero=0 ;; 8) batch=$2 zero=1 ;; *) echo "train_$model.sh: found \$gpus GPUs, expected 1 or 8" >&2; exit 2 ;; esac
case " \$* " in *" --resume "*) exec ./train_gpt2cu --gpus "\$gpus" --zero "\$zero" --batch "\$batch" "\$@" ;; esac
case " \$* " in *" --variant "*) ;; *) set -- --variant unified "\$@" ;; esac
exec ./train_gpt2cu --model $model --gpus "\$gpus" --zero "\$zero" --batch "\$batch" --data 'data/fineweb10B/fineweb_train_*.bin' --out "runs/$model" "\$@"
END
    chmod +x "$script"
    echo "$script: $(sed -n 's/^#   //p' "$script" | tail -n 2 | tr -s ' ' | tr '\n' ';')"
done
