// Element types: how they are numbered, read and written. Kernels switch on a type once for each element; the branch is the
// same for all threads, and they wait for memory anyway.
//
// A NaN is written as its type's canonical one (brigade-device's poison), whatever the hardware would give.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace brigade {

// Numbered as in crates/cuda/src/types.rs.
enum Type : uint32_t { U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, F8E4M3 };

__device__ __forceinline__ uint16_t half_bits(float x) {
  return isnan(x) ? 0x7E00 : __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ uint16_t bfloat_bits(float x) {
  return isnan(x) ? 0x7FC0 : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ float canonical(float x) { return isnan(x) ? __uint_as_float(0x7FC00000u) : x; }

__device__ __forceinline__ uint8_t fp8_bits(float x) {
  return isnan(x) ? 0x7F : uint8_t(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

__device__ __forceinline__ float fp8_value(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// Element `at` of an array of f16, bf16 or f32.
__device__ __forceinline__ float load_float(uint32_t type, uint64_t array, uint64_t at) {
  switch (type) {
    case F16: return __half2float(reinterpret_cast<const __half*>(array)[at]);
    case BF16: return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(array)[at]);
    default: return reinterpret_cast<const float*>(array)[at];
  }
}

__device__ __forceinline__ float2 widen(uint32_t type, uint32_t word);

// Elements `at`, which is even, and the next of such an array, which is aligned to two.
__device__ __forceinline__ float2 load_two(uint32_t type, uint64_t array, uint64_t at) {
  if (type == F32) return reinterpret_cast<const float2*>(array)[at / 2];
  return widen(type, reinterpret_cast<const uint32_t*>(array)[at / 2]);
}

// Rounded to nearest, ties to even.
__device__ __forceinline__ void store_float(uint32_t type, uint64_t array, uint64_t at, float x) {
  switch (type) {
    case F16: reinterpret_cast<uint16_t*>(array)[at] = half_bits(x); break;
    case BF16: reinterpret_cast<uint16_t*>(array)[at] = bfloat_bits(x); break;
    default: reinterpret_cast<float*>(array)[at] = canonical(x);
  }
}

// Two values of f16 or bf16 that share a word.
__device__ __forceinline__ float2 widen(uint32_t type, uint32_t word) {
  // A bfloat16 is the upper half of an f32.
  if (type == BF16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// Rounded to nearest, ties to even.
__device__ __forceinline__ uint32_t narrow(uint32_t type, float low, float high) {
  // The hardware's NaN has all its lower bits set, which no number has.
  if (type == BF16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&two) - (__hneu2_mask(two, two) & 0x003F003Fu);
  }
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two) - (__hneu2_mask(two, two) & 0x01FF01FFu);
}

// Eight elements at once, in accesses of 16 bytes: array and element must be aligned to that (see `wide`).
constexpr uint32_t wide_elements = 8;

// Whether rows of `stride` elements from `array` on can be taken eight at a time.
__device__ __forceinline__ bool wide(uint64_t array, uint64_t stride) {
  return array % 16 == 0 && stride % wide_elements == 0;
}

__device__ __forceinline__ void load_wide(uint64_t array, uint64_t at, float (&v)[8]) {
  const float4* from = reinterpret_cast<const float4*>(array + at * 4);
  const float4 low = from[0], high = from[1];
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

__device__ __forceinline__ void load_wide(uint32_t type, uint64_t array, uint64_t at, float (&v)[8]) {
  if (type == F32) return load_wide(array, at, v);
  const uint4 bits = *reinterpret_cast<const uint4*>(array + at * 2);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = widen(type, words[i]);
    v[2 * i] = two.x, v[2 * i + 1] = two.y;
  }
}

__device__ __forceinline__ void store_wide(uint32_t type, uint64_t array, uint64_t at, const float (&v)[8]) {
  if (type == F32) {
    float4* to = reinterpret_cast<float4*>(array + at * 4);
    to[0] = make_float4(canonical(v[0]), canonical(v[1]), canonical(v[2]), canonical(v[3]));
    to[1] = make_float4(canonical(v[4]), canonical(v[5]), canonical(v[6]), canonical(v[7]));
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = narrow(type, v[2 * i], v[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(array + at * 2) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace brigade
