// One post and one bounded wait, alone: what a device runs to show that its flags arrive and that its waits end.
#include "fault.cuh"
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

extern "C" __global__ void brigade_probe_post(const __grid_constant__ PostParams p) {
  wait_for_previous_kernel();
  const uint64_t start_ns = globaltimer_ns();
  while (globaltimer_ns() - start_ns < p.delay_ns) {
  }
  store_release_sys(reinterpret_cast<uint64_t*>(p.flag), p.value);
}

extern "C" __global__ void brigade_probe_wait(const __grid_constant__ WaitParams p) {
  wait_for_previous_kernel();
  uint32_t* abort_word = reinterpret_cast<uint32_t*>(p.abort);
  const Waited w = wait_flag(reinterpret_cast<const uint64_t*>(p.flag), p.expected, Want::exactly, abort_word,
                             p.timeout_ns);
  if (w.outcome != Outcome::reached) {
    FaultRecord what{};
    what.kind = uint32_t(w.outcome);
    what.operation = p.operation;
    what.rank = p.rank;
    what.peer = p.peer;
    what.slot = p.slot;
    what.generation = unpack(p.expected).generation;
    what.expected = p.expected;
    what.seen = w.seen;
    what.waited_ns = w.waited_ns;
    what.call = p.call;
    record_fault(reinterpret_cast<FaultRecord*>(p.fault), what);
    store_release_sys(abort_word, 1u);
  }
  *reinterpret_cast<uint32_t*>(p.outcome) = uint32_t(w.outcome);
}
