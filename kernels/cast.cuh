// Scales of fp8, and how they are told: every step is one f32 operation, and brigade-host's are the same (crates/host/src/quantize.rs).
#pragma once
#include "quantized.cuh"

namespace brigade {

// How scales are told.
enum ScaleFormat : uint32_t { as_f32 = 0, as_power_of_two = 1, as_exponent = 2 };

// The least power of two that is not below a scale, and not subnormal; 1 for 0.
__device__ __forceinline__ float power_of_two(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  if (bits == 0) return 1.0f;
  if (isnan(scale)) return canonical(scale);
  constexpr uint32_t mantissa = (1u << 23) - 1;
  return __uint_as_float(max((bits + mantissa) & ~mantissa, 1u << 23));
}

// The scale of numbers, of which `most` is the greatest magnitude, as bits.
__device__ __forceinline__ float scale_as(uint32_t format, uint32_t most) {
  const float scale = scale_of(most, F8E4M3);
  return format == as_f32 ? scale : power_of_two(scale);
}

__device__ __forceinline__ void store_scale(uint32_t format, uint64_t scales, uint64_t at, float scale) {
  if (format == as_exponent) {
    reinterpret_cast<uint8_t*>(scales)[at] = uint8_t(__float_as_uint(scale) >> 23);
  } else {
    reinterpret_cast<float*>(scales)[at] = scale;
  }
}

__device__ __forceinline__ float load_scale(uint32_t format, uint64_t scales, uint64_t at) {
  if (format == as_exponent) return __uint_as_float(uint32_t(reinterpret_cast<const uint8_t*>(scales)[at]) << 23);
  return reinterpret_cast<const float*>(scales)[at];
}

}  // namespace brigade
