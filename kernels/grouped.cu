// Products in groups of rows, each with a weight of its own: out = x weight^T. How many rows a group has is read here.
//
// Blocks walk over all tiles: group by group, in a group column tile by column tile, and there row tile by row tile, so that who is at
// work at the same time has a weight's rows in common. Which group a tile is in is found by 32 lanes at once. A tile's steps of the inner
// dimension pass through a ring of stages in shared memory, filled by asynchronous copies; tensor cores multiply 16 bytes of inner
// dimension at a time. Of a group with few rows only those fragments are multiplied that have any, so that the time is that of reading
// its weight.
//
// Every element is summed in the order of the inner dimension, 16 at a time, whatever its tile: so results depend neither on the grouping
// nor on the size of tiles. (A grid that walks over groups is after MegaBlocks and CUTLASS's grouped kernels; swizzled rows and ring after
// CUTLASS's multistage kernels.)
#include "mma.cuh"
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

namespace {

struct Tile {
  uint32_t first_row, rows, column;
  uint64_t weight;
};

// Goes from tile to tile. All threads of a warp ask together, and all get the same.
struct Walk {
  const GroupedParams& p;
  const uint32_t tile_rows, column_tiles, tile_columns;
  // The first of the 32 groups at hand, and tiles of those before.
  uint32_t base = 0;
  uint64_t before = 0;

  __device__ __forceinline__ Walk(const GroupedParams& p, uint32_t tile_rows, uint32_t tile_columns)
      : p(p), tile_rows(tile_rows), column_tiles((p.columns + tile_columns - 1) / tile_columns), tile_columns(tile_columns) {}

  // First row, number of rows and weight of this lane's group, cut to what there is.
  __device__ __forceinline__ void group(uint32_t g, uint32_t& first, uint32_t& count, uint32_t& weight) const {
    first = count = weight = 0;
    if (g >= p.groups) return;
    const int32_t* offsets = reinterpret_cast<const int32_t*>(p.offsets);
    const int32_t* counts = reinterpret_cast<const int32_t*>(p.counts);
    const int32_t* which = reinterpret_cast<const int32_t*>(p.which);
    const int32_t w = which == nullptr ? int32_t(g) : which[g];
    if (w < 0 || uint32_t(w) >= p.weight_count) return;
    weight = uint32_t(w);
    first = offsets == nullptr ? g * p.places : uint32_t(max(offsets[g], 0));
    first = min(first, p.rows);
    const uint32_t most = offsets == nullptr ? p.places : p.rows - first;
    const int32_t rows = counts == nullptr ? max(offsets[g + 1], 0) - int32_t(first) : counts[g];
    count = min(uint32_t(max(rows, 0)), most);
  }

