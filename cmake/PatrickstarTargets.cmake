# SPDX-License-Identifier: Apache-2.0
#
# patrickstar_library(<folder> [DEPENDS <folder>...]): one target per folder of
#   the core, named patrickstar_<folder>, from the sources in it. DEPENDS names
#   the folders whose code it may use, so linking checks the order of the layers.
#   A folder of headers, or one still empty, becomes an INTERFACE library.
# patrickstar_compile_for(<folder> <isa> <source> <flag>...): compiles one source once
#   more into the folder's target, for an instruction set. The source lies in a folder
#   below, so that it is compiled in no other way; PATRICKSTAR_COMPILE_FOR_<isa> tells it.
# patrickstar_benchmarks(<path>): one executable per bench_*.cc; the other sources
#   there are shared by all of them.

set(PATRICKSTAR_CORE_ROOT "${PROJECT_SOURCE_DIR}/core")

# A test that runs longer than this hangs; sanitizers are slow, hence the margin.
set(PATRICKSTAR_TEST_TIMEOUT_S 300)

function(patrickstar_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "DEPENDS")
  file(GLOB sources CONFIGURE_DEPENDS "*.cc")
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")

  set(library patrickstar_${folder})
  list(TRANSFORM arg_DEPENDS PREPEND patrickstar_ OUTPUT_VARIABLE lower_libraries)
  if(sources)
    add_library(${library} STATIC ${sources})
    target_include_directories(${library} PUBLIC "${PATRICKSTAR_CORE_ROOT}")
    target_link_libraries(${library} PUBLIC ${lower_libraries} PRIVATE patrickstar_options)
  else()
    add_library(${library} INTERFACE)
    target_include_directories(${library} INTERFACE "${PATRICKSTAR_CORE_ROOT}")
    target_link_libraries(${library} INTERFACE ${lower_libraries})
  endif()

  if(PATRICKSTAR_BUILD_TESTS)
    foreach(test IN LISTS tests)
      patrickstar_test(${folder} "${test}")
    endforeach()
  endif()
endfunction()

function(patrickstar_compile_for folder isa source)
  string(TOLOWER "patrickstar_${folder}_${isa}" objects)
  add_library(${objects} OBJECT "${source}")
  target_compile_definitions(${objects} PRIVATE PATRICKSTAR_COMPILE_FOR_${isa})
  target_compile_options(${objects} PRIVATE ${ARGN})
  target_include_directories(${objects} PRIVATE "${PATRICKSTAR_CORE_ROOT}")
  target_link_libraries(${objects} PRIVATE patrickstar_options)
  target_sources(patrickstar_${folder} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()

function(patrickstar_test folder source)
  get_filename_component(name "${source}" NAME_WE)
  set(executable ${folder}_${name})
  add_executable(${executable} "${source}")
  target_link_libraries(${executable}
                        PRIVATE patrickstar_${folder} patrickstar_options GTest::gtest_main)
  gtest_discover_tests(${executable} DISCOVERY_MODE PRE_TEST
                       PROPERTIES TIMEOUT ${PATRICKSTAR_TEST_TIMEOUT_S})
endfunction()

function(patrickstar_benchmarks path)
  file(GLOB sources CONFIGURE_DEPENDS "${path}/*.cc")
  set(shared ${sources})
  list(FILTER sources INCLUDE REGEX "/bench_[^/]*\\.cc$")
  list(FILTER shared EXCLUDE REGEX "/bench_[^/]*\\.cc$")
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}" ${shared})
    target_link_libraries(${name} PRIVATE ${PATRICKSTAR_CORE_LIBRARIES} patrickstar_options)
  endforeach()
endfunction()
