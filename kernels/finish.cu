// The end of a linear: scales of integer sums, C, activation, one rounding. Every step is one operation in f32 (multiply,
// then add, unfused), as brigade-host does it.
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

enum Activation : uint32_t { NONE, RELU, GELU_TANH, GELU_ERF, SILU };

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

constexpr uint64_t tile_columns = 1024;

extern "C" __global__ void brigade_finish(const __grid_constant__ FinishParams p) {
  wait_for_previous_kernel();
  const float* row_scales = reinterpret_cast<const float*>(p.row_scales);
  const float* column_scales = reinterpret_cast<const float*>(p.column_scales);
  const uint64_t tiles = (p.columns + tile_columns - 1) / tile_columns;
  for (uint64_t t = blockIdx.x; t < p.rows * tiles; t += gridDim.x) {
    const uint64_t row = t / tiles, first = t % tiles * tile_columns;
    const uint64_t end = first + tile_columns < p.columns ? first + tile_columns : p.columns;
    for (uint64_t column = first + threadIdx.x; column < end; column += blockDim.x) {
      float v;
      if (p.from_type == I32) {
        const int32_t sum = reinterpret_cast<const int32_t*>(p.from)[row * p.from_stride + column];
        v = __fmul_rn(float(sum), row_scales[row * p.row_scale_stride]);
        v = __fmul_rn(p.alpha, __fmul_rn(v, column_scales[column * p.column_scale_stride]));
      } else {
        v = load_float(p.from_type, p.from, row * p.from_stride + column);
      }
      if (p.bias != 0) {
        const float c = load_float(p.bias_type, p.bias, row * p.bias_stride + column);
        v = __fadd_rn(v, __fmul_rn(p.beta, c));
      }
      store_float(p.out_type, p.out, row * p.columns + column, activate(p.activation, v));
    }
  }
}
