// Rows back from their experts. `back` writes each into this rank's part of the half of the rank that it came from, at a place that both
// know: that of its token, and by expert also by its place among the token's experts. Once the steps between have
// seen all of them come, `sum` adds them up, for the tokens of a piece (and `pull` those that stayed in place, from where they lie): in f32, products rounded before they are added, never fused, so that the host's are the
// same bits.
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
  uint64_t moved = 0;
  // Where rows lie by source, about the next rank's are the first, so that not all write to one.
  const uint32_t first = uint32_t(uint64_t(p.rank + 1) * p.capacity / p.size);
  // Those before the piece wrap around.
  auto wanted = [&](int4 source) { return place_back(p, source) - p.first_row < p.piece_rows && goes_back(p, source); };
  for_rows(reinterpret_cast<const int4*>(p.sources), p.capacity, first, p.row_threads, wanted, [&](uint32_t at, int4 source) {
    const uint64_t part = p.base + uint32_t(source.x) * p.stride + p.half + p.rank * p.part_bytes;
    const uint64_t i = place_back(p, source) - p.first_row;
    write_back_as<sums>(p, at, source, part + p.rows_at + i * row_bytes, part + p.weights_at + i * 4 * weights, thread);
    if (thread == 0 && uint32_t(source.x) != p.rank) moved += row_bytes + 4 * weights;
  });
  if (moved > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)moved);
}

extern "C" __global__ void __launch_bounds__(1024) brigade_combine_back(const __grid_constant__ CombineParams p) { go_back<false>(p); }

// Of rows that are added before they go back.
extern "C" __global__ void __launch_bounds__(1024) brigade_combine_back_sums(const __grid_constant__ CombineParams p) { go_back<true>(p); }

constexpr uint32_t any_type = ~0u;

// Eight elements, as narrow as they come.
template <uint32_t known>
struct Held {
  uint4 words;

  Held() = default;
  __device__ __forceinline__ Held(uint32_t, uint64_t array, uint32_t first, uint32_t, bool)
      : words(reinterpret_cast<const uint4*>(array)[first / 8]) {}
  __device__ __forceinline__ Eight eight() const { return eight_of(known, words); }
};

template <>
struct Held<any_type> {
  Eight values;

  Held() = default;
  __device__ __forceinline__ Held(uint32_t type, uint64_t array, uint32_t first, uint32_t hidden, bool whole)
      : values(load(type, array, first, hidden, whole)) {}
  __device__ __forceinline__ Eight eight() const { return values; }
};

// With rows of `known` type, that suit the widest access and give the same type; or of any. Where they stayed in place, `parts` are what this
// rank has sent to each, and rows are read from there.
template <uint32_t known, bool in_place>
__device__ __forceinline__ void sum_rows(const CombineParams& p, bool whole) {
  const uint32_t from_type = known == any_type ? p.from_type : known, out_type = known == any_type ? p.out_type : known;
  whole |= known != any_type;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = uint64_t(p.hidden) * (from_type == F32 ? 4 : 2);
  const uint64_t out_bytes = uint64_t(p.hidden) * (out_type == F32 ? 4 : 2);
  const int32_t* slots = reinterpret_cast<const int32_t*>(p.slots);
  const int32_t* positions = reinterpret_cast<const int32_t*>(p.positions);
  auto part = [&](uint32_t rank) { return p.parts + rank * p.parts_stride; };
  uint64_t moved = 0;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t each = p.sum == by_experts ? p.k : 1, first = p.first_row / each, piece = p.piece_rows / each;
  for (uint64_t of_piece = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; of_piece < piece; of_piece += groups) {
    const uint64_t token = first + of_piece;
    if (token >= p.tokens) break;
    // Each lane finds one of the rows that are added: by experts, or by ranks.
    bool there = false;
    uint64_t row = 0;
    float weight = 1.0f;
    if (p.sum == by_experts) {
      const int32_t slot = lane < p.k ? slots[token * p.k + lane] : -1;
      there = slot >= 0;
      if (there) {
        row = part(rank_of_slot(p, uint32_t(slot))) + p.came_rows + (of_piece * p.k + lane) * row_bytes;
        weight = reinterpret_cast<const float*>(p.own_weights)[token * p.k + lane];
      }
    } else {
      const int32_t position = lane < p.size ? positions[token * p.size + lane] : -1;
      there = position >= 0;
      row = part(lane) + p.came_rows + (in_place ? uint32_t(position) : of_piece) * row_bytes;
      if (in_place && thread < 32 && there && lane != p.rank) moved += row_bytes;
    }
    const uint32_t all_rows = __ballot_sync(0xFFFFFFFFu, there);
    // All lanes go on as long as one of a warp does, since they tell each other.
    for (uint32_t warp = thread / 32 * 32; warp * 8 < p.hidden; warp += p.row_threads) {
      const uint32_t i = (warp + lane) * 8;
      const bool mine = i < p.hidden;
      Adding all{};
      for (uint32_t left = all_rows; left != 0;) {
        // As many as may be under way at once, as they lie in memory.
        constexpr int in_flight = known == any_type ? 1 : 4;
        Held<known> x[in_flight];
        int from[in_flight];
#pragma unroll
        for (int n = 0; n < in_flight; ++n) {
          from[n] = __ffs(int(left)) - 1;
          left &= left - 1;
          const uint64_t at = __shfl_sync(0xFFFFFFFFu, row, max(from[n], 0));
          if (mine && from[n] >= 0) x[n] = Held<known>(from_type, at, i, p.hidden, whole);
        }
#pragma unroll
        for (int n = 0; n < in_flight; ++n) {
          const float w = __shfl_sync(0xFFFFFFFFu, weight, max(from[n], 0));
          if (from[n] < 0) break;
          p.sum == by_experts ? all.add(x[n].eight(), w) : all.add(x[n].eight());
        }
      }
      if (!mine) continue;
      for (uint32_t b = 0; b < p.bias_count; ++b) {
        all.add(load(from_type, p.biases[b] + token * row_bytes, i, p.hidden, whole));
      }
      store(out_type, p.out + token * out_bytes, i, p.hidden, whole, all.sum);
    }
    if (p.weights_out == 0) continue;
    for (uint32_t e = thread; e < p.k; e += p.row_threads) {
      const int32_t slot = slots[token * p.k + e];
      float x = 0.0f;
      if (slot >= 0) {
        const uint32_t from = rank_of_slot(p, uint32_t(slot));
        const uint64_t place = of_piece * p.k + e;
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
  const bool whole = is_whole(p.parts | p.parts_stride | p.out | p.biases[0] | p.biases[1], p.hidden);
  switch (whole && p.from_type == p.out_type ? p.from_type : any_type) {
    case BF16: return sum_rows<BF16, in_place>(p, whole);
    case F16: return sum_rows<F16, in_place>(p, whole);
    default: return sum_rows<any_type, in_place>(p, whole);
  }
}

extern "C" __global__ void __launch_bounds__(1024) brigade_combine_sum(const __grid_constant__ CombineParams p) {
  sum_of_type<false>(p);
}

// The same of rows that stayed in place, at each rank.
extern "C" __global__ void __launch_bounds__(1024) brigade_combine_pull(const __grid_constant__ CombineParams p) {
  sum_of_type<true>(p);
}
