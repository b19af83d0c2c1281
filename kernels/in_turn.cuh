// Half of a call that ranks make in turn, a send or a receive, as one launch. Where a hook is asked, steps do all of this around the kernel
// (steps.cu), which is not `alone` then.
//
//   a send      gives credits for what this rank has taken, waits for those of the half, writes; the last block out posts flags
//   a receive   waits for all flags, takes what they announce
//
// Every block waits by itself, since a word from another block would come later than a peer's flag does. What they wait for follows from
// counters that each of them has read before it is counted out, and that the last one out advances: so the same launch counts on
// at every replay of a graph. A block that finds the group stopped, or stops it, is counted out like any other.
//
//   access                           why it is enough
//   ld.acquire.sys                   flags and credits, as by steps
//   st.relaxed.sys behind a fence    credits: the fence makes them releases
//   atom.acq_rel.sys, of a send      who is out last has seen what all blocks wrote, and posts flags with a release behind it
//   atom.acq_rel.gpu, of a receive   who is out last may poison, behind what other blocks gave
#pragma once
#include "steps.cuh"

namespace brigade {

// One whose time is the launch's own, and whose call is over for some blocks before it is for others.
struct InTurn : Group {
  uint64_t since_ns;
  uint64_t number;
  __device__ uint64_t started_ns() const { return since_ns; }
  __device__ uint64_t call() const { return number; }
};

// At the beginning of each kernel.
template <typename P>
__device__ __forceinline__ void begin_launch(const P& p) {
  wait_for_previous_kernel();
  if (p.lets_next == LETS_NEXT_AT_ONCE) let_next_kernel_start();
}

// Once a block has done its work, and only tells of it.
template <typename P>
__device__ __forceinline__ void near_end(const P& p) {
  if (p.lets_next == LETS_NEXT_AT_THE_END) let_next_kernel_start();
}

template <typename P>
__device__ __forceinline__ uint64_t* state_of(const P& p) {
  return reinterpret_cast<uint64_t*>(p.state);
}

template <typename P>
__device__ __forceinline__ uint64_t* word_of(const P& p, uint32_t owner, uint32_t index) {
  return reinterpret_cast<uint64_t*>(p.base + owner * p.stride) + index;
}

template <typename P>
__device__ __forceinline__ uint64_t* counter_of(const P& p, uint32_t half) {
  return state_of(p) + STATE_COUNTERS + 2 * p.counters[half];
}

// What a rank's state says, as a warp reads it: all of it is on its way at the same time.
struct Said {
  uint64_t generation, stop, uses[2], marks[2];
  uint32_t absent;

  template <typename P>
  __device__ __forceinline__ explicit Said(const P& p) {
    stop = load_relaxed_sys(word_of(p, p.rank, p.stop));
    generation = read_word(state_of(p) + STATE_GENERATION);
    absent = uint32_t(read_word(state_of(p) + STATE_ABSENT));
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uses[half] = read_word(counter_of(p, half));
      marks[half] = read_word(counter_of(p, half) + 1);
    }
  }

  __device__ bool stopped() const { return stop == generation; }
  // Of a use of a half.
  template <typename P>
  __device__ uint64_t flag(const P& p, uint64_t use) const {
    return pack({uint32_t(generation), p.signature, uint32_t(use)});
  }
  // Whether this lane has a peer to post to, or to wait for.
  template <typename P>
  __device__ bool has_peer(const P& p) const {
    const uint32_t lane = threadIdx.x % 32;
    return lane < p.size && lane != p.rank && !(absent >> lane & 1);
  }
};

// The group was stopped, and this rank's host is to hear of it: by the first warp. Rare, so not inlined.
template <typename P>
__device__ __noinline__ void pass_stop_on(const P& p) {
  if (threadIdx.x == 0) stop_all(group_of(p, p.signature));
}

// By the first warp, whose lanes look at words `apart`, from `first` on, until all say what is wanted. False if the group was stopped, or is now.
// Rare, so not inlined.
template <typename P>
__device__ __noinline__ bool keep_waiting(const P& p, uint32_t first, uint32_t apart, Want want) {
  const Group g = group_of(p, p.signature);
  const Said said(p);
  if (__any_sync(0xffffffffu, said.stopped())) {
    pass_stop_on(p);
    return false;
  }
  const InTurn turn{g, globaltimer_ns(), g.call()};
  const uint32_t peer = threadIdx.x;
  Waiting w{first + peer * apart, said.flag(p, said.uses[0]), want, peer, peer};
  w.end = said.has_peer(p) ? End::going_on : End::there;
  // One block tells how long it was.
  w.uncounted = blockIdx.x != 0;
  uint32_t failed;
  do {
    if (w.end == End::going_on) look(turn, w);
    failed = __ballot_sync(0xffffffffu, w.end != End::going_on && w.end != End::there);
  } while (failed == 0 && __any_sync(0xffffffffu, w.end == End::going_on));
  if (failed != 0 && threadIdx.x == __ffs(failed) - 1) give_up(turn, w);
  return failed == 0;
}

