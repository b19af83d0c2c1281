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

// Rounded to nearest, ties to even.
__device__ __forceinline__ void store_float(uint32_t type, uint64_t array, uint64_t at, float x) {
  switch (type) {
    case F16: reinterpret_cast<uint16_t*>(array)[at] = half_bits(x); break;
    case BF16: reinterpret_cast<uint16_t*>(array)[at] = bfloat_bits(x); break;
    default: reinterpret_cast<float*>(array)[at] = canonical(x);
  }
}

}  // namespace brigade
