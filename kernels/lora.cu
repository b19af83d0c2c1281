// Adapters of many runs of rows, each with factors of its own, in two launches: `low = x first`, and `scale low second` into the rows' result.
//
// Where runs, and tiles of them, begin is the host's to know, and stands in the parameters. A run has few rows, so that the time is that of
// reading its factors. Going down, sums are taken over chunks of the inner dimension, from the first on, and then added up chunk by chunk: where
// there are few tiles, each chunk has a block, and who goes up adds. So an element's bits depend neither on the other rows nor on who adds.
// Going up, a block takes several tiles side by side, for which it gathers `low` once. (Many adapters in one launch are after Punica's and
// S-LoRA's kernels, which take one row or one rank at a time; the chunks are stream-K's without its fix-up.)
#include "mma.cuh"
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

namespace {

constexpr uint32_t tile_rows = LORA_ROWS, tile_columns = LORA_COLUMNS;
// Of 16 rows down, and of 8 columns across a warp of four.
constexpr uint32_t down = tile_rows / 16, across = 2;
constexpr uint32_t threads = LORA_THREADS, rows_bytes = tile_rows * step_bytes, weight_bytes = step_inner * step_bytes;
static_assert(tile_columns == step_bytes / 2 && tile_columns == 4 * 8 * across, "a weight's step is as wide as a tile");

// The run of tile number `t`, of which `in` says which of its tiles that is.
__device__ __forceinline__ uint32_t find(const LoraParams& p, uint32_t t, uint32_t& in) {
  static_assert(MOST_LORA_RUNS <= 128, "found in seven steps");
  uint32_t run = 0;
  // Of runs that begin at the same tile only the last has any.
#pragma unroll
  for (uint32_t step = 64; step > 0; step /= 2) {
    if (run + step < p.runs && p.first[run + step] <= t) run += step;
  }
  in = t - p.first[run];
  return run;
}

// A tile on the way down: its rows, its columns of `low`, and which part of the inner dimension.
struct Down {
  uint32_t run, row, rows, column, part, begin, end;
  __device__ __forceinline__ Down(const LoraParams& p, uint32_t t) {
    uint32_t in;
    run = find(p, t, in);
    const uint32_t row_tiles = (p.rows[run] + tile_rows - 1) / tile_rows;
    row = in % row_tiles * tile_rows;
    rows = min(p.rows[run] - row, tile_rows);
    part = in / row_tiles % p.parts;
    column = in / row_tiles / p.parts * tile_columns;
    begin = p.parts > 1 ? part * uint32_t(LORA_CHUNK) : 0;
    end = p.parts > 1 ? min(begin + uint32_t(LORA_CHUNK), p.inner) : p.inner;
  }

  // Where row `i` of the tile begins in `low`.
  __device__ __forceinline__ float* low(const LoraParams& p, uint32_t i) const {
    return reinterpret_cast<float*>(p.low) + part * p.part_stride + uint64_t(p.low_row[run] + row + i) * p.low_stride + column;
  }
};

// A tile on the way up: its rows, and `tiles` tiles of columns side by side.
struct Up {
  uint32_t run, row, rows, column, tiles;
  __device__ __forceinline__ Up(const LoraParams& p, uint32_t t) {
    uint32_t in;
    run = find(p, t, in);
    const uint32_t row_tiles = (p.rows[run] + tile_rows - 1) / tile_rows;
    row = in % row_tiles * tile_rows;
    rows = min(p.rows[run] - row, tile_rows);
    column = in / row_tiles * p.span * tile_columns;
    tiles = min(p.span, (p.columns - column + tile_columns - 1) / tile_columns);
  }

