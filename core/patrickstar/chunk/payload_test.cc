// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/payload.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

namespace patrickstar {
namespace {

// Written out by hand, one cell per state and event, so that a slip in the table of
// the product does not slip in here too.
TEST(PayloadState, EveryStateAndEventPairIsDecided) {
  const std::map<std::pair<std::string, std::string>, std::string> legal = {
      {{"None", "Reserve"}, "Loading"},      {{"Loading", "Loaded"}, "Ready"},
      {{"Loading", "LoadFailed"}, "Failed"}, {{"Loading", "Cancel"}, "None"},
      {{"Ready", "Attach"}, "Attached"},     {{"Ready", "Save"}, "Saving"},
      {{"Ready", "Drop"}, "None"},           {{"Ready", "Discard"}, "None"},
      {{"Attached", "Detach"}, "Ready"},     {{"Attached", "Discard"}, "None"},
      {{"Saving", "Saved"}, "None"},         {{"Saving", "Keep"}, "Ready"},
      {{"Saving", "Discard"}, "None"},       {{"Failed", "Report"}, "None"},
  };
  int num_legal = 0;
  for (int state = 0; state < kNumPayloadStates; ++state) {
    for (int event = 0; event < kNumPayloadEvents; ++event) {
      const auto from = static_cast<PayloadState>(state);
      const auto what = static_cast<PayloadEvent>(event);
      const auto expected = legal.find({PayloadStateName(from), PayloadEventName(what)});
      const auto next = NextState(from, what);
      ASSERT_EQ(next.has_value(), expected != legal.end())
          << PayloadStateName(from) << " + " << PayloadEventName(what);
      if (!next) continue;
      EXPECT_EQ(PayloadStateName(*next), expected->second);
      ++num_legal;
    }
  }
  EXPECT_EQ(num_legal, 14);
}

}  // namespace
}  // namespace patrickstar
