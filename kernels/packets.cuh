// Packets of rows that are pushed (push_dispatch.cuh): where they lie, and how they go and come. Nearly all of them are nothing but granules
// of rows that lie at multiples of 16 bytes, and at most weights behind them. The way of those has no calls, which would have their granules
// read one after the other, but for weights of more entries than are kept.
#pragma once
#include "ways.cuh"

namespace brigade {

struct Packets : Pushing<PushDispatchParams> {
  using Pushing::Pushing;

  // Which place `from` has at `to`: that of the next rank comes first.
  __device__ __forceinline__ uint32_t place(uint32_t to, uint32_t from) const {
    return (from > to ? from - to : from + p.size - to) - 1;
  }

  // Granules that say which of a rank's tokens come.
  __device__ __forceinline__ uint32_t way_granules() const { return max(1u, (p.max_tokens + PerGranule - 1) / PerGranule); }

  // That one of them in which `from` tells `to`.
  __device__ __forceinline__ uint64_t way_at(uint32_t to, uint32_t from, uint32_t g) const {
    return slots(to, buffer) + 16ull * (g * (p.size - 1) + place(to, from));
  }

  // Whether blocks find the ways of many tokens between them, a share each: where they have no room for the slots of all entries.
  __device__ __forceinline__ bool shares_ways() const { return many && p.size > 1 && !p.again && p.tokens * p.k > Kept; }

  // Tokens whose ranks blocks tell each other in a granule, two in a word: which is never the sentinel.
  static constexpr uint32_t PerShared = 8;

  // The first of own tokens whose ways this block finds, or that of the next block.
  __device__ __forceinline__ uint32_t least(uint32_t block) const {
    if (!shares_ways()) return block == blockIdx.x ? 0 : p.tokens;
    const uint32_t granules = (p.tokens + PerShared - 1) / PerShared, each = (granules + gridDim.x - 1) / gridDim.x;
    return min(block * each * PerShared, p.tokens);
  }

  // That of token `PerShared * g` and those behind it: the last that come before records.
  __device__ __forceinline__ uint64_t shared_at(uint32_t g) const {
    const uint32_t granules = (p.max_tokens + PerShared - 1) / PerShared;
    return slots(p.rank, buffer) + 16ull * (p.first_record - granules + g);
  }

  // Tells the other blocks of the ways that this one has found, and hears of the others'. By all threads; says whether all have been heard of.
  __device__ __forceinline__ bool share_ways() const {
    const auto granules = [](uint32_t tokens) { return (tokens + PerShared - 1) / PerShared; };
    const uint32_t end = granules(least(blockIdx.x + 1)), all = granules(p.tokens);
#pragma unroll 1
    for (uint32_t g = granules(least(blockIdx.x)) + threadIdx.x; g < end; g += blockDim.x) {
      const uint32_t a = ways.masks[2 * g], b = PerShared * g + 4 < p.tokens ? ways.masks[2 * g + 1] : 0;
      const auto apart = [](uint32_t two) { return (two & 0xFF) | (two & 0xFF00) << 8; };
      push(shared_at(g), make_uint4(apart(a), apart(a >> 16), apart(b), apart(b >> 16)));
    }
    __syncthreads();
    bool there = true;
#pragma unroll 1
    for (uint32_t g = threadIdx.x; g < all && there; g += blockDim.x) {
      uint4 v;
      there = wait([&] { return p.rank; }, [&] { return is_there(v = peek(shared_at(g))); });
      if (!there) break;
      const auto together = [](uint32_t two) { return (two & 0xFF) | two >> 8; };
      ways.masks[2 * g] = together(v.x) | together(v.y) << 16;
      if (PerShared * g + 4 < p.tokens) ways.masks[2 * g + 1] = together(v.z) | together(v.w) << 16;
    }
    return !__syncthreads_or(!there);
  }

  // The row that `from` sends to `to` of its token `t`: a header, the row, and the words behind it.
  __device__ __forceinline__ uint64_t record_at(uint32_t to, uint32_t from, uint32_t t) const {
    return slots(to, buffer) + 16ull * (p.first_record + (uint64_t(t) * (p.size - 1) + place(to, from)) * p.record);
  }

