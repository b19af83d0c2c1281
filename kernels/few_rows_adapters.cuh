// Adapters in a product of few rows (few_rows.cu): first factors as stages of the ring, sums that a cluster shares, and what second factors make of them.
#pragma once
#include "cluster.cuh"
#include "few_rows.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace brigade {

// Columns between adapters' factors, at most, and blocks that share what makes these.
constexpr uint32_t low_columns = FEW_LOW_COLUMNS, low_blocks = FEW_LOW_BLOCKS;

// Until all threads of the cluster are here, who see each other's barriers then.
__device__ __forceinline__ void cluster_meets() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory"); }

// A number to the same place of a block of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void give(uint32_t to, float value, uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 told, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [told];\n"
      "}" ::"r"(to), "f"(value), "r"(barrier), "r"(block)
      : "memory");
}

// Slices of first factors that this block has, of all that a cluster shares: one of so many. Each is in front of the columns of its slice, but for the first one, so that a
// settled weight is under way before the wait for first factors, of which nobody has said that they are.
struct LowWalk {
  uint32_t rank, slices;
  __device__ __forceinline__ explicit LowWalk(uint32_t of) : rank(cluster_rank()), slices(of) {}
  // Which slice comes behind the columns of this one, and whether one does.
  __device__ __forceinline__ uint32_t behind(uint32_t slice) const { return slice == 0 && rank == 0 ? 0 : slice + 1; }
  __device__ __forceinline__ bool has(uint32_t slice) const { return slice < slices && slice % low_blocks == rank; }
  // Whether none comes behind later columns.
  __device__ __forceinline__ bool ends_behind(uint32_t slice) const { return slice == (slices > low_blocks ? (slices - 1 - rank) / low_blocks * low_blocks + rank - 1 : 0); }
};

// Stages of an adapter's first factor in a slice: of each warp's elements of the inner dimension a part, with all columns.
template <uint32_t ROWS>
struct LowStages {
  // Columns of the factor and units of them; bytes of a line; a warp's lines, and its fragments that have these.
  uint32_t width, units, row_bytes, rows, fragments;
  __device__ __forceinline__ explicit LowStages(uint32_t of)
      : width(of), units(max(1u, of / unit)), row_bytes(2 * of), rows(Form<ROWS>::own / units), fragments(Form<ROWS>::loads / units) {}
  __device__ __forceinline__ uint32_t bytes() const { return multipliers * rows * row_bytes; }
};

// A stage lies in shared memory in pieces, a bit apart, so that fewer lines of a matrix are in the same banks: where so many bytes from the beginning are.
constexpr uint32_t piece = 2048, piece_gap = 16;
__device__ __forceinline__ uint32_t in_pieces(uint32_t bytes) { return bytes + bytes / piece * piece_gap; }

// By a warp, its pieces of a slice of first factors.
template <uint32_t ROWS>
__device__ __forceinline__ void load_low(const FewRowsParams& p, uint32_t slice, uint32_t which, Ring<ROWS>& ring) {
  using F = Form<ROWS>;
  constexpr uint32_t most = F::slice * 2 * unit / piece / loaders;
  static_assert(most <= 32 && loaders * most * (piece + piece_gap) <= F::stage_bytes);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t a = 0; a < p.adapters; ++a) {
    const LowStages<ROWS> low(p.first_width[a]);
    for (uint32_t s = 0; s < low.units; ++s, ring.next()) {
      const uint32_t first = (which * most + lane) * piece, row = first / low.row_bytes;
      const uint32_t k = slice * F::slice + row / low.rows * F::own + s * low.rows + row % low.rows;
      const bool is_mine = lane < most && first < low.bytes() && k < p.inner;
      const uint32_t bytes = is_mine ? min(piece, (p.inner - k) * low.row_bytes) : 0, all = __reduce_add_sync(0xffffffff, bytes);
      const uint32_t barrier = ring.full + 8 * ring.stage;
      barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
      if (lane == 0) barrier_expect(barrier, all);
      __syncwarp();
      if (bytes != 0) load_line(ring.at() + in_pieces(first), p.first[a] + uint64_t(k) * low.row_bytes, bytes, barrier);
    }
  }
}

// Sums of rows times first factors: of units of columns, each of one adapter.
template <uint32_t ROWS>
using Low = float[low_columns / unit][Form<ROWS>::groups][4];

