// A product whose tiles wait for their rows: out = rows weight^T + bias, rows in parts that arrive one by one.
//
// One block on each multiprocessor takes every so-many-th tile, in the order of the parts, and works until there is none left.
// In a block, one thread loads (it waits for the flag of a part before it touches the part's rows) and two warp groups multiply
// 64 rows of a tile each; a ring of stages in shared memory lies between them. The inner dimension is walked in the same order
// for every tile, so results do not depend on how rows were cut into parts, or on when they came.
//
// The split into loading and multiplying warps is CUTLASS's (its warp-specialized cooperative kernels); flags in front of tiles
// are after FLUX and TileLink.
#include "steps.cuh"
#include "wgmma.cuh"
#include <type_traits>

using namespace brigade;

// As a tensor map must lie.
struct alignas(64) Parameters : GemmFlagsParams {};
static_assert(sizeof(Parameters) == sizeof(GemmFlagsParams), "the host's struct ends where this one does");

#ifdef BRIGADE_HAS_WGMMA

constexpr uint32_t tile_rows = GEMM_ROWS, inner = 64, row_bytes = 128;
constexpr uint32_t rows_bytes = tile_rows * row_bytes;
constexpr uint32_t bands_together = 8;

// Stages of a tile of so many columns: rows and weight for 64 steps of the inner dimension. Beside them there is room to align
// the first, and for barriers.
template <uint32_t COLUMNS>
constexpr uint32_t stage_bytes = rows_bytes + COLUMNS * row_bytes;
template <uint32_t COLUMNS>
constexpr uint32_t stages = (GEMM_SHARED_BYTES - 1024 - 128) / stage_bytes<COLUMNS>;

struct Tile {
  uint32_t part, band, column;
};

// Tiles of some bands are neighbours, so that what is in flight together has rows and columns in common.
__device__ __forceinline__ Tile tile_of(const Parameters& p, uint32_t t, uint32_t tile_columns) {
  uint32_t part = 0;
  while (part + 1 < p.parts && t >= p.part_first[part + 1]) ++part;
  t -= p.part_first[part];
  const uint32_t bands = (p.part_rows[part] + tile_rows - 1) / tile_rows;
  const uint32_t together = t / (bands_together * p.column_tiles), in = t % (bands_together * p.column_tiles);
  const uint32_t left = bands - together * bands_together, height = left < bands_together ? left : bands_together;
  return {part, together * bands_together + in % height, in / height * tile_columns};
}

// Waits for the rows of a part. False if the group was stopped: the product goes on, and its result is poisoned.
__device__ inline bool wait_for_part(const Parameters& p, const Group& g, uint32_t part) {
  Waiting w{p.part_word[part], g.flag(*g.counter(p.counter)), Want::exactly, p.part_peer[part], p.part_peer[part]};
  while (w.end == End::going_on) look(g, w);
  if (w.end == End::there) return true;
  give_up(g, w);
  return false;
}

// Loads what the tiles need, stage after stage.
template <uint32_t COLUMNS>
__device__ inline void load(const Parameters& p, uint32_t base, uint32_t full, uint32_t empty) {
  const Group g = group_of(p, p.signature);
  bool waits = true;
  uint32_t seen = 0, stage = 0, phase = 0;
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Tile tile = tile_of(p, t, COLUMNS);
    const bool own = p.part_word[tile.part] == 0;
    if (!own && waits && !(seen >> tile.part & 1)) {
      waits = wait_for_part(p, g, tile.part);
      bulk_copies_follow();
      seen |= 1u << tile.part;
    }
    const void* map = own ? p.own_map : p.rows_map;
    const uint32_t row = p.part_row[tile.part] + tile.band * tile_rows;
    for (uint32_t k = 0; k < p.inner; k += inner) {
      barrier_wait(empty + 8 * stage, phase ^ 1);
      const uint32_t at = base + stage * stage_bytes<COLUMNS>, barrier = full + 8 * stage;
      barrier_expect(barrier, stage_bytes<COLUMNS>);
      load_box(at, map, k, row, barrier);
      load_box(at + rows_bytes, p.weight_map, k, tile.column, barrier);
      if (++stage == stages<COLUMNS>) stage = 0, phase ^= 1;
    }
  }
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

template <typename T>
__device__ __forceinline__ float2 both(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
}

