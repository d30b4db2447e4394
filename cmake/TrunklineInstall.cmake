# cmake --install: headers, library, command line, packages for find_package(trunkline) and pkg-config, and the licences
# of what is inside.
include(CMakePackageConfigHelpers)
set(trunkline_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/trunkline)
install(TARGETS trunkline EXPORT trunkline-targets)
install(DIRECTORY include/trunkline TYPE INCLUDE)
install(EXPORT trunkline-targets NAMESPACE trunkline:: DESTINATION ${trunkline_package_dir})
configure_package_config_file(cmake/trunkline-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config.cmake
  INSTALL_DESTINATION ${trunkline_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/trunkline-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/trunkline-config-version.cmake cmake/TrunklineLibraries.cmake
  DESTINATION ${trunkline_package_dir})

# A static library is linked together with what it uses, by everyone.
if(BUILD_SHARED_LIBS)
  set(trunkline_pc_requires Requires.private)
else()
  set(trunkline_pc_requires Requires)
endif()
file(RELATIVE_PATH trunkline_pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/trunkline.pc.in ${CMAKE_CURRENT_BINARY_DIR}/trunkline.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/trunkline.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES LICENSE ${PROJECT_BINARY_DIR}/trunkline.cdx.json DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/trunkline)
install(DIRECTORY licenses DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/trunkline)
