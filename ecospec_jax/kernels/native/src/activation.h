// Gated activations, written so that the compiler turns them into vector instructions. Included once by each file that
// compiles for an instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace ecospec {
namespace {

// e^x to about one unit in the last place, between 2^-126 and 2^127: e^r by a polynomial (Remez, |r| <= ln(2) / 2)
// times a power of two.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;  // NaN stays NaN
  // Adding and taking away 1.5 * 2^23 rounds to an integer.
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

void activate(const Activation& activation, float* gate, const float* up, int64_t count) {
  if (!activation.clamped) {
    for (int64_t i = 0; i < count; i++) gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    return;
  }
  const float limit = activation.limit, alpha = activation.alpha;
  for (int64_t i = 0; i < count; i++) {
    const float g = gate[i] > limit ? limit : gate[i];
    const float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    gate[i] = g / (1 + exponential(-alpha * g)) * (u + 1);
  }
}

}  // namespace
}  // namespace ecospec
