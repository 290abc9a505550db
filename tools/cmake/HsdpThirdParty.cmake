# Libraries of the programs and tests: CLI11, and yaml-cpp for those that read configurations.

include_guard(GLOBAL)

set(hsdp_packages "CLI11 libcli11-dev")
if(HSDP_BUILD_APPS)
  list(PREPEND hsdp_packages "yaml-cpp libyaml-cpp-dev")
endif()
foreach(package IN LISTS hsdp_packages)
  separate_arguments(package)
  list(GET package 0 name)
  list(GET package 1 debian)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "[hsdp] ${name} not found. Install ${debian}, or build the library alone with -DHSDP_BUILD_APPS=OFF.")
  endif()
endforeach()

# yaml-cpp before 0.8 names its target without a namespace.
if(HSDP_BUILD_APPS AND NOT TARGET yaml-cpp::yaml-cpp)
  add_library(hsdp_yaml_cpp INTERFACE)
  target_link_libraries(hsdp_yaml_cpp INTERFACE yaml-cpp)
  add_library(yaml-cpp::yaml-cpp ALIAS hsdp_yaml_cpp)
endif()
