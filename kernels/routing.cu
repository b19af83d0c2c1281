// Where a rank's rows go: a block for each rank and run of tokens finds those that go there. The first kernel counts them, so that in the
// second one every block knows what comes before its own.
#include "params.cuh"
#include "slots.cuh"
#include "sync.cuh"

using namespace brigade;

// The run of tokens of a block.
__device__ __forceinline__ uint32_t first_token(const RouteParams& p) { return blockIdx.x % p.runs * blockDim.x; }

extern "C" __global__ void __launch_bounds__(512) brigade_route_counts(const __grid_constant__ RouteParams p) {
  wait_for_previous_kernel();
  const uint32_t to = blockIdx.x / p.runs, token = first_token(p) + threadIdx.x;
  const int32_t first = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
  if (blockIdx.x % p.runs == 0) {
    uint32_t* rows_per_slot = reinterpret_cast<uint32_t*>(p.rows_per_slot);
    for (int32_t s = first + int32_t(threadIdx.x); s < end; s += int32_t(blockDim.x)) rows_per_slot[s] = 0;
  }
  bool goes = false;
  constexpr uint32_t at_once = 8;
  for (uint32_t e = 0; e < p.k && token < p.tokens; e += at_once) {
    Id ids[at_once];
#pragma unroll
    for (uint32_t i = 0; i < at_once; ++i) {
      if (e + i < p.k) ids[i] = read_id(p, token, e + i);
    }
#pragma unroll
    for (uint32_t i = 0; i < at_once; ++i) {
      if (e + i >= p.k) break;
      const int32_t slot = present_slot(p, slot_of(p, token, ids[i]), p.absent);
      if (to == 0) reinterpret_cast<int32_t*>(p.slots)[uint64_t(token) * p.k + e + i] = slot;
      goes |= slot >= first && slot < end;
    }
  }
  const uint32_t all = __syncthreads_count(goes);
  if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(p.counts)[blockIdx.x] = all;
}

extern "C" __global__ void __launch_bounds__(512) brigade_route_lists(const __grid_constant__ RouteParams p) {
  wait_for_previous_kernel();
  // Rows for the ranks before this one, for all blocks before this one, and for all.
  __shared__ uint32_t sums[3];
  const uint32_t to = blockIdx.x / p.runs, token = first_token(p) + threadIdx.x;
  if (threadIdx.x < 3) sums[threadIdx.x] = 0;
  __syncthreads();
  uint32_t ranks = 0, blocks = 0, every = 0;
  for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    const uint32_t n = reinterpret_cast<const uint32_t*>(p.counts)[i];
    ranks += i < to * p.runs ? n : 0;
    blocks += i < blockIdx.x ? n : 0;
    every += n;
  }
  if (every > 0) {
    atomicAdd(&sums[0], ranks);
    atomicAdd(&sums[1], blocks);
    atomicAdd(&sums[2], every);
  }
  const int32_t first = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
  bool goes = false;
  for (uint32_t e = 0; e < p.k && token < p.tokens; ++e) {
    const int32_t slot = reinterpret_cast<const int32_t*>(p.slots)[uint64_t(token) * p.k + e];
    if (slot < first || slot >= end) continue;
    goes = true;
    atomicAdd(reinterpret_cast<uint32_t*>(p.rows_per_slot) + slot, 1u);
  }
  uint32_t here;
  // Behind it, the sums are there too.
  const uint32_t before = rank_among(goes, here);
  const uint32_t begin = sums[0], at = sums[1] + before, all = sums[2];
  int32_t* sent = reinterpret_cast<int32_t*>(p.sent);
  if (token < p.tokens) {
    reinterpret_cast<int32_t*>(p.positions)[uint64_t(token) * p.size + to] = goes ? int32_t(at - begin) : -1;
  }
  if (goes) sent[at] = int32_t(token);
  if (threadIdx.x == 0 && blockIdx.x % p.runs == 0) {
    reinterpret_cast<uint32_t*>(p.sent_offsets)[to] = begin;
    if (to == 0) reinterpret_cast<uint32_t*>(p.sent_offsets)[p.size] = all;
  }
  for (uint32_t i = all + blockIdx.x * blockDim.x + threadIdx.x; i < p.room; i += gridDim.x * blockDim.x) sent[i] = -1;
}
