// The twin's product: sums of each part of the rows go to the part's owner, and own rows' are added to what all others made of them:
// out = act(sum of all ranks' rows weight^T + bias), in the order of ranks.
//
// All rows are there, and own ones come last. A tile for another rank passes through the ring of stages: behind its last products the loading thread gives
// each group of warps that multiplies a stage for its 64 rows; the group rounds into it and goes on with the next tile, and a warp beside the loading one
// writes the rows to their owner's memory. So tensor cores do not wait for a link that all multiprocessors share, nor for a fence. Whoever writes the last
// rows of a part says so to its owner.
//
// What others have made of an own tile is loaded as more stages behind its products, while it is still multiplied: the end finds it in shared memory.
// The first of these loads waits until all others have said that their parts are whole.
//
// Tiles that go to their owners with a flag are FLUX's and TileLink's; results that leave through shared memory beside the next tile's products are
// CUTLASS's.
#include "gemm_tiles.cuh"

using namespace brigade;

#ifdef BRIGADE_HAS_WGMMA

// What a rank has made of a tile's rows comes in boxes, each of as many columns as a row of a stage holds: those of all other ranks for the
// first columns, then for the next, as many in a stage as it has room for.
constexpr uint32_t slab_columns = row_bytes / 2;
template <uint32_t COLUMNS>
constexpr uint32_t boxes = stage_bytes<COLUMNS> / rows_bytes;
template <uint32_t COLUMNS>
constexpr uint32_t most_slabs = (COLUMNS + slab_columns - 1) / slab_columns;

// From row to row of what goes out, in bytes: such that the words of 8 rows lie in different banks.
template <uint32_t COLUMNS>
constexpr uint32_t out_pitch = COLUMNS * 2 + 16;
static_assert(64 * out_pitch<256> <= stage_bytes<256> && 64 * out_pitch<64> <= stage_bytes<64>, "a group's rows find room in a stage");

// Says that there is no more to go out.
constexpr uint32_t no_stage = ~0u;

// Whether what all ranks have made of a part's rows is added up here.
__device__ __forceinline__ bool is_added_up(const Parameters& p, uint32_t part) { return p.part_told[part] == 0; }

template <uint32_t COLUMNS>
__device__ __forceinline__ uint32_t slabs_of(const Parameters& p, const Tile& tile) {
  const uint32_t left = (p.columns - tile.column + slab_columns - 1) / slab_columns;
  return left < most_slabs<COLUMNS> ? left : most_slabs<COLUMNS>;
}

// How stages of rounded rows pass from a group that multiplies to the warp that writes them.
struct Outbox {
  // Barriers: the group's rows lie in `stage`, and the warp has read its number.
  uint32_t is_written, is_heard;
  volatile uint32_t* stage;
  uint32_t phase;
};

