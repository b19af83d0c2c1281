// The low-latency exchange, after DeepEP's low-latency dispatch and combine: every row has a place at its receiver that its sender
// knows, whatever else is sent. Each half of it is a launch (in_turn.cuh): what sends waits for the half's credits, and tells of each row
// behind it; what receives takes rows as they come, and may do so while its own rank still sends. Credits are given when the slot is used again.
//
// There: a rank first tells all others which of their experts its tokens name, and then writes the tokens into its part of the halves of all, each
// at the token's own place, with their weights if they have any; a row goes once to a rank. The receiver packs the rows of each of its
// experts, by source and token, and with weights it writes down which row each expert of a token got. Back: there is a place for each expert
// of each token at the rank that has the token; where a rank adds a token's rows before they go, their sum takes the place of the first. The
// sums are in f32, products rounded before they are added, never fused, so that the host's are the same bits.
//
// Words that tell, of each sender at each receiver (crates/plan/src/low_latency.rs): how many tokens it has; of each token, whether its row has
// come; of each of its experts, and there of each token, which of the receiver's experts that is. On the way back, of each expert of each
// token whether its row has come.
#include "copy.cuh"
#include "in_turn.cuh"
#include "params.cuh"
#include "payload.cuh"
#include "poison.cuh"
#include "slots.cuh"

using namespace brigade;

enum Section : uint32_t { row = 0, scales = 1, named = 2, weights = 3 };

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
__device__ __forceinline__ uint32_t of_names(const LowLatencyParams& p, uint32_t entry) { return of_rows + (1 + entry) * p.max_tokens; }

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

// A row there as fp8, as brigade_cast has it. Anew for each rank that it goes to, which is less than a launch in front.
__device__ __noinline__ void cast_there(const LowLatencyParams& p, uint64_t values, uint64_t to_scales, uint64_t from, uint32_t thread) {
  const uint32_t format = p.payload - fp8, blocks = (p.hidden + block_columns - 1) / block_columns;
  // What fills up the last word of scales.
  for (uint64_t i = blocks + thread; format == as_exponent && i < p.row_bytes[scales]; i += p.row_threads) reinterpret_cast<uint8_t*>(to_scales)[i] = 0;
  if (!is_whole(from, p.hidden) || p.from_type == F32) {
    const bool whole = is_whole(p.from, p.hidden);
    return for_columns(p, thread, p.row_threads, [&](uint32_t i, bool there) {
      store_fp8(format, values, to_scales, i, there ? load(p.from_type, from, i, p.hidden, whole) : Eight{}, there);
    });
  }
  constexpr uint32_t in_flight = 4;
  const uint32_t step = p.row_threads * 8;
  for (uint32_t i = thread * 8; i - threadIdx.x % 32 * 8 < p.hidden; i += in_flight * step) {
    uint4 held[in_flight];
#pragma unroll
    for (uint32_t j = 0; j < in_flight; ++j) {
      held[j] = make_uint4(0, 0, 0, 0);
      if (i + j * step < p.hidden) held[j] = *reinterpret_cast<const uint4*>(from + (i + j * step) * 2);
    }
#pragma unroll
    for (uint32_t j = 0; j < in_flight; ++j) {
      const uint32_t c = i + j * step;
      if (c - threadIdx.x % 32 * 8 < p.hidden) store_fp8(format, values, to_scales, c, eight_of(p.from_type, held[j]), c < p.hidden);
    }
  }
}

// Tells all ranks which of their experts own tokens name: neighbours in neighbouring words. All blocks have some of it, since stores of one are
// held up by all others' rows. What it reads first is on its way before it is known whether it may tell.
struct Names {
  const LowLatencyParams& p;
  Writers writers;
  uint32_t i, all;
  Id id;

  __device__ __forceinline__ explicit Names(const LowLatencyParams& p) : p(p), all(p.size * p.k * p.tokens), id{0, 0} {
    i = 32 * (threadIdx.x / 32 * writers.blocks + writers.me) + threadIdx.x % 32;
    if (!writers.is_one()) i = all;
    if (i < all) id = read_id(p, i % p.tokens, i / p.tokens % p.k);
  }

