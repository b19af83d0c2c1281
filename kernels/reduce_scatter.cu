// Reduce-scatters that push, as one kernel (push.cuh): every rank pushes each share of its input to its owner, who combines those of
// all ranks in rank order. It is the first shot of an all-reduce in two; shares may differ, and be nothing. What does not fit a buffer goes
// in pieces, one kernel each.
//
// A rank tells every peer of its arrival and waits for all of theirs, whether or not they have a share. So the buffers' turn is
// safe, as in push.cuh.
#include "sums.cuh"

namespace brigade {

__device__ inline void poison_outputs(const ReduceScatterParams& p) {
  poison(p.out, p.out_bytes, p.poison, threadIdx.x, blockDim.x);
}

}  // namespace brigade

using namespace brigade;

template <uint32_t In, uint32_t Out, int Most>
struct ReduceScatter : Sums<ReduceScatterParams, In, Out, Most> {
  using Base = Sums<ReduceScatterParams, In, Out, Most>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped, Base::slots, Base::peer, Base::reduce;
  using typename Base::Sum;

  __device__ __forceinline__ uint32_t granules(uint32_t owner) const {
    return uint32_t((p.elements[owner] + lanes<In> - 1) / lanes<In>);
  }

  // Elements from granule `i` of a share on, at most a granule.
  __device__ __forceinline__ uint32_t left(uint32_t owner, uint32_t i) const {
    const uint64_t all = p.elements[owner] - uint64_t(i) * lanes<In>;
    return all < lanes<In> ? uint32_t(all) : lanes<In>;
  }

  __device__ __forceinline__ uint4 input(uint32_t owner, uint32_t i) const {
    const uint64_t from = p.from + p.first[owner] * (16 / lanes<In>);
    const uint32_t count = left(owner, i);
    if (count == lanes<In> && from % 16 == 0) return *reinterpret_cast<const uint4*>(from + 16ull * i);
    return narrow_input<In>(from, uint64_t(i) * lanes<In>, count);
  }

  __device__ __forceinline__ void output(uint32_t i, const Sum& sum) const {
    const uint32_t count = left(p.rank, i);
    if (count < lanes<In> || p.out % 16 != 0) {
      return narrow_output<In, Out>(p.out, uint64_t(i) * lanes<In>, count, sum);
    }
#pragma unroll
    for (uint32_t k = 0; k < Sum::parts; ++k) reinterpret_cast<uint4*>(p.out)[uint64_t(i) * Sum::parts + k] = sum.part[k];
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const ReduceScatterParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const ReduceScatter all(p, use, buffer, flag);
    bool there = true;
    const uint32_t share = all.granules(p.rank);
    for (uint32_t j = threadIdx.x; j < share && there; j += blockDim.x) {
      Sum sum;
      there = all.reduce(all.slots(p.rank, buffer) + 16ull * j, share, make_uint4(0, 0, 0, 0), p.op, false, sum);
    }
    all.have_come(0);
    return there;
  }

  __device__ __forceinline__ void run() {
    const uint32_t mine = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    bool failed = stopped, herald = this->is_herald();
    this->announce();
    for (uint32_t j = mine; j < p.share; j += threads) {
#pragma unroll
      for (int d = 1; d < Most; ++d) {
        if (d >= p.size) continue;
        const uint32_t owner = peer(d), share = granules(owner);
        if (j >= share) continue;
        push(slots(owner, buffer) + 16ull * (uint64_t(p.size - 1 - d) * share + j), without_sentinel<In>(input(owner, j)));
      }
    }
    this->empty();
    const uint32_t share = granules(p.rank);
    this->count((p.size - 1) * share);
    if (p.desk != 0) failed |= !await(p, use, buffer, flag);
    for (uint32_t j = mine; j < share && !failed; j += threads) {
      Sum sum;
      failed = !reduce(slots(p.rank, buffer) + 16ull * j, share, input(p.rank, j), p.op, herald, sum);
      herald = false;
      if (!failed) output(j, sum);
    }
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

// As many blocks find room as those of all-reduces.
#define REDUCE_SCATTER(NAME, IN, OUT, MOST)                                               \
  extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)                     \
      brigade_reduce_scatter_##NAME##_##MOST(const __grid_constant__ ReduceScatterParams p) { \
    wait_for_previous_kernel();                                                           \
    let_next_kernel_start();                                                              \
    ReduceScatter<IN, OUT, MOST>(p).run();                                                \
  }

#define FOR_RANKS(NAME, IN, OUT)   \
  REDUCE_SCATTER(NAME, IN, OUT, 2) \
  REDUCE_SCATTER(NAME, IN, OUT, 4) \
  REDUCE_SCATTER(NAME, IN, OUT, 8)

FOR_RANKS(f32_f32, F32, F32)
FOR_RANKS(f16_f16, F16, F16)
FOR_RANKS(bf16_bf16, BF16, BF16)
FOR_RANKS(f16_f32, F16, F32)
FOR_RANKS(bf16_f32, BF16, F32)
