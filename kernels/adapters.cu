// Lays adapters out for a product whose tiles wait: see gemm_flags.cu. Elements of 2 bytes, whatever they mean.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

extern "C" __global__ void brigade_adapters(const __grid_constant__ AdaptersParams p) {
  wait_for_previous_kernel();
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = thread; i < p.flag_count; i += threads) reinterpret_cast<uint32_t*>(p.flags)[i] = 0;
  uint16_t* down = reinterpret_cast<uint16_t*>(p.down);
  uint16_t* up = reinterpret_cast<uint16_t*>(p.up);
  // Columns that no adapter has are multiplied as well: by zeros, so they must be numbers.
  const auto zeros_between = [&](uint32_t from, uint32_t to) {
    const uint64_t width = to - from;
    for (uint64_t i = thread; width > 0 && i < p.columns * width; i += threads) up[i / width * p.stride + from + i % width] = 0;
  };
  uint32_t used = 0;
  for (uint32_t a = 0; a < p.count; ++a) {
    const uint32_t width = p.width[a], column = p.column[a];
    zeros_between(used, column);
    const uint16_t* first = reinterpret_cast<const uint16_t*>(p.first[a]);
    for (uint64_t i = thread; i < p.inner * width; i += threads) {
      down[(column + i % width) * p.inner + i / width] = first[i];
    }
    const uint16_t* second = reinterpret_cast<const uint16_t*>(p.second[a]);
    for (uint64_t i = thread; i < p.columns * width; i += threads) {
      up[i % p.columns * p.stride + column + i / p.columns] = second[i];
    }
    used = column + width;
  }
  zeros_between(used, p.stride);
}
