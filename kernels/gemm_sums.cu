// The twin: a rank's product of everybody's rows. Tiles of others' come first, and go to their owners as they are made (`gemm_send.cuh`), or by copy
// engines, part by part. To those of its own rows, the last parts, a rank adds what all others made of them:
// out = act(sum of all ranks' rows weight^T + bias), in the order of ranks.
//
// What another rank made of a tile is loaded as more stages behind the tile's own products, while these
// are still multiplied: so the end finds it in shared memory, and no kernel behind the product reads all of it again. The first of these loads waits
// until all others have said that the part's rows are there.
#include "gemm_send.cuh"

using namespace brigade;

#ifdef BRIGADE_HAS_WGMMA

// What a rank has made of a tile's rows comes in boxes, each of as many columns as a row of a stage holds: those of all other ranks for the
// first columns, then for the next, as many in a stage as it has room for.
constexpr uint32_t slab_columns = row_bytes / 2;
template <uint32_t COLUMNS>
constexpr uint32_t boxes = stage_bytes<COLUMNS> / rows_bytes;
template <uint32_t COLUMNS>
constexpr uint32_t most_slabs = (COLUMNS + slab_columns - 1) / slab_columns;

template <uint32_t COLUMNS>
__device__ __forceinline__ uint32_t slabs_of(const Parameters& p, const Tile& tile) {
  const uint32_t left = (p.columns - tile.column + slab_columns - 1) / slab_columns;
  return left < most_slabs<COLUMNS> ? left : most_slabs<COLUMNS>;
}

// One of the two groups that multiply.
__device__ __forceinline__ void group_meets(uint32_t half) { asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory"); }

__device__ __forceinline__ uint32_t load_shared(uint32_t at) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t sum_word(const Parameters& p, uint32_t part, uint32_t peer) {
  return p.sum_word[(part - p.sum_part) * p.size + peer];
}

__device__ __forceinline__ uint64_t flag_of_call(const Parameters& p, const Group& g) { return g.flag(load_relaxed_sys(g.counter(p.counter))); }

// Whether all others have told this rank that what they made of a part's rows is there.
__device__ inline bool others_are_there(const Parameters& p, const Group& g, uint32_t part) {
  const uint64_t flag = flag_of_call(p, g);
  bool there = true;
  for (uint32_t i = 1; i < p.size; ++i) {
    const uint32_t peer = (p.rank + i) % p.size;
    there = there && load_acquire_sys(g.word(p.rank, sum_word(p, part, peer))) == flag;
  }
  return there;
}

// Waits for that. False if the group was stopped.
__device__ inline bool wait_for_others(const Parameters& p, const Group& g, uint32_t part) {
  const uint64_t flag = flag_of_call(p, g);
  for (uint32_t i = 1; i < p.size; ++i) {
    const uint32_t peer = (p.rank + i) % p.size;
    Waiting w{sum_word(p, part, peer), flag, Want::exactly, peer, peer};
    w.uncounted = blockIdx.x > 0;
    while (w.end == End::going_on) look(g, w);
    if (w.end == End::there) continue;
    give_up(g, w);
    return false;
  }
  return true;
}

// Loads what others made of a tile.
template <uint32_t COLUMNS>
struct Behind {
  const Parameters& p;
  uint32_t base, full, empty;
  uint32_t* tiles;
  uint32_t seen;

  // Whether others must be heard of first.
  __device__ __forceinline__ bool is_open(const Tile& tile) const { return tile.part >= p.sum_part && p.size > 1 && !(seen >> tile.part & 1); }

  template <typename MayWait>
  __device__ __forceinline__ void look_ahead(const Tile& tile, MayWait& may_wait) {
    if (!is_open(tile) || !may_wait() || !others_are_there(p, group_of(p, p.signature), tile.part)) return;
    bulk_copies_follow();
    seen |= 1u << tile.part;
  }

  template <typename MayWait>
  __device__ __forceinline__ void operator()(uint32_t t, const Tile& tile, Ring<COLUMNS>& ring, MayWait& may_wait, bool& waits) {
    if (tile.part < p.sum_part) return;
    if (is_open(tile)) {
      if (may_wait()) waits = wait_for_others(p, group_of(p, p.signature), tile.part);
      bulk_copies_follow();
      seen |= 1u << tile.part;
    }
    const uint32_t others = p.size - 1, count = slabs_of<COLUMNS>(p, tile) * others;
    const uint32_t row = p.part_out_row[tile.part] - p.part_out_row[p.sum_part] + tile.band * p.band_rows;
    uint32_t slab = 0, other = 0;
    for (uint32_t first = 0; first < count; first += boxes<COLUMNS>) {
      const uint32_t here = count - first < boxes<COLUMNS> ? count - first : boxes<COLUMNS>;
      const uint32_t barrier = full + 8 * ring.stage;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      tiles[ring.stage] = t;
      barrier_expect(barrier, here * p.band_rows * row_bytes);
      for (uint32_t i = 0; i < here; ++i) {
        const uint32_t source = other < p.rank ? other : other + 1;
        const uint32_t to = base + ring.stage * stage_bytes<COLUMNS> + i * rows_bytes;
        load_box(to, p.parts_map, tile.column + slab * slab_columns, source * p.sum_rows + row, barrier);
        if (++other == others) other = 0, ++slab;
      }
      ring.next();
    }
  }
};

// Adds what others have made of a tile to `sums`, in the order of ranks and as `reduce.cu` does. What this rank made is rounded like everybody's.
template <typename T, uint32_t COLUMNS>
__device__ inline void add_parts(const Parameters& p, const Tile& tile, uint32_t base, uint32_t full, uint32_t empty, Ring<COLUMNS>& ring,
                                 float (&sums)[COLUMNS / 2]) {
  const uint32_t half = threadIdx.x / 128 - 1, row = own_row(half * 64), slabs = slabs_of<COLUMNS>(p, tile);
  const uint32_t in_box = row * row_bytes + threadIdx.x % 4 * 4;
  uint32_t box = 0;
  const auto release = [&] {
    reads_are_done();
    group_meets(half);
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ring.stage);
    ring.next();
    box = 0;
  };
#pragma unroll
  for (uint32_t slab = 0; slab < most_slabs<COLUMNS>; ++slab) {
    if (slab >= slabs) break;
    constexpr uint32_t blocks = slab_columns / 8;
    uint32_t own[2 * blocks] = {};
#pragma unroll
    for (uint32_t i = 0; i < 2 * blocks; ++i) {
      const uint32_t at = slab * slab_columns / 2 + 2 * i;
      if (at >= COLUMNS / 2) continue;
      own[i] = rounded<T>(sums[at], sums[at + 1]);
      // The one number that changes none that is added to it.
      sums[at] = sums[at + 1] = -0.0f;
    }
    const auto add = [&](const uint32_t(&words)[2 * blocks]) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * blocks; ++i) {
        const uint32_t at = slab * slab_columns / 2 + 2 * i;
        if (at >= COLUMNS / 2) continue;
        const float2 two = widen(type_of<T>, words[i]);
        sums[at] = __fadd_rn(sums[at], two.x), sums[at + 1] = __fadd_rn(sums[at + 1], two.y);
      }
    };
