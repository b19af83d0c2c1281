// What blocks of a product of few rows do with the weight (few_rows.cu): passes, the ring, and sums.
#pragma once
#include "barriers.cuh"
#include "mma.cuh"
#include "sums.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace brigade {

constexpr uint32_t multipliers = 8, loaders = 2;
static_assert(FEW_ROWS_THREADS == 32 * (multipliers + loaders));

// Columns that tensor cores multiply together, and how many of the rows; a stage has so many columns.
constexpr uint32_t unit = 16, group = 8;

// Named barrier of the warps that multiply.
__device__ __forceinline__ void multipliers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * multipliers) : "memory"); }

template <uint32_t ROWS>
struct Form {
  static constexpr uint32_t groups = ROWS / group;
  // Elements of the inner dimension in a stage, of which each warp multiplies its own, and a lane 8 of every 32.
  static constexpr uint32_t slice = ROWS == 8 ? 1024 : 512, own = slice / multipliers, loads = own / 32;
  static constexpr uint32_t stages = ROWS == 8 ? 6 : 8;
  // Units of a pass, at most; and beside sums of first factors.
  static constexpr uint32_t units = ROWS == 8 ? 4 : 7, units_beside_low = ROWS == 8 ? 4 : 5;
  // From one column's elements to the next: two of them lie in all banks.
  static constexpr uint32_t line_bytes = 2 * slice + 64, stage_bytes = unit * line_bytes;
  // Floats that a warp gives for a unit, and for one of the rows in it.
  static constexpr uint32_t row_sums = unit + 4, sums = row_sums * ROWS;
  static constexpr uint32_t bytes = stages * stage_bytes + multipliers * units * sums * sizeof(float);
};
static_assert(Form<8>::bytes == FEW_ROWS_BYTES_8 && Form<16>::bytes == FEW_ROWS_BYTES_16);

// Stages of a block, in passes over some of its columns, which are as even as can be: slice by slice, and in each unit by unit; with a gate, first those of the
// gate and then those beside them.
template <uint32_t ROWS>
struct Walk {
  uint32_t first, last, pass, column, slice, slices, half = 0, halves;
  __device__ __forceinline__ Walk(const FewRowsParams& p, bool beside_low) {
    // What is sent is two columns at a time.
    const uint32_t grain = p.slots != 0 ? 2 : 1;
    first = uint64_t(p.columns / grain) * blockIdx.x / gridDim.x * grain, last = uint64_t(p.columns / grain) * (blockIdx.x + 1) / gridDim.x * grain;
    halves = p.activation == GATED ? 2 : 1;
    const uint32_t all = (last - first + unit - 1) / unit, most = (beside_low ? Form<ROWS>::units_beside_low : Form<ROWS>::units) / halves, passes = max(1u, (all + most - 1) / most);
    pass = (all + passes - 1) / passes * unit;
    column = first, slice = 0, slices = (p.inner + Form<ROWS>::slice - 1) / Form<ROWS>::slice;
  }
  __device__ __forceinline__ bool done() const { return first >= last; }
  __device__ __forceinline__ uint32_t end() const { return min(first + pass, last); }
  __device__ __forceinline__ void next_pass() { column = first += pass, slice = 0; }
  __device__ __forceinline__ void next() {
    if ((column += unit) < end()) return;
    column = first;
    if (++half < halves) return;
    half = 0;
    if (++slice == slices) next_pass();
  }
};

template <uint32_t ROWS>
struct Ring {
  uint32_t base, full, empty, stage = 0, phase = 0;
  __device__ __forceinline__ Ring(const void* memory, const uint64_t* barriers)
      : base(shared_address(memory)), full(shared_address(barriers)), empty(full + 8 * Form<ROWS>::stages) {}
  __device__ __forceinline__ uint32_t at() const { return base + stage * Form<ROWS>::stage_bytes; }
  __device__ __forceinline__ void next() {
    if (++stage == Form<ROWS>::stages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void load_line(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ uint4 load_sixteen(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Lets a stage be loaded anew, of which this warp's lanes have read so much that what they saw depends on every load. An arrival by itself overtakes loads that stand in line
// behind others, and a fence waits for all that is under way, rows too; so it waits for what was seen, of which `zero` leaves nothing.
__device__ __forceinline__ void give_back(uint32_t barrier, uint32_t seen, uint32_t zero) {
  const bool is_none = !__any_sync(0xffffffff, (seen & zero) != 0);
  if (is_none && threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// This lane's elements of a slice, of one of the rows in each group.
template <uint32_t ROWS>
struct Fragment {
  uint4 of[Form<ROWS>::loads][Form<ROWS>::groups];
  __device__ __forceinline__ void read(const FewRowsParams& p, uint32_t slice) {
#pragma unroll
    for (uint32_t i = 0; i < Form<ROWS>::loads; ++i) {
#pragma unroll
      for (uint32_t g = 0; g < Form<ROWS>::groups; ++g) {
        const uint32_t at = first_of(slice) + 32 * i, row = group * g + threadIdx.x % 32 / 4;
        of[i][g] = make_uint4(0, 0, 0, 0);
        if (at < p.inner && row < p.rows) of[i][g] = *reinterpret_cast<const uint4*>(p.x + 2 * (row * p.x_stride + at));
      }
    }
  }
  static __device__ __forceinline__ uint32_t first_of(uint32_t slice) {
    return slice * Form<ROWS>::slice + threadIdx.x / 32 * Form<ROWS>::own + threadIdx.x % 4 * 8;
  }
};

// Sums of a unit of columns, which a warp has, to where they are added up.
template <uint32_t ROWS>
__device__ __forceinline__ void lay_down(float* all, uint32_t u, const float (&sums)[Form<ROWS>::groups][4]) {
  using F = Form<ROWS>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quarter = lane % 4;
#pragma unroll
  for (uint32_t g = 0; g < F::groups; ++g) {
    float* to = all + (warp * F::units + u) * F::sums + (group * g + 2 * quarter) * F::row_sums + line;
    to[0] = sums[g][0], to[F::row_sums] = sums[g][1];
    to[unit / 2] = sums[g][2], to[F::row_sums + unit / 2] = sums[g][3];
  }
}

// Of one of the rows and one of the columns, in the order of the warps.
template <uint32_t ROWS>
__device__ __forceinline__ float sum_of_warps(const float* all, uint32_t row, uint32_t column) {
  using F = Form<ROWS>;
  const float* from = all + column / unit * F::sums + row * F::row_sums + column % unit;
  float sum = 0.0f;
#pragma unroll
  for (uint32_t w = 0; w < multipliers; ++w) sum += from[w * F::units * F::sums];
  return sum;
}

}  // namespace brigade

#endif
