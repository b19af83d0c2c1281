// LogFMT-10 (crates/plan/src/logfmt.rs has the format and the same arithmetic, operation by operation): blocks of 128 numbers, of which each
// thread of sixteen has eight.
#pragma once
#include "back.cuh"

namespace brigade::logfmt {

// Bytes of a block's codes, of which the lower eight bits of each come first; and of its least and greatest logarithm.
constexpr uint32_t codes = 160, low_codes = 128, beside = 8;

constexpr uint32_t greatest_code = 511, sign = 1u << 9;
constexpr float steps = 510.0f, orders = 32.0f;
constexpr uint32_t infinity = 0x7F800000u, smallest = 0x00800000u;

// The logarithm of a positive normal number to base 2.
__device__ __forceinline__ float log2(uint32_t bits) {
  constexpr uint32_t halfway = 0x3F3504F3u;
  const uint32_t shifted = bits - halfway;
  const float exponent = float(int32_t(shifted) >> 23);
  const float m = __uint_as_float((shifted & 0x007FFFFFu) + halfway);
  const float s = __fdiv_rn(__fsub_rn(m, 1.0f), __fadd_rn(m, 1.0f));
  const float z = __fmul_rn(s, s);
  float sum = 0.4121986f;
  sum = __fadd_rn(__fmul_rn(sum, z), 0.577078f);
  sum = __fadd_rn(__fmul_rn(sum, z), 0.9617967f);
  sum = __fadd_rn(__fmul_rn(sum, z), 2.88539f);
  return __fadd_rn(exponent, __fmul_rn(sum, s));
}

// 2 to a power from -126 to less than 128.
__device__ __forceinline__ float exp2(float x) {
  const float whole = floorf(__fadd_rn(x, 0.5f));
  const float r = __fsub_rn(x, whole);
  float sum = 0.0001540353f;
  sum = __fadd_rn(__fmul_rn(sum, r), 0.0013333558f);
  sum = __fadd_rn(__fmul_rn(sum, r), 0.009618129f);
  sum = __fadd_rn(__fmul_rn(sum, r), 0.05550411f);
  sum = __fadd_rn(__fmul_rn(sum, r), 0.2402265f);
  sum = __fadd_rn(__fmul_rn(sum, r), 0.6931472f);
  sum = __fadd_rn(__fmul_rn(sum, r), 1.0f);
  return __uint_as_float(__float_as_uint(sum) + (uint32_t(int32_t(whole)) << 23));
}

// The numbers that a block's codes stand for.
struct Scale {
  float least, step;

  __device__ __forceinline__ Scale(float least, float greatest) : least(least), step(__fdiv_rn(__fsub_rn(greatest, least), steps)) {}

  __device__ __forceinline__ float magnitude(uint32_t code) const {
    return code == 0 ? 0.0f : exp2(__fadd_rn(least, __fmul_rn(float(code - 1), step)));
  }

  // The code of the magnitude with these bits.
  __device__ __forceinline__ uint32_t code(uint32_t bits) const {
    if (bits < smallest) return 0;
    const float above = __fsub_rn(log2(bits), least);
    uint32_t lower = 0;
    if (above >= 0.0f) {
      if (!(step > 0.0f)) return 1;
      lower = min(uint32_t(floorf(__fdiv_rn(above, step))) + 1, greatest_code - 1);
    }
    const float x = __uint_as_float(bits);
    return lower + (__fsub_rn(x, magnitude(lower)) > __fsub_rn(magnitude(lower + 1), x) ? 1 : 0);
  }
};

// Into the codes of a block at `to`, and what belongs to it at `beside_to`. By all threads of a warp, of which those that are not `there` have
// no block.
__device__ __forceinline__ void store(uint64_t to, uint64_t beside_to, const Eight& x, bool there) {
  const uint32_t thread = threadIdx.x % 16;
  uint32_t least = ~0u, greatest = 0;
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) {
    const uint32_t bits = __float_as_uint(x.v[j]) & 0x7FFFFFFFu;
    greatest = max(greatest, bits);
    if (bits >= smallest) least = min(least, bits);
  }
#pragma unroll
  for (uint32_t d = 8; d > 0; d /= 2) {
    greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, d));
    least = min(least, __shfl_xor_sync(0xFFFFFFFFu, least, d));
  }
  if (!there) return;
  uint32_t low[2] = {0, 0}, high = 0;
  float2 range = make_float2(0.0f, 0.0f);
  if (greatest >= infinity) {
    range.x = range.y = __uint_as_float(0x7FC00000u);
  } else if (greatest >= smallest) {
    range.y = log2(greatest);
    range.x = log2(least);
    const float clipped = __fsub_rn(range.y, orders);
    if (range.x < clipped) range.x = clipped;
    const Scale scale(range.x, range.y);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      const uint32_t bits = __float_as_uint(x.v[j]);
      const uint32_t code = (bits >> 31 != 0 ? sign : 0) | scale.code(bits & 0x7FFFFFFFu);
      low[j / 4] |= (code & 0xFF) << (j % 4 * 8);
      high |= code >> 8 << (j * 2);
    }
  }
  *reinterpret_cast<uint2*>(to + thread * 8) = make_uint2(low[0], low[1]);
  *reinterpret_cast<uint16_t*>(to + low_codes + thread * 2) = uint16_t(high);
  if (thread == 0) *reinterpret_cast<float2*>(beside_to) = range;
}

// Eight numbers of a block, from its `first` on.
__device__ __forceinline__ Eight load(uint64_t from, uint64_t beside_from, uint32_t first) {
  const float2 range = *reinterpret_cast<const float2*>(beside_from);
  const uint2 both = *reinterpret_cast<const uint2*>(from + first);
  const uint32_t high = *reinterpret_cast<const uint16_t*>(from + low_codes + first / 4);
  const uint32_t low[2] = {both.x, both.y};
  const Scale scale(range.x, range.y);
  Eight x;
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) {
    const uint32_t code = (high >> (j * 2) & 3) << 8 | (low[j / 4] >> (j % 4 * 8) & 0xFF);
    const uint32_t bits = __float_as_uint(scale.magnitude(code & greatest_code)) | code >> 9 << 31;
    x.v[j] = isnan(range.x) ? range.x : __uint_as_float(bits);
  }
  return x;
}

}  // namespace brigade::logfmt
