// Copies between this GPU's memory and its own or its peers' parts of the symmetric memory.
#include "copy.cuh"
#include "steps.cuh"

using namespace brigade;

extern "C" __global__ void brigade_move(const __grid_constant__ MoveParams p) {
  wait_for_previous_kernel();
  if (is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state))) return;
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = 0; i < p.count; ++i) copy_bytes(p.to[i], p.from[i], p.bytes[i], thread, threads);
}
