#!/usr/bin/env bash
# Sets up, builds and runs the tests: tools/test.sh [--nightly] [arguments of ctest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(--label-exclude nightly)
if [[ ${1:-} == --nightly ]]; then
  selection=()
  shift
fi

tools/setup.sh
# There when the system's cmake is too old.
if [[ -x .venv/bin/cmake ]]; then PATH=$(pwd)/.venv/bin:$PATH; fi
cores=$(nproc)
cmake --preset release
cmake --build --preset release --parallel "$cores"

if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  echo "[test] tests labelled gpu skip: this machine shows no NVIDIA device (/dev/nvidia0)"
fi
exec ctest --test-dir build/release --output-on-failure --no-tests=error --parallel "$cores" "${selection[@]}" "$@"
