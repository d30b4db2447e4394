// What traces show of streaming.
#pragma once

#include "base/trace.h"

namespace trunkline {

inline constexpr trace::Kind kReadUnit{"read a unit ahead", trace::Category::stream,
                                       trace::Kind::Fields::bytes};
inline constexpr trace::Kind kUploadUnit{"upload a unit", trace::Category::copy, trace::Kind::Fields::bytes};
inline constexpr trace::Kind kUnitWait{"wait for a unit", trace::Category::wait};
inline constexpr trace::Kind kCheckUnit{"checksum of a unit", trace::Category::checksum,
                                        trace::Kind::Fields::bytes};

}  // namespace trunkline
