// The low-latency exchange, after DeepEP's low-latency dispatch and combine: every row has a place at its receiver that its sender
// knows, whatever else is sent. Each half of it is a launch (in_turn.cuh): what sends waits for the half's credits, and tells of each row
// behind it; what receives takes rows as they come, and may do so while its own rank still sends. Credits are given when the slot is used again.
//
// There: a rank first tells all others which of their experts its tokens name, and then writes the tokens into its part of the halves of all, each
// at the token's own place, with their weights if they have any; a row goes once to a rank. The receiver packs the rows of each of its
// experts, by source and token, and with weights it writes down which row each expert of a token got. Where a row lies among those of its source, the
// source has counted; behind how many of other sources, their numbers of rows say: so each row is packed by itself. Back: there is a place for each expert
// of each token at the rank that has the token; where a rank adds a token's rows before they go, their sum takes the place of the first. The
// sums are in f32, products rounded before they are added, never fused, so that the host's are the same bits.
//
// Words that tell, of each sender at each receiver (crates/plan/src/low_latency.rs): how many tokens it has; of each token, whether its row has
// come, and which of the receiver's experts its experts are, and their how manieth rows there it is; of each of the receiver's experts, how many rows it
// gets. On the way back, of each expert of each token whether its row has come.
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

// The memory of several ranks, of the one behind this one first, so that not all write to the same.
struct Targets {
  uint64_t first, apart;
  uint32_t rank, size, which;
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (uint32_t i = 1; i <= size; ++i) {
      const uint32_t to = rank + i < size ? rank + i : rank + i - size;
      if (which >> to & 1) f(first + to * apart);
    }
  }
};

// A row there that is rare.
__device__ __noinline__ void send_any(const LowLatencyParams& p, const Targets& targets, uint32_t token, uint64_t from, uint32_t thread) {
  const uint32_t format = p.payload - fp8, blocks = (p.hidden + block_columns - 1) / block_columns;
  const bool whole = is_whole(from, p.hidden);
  targets.each([&](uint64_t part) {
    const uint64_t to = part + p.section[row] + token * p.row_bytes[row], its_scales = part + p.section[scales] + token * p.row_bytes[scales];
    if (p.payload == as_is) return copy_row(to, from, p.row_bytes[row], thread, p.row_threads);
    // What fills up the last word of scales.
    for (uint64_t i = blocks + thread; format == as_exponent && i < p.row_bytes[scales]; i += p.row_threads) reinterpret_cast<uint8_t*>(its_scales)[i] = 0;
    for_columns(p, thread, p.row_threads, [&](uint32_t i, bool there) {
      store_fp8(format, to, its_scales, i, there ? load(p.from_type, from, i, p.hidden, whole) : Eight{}, there);
    });
  });
}

// Tokens of a block that writes, one behind the other.
struct Tokens {
  uint32_t first, end;
  __device__ __forceinline__ explicit Tokens(const LowLatencyParams& p) : first(p.tokens), end(p.tokens) {
    const Writers writers;
    if (!writers.is_one()) return;
    const uint32_t each = p.tokens / writers.blocks, more = p.tokens % writers.blocks;
    first = writers.me * each + min(writers.me, more), end = first + each + (writers.me < more);
  }
};

// Slots that are looked at together.
constexpr uint32_t most_slots = 1024;

// How many rows each of these has of the tokens that a block has counted.
__shared__ uint32_t rows_before[most_slots];

// An entry of a token, as each lane has one, so that all of a token's are in one warp. Those of absent ranks count, and are told to nobody.
struct Entry {
  uint32_t token, entry;
  int32_t slot;
  // Whether it is one of those from `start` on; lanes that have the same, and of all lanes those that are the first of their token with theirs.
  bool here;
  uint32_t same, firsts;
  // Whose it is, and what it is called there if it gets its first row from here.
  uint32_t owner, name;

  Entry() = default;

  // Of so many tokens of a warp, from `first` on.
  __device__ __forceinline__ Entry(const LowLatencyParams& p, uint32_t first, uint32_t end, uint32_t start) {
    const uint32_t lane = threadIdx.x % 32;
    token = first + lane / p.k, entry = lane % p.k;
    if (lane >= tokens_of_warp(p) * p.k || token >= end) token = p.tokens;
    slot = token < p.tokens ? chosen_slot(p, token, entry) : -1;
    here = slot >= int32_t(start) && slot - start < most_slots;
    same = __match_any_sync(everybody, here ? slot : -1);
    firsts = __ballot_sync(everybody, here && (same & before_it() & ~before_token()) == 0);
    owner = here ? rank_of_slot(p, slot) : p.size;
    name = here ? (slot - first_slot(p, owner)) * p.max_tokens : 0;
  }
  static __device__ __forceinline__ uint32_t tokens_of_warp(const LowLatencyParams& p) { return 32 / p.k; }
  static __device__ __forceinline__ uint32_t before_it() { return (1u << threadIdx.x % 32) - 1; }
  __device__ __forceinline__ uint32_t before_token() const { return (1u << (threadIdx.x % 32 - entry)) - 1; }
  __device__ __forceinline__ bool is_first() const { return firsts >> threadIdx.x % 32 & 1; }
};

