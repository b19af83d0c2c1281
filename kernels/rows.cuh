// Groups of threads that look for rows.
#pragma once
#include <cstdint>

namespace brigade {

// Of a row that is not there, or not wanted.
__device__ __forceinline__ int4 no_source() { return make_int4(-1, -1, -1, -1); }

// Calls `work(at, source)` for those of `count` rows of which `look(at)` gives a source, beginning with row `first` and going round; each
// by the `row_threads` threads of one group. Lanes look at different rows, so that those that are not wanted cost next to nothing.
template <typename Look, typename Work>
__device__ __forceinline__ void for_rows(uint32_t count, uint32_t first, uint32_t row_threads, Look look, Work work) {
  const uint32_t groups = gridDim.x * blockDim.x / row_threads;
  const uint32_t group = (blockIdx.x * blockDim.x + threadIdx.x) / row_threads, lane = threadIdx.x % 32;
  for (uint32_t turn = 0; turn * groups + group < count; turn += 32) {
    const uint32_t w = (turn + lane) * groups + group;
    const uint32_t at = w < count - first ? w + first : w - (count - first);
    const int4 source = w < count ? look(at) : no_source();
    uint32_t found = __ballot_sync(0xFFFFFFFFu, source.x >= 0);
    while (found != 0) {
      const int from = __ffs(int(found)) - 1;
      found &= found - 1;
      auto of = [&](int x) { return __shfl_sync(0xFFFFFFFFu, x, from); };
      work(uint32_t(of(int(at))), make_int4(of(source.x), of(source.y), of(source.z), of(source.w)));
    }
  }
}

}  // namespace brigade