// Adds what a slice gives to them, of which these are the rows' elements.
template <typename T, uint32_t ROWS>
__device__ __forceinline__ void multiply_low(const FewRowsParams& p, uint32_t slice, const Fragment<ROWS>& x, Ring<ROWS>& ring, Low<ROWS>& low) {
  using F = Form<ROWS>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The element whose line this lane names: in each fragment lanes of a quad have 8 after one another, two of each matrix.
  const uint32_t element = 8 * (lane % 8 / 2) + lane % 2 + 2 * (lane / 8);
  uint32_t first_unit = 0;
  for (uint32_t a = 0; a < p.adapters; ++a) {
    const LowStages<ROWS> at(p.first_width[a]);
    for (uint32_t s = 0; s < at.units; ++s, ring.next()) {
      barrier_wait(ring.full + 8 * ring.stage, ring.phase);
      uint32_t seen = 0;
#pragma unroll
      for (uint32_t i = 0; i < F::loads; ++i) {
        if (i < s * at.fragments || i >= (s + 1) * at.fragments) continue;
        const uint32_t line = ring.at() + in_pieces((warp * at.rows + 32 * (i - s * at.fragments) + element) * at.row_bytes);
        // Beyond the inner dimension lies what was there before, which may be no number.
        const bool is_there = Fragment<ROWS>::first_of(slice) + 32 * i < p.inner;
#pragma unroll
        for (uint32_t u = 0; u < low_columns / unit; ++u) {
          if (u < first_unit || u >= first_unit + at.units) continue;
          uint32_t left[4], right[4] = {};
          load_transposed(left, line + 2 * unit * (u - first_unit));
          if (at.width >= unit) load_transposed(right, line + 2 * unit * (u - first_unit) + unit);
          seen ^= left[0] ^ right[0];
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) {
            if (!is_there) left[j] = right[j] = 0;
          }
          const uint32_t first_half[4] = {left[0], right[0], left[1], right[1]}, second_half[4] = {left[2], right[2], left[3], right[3]};
#pragma unroll
          for (uint32_t g = 0; g < F::groups; ++g) {
            brigade::multiply<T>(low[u][g], first_half, x.of[i][g].x, x.of[i][g].y);
            brigade::multiply<T>(low[u][g], second_half, x.of[i][g].z, x.of[i][g].w);
          }
        }
      }
      give_back(ring.empty + 8 * ring.stage, seen, p.zero);
    }
    first_unit += at.units;
  }
}

// What blocks of a cluster give each other: rows times columns.
template <uint32_t ROWS>
struct LowSums {
  float given[low_blocks][ROWS * low_columns];
  uint64_t barrier;
};

// Adds up what warps have, by way of `all`, and gives it to the cluster.
template <uint32_t ROWS>
__device__ __forceinline__ void give_low(float* all, const Low<ROWS>& low, LowSums<ROWS>& exchange) {
  constexpr uint32_t units = low_columns / unit;
  static_assert(units <= Form<ROWS>::units, "sums of all units find room");
#pragma unroll
  for (uint32_t g = 0; g < Form<ROWS>::groups; ++g) {
    if (g != 0) multipliers_meet();
#pragma unroll
    for (uint32_t u = 0; u < units; ++u) lay_down<ROWS>(all, u, low[u][g]);
    multipliers_meet();
    for (uint32_t i = threadIdx.x; i < group * low_columns; i += 32 * multipliers) {
      const float sum = sum_of_warps<ROWS>(all, i / low_columns, i % low_columns);
      float* to = &exchange.given[cluster_rank()][g * group * low_columns + i];
      for (uint32_t b = 0; b < low_blocks; ++b) give(shared_address(to), sum, shared_address(&exchange.barrier), b);
    }
  }
}

// Adds up what it was given, into the first block's place.
template <uint32_t ROWS>
__device__ __forceinline__ void take_low(const FewRowsParams& p, LowSums<ROWS>& exchange) {
  barrier_wait_for_cluster(shared_address(&exchange.barrier), 0);
  for (uint32_t i = threadIdx.x; i < ROWS * low_columns; i += 32 * multipliers) {
    float sum = exchange.given[0][i];
#pragma unroll
    for (uint32_t b = 1; b < low_blocks; ++b) sum = __fadd_rn(sum, exchange.given[b][i]);
    exchange.given[0][i] = __fmul_rn(p.scale[i / low_columns], sum);
  }
}

// Second factors of these columns, to where they are read from soon.
__device__ __forceinline__ void fetch_second(const FewRowsParams& p, uint32_t first, uint32_t last) {
  for (uint32_t row = 0; row < p.rows; ++row) {
    // Rows of a run lie side by side.
    if (row != 0 && p.second[row] == p.second[row - 1]) continue;
    for (uint32_t i = threadIdx.x; i < p.width[row]; i += 32 * multipliers) {
      const uint64_t line = p.second[row] + 2ull * i * p.columns;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line + 2 * first));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line + 2 * (last - 1)));
    }
  }
}

// Elements of a column of a second factor that a thread has at once.
template <typename T>
struct Second {
  static constexpr uint32_t together = 32;
  T of[together];
  // Of the adapter of a row, which is so wide or wider.
  __device__ __forceinline__ void read(const FewRowsParams& p, uint32_t row, uint32_t column, uint32_t first) {
    const T* from = reinterpret_cast<const T*>(p.second[row]) + uint64_t(first) * p.columns + column;
#pragma unroll
    for (uint32_t j = 0; j < together; ++j, from += p.columns) {
      if (first + j < p.width[row]) of[j] = *from;
    }
  }
};

// What adapters add to some rows of a column. There is what is first needed of second factors.
template <typename T, uint32_t COUNT>
__device__ __forceinline__ void of_adapters(const FewRowsParams& p, const float* low, uint32_t row, uint32_t column, Second<T>& second, float (&sums)[COUNT]) {
#pragma unroll 1
  for (uint32_t first = 0; first < low_columns; first += Second<T>::together) {
#pragma unroll
    for (uint32_t r = 0; r < COUNT; ++r) {
      const uint32_t width = row + r < p.rows ? p.width[row + r] : 0;
      if (first >= width) continue;
      const bool is_there = r == 0 ? first == 0 : p.second[row + r] == p.second[row + r - 1] && width == p.width[row + r - 1];
      if (!is_there) second.read(p, row + r, column, first);
      const float* of_row = low + (row + r) * low_columns + p.column[row + r] + first;
#pragma unroll
      for (uint32_t j = 0; j < Second<T>::together; ++j) {
        if (first + j < width) sums[r] = __fmaf_rn(of_row[j], float(second.of[j]), sums[r]);
      }
    }
  }
}

}  // namespace brigade

#endif
