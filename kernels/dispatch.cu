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
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_dispatch_push(const __grid_constant__ DispatchParams p) {
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
  if (targets == 0) return;
  struct Sent {
    uint32_t to, i, theirs, from;
    bool there;
  };
  // The next rank first, so that not all write to one.
  auto find = [&](uint32_t w) {
    Sent x{(p.rank + 1 + w % targets) % p.size, w / targets, 0, 0, false};
    if (x.i >= p.piece_rows || (absent >> x.to & 1)) return x;
    const uint32_t first = offsets[x.to], at = p.first_row + x.i;
    x.theirs = offsets[x.to + 1] - first;
    x.there = at < (p.gathers ? p.tokens : x.theirs);
    if (x.there) x.from = p.gathers ? at : reinterpret_cast<const uint32_t*>(p.sent)[first + at];
    return x;
  };
  uint32_t w = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads;
  for (Sent here = find(w), next; here.i < p.piece_rows; here = next) {
    // What the next row is is on its way meanwhile.
    w += groups;
    next = find(w);
    const uint64_t part = p.base + here.to * p.stride + p.half + p.rank * p.part_bytes;
    if (here.i == 0 && thread == 0 && !(absent >> here.to & 1)) {
      *reinterpret_cast<uint64_t*>(part) = here.theirs;
      const uint32_t all = p.gathers ? p.tokens : here.theirs;
      if (here.to != p.rank && p.first_row < all) count_moved(p, min(p.piece_rows, all - p.first_row));
    }
    if (here.there) write_sections(p, p.section, part, here.i, here.to, here.from, here.to != p.rank || in_place, thread);
  }
}

// Slots of which a block knows something at once.
constexpr uint32_t slots_at_once = 1024;

// Calls `look(slot)` for the entries that are this thread's.
template <typename Look>
__device__ __forceinline__ void for_entries(const int32_t* entries, uint32_t n, Look look) {
  const uint32_t wide = reinterpret_cast<uint64_t>(entries) % 16 == 0 ? n / 4 : 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < wide; i += blockDim.x) {
    const int4 four = reinterpret_cast<const int4*>(entries)[i];
    look(four.x), look(four.y), look(four.z), look(four.w);
  }
  for (uint32_t i = 4 * wide + threadIdx.x; i < n; i += blockDim.x) look(entries[i]);
}

// A block for each slot, or for several.
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_dispatch_count(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  __shared__ uint32_t found[slots_at_once];
  const uint32_t each = min(slots_at_once, (p.own_slots + gridDim.x - 1) / gridDim.x);
  for (uint32_t first = blockIdx.x * each; first < p.own_slots; first += gridDim.x * each) {
    for (uint32_t i = threadIdx.x; i < each; i += blockDim.x) found[i] = 0;
    __syncthreads();
    uint32_t one = 0;
    for (uint32_t s = 0; s < p.size; ++s) {
      for_entries(reinterpret_cast<const int32_t*>(came(p, s, slots, 0)), came_from(p, s) * p.k, [&](int32_t slot) {
        const uint32_t i = uint32_t(slot) - first;
        if (each == 1) {
          one += i == 0;
        } else if (i < each) {
          atomicAdd(&found[i], 1u);
        }
      });
    }
    one = __reduce_add_sync(0xFFFFFFFFu, one);
    if (one != 0 && threadIdx.x % 32 == 0) atomicAdd(&found[0], one);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < each && first + i < p.own_slots; i += blockDim.x) {
      reinterpret_cast<uint32_t*>(p.counts)[first + i] = found[i];
    }
    __syncthreads();
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

// No row lies here; a row has so many ids.
__device__ __forceinline__ void nobody(const DispatchParams& p, uint32_t at, uint32_t each) {
  say(p, at, no_source());
  for (uint64_t e = 0; e < each; ++e) {
    reinterpret_cast<int32_t*>(p.ids)[uint64_t(at) * each + e] = called(p, -1);
    if (p.weights != 0) reinterpret_cast<float*>(p.weights)[uint64_t(at) * each + e] = 0.0f;
  }
}

// The rows of one source after the other, or with room for all that it may send.
__device__ __forceinline__ void arrange_by_source(const DispatchParams& p) {
  const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.offsets);
  for (uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < p.capacity; at += gridDim.x * blockDim.x) {
    uint32_t s = 0;
    while (s + 1 < p.size && offsets[s + 1] <= at) ++s;
    const uint32_t i = at - offsets[s];
    if (at >= offsets[p.size] || i >= reinterpret_cast<const uint32_t*>(p.received)[s]) {
      nobody(p, at, p.k);
      continue;
    }
    say(p, at, make_int4(int32_t(s), *reinterpret_cast<const int32_t*>(came(p, s, token, i)), -1, int32_t(i)));
    constexpr uint32_t ahead = 4;
    for (uint32_t e = 0; e < p.k; e += ahead) {
      int32_t slot[ahead];
      float weight[ahead];
#pragma unroll
      for (uint32_t n = 0; n < ahead; ++n) {
        if (e + n >= p.k) break;
        slot[n] = reinterpret_cast<const int32_t*>(came(p, s, slots, i))[e + n];
        weight[n] = p.weights != 0 ? reinterpret_cast<const float*>(came(p, s, weights, i))[e + n] : 0.0f;
      }
#pragma unroll
      for (uint32_t n = 0; n < ahead; ++n) {
        if (e + n >= p.k) break;
        const uint64_t entry = uint64_t(at) * p.k + e + n;
        reinterpret_cast<int32_t*>(p.ids)[entry] = called(p, slot[n]);
        if (p.weights != 0) reinterpret_cast<float*>(p.weights)[entry] = weight[n];
      }
    }
  }
}