__device__ __forceinline__ void count_none() {
  for (uint32_t i = threadIdx.x; i < most_slots; i += blockDim.x) rows_before[i] = 0;
}

// Counts the rows that slots from `start` on have of own tokens up to `end`. By all warps of a block but the first; seen by all behind the next meeting.
__device__ __forceinline__ void count_rows(const LowLatencyParams& p, uint32_t end, uint32_t start) {
  const uint32_t each = Entry::tokens_of_warp(p), step = (blockDim.x / 32 - 1) * each;
#pragma unroll 2
  for (uint32_t first = (threadIdx.x / 32 - 1) * each; first < end; first += step) {
    const Entry e(p, first, end, start);
    if (e.is_first()) atomicAdd(rows_before + e.slot - start, 1);
  }
}

// Tells all ranks which of their experts a block's tokens name, and its how manieth row from here each gets; by a warp, which has looked at the first ones.
__device__ __forceinline__ void tell_names(const LowLatencyParams& p, const Tokens& mine, uint32_t start, Entry e) {
  for (uint32_t first = mine.first; first < mine.end;) {
    const uint32_t row = e.here ? rows_before[e.slot - start] + __popc(e.same & e.firsts & e.before_token()) : 0;
    __syncwarp();
    if (e.is_first()) atomicAdd(rows_before + e.slot - start, 1);
    // With the first slots, those that are none.
    if (e.here || (start == 0 && e.slot < 0 && e.token < p.tokens)) {
      constexpr uint32_t nothing = ~0u;
      const uint32_t word = of_names(p, e.token) + e.entry;
      for (uint32_t to = 0; to < p.size; ++to) {
        if (!(these_absent >> to & 1)) store_relaxed_sys(words_of(p, to, p.rank) + word, told(this_use, to == e.owner ? e.name + row : nothing));
      }
      reinterpret_cast<int32_t*>(p.chosen)[uint64_t(e.token) * p.k + e.entry] = present_slot(p, e.slot, these_absent);
    }
    __syncwarp();
    first += Entry::tokens_of_warp(p);
    if (first < mine.end) e = Entry(p, first, mine.end, start);
  }
}

// And by the first block how many rows each of their experts gets.
__device__ __forceinline__ void tell_numbers(const LowLatencyParams& p, uint32_t start) {
  for (uint32_t i = threadIdx.x; i < most_slots && start + i < first_slot(p, p.size); i += blockDim.x) {
    const uint32_t to = rank_of_slot(p, start + i);
    if (these_absent >> to & 1) continue;
    store_relaxed_sys(words_of(p, to, p.rank) + of_counts(p) + start + i - first_slot(p, to), told(this_use, rows_before[i]));
  }
}

// By all threads of a block, which has counted the rows of the first slots; its last warp has looked at its first tokens.
__device__ __forceinline__ void tell_all(const LowLatencyParams& p, const Tokens& mine, const Entry& looked) {
  const uint32_t warp = threadIdx.x / 32, last = blockDim.x / 32 - 1;
  if (warp == last) tell_names(p, mine, 0, looked);
  // It has own tokens besides.
  if (gridDim.x == 1) __syncthreads();
  if (blockIdx.x == 0) tell_numbers(p, 0);
  for (uint32_t start = most_slots; start < first_slot(p, p.size); start += most_slots) {
    __syncthreads();
    count_none();
    __syncthreads();
    if (warp > 0) count_rows(p, mine.first, start);
    __syncthreads();
    if (warp == last) tell_names(p, mine, start, Entry(p, mine.first, mine.end, start));
    __syncthreads();
    if (blockIdx.x == 0) tell_numbers(p, start);
  }
}

// Own rows of a block: a group of threads for each token, and once to each rank. A thread takes two granules at a time, of eight columns if they are cast.
struct OwnRows {
  static constexpr uint32_t at_once = 2;
  const LowLatencyParams& p;
  uint32_t token, end, thread;
  // Of a row.
  uint32_t granules;
  // What this lane has of its token's experts, and this thread's weight of it.
  Id id;
  float weight;

  __device__ __forceinline__ OwnRows(const LowLatencyParams& p, const Tokens& mine)
      : p(p), token(mine.first + threadIdx.x / p.row_threads), end(mine.end), thread(threadIdx.x % p.row_threads), id{0, 0}, weight(0.0f) {
    granules = is_plain() ? uint32_t(bytes() / 16) : 0;
    // Threads that are too few for a row have none.
    if ((threadIdx.x / p.row_threads + 1) * p.row_threads > blockDim.x) token = end;
    begin();
  }

