# The torch of this build, and what of it is used: CUDA, NCCL, Gloo.
#
# Without a word of the builder torch comes from the project's own .venv. Makes the targets hsdp::torch (CPU part and all
# compile definitions) and, with CUDA, hsdp::torch_cuda; sets HSDP_TORCH_ROOT, HSDP_TORCH_VERSION, HSDP_CUDA, HSDP_NCCL.

include_guard(GLOBAL)
include(HsdpFindTorch)

set(hsdp_torch_required "2.11")

set(own_python "${PROJECT_SOURCE_DIR}/.venv/bin/python")
if(NOT EXISTS "${own_python}")
  set(own_python "")
endif()
hsdp_find_torch("${own_python}" problem)
if(problem)
  message(FATAL_ERROR
    "[hsdp] ${problem}. Run tools/setup.sh, which makes ${PROJECT_SOURCE_DIR}/.venv, or name a torch "
    "${hsdp_torch_required}.x: -DCMAKE_PREFIX_PATH=<libtorch folder>, or HSDP_PYTHON=<a python that has it>.")
endif()
if(NOT HSDP_TORCH_VERSION MATCHES "^2\\.11\\." AND NOT HSDP_ALLOW_ANY_TORCH)
  message(FATAL_ERROR
    "[hsdp] torch ${HSDP_TORCH_VERSION} in ${HSDP_TORCH_ROOT}, expected ${hsdp_torch_required}.x. "
    "hsdp relies on internals that change between versions; -DHSDP_ALLOW_ANY_TORCH=ON builds all the same.")
endif()

# Sets the cache variable `folder` to where `header` is found at the hints that follow; a folder given by hand must have it.
function(hsdp_find_header folder header)
  if(${folder} AND NOT EXISTS "${${folder}}/${header}")
    message(FATAL_ERROR "[hsdp] ${folder}=${${folder}} has no ${header}, expected the folder that holds it.")
  endif()
  find_path(${folder} ${header} HINTS ${ARGN} DOC "Folder that holds ${header}")
endfunction()

# --- CUDA and NCCL --------------------------------------------------------------------------------------------------------
set(cuda_found FALSE)
if(HSDP_WITH_CUDA STREQUAL "OFF")
  set(HSDP_CUDA_OFF_REASON "HSDP_WITH_CUDA=OFF")
elseif(NOT EXISTS "${HSDP_TORCH_ROOT}/lib/libtorch_cuda.so")
  set(HSDP_CUDA_OFF_REASON "this torch was built without CUDA")
else()
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(HSDP_CUDA_OFF_REASON "no CUDA toolkit found")
  elseif(NOT CUDAToolkit_NVCC_EXECUTABLE)
    set(HSDP_CUDA_OFF_REASON "the toolkit in ${CUDAToolkit_BIN_DIR} has no nvcc")
  elseif(HSDP_TORCH_CUDA_MAJOR AND NOT CUDAToolkit_VERSION_MAJOR EQUAL HSDP_TORCH_CUDA_MAJOR)
    string(CONCAT HSDP_CUDA_OFF_REASON
      "the toolkit in ${CUDAToolkit_BIN_DIR} is CUDA ${CUDAToolkit_VERSION} and this torch was built with CUDA "
      "${HSDP_TORCH_CUDA_MAJOR}; name a toolkit of that major version with -DCUDAToolkit_ROOT=<folder>")
  else()
    set(cuda_found TRUE)
  endif()
endif()
hsdp_resolve_option(HSDP_WITH_CUDA "${cuda_found}" "${HSDP_CUDA_OFF_REASON}" HSDP_CUDA)
if(HSDP_CUDA)
  include(HsdpCudaLanguage)
endif()

set(nccl_found FALSE)
if(HSDP_WITH_NCCL STREQUAL "OFF")
  set(HSDP_NCCL_OFF_REASON "HSDP_WITH_NCCL=OFF")
elseif(NOT HSDP_CUDA)
  set(HSDP_NCCL_OFF_REASON "CUDA is off")
else()
  # The header that came with torch's own NCCL, before any other.
  hsdp_find_header(HSDP_NCCL_INCLUDE_DIR nccl.h "${HSDP_TORCH_ROOT}/../nvidia/nccl/include" ${CUDAToolkit_INCLUDE_DIRS})
  if(HSDP_NCCL_INCLUDE_DIR)
    set(nccl_found TRUE)
  else()
    set(HSDP_NCCL_OFF_REASON "nccl.h not found; name its folder with -DHSDP_NCCL_INCLUDE_DIR")
  endif()
