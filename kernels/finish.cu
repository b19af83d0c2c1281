// The end of a linear: scales of integer sums, C, activation, one rounding. Every step is one operation in f32 (multiply,
// then add, unfused), as brigade-host does it.
#include "activation.cuh"
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

// One element: its sum and its C.
__device__ __forceinline__ float finished(const FinishParams& p, float v, float c) {
  return activate(p.activation, p.bias == 0 ? v : __fadd_rn(v, __fmul_rn(p.beta, c)));
}

// One integer sum as a float.
__device__ __forceinline__ float scaled(const FinishParams& p, int32_t sum, float row_scale, uint64_t column) {
  const float column_scale = reinterpret_cast<const float*>(p.column_scales)[column * p.column_scale_stride];
  return __fmul_rn(p.alpha, __fmul_rn(__fmul_rn(float(sum), row_scale), column_scale));
}

constexpr uint64_t tile_columns = 2048;

// Calls `each(row, column, row_scale)` for every `step`-th column, tile by tile.
template <typename Each>
__device__ __forceinline__ void walk(const FinishParams& p, uint32_t step, Each each) {
  const float* row_scales = reinterpret_cast<const float*>(p.row_scales);
  const uint64_t tiles = (p.columns + tile_columns - 1) / tile_columns;
  for (uint64_t t = blockIdx.x; t < p.rows * tiles; t += gridDim.x) {
    const uint64_t row = t / tiles, first = t % tiles * tile_columns;
    const uint64_t end = first + tile_columns < p.columns ? first + tile_columns : p.columns;
    const float row_scale = p.from_type == I32 ? row_scales[row * p.row_scale_stride] : 1.0f;
    for (uint64_t column = first + threadIdx.x * step; column < end; column += blockDim.x * step) {
      each(row, column, row_scale);
    }
  }
}

extern "C" __global__ void brigade_finish(const __grid_constant__ FinishParams p) {
  wait_for_previous_kernel();
  const bool all_wide = wide(p.out, p.columns) && wide(p.from, p.from_stride) && wide(p.bias, p.bias_stride);
  if (all_wide) {
    walk(p, wide_elements, [&](uint64_t row, uint64_t column, float row_scale) {
      float v[8], c[8] = {};
      if (p.from_type == I32) {
        const int4* from = reinterpret_cast<const int4*>(p.from + (row * p.from_stride + column) * 4);
        const int4 low = from[0], high = from[1];
        const int32_t sums[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        for (int i = 0; i < 8; ++i) v[i] = scaled(p, sums[i], row_scale, column + i);
      } else {
        load_wide(p.from_type, p.from, row * p.from_stride + column, v);
      }
      if (p.bias != 0) load_wide(p.bias_type, p.bias, row * p.bias_stride + column, c);
      for (int i = 0; i < 8; ++i) v[i] = finished(p, v[i], c[i]);
      store_wide(p.out_type, p.out, row * p.columns + column, v);
    });
    return;
  }
  walk(p, 1, [&](uint64_t row, uint64_t column, float row_scale) {
    const uint64_t at = row * p.from_stride + column;
    const float v = p.from_type == I32 ? scaled(p, reinterpret_cast<const int32_t*>(p.from)[at], row_scale, column)
                                       : load_float(p.from_type, p.from, at);
    const float c = p.bias == 0 ? 0.0f : load_float(p.bias_type, p.bias, row * p.bias_stride + column);
    store_float(p.out_type, p.out, row * p.columns + column, finished(p, v, c));
  });
}
