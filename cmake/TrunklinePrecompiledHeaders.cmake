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

# trunkline_precompile_tests(TARGET): a program without tests has the precompiled header for all, so that none of them
# waits for another.
function(trunkline_precompile_tests target)
  if(NOT TRUNKLINE_PRECOMPILED_HEADERS)
    return()
  endif()
  if(NOT TARGET test_headers)
    add_executable(test_headers ${PROJECT_SOURCE_DIR}/tests/support/tsan_suppressions.cpp)
    trunkline_test_target(test_headers)
    _trunkline_use_precompiled(test_headers PRIVATE ${trunkline_common_test_headers})
  endif()
  _trunkline_use_precompiled(${target} REUSE_FROM test_headers)
endfunction()
