// Rows back from their experts as one kernel (push.cuh): of few tokens and of many, and for experts. Each row goes to a place at its token's rank that both know, and
// is added there as soon as it has come: in f32, products rounded before they are added, as in combine.cu. Rows of sums are pushed as
// those of all-reduces are: a NaN may become another. Every other block pushes, and the rest add.
//
//   by rank             [what goes back with rows][for each token, a row of each peer]
//   by expert           [what goes back with rows][for each token, a row of each of its experts]
#pragma once
#include "copy.cuh"
#include "escaped.cuh"
#include "slots.cuh"
#include "sums.cuh"

namespace brigade {

__device__ inline void poison_outputs(const PushCombineParams& p) {
  poison(p.out, p.out_bytes, p.poison, threadIdx.x, blockDim.x);
  if (p.weights_out != 0) poison(p.weights_out, 4ull * p.tokens * p.k, nan_word<F32> * 0x100000001ull, threadIdx.x, blockDim.x);
}

}  // namespace brigade

using namespace brigade;

enum Sum : uint32_t { by_ranks = 0, by_experts = 1, by_experts_and_ranks = 2 };

// Added in the order in which they are given.
template <uint32_t In>
struct Adding {
  float x[lanes<In>];
  bool any;

  __device__ __forceinline__ void add(uint4 v) {
    float y[lanes<In>];
    values<In>(v, y);
    add(y);
  }

  __device__ __forceinline__ void add(uint4 v, float weight) {
    float y[lanes<In>];
    values<In>(v, y);
#pragma unroll
    for (uint32_t i = 0; i < lanes<In>; ++i) y[i] = __fmul_rn(y[i], weight);
    add(y);
  }

  __device__ __forceinline__ void add(const float (&y)[lanes<In>]) {
#pragma unroll
    for (uint32_t i = 0; i < lanes<In>; ++i) x[i] = any ? __fadd_rn(x[i], y[i]) : y[i];
    any = true;
  }
};

// What is to be added next.
__shared__ uint32_t item;

// Rows that came from each rank, and where they begin.
__shared__ uint32_t came[8], begins[8];

// Of rows by rank, or else for experts.
template <uint32_t In, uint32_t Out, int Most, bool by_rank>
struct PushCombine : Pushing<PushCombineParams> {
  using Pushing::Pushing;

  __device__ __forceinline__ int32_t position(uint32_t t, uint32_t r) const {
    return reinterpret_cast<const int32_t*>(p.positions)[uint64_t(t) * p.size + r];
  }
  __device__ __forceinline__ int32_t chosen(uint32_t t, uint32_t e) const {
    return reinterpret_cast<const int32_t*>(p.chosen)[uint64_t(t) * p.k + e];
  }
  __device__ __forceinline__ uint32_t offset(uint32_t i) const { return reinterpret_cast<const uint32_t*>(p.offsets)[i]; }
  __device__ __forceinline__ int4 source(uint32_t at) const { return reinterpret_cast<const int4*>(p.sources)[at]; }

  // The row of each expert of a token that came.
  __device__ __forceinline__ const int32_t* rows_of(uint32_t s, uint32_t i) const {
    return reinterpret_cast<const int32_t*>(p.rows_of) + (uint64_t(s) * p.max_tokens + i) * p.k;
  }

  // Granule `g` of row `at` of an array; where it is not `whole`, from any address.
  template <bool whole>
  __device__ __forceinline__ uint4 load(uint64_t array, uint32_t at, uint32_t g) const {
    const uint64_t from = array + 16 * (uint64_t(at) * p.granules + g);
    if constexpr (whole) return *reinterpret_cast<const uint4*>(from);
    return any_input(from, 16);
  }

  // Whether all rows lie at multiples of 16 bytes.
  __device__ __forceinline__ bool is_whole() const { return (p.from | p.out | p.biases[0] | p.biases[1]) % 16 == 0; }

  // Which row a granule is of, and which of its granules it is.
  __device__ __forceinline__ uint32_t row_of_granule(uint32_t w, uint32_t& g) const { return divided(w, p.granules, p.inverse_granules, g); }

  // Where row `i` of those for one token lies at its rank.
  __device__ __forceinline__ uint64_t place(uint32_t to, uint64_t i, uint32_t g) const {
    return slots(to, buffer) + 16 * (p.weight_granules + i * p.granules + g);
  }

  // Which of a token's rows is that of `from`: that of the next rank comes first.
  __device__ __forceinline__ uint64_t row_of(uint32_t to, uint32_t t, uint32_t from) const {
    return uint64_t(t) * (p.size - 1) + (from > to ? from - to : from + p.size - to) - 1;
  }

