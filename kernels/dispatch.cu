// Rows to their experts. `push` writes own rows into this rank's part of every receiver's half, section by section; once the steps
// between have seen all of them come, `count` counts what each slot gets, `place` says where rows begin and whether there is room,
// `arrange` which row is what, and `collect` takes rows there. A dispatch that gathers does all of it but `collect` without rows; then
// all rows of all ranks come in the order of their tokens, and `collect` takes those that are for this rank.
#include "cast.cuh"
#include "params.cuh"
#include "rows.cuh"
#include "sections.cuh"
#include "steps.cuh"
#include "types.cuh"

using namespace brigade;

enum Arrangement : uint32_t { dense = 0, by_source = 1, by_expert = 2 };

__device__ __forceinline__ bool is_stopped(const DispatchParams& p) { return is_stopped(group_of(p, p.signature)); }

// Where a section of what came from `source` begins, for its row `i`.
__device__ __forceinline__ uint64_t came(const DispatchParams& p, uint32_t source, uint32_t section, uint64_t i) {
  return p.parts + source * p.parts_stride + p.came[section] + i * p.row_bytes[section];
}

// Rows that came from a rank.
__device__ __forceinline__ uint32_t came_from(const DispatchParams& p, uint32_t source) {
  if (absent_ranks(reinterpret_cast<const uint64_t*>(p.state)) >> source & 1) return 0;
  return uint32_t(*reinterpret_cast<const uint64_t*>(p.parts + source * p.parts_stride));
}

__device__ __forceinline__ void count_moved(const DispatchParams& p, uint32_t rows) {
  uint64_t bytes = 0;
  for (uint32_t s = 0; s < p.sections; ++s) bytes += p.row_bytes[s];
  atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)(rows * bytes));
}

// A group of threads for each row.
extern "C" __global__ void __launch_bounds__(1024) brigade_dispatch_push(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads;
  const uint32_t thread = threadIdx.x % p.row_threads;
  const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.sent_offsets);
  const uint32_t absent = absent_ranks(reinterpret_cast<const uint64_t*>(p.state));
  // Own rows are taken from where they lie: this rank gets no more than what says which they are.
  // Rows that stay in place lie before the parts: own ones, too.
  const bool in_place = int64_t(p.section[row]) < 0;
  const uint32_t targets = p.size - (p.row_bytes[token] == 0 && !in_place);
  if (targets < p.size && blockIdx.x == 0 && threadIdx.x == 0) {
    const uint64_t own = p.base + p.rank * p.stride + p.half + p.rank * p.part_bytes;
    *reinterpret_cast<uint64_t*>(own) = offsets[p.rank + 1] - offsets[p.rank];
  }
  for (uint32_t w = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; w < targets * p.piece_rows; w += groups) {
    // The next rank first, so that not all write to one.
    const uint32_t next = p.rank + 1 + w % targets, to = next % p.size, i = w / targets;
    if (absent >> to & 1) continue;
    const uint32_t first = offsets[to], theirs = offsets[to + 1] - first, at = p.first_row + i;
    const uint32_t all = p.gathers ? p.tokens : theirs;
    const uint64_t part = p.base + to * p.stride + p.half + p.rank * p.part_bytes;
    if (i == 0 && thread == 0) {
      *reinterpret_cast<uint64_t*>(part) = theirs;
      if (to != p.rank && at < all) count_moved(p, min(p.piece_rows, all - at));
    }
    if (at >= all) continue;
    const uint32_t from = p.gathers ? at : reinterpret_cast<const uint32_t*>(p.sent)[first + at];
    write_sections(p, p.section, part, i, to, from, to != p.rank || in_place, thread);
  }
}

// How many of the entries that are this thread's name a slot.
__device__ __forceinline__ uint32_t naming(const int32_t* entries, uint32_t n, int32_t slot) {
  const uint32_t wide = reinterpret_cast<uint64_t>(entries) % 16 == 0 ? n / 4 : 0;
  uint32_t found = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < wide; i += blockDim.x) {
    const int4 four = reinterpret_cast<const int4*>(entries)[i];
    found += (four.x == slot) + (four.y == slot) + (four.z == slot) + (four.w == slot);
  }
  for (uint32_t i = 4 * wide + threadIdx.x; i < n; i += blockDim.x) found += entries[i] == slot;
  return found;
}

// A block for each slot, or for several.
extern "C" __global__ void __launch_bounds__(1024) brigade_dispatch_count(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  __shared__ uint32_t sum;
  for (uint32_t slot = blockIdx.x; slot < p.own_slots; slot += gridDim.x) {
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    uint32_t mine = 0;
    for (uint32_t s = 0; s < p.size; ++s) {
      mine += naming(reinterpret_cast<const int32_t*>(came(p, s, slots, 0)), came_from(p, s) * p.k, int32_t(slot));
    }
    mine = __reduce_add_sync(0xFFFFFFFFu, mine);
    if (threadIdx.x % 32 == 0) atomicAdd(&sum, mine);
    __syncthreads();
    if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(p.counts)[slot] = sum;
  }
}

