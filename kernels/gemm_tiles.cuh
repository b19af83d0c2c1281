// Products by tiles: what `gemm_flags.cu`, whose rows arrive part by part, and `gemm_sums.cu`, which adds up what all ranks made of its own, have in common.
//
// One block on each multiprocessor takes tile after tile, each the first that nobody has, in the order of the parts, and works until there is none left. In a block,
// one thread loads and two warp groups multiply 64 rows of a tile each; a ring of stages in shared memory lies between them. The inner dimension is walked in the same
// order for every tile, so results do not depend on how rows were cut into parts, or on when they came.
//
// Adapters are more of the inner dimension. Narrow tiles make `low`: rows times the adapters' first factors. Every tile ends with a product of its rows of `low` and
// the second factors. A few blocks begin with narrow tiles, until there are none, and then take others, where that leaves blocks enough for the others: who takes one
// among others ends later by its length. Else those of some bands come right before the bands' other tiles. A narrow tile waits for its part alone, and is taken before
// all that wait for it, by a block that is on its way already.
//
// Factors of 8 bits have scales, one for each row (or part) and one for each column (or for all), which the end multiplies by as `finish.cu` does. Sums of int8 are
// exact; those of fp8 are taken of 128 products at a time, and added up in f32, since tensor cores keep fewer bits.
//
// Warps that load and others that multiply are CUTLASS's (warp-specialized cooperative); flags before tiles are after FLUX and TileLink; adapters after Punica, S-LoRA.
#pragma once
#include "activation.cuh"
#include "steps.cuh"
#include "types.cuh"
#include "wgmma.cuh"
#include <type_traits>

namespace brigade {

// As a tensor map must lie.
struct alignas(64) Parameters : GemmFlagsParams {};
static_assert(sizeof(Parameters) == sizeof(GemmFlagsParams), "the host's struct ends where this one does");

}  // namespace brigade

