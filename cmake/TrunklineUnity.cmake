# TRUNKLINE_UNITY: whose sources of one folder are compiled as one, which takes a quarter of the time where all are new.
#   OFF    none
#   TESTS  tests (the release preset: a source that lacks an include still fails to compile there)
#   ON     all (the sanitizers' presets)
# Names in unnamed namespaces must therefore differ within a folder; the compiler names two that do not.
set(TRUNKLINE_UNITY OFF CACHE STRING "Whose sources of one folder are compiled as one: OFF, TESTS or ON")
set_property(CACHE TRUNKLINE_UNITY PROPERTY STRINGS OFF TESTS ON)

# trunkline_unity(TARGET): for a target whose sources are to be compiled so.
function(trunkline_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    string(REPLACE "/" "_" group ${folder})
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()
