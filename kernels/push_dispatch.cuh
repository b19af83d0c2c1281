// Rows to their experts as one kernel (push.cuh): of few tokens, where launches and waits cost more than bytes, and of many, where what arranges rows
// would stand behind them. Whoever includes this says which (ways.cuh).
//
// Every block finds out for itself which ranks own tokens go to. A sender has a place at each receiver for each of its tokens: a header, with the
// token and its slots there, and then the row in packets (escaped.cuh). So a row can go before anybody has counted rows: which tokens come is
// told apart, and whoever takes them counts; where rows lie by expert, what they name is counted by who sends them (expert_rows.cuh). Nothing waits
// for a peer before it pushes, unless rows stay in place (places.cuh); each row is taken as soon as it is there, and goes where it belongs. Some blocks push and the rest take (as
// DeepEP's channels have a sender and a receiver): what waits for a link keeps all of a multiprocessor waiting. The last blocks, where there are
// more, push and take no rows: they tell of own tokens, here and to peers, of what headers say, and of what has come, each one thing, since it is
// code that runs once, and fetching that takes longer than what it does. Of many tokens blocks find ways between them, and those that take rows say
// what their headers do.
//
//   [which tokens of each peer come][what it counts for each slot, or which of its blocks are done][where own tokens go][token 0 of each peer][token 1 of each peer]...
//
// so that what was filled is one range.
//
// Rows begin at lines of 128 bytes, and so do the quarters that a warp pushes of them: what is less than a line is slow to travel.
#pragma once
#include "places.cuh"

using namespace brigade;

struct PushDispatch : Places {
  using Places::Places;

  // The last blocks, where there are some to spare: one for each thing that there is to write down of few rows, else for two.
  __device__ __forceinline__ bool is_clerk(uint32_t n) const { return blockIdx.x == (p.clerks == 0 ? 0 : gridDim.x - 1 - n % p.clerks); }
  __device__ __forceinline__ uint32_t workers() const { return gridDim.x - p.clerks; }
  __device__ __forceinline__ bool is_worker() const { return blockIdx.x < workers(); }
  // Whether a worker pushes or takes, and not both; which of those it is, and how many there are.
  __device__ __forceinline__ bool splits() const { return p.desk == 0 && p.size > 1 && workers() >= (in_place ? Apart : 2); }
  // Where rows stay in place, next to nothing is taken, and all but one of so many push.
  static constexpr uint32_t Apart = 8;
  // Of the first so many, how many push otherwise.
  __device__ __forceinline__ uint32_t share(uint32_t blocks) const { return p.pushing * blocks / 10; }
  __device__ __forceinline__ bool is_wide() const { return !in_place && !for_experts && blockDim.x == Widest; }
  __device__ __forceinline__ bool is_first() const {
    return in_place ? blockIdx.x % Apart != Apart - 1 : blockIdx.x == 0 || share(blockIdx.x) != share(blockIdx.x - 1);
  }
  __device__ __forceinline__ bool pushes() const { return is_worker() && (p.size > 1 || in_place) && (!splits() || is_first()); }
  __device__ __forceinline__ bool takes() const { return is_worker() && (!splits() || !is_first()); }
  __device__ __forceinline__ uint32_t which() const {
    if (!splits()) return blockIdx.x;
    if (in_place) return is_first() ? blockIdx.x - blockIdx.x / Apart : blockIdx.x / Apart;
    const uint32_t which = share(blockIdx.x);
    return is_first() ? which : blockIdx.x - which - 1;
  }
  __device__ __forceinline__ uint32_t pushers() const {
    if (!splits()) return workers();
    return in_place ? workers() - workers() / Apart : share(workers() - 1) + 1;
  }
  __device__ __forceinline__ uint32_t takers() const { return splits() ? workers() - pushers() : workers(); }

  __device__ __forceinline__ bool tells_ways() const { return is_clerk(0); }
  __device__ __forceinline__ bool tells_rows() const { return is_clerk(1); }
  __device__ __forceinline__ bool tells_headers() const { return !for_experts && is_clerk(2); }
  __device__ __forceinline__ bool tells_counts() const { return for_experts && is_clerk(2); }
  __device__ __forceinline__ bool tells_slots() const { return is_clerk(3); }
  __device__ __forceinline__ bool tells_own() const { return is_clerk(for_experts ? 4 : 0); }

