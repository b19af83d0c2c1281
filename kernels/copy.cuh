// Copying bytes between any addresses.
#pragma once
#include <cstdint>

namespace brigade {

template <typename T>
__device__ __forceinline__ void copy_as(uint64_t to, uint64_t from, uint64_t count, uint64_t thread, uint64_t threads) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  // Loads that are under way at once, also where there are fewer left.
  constexpr int in_flight = 4;
  for (uint64_t i = thread; i < count; i += in_flight * threads) {
    T held[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (i + k * threads < count) held[k] = in[i + k * threads];
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (i + k * threads < count) out[i + k * threads] = held[k];
    }
  }
}

// The share of `thread` among `threads`: in words as wide as both addresses allow, the bytes before and after them one by one.
__device__ inline void copy_bytes(uint64_t to, uint64_t from, uint64_t bytes, uint64_t thread, uint64_t threads) {
  const uint64_t apart = to ^ from;
  const uint64_t width = apart % 16 == 0 ? 16 : apart % 8 == 0 ? 8 : apart % 4 == 0 ? 4 : 1;
  const uint64_t to_aligned = (width - to % width) % width;
  const uint64_t head = to_aligned < bytes ? to_aligned : bytes;
  const uint64_t words = (bytes - head) / width;
  const uint64_t tail = head + words * width;
  copy_as<uint8_t>(to, from, head, thread, threads);
  switch (width) {
    case 16: copy_as<ulonglong2>(to + head, from + head, words, thread, threads); break;
    case 8: copy_as<uint64_t>(to + head, from + head, words, thread, threads); break;
    case 4: copy_as<uint32_t>(to + head, from + head, words, thread, threads); break;
    default: copy_as<uint8_t>(to + head, from + head, words, thread, threads);
  }
  copy_as<uint8_t>(to + tail, from + tail, bytes - tail, thread, threads);
}

}  // namespace brigade