  // Tile number `t`, which is greater than the one asked for before. False if there are not so many.
  __device__ __forceinline__ bool find(uint64_t t, Tile& tile) {
    const uint32_t lane = threadIdx.x % 32;
    for (; base < p.groups; base += 32) {
      uint32_t first, count, weight;
      group(base + lane, first, count, weight);
      const uint32_t row_tiles = (count + tile_rows - 1) / tile_rows;
      const uint64_t mine = uint64_t(row_tiles) * column_tiles;
      uint64_t end = mine;
      for (uint32_t other = 1; other < 32; other *= 2) {
        const uint64_t left = __shfl_up_sync(0xFFFFFFFFu, end, other);
        if (lane >= other) end += left;
      }
      const uint32_t holds = __ballot_sync(0xFFFFFFFFu, before + end > t);
      if (holds == 0) {
        before += __shfl_sync(0xFFFFFFFFu, end, 31);
        continue;
      }
      const uint32_t owner = __ffs(holds) - 1;
      const uint32_t in = uint32_t(t - before - __shfl_sync(0xFFFFFFFFu, end - mine, owner));
      const uint32_t tiles_of = __shfl_sync(0xFFFFFFFFu, row_tiles, owner);
      const uint32_t rows_of = __shfl_sync(0xFFFFFFFFu, count, owner);
      const uint32_t row = in % tiles_of * tile_rows;
      tile.first_row = __shfl_sync(0xFFFFFFFFu, first, owner) + row;
      tile.rows = min(rows_of - row, tile_rows);
      tile.column = in / tiles_of * tile_columns;
      tile.weight = __shfl_sync(0xFFFFFFFFu, weight, owner);
      return true;
    }
    return false;
  }
};

// Rows of the inner dimension's step at `k` into shared memory. Rows from `rows` on are left as they are: what is made of them is not
// stored. What is beyond the inner dimension becomes zero.
template <uint32_t ROWS, uint32_t THREADS>
__device__ __forceinline__ void load_rows(uint32_t to, uint64_t from, uint32_t rows, uint32_t k, uint32_t inner, bool aligned) {
  const uint16_t* elements = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
  for (uint32_t i = 0; i < ROWS * chunks / THREADS; ++i) {
    const uint32_t at = threadIdx.x + i * THREADS, row = at / chunks, chunk = at % chunks;
    if (row >= rows) continue;
    const uint32_t column = k + chunk * chunk_elements, left = column < inner ? inner - column : 0;
    const uint16_t* source = elements + uint64_t(row) * inner + column;
    const uint32_t target = to + place(row, chunk);
    if (aligned) {
      copy_chunk(target, left == 0 ? elements : source, left == 0 ? 0 : 16);
      continue;
    }
    uint32_t words[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t low = 2 * j < left ? source[2 * j] : 0, high = 2 * j + 1 < left ? source[2 * j + 1] : 0;
      words[j] = low | high << 16;
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// Tiles of ROWS by COLUMNS, by WARPS_DOWN times WARPS_ACROSS warps, with as many stages as BYTES have room for.
template <typename T, uint32_t ROWS, uint32_t COLUMNS, uint32_t WARPS_DOWN, uint32_t WARPS_ACROSS, uint32_t BYTES>
__device__ __forceinline__ void tiles(const GroupedParams& p) {
  constexpr uint32_t threads = 32 * WARPS_DOWN * WARPS_ACROSS;
  constexpr uint32_t stage_bytes = (ROWS + COLUMNS) * step_bytes, stages = BYTES / stage_bytes;
  constexpr uint32_t warp_rows = ROWS / WARPS_DOWN, warp_columns = COLUMNS / WARPS_ACROSS;
  constexpr uint32_t down = warp_rows / 16, across = warp_columns / 8;
  static_assert(ROWS * chunks % threads == 0 && COLUMNS * chunks % threads == 0 && across % 2 == 0, "whole loads");
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t warp_row = warp / WARPS_ACROSS * warp_rows, warp_column = warp % WARPS_ACROSS * warp_columns;
  const uint32_t steps = (p.inner + step_inner - 1) / step_inner;
  constexpr uint32_t type = std::is_same_v<T, __half> ? F16 : BF16;
  Walk walk(p, ROWS, COLUMNS);
  Tile tile;
  for (uint64_t t = blockIdx.x; walk.find(t, tile); t += gridDim.x) {
    const uint64_t x = p.x + uint64_t(tile.first_row) * p.inner * 2;
    const uint64_t weight = p.weights + (tile.weight * p.columns + tile.column) * p.inner * 2;
    const uint32_t columns = min(p.columns - tile.column, COLUMNS);
    const auto load = [&](uint32_t step) {
      const uint32_t to = ring + step % stages * stage_bytes, k = step * step_inner;
      load_rows<COLUMNS, threads>(to + ROWS * step_bytes, weight, columns, k, p.inner, p.aligned != 0);
      load_rows<ROWS, threads>(to, x, tile.rows, k, p.inner, p.aligned != 0);
    };
    float sums[down][across][4] = {};
    // The last tile's stages have been read.
    __syncthreads();
#pragma unroll
    for (uint32_t step = 0; step < stages - 1; ++step) {
      if (step < steps) load(step);
      close_copies();
    }
    // Fragments of 16 rows that this warp has something to do in.
    const uint32_t busy = tile.rows <= warp_row ? 0 : min((tile.rows - warp_row + 15) / 16, down);
    for (uint32_t step = 0; step < steps; ++step) {
      wait_for_copies<stages - 2>();
      __syncthreads();
      // Into the stage that all have read in the step before.
      if (step + stages - 1 < steps) load(step + stages - 1);
      close_copies();
      if (busy == 0) continue;
      const uint32_t rows_at = ring + step % stages * stage_bytes, columns_at = rows_at + ROWS * step_bytes;
#pragma unroll
      for (uint32_t k = 0; k < step_inner / 16; ++k) {
        uint32_t b[across / 2][4];
#pragma unroll
        for (uint32_t j = 0; j < across / 2; ++j) {
          const uint32_t row = warp_column + j * 16 + lane % 8 + lane / 16 * 8;
          load_matrices(b[j], columns_at + place(row, 2 * k + lane / 8 % 2));
        }
#pragma unroll
        for (uint32_t i = 0; i < down; ++i) {
          if (i >= busy) break;
          uint32_t a[4];
          load_matrices(a, rows_at + place(warp_row + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
          for (uint32_t j = 0; j < across; ++j) multiply<T>(sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    wait_for_copies<0>();
    const bool pairs = p.columns % 2 == 0 && p.out % 8 == 0;
#pragma unroll
    for (uint32_t i = 0; i < down; ++i) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = warp_row + i * 16 + half * 8 + lane / 4;
        if (row >= tile.rows) continue;
        const uint64_t line = (uint64_t(tile.first_row) + row) * p.columns;
#pragma unroll
        for (uint32_t j = 0; j < across; ++j) {
          const uint32_t column = tile.column + warp_column + j * 8 + lane % 4 * 2;
          const float low = sums[i][j][2 * half], high = sums[i][j][2 * half + 1];
          if (pairs && column < p.columns) {
            if (p.out_type == F32) {
              *reinterpret_cast<float2*>(p.out + (line + column) * 4) = make_float2(canonical(low), canonical(high));
              continue;
            }
            if (p.out_type == type) {
              *reinterpret_cast<uint32_t*>(p.out + (line + column) * 2) = narrow(type, low, high);
              continue;
            }
          }
          if (column < p.columns) store_float(p.out_type, p.out, line + column, low);
          if (column + 1 < p.columns) store_float(p.out_type, p.out, line + column + 1, high);
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void large(const GroupedParams& p) {
  static_assert(GROUPED_LARGE_THREADS == 32 * 2 * 4, "threads of these warps");
  tiles<T, GROUPED_LARGE, GROUPED_LARGE, 2, 4, GROUPED_LARGE_BYTES>(p);
}

template <typename T>
__device__ __forceinline__ void small(const GroupedParams& p) {
  static_assert(GROUPED_SMALL_THREADS == 32 * 4, "threads of these warps");
  tiles<T, GROUPED_SMALL_ROWS, GROUPED_SMALL_COLUMNS, 1, 4, GROUPED_SMALL_BYTES>(p);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GROUPED_LARGE_THREADS) brigade_grouped_f16_large(const __grid_constant__ GroupedParams p) {
  wait_for_previous_kernel();
  large<__half>(p);
}

extern "C" __global__ void __launch_bounds__(GROUPED_LARGE_THREADS) brigade_grouped_bf16_large(const __grid_constant__ GroupedParams p) {
  wait_for_previous_kernel();
  large<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(GROUPED_SMALL_THREADS) brigade_grouped_f16_small(const __grid_constant__ GroupedParams p) {
  wait_for_previous_kernel();
  small<__half>(p);
}

extern "C" __global__ void __launch_bounds__(GROUPED_SMALL_THREADS) brigade_grouped_bf16_small(const __grid_constant__ GroupedParams p) {
  wait_for_previous_kernel();
  small<__nv_bfloat16>(p);
}

// Without tensor cores: a thread has 4 by 4 elements of a tile, and adds one product after the other.
extern "C" __global__ void __launch_bounds__(256) brigade_grouped_f32(const __grid_constant__ GroupedParams p) {
  wait_for_previous_kernel();
  constexpr uint32_t side = 64, depth = 16;
  // By the inner dimension; a row has room for four more, so that its elements are not all in one bank where they are written.
  __shared__ __align__(16) float rows[depth][side + 4], columns[depth][side + 4];
  const uint32_t own_row = threadIdx.x / 16 * 4, own_column = threadIdx.x % 16 * 4;
  Walk walk(p, side, side);
  Tile tile;
  for (uint64_t t = blockIdx.x; walk.find(t, tile); t += gridDim.x) {
    const float* x = reinterpret_cast<const float*>(p.x) + uint64_t(tile.first_row) * p.inner;
    const float* weight = reinterpret_cast<const float*>(p.weights) + (tile.weight * p.columns + tile.column) * p.inner;
    const uint32_t width = min(p.columns - tile.column, side);
    float sums[4][4] = {};
    for (uint32_t k = 0; k < p.inner; k += depth) {
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < side * depth; at += blockDim.x) {
        const uint32_t row = at / depth, in = at % depth;
        const bool there = k + in < p.inner;
        const uint64_t from = uint64_t(row) * p.inner + k + in;
        rows[in][row] = there && row < tile.rows ? x[from] : 0.0f;
        columns[in][row] = there && row < width ? weight[from] : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (uint32_t in = 0; in < depth; ++in) {
        const float4 a = *reinterpret_cast<const float4*>(&rows[in][own_row]);
        const float4 b = *reinterpret_cast<const float4*>(&columns[in][own_column]);
        const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) sums[i][j] = __fmaf_rn(left[i], right[j], sums[i][j]);
        }
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = own_row + i;
      if (row >= tile.rows) continue;
      const uint64_t line = (uint64_t(tile.first_row) + row) * p.columns + tile.column;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (own_column + j < width) store_float(p.out_type, p.out, line + own_column + j, sums[i][j]);
      }
    }
  }
}
