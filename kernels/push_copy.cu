// Copies that push, as one kernel (push.cuh): what a rank has goes to every peer. In an all-gather each has some, in a broadcast
// one has all. What does not fit a buffer goes in pieces, one kernel each.
//
// Their words may be anything, and travel in packets (escaped.cuh).
//
// A large broadcast goes out of its root once: each part to one peer, which passes it on to the others, into the very places into
// which the root would have pushed it. Who takes it does not mind who pushed, and within a use the order of pushes is free.
//
// Ranks that have nothing say that they have arrived, and are waited for, as all others: the kernel of a use ends behind the
// arrivals of all peers, with which the buffers' turn is argued for. So copies and sums may follow each other in any order.
#include "copy.cuh"
#include "escaped.cuh"

namespace brigade {

__device__ inline void poison_outputs(const PushCopyParams& p) {
  for (uint32_t r = 0; r < p.size; ++r) {
    if (p.out[r] != 0) poison(p.out[r], p.poisoned[r], p.poison, threadIdx.x, blockDim.x);
  }
}

}  // namespace brigade

using namespace brigade;

struct PushCopy : Pushing<PushCopyParams> {
  using Pushing::Pushing;

  __device__ __forceinline__ uint32_t granules(uint32_t rank) const { return uint32_t((p.bytes[rank] + 15) / 16); }
  __device__ __forceinline__ static uint32_t packets(uint32_t granules) { return (granules + Each - 1) / Each; }

  // Bytes from granule `i` of a rank on, at most a granule.
  __device__ __forceinline__ uint32_t left(uint32_t rank, uint32_t i) const {
    const uint64_t all = p.bytes[rank] - 16ull * i;
    return all < 16 ? uint32_t(all) : 16;
  }

  // Whether peers pass on what one rank has. Same on all ranks: where only one has something, all have its slot.
  __device__ __forceinline__ bool is_relayed() const { return p.slot == 0 && p.size > 2 && p.packets >= RELAYED_PACKETS; }

  // The rank that has packet `j` of `root` from `root` itself.
  __device__ __forceinline__ uint32_t relay(uint32_t root, uint32_t j) const {
    const uint32_t each = (p.packets + p.size - 2) / (p.size - 1), r = root + 1 + j / each;
    return r >= p.size ? r - p.size : r;
  }

  // Whether packet `j` of a rank has four whole granules, which lie as the widest accesses want it.
  __device__ __forceinline__ bool is_wide(uint64_t at, uint32_t rank, uint32_t j) const {
    return at % 16 == 0 && 16ull * ((Each - 1) * packets(granules(rank)) + j + 1) <= p.bytes[rank];
  }

  // Where the rank that is `distance` behind `to` has its slot there.
  __device__ __forceinline__ uint64_t slot(uint32_t to, uint32_t distance) const {
    return slots(to, buffer) + 16ull * (distance - 1) * p.slot;
  }

  // Behind the granules of a slot is a word for each packet.
  __device__ __forceinline__ static uint32_t* word(uint64_t slot, uint32_t all, uint32_t j) {
    return reinterpret_cast<uint32_t*>(slot + 16ull * all) + j;
  }

