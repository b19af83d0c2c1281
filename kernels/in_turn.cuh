// Half of a call that ranks make in turn, a send or a receive, as one launch. Where a hook is asked, steps do some of this around the kernel
// (steps.cu), which is not `alone` then.
//
//   a send      gives credits for what this rank has taken, waits for those of the half, posts flags, which say what is coming, and writes;
//               words that tell of themselves stand for what has come
//   a receive   waits for all flags, and for what has come as it takes it: beside the send of the same use, which lets it begin
//
// Every block waits by itself, since a word from another block would come later than a peer's flag does. What they wait for follows from
// counters that each of them has read before it is counted out, and that the last one out advances: so the same launch counts on
// at every replay of a graph. What a receive reads of them, a send has written before it lets it begin. A block that finds the group stopped, or
// stops it, is counted out like any other.
//
// A word that tells of itself has the number of the use, of its half, in its lower half, and lies where no others do: so one of an earlier use
// is not taken for it, whatever that one told.
//
//   access                           why it is enough
//   ld.acquire.sys                   flags and credits, as by steps; words that tell that what lies elsewhere has come
//   st.relaxed.sys behind a fence    credits, and words that tell of what was written before: the fence makes them releases
//   st.relaxed.sys                   flags, and words that tell of nothing but themselves
//   ld.relaxed.sys                   such words
//   atom.acq_rel.gpu                 who is out last may poison, behind what other blocks gave
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

