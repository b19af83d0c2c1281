// What a product sends to other ranks while it multiplies, by warps that have nothing else to do: own rows of a gather, or finished tiles of its
// twin. A copy engine begins later, and the stream that it needs beside the product's is a fork and a join of each call; but what it carries
// takes nothing from the product. Of what copy engines carry these warps tell the rank itself as soon as it is made.
//
// The warp that is through with the last of what is for a rank says so there, as the steps of a protocol do. In a group that was stopped nothing is
// said, since the steps before may not have counted the call.
#pragma once
#include "gemm_tiles.cuh"

#ifdef BRIGADE_HAS_WGMMA
namespace brigade {

// Accesses of a thread on their way at a time.
constexpr uint32_t sent_together = 4;

__device__ __forceinline__ uint32_t sender() { return threadIdx.x / 32 - 1; }

// Past the first-level cache: other warps may have written it.
template <typename Unit>
__device__ __forceinline__ Unit load_to_send(uint64_t at) {
  return __ldcg(reinterpret_cast<const Unit*>(at));
}

// Copies what falls to a slice of `count` units, by one warp.
template <typename Unit>
__device__ __forceinline__ void send_slice(uint64_t from, uint64_t to, uint64_t count, uint32_t slice, uint32_t slices) {
  const uint64_t end = count * (slice + 1) / slices;
  for (uint64_t i = count * slice / slices + threadIdx.x % 32; i < end; i += 32 * sent_together) {
    Unit v[sent_together];
#pragma unroll
    for (uint32_t k = 0; k < sent_together; ++k) {
      if (i + 32 * k < end) v[k] = load_to_send<Unit>(from + (i + 32 * k) * sizeof(Unit));
    }
#pragma unroll
    for (uint32_t k = 0; k < sent_together; ++k) {
      if (i + 32 * k < end) reinterpret_cast<Unit*>(to)[i + 32 * k] = v[k];
    }
  }
}

// Counts to `all` and then from zero again, and gives what was counted before: behind what this thread and those it has heard of wrote, and in front
// of what it does then, for whoever hears of it.
__device__ __forceinline__ uint32_t count_sent(uint32_t* through, uint32_t all) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(through), "r"(all - 1) : "memory");
  return before;
}

// This warp is through with one part of what `peer` is told of by `word`. `count` is which half word counts the parts, of which there are `all`.
__device__ inline void is_sent(const Parameters& p, const Group& g, uint32_t count, uint32_t all, uint32_t peer, uint32_t word) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  const uint64_t flag = g.flag(load_relaxed_sys(g.counter(p.counter)));
  if (count_sent(reinterpret_cast<uint32_t*>(g.state + STATE_SENT) + count, all) == all - 1) store_release_sys(g.word(peer, word), flag);
}

// Whether the group is stopped, as all lanes hear it: what one of them does not send must not be told of by another.
__device__ __forceinline__ bool is_stopped_for_all(const Group& g) { return __any_sync(~0u, is_stopped(g)); }

// The first slice that no warp has. Not each warp its own: what is on its way to others must not wait for a block that has no place yet. As tiles are
// counted, all warps ask until there is none, and so leave the count at zero.
__device__ __forceinline__ uint32_t next_slice(const Group& g, uint32_t slices) {
  // A half word that no rank has.
  uint32_t* taken = reinterpret_cast<uint32_t*>(g.state + STATE_SENT) + MOST_PARTS - 1;
  uint32_t slice = 0;
  if (threadIdx.x % 32 == 0) slice = atomicInc(taken, slices + senders * gridDim.x - 1);
  return __shfl_sync(~0u, slice, 0);
}

