# Finds libtorch and imports it as the target hsdp::torch. The project's build and find_package(hsdp) both use this file, which
# is installed beside hsdpConfig.cmake.
#
# TorchConfig.cmake is not used: that of a CUDA build stops when the machine has no CUDA toolkit or no nvToolsExt, although the
# libraries run there.

include_guard(GLOBAL)

# Sets `out` to the torch package's folder of a Python, without the seconds that importing torch takes; `problem` says why
# there is none, or is "".
function(hsdp_torch_of_python python out problem)
  execute_process(
    COMMAND "${python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE error RESULT_VARIABLE status)
  set(${problem} "" PARENT_SCOPE)
  if(NOT status EQUAL 0)
    set(${problem} "the Python ${python} does not run: ${status} ${error}" PARENT_SCOPE)
  elseif(NOT root)
    set(${problem} "the Python ${python} has no torch package" PARENT_SCOPE)
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

# Looks for libtorch at, in this order: Torch_DIR, CMAKE_PREFIX_PATH (variable or environment), HSDP_PYTHON (variable or
# environment), `otherwise` (a Python or a folder). Sets HSDP_TORCH_ROOT, HSDP_TORCH_VERSION, HSDP_TORCH_CUDA_MAJOR ("" without
# CUDA); or `problem`, which is "" when all is well.
function(hsdp_find_torch otherwise problem)
  # A shell's environment is not there when ninja runs CMake again, so what it named is kept in the cache.
  foreach(name HSDP_PYTHON CMAKE_PREFIX_PATH)
    if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
      string(REPLACE ":" ";" value "$ENV{${name}}")
      set(HSDP_ENVIRONMENT_${name} "${value}" CACHE INTERNAL "${name} as the environment last gave it")
    endif()
  endforeach()

  set(root "")
  set(why "")
  foreach(start IN LISTS Torch_DIR CMAKE_PREFIX_PATH HSDP_ENVIRONMENT_CMAKE_PREFIX_PATH)
    hsdp_torch_above("${start}" root)
    if(root)
      break()
    endif()
  endforeach()
  foreach(place "${HSDP_PYTHON}" "${HSDP_ENVIRONMENT_HSDP_PYTHON}" "${otherwise}")
    if(root OR why)
      break()
    elseif(IS_DIRECTORY "${place}")
      hsdp_torch_above("${place}" root)
    elseif(place)
      hsdp_torch_of_python("${place}" root why)
    endif()
  endforeach()
  if(NOT root AND NOT why)
    set(why "no libtorch found")
  endif()
  set(${problem} "${why}" PARENT_SCOPE)

  set(version_header "${root}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${version_header}")
    set(version_header "${root}/include/torch/csrc/api/include/torch/version.h")
  endif()
  set(version "unknown")
  if(EXISTS "${version_header}")
    file(STRINGS "${version_header}" version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    if("${version_lines}" MATCHES "MAJOR +([0-9]+).*MINOR +([0-9]+).*PATCH +([0-9]+)")
      set(version "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
    endif()
  endif()

  set(cuda_major "")
  if(EXISTS "${root}/lib/libc10_cuda.so")
    # Also a libtorch without Python says in its libraries which CUDA runtime it was linked to.
    file(STRINGS "${root}/lib/libc10_cuda.so" runtime REGEX "libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
    if("${runtime}" MATCHES "libcudart\\.so\\.([0-9]+)")
      set(cuda_major "${CMAKE_MATCH_1}")
    endif()
  endif()
  set(HSDP_TORCH_ROOT "${root}" PARENT_SCOPE)
  set(HSDP_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(HSDP_TORCH_CUDA_MAJOR "${cuda_major}" PARENT_SCOPE)
endfunction()

# Makes hsdp::torch of the libtorch in `root`: its CPU part, with the compile definitions that follow.
function(hsdp_import_torch root)
  if(TARGET hsdp::torch)
    return()
  endif()
  add_library(hsdp::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(hsdp::torch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_features(hsdp::torch INTERFACE cxx_std_20)
  target_compile_definitions(hsdp::torch INTERFACE ${ARGN})
  foreach(library torch_cpu c10)
    add_library(hsdp::${library} SHARED IMPORTED GLOBAL)
    set_target_properties(hsdp::${library} PROPERTIES IMPORTED_LOCATION "${root}/lib/lib${library}.so")
    target_link_libraries(hsdp::torch INTERFACE hsdp::${library})
  endforeach()
  # libtorch exports an old copy of std::filesystem, which crashes when it is found before the one of libstdc++.
  target_link_options(hsdp::torch BEFORE INTERFACE "LINKER:--push-state,--no-as-needed,-lstdc++,--pop-state")
endfunction()
