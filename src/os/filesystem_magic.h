// Magic numbers of filesystems (statfs(2)) that <linux/magic.h> does not list, or not everywhere.
#pragma once

#include <cstdint>

namespace trunkline::os {

inline constexpr std::uint32_t kBcachefsMagic = 0xCA451A4E;
inline constexpr std::uint32_t kBeegfsMagic = 0x19830326;
inline constexpr std::uint32_t kCifsMagic = 0xFF534D42;
inline constexpr std::uint32_t kGpfsMagic = 0x47504653;
inline constexpr std::uint32_t kLustreMagic = 0x0BD00BD0;
inline constexpr std::uint32_t kSmb2Magic = 0xFE534D42;
inline constexpr std::uint32_t kZfsMagic = 0x2FC12FC1;

}  // namespace trunkline::os