  // Four columns of row `i` of `low`, of which those beyond the width are zero.
  __device__ __forceinline__ float4 low(const LoraParams& p, uint32_t i, uint32_t column) const {
    const float* from = reinterpret_cast<const float*>(p.low) + uint64_t(p.low_row[run] + row + i) * p.low_stride + column;
    const uint32_t width = p.width[run];
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column >= width) return sum;
    for (uint32_t part = 0; part < p.parts; ++part, from += p.part_stride) {
      const float4 more = *reinterpret_cast<const float4*>(from);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    if (column + 1 >= width) sum.y = 0.0f;
    if (column + 2 >= width) sum.z = 0.0f;
    if (column + 3 >= width) sum.w = 0.0f;
    return sum;
  }
};

__device__ __forceinline__ void put(uint32_t to, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}

// Eight elements of 2 bytes, `stride` from one to the next, of which there are `count`.
__device__ __forceinline__ uint4 gather(const uint16_t* from, uint64_t stride, uint32_t count) {
  uint32_t words[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i * stride] : 0, high = 2 * i + 1 < count ? from[(2 * i + 1) * stride] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The step from `k` on of a tile's rows. What is beyond the inner dimension becomes zero; rows that there are not stay as they are.
__device__ __forceinline__ void load_rows(const LoraParams& p, const Down& tile, uint32_t to, uint32_t k) {
#pragma unroll
  for (uint32_t i = 0; i < tile_rows * chunks / threads; ++i) {
    const uint32_t at = threadIdx.x + i * threads, row = at / chunks, chunk = at % chunks;
    if (row >= tile.rows) continue;
    const uint32_t column = k + chunk * chunk_elements, left = column < tile.end ? tile.end - column : 0;
    const uint16_t* x = reinterpret_cast<const uint16_t*>(p.x);
    const uint16_t* from = x + uint64_t(p.row[tile.run] + tile.row + row) * p.x_row + column * p.x_inner;
    if (p.x_aligned != 0) {
      copy_chunk(to + place(row, chunk), left == 0 ? x : from, left == 0 ? 0 : 16);
    } else {
      put(to + place(row, chunk), gather(from, p.x_inner, left));
    }
  }
}

// Rows `k` to `end` of a factor with so many columns, filled up with zeros to `needed`, and of these the columns of a tile.
__device__ __forceinline__ void load_weight(uint64_t weight, uint32_t columns, uint32_t to, uint32_t k, uint32_t end, uint32_t needed,
                                            uint32_t first) {
  const uint16_t* elements = reinterpret_cast<const uint16_t*>(weight);
  const bool aligned = weight % 16 == 0 && columns % chunk_elements == 0;
#pragma unroll
  for (uint32_t i = 0; i < step_inner * chunks / threads; ++i) {
    const uint32_t at = threadIdx.x + i * threads, row = at / chunks, chunk = at % chunks;
    const uint32_t column = first + chunk * chunk_elements;
    if (row >= needed || column >= columns) continue;
    const bool there = k + row < end;
    const uint16_t* from = elements + (there ? uint64_t(k + row) * columns + column : 0);
    if (aligned) {
      copy_chunk(to + place(row, chunk), from, there ? 16 : 0);
    } else {
      put(to + place(row, chunk), gather(from, 1, there ? columns - column : 0));
    }
  }
}

using Sums = float[down][across][4];

// A step's rows times its weight: as many times 16 of the inner dimension as said, of so many fragments of 16 rows.
template <typename T>
__device__ __forceinline__ void add_step(Sums& sums, uint32_t rows_at, uint32_t weight_at, uint32_t fragments, uint32_t busy) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t k = 0; k < step_inner / 16; ++k) {
    if (k >= fragments) break;
    uint32_t b[4];
    load_transposed(b, weight_at + place(k * 16 + lane % 16, warp * across + lane / 16));
#pragma unroll
    for (uint32_t i = 0; i < down; ++i) {
      if (i >= busy) break;
      uint32_t a[4];
      load_matrices(a, rows_at + place(i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (uint32_t j = 0; j < across; ++j) multiply<T>(sums[i][j], a, b[2 * j], b[2 * j + 1]);
    }
  }
}

// Gives every pair of sums of a tile that it has rows for, with their row and their first column in the tile.
template <typename F>
__device__ __forceinline__ void each_pair(const Sums& sums, uint32_t rows, F&& pair) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < down; ++i) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = i * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
#pragma unroll
      for (uint32_t j = 0; j < across; ++j) pair(row, (warp * across + j) * 8 + lane % 4 * 2, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void go_down(const LoraParams& p) {
  constexpr uint32_t stage_bytes = rows_bytes + weight_bytes, stages = LORA_DOWN_BYTES / stage_bytes;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared)), warp = threadIdx.x / 32;
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Down tile(p, t);
    const uint64_t weight = p.weight[tile.run];
    const uint32_t width = p.width[tile.run], steps = (tile.end - tile.begin + step_inner - 1) / step_inner;
    const auto load = [&](uint32_t step) {
      const uint32_t to = ring + step % stages * stage_bytes, k = tile.begin + step * step_inner;
      load_weight(weight, width, to + rows_bytes, k, tile.end, step_inner, tile.column);
      load_rows(p, tile, to, k);
    };
    const uint32_t busy = tile.column + warp * across * 8 < width ? (tile.rows + 15) / 16 : 0;
    Sums sums = {}, total = {};
    // The last tile's stages have been read.
    __syncthreads();
#pragma unroll
    for (uint32_t step = 0; step < stages - 1; ++step) {
      if (step < steps) load(step);
      close_copies();
    }
    for (uint32_t step = 0; step < steps; ++step) {
      wait_for_copies<stages - 2>();
      __syncthreads();
      // Into the stage that all have read in the step before.
      if (step + stages - 1 < steps) load(step + stages - 1);
      close_copies();
      const uint32_t at = ring + step % stages * stage_bytes;
      add_step<T>(sums, at, at + rows_bytes, step_inner / 16, busy);
      if ((step + 1) % (LORA_CHUNK / step_inner) != 0 && step + 1 < steps) continue;
#pragma unroll
      for (uint32_t i = 0; i < down * across * 4; ++i) {
        (&total[0][0][0])[i] += (&sums[0][0][0])[i];
        (&sums[0][0][0])[i] = 0.0f;
      }
    }
    wait_for_copies<0>();
    each_pair(total, tile.rows, [&](uint32_t row, uint32_t column, float low, float high) {
      // Rows of `low` end with a column of an odd number.
      if (tile.column + column < width) *reinterpret_cast<float2*>(tile.low(p, row) + column) = make_float2(low, high);
    });
  }
}

