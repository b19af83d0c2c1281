// Rows back from their experts. `back` writes each into this rank's part of the half of the rank that it came from, at a place that both
// know: by its position among the rows from there, and by expert also by its place among the token's experts. Once the steps between have
// seen all of them come, `sum` adds them up: in f32, products rounded before they are added, never fused, so that the host's are the
// same bits.
#include "back.cuh"
#include "params.cuh"
#include "slots.cuh"
#include "steps.cuh"

using namespace brigade;

__device__ __forceinline__ bool is_stopped(const CombineParams& p) {
  return is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state));
}

extern "C" __global__ void __launch_bounds__(256) brigade_combine_back(const __grid_constant__ CombineParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = row_bytes_back(p);
  const uint32_t weights = weights_back(p);
  uint64_t moved = 0;
  // Where rows lie by source, about the next rank's are the first, so that not all write to one.
  const uint32_t first = uint32_t(uint64_t(p.rank + 1) * p.capacity / p.size);
  for (uint32_t w = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; w < p.capacity; w += groups) {
    const uint32_t at = w < p.capacity - first ? w + first : w - (p.capacity - first);
    const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
    if (source.x < 0) continue;
    const uint32_t place = place_back(p, source);
    if (place < p.first_row || place - p.first_row >= p.piece_rows || !goes_back(p, source)) continue;
    const uint64_t part = p.base + uint32_t(source.x) * p.stride + p.half + p.rank * p.part_bytes, i = place - p.first_row;
    write_back(p, at, source, part + p.rows_at + i * row_bytes, part + p.weights_at + i * 4 * weights, thread);
    if (thread == 0 && uint32_t(source.x) != p.rank) moved += row_bytes + 4 * weights;
  }
  if (moved > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.state) + STATE_MOVED, (unsigned long long)moved);
}

extern "C" __global__ void __launch_bounds__(256) brigade_combine_sum(const __grid_constant__ CombineParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = uint64_t(p.hidden) * (p.from_type == F32 ? 4 : 2);
  const uint64_t out_bytes = uint64_t(p.hidden) * (p.out_type == F32 ? 4 : 2);
  const bool whole = is_whole(p.parts | p.parts_stride | p.out | p.biases[0] | p.biases[1], p.hidden);
  const int32_t* slots = reinterpret_cast<const int32_t*>(p.slots);
  const int32_t* positions = reinterpret_cast<const int32_t*>(p.positions);
  auto part = [&](uint32_t rank) { return p.parts + rank * p.parts_stride; };
  for (uint64_t token = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; token < p.tokens; token += groups) {
    for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
      Adding all{};
      if (p.sum == by_experts) {
        for (uint32_t e = 0; e < p.k; ++e) {
          const int32_t slot = slots[token * p.k + e];
          if (slot < 0) continue;
          const uint32_t from = rank_of_slot(p, uint32_t(slot));
          const uint64_t place = uint64_t(positions[token * p.size + from]) * p.k + e;
          const Eight x = load(p.from_type, part(from) + p.came_rows + place * row_bytes, i, p.hidden, whole);
          all.add(x, reinterpret_cast<const float*>(p.own_weights)[token * p.k + e]);
        }
      } else {
        for (uint32_t from = 0; from < p.size; ++from) {
          const int32_t place = positions[token * p.size + from];
          if (place < 0) continue;
          all.add(load(p.from_type, part(from) + p.came_rows + uint32_t(place) * row_bytes, i, p.hidden, whole));
        }
      }
      for (uint32_t b = 0; b < p.bias_count; ++b) {
        all.add(load(p.from_type, p.biases[b] + token * row_bytes, i, p.hidden, whole));
      }
      store(p.out_type, p.out + token * out_bytes, i, p.hidden, whole, all.sum);
    }
    if (p.weights_out == 0) continue;
    for (uint32_t e = thread; e < p.k; e += p.row_threads) {
      const int32_t slot = slots[token * p.k + e];
      float x = 0.0f;
      if (slot >= 0) {
        const uint32_t from = rank_of_slot(p, uint32_t(slot));
        const uint64_t place = uint64_t(positions[token * p.size + from]) * p.k + e;
        x = reinterpret_cast<const float*>(part(from) + p.came_weights)[place];
      }
      reinterpret_cast<float*>(p.weights_out)[token * p.k + e] = x;
    }
  }
}
