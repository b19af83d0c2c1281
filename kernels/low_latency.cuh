// What both ways of a low-latency exchange know (low_latency.cu): where rows and words lie, and how rows are copied.
#pragma once
#include "copy.cuh"
#include "in_turn.cuh"
#include "params.cuh"
#include "payload.cuh"
#include "poison.cuh"
#include "push.cuh"
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

// Rows that tell of themselves: their memory holds nothing but the sentinel before they come, and whoever takes them empties it. None of these has
// a word that is the sentinel: fp8 that was cast here, with scales of 32 bits.
__device__ __forceinline__ bool tells_there(const LowLatencyParams& p) {
  const uint64_t at = p.base | p.stride | p.half | p.part_bytes | p.section[row] | p.row_bytes[row] | p.section[scales] | p.row_bytes[scales];
  return p.alone != 0 && (p.payload == fp8 + as_f32 || p.payload == fp8 + as_power_of_two) && at % 16 == 0 && p.scale_words == 0;
}

// On the way back, numbers of 16 bits, since a word that is the sentinel is two that are none.
__device__ __forceinline__ bool tells_back(const LowLatencyParams& p) {
  return p.alone != 0 && p.payload == as_is && p.from_type != F32 && (p.base | p.stride | p.half | p.row_bytes[row] | p.row_bytes[both]) % 16 == 0;
}

__device__ __forceinline__ uint4 without_sentinel(const LowLatencyParams& p, uint4 v) {
  const uint32_t nan = p.from_type == BF16 ? 0x7FC07FC0u : 0x7E007E00u;
  return make_uint4(v.x == sentinel ? nan : v.x, v.y == sentinel ? nan : v.y, v.z == sentinel ? nan : v.z, v.w == sentinel ? nan : v.w);
}

// By a warp, of which lanes that ask wait for what a rank's rows tell of themselves, until it has come.
template <typename Come>
__device__ __forceinline__ bool await_row(const LowLatencyParams& p, uint32_t from, bool asked, Come come) {
  Waiting w{};
  w.end = asked ? End::going_on : End::there;
  w.peer = w.slot = w.blamed = from;
  w.word = p.filled + from * p.pieces;
  w.uncounted = true;
  const bool well = keep_waiting(p, w, [=](const InTurn& turn, Waiting& w) {
    if (come()) {
      w.end = End::there;
    } else {
      w.expected = w.blamed_expected = load_relaxed_sys(turn.word(turn.rank, w.word));
      doubt(turn, w, [=] { return !come(); });
    }
  });
  __syncwarp();
  return well;
}

__device__ __noinline__ bool await_granule(const LowLatencyParams& p, uint32_t from, uint64_t at, bool asked) {
  return await_row(p, from, asked, [=] { return is_there(peek(at)); });
}

__device__ __noinline__ bool await_word(const LowLatencyParams& p, uint32_t from, const uint32_t* at, bool asked) {
  return await_row(p, from, asked, [=] { return load_relaxed_sys(at) != sentinel; });
}

// By a warp: looks at `n` granules for each lane, of which `at(j)` is where the lane's own is, or 0, until all have come. `from(j)` sends them.
template <uint32_t n, typename At, typename From>
__device__ __forceinline__ bool take_granules(const LowLatencyParams& p, uint4 (&held)[n], At at, From from) {
  for (;;) {
    uint32_t missing = n;
#pragma unroll
    for (uint32_t j = 0; j < n; ++j) {
      if (at(j) == 0) continue;
      held[j] = peek(at(j));
    }
#pragma unroll
    for (uint32_t j = 0; j < n; ++j) {
      if (at(j) != 0 && !is_there(held[j])) missing = j;
    }
    if (__all_sync(everybody, missing == n)) break;
    if (!await_granule(p, missing < n ? from(missing) : p.rank, missing < n ? at(missing) : 0, missing < n)) return false;
  }
#pragma unroll
  for (uint32_t j = 0; j < n; ++j) {
    if (at(j) != 0) push(at(j), make_uint4(sentinel, sentinel, sentinel, sentinel));
  }
  return true;
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