  // Which token and peer a pair of them is. Says whether that token goes there.
  __device__ __forceinline__ bool pair(uint32_t w, uint32_t& to, uint32_t& t) const {
    uint32_t distance;
    t = divided(w, p.size - 1, p.inverse_peers, distance), to = peer(1 + distance);
    return ways.mask(t) >> to & 1;
  }

  // Tells peers which tokens come, by a warp for each granule of that.
  __device__ __forceinline__ void push_ways() const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t w = threadIdx.x / 32; w < way_granules() * (p.size - 1); w += blockDim.x / 32) {
      uint32_t distance;
      const uint32_t g = divided(w, p.size - 1, p.inverse_peers, distance), to = peer(1 + distance), t = PerGranule * g + lane;
      const uint32_t low = __ballot_sync(0xFFFFFFFFu, goes(p, t, to)), high = __ballot_sync(0xFFFFFFFFu, goes(p, t + 32, to));
      if (lane == 0) push(way_at(to, p.rank, g), make_uint4(low & 0xFFFF, low >> PerWord, high & 0xFFFF, high >> PerWord));
    }
  }

  // By a block that does nothing else, where there is one for each thing. Else by the last warps of each block that takes, if that is apart: so they
  // need not queue behind rows, nor all go one way.
  __device__ __forceinline__ void push_headers() const {
    if (p.size == 1) return;
    if (p.clerks == PUSH_CLERKS) {
      if (is_clerk(4)) push_headers(p, buffer, threadIdx.x, blockDim.x);
      return;
    }
    // About four for a thread.
    const uint32_t blocks = splits() ? takers() : pushers(), few = 4 * 32 * blocks;
    const uint32_t threads = headers() <= few ? 32 : min(blockDim.x, (headers() + few - 1) / few * 32), me = threadIdx.x + threads - blockDim.x;
    if (me < threads && (splits() ? takes() : pushes())) push_headers(p, buffer, which() * threads + me, blocks * threads);
  }

  __device__ __forceinline__ uint32_t headers() const { return p.tokens * (p.size - 1) * p.header; }

  // From `w` on.
  static __device__ __noinline__ void push_headers(const PushDispatchParams& p, uint32_t buffer, uint32_t w, uint32_t threads) {
    const PushDispatch one(p, 0, buffer, 0);
    uint32_t to, t;
#pragma unroll 1
    for (; w < one.headers(); w += threads) {
      const uint32_t h = w % p.header;
      if (one.pair(w / p.header, to, t)) push(one.record_at(to, p.rank, t) + 16ull * h, header_of(p, to, t, h));
    }
  }

  // Packets from `w` up to an end.
  __device__ __forceinline__ void push_rows(uint32_t w, uint32_t end, uint32_t threads) const {
    uint32_t to, t, j;
#pragma unroll 1
    for (; w < end; w += threads) {
      if (!pair(divided(w, p.packets, p.inverse_packets, j), to, t)) continue;
      if (is_plain(p.from[row], p.from[weights], j)) {
        push_plain(to, t, j);
      } else {
        push_rare(p, buffer, to, t, j);
      }
    }
  }

  // Waits for a peer to say which tokens come, and for its arrival, and adds how long. By a lane for each peer.
  static __device__ __noinline__ bool add_wait(const PushDispatchParams& p, uint32_t buffer, uint64_t flag) {
    const PushDispatch one(p, 0, buffer, flag);
    const uint64_t at = one.way_at(p.rank, threadIdx.x, 0);
    return one.wait_and_add(threadIdx.x, [&] { return one.arrived(true) == flag && is_there(peek(at)); });
  }

  // Waits for all peers to arrive and to say which tokens come, and counts those. By all threads, of which a warp asks a rank; says whether they came.
  __device__ __forceinline__ bool take_ways() const {
    const uint32_t lane = threadIdx.x % 32, granules = way_granules();
    bool there = !stopped;
    // What is waited for there is there in the end.
    if (p.waits != 0 && tells_rows() && there && threadIdx.x < p.size && threadIdx.x != p.rank) there = add_wait(p, buffer, flag);
#pragma unroll 1
    for (uint32_t s = threadIdx.x / 32; s < p.size; s += blockDim.x / 32) {
      uint32_t came = 0, till = 0;
      // A lane for each granule, time and again where there are many.
#pragma unroll 1
      for (uint32_t start = 0; start < Ways::Tokens / PerGranule; start += 32) {
        const uint32_t g = start + lane;
        uint4 v = make_uint4(0, 0, 0, 0);
        there = __all_sync(0xFFFFFFFFu, there);
        if (s == p.rank) {
#pragma unroll 1
          for (uint32_t t = PerGranule * start + lane; t - lane < min(p.tokens, PerGranule * (start + 32)); t += PerGranule) {
            const uint32_t low = __ballot_sync(0xFFFFFFFFu, goes(p, t, s)), high = __ballot_sync(0xFFFFFFFFu, goes(p, t + 32, s));
            if (g == t / PerGranule) v = make_uint4(low & 0xFFFF, low >> PerWord, high & 0xFFFF, high >> PerWord);
          }
        } else if (there && g < granules) {
          // Every block looks whether the peer is in this call: what it reads of another one could be anything.
          const uint64_t* said = arrival(p.rank, s);
          const uint64_t at = way_at(p.rank, s, g);
          there = wait([&] { return s; }, [&] {
            const uint64_t seen = arrived(said, lane == 0);
            v = peek(at);
            return is_there(v) && seen == flag;
          });
        }
        __syncwarp();
        const uint32_t w[4] = {v.x, v.y, v.z, v.w}, mine = __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
        const uint32_t sum = sum_of_lanes(mine);
        uint32_t before = came + sum - mine;
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          if (g < Ways::Tokens / PerGranule) ways.coming[s][4 * g + k] = before << PerWord | w[k];
          if (w[k] != 0) till = PerGranule * g + PerWord * k + 32 - __clz(w[k]);
          before += __popc(w[k]);
        }
        came += __shfl_sync(0xFFFFFFFFu, sum, 31);
      }
      till = __reduce_max_sync(0xFFFFFFFFu, till);
      if (lane == 31) ways.came[s] = came, ways.till[s] = till;
    }
    // By expert, what peers have for each slot is looked for beside it.
    if (for_experts && !p.again && there) there = take_counts(32 * p.size);
    if (__syncthreads_or(!there)) return false;
    if (threadIdx.x >= blockDim.x - 32) add_up_ways();
    if (for_experts && !p.again) add_up_counts();
    __syncthreads();
    return true;
  }

  // By a warp: a lane for each rank, and one behind them.
  __device__ __forceinline__ void add_up_ways() const {
    const uint32_t lane = threadIdx.x % 32, n = lane < p.size ? ways.came[lane] : 0, till = lane < p.size ? ways.till[lane] : 0;
    const uint32_t others = __reduce_max_sync(0xFFFFFFFFu, lane == p.rank ? 0 : till), most = __reduce_max_sync(0xFFFFFFFFu, till);
    const uint32_t before = sum_of_lanes(n) - n;
    if (lane <= p.size) ways.at[lane] = p.arrangement == by_source ? lane * p.max_tokens : before;
    if (lane != 0) return;
    ways.most = most;
    // Only blocks that wait for this know it.
    if (tells_rows()) fill(p.first_record + others * (p.size - 1) * p.record);
  }

  // Waits for part of a header of a peer's row.
  __device__ __forceinline__ bool take_header(uint32_t s, uint32_t t, uint32_t h, uint4& v) const {
    const uint64_t at = record_at(p.rank, s, t) + 16ull * h;
    return wait([&] { return s; }, [&] { return is_there(v = peek(at)); });
  }

  // Where there is a hook: by its number among those of all tokens that may come.
  static __device__ __noinline__ bool await_packet(const PushDispatchParams& p, uint32_t buffer, uint64_t flag, uint32_t w) {
    const PushDispatch one(p, 0, buffer, flag);
    const uint32_t q = w / p.packets, s = q % p.size, t = q / p.size;
    uint4 v[Each];
    if (!one.comes(s, t)) return true;
    return one.take(s, t, w % p.packets, v) && (!for_experts || p.again || w % p.packets != 0 || one.await_said(s, t));
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
#pragma unroll 1
    for (uint32_t e = 0; e < each; ++e) {
      ids()[uint64_t(at) * each + e] = called(p, -1);
      if (p.to[weights] != 0) out_weights()[uint64_t(at) * each + e] = 0;
    }
  }

  // Rows of one source after the other, or with room for all that it may send. Packets are taken as they come, the row of a token of each source
  // in turn: a block's share, of which warps take what is next. Says whether all came.
  __device__ __forceinline__ bool take_by_source() const {
    const uint32_t all = ways.most * p.size * p.packets, lane = threadIdx.x % 32;
    // In pieces for a warp, which blocks take in turn.
    const uint32_t pieces = (all + 31) / 32, mine = (pieces + takers() - 1 - which()) / takers();
    bool there = true;
#pragma unroll 1
    while (__all_sync(0xFFFFFFFFu, there)) {
      const uint32_t n = next_of(ways.item);
      if (n >= mine) break;
      const uint32_t w = (n * takers() + which()) * 32 + lane;
      if (w >= all) continue;
      uint32_t j, distance;
      const uint32_t q = divided(w, p.packets, p.inverse_packets, j), t = divided(q, p.size, p.inverse_size, distance);
      const uint32_t s = peer(distance);
      if (!comes(s, t)) continue;
      const uint64_t at = ways.at[s] + row_of(s, t);
      const bool plain = is_plain(p.from[row] | p.to[row], p.from[weights] | p.to[weights], j);
      there = plain ? move_plain(s, t, j, at) : move_rare(p, buffer, flag, s, t, j, at);
    }
    return there;
  }

  static __device__ __noinline__ bool take_headers(const PushDispatchParams& p, uint32_t buffer, uint64_t flag, uint32_t me, uint32_t threads) {
    return PushDispatch(p, 0, buffer, flag).take_all_headers(me, threads);
  }

  __device__ __forceinline__ bool take_all_headers(uint32_t me, uint32_t threads) const {
    bool there = true;
    // Own rows, by the last threads.
#pragma unroll 1
    for (uint32_t n = threads - 1 - me; n < p.tokens * p.k; n += threads) {
      const uint32_t t = n / p.k, e = n % p.k;
      if (!comes(p.rank, t)) continue;
      const uint32_t own = row_of(p.rank, t), at = ways.at[p.rank] + own;
      if (e == 0) say(at, make_int4(p.rank, int32_t(t), -1, int32_t(own)));
      ids()[uint64_t(at) * p.k + e] = called(p, int32_t(slot_at(p, p.rank, t, e)) - 1);
    }
#pragma unroll 1
    for (uint32_t n = me; n < ways.most * p.size * p.header && there; n += threads) {
      const uint32_t h = n % p.header, q = n / p.header, s = q % p.size, t = q / p.size;
      if (s == p.rank || !comes(s, t)) continue;
      const uint32_t i = row_of(s, t), at = ways.at[s] + i;
      uint4 v;
      there = take_header(s, t, h, v);
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
        if (e < p.k) ids()[uint64_t(at) * p.k + e] = called(p, int32_t(w[k] & 0xFFFF) - 1);
        if (e + 1 < p.k) ids()[uint64_t(at) * p.k + e + 1] = called(p, int32_t(w[k] >> 16) - 1);
      }
    }
    return there;
  }

  // Counts rows of all slots. By all threads of a block.
  __device__ __forceinline__ bool count_slots() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < p.own_slots; i += blockDim.x) ways.count[i] = 0;
    __syncthreads();
    bool there = true;
    // Of own tokens, by the last threads.