  __device__ __forceinline__ uint32_t* weight(uint32_t to, uint64_t entry) const {
    return reinterpret_cast<uint32_t*>(slots(to, buffer)) + entry;
  }

  // A rank's rows of one token, added and rounded; some of them are on their way at once.
  template <bool whole>
  __device__ __forceinline__ uint4 added(const int32_t* rows, uint32_t g) const {
    constexpr uint32_t ahead = whole ? 4 : 1;
    Adding<In> all{};
#pragma unroll 1
    for (uint32_t e = 0; e < p.k; e += ahead) {
      uint4 v[ahead];
      float weight[ahead];
      int32_t at[ahead];
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) at[i] = e + i < p.k ? rows[e + i] : -1;
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) {
        if (at[i] < 0) continue;
        v[i] = load<whole>(p.from, uint32_t(at[i]), g), weight[i] = reinterpret_cast<const float*>(p.held)[at[i]];
      }
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) {
        if (at[i] >= 0) all.add(v[i], weight[i]);
      }
    }
    Result<In, In> sum;
    sum.set(all.x);
    return sum.part[0];
  }

  __device__ __forceinline__ void push_weight(uint32_t to, uint64_t entry, uint32_t at) const {
    const uint32_t bits = reinterpret_cast<const uint32_t*>(p.back)[at];
    store_relaxed_sys(weight(to, entry), bits == sentinel ? nan_word<F32> : bits);
  }

  // Of rows by rank, one of each source in turn goes back, so that all ways are in use. Says which one is `q`-th, if there is one.
  __device__ __forceinline__ bool turn_of(uint32_t q, uint32_t& s, uint32_t& i) const {
    uint32_t distance;
    i = divided(q, p.size - 1, p.inverse_peers, distance), s = peer(1 + distance);
    return i < came[s];
  }

  // Rows as they are, from granule `w` up to an end. Gives the rows of which it was the first one's turn.
  template <bool whole>
  __device__ __forceinline__ uint32_t push_rows_as_they_are(uint32_t w, uint32_t end, uint32_t threads) const {
    uint32_t begun = 0;
    // Whatever none is called in ids, it is no less.
    const uint32_t all_slots = first_slot(p, p.size);
#pragma unroll 1
    for (; w < end; w += threads) {
      uint32_t g, at = row_of_granule(w, g);
      if constexpr (by_rank) {
        uint32_t s, i;
        if (!turn_of(at, s, i)) continue;
        at = begins[s] + i;
      }
      const int4 from = source(at);
      const uint32_t to = uint32_t(from.x), t = uint32_t(from.y);
      if (from.x < 0 || to == p.rank) continue;
      begun += g == 0;
      const uint64_t entry = uint64_t(t) * p.k + uint32_t(from.z);
      push(place(to, by_rank ? row_of(to, t, p.rank) : entry, g), without_sentinel<In>(load<whole>(p.from, at, g)));
      if (p.back == 0) continue;
      if constexpr (by_rank) {
#pragma unroll 1
        for (uint32_t e = g; e < p.k; e += p.granules) {
          const uint32_t own = at * p.k + e;
          if (reinterpret_cast<const uint32_t*>(p.received_ids)[own] < all_slots) push_weight(to, uint64_t(t) * p.k + e, own);
        }
      } else {
        if (g == 0) push_weight(to, entry, at);
      }
    }
    return begun;
  }

  // The same of sums of this rank's rows of each token.
  template <bool whole>
  __device__ __forceinline__ uint32_t push_sums(uint32_t w, uint32_t end, uint32_t threads) const {
    uint32_t begun = 0;
#pragma unroll 1
    for (; w < end; w += threads) {
      uint32_t g, s, i;
      if (!turn_of(row_of_granule(w, g), s, i)) continue;
      begun += g == 0;
      const int32_t* rows = rows_of(s, i);
      uint32_t e = 0;
#pragma unroll 1
      while (rows[e] < 0) ++e;
      const uint32_t t = uint32_t(source(uint32_t(rows[e])).y);
      push(place(s, row_of(s, t, p.rank), g), added<whole>(rows, g));
      if (p.back == 0) continue;
#pragma unroll 1
      for (uint32_t e = g; e < p.k; e += p.granules) {
        if (rows[e] >= 0) push_weight(s, uint64_t(t) * p.k + e, uint32_t(rows[e]));
      }
    }
    return begun;
  }

  template <bool whole>
  __device__ __forceinline__ uint32_t push_granules(uint32_t w, uint32_t end, uint32_t threads) const {
    return !by_rank && p.sum == by_experts_and_ranks ? push_sums<whole>(w, end, threads) : push_rows_as_they_are<whole>(w, end, threads);
  }

  // From and to any addresses.
  static __device__ __noinline__ uint32_t push_any(const PushCombineParams& p, uint32_t buffer, uint32_t w, uint32_t end, uint32_t threads) {
    return PushCombine(p, 0, buffer, 0).template push_granules<false>(w, end, threads);
  }

  // Waits for a granule of a token's rows, and for a herald's peer to arrive. `there` has a bit for each rank that has one.
  template <bool whole>
  __device__ __forceinline__ bool take_of_ranks(uint32_t t, uint32_t g, bool herald, uint4 (&got)[Most], uint32_t& there) const {
    there = 0;
#pragma unroll
    for (int r = 0; r < Most; ++r) {
      got[r] = make_uint4(0, 0, 0, 0);
      const int32_t i = r < p.size ? position(t, r) : -1;
      if (i < 0) continue;
      there |= 1u << r;
      if (r != p.rank) continue;
      if (by_rank) {
        got[r] = load<whole>(p.from, begins[r] + i, g);
      } else {
        got[r] = added<whole>(rows_of(r, i), g);
      }
    }
    const auto comes = [&](int r) { return r != p.rank && (there >> r & 1); };
    const auto look = [&] {
      bool come = arrived(herald) == flag;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (comes(r)) got[r] = peek(place(p.rank, row_of(p.rank, t, r), g));
      }
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (comes(r)) come &= is_there(got[r]);
      }
      return come;
    };
    const auto missing = [&] {
      uint32_t who = herald ? threadIdx.x : p.rank;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (comes(r) && !is_there(got[r])) who = r;
      }
      return who;
    };
    return wait(missing, look);
  }

  // Waits for the rows of a token's experts, some at a time, and adds them.
  template <bool whole>
  __device__ __forceinline__ bool sum_of_experts(uint32_t t, uint32_t g, Adding<In>& all) const {
    constexpr uint32_t ahead = whole ? 4 : 1;
#pragma unroll 1
    for (uint32_t e = 0; e < p.k; e += ahead) {
      const uint64_t entry = uint64_t(t) * p.k + e;
      uint4 v[ahead];
      uint32_t from[ahead], named = 0, comes = 0;
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) {
        const int32_t slot = e + i < p.k ? chosen(t, e + i) : -1;
        from[i] = p.rank;
        if (slot < 0) continue;
        from[i] = rank_of_slot(p, uint32_t(slot));
        (from[i] == p.rank ? named : comes) |= 1u << i;
      }
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) {
        if (named >> i & 1) v[i] = load<whole>(p.from, uint32_t(rows_of(p.rank, position(t, p.rank))[e + i]), g);
      }
      const auto look = [&] {
        bool come = true;
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i) {
          if (comes >> i & 1) v[i] = peek(place(p.rank, entry + i, g));
        }
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i) {
          if (comes >> i & 1) come &= is_there(v[i]);
        }
        return come;
      };
      const auto missing = [&] {
        uint32_t who = p.rank;
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i) {
          if ((comes >> i & 1) && !is_there(v[i])) who = from[i];
        }
        return who;
      };
      if (!wait(missing, look)) return false;
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i) {
        if ((named | comes) >> i & 1) all.add(v[i], reinterpret_cast<const float*>(p.own_weights)[entry + i]);
      }
    }
    return true;
  }

  // What is added at last, and the result.
  template <bool whole>
  __device__ __forceinline__ void give(uint32_t w, uint32_t t, uint32_t g, Adding<In>& parts) const {
#pragma unroll 1
    for (uint32_t b = 0; b < p.bias_count; ++b) parts.add(load<whole>(p.biases[b], t, g));
    Result<In, Out> result;
    result.set(parts.x);
#pragma unroll
    for (uint32_t k = 0; k < Result<In, Out>::parts; ++k) {
      const uint64_t to = p.out + 16 * (uint64_t(w) * Result<In, Out>::parts + k);
      if constexpr (whole) {
        *reinterpret_cast<uint4*>(to) = result.part[k];
      } else {
        any_output(to, 16, result.part[k]);
      }
    }
  }

  // Adds up a granule of own tokens, and gives it if it is to be `kept`. A herald waits for its peer's arrival too.
  template <bool whole>
  __device__ __forceinline__ bool add_granule(uint32_t w, bool herald, bool kept) const {
    uint32_t g;
    const uint32_t t = row_of_granule(w, g);
    if (!by_rank && p.sum == by_experts) {
      Adding<In> parts{};
      if (!sum_of_experts<whole>(t, g, parts)) return false;
      if (herald && !wait([] { return threadIdx.x; }, [&] { return arrived(true) == flag; })) return false;
      if (kept) give<whole>(w, t, g, parts);
      return true;
    }
    uint4 got[Most];
    uint32_t there;
    if (!take_of_ranks<whole>(t, g, herald, got, there)) return false;
    if (!kept) return true;
    Adding<In> parts{};
#pragma unroll
    for (int r = 0; r < Most; ++r) {
      if (there >> r & 1) parts.add(got[r]);
    }
    give<whole>(w, t, g, parts);
    return true;
  }

  __device__ __forceinline__ bool take_weight(uint32_t t, uint32_t e) const {
    const uint64_t entry = uint64_t(t) * p.k + e;
    const int32_t slot = chosen(t, e);
    uint32_t bits = 0;
    if (slot >= 0) {
      const uint32_t from = rank_of_slot(p, uint32_t(slot));
      if (from == p.rank) {
        const int32_t i = position(t, from);
        const uint32_t at = p.sum == by_ranks ? (begins[from] + i) * p.k + e : uint32_t(rows_of(from, i)[e]);
        bits = reinterpret_cast<const uint32_t*>(p.back)[at];
      } else if (!wait([&] { return from; }, [&] { return (bits = load_relaxed_sys(weight(p.rank, entry))) != sentinel; })) {
        return false;
      }
    }
    reinterpret_cast<uint32_t*>(p.weights_out)[entry] = bits;
    return true;
  }

  // Waits for each peer to be in the call, and adds how long: a lane for each, of the first block that adds.
  __device__ __forceinline__ bool add_waits() const {
    if (p.waits == 0 || blockIdx.x != uint32_t(splits()) || threadIdx.x >= p.size || threadIdx.x == p.rank) return true;
    return wait_and_add(threadIdx.x, [&] { return arrived(true) == flag; });
  }

  // Where waits are added up; and where there is a hook: waits until all has come, and tells it.
  static __device__ __noinline__ bool await(const PushCombineParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const PushCombine combine(p, use, buffer, flag);
    bool there = combine.add_waits();
    if (p.desk == 0) return there;
#pragma unroll 1
    for (uint32_t w = threadIdx.x; w < p.tokens * p.granules && there; w += blockDim.x) {
      there = combine.template add_granule<false>(w, false, false);
    }
    combine.have_come(0);
    return there;
  }

  static __device__ __noinline__ void deny(const PushCombineParams& p, uint64_t flag) {
    const Exchange g{group_of(p, p.signature), flag, globaltimer_ns()};
    Waiting w{};
    w.blamed = w.slot = p.rank, w.end = End::mismatch;
    w.blamed_expected = p.max_tokens, w.seen = reinterpret_cast<const uint32_t*>(p.received)[p.rank];
    give_up(g, w);
  }

  // Whether a block pushes or adds, and not both; which of those it is, and how many add.
  __device__ __forceinline__ bool splits() const { return p.desk == 0 && p.size > 1 && gridDim.x > 1; }
  __device__ __forceinline__ uint32_t which() const { return splits() ? blockIdx.x / 2 : blockIdx.x; }
  __device__ __forceinline__ uint32_t adders() const { return splits() ? gridDim.x / 2 : gridDim.x; }

  // Granules that there are to push, with those of rows that go nowhere.
  __device__ __forceinline__ uint32_t to_push() const {
    if (p.size == 1) return 0;
    if (p.sum == by_experts) return offset(p.own_slots) * p.granules;
    uint32_t most = 0;
#pragma unroll 1
    for (uint32_t s = 0; s < p.size; ++s) most = s == p.rank ? most : max(most, came[s]);
    return most * (p.size - 1) * p.granules;
  }

  __device__ __forceinline__ void push_rows(uint32_t first, uint32_t end, uint32_t threads) const {
    count_moved(is_whole() ? push_granules<true>(first, end, threads) : push_any(p, buffer, first, end, threads));
  }

  __device__ __forceinline__ void count_moved(uint32_t rows) const {
    if (rows == 0) return;
    const uint32_t row_weights = p.back == 0 ? 0 : p.sum == by_experts ? 1 : p.k;
    const uint64_t moved = rows * (16ull * p.granules + 4 * row_weights);
    atomicAdd(reinterpret_cast<unsigned long long*>(state()) + STATE_MOVED, (unsigned long long)moved);
  }

  // Adds up granules of own tokens: a block's share, of which warps take what is next. A herald waits for its peer's arrival too, with the first.
  template <bool whole>
  __device__ __forceinline__ bool add_share(bool& herald) const {
    const uint32_t all = p.tokens * p.granules, lane = threadIdx.x % 32;
    const uint32_t pieces = (all + 31) / 32, mine = (pieces + adders() - 1 - which()) / adders();
    bool there = true;
#pragma unroll 1
    while (__all_sync(0xFFFFFFFFu, there)) {
      const uint32_t n = next_of(item);
      if (n >= mine) break;
      const uint32_t w = (n * adders() + which()) * 32 + lane;
      if (w >= all) continue;
      there = add_granule<whole>(w, herald, true);
      herald = false;
    }
    return there;
  }

  static __device__ __noinline__ bool add_any(const PushCombineParams& p, uint32_t buffer, uint64_t flag, bool& herald) {
    return PushCombine(p, 0, buffer, flag).template add_share<false>(herald);
  }

  // By all threads of a block, the first of which have read rows of a rank, and where they begin. Says whether all is well.
  __device__ __forceinline__ bool begin(uint32_t rows, uint32_t first) const {
    announce();
    if (threadIdx.x < p.size) came[threadIdx.x] = rows, begins[threadIdx.x] = first;
    if (threadIdx.x == 0) item = 0;
    // What a dispatch leaves that came to no good end is poisoned.
    const bool poisoned = __syncthreads_or(rows > p.max_tokens);
    if (poisoned && !stopped && threadIdx.x == 0) deny(p, flag);
    return !poisoned && !stopped;
  }

  // Whether it is one of the largest blocks: of those, the ones that push have more time, and empty.
  __device__ __forceinline__ static bool is_wide() { return by_rank && blockDim.x == Widest; }

  __device__ __forceinline__ void run(uint32_t rows, uint32_t first) const {
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    bool failed = !begin(rows, first), herald = is_herald();
    const uint32_t all = failed ? 0 : to_push();
    if (!splits()) {
      push_rows(me, all, threads);
      empty();
    }
    tally(p.moved_bytes);
    if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) fill(p.weight_granules + p.tokens * (p.sum == by_experts ? p.k : p.size - 1) * p.granules);
    if ((p.desk != 0 || p.waits != 0) && !failed) failed = __syncthreads_or(!await(p, use, buffer, flag));
    const uint32_t mine = which() * blockDim.x + threadIdx.x;
    if (splits() && blockIdx.x % 2 == 0) {
      const uint32_t threads = (gridDim.x + 1) / 2 * blockDim.x;
      push_rows(mine, all, threads);
      if (is_wide()) empty_by(mine, threads);
    } else {
      if (splits() && !is_wide()) empty_by(mine, adders() * blockDim.x);
      if (!failed) failed = is_whole() ? !add_share<true>(herald) : !add_any(p, buffer, flag, herald);
    }
    if (p.weights_out != 0) {
#pragma unroll 1
      for (uint32_t n = me; n < p.tokens * p.k && !failed; n += threads) failed = !take_weight(n / p.k, n % p.k);
    }
    if (herald && !failed) failed = !wait([] { return threadIdx.x; }, [&] { return arrived(true) == flag; });
    finish(failed);
  }
};

// As many blocks find room as those of all-reduces.
#define PUSH_COMBINE(NAME, BY_RANK, ...)                                                                 \
  extern "C" __global__ void __launch_bounds__(BY_RANK ? Widest : ALL_REDUCE_THREADS, BY_RANK ? 1 : 2)   \
      brigade_push_combine_##NAME(const __grid_constant__ PushCombineParams p) {                         \
    wait_for_previous_kernel();                                                                          \
    let_next_kernel_start();                                                                             \
    /* On their way with the state. */                                                                   \
    const uint32_t rank = threadIdx.x;                                                                   \
    const uint32_t rows = rank < p.size ? reinterpret_cast<const uint32_t*>(p.received)[rank] : 0;       \
    const uint32_t begin = BY_RANK && rank < p.size ? reinterpret_cast<const uint32_t*>(p.offsets)[rank] : 0; \
    find_state(p);                                                                                       \
    __VA_ARGS__(p, state_found).run(rows, begin);                                                        \
  }
