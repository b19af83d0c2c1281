// Rows for experts that are pushed (push_dispatch.cuh). Those of a slot lie together, by source, token, and place among the token's experts. A
// sender knows which of its own rows for a slot each is, and says so in the row's header; and how many it has for each slot it tells beside which
// tokens come. So whoever takes a packet knows where it goes from those counts and the header, and looks at nobody else's.
#pragma once
#include "packets.cuh"

namespace brigade {

struct ExpertRows : Packets {
  using Packets::Packets;

  // Counts of a granule: two in each word, which is never the sentinel, as there are no more than entries.
  static constexpr uint32_t Counts = 8;

  // That in which `from` tells `to` how many rows it has for some slots there.
  __device__ __forceinline__ uint64_t counts_at(uint32_t to, uint32_t from, uint32_t g) const {
    return slots(to, buffer) + 16ull * (p.first_count + g * (p.size - 1) + place(to, from));
  }

  // What the header of a row for a rank says of an own entry: its slot there, counted from 1, or 0, and which of this rank's rows for it this is. A block
  // knows that of the entries that it has numbered last, from `start` on.
  __device__ __forceinline__ uint32_t said_of(uint32_t to, uint32_t n, uint32_t start) const {
    const uint32_t entry = ways.numbered[n - start], slot = (entry & 0xFFFF) - 1;
    if (slot < ways.slots[to] || slot >= ways.slots[to + 1]) return 0;
    return (entry & 0xFFFF0000) | (slot - ways.slots[to] + 1);
  }

  // Own tokens that a block numbers at a time: as many as their entries are no more than its threads.
  __device__ __forceinline__ uint32_t together() const { return blockDim.x / p.k; }

  // The slot that an own entry names, counted from 1.
  __device__ __forceinline__ uint32_t name_of(uint32_t n) const {
    uint32_t e;
    const uint32_t t = divided(n, p.k, p.inverse_k, e);
    return uint32_t(own_slot(p, t, e) + 1);
  }

  // Counts what the entries from `n` up to `end` name. By all threads of a block.
  __device__ __forceinline__ void count_names(uint32_t n, uint32_t end) const {
#pragma unroll 1
    for (n += threadIdx.x; n < end; n += blockDim.x) ways.name(name_of(n), 1);
    __syncthreads();
  }

  // The same, and finds which of this rank's rows for its slot each of them is: of no more entries than threads, behind those in front of them.
  __device__ __forceinline__ void number_entries(uint32_t start, uint32_t end) const {
    const uint32_t me = threadIdx.x, entry = start + me < end ? name_of(start + me) : 0;
    // A warp at a time.
#pragma unroll 1
    for (uint32_t w = 0; 32 * w < end - start; ++w) {
      if (me / 32 == w) {
        const uint32_t same = __match_any_sync(0xFFFFFFFFu, entry), before = __popc(same & ((1u << me % 32) - 1));
        ways.numbered[me] = entry == 0 ? 0 : (ways.named(entry - 1) + before) << 16 | entry;
        __syncwarp();
        if (before == 0) ways.name(entry, __popc(same));
      }
      __syncthreads();
    }
  }

  // Tells peers how many rows come for each of their slots. By all threads of a block that has counted them.
  __device__ __forceinline__ void push_counts() const {
#pragma unroll 1
    for (uint32_t w = threadIdx.x; w < p.count_granules * (p.size - 1); w += blockDim.x) {
      uint32_t distance;
      const uint32_t g = divided(w, p.size - 1, p.inverse_peers, distance), to = peer(1 + distance), first = ways.slots[to] + Counts * g, end = ways.slots[to + 1];
      uint32_t v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t slot = first + 2 * i;
        v[i] = (slot < end ? ways.named(slot) : 0) | (slot + 1 < end ? ways.named(slot + 1) : 0) << 16;
      }
      push(counts_at(to, p.rank, g), make_uint4(v[0], v[1], v[2], v[3]));
    }
  }

