# Libraries that bring no package of CMake with them, as targets: trunkline::liburing and trunkline::isal. Used by the
# build, and installed for those who link a static libtrunkline.

# trunkline_find_library(NAME LIBRARY HEADER): a static archive is preferred where there is one.
function(trunkline_find_library name library header)
  string(TOUPPER ${name} upper)
  find_path(${upper}_INCLUDE_DIR ${header})
  find_library(${upper}_LIBRARY NAMES lib${library}.a ${library})
  mark_as_advanced(${upper}_INCLUDE_DIR ${upper}_LIBRARY)
  if(NOT ${upper}_INCLUDE_DIR OR NOT ${upper}_LIBRARY)
    message(FATAL_ERROR "Trunkline needs ${name}, which was not found: install lib${library}-dev (Debian and Ubuntu), or set "
      "${upper}_INCLUDE_DIR (where ${header} is) and ${upper}_LIBRARY.")
  endif()
  if(NOT TARGET trunkline::${name})
    add_library(trunkline::${name} UNKNOWN IMPORTED GLOBAL)
    set_target_properties(trunkline::${name} PROPERTIES IMPORTED_LOCATION ${${upper}_LIBRARY}
      INTERFACE_INCLUDE_DIRECTORIES ${${upper}_INCLUDE_DIR})
  endif()
endfunction()

trunkline_find_library(liburing uring liburing.h)
trunkline_find_library(isal isal isa-l.h)