// Bias, and rounding; then the four threads of a quad, which hold 2 columns of each block of 8, trade until each has
// one block, so that a store is 16 bytes.
template <typename T, uint32_t COLUMNS>
__device__ inline void write_tile(const Parameters& p, const Tile& tile, uint32_t first_row, float (&sums)[COLUMNS / 2]) {
  const uint32_t lane = threadIdx.x % 32, quad = lane % 4;
  const uint32_t rows = p.part_rows[tile.part], own_row = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint32_t* bias = reinterpret_cast<const uint32_t*>(p.bias);
#pragma unroll
  for (uint32_t block = 0; block < COLUMNS / 8; block += 4) {
    float2 added[4] = {};
    if (bias != nullptr) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t column = tile.column + 8 * (block + i) + 2 * quad;
        if (column < p.columns) added[i] = both<T>(bias[column / 2]);
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float low = sums[4 * (block + i) + 2 * half], high = sums[4 * (block + i) + 2 * half + 1];
        if (bias != nullptr) low = __fadd_rn(low, added[i].x), high = __fadd_rn(high, added[i].y);
        v[i] = rounded<T>(low, high);
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
      const uint32_t row = own_row + 8 * half, column = tile.column + 8 * (block + quad);
      if (row < rows && column < p.columns) {
        uint4* out = reinterpret_cast<uint4*>(p.part_out[tile.part] + (uint64_t(row) * p.columns + column) * sizeof(T));
        *out = {v[0], v[1], v[2], v[3]};
      }
    }
  }
}

// Multiplies what was loaded.
template <typename T, uint32_t COLUMNS>
__device__ inline void multiply(const Parameters& p, uint32_t base, uint32_t full, uint32_t empty) {
  const uint32_t half = threadIdx.x / 128 - 1;
  uint32_t stage = 0, phase = 0;
  float sums[COLUMNS / 2];
  for (uint32_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
    const Tile tile = tile_of(p, t, COLUMNS);
    uint32_t before = 0;
    for (uint32_t k = 0; k < p.inner; k += inner) {
      barrier_wait(full + 8 * stage, phase);
      const uint32_t at = base + stage * stage_bytes<COLUMNS>;
      const uint64_t a = inner_major(at + half * 64 * row_bytes), b = inner_major(at + rows_bytes);
      products_begin();
      // 16 elements are 32 bytes, and descriptors count in 16.
#pragma unroll
      for (uint32_t i = 0; i < inner / 16; ++i) product(T{}, sums, a + 2 * i, b + 2 * i, i > 0 || k > 0);
      products_commit();
      // The stage before is free once its products are through; this one's go on meanwhile.
      if (k > 0) {
        products_wait<1>();
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
      }
      before = stage;
      if (++stage == stages<COLUMNS>) stage = 0, phase ^= 1;
    }
    products_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
    write_tile<T, COLUMNS>(p, tile, tile.band * tile_rows + half * 64, sums);
  }
}

template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_flags(const Parameters& p) {
  wait_for_previous_kernel();
  extern __shared__ uint8_t memory[];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = base + stages<COLUMNS> * stage_bytes<COLUMNS>, empty = full + 8 * stages<COLUMNS>;
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < stages<COLUMNS>; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2);
    }
    barriers_made();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) load<COLUMNS>(p, base, full, empty);
  } else {
    more_registers<232>();
    multiply<T, COLUMNS>(p, base, full, empty);
  }
}
#else
template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_flags(const Parameters&) {
  __trap();  // The host launches it on compute capability 9.0 alone.
}
#endif

#define BRIGADE_GEMM_FLAGS(T, TYPE, COLUMNS)                                        \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)                     \
      brigade_gemm_flags_##TYPE##_##COLUMNS(const __grid_constant__ Parameters p) { \
    gemm_flags<T, COLUMNS>(p);                                                      \
  }
#define BRIGADE_GEMM_FLAGS_OF(T, TYPE) \
  BRIGADE_GEMM_FLAGS(T, TYPE, 128)     \
  BRIGADE_GEMM_FLAGS(T, TYPE, 192)     \
  BRIGADE_GEMM_FLAGS(T, TYPE, 224)     \
  BRIGADE_GEMM_FLAGS(T, TYPE, 256)

BRIGADE_GEMM_FLAGS_OF(__half, f16)
BRIGADE_GEMM_FLAGS_OF(__nv_bfloat16, bf16)