#ifdef BRIGADE_HAS_WGMMA
namespace brigade {

constexpr uint32_t tile_rows = GEMM_ROWS, row_bytes = 128;
constexpr uint32_t rows_bytes = tile_rows * row_bytes;

// Warps that send, behind the one that loads.
constexpr uint32_t senders = 2;

// Stages of a tile of so many columns: rows and weight for 64 steps of the inner dimension. Beside them there is room to align the first, and for two barriers each and
// the number of its tile.
template <uint32_t COLUMNS>
constexpr uint32_t stage_bytes = rows_bytes + COLUMNS * row_bytes;
template <uint32_t COLUMNS>
constexpr uint32_t stages = (GEMM_SHARED_BYTES - 1024 - 160) / stage_bytes<COLUMNS>;

// Elements of the inner dimension in a row of a stage.
template <typename In>
constexpr uint32_t inner_of = row_bytes / sizeof(In);

template <typename In>
using SumOf = std::conditional_t<std::is_same_v<In, int8_t>, int32_t, float>;

// Whether rows and columns have scales. Adapters go with those that have none.
template <typename In>
constexpr bool has_scales = sizeof(In) == 1;

// Whether sums of a stage are added up apart.
template <typename In>
constexpr bool adds_apart = std::is_same_v<In, __nv_fp8_e4m3>;

// How many steps of the inner dimension a stage holds, and of how many bytes. Of a narrow tile they are as many as find room, since it waits for loads more than for
// products; of its columns those are loaded which adapters have, and the rest is multiplied into sums that nobody reads.
template <uint32_t COUNT, uint32_t BYTES>
struct Steps { static constexpr uint32_t count = COUNT, bytes = BYTES; };
template <uint32_t COLUMNS>
using OneStep = Steps<1, stage_bytes<COLUMNS>>;
template <uint32_t COLUMNS, uint32_t LOW>
using NarrowSteps = Steps<stage_bytes<COLUMNS> / stage_bytes<LOW>, stage_bytes<LOW>>;

// Columns of a narrow tile's products, by what adapters have.
constexpr uint32_t few_low_columns = GEMM_LOW_COLUMNS / 2;

struct Tile {
  uint32_t part, band, column;
  bool narrow;
};

__device__ __forceinline__ uint32_t bands_of(const Parameters& p, uint32_t part) {
  return (p.part_rows[part] + p.band_rows - 1) / p.band_rows;
}

// Where the rows of a tile's band end in its part.
__device__ __forceinline__ uint32_t rows_until(const Parameters& p, const Tile& tile) {
  const uint32_t end = (tile.band + 1) * p.band_rows, rows = p.part_rows[tile.part];
  return end < rows ? end : rows;
}

// Tiles of some bands are neighbours, so that what is in flight together has rows and columns in common. In front of all, or of those of the same bands, are narrow
// ones, one for each band.
__device__ __forceinline__ Tile tile_of(const Parameters& p, uint32_t t, uint32_t tile_columns) {
  uint32_t part = 0;
  if (t < p.low_tiles) {
    for (; t >= bands_of(p, part); ++part) t -= bands_of(p, part);
    return {part, t, 0, true};
  }
  t -= p.low_tiles;
  const uint32_t column_tiles = (p.columns + tile_columns - 1) / tile_columns;
  while (part + 1 < p.parts && t >= p.part_first[part + 1]) ++part;
  t -= p.part_first[part];
  const uint32_t narrow = p.low_columns != 0 && p.low_tiles == 0, in_bands = GEMM_BANDS * (column_tiles + narrow);
  const uint32_t first = t / in_bands * GEMM_BANDS, in = t % in_bands;
  const uint32_t left = bands_of(p, part) - first, height = left < GEMM_BANDS ? left : GEMM_BANDS;
  const uint32_t band = first + in % height, column = in / height;
  if (column < narrow) return {part, band, 0, true};
  return {part, band, (column - narrow) * tile_columns, false};
}

// The word that says that a band's part of `low` is there.
__device__ __forceinline__ uint32_t* low_flag(const Parameters& p, uint32_t part, uint32_t band) {
  uint32_t before = 0;
  for (uint32_t i = 0; i < part; ++i) before += bands_of(p, i);
  return reinterpret_cast<uint32_t*>(p.low_flags) + before + band;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_gpu(uint32_t* at, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Which tiles a block takes: each the first that no block has; none is left from `p.tiles` on. Every block asks until there is none, and so leaves both counts at zero
// for the next product.
//
// Where narrow tiles come first, who is among the first `p.low_blocks` to ask has the one of that number, and asks for more until there are none.
struct Turns {
  bool narrow = false;
  __device__ __forceinline__ static uint32_t* counts(const Parameters& p) { return reinterpret_cast<uint32_t*>(p.state + 8 * STATE_TILES); }
  // So that a block's first answer is on its way before it is known what it means.
  __device__ __forceinline__ static uint32_t ask(const Parameters& p) {
    return atomicInc(counts(p), p.low_blocks + p.tiles - p.low_tiles + gridDim.x - 1);
  }
  __device__ __forceinline__ uint32_t tile(const Parameters& p, uint32_t turn) {
    narrow = turn < p.low_blocks;
    return narrow ? turn : turn - p.low_blocks + p.low_tiles;
  }
  __device__ __forceinline__ uint32_t next(const Parameters& p) {
    if (narrow) {
      const uint32_t t = p.low_blocks + atomicInc(counts(p) + 1, p.low_tiles - 1);
      if (t < p.low_tiles) return t;
    }
    return tile(p, ask(p));
  }
};

// The two groups that multiply, and not the one that loads.
__device__ __forceinline__ void both_groups_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Waits for the rows of a part. False if the group was stopped: the product goes on, and its result is poisoned.
__device__ inline bool wait_for_part(const Parameters& p, const Group& g, uint32_t part) {
  // Steps may have counted since this kernel began: the first-level cache need not know.
  const uint64_t count = load_relaxed_sys(g.counter(p.counter));
  Waiting w{p.part_word[part], g.flag(count), Want::exactly, p.part_peer[part], p.part_peer[part]};
  w.uncounted = blockIdx.x > 0;
  while (w.end == End::going_on) look(g, w);
  if (w.end == End::there) return true;
  give_up(g, w);
  return false;
}

// Waits for a band's part of `low`, which another block makes: soon, unless something else keeps it from its multiprocessor.
__device__ inline bool wait_for_low(const Parameters& p, const Group& g, const uint32_t* there) {
  for (uint32_t looks = 1; load_acquire_gpu(there) == 0; ++looks) {
    if (looks % long_glance != 0) continue;
    if (is_stopped(g)) return false;
    if (globaltimer_ns() - g.started_ns() < most_ns(g)) continue;
    Waiting w{};
    w.end = End::timeout;
    w.peer = w.blamed = w.slot = g.rank;
    give_up(g, w);
    return false;
  }
  return true;
}

// Which stage of the ring comes next, and in which round.
template <uint32_t COLUMNS>
struct Ring {
  uint32_t stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages<COLUMNS>) stage = 0, phase ^= 1;
  }
};

// Where a block has its stages and their barriers in shared memory, the numbers of their tiles, and the mail of the warps that send.
struct Block {
  uint32_t base, full, empty;
  uint32_t* tiles;
  // For each group that multiplies: a barrier that says there is mail, one that says it was read, and the tile that it is about.
  uint32_t mail;
  uint32_t* mailed;
};

template <uint32_t COLUMNS>
__device__ __forceinline__ Block block_in(uint8_t* memory) {
  const uint32_t begin = shared_address(memory), base = (begin + 1023) & ~1023u;
  const uint32_t full = base + stages<COLUMNS> * stage_bytes<COLUMNS>, empty = full + 8 * stages<COLUMNS>;
  const uint32_t mail = empty + 8 * stages<COLUMNS>, tiles = mail + 4 * 8;
  static_assert(1023 + stages<COLUMNS> * (stage_bytes<COLUMNS> + 20) + 4 * 8 + 2 * 4 <= GEMM_SHARED_BYTES, "all lies in shared memory");
  uint32_t* numbers = reinterpret_cast<uint32_t*>(memory + (tiles - begin));
  return {base, full, empty, numbers, mail, numbers + stages<COLUMNS>};
}

// Loads what the tiles need, stage after stage, and says of each stage for which tile it is. Rows beyond a matrix' end take longer than those that are there. So bands
// are as high as their rows need, and what the rest of a stage holds is multiplied into sums that nobody writes.
//
// `behind` loads what a tile needs behind its products: called as `behind(number, tile, ring, may_wait, waits)`. While products are still loaded, it is called as
// `behind.look_ahead(tile, may_wait)`, so that what is there by then is not waited for.
template <typename In, uint32_t COLUMNS, typename Behind>
__device__ inline void load(const Parameters& p, uint32_t first_turn, uint32_t base, uint32_t full, uint32_t empty, uint32_t* tiles, Behind behind) {
  constexpr uint32_t inner = inner_of<In>;
  Turns turns;
  uint32_t t = turns.tile(p, first_turn);
  const Group g = group_of(p, p.signature);
  Ring<COLUMNS> ring;
  uint32_t next = 0;
  // A step's columns lie behind room for all rows, and may be fewer than it has room for.
  const auto load_stage = [&](const void* rows, uint32_t row, const void* columns, uint32_t column, uint32_t k, auto steps, uint32_t count_columns) {
    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    const uint32_t at = base + ring.stage * stage_bytes<COLUMNS>, barrier = full + 8 * ring.stage;
    tiles[ring.stage] = t;
    barrier_expect(barrier, steps.count * (p.band_rows + count_columns) * row_bytes);
#pragma unroll 1
    for (uint32_t i = 0; i < steps.count; ++i) {
      load_box(at + i * steps.bytes, rows, k + i * inner, row, barrier);
      load_box(at + i * steps.bytes + rows_bytes, columns, k + i * inner, column, barrier);
    }
    ring.next();
  };
  // Where nothing is waited for, nobody looks either. Steps that this product began beside have let it in behind all that was in front of
  // them, so own rows and adapters are there; what they count and are told is not, before they have ended.
  bool waits = true, looked = false;
  const auto may_wait = [&] {
    if (!looked) {
      wait_for_previous_kernel();
      // In a group that was stopped, the steps before this product have not counted the call.
      waits = !is_stopped(g);
    }
    looked = true;
    return waits;
  };
  uint32_t seen = 0;
  constexpr OneStep<COLUMNS> one;
  constexpr NarrowSteps<COLUMNS, few_low_columns> few;
  constexpr NarrowSteps<COLUMNS, GEMM_LOW_COLUMNS> many;
  static_assert(few.count % many.count == 0, "who asks at a stage of the first asks at one of the second");
  // Asked for while there is still something to multiply, and no sooner, since whoever is free first should have it.
  constexpr uint32_t stage_inner = inner * few.count, last = stage_inner * stages<COLUMNS>;
  const uint32_t ask_at = p.inner > last ? (p.inner - last) / stage_inner * stage_inner : 0;
  for (; t < p.tiles; t = next) {
    const Tile tile = tile_of(p, t, COLUMNS);
    const bool own = p.part_word[tile.part] == 0;
    if (!own && !(seen >> tile.part & 1) && may_wait()) {
      waits = wait_for_part(p, g, tile.part);
      bulk_copies_follow();
      seen |= 1u << tile.part;
    }
    const void* rows = own ? p.own_map : p.rows_map;
    const uint32_t row = p.part_row[tile.part] + tile.band * p.band_rows;
    if (!has_scales<In> && tile.narrow) {
      struct { uint32_t count, bytes; } steps = {many.count, many.bytes};
      if (p.low_columns <= few_low_columns) steps = {few.count, few.bytes};
      for (uint32_t k = 0; k < p.inner; k += inner * steps.count) {
        if (k == ask_at) next = turns.next(p);
        load_stage(rows, row, p.down_map, 0, k, steps, p.low_columns);
      }
      continue;
    }
    for (uint32_t k = 0; k < p.inner; k += inner) {
      if (k == ask_at) {
        next = turns.next(p);
        behind.look_ahead(tile, may_wait);
      }
      load_stage(rows, row, p.weight_map, tile.column, k, one, COLUMNS);
    }
    if (!has_scales<In> && p.low_columns != 0) {
      const uint32_t* there = low_flag(p, tile.part, tile.band);
      if (load_acquire_gpu(there) == 0 && may_wait()) waits = wait_for_low(p, g, there);
      bulk_copies_follow();
      const uint32_t out_row = p.part_out_row[tile.part] + tile.band * p.band_rows;
      load_stage(p.low_map, out_row, p.up_map, tile.column, 0, one, COLUMNS);
    }
    behind(t, tile, ring, may_wait, waits);
  }
  // Who waits for the end of this product waits for those steps, too.
  wait_for_previous_kernel();
  // There is no more.
  barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  tiles[ring.stage] = t;
  barrier_arrive(full + 8 * ring.stage);
}

template <typename T>
__device__ __forceinline__ uint32_t rounded(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}

// Applied to all, and once in the code, not once for each.
template <uint32_t COUNT>
__device__ __forceinline__ void activate_all(uint32_t activation, float (&values)[COUNT]) {
  float x[COUNT];
#pragma unroll
  for (uint32_t k = 0; k < COUNT; ++k) x[k] = values[k];
#pragma unroll 1
  for (uint32_t k = 0; k < COUNT; ++k) x[k] = activate(activation, x[k]);
#pragma unroll
  for (uint32_t k = 0; k < COUNT; ++k) values[k] = x[k];
}

// What a part of the rows has been waited for to be read: not by a line that was in the multiprocessor's cache before.
__device__ __forceinline__ float load_arrived(uint64_t at) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
  return value;
}

