# cmake -DSOURCE=<hsdp's sources> -DWORK=<folder> -DGENERATOR=.. -DCOMPILER=.. -DTORCH=.. -DGLOO_HEADERS=..
#   -P check_configure.cmake
#
# What configuring says of options that do not fit the machine. Nothing is compiled.
cmake_minimum_required(VERSION 3.25)

set(ENV{HSDP_PYTHON})
set(ENV{CMAKE_PREFIX_PATH})
file(REMOVE_RECURSE "${WORK}")

# Configures with the options that follow `expected`; "works" or "refused", and the text that it must print.
function(expect outcome expected)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" --fresh -G "${GENERATOR}" -S "${SOURCE}" -B "${WORK}/build"
      "-DCMAKE_CXX_COMPILER=${COMPILER}" ${ARGN}
    RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  string(FIND "${said}" "${expected}" at)
  set(said "${said}" PARENT_SCOPE)
  if((outcome STREQUAL "works") EQUAL (NOT status EQUAL 0) OR at EQUAL -1)
    message(SEND_ERROR "${ARGN}\nended with ${status}, expected that it ${outcome} and says\n${expected}\nIt said\n${said}")
  endif()
endfunction()

# --- the folder of gloo's headers ---
if(GLOO_HEADERS)
  file(MAKE_DIRECTORY "${WORK}/headers")
  file(CREATE_LINK "${GLOO_HEADERS}/gloo" "${WORK}/headers/gloo" SYMBOLIC)
  expect(works "Gloo ON" -DTorch_DIR=${TORCH} -DHSDP_GLOO_INCLUDE_DIR=${WORK}/headers)
endif()
expect(refused
  "[hsdp] HSDP_GLOO_INCLUDE_DIR=${WORK}/nowhere has no gloo/algorithm.h, expected the folder that holds it."
  -DTorch_DIR=${TORCH} -DHSDP_GLOO_INCLUDE_DIR=${WORK}/nowhere)

# --- no Gloo: nothing that needs it, and no test of several ranks ---
expect(works "Gloo OFF" -DTorch_DIR=${TORCH} -DHSDP_WITH_GLOO=OFF)
execute_process(COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${WORK}/build" -N OUTPUT_VARIABLE tests)
if(tests MATCHES "multi\\.[a-z_]+" OR NOT tests MATCHES "unit\\.[a-z_]+")
  message(SEND_ERROR "Without Gloo the tests are\n${tests}")
endif()

# --- a CUDA toolkit that is not torch's ---
file(WRITE "${WORK}/toolkit/bin/nvcc" "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
file(CHMOD "${WORK}/toolkit/bin/nvcc" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
file(WRITE "${WORK}/toolkit/include/cuda_runtime.h" "")
file(WRITE "${WORK}/toolkit/lib64/libcudart.so" "")
file(MAKE_DIRECTORY "${WORK}/torch/lib")
file(CREATE_LINK "${TORCH}/include" "${WORK}/torch/include" SYMBOLIC)
file(WRITE "${WORK}/torch/lib/libtorch_cuda.so" "")
file(WRITE "${WORK}/torch/lib/libc10_cuda.so" "libcudart.so.77\n")
string(CONCAT why
  "the toolkit in ${WORK}/toolkit/bin is CUDA 12.4.99 and this torch was built with CUDA 77; "
  "name a toolkit of that major version with -DCUDAToolkit_ROOT=<folder>")
set(cuda -DTorch_DIR=${WORK}/torch -DCUDAToolkit_ROOT=${WORK}/toolkit -DHSDP_WITH_GLOO=OFF)
expect(works "CUDA off (${why})" ${cuda})
expect(refused "[hsdp] HSDP_WITH_CUDA=ON, but ${why}." ${cuda} -DHSDP_WITH_CUDA=ON)

# --- the toolkit of this machine, without NCCL ---
# Kernels have machine code for those of the list that the toolkit knows; 13.0 knows all.
set(why_no_toolkit "CUDA off \\((this torch was built without CUDA|no CUDA toolkit found|the toolkit in [^ ]+ (has no nvcc|is CUDA ))")
expect(works "NCCL off (HSDP_WITH_NCCL=OFF)" -DTorch_DIR=${TORCH} -DHSDP_WITH_NCCL=OFF -DHSDP_WITH_GLOO=OFF)
if(said MATCHES "${why_no_toolkit}")
  message(STATUS "no toolkit that fits: what configuring says with CUDA is not checked")
else()
  file(GLOB found "${WORK}/build/CMakeFiles/*/CMakeCUDACompiler.cmake")
  file(STRINGS "${found}" nvcc REGEX "^set\\(CMAKE_CUDA_COMPILER \"")
  string(REGEX REPLACE "^[^\"]*\"([^\"]*)\".*" "\\1" nvcc "${nvcc}")
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version)
  execute_process(COMMAND "${nvcc}" --list-gpu-code OUTPUT_VARIABLE known)
  string(REGEX MATCH "V([0-9]+\\.[0-9]+\\.[0-9]+)" version "${version}")
  set(version "${CMAKE_MATCH_1}")
  set(code "")
  foreach(architecture 80 86 89 90 100 120)
    if("${known} " MATCHES "sm_${architecture}[^0-9a-z]")
      string(APPEND code " ${architecture}")
    endif()
  endforeach()
  if(version MATCHES "^13\\.0\\." AND NOT code STREQUAL " 80 86 89 90 100 120")
    message(SEND_ERROR "Of toolkit ${version} this script expects code for${code}")
  endif()
  string(FIND "${said}" "CUDA on, toolkit ${version}, code for${code} -- NCCL off (HSDP_WITH_NCCL=OFF) " at)
  if(at EQUAL -1)
    message(SEND_ERROR "With ${nvcc}, ${version}, expected code for${code} and no NCCL. It said\n${said}")
  endif()
endif()

# --- a libtorch without its Python: nothing to compare with ---
if(GLOO_HEADERS)
  expect(works "fsdp2_cross_check_test is left out: no Python has the torch in ${WORK}/torch; HSDP_PYTHON may name one"
    -DTorch_DIR=${WORK}/torch -DHSDP_WITH_CUDA=OFF -DHSDP_GLOO_INCLUDE_DIR=${GLOO_HEADERS})
  execute_process(COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${WORK}/build" -N OUTPUT_VARIABLE tests)
  if(tests MATCHES "fsdp2_cross_check_test" OR NOT tests MATCHES "multi\\.parity_test")
    message(SEND_ERROR "Without the Python of torch the tests are\n${tests}")
  endif()
endif()

# --- no torch, and another torch ---
file(WRITE "${WORK}/old_torch/include/torch/csrc/api/include/torch/torch.h" "")
file(WRITE "${WORK}/old_torch/include/torch/headeronly/version.h"
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 1\n")
expect(refused "[hsdp] torch 2.9.1 in ${WORK}/old_torch, expected 2.11.x." -DTorch_DIR=${WORK}/old_torch)
expect(refused "[hsdp] the Python /nowhere/python does not run" -DHSDP_PYTHON=/nowhere/python)
