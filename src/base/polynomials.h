// Arithmetic of polynomials over GF(2) modulo the checksums' polynomials.
#pragma once

#include <cstdint>

namespace trunkline {

// Polynomials of degree below 32, reflected: the highest bit is the coefficient of x^0.
inline constexpr std::uint32_t kOne = 1U << 31;
inline constexpr std::uint32_t kCastagnoli = 0x82F63B78;  // CRC-32C
inline constexpr std::uint32_t kIsoHdlc = 0xEDB88320;     // CRC-32 of zip

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b, std::uint32_t modulus) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & kOne) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? modulus : 0);
  }
  return product;
}

// (x^base)^exponent, base below 32.
constexpr std::uint32_t power_of_x(unsigned base, std::uint64_t exponent, std::uint32_t modulus) {
  std::uint32_t power = kOne;
  for (std::uint32_t square = kOne >> base; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power = multiply(power, square, modulus);
    square = multiply(square, square, modulus);
  }
  return power;
}

}  // namespace trunkline
