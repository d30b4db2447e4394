# What the library stands on, all from the distribution: liburing, libaio, ISA-L, fmt, and nlohmann-json (headers only).
# Static archives are preferred where the distribution ships them; of a wheel, auditwheel bundles the rest (libisal,
# libfmt). fmt is linked and not compiled in: its header-only form doubles the time of every build.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)

function(trunkline_find_library variable name header)
  find_path(${variable}_INCLUDE_DIR ${header} REQUIRED)
  find_library(${variable}_LIBRARY NAMES lib${name}.a ${name} REQUIRED)
  mark_as_advanced(${variable}_INCLUDE_DIR ${variable}_LIBRARY)
  target_include_directories(trunkline_private_dependencies SYSTEM INTERFACE ${${variable}_INCLUDE_DIR})
endfunction()

# For the project's own targets; what an installed library's user must link too is in TRUNKLINE_LINK_LIBRARIES.
add_library(trunkline_private_dependencies INTERFACE)
target_link_libraries(trunkline_private_dependencies INTERFACE fmt::fmt nlohmann_json::nlohmann_json)
trunkline_find_library(LIBURING uring liburing.h)
trunkline_find_library(LIBAIO aio libaio.h)
trunkline_find_library(ISAL isal isa-l.h)
set(TRUNKLINE_LINK_LIBRARIES ${LIBURING_LIBRARY} ${LIBAIO_LIBRARY} ${ISAL_LIBRARY} fmt::fmt)
