#!/usr/bin/env bash
# Everything to be measured on an NVIDIA GPU in one go, in under ten minutes: compiles the kernels
# and holds them to torch, then times them. Needs no network and installs nothing.
# usage: tests/gpu/session.sh [FOLDER]   (PYTHON=... chooses the interpreter)
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-session}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
timeout 360 make --no-print-directory test-gpu GPU_PYTHON="$python" 2>&1 | tee "$out/tests.log"
tests=$?
timeout 200 "$python" -m surefoot.bench.kernels_cuda --out "$out/kernels.json" 2>&1 |
  tee "$out/kernels.log"
exit $((tests | $?))
