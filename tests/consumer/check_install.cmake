# cmake -DBUILD=<build folder> -DWORK=<folder> -DGENERATOR=.. -DCOMPILER=.. -DGLOO=<ON or OFF> -DTORCH=.. -DTORCH_VERSION=..
#   [-DEACH_HEADER=ON] -P check_install.cmake
#
# Installs the build, moves the installation, then configures, builds and runs the project in this folder against it.
cmake_minimum_required(VERSION 3.25)

# Runs a command; what it printed is in `output`.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE out)
  set(output "${out}" PARENT_SCOPE)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${out}")
  endif()
endfunction()

set(configure "${CMAKE_COMMAND}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}")
# What the machine's environment names must not help: the installation knows its torch.
set(ENV{HSDP_PYTHON})
set(ENV{CMAKE_PREFIX_PATH})

file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/first")
file(RENAME "${WORK}/first" "${WORK}/moved")

file(GLOB_RECURSE package "${WORK}/moved/*.cmake")
foreach(file IN LISTS package)
  file(READ "${file}" text)
  foreach(folder "${BUILD}" "${WORK}/first")
    string(FIND "${text}" "${folder}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${folder}, which need not exist.")
    endif()
  endforeach()
endforeach()

run(${configure} -S "${CMAKE_CURRENT_LIST_DIR}" -B "${WORK}/build" -DCMAKE_PREFIX_PATH=${WORK}/moved
  "-DEACH_HEADER=${EACH_HEADER}")
run("${CMAKE_COMMAND}" --build "${WORK}/build" --parallel 2)
run("${WORK}/build/my_program")
message(STATUS "${output}")

if(NOT GLOO)
  # Two ranks cannot talk: rank 0 says so at once.
  set(expected "[init] backend gloo in a build without Gloo; build with HSDP_WITH_GLOO=ON\n")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=1
      "${WORK}/build/my_program"
    RESULT_VARIABLE status ERROR_VARIABLE said TIMEOUT 60)
  if(NOT status EQUAL 2 OR NOT said STREQUAL expected)
    message(FATAL_ERROR "my_program as one of two ranks ended with ${status} and said\n${said}, expected 2 and\n${expected}")
  endif()
endif()

# Configuring the project must be refused with this text. Options follow.
function(expect_refusal expected)
  execute_process(
    COMMAND ${configure} --fresh -S "${CMAKE_CURRENT_LIST_DIR}" -B "${WORK}/refused" ${ARGN}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  string(FIND "${said}" "${expected}" at)
  if(status EQUAL 0 OR at EQUAL -1)
    message(FATAL_ERROR
      "Configuring with ${ARGN} ended with ${status}, expected a refusal that says\n${expected}\nIt said\n${said}")
  endif()
endfunction()

# Another torch than the one it was built with.
file(WRITE "${WORK}/old_torch/include/torch/csrc/api/include/torch/torch.h" "")
file(WRITE "${WORK}/old_torch/include/torch/headeronly/version.h"
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 1\n")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor_version "${TORCH_VERSION}")
expect_refusal("[hsdp] torch 2.9.1 in ${WORK}/old_torch, expected ${minor_version}.x, which hsdp was built with."
  -DCMAKE_PREFIX_PATH=${WORK}/moved -DTorch_DIR=${WORK}/old_torch)

# The torch it was built with is gone.
file(COPY "${WORK}/moved/" DESTINATION "${WORK}/without_torch")
file(GLOB_RECURSE config "${WORK}/without_torch/hsdpConfig.cmake")
file(READ "${config}" text)
string(REPLACE "${TORCH}" "/nowhere/torch" text "${text}")
file(WRITE "${config}" "${text}")
expect_refusal("[hsdp] no libtorch found; hsdp was built with torch ${TORCH_VERSION}" -DCMAKE_PREFIX_PATH=${WORK}/without_torch)
