// The XLA custom calls.
#include <algorithm>

#include "routine.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace ecospec {
namespace {

// A float32 or bfloat16 array.
struct Floats {
  const void* data;
  bool narrow;
  explicit Floats(const ffi::AnyBuffer& buffer)
      : data(buffer.untyped_data()), narrow(buffer.element_type() == ffi::DataType::BF16) {}
  float operator[](int64_t i) const {
    return narrow ? from_bfloat16(static_cast<const uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
  }
  const float* row(int64_t start, int64_t count, std::vector<float>& scratch) const {
    if (!narrow) return static_cast<const float*>(data) + start;
    scratch.resize(count);
    for (int64_t i = 0; i < count; i++) scratch[i] = (*this)[start + i];
    return scratch.data();
  }
};

void store(ffi::AnyBuffer& buffer, int64_t start, const float* values, int64_t count) {
  if (buffer.element_type() == ffi::DataType::BF16) {
    uint16_t* out = static_cast<uint16_t*>(buffer.untyped_data()) + start;
    for (int64_t i = 0; i < count; i++) out[i] = to_bfloat16(values[i]);
  } else {
    std::memcpy(static_cast<float*>(buffer.untyped_data()) + start, values, count * 4);
  }
}

// Matrices of a stack, of which weight and scales are buffers; `rows` and `cols` are those of one.
Matrix matrix_of(Format format, const ffi::AnyBuffer& weight, const ffi::AnyBuffer& scales, int64_t rows,
                 int64_t cols) {
  return {format, static_cast<const uint8_t*>(weight.untyped_data()),
          static_cast<const uint8_t*>(scales.untyped_data()), rows, cols};
}

// What a thread keeps for its next call, since fresh memory costs a page fault a page.
struct Workspace {
  PackedRows packed, packed_h;
  std::vector<float> row, sums, products, gate, up;
};

Workspace& workspace() {
  static thread_local Workspace kept;
  return kept;
}

ffi::Error dense(int64_t format, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                 ffi::Result<ffi::AnyBuffer> y) {
  const int64_t count = x.dimensions()[0], cols = x.dimensions()[1], rows = y->dimensions()[1];
  const Floats floats(x);
  const Matrix matrix = matrix_of(static_cast<Format>(format), weight, scales, rows, cols);
  Workspace& own = workspace();
  own.packed.reset(count, matrix.format, cols, floats.narrow);
  own.sums.resize(count * rows);
  std::vector<const uint8_t*> in(count);
  std::vector<float*> out(count);
  for (int64_t r = 0; r < count; r++) {
    own.packed.set(r, floats.row(r * cols, cols, own.row));
    in[r] = own.packed.at(r);
    out[r] = own.sums.data() + r * rows;
  }
  multiply(matrix, in, floats.narrow, out, matrix);
  store(*y, 0, own.sums.data(), count * rows);
  return ffi::Error::Success();
}

// A row of an expert's work: row of x, and the factor of its output.
struct Pair {
  int64_t row;
  float weight;
};

ffi::Error grouped_experts(int64_t format, int64_t count, int64_t ffn, bool split, bool clamped, float limit,
                           float alpha, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                           ffi::Buffer<ffi::S32> first, ffi::AnyBuffer gate_weight, ffi::AnyBuffer gate_scales,
                           ffi::AnyBuffer gate_bias, ffi::AnyBuffer up_weight, ffi::AnyBuffer up_scales,
                           ffi::AnyBuffer up_bias, ffi::AnyBuffer down_weight, ffi::AnyBuffer down_scales,
                           ffi::AnyBuffer down_bias, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t rows = x.dimensions()[0], hidden = x.dimensions()[1], k = ids.dimensions()[1];
  const int64_t base = first.typed_data()[0];
  const Format stored = static_cast<Format>(format);
  const Activation activation{clamped, limit, alpha};

  std::vector<std::vector<Pair>> pairs(count);
  std::vector<char> live(rows, 0);
  for (int64_t i = 0; i < rows * k; i++) {
    const int32_t id = ids.typed_data()[i];
    if (id < 0 || id >= count) continue;
    pairs[id].push_back({i / k, weights.typed_data()[i]});
    live[i / k] = 1;
  }

  const Floats floats(x);
  const bool rounded = floats.narrow;
  auto& [packed, packed_h, row, sums, products, gate_part, up_part] = workspace();
  packed.reset(rows, stored, hidden, rounded);
  for (int64_t r = 0; r < rows; r++)
    if (live[r]) packed.set(r, floats.row(r * hidden, hidden, row));

  const int64_t gate_rows = split ? ffn : 2 * ffn;
  const Matrix gates = matrix_of(stored, gate_weight, gate_scales, gate_rows, hidden);
  const Matrix ups = matrix_of(stored, up_weight, up_scales, ffn, hidden);
  const Matrix downs = matrix_of(stored, down_weight, down_scales, hidden, ffn);
  const Floats gate_b(gate_bias), up_b(up_bias), down_b(down_bias);
  const bool biased = gate_bias.element_count() > 0, down_biased = down_bias.element_count() > 0;

  sums.assign(rows * hidden, 0.0f);
  gate_part.resize(ffn), up_part.resize(ffn);
  std::vector<const uint8_t*> in;
  std::vector<float*> gate_out, up_out;
  std::vector<int64_t> used;
  for (int64_t e = 0; e < count; e++)
    if (!pairs[e].empty()) used.push_back(e);
  for (size_t u = 0; u < used.size(); u++) {
    const int64_t e = used[u], own = pairs[e].size(), expert = base + e;
    const Matrix down = downs.at(expert);
    const Matrix next = u + 1 < used.size() ? gates.at(base + used[u + 1]) : down;
    count_expert();
    const int64_t wide = std::max(2 * ffn, hidden);
    products.resize(own * wide);
    in.clear(), gate_out.clear(), up_out.clear();
    for (int64_t i = 0; i < own; i++) {
      in.push_back(packed.at(pairs[e][i].row));
      gate_out.push_back(products.data() + i * wide);
      up_out.push_back(products.data() + i * wide + ffn);
    }
    const Matrix gate = gates.at(expert), up = ups.at(expert);
    multiply(gate, in, rounded, gate_out, split ? up : down);
    if (split) multiply(up, in, rounded, up_out, down);
    fetch(down, own);

    packed_h.reset(own, stored, ffn, rounded);
    for (int64_t i = 0; i < own; i++) {
      float* g = split ? gate_out[i] : gate_part.data();
      float* u = split ? up_out[i] : up_part.data();
      if (!split) {
        for (int64_t f = 0; f < ffn; f++) g[f] = gate_out[i][2 * f], u[f] = gate_out[i][2 * f + 1];
      }
      if (biased) {
        for (int64_t f = 0; f < ffn; f++) {
          g[f] += split ? gate_b[expert * ffn + f] : gate_b[(expert * ffn + f) * 2];
          u[f] += split ? up_b[expert * ffn + f] : gate_b[(expert * ffn + f) * 2 + 1];
        }
      }
      variant().activate(activation, g, u, ffn);
      packed_h.set(i, g);
      in[i] = packed_h.at(i);
    }
    multiply(down, in, rounded, gate_out, next);
    for (int64_t i = 0; i < own; i++) {
      float* sum = sums.data() + pairs[e][i].row * hidden;
      const float* product = gate_out[i];
      const float weight = pairs[e][i].weight;
      if (down_biased) {
        for (int64_t d = 0; d < hidden; d++) sum[d] += weight * (product[d] + down_b[expert * hidden + d]);
      } else {
        for (int64_t d = 0; d < hidden; d++) sum[d] += weight * product[d];
      }
    }
  }
  store(*y, 0, sums.data(), rows * hidden);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ecospec

XLA_FFI_DEFINE_HANDLER_SYMBOL(ecospec_dense, ecospec::dense,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ecospec_grouped_experts, ecospec::grouped_experts,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("count")
                                  .Attr<int64_t>("ffn")
                                  .Attr<bool>("split")
                                  .Attr<bool>("clamped")
                                  .Attr<float>("limit")
                                  .Attr<float>("alpha")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
