# trunkline_target(TARGET): warnings, sanitizers and language settings that all of the project's targets share.
function(trunkline_target target)
  target_compile_features(${target} PUBLIC cxx_std_23)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
    $<$<BOOL:${TRUNKLINE_WERROR}>:-Werror>)
  if(TRUNKLINE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${TRUNKLINE_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all -g1)
    if(TRUNKLINE_SANITIZE MATCHES "undefined" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      # It would object to every function of a driver, whose headers give structures other names than ours.
      target_compile_options(${target} PRIVATE -fno-sanitize=function)
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${TRUNKLINE_SANITIZE})
  endif()
endfunction()

# trunkline_test_target(TARGET): the same, and GoogleTest, for a program of tests.
function(trunkline_test_target target)
  trunkline_target(${target})
  # Optimizing assertions is most of the work of a build; with the address sanitizer, three quarters of it.
  if(TRUNKLINE_SANITIZE MATCHES "address")
    target_compile_options(${target} PRIVATE -O0)
  else()
    target_compile_options(${target} PRIVATE -O1)
  endif()
  target_link_libraries(${target} PRIVATE trunkline_private_dependencies GTest::gtest GTest::gtest_main)
endfunction()

# trunkline_tests(LAYER LIBRARY): builds src/LAYER/**/*_test.cpp into LAYER_tests and registers each test.
function(trunkline_tests layer library)
  file(GLOB_RECURSE tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${layer}/*_test.cpp)
  if(NOT tests)
    return()
  endif()
  add_executable(${layer}_tests ${tests} ${PROJECT_SOURCE_DIR}/tests/support/no_tuning.cpp
    ${PROJECT_SOURCE_DIR}/tests/support/tsan_suppressions.cpp)
  trunkline_test_target(${layer}_tests)
  target_include_directories(${layer}_tests PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${layer}_tests PRIVATE ${library} trunkline_private_dependencies ${TRUNKLINE_LINK_LIBRARIES}
    fake_cuda)
  trunkline_precompile_tests(${layer}_tests)
  if(TRUNKLINE_UNITY)
    trunkline_unity(${layer}_tests)
  endif()
  gtest_discover_tests(${layer}_tests DISCOVERY_TIMEOUT 120 PROPERTIES TIMEOUT 300 LABELS ${layer})
endfunction()

# Every public header compiles alone.
function(trunkline_header_check)
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/trunkline/*.h)
  set(sources "")
  foreach(header IN LISTS headers)
    get_filename_component(name ${header} NAME_WE)
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/header_check/${name}.cpp
      CONTENT "#include \"trunkline/${name}.h\"\n#include \"trunkline/${name}.h\"  // guarded\n")
    list(APPEND sources ${CMAKE_CURRENT_BINARY_DIR}/header_check/${name}.cpp)
  endforeach()
  add_library(header_check OBJECT ${sources})
  trunkline_target(header_check)
  target_link_libraries(header_check PRIVATE trunkline)
endfunction()
