// Filling memory with a repeated pattern of 8 bytes.
#pragma once
#include <cstdint>

namespace brigade {

// Bytes 0..8 of the repeated pattern, seen from `shift` bytes further on.
__device__ __forceinline__ uint64_t rotated(uint64_t pattern, uint32_t shift) {
  const uint32_t bits = shift % 8 * 8;
  return bits == 0 ? pattern : pattern >> bits | pattern << (64 - bits);
}

__device__ __forceinline__ uint8_t byte_of(uint64_t pattern, uint64_t at) {
  return uint8_t(pattern >> (at % 8 * 8));
}

// The share of `thread` among `threads`. The middle goes out in aligned 16-byte stores; up to 15 bytes before and after it, one
// by one.
__device__ inline void poison(uint64_t at, uint64_t bytes, uint64_t pattern, uint64_t thread, uint64_t threads) {
  uint8_t* out = reinterpret_cast<uint8_t*>(at);
  const uint64_t to_aligned = (16 - at % 16) % 16;
  const uint64_t head = to_aligned < bytes ? to_aligned : bytes;
  const uint64_t vectors = (bytes - head) / 16;
  const uint64_t tail = head + vectors * 16;

  const uint64_t word = rotated(pattern, uint32_t(head));
  ulonglong2* middle = reinterpret_cast<ulonglong2*>(out + head);
  for (uint64_t i = thread; i < vectors; i += threads) middle[i] = make_ulonglong2(word, word);
  for (uint64_t i = thread; i < head; i += threads) out[i] = byte_of(pattern, i);
  for (uint64_t i = tail + thread; i < bytes; i += threads) out[i] = byte_of(pattern, i);
}

}  // namespace brigade
