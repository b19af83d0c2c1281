// What the blocks of a dispatch that is pushed know of the call, and parts of rows that are not whole granules (push_dispatch.cuh).
#pragma once
#include "copy.cuh"
#include "escaped.cuh"
#include "slots.cuh"

namespace brigade {

__device__ inline void poison_outputs(const PushDispatchParams& p) {
#pragma unroll 1
  for (uint32_t i = 0; i < 10; ++i) poison(p.poisoned[i], p.poisoned_bytes[i], p.poisons[i], threadIdx.x, blockDim.x);
}

enum Section : uint32_t { row = 0, scales = 1, token = 2, slots_of_row = 3, weights = 4, beside = 5 };
enum Arrangement : uint32_t { dense = 0, by_source = 1, by_expert = 2 };

constexpr uint32_t Most = 8;

// Tokens whose ways to a rank are bits of one granule, and of one of its words: which is never the sentinel.
constexpr uint32_t PerGranule = 64, PerWord = 16;

// Entries whose slots are kept.
constexpr uint32_t Kept = for_experts ? 8192 : 5120;

// What a block knows of the call. Whoever includes this says whether it is for many tokens of a rank, or for rows by expert: there is no room for
// both.
struct Ways {
  static constexpr uint32_t Tokens = many ? PUSH_MANY_TOKENS : PUSH_TOKENS;
  static constexpr uint32_t Threads = for_experts ? ALL_REDUCE_THREADS : 1, Places = for_experts ? PUSH_PLACES : 2;
  // Tokens whose ranks share a word.
  static constexpr uint32_t PerMask = many || for_experts ? 4 : 1;

  // Which ranks each own token goes to.
  uint32_t masks[Tokens / PerMask];
  // Which tokens of each rank come: a bit for each, and above them how many came before these.
  uint32_t coming[Most][Tokens / PerWord];
  // Slots of all entries, counted from 1, if they are few enough.
  uint16_t slot[Kept];
  // By expert: those of some entries, and above them which of this rank's rows for the slot each is.
  uint32_t numbered[Threads];
  // By expert: how often entries that have been counted name each slot, two of them in a word.
  uint32_t names[Places / 2];
  // By expert: rows for each own slot from the ranks before each one, and behind the last one's, from all.
  uint32_t earlier[Places];
  // Rows to each rank, and from each rank, and behind which of its tokens none comes.
  uint32_t to[Most], came[Most], till[Most];
  // First slot of each rank.
  uint32_t slots[Most + 1];
  // Where the first row of each rank lies.
  uint32_t at[Most + 1];
  // Rows of each slot, or by expert, where they begin.
  uint32_t count[for_experts ? 1 : PUSH_SLOTS], begin[Places / 2 + 1];
  // By expert: own tokens that this block tells of and takes, from the first up to the end.
  uint32_t least, end;
  // Behind which token of any rank none comes.
  uint32_t most;
  // What is to be taken next.
  uint32_t item;

  __device__ __forceinline__ uint32_t mask(uint32_t t) const { return masks[t / PerMask] >> t % PerMask * Most; }
  __device__ __forceinline__ void add(uint32_t t, uint32_t ranks) { atomicOr(&masks[t / PerMask], ranks << t % PerMask * Most); }

