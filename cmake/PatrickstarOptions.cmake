# SPDX-License-Identifier: Apache-2.0
#
# The compiler settings of all our code, carried by the target
# patrickstar_options. No -march: kernels that want an instruction set are
# compiled for it by name and chosen at run time.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug or Release" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# -g1 keeps file and line in backtraces; installing strips it, so wheels stay small.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g")

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(patrickstar_options INTERFACE)
target_compile_options(patrickstar_options INTERFACE
  -Wall -Wextra -Wconversion $<$<BOOL:${PATRICKSTAR_WERROR}>:-Werror>)
target_link_libraries(patrickstar_options INTERFACE Threads::Threads)

if(PATRICKSTAR_SANITIZE)
  set(sanitizer_flags -fsanitize=${PATRICKSTAR_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  target_compile_options(patrickstar_options INTERFACE ${sanitizer_flags})
  target_link_options(patrickstar_options INTERFACE ${sanitizer_flags})
endif()
