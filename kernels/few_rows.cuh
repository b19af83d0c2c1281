// What blocks of a product of few rows do with the weight (few_rows.cu): passes, the ring, and sums.
#pragma once
#include "barriers.cuh"
#include "mma.cuh"
#include "sums.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace brigade {

// Warps that multiply, and that load; with these two more, so that registers can be dealt out anew, as to groups of four warps.
constexpr uint32_t multipliers = 8, loaders = 2;
static_assert(FEW_ROWS_THREADS == 32 * (multipliers + 4) && loaders <= 4);

// Columns that tensor cores multiply together, and how many of the rows; a stage has so many columns.
constexpr uint32_t unit = 16, group = 8;

// Named barrier of the warps that multiply.
__device__ __forceinline__ void multipliers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * multipliers) : "memory"); }

template <uint32_t ROWS>
struct Form {
  static constexpr uint32_t groups = ROWS / group;
  // Elements of the inner dimension in a stage, of which each warp multiplies its own, and a lane 8 of every 32.
  static constexpr uint32_t slice = FEW_ROWS_SLICE, own = slice / multipliers, loads = own / 32, stages = 6;
  // Units of a pass, at most.
  static constexpr uint32_t units = 4;
  // From one column's elements to the next: two of them lie in all banks.
  static constexpr uint32_t line_bytes = 2 * slice + 64, stage_bytes = unit * line_bytes;
  // Floats that a warp gives for a unit of a group of the rows, and for one of these.
  static constexpr uint32_t row_sums = unit + 4, sums = row_sums * group;
  static constexpr uint32_t bytes = stages * stage_bytes + multipliers * units * sums * sizeof(float);
};
static_assert(Form<8>::bytes == FEW_ROWS_BYTES && Form<16>::bytes == FEW_ROWS_BYTES);

// Stages of a block, in passes over some of its columns, which are as even as can be: slice by slice, and in each unit by unit; with a gate, first those of the
// gate and then those beside them.
template <uint32_t ROWS>
struct Walk {
  uint32_t first, last, pass, column, slice, slices, half = 0, halves;
  __device__ __forceinline__ explicit Walk(const FewRowsParams& p) {
    // What is sent is two columns at a time.
    const uint32_t grain = p.slots != 0 ? 2 : 1;
    first = uint64_t(p.columns / grain) * blockIdx.x / gridDim.x * grain, last = uint64_t(p.columns / grain) * (blockIdx.x + 1) / gridDim.x * grain;
    halves = p.activation == GATED ? 2 : 1;
    const uint32_t all = (last - first + unit - 1) / unit, most = Form<ROWS>::units / halves, passes = max(1u, (all + most - 1) / most);
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

// Sums of a unit of columns and a group of the rows, which a warp has, to where they are added up.
template <uint32_t ROWS>
__device__ __forceinline__ void lay_down(float* all, uint32_t u, const float (&sums)[4]) {
  using F = Form<ROWS>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quarter = lane % 4;
  float* to = all + (warp * F::units + u) * F::sums + 2 * quarter * F::row_sums + line;
  to[0] = sums[0], to[F::row_sums] = sums[1];
  to[unit / 2] = sums[2], to[F::row_sums + unit / 2] = sums[3];
}

// Of one of the group's rows and one of the columns, in the order of the warps.
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