// Own rows to all others, slice by slice; and to their place here.
__device__ inline void send_rows(const Parameters& p) {
  if (p.sends == 0) return;
  // Others are done with the half that is written, as the steps have heard.
  wait_for_previous_kernel();
  const Group g = group_of(p, p.signature);
  if (is_stopped_for_all(g)) return;
  const uint32_t slices = senders * gridDim.x;
  for (uint32_t slice = next_slice(g, slices); slice < slices; slice = next_slice(g, slices)) {
    for (uint32_t i = 1; i <= p.size; ++i) {
      const uint32_t to = (p.rank + i) % p.size;
      const bool own = to == p.rank;
      if (own ? p.keeps_own == 0 : (absent_ranks(g.state) >> to & 1) != 0) continue;
      const uint64_t there = p.base + to * p.stride;
      send_slice<uint4>(p.send_from[0], there + p.send_to[0], p.send_bytes[0] / sizeof(uint4), slice, slices);
      send_slice<uint32_t>(p.send_from[1], there + p.send_to[1], p.send_bytes[1] / sizeof(uint32_t), slice, slices);
      if (!own) is_sent(p, g, to, slices, to, p.send_word);
    }
  }
}

// The mail of a group that multiplies, to the warp that sends what it makes. `none` is the last.
constexpr uint32_t none = ~0u;

struct Mail {
  uint32_t there, read;
  volatile uint32_t* tile;
  uint32_t phase;
  __device__ __forceinline__ Mail(const Block& block, uint32_t group)
      : there(block.mail + 16 * group), read(there + 8), tile(block.mailed + group), phase(0) {}
  // By one thread, when all threads of the group have written what it is about.
  __device__ __forceinline__ void put(uint32_t t) {
    barrier_wait(read, phase ^ 1);
    *tile = t;
    barrier_arrive(there);
    phase ^= 1;
  }
  // By all threads of a warp.
  __device__ __forceinline__ uint32_t take() {
    barrier_wait(there, phase);
    const uint32_t t = *tile;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(read);
    phase ^= 1;
    return t;
  }
};

// What a group has made of a tile, to the owner of its rows: 16 bytes of a row by each thread.
template <uint32_t COLUMNS>
__device__ __forceinline__ void send_tile(const Parameters& p, const Tile& tile, uint32_t first_row) {
  constexpr uint32_t in_row = COLUMNS / 8;
  const uint32_t rows = rows_until(p, tile);
  const uint64_t from = p.part_out[tile.part], to = p.part_to[tile.part];
  const auto place = [&](uint32_t i) {
    const uint32_t row = first_row + i / in_row, column = tile.column + i % in_row * 8;
    return row < rows && column < p.columns ? (uint64_t(row) * p.columns + column) * 2 : ~uint64_t(0);
  };
#pragma unroll 1
  for (uint32_t i = threadIdx.x % 32; i < 64 * in_row; i += 32 * sent_together) {
    uint4 v[sent_together];
#pragma unroll
    for (uint32_t k = 0; k < sent_together; ++k) {
      const uint64_t at = place(i + 32 * k);
      if (at != ~uint64_t(0)) v[k] = load_to_send<uint4>(from + at);
    }
#pragma unroll
    for (uint32_t k = 0; k < sent_together; ++k) {
      const uint64_t at = place(i + 32 * k);
      if (at != ~uint64_t(0)) *reinterpret_cast<uint4*>(to + at) = v[k];
    }
  }
}

// Sends all that a group makes of tiles that are not added up here, or tells of what copy engines carry.
template <uint32_t COLUMNS>
__device__ inline void send_tiles(const Parameters& p, const Block& block) {
  const Group g = group_of(p, p.signature);
  Mail mail(block, sender());
  bool looked = false, stopped = false;
  for (uint32_t t = mail.take(); t != none; t = mail.take()) {
    if (!looked) {
      // As in `send_rows`.
      wait_for_previous_kernel();
      stopped = is_stopped_for_all(g);
      looked = true;
    }
    if (stopped) continue;
    const Tile tile = tile_of(p, t, COLUMNS);
    if (p.part_to[tile.part] != 0) send_tile<COLUMNS>(p, tile, tile.band * p.band_rows + 64 * sender());
    const uint32_t all = senders * bands_of(p, tile.part) * ((p.columns + COLUMNS - 1) / COLUMNS);
    is_sent(p, g, tile.part, all, p.part_peer[tile.part], p.part_tells[tile.part]);
  }
}

}  // namespace brigade
#endif