  // A packet has granules that lie `packets` apart, so that those which threads access together lie together.
  static __device__ __noinline__ void push_any(const PushCopyParams& p, uint32_t buffer, uint32_t distance, uint32_t j) {
    const PushCopy copy(p, 0, buffer, 0);
    const uint32_t all = copy.granules(p.rank);
    const uint64_t at = copy.slot(copy.peer(distance), p.size - distance);
    uint4 v[Each] = {};
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t i = k * packets(all) + j;
      if (i < all) v[k] = any_input(p.from + 16ull * i, copy.left(p.rank, i));
    }
    push_packet(at, all, j, v);
  }

  // Of a slot with so many granules.
  __device__ __forceinline__ static void push_packet(uint64_t slot, uint32_t all, uint32_t j, const uint4 (&v)[Each]) {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t i = k * packets(all) + j;
      if (i < all) push(slot + 16ull * i, pushable(v[k]));
    }
    push_more(v, word(slot, all, j));
  }

  __device__ __forceinline__ void push_to(uint32_t distance, uint32_t j) const {
    if (!is_wide(p.from, p.rank, j)) return push_any(p, buffer, distance, j);
    const uint32_t all = granules(p.rank);
    const uint64_t at = slot(peer(distance), p.size - distance);
    uint4 v[Each];
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) v[k] = reinterpret_cast<const uint4*>(p.from)[k * packets(all) + j];
    push_packet(at, all, j, v);
  }

  // What has come of a packet before.
  static __device__ __noinline__ void output_any(const PushCopyParams& p, uint32_t buffer, uint32_t distance, uint32_t j) {
    const PushCopy copy(p, 0, buffer, 0);
    const uint32_t from = copy.peer(distance), all = copy.granules(from);
    const uint64_t at = copy.slot(p.rank, distance);
    uint4 v[Each];
    uint32_t escaped;
    look(at, all, j, v, escaped);
    restore(v, escaped);
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t i = k * packets(all) + j;
      if (i < all) any_output(p.out[from] + 16ull * i, copy.left(from, i), v[k]);
    }
  }

  // Takes a look at a packet of a slot with so many granules.
  __device__ __forceinline__ static bool look(uint64_t slot, uint32_t all, uint32_t j, uint4 (&v)[Each], uint32_t& escaped) {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t i = k * packets(all) + j;
      v[k] = i < all ? peek(slot + 16ull * i) : make_uint4(0, 0, 0, 0);
    }
    return is_complete(greatest(v), word(slot, all, j), escaped);
  }

  // Packet `j` of `root`, as it came, goes on to all who have it from here.
  __device__ __forceinline__ void pass_on(uint32_t root, uint32_t j, const uint4 (&v)[Each], uint32_t escaped) const {
    if (!is_relayed() || relay(root, j) != p.rank) return;
    const uint32_t all = granules(root);
#pragma unroll 1
    for (uint32_t d = 1; d < p.size; ++d) {
      if (peer(d) == root) continue;
      const uint64_t at = slots(peer(d), buffer);
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        const uint32_t i = k * packets(all) + j;
        if (i < all) push(at + 16ull * i, v[k]);
      }
      if (has_more(v)) store_relaxed_sys(word(at, all, j), escaped);
    }
  }

  // Waits for packet `j` of the rank at this distance. A herald waits for its peer's arrival too.
  __device__ __forceinline__ bool take(uint32_t distance, uint32_t j, bool herald, uint4 (&v)[Each], uint32_t& escaped) const {
    const uint32_t all = granules(peer(distance));
    const uint64_t at = slot(p.rank, distance);
    bool come = false;
    const auto looks = [&] {
      const uint64_t seen = arrived(herald);
      come = look(at, all, j, v, escaped);
      return come && seen == flag;
    };
    const auto missing = [&] {
      const uint32_t root = peer(distance), by = is_relayed() ? relay(root, j) : root;
      return come ? threadIdx.x : by == p.rank ? root : by;
    };
    // Lanes of a warp have packets that different ranks pass on, each behind a wait of its own.
    return wait<false>(missing, looks);
  }

  // Own bytes, where they go too.
  static __device__ __noinline__ void copy_own(const PushCopyParams& p) {
    copy_bytes(p.out[p.rank], p.from, p.bytes[p.rank], blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  }

  // Where there is a hook: waits until all has come, and tells it.
  static __device__ __noinline__ bool await(const PushCopyParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const PushCopy copy(p, use, buffer, flag);
    bool there = true;
    for (uint32_t d = 1; d < p.size; ++d) {
      const uint32_t all = copy.granules(copy.peer(d));
      for (uint32_t j = threadIdx.x; j < packets(all) && there; j += blockDim.x) {
        uint4 v[Each];
        uint32_t escaped;
        there = copy.take(d, j, false, v, escaped);
        if (there) copy.pass_on(copy.peer(d), j, v, escaped);
      }
    }
    copy.have_come(0);
    return there;
  }

  __device__ __forceinline__ void run() {
    const uint32_t mine = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    bool failed = stopped, herald = is_herald();
    announce();
    const uint32_t own = packets(granules(p.rank));
    if (is_relayed()) {
      for (uint32_t j = mine; j < own; j += threads) push_to((relay(p.rank, j) + p.size - p.rank) % p.size, j);
    } else {
      for (uint32_t i = mine; i < (p.size - 1) * own; i += threads) push_to(1 + i / own, i % own);
    }
    empty();
    count(p.filled);
    if (p.out[p.rank] != 0) copy_own(p);
    if (p.desk != 0) failed |= !await(p, use, buffer, flag);
    for (uint32_t i = mine; i < (p.size - 1) * p.packets && !failed; i += threads) {
      const uint32_t distance = 1 + i / p.packets, j = i % p.packets, from = peer(distance), of = packets(granules(from));
      if (j >= of) continue;
      uint4 v[Each];
      uint32_t escaped;
      failed = !take(distance, j, herald, v, escaped);
      herald = false;
      if (failed) break;
      if (p.desk == 0) pass_on(from, j, v, escaped);
      if (!is_wide(p.out[from], from, j)) {
        output_any(p, buffer, distance, j);
        continue;
      }
      restore(v, escaped);
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        reinterpret_cast<uint4*>(p.out[from])[k * of + j] = v[k];
      }
    }
    if (herald && !failed) failed = !wait([] { return threadIdx.x; }, [&] { return arrived(true) == flag; });
    finish(failed);
  }
};

// As many blocks find room as those of all-reduces.
extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)
    brigade_push_copy(const __grid_constant__ PushCopyParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  PushCopy(p).run();
}
