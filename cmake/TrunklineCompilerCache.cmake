# Compiles through ccache where it is installed, unless this is part of another project or a launcher was chosen
# (CMAKE_CXX_COMPILER_LAUNCHER, as a variable of CMake or of the environment; an empty one is none).
if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(TRUNKLINE_CCACHE ccache)
  mark_as_advanced(TRUNKLINE_CCACHE)
  if(TRUNKLINE_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ccache)
  endif()
endif()
