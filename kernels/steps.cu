// Carries out the steps of a protocol: the posts and waits that brigade-sync's machines give as data, with counters that live
// here in place of the host's.
#include "hook.cuh"
#include "poison.cuh"

using namespace brigade;

constexpr uint32_t everybody = 0xffffffffu;

struct Step {
  uint32_t op, phase, counter, slot, peer, word;
};

__device__ __forceinline__ Step step_of(uint64_t bits) {
  return {uint32_t(bits >> 60),          uint32_t(bits >> 56 & 0xf),   uint32_t(bits >> 40 & 0xffff),
          uint32_t(bits >> 28 & 0xfff), uint32_t(bits >> 20 & 0xff), uint32_t(bits & 0xfffff)};
}

// A counter, as a step finds it.
struct Count {
  uint64_t uses, marks;
};

__device__ __forceinline__ bool counts(uint32_t op) {
  return op == STEP_ADVANCE || op == STEP_TAKE || op == STEP_RESERVE || op == STEP_CLOSE || op == STEP_CATCH_UP;
}

// What a step makes of its counter.
__device__ inline void count_on(const Group& g, const Step& s, Count& c) {
  const bool begun = (c.marks & MARK_BEGUN) != 0;
  switch (s.op) {
    case STEP_TAKE:
      if (begun) {
        c.marks &= ~MARK_BEGUN;
        return;
      }
      [[fallthrough]];  // Else it is a use like any other.
    case STEP_ADVANCE:
      c.uses += 1;
      c.marks |= MARK_OPEN;
      return;
    case STEP_RESERVE:
      if (!begun) {
        c.uses += 1;
        c.marks |= MARK_OPEN | MARK_BEGUN;
      }
      return;
    case STEP_CLOSE:
      if (!begun) c.marks &= ~MARK_OPEN;
      return;
    case STEP_CATCH_UP: {
      const Flag last = unpack(load_acquire_sys(g.word(g.rank, s.word)));
      if (last.generation == g.generation()) c.uses += uint64_t(int64_t(int32_t(last.epoch - uint32_t(c.uses))));
      return;
    }
  }
}

// Counts for the steps of a phase, by all lanes. `mine` is what a lane's counter says before, whatever phase its step is of, and then when it is the
// step's turn: behind those in front of it, and, if it counts itself, behind that. So counters are read once for all phases.
__device__ inline void count_all(const Group& g, bool takes_part, const Step& s, Count& mine) {
  const uint32_t lane = threadIdx.x;
  const uint32_t counting = __ballot_sync(everybody, takes_part && counts(s.op));
  for (uint32_t left = counting; left != 0; left &= left - 1) {
    const uint32_t turn = __ffs(left) - 1;
    if (lane == turn) count_on(g, s, mine);
    const Count now = {__shfl_sync(everybody, mine.uses, turn), __shfl_sync(everybody, mine.marks, turn)};
    const uint32_t counter = __shfl_sync(everybody, s.counter, turn);
    if (lane > turn && s.counter == counter) mine = now;
  }
  const uint32_t behind = ~((2u << lane) - 1), same = __match_any_sync(everybody, s.counter);
  if ((counting >> lane & 1) != 0 && (same & counting & behind) == 0) {
    uint64_t* at = g.counter(s.counter);
    at[0] = mine.uses, at[1] = mine.marks;
  }
  __syncwarp();
}

// Adds without waiting for what was there.
__device__ __forceinline__ void add(uint64_t* at, uint64_t more) { atomicAdd(reinterpret_cast<unsigned long long*>(at), more); }

// What is left of a step once counters are as it wants them.
enum class Rest : uint32_t { nothing, post, wait };

// Does what is done at once. What the step posts or waits for is in `w` then. `uses` is what its counter says.
__device__ inline Rest carry_out(const StepsParams& p, const Group& g, uint32_t generation, const Step& s, uint64_t uses, uint64_t marks, Waiting& w) {
  const auto flag = [&](uint64_t count) { return pack({generation, g.signature, uint32_t(count)}); };
  // What a rank has to wait for of its own is no wait for others.
  w = {s.word, flag(uses), Want::exactly, s.peer, s.slot, End::going_on, 0, s.peer, 0, 0, 0, s.peer == g.rank};
  switch (s.op) {
    case STEP_START:
      g.state[STATE_STARTED] = globaltimer_ns();
      return Rest::nothing;
    case STEP_POST_OPEN:
      return marks == MARK_OPEN ? Rest::post : Rest::nothing;
    case STEP_POST:
      return Rest::post;
    case STEP_WAIT:
      return Rest::wait;
    case STEP_CREDIT:
      w.expected = flag(uses - 1);
      w.want = Want::at_least;
      return uses > 1 ? Rest::wait : Rest::nothing;
    case STEP_RELEASED:
      w.want = Want::at_least;
      return uses > 0 ? Rest::wait : Rest::nothing;
    case STEP_ARRIVE:
      w.word = g.arrivals(uint32_t(uses)) + g.rank;
      return Rest::post;
    case STEP_MEET:
      w.word = g.arrivals(uint32_t(uses)) + s.peer;
      return Rest::wait;
    case STEP_FINISH:
      add(g.state + STATE_CALLS, 1);
      add(g.state + STATE_MOVED, p.moved_bytes);
      return Rest::nothing;
  }
  return Rest::nothing;
}

