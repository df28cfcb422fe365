// SPDX-License-Identifier: Apache-2.0
//
// Guard: the dispatcher kernel that leases an op's chunks before the op runs. It stands
// on the PrivateUse2 backend bit that managed tensors carry beside their own, takes op
// leases for all of them at once, and redispatches the same tensors with the bit
// removed. Nothing is unwrapped, so identity, metadata, views and modes are torch's own.
//
// It is registered by name for every op that has a kernel for the CPU or for all
// backends, and as fallback for the rest. Any thread may be inside it.
#pragma once

#include <cstddef>

namespace patrickstar {

// Registers the guard for every op known now; ops registered later are covered by the
// fallback until the next call, which is cheap when there are none. Returns the number of
// kernels registered by this call. The registrations stay for the life of the process and
// cost nothing for tensors that are not managed.
size_t InstallGuard();

// For tests of the tests: while true, the guard takes no leases for reads, so that a
// stress run must go red.
void SkipReadLeases(bool is_skipped);

}  // namespace patrickstar
