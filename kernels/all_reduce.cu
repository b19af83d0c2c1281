// All-reduces that push, as one kernel (push.cuh). In one shot every rank pushes its input to every rank, and all reduce all of
// it. In two, every rank pushes each share of its input to the rank that reduces it, and that pushes the result to every rank.
// Either way values are combined in rank order, so both give the same bits.
//
// A thread does the same granules at every stage, on all ranks, so no thread waits for another of its block.
#include "sums.cuh"

using namespace brigade;

template <uint32_t In, uint32_t Out, int Most, bool TwoShot>
struct AllReduce : Sums<AllReduceParams, In, Out, Most> {
  using Base = Sums<AllReduceParams, In, Out, Most>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped, Base::slots, Base::peer, Base::reduce;
  using typename Base::Sum;

  __device__ __forceinline__ uint64_t first(uint32_t i) const { return uint64_t(i) * lanes<In>; }

  // Whether granule `i` is whole, and lies as the widest accesses want it.
  __device__ __forceinline__ bool is_wide(uint32_t i) const {
    return first(i) + lanes<In> <= p.elements && (p.from | p.out) % 16 == 0;
  }

  // Elements from granule `i` on, in 32 bits.
  __device__ __forceinline__ uint32_t left(uint32_t i) const {
    const uint64_t all = p.elements - first(i);
    return all < lanes<In> ? uint32_t(all) : lanes<In>;
  }

  __device__ __forceinline__ uint4 input(uint32_t i) const {
    return is_wide(i) ? *reinterpret_cast<const uint4*>(p.from + 16ull * i) : narrow_input<In>(p.from, first(i), left(i));
  }

  __device__ __forceinline__ void output(uint32_t i, const Sum& sum) const {
    if (!is_wide(i)) return narrow_output<In, Out>(p.out, first(i), left(i), sum);
#pragma unroll
    for (uint32_t k = 0; k < Sum::parts; ++k) reinterpret_cast<uint4*>(p.out)[uint64_t(i) * Sum::parts + k] = sum.part[k];
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const AllReduceParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const AllReduce all(p, use, buffer, flag);
    bool there = true;
    const uint32_t before = TwoShot ? p.rank * p.share : 0;
    for (uint32_t i = threadIdx.x; i < p.share && before + i < p.granules && there; i += blockDim.x) {
      Sum sum;
      there = all.reduce(all.slots(p.rank, buffer) + 16ull * i, p.share, make_uint4(0, 0, 0, 0), p.op, false, sum);
    }
    all.have_come(0);
    return there;
  }

  __device__ __forceinline__ void run() {
    const uint32_t mine = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    bool failed = stopped, herald = this->is_herald();
    this->announce();
    if constexpr (!TwoShot) {
      for (uint32_t i = mine; i < p.granules; i += threads) {
        const uint4 v = without_sentinel<In>(input(i));
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          if (d < p.size) push(slots(peer(d), buffer) + 16ull * (uint64_t(p.size - 1 - d) * p.share + i), v);
        }
      }
      this->empty();
      this->count((p.size - 1) * p.share);
      if (p.desk != 0) failed |= !await(p, use, buffer, flag);
      const uint64_t own = slots(p.rank, buffer);
      for (uint32_t i = mine; i < p.granules && !failed; i += threads) {
        Sum sum;
        failed = !reduce(own + 16ull * i, p.share, input(i), p.op, herald, sum);
        herald = false;
        if (!failed) output(i, sum);
      }
    } else {
      const uint32_t share = p.share;
      for (uint32_t j = mine; j < share; j += threads) {
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          const uint32_t owner = peer(d), i = owner * share + j;
          if (d >= p.size || i >= p.granules) continue;
          push(slots(owner, buffer) + 16ull * (uint64_t(p.size - 1 - d) * share + j), without_sentinel<In>(input(i)));
        }
      }
      this->empty();
      this->count((p.size - 1) * share * (1 + Sum::parts));
      if (p.desk != 0) failed |= !await(p, use, buffer, flag);
      const uint64_t own = slots(p.rank, buffer);
      // Results lie behind the shares.
      const uint64_t results = 16ull * (p.size - 1) * share;
      for (uint32_t j = mine; j < share && !failed; j += threads) {
        const uint32_t i = p.rank * share + j;
        if (i >= p.granules) break;
        Sum sum;
        failed = !reduce(own + 16ull * j, share, input(i), p.op, herald, sum);
        herald = false;
        if (failed) break;
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          if (d >= p.size) continue;
          const uint64_t slot = uint64_t(p.size - 1 - d) * share + j;
#pragma unroll
          for (uint32_t k = 0; k < Sum::parts; ++k) {
            push(slots(peer(d), buffer) + results + 16 * (slot * Sum::parts + k), sum.part[k]);
          }
        }
        output(i, sum);
      }
      for (uint32_t j = mine; j < share && !failed; j += threads) {
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          const uint32_t owner = peer(d), i = owner * share + j;
          if (d >= p.size || i >= p.granules || failed) continue;
          const uint64_t at = own + results + 16ull * (uint64_t(d - 1) * share + j) * Sum::parts;
          Sum sum;
          failed = !this->wait([&] { return owner; }, [&] {
            bool all = true;
#pragma unroll
            for (uint32_t k = 0; k < Sum::parts; ++k) {
              sum.part[k] = peek(at + 16 * k);
              all &= is_there(sum.part[k]);
            }
            return all;
          });
          if (!failed) output(i, sum);
        }
      }
    }
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

// Two blocks find room on a multiprocessor, as those of messages do, which have the same places.
#define ALL_REDUCE(NAME, IN, OUT, MOST, TWO)                                                             \
  extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)                                    \
      brigade_all_reduce_##NAME##_##MOST(const __grid_constant__ AllReduceParams p) {                    \
    wait_for_previous_kernel();                                                                          \
    let_next_kernel_start();                                                                             \
    AllReduce<IN, OUT, MOST, TWO>(p).run();                                                      \
  }

#define FOR_RANKS(NAME, IN, OUT, TWO) \
  ALL_REDUCE(NAME, IN, OUT, 2, TWO)   \
  ALL_REDUCE(NAME, IN, OUT, 4, TWO)   \
  ALL_REDUCE(NAME, IN, OUT, 8, TWO)

#define FOR_ALGORITHMS(NAME, IN, OUT)         \
  FOR_RANKS(one_##NAME, IN, OUT, false)       \
  FOR_RANKS(two_##NAME, IN, OUT, true)

FOR_ALGORITHMS(f32_f32, F32, F32)
FOR_ALGORITHMS(f16_f16, F16, F16)
FOR_ALGORITHMS(bf16_bf16, BF16, BF16)
FOR_ALGORITHMS(f16_f32, F16, F32)
FOR_ALGORITHMS(bf16_f32, BF16, F32)