// One of the two groups that multiply.
__device__ __forceinline__ void group_meets(uint32_t half) { asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory"); }

// All of a group have written what they have of a tile: one tells. (Were each warp to tell, one that is ahead might do so twice.)
__device__ __forceinline__ void hand_over(Outbox& outbox, uint32_t half, uint32_t stage) {
  group_meets(half);
  if (threadIdx.x % 128 == 0) {
    barrier_wait(outbox.is_heard, outbox.phase ^ 1);
    *outbox.stage = stage;
    barrier_arrive(outbox.is_written);
  }
  outbox.phase ^= 1;
}

// Writes rows from shared memory, 16 bytes a thread, of as many columns as there are.
template <uint32_t COLUMNS>
__device__ inline void write_rows(uint64_t to, uint32_t from, uint32_t rows, uint32_t stride, uint32_t columns) {
  constexpr uint32_t in_row = COLUMNS / 8, together = 4;
#pragma unroll 1
  for (uint32_t first = threadIdx.x % 32; first < rows * in_row; first += 32 * together) {
    uint4 words[together];
#pragma unroll
    for (uint32_t i = 0; i < together; ++i) {
      // What is beyond the rows is read, and not written.
      const uint32_t at = first + 32 * i;
      words[i] = load_shared_wide(from + at / in_row * out_pitch<COLUMNS> + at % in_row * 16);
    }
#pragma unroll
    for (uint32_t i = 0; i < together; ++i) {
      const uint32_t row = (first + 32 * i) / in_row, column = (first + 32 * i) % in_row * 8;
      if (row < rows && column < columns) *reinterpret_cast<uint4*>(to + (uint64_t(row) * stride + column) * 2) = words[i];
    }
  }
}

// Counts a group's rows of a tile that are written; the last of a part is told to its owner.
__device__ inline void tell_of_whole_part(const Parameters& p, const Group& g, uint32_t part, uint32_t column_tiles) {
  uint32_t* counts = reinterpret_cast<uint32_t*>(p.state + 8 * STATE_PARTS);
  const uint32_t all = 2 * bands_of(p, part) * column_tiles;
  // What was written before comes before the count, and what others counted before the flag.
  __threadfence_system();
  if (atomicInc(counts + part, all - 1) != all - 1) return;
  __threadfence_system();
  // Nobody is to take what a rank made that was stopped.
  if (is_stopped(g)) return;
  const uint64_t flag = g.flag(load_relaxed_sys(g.counter(p.counter)));
  store_release_sys(g.word(p.part_peer[part], p.part_told[part]), flag);
}

// Waits until all others have told this rank that what they made of its rows is there. False if the group was stopped.
__device__ inline bool wait_for_others(const Parameters& p, const Group& g) {
  const uint64_t flag = g.flag(load_relaxed_sys(g.counter(p.counter)));
  for (uint32_t i = 1; i < p.size; ++i) {
    const uint32_t peer = (p.rank + i) % p.size;
    Waiting w{p.sum_word[peer], flag, Want::exactly, peer, peer};
    w.uncounted = blockIdx.x > 0;
    while (w.end == End::going_on) look(g, w);
    if (w.end == End::there) continue;
    give_up(g, w);
    return false;
  }
  return true;
}

// What a tile needs behind its products.
template <uint32_t COLUMNS>
struct Behind {
  const Parameters& p;
  uint32_t base, full, empty;
  uint32_t* tiles;
  bool parts_are_there;

  template <typename MayWait>
  __device__ __forceinline__ void operator()(uint32_t t, const Tile& tile, Ring<COLUMNS>& ring, MayWait& may_wait, bool& waits) {
    if (is_added_up(p, tile.part)) {
      if (p.size > 1 && !parts_are_there) {
        if (may_wait()) waits = wait_for_others(p, group_of(p, p.signature));
        bulk_copies_follow();
        parts_are_there = true;
      }
      load_parts(t, tile, ring);
      return;
    }
    for (uint32_t half = 0; half < 2; ++half) {
      next_stage(t, ring);
      barrier_arrive(full + 8 * ring.stage);
      ring.next();
    }
  }

  __device__ __forceinline__ void next_stage(uint32_t t, const Ring<COLUMNS>& ring) {
    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    tiles[ring.stage] = t;
  }

  __device__ __forceinline__ void load_parts(uint32_t t, const Tile& tile, Ring<COLUMNS>& ring) {
    const uint32_t others = p.size - 1, count = slabs_of<COLUMNS>(p, tile) * others;
    uint32_t slab = 0, other = 0;
    for (uint32_t first = 0; first < count; first += boxes<COLUMNS>) {
      const uint32_t here = count - first < boxes<COLUMNS> ? count - first : boxes<COLUMNS>;
      next_stage(t, ring);
      const uint32_t barrier = full + 8 * ring.stage;
      barrier_expect(barrier, here * p.band_rows * row_bytes);
      for (uint32_t i = 0; i < here; ++i) {
        const uint32_t source = other < p.rank ? other : other + 1;
        const uint32_t to = base + ring.stage * stage_bytes<COLUMNS> + i * rows_bytes;
        load_box(to, p.parts_map, tile.column + slab * slab_columns, source * p.sum_rows + tile.band * p.band_rows, barrier);
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
#pragma unroll 1
    for (uint32_t source = 0; source < p.size; ++source) {
      uint32_t words[2 * blocks];
      if (source == p.rank) {
#pragma unroll
        for (uint32_t i = 0; i < 2 * blocks; ++i) words[i] = own[i];
      } else {
        if (box == 0) barrier_wait(full + 8 * ring.stage, ring.phase);
        const uint32_t from = base + ring.stage * stage_bytes<COLUMNS> + box * rows_bytes + in_box;
#pragma unroll
        for (uint32_t i = 0; i < 2 * blocks; ++i) words[i] = load_shared(from + ((i / 2 ^ row % 8) << 4) + i % 2 * 8 * row_bytes);
        if (++box == boxes<COLUMNS>) release();
      }
#pragma unroll
      for (uint32_t i = 0; i < 2 * blocks; ++i) {
        const uint32_t at = slab * slab_columns / 2 + 2 * i;
        if (at >= COLUMNS / 2) continue;
        const float2 two = widen(type_of<T>, words[i]);
        sums[at] = __fadd_rn(sums[at], two.x), sums[at + 1] = __fadd_rn(sums[at + 1], two.y);
      }
    }
  }
  if (box != 0) release();
}

// Rounds a tile's sums into the stage that is for this group's rows, and tells the warp that writes them.
template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void put_out(uint32_t base, uint32_t full, Ring<COLUMNS>& ring, Outbox& outbox, const float (&sums)[COLUMNS / 2]) {
  const uint32_t half = threadIdx.x / 128 - 1;
  if (half == 1) ring.next();
  barrier_wait(full + 8 * ring.stage, ring.phase);
  const uint32_t to = base + ring.stage * stage_bytes<COLUMNS> + own_row(0) * out_pitch<COLUMNS> + threadIdx.x % 4 * 4;
#pragma unroll
  for (uint32_t i = 0; i < COLUMNS / 4; ++i) {
    store_shared(to + i / 2 * 16 + i % 2 * 8 * out_pitch<COLUMNS>, rounded<T>(sums[2 * i], sums[2 * i + 1]));
  }
  hand_over(outbox, half, ring.stage);
  ring.next();
  if (half == 0) ring.next();
}

// What becomes of a tile's sums.
template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void end_tile(const Parameters& p, const Tile& tile, uint32_t first_row, uint32_t base, uint32_t full, uint32_t empty,
                                         Ring<COLUMNS>& ring, Outbox& outbox, float (&sums)[COLUMNS / 2]) {
  if (is_added_up(p, tile.part)) {
    add_parts<T, COLUMNS>(p, tile, base, full, empty, ring, sums);
    write_tile<T, T, COLUMNS, true>(p, tile, first_row, sums);
  } else {
    put_out<T, COLUMNS>(base, full, ring, outbox, sums);
  }
}

// Writes one group's rows, tile after tile, to their owners, and tells these of the parts that are whole. One warp does.
template <uint32_t COLUMNS>
__device__ inline void send(const Parameters& p, uint32_t half, uint32_t base, uint32_t empty, const uint32_t* tiles, Outbox outbox) {
  // Owners may still read what was there before, until steps have heard from them.
  wait_for_previous_kernel();
  const Group g = group_of(p, p.signature);
  const bool writes = !is_stopped(g);
  const uint32_t lane = threadIdx.x % 32;
  for (;; outbox.phase ^= 1) {
    barrier_wait(outbox.is_written, outbox.phase);
    const uint32_t stage = *outbox.stage;
    if (stage == no_stage) break;
    const Tile tile = tile_of(p, *static_cast<const volatile uint32_t*>(tiles + stage), COLUMNS);
    __syncwarp();
    if (lane == 0) barrier_arrive(outbox.is_heard);
    const uint32_t first = tile.band * p.band_rows + half * 64, until = rows_until(p, tile);
    const uint32_t rows = !writes || until < first ? 0 : until - first < 64 ? until - first : 64;
    const uint64_t to = p.part_out[tile.part] + (uint64_t(first) * p.columns + tile.column) * 2;
    write_rows<COLUMNS>(to, base + stage * stage_bytes<COLUMNS>, rows, p.columns, p.columns - tile.column);
    __syncwarp();
    // For both groups, since this one alone had it.
    if (lane < 2) barrier_arrive(empty + 8 * stage);
    if (lane == 0) tell_of_whole_part(p, g, tile.part, (p.columns + COLUMNS - 1) / COLUMNS);
    __syncwarp();
  }
}

template <typename T, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_sums(const Parameters& p) {
  let_next_kernel_start();
  extern __shared__ uint8_t memory[];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = base + stages<COLUMNS> * stage_bytes<COLUMNS>, empty = full + 8 * stages<COLUMNS>;
  const uint32_t is_written = empty + 8 * stages<COLUMNS>, is_heard = is_written + 16;
  uint32_t* tiles = reinterpret_cast<uint32_t*>(memory + (is_heard + 16 - shared_address(memory)));
  // Answers take about a microsecond. Whatever counted tiles before had ended when steps let this kernel begin.
  uint32_t first_tile = 0;
  if (threadIdx.x == 0) {
    first_tile = next_tile(p);
    map_is_wanted(p.own_map);
    map_is_wanted(p.weight_map);
    for (uint32_t s = 0; s < stages<COLUMNS>; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2);
    }
    for (uint32_t half = 0; half < 2; ++half) {
      barrier_init(is_written + 8 * half, 1);
      barrier_init(is_heard + 8 * half, 1);
    }
    barriers_made();
  }
  __syncthreads();
  // What is above touches nothing else of an earlier kernel's.
  if (p.begins_early == 0) wait_for_previous_kernel();
  const auto outbox = [&](uint32_t half) { return Outbox{is_written + 8 * half, is_heard + 8 * half, tiles + stages<COLUMNS> + half, 0}; };
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) load<T, COLUMNS>(p, first_tile, base, full, empty, tiles, Behind<COLUMNS>{p, base, full, empty, tiles, false});
    if (warp == 1 || warp == 2) send<COLUMNS>(p, warp - 1, base, empty, tiles, outbox(warp - 1));
  } else {
    more_registers<232>();
    Outbox own = outbox(threadIdx.x / 128 - 1);
    multiply<T, COLUMNS>(p, base, full, empty, tiles, [&](const Tile& tile, uint32_t first_row, float(&sums)[COLUMNS / 2], Ring<COLUMNS>& ring) {
      end_tile<T, COLUMNS>(p, tile, first_row, base, full, empty, ring, own, sums);
    });
    // There is no more.
    hand_over(own, threadIdx.x / 128 - 1, no_stage);
  }
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
  BRIGADE_GEMM_SUMS(T, TYPE, 176)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 192)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 224)       \
  BRIGADE_GEMM_SUMS(T, TYPE, 256)

BRIGADE_GEMM_SUMS_OF(__half, f16)
BRIGADE_GEMM_SUMS_OF(__nv_bfloat16, bf16)