// Rows of a tile of which this thread has sums: this one, and the eighth after it.
__device__ __forceinline__ uint32_t own_row(uint32_t first_row) { return first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

__device__ __forceinline__ float as_float(float sum) { return sum; }
__device__ __forceinline__ float as_float(int32_t sum) { return __int_as_float(sum); }
__device__ __forceinline__ void set(float& sum, float value) { sum = value; }
__device__ __forceinline__ void set(int32_t& sum, float value) { sum = __float_as_int(value); }

// Scales, bias and activation, in place: floats, where sums were integers as well. Apart from what rounds and writes, which stays short where there is none of these.
template <typename In, uint32_t COLUMNS>
__device__ inline void finish_tile(const Parameters& p, const Tile& tile, uint32_t first_row, SumOf<In> (&sums)[COLUMNS / 2]) {
  const uint32_t quad = threadIdx.x % 4, rows = rows_until(p, tile);
  const float* column_scales = reinterpret_cast<const float*>(p.column_scales);
  float row_scale[2] = {};
  if constexpr (has_scales<In>) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = own_row(first_row) + 8 * half;
      if (row < rows) row_scale[half] = load_arrived(p.part_scales[tile.part] + uint64_t(row) * p.row_scale_stride * sizeof(float));
    }
  }
#pragma unroll
  for (uint32_t block = 0; block < COLUMNS / 8; block += 4) {
    float2 scale[4] = {};
    if constexpr (has_scales<In>) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t column = tile.column + 8 * (block + i) + 2 * quad, stride = p.column_scale_stride;
        if (column >= p.columns) continue;
        scale[i] = {column_scales[column * stride], column_scales[(column + 1) * stride]};
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float x[8] = {};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float &low = x[2 * i], &high = x[2 * i + 1];
        low = float(sums[4 * (block + i) + 2 * half]), high = float(sums[4 * (block + i) + 2 * half + 1]);
        if constexpr (has_scales<In>) {
          low = __fmul_rn(__fmul_rn(low, row_scale[half]), scale[i].x);
          high = __fmul_rn(__fmul_rn(high, row_scale[half]), scale[i].y);
        }
      }
      const uint32_t row = own_row(first_row) + 8 * half;
      if (p.bias != 0 && row < rows) {
        const uint64_t from = uint64_t(p.part_out_row[tile.part] + row) * p.bias_stride;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t column = tile.column + 8 * (block + i) + 2 * quad;
          if (column >= p.columns) continue;
          const float2 c = load_two(p.bias_type, p.bias, from + column);
          x[2 * i] = __fadd_rn(x[2 * i], c.x), x[2 * i + 1] = __fadd_rn(x[2 * i + 1], c.y);
        }
      }
      if (p.activation != NONE) activate_all(p.activation, x);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        set(sums[4 * (block + i) + 2 * half], x[2 * i]), set(sums[4 * (block + i) + 2 * half + 1], x[2 * i + 1]);
      }
    }
  }
}

