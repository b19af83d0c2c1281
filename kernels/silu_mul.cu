// The gate between two products: out[i, j] = silu(from[i, j]) * from[i, columns + j] in f32, with one rounding.
#include "activation.cuh"
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

constexpr uint64_t tile_columns = 2048;

extern "C" __global__ void brigade_silu_mul(const __grid_constant__ SiluMulParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  uint64_t rows = p.rows;
  if (p.count != 0) rows = min(rows, uint64_t(max(*reinterpret_cast<const int32_t*>(p.count), 0)));
  const bool eight = wide(p.out, p.columns) && wide(p.from, p.columns);
  const uint32_t step = eight ? wide_elements : 1;
  const uint64_t tiles = (p.columns + tile_columns - 1) / tile_columns;
  for (uint64_t t = blockIdx.x; t < rows * tiles; t += gridDim.x) {
    const uint64_t row = t / tiles, first = t % tiles * tile_columns;
    const uint64_t end = min(first + tile_columns, p.columns);
    const uint64_t from = row * 2 * p.columns, to = row * p.columns;
    for (uint64_t column = first + threadIdx.x * step; column < end; column += blockDim.x * step) {
      if (eight) {
        float gate[8], up[8];
        load_wide(p.from_type, p.from, from + column, gate);
        load_wide(p.from_type, p.from, from + p.columns + column, up);
        for (int i = 0; i < 8; ++i) gate[i] = gated(gate[i], up[i]);
        store_wide(p.out_type, p.out, to + column, gate);
      } else {
        const float gate = load_float(p.from_type, p.from, from + column);
        const float up = load_float(p.from_type, p.from, from + p.columns + column);
        store_float(p.out_type, p.out, to + column, gated(gate, up));
      }
    }
  }
}