  __device__ __forceinline__ uint64_t bytes() const { return p.payload == as_is ? p.row_bytes[row] : row_bytes_back(p); }
  __device__ __forceinline__ uint64_t from() const { return p.from + token * bytes(); }

  // All but odd addresses, f32 that is cast, what is no whole granule once it is cast, and scales that do not fill their last word.
  __device__ __forceinline__ bool is_plain() const {
    if ((p.from | p.base | p.stride | p.half | p.part_bytes | p.section[row] | p.row_bytes[row]) % 16 != 0) return false;
    if (p.payload == as_is) return true;
    const bool filled = p.payload - fp8 != as_exponent || p.hidden % (4 * block_columns) == 0;
    return filled && p.from_type != F32;
  }

  // What is read first of a row is on its way.
  __device__ __forceinline__ void begin() {
    if (token >= end) return;
    const uint32_t lane = threadIdx.x % 32;
    if (lane < p.k) id = read_id(p, token, lane);
    if (p.weights != 0 && thread < p.k) weight = reinterpret_cast<const float*>(p.weights)[uint64_t(token) * p.k + thread];
  }

  // Every warp finds out by itself to which ranks a row goes, a bit each: k is at most 32.
  __device__ __forceinline__ uint32_t ranks() const {
    const int32_t slot = threadIdx.x % 32 < p.k ? present_slot(p, slot_of(p, token, id), these_absent) : -1;
    return __reduce_or_sync(everybody, slot >= 0 ? 1u << rank_of_slot(p, uint32_t(slot)) : 0);
  }

  // Those granules from `first` on that its threads hold at the same time.
  __device__ __forceinline__ void send_granules(const Targets& targets, uint32_t first) {
    const uint4* in = reinterpret_cast<const uint4*>(from());
    uint4 held[at_once] = {};
#pragma unroll
    for (uint32_t j = 0; j < at_once; ++j) {
      if (first + thread + j * p.row_threads < granules) held[j] = in[first + thread + j * p.row_threads];
    }
    // Not unrolled: code that runs once is waited for.
#pragma unroll 1
    for (uint32_t j = 0, g = first + thread; j < at_once && g < granules; ++j, g += p.row_threads) {
      const uint4 x = j == 0 ? held[0] : held[1];
      targets.each([&](uint64_t part) { reinterpret_cast<uint4*>(part + p.section[row] + token * p.row_bytes[row])[g] = x; });
    }
  }

  // The same of rows that are cast: two granules side by side become one.
  __device__ __forceinline__ void send_cast(const Targets& targets, uint32_t first) {
    const uint32_t g = first + at_once * thread, format = p.payload - fp8, lane = threadIdx.x % 32;
    const bool there = g < granules;
    uint4 held[at_once] = {};
#pragma unroll
    for (uint32_t j = 0; j < at_once; ++j) {
      if (there) held[j] = reinterpret_cast<const uint4*>(from())[g + j];
    }
    uint32_t most = 0;
#pragma unroll
    for (uint32_t j = 0; j < at_once; ++j) {
      const Eight x = eight_of(p.from_type, held[j]);
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) most = max(most, __float_as_uint(x.v[i]) & 0x7FFFFFFFu);
    }
    constexpr uint32_t of_scale = block_columns / (8 * at_once);
    const float scale = scale_as(format, greatest_of<of_scale>(most));
    const Divisor by(scale);
    uint2 low, high;
#pragma unroll 1
    for (uint32_t j = 0; j < at_once; ++j) {
      const auto q = quantized(eight_of(p.from_type, j == 0 ? held[0] : held[1]).v, by, F8E4M3);
      low = high, high = make_uint2(q.words[0], q.words[1]);
    }
    const float its_scale = __shfl_sync(everybody, scale, lane % (32 / of_scale) * of_scale);
    targets.each([&](uint64_t part) {
      if (there) reinterpret_cast<uint4*>(part + p.section[row] + token * p.row_bytes[row])[g / at_once] = make_uint4(low.x, low.y, high.x, high.y);
      // A warp's scales side by side.
      const uint32_t n = (g - at_once * lane) / (at_once * of_scale) + lane;
      if (lane < 32 / of_scale && n < granules / (at_once * of_scale) + (granules % (at_once * of_scale) != 0)) {
        store_scale(format, part + p.section[scales] + token * p.row_bytes[scales], n, its_scale);
      }
    });
  }

  __device__ __forceinline__ void send() {
    uint64_t moved = 0;
    while (token < end) {
      const uint32_t to = ranks();
      const Targets targets{p.base + p.half + p.rank * p.part_bytes, p.stride, p.rank, p.size, to};
      for (uint32_t first = 0; first < granules; first += at_once * p.row_threads) {
        if (p.payload == as_is) {
          send_granules(targets, first);
        } else {
          send_cast(targets, first);
        }
      }
      if (granules == 0) send_any(p, targets, token, from(), thread);
      if (p.weights != 0 && thread < p.k) targets.each([&](uint64_t part) { reinterpret_cast<float*>(place(p, part, weights, token))[thread] = weight; });
      tell_behind(p.row_threads, [&] {
        for (uint32_t at = 0; at < p.size; ++at) {
          if (to >> at & 1) store_relaxed_sys(words_of(p, at, p.rank) + of_rows + token, told(this_use, 0));
        }
      });
      moved += uint64_t(__popc(to & ~(1u << p.rank))) * (p.row_bytes[row] + p.row_bytes[scales] + p.row_bytes[weights]);
      token += blockDim.x / p.row_threads;
      begin();
    }
    if (thread == 0) count_moved(p, moved);
  }
};

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_send(const __grid_constant__ LowLatencyParams p) {
  count_none();
  const Tokens mine(p);
  __syncthreads();
  wait_for_previous_kernel();
  // What is read first is on its way before it is known whether it may go.
  OwnRows rows(p, mine);
  Entry looked;
  if (threadIdx.x / 32 == blockDim.x / 32 - 1) looked = Entry(p, mine.first, mine.end, 0);
  // How many tokens there are.
  const auto post = [&](const Said& said, uint32_t use) {
    const uint32_t to = threadIdx.x;
    if (to == p.rank || said.has_peer(p)) store_relaxed_sys(words_of(p, to, p.rank), told(use, p.tokens));
  };
  const bool well = enter_send(p, post, [&] { count_rows(p, mine.first, 0); });
  if (well) {
    tell_all(p, mine, looked);
    rows.send();
  }
  leave_send(p, well);
}

