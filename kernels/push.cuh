// Exchanges in which data is its own flag (after TensorRT-LLM's Lamport all-reduce): granules of 16 bytes are pushed into
// buffers that hold nothing but a sentinel, and whoever takes them looks until none of it is left.
//
// Three buffers rotate. Use n writes and reads buffer n % 3, and empties the one of use n - 1, which this rank has taken. A peer
// writes there for use n + 2, in a kernel that begins after it has taken use n + 1, which includes this rank's arrival; and
// this rank's kernel of use n + 1 begins after that of use n, with the emptying, has ended. So every order that is needed is one
// between kernels, and within a use all accesses may be relaxed: a word is empty, or it is the data.
//
//   access                            why it is enough
//   st.relaxed.sys / ld.relaxed.sys   every word of a granule tells by itself whether it is there
//   arrival (relaxed)                 says which call this is; the data beside it needs no order
//
// Which use it is follows from one number, to which the blocks of a kernel add USE between them, each once it has read it: so all
// of them find the same use in its upper bits, and none has to know whether it is the last.
#pragma once
#include "hook.cuh"
#include "poison.cuh"

namespace brigade {

// No word of a granule that was pushed.
constexpr uint32_t sentinel = 0xFFFFFFFFu;

// Threads of the largest block that pushes rows which are not for experts. It has a multiprocessor to itself: within a budget, so that as much is on its way
// as by two.
constexpr uint32_t Widest = 2 * ALL_REDUCE_THREADS;

__device__ __forceinline__ void push(uint64_t at, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 peek(uint64_t at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ bool is_there(uint4 v) {
  return v.x != sentinel && v.y != sentinel && v.z != sentinel && v.w != sentinel;
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// 0, though the compiler takes it for a thread's own: what follows from it is found by each thread, and not once for a warp in
// registers from which addresses are slow to reach.
__device__ __forceinline__ uint32_t nothing_of(uint32_t thread) {
  uint32_t none;
  asm volatile("shr.u32 %0, %1, 16;" : "=r"(none) : "r"(thread));
  return none;
}

// A group in a call that is one use, which its kernel counts while it runs.
struct Exchange : Group {
  uint64_t arrived;
  uint64_t since_ns;

  __device__ uint32_t epoch() const { return unpack(arrived).epoch; }
  __device__ uint32_t arrivals() const { return barrier + (epoch() & 1) * size; }
  __device__ uint64_t started_ns() const { return since_ns; }
  __device__ bool is_first() const { return collective && epoch() <= 1; }
};

// What is rare is not inlined, takes nothing by reference but the parameters, and so costs the rest no registers and no fetches.

// What is the matter with `peer`, whose data or arrival is not there.
template <typename P>
__device__ inline Waiting diagnose(const P& p, const Exchange& g, uint32_t peer, bool far) {
  Waiting w{};
  w.end = End::going_on;
  w.peer = w.blamed = w.slot = peer;
  w.blamed_expected = g.arrived;
  w.seen = load_acquire_sys(g.word(p.rank, g.arrivals() + peer));
  if (is_stopped(g)) {
    w.end = End::stopped;
  } else if (globaltimer_ns() - g.since_ns >= most_ns(g)) {
    find_peer(g, true, w.blamed, w.seen);
    w.end = End::timeout;
  } else if (find_peer(g, false, w.blamed, w.seen)) {
    w.end = End::mismatch;
  } else if (far && is_stop_asked(g)) {
    w.end = End::stopped;
  } else if (far && (load_acquire_sys(reinterpret_cast<const uint64_t*>(g.report + REPORT_DEPARTED)) >> peer & 1)) {
    w.end = End::lost;
  }
  return w;
}

// In since when a lane waits: there was no hope already.
constexpr uint64_t hopeless = 1ull << 63;

// Now and then, while `peer` is waited for since a time: gives that time, and whether there is no hope.
template <typename P>
__device__ __noinline__ uint64_t hope_for(const P& p, uint64_t flag, uint32_t peer, uint32_t times, uint64_t since_ns) {
  const Exchange g{group_of(p, p.signature), flag, since_ns == 0 ? globaltimer_ns() : since_ns};
  // The host is far away.
  return diagnose(p, g, peer, times % 16 == 0).end == End::going_on ? g.since_ns : g.since_ns | hopeless;
}

// There is no hope: leaves a record, if nobody else has, and stops the group.
template <typename P>
__device__ __noinline__ void give_up_on(const P& p, uint64_t flag, uint32_t peer, uint64_t since_ns) {
  const Exchange g{group_of(p, p.signature), flag, since_ns & ~hopeless};
  const Waiting w = diagnose(p, g, peer, true);
  give_up(g, w);
}

// Asks the hook, where there is one: then there is one block, whose threads take slots by the ranks that they ask about.
template <typename P>
__device__ __noinline__ bool is_allowed(const P& p, uint64_t step, uint32_t epoch) {
  return consult(p, p.signature, step, epoch, threadIdx.x) == Answer::go_on;
}

template <typename P>
__device__ __noinline__ bool clears(const P& p, uint32_t stale, uint32_t epoch) {
  __shared__ bool allowed;
  if (threadIdx.x == 0) allowed = is_allowed(p, step_bits(STEP_CLEAR, p.rank, stale), epoch);
  __syncthreads();
  return allowed;
}

__device__ inline void poison_outputs(const AllReduceParams& p) {
  poison(p.out, p.out_bytes, p.poison, threadIdx.x, blockDim.x);
}

template <typename P>
__device__ __noinline__ void poison_all(const P& p) {
  // Who found the group stopped as it began has told nobody yet.
  if (threadIdx.x == 0) say_stopped(p.report, uint32_t(reinterpret_cast<const uint64_t*>(p.state)[STATE_GENERATION]));
  const uint64_t start_ns = globaltimer_ns();
  while (globaltimer_ns() - start_ns < 2000000) {
  }
  poison_outputs(p);
}

// The rank `distance` behind this one.
template <typename P>
__device__ __forceinline__ uint32_t peer_of(const P& p, uint32_t distance) {
  const uint32_t r = p.rank + distance;
  return r >= p.size ? r - p.size : r;
}

// What a warp of a block takes next, of what its warps share.
__device__ __forceinline__ uint32_t next_of(uint32_t& item) {
  uint32_t n = 0;
  if (threadIdx.x % 32 == 0) n = atomicAdd(&item, 1u);
  return __shfl_sync(0xFFFFFFFFu, n, 0);
}

// Which buffer a use has, by the word of the state that counts them.
__device__ __forceinline__ uint32_t buffer_of(uint64_t uses, uint32_t buffers) {
  const uint32_t use = uint32_t(uses >> USE_BITS);
  // 2^32 is 1 modulo 3, and what is above it is small.
  return buffers == 3 ? (use % 3 + uint32_t(uses >> (USE_BITS + 32))) % 3 : use % 2;
}

// What a rank's state says as a kernel begins.
struct StateFound {
  uint64_t uses, granules, generation, calls, stop;

  // All that is read here is on its way at the same time. See `nothing_of`.
  template <typename P>
  __device__ __forceinline__ static StateFound of(const P& p, uint32_t nothing = 0) {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(p.state) + nothing;
    StateFound found;
    found.uses = read_word(words + STATE_USES);
    found.granules = read_word(words + STATE_GRANULES);
    found.generation = read_word(words + STATE_GENERATION);
    found.calls = read_word(words + STATE_COUNTERS);
    found.stop = load_relaxed_sys(reinterpret_cast<const uint64_t*>(p.base + p.rank * p.stride) + p.stop);
    return found;
  }
};

// The same for all threads of a block, of which one warp reads it: where all warps of many blocks do, they queue for these few words.
__shared__ StateFound state_found;

template <typename P>
__device__ __forceinline__ void find_state(const P& p) {
  if (threadIdx.x < 32) {
    const StateFound found = StateFound::of(p, nothing_of(threadIdx.x));
    if (threadIdx.x == 0) state_found = found;
  }
  __syncthreads();
}

// What one kernel is in, as a thread sees it. Where no hook can be asked, what it would cost is not compiled.
template <typename P, bool Hooked = true>
struct Pushing {
  const P& p;
  // Which buffer this use has, and what to empty.
  uint32_t use, buffer, stale, stale_granules;
  // The group was stopped before this kernel began.
  bool stopped;
  // Of this rank's arrival, and of every peer's.
  uint64_t flag;

  // In the middle of a use.
  __device__ Pushing(const P& parameters, uint32_t this_use, uint32_t this_buffer, uint64_t this_flag)
      : p(parameters), use(this_use), buffer(this_buffer), stale(0), stale_granules(0), stopped(false), flag(this_flag) {}

  __device__ __forceinline__ explicit Pushing(const P& parameters, uint32_t nothing = 0) : Pushing(parameters, StateFound::of(parameters, nothing)) {}

  __device__ __forceinline__ Pushing(const P& parameters, const StateFound& found) : p(parameters) {
    use = uint32_t(found.uses >> USE_BITS);
    buffer = buffer_of(found.uses, p.buffers);
    stale = buffer == 0 ? p.buffers - 1 : buffer - 1;
    // Of the use before: even and odd uses have a half each.
    stale_granules = uint32_t(use % 2 == 0 ? found.granules >> 32 : found.granules);
    flag = pack({uint32_t(found.generation), p.signature, uint32_t(found.calls) + use + 1});
    stopped = found.stop == found.generation;
  }

  __device__ bool hooked() const { return Hooked && p.desk != 0; }

  __device__ uint64_t* state() const { return reinterpret_cast<uint64_t*>(p.state); }

  __device__ uint64_t slots(uint32_t rank, uint32_t which) const {
    return p.base + rank * p.stride + p.slots + which * p.buffer_bytes;
  }

  __device__ uint32_t peer(uint32_t distance) const { return peer_of(p, distance); }

  // The word in which `from` tells `to` which call it is in.
  __device__ uint64_t* arrival(uint32_t to, uint32_t from) const {
    return reinterpret_cast<uint64_t*>(p.base + to * p.stride) + p.barrier + (uint32_t(flag) & 1) * p.size + from;
  }

  // One warp tells every peer which call this is, and looks which one it is in: a thread for each.
  __device__ bool is_herald() const { return blockIdx.x == 0 && threadIdx.x < p.size && threadIdx.x != p.rank; }

  __device__ void announce() const {
    if (!is_herald()) return;
    if (hooked() && !is_allowed(p, step_bits(STEP_ARRIVE, threadIdx.x, 0), uint32_t(flag))) return;
    store_relaxed_sys(arrival(threadIdx.x, p.rank), flag);
  }

  // What the peer of a herald has said of its call. All other threads find that it is this one.
  __device__ __forceinline__ uint64_t arrived(bool herald) const { return arrived(arrival(p.rank, threadIdx.x), herald); }

  __device__ __forceinline__ uint64_t arrived(const uint64_t* arrival, bool herald) const {
    // No branch, so that what follows need not wait for it.
    uint64_t seen = flag;
    asm volatile("{.reg .pred q; setp.ne.u32 q, %1, 0; @q ld.relaxed.sys.global.u64 %0, [%2];}"
                 : "+l"(seen)
                 : "r"(uint32_t(herald)), "l"(arrival)
                 : "memory");
    return seen;
  }

  // The first granule of the use before that this thread has to empty.
  __device__ uint32_t first_stale() const {
    if (hooked() && stale_granules != 0 && !clears(p, stale, use + 1)) return stale_granules;
    return blockIdx.x * blockDim.x + threadIdx.x;
  }

  // Empties this thread's granules of the use before, from `next` on, and at most so many.
  __device__ __forceinline__ void empty(uint32_t& next, uint32_t most) const {
    const uint4 nothing = make_uint4(sentinel, sentinel, sentinel, sentinel);
    const uint64_t from = slots(p.rank, stale);
    for (; most > 0 && next < stale_granules; --most, next += gridDim.x * blockDim.x) push(from + 16ull * next, nothing);
  }

  // All of them.
  __device__ void empty() const {
    uint32_t next = first_stale();
    empty(next, 0xFFFFFFFFu);
  }

  // The same where some threads of each block do it, and there is no hook.
  __device__ __forceinline__ void empty_by(uint32_t me, uint32_t threads) const {
    const uint64_t from = slots(p.rank, stale);
    for (uint32_t i = me; i < stale_granules; i += threads) push(from + 16ull * i, make_uint4(sentinel, sentinel, sentinel, sentinel));
  }

  // Behind all that threads read of the state. A rank alone takes no use of a buffer. `granules` are those of this use, of all peers.
  __device__ __forceinline__ void count(uint32_t granules) const {
    __syncthreads();
    tally(p.moved_bytes);
    if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) fill(granules);
  }

  __device__ __forceinline__ void tally(uint64_t moved_bytes) const {
    if (threadIdx.x != blockDim.x - 1) return;
    if (p.size > 1) {
      // The first block adds what is left of USE.
      const uint32_t share = USE >> (32 - __clz(gridDim.x));
      add(STATE_USES, blockIdx.x == 0 ? USE - share * (gridDim.x - 1) : share);
    }
    if (blockIdx.x != 0) return;
    add(STATE_CALLS, p.last);
    add(STATE_MOVED, moved_bytes);
  }

  __device__ __forceinline__ void add(uint32_t word, uint64_t value) const {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(state() + word), "l"(value) : "memory");
  }

  // What the next use is to empty: said by one thread of all, before this kernel ends.
  __device__ __forceinline__ void fill(uint32_t granules) const {
    if (p.size > 1) reinterpret_cast<uint32_t*>(state() + STATE_GRANULES)[use % 2] = granules;
  }

  // Whether the group is stopped by now.
  __device__ __noinline__ bool is_stopped_now() const {
    return is_stopped(reinterpret_cast<const uint64_t*>(p.base + p.rank * p.stride) + p.stop, reinterpret_cast<const uint64_t*>(p.state));
  }

  // Looks until `look` is true; `missing` says for which rank. False if the group was stopped, or is now.
  //
  // Lanes that come here together look until all of them have what they look for, and leave together. Where each left by itself, the others took
  // turns with those that had, and even behind the loop a warp went on in parts: a tree of shuffles took four times as long. So what one of them
  // waits for must not come of what another does behind its wait, here or on other ranks. Where it may, none waits `Together` with another.
  template <bool Together = true, typename Missing, typename Look>
  __device__ __forceinline__ bool wait(Missing missing, Look look) const {
    const uint32_t together = Together ? __activemask() : 0;
    const auto any = [&](bool x) { return Together ? __any_sync(together, x) : x; };
    uint64_t since_ns = 0;
    bool there;
    for (uint32_t spins = 1; there = look(), Together ? !__all_sync(together, there) : !there; ++spins) {
      if (spins % looks_between != 0) continue;
      const bool lost = !there && since_ns >= hopeless;
      if (any(lost)) {
        if (lost) give_up_on(p, flag, missing(), since_ns);
        return false;
      }
      if (!there) since_ns = hope_for(p, flag, missing(), spins / looks_between, since_ns);
      // What a rank says last is that it is gone: all that it pushed would be there. So there are some more looks.
      if (any(since_ns >= hopeless)) spins += looks_between - last_looks;
    }
    return true;
  }

  // The same as one lane for one peer, where the caller has waits added up. Each lane takes its times as it looks: those of a warp
  // come out of the loop together.
  template <typename Look>
  __device__ __forceinline__ bool wait_and_add(uint32_t from, Look look) const {
    uint64_t since_ns = 0, waited_ns = 0;
    bool come = false;
    const auto timed = [&] {
      const bool came = come;
      come = look();
      if (!come && since_ns == 0) since_ns = globaltimer_ns();
      if (come && !came && since_ns != 0) waited_ns = globaltimer_ns() - since_ns;
      return come;
    };
    const bool there = wait([&] { return from; }, timed);
    if (there && since_ns != 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.waits) + from, (unsigned long long)waited_ns);
    return there;
  }

  // All data of shot `piece` has come, and the hook hears of it, by all threads.
  __device__ __forceinline__ void have_come(uint32_t piece) const {
    __syncthreads();
    if (is_herald()) is_allowed(p, step_bits(STEP_READ, threadIdx.x, buffer | piece << 8), use + 1);
    __syncthreads();
  }

  // At the very end, by all threads of a block. If one gave up, the block poisons the result: once all other blocks have ended,
  // or have found the group stopped too, which they look for much more often.
  __device__ __forceinline__ void finish(bool failed) const {
    if (hooked() && p.last && is_herald()) is_allowed(p, step_bits(STEP_MEET, threadIdx.x, 0), uint32_t(flag));
    if (__syncthreads_or(failed)) poison_all(p);
  }

  // Looks at data between two thoughts of giving up.
  static constexpr uint32_t looks_between = 256, last_looks = 16;
};

}  // namespace brigade