  // By expert: so many more entries name this slot, counted from 1; and how many have named one, counted from 0.
  __device__ __forceinline__ void name(uint32_t slot, uint32_t times) {
    if (slot != 0) atomicAdd(&names[(slot - 1) / 2], times << (slot - 1) % 2 * 16);
  }
  __device__ __forceinline__ uint32_t named(uint32_t slot) const { return names[slot / 2] >> slot % 2 * 16 & 0xFFFF; }
};

__shared__ Ways ways;

// What is called instead of inlined keeps the kernel small: it runs through most of its code once, and fetches that from far away.

// The slot of an own entry, or -1.
__device__ __noinline__ int32_t find_slot(const PushDispatchParams& p, uint32_t t, uint32_t e) { return chosen_slot(p, t, e); }

// The same once it is known.
__device__ __forceinline__ int32_t own_slot(const PushDispatchParams& p, uint32_t t, uint32_t e) {
  return p.tokens * p.k <= Kept ? int32_t(ways.slot[t * p.k + e]) - 1 : find_slot(p, t, e);
}

// The slot of an own entry at a rank, counted from 1; 0 if it is not there.
__device__ __forceinline__ uint32_t slot_at(const PushDispatchParams& p, uint32_t to, uint32_t t, uint32_t e) {
  const int32_t slot = own_slot(p, t, e), first = int32_t(ways.slots[to]);
  return slot >= first && slot < int32_t(ways.slots[to + 1]) ? uint32_t(slot - first) + 1 : 0;
}

// Part of the header of a row for a rank: the token, and then two slots in each word. So none is the sentinel.
__device__ __noinline__ uint4 header_of(const PushDispatchParams& p, uint32_t to, uint32_t t, uint32_t h) {
  uint32_t w[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const int32_t e = 2 * (4 * int32_t(h) + int32_t(i) - 1);
    w[i] = t;
    if (e < 0) continue;
    w[i] = e < int32_t(p.k) ? slot_at(p, to, t, e) : 0;
    if (e + 1 < int32_t(p.k)) w[i] |= slot_at(p, to, t, e + 1) << 16;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Part of a row's image which is not a whole granule of the row itself.
__device__ __noinline__ uint4 rare_input(const PushDispatchParams& p, uint32_t from, uint32_t to, uint32_t g) {
  uint32_t s = 0;
#pragma unroll 1
  while (p.first_granule[s + 1] <= g) ++s;
  const uint64_t at = 16ull * (g - p.first_granule[s]), left = p.row_bytes[s] - at;
  if (s != weights) return any_input(p.from[s] + from * p.row_bytes[s] + at, left < 16 ? uint32_t(left) : 16);
  uint32_t w[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t e = uint32_t(at / 4) + i;
    const bool theirs = e < p.k && slot_at(p, to, from, e) != 0;
    w[i] = theirs ? reinterpret_cast<const uint32_t*>(p.from[weights])[uint64_t(from) * p.k + e] : 0;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __noinline__ void rare_output(const PushDispatchParams& p, uint64_t at, uint32_t g, uint4 v) {
  uint32_t s = 0;
#pragma unroll 1
  while (p.first_granule[s + 1] <= g) ++s;
  // Of a row for one expert, whoever places it writes its weight.
  if (s == weights && p.arrangement == by_expert) return;
  const uint64_t in_row = 16ull * (g - p.first_granule[s]), left = p.row_bytes[s] - in_row;
  const uint32_t bytes = left < 16 ? uint32_t(left) : 16;
  if (s == scales && p.scale_words != 0) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll 1
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      reinterpret_cast<uint32_t*>(p.to[s])[(in_row / 4 + i) * p.capacity + at] = w[i];
    }
    return;
  }
  any_output(p.to[s] + at * p.row_bytes[s] + in_row, bytes, v);
}

// An entry of a token, as a thread reads it: how its id lies in memory. What is behind the last one reads nothing.
struct Entry {
  uint32_t t;
  Id id;

  Entry() = default;
  __device__ __forceinline__ Entry(const PushDispatchParams& p, uint32_t n) : id{~0u, ~0u} {
    uint32_t e;
    t = divided(n, p.k, p.inverse_k, e);
    if (n < p.tokens * p.k && !p.again) id = read_id(p, t, e);
  }
};

// In a call that is like an earlier one.
__device__ __noinline__ void find_ways_again(const PushDispatchParams& p) {
#pragma unroll 1
  for (uint32_t t = threadIdx.x; t < p.tokens; t += blockDim.x) {
    uint32_t mask = 0;
#pragma unroll 1
    for (uint32_t r = 0; r < p.size; ++r) {
      mask |= uint32_t(reinterpret_cast<const int32_t*>(p.positions)[uint64_t(t) * p.size + r] >= 0) << r;
    }
    ways.add(t, mask);
  }
  __syncthreads();
}

// No entry has been counted yet. By all threads.
__device__ __forceinline__ void begin_names(const PushDispatchParams& p) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; 2 * i < p.all_slots; i += blockDim.x) ways.names[i] = 0;
}

// What is known before anything has been read. By all threads, before a barrier of the block.
__device__ __forceinline__ void begin_ways(const PushDispatchParams& p) {
  if (threadIdx.x <= Most) ways.slots[threadIdx.x] = threadIdx.x <= p.size ? first_slot(p, threadIdx.x) : ~0u;
  if (threadIdx.x == 0) ways.item = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i * Ways::PerMask < p.tokens; i += blockDim.x) ways.masks[i] = 0;
  if (for_experts) begin_names(p);
}

