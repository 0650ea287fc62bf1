// Multiplies random shapes with every variant of the routines, in buffers of exactly the size they should have. Built
// with AddressSanitizer and UBSan by test_native.py; sums are compared with a plain loop over the baseline's numbers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "routine.h"

using namespace ecospec;

namespace {

std::mt19937 random_bits(7);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_bits); }

// A buffer that ends where a sanitizer notices; `offset` bytes of it lie before the data, so that rows are unaligned.
struct Buffer {
  std::unique_ptr<uint8_t[]> bytes;
  uint8_t* data;
  Buffer(size_t size, size_t offset) : bytes(new uint8_t[size + offset]), data(bytes.get() + offset) {}
};

bool check(const Variant& variant, Format format, int64_t rows, int64_t cols, int count, bool rounded) {
  Matrix matrix{format, nullptr, nullptr, rows, cols};
  Buffer weight(rows * matrix.row_bytes(), format == Format::kFloat32 ? 4 : 2), scales(matrix.scale_bytes(), 0);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * matrix.row_bytes(); i++) weight.data[i] = draw(0, 255);
  if (format == Format::kFloat32 || format == Format::kBfloat16) {
    for (int64_t i = 0; i < rows * cols; i++) {
      const float value = normal(random_bits);
      const uint16_t narrow = to_bfloat16(value);
      if (format == Format::kFloat32) std::memcpy(weight.data + 4 * i, &value, 4);
      if (format == Format::kBfloat16) std::memcpy(weight.data + 2 * i, &narrow, 2);
    }
  }
  if (format == Format::kFp8) {
    for (int64_t i = 0; i < rows * cols; i++)
      if ((weight.data[i] & 0x7f) == 0x7f) weight.data[i] = 0;
    for (int64_t i = 0; i < matrix.scale_bytes() / 4; i++) {
      const float scale = std::abs(normal(random_bits));
      std::memcpy(scales.data + 4 * i, &scale, 4);
    }
  }
  if (format == Format::kMxfp4)
    for (int64_t i = 0; i < matrix.scale_bytes(); i++) scales.data[i] = draw(110, 135);
  matrix.weight = weight.data;
  matrix.scales = scales.data;

  // Aligned to 64 bytes, as PackedRows makes them, without room behind.
  auto run = [&](const Variant& v, const std::vector<std::vector<float>>& x, std::vector<std::vector<float>>& y) {
    const size_t size = (v.packed_bytes(format, cols, rounded) + 63) / 64 * 64;
    std::vector<uint8_t*> packed;
    std::vector<float*> out;
    for (int r = 0; r < count; r++) {
      packed.push_back(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
      v.pack(format, x[r].data(), cols, rounded, packed.back());
      y.emplace_back(rows);
      out.push_back(y.back().data());
    }
    const int64_t middle = draw(0, rows);
    const Rows upper{matrix, 0, middle}, lower{matrix, middle, rows};
    v.multiply(upper, packed.data(), count, rounded, out.data(), lower);
    v.multiply(lower, packed.data(), count, rounded, out.data(), upper);
    for (uint8_t* row : packed) std::free(row);
  };
  std::vector<std::vector<float>> x, ours, expected;
  for (int r = 0; r < count; r++) {
    x.emplace_back(cols);
    for (float& value : x.back()) value = normal(random_bits);
  }
  run(variant, x, ours);
  run(kBaseline, x, expected);
  float most = 0, off = 0;
  for (int r = 0; r < count; r++) {
    for (int64_t n = 0; n < rows; n++) {
      most = std::max(most, std::abs(expected[r][n]));
      off = std::max(off, std::abs(expected[r][n] - ours[r][n]));
    }
  }
  if (off <= 2e-5f * most) return true;
  std::printf("%s: format %d, %ld x %ld, %d rows: off by %g of %g\n", variant.name, static_cast<int>(format),
              static_cast<long>(rows), static_cast<long>(cols), count, off, most);
  return false;
}

}  // namespace

int main() {
  std::vector<const Variant*> variants = {&kBaseline};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) variants.push_back(&kAvx2);
  if (variant().name == kAvx512.name) variants.push_back(&kAvx512);
#endif
  bool good = true;
  int cases = 0;
  for (const Variant* v : variants) {
    for (int format = 0; format < 4; format++) {
      for (int i = 0; i < 60; i++) {
        const Format stored = static_cast<Format>(format);
        const int64_t cols = stored == Format::kMxfp4 ? 32 * draw(1, 18) : draw(1, 600);
        good &= check(*v, stored, draw(1, 300), cols, static_cast<int>(draw(1, kMaxRows)), draw(0, 1));
        cases++;
      }
    }
    float gate[37], up[37];
    for (int i = 0; i < 37; i++) gate[i] = 10.0f * (i - 18), up[i] = i;
    v->activate({true, 7.0f, 1.702f}, gate, up, 37);
  }
  std::printf("%d cases, %zu variants\n", cases, variants.size());
  return good ? 0 : 1;
}
