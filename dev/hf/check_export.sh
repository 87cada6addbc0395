#!/bin/sh
# make check-export: compares exported models with Transformers. A check for developers: nothing else needs Python.
#   PYTHON=path/to/python3 make check-export      one that has torch, transformers, safetensors and numpy
set -eu
: "${PYTHON:=python3}" "${OMP_WAIT_POLICY:=passive}"
export OMP_WAIT_POLICY
if ! found=$("$PYTHON" -c 'import numpy, safetensors, torch, transformers' 2>&1); then
    echo '************************************************************************'
    echo "SKIPPED: no exported model was checked against Transformers: $PYTHON says"
    echo "    $(echo "$found" | tail -n 1)"
    echo 'Install torch, transformers, safetensors and numpy, or set PYTHON.'
    echo '************************************************************************'
    exit 0
fi
exec "$PYTHON" dev/hf/check_export.py