  // Whether token `t` of a rank comes.
  __device__ __forceinline__ bool comes(uint32_t s, uint32_t t) const { return ways.coming[s][t / PerWord] >> t % PerWord & 1; }

  // Which row of that rank it is, then.
  __device__ __forceinline__ uint32_t row_of(uint32_t s, uint32_t t) const {
    const uint32_t word = ways.coming[s][t / PerWord];
    return (word >> PerWord) + __popc(word & ((1u << t % PerWord) - 1));
  }

  // The words behind the packets of a record.
  __device__ __forceinline__ uint32_t* words_of(uint64_t record) const { return reinterpret_cast<uint32_t*>(record + 16ull * p.words); }

  // Bytes from a granule of a packet to the next one: found once.
  __device__ __forceinline__ uint64_t apart() const {
    uint64_t bytes = 16ull * p.packets;
    asm volatile("" : "+l"(bytes));
    return bytes;
  }

  // Granule `g` of an own row.
  __device__ __forceinline__ uint64_t granule(uint32_t t, uint32_t g) const { return p.from[row] + t * p.row_bytes[row] + 16ull * g; }

  // Whether a granule is of weights.
  __device__ __forceinline__ bool is_weights(uint32_t g) const { return g >= p.first_granule[weights] && g < p.first_granule[weights + 1]; }

  // The last granule of a packet.
  __device__ __forceinline__ uint32_t last(uint32_t j) const { return (Each - 1) * p.packets + j; }

  // Whether a packet is nothing but granules of a row, of which the last may be one of weights; and they lie at multiples of 16 bytes, as
  // arrays of rows and of weights do.
  __device__ __forceinline__ bool is_plain(uint64_t rows, uint64_t of_weights, uint32_t j) const {
    bool plain = rows % 16 == 0;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      plain &= g < p.first_granule[1] || g >= p.granules || (k + 1 == Each && is_weights(g) && p.k % 4 == 0 && of_weights % 16 == 0);
    }
    return plain;
  }

  // A granule of an own row's weights for a rank, where rows of them are whole granules.
  __device__ __forceinline__ uint4 own_weights(uint32_t to, uint32_t t, uint32_t g) const {
    const uint32_t e = 4 * (g - p.first_granule[weights]);
    uint4 w = *reinterpret_cast<const uint4*>(p.from[weights] + 4 * (uint64_t(t) * p.k + e));
    if (slot_at(p, to, t, e) == 0) w.x = 0;
    if (slot_at(p, to, t, e + 1) == 0) w.y = 0;
    if (slot_at(p, to, t, e + 2) == 0) w.z = 0;
    if (slot_at(p, to, t, e + 3) == 0) w.w = 0;
    return w;
  }

