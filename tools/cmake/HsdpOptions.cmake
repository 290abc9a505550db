# Every option a builder may set, all with the prefix HSDP_. Three more, HSDP_GLOO_INCLUDE_DIR, HSDP_NCCL_INCLUDE_DIR and
# HSDP_XXHASH_INCLUDE_DIR, are made where those folders are looked for.

include(CMakeDependentOption)

set(HSDP_WITH_CUDA "AUTO" CACHE STRING "CUDA code: ON, OFF, or AUTO (when torch and a CUDA toolkit both have it)")
set(HSDP_WITH_NCCL "AUTO" CACHE STRING "NCCL transport: ON, OFF, or AUTO (when CUDA is on and nccl.h is found)")
option(HSDP_WITH_GLOO "Gloo transport; needs the gloo headers" ON)
foreach(option HSDP_WITH_CUDA HSDP_WITH_NCCL)
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  if(NOT ${option} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "[hsdp] ${option}=${${option}} is not one of AUTO, ON, OFF.")
  endif()
endforeach()

set(HSDP_PYTHON "" CACHE FILEPATH "Python whose torch package is used; the environment variable of this name sets it too")
option(HSDP_ALLOW_ANY_TORCH "Build against a torch other than 2.11.x" OFF)

option(HSDP_BUILD_APPS "Build the models, the trainer library, hsdp_train and the examples" ${PROJECT_IS_TOP_LEVEL})
cmake_dependent_option(HSDP_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL} "HSDP_BUILD_APPS" OFF)

option(HSDP_INSTALL "Make cmake --install install the library" ${PROJECT_IS_TOP_LEVEL})

option(HSDP_WARNINGS_AS_ERRORS "Stop at a compiler warning" OFF)
set(HSDP_SANITIZE "" CACHE STRING "Sanitizers to compile in, separated by semicolons: address;undefined")

# Turns the value of an AUTO/ON/OFF option and what was found into TRUE or FALSE in `out`; stops when ON cannot be had.
function(hsdp_resolve_option option found why_not out)
  if(${option} STREQUAL "OFF")
    set(${out} FALSE PARENT_SCOPE)
  elseif(found)
    set(${out} TRUE PARENT_SCOPE)
  elseif(${option} STREQUAL "ON")
    message(FATAL_ERROR "[hsdp] ${option}=ON, but ${why_not}.")
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

function(hsdp_print_summary)
  message(STATUS "hsdp ${PROJECT_VERSION}")
  message(STATUS "  torch     ${HSDP_TORCH_VERSION} in ${HSDP_TORCH_ROOT}")
  if(HSDP_CUDA)
    message(STATUS "  CUDA      on, toolkit ${CUDAToolkit_VERSION}")
  else()
    message(STATUS "  CUDA      off (${HSDP_CUDA_OFF_REASON})")
  endif()
  if(HSDP_NCCL)
    message(STATUS "  NCCL      on, ${HSDP_NCCL_INCLUDE_DIR}")
  else()
    message(STATUS "  NCCL      off (${HSDP_NCCL_OFF_REASON})")
  endif()
  message(STATUS "  Gloo      ${HSDP_WITH_GLOO}")
  message(STATUS "  apps      ${HSDP_BUILD_APPS}")
  message(STATUS "  tests     ${HSDP_BUILD_TESTS}")
  message(STATUS "  sanitize  ${HSDP_SANITIZE}")
endfunction()
