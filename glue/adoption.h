// SPDX-License-Identifier: Apache-2.0
//
// Adoption: giving tensors a slot, in place. A tensor keeps its identity, name, shape,
// strides, dtype, hooks, gradient and the graphs it is part of; only where its bytes lie
// changes. A storage is adopted with all tensors over it together, or not yet: a tensor
// detached before adoption would silently stop following.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "glue/engine.h"
#include "glue/managed_storage.h"

namespace patrickstar {

enum class Adoption : uint8_t {
  kDone,         // managed now
  kAlready,      // was managed
  kAliased,      // somebody else uses its storage: try again later
  kOverlapping,  // expanded, or elements that share memory
  kLeftAlone,    // not a dense CPU tensor with bytes of its own
};

// Adopts what can be adopted; one answer for each tensor.
// Throws: OutOfMemory, IoError as torch::PyTorchError; tensors adopted before that stay so.
std::vector<Adoption> Adopt(Engine* engine, const std::vector<at::Tensor>& tensors,
                            const std::vector<std::string>& names);

// Makes a managed tensor ordinary, in place; tensors over the same storage follow.
// Throws: Unsupported when an address is in use, OutOfMemory, as torch::PyTorchError.
void Unmanage(Engine* engine, const at::Tensor& tensor);

// The same for a storage; its tensors follow, and keep a key that finds nothing to lease.
// `what` says in messages what is done to it: "unmanage".
void UnmanageStorage(Engine* engine, ManagedStorage* storage, std::string_view what);

// A dense strided CPU tensor with bytes, not managed and of no other system.
bool IsPlainDense(const at::Tensor& tensor);

// Nobody but this tensor uses its storage.
bool OwnsItsStorage(const at::Tensor& tensor);

// The tensor and its slot are of one size: it may stand for the slot.
bool FillsItsSlot(const at::Tensor& tensor);

// Copies `source` (IsPlainDense) to a fresh storage in the place of `neighbour`'s group and
// hands the managed tensor over it, strides kept, to `publish` while it is leased.
// Throws: as Adopt.
void MoveIntoGroup(Engine* engine, const at::Tensor& source, const Slot& neighbour, Kind kind,
                   const std::string& name, const std::function<void(const at::Tensor&)>& publish);

}  // namespace patrickstar