  // A packet of an own row for a rank.
  __device__ __forceinline__ void input(uint32_t t, uint32_t to, uint32_t j, uint4 (&v)[Each]) const {
    const uint32_t whole = p.from[row] % 16 == 0 ? p.first_granule[1] : 0;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g < whole) v[k] = *reinterpret_cast<const uint4*>(granule(t, g));
    }
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g >= whole && g < p.granules) v[k] = rare_input(p, t, to, g);
    }
  }

  __device__ __forceinline__ void output(uint64_t at, uint32_t g, uint4 v) const {
    if (g < p.first_granule[1] && p.to[row] % 16 == 0) {
      *reinterpret_cast<uint4*>(p.to[row] + at * p.row_bytes[row] + 16ull * g) = v;
    } else {
      rare_output(p, at, g, v);
    }
  }

  __device__ __forceinline__ void push_packet(uint64_t record, uint32_t j, const uint4 (&v)[Each]) const {
    const uint64_t at = record + 16ull * (p.body + j), step = apart();
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (k * p.packets + j < p.granules) push(at + k * step, pushable(v[k]));
    }
    push_more(v, words_of(record) + j);
  }

  // Of whole granules.
  __device__ __forceinline__ void push_plain(uint32_t to, uint32_t t, uint32_t j) const {
    const uint64_t from = granule(t, j), step = apart();
    uint4 v[Each];
    // All of them are on their way at once.
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      v[k] = make_uint4(0, 0, 0, 0);
      if (k * p.packets + j < p.first_granule[1]) v[k] = *reinterpret_cast<const uint4*>(from + k * step);
    }
    if (is_weights(last(j))) v[Each - 1] = own_weights(to, t, last(j));
    push_packet(record_at(to, p.rank, t), j, v);
  }

  // The same of any packet.
  static __device__ __noinline__ void push_rare(const PushDispatchParams& p, uint32_t buffer, uint32_t to, uint32_t t, uint32_t j) {
    const Packets one(p, 0, buffer, 0);
    uint4 v[Each] = {};
    one.input(t, to, j, v);
    one.push_packet(one.record_at(to, p.rank, t), j, v);
  }

  // Waits for a packet, and until what else is looked for has come, too. What is own is there, whatever it is; own weights are elsewhere.
  template <typename Beside>
  __device__ __forceinline__ bool await_granules(uint32_t s, uint64_t from, const uint32_t* word, uint32_t j, uint4 (&v)[Each], Beside beside) const {
    const uint64_t step = apart();
    const uint32_t granules = s == p.rank ? p.first_granule[1] : p.granules;
    uint32_t escaped;
    const auto look = [&] {
      const bool come = beside();
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        v[k] = make_uint4(0, 0, 0, 0);
        if (k * p.packets + j < granules) v[k] = peek(from + k * step);
      }
      return is_complete(s == p.rank ? 0 : greatest(v), word, escaped) && come;
    };
    if (!wait([&] { return s; }, look)) return false;
    restore(v, escaped);
    return true;
  }

  __device__ __forceinline__ bool await_granules(uint32_t s, uint64_t from, const uint32_t* word, uint32_t j, uint4 (&v)[Each]) const {
    return await_granules(s, from, word, j, v, [] { return true; });
  }

  // Waits for a packet of a row, or takes it from own ones.
  __device__ __forceinline__ bool take(uint32_t s, uint32_t t, uint32_t j, uint4 (&v)[Each]) const {
    if (s == p.rank) {
      input(t, s, j, v);
      return true;
    }
    const uint64_t record = record_at(p.rank, s, t);
    return await_granules(s, record + 16ull * (p.body + j), words_of(record) + j, j, v);
  }

  __device__ __forceinline__ void give(uint64_t at, uint32_t j, const uint4 (&v)[Each]) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = k * p.packets + j;
      if (g < p.granules) output(at, g, v[k]);
    }
  }

  // Takes a packet of whole granules, and puts it where it belongs.
  __device__ __forceinline__ bool move_plain(uint32_t s, uint32_t t, uint32_t j, uint64_t at) const {
    const uint64_t record = record_at(p.rank, s, t), step = apart();
    const uint64_t from = s == p.rank ? granule(t, j) : record + 16ull * (p.body + j);
    const uint64_t to = p.to[row] + at * p.row_bytes[row] + 16ull * j;
    uint4 v[Each];
    if (!await_granules(s, from, words_of(record) + j, j, v)) return false;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (k * p.packets + j < p.first_granule[1]) *reinterpret_cast<uint4*>(to + k * step) = v[k];
    }
    if (is_weights(last(j))) {
      const uint64_t given = p.to[weights] + 4ull * at * p.k + 16ull * (last(j) - p.first_granule[weights]);
      *reinterpret_cast<uint4*>(given) = s == p.rank ? own_weights(s, t, last(j)) : v[Each - 1];
    }
    return true;
  }

  // The same of any packet.
  static __device__ __noinline__ bool move_rare(const PushDispatchParams& p, uint32_t buffer, uint64_t flag, uint32_t s, uint32_t t,
                                                uint32_t j, uint64_t at) {
    const Packets one(p, 0, buffer, flag);
    uint4 v[Each];
    const bool there = one.take(s, t, j, v);
    if (there) one.give(at, j, v);
    return there;
  }
};

}  // namespace brigade