  __device__ __forceinline__ void tell() {
    while (i < all) {
      const uint32_t token = i % p.tokens, entry = i / p.tokens % p.k, to = (p.rank + 1 + i / p.tokens / p.k) % p.size;
      const int32_t slot = present_slot(p, slot_of(p, token, id), these_absent);
      const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
      const uint32_t name = slot >= begin && slot < end ? slot - begin : -1;
      if (!(these_absent >> to & 1)) store_relaxed_sys(words_of(p, to, p.rank) + of_names(p, entry) + token, told(this_use, name));
      if (to == p.rank) reinterpret_cast<int32_t*>(p.chosen)[uint64_t(token) * p.k + entry] = slot;
      i += writers.threads();
      if (i < all) id = read_id(p, i % p.tokens, i / p.tokens % p.k);
    }
  }
};

// Own rows: a group of threads, whole warps, for each token and rank. As above.
struct OwnRows {
  const LowLatencyParams& p;
  Writers writers;
  uint32_t i, all;
  Id id;

  __device__ __forceinline__ explicit OwnRows(const LowLatencyParams& p) : p(p), all(p.tokens * p.size), id{0, 0} {
    i = writers.is_one() ? writers.thread() / p.row_threads : all;
    read();
  }

  // Every warp finds out by itself whether a row goes to a rank: k is at most 32.
  __device__ __forceinline__ void read() {
    const uint32_t lane = threadIdx.x % 32;
    if (i < all && lane < p.k) id = read_id(p, i / p.size, lane);
  }

  __device__ __forceinline__ void send() {
    const uint32_t thread = threadIdx.x % p.row_threads, lane = threadIdx.x % 32;
    uint64_t moved = 0;
    for (; i < all; i += writers.threads() / p.row_threads, read()) {
      // The next rank first, so that not all write to one.
      const uint32_t to = (p.rank + 1 + i % p.size) % p.size, token = i / p.size;
      if (these_absent >> to & 1) continue;
      const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
      const int32_t slot = lane < p.k ? present_slot(p, slot_of(p, token, id), these_absent) : -1;
      if (!__any_sync(everybody, slot >= begin && slot < end)) continue;
      const uint64_t target = part(p, to, p.rank);
      if (thread < p.k && p.weights != 0) {
        reinterpret_cast<float*>(place(p, target, weights, token))[thread] = reinterpret_cast<const float*>(p.weights)[uint64_t(token) * p.k + thread];
      }
      const uint64_t there = place(p, target, row, token);
      if (p.payload == as_is) {
        copy_row(there, p.from + token * p.row_bytes[row], p.row_bytes[row], thread, p.row_threads);
      } else {
        cast_there(p, there, place(p, target, scales, token), p.from + token * row_bytes_back(p), thread);
      }
      tell_behind(p.row_threads, [&] { store_relaxed_sys(words_of(p, to, p.rank) + of_rows + token, told(this_use, 0)); });
      if (thread == 0 && to != p.rank) moved += p.row_bytes[row] + p.row_bytes[scales] + p.row_bytes[weights];
    }
    count_moved(p, moved);
  }
};

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_send(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  Names names(p);
  OwnRows rows(p);
  // How many tokens there are.
  const bool well = enter_send(p, [&](const Said& said, uint32_t use) {
    const uint32_t to = threadIdx.x;
    if (to == p.rank || said.has_peer(p)) store_relaxed_sys(words_of(p, to, p.rank), told(use, p.tokens));
  });
  if (well) {
    names.tell();
    rows.send();
  }
  leave_send(p, well);
}

// How a block's threads are shared out among so many rows: as many for each as can be.
__device__ __forceinline__ uint32_t threads_for(uint32_t rows) {
  uint32_t threads = 32;
  while (threads < blockDim.x && 2 * threads * rows <= blockDim.x) threads *= 2;
  return threads;
}

// How many rows came from each rank, where it is written down which is the first; `all` came. By all threads of a block.
__device__ __forceinline__ void tell_ranges(const LowLatencyParams& p, int32_t* ranges, uint32_t all) {
  __syncthreads();
  for (uint32_t source = threadIdx.x; source < p.size; source += blockDim.x) {
    // No rank has a token.
    if (p.max_tokens == 0) ranges[2 * source] = 0;
    const int32_t end = source + 1 < p.size && p.max_tokens != 0 ? ranges[2 * source + 2] : int32_t(all);
    ranges[2 * source + 1] = end - ranges[2 * source];
  }
}

// Which of a rank's experts its tokens have as their expert number `entry`, once it is known here: by token.
__device__ __forceinline__ int32_t* names_of(const LowLatencyParams& p, uint32_t source, uint32_t entry) {
  return reinterpret_cast<int32_t*>(part(p, p.rank, source) + p.section[named]) + entry * p.max_tokens;
}

