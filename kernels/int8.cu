// What products of small integers need beside a library: their layout, and sums that leave 32 bits.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

extern "C" __global__ void brigade_pack(const __grid_constant__ PackParams p) {
  wait_for_previous_kernel();
  const uint8_t* from = reinterpret_cast<const uint8_t*>(p.from);
  uint8_t* out = reinterpret_cast<uint8_t*>(p.out);
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.out_rows * p.out_columns; i += threads) {
    const uint64_t row = i / p.out_columns, column = i % p.out_columns;
    const bool inside = row < p.rows && column < p.columns;
    out[i] = inside ? from[row * p.row_stride + column * p.column_stride] : 0;
  }
}

// A warp for each element of the result.
extern "C" __global__ void brigade_int8_long(const __grid_constant__ LongParams p) {
  wait_for_previous_kernel();
  const int8_t* x = reinterpret_cast<const int8_t*>(p.x);
  const int8_t* w = reinterpret_cast<const int8_t*>(p.w);
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t warps = uint64_t(gridDim.x) * blockDim.x / 32;
  for (uint64_t i = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < p.rows * p.columns; i += warps) {
    const uint64_t row = i / p.columns, column = i % p.columns;
    long long sum = 0;
    for (uint64_t l = lane; l < p.inner; l += 32) {
      const int b = w[l * p.w_inner_stride + column * p.w_column_stride];
      sum += int(x[row * p.x_stride + l]) * b;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane != 0) continue;
    const float row_scale = reinterpret_cast<const float*>(p.row_scales)[row * p.row_scale_stride];
    const float column_scale = reinterpret_cast<const float*>(p.column_scales)[column * p.column_scale_stride];
    const float scaled = __fmul_rn(__fmul_rn(__ll2float_rn(sum), row_scale), column_scale);
    reinterpret_cast<float*>(p.out)[i] = __fmul_rn(p.alpha, scaled);
  }
}