// A type of results, as `types.cuh` numbers it.
template <typename T>
constexpr uint32_t type_of = std::is_same_v<T, __half> ? F16 : BF16;

// Rounds; then the four threads of a quad, which hold 2 columns of each block of 8, trade until each has one block, so that a store is 16 bytes. A NaN is the
// hardware's, or, if `CANONICAL`, that of the type.
template <typename Sum, typename Out, uint32_t COLUMNS, bool CANONICAL = false>
__device__ inline void round_tile(const Parameters& p, const Tile& tile, uint32_t first_row, Sum (&sums)[COLUMNS / 2]) {
  const uint32_t quad = threadIdx.x % 4, rows = rows_until(p, tile);
#pragma unroll
  for (uint32_t block = 0; block < COLUMNS / 8; block += 4) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t v[4] = {};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t at = 4 * (block + i) + 2 * half;
        if constexpr (CANONICAL) {
          v[i] = narrow(type_of<Out>, as_float(sums[at]), as_float(sums[at + 1]));
        } else {
          v[i] = rounded<Out>(as_float(sums[at]), as_float(sums[at + 1]));
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, quad & 1 ? v[i] : v[i + 1], 1);
        (quad & 1 ? v[i] : v[i + 1]) = got;
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(~0u, quad & 2 ? v[i] : v[i + 2], 2);
        (quad & 2 ? v[i] : v[i + 2]) = got;
      }
      const uint32_t row = own_row(first_row) + 8 * half, column = tile.column + 8 * (block + quad);
      if (row < rows && column < p.columns) {
        uint4* out = reinterpret_cast<uint4*>(p.part_out[tile.part] + (uint64_t(row) * p.columns + column) * sizeof(Out));
        *out = {v[0], v[1], v[2], v[3]};
      }
    }
  }
}