// Whether peers' words say what is wanted of the last use. By the first warp. Before the first use there is nothing to wait for.
template <typename P>
__device__ __forceinline__ bool wait_for_peers(const P& p, uint32_t first, uint32_t apart, Want want) {
  const Said said(p);
  if (p.alone == 0) return !said.stopped();
  bool there = !said.stopped();
  if (said.has_peer(p) && said.uses[0] > 0) {
    const uint64_t seen = load_acquire_sys(word_of(p, p.rank, first + threadIdx.x * apart));
    there = there && progress(seen, said.flag(p, said.uses[0]), want) == Progress::there;
  }
  return __all_sync(0xffffffffu, there) || keep_waiting(p, first, apart, want);
}

// By a warp. What came in both halves, and was not let go of yet, has been taken by launches before this one, or is given up.
template <typename P>
__device__ __forceinline__ void give_credits(const P& p) {
  const Said said(p);
  if (!said.has_peer(p) || said.stopped()) return;
  // One fence for all that is posted behind it.
  __threadfence_system();
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    uint64_t* credit = word_of(p, threadIdx.x % 32, p.credits[half] + p.rank);
    if (said.marks[half] == MARK_OPEN) store_relaxed_sys(credit, said.flag(p, said.uses[half]));
  }
}

// Whether a block goes on with a send. By all its threads, as what follows.
template <typename P>
__device__ __forceinline__ bool enter_send(const P& p) {
  bool failed = false;
  if (threadIdx.x < 32) {
    failed = !wait_for_peers(p, p.credits[0], 1, Want::at_least);
  } else if (p.alone != 0 && blockIdx.x == 0 && threadIdx.x >= blockDim.x - 32) {
    // Beside the wait and not behind it: peers may wait for these before they give theirs.
    give_credits(p);
  }
  return !__syncthreads_or(failed);
}

template <typename P>
__device__ __forceinline__ bool enter_receive(const P& p) {
  return !__syncthreads_or(threadIdx.x < 32 && !wait_for_peers(p, p.filled, p.pieces, Want::exactly));
}

// Blocks that are out: in the upper half of the word, those that failed.
constexpr uint64_t one_failed = 1ull << 32;

struct Out {
  bool last;
  uint32_t failed;
};

// This block is through, by its first warp; `add` is what orders it.
template <typename P, typename Add>
__device__ __forceinline__ Out count_out(const P& p, bool well, Add add) {
  const uint64_t mine = well ? 1 : 1 + one_failed;
  uint64_t all = mine;
  if (gridDim.x > 1) {
    uint64_t* out = state_of(p) + STATE_OUT;
    if (threadIdx.x == 0) all = add(out, mine) + mine;
    all = __shfl_sync(0xffffffffu, all, 0);
    if (threadIdx.x == 0 && uint32_t(all) == gridDim.x) *out = 0;
    __syncwarp();
  }
  return {uint32_t(all) == gridDim.x, uint32_t(all >> 32)};
}

// At the end of a send.
template <typename P>
__device__ __forceinline__ void leave_send(const P& p, bool well) {
  near_end(p);
  if (p.alone == 0) return;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  // Read while the block's stores are on their way.
  const Said said(p);
  const Out out = count_out(p, well, [](uint64_t* at, uint64_t value) {
    uint64_t before;
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
  });
  if (!out.last || out.failed != 0) return;
  if (__any_sync(0xffffffffu, said.stopped())) return pass_stop_on(p);
  const uint64_t use = said.uses[0] + 1;
  if (said.has_peer(p)) store_release_sys(word_of(p, threadIdx.x, p.filled + p.rank * p.pieces), said.flag(p, use));
  if (threadIdx.x != 0) return;
  counter_of(p, 0)[0] = use;
  counter_of(p, 0)[1] = MARK_OPEN;
  counter_of(p, 1)[1] = 0;
  state_of(p)[STATE_CALLS] += 1;
}

// At the end of a receive: whether this one is to poison all that others gave, since not all of them could.
template <typename P>
__device__ __forceinline__ bool leave_receive(const P& p, bool well) {
  near_end(p);
  if (p.alone == 0) return false;
  bool spoils = false;
  __syncthreads();
  if (threadIdx.x < 32) {
    const Out out = count_out(p, well, [](uint64_t* at, uint64_t value) {
      uint64_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
      return before;
    });
    if (out.last && out.failed == 0 && threadIdx.x == 0) state_of(p)[STATE_CALLS] += 1;
    spoils = out.last && out.failed != 0 && out.failed != gridDim.x;
  }
  return __syncthreads_or(spoils);
}

}  // namespace brigade
