// Residual and RMSNorm alone, as norm.cuh has them: what comes behind a sum that another kernel made. A block for each row.
#include "norm.cuh"

using namespace brigade;

// Rows of whole granules that threads hold in registers; the weight, too, which is the same for all rows.
template <uint32_t In>
__device__ __forceinline__ void in_registers(const ResidualNormParams& p) {
  using Rows = NormRows<ResidualNormParams, In, true>;
  constexpr Alone alone;
  uint4 weight[most_granules];
  Rows::read_row(p, alone, p.weight, 0, weight);
  for (uint32_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    uint4 h[most_granules], residual[most_granules];
    Rows::read_row(p, alone, p.from, row * p.granules, h);
    Rows::read_row(p, alone, p.residual, row * p.granules, residual);
    // All have read what they gave each other for the row before.
    __syncthreads();
    Rows::norm(p, alone, row, h, residual, weight);
  }
}

// Sums of squares as they come, of parts of a row that have the same number of leaves: added by adjacent pairs, however many they
// are. What has no partner in the end would be added to +0.
struct Pairs {
  static constexpr uint32_t levels = 32;
  float waiting[levels];
  uint32_t count = 0;

  __device__ __forceinline__ void take(float sum) {
    uint32_t level = 0;
    for (; count >> level & 1; ++level) sum = __fadd_rn(waiting[level], sum);
    waiting[level] = sum;
    ++count;
  }

  __device__ __forceinline__ float all() const {
    float sum = 0;
    for (uint32_t level = 0; count >> level != 0; ++level) {
      if (count >> level & 1) sum = __fadd_rn(waiting[level], sum);
    }
    return sum;
  }
};

// Any rows. Between the steps they lie where sums are wanted; what int8 is made of is made twice. Threads are a power of two, so that
// each part of a row is a tree of its own.
template <uint32_t In>
__device__ __noinline__ void in_memory(const ResidualNormParams& p) {
  using Rows = NormRows<ResidualNormParams, In, false>;
  __shared__ uint32_t mine[NORM_THREADS / 32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (uint32_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const uint32_t first = row * p.granules;
    Pairs squares;
    for (uint32_t part = 0; part < p.granules; part += blockDim.x) {
      const uint32_t g = part + threadIdx.x;
      float q = 0;
      if (g < p.granules) {
        uint4 h = Rows::read(p, p.from, first + g);
        q = Rows::add(p, g, h, Rows::read(p, p.residual, first + g));
        Rows::write(p, p.sum, first + g, h);
      }
      q = whole_tree(q);
      // All have read those of the part before.
      __syncthreads();
      if (lane == 0) mine[warp] = __float_as_uint(q);
      __syncthreads();
      squares.take(whole_tree(lane < warps ? __uint_as_float(mine[lane]) : 0.0f));
    }
    const float inverse = Rows::inverse_of(p, squares.all());
    // A thread reads the sums that it wrote.
    const auto normed = [&](uint32_t g) {
      return Rows::normed(Rows::read(p, p.sum, first + g), Rows::read(p, p.weight, g), inverse);
    };
    uint32_t greatest = 0;
    for (uint32_t g = threadIdx.x; g < p.granules; g += blockDim.x) Rows::give(p, row, g, normed(g), greatest);
    if (p.form != NORM_INT8) continue;
    greatest = __reduce_max_sync(0xFFFFFFFFu, greatest);
    __syncthreads();
    if (lane == 0) mine[warp] = greatest;
    __syncthreads();
    const float scale = scale_of(__reduce_max_sync(0xFFFFFFFFu, lane < warps ? mine[lane] : 0), I8);
    if (threadIdx.x == 0) reinterpret_cast<float*>(p.scales)[row] = scale;
    const Divisor by(scale);
    for (uint32_t g = threadIdx.x; g < p.granules; g += blockDim.x) Rows::quantize(p, row, g, normed(g), by, I8);
  }
}

template <uint32_t In>
__device__ __forceinline__ void residual_norm(const ResidualNormParams& p) {
  wait_for_previous_kernel();
  if (p.wide == 0 || p.granules > most_granules * blockDim.x) return in_memory<In>(p);
  in_registers<In>(p);
}

#define RESIDUAL_NORM(NAME, IN)                                                              \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS, 1)                              \
      brigade_residual_norm_##NAME(const __grid_constant__ ResidualNormParams p) {           \
    residual_norm<IN>(p);                                                                    \
  }

RESIDUAL_NORM(f32, F32)
RESIDUAL_NORM(f16, F16)
RESIDUAL_NORM(bf16, BF16)
