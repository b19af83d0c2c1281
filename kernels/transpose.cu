// Transposes a matrix by tiles, so that both sides are read and written in whole lines.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

constexpr uint32_t tile = 32;
constexpr uint32_t threads = 256;

template <typename T>
__device__ void transpose(const TransposeParams& p, uint64_t* shared) {
  // One more column than a tile has, against bank conflicts.
  T(*held)[tile + 1] = reinterpret_cast<T(*)[tile + 1]>(shared);
  const T* from = reinterpret_cast<const T*>(p.from);
  T* out = reinterpret_cast<T*>(p.out);
  const uint64_t across = (p.columns + tile - 1) / tile, down = (p.rows + tile - 1) / tile;
  const uint32_t x = threadIdx.x % tile, y = threadIdx.x / tile;
  for (uint64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
    const uint64_t row = t / across * tile, column = t % across * tile;
    for (uint32_t i = y; i < tile; i += threads / tile) {
      if (row + i < p.rows && column + x < p.columns) held[i][x] = from[(row + i) * p.columns + column + x];
    }
    __syncthreads();
    for (uint32_t j = y; j < tile; j += threads / tile) {
      if (column + j < p.columns && row + x < p.rows) out[(column + j) * p.rows + row + x] = held[x][j];
    }
    __syncthreads();
  }
}

// Launched with 256 threads a block.
extern "C" __global__ void __launch_bounds__(threads) brigade_transpose(const __grid_constant__ TransposeParams p) {
  __shared__ uint64_t shared[tile * (tile + 1)];
  wait_for_previous_kernel();
  switch (p.element_bytes) {
    case 1: return transpose<uint8_t>(p, shared);
    case 2: return transpose<uint16_t>(p, shared);
    case 4: return transpose<uint32_t>(p, shared);
    default: return transpose<uint64_t>(p, shared);
  }
}
