// What both ways of a low-latency exchange know (low_latency.cu): where rows and words lie, and how rows are copied.
#pragma once
#include "copy.cuh"
#include "in_turn.cuh"
#include "params.cuh"
#include "payload.cuh"
#include "poison.cuh"
#include "slots.cuh"

namespace brigade {

// Whatever says where experts are, each rank has as many slots as others, or one more: told so, none of these divides, which is long code to run once.
__device__ __forceinline__ uint32_t first_slot(const LowLatencyParams& p, uint32_t rank) { return rank * p.slots_each + min(rank, p.slots_more); }

__device__ __forceinline__ uint32_t rank_of_slot(const LowLatencyParams& p, uint32_t slot) {
  uint32_t rank = 0;
#pragma unroll 1
  while (rank + 1 < p.size && slot >= first_slot(p, rank + 1)) ++rank;
  return rank;
}

}  // namespace brigade

using namespace brigade;

// The one between them is for the host.
enum Section : uint32_t { row = 0, scales = 1, weights = 3 };

// On the way back, a row and what belongs to it share a place.
constexpr uint32_t both = 2;

// As many find room on a multiprocessor as places for waiting blocks are counted for.
constexpr uint32_t most_threads = 512;

// What a launch gives, if the group was stopped: by a block.
__device__ __noinline__ void poison_outputs(const LowLatencyParams& p) {
  const uint64_t outputs[5] = {p.to, p.to_scales, p.counts, p.sources, p.ranges};
#pragma unroll
  for (uint32_t i = 0; i < 5; ++i) poison(outputs[i], p.poisoned_bytes[i], p.poisons[i], threadIdx.x, blockDim.x);
}

// At the end of a launch that gives something, by all threads of a block.
__device__ __forceinline__ void end_receive(const LowLatencyParams& p, bool well) {
  if (leave_receive(p, well)) poison_outputs(p);
}

// Rows between any addresses: most of the code of a copy, and rare. Not inlined, since a kernel that runs through its code once waits for the code.
__device__ __noinline__ void copy_odd(uint64_t to, uint64_t from, uint64_t bytes, uint32_t thread, uint32_t threads) {
  copy_bytes(to, from, bytes, thread, threads);
}

__device__ __forceinline__ void copy_row(uint64_t to, uint64_t from, uint64_t bytes, uint32_t thread, uint32_t threads) {
  if ((to | from | bytes) % 16 != 0) return copy_odd(to, from, bytes, thread, threads);
  const uint4* in = reinterpret_cast<const uint4*>(from);
  uint4* out = reinterpret_cast<uint4*>(to);
  constexpr uint32_t in_flight = 4;
  const uint32_t words = uint32_t(bytes / 16);
#pragma unroll 1
  for (uint32_t i = thread; i < words; i += in_flight * threads) {
    uint4 held[in_flight];
#pragma unroll
    for (uint32_t j = 0; j < in_flight; ++j) {
      if (i + j * threads < words) held[j] = in[i + j * threads];
    }
#pragma unroll
    for (uint32_t j = 0; j < in_flight; ++j) {
      if (i + j * threads < words) out[i + j * threads] = held[j];
    }
  }
}

// The part of sender `from` of a half at `at`.
__device__ __forceinline__ uint64_t part(const LowLatencyParams& p, uint32_t at, uint32_t from) {
  return p.base + at * p.stride + p.half + from * p.part_bytes;
}

__device__ __forceinline__ uint64_t place(const LowLatencyParams& p, uint64_t part, Section s, uint32_t token) {
  return part + p.section[s] + token * p.row_bytes[s];
}

// The words by which sender `from` tells rank `at`, and where among them those are that tell of rows, and of what one of their experts is.
__device__ __forceinline__ uint64_t* words_of(const LowLatencyParams& p, uint32_t at, uint32_t from) {
  return reinterpret_cast<uint64_t*>(p.base + at * p.stride + p.told + from * p.told_bytes);
}
constexpr uint32_t of_rows = 1;
__device__ __forceinline__ uint32_t of_names(const LowLatencyParams& p, uint32_t token) { return of_rows + p.max_tokens + token * p.k; }
__device__ __forceinline__ uint32_t of_counts(const LowLatencyParams& p) { return of_names(p, p.max_tokens); }

// The word that tells that a row has come back to rank `at`.
__device__ __forceinline__ uint64_t* word_back(const LowLatencyParams& p, uint32_t at, uint64_t token, uint32_t entry) {
  return words_of(p, at, 0) + token * p.k + entry;
}

__device__ __forceinline__ void count_moved(const LowLatencyParams& p, uint64_t bytes) {
  if (bytes > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)bytes);
}

// Calls `f` with the first of eight columns, time and again, until all threads of each warp are behind the last one; and whether this one is
// not yet.
template <typename F>
__device__ __forceinline__ void for_columns(const LowLatencyParams& p, uint32_t thread, uint32_t threads, F f) {
  for (uint32_t i = thread * 8; i - threadIdx.x % 32 * 8 < p.hidden; i += threads * 8) f(i, i < p.hidden);
}

// Rows of a token, at most one for each lane's expert, or what a warp adds: in this order, and what each is multiplied by.
struct Listed {
  uint32_t at[32];
  float weight[32];
};

// Lists those lanes that have `place`, each at its place. What was listed before is no longer read.
__device__ __forceinline__ void list(Listed& to, int32_t place, uint32_t at, float weight) {
  __syncwarp();
  if (place >= 0) to.at[place] = at, to.weight[place] = weight;
  __syncwarp();
}
