// The way back of a low-latency exchange (low_latency.cu): rows of experts, or sums of a rank's, to where tokens are; and what is added there.
#pragma once
#include "low_latency.cuh"

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
    if (!wait_for_told<quick_looks>(p, from, word, place >= 0, nothing)) return false;
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
