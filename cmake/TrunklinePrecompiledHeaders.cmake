# With TRUNKLINE_PRECOMPILED_HEADERS: what most sources include is parsed once for the library and once for all of the
# tests. The sanitizers' presets turn it on. The release preset does not, so that a source that lacks an include still
# fails to compile there, and so that clang-tidy sees sources as they are.
set(trunkline_common_headers <algorithm> <array> <atomic> <cerrno> <chrono> <cstddef> <cstdint> <cstdlib> <cstring>
  <filesystem> <fmt/format.h> <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view>
  <thread> <utility> <vector>)
set(trunkline_common_test_headers ${trunkline_common_headers} <fstream> <gtest/gtest.h> <random>)

if(TRUNKLINE_PRECOMPILED_HEADERS AND CMAKE_CXX_COMPILER_LAUNCHER STREQUAL "ccache")
  # What ccache must ignore to serve what includes a precompiled header: the times in it, and unused definitions.
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_SLOPPINESS=pch_defines,time_macros ccache)
endif()

function(_trunkline_use_precompiled target)
  target_precompile_headers(${target} ${ARGN})
  # Names the precompiled header where ccache looks for it, in what the preprocessor leaves.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endfunction()

# trunkline_precompile(TARGET): for a target of the library.
function(trunkline_precompile target)
  if(TRUNKLINE_PRECOMPILED_HEADERS)
    _trunkline_use_precompiled(${target} PRIVATE ${trunkline_common_headers})
  endif()
endfunction()

# trunkline_precompile_tests(TARGET): the first one's precompiled header serves all: they are compiled alike.
function(trunkline_precompile_tests target)
  if(NOT TRUNKLINE_PRECOMPILED_HEADERS)
    return()
  endif()
  get_property(first GLOBAL PROPERTY trunkline_first_tests)
  if(first)
    _trunkline_use_precompiled(${target} REUSE_FROM ${first})
  else()
    _trunkline_use_precompiled(${target} PRIVATE ${trunkline_common_test_headers})
    set_property(GLOBAL PROPERTY trunkline_first_tests ${target})
  endif()
endfunction()
