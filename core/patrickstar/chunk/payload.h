// SPDX-License-Identifier: Apache-2.0
//
// Payload: a chunk's bytes on the compute tier with the reservation that pays for
// them. PayloadState and PayloadEvent: where a payload is in its life, and the one
// transition table. Nothing else in the engine decides what may follow what.
#pragma once

#include <cstdint>
#include <optional>

#include "patrickstar/chunk/budget.h"
#include "patrickstar/device/host_slab.h"

namespace patrickstar {

struct Payload {
  Reservation reservation;
  HostSlab slab;
};

enum class PayloadState : uint8_t {
  kNone,      // no bytes on this tier; Content says where they are
  kLoading,   // reserved; a transfer, or the caller that fills it, writes it
  kReady,     // valid; no storage points to it
  kAttached,  // valid; storages point to it; may be leased
  kSaving,    // valid and detached; a write-back reads it
  kFailed,    // no bytes; holds the exception of a load; the lower copy is the truth
};

enum class PayloadEvent : uint8_t {
  kReserve,     // an acquirer has reserved its bytes
  kLoaded,      // every byte is there
  kLoadFailed,  // the transfer ended with an error
  kCancel,      // its memory could not be had; nothing was read
  kAttach,      // storages are pointed at it
  kDetach,      // storages are pointed at nothing
  kSave,        // a write-back begins
  kSaved,       // the write-back ended and nobody wants the bytes here
  kKeep,        // the write-back ended, failed or was cancelled, and the bytes stay
  kDrop,        // clean: a lower tier, or knowledge, has the same bytes
  kDiscard,     // the content is dead
  kReport,      // the failure has been thrown
};

inline constexpr int kNumPayloadStates = 6;
inline constexpr int kNumPayloadEvents = 12;

// The state after `event`, or nothing when the event is illegal in `state`.
std::optional<PayloadState> NextState(PayloadState state, PayloadEvent event);

const char* PayloadStateName(PayloadState state);
const char* PayloadEventName(PayloadEvent event);

}  // namespace patrickstar