#pragma unroll 1
    for (uint32_t other = 0;; ++other) {
      if (other == p.rank) add(own);
      if (other + 1 == p.size) break;
      if (box == 0) barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t from = base + ring.stage * stage_bytes<COLUMNS> + box * rows_bytes + in_box;
      uint32_t words[2 * blocks];
#pragma unroll
      for (uint32_t i = 0; i < 2 * blocks; ++i) words[i] = load_shared(from + ((i / 2 ^ row % 8) << 4) + i % 2 * 8 * row_bytes);
      if (++box == boxes<COLUMNS>) release();
      add(words);
    }
  }
  if (box != 0) release();
}

// What becomes of a tile's sums: a part of what its owner adds up, or the result.
template <typename T, uint32_t COLUMNS>
struct Ends {
  const Parameters& p;
  const Block& block;
  Mail mail;

  __device__ __forceinline__ Ends(const Parameters& p, const Block& block) : p(p), block(block), mail(block, group()) {}
  static __device__ __forceinline__ uint32_t group() { return threadIdx.x / 128 - 1; }

  __device__ __forceinline__ void operator()(uint32_t t, const Tile& tile, uint32_t first_row, float (&sums)[COLUMNS / 2], Ring<COLUMNS>& ring) {
    if (tile.part < p.sum_part) {
      round_tile<float, T, COLUMNS>(p, tile, first_row, sums);
      group_meets(group());
      if (threadIdx.x % 128 == 0) mail.put(t);
      __syncwarp();
      return;
    }
    add_parts<T, COLUMNS>(p, tile, block.base, block.full, block.empty, ring, sums);
    write_tile<T, T, COLUMNS, true>(p, tile, first_row, sums);
  }
  __device__ __forceinline__ void done() {
    if (threadIdx.x % 128 == 0) mail.put(none);
  }
};

template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_sums(const Parameters& p) {
  run_tiles<T, COLUMNS>(
      p, [&](const Block& b) { return Behind<COLUMNS>{p, b.base, b.full, b.empty, b.tiles, 0}; },
      [&](const Block& b) { return Ends<T, COLUMNS>(p, b); }, [&](const Block& b) { send_tiles<COLUMNS>(p, b); });
}
#else
template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_sums(const Parameters&) {
  __trap();  // The host launches it on compute capability 9.0 alone.
}
#endif

#define BRIGADE_GEMM_SUMS(T, TYPE, COLUMNS)                                         \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)                     \
      brigade_gemm_sums_##TYPE##_##COLUMNS(const __grid_constant__ Parameters p) {  \
    gemm_sums<T, COLUMNS>(p);                                                       \
  }
#define BRIGADE_GEMM_SUMS_OF(T, TYPE)   \
  BRIGADE_GEMM_SUMS(T, TYPE, 64)        \
  BRIGADE_GEMM_SUMS(T, TYPE, 128)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 192)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 224)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 256)

BRIGADE_GEMM_SUMS_OF(__half, f16)
BRIGADE_GEMM_SUMS_OF(__nv_bfloat16, bf16)