// Calls `work(n, t, slot)` for the entries from `start` up to `end`, of which each thread has read its first. By all threads.
template <typename Work>
__device__ __forceinline__ void for_entries(const PushDispatchParams& p, uint32_t start, uint32_t end, Entry first, Work work) {
  // So many are on their way while others are handled.
  constexpr uint32_t Ahead = many ? 4 : 1;
  const uint32_t threads = blockDim.x;
  Entry next[Ahead] = {first};
#pragma unroll
  for (uint32_t i = 1; i < Ahead; ++i) next[i] = Entry(p, start + threadIdx.x + i * threads);
#pragma unroll 1
  for (uint32_t n = start + threadIdx.x; n < end; n += Ahead * threads) {
    Entry now[Ahead];
#pragma unroll
    for (uint32_t i = 0; i < Ahead; ++i) now[i] = next[i], next[i] = Entry(p, n + (Ahead + i) * threads);
#pragma unroll
    for (uint32_t i = 0; i < Ahead; ++i) {
      if (i > 0 && n + i * threads >= end) continue;
      work(n + i * threads, now[i].t, slot_of(p, now[i].t, now[i].id));
    }
  }
}

// Where own tokens go of the entries from `start` up to `end`, of which each thread has read its first. By all threads.
__device__ __forceinline__ void find_ways(const PushDispatchParams& p, uint32_t start, uint32_t end, Entry first) {
  const bool kept = p.tokens * p.k <= Kept;
  for_entries(p, start, end, first, [&](uint32_t n, uint32_t t, int32_t slot) {
    if (kept) ways.slot[n] = uint16_t(slot + 1);
    uint32_t r = 0;
#pragma unroll
    for (uint32_t s = 1; s < Most; ++s) r += uint32_t(slot) >= ways.slots[s];
    if (slot >= 0) ways.add(t, 1u << r);
  });
  __syncthreads();
}

// Whether an own token goes to a rank.
__device__ __forceinline__ bool goes(const PushDispatchParams& p, uint32_t t, uint32_t to) {
  return t < p.tokens && (ways.mask(t) >> to & 1);
}

// How many own tokens go to each rank. By all threads of a block.
__device__ __forceinline__ void count_ways(const PushDispatchParams& p) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t r = threadIdx.x / 32; r < p.size; r += blockDim.x / 32) {
    uint32_t all = 0;
#pragma unroll 1
    for (uint32_t t = lane; t - lane < p.tokens; t += 32) all += __popc(__ballot_sync(0xFFFFFFFFu, goes(p, t, r)));
    if (lane == 0) ways.to[r] = all;
  }
  __syncthreads();
}

// What the caller is told of own tokens, which have been counted. By all threads of a block.
__device__ __noinline__ void tell_ways(const PushDispatchParams& p) {
  const uint32_t me = threadIdx.x, threads = blockDim.x;
  int32_t* positions = reinterpret_cast<int32_t*>(p.positions);
  uint32_t* rows_per_slot = reinterpret_cast<uint32_t*>(p.rows_per_slot);
  uint32_t* sent_offsets = reinterpret_cast<uint32_t*>(p.sent_offsets);
  int32_t* sent = reinterpret_cast<int32_t*>(p.sent);
  // Counted where slots that come are counted later, if they are few enough. By expert they have been.
  const bool few = !for_experts && p.all_slots <= PUSH_SLOTS;
#pragma unroll 1
  for (uint32_t s = me; s < p.all_slots; s += threads) (few ? ways.count : rows_per_slot)[s] = for_experts ? ways.named(s) : 0;
  __syncthreads();
  const auto tell = [&](uint32_t n, int32_t slot) {
    reinterpret_cast<int32_t*>(p.chosen)[n] = slot;
    if (!for_experts && slot >= 0) atomicAdd((few ? ways.count : rows_per_slot) + slot, 1u);
  };
  if (many) {
    for_entries(p, 0, p.tokens * p.k, Entry(p, me), [&](uint32_t n, uint32_t, int32_t slot) { tell(n, slot); });
  } else {
#pragma unroll 1
    for (uint32_t n = me; n < p.tokens * p.k; n += threads) tell(n, own_slot(p, n / p.k, n % p.k));
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t s = me; s < p.all_slots && few; s += threads) rows_per_slot[s] = ways.count[s];
  __syncthreads();
  const uint32_t lane = me % 32;
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t r = 0; r < p.size; ++r) {
    if (me == 0) sent_offsets[r] = all;
    // A warp for each rank.
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t t = lane; r % (threads / 32) == me / 32 && t - lane < p.tokens; t += 32) {
      const bool mine = goes(p, t, r);
      const uint32_t votes = __ballot_sync(0xFFFFFFFFu, mine), at = before + __popc(votes & ((1u << lane) - 1));
      if (t < p.tokens) positions[uint64_t(t) * p.size + r] = mine ? int32_t(at) : -1;
      if (mine) sent[all + at] = int32_t(t);
      before += __popc(votes);
    }
    all += ways.to[r];
  }
  if (me == 0) sent_offsets[p.size] = all;
#pragma unroll 1
  for (uint32_t i = all + me; i < p.room; i += threads) sent[i] = -1;
}

}  // namespace brigade
