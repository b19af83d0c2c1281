// Fills an output with the poison pattern of its element type, so that nobody takes stale data for a result.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

// Bytes 0..8 of the repeated pattern, seen from `shift` bytes further on.
__device__ __forceinline__ uint64_t rotated(uint64_t pattern, uint32_t shift) {
  const uint32_t bits = shift % 8 * 8;
  return bits == 0 ? pattern : pattern >> bits | pattern << (64 - bits);
}

__device__ __forceinline__ uint8_t byte_of(uint64_t pattern, uint64_t at) {
  return uint8_t(pattern >> (at % 8 * 8));
}

// The middle goes out in aligned 16-byte stores; up to 15 bytes before and after it, one by one.
extern "C" __global__ void brigade_fill(const __grid_constant__ FillParams p) {
  wait_for_previous_kernel();
  uint8_t* out = reinterpret_cast<uint8_t*>(p.out);
  const uint64_t to_aligned = (16 - p.out % 16) % 16;
  const uint64_t head = to_aligned < p.bytes ? to_aligned : p.bytes;
  const uint64_t vectors = (p.bytes - head) / 16;
  const uint64_t tail = head + vectors * 16;

  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  const uint64_t word = rotated(p.pattern, uint32_t(head));
  ulonglong2* middle = reinterpret_cast<ulonglong2*>(out + head);
  for (uint64_t i = thread; i < vectors; i += threads) middle[i] = make_ulonglong2(word, word);
  for (uint64_t i = thread; i < head; i += threads) out[i] = byte_of(p.pattern, i);
  for (uint64_t i = tail + thread; i < p.bytes; i += threads) out[i] = byte_of(p.pattern, i);
}
