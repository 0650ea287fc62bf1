// x86-64 with AVX-512 BF16 and VBMI (Zen 4, Sapphire Rapids and newer).
//
// Everything but float32 is multiplied by vdpbf16ps: all stored numbers are exact in bfloat16, so only the activations
// need care. Those in bfloat16 are exact too; those in float32 are split into three bfloat16 parts, which hold all 24
// bits. Widening to float32 instead would need twice the instructions, more than memory leaves time for.
#include <immintrin.h>

#include <algorithm>

#include "activation.h"
#include "matrix.h"

namespace ecospec {
namespace {

constexpr int kParts = 3;

inline __m512bh words(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// Sums of the lanes of four registers.
inline __m128 reduce4(__m512 a, __m512 b, __m512 c, __m512 d) {
  auto half = [](__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); };
  __m256 ab = _mm256_hadd_ps(half(a), half(b)), cd = _mm256_hadd_ps(half(c), half(d));
  __m256 all = _mm256_hadd_ps(ab, cd);
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// Each format names its group of columns, and how many bytes ahead of the multiplication it asks for the weights of a
// stream and for their scales (measured). `add` multiplies one group of a weight row of each stream with R activation
// rows of P parts each; `left` is how many of the group's columns exist. The loops over R have to be unrolled, or the
// sums are not kept in registers.

struct Float32 {
  static constexpr int64_t kGroup = 16, kGroupBytes = 64;
  static constexpr int64_t kAheadBytes = 1280, kAheadScales = 0;
  struct Row {
    const float* weight;
  };
  static Row row(const Matrix& m, int64_t n) { return {reinterpret_cast<const float*>(m.weight) + n * m.cols}; }
  template <int R, int P>
  static void add(const Row* rows, int64_t group, int64_t left, const uint8_t* const* x, __m512 (*sums)[R]) {
    const __mmask16 mask = left >= kGroup ? 0xffff : (1u << left) - 1;
    __m512 w[kStreams];
    for (int i = 0; i < kStreams; i++) w[i] = _mm512_maskz_loadu_ps(mask, rows[i].weight + group * kGroup);
#pragma GCC unroll kMaxRows
    for (int r = 0; r < R; r++) {
      const __m512 own = _mm512_load_ps(x[r] + group * 64);
      for (int i = 0; i < kStreams; i++) sums[i][r] = _mm512_fmadd_ps(w[i], own, sums[i][r]);
    }
  }
};

struct Bfloat16 {
  static constexpr int64_t kGroup = 32, kGroupBytes = 64;
  static constexpr int64_t kAheadBytes = 1024, kAheadScales = 0;
  using Words = uint16_t;
  struct Row {
    const uint16_t* weight;
    int64_t groups;
  };
  static Row row(const Matrix& m, int64_t n) {
    return {reinterpret_cast<const uint16_t*>(m.weight) + n * m.cols, (m.cols + kGroup - 1) / kGroup};
  }
  template <int R, int P>
  static void add(const Row* rows, int64_t group, int64_t left, const uint8_t* const* x, __m512 (*sums)[R]) {
    const __mmask32 mask = left >= kGroup ? 0xffffffff : (1u << left) - 1;
    __m512i w[kStreams];
    for (int i = 0; i < kStreams; i++) w[i] = _mm512_maskz_loadu_epi16(mask, rows[i].weight + group * kGroup);
#pragma GCC unroll kMaxRows
    for (int r = 0; r < R; r++) {
      for (int p = 0; p < P; p++) {
        const __m512i own = _mm512_load_si512(x[r] + (p * rows[0].groups + group) * 64);
        for (int i = 0; i < kStreams; i++) sums[i][r] = _mm512_dpbf16_ps(sums[i][r], words(w[i]), words(own));
      }
    }
  }
};

// sums += scale * dot product, for a group of 128 columns in four vectors.
template <class F, int R, int P>
inline void add_scaled(const typename F::Row* rows, const __m512i (*w)[4], const __m512* scale, int64_t group,
                       const uint8_t* const* x, __m512 (*sums)[R]) {
#pragma GCC unroll kMaxRows
  for (int r = 0; r < R; r++) {
    __m512 block[kStreams];
    for (auto& sum : block) sum = _mm512_setzero_ps();
    for (int p = 0; p < P; p++) {
      const uint8_t* part = x[r] + (p * rows[0].groups + group) * 256;
      for (int j = 0; j < 4; j++) {
        const __m512i own = _mm512_load_si512(part + 64 * j);
        for (int i = 0; i < kStreams; i++) block[i] = _mm512_dpbf16_ps(block[i], words(w[i][j]), words(own));
      }
    }
    for (int i = 0; i < kStreams; i++) sums[i][r] = _mm512_fmadd_ps(block[i], scale[i], sums[i][r]);
  }
}

// Four blocks of 32 in 64 bytes. Word w holds the codes of columns 4w .. 4w+3, so vector j of the activations holds
// every fourth column from j; a 32-bit lane then stays within one block.
struct Mxfp4 {
  static constexpr int64_t kGroup = 128, kGroupBytes = 64;
  static constexpr int64_t kAheadBytes = 2304, kAheadScales = 256;
  using Words = uint64_t;
  struct Row {
    const uint8_t *weight, *scales;
    int64_t groups;
  };
  static Row row(const Matrix& m, int64_t n) {
    return {m.weight + n * (m.cols / 2), m.scales + n * (m.cols / kMxfp4Block), (m.cols + kGroup - 1) / kGroup};
  }
  template <int R, int P>
  static void add(const Row* rows, int64_t group, int64_t left, const uint8_t* const* x, __m512 (*sums)[R]) {
    // The sixteen E2M1 codes as bfloat16, twice: the lookup takes five bits, of which the fifth is a neighbour's.
    const __m512i table = _mm512_set_epi64(
        0xc0c0c080c040c000, 0xbfc0bf80bf008000, 0x40c0408040404000, 0x3fc03f803f000000, 0xc0c0c080c040c000,
        0xbfc0bf80bf008000, 0x40c0408040404000, 0x3fc03f803f000000);
    // Rotations that bring the scale of a lane's block to the place of a float's exponent.
    const __m512i turns = _mm512_set_epi32(31, 31, 31, 31, 7, 7, 7, 7, 15, 15, 15, 15, 23, 23, 23, 23);
    __m512i w[kStreams][4];
    __m512 scale[kStreams];
    for (int i = 0; i < kStreams; i++) {
      const uint8_t* bytes = rows[i].weight + group * 64;
      __m512i codes;
      int32_t exponents = 0;
      if (left >= kGroup) {
        codes = _mm512_loadu_si512(bytes);
        std::memcpy(&exponents, rows[i].scales + group * 4, 4);
      } else {
        codes = _mm512_maskz_loadu_epi8((1ull << left / 2) - 1, bytes);
        std::memcpy(&exponents, rows[i].scales + group * 4, left / kMxfp4Block);
      }
      w[i][0] = _mm512_permutexvar_epi16(codes, table);
      w[i][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
      w[i][2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
      w[i][3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
      scale[i] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_rolv_epi32(_mm512_set1_epi32(exponents), turns),
                                                      _mm512_set1_epi32(0x7f800000)));
    }
    add_scaled<Mxfp4, R, P>(rows, w, scale, group, x, sums);
  }
};

// The low and the high bytes of the bfloat16 values of the e4m3 codes 0 .. 127. Made by the compiler: code that runs
// when the library is loaded must not use this file's instructions.
struct E4m3Table {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr E4m3Table() {
    for (int code = 0; code < 127; code++) {
      int exponent = (code >> 3) + 120, mantissa = (code & 7) << 4;
      if (code < 8) {  // subnormal: code * 2^-9
        const int shift = code >= 4 ? 0 : code >= 2 ? 1 : 2;
        exponent = code ? 120 - shift : 0;
        mantissa = (code << shift & 3) << 5;
      }
      const int bits = exponent << 7 | mantissa;
      low[code] = bits & 0xff;
      high[code] = bits >> 8;
    }
    low[127] = 0xc0, high[127] = 0x7f;  // NaN
  }
};
constexpr E4m3Table kE4m3;

// A scale block of 128 columns; each 64 codes are widened to their even and their odd columns.
struct Fp8 {
  static constexpr int64_t kGroup = 128, kGroupBytes = 128;
  static constexpr int64_t kAheadBytes = 2304, kAheadScales = 0;
  using Words = uint32_t;
  struct Row {
    const uint8_t* weight;
    const float* scales;
    int64_t groups;
  };
  static Row row(const Matrix& m, int64_t n) {
    const int64_t groups = (m.cols + kGroup - 1) / kGroup;
    return {m.weight + n * m.cols, reinterpret_cast<const float*>(m.scales) + n / kFp8Block * groups, groups};
  }
  template <int R, int P>
  static void add(const Row* rows, int64_t group, int64_t left, const uint8_t* const* x, __m512 (*sums)[R]) {
    __m512i w[kStreams][4];
    __m512 scale[kStreams];
    for (int i = 0; i < kStreams; i++) {
      for (int half = 0; half < 2; half++) {
        const int64_t here = std::clamp<int64_t>(left - 64 * half, 0, 64);
        const __mmask64 mask = here == 64 ? ~0ull : (1ull << here) - 1;
        const __m512i codes = _mm512_maskz_loadu_epi8(mask, rows[i].weight + group * kGroup + 64 * half);
        const __m512i low =
            _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.low), codes, _mm512_load_si512(kE4m3.low + 64));
        __m512i high =
            _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.high), codes, _mm512_load_si512(kE4m3.high + 64));
        // high | codes & 0x80: the sign
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
        const __m512i low_byte = _mm512_set1_epi16(0xff);
        // select low_byte ? first : second
        w[i][2 * half] = _mm512_ternarylogic_epi32(low_byte, low, _mm512_slli_epi16(high, 8), 0xca);
        w[i][2 * half + 1] = _mm512_ternarylogic_epi32(low_byte, _mm512_srli_epi16(low, 8), high, 0xca);
      }
      scale[i] = _mm512_set1_ps(rows[i].scales[group]);
    }
    add_scaled<Fp8, R, P>(rows, w, scale, group, x, sums);
  }
};

