// Rows to their experts as one kernel (push.cuh): for few tokens, where launches and waits cost more than bytes.
//
// Every block finds out for itself where own tokens go. A sender has a place at each receiver for every row that it may send: a header,
// with the token and its slots there, and then the row in packets (escaped.cuh). Counts come first. Nothing waits for anybody before it
// pushes; each row is taken as soon as it is there, and goes where it belongs. The last block, if it is not the only one, pushes and
// takes nothing: it writes down what the caller is told of the ways.
//
//   [count of each peer][row 0 of each peer][row 1 of each peer]..., so that what was filled is one range
#include "copy.cuh"
#include "escaped.cuh"
#include "slots.cuh"

namespace brigade {

__device__ inline void poison_outputs(const PushDispatchParams& p) {
  for (uint32_t i = 0; i < 10; ++i) poison(p.poisoned[i], p.poisoned_bytes[i], p.poisons[i], threadIdx.x, blockDim.x);
}

}  // namespace brigade

using namespace brigade;

enum Section : uint32_t { row = 0, scales = 1, token = 2, slots_of_row = 3, weights = 4, beside = 5 };
enum Arrangement : uint32_t { dense = 0, by_source = 1, by_expert = 2 };

constexpr uint32_t Nowhere = 0xFFFFu;
constexpr uint32_t Most = 8;

// What a block knows of the call.
struct Ways {
  // Of each token, for each rank.
  uint16_t position[PUSH_TOKENS * Most];
  // Of own rows to this rank, in their order.
  uint16_t own[PUSH_TOKENS];
  uint32_t warps[ALL_REDUCE_THREADS / 32][Most];
  // Rows to each rank, and from each rank.
  uint32_t to[Most], came[Most];
  // Of the rows of each rank, the first, counted over all that came; and where it lies.
  uint32_t first[Most + 1], at[Most + 1];
  // By expert: rows of each slot, and where they begin.
  uint32_t count[PUSH_SLOTS], begin[PUSH_SLOTS + 1];
  // By expert: rows that are handled together.
  uint16_t list[ALL_REDUCE_THREADS];
};

__shared__ Ways ways;

// Part of a row's image which is not a whole granule of the row itself.
__device__ __noinline__ uint4 rare_input(const PushDispatchParams& p, uint32_t from, uint32_t to, uint32_t g) {
  uint32_t s = 0;
  while (p.first_granule[s + 1] <= g) ++s;
  const uint64_t at = 16ull * (g - p.first_granule[s]), left = p.row_bytes[s] - at;
  if (s != weights) return any_input(p.from[s] + from * p.row_bytes[s] + at, left < 16 ? uint32_t(left) : 16);
  const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
  uint32_t w[4] = {};
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t e = uint32_t(at / 4) + i;
    if (e >= p.k) break;
    const int32_t slot = chosen_slot(p, from, e);
    const bool theirs = slot >= begin && slot < end;
    w[i] = theirs ? reinterpret_cast<const uint32_t*>(p.from[weights])[uint64_t(from) * p.k + e] : 0;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __noinline__ void rare_output(const PushDispatchParams& p, uint64_t at, uint32_t g, uint4 v) {
  uint32_t s = 0;
  while (p.first_granule[s + 1] <= g) ++s;
  // Of a row for one expert, whoever places it writes its weight.
  if (s == weights && p.arrangement == by_expert) return;
  const uint64_t in_row = 16ull * (g - p.first_granule[s]), left = p.row_bytes[s] - in_row;
  const uint32_t bytes = left < 16 ? uint32_t(left) : 16;
  if (s == scales && p.scale_words != 0) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      reinterpret_cast<uint32_t*>(p.to[s])[(in_row / 4 + i) * p.capacity + at] = w[i];
    }
    return;
  }
  any_output(p.to[s] + at * p.row_bytes[s] + in_row, bytes, v);
}

struct PushDispatch : Pushing<PushDispatchParams> {
  using Pushing::Pushing;

  __device__ __forceinline__ bool is_clerk() const { return blockIdx.x == gridDim.x - 1; }
  __device__ __forceinline__ bool is_worker() const { return gridDim.x == 1 || !is_clerk(); }
  __device__ __forceinline__ uint32_t workers() const { return gridDim.x == 1 ? 1 : gridDim.x - 1; }