// Collects what all ranks have told, each thread of the launch some of it, and lets no block go on before all of it is there: if each looked at
// all of it until it came, looks would be in the way of rows. False if the group was stopped, or is now.
__device__ __forceinline__ bool collect_names(const LowLatencyParams& p) {
  bool well = true;
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, lane = threadIdx.x % 32, use = this_use;
  const uint32_t each = p.k * p.max_tokens, all = p.size * each;
  for (uint32_t first = 32 * warp; well && first < all; first += gridDim.x * blockDim.x) {
    const uint32_t i = first + lane, source = i / max(each, 1u), entry = i % each / p.max_tokens, token = i % p.max_tokens;
    const bool asked = i < all && !(these_absent >> source & 1);
    const uint64_t* words = words_of(p, p.rank, source);
    const uint64_t* word = words + of_names(p, entry) + token;
    uint64_t name = 0;
    well = wait_for_told(p, source, [=, &name] {
      if (!asked) return true;
      const uint64_t tokens = load_relaxed_sys(words);
      name = load_relaxed_sys(word);
      return is_told(tokens, use) && (is_told(name, use) || token >= uint32_t(tokens >> 32));
    });
    if (well && asked) names_of(p, source, entry)[token] = is_told(name, use) ? int32_t(name >> 32) : -1;
  }
  return meet_blocks(p, well);
}

// Which experts of a token are asked for, as bits, and which are none of this rank's.
struct Entries {
  uint32_t asked, nobody;
};

__device__ __forceinline__ Entries find_entries(const LowLatencyParams& p, uint32_t source, uint32_t token, uint32_t expert) {
  Entries e{0, 0};
#pragma unroll 8
  for (uint32_t i = 0; i < p.k; ++i) {
    const int32_t name = names_of(p, source, i)[token];
    e.asked |= uint32_t(name == int32_t(expert)) << i;
    e.nobody |= uint32_t(name < 0) << i;
  }
  return e;
}

// What is kept of a token whose row came with weights, for one of its experts, by a thread for each entry.
__device__ __forceinline__ void hold(const LowLatencyParams& p, uint32_t source, uint32_t token, uint32_t entries, uint64_t to, uint32_t thread) {
  if (p.rows_of == 0 || thread >= p.k || !(entries >> thread & 1)) return;
  const uint64_t at = (uint64_t(source) * p.max_tokens + token) * p.k + thread;
  reinterpret_cast<int32_t*>(p.rows_of)[at] = int32_t(to);
  reinterpret_cast<float*>(p.held)[at] = reinterpret_cast<const float*>(place(p, part(p, p.rank, source), weights, token))[thread];
}

// Of entries without a row the first expert says so.
__device__ __forceinline__ void hold_nothing(const LowLatencyParams& p, uint32_t at, uint32_t nobody) {
  if (p.rows_of == 0) return;
  for (uint32_t e = 0; e < p.k; ++e) {
    if (nobody >> e & 1) reinterpret_cast<int32_t*>(p.rows_of)[uint64_t(at) * p.k + e] = -1;
  }
}

