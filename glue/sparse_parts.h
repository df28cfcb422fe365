// SPDX-License-Identifier: Apache-2.0
//
// SparseParts: the dense tensors that a sparse tensor is made of, which torch takes over
// without a copy when it makes one. A compressed one (CSR and its like) over managed parts
// gets the guard's backend bit, and its ops lease what its parts lie in. A COO one cannot:
// torch derives its device from its highest bit. Its managed parts are copied.
// Thread-safe as tensors are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace patrickstar {

// The indices and values of a sparse tensor of any layout; nothing for any other.
c10::SmallVector<const c10::TensorImpl*, 3> SparsePartsOf(const c10::TensorImpl* tensor);

// Makes a fresh result over managed memory safe to use: a COO tensor gets copies of its
// managed parts; any other that is not plainly dense goes to the guard from now on.
void SettleUnusualResult(const at::Tensor& tensor);

}  // namespace patrickstar
