// Blocks that are launched as one cluster: how many there are, and which of them this one is. Before compute capability 9.0 each is alone.
#pragma once
#include <cstdint>

namespace brigade {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
  return n;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}
#else
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
#endif

}  // namespace brigade