// How many rows came for own experts, and where among an expert's those of each rank lie: a warp for each expert, from the last one on, which has no row
// to wait for if there are more than rows have. False if a thread waited in vain.
__device__ __forceinline__ bool tell_counts(const LowLatencyParams& p) {
  const uint32_t lane = threadIdx.x % 32;
  bool well = true;
  const uint32_t warps = gridDim.x * blockDim.x / 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  for (uint32_t expert = warps - 1 - warp; well && expert < p.own_experts; expert += warps) {
    const bool asked = lane < p.size && !(these_absent >> lane & 1);
    const uint64_t* word = words_of(p, p.rank, lane) + of_counts(p) + expert;
    uint32_t rows = 0;
    well = wait_for_told(p, lane, word, asked, rows);
    if (!well) break;
    const uint32_t end = sum_of_lanes(rows);
    if (lane < p.size) {
      int32_t* range = reinterpret_cast<int32_t*>(p.ranges) + (uint64_t(expert) * p.size + lane) * 2;
      range[0] = int32_t(end - rows), range[1] = int32_t(rows);
    }
    if (lane + 1 != p.size) continue;
    reinterpret_cast<uint32_t*>(p.counts)[expert] = end;
    if (p.totals != 0) reinterpret_cast<int64_t*>(p.totals)[expert] += end;
  }
  return well;
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

// A row to all of its places, with so many loads under way.
template <uint32_t in_flight>
__device__ __forceinline__ void copy_to_each(uint64_t to, const Listed& listed, uint32_t count, uint64_t from, uint64_t bytes, uint32_t thread, uint32_t threads) {
  if ((to | from | bytes) % 16 != 0) {
    for (uint32_t n = 0; n < count; ++n) copy_odd(to + listed.at[n] * bytes, from, bytes, thread, threads);
    return;
  }
  const uint4* in = reinterpret_cast<const uint4*>(from);
  const uint32_t words = uint32_t(bytes / 16);
#pragma unroll 1
  for (uint32_t i = thread; i < words; i += in_flight * threads) {
    uint4 held[in_flight];
#pragma unroll
    for (uint32_t j = 0; j < in_flight; ++j) {
      if (i + j * threads < words) held[j] = in[i + j * threads];
    }
#pragma unroll 1
    for (uint32_t n = 0; n < count; ++n) {
      uint4* out = reinterpret_cast<uint4*>(to + listed.at[n] * bytes);
#pragma unroll
      for (uint32_t j = 0; j < in_flight; ++j) {
        if (i + j * threads < words) out[i + j * threads] = held[j];
      }
    }
  }
}

// How many tokens each rank has, once that is known: none of those that are absent.
__shared__ uint32_t tokens_of[32];

// By a warp. False if the group was stopped, or is now.
__device__ __forceinline__ bool find_tokens(const LowLatencyParams& p) {
  const uint32_t lane = threadIdx.x % 32;
  const bool asked = lane < p.size && !(these_absent >> lane & 1);
  uint32_t tokens = 0;
  const bool well = wait_for_told(p, lane, words_of(p, p.rank, lane), asked, tokens);
  tokens_of[lane] = asked ? tokens : 0;
  return well;
}

// How many rows an expert gets from ranks in front of `source`, for each lane that asks. False if the group was stopped, or is now.
__device__ __forceinline__ bool rows_in_front(const LowLatencyParams& p, uint32_t source, bool asks, uint32_t expert, uint32_t& rows) {
  // All of them on their way at once: mostly they are there.
  constexpr uint32_t together = 7;
  const uint32_t use = this_use;
  bool there = source <= together;
  rows = 0;
#pragma unroll
  for (uint32_t s = 0; s < together; ++s) {
    if (s >= source || !asks || these_absent >> s & 1) continue;
    const uint64_t word = load_relaxed_sys(words_of(p, p.rank, s) + of_counts(p) + expert);
    there &= is_told(word, use), rows += uint32_t(word >> 32);
  }
  if (__all_sync(everybody, there)) return true;
  rows = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < source; ++s) {
    uint32_t more = 0;
    if (!wait_for_told(p, s, words_of(p, p.rank, s) + of_counts(p) + expert, asks && !(these_absent >> s & 1), more)) return false;
    rows += more;
  }
  return true;
}

