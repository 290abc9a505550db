# Libraries of the programs and tests: yaml-cpp, CLI11.

include_guard(GLOBAL)

foreach(package "yaml-cpp libyaml-cpp-dev" "CLI11 libcli11-dev")
  separate_arguments(package)
  list(GET package 0 name)
  list(GET package 1 debian)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "[hsdp] ${name} not found. Install ${debian}, or build the library alone with -DHSDP_BUILD_APPS=OFF.")
  endif()
endforeach()

# yaml-cpp before 0.8 names its target without a namespace.
if(NOT TARGET yaml-cpp::yaml-cpp)
  add_library(hsdp_yaml_cpp INTERFACE)
  target_link_libraries(hsdp_yaml_cpp INTERFACE yaml-cpp)
  add_library(yaml-cpp::yaml-cpp ALIAS hsdp_yaml_cpp)
endif()