inline void fetch(const void* from) { _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0); }

// Multiplies one row of each stream after the other: the streams are far apart, and each is in the order of memory.
template <class F, int R, int P>
void multiply_rows(const Rows& all, const uint8_t* const* x, float* const* out, const Rows& next) {
  const Matrix m = all.matrix;
  const int64_t whole = m.cols / F::kGroup, rest = m.cols % F::kGroup, row_bytes = m.row_bytes(), share = all.share();
  int64_t index[kStreams], jump[kStreams];
  for (int i = 0; i < kStreams; i++) {
    index[i] = all.begin(i);
    jump[i] = next.start(i) - all.start(i) - share * row_bytes;
    // The first access to a page waits for the translation of its address as well, so it is made early.
    fetch(next.start(i));
    if constexpr (F::kAheadScales > 0) {
      const uint8_t* scales = F::row(next.matrix, next.begin(i)).scales;
      for (int64_t line = 0; line < F::kAheadScales; line += 64) fetch(scales + line);
    }
  }
  for (int64_t n = 0; n < share; n++) {
    __m512 sums[kStreams][R] = {};
    typename F::Row rows[kStreams];
    const uint8_t* ahead[kStreams];
    const bool beyond = (share - n) * row_bytes <= F::kAheadBytes;
    for (int i = 0; i < kStreams; i++) {
      rows[i] = F::row(m, index[i]);
      ahead[i] = reinterpret_cast<const uint8_t*>(rows[i].weight) + F::kAheadBytes + (beyond ? jump[i] : 0);
      if constexpr (F::kAheadScales > 0) fetch(rows[i].scales + F::kAheadScales);
    }
    for (int64_t g = 0; g < whole; g++) {
      for (int i = 0; i < kStreams; i++)
        for (int64_t line = 0; line < F::kGroupBytes; line += 64) fetch(ahead[i] + g * F::kGroupBytes + line);
      F::template add<R, P>(rows, g, F::kGroup, x, sums);
    }
    if (rest) F::template add<R, P>(rows, whole, rest, x, sums);
    float totals[R][kStreams];
#pragma GCC unroll kMaxRows
    for (int r = 0; r < R; r++) _mm_storeu_ps(totals[r], reduce4(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
    for (int i = 0; i < kStreams; i++) {
      for (int r = 0; r < R; r++) out[r][index[i]] = totals[r][i];
      if (index[i] + 1 < all.begin(i + 1)) index[i]++;
    }
  }
}

template <class F, int P>
void multiply_count(const Rows& rows, const uint8_t* const* x, int count, float* const* out, const Rows& next) {
  switch (count) {
    case 1: return multiply_rows<F, 1, P>(rows, x, out, next);
    case 2: return multiply_rows<F, 2, P>(rows, x, out, next);
    case 3: return multiply_rows<F, 3, P>(rows, x, out, next);
    case 4: return multiply_rows<F, 4, P>(rows, x, out, next);
    case 5: return multiply_rows<F, 5, P>(rows, x, out, next);
    case 6: return multiply_rows<F, 6, P>(rows, x, out, next);
  }
}

template <class F>
void multiply_parts(const Rows& rows, const uint8_t* const* x, int count, bool rounded, float* const* out,
                    const Rows& next) {
  if (rounded) return multiply_count<F, 1>(rows, x, count, out, next);
  multiply_count<F, kParts>(rows, x, count, out, next);
}

void multiply(const Rows& rows, const uint8_t* const* x, int count, bool rounded, float* const* out,
              const Rows& next) {
  switch (rows.matrix.format) {
    case Format::kFloat32: return multiply_count<Float32, 1>(rows, x, count, out, next);
    case Format::kBfloat16: return multiply_parts<Bfloat16>(rows, x, count, rounded, out, next);
    case Format::kMxfp4: return multiply_parts<Mxfp4>(rows, x, count, rounded, out, next);
    case Format::kFp8: return multiply_parts<Fp8>(rows, x, count, rounded, out, next);
  }
}

// Vectors of 64 bytes that hold one part of a row.
template <class F>
int64_t vectors_of(int64_t cols) {
  return (cols + F::kGroup - 1) / F::kGroup * (F::kGroup / 32);
}

template <class F>
void pack_words(const float* x, int64_t cols, bool rounded, uint8_t* packed) {
  const int64_t vectors = vectors_of<F>(cols);
  using Words = typename F::Words;
  constexpr int64_t kMixed = sizeof(Words) / 2, kColumns = 32 * kMixed;
  uint16_t* parts = reinterpret_cast<uint16_t*>(packed);
  for (int64_t start = 0; start < vectors * 32; start += kColumns) {
    float rest[kColumns] = {};
    if (start < cols) std::memcpy(rest, x + start, std::min(kColumns, cols - start) * 4);
    for (int p = 0; p < (rounded ? 1 : kParts); p++) {
      // In two loops, of which the compiler makes vector instructions: rounding in order, then the order of the words.
      uint16_t part[kColumns];
      for (int64_t i = 0; i < kColumns; i++) {
        part[i] = to_bfloat16(rest[i]);
        rest[i] -= from_bfloat16(part[i]);
      }
      Words words[32];
      std::memcpy(words, part, sizeof(part));
      uint16_t* out = parts + p * vectors * 32 + start;
      for (int64_t v = 0; v < kMixed; v++)
        for (int64_t word = 0; word < 32; word++) out[v * 32 + word] = static_cast<uint16_t>(words[word] >> 16 * v);
    }
  }
}

size_t packed_bytes(Format format, int64_t cols, bool rounded) {
  const int64_t part_bytes = 64 * (rounded ? 1 : kParts);
  switch (format) {
    case Format::kFloat32: return (cols + 15) / 16 * 64;
    case Format::kBfloat16: return vectors_of<Bfloat16>(cols) * part_bytes;
    case Format::kMxfp4: return vectors_of<Mxfp4>(cols) * part_bytes;
    case Format::kFp8: return vectors_of<Fp8>(cols) * part_bytes;
  }
  return 0;
}

void pack(Format format, const float* x, int64_t cols, bool rounded, uint8_t* packed) {
  switch (format) {
    case Format::kFloat32: {
      float* out = reinterpret_cast<float*>(packed);
      for (int64_t i = 0; i < cols; i++) out[i] = rounded ? from_bfloat16(to_bfloat16(x[i])) : x[i];
      std::memset(out + cols, 0, packed_bytes(format, cols, rounded) - cols * 4);
      return;
    }
    case Format::kBfloat16: return pack_words<Bfloat16>(x, cols, rounded, packed);
    case Format::kMxfp4: return pack_words<Mxfp4>(x, cols, rounded, packed);
    case Format::kFp8: return pack_words<Fp8>(x, cols, rounded, packed);
  }
}

}  // namespace

const Variant kAvx512 = {"avx512", packed_bytes, pack, multiply, activate};

}  // namespace ecospec