#pragma unroll 1
    for (uint32_t n = blockDim.x - 1 - threadIdx.x; n < p.tokens * p.k; n += blockDim.x) {
      const uint32_t slot = slot_at(p, p.rank, n / p.k, n % p.k);
      if (slot != 0) atomicAdd(&ways.count[slot - 1], 1u);
    }
#pragma unroll 1
    for (uint32_t n = threadIdx.x; n < ways.most * p.size * p.header && there; n += blockDim.x) {
      const uint32_t h = n % p.header, q = n / p.header, s = q % p.size, t = q / p.size;
      if (s == p.rank || !comes(s, t)) continue;
      uint4 v;
      there = take_header(s, t, h, v);
      if (!there) break;
      const uint32_t w[4] = {h == 0 ? 0 : v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        if (w[k] & 0xFFFF) atomicAdd(&ways.count[(w[k] & 0xFFFF) - 1], 1u);
        if (w[k] >> 16) atomicAdd(&ways.count[(w[k] >> 16) - 1], 1u);
      }
    }
    return !__syncthreads_or(!there);
  }

  // By expert, the same ways again: rows are where they were.
  __device__ __forceinline__ bool take_again(uint32_t me, uint32_t threads) const {
    const uint32_t rows = reinterpret_cast<const uint32_t*>(p.offsets)[p.own_slots];
    bool there = true;
#pragma unroll 1
    for (uint32_t w = me; w < rows * p.packets && there; w += threads) {
      const uint32_t at = w / p.packets, j = w % p.packets;
      const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
      if (source.x < 0) continue;
      // As many rows, but of other tokens.
      if (!comes(uint32_t(source.x), uint32_t(source.y))) {
        deny(p, flag, uint32_t(source.x), ways.came[source.x]);
        return false;
      }
      uint4 v[Each];
      there = take(uint32_t(source.x), uint32_t(source.y), j, v);
      if (there) give(at, j, v);
    }
    return there;
  }

  // A row for each expert.
  __device__ __forceinline__ bool take_by_expert() const {
    if (p.again) return take_again(which() * blockDim.x + threadIdx.x, takers() * blockDim.x);
    const bool there = move_to_experts(which(), takers());
    // Between the rows of two slots.
#pragma unroll 1
    for (uint32_t slot = which(); slot < p.own_slots && p.alignment > 1; slot += takers()) {
#pragma unroll 1
      for (uint32_t at = ways.begin[slot] + rows_of_slot(slot) + threadIdx.x; at < ways.begin[slot + 1]; at += blockDim.x) nobody(at, 1);
    }
    return there;
  }

  // Of own tokens, those that this block tells of and takes: each that takes rows has a share.
  __device__ __forceinline__ void share_out() const {
    if (!for_experts || threadIdx.x != 0) return;
    ways.least = takes() ? which() * p.tokens / takers() : 0, ways.end = takes() ? (which() + 1) * p.tokens / takers() : 0;
  }

  // What the caller is told of the rows that come. By all threads of a block.
  __device__ __forceinline__ void tell_rows() const {
    const uint32_t me = threadIdx.x, threads = blockDim.x;
    uint32_t* offsets = reinterpret_cast<uint32_t*>(p.offsets);
    if (me < p.size) reinterpret_cast<uint32_t*>(p.received)[me] = ways.came[me];
    if (for_experts) {
#pragma unroll 1
      for (uint32_t i = me; i <= p.own_slots; i += threads) offsets[i] = ways.begin[i];
#pragma unroll 1
      for (uint32_t at = ways.begin[p.own_slots] + me; at < p.capacity; at += threads) nobody(at, 1);
      // Tokens that no rank sent: of others it is said by those who take them.
#pragma unroll 1
      for (uint32_t s = 0; s < p.size; ++s) {
#pragma unroll 1
        for (uint32_t n = ways.came[s] * p.k + me; n < p.max_tokens * p.k; n += threads) {
          reinterpret_cast<int32_t*>(p.rows_of)[uint64_t(s) * p.max_tokens * p.k + n] = -1;
        }
      }
      return;
    }
    if (me <= p.size) offsets[me] = ways.at[me];
#pragma unroll 1
    for (uint32_t at = me; at < p.capacity; at += threads) {
      uint32_t s = 0;
#pragma unroll 1
      while (s + 1 < p.size && ways.at[s + 1] <= at) ++s;
      if (at >= ways.at[p.size] || at - ways.at[s] >= ways.came[s]) nobody(at, p.k);
    }
  }

  // Where there is a hook: waits until all has come, and tells it.
  __device__ __forceinline__ bool await() const {
    bool there = true;
#pragma unroll 1
    for (uint32_t w = threadIdx.x; w < ways.most * p.size * p.packets && there; w += blockDim.x) {
      there = await_packet(p, buffer, flag, w);
    }
    have_come(0);
    return !__syncthreads_or(!there);
  }

  // Sees that what came is what there is room for, and tells of it. By all threads of a block.
  static __device__ __noinline__ bool see(const PushDispatchParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const PushDispatch all(p, use, buffer, flag);
    if (!all.check_rows() || (p.desk != 0 && !all.await())) return false;
    if (all.tells_rows() && !p.again) all.tell_rows();
    if (all.tells_slots()) all.tell_slots();
    return true;
  }

  // What slots get, and with what they got before.
  __device__ __forceinline__ void tell_slots() const {
    uint32_t* counts = reinterpret_cast<uint32_t*>(p.counts);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < p.own_slots; i += blockDim.x) {
      const uint32_t count = p.again ? counts[i] : for_experts ? rows_of_slot(i) : ways.count[i];
      if (!p.again) counts[i] = count;
      if (p.totals != 0) reinterpret_cast<int64_t*>(p.totals)[i] += count;
    }
  }

  __device__ __forceinline__ bool check_rows() const {
    if (p.again) {
      const uint32_t* received = reinterpret_cast<const uint32_t*>(p.received);
      if (tells_rows() && threadIdx.x < p.size && ways.came[threadIdx.x] != received[threadIdx.x]) {
        deny(p, flag, threadIdx.x, ways.came[threadIdx.x]);
      }
      const bool other = threadIdx.x < p.size && ways.came[threadIdx.x] != received[threadIdx.x];
      if (__syncthreads_or(other)) return false;
    } else {
      // Slots are counted for the caller too.
      if (!for_experts && tells_slots() && !count_slots()) return false;
      return is_room(for_experts ? ways.begin[p.own_slots] : ways.at[p.size]);
    }
    return true;
  }

  __device__ __forceinline__ bool is_room(uint32_t rows) const {
    if (rows > p.capacity) overflow(p, flag, rows);
    return rows <= p.capacity;
  }

  // Most blocks see no more than that there is room.
  __device__ __forceinline__ bool are_well() const {
    if (p.desk != 0 || p.again || tells_rows() || tells_slots()) return see(p, use, buffer, flag);
    return is_room(for_experts ? ways.begin[p.own_slots] : ways.at[p.size]);
  }

  // What is told of own tokens. By all threads of a block.
  static __device__ __noinline__ void tell(const PushDispatchParams& p) {
    const PushDispatch one(p, 0, 0, 0);
    count_ways(p);
    if (threadIdx.x == 0) {
      uint32_t rows = 0;
#pragma unroll 1
      for (uint32_t r = 0; r < p.size; ++r) rows += r == p.rank ? 0 : ways.to[r];
      one.add(STATE_MOVED, uint64_t(rows) * p.all_bytes);
    }
    if (!p.again) tell_ways(p);
  }

  // By expert, what peers have to know of own entries, for which blocks that only push have no use.
  __device__ __forceinline__ void push_names() const {
    if (p.again || (splits() && pushes())) return;
    name_own();
    if (p.size > 1 && tells_counts()) push_counts();
  }

  __device__ __forceinline__ void run(const Entry& first) const {
    announce();
    tally(0);
    if (p.again) {
      find_ways_again(p);
    } else {
      find_ways(p, least(blockIdx.x) * p.k, least(blockIdx.x + 1) * p.k, first);
      // What it knows of ways is not all then, and nobody must take it for that.
      if (shares_ways() && !share_ways()) return finish(true);
    }
    if (tells_ways()) push_ways();
    if (for_experts) {
      push_names();
    } else {
      push_headers();
    }
    const uint32_t me = which() * blockDim.x + threadIdx.x;
    if (pushes() && p.size > 1) push_rows(me, p.tokens * (p.size - 1) * p.packets, pushers() * blockDim.x);
    bool there = true;
    if (in_place && pushes()) there = push_to_places(which(), pushers(), tells_rows());
    // Of the largest blocks, those that push have more time.
    if (!splits()) {
      empty();
    } else if (is_wide() ? pushes() : takes()) {
      empty_by(me, (is_wide() ? pushers() : takers()) * blockDim.x);
    }
    if (tells_own()) tell(p);
    if ((!splits() || !pushes()) && there) there = take_ways() && are_well();
    if (in_place && there && p.size > 1 && tells_rows()) there = await_places();
    if (takes() && there) there = for_experts ? take_by_expert() : take_by_source();
    // Of many rows, by all that take some.
    if (many) {
      if (takes() && !p.again && there) there = take_headers(p, buffer, flag, me, takers() * blockDim.x);
    } else if (tells_headers() && !p.again && there) {
      there = take_headers(p, buffer, flag, threadIdx.x, blockDim.x);
    }
    finish(!there);
  }
};

// All of a kernel.
__device__ __forceinline__ void push_dispatch(const PushDispatchParams& p) {
  begin_ways(p);
  const PushDispatch early(p, 0, 0, 0);
  early.share_out();
  const uint32_t start = early.least(blockIdx.x) * p.k;
  wait_for_previous_kernel();
  let_next_kernel_start();
  // On its way with the state.
  const Entry first(p, start + threadIdx.x);
  find_state(p);
  PushDispatch(p, state_found).run(first);
}
