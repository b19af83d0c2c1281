// The low-latency exchange, after DeepEP's low-latency dispatch and combine: every row has a place at its receiver that its sender
// knows, whatever else is sent. Nobody waits in these kernels: steps before them have waited for the half's credits or for everybody's
// flags, and steps behind those that send post flags. Credits are given when the slot is used again.
//
// There: a rank writes own tokens into its part of the halves of all, each at the token's own place, and beside every token which of the
// receiver's experts it names; a row goes once to a rank. The receiver packs the rows of each of its experts, by source and token. Back:
// there is a place for each expert of each token at the rank that has the token. The sums there are in f32, products rounded before they are
// added, never fused, so that the host's are the same bits.
#include "back.cuh"
#include "copy.cuh"
#include "params.cuh"
#include "poison.cuh"
#include "slots.cuh"
#include "steps.cuh"

using namespace brigade;

enum Section : uint32_t { row = 0, scales = 1, named = 2 };

constexpr uint32_t everybody = 0xFFFFFFFFu;

__device__ __forceinline__ bool is_stopped(const LowLatencyParams& p) {
  return is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state));
}

// What a launch gives, if the group was stopped: by all threads. Who waited for it in vain has stopped the group before this kernel.
__device__ __noinline__ void poison_outputs(const LowLatencyParams& p) {
  const uint64_t outputs[4] = {p.to, p.to_scales, p.counts, p.sources};
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = uint64_t(gridDim.x) * blockDim.x;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) poison(outputs[i], p.poisoned_bytes[i], p.poisons[i], thread, threads);
}

// The part of sender `from` of a half at `at`.
__device__ __forceinline__ uint64_t part(const LowLatencyParams& p, uint32_t at, uint32_t from) {
  return p.base + at * p.stride + p.half + from * p.part_bytes;
}

__device__ __forceinline__ uint64_t place(const LowLatencyParams& p, uint64_t part, Section s, uint32_t token) {
  return part + p.section[s] + token * p.row_bytes[s];
}

__device__ __forceinline__ void count_moved(const LowLatencyParams& p, uint64_t bytes) {
  if (bytes > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)bytes);
}

// A group of threads, whole warps, for each own token and rank.
extern "C" __global__ void __launch_bounds__(256) brigade_low_latency_send(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  if (blockIdx.x == 0) {
    for (uint32_t to = threadIdx.x; to < p.size; to += blockDim.x) *reinterpret_cast<uint64_t*>(part(p, to, p.rank)) = p.tokens;
  }
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads, lane = threadIdx.x % 32;
  uint64_t moved = 0;
  for (uint32_t w = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; w < p.tokens * p.size; w += groups) {
    // The next rank first, so that not all write to one.
    const uint32_t to = (p.rank + 1 + w % p.size) % p.size, token = w / p.size;
    const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
    // Every warp finds out by itself whether the row goes there: k is at most 32.
    const int32_t slot = lane < p.k ? chosen_slot(p, token, lane) : -1;
    const bool theirs = slot >= begin && slot < end;
    const bool goes = __any_sync(everybody, theirs);
    const uint64_t target = part(p, to, p.rank);
    if (thread < p.k) {
      reinterpret_cast<int32_t*>(place(p, target, named, token))[thread] = theirs ? slot - begin : -1;
      if (to == p.rank) reinterpret_cast<int32_t*>(p.chosen)[uint64_t(token) * p.k + thread] = slot;
    }
    if (!goes) continue;
    copy_bytes(place(p, target, row, token), p.from + token * p.row_bytes[row], p.row_bytes[row], thread, p.row_threads);
    if (p.from_scales != 0) {
      const uint64_t bytes = p.row_bytes[scales];
      copy_bytes(place(p, target, scales, token), p.from_scales + token * bytes, bytes, thread, p.row_threads);
    }
    if (thread == 0 && to != p.rank) moved += p.row_bytes[row] + p.row_bytes[scales];
  }
  count_moved(p, moved);
}

// How a block's threads are shared out among so many rows: as many for each as can be.
__device__ __forceinline__ uint32_t threads_for(uint32_t rows) {
  uint32_t threads = 32;
  while (threads < blockDim.x && 2 * threads * rows <= blockDim.x) threads *= 2;
  return threads;
}