constexpr uint32_t everybody = 0xFFFFFFFFu;

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
  uint64_t generation, stop, begun, uses[2], marks[2];
  uint32_t absent;

  template <typename P>
  __device__ __forceinline__ explicit Said(const P& p) {
    stop = load_relaxed_sys(word_of(p, p.rank, p.stop));
    generation = read_word(state_of(p) + STATE_GENERATION);
    absent = uint32_t(read_word(state_of(p) + STATE_ABSENT));
    begun = read_word(state_of(p) + p.begun);
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

// Which use this launch is of, and which ranks do not take part, for all threads of a block.
__shared__ uint32_t this_use, these_absent;

// By a warp: what a lane has to wait for has come, or there is no hope. `w` says what it waits for, `look` takes a look. Not inlined: what
// comes at once needs none of it.
template <typename P, typename Look>
__device__ __noinline__ bool keep_waiting(const P& p, Waiting w, Look look) {
  const Group g = group_of(p, p.signature);
  // The call in front counts until it has ended, if that is the send beside which this is.
  const bool sends = p.beside != 0 && read_word(counter_of(p, 0)) != read_word(state_of(p) + p.begun);
  const InTurn turn{g, globaltimer_ns(), g.call() + sends};
  uint32_t failed;
  do {
    if (w.end == End::going_on) look(turn, w);
    failed = __ballot_sync(everybody, w.end != End::going_on && w.end != End::there);
  } while (failed == 0 && __any_sync(everybody, w.end == End::going_on));
  if (failed != 0 && threadIdx.x % 32 == __ffs(failed) - 1) give_up(turn, w);
  return failed == 0;
}

// Looks before anything else is thought of. What is called for that costs about a microsecond; but who looks as quickly as that keeps what others store from
// coming, where much does.
constexpr uint32_t quick_looks = 64;

// How long lanes wait for their peers, as far as one block tells it.
struct PeerWait {
  uint64_t since_ns, waited_ns;
  __device__ __forceinline__ void looked(bool come) {
    if (!come && since_ns == 0) since_ns = globaltimer_ns();
    if (come && since_ns != 0 && waited_ns == 0) waited_ns = globaltimer_ns() - since_ns;
  }
};

// By the first warp, whose lanes look at words `apart`, from `first` on, until all say what is wanted of a use. False if the group was stopped, or
// is now.
template <uint32_t most_looks, typename P>
__device__ __forceinline__ bool wait_for_peers(const P& p, const Said& said, uint32_t first, uint32_t apart, Want want, uint64_t use) {
  if (__any_sync(everybody, said.stopped())) {
    pass_stop_on(p);
    return false;
  }
  // Steps have waited.
  if (p.alone == 0) return true;
  const uint32_t peer = threadIdx.x;
  Waiting w{first + peer * apart, said.flag(p, use), want, peer, peer};
  // Before the first use there is nothing to wait for.
  const bool waits = said.has_peer(p) && use > 0;
  // One block tells how long it was.
  w.uncounted = blockIdx.x != 0;
  PeerWait mine{};
  bool come, all;
#pragma unroll 1
  for (uint32_t looks = 0; looks < most_looks; ++looks) {
    come = !waits || progress(load_acquire_sys(word_of(p, p.rank, w.word)), w.expected, want) == Progress::there;
    if (most_looks > 1 && !w.uncounted) mine.looked(come);
    all = __all_sync(everybody, come);
    if (all) break;
  }
  if (most_looks > 1 && mine.waited_ns != 0) count_wait(group_of(p, p.signature), peer, mine.waited_ns);
  if (all) return true;
  w.end = come ? End::there : End::going_on;
  w.looks = mine.since_ns != 0, w.since_ns = mine.since_ns;
  return keep_waiting(p, w, [](const InTurn& turn, Waiting& w) { look(turn, w); });
}

// What a word says that tells of itself.
__device__ __forceinline__ uint64_t told(uint32_t use, uint32_t what) { return uint64_t(what) << 32 | use; }
__device__ __forceinline__ bool is_told(uint64_t word, uint32_t use) { return uint32_t(word) == use; }

// By a warp, whose lanes that have a word look at it until it tells of this use. Not inlined: what comes at once needs none of it.
template <typename P>
__device__ __noinline__ bool keep_looking(const P& p, uint32_t from, const uint64_t* word, bool asked, uint32_t use) {
  Waiting w{};
  w.end = asked ? End::going_on : End::there;
  w.peer = w.slot = w.blamed = from;
  w.word = p.filled + from * p.pieces;
  w.uncounted = true;
  const bool well = keep_waiting(p, w, [=](const InTurn& turn, Waiting& w) {
    const auto come = [=] { return is_told(load_acquire_sys(word), use); };
    if (come()) {
      w.end = End::there;
    } else {
      // Its flag has come, and what it tells of has not.
      w.expected = w.blamed_expected = load_relaxed_sys(turn.word(turn.rank, w.word));
      doubt(turn, w, [come] { return !come(); });
    }
  });
  __syncwarp();
  return well;
}

// By a warp: until the word of each lane that asks tells of this use, and what it tells. What each of them tells of, all lanes may read then. Such waits are
// not counted, since many wait for the same. False if the group was stopped, or is now.
template <uint32_t most_looks = 1, typename P>
__device__ __forceinline__ bool wait_for_told(const P& p, uint32_t from, const uint64_t* word, bool asked, uint32_t& what) {
  const uint32_t use = this_use;
  for (bool looked = false;; looked = true) {
    uint64_t value;
    bool there;
#pragma unroll 1
    for (uint32_t looks = 0; looks < most_looks; ++looks) {
      value = asked ? load_acquire_sys(word) : use;
      there = __all_sync(everybody, is_told(value, use));
      if (there) break;
    }
    what = uint32_t(value >> 32);
    // Votes order nothing.
    __syncwarp();
    if (there || looked) return there;
    if (!keep_looking(p, from, word, asked && !is_told(value, use), use)) return false;
  }
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

// Blocks of a send that write, and which of them this one is. The first block only sees to the protocol, if there are others: it gives credits, and
// posts what is held up by rows if it comes behind them.
struct Writers {
  uint32_t blocks, me;
  __device__ __forceinline__ Writers() : blocks(max(gridDim.x, 2u) - 1), me(gridDim.x > 1 ? blockIdx.x - 1 : 0) {}
  __device__ __forceinline__ bool is_one() const { return me < blocks; }
  // Threads of all of them, and which of these this one is.
  __device__ __forceinline__ uint32_t threads() const { return blocks * blockDim.x; }
  __device__ __forceinline__ uint32_t thread() const { return me * blockDim.x + threadIdx.x; }
};

// Whether a block goes on with a send, which has waited for the kernel in front. By all its threads, as what follows. `post` posts what else is to go
// ahead of rows, for the lanes that have a peer; `meanwhile` is for all warps but the first.
template <typename P, typename Post, typename Meanwhile>
__device__ __forceinline__ bool enter_send(const P& p, Post post, Meanwhile meanwhile) {
  bool failed = false;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (warp == 0) {
    const Said said(p);
    // Steps have counted.
    const uint64_t use = said.uses[0] + p.alone;
    failed = !wait_for_peers<1>(p, said, p.credits[0], 1, Want::at_least, said.uses[0]);
    if (threadIdx.x == 0) this_use = uint32_t(use), these_absent = said.absent;
    if (blockIdx.x == 0 && !failed) {
      if (p.alone != 0 && said.has_peer(p)) store_relaxed_sys(word_of(p, threadIdx.x, p.filled + p.rank * p.pieces), said.flag(p, use));
      post(said, uint32_t(use));
    }
  } else if (blockIdx.x == 0 && warp == warps - 1) {
    // Beside the wait and not behind it: peers may wait for these before they give theirs.
    if (p.alone != 0) give_credits(p);
  } else if (blockIdx.x == 0 && warp == warps - 2 && threadIdx.x % 32 == 0) {
    state_of(p)[p.begun] = read_word(counter_of(p, 0)) + p.alone;
    // So whom this launch lets begin reads it.
    __threadfence();
  }
  __syncwarp();
  if (warp > 0) meanwhile();
  const bool well = !__syncthreads_or(failed);
  // It waits for nobody any more.
  if (p.lets_next == LETS_NEXT_AT_ONCE) let_next_kernel_start();
  return well;
}

template <typename P>
__device__ __forceinline__ bool enter_send(const P& p) {
  return enter_send(p, [](const Said&, uint32_t) {}, [] {});
}

// The same of a receive. `besides` is what the first warp waits for, too, for all of the block: whether that came.
template <uint32_t most_looks = 1, typename P, typename Besides>
__device__ __forceinline__ bool enter_receive(const P& p, Besides besides) {
  // Beside the send of the same use, which waits at its start for all that is in front of both.
  if (p.beside == 0) {
    wait_for_previous_kernel();
    if (p.lets_next == LETS_NEXT_AT_ONCE) let_next_kernel_start();
  }
  bool failed = false;
  if (threadIdx.x < 32) {
    const Said said(p);
    failed = !wait_for_peers<most_looks>(p, said, p.filled, p.pieces, Want::exactly, said.begun);
    if (threadIdx.x == 0) this_use = uint32_t(said.begun), these_absent = said.absent;
    __syncwarp();
    failed = failed || !besides();
  }
  return !__syncthreads_or(failed);
}

template <uint32_t most_looks, typename P>
__device__ __forceinline__ bool enter_receive(const P& p) {
  return enter_receive<most_looks>(p, [] { return true; });
}

// Whole warps that stand side by side, so many threads.
__device__ __forceinline__ void meet_threads(uint32_t threads) {
  __syncwarp();
  if (threads > 32) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / threads), "r"(threads) : "memory");
  }
}

