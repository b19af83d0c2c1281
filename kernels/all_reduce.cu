// All-reduces that push, as one kernel (push.cuh). In one shot every rank pushes its input to every rank, and all reduce all of
// it. In two, every rank pushes each share of its input to the rank that reduces it, and that pushes the result to every rank.
// Either way values are combined in rank order, so both give the same bits.
//
// A thread does the same granules at every stage, on all ranks, so no thread waits for another of its block.
#include <type_traits>

#include "combine.cuh"
#include "push.cuh"
#include "types.cuh"

using namespace brigade;

// Elements of a granule of the input.
template <uint32_t In>
constexpr uint32_t lanes = In == F32 ? 4 : 8;

// A word of canonical NaNs.
template <uint32_t In>
constexpr uint32_t nan_word = In == F32 ? 0x7FC00000u : In == BF16 ? 0x7FC07FC0u : 0x7E007E00u;

template <uint32_t In>
__device__ __forceinline__ uint4 without_sentinel(uint4 v) {
  constexpr uint32_t nan = nan_word<In>;
  return make_uint4(v.x == sentinel ? nan : v.x, v.y == sentinel ? nan : v.y, v.z == sentinel ? nan : v.z,
                    v.w == sentinel ? nan : v.w);
}

template <uint32_t In>
__device__ __forceinline__ void values(uint4 v, float (&x)[lanes<In>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (In == F32) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 two = widen(In, words[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
}

// A granule's result, in 16-byte parts.
template <uint32_t In, uint32_t Out>
struct Result {
  static constexpr uint32_t parts = Out == F32 ? lanes<In> / 4 : 1;
  uint4 part[parts];

  __device__ __forceinline__ void set(const float (&x)[lanes<In>]) {
    if constexpr (Out == F32) {
#pragma unroll
      for (uint32_t i = 0; i < parts; ++i) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = __float_as_uint(canonical(x[4 * i + k]));
        part[i] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    } else {
      part[0] = make_uint4(narrow(Out, x[0], x[1]), narrow(Out, x[2], x[3]), narrow(Out, x[4], x[5]), narrow(Out, x[6], x[7]));
    }
  }
};

template <uint32_t In, uint32_t Out, int Most, bool TwoShot>
struct AllReduce : Pushing<AllReduceParams> {
  using Pushing::Pushing;
  using Sum = Result<In, Out>;
  static constexpr uint32_t in_bytes = In == F32 ? 4 : 2, out_bytes = Out == F32 ? 4 : 2;

  // Whether granule `i` is whole, and lies as the widest accesses want it.
  __device__ __forceinline__ bool is_wide(uint32_t i) const {
    return (uint64_t(i) + 1) * lanes<In> <= p.elements && (p.from | p.out) % 16 == 0;
  }

  __device__ __forceinline__ uint4 input(uint32_t i) const {
    return is_wide(i) ? *reinterpret_cast<const uint4*>(p.from + 16ull * i) : narrow_input(p, i);
  }

  // Not inlined, as all that is rare: what is not fetched between two stores does not hold up the second.
  static __device__ __noinline__ uint4 narrow_input(const AllReduceParams& p, uint32_t i) {
    uint32_t words[4] = {};
    for (uint32_t k = 0; k < lanes<In> && uint64_t(i) * lanes<In> + k < p.elements; ++k) {
      const uint64_t at = p.from + in_bytes * (uint64_t(i) * lanes<In> + k);
      if constexpr (In == F32) {
        words[k] = *reinterpret_cast<const uint32_t*>(at);
      } else {
        words[k / 2] |= uint32_t(*reinterpret_cast<const uint16_t*>(at)) << (k % 2 * 16);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  static __device__ __forceinline__ uint64_t place(const AllReduceParams& p, uint32_t i) {
    return p.out + uint64_t(out_bytes) * lanes<In> * i;
  }

  __device__ __forceinline__ void output(uint32_t i, const Sum& sum) const {
    if (!is_wide(i)) return narrow_output(p, i, sum);
#pragma unroll
    for (uint32_t k = 0; k < Sum::parts; ++k) reinterpret_cast<uint4*>(place(p, i))[k] = sum.part[k];
  }

  static __device__ __noinline__ void narrow_output(const AllReduceParams& p, uint32_t i, Sum sum) {
    using Element = std::conditional_t<Out == F32, uint32_t, uint16_t>;
    const Element* from = reinterpret_cast<const Element*>(sum.part);
    for (uint32_t k = 0; k < lanes<In> && uint64_t(i) * lanes<In> + k < p.elements; ++k) {
      reinterpret_cast<Element*>(place(p, i))[k] = from[k];
    }
  }

  // By other operations than sums.
  struct Values {
    float x[lanes<In>];
  };
  static __device__ __noinline__ Values combined(uint32_t op, Values a, uint4 with) {
    float y[lanes<In>];
    values<In>(with, y);
    for (uint32_t k = 0; k < lanes<In>; ++k) a.x[k] = combine(op, a.x[k], y[k]);
    return a;
  }
  static __device__ __noinline__ Values averaged(uint32_t size, Values a) {
    for (uint32_t k = 0; k < lanes<In>; ++k) a.x[k] = brigade::finish(average, size, a.x[k]);
    return a;
  }

  // Combines granule `own` of this rank with those of its peers, which lie `stride` granules apart at `slots`, in the order of
  // their distance from this rank. False if they do not come.
  // A herald waits for its peer's arrival too.
  __device__ __forceinline__ bool reduce(uint64_t slots, uint32_t stride, uint4 own, bool herald, Sum& sum) const {
    uint4 got[Most];
    const auto look = [&] {
      const uint64_t seen = arrived(herald);
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (r >= p.size || r == p.rank) continue;
        const uint32_t distance = r > p.rank ? r - p.rank : r + p.size - p.rank;
        got[r] = peek(slots + 16ull * stride * (distance - 1));
      }
      bool all = seen == flag;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (r >= p.size || r == p.rank) continue;
        if (!is_there(got[r])) all = false;
      }
      return all;
    };
    const auto missing = [&] {
      uint32_t who = herald ? threadIdx.x : p.rank;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (r < p.size && r != p.rank && !is_there(got[r])) who = r;
      }
      return who;
    };
    if (!wait(missing, look)) return false;
#pragma unroll
    for (int r = 0; r < Most; ++r) {
      if (r == p.rank) got[r] = own;
    }
    Values all;
    values<In>(got[0], all.x);
    const bool adds = p.op == Op::sum || p.op == average;
#pragma unroll
    for (int r = 1; r < Most; ++r) {
      if (r >= p.size) continue;
      if (adds) {
        float y[lanes<In>];
        values<In>(got[r], y);
#pragma unroll
        for (uint32_t k = 0; k < lanes<In>; ++k) all.x[k] = __fadd_rn(all.x[k], y[k]);
      } else {
        all = combined(p.op, all, got[r]);
      }
    }
    if (p.op == average) all = averaged(p.size, all);
    sum.set(all.x);
    return true;
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const AllReduceParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const AllReduce all(p, use, buffer, flag);
    bool there = true;
    const uint32_t granules = TwoShot ? p.share : p.granules, first = TwoShot ? p.rank * p.share : 0;
    for (uint32_t i = threadIdx.x; i < granules && first + i < p.granules && there; i += blockDim.x) {
      Sum sum;
      there = all.reduce(all.slots(p.rank, buffer) + 16ull * i, granules, make_uint4(0, 0, 0, 0), false, sum);
    }
    all.have_come(0);
    return there;
  }

  __device__ __forceinline__ void run() {
    const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    bool failed = stopped, herald = is_herald();
    announce();
    if constexpr (!TwoShot) {
      for (uint32_t i = first; i < p.granules; i += threads) {
        const uint4 v = without_sentinel<In>(input(i));
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          if (d < p.size) push(slots(peer(d), buffer) + 16ull * (uint64_t(p.size - 1 - d) * p.granules + i), v);
        }
      }
      empty();
      count((p.size - 1) * p.granules);
      if (p.desk != 0) failed |= !await(p, use, buffer, flag);
      const uint64_t own = slots(p.rank, buffer);
      for (uint32_t i = first; i < p.granules && !failed; i += threads) {
        Sum sum;
        failed = !reduce(own + 16ull * i, p.granules, input(i), herald, sum);
        herald = false;
        if (!failed) output(i, sum);
      }
    } else {
      const uint32_t share = p.share;
      for (uint32_t j = first; j < share; j += threads) {
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          const uint32_t owner = peer(d), i = owner * share + j;
          if (d >= p.size || i >= p.granules) continue;
          push(slots(owner, buffer) + 16ull * (uint64_t(p.size - 1 - d) * share + j), without_sentinel<In>(input(i)));
        }
      }
      empty();
      count((p.size - 1) * share * (1 + Sum::parts));
      if (p.desk != 0) failed |= !await(p, use, buffer, flag);
      const uint64_t own = slots(p.rank, buffer);
      // Results lie behind the shares.
      const uint64_t results = 16ull * (p.size - 1) * share;
      for (uint32_t j = first; j < share && !failed; j += threads) {
        const uint32_t i = p.rank * share + j;
        if (i >= p.granules) break;
        Sum sum;
        failed = !reduce(own + 16ull * j, share, input(i), herald, sum);
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
      for (uint32_t j = first; j < share && !failed; j += threads) {
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          const uint32_t owner = peer(d), i = owner * share + j;
          if (d >= p.size || i >= p.granules || failed) continue;
          const uint64_t at = own + results + 16ull * (uint64_t(d - 1) * share + j) * Sum::parts;
          Sum sum;
          failed = !wait([&] { return owner; }, [&] {
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
    if (herald && !failed) failed = !wait([] { return threadIdx.x; }, [&] { return arrived(true) == flag; });
    finish(failed);
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
