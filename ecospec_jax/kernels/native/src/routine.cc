#include "routine.h"

#include <algorithm>
#include <atomic>
#include <string_view>

namespace ecospec {
namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> experts{0}, bytes{0};

const Variant& choose() {
  const char* asked = std::getenv("ECOSPEC_JAX_CPU_VARIANT");
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && (!asked || kAvx512.name == std::string_view(asked))) return kAvx512;
  if (avx2 && (!asked || kAvx2.name == std::string_view(asked))) return kAvx2;
#else
  (void)asked;
#endif
  return kBaseline;
}

// Weights of this many bytes stay in the cache while several groups of activation rows pass over them.
constexpr int64_t kCachedBytes = 1 << 18;

// What memory delivers while activations are computed and packed.
constexpr int64_t kFetchedBytes = 1 << 15;

}  // namespace

const Variant& variant() {
  static const Variant& chosen = choose();
  return chosen;
}

void count_expert() {
  if (counting.load(std::memory_order_relaxed)) experts.fetch_add(1, std::memory_order_relaxed);
}

void count_bytes(int64_t read) {
  if (counting.load(std::memory_order_relaxed)) bytes.fetch_add(read, std::memory_order_relaxed);
}

void multiply(const Matrix& matrix, const std::vector<const uint8_t*>& packed, bool rounded,
              const std::vector<float*>& out, const uint8_t* after) {
  const int64_t count = packed.size();
  const int64_t groups = (count + kMaxRows - 1) / kMaxRows;
  // With one group of rows there is nothing to come back for.
  int64_t step = groups == 1 ? matrix.rows : std::max<int64_t>(4, kCachedBytes / std::max<int64_t>(1, matrix.row_bytes()) / 4 * 4);
  for (int64_t first = 0; first < matrix.rows; first += step) {
    const int64_t last = std::min(matrix.rows, first + step);
    for (int64_t g = 0; g < groups; g++) {
      // Groups of equal size: 9 rows are 5 and 4, not 6 and 3.
      const int64_t begin = g * count / groups, end = (g + 1) * count / groups;
      // Another group will pass over the same weights, or the rows behind them come next, or another matrix.
      const uint8_t* behind = matrix.weight + last * matrix.row_bytes();
      variant().multiply(matrix, first, last, packed.data() + begin, static_cast<int>(end - begin), rounded,
                         out.data() + begin, last == matrix.rows && g == groups - 1 ? after : behind);
    }
  }
  count_bytes(matrix.bytes());
}

void fetch(const Matrix& matrix) {
  const int64_t size = std::min<int64_t>(kFetchedBytes, matrix.rows * matrix.row_bytes());
  for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(matrix.weight + line, 0, 2);
}

}  // namespace ecospec

extern "C" {

const char* ecospec_variant() { return ecospec::variant().name; }

// Starts counting from zero (on = 1) or stops (on = 0).
void ecospec_count_traffic(int on) {
  ecospec::experts = 0;
  ecospec::bytes = 0;
  ecospec::counting = on != 0;
}

void ecospec_traffic(int64_t* experts, int64_t* bytes) {
  *experts = ecospec::experts;
  *bytes = ecospec::bytes;
}
}