// Share `mine` of an expert's rows, by a block, which looks for all of them. False if a thread waited in vain.
__device__ __forceinline__ bool receive_rows(const LowLatencyParams& p, uint32_t expert, uint32_t mine) {
  // Of the places that are looked at together, those that have a row for this expert, and for which of the token's experts.
  __shared__ uint32_t found[most_threads], entries_of[most_threads];
  const uint64_t first = uint64_t(expert) * p.room;
  int32_t* ranges = reinterpret_cast<int32_t*>(p.ranges) + uint64_t(expert) * p.size * 2;
  uint32_t next = 0;
  bool well = true;
  for (uint32_t start = 0; start < p.size * p.max_tokens; start += blockDim.x) {
    const uint32_t at = start + threadIdx.x, source = at / p.max_tokens, token = at % p.max_tokens;
    const bool has_source = source < p.size && !(these_absent >> source & 1);
    const Entries entries = has_source ? find_entries(p, source, token, expert) : Entries{0, everybody};
    uint32_t all;
    // What was found before has been taken by all threads that come here.
    const uint32_t i = rank_among(entries.asked != 0, all);
    // The first token of a rank says where its rows begin.
    if (mine == 0 && token == 0 && source < p.size) ranges[2 * source] = int32_t(next + i);
    if (entries.asked != 0) {
      found[i] = at;
      entries_of[i] = entries.asked;
      int32_t* said = reinterpret_cast<int32_t*>(p.sources) + (first + next + i) * 3;
      if (mine == 0) said[0] = int32_t(source), said[1] = int32_t(token), said[2] = int32_t(entries.asked);
    }
    if (mine == 0 && expert == 0 && source < p.size) hold_nothing(p, at, entries.nobody);
    __syncthreads();
    const uint32_t threads = threads_for((all + p.share - 1) / p.share);
    const uint32_t thread = threadIdx.x % threads, step = blockDim.x / threads * p.share;
    for (uint32_t n = mine + threadIdx.x / threads * p.share; well && n < all; n += step) {
      const uint32_t source = found[n] / p.max_tokens, token = found[n] % p.max_tokens;
      const uint64_t* word = words_of(p, p.rank, source) + of_rows + token;
      const uint32_t use = this_use;
      well = wait_for_told(p, source, [=] { return is_told(load_acquire_sys(word), use); });
      if (!well) break;
      const uint64_t came = part(p, p.rank, source), to = first + next + n;
      hold(p, source, token, entries_of[n], to, thread);
      copy_row(p.to + to * p.row_bytes[row], place(p, came, row, token), p.row_bytes[row], thread, threads);
      if (p.to_scales == 0) continue;
      const uint64_t bytes = p.row_bytes[scales], from = place(p, came, scales, token);
      if (p.scale_words == 0) {
        copy_row(p.to_scales + to * bytes, from, bytes, thread, threads);
        continue;
      }
      uint32_t* columns = reinterpret_cast<uint32_t*>(p.to_scales) + first * p.scale_words + next + n;
      for (uint32_t w = thread; w < p.scale_words; w += threads) columns[uint64_t(w) * p.room] = reinterpret_cast<const uint32_t*>(from)[w];
    }
    next += all;
  }
  if (mine == 0) tell_ranges(p, ranges, next);
  if (mine == 0 && threadIdx.x == 0) {
    reinterpret_cast<uint32_t*>(p.counts)[expert] = next;
    if (p.totals != 0) reinterpret_cast<int64_t*>(p.totals)[expert] += next;
  }
  return well;
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_receive(const __grid_constant__ LowLatencyParams p) {
  bool well = enter_receive(p) && collect_names(p);
  if (well) {
    // Blocks that share a multiprocessor have shares of different experts.
    for (uint32_t i = blockIdx.x; i < p.own_experts * p.share; i += gridDim.x) well &= receive_rows(p, i % p.own_experts, i / p.own_experts);
  }
  end_receive(p, !__syncthreads_or(!well));
}

__device__ __noinline__ void cast_row(const LowLatencyParams& p, uint64_t place, uint64_t from, uint32_t thread, uint32_t threads) {
  const bool whole = is_whole(p.from, p.hidden);
  for_columns(p, thread, threads, [&](uint32_t i, bool there) {
    store_payload(p, place, i, there ? load(p.from_type, from, i, p.hidden, whole) : Eight{});
  });
}

// Row `i` of an expert, to all places that it has at the rank it came from, by so many threads. Bytes that go to a peer.
__device__ __forceinline__ uint64_t send_row_back(const LowLatencyParams& p, uint64_t i, uint32_t thread, uint32_t threads) {
  const uint32_t* source = reinterpret_cast<const uint32_t*>(p.sources) + i * 3;
  const uint32_t to = source[0], token = source[1], named = source[2] & uint32_t((1ull << p.k) - 1);
  if (to >= p.size || token >= p.max_tokens) return 0;
  const uint64_t places = p.base + to * p.stride + p.half + uint64_t(token) * p.k * p.row_bytes[both], from = p.from + i * row_bytes_back(p);
  uint64_t moved = 0;
  for (uint32_t entries = named; entries != 0; entries &= entries - 1) {
    const uint32_t e = __ffs(entries) - 1;
    const uint64_t place = places + e * p.row_bytes[both];
    if (p.payload == as_is) {
      copy_row(place, from, p.row_bytes[row], thread, threads);
    } else {
      cast_row(p, place, from, thread, threads);
    }
    if (to != p.rank) moved += p.row_bytes[row] + p.row_bytes[scales];
  }
  tell_behind(threads, [&] {
    for (uint32_t entries = named; entries != 0; entries &= entries - 1) store_relaxed_sys(word_back(p, to, token, __ffs(entries) - 1), told(this_use, 0));
  });
  return moved;
}

// Rows of all experts are shared out as if they lay one behind the other: experts have very different numbers of them.
__device__ __forceinline__ void send_rows_back(const LowLatencyParams& p) {
  // Where each expert's rows end, of those that are looked at together.
  __shared__ uint32_t ends[most_threads];
  uint64_t moved = 0;
  const Writers writers;
  if (!writers.is_one()) return;
  for (uint32_t start = 0; start < p.own_experts; start += blockDim.x) {
    const uint32_t expert = start + threadIdx.x;
    const uint32_t rows = expert < p.own_experts ? min(reinterpret_cast<const uint32_t*>(p.counts)[expert], p.room) : 0;
    uint32_t all;
    const uint32_t before = sum_before(rows, all);
    ends[threadIdx.x] = before + rows;
    __syncthreads();
    const uint32_t threads = threads_for((all + writers.blocks - 1) / writers.blocks), thread = threadIdx.x % threads;
    for (uint32_t n = writers.me + threadIdx.x / threads * writers.blocks; n < all; n += blockDim.x / threads * writers.blocks) {
      uint32_t of = 0;
      // The first one whose rows end behind this row.
      for (uint32_t step = blockDim.x / 2; step > 0; step /= 2) {
        if (ends[of + step - 1] <= n) of += step;
      }
      const uint64_t i = uint64_t(start + of) * p.room + n - (of == 0 ? 0 : ends[of - 1]);
      const uint64_t bytes = send_row_back(p, i, thread, threads);
      if (thread == 0) moved += bytes;
    }
  }
  count_moved(p, moved);
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back(const __grid_constant__ LowLatencyParams p) {
  const bool well = enter_send(p);
  if (well) send_rows_back(p);
  leave_send(p, well);
}

// Rows that a warp adds, in this order, and what it multiplies them by.
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

// A group of threads, whole warps, for each token that may have rows here.
__device__ __forceinline__ void send_sums_back(const LowLatencyParams& p) {
  __shared__ Listed lists[most_threads / 32];
  Listed& listed = lists[threadIdx.x / 32];
  const Writers writers;
  if (!writers.is_one()) return;
  const uint32_t groups = writers.threads() / p.row_threads, thread = threadIdx.x % p.row_threads, lane = threadIdx.x % 32;
  const uint64_t from_bytes = row_bytes_back(p);
  const bool whole = is_whole(p.from | p.base | p.half | p.stride, p.hidden), plain = whole && p.payload == as_is && p.from_type != F32;
  uint64_t moved = 0;
  // Who has no expert has written down no rows.
  const uint32_t places = p.own_experts == 0 ? 0 : p.max_tokens * p.size;
  for (uint32_t w = writers.thread() / p.row_threads; w < places; w += groups) {
    // The next rank first, so that not all write to one.
    const uint32_t to = (p.rank + 1 + w % p.size) % p.size, token = w / p.size;
    const uint64_t mine = (uint64_t(to) * p.max_tokens + token) * p.k + lane;
    const int32_t at = lane < p.k ? reinterpret_cast<const int32_t*>(p.rows_of)[mine] : -1;
    const uint32_t there = __ballot_sync(everybody, at >= 0);
    if (there == 0) continue;
    const float weight = at >= 0 ? reinterpret_cast<const float*>(p.held)[mine] : 0.0f;
    list(listed, at >= 0 ? __popc(there & ((1u << lane) - 1)) : -1, uint32_t(at), weight);
    const uint32_t entry = __ffs(there) - 1;
    const uint64_t target = p.base + to * p.stride + p.half + (uint64_t(token) * p.k + entry) * p.row_bytes[both];
    if (plain) {
#pragma unroll 1
      for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
        const Eight sum = sum_of_halves(p, listed, __popc(there), i, [&](uint32_t at) { return p.from + at * from_bytes; });
        store_wide(p.from_type, target, i, sum.v);
      }
    } else {
      send_any_sum(p, listed, __popc(there), target, whole, thread);
    }
    tell_behind(p.row_threads, [&] { store_relaxed_sys(word_back(p, to, token, entry), told(this_use, 0)); });
    if (thread == 0 && to != p.rank) moved += p.row_bytes[row] + p.row_bytes[scales];
  }
  count_moved(p, moved);
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back_sums(const __grid_constant__ LowLatencyParams p) {
  const bool well = enter_send(p);
  if (well) send_sums_back(p);
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
    const uint32_t from = slot >= 0 ? rank_of_slot(p, uint32_t(slot)) : 0, use = this_use;
    const uint64_t* word = word_back(p, p.rank, token, lane);
    if (!wait_for_told(p, from, [=] { return place < 0 || is_told(load_acquire_sys(word), use); })) return false;
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
