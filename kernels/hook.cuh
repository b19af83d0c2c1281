// Fault injection: before and after steps of a protocol, kernels ask the hook that the host was given. Questions and answers
// go through slots in memory that both see, the desk; whoever asks has a slot to itself. How long a rank is held up there is
// the host's business.
#pragma once
#include "steps.cuh"

namespace brigade {

// What the hook wants; or that the group was stopped before it said so.
enum class Answer : uint32_t { none = 0, go_on = ANSWER_GO_ON, leave_out = ANSWER_LEAVE_OUT, stopped = 3 };

// A step of this kind, as the host packs those of a protocol.
__device__ __forceinline__ uint64_t step_bits(uint64_t op, uint32_t peer, uint32_t word) {
  return op << 60 | uint64_t(peer) << 20 | word;
}

__device__ __forceinline__ uint64_t* slot_of(const Group& g, uint32_t i) {
  return reinterpret_cast<uint64_t*>(g.desk) + i * QUESTION_WORDS;
}

// Asks about a step, in slot `i` of those that this launch has. Gives the question's number, never 0; an answer bears it too, so
// that one that nobody waited for is not taken for another's.
__device__ inline uint64_t ask(const Group& g, uint32_t i, uint64_t step, uint64_t epoch) {
  uint64_t* slot = slot_of(g, i);
  const uint64_t number = load_relaxed_sys(slot + QUESTION_ASKED) + 1;
  slot[QUESTION_STEP] = step;
  slot[QUESTION_EPOCH] = epoch;
  slot[QUESTION_CALL] = g.call();
  slot[QUESTION_OPERATION] = g.operation;
  store_release_sys(slot + QUESTION_ASKED, number);
  return number;
}

// Takes one look at the answer; before the first, `w.looks` is 0, and afterwards again. `w.end` changes if the group was stopped
// meanwhile, or if the hook takes longer than a call may.
__device__ inline Answer hear(const Group& g, uint32_t i, uint64_t number, Waiting& w) {
  const uint64_t said = load_acquire_sys(slot_of(g, i) + QUESTION_ANSWER);
  if (said >> 2 == number) {
    w.looks = 0;
    return Answer(uint32_t(said & 3));
  }
  if (w.looks++ == 0) w.since_ns = globaltimer_ns();
  if (is_stopped(g)) {
    w.end = End::stopped;
  } else if (globaltimer_ns() - w.since_ns >= most_ns(g)) {
    // The rank that holds up the others is this one.
    w.end = End::timeout;
    w.blamed = g.rank;
    w.blamed_expected = w.seen = 0;
  } else if (w.looks % long_glance == 0 && is_stop_asked(g)) {
    w.end = End::stopped;
  }
  return Answer::none;
}

// Asks and spins for the answer, as one thread, in a slot of its own. Whoever is `stopped` here has given up. Not inlined, so
// that its callers keep what they have in registers.
template <typename P>
__device__ __noinline__ Answer consult(const P& p, uint32_t signature, uint64_t step, uint64_t epoch, uint32_t slot) {
  const Group g = group_of(p, signature);
  Waiting w{};
  const uint64_t number = ask(g, slot, step, epoch);
  Answer answer;
  do {
    answer = hear(g, slot, number, w);
  } while (answer == Answer::none && w.end == End::going_on);
  if (answer != Answer::none) return answer;
  give_up(g, w);
  return Answer::stopped;
}

// Waits as one thread, for the block. The hook is asked about the piece, in the block's slot: before a guard (STEP_CREDIT), and behind a flag that
// tells of data (STEP_WAIT). False if the group was stopped.
template <typename P, typename G>
__device__ inline bool wait_for(const P& p, const G& g, uint64_t op, uint64_t epoch, Waiting w, bool& failed) {
  if (threadIdx.x == 0) {
    const auto heard = [&](uint64_t at) {
      const bool asks = g.desk != 0 && op == at;
      return asks ? consult(p, g.signature, step_bits(op, w.peer, w.word), epoch, blockIdx.x) : Answer::go_on;
    };
    Answer answer = heard(STEP_CREDIT);
    if (answer == Answer::go_on) {
      do {
        look(g, w);
      } while (w.end == End::going_on);
      if (w.end == End::there) {
        answer = heard(STEP_WAIT);
      } else {
        give_up(g, w);
        answer = Answer::stopped;
      }
    }
    failed = answer == Answer::stopped;
  }
  __syncthreads();
  return !failed;
}

// Posts as one thread, unless the hook loses it. A block that is stopped here finds the stop word at its next wait.
template <typename P>
__device__ inline void post(const P& p, const Group& g, uint64_t epoch, uint32_t peer, uint32_t word, uint64_t flag) {
  if (g.desk != 0 && consult(p, g.signature, step_bits(STEP_POST, peer, word), epoch, blockIdx.x) != Answer::go_on) return;
  store_release_sys(g.word(peer, word), flag);
}

}  // namespace brigade