  // Which place `from` has at `to`: that of the next rank comes first.
  __device__ __forceinline__ uint32_t place(uint32_t to, uint32_t from) const {
    return (from > to ? from - to : from + p.size - to) - 1;
  }

  __device__ __forceinline__ uint64_t count_at(uint32_t to, uint32_t from) const {
    return slots(to, buffer) + 16ull * place(to, from);
  }

  // The header of row `i` that `from` sends to `to`; the row and the words behind it follow.
  __device__ __forceinline__ uint64_t record_at(uint32_t to, uint32_t from, uint32_t i) const {
    return slots(to, buffer) + 16ull * (p.size + (uint64_t(i) * (p.size - 1) + place(to, from)) * p.record);
  }

  // Where own tokens go. By all threads.
  __device__ __forceinline__ void find_ways() const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < Most) ways.to[threadIdx.x] = 0;
    if (p.again) {
      const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.sent_offsets);
      if (threadIdx.x < p.size) ways.to[threadIdx.x] = offsets[threadIdx.x + 1] - offsets[threadIdx.x];
      for (uint32_t i = threadIdx.x; i < p.tokens * p.size; i += blockDim.x) {
        const int32_t at = reinterpret_cast<const int32_t*>(p.positions)[i];
        ways.position[i] = at < 0 ? Nowhere : uint16_t(at);
        if (at >= 0 && i % p.size == p.rank) ways.own[at] = uint16_t(i / p.size);
      }
      __syncthreads();
      return;
    }
    for (uint32_t start = 0; start < p.tokens; start += blockDim.x) {
      const uint32_t t = start + threadIdx.x;
      uint32_t goes = 0;
      if (t < p.tokens) {
        for (uint32_t e = 0; e < p.k; ++e) {
          const int32_t slot = chosen_slot(p, t, e);
          if (slot >= 0) goes |= 1u << rank_of_slot(p, uint32_t(slot));
        }
      }
      for (uint32_t r = 0; r < p.size; ++r) {
        const uint32_t votes = __ballot_sync(0xFFFFFFFFu, goes >> r & 1);
        if (lane == 0) ways.warps[warp][r] = __popc(votes);
      }
      __syncthreads();
      for (uint32_t r = 0; r < p.size; ++r) {
        const uint32_t votes = __ballot_sync(0xFFFFFFFFu, goes >> r & 1);
        if (t >= p.tokens) continue;
        uint32_t at = Nowhere;
        if (goes >> r & 1) {
          at = ways.to[r] + __popc(votes & ((1u << lane) - 1));
          for (uint32_t w = 0; w < warp; ++w) at += ways.warps[w][r];
          if (r == p.rank) ways.own[at] = uint16_t(t);
        }
        ways.position[t * p.size + r] = uint16_t(at);
      }
      __syncthreads();
      if (threadIdx.x < p.size) {
        for (uint32_t w = 0; w < blockDim.x / 32; ++w) ways.to[threadIdx.x] += ways.warps[w][threadIdx.x];
      }
      __syncthreads();
    }
    __syncthreads();
  }

  // Word `i` of a row's header: the token, and then two slots in each, counted from 1. So none is the sentinel.
  __device__ __forceinline__ uint32_t header_word(uint32_t t, uint32_t begin, uint32_t end, uint32_t i) const {
    if (i == 0) return t;
    uint32_t word = 0;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t e = 2 * (i - 1) + half;
      const int32_t slot = e < p.k ? chosen_slot(p, t, e) : -1;
      if (slot >= int32_t(begin) && slot < int32_t(end)) word |= (uint32_t(slot) - begin + 1) << (16 * half);
    }
    return word;
  }

  __device__ __forceinline__ void push_header(uint32_t to, uint32_t t, uint32_t i, uint32_t h) const {
    const uint32_t begin = first_slot(p, to), end = first_slot(p, to + 1);
    uint32_t w[4];
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) w[k] = header_word(t, begin, end, 4 * h + k);
    push(record_at(to, p.rank, i) + 16ull * h, make_uint4(w[0], w[1], w[2], w[3]));
  }

  __device__ __forceinline__ uint4 input(uint32_t t, uint32_t to, uint32_t g) const {
    if (g < p.first_granule[1] && p.from[row] % 16 == 0) {
      return *reinterpret_cast<const uint4*>(p.from[row] + t * p.row_bytes[row] + 16ull * g);
    }
    return rare_input(p, t, to, g);
  }

  __device__ __forceinline__ void output(uint64_t at, uint32_t g, uint4 v) const {
    if (g < p.first_granule[1] && p.to[row] % 16 == 0) {
      *reinterpret_cast<uint4*>(p.to[row] + at * p.row_bytes[row] + 16ull * g) = v;
    } else {
      rare_output(p, at, g, v);
    }
  }

  __device__ __forceinline__ void push_packet(uint32_t to, uint32_t t, uint32_t i, uint32_t j) const {
    const uint64_t at = record_at(to, p.rank, i) + 16ull * p.header;
    uint4 v[Each];
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g < p.granules) v[k] = input(t, to, g);
    }
    uint32_t escaped = 0;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g < p.granules) push(at + 16ull * g, escape(v[k], Each * k, escaped));
    }
    store_relaxed_sys(reinterpret_cast<uint32_t*>(at + 16ull * p.granules) + j, escaped);
  }

  __device__ __forceinline__ void push_all(uint32_t me, uint32_t threads) const {
    const uint32_t peers = p.size - 1;
    if (peers == 0) return;
    if (is_herald()) push(count_at(threadIdx.x, p.rank), make_uint4(ways.to[threadIdx.x], 0, 0, 0));
    const auto of = [&](uint32_t pair, uint32_t& to, uint32_t& t) {
      t = pair / peers, to = peer(1 + pair % peers);
      return uint32_t(ways.position[t * p.size + to]);
    };
    uint32_t to, t;
    for (uint32_t w = me; w < p.tokens * peers * p.header; w += threads) {
      const uint32_t i = of(w / p.header, to, t);
      if (i != Nowhere) push_header(to, t, i, w % p.header);
    }
    for (uint32_t w = me; w < p.tokens * peers * p.packets; w += threads) {
      const uint32_t i = of(w / p.packets, to, t);
      if (i != Nowhere) push_packet(to, t, i, w % p.packets);
    }
  }

  // Waits for the counts of all peers, and for their arrivals. By all threads; says whether they came.
  __device__ __forceinline__ bool take_counts() const {
    bool there = !stopped;
    if (threadIdx.x < p.size && there) {
      uint32_t n = ways.to[p.rank];
      if (threadIdx.x != p.rank) {
        // Every block looks whether the peer is in this call: what it reads of another one could be anything.
        const auto look = [&] {
          const uint64_t seen = arrived(true);
          const uint4 v = peek(count_at(p.rank, threadIdx.x));
          n = v.x;
          return is_there(v) && seen == flag;
        };
        there = wait([] { return threadIdx.x; }, look);
      }
      ways.came[threadIdx.x] = n;
    }
    if (__syncthreads_or(!there)) return false;
    if (threadIdx.x == 0) {
      uint32_t sum = 0, at = 0, most = 0;
      for (uint32_t r = 0; r < p.size; ++r) {
        ways.first[r] = sum, ways.at[r] = at;
        sum += ways.came[r];
        at += p.arrangement == by_source ? p.max_tokens : ways.came[r];
        if (r != p.rank) most = max(most, ways.came[r]);
      }
      ways.first[p.size] = sum, ways.at[p.size] = at;
      fill(p.size + most * (p.size - 1) * p.record);
    }
    __syncthreads();
    return true;
  }

  // Whose row `r` of all is that came, and which of those from there.
  __device__ __forceinline__ uint32_t source_of(uint32_t r, uint32_t& i) const {
    uint32_t s = 0;
    while (s + 1 < p.size && ways.first[s + 1] <= r) ++s;
    i = r - ways.first[s];
    return s;
  }

  // Waits for part of a header.
  __device__ __forceinline__ bool take_header(uint32_t s, uint32_t i, uint32_t h, uint4& v) const {
    if (s == p.rank) {
      const uint32_t begin = first_slot(p, s), end = first_slot(p, s + 1), t = ways.own[i];
      v = make_uint4(header_word(t, begin, end, 4 * h), header_word(t, begin, end, 4 * h + 1),
                     header_word(t, begin, end, 4 * h + 2), header_word(t, begin, end, 4 * h + 3));
      return true;
    }
    const uint64_t at = record_at(p.rank, s, i) + 16ull * h;
    return wait([&] { return s; }, [&] { return is_there(v = peek(at)); });
  }

  // Waits for a packet, or takes it from own rows.
  __device__ __forceinline__ bool take(uint32_t s, uint32_t i, uint32_t j, uint4 (&v)[Each]) const {
    if (s == p.rank) {
      const uint32_t t = ways.own[i];
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        const uint32_t g = k * p.packets + j;
        if (g < p.granules) v[k] = input(t, s, g);
      }
      return true;
    }
    const uint64_t at = record_at(p.rank, s, i) + 16ull * p.header;
    uint32_t escaped;
    const auto look = [&] {
      bool come = true;
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        const uint32_t g = k * p.packets + j;
        v[k] = g < p.granules ? peek(at + 16ull * g) : make_uint4(0, 0, 0, 0);
      }
      escaped = load_relaxed_sys(reinterpret_cast<const uint32_t*>(at + 16ull * p.granules) + j);
      come = escaped != sentinel;
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) come &= is_there(v[k]);
      return come;
    };
    if (!wait([&] { return s; }, look)) return false;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) v[k] = restored(v[k], Each * k, escaped);
    return true;
  }

  __device__ __forceinline__ void give(uint64_t at, uint32_t j, const uint4 (&v)[Each]) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g < p.granules) output(at, g, v[k]);
    }
  }

  // There are more rows than room: nothing is written.
  static __device__ __noinline__ void overflow(const PushDispatchParams& p, uint64_t flag, uint32_t rows) {
    if (threadIdx.x != 0) return;
    const Exchange g{group_of(p, p.signature), flag, globaltimer_ns()};
    Waiting w{};
    w.blamed = p.rank, w.blamed_expected = p.capacity, w.seen = rows, w.end = End::overflow;
    give_up(g, w);
  }

  // Other rows came than went these ways before.
  static __device__ __noinline__ void deny(const PushDispatchParams& p, uint64_t flag, uint32_t s, uint32_t rows) {
    const Exchange g{group_of(p, p.signature), flag, globaltimer_ns()};
    Waiting w{};
    w.blamed = w.slot = s, w.seen = rows, w.end = End::mismatch;
    w.blamed_expected = reinterpret_cast<const uint32_t*>(p.received)[s];
    give_up(g, w);
  }

  __device__ __forceinline__ void say(uint32_t at, int4 source) const { reinterpret_cast<int4*>(p.sources)[at] = source; }

  __device__ __forceinline__ int32_t* ids() const { return reinterpret_cast<int32_t*>(p.received_ids); }
  __device__ __forceinline__ uint32_t* out_weights() const { return reinterpret_cast<uint32_t*>(p.to[weights]); }

  // No row lies here; a row has so many ids.
  __device__ __forceinline__ void nobody(uint32_t at, uint32_t each) const {
    say(at, make_int4(-1, -1, -1, -1));
    for (uint32_t e = 0; e < each; ++e) {
      ids()[uint64_t(at) * each + e] = -1;
      if (p.to[weights] != 0) out_weights()[uint64_t(at) * each + e] = 0;
    }
  }

  // Rows of one source after the other, or with room for all that it may send. Says whether all came.
  __device__ __forceinline__ bool take_by_source(uint32_t me, uint32_t threads) const {
    const uint32_t all = ways.first[p.size];
    bool there = true;
    uint32_t i;
    for (uint32_t w = me; w < all * p.packets && there; w += threads) {
      const uint32_t s = source_of(w / p.packets, i), j = w % p.packets;
      uint4 v[Each];
      there = take(s, i, j, v);
      if (there) give(ways.at[s] + i, j, v);
    }
    if (p.again) return there;
    // From the other end: those that have fewer packets.
    for (uint32_t r = threads - 1 - me; r < all && there; r += threads) {
      const uint32_t s = source_of(r, i), at = ways.at[s] + i;
      for (uint32_t h = 0; h < p.header && there; ++h) {
        uint4 v;
        there = take_header(s, i, h, v);
        if (!there) break;
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const uint32_t word = 4 * h + k;
          if (word == 0) {
            say(at, make_int4(int32_t(s), int32_t(w[k]), -1, int32_t(i)));
            continue;
          }
          const uint32_t e = 2 * (word - 1);
          if (e < p.k) ids()[uint64_t(at) * p.k + e] = int32_t(w[k] & 0xFFFF) - 1;
          if (e + 1 < p.k) ids()[uint64_t(at) * p.k + e + 1] = int32_t(w[k] >> 16) - 1;
        }
      }
    }
    return there;
  }

  // The slot of entry `e` of row `r`, counted from 1, of rows whose headers have come.
  __device__ __forceinline__ uint32_t entry(uint32_t r, uint32_t e) const {
    uint32_t i;
    const uint32_t s = source_of(r, i), word = 1 + e / 2;
    const uint32_t w = s == p.rank ? header_word(ways.own[i], first_slot(p, s), first_slot(p, s + 1), word)
                                   : load_relaxed_sys(reinterpret_cast<const uint32_t*>(record_at(p.rank, s, i)) + word);
    return w >> (e % 2 * 16) & 0xFFFF;
  }

  // By expert: counts rows of all slots, and where they begin. By all threads of every block.
  __device__ __forceinline__ bool count_slots() const {
    for (uint32_t i = threadIdx.x; i < p.own_slots; i += blockDim.x) ways.count[i] = 0;
    __syncthreads();
    bool there = true;
    for (uint32_t n = threadIdx.x; n < ways.first[p.size] * p.header && there; n += blockDim.x) {
      uint32_t i;
      const uint32_t s = source_of(n / p.header, i), h = n % p.header;
      uint4 v;
      there = take_header(s, i, h, v);
      if (!there) break;
      const uint32_t w[4] = {h == 0 ? 0 : v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        if (w[k] & 0xFFFF) atomicAdd(&ways.count[(w[k] & 0xFFFF) - 1], 1u);
        if (w[k] >> 16) atomicAdd(&ways.count[(w[k] >> 16) - 1], 1u);
      }
    }
    if (__syncthreads_or(!there)) return false;
    if (threadIdx.x < 32) {
      uint32_t before = 0;
      for (uint32_t start = 0; start < p.own_slots; start += 32) {
        const uint32_t i = start + threadIdx.x;
        const uint32_t own = i < p.own_slots ? (ways.count[i] + p.alignment - 1) / p.alignment * p.alignment : 0;
        uint32_t sum = own;
#pragma unroll
        for (uint32_t d = 1; d < 32; d *= 2) {
          const uint32_t below = __shfl_up_sync(0xFFFFFFFFu, sum, d);
          if (threadIdx.x >= d) sum += below;
        }
        if (i < p.own_slots) ways.begin[i] = before + sum - own;
        before += __shfl_sync(0xFFFFFFFFu, sum, 31);
      }
      if (threadIdx.x == 0) ways.begin[p.own_slots] = before;
    }
    __syncthreads();
    return true;
  }

  // The weight of entry `e` of a row.
  __device__ __forceinline__ bool take_weight(uint32_t s, uint32_t i, uint32_t e, uint32_t& weight) const {
    if (s == p.rank) {
      weight = reinterpret_cast<const uint32_t*>(p.from[weights])[uint64_t(ways.own[i]) * p.k + e];
      return true;
    }
    const uint32_t g = p.first_granule[weights] + e / 4, bit = g / p.packets * Each + e % 4;
    const uint64_t at = record_at(p.rank, s, i) + 16ull * p.header;
    uint32_t escaped;
    const auto look = [&] {
      weight = load_relaxed_sys(reinterpret_cast<const uint32_t*>(at + 16ull * g) + e % 4);
      escaped = load_relaxed_sys(reinterpret_cast<const uint32_t*>(at + 16ull * p.granules) + g % p.packets);
      return weight != sentinel && escaped != sentinel;
    };
    if (!wait([&] { return s; }, look)) return false;
    if (escaped >> bit & 1) weight = sentinel;
    return true;
  }

  // A row for each expert. Some blocks share each slot: all find its rows, and each takes its part of them.
  __device__ __forceinline__ bool take_by_expert() const {
    if (p.own_slots == 0) return true;
    const uint32_t entries = ways.first[p.size] * p.k, share = max(1u, workers() / p.own_slots);
    bool there = true;
    for (uint32_t unit = blockIdx.x; unit < p.own_slots * share; unit += workers()) {
      const uint32_t slot = unit / share, part = unit % share, end = ways.begin[slot] + ways.count[slot];
      uint32_t next = ways.begin[slot];
      for (uint32_t start = 0; start < entries && next < end; start += blockDim.x) {
        const uint32_t n = start + threadIdx.x, e = n % p.k;
        const bool mine = n < entries && entry(n / p.k, e) == slot + 1;
        uint32_t all;
        const uint32_t which = rank_among(mine, all);
        if (mine) {
          ways.list[which] = uint16_t(n / p.k);
          if (part == 0) {
            uint32_t i;
            const uint32_t s = source_of(n / p.k, i), at = next + which;
            const uint32_t t = s == p.rank ? ways.own[i] : load_relaxed_sys(reinterpret_cast<const uint32_t*>(record_at(p.rank, s, i)));
            say(at, make_int4(int32_t(s), int32_t(t), int32_t(e), int32_t(i)));
            ids()[at] = int32_t(slot);
            reinterpret_cast<int32_t*>(p.rows_of)[(uint64_t(s) * p.max_tokens + i) * p.k + e] = int32_t(at);
            uint32_t weight = 0;
            if (p.to[weights] != 0 && there) there = take_weight(s, i, e, weight);
            if (p.to[weights] != 0) out_weights()[at] = weight;
          }
        }
        __syncthreads();
        for (uint32_t w = part * blockDim.x + threadIdx.x; w < all * p.packets && there; w += share * blockDim.x) {
          uint32_t i;
          const uint32_t q = w / p.packets, j = w % p.packets, s = source_of(ways.list[q], i);
          uint4 v[Each];
          there = take(s, i, j, v);
          if (there) give(next + q, j, v);
        }
        next += all;
      }
      if (part == 0) {
        for (uint32_t at = end + threadIdx.x; at < ways.begin[slot + 1]; at += blockDim.x) nobody(at, 1);
      }
    }
    return there;
  }

  // By expert, the same ways again: rows are where they were.
  __device__ __forceinline__ bool take_again(uint32_t me, uint32_t threads) const {
    const uint32_t rows = reinterpret_cast<const uint32_t*>(p.offsets)[p.own_slots];
    bool there = true;
    for (uint32_t w = me; w < rows * p.packets && there; w += threads) {
      const uint32_t at = w / p.packets, j = w % p.packets;
      const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
      if (source.x < 0) continue;
      uint4 v[Each];
      there = take(uint32_t(source.x), uint32_t(source.w), j, v);
      if (there) give(at, j, v);
    }
    return there;
  }

  static __device__ __noinline__ bool by_experts(const PushDispatchParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const PushDispatch all(p, use, buffer, flag);
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x;
    return p.again ? all.take_again(me, all.workers() * blockDim.x) : all.take_by_expert();
  }

  // What the caller is told of own tokens. By all threads of a block.
  static __device__ __noinline__ void tell_ways(const PushDispatchParams& p) {
    const uint32_t me = threadIdx.x, threads = blockDim.x;
    int32_t* positions = reinterpret_cast<int32_t*>(p.positions);
    uint32_t* rows_per_slot = reinterpret_cast<uint32_t*>(p.rows_per_slot);
    uint32_t* sent_offsets = reinterpret_cast<uint32_t*>(p.sent_offsets);
    int32_t* sent = reinterpret_cast<int32_t*>(p.sent);
    for (uint32_t s = me; s < p.all_slots; s += threads) rows_per_slot[s] = 0;
    __syncthreads();
    for (uint32_t n = me; n < p.tokens * p.k; n += threads) {
      const int32_t slot = chosen_slot(p, n / p.k, n % p.k);
      reinterpret_cast<int32_t*>(p.chosen)[n] = slot;
      if (slot >= 0) atomicAdd(rows_per_slot + slot, 1u);
    }
    uint32_t all = 0;
    for (uint32_t r = 0; r < p.size; ++r) {
      if (me == 0) sent_offsets[r] = all;
      for (uint32_t t = me; t < p.tokens; t += threads) {
        const uint32_t at = ways.position[t * p.size + r];
        positions[t * p.size + r] = at == Nowhere ? -1 : int32_t(at);
        if (at != Nowhere) sent[all + at] = int32_t(t);
      }
      all += ways.to[r];
    }
    if (me == 0) sent_offsets[p.size] = all;
    for (uint32_t i = all + me; i < p.room; i += threads) sent[i] = -1;
  }

  // What the caller is told of the rows that come. By all threads of a block; says whether they came.
  __device__ __forceinline__ bool tell_rows() const {
    const uint32_t me = threadIdx.x, threads = blockDim.x;
    uint32_t* offsets = reinterpret_cast<uint32_t*>(p.offsets);
    if (me < p.size) reinterpret_cast<uint32_t*>(p.received)[me] = ways.came[me];
    for (uint32_t i = me; i < p.own_slots; i += threads) reinterpret_cast<uint32_t*>(p.counts)[i] = ways.count[i];
    if (p.arrangement == by_expert) {
      for (uint32_t i = me; i <= p.own_slots; i += threads) offsets[i] = ways.begin[i];
      for (uint32_t at = ways.begin[p.own_slots] + me; at < p.capacity; at += threads) nobody(at, 1);
      // Who has no row: what is there is written by those who find it.
      for (uint32_t n = me; n < p.size * p.max_tokens * p.k; n += threads) {
        const uint32_t s = n / p.k / p.max_tokens, i = n / p.k % p.max_tokens;
        const bool there = i < ways.came[s] && entry(ways.first[s] + i, n % p.k) != 0;
        if (!there) reinterpret_cast<int32_t*>(p.rows_of)[n] = -1;
      }
      return true;
    }
    if (me <= p.size) offsets[me] = ways.at[me];
    for (uint32_t at = me; at < p.capacity; at += threads) {
      uint32_t s = 0;
      while (s + 1 < p.size && ways.at[s + 1] <= at) ++s;
      if (at >= ways.at[p.size] || at - ways.at[s] >= ways.came[s]) nobody(at, p.k);
    }
    return true;
  }

  // Where there is a hook: waits until all has come, and tells it.
  __device__ __forceinline__ bool await() const {
    bool there = true;
    for (uint32_t w = threadIdx.x; w < ways.first[p.size] * p.packets && there; w += blockDim.x) {
      uint32_t i;
      const uint32_t s = source_of(w / p.packets, i);
      uint4 v[Each];
      there = take(s, i, w % p.packets, v);
    }
    have_come(0);
    return !__syncthreads_or(!there);
  }

  // Sees that what came is what there is room for, and tells of it. By all threads of a block.
  static __device__ __noinline__ bool see(const PushDispatchParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const PushDispatch all(p, use, buffer, flag);
    return all.check_rows() && (p.desk == 0 || all.await()) && (!all.is_clerk() || p.again || all.tell_rows());
  }

  __device__ __forceinline__ bool check_rows() const {
    if (p.again) {
      const uint32_t* received = reinterpret_cast<const uint32_t*>(p.received);
      if (is_clerk() && threadIdx.x < p.size && ways.came[threadIdx.x] != received[threadIdx.x]) {
        deny(p, flag, threadIdx.x, ways.came[threadIdx.x]);
      }
      const bool other = threadIdx.x < p.size && ways.came[threadIdx.x] != received[threadIdx.x];
      if (__syncthreads_or(other)) return false;
    } else {
      // Slots are counted for the caller too.
      if ((p.arrangement == by_expert || is_clerk()) && !count_slots()) return false;
      const uint32_t rows = p.arrangement == by_expert ? ways.begin[p.own_slots] : ways.at[p.size];
      if (rows > p.capacity) {
        overflow(p, flag, rows);
        return false;
      }
    }
    return true;
  }

  __device__ __forceinline__ bool take_rows(uint32_t me, uint32_t threads) const {
    if (!take_counts() || !see(p, use, buffer, flag)) return false;
    if (!is_worker()) return true;
    return p.arrangement == by_expert ? by_experts(p, use, buffer, flag) : take_by_source(me, threads);
  }

  __device__ __forceinline__ void run() {
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, threads = workers() * blockDim.x;
    announce();
    find_ways();
    uint64_t rows = 0;
    for (uint32_t r = 0; r < p.size; ++r) rows += r == p.rank ? 0 : ways.to[r];
    if (is_worker()) push_all(me, threads);
    empty();
    tally(rows * p.all_bytes);
    if (is_clerk() && !p.again) tell_ways(p);
    finish(!take_rows(me, threads));
  }
};

// As many blocks find room as those of all-reduces.
extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)
    brigade_push_dispatch(const __grid_constant__ PushDispatchParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  PushDispatch(p).run();
}
