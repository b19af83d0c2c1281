// All-reduce, residual and RMSNorm (Zhang and Sennrich) in one kernel that pushes (push.cuh; fused as TensorRT-LLM does). A block
// takes whole rows. In one shot it reduces them all; in two, the rows of its rank, whose sums it pushes to every rank, and then
// it takes the others' sums.
//
// sum = round(all-reduce) + residual, rounded; normed = sum / sqrt(mean(sum^2) + eps) * weight, each step one operation in f32.
// Squares are added granule by granule, and granules by a tree of adjacent pairs, so that the host's are the same bits.
#include "sums.cuh"

namespace brigade {

__device__ inline void poison_outputs(const AllReduceNormParams& p) {
  for (int i = 0; i < 3; ++i) poison(p.poisoned[i], p.poisoned_bytes[i], p.poison[i], threadIdx.x, blockDim.x);
}

}  // namespace brigade

using namespace brigade;

// Granules of a row that a thread has.
constexpr uint32_t most_granules = NORM_COLUMNS / 8 / NORM_THREADS;
// Leaves of the tree above a warp's.
constexpr uint32_t most_groups = most_granules * NORM_THREADS / 32;

__device__ __forceinline__ float whole_tree(float x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
  return x;
}

__device__ __forceinline__ uint8_t quantized(float x, float scale, bool fp8) {
  const float q = scale == 0.0f ? 0.0f : __fdiv_rn(x, scale);
  if (fp8) return fp8_bits(q);
  if (isnan(q)) return 0;
  return uint8_t(int8_t(fminf(fmaxf(rintf(q), -127.0f), 127.0f)));
}

template <uint32_t In, int Most, bool TwoShot>
struct AllReduceNorm : Sums<AllReduceNormParams, In, In, Most> {
  using Base = Sums<AllReduceNormParams, In, In, Most>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped, Base::slots, Base::peer, Base::reduce;
  using typename Base::Sum;
  static constexpr uint32_t element_bytes = In == F32 ? 4 : 2;

  __device__ __forceinline__ bool is_whole(uint32_t g) const { return p.wide != 0 && (g + 1) * lanes<In> <= p.hidden; }

  __device__ __forceinline__ uint32_t left(uint32_t g) const {
    const uint32_t all = p.hidden - g * lanes<In>;
    return all < lanes<In> ? all : lanes<In>;
  }

  __device__ __forceinline__ uint4 read(uint64_t array, uint32_t row, uint32_t g) const {
    const uint64_t first = uint64_t(row) * p.hidden + g * lanes<In>;
    return is_whole(g) ? *reinterpret_cast<const uint4*>(array + element_bytes * first) : narrow_input<In>(array, first, left(g));
  }

  __device__ __forceinline__ void write(uint64_t array, uint32_t row, uint32_t g, uint4 v) const {
    const uint64_t first = uint64_t(row) * p.hidden + g * lanes<In>;
    Sum sum;
    sum.part[0] = v;
    if (!is_whole(g)) return narrow_output<In, In>(array, first, left(g), sum);
    *reinterpret_cast<uint4*>(array + element_bytes * first) = v;
  }

  // What comes behind the sums of a row, granules `g` of this thread among them, by all threads of the block.
  __device__ __forceinline__ void norm(uint32_t row, uint4 (&h)[most_granules]) const {
    // All have read those of the row before: they met when they took this one.
    __shared__ float mine[most_groups];
    const uint32_t lane = threadIdx.x % 32, count = (p.granules + 31) / 32;
#pragma unroll
    for (uint32_t k = 0; k < most_granules; ++k) {
      const uint32_t g = k * blockDim.x + threadIdx.x;
      if (k * blockDim.x >= p.granules) break;
      float q = 0;
      if (g < p.granules) {
        float x[lanes<In>], r[lanes<In>];
        values<In>(h[k], x);
        values<In>(read(p.residual, row, g), r);
#pragma unroll
        for (uint32_t i = 0; i < lanes<In>; ++i) x[i] = __fadd_rn(x[i], r[i]);
        Sum sum;
        sum.set(x);
        h[k] = sum.part[0];
        write(p.sum, row, g, h[k]);
        values<In>(h[k], x);
        q = __fmul_rn(x[0], x[0]);
        const uint32_t whole = left(g);
#pragma unroll
        for (uint32_t i = 1; i < lanes<In>; ++i) {
          if (i < whole) q = __fadd_rn(q, __fmul_rn(x[i], x[i]));
        }
      }
      q = whole_tree(q);
      if (lane == 0 && g / 32 < count) mine[g / 32] = q;
    }
    __syncthreads();
    float q[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) q[i] = 4 * lane + i < count ? mine[4 * lane + i] : 0.0f;
    const float squares = whole_tree(__fadd_rn(__fadd_rn(q[0], q[1]), __fadd_rn(q[2], q[3])));
    const float inverse =
        __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(p.hidden)), __uint_as_float(p.eps))));
    uint32_t greatest = 0;