// One thread's work. Says whether as many rows come as should, and there is room for them.
__device__ __forceinline__ bool place_rows(const DispatchParams& p) {
  uint32_t* received = reinterpret_cast<uint32_t*>(p.received);
  const Group g = group_of(p, p.signature);
  Waiting w{};
  for (uint32_t s = 0; s < p.size; ++s) {
    const uint32_t n = came_from(p, s);
    if (p.known && n != received[s]) {
      w.blamed = w.slot = s, w.blamed_expected = received[s], w.seen = n, w.end = End::mismatch;
      give_up(g, w);
      return false;
    }
    if (!p.known) received[s] = n;
  }
  if (p.known) return true;
  uint32_t* offsets = reinterpret_cast<uint32_t*>(p.offsets);
  uint32_t next = 0;
  const uint32_t runs = p.arrangement == by_expert ? p.own_slots : p.size;
  for (uint32_t i = 0; i < runs; ++i) {
    offsets[i] = next;
    switch (p.arrangement) {
      case dense: next += received[i]; break;
      case by_source: next += p.max_tokens; break;
      default: {
        const uint32_t n = reinterpret_cast<const uint32_t*>(p.counts)[i];
        next += (n + p.alignment - 1) / p.alignment * p.alignment;
      }
    }
  }
  offsets[runs] = next;
  if (p.room != 0) *reinterpret_cast<volatile uint64_t*>(p.room) = next;
  if (p.room == 0 && next > p.capacity) {
    w.blamed = p.rank, w.blamed_expected = p.capacity, w.seen = next, w.end = End::overflow;
    give_up(g, w);
    return false;
  }
  return true;
}

// A warp's: the first thread places rows, and all of them add up what slots get.
extern "C" __global__ void __launch_bounds__(32) brigade_dispatch_place(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  const bool placed = threadIdx.x == 0 && !is_stopped(p) && place_rows(p);
  if (!__any_sync(0xFFFFFFFFu, placed) || p.totals == 0) return;
  for (uint32_t slot = threadIdx.x; slot < p.own_slots; slot += 32) {
    reinterpret_cast<int64_t*>(p.totals)[slot] += reinterpret_cast<const uint32_t*>(p.counts)[slot];
  }
}

__device__ __forceinline__ void say(const DispatchParams& p, uint32_t at, int4 source) {
  reinterpret_cast<int4*>(p.sources)[at] = source;
}

// By source: all blocks for all rows. By expert: a block for each slot, or for several.
extern "C" __global__ void __launch_bounds__(1024) brigade_dispatch_arrange(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.offsets);
  const uint32_t* received = reinterpret_cast<const uint32_t*>(p.received);
  int32_t* ids = reinterpret_cast<int32_t*>(p.ids);
  float* out_weights = reinterpret_cast<float*>(p.weights);
  const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const int4 none = make_int4(-1, -1, -1, -1);
  if (p.arrangement != by_expert) {
    for (uint32_t at = me; at < p.capacity; at += threads) {
      uint32_t s = 0;
      while (s + 1 < p.size && offsets[s + 1] <= at) ++s;
      const uint32_t i = at - offsets[s];
      const bool there = at < offsets[p.size] && i < received[s];
      const uint64_t from = came(p, s, slots, i), with = came(p, s, weights, i);
      say(p, at, there ? make_int4(int32_t(s), *reinterpret_cast<const int32_t*>(came(p, s, token, i)), -1, int32_t(i)) : none);
      for (uint32_t e = 0; e < p.k; ++e) {
        ids[uint64_t(at) * p.k + e] = called(p, there ? reinterpret_cast<const int32_t*>(from)[e] : -1);
        if (out_weights != nullptr) {
          out_weights[uint64_t(at) * p.k + e] = there ? reinterpret_cast<const float*>(with)[e] : 0.0f;
        }
      }
    }
    return;
  }
  const uint32_t end = p.own_slots == 0 ? 0 : offsets[p.own_slots];
  auto nobody = [&](uint32_t at) {
    say(p, at, none);
    ids[at] = called(p, -1);
    if (out_weights != nullptr) out_weights[at] = 0.0f;
  };
  for (uint32_t at = end + me; at < p.capacity; at += threads) nobody(at);
  // Entries without a row; those that have one are written by who finds it.
  int32_t* rows_of = reinterpret_cast<int32_t*>(p.rows_of);
  for (uint64_t n = me; n < uint64_t(p.size) * p.max_tokens * p.k; n += threads) {
    const uint32_t s = uint32_t(n / p.k / p.max_tokens), i = uint32_t(n / p.k % p.max_tokens);
    if (i >= received[s] || reinterpret_cast<const int32_t*>(came(p, s, slots, i))[n % p.k] < 0) rows_of[n] = -1;
  }
  for (uint32_t slot = blockIdx.x; slot < p.own_slots; slot += gridDim.x) {
    uint32_t next = offsets[slot];
    for (uint32_t s = 0; s < p.size; ++s) {
      const int32_t* entries = reinterpret_cast<const int32_t*>(came(p, s, slots, 0));
      const uint32_t n = received[s] * p.k;
      for (uint32_t start = 0; start < n; start += blockDim.x) {
        const uint32_t i = start + threadIdx.x;
        const bool mine = i < n && entries[i] == int32_t(slot);
        uint32_t all;
        const uint32_t at = next + rank_among(mine, all);
        next += all;
        if (!mine) continue;
        const int32_t from = *reinterpret_cast<const int32_t*>(came(p, s, token, i / p.k));
        say(p, at, make_int4(int32_t(s), from, int32_t(i % p.k), int32_t(i / p.k)));
        ids[at] = called(p, int32_t(slot));
        rows_of[(uint64_t(s) * p.max_tokens + i / p.k) * p.k + i % p.k] = int32_t(at);
        if (out_weights != nullptr) out_weights[at] = reinterpret_cast<const float*>(came(p, s, weights, 0))[i];
      }
    }
    for (uint32_t at = next + threadIdx.x; at < offsets[slot + 1]; at += blockDim.x) nobody(at);
  }
}

