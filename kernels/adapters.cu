// Lays adapters out for a product whose tiles wait: see gemm_flags.cu. Elements of 2 bytes, of any type with an exponent.
//
// Rows are multiplied by the second factors of all adapters, with zeros for those that are not theirs. So what is not finite there becomes zero, lest it makes NaN of
// everybody's rows; and the column that it is multiplied by begins with a NaN in the first factor, which makes NaN of all rows of its own adapter, and of no others.
#include "params.cuh"
#include "sync.cuh"

using namespace brigade;

namespace {

// What a thread reads before it writes any of it, and what a wide access takes. Short code: between two products it comes from memory, line by
// line, which takes longer than what it does.
constexpr uint32_t at_once = 8;
struct alignas(16) Eight {
  uint16_t at[at_once];
};

// Eight columns of a row of an adapter's first factor, or what is left of them, next to which other threads write theirs of other rows.
__device__ inline void lay_down(const AdaptersParams& p, uint32_t a, uint64_t row, uint32_t first) {
  const uint32_t width = p.width[a];
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p.first[a]) + row * width + first;
  uint16_t* to = reinterpret_cast<uint16_t*>(p.down) + (p.column[a] + first) * p.inner + row;
  Eight values;
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) values.at[i] = from[first + i < width ? i : 0];
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) {
    if (first + i < width) to[i * p.inner] = values.at[i];
  }
}

__device__ __forceinline__ bool is_finite(const AdaptersParams& p, uint16_t value) { return (value & p.exponent) != p.exponent; }

// The first element of a column of `down`, by a block, which looks at the row of the second factor that the column is multiplied by.
__device__ inline void begin_column(const AdaptersParams& p, uint32_t a, uint32_t column) {
  const uint16_t* row = reinterpret_cast<const uint16_t*>(p.second[a]) + column * p.columns;
  bool finite = true;
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < p.columns; i += blockDim.x) finite &= is_finite(p, row[i]);
  constexpr uint16_t nan = 0x7fff;
  const bool all = __syncthreads_and(finite);
  if (threadIdx.x == 0) {
    const uint16_t first = reinterpret_cast<const uint16_t*>(p.first[a])[column];
    reinterpret_cast<uint16_t*>(p.down)[(p.column[a] + column) * p.inner] = all ? first : nan;
  }
}

// Eight elements of a row of `up`, from rows of second factors. Columns that no adapter has are multiplied as well: by zeros, so they must
// be numbers.
__device__ inline void lay_up(const AdaptersParams& p, uint64_t row, uint32_t first) {
  Eight values;
  uint32_t a = 0;
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) {
    while (a < p.count && first + i >= p.column[a] + p.width[a]) ++a;
    const bool there = a < p.count && first + i >= p.column[a];
    const uint16_t* from = reinterpret_cast<const uint16_t*>(p.second[there ? a : 0]) + row;
    values.at[i] = there ? from[(first + i - p.column[a]) * p.columns] : 0;
  }
#pragma unroll
  for (uint32_t i = 0; i < at_once; ++i) values.at[i] = is_finite(p, values.at[i]) ? values.at[i] : 0;
  *reinterpret_cast<Eight*>(p.up + (row * p.stride + first) * sizeof(uint16_t)) = values;
}

}  // namespace

extern "C" __global__ void brigade_adapters(const __grid_constant__ AdaptersParams p) {
  wait_for_previous_kernel();
  const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = thread; i < p.flag_count; i += threads) reinterpret_cast<uint32_t*>(p.flags)[i] = 0;
  for (uint64_t i = thread; p.state != 0 && i <= STATE_COUNTERS; i += threads) {
    reinterpret_cast<uint64_t*>(p.state)[i] = i == STATE_GENERATION;
  }
  uint32_t downs = 0;
  for (uint32_t a = 0; a < p.count; ++a) downs += (p.width[a] + at_once - 1) / at_once;
  const uint32_t pieces = downs * uint32_t(p.inner), all = pieces + uint32_t(p.stride / at_once * p.columns);
  for (uint32_t i = thread; i < all; i += threads) {
    if (i >= pieces) {
      lay_up(p, (i - pieces) % uint32_t(p.columns), (i - pieces) / uint32_t(p.columns) * at_once);
      continue;
    }
    uint32_t piece = i / uint32_t(p.inner), a = 0;
    for (; piece >= (p.width[a] + at_once - 1) / at_once; ++a) piece -= (p.width[a] + at_once - 1) / at_once;
    if (i % uint32_t(p.inner) != 0) lay_down(p, a, i % uint32_t(p.inner), piece * at_once);
  }
  for (uint32_t a = 0, n = 0; a < p.count; ++a) {
    for (uint32_t column = 0; column < p.width[a]; ++column, ++n) {
      if (n % gridDim.x == blockIdx.x) begin_column(p, a, column);
    }
  }
}
