// How the values of several ranks are combined: in f32, never fused, so that the host's are the same bits.
#pragma once
#include <cstdint>

namespace brigade {

enum Op : uint32_t { sum, product, maximum, minimum, average };

// As IEEE 754 orders all values but NaNs: -0 below +0.
__device__ __forceinline__ int32_t rank_of(float x) {
  const int32_t bits = __float_as_int(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// NaNs win over numbers.
__device__ __forceinline__ float pick(float a, float b, bool first) {
  return isnan(a) || (!isnan(b) && first) ? a : b;
}

__device__ __forceinline__ float combine(uint32_t op, float a, float b) {
  switch (op) {
    case product: return __fmul_rn(a, b);
    case maximum: return pick(a, b, rank_of(a) >= rank_of(b));
    case minimum: return pick(a, b, rank_of(a) <= rank_of(b));
    default: return __fadd_rn(a, b);
  }
}

// What `parts` values were combined to.
__device__ __forceinline__ float finish(uint32_t op, uint32_t parts, float x) {
  return op == average ? __fdiv_rn(x, float(parts)) : x;
}

}  // namespace brigade
