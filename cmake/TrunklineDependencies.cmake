# What the library stands on, all from the distribution: liburing, ISA-L, fmt, and nlohmann-json (headers only).
# Static archives are preferred where the distribution ships them; of a wheel, auditwheel bundles the rest (libisal,
# libfmt). fmt is linked and not compiled in: its header-only form doubles the time of every build.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
include(TrunklineLibraries)

# For the project's own targets; what an installed library's user must link too is in TRUNKLINE_LINK_LIBRARIES.
set(TRUNKLINE_LINK_LIBRARIES trunkline::liburing trunkline::isal fmt::fmt)
add_library(trunkline_private_dependencies INTERFACE)
target_link_libraries(trunkline_private_dependencies INTERFACE fmt::fmt nlohmann_json::nlohmann_json)
target_include_directories(trunkline_private_dependencies SYSTEM INTERFACE ${LIBURING_INCLUDE_DIR} ${ISAL_INCLUDE_DIR})
