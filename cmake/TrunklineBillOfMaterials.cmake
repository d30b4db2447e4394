# trunkline.cdx.json, a CycloneDX bill of materials: the software of others that is linked or compiled in, with the
# versions found here. Made without a date and without paths, so that equal builds give equal files.
set(trunkline_bom_components "")
set(trunkline_bom_refs "")

# trunkline_bom_add(NAME VERSION SPDX HOW): HOW is "linked" or "headers".
function(trunkline_bom_add name version license how)
  if(NOT version AND SKBUILD)
    message(FATAL_ERROR "the version of ${name} was not found; the wheel's bill of materials needs it")
  elseif(NOT version)
    set(version unknown)
  endif()
  set(ref "${name}@${version}")
  set(component "
    {
      \"type\": \"library\",
      \"bom-ref\": \"${ref}\",
      \"name\": \"${name}\",
      \"version\": \"${version}\",
      \"purl\": \"pkg:generic/${name}@${version}\",
      \"licenses\": [{\"license\": {\"id\": \"${license}\"}}],
      \"properties\": [{\"name\": \"trunkline:use\", \"value\": \"${how}\"}]
    }")
  list(APPEND trunkline_bom_components "${component}")
  list(APPEND trunkline_bom_refs "\"${ref}\"")
  set(trunkline_bom_components "${trunkline_bom_components}" PARENT_SCOPE)
  set(trunkline_bom_refs "${trunkline_bom_refs}" PARENT_SCOPE)
endfunction()

# trunkline_macro_version(VARIABLE FILE MACRO...): the values of the macros in a header, joined by dots.
function(trunkline_macro_version variable file)
  set(numbers "")
  if(EXISTS ${file})
    file(READ ${file} text)
    foreach(macro IN LISTS ARGN)
      if(text MATCHES "#[ \t]*define[ \t]+${macro}[ \t]+([0-9]+)")
        list(APPEND numbers ${CMAKE_MATCH_1})
      endif()
    endforeach()
  endif()
  list(JOIN numbers "." version)
  set(${variable} "${version}" PARENT_SCOPE)
endfunction()

# trunkline_library_version(VARIABLE LIBRARY MODULE): of a library that may have no version in its headers: from the
# file of pkg-config beside it, or wherever pkg-config looks.
function(trunkline_library_version variable library module)
  get_filename_component(folder ${library} DIRECTORY)
  set(version "")
  foreach(file IN ITEMS ${folder}/pkgconfig/${module}.pc ${folder}/../share/pkgconfig/${module}.pc)
    if(EXISTS ${file})
      file(STRINGS ${file} line REGEX "^Version:" LIMIT_COUNT 1)
      string(REGEX REPLACE "^Version:[ \t]*" "" version "${line}")
      break()
    endif()
  endforeach()
  set(${variable} "${version}" PARENT_SCOPE)
endfunction()

trunkline_library_version(liburing_VERSION ${LIBURING_LIBRARY} liburing)
if(NOT liburing_VERSION)
  trunkline_macro_version(liburing_VERSION ${LIBURING_INCLUDE_DIR}/liburing/io_uring_version.h
    IO_URING_VERSION_MAJOR IO_URING_VERSION_MINOR)
endif()
trunkline_macro_version(isal_VERSION ${ISAL_INCLUDE_DIR}/isa-l.h
  ISAL_MAJOR_VERSION ISAL_MINOR_VERSION ISAL_PATCH_VERSION)
trunkline_bom_add(liburing "${liburing_VERSION}" MIT linked)
trunkline_bom_add(isa-l "${isal_VERSION}" BSD-3-Clause linked)
trunkline_bom_add(fmt "${fmt_VERSION}" MIT linked)
trunkline_bom_add(nlohmann-json "${nlohmann_json_VERSION}" MIT headers)
if(TRUNKLINE_CLI)
  find_package(CLI11 REQUIRED)
  trunkline_bom_add(cli11 "${CLI11_VERSION}" BSD-3-Clause headers)
endif()
if(TRUNKLINE_PYTHON)
  trunkline_bom_add(nanobind "${nanobind_VERSION}" BSD-3-Clause linked)
  trunkline_bom_add(robin-map "${nanobind_VERSION}+nanobind" MIT headers)
endif()
list(JOIN trunkline_bom_components "," trunkline_bom_components)
list(JOIN trunkline_bom_refs ", " trunkline_bom_refs)
configure_file(${PROJECT_SOURCE_DIR}/cmake/trunkline.cdx.json.in ${PROJECT_BINARY_DIR}/trunkline.cdx.json @ONLY)
