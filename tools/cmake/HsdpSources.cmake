# Source lists, and the choice between a file and its stand-in.

include_guard(GLOBAL)

# Drops from the list variable `list` the files that this configuration does not compile. A file whose name has one of the
# words cuda, nccl, gloo, nvtx between underscores needs that feature; no_cuda, no_nccl, no_gloo, no_nvtx mark the file that
# takes its place (transport_nccl.cpp, transport_no_nccl.cpp). The end of the name, .cpp or .cu, plays no part.
function(hsdp_select_sources list)
  set(cuda ${HSDP_CUDA})
  set(nccl ${HSDP_NCCL})
  set(gloo ${HSDP_WITH_GLOO})
  set(nvtx ${HSDP_NVTX})
  set(selected "")
  foreach(file IN LISTS ${list})
    get_filename_component(name "${file}" NAME_WE)
    set(keep TRUE)
    foreach(feature cuda nccl gloo nvtx)
      if("_${name}_" MATCHES "_no_${feature}_")
        if(${feature})
          set(keep FALSE)
        endif()
      elseif("_${name}_" MATCHES "_${feature}_" AND NOT ${feature})
        set(keep FALSE)
      endif()
    endforeach()
    if(keep)
      list(APPEND selected "${file}")
    endif()
  endforeach()
  set(${list} "${selected}" PARENT_SCOPE)
endfunction()
