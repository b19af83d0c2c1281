// Where a rank's rows go: a block for each rank finds the tokens that go there, in their order.
#include "params.cuh"
#include "slots.cuh"
#include "sync.cuh"

using namespace brigade;

extern "C" __global__ void __launch_bounds__(1024) brigade_route_positions(const __grid_constant__ RouteParams p) {
  wait_for_previous_kernel();
  const uint32_t to = blockIdx.x;
  int32_t* slots = reinterpret_cast<int32_t*>(p.slots);
  uint32_t* rows_per_slot = reinterpret_cast<uint32_t*>(p.rows_per_slot);
  const uint32_t first = first_slot(p, to), end = first_slot(p, to + 1);
  for (uint32_t s = first + threadIdx.x; s < end; s += blockDim.x) rows_per_slot[s] = 0;
  __syncthreads();
  uint32_t before = 0;
  for (uint32_t start = 0; start < p.tokens; start += blockDim.x) {
    const uint32_t token = start + threadIdx.x;
    bool goes = false;
    for (uint32_t e = 0; e < p.k && token < p.tokens; ++e) {
      const int32_t slot = present_slot(p, token, e, uint32_t(p.absent));
      if (to == 0) slots[uint64_t(token) * p.k + e] = slot;
      if (slot < int32_t(first) || slot >= int32_t(end)) continue;
      goes = true;
      atomicAdd(rows_per_slot + slot, 1u);
    }
    uint32_t all;
    const uint32_t position = before + rank_among(goes, all);
    if (token < p.tokens) {
      reinterpret_cast<int32_t*>(p.positions)[uint64_t(token) * p.size + to] = goes ? int32_t(position) : -1;
    }
    before += all;
  }
  if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(p.counts)[to] = before;
}

extern "C" __global__ void __launch_bounds__(1024) brigade_route_lists(const __grid_constant__ RouteParams p) {
  wait_for_previous_kernel();
  __shared__ uint32_t sums[2];
  const uint32_t to = blockIdx.x;
  const uint32_t* counts = reinterpret_cast<const uint32_t*>(p.counts);
  int32_t* sent = reinterpret_cast<int32_t*>(p.sent);
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < p.size; r += blockDim.x) {
    if (r < to) atomicAdd(&sums[0], counts[r]);
    atomicAdd(&sums[1], counts[r]);
  }
  __syncthreads();
  const uint32_t first = sums[0], all = sums[1];
  if (threadIdx.x == 0) {
    reinterpret_cast<uint32_t*>(p.sent_offsets)[to] = first;
    if (to == 0) reinterpret_cast<uint32_t*>(p.sent_offsets)[p.size] = all;
  }
  for (uint32_t token = threadIdx.x; token < p.tokens; token += blockDim.x) {
    const int32_t position = reinterpret_cast<const int32_t*>(p.positions)[uint64_t(token) * p.size + to];
    if (position >= 0) sent[first + position] = int32_t(token);
  }
  for (uint32_t i = all + to * blockDim.x + threadIdx.x; i < p.room; i += p.size * blockDim.x) sent[i] = -1;
}