#pragma unroll
    for (uint32_t k = 0; k < most_granules; ++k) {
      const uint32_t g = k * blockDim.x + threadIdx.x;
      if (k * blockDim.x >= p.granules) break;
      if (g >= p.granules) continue;
      float x[lanes<In>], w[lanes<In>];
      values<In>(h[k], x);
      values<In>(read(p.weight, 0, g), w);
#pragma unroll
      for (uint32_t i = 0; i < lanes<In>; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), w[i]);
      Sum normed;
      normed.set(x);
      h[k] = normed.part[0];
      if (p.form == NORM_PLAIN) {
        write(p.normed, row, g, h[k]);
      } else if (p.form == NORM_FP8) {
        quantize(row, g, h[k], __uint_as_float(p.scale), true);
      } else {
        values<In>(h[k], x);
        const uint32_t whole = left(g);
        for (uint32_t i = 0; i < lanes<In>; ++i) {
          if (i < whole) greatest = max(greatest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
        }
      }
    }
    if (p.form == NORM_INT8) by_row(row, greatest, h);
  }

  // int8, by the greatest magnitude of the row.
  __device__ __forceinline__ void by_row(uint32_t row, uint32_t greatest, const uint4 (&h)[most_granules]) const {
    __shared__ uint32_t mine[NORM_THREADS / 32];
    greatest = __reduce_max_sync(0xFFFFFFFFu, greatest);
    if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = greatest;
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    greatest = __reduce_max_sync(0xFFFFFFFFu, lane < blockDim.x / 32 ? mine[lane] : 0);
    const float scale = canonical(__fdiv_rn(__uint_as_float(greatest), 127.0f));
    if (threadIdx.x == 0) reinterpret_cast<float*>(p.scales)[row] = scale;
#pragma unroll
    for (uint32_t k = 0; k < most_granules; ++k) {
      const uint32_t g = k * blockDim.x + threadIdx.x;
      if (g < p.granules) quantize(row, g, h[k], scale, false);
    }
  }

  __device__ __forceinline__ void quantize(uint32_t row, uint32_t g, uint4 v, float scale, bool fp8) const {
    float x[lanes<In>];
    values<In>(v, x);
    uint8_t* to = reinterpret_cast<uint8_t*>(p.normed) + uint64_t(row) * p.hidden + g * lanes<In>;
    uint32_t words[lanes<In> / 4] = {};
#pragma unroll
    for (uint32_t i = 0; i < lanes<In>; ++i) words[i / 4] |= uint32_t(quantized(x[i], scale, fp8)) << (i % 4 * 8);
    if (is_whole(g)) {
#pragma unroll
      for (uint32_t i = 0; i < lanes<In> / 4; ++i) reinterpret_cast<uint32_t*>(to)[i] = words[i];
    } else {
      for (uint32_t i = 0; i < left(g); ++i) to[i] = uint8_t(words[i / 4] >> (i % 4 * 8));
    }
  }

  // This rank's rows in stage 1, of which slots have `rows`.
  __device__ __forceinline__ uint64_t slot(uint32_t to, uint32_t which, uint32_t rows, uint32_t j, uint32_t g) const {
    return slots(to, buffer) + 16ull * ((uint64_t(which) * rows + j) * p.granules + g);
  }

  // Takes the sums of row `j` of those that lie here. False for all threads if they do not come.
  __device__ __forceinline__ bool take(uint32_t row, uint32_t j, uint32_t rows, bool& herald, uint4 (&h)[most_granules]) const {
    bool there = true;
#pragma unroll
    for (uint32_t k = 0; k < most_granules; ++k) {
      const uint32_t g = k * blockDim.x + threadIdx.x;
      if (g >= p.granules || !there) break;
      Sum sum;
      there = reduce(slot(p.rank, 0, rows, j, g), rows * p.granules, read(p.from, row, g), Op::sum, herald, sum);
      herald = false;
      h[k] = sum.part[0];
    }
    return __syncthreads_and(there);
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const AllReduceNormParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const AllReduceNorm all(p, use, buffer, flag);
    bool there = true, herald = false;
    const uint32_t rows = TwoShot ? p.share : p.rows, before = TwoShot ? p.rank * p.share : 0;
    for (uint32_t j = 0; j < rows && before + j < p.rows && there; ++j) {
      uint4 h[most_granules];
      there = all.take(before + j, j, rows, herald, h);
    }
    all.have_come(0);
    return there;
  }

  __device__ __forceinline__ void run() {
    bool failed = stopped, herald = this->is_herald();
    this->announce();
    const uint32_t rows = TwoShot ? p.share : p.rows;
    for (uint32_t j = blockIdx.x; j < rows; j += gridDim.x) {
      for (uint32_t g = threadIdx.x; g < p.granules; g += blockDim.x) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (!TwoShot) v = without_sentinel<In>(read(p.from, j, g));
#pragma unroll
        for (int d = 1; d < Most; ++d) {
          const uint32_t owner = peer(d), row = owner * rows + j;
          if (d >= p.size || (TwoShot && row >= p.rows)) continue;
          if (TwoShot) v = without_sentinel<In>(read(p.from, row, g));
          push(slot(owner, p.size - 1 - d, rows, j, g), v);
        }
      }
    }
    this->empty();
    this->count((p.size - 1) * rows * p.granules * (TwoShot ? 2 : 1));
    if (p.desk != 0) failed |= !await(p, use, buffer, flag);
    failed = __syncthreads_or(failed);
    const uint32_t before = TwoShot ? p.rank * p.share : 0;
    uint4 h[most_granules];
    for (uint32_t j = blockIdx.x; j < rows && before + j < p.rows && !failed; j += gridDim.x) {
      failed = !take(before + j, j, rows, herald, h);
      if (failed) break;
      if (TwoShot) {
#pragma unroll
        for (uint32_t k = 0; k < most_granules; ++k) {
          const uint32_t g = k * blockDim.x + threadIdx.x;
          if (g >= p.granules) break;
#pragma unroll
          for (int d = 1; d < Most; ++d) {
            if (d < p.size) push(slot(peer(d), 2 * (p.size - 1) - d, rows, j, g), h[k]);
          }
        }
      }
      norm(before + j, h);
    }
    for (uint32_t j = blockIdx.x; TwoShot && j < rows && !failed; j += gridDim.x) {
      for (uint32_t d = 1; d < p.size && !failed; ++d) {
        const uint32_t owner = peer(d), row = owner * rows + j;
        if (row >= p.rows) continue;
        bool there = true;
#pragma unroll
        for (uint32_t k = 0; k < most_granules; ++k) {
          const uint32_t g = k * blockDim.x + threadIdx.x;
          if (g >= p.granules || !there) break;
          const uint64_t at = slot(p.rank, p.size - 1 + d - 1, rows, j, g);
          there = this->wait([&] { return owner; }, [&] {
            h[k] = peek(at);
            return is_there(h[k]);
          });
        }
        failed = !__syncthreads_and(there);
        if (!failed) norm(row, h);
      }
    }
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

#define NORM(NAME, IN, MOST, TWO)                                                              \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS)                              \
      brigade_all_reduce_norm_##NAME##_##MOST(const __grid_constant__ AllReduceNormParams p) { \
    wait_for_previous_kernel();                                                                \
    let_next_kernel_start();                                                                   \
    AllReduceNorm<IN, MOST, TWO>(p).run();                                                     \
  }

#define FOR_RANKS(NAME, IN, TWO) \
  NORM(NAME, IN, 4, TWO)         \
  NORM(NAME, IN, 8, TWO)

#define FOR_ALGORITHMS(NAME, IN)      \
  FOR_RANKS(one_##NAME, IN, false)    \
  FOR_RANKS(two_##NAME, IN, true)

FOR_ALGORITHMS(f32, F32)
FOR_ALGORITHMS(f16, F16)
FOR_ALGORITHMS(bf16, BF16)