// Rows as they come: a group of threads, whole warps, for each token of each rank, which packs its row for every one of this rank's experts that it names. False
// if a thread waited in vain.
__device__ __forceinline__ bool receive_rows(const LowLatencyParams& p) {
  __shared__ Listed lists[most_threads / 32];
  Listed& listed = lists[threadIdx.x / 32];
  const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, groups = gridDim.x * blockDim.x / p.row_threads;
  const uint32_t thread = me % p.row_threads, lane = threadIdx.x % 32;
  for (uint32_t w = me / p.row_threads; w < p.size * p.max_tokens; w += groups) {
    const uint32_t source = w % p.size, token = w / p.size;
    const uint64_t* words = words_of(p, p.rank, source);
    // What its source tells of it.
    uint32_t name = 0;
    const bool named = token < tokens_of[source] && lane < p.k;
    if (!wait_for_told(p, source, words + of_names(p, token) + lane, named, name)) return false;
    const bool asks = named && int32_t(name) >= 0;
    const uint32_t expert = asks ? name / p.max_tokens : 0;
    const uint32_t same = __match_any_sync(everybody, asks ? int32_t(name) : -1), firsts = __ballot_sync(everybody, asks && (same & ((1u << lane) - 1)) == 0);
    uint32_t to = 0;
    if (firsts != 0 && !rows_in_front(p, source, asks, expert, to)) return false;
    to += expert * p.room + name % p.max_tokens;
    const bool first = firsts >> lane & 1;
    list(listed, first ? __popc(firsts & ((1u << lane) - 1)) : -1, to, 0.0f);
    if (first && thread < 32) {
      int32_t* said = reinterpret_cast<int32_t*>(p.sources) + uint64_t(to) * 3;
      said[0] = int32_t(source), said[1] = int32_t(token), said[2] = int32_t(same);
    }
    // Of each of its experts, the row that it got, or that it got none.
    const uint64_t held = (uint64_t(source) * p.max_tokens + token) * p.k + lane;
    if (p.rows_of != 0 && thread < p.k) reinterpret_cast<int32_t*>(p.rows_of)[held] = asks ? int32_t(to) : -1;
    if (firsts == 0) continue;
    uint32_t nothing;
    if (!wait_for_told(p, source, words + of_rows + token, true, nothing)) return false;
    const uint64_t came = part(p, p.rank, source), its_scales = place(p, came, scales, token);
    const uint32_t count = __popc(firsts);
    copy_to_each<4>(p.to, listed, count, place(p, came, row, token), p.row_bytes[row], thread, p.row_threads);
    if (p.scale_words == 0 && p.to_scales != 0) copy_to_each<1>(p.to_scales, listed, count, its_scales, p.row_bytes[scales], thread, p.row_threads);
    if (p.rows_of != 0 && thread < p.k && asks) reinterpret_cast<float*>(p.held)[held] = reinterpret_cast<const float*>(place(p, came, weights, token))[lane];
    for (uint32_t n = 0; n < __popc(firsts) && p.to_scales != 0; ++n) {
      // A word of all of an expert's rows behind the other, if there are any.
      const uint32_t row = listed.at[n] % p.room, first_row = listed.at[n] - row;
      uint32_t* columns = reinterpret_cast<uint32_t*>(p.to_scales) + uint64_t(first_row) * p.scale_words + row;
      for (uint32_t i = thread; i < p.scale_words; i += p.row_threads) columns[uint64_t(i) * p.room] = reinterpret_cast<const uint32_t*>(its_scales)[i];
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_receive(const __grid_constant__ LowLatencyParams p) {
  bool well = enter_receive(p, [&] { return find_tokens(p); });
  if (well) well = tell_counts(p) && receive_rows(p);
  end_receive(p, !__syncthreads_or(!well));
}

__device__ __noinline__ void cast_row(const LowLatencyParams& p, uint64_t place, uint64_t from, uint32_t thread, uint32_t threads) {
  const bool whole = is_whole(from, p.hidden);
  for_columns(p, thread, threads, [&](uint32_t i, bool there) {
    store_payload(p, place, i, there ? load(p.from_type, from, i, p.hidden, whole) : Eight{});
  });
}

// How a block's threads are shared out among so many rows: as many for each as can be.
__device__ __forceinline__ uint32_t threads_for(uint32_t rows) {
  uint32_t threads = 32;
  while (threads < blockDim.x && 2 * threads * rows <= blockDim.x) threads *= 2;
  return threads;
}

// Rows of this rank's experts go back, each to all places that it has at the rank it came from, by a group of threads. They are shared out as if those of all
// experts lay one behind the other: experts have very different numbers of them.
struct RowsBack {
  const LowLatencyParams& p;
  Writers writers;
  // Those of experts that are looked at together, from `start` on.
  uint32_t start, all, threads, n;
  uint64_t from;
  uint32_t to, token, named;

  // By all threads of a block. What is read first is on its way before it is known whether it may go.
  __device__ __forceinline__ explicit RowsBack(const LowLatencyParams& p) : p(p), start(0) { look(); }

  // Where each expert's rows end.
  static __device__ __forceinline__ uint32_t* ends() {
    __shared__ uint32_t ends[most_threads];
    return ends;
  }

  // At the next experts.
  __device__ __forceinline__ void look() {
    const uint32_t expert = start + threadIdx.x;
    const uint32_t rows = expert < p.own_experts ? min(reinterpret_cast<const uint32_t*>(p.counts)[expert], p.room) : 0;
    const uint32_t before = sum_before(rows, all);
    ends()[threadIdx.x] = before + rows;
    __syncthreads();
    threads = threads_for((all + writers.blocks - 1) / writers.blocks);
    n = writers.is_one() ? writers.me + threadIdx.x / threads * writers.blocks : all;
    find();
  }

  // Where row `n` is, and where it goes.
  __device__ __forceinline__ void find() {
    if (n >= all) return;
    uint32_t of = 0;
    // The first one whose rows end behind this row.
    for (uint32_t step = blockDim.x / 2; step > 0; step /= 2) {
      if (ends()[of + step - 1] <= n) of += step;
    }
    const uint64_t i = uint64_t(start + of) * p.room + n - (of == 0 ? 0 : ends()[of - 1]);
    const uint32_t* source = reinterpret_cast<const uint32_t*>(p.sources) + i * 3;
    to = source[0], token = source[1], named = source[2];
    from = p.from + i * row_bytes_back(p);
  }

  __device__ __forceinline__ void send() {
    const uint64_t bytes = p.row_bytes[row] + p.row_bytes[scales];
    uint64_t moved = 0;
    for (;;) {
      for (; n < all; n += blockDim.x / threads * writers.blocks, find()) {
        if (to >= p.size || token >= p.max_tokens) continue;
        const uint32_t thread = threadIdx.x % threads, entries = named & uint32_t((1ull << p.k) - 1);
        const uint64_t places = p.base + to * p.stride + p.half + uint64_t(token) * p.k * p.row_bytes[both];
        for (uint32_t left = entries; left != 0; left &= left - 1) {
          const uint64_t place = places + (__ffs(left) - 1) * p.row_bytes[both];
          if (p.payload == as_is) {
            copy_row(place, from, p.row_bytes[row], thread, threads);
          } else {
            cast_row(p, place, from, thread, threads);
          }
        }
        tell_behind(threads, [&] {
          for (uint32_t left = entries; left != 0; left &= left - 1) store_relaxed_sys(word_back(p, to, token, __ffs(left) - 1), told(this_use, 0));
        });
        if (thread == 0 && to != p.rank) moved += __popc(entries) * bytes;
      }
      start += blockDim.x;
      if (start >= p.own_experts) break;
      __syncthreads();
      look();
    }
    count_moved(p, moved);
  }
};

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  RowsBack rows(p);
  const bool well = enter_send(p);
  if (well) rows.send();
  leave_send(p, well);
}

// Eight columns of the sum of those that are listed. `AtOnce` are under way before the first is added; `widen` makes numbers of what was loaded.
template <uint32_t AtOnce, typename Load, typename Widen>
__device__ __forceinline__ Eight sum_of(const Listed& listed, uint32_t count, Load load, Widen widen) {
  using Raw = decltype(load(0u));
  Adding all{};
#pragma unroll 1
  for (uint32_t n = 0; n < count; n += AtOnce) {
    Raw x[AtOnce];
#pragma unroll
    for (uint32_t j = 0; j < AtOnce; ++j) {
      if (n + j < count) x[j] = load(listed.at[n + j]);
    }
#pragma unroll
    for (uint32_t j = 0; j < AtOnce; ++j) {
      if (n + j < count) all.add(widen(x[j]), listed.weight[n + j]);
    }
  }
  return all.sum;
}

// Rows of 16 bits, each at `row(at)`, from column `i` on. What type they are of is asked behind all loads: a branch before each would have the next
// one wait for it.
template <typename Row>
__device__ __forceinline__ Eight sum_of_halves(const LowLatencyParams& p, const Listed& listed, uint32_t count, uint32_t i, Row row) {
  const auto load = [&](uint32_t at) { return *reinterpret_cast<const uint4*>(row(at) + i * 2); };
  return sum_of<4>(listed, count, load, [&](uint4 x) { return eight_of(p.from_type, x); });
}

// Rows of any type.
template <typename Row>
__device__ __forceinline__ Eight sum_of_any(const LowLatencyParams& p, const Listed& listed, uint32_t count, uint32_t i, bool whole, Row row) {
  const auto plain = [&](uint32_t at) { return load(p.from_type, row(at), i, p.hidden, whole); };
  return sum_of<1>(listed, count, plain, [](const Eight& x) { return x; });
}

// A token's sum to where it goes, where its type or that of what travels is a rare one.
__device__ __noinline__ void send_any_sum(const LowLatencyParams& p, const Listed& listed, uint32_t count, uint64_t target, bool whole, uint32_t thread) {
  for_columns(p, thread, p.row_threads, [&](uint32_t i, bool within) {
    const Eight sum = sum_of_any(p, listed, within ? count : 0, i, whole, [&](uint32_t at) { return p.from + at * row_bytes_back(p); });
    if (p.payload != as_is) {
      store_payload(p, target, i, rounded(p.from_type, sum));
    } else if (within) {
      store(p.from_type, target, i, p.hidden, whole, sum);
    }
  });
}

// Sums go back: a group of threads, whole warps, for each token that may have rows here.
struct SumsBack {
  const LowLatencyParams& p;
  Writers writers;
  Listed& listed;
  uint32_t w, places;
  uint32_t to, token, entry, count;

  static __device__ __forceinline__ Listed& list_of_warp() {
    __shared__ Listed lists[most_threads / 32];
    return lists[threadIdx.x / 32];
  }

  // What is read first is on its way before it is known whether it may go.
  __device__ __forceinline__ explicit SumsBack(const LowLatencyParams& p) : p(p), listed(list_of_warp()) {
    w = writers.thread() / p.row_threads;
    // Who has no expert has written down no rows.
    places = writers.is_one() && p.own_experts > 0 ? p.max_tokens * p.size : 0;
    find();
  }

  // The next token from here that has rows, and its rows.
  __device__ __forceinline__ void find() {
    const uint32_t lane = threadIdx.x % 32;
    for (; w < places; w += writers.threads() / p.row_threads) {
      // The next rank first, so that not all write to one.
      to = (p.rank + 1 + w % p.size) % p.size, token = w / p.size;
      const uint64_t mine = (uint64_t(to) * p.max_tokens + token) * p.k + lane;
      const int32_t at = lane < p.k ? reinterpret_cast<const int32_t*>(p.rows_of)[mine] : -1;
      const uint32_t there = __ballot_sync(everybody, at >= 0);
      if (there == 0) continue;
      const float weight = at >= 0 ? reinterpret_cast<const float*>(p.held)[mine] : 0.0f;
      list(listed, at >= 0 ? __popc(there & ((1u << lane) - 1)) : -1, uint32_t(at), weight);
      entry = __ffs(there) - 1, count = __popc(there);
      return;
    }
  }

  __device__ __forceinline__ void send() {
    const uint32_t thread = threadIdx.x % p.row_threads;
    const uint64_t from_bytes = row_bytes_back(p);
    const bool whole = is_whole(p.from | p.base | p.half | p.stride, p.hidden), plain = whole && p.payload == as_is && p.from_type != F32;
    uint64_t moved = 0;
    for (; w < places; w += writers.threads() / p.row_threads, find()) {
      const uint64_t target = p.base + to * p.stride + p.half + (uint64_t(token) * p.k + entry) * p.row_bytes[both];
      if (plain) {
#pragma unroll 1
        for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
          const Eight sum = sum_of_halves(p, listed, count, i, [&](uint32_t at) { return p.from + at * from_bytes; });
          store_wide(p.from_type, target, i, sum.v);
        }
      } else {
        send_any_sum(p, listed, count, target, whole, thread);
      }
      tell_behind(p.row_threads, [&] { store_relaxed_sys(word_back(p, to, token, entry), told(this_use, 0)); });
      if (thread == 0 && to != p.rank) moved += p.row_bytes[row] + p.row_bytes[scales];
    }
    count_moved(p, moved);
  }
};

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back_sums(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  SumsBack sums(p);
  const bool well = enter_send(p);
  if (well) sums.send();
  leave_send(p, well);
}

// Where each lane's entry stands among those of a token that are added, or -1: in their order, or one for each rank, in rank order. `slot` is the
// entry's, or -1.
__device__ __forceinline__ int32_t place_among(const LowLatencyParams& p, int32_t slot) {
  const uint32_t lane = threadIdx.x % 32, before = (1u << lane) - 1;
  const uint32_t there = __ballot_sync(everybody, slot >= 0);
  if (p.sum == by_experts) return slot >= 0 ? __popc(there & before) : -1;
  const uint32_t rank = slot >= 0 ? rank_of_slot(p, uint32_t(slot)) : everybody;
  const uint32_t same = __match_any_sync(everybody, rank);
  const bool first = slot >= 0 && (same & before) == 0;
  const uint32_t firsts = __ballot_sync(everybody, first);
  int32_t place = 0;
  for (uint32_t left = firsts; left != 0; left &= left - 1) place += __shfl_sync(everybody, rank, __ffs(left) - 1) < rank;
  return first ? place : -1;
}

// A token's sum, where types or what has travelled are rare.
__device__ __noinline__ void add_up_any(const LowLatencyParams& p, const Listed& listed, uint32_t count, uint64_t of_token, uint64_t to, bool whole, uint32_t thread) {
  const auto place = [&](uint32_t e) { return of_token + e * p.row_bytes[both]; };
  for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
    const auto cast = [&](uint32_t e) { return load_payload(p, place(e), i); };
    const Eight sum = p.payload == as_is ? sum_of_any(p, listed, count, i, whole, place)
                                         : sum_of<2>(listed, count, cast, [](const Eight& x) { return x; });
    store(p.out_type, to, i, p.hidden, whole, sum);
  }
}

