# What every compiled target of the project shares. The precompiled header is made once and GCC takes it only where all code
# generation flags and definitions agree, so all of them are given here and nowhere else.

include_guard(GLOBAL)

add_library(hsdp_warnings INTERFACE)
set(warnings -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wsuggest-override
  # GCC 12 reports std::string operator+ of two short literals.
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  # In a unity build every source is an included file, where GCC reports anonymous namespaces.
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<BOOL:${CMAKE_UNITY_BUILD}>>:-Wno-subobject-linkage>
  $<$<BOOL:${HSDP_WARNINGS_AS_ERRORS}>:-Werror>)
target_compile_options(hsdp_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>"
  # nvcc passes code of its own to the host compiler, which not every warning suits.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall;$<$<BOOL:${HSDP_WARNINGS_AS_ERRORS}>:-Werror=all-warnings>>")

add_library(hsdp_build_settings INTERFACE)
# Executables too: with -fPIE they could not use the library's precompiled header.
set(settings -fPIC -pthread
  # Half of what a compiler holds comes from the precompiled header: looking through it for garbage takes an eighth of the
  # time and finds nothing.
  $<$<CXX_COMPILER_ID:GNU>:SHELL:--param ggc-min-heapsize=1048576>)
target_compile_options(hsdp_build_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${settings}>")
target_link_options(hsdp_build_settings INTERFACE -pthread)
target_link_libraries(hsdp_build_settings INTERFACE hsdp_warnings)

if(HSDP_SANITIZE)
  list(JOIN HSDP_SANITIZE "," sanitizers)
  # libtorch does not export every type_info, which the vptr check needs.
  set(flags -fsanitize=${sanitizers} -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(hsdp_build_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  target_link_options(hsdp_build_settings INTERFACE ${flags})
endif()

# ccache never hits with a precompiled header unless it may ignore the time and defines of one, and GCC keeps it in view while
# preprocessing.
find_program(HSDP_CCACHE ccache DOC "ccache, used when it is there")
mark_as_advanced(HSDP_CCACHE)
set(hsdp_launcher "")
if(HSDP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(hsdp_launcher "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${HSDP_CCACHE}")
  target_compile_options(hsdp_build_settings INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()

# Gives `target` the common settings and the shared precompiled header; TEST: those of a test.
function(hsdp_configure_target target)
  cmake_parse_arguments(PARSE_ARGV 1 this "TEST" "" "")
  set(header hsdp_pch)
  if(this_TEST AND TARGET hsdp_tests_pch)
    set(header hsdp_tests_pch)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  if(this_TEST)
    set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  endif()
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:hsdp_build_settings>)
  # LINK_DEPENDS_NO_SHARED: a change inside the library does not link every test again.
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF DEFINE_SYMBOL "" LINK_DEPENDS_NO_SHARED ON)
  if(hsdp_launcher)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "${hsdp_launcher}")
  endif()
  target_precompile_headers(${target} REUSE_FROM ${header})
endfunction()