template <typename In, typename Out, uint32_t COLUMNS, bool CANONICAL = false>
__device__ __forceinline__ void write_tile(const Parameters& p, const Tile& tile, uint32_t first_row, SumOf<In> (&sums)[COLUMNS / 2]) {
  if (has_scales<In> || p.bias != 0 || p.activation != NONE) finish_tile<In, COLUMNS>(p, tile, first_row, sums);
  round_tile<SumOf<In>, Out, COLUMNS, CANONICAL>(p, tile, first_row, sums);
}

// Rounds a narrow tile's sums, times the factors of their runs, into `low`, and zeros between them.
template <typename T, uint32_t LOW>
__device__ inline void write_low(const Parameters& p, const Tile& tile, uint32_t first_row, float (&sums)[LOW / 2]) {
  const uint32_t lane = threadIdx.x % 32, rows = rows_until(p, tile);
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
    if (row >= rows) continue;
    const uint32_t out_row = p.part_out_row[tile.part] + row;
    uint32_t first = 0, width = 0;
    float scale = 0;
    for (uint32_t run = 0; run < p.runs; ++run) {
      if (out_row - p.run_row[run] < p.run_rows[run]) first = p.run_column[run], width = p.run_width[run], scale = p.run_scale[run];
    }
#pragma unroll
    for (uint32_t block = 0; block < LOW / 8; ++block) {
      const uint32_t column = 8 * block + 2 * (lane % 4);
      if (column >= p.low_columns) continue;
      const auto value = [&](uint32_t i) {
        const float sum = half == 0 ? sums[4 * block + i] : sums[4 * block + 2 + i];
        return column + i - first < width ? __fmul_rn(scale, sum) : 0.0f;
      };
      const uint64_t at = uint64_t(out_row) * p.low_columns + column;
      *reinterpret_cast<uint32_t*>(p.low + at * sizeof(T)) = rounded<T>(value(0), value(1));
    }
  }
}