// A group of threads, whole warps, for each own token. False if a thread waited in vain.
__device__ __forceinline__ bool add_up_rows(const LowLatencyParams& p) {
  __shared__ Listed lists[most_threads / 32];
  Listed& listed = lists[threadIdx.x / 32];
  // A token has some blocks, or a block some tokens.
  const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, groups = gridDim.x * blockDim.x / p.row_threads;
  const uint32_t thread = me % p.row_threads, lane = threadIdx.x % 32;
  const uint64_t out_bytes = uint64_t(p.hidden) * (p.out_type == F32 ? 4 : 2);
  const uint64_t places = p.base + p.rank * p.stride + p.half;
  const bool whole = is_whole(places | p.to, p.hidden), plain = whole && p.payload == as_is && p.from_type != F32;
  for (uint64_t token = me / p.row_threads; token < p.tokens; token += groups) {
    const uint64_t entry = token * p.k + lane;
    const int32_t slot = lane < p.k ? reinterpret_cast<const int32_t*>(p.chosen)[entry] : -1;
    const int32_t place = place_among(p, slot);
    // Sums have been multiplied by their weights.
    const float weight = place >= 0 && p.weights != 0 ? reinterpret_cast<const float*>(p.weights)[entry] : 1.0f;
    list(listed, place, lane, weight);
    const uint32_t count = __popc(__ballot_sync(everybody, place >= 0));
    const uint32_t from = slot >= 0 ? rank_of_slot(p, uint32_t(slot)) : 0;
    const uint64_t* word = word_back(p, p.rank, token, lane);
    uint32_t nothing;
    if (!wait_for_told(p, from, word, place >= 0, nothing)) return false;
    const uint64_t of_token = places + token * p.k * p.row_bytes[both], to = p.to + token * out_bytes;
    if (!plain) {
      add_up_any(p, listed, count, of_token, to, whole, thread);
      continue;
    }
#pragma unroll 1
    for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
      const Eight sum = sum_of_halves(p, listed, count, i, [&](uint32_t e) { return of_token + e * p.row_bytes[both]; });
      store_wide(p.out_type, to, i, sum.v);
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_sum(const __grid_constant__ LowLatencyParams p) {
  bool well = enter_receive(p);
  if (well) well = add_up_rows(p);
  end_receive(p, !__syncthreads_or(!well));
}
