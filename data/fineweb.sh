#!/usr/bin/env bash
# Downloads GPT-2 tokens of FineWeb (10 billion tokens, 100 million a shard) and
# the GPT-2 byte-pair ranks.
#
#   data/fineweb.sh [N] [DIR]
#
# N: training shards, 1 to 103 (default 1; 200 MB each). DIR: where they go
# (default data/fineweb10B). What is there already and whole is not downloaded
# again; an interrupted download resumes.
#
# Where to download from, for mirrors and tests:
#   FINEWEB_URL  folder with fineweb_val_000000.bin, fineweb_train_000001.bin, ...
#   RANKS_URL    the rank file    RANKS_SHA256  its checksum
set -euo pipefail

fineweb_url=${FINEWEB_URL:-https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main}
ranks_url=${RANKS_URL:-https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken}
ranks_sha256=${RANKS_SHA256:-306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930}

usage() {
    echo "fineweb.sh: $1 (usage: data/fineweb.sh [N from 1 to 103] [DIR])" >&2
    exit 2
}

fail() {
    echo "fineweb.sh: $1" >&2
    exit 1
}

# ------------------------------------------------------------------------------
# Checks: each prints what is wrong with a file, or nothing

# A shard is 256 int32 of header (magic 20240520, version 1, number of tokens,
# ...) and 2 bytes a token.
shard_fault() {
    local size magic version tokens
    size=$(wc -c <"$1")
    if ((size < 1024)); then
        echo "found $((size)) bytes, expected a header of 1024"
        return
    fi
    read -r magic version tokens < <(od -An -t d4 -N 12 "$1")
    if [[ $magic != 20240520 || $version != 1 ]]; then
        echo "found magic $magic version $version, expected 20240520 version 1"
    elif ((tokens <= 0 || size != 1024 + 2 * tokens)); then
        echo "found $((size)) bytes, expected $((1024 + 2 * tokens)) for the $tokens tokens of its header"
    fi
}

ranks_fault() {
    local sum
    sum=$( (sha256sum "$1" 2>/dev/null || shasum -a 256 "$1") | cut -d ' ' -f 1)
    if [[ $sum != "$ranks_sha256" ]]; then
        echo "found sha256 $sum, expected $ranks_sha256"
    fi
}

# ------------------------------------------------------------------------------
# Download to FILE.part, check, rename: a file under its own name is whole

# fetch URL FILE CHECK
fetch() {
    local url=$1 file=$2 check=$3 fault status
    if [[ -f $file ]]; then
        fault=$("$check" "$file")
        if [[ -n $fault ]]; then
            fail "$file: $fault; remove it to download it again"
        fi
        echo "$file: already there"
        return
    fi
    # A finished download whose rename was interrupted needs no server.
    if [[ ! -f $file.part || -n $("$check" "$file.part") ]]; then
        echo "$file: downloading"
        status=0
        curl --fail --location --continue-at - --retry 5 --retry-delay 2 --progress-bar \
            --output "$file.part" "$url" || status=$?
        case $status in
        0) ;;
        22) fail "$file: the server refused $url (curl status 22); does it exist? If so, remove $file.part and run again" ;;
        33 | 36) fail "$file: the server cannot resume $file.part; remove it and run again" ;;
        *) fail "$file: download stopped (curl status $status), run again to resume" ;;
        esac
    fi
    fault=$("$check" "$file.part")
    if [[ -n $fault ]]; then
        rm -f "$file.part"
        fail "$file: $fault; the damaged download is removed, run again"
    fi
    mv "$file.part" "$file"
}

# ------------------------------------------------------------------------------
# main

if (($# > 2)); then usage "found $# arguments, expected at most 2"; fi
n=${1:-1}
dir=${2:-data/fineweb10B}
if [[ ! $n =~ ^[1-9][0-9]{0,2}$ ]] || ((n > 103)); then usage "N: found $n, expected 1 to 103"; fi
command -v curl >/dev/null || fail "found no curl, expected it to be installed"
mkdir -p "$dir"

fetch "$ranks_url" "$dir/r50k_base.tiktoken" ranks_fault
fetch "$fineweb_url/fineweb_val_000000.bin" "$dir/fineweb_val_000000.bin" shard_fault
for ((i = 1; i <= n; i++)); do
    name=$(printf 'fineweb_train_%06d.bin' "$i")
    fetch "$fineweb_url/$name" "$dir/$name" shard_fault
done
echo "$dir: $n training shards, 1 validation shard and the GPT-2 ranks"
