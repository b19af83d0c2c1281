// Fills an output with the poison pattern of its element type, so that nobody takes stale data for a result.
#include "params.cuh"
#include "poison.cuh"
#include "sync.cuh"

using namespace brigade;

extern "C" __global__ void brigade_fill(const __grid_constant__ FillParams p) {
  wait_for_previous_kernel();
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  poison(p.out, p.bytes, p.pattern, thread, uint64_t(gridDim.x) * blockDim.x);
}