endif()
hsdp_resolve_option(HSDP_WITH_NCCL "${nccl_found}" "${HSDP_NCCL_OFF_REASON}" HSDP_NCCL)

# NVTX needs its headers only, and no device: they are used in host builds, too.
set(nvtx_found FALSE)
if(HSDP_WITH_NVTX STREQUAL "OFF")
  set(HSDP_NVTX_OFF_REASON "HSDP_WITH_NVTX=OFF")
else()
  # The toolkit's before torch's own, which lie among headers of another toolkit; nvidia/nvtx is where wheels for CUDA 12
  # have them.
  hsdp_find_header(HSDP_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h ${CUDAToolkit_INCLUDE_DIRS}
    "${HSDP_TORCH_ROOT}/../nvidia/cu${HSDP_TORCH_CUDA_MAJOR}/include" "${HSDP_TORCH_ROOT}/../nvidia/nvtx/include")
  if(HSDP_NVTX_INCLUDE_DIR)
    set(nvtx_found TRUE)
  else()
    set(HSDP_NVTX_OFF_REASON "nvtx3/nvToolsExt.h not found; name its folder with -DHSDP_NVTX_INCLUDE_DIR")
  endif()
endif()
hsdp_resolve_option(HSDP_WITH_NVTX "${nvtx_found}" "${HSDP_NVTX_OFF_REASON}" HSDP_NVTX)

# --- headers of other libraries -------------------------------------------------------------------------------------------
if(HSDP_WITH_GLOO)
  hsdp_find_header(HSDP_GLOO_INCLUDE_DIR gloo/algorithm.h)
  if(NOT HSDP_GLOO_INCLUDE_DIR)
    message(FATAL_ERROR
      "[hsdp] gloo/algorithm.h not found. The torch wheel contains gloo but not its headers: install libgloo-dev, name the "
      "folder with -DHSDP_GLOO_INCLUDE_DIR=<folder>, or build without that transport with -DHSDP_WITH_GLOO=OFF.")
  endif()
endif()
hsdp_find_header(HSDP_XXHASH_INCLUDE_DIR xxhash.h)
if(NOT HSDP_XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR
    "[hsdp] xxhash.h not found: checkpoints are checksummed with it. Install libxxhash-dev, or name the folder with "
    "-DHSDP_XXHASH_INCLUDE_DIR=<folder>.")
endif()

find_package(nlohmann_json QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR
    "[hsdp] nlohmann/json.hpp not found: headers of torch include it and the wheel lacks it. Install nlohmann-json3-dev.")
endif()

# --- targets --------------------------------------------------------------------------------------------------------------
set(hsdp_torch_definitions _GLIBCXX_USE_CXX11_ABI=1 USE_DISTRIBUTED)
if(HSDP_WITH_GLOO)
  list(APPEND hsdp_torch_definitions USE_C10D_GLOO)
endif()
if(HSDP_NCCL)
  list(APPEND hsdp_torch_definitions USE_C10D_NCCL)
endif()
hsdp_import_torch("${HSDP_TORCH_ROOT}" ${hsdp_torch_definitions})
target_link_libraries(hsdp::torch INTERFACE nlohmann_json::nlohmann_json)

if(HSDP_CUDA)
  # The CUDA part registers itself when it is loaded, so the linker must keep it although no symbol of it may be used.
  add_library(hsdp::torch_cuda INTERFACE IMPORTED GLOBAL)
  target_link_options(hsdp::torch_cuda INTERFACE
    "LINKER:--push-state,--no-as-needed,${HSDP_TORCH_ROOT}/lib/libtorch_cuda.so,${HSDP_TORCH_ROOT}/lib/libc10_cuda.so,--pop-state")
  target_include_directories(hsdp::torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  if(HSDP_NCCL)
    target_include_directories(hsdp::torch_cuda SYSTEM INTERFACE "${HSDP_NCCL_INCLUDE_DIR}")
  endif()
  # The runtime that torch loads, never a second one.
  set(runtime "${HSDP_TORCH_ROOT}/../nvidia/cu${HSDP_TORCH_CUDA_MAJOR}/lib/libcudart.so.${HSDP_TORCH_CUDA_MAJOR}")
  if(EXISTS "${runtime}")
    get_filename_component(runtime "${runtime}" ABSOLUTE)
    add_library(hsdp::cudart SHARED IMPORTED GLOBAL)
    set_target_properties(hsdp::cudart PROPERTIES IMPORTED_LOCATION "${runtime}")
    target_link_libraries(hsdp::torch_cuda INTERFACE hsdp::cudart)
  else()
    target_link_libraries(hsdp::torch_cuda INTERFACE CUDA::cudart)
  endif()
endif()
