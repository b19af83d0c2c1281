// Lays adapters out for a product whose tiles wait: see gemm_flags.cu. Elements of 2 bytes, of any type with an exponent.
//
// Rows are multiplied by the second factors of all adapters, with zeros for those that are not theirs. So what is not finite there becomes zero, lest it makes NaN of
// everybody's rows; and the column that it is multiplied by begins with a NaN in the first factor, which makes NaN of all rows of its own adapter, and of no others.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

namespace {

// What is read before any of it is written, and what a store takes. Short code and few steps: between two products it comes from memory, line by
// line, which takes longer than what it does.
constexpr uint32_t at_once = 8;
struct alignas(16) Eight {
  uint16_t at[at_once];
};

__device__ __forceinline__ uint32_t eights(uint32_t elements) { return (elements + at_once - 1) / at_once; }

// Eight elements of a row of an adapter's first factor, the `n`-th in its adapter and the next: part of eight columns of `down`, next to which other threads write theirs.
__device__ inline void lay_down(const AdaptersParams& p, uint64_t row, uint32_t n) {
  uint32_t a = 0;
  for (; n >= eights(p.width[a]); ++a) n -= eights(p.width[a]);
  const uint32_t width = p.width[a], first = n * at_once;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p.first[a]) + row * width + first;
  uint16_t* to = reinterpret_cast<uint16_t*>(p.down) + (p.column[a] + first) * p.inner + row;
  Eight values;
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) {
    if (first + i < width) values.at[i] = from[i];
  }
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) {
    if (first + i < width) to[i * p.inner] = values.at[i];
  }
}

__device__ __forceinline__ bool is_finite(const AdaptersParams& p, uint16_t value) { return (value & p.exponent) != p.exponent; }

// Of a word of two elements, the highest bits of those that are not finite: what has all of its exponent's bits passes them with a step.
__device__ __forceinline__ uint32_t not_finite(const AdaptersParams& p, uint32_t word) {
  const uint32_t step = 0x8000 - uint32_t(p.exponent);
  return ((word & 0x7fff7fff) + (step | step << 16)) & 0x80008000;
}

// The first element of a column of `down`, by a block, which looks at the row of the second factor that the column is multiplied by.
__device__ inline void begin_column(const AdaptersParams& p, uint32_t column) {
  uint32_t a = 0;
  while (a < p.count && column - p.column[a] >= p.width[a]) ++a;
  if (a == p.count) return;
  const uint32_t at = column - p.column[a];
  const uint64_t row = p.second[a] + at * p.columns * sizeof(uint16_t);
  uint32_t bad = 0;
  if (row % sizeof(uint4) == 0 && p.columns % at_once == 0) {
    constexpr uint32_t loads = 4;
    const uint4* words = reinterpret_cast<const uint4*>(row);
    const uint32_t count = p.columns / at_once;
    for (uint32_t first = threadIdx.x; first < count; first += loads * blockDim.x) {
      uint4 of[loads]{};
#pragma unroll
      for (uint32_t i = 0; i < loads; ++i) {
        if (first + i * blockDim.x < count) of[i] = words[first + i * blockDim.x];
      }
#pragma unroll
      for (const uint4& w : of) bad |= not_finite(p, w.x) | not_finite(p, w.y) | not_finite(p, w.z) | not_finite(p, w.w);
    }
  } else {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(row);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < p.columns; i += blockDim.x) bad |= not_finite(p, values[i]);
  }
  constexpr uint16_t nan = 0x7fff;
  const bool any = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    const uint16_t first = reinterpret_cast<const uint16_t*>(p.first[a])[at];
    reinterpret_cast<uint16_t*>(p.down)[column * p.inner] = any ? nan : first;
  }
}

// Eight elements of a row of `up`, from rows of second factors. Columns that no adapter has are multiplied as well: by zeros, so they must
// be numbers.
__device__ inline void lay_up(const AdaptersParams& p, uint64_t row, uint32_t first) {
  Eight values{};
  for (uint32_t a = 0; a < p.count; ++a) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(p.second[a]) + row;
#pragma unroll
    for (uint32_t i = 0; i < at_once; ++i) {
      const uint32_t column = first + i - p.column[a];
      if (column < p.width[a]) values.at[i] = from[column * p.columns];
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) values.at[i] = is_finite(p, values.at[i]) ? values.at[i] : 0;
  *reinterpret_cast<Eight*>(p.up + (row * p.stride + first) * sizeof(uint16_t)) = values;
}

}  // namespace

// The first blocks begin columns, one each unless there are more than half of the grid; the others do the rest.
extern "C" __global__ void brigade_adapters(const __grid_constant__ AdaptersParams p) {
  wait_for_previous_kernel();
  // Whoever comes next waits for this one's end, and is launched by then.
  let_next_kernel_start();
  const uint32_t heads = min(uint32_t(p.stride), gridDim.x / 2);
  if (blockIdx.x < heads) {
    for (uint32_t column = blockIdx.x; column < p.stride; column += heads) begin_column(p, column);
    return;
  }
  const uint64_t thread = uint64_t(blockIdx.x - heads) * blockDim.x + threadIdx.x, threads = uint64_t(gridDim.x - heads) * blockDim.x;
  for (uint64_t i = thread; i < p.flag_count; i += threads) reinterpret_cast<uint32_t*>(p.flags)[i] = 0;
  for (uint64_t i = thread; p.state != 0 && i <= STATE_COUNTERS; i += threads) {
    reinterpret_cast<uint64_t*>(p.state)[i] = i == STATE_GENERATION;
  }
  uint32_t parts = 0;
  for (uint32_t a = 0; a < p.count; ++a) parts += eights(p.width[a]);
  const uint64_t downs = parts * p.inner, all = downs + p.stride / at_once * p.columns;
  for (uint64_t i = thread; i < all; i += threads) {
    if (i >= downs) {
      lay_up(p, (i - downs) % p.columns, (i - downs) / p.columns * at_once);
    } else if (i % p.inner != 0) {
      lay_down(p, i % p.inner, i / p.inner);
    }
  }
}
