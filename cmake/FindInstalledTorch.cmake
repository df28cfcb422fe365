# SPDX-License-Identifier: Apache-2.0
#
# Asks the torch that is installed for Python_EXECUTABLE where it is and what it
# is, instead of find_package(Torch), which asks for MKL, CUDA and protobuf.
# Defines InstalledTorch_VERSION, InstalledTorch_ROOT and the target
# InstalledTorch::torch. torch's pybind11 comes with its headers.

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [[
import os
import torch
print(torch.__version__)
print(os.path.dirname(torch.__file__))
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
]]
  OUTPUT_VARIABLE torch_answer
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)

if(torch_result EQUAL 0)
  string(REPLACE "\n" ";" torch_answer "${torch_answer}")
  list(GET torch_answer 0 InstalledTorch_VERSION)
  list(GET torch_answer 1 InstalledTorch_ROOT)
  list(GET torch_answer 2 torch_cxx11_abi)
else()
  set(torch_message "${Python_EXECUTABLE} cannot import torch; install torch==2.13.0 there first, "
                    "and use --no-build-isolation\n${torch_error}")
  string(CONCAT torch_message ${torch_message})
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  InstalledTorch
  REQUIRED_VARS InstalledTorch_ROOT InstalledTorch_VERSION
  VERSION_VAR InstalledTorch_VERSION
  REASON_FAILURE_MESSAGE "${torch_message}")

if(InstalledTorch_FOUND AND NOT TARGET InstalledTorch::torch)
  add_library(InstalledTorch::torch INTERFACE IMPORTED)
  # Imported, so the headers are system headers: our warnings do not see them.
  set_target_properties(InstalledTorch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${InstalledTorch_ROOT}/include;${InstalledTorch_ROOT}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi}"
    INTERFACE_LINK_DIRECTORIES "${InstalledTorch_ROOT}/lib"
    INTERFACE_LINK_LIBRARIES "torch;torch_cpu;c10;torch_python")
endif()