// Rows of runs with no width become zero.
template <typename T>
__device__ __forceinline__ void go_up(const LoraParams& p) {
  constexpr uint32_t low_bytes = LORA_WIDTH / step_inner * rows_bytes, stages = (LORA_UP_BYTES - low_bytes) / weight_bytes;
  constexpr uint32_t type = std::is_same_v<T, __half> ? F16 : BF16;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t low = uint32_t(__cvta_generic_to_shared(shared)), ring = low + low_bytes, warp = threadIdx.x / 32;
  const bool pairs = p.columns % 2 == 0 && p.out % 4 == 0;
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Up tile(p, t);
    const uint64_t weight = p.weight[tile.run];
    const uint32_t width = p.width[tile.run], padded = (width + 15) / 16 * 16;
    const uint32_t inner_steps = max((width + step_inner - 1) / step_inner, 1), steps = tile.tiles * inner_steps;
    const float scale = p.scale[tile.run];
    const auto column_of = [&](uint32_t step) { return tile.column + step / inner_steps * tile_columns; };
    const auto load = [&](uint32_t step) {
      const uint32_t to = ring + step % stages * weight_bytes, k = step % inner_steps * step_inner;
      load_weight(weight, p.columns, to, k, width, padded - k, column_of(step));
    };
    __syncthreads();
#pragma unroll
    for (uint32_t step = 0; step < stages - 1; ++step) {
      if (step < steps) load(step);
      close_copies();
    }
    for (uint32_t at = threadIdx.x; at < tile.rows * (padded / 4); at += threads) {
      const uint32_t row = at / (padded / 4), column = at % (padded / 4) * 4;
      const float4 sum = tile.low(p, row, column);
      const uint32_t to = low + column / step_inner * rows_bytes + place(row, column % step_inner / chunk_elements) + column % chunk_elements * 2;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(narrow(type, sum.x, sum.y)), "r"(narrow(type, sum.z, sum.w)) : "memory");
    }
    Sums sums = {};
    for (uint32_t step = 0; step < steps; ++step) {
      wait_for_copies<stages - 2>();
      __syncthreads();
      if (step + stages - 1 < steps) load(step + stages - 1);
      close_copies();
      const uint32_t in = step % inner_steps, first = column_of(step);
      const uint32_t busy = first + warp * across * 8 < p.columns ? (tile.rows + 15) / 16 : 0;
      const uint32_t fragments = min((padded - in * step_inner) / 16, step_inner / 16);
      add_step<T>(sums, low + in * rows_bytes, ring + step % stages * weight_bytes, fragments, busy);
      if (in + 1 < inner_steps) continue;
      each_pair(sums, tile.rows, [&](uint32_t row, uint32_t column, float left, float right) {
        const uint64_t line = uint64_t(p.row[tile.run] + tile.row + row) * p.columns;
        column += first;
        left *= scale, right *= scale;
        if (pairs && column < p.columns) {
          *reinterpret_cast<uint32_t*>(p.out + (line + column) * 2) = narrow(type, left, right);
          return;
        }
        if (column < p.columns) store_float(type, p.out, line + column, left);
        if (column + 1 < p.columns) store_float(type, p.out, line + column + 1, right);
      });
#pragma unroll
      for (uint32_t i = 0; i < down * across * 4; ++i) (&sums[0][0][0])[i] = 0.0f;
    }
    wait_for_copies<0>();
  }
}

