// Rows back from their experts. `back` writes each into this rank's part of the half of the rank that it came from, at a place that both
// know: by its position among the rows from there, and by expert also by its place among the token's experts. Once the steps between have
// seen all of them come, `sum` adds them up: in f32, products rounded before they are added, never fused, so that the host's are the
// same bits.
#include "params.cuh"
#include "slots.cuh"
#include "steps.cuh"
#include "types.cuh"

using namespace brigade;

enum Sum : uint32_t { by_ranks = 0, by_experts = 1, by_experts_and_ranks = 2 };

__device__ __forceinline__ bool is_stopped(const CombineParams& p) {
  return is_stopped(reinterpret_cast<const uint64_t*>(p.stop), reinterpret_cast<const uint64_t*>(p.state));
}

// Eight elements, or as many as there are.
struct Eight {
  float v[8];
};

__device__ __forceinline__ Eight load(uint32_t type, uint64_t array, uint32_t first, uint32_t hidden, bool whole) {
  Eight x;
  if (whole) {
    load_wide(type, array, first, x.v);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x.v[i] = first + i < hidden ? load_float(type, array, first + i) : 0.0f;
  }
  return x;
}

__device__ __forceinline__ void store(uint32_t type, uint64_t array, uint32_t first, uint32_t hidden, bool whole, const Eight& x) {
  if (whole) return store_wide(type, array, first, x.v);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (first + i < hidden) store_float(type, array, first + i, x.v[i]);
  }
}

// Added in the order in which they are given.
struct Adding {
  Eight sum;
  bool any;

  __device__ __forceinline__ void add(const Eight& x) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sum.v[i] = any ? __fadd_rn(sum.v[i], x.v[i]) : x.v[i];
    any = true;
  }

  __device__ __forceinline__ void add(Eight x, float weight) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x.v[i] = __fmul_rn(x.v[i], weight);
    add(x);
  }
};

__device__ __forceinline__ bool is_whole(uint64_t array, uint32_t hidden) { return array % 16 == 0 && hidden % 8 == 0; }

extern "C" __global__ void __launch_bounds__(256) brigade_combine_back(const __grid_constant__ CombineParams p) {
  wait_for_previous_kernel();
  if (is_stopped(p)) return;
  const uint32_t groups = gridDim.x * blockDim.x / p.row_threads, thread = threadIdx.x % p.row_threads;
  const uint64_t row_bytes = uint64_t(p.hidden) * (p.from_type == F32 ? 4 : 2);
  const bool whole = is_whole(p.from, p.hidden);
  const float* back = reinterpret_cast<const float*>(p.back);
  const uint32_t row_weights = back == nullptr ? 0 : p.sum == by_experts ? 1 : p.k;
  uint64_t moved = 0;
  for (uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / p.row_threads; at < p.capacity; at += groups) {
    const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
    if (source.x < 0) continue;
    const uint32_t place = p.sum == by_experts ? source.w * p.k + source.z : source.w;
    if (place < p.first_row || place - p.first_row >= p.piece_rows) continue;
    const int32_t* rows = reinterpret_cast<const int32_t*>(p.rows_of) + (uint64_t(source.x) * p.max_tokens + source.w) * p.k;
    if (p.sum == by_experts_and_ranks) {
      // The first of a token's rows stands for all of them.
      bool first = true;
      for (int32_t e = 0; e < source.z; ++e) first &= rows[e] < 0;
      if (!first) continue;
    }
    const uint64_t part = p.base + uint32_t(source.x) * p.stride + p.half + p.rank * p.part_bytes;
    const uint64_t to = part + p.rows_at + (place - p.first_row) * row_bytes;
    for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
      Adding all{};
      if (p.sum == by_experts_and_ranks) {
        for (uint32_t e = source.z; e < p.k; ++e) {
          if (rows[e] < 0) continue;
          const uint64_t from = p.from + uint32_t(rows[e]) * row_bytes;
          all.add(load(p.from_type, from, i, p.hidden, whole), reinterpret_cast<const float*>(p.held)[rows[e]]);
        }
      } else {
        all.add(load(p.from_type, p.from + at * row_bytes, i, p.hidden, whole));
      }
      store(p.from_type, to, i, p.hidden, whole, all.sum);
    }
    if (thread == 0 && uint32_t(source.x) != p.rank) moved += row_bytes + 4 * row_weights;
    if (back == nullptr) continue;
    float* weights = reinterpret_cast<float*>(part + p.weights_at);
    const uint64_t with = place - p.first_row;
    if (p.sum == by_experts) {
      if (thread == 0) weights[with] = back[at];
      continue;
    }
    for (uint32_t e = thread; e < p.k; e += p.row_threads) {
      const bool there = p.sum == by_ranks || rows[e] >= 0;
      weights[with * p.k + e] = p.sum == by_ranks ? back[uint64_t(at) * p.k + e] : there ? back[rows[e]] : 0.0f;
    }
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
