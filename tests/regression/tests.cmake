# The runner in tools/regression is Python; a test of a module is regression/<module>_test.py.

# What sharded training is held to.
add_executable(plain_train regression/plain_train.cpp)
target_link_libraries(plain_train PRIVATE hsdp_trainer)
hsdp_configure_target(plain_train)

# Mistakes that are planted into the library under an unchanged program.
add_library(hsdp_mistakes MODULE regression/mistakes.cpp)
target_link_libraries(hsdp_mistakes PRIVATE hsdp::hsdp)
hsdp_configure_target(hsdp_mistakes)

hsdp_python_of_torch(python)
if(python)
  execute_process(COMMAND "${python}" -c "import jinja2, yaml" RESULT_VARIABLE no_modules ERROR_QUIET)
endif()
if(NOT python OR no_modules)
  message(STATUS "Tests of tools/regress are left out: no Python with this torch, PyYAML and Jinja2; HSDP_PYTHON may name one")
  return()
endif()

function(hsdp_add_regression_test name label timeout)
  add_test(NAME ${label}.regression_${name} COMMAND "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/regression/${name}_test.py")
  set_tests_properties(${label}.regression_${name} PROPERTIES
    LABELS ${label} TIMEOUT ${timeout} ENVIRONMENT "HSDP_BUILD_FOLDER=${PROJECT_BINARY_DIR}")
endfunction()

foreach(name
  charts checks console devices environment goldens history launch listing listing_refusals lists main processes
  report_page reports selection)
  hsdp_add_regression_test(${name} unit 1800)
endforeach()

# They look for what a run leaves in /dev/shm, where one of them leaves something on purpose.
set_tests_properties(unit.regression_launch unit.regression_main unit.regression_processes PROPERTIES
  RESOURCE_LOCK shared_memory)
set_tests_properties(unit.regression_processes PROPERTIES RUN_SERIAL ON)

# They start ranks over Gloo.
if(HSDP_WITH_GLOO)
  hsdp_add_regression_test(mistakes multi 1800)
  foreach(list cpu nightly)
    add_test(NAME multi.regression_${list} COMMAND
      "${CMAKE_COMMAND}" -E env "HSDP_PYTHON=${python}" "${PROJECT_SOURCE_DIR}/tools/regress"
      "${CMAKE_CURRENT_SOURCE_DIR}/regression/${list}.yaml" --device cpu --build "${PROJECT_BINARY_DIR}"
      --out "${CMAKE_CURRENT_BINARY_DIR}/regression/${list}")
  endforeach()
  set_tests_properties(multi.regression_cpu PROPERTIES LABELS multi TIMEOUT 1800)
  set_tests_properties(multi.regression_nightly PROPERTIES LABELS "multi;nightly" TIMEOUT 7200)
  set_tests_properties(multi.regression_cpu multi.regression_nightly multi.regression_mistakes PROPERTIES
    PROCESSORS 2 RESOURCE_LOCK shared_memory)
endif()