// A row for each expert. Blocks share the rows that came, in order: where each goes follows from how many entries before it name the
// same slot.
__device__ __forceinline__ void arrange_by_expert(const DispatchParams& p) {
  __shared__ uint32_t next[slots_at_once];
  const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.offsets);
  const uint32_t* received = reinterpret_cast<const uint32_t*>(p.received);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto slots_of = [&](uint32_t s) { return reinterpret_cast<const int32_t*>(came(p, s, slots, 0)); };
  uint32_t rows = 0;
  for (uint32_t s = 0; s < p.size; ++s) rows += received[s];
  const uint32_t each = (rows + gridDim.x - 1) / gridDim.x, least = min(rows, blockIdx.x * each), end = min(rows, least + each);
  for (uint32_t first = 0; first < p.own_slots; first += slots_at_once) {
    const uint32_t known = min(slots_at_once, p.own_slots - first);
    for (uint32_t i = threadIdx.x; i < known; i += blockDim.x) next[i] = offsets[first + i];
    __syncthreads();
    for (uint32_t s = 0, before = least; before > 0; ++s) {
      const uint32_t n = min(before, received[s]);
      for_entries(slots_of(s), n * p.k, [&](int32_t slot) {
        if (uint32_t(slot) - first < known) atomicAdd(&next[uint32_t(slot) - first], 1u);
      });
      before -= n;
    }
    __syncthreads();
    const uint32_t together = blockDim.x / p.k;
    for (uint32_t start = least; start < end; start += together) {
      // The row of this thread's entry, as one of those from its source.
      uint32_t s = 0, i = start + threadIdx.x / p.k, e = threadIdx.x % p.k, slot = ~0u;
      if (i < end && threadIdx.x / p.k < together) {
        while (i >= received[s]) i -= received[s++];
        slot = uint32_t(slots_of(s)[i * p.k + e]) - first;
      }
      const bool mine = slot < known;
      const uint32_t alike = __match_any_sync(0xFFFFFFFFu, mine ? slot : ~0u);
      uint32_t at = 0;
      // One warp after the other.
      for (uint32_t turn = 0; turn < blockDim.x / 32; ++turn) {
        if (turn == warp && mine) {
          at = next[slot] + __popc(alike & ((1u << lane) - 1));
          __syncwarp(alike);
          if (lane == __ffs(int(alike)) - 1) next[slot] += __popc(alike);
        }
        __syncthreads();
      }
      if (!mine) continue;
      say(p, at, make_int4(int32_t(s), *reinterpret_cast<const int32_t*>(came(p, s, token, i)), int32_t(e), int32_t(i)));
      reinterpret_cast<int32_t*>(p.ids)[at] = called(p, int32_t(first + slot));
      reinterpret_cast<int32_t*>(p.rows_of)[(uint64_t(s) * p.max_tokens + i) * p.k + e] = int32_t(at);
      if (p.weights != 0) {
        reinterpret_cast<float*>(p.weights)[at] = reinterpret_cast<const float*>(came(p, s, weights, 0))[i * p.k + e];
      }
    }
    __syncthreads();
  }
  // Between the rows of two slots, and behind all.
  const uint32_t* counts = reinterpret_cast<const uint32_t*>(p.counts);
  for (uint32_t slot = blockIdx.x; slot < p.own_slots; slot += gridDim.x) {
    for (uint32_t at = offsets[slot] + counts[slot] + threadIdx.x; at < offsets[slot + 1]; at += blockDim.x) nobody(p, at, 1);
  }
  const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (uint32_t at = offsets[p.own_slots] + me; at < p.capacity; at += threads) nobody(p, at, 1);
  // Entries without a row; those that have one are written by who finds it.
  for (uint32_t n = me; n < p.size * p.max_tokens * p.k; n += threads) {
    const uint32_t s = n / p.k / p.max_tokens, i = n / p.k % p.max_tokens;
    if (i >= received[s] || slots_of(s)[i * p.k + n % p.k] < 0) reinterpret_cast<int32_t*>(p.rows_of)[n] = -1;
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) brigade_dispatch_arrange(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  p.arrangement == by_expert ? arrange_by_expert(p) : arrange_by_source(p);
}