// A group of threads for each row that there is room for, if it is in this piece.
extern "C" __global__ void __launch_bounds__(1024) brigade_dispatch_collect(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t thread = threadIdx.x % p.row_threads;
  auto is_own = [&](int4 source) { return uint32_t(source.x) == p.rank && p.from[row] != 0; };
  auto which = [&](int4 source) { return uint32_t(p.gathers ? source.y : source.w); };
  // Those before the piece wrap around.
  auto wanted = [&](int4 source) {
    return is_own(source) ? which(source) - p.own_first < p.own_rows : which(source) - p.first_row < p.piece_rows;
  };
  for_rows(reinterpret_cast<const int4*>(p.sources), p.capacity, 0, p.row_threads, wanted, [&](uint32_t at, int4 source) {
    const uint32_t i = which(source) - p.first_row;
    for (uint32_t s = 0; s < p.sections; ++s) {
      const uint64_t bytes = p.row_bytes[s];
      if (bytes == 0 || says_which(s)) continue;
      const bool own = uint32_t(source.x) == p.rank && p.from[s] != 0;
      const uint64_t from = own ? p.from[s] + uint32_t(source.y) * bytes : came(p, uint32_t(source.x), s, i);
      if (s == scales && p.scale_words != 0) {
        for (uint32_t w = thread; w < p.scale_words; w += p.row_threads) {
          reinterpret_cast<uint32_t*>(p.to[s])[uint64_t(w) * p.capacity + at] = reinterpret_cast<const uint32_t*>(from)[w];
        }
        continue;
      }
      copy_bytes(p.to[s] + at * bytes, from, bytes, thread, p.row_threads);
    }
  });
}

// A warp for each 128 columns of a row, as brigade-host does it.
extern "C" __global__ void __launch_bounds__(1024) brigade_cast(const __grid_constant__ CastParams p) {
  wait_for_previous_kernel();
  const uint32_t blocks = (p.hidden + 127) / 128, lane = threadIdx.x % 32;
  const uint32_t warps = gridDim.x * blockDim.x / 32;
  for (uint64_t w = (blockIdx.x * blockDim.x + threadIdx.x) / 32; w < uint64_t(p.rows) * p.per_row; w += warps) {
    const uint64_t at = w / p.per_row, block = w % p.per_row;
    if (block >= blocks) {
      if (lane == 0) reinterpret_cast<uint8_t*>(p.scales)[w] = 0;
      continue;
    }
    const uint32_t first = uint32_t(block) * 128, count = min(128u, p.hidden - first);
    const uint64_t start = at * p.hidden + first;
    float x[4];
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t c = i * 32 + lane;
      x[i] = c < count ? load_float(p.from_type, p.from, start + c) : 0.0f;
      most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    const float scale = scale_as(p.format, most);
    const auto q = quantized(x, Divisor(scale), F8E4M3);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t c = i * 32 + lane;
      if (c < count) reinterpret_cast<uint8_t*>(p.values)[start + c] = uint8_t(q.words[0] >> (i * 8));
    }
    if (lane == 0) store_scale(p.format, p.scales, w, scale);
  }
}
