# The CUDA language, for the .cu files: enabled where CUDA is on, and for the library alone. Sets HSDP_CUDA_CODE, the
# architectures with machine code.

include_guard(GLOBAL)

# --- the compiler: that of the toolkit, with the host compiler of the C++ sources where it is one that nvcc knows ---
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX} AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
# One intermediate code serves all architectures, which CMake's own list cannot say.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)

# --- architectures ---
set(HSDP_CUDA_ARCHITECTURES "" CACHE STRING
  "Architectures that GPU kernels are compiled for, as 80;90; empty: those of sm_80 to sm_120 that the toolkit has")
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
  OUTPUT_VARIABLE known ERROR_VARIABLE error RESULT_VARIABLE status)
string(REGEX MATCHALL "sm_[0-9]+" known "${known}")
list(TRANSFORM known REPLACE "sm_" "")
list(SORT known COMPARE NATURAL)
if(NOT status EQUAL 0 OR NOT known)
  message(FATAL_ERROR "[hsdp] ${CMAKE_CUDA_COMPILER} --list-gpu-code ended with ${status}: ${error}")
endif()
set(HSDP_CUDA_CODE "")
if(HSDP_CUDA_ARCHITECTURES)
  foreach(architecture IN LISTS HSDP_CUDA_ARCHITECTURES)
    if(NOT architecture IN_LIST known OR architecture LESS 70)
      list(JOIN known " " known)
      message(FATAL_ERROR
        "[hsdp] HSDP_CUDA_ARCHITECTURES=${HSDP_CUDA_ARCHITECTURES} has ${architecture}, expected numbers from 70 on of ${known}.")
    endif()
    list(APPEND HSDP_CUDA_CODE "${architecture}")
  endforeach()
else()
  foreach(architecture 80 86 89 90 100 120)
    if(architecture IN_LIST known)
      list(APPEND HSDP_CUDA_CODE "${architecture}")
    endif()
  endforeach()
endif()
# The intermediate code is compiled when the library is loaded on a GPU that has no machine code here, older or newer.
list(SORT HSDP_CUDA_CODE COMPARE NATURAL)
set(lowest 75)
foreach(architecture IN LISTS HSDP_CUDA_CODE)
  if(architecture LESS lowest)
    set(lowest ${architecture})
  endif()
endforeach()
list(TRANSFORM HSDP_CUDA_CODE PREPEND "sm_" OUTPUT_VARIABLE code)
list(JOIN code "," code)

# Gives `target` what its .cu files are compiled with. No runtime: the library is linked to the one that torch loads.
function(hsdp_configure_cuda target)
  # The property CUDA_STANDARD knows no C++20 before cmake 3.26.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:\
-std=c++20;--generate-code=arch=compute_${lowest},code=[compute_${lowest},${code}];--threads=0>")
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY None LINKER_LANGUAGE CXX)
  if(hsdp_launcher)
    set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${hsdp_launcher}")
  endif()
endfunction()
