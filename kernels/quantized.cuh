// Numbers as int8 or fp8 (types I8 and F8E4M3), as brigade-host has them (crates/host/src/quantize.rs): `scale = greatest |x| / limit`,
// `q = x / scale`, each one operation in f32, and one rounding to the type, ties to even. A scale of 0 gives zeros; a NaN is the canonical
// one of its type, and 0 in int8.
#pragma once
#include "types.cuh"

namespace brigade {

// The scale of numbers, of which `greatest` is the greatest magnitude, as bits.
__device__ __forceinline__ float scale_of(uint32_t greatest, uint32_t type) {
  return canonical(__fdiv_rn(__uint_as_float(greatest), type == I8 ? 127.0f : 448.0f));
}

// By a division.
__device__ __forceinline__ uint8_t divided(float x, float scale, uint32_t type) {
  const float q = scale == 0.0f ? 0.0f : __fdiv_rn(x, scale);
  if (type == F8E4M3) return fp8_bits(q);
  if (isnan(q)) return 0;
  return uint8_t(int8_t(fminf(fmaxf(rintf(q), -127.0f), 127.0f)));
}

template <uint32_t N>
struct Numbers {
  float x[N];
};

// Bytes of numbers, four in a word.
template <uint32_t N>
struct Quantized {
  uint32_t words[N / 4];
};

// Not inlined, as all that is rare.
template <uint32_t N>
__device__ __noinline__ Quantized<N> all_divided(Numbers<N> numbers, float scale, uint32_t type) {
  Quantized<N> q = {};
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) q.words[i / 4] |= uint32_t(divided(numbers.x[i], scale, type)) << (i % 4 * 8);
  return q;
}

// A scale that many numbers are divided by. A product with its inverse, corrected by what that leaves of the number, has all bits of the
// quotient as a division rounds it (Markstein: Computation of elementary functions on the IBM RISC System/6000 processor, 1990), where
// nothing over- or underflows; with f32, for all pairs of significands. Quotients that become 0 may underflow.
struct Divisor {
  float scale, inverse;

  // An inverse of 0 says that the scale is too great or too small for that.
  __device__ __forceinline__ explicit Divisor(float scale)
      : scale(scale), inverse(scale >= 0x1p-64f && scale <= 0x1p64f ? __frcp_rn(scale) : 0.0f) {}

  // With these signs, a zero keeps its own.
  __device__ __forceinline__ float corrected(float x, float product) const {
    return __fmaf_rn(__fmaf_rn(scale, product, -x), -inverse, product);
  }

  // In the lowest byte: what is added leaves no bits behind the point. No magnitude is above 127, as the scale is of the greatest.
  __device__ __forceinline__ uint32_t int8(float x) const {
    return __float_as_uint(__fadd_rn(corrected(x, __fmul_rn(x, inverse)), 0x1.8p23f));
  }

  // Two in the lowest bytes. Here the scale may be any: a product above all of fp8 stays so, but finite.
  __device__ __forceinline__ uint32_t fp8(float low, float high) const {
    const auto q = [&](float x) { return corrected(x, fminf(fmaxf(__fmul_rn(x, inverse), -512.0f), 512.0f)); };
    // The NaN of a sum is a positive one, of which the canonical one is made.
    return __nv_cvt_float2_to_fp8x2(make_float2(q(low), q(high)), __NV_SATFINITE, __NV_E4M3);
  }
};

template <uint32_t N>
__device__ __forceinline__ Quantized<N> quantized(const float (&x)[N], const Divisor& by, uint32_t type) {
  if (by.inverse == 0.0f) {
    Numbers<N> numbers;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) numbers.x[i] = x[i];
    return all_divided(numbers, by.scale, type);
  }
  Quantized<N> q;
#pragma unroll
  for (uint32_t i = 0; i < N; i += 4) {
    if (type == F8E4M3) {
      q.words[i / 4] = by.fp8(x[i], x[i + 1]) | by.fp8(x[i + 2], x[i + 3]) << 16;
    } else {
      const uint32_t low = __byte_perm(by.int8(x[i]), by.int8(x[i + 1]), 0x0040);
      q.words[i / 4] = __byte_perm(low, __byte_perm(by.int8(x[i + 2]), by.int8(x[i + 3]), 0x0040), 0x5410);
    }
  }
  return q;
}

}  // namespace brigade
