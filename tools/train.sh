#!/usr/bin/env bash
# Sets up, builds and trains: tools/train.sh CONFIG [arguments of hsdp_train]
#
# NPROC (default 2) ranks on this machine, under torchrun. Paths inside the configuration are relative to the project's folder.
set -euo pipefail

if (($# == 0)) || [[ $1 == -* ]]; then
  echo "usage: [NPROC=2] tools/train.sh CONFIG [--set section.key=value ...]" >&2
  exit 2
fi
if [[ ! -r $1 ]]; then
  echo "[train] configuration $1 cannot be read; see configs/ for those that come with the project" >&2
  exit 2
fi
config=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${NPROC:-2}

if [[ -n ${HSDP_PYTHON:-} ]]; then
  python=$HSDP_PYTHON
elif [[ -n ${CMAKE_PREFIX_PATH:-} ]]; then
  echo "[train] CMAKE_PREFIX_PATH names a libtorch without its Python, and torchrun is part of torch's Python package. Set" \
    "HSDP_PYTHON to a Python that has torch, or build with cmake --workflow --preset release and start" \
    "build/release/apps/hsdp_train --config $config under your own launcher." >&2
  exit 2
else
  python=.venv/bin/python
fi

tools/setup.sh
# There when the system's cmake is too old.
if [[ -x .venv/bin/cmake ]]; then PATH=$(pwd)/.venv/bin:$PATH; fi
cmake --preset release >/dev/null
cmake --build --preset release --parallel "$(nproc)" --target hsdp_train

if [[ ! -e data/quickstart.bin ]] && grep -q 'data/quickstart\.bin' "$config"; then
  "$python" tools/prepare_data.py --out data/quickstart.bin
fi

# torchrun would set one thread per rank and print a banner about it.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
exec "$python" -m torch.distributed.run --no-python --standalone --nproc-per-node "$ranks" \
  build/release/apps/hsdp_train --config "$config" "$@"
