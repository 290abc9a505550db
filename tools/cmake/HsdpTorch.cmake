# Imports libtorch from its folder. TorchConfig.cmake is not used: that of a CUDA build stops when the machine has no CUDA
# toolkit, although the libraries run there.
#
# The folder comes from, in this order: Torch_DIR, CMAKE_PREFIX_PATH (variable or environment), HSDP_PYTHON (variable or
# environment), the project's own .venv.
#
# Makes the targets hsdp::torch (CPU part and all compile definitions) and, with CUDA, hsdp::torch_cuda; sets HSDP_TORCH_ROOT,
# HSDP_TORCH_VERSION, HSDP_CUDA, HSDP_NCCL.

include_guard(GLOBAL)

set(hsdp_torch_required "2.11")

# A shell's environment is not there when ninja runs CMake again, so what it named is kept in the cache.
foreach(name HSDP_PYTHON CMAKE_PREFIX_PATH)
  if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
    string(REPLACE ":" ";" value "$ENV{${name}}")
    set(HSDP_ENVIRONMENT_${name} "${value}" CACHE INTERNAL "${name} as the environment last gave it")
  endif()
endforeach()

# Sets `out` to the torch package's folder of a Python, without the seconds that importing torch takes.
function(hsdp_torch_of_python python out)
  execute_process(
    COMMAND "${python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE error RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "[hsdp] HSDP_PYTHON=${python} does not run: ${status} ${error}")
  endif()
  set(${out} "${root}" PARENT_SCOPE)
endfunction()

# Sets `out` to the libtorch folder at or above `start` (share/cmake/Torch is three levels below it), or to "".
function(hsdp_torch_above start out)
  set(${out} "" PARENT_SCOPE)
  foreach(up "" "/.." "/../.." "/../../..")
    if(EXISTS "${start}${up}/include/torch/csrc/api/include/torch/torch.h")
      get_filename_component(root "${start}${up}" ABSOLUTE)
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(hsdp_find_torch)
  set(python "${HSDP_PYTHON}")
  if(NOT python)
    set(python "${HSDP_ENVIRONMENT_HSDP_PYTHON}")
  endif()
  foreach(start IN LISTS Torch_DIR CMAKE_PREFIX_PATH HSDP_ENVIRONMENT_CMAKE_PREFIX_PATH)
    hsdp_torch_above("${start}" root)
    if(root)
      break()
    endif()
  endforeach()
  if(NOT root AND python)
    hsdp_torch_of_python("${python}" root)
    if(NOT root)
      message(FATAL_ERROR "[hsdp] HSDP_PYTHON=${python} has no torch package; install torch==${hsdp_torch_required}.* into it.")
    endif()
  endif()
  if(NOT root AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    hsdp_torch_of_python("${PROJECT_SOURCE_DIR}/.venv/bin/python" root)
  endif()
  if(NOT root)
    message(FATAL_ERROR
      "[hsdp] No libtorch found. Run tools/setup.sh, which makes ${PROJECT_SOURCE_DIR}/.venv, or name one: "
      "-DCMAKE_PREFIX_PATH=<libtorch folder>, or HSDP_PYTHON=<a python that has torch>.")
  endif()
  set(HSDP_TORCH_ROOT "${root}" PARENT_SCOPE)
endfunction()

hsdp_find_torch()

# --- version --------------------------------------------------------------------------------------------------------------
set(version_header "${HSDP_TORCH_ROOT}/include/torch/headeronly/version.h")
if(NOT EXISTS "${version_header}")
  set(version_header "${HSDP_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")
endif()
set(HSDP_TORCH_VERSION "unknown")
if(EXISTS "${version_header}")
  file(STRINGS "${version_header}" version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  if("${version_lines}" MATCHES "MAJOR +([0-9]+).*MINOR +([0-9]+).*PATCH +([0-9]+)")
    set(HSDP_TORCH_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
  endif()
endif()
if(NOT HSDP_TORCH_VERSION MATCHES "^2\\.11\\." AND NOT HSDP_ALLOW_ANY_TORCH)
  message(FATAL_ERROR
    "[hsdp] torch ${HSDP_TORCH_VERSION} in ${HSDP_TORCH_ROOT}, expected ${hsdp_torch_required}.x. "
    "hsdp relies on internals that change between versions; -DHSDP_ALLOW_ANY_TORCH=ON builds all the same.")
endif()

# --- CUDA and NCCL --------------------------------------------------------------------------------------------------------
set(HSDP_TORCH_CUDA_MAJOR "")
if(EXISTS "${HSDP_TORCH_ROOT}/lib/libtorch_cuda.so")
  # Also a libtorch without Python says in its libraries which CUDA runtime it was linked to.
  file(STRINGS "${HSDP_TORCH_ROOT}/lib/libc10_cuda.so" runtime REGEX "libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
  if("${runtime}" MATCHES "libcudart\\.so\\.([0-9]+)")
    set(HSDP_TORCH_CUDA_MAJOR "${CMAKE_MATCH_1}")
  endif()
endif()

set(cuda_found FALSE)
if(HSDP_WITH_CUDA STREQUAL "OFF")
  set(HSDP_CUDA_OFF_REASON "HSDP_WITH_CUDA=OFF")
elseif(NOT EXISTS "${HSDP_TORCH_ROOT}/lib/libtorch_cuda.so")
  set(HSDP_CUDA_OFF_REASON "this torch was built without CUDA")
else()
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(HSDP_CUDA_OFF_REASON "no CUDA toolkit found")
  elseif(HSDP_TORCH_CUDA_MAJOR AND NOT CUDAToolkit_VERSION_MAJOR EQUAL HSDP_TORCH_CUDA_MAJOR)
    message(FATAL_ERROR
      "[hsdp] CUDA toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR}, but torch in ${HSDP_TORCH_ROOT} was built with "
      "CUDA ${HSDP_TORCH_CUDA_MAJOR}. Name a toolkit of that major version with -DCUDAToolkit_ROOT=<folder>, or build for the "
      "CPU with -DHSDP_WITH_CUDA=OFF.")
  else()
    set(cuda_found TRUE)
  endif()
endif()
hsdp_resolve_option(HSDP_WITH_CUDA "${cuda_found}" "${HSDP_CUDA_OFF_REASON}" HSDP_CUDA)

set(nccl_found FALSE)
if(HSDP_WITH_NCCL STREQUAL "OFF")
  set(HSDP_NCCL_OFF_REASON "HSDP_WITH_NCCL=OFF")
elseif(NOT HSDP_CUDA)
  set(HSDP_NCCL_OFF_REASON "CUDA is off")
else()
  # The header that came with torch's own NCCL, before any other.
  find_path(HSDP_NCCL_INCLUDE_DIR nccl.h
    HINTS "${HSDP_TORCH_ROOT}/../nvidia/nccl/include" ${CUDAToolkit_INCLUDE_DIRS}
    DOC "Folder that holds nccl.h")
  if(HSDP_NCCL_INCLUDE_DIR)
    set(nccl_found TRUE)
  else()
    set(HSDP_NCCL_OFF_REASON "nccl.h not found; name its folder with -DHSDP_NCCL_INCLUDE_DIR")
  endif()
endif()
hsdp_resolve_option(HSDP_WITH_NCCL "${nccl_found}" "${HSDP_NCCL_OFF_REASON}" HSDP_NCCL)

# --- Gloo headers ---------------------------------------------------------------------------------------------------------
if(HSDP_WITH_GLOO)
  find_path(HSDP_GLOO_INCLUDE_DIR gloo/algorithm.h DOC "Folder that holds gloo/algorithm.h")
  if(NOT HSDP_GLOO_INCLUDE_DIR)
    message(FATAL_ERROR
      "[hsdp] gloo/algorithm.h not found. The torch wheel contains gloo but not its headers: install libgloo-dev, name the "
      "folder with -DHSDP_GLOO_INCLUDE_DIR=<folder>, or build without that transport with -DHSDP_WITH_GLOO=OFF.")
  endif()
endif()
find_package(nlohmann_json QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR
    "[hsdp] nlohmann/json.hpp not found: headers of torch include it and the wheel lacks it. Install nlohmann-json3-dev.")
endif()

# --- targets --------------------------------------------------------------------------------------------------------------
add_library(hsdp_torch INTERFACE)
add_library(hsdp::torch ALIAS hsdp_torch)
target_include_directories(hsdp_torch SYSTEM INTERFACE
  "${HSDP_TORCH_ROOT}/include" "${HSDP_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_features(hsdp_torch INTERFACE cxx_std_20)
target_compile_definitions(hsdp_torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=1 USE_DISTRIBUTED
  $<$<BOOL:${HSDP_WITH_GLOO}>:USE_C10D_GLOO> $<$<BOOL:${HSDP_NCCL}>:USE_C10D_NCCL>)
foreach(library torch_cpu c10)
  add_library(hsdp::${library} SHARED IMPORTED GLOBAL)
  set_target_properties(hsdp::${library} PROPERTIES IMPORTED_LOCATION "${HSDP_TORCH_ROOT}/lib/lib${library}.so")
  target_link_libraries(hsdp_torch INTERFACE hsdp::${library})
endforeach()
target_link_libraries(hsdp_torch INTERFACE nlohmann_json::nlohmann_json)
# libtorch exports an old copy of std::filesystem, which crashes when it is found before the one of libstdc++.
target_link_options(hsdp_torch BEFORE INTERFACE "LINKER:--push-state,--no-as-needed,-lstdc++,--pop-state")

if(HSDP_CUDA)
  # The CUDA part registers itself when it is loaded, so the linker must keep it although no symbol of it may be used.
  add_library(hsdp_torch_cuda INTERFACE)
  add_library(hsdp::torch_cuda ALIAS hsdp_torch_cuda)
  target_link_options(hsdp_torch_cuda INTERFACE
    "LINKER:--push-state,--no-as-needed,${HSDP_TORCH_ROOT}/lib/libtorch_cuda.so,${HSDP_TORCH_ROOT}/lib/libc10_cuda.so,--pop-state")
  target_include_directories(hsdp_torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  if(HSDP_NCCL)
    target_include_directories(hsdp_torch_cuda SYSTEM INTERFACE "${HSDP_NCCL_INCLUDE_DIR}")
  endif()
  # The runtime that torch loads, never a second one.
  set(runtime "${HSDP_TORCH_ROOT}/../nvidia/cu${HSDP_TORCH_CUDA_MAJOR}/lib/libcudart.so.${HSDP_TORCH_CUDA_MAJOR}")
  if(EXISTS "${runtime}")
    get_filename_component(runtime "${runtime}" ABSOLUTE)
    add_library(hsdp::cudart SHARED IMPORTED GLOBAL)
    set_target_properties(hsdp::cudart PROPERTIES IMPORTED_LOCATION "${runtime}")
    target_link_libraries(hsdp_torch_cuda INTERFACE hsdp::cudart)
  else()
    target_link_libraries(hsdp_torch_cuda INTERFACE CUDA::cudart)
  endif()
endif()
