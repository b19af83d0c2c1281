// Bytes of any kind as data that is its own flag (push.cuh).
//
// Their words may be anything, the sentinel too, for which another one stands. Where a packet of four granules has one of those two, a word beside it has a
// bit for each of its sixteen words that was the sentinel. That word has no other bits, and so is never the sentinel itself. Therefore each word of a packet
// tells by itself whether it is there, as those of sums do, and a stand-in that there is more to wait for: no order among words is needed, nor that an
// access of 16 bytes is one. Most data has neither of the two, and so a packet is as large as what it carries.
#pragma once
#include "push.cuh"

namespace brigade {

// Granules of a packet.
constexpr uint32_t Each = 4;

// Stands for the sentinel, and for itself.
constexpr uint32_t stand_in = sentinel - 1;

// A granule, or what there is of it, from any address. What is rare here reads and writes one at a time, is not inlined, and so
// costs whole packets no registers.
__device__ __noinline__ uint4 any_input(uint64_t from, uint32_t bytes) {
  if (bytes == 16 && from % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  uint32_t w[4] = {};
  if ((from | bytes) % 4 == 0) {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      if (4 * k < bytes) w[k] = reinterpret_cast<const uint32_t*>(from)[k];
    }
  } else {
#pragma unroll
    for (uint32_t k = 0; k < 16; ++k) {
      if (k < bytes) w[k / 4] |= uint32_t(reinterpret_cast<const uint8_t*>(from)[k]) << (k % 4 * 8);
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __noinline__ void any_output(uint64_t to, uint32_t bytes, uint4 v) {
  if (bytes == 16 && to % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
  if ((to | bytes) % 4 == 0) {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      if (4 * k < bytes) reinterpret_cast<uint32_t*>(to)[k] = w[k];
    }
  } else {
#pragma unroll
    for (uint32_t k = 0; k < 16; ++k) {
      if (k < bytes) reinterpret_cast<uint8_t*>(to)[k] = uint8_t(w[k / 4] >> (k % 4 * 8));
    }
  }
}

// What is pushed of a granule.
__device__ __forceinline__ uint4 pushable(uint4 v) {
  return make_uint4(min(v.x, stand_in), min(v.y, stand_in), min(v.z, stand_in), min(v.w, stand_in));
}

// Of all words of a packet the greatest: those of which more is told are greater than all others.
__device__ __forceinline__ uint32_t greatest(const uint4 (&v)[Each]) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) most = max(most, max(max(v[k].x, v[k].y), max(v[k].z, v[k].w)));
  return most;
}

// Whether more is told beside a packet, as its sender and whoever takes it see it.
__device__ __forceinline__ bool has_more(const uint4 (&v)[Each]) { return greatest(v) >= stand_in; }

// Pushes the word beside a packet, if there is one.
__device__ __forceinline__ void push_more(const uint4 (&v)[Each], uint32_t* word) {
  if (!has_more(v)) return;
  uint32_t escaped = 0;
  const auto one = [&](uint32_t value, uint32_t bit) { escaped |= uint32_t(value == sentinel) << bit; };
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) one(v[k].x, 4 * k), one(v[k].y, 4 * k + 1), one(v[k].z, 4 * k + 2), one(v[k].w, 4 * k + 3);
  store_relaxed_sys(word, escaped);
}

// Whether all of a packet is there, by the greatest of its words as they were seen; looks at the word beside it where there is one.
__device__ __forceinline__ bool is_complete(uint32_t most, const uint32_t* word, uint32_t& escaped) {
  escaped = 0;
  // No branch in a loop that all lanes leave together.
  asm volatile("{.reg .pred q; setp.eq.u32 q, %1, %2; @q ld.relaxed.sys.global.u32 %0, [%3];}"
               : "+r"(escaped)
               : "r"(most), "n"(stand_in), "l"(word)
               : "memory");
  return most != sentinel && escaped != sentinel;
}

// A packet as it was, once it is there.
__device__ __forceinline__ void restore(uint4 (&v)[Each], uint32_t escaped) {
  if (escaped == 0) return;
  const auto one = [&](uint32_t& value, uint32_t bit) {
    if (escaped >> bit & 1) value = sentinel;
  };
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) one(v[k].x, 4 * k), one(v[k].y, 4 * k + 1), one(v[k].z, 4 * k + 2), one(v[k].w, 4 * k + 3);
}

}  // namespace brigade
