// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/payload.h"

#include <array>

namespace patrickstar {
namespace {

struct Transition {
  PayloadState from;
  PayloadEvent event;
  PayloadState to;
};

using S = PayloadState;
using E = PayloadEvent;

constexpr std::array kTransitions = {
    Transition{S::kNone, E::kReserve, S::kLoading},
    Transition{S::kLoading, E::kLoaded, S::kReady},
    Transition{S::kLoading, E::kLoadFailed, S::kFailed},
    Transition{S::kLoading, E::kCancel, S::kNone},
    Transition{S::kReady, E::kAttach, S::kAttached},
    Transition{S::kReady, E::kSave, S::kSaving},
    Transition{S::kReady, E::kDrop, S::kNone},
    Transition{S::kReady, E::kDiscard, S::kNone},
    Transition{S::kAttached, E::kDetach, S::kReady},
    Transition{S::kAttached, E::kDiscard, S::kNone},
    Transition{S::kSaving, E::kSaved, S::kNone},
    Transition{S::kSaving, E::kKeep, S::kReady},
    Transition{S::kSaving, E::kDiscard, S::kNone},
    Transition{S::kFailed, E::kReport, S::kNone},
};

}  // namespace

std::optional<PayloadState> NextState(PayloadState state, PayloadEvent event) {
  for (const Transition& transition : kTransitions) {
    if (transition.from == state && transition.event == event) return transition.to;
  }
  return std::nullopt;
}

const char* PayloadStateName(PayloadState state) {
  constexpr std::array kNames = {"None", "Loading", "Ready", "Attached", "Saving", "Failed"};
  return kNames[static_cast<size_t>(state)];
}

const char* PayloadEventName(PayloadEvent event) {
  constexpr std::array kNames = {"Reserve", "Loaded", "LoadFailed", "Cancel", "Attach",  "Detach",
                                 "Save",    "Saved",  "Keep",       "Drop",   "Discard", "Report"};
  return kNames[static_cast<size_t>(event)];
}

}  // namespace patrickstar
