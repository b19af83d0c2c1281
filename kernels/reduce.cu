// Combines what all ranks have, in rank order: rank 0's value, then rank 1's, and so on, in f32, with one rounding at the end.
#include "combine.cuh"
#include "steps.cuh"
#include "types.cuh"

using namespace brigade;

extern "C" __global__ void brigade_reduce(const __grid_constant__ ReduceParams p) {
  wait_for_previous_kernel();
  if (is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state))) return;
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  const bool aligned = p.out % 16 == 0 && p.from % 16 == 0 && p.stride % 16 == 0;
  const uint64_t vectors = aligned ? p.elements / wide_elements : 0;
  for (uint64_t i = thread; i < vectors; i += threads) {
    float all[8];
    load_wide(p.from_type, p.from, i * wide_elements, all);
    for (uint32_t r = 1; r < p.parts; ++r) {
      float next[8];
      load_wide(p.from_type, p.from + r * p.stride, i * wide_elements, next);
#pragma unroll
      for (int k = 0; k < 8; ++k) all[k] = combine(p.op, all[k], next[k]);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) all[k] = finish(p.op, p.parts, all[k]);
    store_wide(p.out_type, p.out, i * wide_elements, all);
  }
  for (uint64_t i = vectors * wide_elements + thread; i < p.elements; i += threads) {
    float all = load_float(p.from_type, p.from, i);
    for (uint32_t r = 1; r < p.parts; ++r) all = combine(p.op, all, load_float(p.from_type, p.from + r * p.stride, i));
    store_float(p.out_type, p.out, i, finish(p.op, p.parts, all));
  }
}

// Writes the word `elements` to `out`; or 0, if this rank was stopped, and nobody is to take what it sends for its part.
extern "C" __global__ void brigade_reduce_sign(const __grid_constant__ ReduceParams p) {
  wait_for_previous_kernel();
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const bool stopped = is_stopped(reinterpret_cast<uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state));
  store_release_sys(reinterpret_cast<uint64_t*>(p.out), stopped ? 0 : p.elements);
}

// Compares words, one of each of `parts` machines, with that of machine `op`, and takes them away, so that none is there for the next. If one
// differs, this rank's kernels are told to stop, and `out`, which the host sees, tells which, from 1; or, with all bits set, that one did not
// come, although what should have brought it has ended, or that who should have sent it was stopped.
extern "C" __global__ void brigade_reduce_compare(const __grid_constant__ ReduceParams p) {
  wait_for_previous_kernel();
  uint64_t* stop = reinterpret_cast<uint64_t*>(p.stop);
  const uint64_t* state = reinterpret_cast<const uint64_t*>(p.state);
  // What stopped this rank may have kept words from coming.
  if (blockIdx.x != 0 || threadIdx.x != 0 || is_stopped(stop, state)) return;
  uint64_t* words = reinterpret_cast<uint64_t*>(p.from);
  const uint64_t mine = load_acquire_sys(words + p.op);
  for (uint32_t i = 0; i < p.parts; ++i) {
    if (i == p.op) continue;
    const uint64_t theirs = load_acquire_sys(words + i);
    words[i] = 0;
    if (theirs == mine) continue;
    store_release_sys(stop, state[STATE_GENERATION]);
    store_release_sys(reinterpret_cast<uint64_t*>(p.out), theirs != 0 ? uint64_t(i) + 1 : ~uint64_t(0));
    return;
  }
}
