#!/usr/bin/env bash
# Installs what building and running need: Debian packages, and torch in the project's .venv. Quick when all is there.
#
# With HSDP_PYTHON (a Python that has torch) or CMAKE_PREFIX_PATH (a libtorch folder) in the environment nothing is
# installed and the network is not used; missing tools are named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=(torch==2.11.0 numpy safetensors==0.8.0 xxhash==4.1.0 PyYAML==6.0.3 Jinja2)
readonly oldest_cmake=3.25
readonly venv=.venv
readonly stamp=$venv/installed-requirements.txt

say() { printf '[setup] %s\n' "$*" >&2; }

# Prints the Debian package of each build tool and header that is missing, one a line.
missing_packages() {
  local tool package
  while read -r tool package; do
    command -v "$tool" >/dev/null || echo "$package"
  done <<'TOOLS'
g++ g++
cmake cmake
ninja ninja-build
ccache ccache
git git
TOOLS
  local include_flags=() prefix
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do include_flags+=(-I "$prefix/include"); done
  local probe='
#if !__has_include(<yaml-cpp/yaml.h>)
libyaml-cpp-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
libcli11-dev
#endif
#if !__has_include(<gtest/gtest.h>)
libgtest-dev
#endif
#if !__has_include(<gmock/gmock.h>)
libgmock-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
#if !__has_include(<xxhash.h>)
libxxhash-dev
#endif
#if !__has_include(<gloo/algorithm.h>)
libgloo-dev
#endif'
  if command -v g++ >/dev/null; then
    g++ -E -P -x c++ "${include_flags[@]}" - <<<"$probe" | sed '/^ *$/d'
  else
    grep '^[a-z]' <<<"$probe"
  fi
}

# Whether the cmake at hand is recent enough.
recent_cmake() {
  local version
  version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p') || true
  [[ $(printf '%s\n' "$oldest_cmake" "${version:-0}" | sort -V | head -1) == "$oldest_cmake" ]]
}

# Prints the first Python that torch has wheels for and that can make a virtual environment.
usable_python() {
  local python
  for python in python3 python3.13 python3.12 python3.11 python3.10 python3.14 /usr/bin/python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
}

install_packages() {
  local packages=("$@") as_root=()
  if [[ $(id -u) != 0 ]]; then as_root=(sudo); fi
  say "installing Debian packages: ${packages[*]}"
  "${as_root[@]}" apt-get update -q
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"; then
    say "apt-get could not install them. On Ubuntu most are in the component universe, which minimal images leave out:" \
      "add-apt-repository universe"
    exit 2
  fi
}

own_torch=
if [[ -n ${HSDP_PYTHON:-} || -n ${CMAKE_PREFIX_PATH:-} ]]; then own_torch=yes; fi

mapfile -t missing < <(missing_packages)
if [[ -z $own_torch && ! -e $stamp && -z $(usable_python) ]]; then missing+=(python3 python3-venv); fi

# ccache only saves time: never a reason to stop.
needed=()
for package in "${missing[@]}"; do
  if [[ $package != ccache ]]; then needed+=("$package"); fi
done

if [[ -n $own_torch ]]; then
  if command -v cmake >/dev/null && ! recent_cmake; then needed+=("cmake>=$oldest_cmake"); fi
  if ((${#needed[@]})); then
    say "nothing is installed, since HSDP_PYTHON or CMAKE_PREFIX_PATH names a torch; missing (Debian names): ${needed[*]}"
    exit 2
  fi
  if [[ -n ${HSDP_PYTHON:-} ]] && ! "$HSDP_PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    say "HSDP_PYTHON=$HSDP_PYTHON has no torch package; expected ${requirements[0]}"
    exit 2
  fi
  exit 0
fi

if ((${#needed[@]})); then
  if ! command -v apt-get >/dev/null || { [[ $(id -u) != 0 ]] && ! command -v sudo >/dev/null; }; then
    say "this is not Debian or Ubuntu, or neither root nor sudo is at hand. Install by hand, then run this again (Debian" \
      "names): ${needed[*]}. Python 3.10 to 3.14 with venv is needed for ${requirements[*]}, or set HSDP_PYTHON to a" \
      "Python that has them."
    exit 2
  fi
  install_packages "${missing[@]}"
fi

# Ubuntu 22.04 has an older one.
if ! recent_cmake; then
  say "$(cmake --version | head -1) is older than $oldest_cmake: use $venv/bin/cmake, as the scripts in tools/ do"
  requirements+=("cmake>=$oldest_cmake,<4")
fi

if [[ ! -e $stamp || $(<"$stamp") != "${requirements[*]}" ]]; then
  say "installing Python packages into $venv: ${requirements[*]} (with a CUDA build's libraries: several GB)"
  if [[ ! -x $venv/bin/python ]]; then "$(usable_python)" -m venv "$venv"; fi
  "$venv/bin/python" -m pip install --disable-pip-version-check "${requirements[@]}"
  echo "${requirements[*]}" >"$stamp"
fi
