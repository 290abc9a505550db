# Tests: one ctest entry per file, named after it.

include_guard(GLOBAL)

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(FATAL_ERROR "[hsdp] GoogleTest not found. Install libgtest-dev and libgmock-dev, or set -DHSDP_BUILD_TESTS=OFF.")
endif()

# GoogleTest's closing lines when nothing passed, something was skipped, and nothing failed (failures are listed after these).
set(hsdp_all_skipped "PASSED  . 0 tests.\n.  SKIPPED . [^\n]*listed below:\n(.  SKIPPED . [^\n]*\n)+$")

# hsdp_add_test(name LABEL unit|multi|gpu|consumer [NIGHTLY_CASES] TIMEOUT seconds SOURCES file... [LIBS library...]
#               [SUPPORT library])
#
# `multi` tests fork ranks that talk over Gloo: they are given both cores, and a build without Gloo has none. A file of which
# every case was skipped is reported as skipped, not as passed. Test suites that a file instantiates as `Nightly` are an entry
# of their own, labelled nightly, if it says NIGHTLY_CASES. SUPPORT takes the place of hsdp_testing.
function(hsdp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "NIGHTLY_CASES" "LABEL;SUPPORT;TIMEOUT" "SOURCES;LIBS")
  if(NOT test_LABEL MATCHES "^(unit|multi|gpu|consumer)$" OR NOT test_TIMEOUT OR NOT test_SOURCES)
    message(FATAL_ERROR "[hsdp] hsdp_add_test(${name}) needs LABEL unit|multi|gpu|consumer, TIMEOUT and SOURCES.")
  endif()
  if(test_LABEL STREQUAL "multi" AND NOT HSDP_WITH_GLOO)
    return()
  endif()
  if(NOT test_SUPPORT)
    set(test_SUPPORT hsdp_testing)
  endif()
  add_executable(${name} ${test_SOURCES})
  target_link_libraries(${name} PRIVATE ${test_SUPPORT} ${test_LIBS} GTest::gmock GTest::gtest_main)
  hsdp_configure_target(${name} TEST)

  set(entries ${test_LABEL}.${name})
  if(test_NIGHTLY_CASES)
    list(APPEND entries ${test_LABEL}.${name}_nightly)
    add_test(NAME ${test_LABEL}.${name} COMMAND ${name} --gtest_filter=-Nightly/*)
    add_test(NAME ${test_LABEL}.${name}_nightly COMMAND ${name} --gtest_filter=Nightly/*)
  else()
    add_test(NAME ${test_LABEL}.${name} COMMAND ${name})
  endif()
  foreach(entry IN LISTS entries)
    hsdp_set_test_properties(${entry} ${test_LABEL} ${test_TIMEOUT})
  endforeach()
  if(test_NIGHTLY_CASES)
    set_tests_properties(${test_LABEL}.${name}_nightly PROPERTIES LABELS "${test_LABEL};nightly")
  endif()
endfunction()

# hsdp_add_tests(program LABEL unit|multi TIMEOUT seconds FILES name...)
#
# The tests <label>/<name>_test.cpp, each an entry as hsdp_add_test makes it, in one program that is linked as <name>_test for
# each: most of what a compiler does for a test is the same for all, and a unity build does it once for several. What a file
# names is in a namespace of its name; parameterised suites of two files cannot have one name.
function(hsdp_add_tests program)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "LABEL;TIMEOUT" "FILES")
  if(test_LABEL STREQUAL "multi" AND NOT HSDP_WITH_GLOO)
    return()
  endif()
  list(TRANSFORM test_FILES REPLACE "(.+)" "${test_LABEL}/\\1_test.cpp" OUTPUT_VARIABLE sources)
  add_executable(${program} testing/files_main.cpp ${sources})
  target_link_libraries(${program} PRIVATE hsdp_testing GTest::gmock)
  hsdp_configure_target(${program} TEST)
  if(CMAKE_UNITY_BUILD)
    set_target_properties(${program} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    set_source_files_properties(testing/files_main.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  foreach(file IN LISTS test_FILES)
    set(name ${file}_test)
    set(link "${CMAKE_CURRENT_BINARY_DIR}/${name}")
    add_custom_command(TARGET ${program} POST_BUILD VERBATIM
      COMMAND "${CMAKE_COMMAND}" -E create_symlink "$<TARGET_FILE_NAME:${program}>" "${link}")
    add_custom_target(${name} DEPENDS ${program})
    add_test(NAME ${test_LABEL}.${name} COMMAND "${link}")
    hsdp_set_test_properties(${test_LABEL}.${name} ${test_LABEL} ${test_TIMEOUT})
  endforeach()
endfunction()

# What every entry has.
function(hsdp_set_test_properties entry label timeout)
  set_tests_properties(${entry} PROPERTIES
    LABELS ${label} TIMEOUT ${timeout} SKIP_REGULAR_EXPRESSION "${hsdp_all_skipped}")
  if(label STREQUAL "multi")
    set_tests_properties(${entry} PROPERTIES PROCESSORS 2)
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