// By such threads, which have met: what they wrote before is told of behind it, by words that `tell` writes. The last of them does.
template <typename Tell>
__device__ __forceinline__ void tell_met(uint32_t threads, Tell tell) {
  if (threadIdx.x % threads != threads - 1) return;
  __threadfence_system();
  tell();
}

template <typename Tell>
__device__ __forceinline__ void tell_behind(uint32_t threads, Tell tell) {
  meet_threads(threads);
  tell_met(threads, tell);
}

// Blocks that are out: in the upper half of the word, those that failed.
constexpr uint64_t one_failed = 1ull << 32;

struct Out {
  bool last;
  uint32_t failed;
};

// This block is through, by its first warp.
template <typename P>
__device__ __forceinline__ Out count_out(const P& p, bool well) {
  const uint64_t mine = well ? 1 : 1 + one_failed;
  uint64_t all = mine;
  if (gridDim.x > 1) {
    uint64_t* out = state_of(p) + STATE_OUT;
    if (threadIdx.x == 0) {
      asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(all) : "l"(out), "l"(mine) : "memory");
      all += mine;
    }
    all = __shfl_sync(everybody, all, 0);
    if (threadIdx.x == 0 && uint32_t(all) == gridDim.x) *out = 0;
    __syncwarp();
  }
  return {uint32_t(all) == gridDim.x, uint32_t(all >> 32)};
}

// At the end of a send.
template <typename P>
__device__ __forceinline__ void leave_send(const P& p, bool well) {
  if (p.alone == 0) return;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const Out out = count_out(p, well);
  if (!out.last || out.failed != 0 || threadIdx.x != 0) return;
  counter_of(p, 0)[0] = this_use;
  counter_of(p, 0)[1] = MARK_OPEN;
  counter_of(p, 1)[1] = 0;
  state_of(p)[STATE_CALLS] += 1;
}

// At the end of a receive: whether this block, the last one out, is to poison all of what the launch gives, since one did not do well. No other does: its warps, and
// other blocks, may still give what they had to.
template <typename P>
__device__ __forceinline__ bool leave_receive(const P& p, bool well) {
  // Both count blocks out by the same word.
  if (p.beside != 0) wait_for_previous_kernel();
  if (p.lets_next == LETS_NEXT_AT_THE_END) let_next_kernel_start();
  bool spoils = false;
  __syncthreads();
  if (threadIdx.x < 32) {
    const Out out = count_out(p, well);
    if (out.last && out.failed == 0 && threadIdx.x == 0 && p.alone != 0) state_of(p)[STATE_CALLS] += 1;
    spoils = out.last && out.failed != 0;
  }
  return __syncthreads_or(spoils);
}

}  // namespace brigade
