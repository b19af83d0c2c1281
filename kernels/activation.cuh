// What may come after a linear's sums, one operation in f32 after the other.
#pragma once
#include <cstdint>

namespace brigade {

// Numbered as in crates/cuda/src/types.rs.
enum Activation : uint32_t { NONE, RELU, GELU_TANH, GELU_ERF, SILU, GATED };

// What makes one of two products (SwiGLU).
__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

__device__ __forceinline__ float activate(uint32_t activation, float x) {
  switch (activation) {
    // Not fmaxf, which hides a NaN.
    case RELU: return x > 0.0f || isnan(x) ? x : 0.0f;
    case GELU_TANH: {
      const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.70710678118f));
    case SILU: return x / (1.0f + expf(-x));
    default: return x;
  }
}

}  // namespace brigade