// Without tensor cores: a thread has 2 by 4 elements of a tile, and adds one product after the other. Factors may be of any type.
constexpr uint32_t float_threads = LORA_FLOAT_THREADS, depth = 32, rows_stride = tile_rows + 4, columns_stride = tile_columns + 4;
constexpr uint32_t own_rows = 2, own_columns = 4;
using FloatSums = float[own_rows][own_columns];
using FloatRows = float[rows_stride];
using FloatColumns = float[columns_stride];

__device__ __forceinline__ uint32_t own_row() { return threadIdx.x / 16 * own_rows; }
__device__ __forceinline__ uint32_t own_column() { return threadIdx.x % 16 * own_columns; }

// Rows and columns lie by the inner dimension, of which there are so many.
__device__ __forceinline__ void add_floats(FloatSums& sums, const FloatRows* rows, const FloatColumns* columns, uint32_t count) {
  for (uint32_t in = 0; in < count; ++in) {
    const float2 a = *reinterpret_cast<const float2*>(&rows[in][own_row()]);
    const float4 b = *reinterpret_cast<const float4*>(&columns[in][own_column()]);
    const float left[own_rows] = {a.x, a.y}, right[own_columns] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (uint32_t i = 0; i < own_rows; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < own_columns; ++j) sums[i][j] = __fmaf_rn(left[i], right[j], sums[i][j]);
    }
  }
}

// A step of a factor on its way: from memory, and to where all read it.
struct FloatWeight {
  float values[depth * tile_columns / float_threads];

  __device__ __forceinline__ void load(uint32_t type, uint64_t weight, uint32_t columns, uint32_t k, uint32_t end, uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < depth * tile_columns / float_threads; ++i) {
      const uint32_t at = threadIdx.x + i * float_threads, in = k + at / tile_columns, column = first + at % tile_columns;
      values[i] = in < end && column < columns ? load_float(type, weight, uint64_t(in) * columns + column) : 0.0f;
    }
  }

  __device__ __forceinline__ void store(FloatColumns* to) const {
#pragma unroll
    for (uint32_t i = 0; i < depth * tile_columns / float_threads; ++i) {
      const uint32_t at = threadIdx.x + i * float_threads;
      to[at / tile_columns][at % tile_columns] = values[i];
    }
  }
};

// The same of a tile's rows.
struct FloatX {
  float values[depth * tile_rows / float_threads];

  __device__ __forceinline__ void load(const LoraParams& p, const Down& tile, uint32_t k) {
#pragma unroll
    for (uint32_t i = 0; i < depth * tile_rows / float_threads; ++i) {
      const uint32_t at = threadIdx.x + i * float_threads, row = at / depth, in = k + at % depth;
      const uint64_t from = uint64_t(p.row[tile.run] + tile.row + row) * p.x_row + in * p.x_inner;
      values[i] = row < tile.rows && in < tile.end ? load_float(p.x_type, p.x, from) : 0.0f;
    }
  }

