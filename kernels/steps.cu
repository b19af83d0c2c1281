// Carries out the steps of a protocol: the posts and waits that brigade-sync's machines give as data, with counters that live
// here in place of the host's.
#include "hook.cuh"
#include "poison.cuh"

using namespace brigade;

struct Step {
  uint32_t op, phase, counter, slot, peer, word;
};

__device__ __forceinline__ Step step_of(uint64_t bits) {
  return {uint32_t(bits >> 60),          uint32_t(bits >> 56 & 0xf),   uint32_t(bits >> 40 & 0xffff),
          uint32_t(bits >> 28 & 0xfff), uint32_t(bits >> 20 & 0xff), uint32_t(bits & 0xfffff)};
}

// What is left of a step once counters are as it wants them.
enum class Rest : uint32_t { nothing, post, wait };

// Does what is done at once. What the step posts or waits for is in `w` then.
__device__ inline Rest carry_out(const StepsParams& p, const Group& g, const Step& s, Waiting& w) {
  uint64_t* count = g.counter(s.counter);
  uint64_t& marks = count[1];
  const bool begun = (marks & MARK_BEGUN) != 0;
  w = {s.word, g.flag(g.count(s.counter)), Want::exactly, s.peer, s.slot, End::going_on, 0, s.peer, 0, 0, 0};
  switch (s.op) {
    case STEP_START:
      g.state[STATE_STARTED] = globaltimer_ns();
      return Rest::nothing;
    case STEP_TAKE:
      if (begun) {
        marks &= ~MARK_BEGUN;
        return Rest::nothing;
      }
      [[fallthrough]];  // Else it is a use like any other.
    case STEP_ADVANCE:
      *count += 1;
      marks |= MARK_OPEN;
      return Rest::nothing;
    case STEP_RESERVE:
      if (!begun) {
        *count += 1;
        marks |= MARK_OPEN | MARK_BEGUN;
      }
      return Rest::nothing;
    case STEP_POST_OPEN:
      return marks == MARK_OPEN ? Rest::post : Rest::nothing;
    case STEP_POST:
      return Rest::post;
    case STEP_CLOSE:
      if (!begun) marks &= ~MARK_OPEN;
      return Rest::nothing;
    case STEP_WAIT:
      return Rest::wait;
    case STEP_CREDIT:
      w.expected = g.flag(*count - 1);
      w.want = Want::at_least;
      return *count > 1 ? Rest::wait : Rest::nothing;
    case STEP_RELEASED:
      w.want = Want::at_least;
      return *count > 0 ? Rest::wait : Rest::nothing;
    case STEP_ARRIVE:
      w.word = g.arrivals() + g.rank;
      return Rest::post;
    case STEP_MEET:
      w.word = g.arrivals() + s.peer;
      return Rest::wait;
    case STEP_CATCH_UP: {
      const Flag last = unpack(load_acquire_sys(g.word(g.rank, s.word)));
      if (last.generation == g.generation()) *count += uint64_t(int64_t(int32_t(last.epoch - uint32_t(*count))));
      return Rest::nothing;
    }
    case STEP_FINISH:
      g.state[STATE_CALLS] += 1;
      g.state[STATE_MOVED] += p.moved_bytes;
      return Rest::nothing;
  }
  return Rest::nothing;
}

// Whether the hook is asked before what is left of a step: not about what a rank says to itself. A call's beginning is behind
// it already; a piece that came is told when its flag was seen.
__device__ __forceinline__ bool is_asked(const Group& g, const Step& s, Rest rest) {
  if (g.desk == 0 || s.op == STEP_WAIT) return false;
  return s.op == STEP_START || (rest != Rest::nothing && s.peer != g.rank);
}

// Asks about a lane's step, and gives the question's number. Not inlined, so that its callers keep what they have in registers.
__device__ __noinline__ uint64_t ask(const StepsParams& p) {
  const Group g = group_of(p, p.signature);
  const Step s = step_of(p.steps[threadIdx.x]);
  // A release is waited for on behalf of the next signal.
  const uint64_t epoch = g.count(s.counter) + (s.op == STEP_RELEASED ? 1 : 0);
  return ask(g, threadIdx.x, p.steps[threadIdx.x], epoch);
}

// Goes on with a step as far as it can: hears the answer to what was asked, posts, or takes a look. `w.end` says whether that
// was all.
__device__ inline void go_on(const StepsParams& p, const Group& g, const Step& s, Rest& rest, uint64_t& asked, Waiting& w) {
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
      if (w.end == End::there && s.op == STEP_WAIT && g.desk != 0) {
        rest = Rest::nothing;
        w.end = End::going_on;
        w.looks = 0;
        asked = ask(p);
      }
      return;
    case Rest::nothing:
      w.end = End::there;
  }
}

// All steps, by one warp. False if the group was stopped.
__device__ inline bool carry_out_all(const StepsParams& p, const Group& g) {
  constexpr uint32_t everybody = 0xffffffffu;
  const uint32_t lane = threadIdx.x;
  if (__any_sync(everybody, is_stopped(g))) {
    if (lane == 0) stop_all(g);
    return false;
  }
  const Step mine = step_of(lane < p.count ? p.steps[lane] : 0);
  const uint32_t phases = p.count == 0 ? 0 : step_of(p.steps[p.count - 1]).phase + 1;
  for (uint32_t phase = 0; phase < phases; ++phase) {
    Waiting w{};
    w.end = End::there;
    Rest rest = Rest::nothing;
    uint64_t asked = 0;
    if (lane < p.count && mine.phase == phase) {
      rest = carry_out(p, g, mine, w);
      if (is_asked(g, mine, rest)) asked = ask(p);
    }
    // All lanes go on in turn, so that none keeps another from seeing its flag or its answer.
    uint32_t failed;
    do {
      if (w.end == End::going_on) go_on(p, g, mine, rest, asked, w);
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
