// Quantizing, and the way back, as brigade-host does it.
//
// Magnitudes are compared as the bits of an f32: they order as the numbers do, and a NaN is above all.
#include "params.cuh"
#include "quantized.cuh"
#include "sync.cuh"

using namespace brigade;

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The greatest of all threads of a block, to all of them.
__device__ __forceinline__ uint32_t greatest_of_block(uint32_t mine) {
  __shared__ uint32_t warps[32];
  mine = __reduce_max_sync(0xFFFFFFFFu, mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  return __reduce_max_sync(0xFFFFFFFFu, threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0);
}

// A block for each group, which it reads twice: the second time it is in the first cache.
extern "C" __global__ void brigade_quantize_rows(const __grid_constant__ QuantizeRowsParams p) {
  wait_for_previous_kernel();
  uint8_t* kernel = reinterpret_cast<uint8_t*>(p.kernel);
  const uint64_t groups = (p.columns + p.group_columns - 1) / p.group_columns;
  const bool eight = wide(p.from, p.columns) && p.kernel % 8 == 0 && p.group_columns % wide_elements == 0;
  const uint32_t step = eight ? wide_elements : 1;
  for (uint64_t g = blockIdx.x; g < p.rows * groups; g += gridDim.x) {
    const uint64_t row = g / groups, first = g % groups * p.group_columns;
    const uint64_t start = row * p.columns + first;
    const uint64_t count = p.columns - first < p.group_columns ? p.columns - first : p.group_columns;
    uint32_t most = 0;
    float v[8];
    for (uint64_t i = threadIdx.x * step; i < count; i += blockDim.x * step) {
      if (eight) {
        load_wide(p.from_type, p.from, start + i, v);
        for (int j = 0; j < 8; ++j) most = max(most, magnitude(v[j]));
      } else {
        most = max(most, magnitude(load_float(p.from_type, p.from, start + i)));
      }
    }
    const float scale = scale_of(greatest_of_block(most), p.kernel_type);
    if (threadIdx.x == 0) reinterpret_cast<float*>(p.scales)[g] = scale;
    const Divisor by(scale);
    for (uint64_t i = threadIdx.x * step; i < count; i += blockDim.x * step) {
      if (eight) {
        load_wide(p.from_type, p.from, start + i, v);
        const auto q = quantized(v, by, p.kernel_type);
        *reinterpret_cast<uint2*>(kernel + start + i) = make_uint2(q.words[0], q.words[1]);
      } else {
        kernel[start + i] = divided(load_float(p.from_type, p.from, start + i), scale, p.kernel_type);
      }
    }
  }
}

constexpr uint64_t rows_at_once = 64;

// By column: a thread takes 64 rows of a column. For all: a block takes what it finds on its way through the rows.
extern "C" __global__ void brigade_greatest(const __grid_constant__ GreatestParams p) {
  wait_for_previous_kernel();
  uint32_t* greatest = reinterpret_cast<uint32_t*>(p.greatest);
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  if (p.column_stride != 0) {
    const uint64_t parts = (p.rows + rows_at_once - 1) / rows_at_once;
    for (uint64_t t = thread; t < p.columns * parts; t += threads) {
      const uint64_t column = t % p.columns, first = t / p.columns * rows_at_once;
      const uint64_t end = first + rows_at_once < p.rows ? first + rows_at_once : p.rows;
      uint32_t most = 0;
      for (uint64_t row = first; row < end; ++row) {
        most = max(most, magnitude(load_float(p.from_type, p.from, row * p.columns + column)));
      }
      atomicMax(greatest + column, most);
    }
    return;
  }
  uint32_t most = 0;
  for (uint64_t i = thread; i < p.rows * p.columns; i += threads) {
    most = max(most, magnitude(load_float(p.from_type, p.from, i)));
  }
  most = greatest_of_block(most);
  if (threadIdx.x == 0) atomicMax(greatest, most);
}

extern "C" __global__ void brigade_quantize(const __grid_constant__ QuantizeParams p) {
  wait_for_previous_kernel();
  const uint32_t* greatest = reinterpret_cast<const uint32_t*>(p.greatest);
  float* scales = reinterpret_cast<float*>(p.scales);
  uint8_t* kernel = reinterpret_cast<uint8_t*>(p.kernel);
  const uint64_t groups = p.column_stride == 0 ? 1 : p.columns;
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows * p.columns; i += threads) {
    const uint64_t group = i % p.columns * p.column_stride;
    const float scale = scale_of(greatest[group], p.kernel_type);
    if (i < groups) scales[group] = scale;
    kernel[i] = divided(load_float(p.from_type, p.from, i), scale, p.kernel_type);
  }
}

extern "C" __global__ void brigade_dequantize(const __grid_constant__ DequantizeParams p) {
  wait_for_previous_kernel();
  const float* scales = reinterpret_cast<const float*>(p.scales);
  const uint8_t* kernel = reinterpret_cast<const uint8_t*>(p.kernel);
  float* out = reinterpret_cast<float*>(p.out);
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows * p.columns; i += threads) {
    const uint64_t row = i / p.columns, column = i % p.columns;
    const float scale = scales[row * p.row_stride + column / p.column_block * p.column_stride];
    const float value = p.kernel_type == I8 ? float(int8_t(kernel[i])) : fp8_value(kernel[i]);
    out[i] = canonical(__fmul_rn(value, scale));
  }
}