// Writes granules to row `at` of each lane of a warp that has one, once they are read; by `threads` threads, all of them of whole warps.
__device__ __forceinline__ void copy_to_all(uint64_t to, int32_t at, uint64_t from, uint64_t bytes, uint32_t thread, uint32_t threads) {
  const uint32_t all = __ballot_sync(0xFFFFFFFFu, at >= 0), granules = uint32_t(bytes / 16);
  const ulonglong2* in = reinterpret_cast<const ulonglong2*>(from);
  constexpr uint32_t in_flight = 4;
  for (uint32_t warp = thread / 32 * 32; warp < granules; warp += in_flight * threads) {
    ulonglong2 held[in_flight];
    const uint32_t g = warp + thread % 32;
#pragma unroll
    for (uint32_t n = 0; n < in_flight; ++n) {
      if (g + n * threads < granules) held[n] = in[g + n * threads];
    }
    for (uint32_t left = all; left != 0; left &= left - 1) {
      ulonglong2* out = reinterpret_cast<ulonglong2*>(to + uint32_t(__shfl_sync(0xFFFFFFFFu, at, __ffs(int(left)) - 1)) * bytes);
#pragma unroll
      for (uint32_t n = 0; n < in_flight; ++n) {
        if (g + n * threads < granules) out[g + n * threads] = held[n];
      }
    }
  }
}

// A group of threads for each row that there is room for, or, by expert, that may have come; if it is in this piece.
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_dispatch_collect(const __grid_constant__ DispatchParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t thread = threadIdx.x % p.row_threads, lane = threadIdx.x % 32;
  auto which = [&](int4 source) { return uint32_t(p.gathers ? source.y : source.w); };
  auto is_own = [&](int4 source, uint32_t section) { return uint32_t(source.x) == p.rank && p.from[section] != 0; };
  auto if_wanted = [&](uint32_t at) {
    const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
    if (source.x < 0) return source;
    // Those before the piece wrap around.
    const uint32_t i = which(source);
    const bool wanted = is_own(source, row) ? i - p.own_first < p.own_rows : i - p.first_row < p.piece_rows;
    return wanted ? source : no_source();
  };
  auto begin = [&](int4 source, uint32_t s) {
    return is_own(source, s) ? p.from[s] + uint32_t(source.y) * p.row_bytes[s]
                             : came(p, uint32_t(source.x), s, which(source) - p.first_row);
  };
  auto copy = [&](uint32_t at, int4 source, uint32_t s) {
    const uint64_t from = begin(source, s);
    if (s != scales || p.scale_words == 0) return copy_bytes(p.to[s] + at * p.row_bytes[s], from, p.row_bytes[s], thread, p.row_threads);
    for (uint32_t w = thread; w < p.scale_words; w += p.row_threads) {
      reinterpret_cast<uint32_t*>(p.to[s])[uint64_t(w) * p.capacity + at] = reinterpret_cast<const uint32_t*>(from)[w];
    }
  };
  auto is_taken = [&](uint32_t s) { return p.row_bytes[s] != 0 && !says_which(s); };
  if (p.arrangement != by_expert) {
    for_rows(p.capacity, 0, p.row_threads, if_wanted, [&](uint32_t at, int4 source) {
      for (uint32_t s = 0; s < p.sections; ++s) {
        if (is_taken(s)) copy(at, source, s);
      }
    });
    return;
  }
  // Each row goes to all of its experts once it is read.
  const int32_t* rows_of = reinterpret_cast<const int32_t*>(p.rows_of);
  auto look = [&](uint32_t n) {
    const uint32_t s = n / p.max_tokens;
    if (n - s * p.max_tokens >= reinterpret_cast<const uint32_t*>(p.received)[s]) return no_source();
    int32_t at = -1;
    for (uint32_t e = 0; e < p.k && at < 0; ++e) at = rows_of[uint64_t(n) * p.k + e];
    return at < 0 ? no_source() : if_wanted(uint32_t(at));
  };
  for_rows(p.size * p.max_tokens, 0, p.row_threads, look, [&](uint32_t n, int4 source) {
    const int32_t at = lane < p.k ? rows_of[uint64_t(n) * p.k + lane] : -1;
    for (uint32_t s = 0; s < p.sections; ++s) {
      if (!is_taken(s)) continue;
      const uint64_t from = begin(source, s);
      if ((s != scales || p.scale_words == 0) && (from | p.to[s] | p.row_bytes[s]) % 16 == 0) {
        copy_to_all(p.to[s], at, from, p.row_bytes[s], thread, p.row_threads);
        continue;
      }
      for (uint32_t left = __ballot_sync(0xFFFFFFFFu, at >= 0); left != 0; left &= left - 1) {
        copy(uint32_t(__shfl_sync(0xFFFFFFFFu, at, __ffs(int(left)) - 1)), source, s);
      }
    }
  });
}

// A warp for each 128 columns of a row, as brigade-host does it.
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_cast(const __grid_constant__ CastParams p) {
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
