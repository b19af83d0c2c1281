// Rows back from their experts. `back` writes each into this rank's part of the half of the rank that it came from, at a place that both
// know: that of its token, and by expert also by its place among the token's experts. Once the steps between have
// seen all of them come, `sum` adds them up, for the tokens of a piece (and `pull` those that stayed in place, from where they lie): in f32,
// products rounded before they are added, never fused, so that the host's are the same bits. Own rows are added from where the caller has
// them, unless it is sums of them that go back.
#include "back.cuh"
#include "params.cuh"
#include "rows.cuh"
#include "slots.cuh"
#include "steps.cuh"

using namespace brigade;

__device__ __forceinline__ bool is_stopped(const CombineParams& p) {
  return is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state));
}

template <bool sums>
__device__ __forceinline__ void go_back(const CombineParams& p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = row_bytes_back(p);
  const uint32_t weights = weights_back(p);
  const int4* sources = reinterpret_cast<const int4*>(p.sources);
  uint64_t moved = 0;
  // Those before the piece wrap around.
  auto if_wanted = [&](int4 source) {
    return source.x >= 0 && place_back(p, source) - p.first_row < p.piece_rows ? source : no_source();
  };
  auto go = [&](uint32_t at, int4 source) {
    const uint64_t part = p.base + uint32_t(source.x) * p.stride + p.half + p.rank * p.part_bytes;
    const uint64_t i = place_back(p, source) - p.first_row;
    const bool own = uint32_t(source.x) == p.rank;
    const uint64_t to = part + p.rows_at + i * row_bytes, weights_to = part + p.weights_at + i * 4 * weights;
    if (sums || !own || p.own_from == 0) write_row_back<sums>(p, at, source, to, thread);
    write_weights_back(p, at, source, weights_to, thread);
    if (thread == 0 && !own) moved += row_bytes + 4 * weights;
  };
  // About the next rank's are the first, so that not all write to one.
  if constexpr (sums) {
    const int32_t* rows_of = reinterpret_cast<const int32_t*>(p.rows_of);
    auto look = [&](uint32_t n) {
      int32_t at = -1;
      for (uint32_t e = 0; e < p.k && at < 0; ++e) at = rows_of[uint64_t(n) * p.k + e];
      return at < 0 ? no_source() : if_wanted(sources[at]);
    };
    for_rows(p.size * p.max_tokens, (p.rank + 1) % p.size * p.max_tokens, p.row_threads, look, go);
  } else {
    const uint32_t first = uint32_t(uint64_t(p.rank + 1) * p.capacity / p.size);
    for_rows(p.capacity, first, p.row_threads, [&](uint32_t at) { return if_wanted(sources[at]); }, go);
  }
  if (moved > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)moved);
}

extern "C" __global__ void __launch_bounds__(1024, 1) brigade_combine_back(const __grid_constant__ CombineParams p) { go_back<false>(p); }

// Of rows that are added before they go back.
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_combine_back_sums(const __grid_constant__ CombineParams p) { go_back<true>(p); }

