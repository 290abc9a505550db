# cmake --install: the library, its public headers, and what find_package(hsdp) reads.

include_guard(GLOBAL)
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# A folder of its own, so that dtensor/ does not lie among other projects' headers.
set(hsdp_headers "${CMAKE_INSTALL_INCLUDEDIR}/hsdp")
set(hsdp_package "${CMAKE_INSTALL_LIBDIR}/cmake/hsdp")

# Programs need not know where torch is: the library says so itself. CMake adds folders outside the project alone, and .venv is
# inside it.
set(hsdp_rpath "${HSDP_TORCH_ROOT}/lib")
if(TARGET hsdp::cudart)
  list(APPEND hsdp_rpath "$<TARGET_FILE_DIR:hsdp::cudart>")
endif()
set_target_properties(hsdp PROPERTIES INSTALL_RPATH "${hsdp_rpath}" INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS hsdp EXPORT hsdpTargets INCLUDES DESTINATION "${hsdp_headers}" LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT hsdpTargets NAMESPACE hsdp:: DESTINATION "${hsdp_package}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/hsdpConfig.cmake.in" hsdpConfig.cmake
  INSTALL_DESTINATION "${hsdp_package}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(hsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/hsdpConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/hsdpConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/HsdpFindTorch.cmake"
  DESTINATION "${hsdp_package}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# Public are hsdp/hsdp.h and the headers of the project that it reaches. Looked up when installing: no list to keep, and none
# that is overtaken when a header changes.
install(CODE "set(source \"${PROJECT_SOURCE_DIR}\")\nset(headers \"${hsdp_headers}\")")
install(CODE [[
  cmake_policy(VERSION 3.25)
  set(pending hsdp/hsdp.h)
  set(public "")
  while(pending)
    list(POP_FRONT pending header)
    if(header IN_LIST public)
      continue()
    endif()
    list(APPEND public "${header}")
    get_filename_component(folder "${header}" DIRECTORY)
    file(INSTALL "${source}/${header}" DESTINATION "${CMAKE_INSTALL_PREFIX}/${headers}/${folder}")
    file(STRINGS "${source}/${header}" includes REGEX "^#include \"")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE "^#include \"([^\"]*)\".*" "\\1" include "${include}")
      list(APPEND pending "${include}")
    endforeach()
  endwhile()
]])
