// The way there of a low-latency exchange (low_latency.cu): a rank's own rows, and what it tells of them; and those that came, packed for each expert.
#pragma once
#include "low_latency.cuh"

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
