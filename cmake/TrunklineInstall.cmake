# cmake --install: headers, library, command line and a package for find_package(trunkline).
include(CMakePackageConfigHelpers)
if(SKBUILD)
  return()  # a wheel carries the extension module and the command line only
endif()
install(TARGETS trunkline EXPORT trunkline-targets)
install(DIRECTORY include/trunkline TYPE INCLUDE)
install(EXPORT trunkline-targets NAMESPACE trunkline:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/trunkline)
configure_package_config_file(cmake/trunkline-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/trunkline)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/trunkline-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/trunkline)