  // Pushes the headers of the own tokens from `least` up to `end`, of which the first entry numbered is `start`.
  __device__ __forceinline__ void push_headers_of(uint32_t least, uint32_t end, uint32_t start) const {
#pragma unroll 1
    for (uint32_t n = least * p.k + threadIdx.x; n < end * p.k; n += blockDim.x) {
      uint32_t e;
      const uint32_t t = divided(n, p.k, p.inverse_k, e);
#pragma unroll 1
      for (uint32_t ranks = ways.mask(t) & ((1u << Most) - 1) & ~(1u << p.rank); ranks != 0; ranks &= ranks - 1) {
        const uint32_t to = __ffs(ranks) - 1;
        store_relaxed_sys(reinterpret_cast<uint32_t*>(record_at(to, p.rank, t)) + e, said_of(to, n, start));
      }
    }
  }

  // Whether each block numbers all own entries.
  __device__ __forceinline__ bool are_few() const { return p.tokens * p.k <= min(256u, blockDim.x); }

  // What peers have to know of own entries: counts what all of them name, and says what those of this block's tokens do. By all threads of a block.
  __device__ __forceinline__ void name_own() const {
    const uint32_t least = ways.least, end = ways.end;
    if (are_few()) {
      number_entries(0, p.tokens * p.k);
      push_headers_of(least, end, 0);
      return;
    }
    count_names(0, least * p.k);
#pragma unroll 1
    for (uint32_t t = least; t < end; t += together()) {
      const uint32_t stop = min(end, t + together());
      number_entries(t * p.k, stop * p.k);
      push_headers_of(t, stop, t * p.k);
      __syncthreads();
    }
    count_names(end * p.k, p.tokens * p.k);
  }