// Whether the hook is asked before what is left of a step: not about what a rank says to itself, as little as behind it. A call's beginning is behind
// it already; a piece that came is told when its flag was seen.
__device__ __forceinline__ bool is_asked(const Group& g, const Step& s, Rest rest) {
  if (g.desk == 0 || s.op == STEP_WAIT) return false;
  return s.op == STEP_START || (rest != Rest::nothing && s.peer != g.rank);
}

// Asks about a lane's step, and gives the question's number. Not inlined, so that its callers keep what they have in registers.
__device__ __noinline__ uint64_t ask(const StepsParams& p, uint64_t epoch) {
  return ask(group_of(p, p.signature), threadIdx.x, p.steps[threadIdx.x], epoch);
}

// Goes on with a step as far as it can: hears the answer to what was asked, posts, or takes a look. `w.end` says whether that
// was all.
__device__ inline void go_on(const StepsParams& p, const Group& g, const Step& s, uint64_t epoch, Rest& rest, uint64_t& asked, Waiting& w) {
  if (asked != 0) {
    const Answer answer = hear(g, threadIdx.x, asked, w);
    if (answer == Answer::none) return;
    asked = 0;
    if (answer == Answer::leave_out) rest = Rest::nothing;
  }
  switch (rest) {
    case Rest::post:
      store_release_sys(g.word(w.peer, w.word), w.expected);
      w.end = End::there;
      return;
    case Rest::wait:
      look(g, w);
      if (w.end == End::there && s.op == STEP_WAIT && s.peer != g.rank && g.desk != 0) {
        rest = Rest::nothing;
        w.end = End::going_on;
        w.looks = 0;
        asked = ask(p, epoch);
      }
      return;
    case Rest::nothing:
      w.end = End::there;
  }
}

// All steps, by one warp. False if the group was stopped.
__device__ inline bool carry_out_all(const StepsParams& p, const Group& g) {
  const uint32_t lane = threadIdx.x;
  // All that is read is on its way at the same time.
  const Step mine = step_of(lane < p.count ? p.steps[lane] : 0);
  const uint64_t* at = g.counter(mine.counter);
  Count count = {at[0], at[1]};
  const uint64_t pushed = g.pushed_uses(), generation = g.state[STATE_GENERATION], stop = load_relaxed_sys(g.word(g.rank, g.stop));
  if (__any_sync(everybody, stop == generation)) {
    if (lane == 0) stop_all(g);
    return false;
  }
  const uint32_t phases = p.count == 0 ? 0 : step_of(p.steps[p.count - 1]).phase + 1;
  for (uint32_t phase = 0; phase < phases; ++phase) {
    const bool takes_part = lane < p.count && mine.phase == phase;
    count_all(g, takes_part, mine, count);
    const uint64_t uses = count.uses + (mine.counter == 0 ? pushed : 0);
    // A release is waited for on behalf of the next signal.
    const uint64_t epoch = uses + (mine.op == STEP_RELEASED ? 1 : 0);
    Waiting w{};
    w.end = End::there;
    Rest rest = Rest::nothing;
    uint64_t asked = 0;
    if (takes_part) {
      rest = carry_out(p, g, uint32_t(generation), mine, uses, count.marks, w);
      if (is_asked(g, mine, rest)) asked = ask(p, epoch);
    }
    // All lanes go on in turn, so that none keeps another from seeing its flag or its answer.
    uint32_t failed;
    do {
      if (w.end == End::going_on) go_on(p, g, mine, epoch, rest, asked, w);
      failed = __ballot_sync(everybody, w.end != End::going_on && w.end != End::there);
    } while (failed == 0 && __any_sync(everybody, w.end == End::going_on));
    if (failed != 0) {
      if (lane == __ffs(failed) - 1) give_up(g, w);
      return false;
    }
    __syncwarp();
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(STEP_THREADS) brigade_steps(const __grid_constant__ StepsParams p) {
  wait_for_previous_kernel();
  if (p.product_begins != 0) let_next_kernel_start();
  __shared__ bool stopped;
  if (threadIdx.x < 32) {
    const bool done = carry_out_all(p, group_of(p, p.signature));
    if (threadIdx.x == 0) stopped = !done;
  }
  __syncthreads();
  for (int i = 0; stopped && i < MOST_POISONED; ++i) {
    poison(p.poison[i], p.poison_bytes[i], p.poison_pattern[i], threadIdx.x, blockDim.x);
  }
}
