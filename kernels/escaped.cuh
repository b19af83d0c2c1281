// Bytes of any kind as data that is its own flag (push.cuh).
//
// Their words may be anything, the sentinel too. So a packet is four granules and one word more: the sixteen words of the
// granules, in which 0 stands for the sentinel, and a bit for each that says so. That word has no other bits, and so is never
// the sentinel. Therefore each word of a packet tells by itself whether it is there, as those of sums do: no order among
// them is needed, nor that an access of 16 bytes is one. A packet is one seventeenth larger than what it carries.
#pragma once
#include "push.cuh"

namespace brigade {

// Granules of a packet.
constexpr uint32_t Each = 4;

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

// Without the sentinel, whose places become bits of `escaped` from bit `at` on.
__device__ __forceinline__ uint4 escape(uint4 v, uint32_t at, uint32_t& escaped) {
  const auto one = [&](uint32_t word, uint32_t k) {
    const bool is_sentinel = word == sentinel;
    escaped |= uint32_t(is_sentinel) << (at + k);
    return is_sentinel ? 0 : word;
  };
  return make_uint4(one(v.x, 0), one(v.y, 1), one(v.z, 2), one(v.w, 3));
}

__device__ __forceinline__ uint4 restored(uint4 v, uint32_t at, uint32_t escaped) {
  const auto one = [&](uint32_t word, uint32_t k) { return escaped >> (at + k) & 1 ? sentinel : word; };
  return make_uint4(one(v.x, 0), one(v.y, 1), one(v.z, 2), one(v.w, 3));
}

}  // namespace brigade
