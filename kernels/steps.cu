// Carries out the steps of a protocol: the posts and waits that brigade-sync's machines give as data, with counters that live
// here in place of the host's.
#include "poison.cuh"
#include "steps.cuh"

using namespace brigade;

struct Step {
  uint32_t op, phase, counter, slot, peer, word;
};

__device__ __forceinline__ Step step_of(uint64_t bits) {
  return {uint32_t(bits >> 60),          uint32_t(bits >> 56 & 0xf),   uint32_t(bits >> 40 & 0xffff),
          uint32_t(bits >> 28 & 0xfff), uint32_t(bits >> 20 & 0xff), uint32_t(bits & 0xfffff)};
}

// What is done at once. True if the step waits, with what it waits for in `w`.
__device__ inline bool carry_out(const StepsParams& p, const Group& g, const Step& s, Waiting& w) {
  uint64_t* count = g.counter(s.counter);
  uint64_t& marks = count[1];
  const bool begun = (marks & MARK_BEGUN) != 0;
  w = {s.word, g.flag(*count), Want::exactly, s.peer, s.slot, End::going_on, 0, s.peer, 0, 0, 0};
  switch (s.op) {
    case STEP_START:
      g.state[STATE_STARTED] = globaltimer_ns();
      return false;
    case STEP_TAKE:
      if (begun) {
        marks &= ~MARK_BEGUN;
        return false;
      }
      [[fallthrough]];  // Else it is a use like any other.
    case STEP_ADVANCE:
      *count += 1;
      marks |= MARK_OPEN;
      return false;
    case STEP_RESERVE:
      if (!begun) {
        *count += 1;
        marks |= MARK_OPEN | MARK_BEGUN;
      }
      return false;
    case STEP_POST_OPEN:
      if (marks != MARK_OPEN) return false;
      [[fallthrough]];
    case STEP_POST:
      store_release_sys(g.word(s.peer, s.word), w.expected);
      return false;
    case STEP_CLOSE:
      if (!begun) marks &= ~MARK_OPEN;
      return false;
    case STEP_WAIT:
      return true;
    case STEP_CREDIT:
      w.expected = g.flag(*count - 1);
      w.want = Want::at_least;
      return *count > 1;
    case STEP_RELEASED:
      w.want = Want::at_least;
      return *count > 0;
    case STEP_ARRIVE:
      store_release_sys(g.word(s.peer, g.arrivals() + g.rank), w.expected);
      return false;
    case STEP_MEET:
      w.word = g.arrivals() + s.peer;
      return true;
    case STEP_CATCH_UP: {
      const Flag last = unpack(load_acquire_sys(g.word(g.rank, s.word)));
      if (last.generation == g.generation()) *count += uint64_t(int64_t(int32_t(last.epoch - uint32_t(*count))));
      return false;
    }
    case STEP_FINISH:
      g.state[STATE_CALLS] += 1;
      g.state[STATE_MOVED] += p.moved_bytes;
      return false;
  }
  return false;
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
    const bool waits = lane < p.count && mine.phase == phase && carry_out(p, g, mine, w);
    if (!waits) w.end = End::there;
    // All lanes look in turn, so that none keeps another from seeing its flag.
    while (__any_sync(everybody, w.end == End::going_on)) {
      if (w.end == End::going_on) look(g, w);
      if (__any_sync(everybody, w.end != End::going_on && w.end != End::there)) break;
    }
    const uint32_t failed = __ballot_sync(everybody, w.end != End::going_on && w.end != End::there);
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