  // Waits until all peers have said how many rows they have for each slot here. By all threads of a block that has counted own entries, those behind
  // `first` before the others; says whether what this one has looked for came.
  __device__ __forceinline__ bool take_counts(uint32_t first) const {
    const uint32_t before = first % blockDim.x, me = threadIdx.x < before ? threadIdx.x + blockDim.x - before : threadIdx.x - before;
    bool there = true;
#pragma unroll 1
    for (uint32_t w = me; w < p.count_granules * (p.size - 1) && there; w += blockDim.x) {
      uint32_t distance;
      const uint32_t g = divided(w, p.size - 1, p.inverse_peers, distance), s = peer(1 + distance);
      const uint64_t at = counts_at(p.rank, s, g);
      uint4 v;
      there = wait([&] { return s; }, [&] { return is_there(v = peek(at)); });
      const uint32_t each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t i = 0; i < Counts; ++i) {
        const uint32_t slot = Counts * g + i;
        if (slot < p.own_slots) ways.earlier[s * p.own_slots + slot] = each[i / 2] >> i % 2 * 16 & 0xFFFF;
      }
    }
#pragma unroll 1
    for (uint32_t i = me; i < p.own_slots; i += blockDim.x) {
      ways.earlier[p.rank * p.own_slots + i] = ways.named(ways.slots[p.rank] + i);
    }
    return there;
  }

  // Finds where the rows of each slot begin, and those of each rank among them. By all threads, once counts are there, before a barrier of the block.
  __device__ __forceinline__ void add_up_counts() const {
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t start = 0; start < p.own_slots; start += blockDim.x) {
      const uint32_t i = start + threadIdx.x;
      uint32_t rows = 0;
#pragma unroll 1
      for (uint32_t s = 0; s < p.size && i < p.own_slots; ++s) {
        const uint32_t mine = ways.earlier[s * p.own_slots + i];
        ways.earlier[s * p.own_slots + i] = rows;
        rows += mine;
      }
      if (i < p.own_slots) ways.earlier[p.size * p.own_slots + i] = rows;
      uint32_t all;
      const uint32_t own = p.alignment == 1 ? rows : (rows + p.alignment - 1) / p.alignment * p.alignment, earlier = sum_before(own, all);
      if (i < p.own_slots) ways.begin[i] = before + earlier;
      before += all;
    }
    if (threadIdx.x == 0) ways.begin[p.own_slots] = before;
  }

  // Rows of a slot.
  __device__ __forceinline__ uint32_t rows_of_slot(uint32_t i) const { return ways.earlier[p.size * p.own_slots + i]; }

  // Where the row lies of which a header says this.
  __device__ __forceinline__ uint32_t at(uint32_t s, uint32_t said) const {
    const uint32_t slot = (said & 0xFFFF) - 1;
    return ways.begin[slot] + ways.earlier[s * p.own_slots + slot] + (said >> 16);
  }

  // Tells of an entry of a token whose row came.
  __device__ __forceinline__ void tell_entry(uint32_t s, uint32_t t, uint32_t e, uint32_t said) const {
    const uint32_t i = row_of(s, t), lies = said != 0 ? at(s, said) : ~0u;
    reinterpret_cast<int32_t*>(p.rows_of)[(uint64_t(s) * p.max_tokens + i) * p.k + e] = int32_t(lies);
    if (said == 0) return;
    reinterpret_cast<int4*>(p.sources)[lies] = make_int4(int32_t(s), int32_t(t), int32_t(e), int32_t(i));
    reinterpret_cast<int32_t*>(p.received_ids)[lies] = called(p, int32_t(said & 0xFFFF) - 1);
    if (s == p.rank && p.to[weights] != 0) set_weight(lies, reinterpret_cast<const uint32_t*>(p.from[weights])[uint64_t(t) * p.k + e]);
  }

  __device__ __forceinline__ void set_weight(uint32_t lies, uint32_t weight) const {
    reinterpret_cast<uint32_t*>(p.to[weights])[lies] = weight;
  }

  // The word of a header that tells of entry `e`.
  __device__ __forceinline__ const uint32_t* said_at(uint32_t s, uint32_t t, uint32_t e) const {
    return reinterpret_cast<const uint32_t*>(record_at(p.rank, s, t)) + e;
  }

  // What the header of a peer's row says of an entry, once it has come, or would say of an own one's. Of own rows `start` is the first entry numbered.
  __device__ __forceinline__ uint32_t said(uint32_t s, uint32_t t, uint32_t start, uint32_t e) const {
    return s == p.rank ? said_of(s, t * p.k + e, start) : load_relaxed_sys(said_at(s, t, e));
  }

  // Waits for a header.
  __device__ __forceinline__ bool await_said(uint32_t s, uint32_t t) const {
    bool there = true;
#pragma unroll 1
    for (uint32_t e = 0; e < p.k && s != p.rank && there; ++e) {
      const uint32_t* at = said_at(s, t, e);
      there = wait([&] { return s; }, [&] { return load_relaxed_sys(at) != sentinel; });
    }
    return there;
  }

  // Takes a piece of a row, a peer's or an own one, and puts it where its experts' rows lie. By a warp, of which each lane has a packet, and each of the first
  // the word of an entry: those of the first piece tell of it. What is done for each entry has no calls, behind which a packet would not stay in registers.
  __device__ __forceinline__ bool move_piece_to_experts(uint32_t s, uint32_t t, uint32_t part, uint32_t start) const {
    const uint32_t lane = threadIdx.x % 32, mine = 32 * part + lane, j = min(mine, p.packets - 1);
    const bool is_own = s == p.rank, says = lane < p.k, looks = says && !is_own;
    const uint64_t record = record_at(p.rank, s, t), from = is_own ? granule(t, j) : record + 16ull * (p.body + j);
    uint4 v[Each];
    uint32_t entry;
    const bool there = await_granules(s, from, words_of(record) + j, j, v, [&] {
      entry = 0;
      // No branch in a loop that all lanes leave together.
      asm volatile("{.reg .pred q; setp.ne.u32 q, %1, 0; @q ld.relaxed.sys.global.u32 %0, [%2];}" : "+r"(entry) : "r"(uint32_t(looks)), "l"(record + 4ull * lane) : "memory");
      return entry != sentinel;
    });
    if (!__all_sync(0xFFFFFFFFu, there)) return false;
    if (is_own && says) entry = said_of(s, t * p.k + lane, start);
    const uint32_t lies = entry != 0 ? at(s, entry) : 0;
    const uint64_t to = p.to[row] + 16ull * j, step = apart(), row_bytes = p.row_bytes[row];
#pragma unroll 1
    for (uint32_t left = __ballot_sync(0xFFFFFFFFu, entry != 0); left != 0; left &= left - 1) {
      const uint64_t out = to + __shfl_sync(0xFFFFFFFFu, lies, __ffs(left) - 1) * row_bytes;
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        if (mine < p.packets && k * p.packets + j < p.first_granule[1]) store(out + k * step, v[k]);
      }
    }
    // Weights of own rows are told with their entries.
    if (!is_own && mine < p.packets && is_weights(last(j))) put_weights(s, t, start, last(j), v[Each - 1]);
    if (part == 0 && says) tell_entry(s, t, lane, entry);
    return true;
  }

  __device__ __forceinline__ static void store(uint64_t at, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }

  // The weights of a granule of a peer's row, where its experts' rows lie.
  __device__ __forceinline__ void put_weights(uint32_t s, uint32_t t, uint32_t start, uint32_t g, uint4 v) const {
    const uint32_t first = 4 * (g - p.first_granule[weights]), each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t entry = first + i < p.k ? said(s, t, start, first + i) : 0;
      if (entry != 0) set_weight(at(s, entry), each[i]);
    }
  }

  // The same of any packet.
  static __device__ __noinline__ bool move_rare_to_experts(const PushDispatchParams& p, uint32_t buffer, uint64_t flag, uint32_t s, uint32_t t, uint32_t j,
                                                           uint32_t start) {
    const ExpertRows one(p, 0, buffer, flag);
    uint4 v[Each];
    if (!one.await_said(s, t) || !one.take(s, t, j, v)) return false;
#pragma unroll 1
    for (uint32_t e = 0; e < p.k; ++e) {
      const uint32_t entry = one.said(s, t, start, e);
      if (e % p.packets == j) one.tell_entry(s, t, e, entry);
      if (entry != 0) one.give(one.at(s, entry), j, v);
    }
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (s != p.rank && one.is_weights(k * p.packets + j)) one.put_weights(s, t, start, k * p.packets + j, v[k]);
    }
    return true;
  }

  // Where a block's own tokens were numbered in turn, they are again: those from `least` up to `end`, of which those before `from` are counted already.
  static __device__ __noinline__ void number_again(const PushDispatchParams& p, uint32_t from, uint32_t least, uint32_t end) {
    const ExpertRows one(p, 0, 0, 0);
    // All have done what the numbers were for.
    __syncthreads();
    if (threadIdx.x == 0) ways.item = 0;
    if (from == 0) begin_names(p);
    __syncthreads();
    one.count_names(from * p.k, least * p.k);
    one.number_entries(least * p.k, end * p.k);
  }

  // Pieces of this block's own tokens, and then a share of those of peers, the row of a token of each in turn: as they come, of which warps take what is
  // next. Of few tokens each block has a share of every own row's, too. Says whether all came.
  __device__ __forceinline__ bool move_to_experts(uint32_t which, uint32_t takers) const {
    const uint32_t parts = (p.packets + 31) / 32, all = ways.most * (p.size - 1) * parts;
    const uint32_t least = ways.least, end = ways.end, few = are_few() ? p.tokens * parts : 0;
    const bool in_turn = end - least > together() && few == 0;
    bool there = true;
#pragma unroll 1
    for (uint32_t from = least, to;; from = to) {
      to = in_turn ? min(end, from + together()) : end;
      if (in_turn) number_again(p, from == least ? 0 : from, from, to);
      const uint32_t mine = few != 0 ? 0 : (to - from) * parts, behind = to < end ? mine : mine + (few + all + takers - 1 - which) / takers;
      const uint32_t start = few != 0 ? 0 : from * p.k;
#pragma unroll 1
      while (__all_sync(0xFFFFFFFFu, there)) {
        const uint32_t n = next_of(ways.item);
        if (n >= behind) break;
        const uint32_t w = n < mine ? n : (n - mine) * takers + which, of_peer = n >= mine && w >= few ? w - few : 0;
        uint32_t s = p.rank, q = w / parts, part = w - q * parts, t = n < mine ? from + q : q;
        if (n >= mine && w >= few) {
          q = of_peer / parts, part = of_peer - q * parts;
          uint32_t distance;
          t = divided(q, p.size - 1, p.inverse_peers, distance), s = peer(1 + distance);
        }
        if (!comes(s, t)) continue;
        const uint32_t j = 32 * part + threadIdx.x % 32;
        const bool plain = j >= p.packets || is_plain(s == p.rank ? p.from[row] | p.to[row] : p.to[row], 0, j);
        if (__all_sync(0xFFFFFFFFu, plain)) {
          there = move_piece_to_experts(s, t, part, start);
        } else if (j < p.packets) {
          there = move_rare_to_experts(p, buffer, flag, s, t, j, start);
        }
      }
      if (to >= end) return there;
    }
  }
};

}  // namespace brigade
