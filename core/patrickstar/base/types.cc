// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/types.h"

namespace patrickstar {

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kParam:
      return "parameter";
    case Kind::kComputeCopy:
      return "compute copy";
    case Kind::kGrad:
      return "gradient";
    case Kind::kState:
      return "optimizer state";
  }
  return "unknown kind";
}

const char* TierName(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kDisk:
      return "disk";
  }
  return "unknown tier";
}

}  // namespace patrickstar