// Multiplies what was loaded, and gives `end` the sums of each tile, to be called as `end(number, tile, first row, sums, ring)`, and as `end.done()` when there is no
// more.
template <typename In, uint32_t COLUMNS, typename End>
__device__ inline void multiply(const Parameters& p, uint32_t base, uint32_t full, uint32_t empty, const uint32_t* tiles, End end) {
  const uint32_t half = threadIdx.x / 128 - 1;
  const bool leads = threadIdx.x % 128 == 0;
  constexpr uint32_t inner = inner_of<In>;
  Ring<COLUMNS> ring;
  // One tile of so many stages, each of so many steps. Boxes are zero beyond the end of the inner dimension.
  const auto sum_up = [&](auto& sums, uint32_t stages_of_tile, auto steps) {
    uint32_t before = 0;
    for (uint32_t stage = 0; stage < stages_of_tile; ++stage) {
      barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t at = base + ring.stage * stage_bytes<COLUMNS>;
      products_begin();
#pragma unroll
      for (uint32_t step = 0; step < steps.count; ++step) {
        const uint32_t from = at + step * steps.bytes;
        const uint64_t a = inner_major(from + half * 64 * row_bytes), b = inner_major(from + rows_bytes);
        // A product is of 32 bytes of each row, and descriptors count in 16.
#pragma unroll
        for (uint32_t i = 0; i < row_bytes / 32; ++i) product(In{}, sums, a + 2 * i, b + 2 * i, i > 0 || step > 0 || stage > 0);
      }
      products_commit();
      // The stage before is free once its products are through; this one's go on meanwhile.
      if (stage > 0) {
        products_wait<1>();
        if (leads) barrier_arrive(empty + 8 * before);
      }
      before = ring.stage;
      ring.next();
    }
    products_wait<0>();
    products_done(sums);
    if (leads) barrier_arrive(empty + 8 * before);
  };
  // The same, where what a stage gives is added up apart. The other group multiplies meanwhile.
  const auto add_up = [&](auto& sums, uint32_t stages_of_tile) {
    for (float& sum : sums) sum = 0;
    for (uint32_t stage = 0; stage < stages_of_tile; ++stage) {
      barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t at = base + ring.stage * stage_bytes<COLUMNS>;
      const uint64_t a = inner_major(at + half * 64 * row_bytes), b = inner_major(at + rows_bytes);
      std::remove_reference_t<decltype(sums)> part;
      products_begin();
#pragma unroll
      for (uint32_t i = 0; i < row_bytes / 32; ++i) product(In{}, part, a + 2 * i, b + 2 * i, i > 0);
      products_commit();
      products_wait<0>();
      products_done(part);
      if (leads) barrier_arrive(empty + 8 * ring.stage);
      ring.next();
#pragma unroll
      for (uint32_t i = 0; i < COLUMNS / 2; ++i) sums[i] = __fadd_rn(sums[i], part[i]);
    }
  };
  constexpr OneStep<COLUMNS> one;
  const uint32_t steps = (p.inner + inner - 1) / inner;
  // A stage is not filled again before this group's products of it, which every warp has begun by then.
  const auto next = [&] {
    barrier_wait(full + 8 * ring.stage, ring.phase);
    return *static_cast<const volatile uint32_t*>(tiles + ring.stage);
  };
  for (uint32_t t = next(); t < p.tiles; t = next()) {
    const Tile tile = tile_of(p, t, COLUMNS);
    const uint32_t first_row = tile.band * p.band_rows + half * 64;
    SumOf<In> sums[COLUMNS / 2];
    if constexpr (adds_apart<In>) {
      add_up(sums, steps);
    } else if constexpr (has_scales<In>) {
      sum_up(sums, steps, one);
    } else {
      if (tile.narrow) {
        const auto make_low = [&](auto columns, auto of_stage) {
          constexpr uint32_t LOW = decltype(columns)::value;
          float low[LOW / 2];
          sum_up(low, (steps + of_stage.count - 1) / of_stage.count, of_stage);
          write_low<In, LOW>(p, tile, first_row, low);
        };
        if (p.low_columns <= few_low_columns) {
          make_low(std::integral_constant<uint32_t, few_low_columns>{}, NarrowSteps<COLUMNS, few_low_columns>{});
        } else {
          make_low(std::integral_constant<uint32_t, GEMM_LOW_COLUMNS>{}, NarrowSteps<COLUMNS, GEMM_LOW_COLUMNS>{});
        }
        __threadfence();
        bulk_copies_follow();
        both_groups_meet();
        if (threadIdx.x == 128) store_release_gpu(low_flag(p, tile.part, tile.band), 1);
        continue;
      }
      sum_up(sums, p.low_columns != 0 ? steps + 1 : steps, one);
    }
    end(t, tile, first_row, sums, ring);
  }
  end.done();
}

