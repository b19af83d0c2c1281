// Rows of a dispatch that stay where they come, in a half of each receiver (push_dispatch_in_place.cu): what else a row has goes through packets. A
// sender counts which of its rows for a rank each token is, and stores it where it stays. A block that has stored its share says so behind a fence, in a
// word at each receiver, which is not the sentinel: so all blocks of a sender can be waited for, however many it has.
#pragma once
#include "expert_rows.cuh"

namespace brigade {

struct Places : ExpertRows {
  using ExpertRows::ExpertRows;

  // Counts own tokens for each rank, as those that come are counted. By all threads of a block.
  __device__ __forceinline__ void count_going() const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t r = threadIdx.x / 32; r < p.size; r += blockDim.x / 32) {
      uint32_t before = 0;
#pragma unroll 1
      for (uint32_t t = lane; t - lane < p.tokens; t += 32) {
        const uint32_t votes = __ballot_sync(0xFFFFFFFFu, goes(p, t, r));
        const uint32_t earlier = before + __popc(votes & ((1u << lane) - 1));
        if (lane % PerWord == 0) ways.coming[r][t / PerWord] = earlier << PerWord | (votes >> lane & 0xFFFF);
        before += __popc(votes);
      }
    }
    __syncthreads();
  }

  // Where an own token's row stays at a rank that it goes to.
  __device__ __forceinline__ uint64_t place_of(uint32_t to, uint32_t t) const {
    return p.base + to * p.stride + p.places + uint64_t(row_of(to, t)) * p.row_bytes[row];
  }

  // Granules of a row that a warp stores at a time, one behind the other.
  static constexpr uint32_t Run = 32 * Each;

  // Granules of a row, a warp's part of it: from granule `g` of this token on, 32 apart. Where they are not `whole`, from any addresses.
  template <bool whole>
  __device__ __forceinline__ void load_run(uint32_t t, uint32_t g, uint4 (&v)[Each]) const {
    const uint32_t granules = uint32_t(p.row_bytes[row] / 16);
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint64_t from = granule(t, g + 32 * k);
      if (g + 32 * k < granules && t < p.tokens) v[k] = whole ? *reinterpret_cast<const uint4*>(from) : any_input(from, 16);
    }
  }

  // The token and the first granule of a thread's part of a run.
  __device__ __forceinline__ uint32_t part_of(uint32_t run, uint32_t& g) const {
    uint32_t part;
    const uint32_t t = divided(run, p.row_runs, p.inverse_row_runs, part);
    g = part * Run + threadIdx.x % 32;
    return t;
  }

  // Stores each own row at all ranks that it goes to, of which another one has the first turn for each token: by warps, from `run` on. The next part is
  // read before one is stored.
  template <bool whole>
  __device__ __forceinline__ void store_rows(uint32_t run, uint32_t warps) const {
    const uint32_t granules = uint32_t(p.row_bytes[row] / 16), end = p.tokens * p.row_runs;
    uint32_t g, t = part_of(run, g);
    uint4 v[Each];
    load_run<whole>(t, g, v);
#pragma unroll 1
    for (; run < end; run += warps) {
      uint32_t next_g;
      const uint32_t next_t = part_of(run + warps, next_g);
      uint4 next[Each];
      load_run<whole>(next_t, next_g, next);
      const uint32_t ranks = ways.mask(t);
      uint32_t turn;
      divided(t, p.size, p.inverse_size, turn);
#pragma unroll 1
      for (uint32_t i = 0; i < p.size; ++i) {
        const uint32_t to = turn + i >= p.size ? turn + i - p.size : turn + i;
        if (!(ranks >> to & 1)) continue;
        const uint64_t at = place_of(to, t) + 16ull * g;
#pragma unroll
        for (uint32_t k = 0; k < Each; ++k) {
          if (g + 32 * k < granules) store(at + 512 * k, v[k]);
        }
      }
      t = next_t, g = next_g;
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) v[k] = next[k];
    }
  }

  static __device__ __noinline__ void store_any(const PushDispatchParams& p, uint32_t run, uint32_t warps) {
    Places(p, 0, 0, 0).template store_rows<false>(run, warps);
  }

  // The word in which a block of `from` says to `to` that it has stored its share.
  __device__ __forceinline__ uint32_t* stored_at(uint32_t to, uint32_t from, uint32_t block) const {
    return reinterpret_cast<uint32_t*>(counts_at(to, from, block / 4)) + block % 4;
  }

  // How often the half was used, this use included.
  __device__ __forceinline__ uint64_t half_uses() const { return read_word(state() + STATE_COUNTERS + 2 * p.half_counter); }

  // Asks the hook, where there is one, about a word of the half.
  __device__ __forceinline__ Answer ask(uint64_t op, uint32_t peer, uint32_t word) const {
    return p.desk == 0 ? Answer::go_on : consult(p, p.signature, step_bits(op, peer, word), half_uses(), peer);
  }

  // Waits until a peer is done with the last use of its half, and adds how long if this block tells of rows too, as a single one does. By a lane for each peer.
  static __device__ __noinline__ bool await_credit(const PushDispatchParams& p, uint64_t flag, bool tells) {
    const Places one(p, 0, 0, flag);
    const uint32_t peer = threadIdx.x, word = p.half_credit + peer;
    const uint64_t uses = one.half_uses();
    if (uses <= 1) return true;
    const Answer answer = one.ask(STEP_CREDIT, peer, word);
    if (answer != Answer::go_on) return answer == Answer::leave_out;
    const uint64_t* at = reinterpret_cast<const uint64_t*>(p.base + p.rank * p.stride) + word;
    const uint64_t before = pack({unpack(flag).generation, 0, uint32_t(uses - 1)});
    const auto look = [&] { return progress(load_acquire_sys(at), before, Want::at_least) == Progress::there; };
    return tells && p.waits != 0 ? one.wait_and_add(peer, look) : one.wait([&] { return peer; }, look);
  }

  // The share of block `which` of so many, once there is room for it. By all threads of a block.
  __device__ __forceinline__ bool push_to_places(uint32_t which, uint32_t blocks, bool tells) const {
    count_going();
    bool there = !stopped;
    if (there && threadIdx.x < p.size && threadIdx.x != p.rank) there = await_credit(p, flag, tells);
    if (__syncthreads_or(!there)) return false;
    const uint32_t each = blockDim.x / 32, run = which * each + threadIdx.x / 32, warps = blocks * each;
    p.from[row] % 16 == 0 ? store_rows<true>(run, warps) : store_any(p, run, warps);
    __syncthreads();
    if (threadIdx.x >= p.size || threadIdx.x == p.rank) return true;
    __threadfence_system();
    if (ask(STEP_POST, threadIdx.x, p.half_filled + p.rank * p.half_pieces) == Answer::go_on) {
      store_relaxed_sys(stored_at(threadIdx.x, p.rank, which), blocks);
    }
    return true;
  }

  // Waits until all blocks of all peers have stored what they have for this rank. By all threads of a block, of which a warp asks a rank.
  __device__ __forceinline__ bool await_places() const {
    const uint32_t lane = threadIdx.x % 32;
    bool there = true;
#pragma unroll 1
    for (uint32_t s = threadIdx.x / 32; s < p.size && there; s += blockDim.x / 32) {
      if (s == p.rank) continue;
      uint32_t blocks = 0;
      const auto come = [&](uint32_t block) { return load_relaxed_sys(stored_at(p.rank, s, block)); };
      there = wait([&] { return s; }, [&] { return (blocks = come(0)) != sentinel; });
#pragma unroll 1
      for (uint32_t b = lane; b - lane < blocks && there; b += 32) {
        there = wait([&] { return s; }, [&] { return b >= blocks || come(b) != sentinel; });
      }
      if (lane == 0 && there) there = ask(STEP_WAIT, s, p.half_filled + s * p.half_pieces) == Answer::go_on;
      there = __all_sync(0xFFFFFFFFu, there);
    }
    __threadfence_system();
    return !__syncthreads_or(!there);
  }
};

}  // namespace brigade
