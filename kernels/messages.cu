// Messages between pairs of ranks. A message passes through its sender's slot in the receiver's memory, in pieces that take the
// slot's two halves in turn. Every block carries its share of each piece, with a flag of its own; the credit for a piece goes
// back when the receiver's last block has read its share.
#include "copy.cuh"
#include "hook.cuh"

using namespace brigade;

// Two blocks find room on a multiprocessor, so that the groups of many ranks do.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_messages(const __grid_constant__ MessagesParams p) {
  wait_for_previous_kernel();
  __shared__ bool failed;
  const uint32_t message = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const bool receives = p.peer[message] >= 256;
  const uint32_t peer = p.peer[message] % 256;
  // Flags of data are signed by the message, arrivals by the call.
  const Group g = group_of(p, p.call_signature);
  const uint32_t generation = g.generation();
  const auto data_flag = [&](uint64_t epoch) { return pack({generation, p.signature[message], uint32_t(epoch)}); };

  if (threadIdx.x == 0) {
    failed = is_stopped(g);
    if (failed) say_stopped(g.report, g.generation());
  }
  __syncthreads();
  const uint32_t counter = p.counters + (receives ? p.size : 0) + peer;
  const uint64_t before = *g.counter(counter);
  const uint64_t pieces = p.bytes[message] == 0 ? 1 : (p.bytes[message] + p.slot_bytes - 1) / p.slot_bytes;
  const uint32_t sender = receives ? peer : p.rank;
  const uint32_t receiver = receives ? p.rank : peer;
  bool going_on = !failed;
  for (uint64_t i = 0; i < pieces && going_on; ++i) {
    const uint64_t n = before + i, start = i * p.slot_bytes;
    const uint32_t half = uint32_t(n & 1);
    const uint64_t epoch = n / 2 + 1;
    const uint64_t left = p.bytes[message] - start;
    const uint64_t bytes = left < p.slot_bytes ? left : p.slot_bytes;
    // Shares of whole 16 bytes.
    const uint64_t share = (bytes / p.blocks + 15) / 16 * 16;
    const uint64_t first = block * share < bytes ? block * share : bytes;
    const uint64_t last = first + share < bytes && block + 1 < p.blocks ? first + share : bytes;
    const uint64_t slot = g.base + receiver * g.stride + p.slots + half * p.half_bytes + sender * p.slot_bytes;
    const uint32_t flag = p.ring + (half * p.size + sender) * p.pieces + block;
    const uint32_t credits = p.ring + 2 * p.size * p.pieces + half * p.size;
    const uint64_t local = p.local[message] + start;
    if (receives) {
      going_on = wait_for(p, g, STEP_WAIT, epoch, {flag, data_flag(epoch), Want::exactly, peer, peer}, failed);
      if (!going_on) break;
      copy_bytes(local + first, slot + first, last - first, threadIdx.x, blockDim.x);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        unsigned long long* readers = reinterpret_cast<unsigned long long*>(g.state + STATE_READ + half);
        // Four bits for each peer: no more than one piece of a half is read at a time.
        const unsigned long long done = atomicAdd(readers, 1ull << (4 * peer)) >> (4 * peer) & 0xf;
        if (done + 1 == p.blocks) {
          atomicAdd(readers, 0ull - ((unsigned long long)p.blocks << (4 * peer)));
          __threadfence_system();
          post(p, g, epoch, peer, credits + p.rank, data_flag(epoch));
        }
      }
    } else {
      if (n >= 2) {
        const Waiting credit = {credits + peer, data_flag(epoch - 1), Want::at_least, peer, peer};
        going_on = wait_for(p, g, STEP_CREDIT, epoch, credit, failed);
      }
      if (!going_on) break;
      copy_bytes(slot + first, local + first, last - first, threadIdx.x, blockDim.x);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence_system();
        post(p, g, epoch, peer, flag, data_flag(epoch));
      }
    }
  }
  if (going_on && !receives && p.confirmed != 0) {
    const uint64_t n = before + pieces - 1;
    const uint32_t credits = p.ring + 2 * p.size * p.pieces + uint32_t(n & 1) * p.size;
    // No guard: nothing is written behind it.
    wait_for(p, g, STEP_MEET, 0, {credits + peer, data_flag(n / 2 + 1), Want::at_least, peer, peer}, failed);
  }
  // The last block to leave advances the counters, which the others have read by then.
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  unsigned int* out = reinterpret_cast<unsigned int*>(g.state + STATE_OUT);
  if (atomicInc(out, gridDim.x - 1) != gridDim.x - 1) return;
  for (uint32_t m = 0; m < p.count; ++m) {
    const uint32_t c = p.counters + (p.peer[m] >= 256 ? p.size : 0) + p.peer[m] % 256;
    *g.counter(c) += p.bytes[m] == 0 ? 1 : (p.bytes[m] + p.slot_bytes - 1) / p.slot_bytes;
  }
}
