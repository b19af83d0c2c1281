// Copying bytes between any addresses.
#pragma once
#include <cstdint>

namespace brigade {

template <typename T, uint32_t in_flight>
__device__ __forceinline__ void copy_as(uint64_t to, uint64_t from, uint64_t count, uint32_t thread, uint32_t threads) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  for (uint64_t first = 0; first < count; first += uint64_t(in_flight) * threads, in += in_flight * threads, out += in_flight * threads) {
    const uint32_t left = uint32_t(min(count - first, uint64_t(in_flight) * threads));
    // Loads that are under way at once, also where there are fewer left.
    T held[in_flight];
#pragma unroll
    for (uint32_t k = 0; k < in_flight; ++k) {
      if (thread + k * threads < left) held[k] = in[thread + k * threads];
    }
#pragma unroll
    for (uint32_t k = 0; k < in_flight; ++k) {
      if (thread + k * threads < left) out[thread + k * threads] = held[k];
    }
  }
}

// The share of `thread` among `threads`: in words as wide as both addresses allow, the bytes before and after them one by one.
__device__ inline void copy_bytes(uint64_t to, uint64_t from, uint64_t bytes, uint32_t thread, uint32_t threads) {
  if ((to | from | bytes) % 16 == 0) return copy_as<ulonglong2, 4>(to, from, bytes / 16, thread, threads);
  const uint64_t apart = to ^ from;
  // No division: it would take longer than a short row.
  const uint32_t shift = apart % 16 == 0 ? 4 : apart % 8 == 0 ? 3 : apart % 4 == 0 ? 2 : 0;
  const uint64_t to_aligned = (0 - to) & ((1u << shift) - 1);
  const uint64_t head = to_aligned < bytes ? to_aligned : bytes;
  const uint64_t words = (bytes - head) >> shift;
  const uint64_t tail = head + (words << shift);
  copy_as<uint8_t, 4>(to, from, head, thread, threads);
  switch (shift) {
    case 4: copy_as<ulonglong2, 4>(to + head, from + head, words, thread, threads); break;
    case 3: copy_as<uint64_t, 4>(to + head, from + head, words, thread, threads); break;
    case 2: copy_as<uint32_t, 4>(to + head, from + head, words, thread, threads); break;
    default: copy_as<uint8_t, 4>(to + head, from + head, words, thread, threads);
  }
  copy_as<uint8_t, 4>(to + tail, from + tail, bytes - tail, thread, threads);
}

}  // namespace brigade
