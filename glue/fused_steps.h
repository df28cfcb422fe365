// SPDX-License-Identifier: Apache-2.0
//
// FusedSteps: the engine's optimizer kernels over raw memory, for Python. The elements of
// a tensor are split over torch's threads; the bits do not depend on how.
#pragma once

#include <pybind11/pybind11.h>

namespace patrickstar {

void RegisterFusedSteps(pybind11::module_& module);

}  // namespace patrickstar
