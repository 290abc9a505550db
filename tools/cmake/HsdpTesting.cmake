# Tests: one executable and one ctest entry per file.

include_guard(GLOBAL)

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(FATAL_ERROR "[hsdp] GoogleTest not found. Install libgtest-dev and libgmock-dev, or set -DHSDP_BUILD_TESTS=OFF.")
endif()

# GoogleTest's closing lines when nothing passed, something was skipped, and nothing failed (failures are listed after these).
set(hsdp_all_skipped "PASSED  . 0 tests.\n.  SKIPPED . [^\n]*listed below:\n(.  SKIPPED . [^\n]*\n)+$")

# hsdp_add_test(name LABEL unit|multi|gpu|consumer [NIGHTLY] TIMEOUT seconds SOURCES file... [LIBS library...])
#
# `multi` tests fork ranks that talk over Gloo: they are given both cores, and a build without Gloo has none. A file of which
# every case was skipped is reported as skipped, not as passed.
function(hsdp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "NIGHTLY" "LABEL;TIMEOUT" "SOURCES;LIBS")
  if(NOT test_LABEL MATCHES "^(unit|multi|gpu|consumer)$" OR NOT test_TIMEOUT OR NOT test_SOURCES)
    message(FATAL_ERROR "[hsdp] hsdp_add_test(${name}) needs LABEL unit|multi|gpu|consumer, TIMEOUT and SOURCES.")
  endif()
  if(test_LABEL STREQUAL "multi" AND NOT HSDP_WITH_GLOO)
    return()
  endif()
  add_executable(${name} ${test_SOURCES})
  target_link_libraries(${name} PRIVATE hsdp_testing ${test_LIBS} GTest::gmock GTest::gtest_main)
  hsdp_configure_target(${name} TEST)

  add_test(NAME ${test_LABEL}.${name} COMMAND ${name})
  set(labels ${test_LABEL})
  if(test_NIGHTLY)
    list(APPEND labels nightly)
  endif()
  set_tests_properties(${test_LABEL}.${name} PROPERTIES
    LABELS "${labels}" TIMEOUT ${test_TIMEOUT} SKIP_REGULAR_EXPRESSION "${hsdp_all_skipped}")
  if(test_LABEL STREQUAL "multi")
    set_tests_properties(${test_LABEL}.${name} PROPERTIES PROCESSORS 2)
  endif()
endfunction()

# The test starts these programs, which are built before it.
function(hsdp_test_starts test)
  if(TARGET ${test})
    add_dependencies(${test} ${ARGN})
  endif()
endfunction()

# Sets `out` to a Python whose torch package is the torch of this build, or to "": a libtorch folder may have none.
function(hsdp_python_of_torch out)
  set(${out} "" PARENT_SCOPE)
  file(REAL_PATH "${HSDP_TORCH_ROOT}" root)
  # A wheel lies in <prefix>/lib/pythonX.Y/site-packages/torch.
  get_filename_component(beside "${HSDP_TORCH_ROOT}/../../../../bin/python3" ABSOLUTE)
  foreach(python "${HSDP_PYTHON}" "${HSDP_ENVIRONMENT_HSDP_PYTHON}" "${beside}")
    if(python)
      hsdp_torch_of_python("${python}" found problem)
      if(NOT problem)
        file(REAL_PATH "${found}" found)
        if(found STREQUAL root)
          set(${out} "${python}" PARENT_SCOPE)
          return()
        endif()
      endif()
    endif()
  endforeach()
endfunction()
