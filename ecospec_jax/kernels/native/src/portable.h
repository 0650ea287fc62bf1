// The routines in plain C++ with the compiler's vectors, for any instruction set: tiles of weights are widened to
// float32 in the cache, then multiplied. Included once by each file that compiles it for an instruction set.
#include <algorithm>

#include "activation.h"
#include "matrix.h"

namespace ecospec {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kTile = 512;  // columns widened at a time
constexpr int kWeightRows = 4;
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4)));

const float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

inline float from_e4m3(uint8_t code) {
  const uint32_t exponent = code >> 3 & 0xf, mantissa = code & 7;
  float value;
  if ((code & 0x7f) == 0x7f) {
    value = __builtin_nanf("");
  } else if (exponent == 0) {  // not by way of a subnormal float, which may count as zero
    value = mantissa * 0x1p-9f;
  } else {
    const uint32_t bits = (exponent + 120) << 23 | mantissa << 20;
    std::memcpy(&value, &bits, 4);
  }
  return code & 0x80 ? -value : value;
}

struct E4m3 {
  float value[256];
  E4m3() {
    for (int code = 0; code < 256; code++) value[code] = from_e4m3(code);
  }
};

inline const float* e4m3() {
  static const E4m3 table;
  return table.value;
}

// Columns [start, start + count) of a row, widened.
void widen(const Matrix& m, int64_t row, int64_t start, int64_t count, float* out) {
  switch (m.format) {
    case Format::kFloat32:
      std::memcpy(out, m.weight + (row * m.cols + start) * 4, count * 4);
      return;
    case Format::kBfloat16: {
      const uint8_t* weight = m.weight + (row * m.cols + start) * 2;
      for (int64_t i = 0; i < count; i++) {
        uint16_t bits;
        std::memcpy(&bits, weight + 2 * i, 2);
        out[i] = from_bfloat16(bits);
      }
      return;
    }
    case Format::kMxfp4: {
      const uint8_t* codes = m.weight + (row * m.cols + start) / 2;
      const uint8_t* scales = m.scales + (row * m.cols + start) / kMxfp4Block;
      for (int64_t block = 0; block < count / kMxfp4Block; block++) {
        const uint32_t bits = static_cast<uint32_t>(scales[block]) << 23;
        float scale;
        std::memcpy(&scale, &bits, 4);
        for (int64_t i = 0; i < kMxfp4Block / 2; i++) {
          const uint8_t code = codes[block * kMxfp4Block / 2 + i];
          out[block * kMxfp4Block + 2 * i] = kE2m1[code & 0xf] * scale;
          out[block * kMxfp4Block + 2 * i + 1] = kE2m1[code >> 4] * scale;
        }
      }
      return;
    }
    case Format::kFp8: {
      const uint8_t* codes = m.weight + row * m.cols + start;
      const uint8_t* scales = m.scales + row / kFp8Block * ((m.cols + kFp8Block - 1) / kFp8Block) * 4;
      const float* table = e4m3();
      for (int64_t i = 0; i < count; i++) {
        float scale;
        std::memcpy(&scale, scales + (start + i) / kFp8Block * 4, 4);
        out[i] = table[codes[i]] * scale;
      }
      return;
    }
  }
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

template <int R>
void multiply_rows(const Rows& all, const uint8_t* const* packed, float* const* out) {
  const auto& [m, first, last] = all;
  alignas(64) float tile[kWeightRows][kTile];
  for (int64_t n = first; n < last; n += kWeightRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kWeightRows, last - n));
    Lanes sums[kWeightRows][R] = {};
    for (int64_t start = 0; start < m.cols; start += kTile) {
      const int64_t count = std::min(kTile, m.cols - start), padded = (count + kLanes - 1) / kLanes * kLanes;
      for (int i = 0; i < kWeightRows; i++) {
        widen(m, n + std::min(i, rows - 1), start, count, tile[i]);
        std::fill(tile[i] + count, tile[i] + padded, 0.0f);
      }
      for (int64_t c = 0; c < padded; c += kLanes) {
        Lanes x[R];
        for (int r = 0; r < R; r++) x[r] = load(reinterpret_cast<const float*>(packed[r]) + start + c);
        for (int i = 0; i < kWeightRows; i++) {
          const Lanes w = load(tile[i] + c);
          for (int r = 0; r < R; r++) sums[i][r] += w * x[r];
        }
      }
    }
    for (int i = 0; i < rows; i++) {
      for (int r = 0; r < R; r++) {
        float sum = 0;
        for (int lane = 0; lane < kLanes; lane++) sum += sums[i][r][lane];
        out[r][n + i] = sum;
      }
    }
  }
}

void multiply(const Rows& rows, const uint8_t* const* packed, int count, bool, float* const* out, const Rows&) {
  switch (count) {
    case 1: return multiply_rows<1>(rows, packed, out);
    case 2: return multiply_rows<2>(rows, packed, out);
    case 3: return multiply_rows<3>(rows, packed, out);
    case 4: return multiply_rows<4>(rows, packed, out);
    case 5: return multiply_rows<5>(rows, packed, out);
    case 6: return multiply_rows<6>(rows, packed, out);
  }
}

size_t packed_bytes(Format, int64_t cols, bool) { return (cols + kLanes - 1) / kLanes * kLanes * 4; }

void pack(Format, const float* x, int64_t cols, bool rounded, uint8_t* packed) {
  float* out = reinterpret_cast<float*>(packed);
  for (int64_t i = 0; i < cols; i++) out[i] = rounded ? from_bfloat16(to_bfloat16(x[i])) : x[i];
  std::fill(out + cols, out + packed_bytes(Format::kFloat32, cols, rounded) / 4, 0.0f);
}

}  // namespace
}  // namespace ecospec