  __device__ __forceinline__ void store(FloatRows* to) const {
#pragma unroll
    for (uint32_t i = 0; i < depth * tile_rows / float_threads; ++i) {
      const uint32_t at = threadIdx.x + i * float_threads;
      to[at % depth][at / depth] = values[i];
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(threads) brigade_lora_down_f16(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  go_down<__half>(p);
}

extern "C" __global__ void __launch_bounds__(threads) brigade_lora_down_bf16(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  go_down<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(threads) brigade_lora_up_f16(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  go_up<__half>(p);
}

extern "C" __global__ void __launch_bounds__(threads) brigade_lora_up_bf16(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  go_up<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(float_threads) brigade_lora_down_f32(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  __shared__ __align__(16) float rows[depth][rows_stride], columns[depth][columns_stride];
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Down tile(p, t);
    const uint64_t weight = p.weight[tile.run];
    const uint32_t width = p.width[tile.run], type = p.weight_type[tile.run];
    FloatSums sums = {}, total = {};
    FloatX x;
    FloatWeight w;
    const auto load = [&](uint32_t k) {
      x.load(p, tile, k);
      w.load(type, weight, width, k, tile.end, tile.column);
    };
    load(tile.begin);
    for (uint32_t k = tile.begin; k < tile.end; k += depth) {
      __syncthreads();
      x.store(rows);
      w.store(columns);
      __syncthreads();
      if (k + depth < tile.end) load(k + depth);
      add_floats(sums, rows, columns, depth);
      if ((k + depth) % LORA_CHUNK != 0 && k + depth < tile.end) continue;
#pragma unroll
      for (uint32_t i = 0; i < own_rows * own_columns; ++i) {
        (&total[0][0])[i] += (&sums[0][0])[i];
        (&sums[0][0])[i] = 0.0f;
      }
    }
    for (uint32_t i = 0; i < own_rows; ++i) {
      if (own_row() + i >= tile.rows) break;
#pragma unroll
      for (uint32_t j = 0; j < own_columns; ++j) {
        if (tile.column + own_column() + j < width) tile.low(p, own_row() + i)[own_column() + j] = total[i][j];
      }
    }
  }
}

// Into sums in f32, to which it adds.
extern "C" __global__ void __launch_bounds__(float_threads) brigade_lora_up_f32(const __grid_constant__ LoraParams p) {
  wait_for_previous_kernel();
  __shared__ __align__(16) float rows[LORA_WIDTH][rows_stride], columns[depth][columns_stride];
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Up tile(p, t);
    const uint64_t weight = p.weight[tile.run];
    const uint32_t width = p.width[tile.run], type = p.weight_type[tile.run], quarters = (width + 3) / 4;
    const float scale = p.scale[tile.run];
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < tile.rows * quarters; at += float_threads) {
      const uint32_t row = at / quarters, column = at % quarters * 4;
      const float4 sum = tile.low(p, row, column);
      rows[column][row] = sum.x, rows[column + 1][row] = sum.y, rows[column + 2][row] = sum.z, rows[column + 3][row] = sum.w;
    }
    FloatWeight w;
    w.load(type, weight, p.columns, 0, width, tile.column);
    for (uint32_t i = 0; i < tile.tiles; ++i) {
      const uint32_t first = tile.column + i * tile_columns;
      FloatSums sums = {};
      for (uint32_t k = 0; k < width; k += depth) {
        __syncthreads();
        w.store(columns);
        __syncthreads();
        const bool more = k + depth < width;
        if (more || i + 1 < tile.tiles) {
          w.load(type, weight, p.columns, more ? k + depth : 0, width, more ? first : first + tile_columns);
        }
        add_floats(sums, rows + k, columns, min(width - k, depth));
      }
#pragma unroll
      for (uint32_t row = 0; row < own_rows; ++row) {
        if (own_row() + row >= tile.rows) break;
        float* out = reinterpret_cast<float*>(p.out) + uint64_t(p.row[tile.run] + tile.row + own_row() + row) * p.columns;
#pragma unroll
        for (uint32_t j = 0; j < own_columns; ++j) {
          const uint32_t column = first + own_column() + j;
          if (column < p.columns) out[column] = canonical(__fmaf_rn(scale, sums[row][j], out[column]));
        }
      }
    }
  }
}
