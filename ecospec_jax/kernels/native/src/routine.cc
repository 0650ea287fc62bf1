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

// Of each stream: what memory delivers while activations are computed and packed.
constexpr int64_t kFetchedBytes = 1 << 13;

int64_t groups_of(int64_t count) { return (count + kMaxRows - 1) / kMaxRows; }

// The part of a matrix that begins at row `first`.
Rows part(const Matrix& matrix, int64_t first, int64_t count) {
  // With one group of rows there is nothing to come back for.
  const int64_t cached = std::max<int64_t>(4, kCachedBytes / std::max<int64_t>(1, matrix.row_bytes()) / 4 * 4);
  return {matrix, first, groups_of(count) == 1 ? matrix.rows : std::min(matrix.rows, first + cached)};
}

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
              const std::vector<float*>& out, const Matrix& next) {
  const int64_t count = packed.size(), groups = groups_of(count);
  for (int64_t first = 0; first < matrix.rows;) {
    const Rows rows = part(matrix, first, count);
    const Rows behind = rows.last < matrix.rows ? part(matrix, rows.last, count) : part(next, 0, count);
    for (int64_t g = 0; g < groups; g++) {
      // Groups of equal size: 9 rows are 5 and 4, not 6 and 3.
      const int64_t begin = g * count / groups, end = (g + 1) * count / groups;
      variant().multiply(rows, packed.data() + begin, static_cast<int>(end - begin), rounded, out.data() + begin,
                         g == groups - 1 ? behind : rows);
    }
    first = rows.last;
  }
  count_bytes(matrix.bytes());
}

void fetch(const Matrix& matrix, int64_t count) {
  const Rows rows = part(matrix, 0, count);
  const int64_t size = std::min(kFetchedBytes, rows.share() * matrix.row_bytes());
  for (int64_t line = 0; line < size; line += 64)
    for (int stream = 0; stream < kStreams; stream++) __builtin_prefetch(rows.start(stream) + line, 0, 2);
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