// A block for each of this rank's experts, or several that all look for its rows and take each their share of them.
extern "C" __global__ void __launch_bounds__(1024) brigade_low_latency_receive(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return poison_outputs(p);
  // Of the places that are looked at together, those that have a row for this expert.
  __shared__ uint32_t found[1024];
  const uint32_t expert = blockIdx.x / p.share, mine = blockIdx.x % p.share;
  const uint64_t first = uint64_t(expert) * p.room;
  uint32_t next = 0;
  for (uint32_t start = 0; start < p.size * p.max_tokens; start += blockDim.x) {
    const uint32_t at = start + threadIdx.x, source = at / p.max_tokens, token = at % p.max_tokens;
    uint32_t entries = 0;
    if (source < p.size) {
      const uint64_t came = part(p, p.rank, source);
      if (token < *reinterpret_cast<const uint64_t*>(came)) {
        const int32_t* names = reinterpret_cast<const int32_t*>(place(p, came, named, token));
        for (uint32_t e = 0; e < p.k; ++e) entries |= uint32_t(names[e] == int32_t(expert)) << e;
      }
    }
    uint32_t all;
    // What was found before has been taken by all threads that come here.
    const uint32_t i = rank_among(entries != 0, all);
    if (entries != 0) {
      found[i] = at;
      int32_t* said = reinterpret_cast<int32_t*>(p.sources) + (first + next + i) * 3;
      if (mine == 0) said[0] = int32_t(source), said[1] = int32_t(token), said[2] = int32_t(entries);
    }
    __syncthreads();
    const uint32_t threads = threads_for((all + p.share - 1) / p.share);
    const uint32_t thread = threadIdx.x % threads, step = blockDim.x / threads * p.share;
    for (uint32_t n = mine + threadIdx.x / threads * p.share; n < all; n += step) {
      const uint32_t token = found[n] % p.max_tokens;
      const uint64_t came = part(p, p.rank, found[n] / p.max_tokens), to = first + next + n;
      copy_bytes(p.to + to * p.row_bytes[row], place(p, came, row, token), p.row_bytes[row], thread, threads);
      if (p.to_scales == 0) continue;
      const uint64_t bytes = p.row_bytes[scales];
      copy_bytes(p.to_scales + to * bytes, place(p, came, scales, token), bytes, thread, threads);
    }
    next += all;
  }
  if (mine == 0 && threadIdx.x == 0) reinterpret_cast<uint32_t*>(p.counts)[expert] = next;
}

// As many blocks for each expert as its rows were received by.
extern "C" __global__ void __launch_bounds__(1024) brigade_low_latency_back(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t expert = blockIdx.x / p.share, mine = blockIdx.x % p.share;
  const uint64_t first = uint64_t(expert) * p.room;
  const uint32_t all = min(reinterpret_cast<const uint32_t*>(p.counts)[expert], p.room);
  const uint32_t threads = threads_for((all + p.share - 1) / p.share), thread = threadIdx.x % threads;
  uint64_t moved = 0;
  for (uint32_t i = mine + threadIdx.x / threads * p.share; i < all; i += blockDim.x / threads * p.share) {
    const uint32_t* source = reinterpret_cast<const uint32_t*>(p.sources) + (first + i) * 3;
    const uint32_t to = source[0], token = source[1];
    if (to >= p.size || token >= p.max_tokens) continue;
    const uint64_t places = p.base + to * p.stride + p.half + uint64_t(token) * p.k * p.row_bytes[row];
    for (uint32_t entries = source[2]; entries != 0; entries &= entries - 1) {
      const uint32_t e = __ffs(entries) - 1;
      if (e >= p.k) break;
      copy_bytes(places + e * p.row_bytes[row], p.from + (first + i) * p.row_bytes[row], p.row_bytes[row], thread, threads);
      if (thread == 0 && to != p.rank) moved += p.row_bytes[row];
    }
  }
  count_moved(p, moved);
}

// A group of threads for each own token.
extern "C" __global__ void __launch_bounds__(256) brigade_low_latency_sum(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return poison_outputs(p);
  // Rows that are read before they are added.
  constexpr uint32_t at_once = 4;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t out_bytes = uint64_t(p.hidden) * (p.out_type == F32 ? 4 : 2);
  const uint64_t places = p.base + p.rank * p.stride + p.half;
  const bool whole = is_whole(places | p.to, p.hidden);
  const int32_t* slots = reinterpret_cast<const int32_t*>(p.chosen);
  const float* weights = reinterpret_cast<const float*>(p.weights);
  for (uint64_t token = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; token < p.tokens; token += groups) {
    const uint64_t entry = token * p.k;
    for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
      Adding all{};
      for (uint32_t e = 0; e < p.k; e += at_once) {
        Eight x[at_once];
#pragma unroll
        for (uint32_t j = 0; j < at_once; ++j) {
          const bool there = e + j < p.k && slots[entry + e + j] >= 0;
          if (there) x[j] = load(p.from_type, places + (entry + e + j) * p.row_bytes[row], i, p.hidden, whole);
        }
#pragma unroll
        for (uint32_t j = 0; j < at_once; ++j) {
          if (e + j < p.k && slots[entry + e + j] >= 0) all.add(x[j], weights[entry + e + j]);
        }
      }
      store(p.out_type, p.to + token * out_bytes, i, p.hidden, whole, all.sum);
    }
  }
}
