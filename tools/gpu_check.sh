#!/usr/bin/env bash
# Builds the library and runs everything that needs a GPU, on a machine without a network: tools/gpu_check.sh --help
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
readonly root

usage() {
  cat <<'TEXT'
tools/gpu_check.sh pack FOLDER [--googletest SOURCES]
    On a machine that has them, copies the small libraries that building needs into FOLDER: nlohmann-json, CLI11, gloo's
    headers, xxhash, and googletest's sources (from /usr/src/googletest unless told otherwise).

tools/gpu_check.sh run --output FOLDER [--brought FOLDER] [--build FOLDER] [--python PYTHON] [--budget SECONDS]
                       [--jobs N] [--ranks N] [--dry-run]
    Builds the library, the tests labelled gpu and the benchmark, and runs them; needs torch 2.11 in PYTHON, a CUDA toolkit
    of torch's major version, cmake, ninja and g++, and no network. Writes environment.txt, build.log, tests.log, tests.xml,
    benchmark.log, benchmark.jsonl, benchmark_runs.jsonl and results.json into the output folder; whoever ends the script,
    they have what came before.

    --brought   what pack has made; without it the machine must have those libraries
    --build     where to build, build/gpu_check by default; kept, so that a second run is quick
    --python    a Python with torch; by default HSDP_PYTHON, .venv/bin/python or python3, whichever has it first
    --budget    seconds for everything, 480 by default, from configuring to the last line: each part is told what it may
                take at most, and one that will not fit is left out and named
    --jobs      compilers at a time, one a core by default
    --ranks     ranks of the second half of the benchmark, as many as there are GPUs by default
    --dry-run   the same commands without a GPU: tests and a tiny benchmark on the host

    Ends with 0 when everything ran and passed, 1 when something failed or was not run, 2 when it could not begin.
TEXT
}

say() { printf '[gpu_check] %s\n' "$*" >&2; }
refuse() {
  say "$*"
  exit 2
}

# ---- pack -----------------------------------------------------------------------------------------------------------------

# What is packed: the header that shows where it is, what to copy of that folder, and Debian's package.
readonly libraries='nlohmann/json.hpp nlohmann nlohmann-json3-dev
CLI/CLI.hpp CLI libcli11-dev
gloo/algorithm.h gloo libgloo-dev
xxhash.h xxhash.h libxxhash-dev'
readonly most_kib=$((60 * 1024))

# Prints the folder in which the compiler finds a header.
folder_of_header() {
  local found
  found=$(g++ -std=c++20 -x c++ -M - <<<"#include <$1>" 2>/dev/null | tr ' ' '\n' | grep -m 1 "/$1\$") || true
  if [[ -n $found ]]; then printf '%s\n' "${found%/"$1"}"; fi
}

# A CMake package of a library that is headers only.
write_package() {
  local folder=$1 name=$2 target=$3 here=CMAKE_CURRENT_LIST_DIR
  mkdir -p "$folder/lib/cmake/$name"
  cat >"$folder/lib/cmake/$name/${name}Config.cmake" <<TEXT
if(NOT TARGET $target)
  add_library($target INTERFACE IMPORTED)
  set_target_properties($target PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "\${$here}/../../../include")
endif()
TEXT
}

