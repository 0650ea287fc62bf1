// What a weight matrix is, and the routines an instruction set offers for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ecospec {

enum class Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kMxfp4 = 2, kFp8 = 3 };

constexpr int64_t kMxfp4Block = 32;
constexpr int64_t kFp8Block = 128;
// Activation rows that one call of Variant::multiply takes.
constexpr int kMaxRows = 6;

// One [rows, cols] matrix, contraction dimension last, as checkpoints store it.
struct Matrix {
  Format format;
  const uint8_t* weight;
  const uint8_t* scales;  // mxfp4: one exponent a block of 32; fp8: one float a 128 x 128 block; else null
  int64_t rows, cols;

  int64_t row_bytes() const {
    switch (format) {
      case Format::kFloat32: return cols * 4;
      case Format::kBfloat16: return cols * 2;
      case Format::kMxfp4: return cols / 2;
      case Format::kFp8: return cols;
    }
    return 0;
  }
  int64_t scale_bytes() const {
    switch (format) {
      case Format::kMxfp4: return rows * (cols / kMxfp4Block);
      case Format::kFp8: return ((rows + kFp8Block - 1) / kFp8Block) * ((cols + kFp8Block - 1) / kFp8Block) * 4;
      default: return 0;
    }
  }
  int64_t bytes() const { return rows * row_bytes() + scale_bytes(); }
  // The same matrix `index` places further in a stack of matrices.
  Matrix at(int64_t index) const {
    Matrix other = *this;
    other.weight += index * rows * row_bytes();
    if (other.scales) other.scales += index * scale_bytes();
    return other;
  }
};

// Rows first .. last of a matrix. They can be read as several streams, each a share of them in order.
constexpr int kStreams = 4;

struct Rows {
  Matrix matrix;
  int64_t first, last;

  // The first row of a stream, or of the one behind it if there are not enough rows.
  int64_t begin(int stream) const { return first + stream * (last - first) / kStreams; }
  // Rows of the longest stream.
  int64_t share() const { return (last - first + kStreams - 1) / kStreams; }
  const uint8_t* start(int stream) const { return matrix.weight + begin(stream) * matrix.row_bytes(); }
};

// What lies between an expert's projections (ecospec_jax/kernels/grouped_experts/activations.py).
struct Activation {
  bool clamped;
  float limit, alpha;
};

// Routines compiled for one instruction set.
//
// The arithmetic of a row does not depend on how many rows are multiplied together: plain decoding and a verification
// of several rows give the same bits.
struct Variant {
  const char* name;
  // Bytes of one packed activation row.
  size_t (*packed_bytes)(Format format, int64_t cols, bool rounded);
  // Packs a row the way `multiply` reads it. With `rounded` the row is taken as bfloat16.
  void (*pack)(Format format, const float* x, int64_t cols, bool rounded, uint8_t* packed);
  // out[r][n] = row n of the matrix . x[r], for count <= kMaxRows packed rows. `next` will be read next, and may be
  // asked for ahead of its time.
  void (*multiply)(const Rows& rows, const uint8_t* const* packed, int count, bool rounded, float* const* out,
                   const Rows& next);
  // gate[i] = activation(gate[i], up[i]).
  void (*activate)(const Activation& activation, float* gate, const float* up, int64_t count);
};

extern const Variant kBaseline;
#if defined(__x86_64__)
extern const Variant kAvx2;
extern const Variant kAvx512;
#endif

// Static, since files for different instruction sets include this: the linker must not merge their copies.
static inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// To nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace ecospec