// What a block does. `behind`, `end` and `send` make of a `Block` what `load` and `multiply` call, and what two more warps do.
template <typename In, uint32_t COLUMNS, typename MakeBehind, typename MakeEnd, typename Send>
__device__ __forceinline__ void run_tiles(const Parameters& p, MakeBehind behind, MakeEnd end, Send send) {
  let_next_kernel_start();
  extern __shared__ uint8_t memory[];
  const Block block = block_in<COLUMNS>(memory);
  // Answers take about a microsecond. Whatever counted tiles here before had ended when steps let this kernel begin, or the kernel before it, unless that makes the state.
  uint32_t first_turn = 0;
  if (threadIdx.x == 0) {
    if (p.begins != BEGINS_WITH_NEW_STATE) first_turn = Turns::ask(p);
    map_is_wanted(p.part_word[0] == 0 ? p.own_map : p.rows_map);
    map_is_wanted(p.weight_map);
    for (uint32_t s = 0; s < stages<COLUMNS>; ++s) {
      barrier_init(block.full + 8 * s, 1);
      barrier_init(block.empty + 8 * s, 2);
    }
    for (uint32_t i = 0; i < 4; ++i) barrier_init(block.mail + 8 * i, 1);
    barriers_made();
  }
  __syncthreads();
  // What is above touches nothing else of an earlier kernel's.
  if (p.begins != BEGINS_BESIDE_STEPS) wait_for_previous_kernel();
  if (p.begins == BEGINS_WITH_NEW_STATE && threadIdx.x == 0) first_turn = Turns::ask(p);
  if (threadIdx.x < 128) {
    fewer_registers<56>();
    if (threadIdx.x == 0) {
      load<In, COLUMNS>(p, first_turn, block.base, block.full, block.empty, block.tiles, behind(block));
    } else if (threadIdx.x >= 32 && threadIdx.x < 32 + 32 * senders) {
      send(block);
    }
  } else {
    more_registers<224>();
    multiply<In, COLUMNS>(p, block.base, block.full, block.empty, block.tiles, end(block));
  }
}

}  // namespace brigade
#endif