// With rows of `known` type, that suit the widest access and give the same type; or of any. Where they stayed in place, `parts` are what this
// rank has sent to each, and rows are read from there.
template <uint32_t known, bool in_place, bool weighted>
__device__ __forceinline__ void sum_rows(const CombineParams& p, bool whole) {
  const uint32_t from_type = known == any_type ? p.from_type : known, out_type = known == any_type ? p.out_type : known;
  whole |= known != any_type;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = uint64_t(p.hidden) * (from_type == F32 ? 4 : 2);
  const uint64_t out_bytes = uint64_t(p.hidden) * (out_type == F32 ? 4 : 2);
  const int32_t* slots = reinterpret_cast<const int32_t*>(p.slots);
  const int32_t* positions = reinterpret_cast<const int32_t*>(p.positions);
  const int32_t* rows_of = reinterpret_cast<const int32_t*>(p.rows_of) + uint64_t(p.rank) * p.max_tokens * p.k;
  auto part = [&](uint32_t rank) { return p.parts + rank * p.parts_stride; };
  uint64_t moved = 0;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t each = p.sum == by_experts ? p.k : 1, first = p.first_row / each, piece = p.piece_rows / each;
  const uint32_t end = uint32_t(min(uint64_t(piece), p.tokens > first ? p.tokens - first : 0));
  const uint64_t own_rows = p.own_from == 0 || p.sum == by_experts ? 0 : reinterpret_cast<const uint32_t*>(p.offsets)[p.rank];
  // What each lane has of a token: the slot of an expert, or the position among a rank's rows.
  auto of_lane = [&](uint32_t of_piece) {
    if (of_piece >= end) return -1;
    const uint64_t token = uint64_t(first) + of_piece;
    if (p.sum == by_experts) return lane < p.k ? slots[token * p.k + lane] : -1;
    return lane < p.size ? positions[token * p.size + lane] : -1;
  };
  uint32_t of_piece = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads;
  for (int32_t here = of_lane(of_piece), ahead; of_piece < end; of_piece += groups, here = ahead) {
    // That of the next is on its way meanwhile.
    ahead = of_lane(of_piece + groups);
    const uint64_t token = uint64_t(first) + of_piece;
    // Each lane finds one of the rows that are added: by experts, or by ranks.
    Named mine{0, 1.0f, here >= 0};
    if (p.sum != by_experts) {
      mine.row = part(lane) + p.came_rows + (in_place ? uint32_t(here) : of_piece) * row_bytes;
      if (!in_place && p.own_from != 0 && lane == p.rank) mine.row = p.own_from + (own_rows + uint32_t(here)) * row_bytes;
      if (in_place && thread < 32 && mine.there && lane != p.rank) moved += row_bytes;
    } else if (mine.there) {
      const uint32_t from = rank_of_slot(p, uint32_t(here));
      mine.row = part(from) + p.came_rows + (uint64_t(of_piece) * p.k + lane) * row_bytes;
      mine.weight = reinterpret_cast<const float*>(p.own_weights)[token * p.k + lane];
      if (from == p.rank && p.own_from != 0) {
        const uint64_t i = uint32_t(positions[token * p.size + p.rank]);
        mine.row = p.own_from + uint32_t(rows_of[i * p.k + lane]) * row_bytes;
      }
    }
    add_rows<known, weighted>(from_type, p.hidden, whole, mine, p.bias_count != 0, thread, p.row_threads, [&](uint32_t i, Eight& sum) {
      for (uint32_t b = 0; b < p.bias_count; ++b) {
        const Eight bias = load(from_type, p.biases[b] + token * row_bytes, i, p.hidden, whole);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum.v[n] = __fadd_rn(sum.v[n], bias.v[n]);
      }
      store(out_type, p.out + token * out_bytes, i, p.hidden, whole, sum);
    });
    if (p.weights_out == 0) continue;
    for (uint32_t e = thread; e < p.k; e += p.row_threads) {
      const int32_t slot = slots[token * p.k + e];
      float x = 0.0f;
      if (slot >= 0) {
        const uint32_t from = rank_of_slot(p, uint32_t(slot));
        const uint64_t place = uint64_t(of_piece) * p.k + e;
        x = reinterpret_cast<const float*>(part(from) + p.came_weights)[place];
      }
      reinterpret_cast<float*>(p.weights_out)[token * p.k + e] = x;
    }
  }
  if (in_place && moved > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)moved);
}

template <bool in_place>
__device__ __forceinline__ void sum_of_type(const CombineParams& p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const bool whole = is_whole(p.parts | p.parts_stride | p.own_from | p.out | p.biases[0] | p.biases[1], p.hidden);
  const bool weighted = !in_place && p.sum == by_experts;
  switch (whole && p.from_type == p.out_type ? p.from_type : any_type) {
    case BF16: return weighted ? sum_rows<BF16, in_place, !in_place>(p, whole) : sum_rows<BF16, in_place, false>(p, whole);
    case F16: return weighted ? sum_rows<F16, in_place, !in_place>(p, whole) : sum_rows<F16, in_place, false>(p, whole);
    default: return sum_rows<any_type, in_place, true>(p, whole);
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) brigade_combine_sum(const __grid_constant__ CombineParams p) {
  sum_of_type<false>(p);
}

// The same of rows that stayed in place, at each rank.
extern "C" __global__ void __launch_bounds__(1024, 1) brigade_combine_pull(const __grid_constant__ CombineParams p) {
  sum_of_type<true>(p);
}
