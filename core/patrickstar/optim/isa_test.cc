// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/optim/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

bool IsAvailable(Isa isa) { return std::ranges::count(AvailableIsas(), isa) == 1; }

TEST(Isa, ScalarIsAlwaysThere) { EXPECT_EQ(AvailableIsas().front(), Isa::kScalar); }

TEST(Isa, WithoutASettingTheFastestIsChosen) {
  EXPECT_EQ(ChooseIsa(nullptr), AvailableIsas().back());
  EXPECT_EQ(ChooseIsa(""), AvailableIsas().back());
}

TEST(Isa, ASettingForcesWhatTheMachineHasAndNothingElse) {
  for (const Isa isa : kAll) {
    const std::string name(IsaName(isa));
    if (IsAvailable(isa)) {
      EXPECT_EQ(ChooseIsa(name.c_str()), isa);
    } else {
      EXPECT_THROW(ChooseIsa(name.c_str()), InvalidArgument) << name;
    }
  }
}

TEST(Isa, AnUnknownWordIsRefusedWithTheWordsThatArePossible) {
  try {
    ChooseIsa("sse9");
    FAIL() << "expected InvalidArgument";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("PATRICKSTAR_ISA=sse9"), std::string::npos) << message;
    for (const Isa isa : AvailableIsas()) {
      EXPECT_NE(message.find(IsaName(isa)), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace patrickstar
