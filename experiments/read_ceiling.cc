// How fast one thread can read memory: nothing is done with the numbers but what keeps the loads.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

volatile uint64_t sink;

template <bool kPrefetch>
void read_lines(const char* data, size_t lines, size_t ahead) {
  Line sums[4] = {};
  for (size_t i = 0; i + 4 <= lines; i += 4) {
    for (size_t j = 0; j < 4; j++) {
      const char* at = data + (i + j) * sizeof(Line);
      if (kPrefetch) __builtin_prefetch(at + ahead);
      Line line;
      std::memcpy(&line, at, sizeof(Line));
      sums[j] ^= line;
    }
  }
  Line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  sink = all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

}  // namespace

// Seconds that reading takes; with `ahead` bytes of prefetching, or without any if that is 0.
extern "C" double read_seconds(const char* data, size_t bytes, size_t ahead) {
  const auto started = std::chrono::steady_clock::now();
  if (ahead) {
    read_lines<true>(data, bytes / sizeof(Line), ahead);
  } else {
    read_lines<false>(data, bytes / sizeof(Line), 0);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}
