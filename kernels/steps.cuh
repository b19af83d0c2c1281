// What every kernel of a communicator does before, while and after it waits.
//
// A rank's own state (counters, the generation) lies in its GPU's memory and is advanced by kernels alone, in stream order, so
// that a captured graph goes on counting at every replay. A report lies in memory that the host sees: there the host asks for
// a stop and says who is gone, and a kernel leaves its fault record.
#pragma once
#include "fault.cuh"
#include "params.cuh"
#include "sync.cuh"

namespace brigade {

// A group, as one rank's kernels see it.
struct Group {
  uint64_t base;
  uint64_t stride;
  uint64_t* state;
  uint64_t report;
  uint64_t desk;  // Where this launch asks the hook of fault injection; 0 without one.
  uint64_t deadline_ns;
  uint64_t first_deadline_ns;
  uint32_t rank;
  uint32_t size;
  uint32_t operation;
  uint32_t signature;
  uint32_t barrier;
  uint32_t stop;
  bool collective;
  // All ranks make this call, and do not meet in it: who is in a later call of all ranks has made it.
  bool in_turn;
  // Where the caller has waits for each rank added up, or null.
  uint64_t* waits;

  __device__ uint64_t* word(uint32_t owner, uint32_t index) const {
    return reinterpret_cast<uint64_t*>(base + owner * stride) + index;
  }
  __device__ uint32_t generation() const { return uint32_t(state[STATE_GENERATION]); }
  __device__ uint64_t* counter(uint32_t i) const { return state + STATE_COUNTERS + 2 * i; }
  // Exchanges by pushing, of the calls that all ranks make.
  __device__ uint64_t pushed_uses() const { return state[STATE_USES] >> USE_BITS; }
  // What a counter says. The first counts the calls that all ranks make, but for those that are exchanges by pushing.
  __device__ uint64_t count(uint32_t i) const { return *counter(i) + (i == 0 ? pushed_uses() : 0); }
  // Of the calls that all ranks make.
  __device__ uint32_t epoch() const { return uint32_t(count(0)); }
  // The call in progress: when it began, which one it is, and whether it is the first of all ranks.
  __device__ uint64_t started_ns() const { return state[STATE_STARTED]; }
  __device__ uint64_t call() const { return state[STATE_CALLS] + 1; }
  __device__ bool is_first() const { return collective && count(0) <= 1; }
  __device__ uint64_t flag(uint64_t count) const { return pack({generation(), signature, uint32_t(count)}); }
  __device__ uint32_t arrivals(uint32_t epoch) const { return barrier + (epoch & 1) * size; }
  __device__ uint32_t arrivals() const { return arrivals(epoch()); }
};

// A bit for each rank that does not take part any more: nobody writes to it, waits for it, or reads what it wrote.
__device__ __forceinline__ uint32_t absent_ranks(const uint64_t* state) { return uint32_t(state[STATE_ABSENT]); }

// Where a kernel adds up its waits: only those that calls with experts wait by are told.
template <typename P>
__device__ __forceinline__ uint64_t waits_of(const P&) {
  return 0;
}
__device__ __forceinline__ uint64_t waits_of(const StepsParams& p) { return p.waits; }
__device__ __forceinline__ uint64_t waits_of(const DispatchFifoParams& p) { return p.waits; }
__device__ __forceinline__ uint64_t waits_of(const CombineFifoParams& p) { return p.waits; }
__device__ __forceinline__ uint64_t waits_of(const LowLatencyParams& p) { return p.waits; }

template <typename P>
__device__ __forceinline__ Group group_of(const P& p, uint32_t signature) {
  return {p.base,
          p.stride,
          reinterpret_cast<uint64_t*>(p.state),
          p.report,
          p.desk,
          p.deadline_ns,
          p.first_deadline_ns,
          p.rank,
          p.size,
          p.operation,
          signature,
          p.barrier,
          p.stop,
          p.collective == MADE_TOGETHER,
          p.collective == MADE_IN_TURN,
          reinterpret_cast<uint64_t*>(waits_of(p))};
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* at, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// What the kernels before this one left, read past the first-level cache: it may be older than they are.
__device__ __forceinline__ uint64_t read_word(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

// Whether this rank was told to stop in this generation. `stop` is the word by which it is told.
__device__ __forceinline__ bool is_stopped(const uint64_t* stop, const uint64_t* state) {
  return load_relaxed_sys(stop) == state[STATE_GENERATION];
}

__device__ __forceinline__ bool is_stopped(const Group& g) {
  return is_stopped(g.word(g.rank, g.stop), g.state);
}

// Whether this rank's host wants its kernels to stop: it is far away.
__device__ __forceinline__ bool is_stop_asked(const Group& g) {
  return load_relaxed_sys(reinterpret_cast<const uint32_t*>(g.report + REPORT_ABORT)) == g.generation();
}

// How long the call in progress may take.
template <typename G>
__device__ __forceinline__ uint64_t most_ns(const G& g) {
  return g.is_first() ? g.first_deadline_ns : g.deadline_ns;
}

// Why a wait of this file ended. Beyond `aborted` the numbers are FaultKind's too; `stopped` leaves no record, since somebody
// else does.
enum class End : uint32_t { going_on = 0, timeout = 1, mismatch = 2, lost = 4, overflow = 5, stopped = 99, there = 100 };

// One wait for a flag in this rank's own memory.
struct Waiting {
  uint32_t word;
  uint64_t expected;
  Want want;
  uint32_t peer;
  uint32_t slot;

  End end;
  uint64_t seen;
  uint32_t blamed;
  uint64_t blamed_expected;
  uint32_t looks;
  uint64_t since_ns;
  // Many blocks wait for the same, and one of them counts it.
  bool uncounted;
  // Looks that found the peer past this call.
  uint32_t passed;
};

// Looks between two glances at the stop word and the clock, and between two at what the host says, which is far away.
constexpr uint32_t glance = 16, long_glance = 512;

// A peer whose arrival says that it is in another call (or, if `missing`, is not there).
template <typename G>
__device__ inline bool find_peer(const G& g, bool missing, uint32_t& peer, uint64_t& seen) {
  if (!g.collective) return false;
  const uint64_t expected = g.flag(g.epoch());
  const uint32_t absent = absent_ranks(g.state);
  for (uint32_t i = 1; i < g.size; ++i) {
    const uint32_t p = (g.rank + i) % g.size;
    if (absent >> p & 1) continue;
    const uint64_t flag = load_acquire_sys(g.word(g.rank, g.arrivals() + p));
    if (progress(flag, expected, Want::exactly) == (missing ? Progress::behind : Progress::other_call)) {
      peer = p;
      seen = flag;
      return true;
    }
  }
  return false;
}

// Whether a peer has come to the next call of all ranks.
template <typename G>
__device__ inline bool has_passed(const G& g, uint32_t peer) {
  if (!g.in_turn) return false;
  const uint32_t next = g.epoch() + 1;
  const uint64_t flag = load_acquire_sys(g.word(g.rank, g.barrier + (next & 1) * g.size + peer));
  return progress(flag, g.flag(next), Want::at_least) == Progress::there;
}

// What is waited for was not there once more: now and then asks whether there is hope. `behind` looks again.
template <typename G, typename Behind>
__device__ inline void doubt(const G& g, Waiting& w, Behind behind) {
  if (w.looks++ == 0) w.since_ns = globaltimer_ns();
  if (w.looks % glance != 0) return;
  if (is_stopped(g)) {
    w.end = End::stopped;
    return;
  }
  if (globaltimer_ns() - g.started_ns() >= most_ns(g)) {
    find_peer(g, true, w.blamed, w.seen);
    w.end = End::timeout;
    return;
  }
  if (w.looks % long_glance != 0) return;
  if (is_stop_asked(g)) {
    w.end = End::stopped;
  } else if (find_peer(g, false, w.blamed, w.seen)) {
    w.blamed_expected = g.flag(g.epoch());
    w.end = End::mismatch;
  } else if (has_passed(g, w.peer)) {
    // What it posted before is there, at the latest, when this is seen again.
    if (behind() && ++w.passed == 2) w.end = End::mismatch;
  } else if (load_acquire_sys(reinterpret_cast<const uint64_t*>(g.report + REPORT_DEPARTED)) >> w.peer & 1) {
    // What a rank says last is that it is gone: its flag would be there.
    if (behind()) w.end = End::lost;
  }
}

// This rank waited for a peer, for so long.
__device__ __forceinline__ void count_wait(const Group& g, uint32_t peer, unsigned long long waited_ns) {
  atomicAdd(reinterpret_cast<unsigned long long*>(g.state + STATE_WAITS + peer), 1ull);
  atomicAdd(reinterpret_cast<unsigned long long*>(g.state + STATE_WAITED + peer), waited_ns);
  if (g.waits != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(g.waits + peer), waited_ns);
}

// Takes one look. `w.end` stays `going_on` while there is hope.
template <typename G>
__device__ inline void look(const G& g, Waiting& w) {
  const uint64_t* flag = g.word(g.rank, w.word);
  w.seen = load_acquire_sys(flag);
  const Progress p = progress(w.seen, w.expected, w.want);
  if (p == Progress::there) {
    w.end = End::there;
    if (w.looks > 0 && !w.uncounted) count_wait(g, w.peer, globaltimer_ns() - w.since_ns);
    return;
  }
  w.blamed = w.peer;
  w.blamed_expected = w.expected;
  if (p == Progress::other_call) {
    // Whoever is in another call may have written where a third rank's flag is waited for.
    if (find_peer(g, false, w.blamed, w.seen)) w.blamed_expected = g.flag(g.epoch());
    w.end = End::mismatch;
    return;
  }
  doubt(g, w, [&] {
    w.seen = load_acquire_sys(flag);
    return progress(w.seen, w.expected, w.want) == Progress::behind;
  });
}

// Tells this rank's host that a kernel of its gave up, or found that the group was stopped: before it hears so from whoever stopped it, it
// would take what is poisoned for a result.
__device__ __forceinline__ void say_stopped(uint64_t report, uint32_t generation) {
  store_release_sys(reinterpret_cast<uint32_t*>(report + REPORT_STOPPED), generation);
}

// Tells every rank's kernels to stop, and this rank's host.
__device__ inline void stop_all(const Group& g) {
  for (uint32_t i = 0; i < g.size; ++i) store_release_sys(g.word((g.rank + i) % g.size, g.stop), uint64_t(g.generation()));
  say_stopped(g.report, g.generation());
}

// A wait ended badly: leaves the record, and stops the group.
template <typename G>
__device__ inline void give_up(const G& g, const Waiting& w) {
  if (w.end != End::stopped) {
    FaultRecord what{};
    what.kind = uint32_t(w.end);
    what.operation = g.operation;
    what.rank = g.rank;
    what.peer = w.blamed;
    what.slot = w.slot;
    what.generation = g.generation();
    what.expected = w.blamed_expected;
    what.seen = w.seen;
    what.waited_ns = globaltimer_ns() - g.started_ns();
    what.call = g.call();
    record_fault(reinterpret_cast<FaultRecord*>(g.report + REPORT_FAULT), what);
  }
  stop_all(g);
}

}  // namespace brigade
