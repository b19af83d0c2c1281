// Whose slots are whose (crates/plan/src/routes.rs has the same arithmetic).
#pragma once
#include <cstdint>

namespace brigade {

enum Placed : uint32_t { evenly = 0, by_map = 1, by_rank = 2 };

// The first slot of a rank; of `size`, how many there are.
template <typename P>
__device__ __forceinline__ uint32_t first_slot(const P& p, uint32_t rank) {
  switch (p.placement) {
    case evenly: {
      const uint32_t each = p.experts / p.size, more = p.experts % p.size;
      return rank * each + min(rank, more);
    }
    case by_map: return rank * p.per_rank;
    default: return rank;
  }
}

template <typename P>
__device__ __forceinline__ uint32_t rank_of_slot(const P& p, uint32_t slot) {
  switch (p.placement) {
    case evenly: {
      // The first ranks have one more.
      const uint32_t each = p.experts / p.size, more = p.experts % p.size, front = more * (each + 1);
      return slot < front ? slot / (each + 1) : more + (slot - front) / each;
    }
    case by_map: return slot / p.per_rank;
    default: return slot;
  }
}

// An id as it lies in memory, low word first: so nothing waits for it where it is read.
struct Id {
  uint32_t low, high;
};

template <typename P>
__device__ __forceinline__ Id read_id(const P& p, uint32_t token, uint32_t entry) {
  const uint32_t wide = p.id_bytes / 8;
  const uint32_t* at = reinterpret_cast<const uint32_t*>(p.ids) + ((uint64_t(token) * p.k + entry) << wide);
  return {at[0], wide ? at[1] : 0};
}

// The slot for an expert of a token, or -1.
template <typename P>
__device__ __forceinline__ int32_t slot_of(const P& p, uint32_t token, Id id) {
  const uint32_t limit = p.placement == by_rank ? p.size : p.experts;
  // Those below 0 are above all others.
  if (id.high != 0 || id.low >= limit) return -1;
  if (p.placement != by_map) return int32_t(id.low);
  const int32_t* slots = reinterpret_cast<const int32_t*>(p.map) + uint64_t(id.low) * p.copies;
  uint32_t there = 0;
  while (there < p.copies && slots[there] >= 0) ++there;
  if (there == 0) return -1;
  const int32_t slot = slots[(token + p.rank) % there];
  return uint32_t(slot) < p.per_rank * p.size ? slot : -1;
}

// That of one of a token's experts.
template <typename P>
__device__ __forceinline__ int32_t chosen_slot(const P& p, uint32_t token, uint32_t entry) {
  return slot_of(p, token, read_id(p, token, entry));
}

// A slot, or -1 if it is one of an absent rank's.
template <typename P>
__device__ __forceinline__ int32_t present_slot(const P& p, int32_t slot, uint32_t absent) {
  return absent != 0 && slot >= 0 && (absent >> rank_of_slot(p, uint32_t(slot)) & 1) ? -1 : slot;
}

// What a slot of this rank is called in the ids of received rows, counted from its first one; -1 for none.
template <typename P>
__device__ __forceinline__ int32_t called(const P& p, int32_t slot) {
  return int32_t(slot < 0 ? p.no_id : p.first_id + uint32_t(slot));
}

// n / d, where `inverse` is that of d (crates/plan/src/records.rs): too small by 1 at most, which the rest shows.
__device__ __forceinline__ uint32_t divided(uint32_t n, uint32_t d, uint32_t inverse, uint32_t& rest) {
  uint32_t q = __umulhi(n, inverse);
  rest = n - q * d;
  if (rest >= d) rest -= d, ++q;
  return q;
}

// Of the lanes up to this one.
__device__ __forceinline__ uint32_t sum_of_lanes(uint32_t mine) {
#pragma unroll
  for (uint32_t d = 1; d < 32; d *= 2) {
    const uint32_t below = __shfl_up_sync(0xFFFFFFFFu, mine, d);
    if (threadIdx.x % 32 >= d) mine += below;
  }
  return mine;
}

// The sum of what the warps before this one have, of which this one has `own`; and of all. By all threads of a block.
__device__ __forceinline__ uint32_t sum_of_warps_before(uint32_t own, uint32_t& all) {
  __shared__ uint32_t warps[33];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) warps[warp] = own;
  __syncthreads();
  if (warp == 0) {
    const uint32_t one = lane < blockDim.x / 32 ? warps[lane] : 0, sum = sum_of_lanes(one);
    warps[lane] = sum - one;
    if (lane == 31) warps[32] = sum;
  }
  __syncthreads();
  all = warps[32];
  return warps[warp];
}

// How many of the threads before this one have `mine`, and how many of all. By all threads of a block.
__device__ __forceinline__ uint32_t rank_among(bool mine, uint32_t& all) {
  const uint32_t votes = __ballot_sync(0xFFFFFFFFu, mine);
  return sum_of_warps_before(__popc(votes), all) + __popc(votes & ((1u << threadIdx.x % 32) - 1));
}

// The sum of what the threads before this one have, and of all. By all threads of a block.
__device__ __forceinline__ uint32_t sum_before(uint32_t mine, uint32_t& all) {
  const uint32_t sum = sum_of_lanes(mine);
  return sum_of_warps_before(__shfl_sync(0xFFFFFFFFu, sum, 31), all) + sum - mine;
}

}  // namespace brigade