# GoogleTest as a CMake package that is built with whatever asks for it, so that no core waits for it.
write_googletest_package() {
  mkdir -p "$1/lib/cmake/GTest"
  cat >"$1/lib/cmake/GTest/GTestConfig.cmake" <<'TEXT'
if(NOT TARGET gtest)
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
  set(INSTALL_GTEST OFF)
  add_subdirectory("${CMAKE_CURRENT_LIST_DIR}/../../../googletest" "${CMAKE_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
  foreach(target gtest gtest_main gmock gmock_main)
    target_compile_options(${target} PRIVATE -w)
    if(NOT TARGET GTest::${target})
      add_library(GTest::${target} ALIAS ${target})
    endif()
  endforeach()
endif()
TEXT
}

copy_licence() {
  local folder=$1 package=$2
  if [[ -r /usr/share/doc/$package/copyright ]]; then
    cp "/usr/share/doc/$package/copyright" "$folder/licences/$package"
  else
    say "no licence of $package in /usr/share/doc: add it before you pass the folder on"
  fi
}

pack() {
  local folder='' googletest=/usr/src/googletest
  while (($#)); do
    case $1 in
      --googletest) googletest=${2:?--googletest needs a folder}; shift 2 ;;
      -*) refuse "unknown option $1 of pack; see --help" ;;
      *)
        if [[ -n $folder ]]; then refuse "pack takes one folder, got $folder and $1"; fi
        folder=$1
        shift
        ;;
    esac
  done
  if [[ -z $folder ]]; then refuse "pack needs a folder; see --help"; fi
  if [[ -e $folder && ! -e $folder/list.txt && -n $(ls -A "$folder") ]]; then
    refuse "$folder is not empty and was not made by pack, expected a new folder"
  fi
  command -v g++ >/dev/null || refuse "no g++, which knows where headers are"

  # Everything is looked for before anything is replaced.
  local header part package source missing=()
  while read -r header part package; do
    [[ -n $(folder_of_header "$header") ]] || missing+=("$package ($header)")
  done <<<"$libraries"
  [[ -r $googletest/CMakeLists.txt ]] || missing+=("googletest ($googletest/CMakeLists.txt)")
  if ((${#missing[@]})); then refuse "missing (Debian names): ${missing[*]}"; fi

  rm -rf "$folder"
  mkdir -p "$folder/include" "$folder/licences"
  while read -r header part package; do
    source=$(folder_of_header "$header")
    cp -rL "$source/$part" "$folder/include/"
    copy_licence "$folder" "$package"
  done <<<"$libraries"
  write_package "$folder" nlohmann_json nlohmann_json::nlohmann_json
  write_package "$folder" CLI11 CLI11::CLI11
  write_googletest_package "$folder"
  mkdir "$folder/googletest"
  cp "$googletest/CMakeLists.txt" "$folder/googletest/"
  for part in googletest googlemock; do
    mkdir "$folder/googletest/$part"
    cp -rL "$googletest/$part/"{CMakeLists.txt,cmake,include,src} "$folder/googletest/$part/"
  done
  copy_licence "$folder" googletest
  (cd "$folder" && du -sk include/* googletest licences) >"$folder/list.txt"
  local kib
  kib=$(du -sk "$folder" | cut -f 1)
  if ((kib > most_kib)); then refuse "$folder has $kib KiB, expected at most $most_kib"; fi
  say "packed $kib KiB into $folder"
}

# ---- run: what the parts share --------------------------------------------------------------------------------------------

# A part that does not end when it is told to is killed some seconds later, and the results take a moment.
readonly grace=8 closing=3
left() { echo $((budget - SECONDS - grace - closing)); }

# note_part NAME STATE SECONDS LIMIT REMARK: what is known so far is always in results.json, whatever becomes of this
# script. The last note of a name counts.
note_part() {
  printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>"$parts"
  "$python" "$root/tools/gpu_check_results.py" "$parts" "$output" "$SECONDS" "$dry_run"
}

# Names a part that did not run, and why.
skip_part() {
  note_part "$1" "not run" 0 0 "$2"
  say "$1: not run, $2"
}

# What a part is doing when somebody ends this script.
part='' child='' part_limit=0 part_start=0
stop() {
  trap '' INT TERM HUP
  if [[ -n $child ]]; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
    note_part "$part" stopped $((SECONDS - part_start)) "$part_limit" "by a signal; what comes after was not begun"
  fi
  say "stopped; $output has what came before"
  exit 1
}

# run_part NAME SECONDS LOG COMMAND...: at most that long; its output is appended to the log. Notes how it ended and returns
# its status.
run_part() {
  local name=$1 limit=$2 log=$3 status=0 state
  shift 3
  if ((limit < 1)); then
    skip_part "$name" "no time is left"
    return 1
  fi
  part=$name part_limit=$limit part_start=$SECONDS
  note_part "$name" running 0 "$limit" "begun at second $SECONDS"
  say "$name: may take $limit s"
  { printf '\n==== %s:' "$name"; printf ' %q' "$@"; printf '\n'; } >>"$log"
  # Children of a child end with it: timeout gives them a process group of their own. In the background, because a shell
  # hears no signal while it waits in any other way.
  timeout --kill-after="$grace" "$limit" "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  wait "$child" || status=$?
  child=''
  case $status in
    0) state=passed ;;
    124 | 137) state="out of time" ;;
    *) state=failed ;;
  esac
  note_part "$name" "$state" $((SECONDS - part_start)) "$limit" "status $status"
  say "$name: $state after $((SECONDS - part_start)) s"
  return "$status"
}

python_has_torch() { "$1" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; }

choose_python() {
  local candidate
  for candidate in "$python" "${HSDP_PYTHON:-}" "$root/.venv/bin/python" python3; do
    if [[ -n $candidate ]] && python_has_torch "$candidate"; then
      python=$(command -v "$candidate")
      return
    fi
    if [[ -n $candidate && $candidate == "$python" ]]; then refuse "$candidate has no torch package"; fi
  done
  refuse "no Python with torch, expected 2.11; name one with --python"
}

# Whether a program is there; of cmake the version that the project asks for.
suits() {
  command -v "$1" >/dev/null || return
  if [[ $1 == cmake ]]; then
    printf '3.25\n%s\n' "$(cmake --version | sed -n '1s/.* //p')" | sort --version-sort --check=quiet
  fi
}

# Prints what a program says of itself, or that it is missing. Never fails.
ask() {
  printf '\n==== %s\n' "$*"
  if command -v "$1" >/dev/null; then timeout 20 "$@" 2>&1 || echo "(status $?)"; else echo "not found"; fi
}

describe_environment() {
  date --utc '+%Y-%m-%d %H:%M:%S UTC'
  ask git -C "$root" log -1 '--format=%H %cs'
  ask git -C "$root" status --short --untracked-files=no
  ask uname -a
  ask nproc
  ask free -m
  ask nvidia-smi
  ask nvidia-smi topo -m
  ask nvcc --version
  ask "$python" -c 'import importlib.metadata as m, importlib.util as u, pathlib, sys
print(sys.version, sys.executable)
print((pathlib.Path(u.find_spec("torch").submodule_search_locations[0]) / "version.py").read_text())
for d in sorted(m.distributions(), key=lambda d: str(d.metadata["Name"])):
    name = str(d.metadata["Name"])
    if name.startswith(("torch", "nvidia", "triton")):
        print(name, d.version)'
  ask cmake --version
  ask ninja --version
  ask g++ --version
}

gpu_names() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true; fi
}

# ---- run: the parts -------------------------------------------------------------------------------------------------------

# What is built, and where in the build it lies.
readonly programs=({collectives,gradient_kernels,memory,overlap,parity,precision,profiling,steady}_gpu_test hsdp_bench)
program_path() { if [[ $1 == hsdp_bench ]]; then echo "$build/hsdp/tools/bench/$1"; else echo "$build/hsdp/tests/gpu/$1"; fi; }

# Fails where there is nothing to run.
build_everything() {
  local cache=(-DCMAKE_BUILD_TYPE=Release '-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG' -DCMAKE_UNITY_BUILD=ON
    -DCMAKE_UNITY_BUILD_BATCH_SIZE=4 -DHSDP_BUILD_APPS=OFF -DHSDP_BUILD_GPU_CHECK=ON -DHSDP_INSTALL=OFF -DHSDP_WITH_CUDA=ON
    -DHSDP_WITH_NCCL=ON "-DHSDP_PYTHON=$python" "-DCMAKE_PREFIX_PATH=$brought") capability
  if command -v nvidia-smi >/dev/null; then
    # Of the GPU at hand alone, which is quicker; without one the project's own choice.
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d ' .') || true
    if [[ $capability =~ ^[0-9]+$ ]]; then cache+=("-DHSDP_CUDA_ARCHITECTURES=$capability"); fi
  fi
  run_part configure "$(left)" "$output/build.log" cmake -G Ninja -S "$root" -B "$build/hsdp" "${cache[@]}" || return
  # A file that does not compile keeps nothing else from being built. A minute is for what could be built in time.
  local limit
  limit=$(left)
  run_part build $((limit > 90 ? limit - 60 : limit)) "$output/build.log" \
    cmake --build "$build/hsdp" --parallel "$jobs" --target gpu_tests hsdp_bench -- -k 0 && return
  good=0
  # Of an earlier build nothing is to be taken for this one's.
  local target path fresh=0
  for target in "${programs[@]}"; do
    path=$(program_path "$target")
    if ninja -C "$build/hsdp" -n "$target" 2>/dev/null | grep -q 'no work to do'; then
      ((++fresh))
    elif [[ -e $path ]]; then
      rm "$path"
    fi
  done
  say "$fresh of ${#programs[@]} programs were built"
  ((fresh > 0))
}

# Takes LIMIT seconds at most. ctest itself stops so early that it still writes its results.
run_tests() {
  local limit=$1 stand_in=() parallel=4 test_dir=(--test-dir "$build/hsdp" --label-regex '^gpu$')
  if ((dry_run)); then
    stand_in=(env HSDP_GPU_DRY_RUN=host)
    parallel=1
  fi
  # Which there are, for the results of what is not reached.
  ctest "${test_dir[@]}" --show-only >>"$output/tests.log" 2>&1 || true
  run_part tests "$limit" "$output/tests.log" "${stand_in[@]}" ctest "${test_dir[@]}" \
    --stop-time "$(date -d "+$((limit > 20 ? limit - 10 : limit)) seconds" '+%H:%M:%S')" \
    --no-tests=error --verbose --parallel "$parallel" --output-junit "$output/tests.xml" \
    --test-output-size-passed 4000000 --test-output-size-failed 4000000
}

# One size: both sides once, in one order or the other. Its line is appended to benchmark.jsonl, that of each side to
# benchmark_runs.jsonl as soon as it is there.
declare -A took=()  # seconds of a size with so many ranks
run_benchmark() {
  local size=$1 ranks=$2 turn=$3 needed=$4 name limit start=$SECONDS
  name="benchmark of size $size with $ranks ranks${turn:+, $turn}"
  limit=$(left)
  if ((limit < needed)); then
    skip_part "$name" "$limit s are left, and it takes about $needed s"
    return 1
  fi
  local how=(--device cuda --rounds 1 --steps 10)
  if ((dry_run)); then
    how=(--device host --rounds 1 --steps 2)
    local setting
    for setting in width=64 layers=2 sequence=64 batch=1 vocabulary=256; do how+=(--override "$setting"); done
  fi
  if [[ -n $turn ]]; then how+=(--peer-first); fi
  # shellcheck disable=SC2016
  run_part "$name" "$limit" "$output/benchmark.log" bash -euc 'line=$("${@:2}"); echo "$line" >>"$1"; echo "$line"' \
    append "$output/benchmark.jsonl" "$python" "$root/tools/bench/compare.py" --cases "size_$size" --ranks "$ranks" \
    --runs "$output/benchmark_runs.jsonl" "${how[@]}" --bench "$(program_path hsdp_bench)" \
    --python "$python" || return
  took[$size.$ranks]=$((SECONDS - start))
}

# What matters most comes first: all sizes on one GPU, then on all; and once more in the other order, which only says
# how quiet the machine was, so that it may be left out.
run_benchmarks() {
  local size world worlds=(1) least guess
  if [[ ! -x $(program_path hsdp_bench) ]]; then
    skip_part benchmark "hsdp_bench was not built"
    return 1
  fi
  if ((ranks > 1)); then worlds+=("$ranks"); fi
  least=$((dry_run ? 5 : 25))
  for world in "${worlds[@]}"; do
    guess=$least
    for size in small medium large; do
      run_benchmark "$size" "$world" '' "$guess" || good=0
      # A larger one takes no less.
      guess=${took[$size.$world]:-$guess}
    done
  done
  for size in small medium large; do
    guess=${took[$size.1]:-}
    if [[ -z $guess ]]; then continue; fi
    if (($(left) < guess)); then
      skip_part "benchmark of size $size with 1 ranks, peer first" "$(left) s are left, and it takes about $guess s"
    else
      run_benchmark "$size" 1 'peer first' "$guess" || good=0
    fi
  done
}

run() {
  output='' brought='' build=$root/build/gpu_check python='' budget=480 jobs=$(nproc) ranks='' dry_run=0
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1; shift ;;
      --output | --brought | --build | --python | --budget | --jobs | --ranks)
        if (($# < 2)) || [[ -z $2 ]]; then refuse "$1 needs a value; see --help"; fi
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      *) refuse "unknown option $1 of run; see --help" ;;
    esac
  done
  if [[ -z $output ]]; then refuse "run needs --output; see --help"; fi
  local number
  for number in budget jobs ${ranks:+ranks}; do
    [[ ${!number} =~ ^[1-9][0-9]*$ ]] || refuse "--$number ${!number}, expected a number above 0"
  done
  if [[ -n $brought && ! -e $brought/list.txt ]]; then refuse "$brought was not made by pack"; fi
  SECONDS=0
  local program
  choose_python
  # cmake and ninja may be packages of that Python, and a toolkit is not always on the path.
  local place
  for program in cmake ninja nvcc; do
    for place in "$(dirname "$python")" /usr/local/cuda/bin; do
      if ! suits "$program" && [[ -x $place/$program ]]; then PATH=$place:"$PATH"; fi
    done
  done
  local missing=()
  for program in cmake ctest ninja g++ nvcc timeout; do
    suits "$program" || missing+=("$program")
  done
  if ((${#missing[@]})); then refuse "missing, or cmake before 3.25: ${missing[*]}"; fi

  local gpus
  gpus=$(gpu_names | grep -c .) || true
  if ((gpus == 0 && !dry_run)); then refuse "nvidia-smi shows no GPU; --dry-run does without"; fi
  if [[ -z $ranks ]]; then ranks=$((dry_run ? 2 : gpus)); fi

  mkdir -p "$output" "$build"
  output=$(realpath "$output")
  build=$(realpath "$build")
  if [[ -n $brought ]]; then brought=$(realpath "$brought"); fi
  rm -f "$output"/{environment.txt,build.log,tests.log,tests.xml,benchmark.log,benchmark.jsonl,benchmark_runs.jsonl,results.json}
  touch "$output"/benchmark{,_runs}.jsonl
  parts=$(mktemp)
  # shellcheck disable=SC2064
  trap "rm -f '$parts'" EXIT
  trap stop INT TERM HUP
  describe_environment >"$output/environment.txt"

  good=1
  if build_everything; then
    # The benchmark is left two minutes where there are that many, the tests one in any case.
    local limit=$(($(left) - 120)) most
    most=$(left)
    if ((limit < 60)); then limit=$((most < 60 ? most : 60)); fi
    run_tests "$limit" || good=0
    run_benchmarks || good=0
  else
    good=0
    skip_part tests "nothing was built"
    skip_part benchmark "nothing was built"
  fi
  "$python" "$root/tools/gpu_check_results.py" "$parts" "$output" "$SECONDS" "$dry_run" --say
  say "everything is in $output after $SECONDS of $budget s"
  if ((!good)); then exit 1; fi
}

case ${1:-} in
  pack | run)
    command=$1
    shift
    for argument in "$@"; do
      if [[ $argument == --help || $argument == -h ]]; then
        usage
        exit 0
      fi
    done
    "$command" "$@"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
