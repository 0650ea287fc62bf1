// Matrix products of a few rows, on the best instruction set of this processor.
#pragma once

#include <cstdlib>
#include <vector>

#include "matrix.h"

namespace ecospec {

// The variant for this processor, or the one that ECOSPEC_JAX_CPU_VARIANT names.
const Variant& variant();

// What the routines have read since the count was switched on (see ecospec_count_traffic).
void count_expert();
void count_bytes(int64_t bytes);

// Rows of activations, packed for one format. Used again and again, since fresh memory costs a page fault a page.
class PackedRows {
 public:
  // Makes room. `rounded`: the activations are bfloat16 numbers.
  void reset(int64_t count, Format format, int64_t cols, bool rounded) {
    format_ = format, cols_ = cols, rounded_ = rounded;
    bytes_ = (variant().packed_bytes(format, cols, rounded) + 63) / 64 * 64;
    // 64 spare bytes, since rows begin at multiples of 64.
    const size_t size = count * bytes_ + 64;
    if (storage_.size() < size) storage_.resize(size);
  }
  void set(int64_t row, const float* x) { variant().pack(format_, x, cols_, rounded_, at(row)); }
  uint8_t* at(int64_t row) {
    const auto start = reinterpret_cast<uintptr_t>(storage_.data());
    return reinterpret_cast<uint8_t*>((start + 63) / 64 * 64) + row * bytes_;
  }

 private:
  Format format_;
  int64_t cols_;
  bool rounded_;
  int64_t bytes_;
  std::vector<uint8_t> storage_;
};

// out[i] = matrix . packed[i] for any number of rows. Reads the matrix from memory once. `next`: see Variant::multiply.
void multiply(const Matrix& matrix, const std::vector<const uint8_t*>& packed, bool rounded,
              const std::vector<float*>& out, const Matrix& next);

// Asks for the first bytes of a matrix that `count` rows will be multiplied with, while other work is done.
void fetch(const Matrix& matrix, int64_t count);

}  // namespace ecospec
