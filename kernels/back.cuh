// What goes back for a row that was dispatched, and how rows are added.
#pragma once
#include "copy.cuh"
#include "types.cuh"

namespace brigade {

enum Sum : uint32_t { by_ranks = 0, by_experts = 1, by_experts_and_ranks = 2 };

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

// Of numbers of 16 bits.
__device__ __forceinline__ Eight eight_of(uint32_t type, uint4 bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  Eight x;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const float2 two = widen(type, words[i]);
    x.v[2 * i] = two.x, x.v[2 * i + 1] = two.y;
  }
  return x;
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

template <typename P>
__device__ __forceinline__ uint64_t row_bytes_back(const P& p) {
  return uint64_t(p.hidden) * (p.from_type == F32 ? 4 : 2);
}

// Weights that go back with each row.
template <typename P>
__device__ __forceinline__ uint32_t weights_back(const P& p) {
  return p.back == 0 ? 0 : p.sum == by_experts ? 1 : p.k;
}

// Which place it has among the rows that go back to its source: both know. Every token there has one, so that any run of them can go back
// on its own.
template <typename P>
__device__ __forceinline__ uint32_t place_back(const P& p, int4 source) {
  return p.sum == by_experts ? source.y * p.k + source.z : source.y;
}

// The rows of a token's experts.
template <typename P>
__device__ __forceinline__ const int32_t* rows_of_token(const P& p, int4 source) {
  return reinterpret_cast<const int32_t*>(p.rows_of) + (uint64_t(source.x) * p.max_tokens + source.w) * p.k;
}

// Where a token's rows are added before they go back, the first of them stands for all.
template <typename P>
__device__ __forceinline__ bool goes_back(const P& p, int4 source) {
  if (p.sum != by_experts_and_ranks) return true;
  const int32_t* rows = rows_of_token(p, source);
  bool first = true;
  for (int32_t e = 0; e < source.z; ++e) first &= rows[e] < 0;
  return first;
}

// Adds granule `g` of rows of 16-bit numbers that lie at multiples of 16 bytes, from the `first` on; some are on their way at once.
template <typename P>
__device__ __forceinline__ void add_narrow(const P& p, const int32_t* rows, int32_t first, uint32_t g, Adding& all) {
  constexpr uint32_t ahead = 4;
  for (uint32_t e = first; e < p.k; e += ahead) {
    int32_t at[ahead];
    uint4 words[ahead];
    float weight[ahead];
#pragma unroll
    for (uint32_t n = 0; n < ahead; ++n) at[n] = e + n < p.k ? rows[e + n] : -1;
#pragma unroll
    for (uint32_t n = 0; n < ahead; ++n) {
      if (at[n] < 0) continue;
      words[n] = reinterpret_cast<const uint4*>(p.from + uint32_t(at[n]) * row_bytes_back(p))[g];
      weight[n] = reinterpret_cast<const float*>(p.held)[at[n]];
    }
#pragma unroll
    for (uint32_t n = 0; n < ahead; ++n) {
      if (at[n] >= 0) all.add(eight_of(p.from_type, words[n]), weight[n]);
    }
  }
}

// Writes the sum of a token's rows from the `first` on.
template <typename P>
__device__ __forceinline__ void write_sum(const P& p, const int32_t* rows, int32_t first, uint64_t to, uint32_t thread) {
  const uint64_t row_bytes = row_bytes_back(p);
  const bool whole = is_whole(p.from, p.hidden);
  for (uint32_t i = thread * 8; i < p.hidden; i += p.row_threads * 8) {
    Adding all{};
    if (whole && p.from_type != F32) {
      add_narrow(p, rows, first, i / 8, all);
    } else {
      for (uint32_t e = first; e < p.k; ++e) {
        if (rows[e] < 0) continue;
        const uint64_t from = p.from + uint32_t(rows[e]) * row_bytes;
        all.add(load(p.from_type, from, i, p.hidden, whole), reinterpret_cast<const float*>(p.held)[rows[e]]);
      }
    }
    store(p.from_type, to, i, p.hidden, whole, all.sum);
  }
}

// Writes what goes back for row `at`, and the weights beside it; where `sums` go back, that of the rank's rows of the token. By
// `p.row_threads` threads, of which this one is `thread`.
template <bool sums, typename P>
__device__ __forceinline__ void write_back_as(const P& p, uint32_t at, int4 source, uint64_t to, uint64_t weights_to, uint32_t thread) {
  const uint64_t row_bytes = row_bytes_back(p);
  const float* back = reinterpret_cast<const float*>(p.back);
  const int32_t* rows = rows_of_token(p, source);
  if constexpr (!sums) {
    copy_bytes(to, p.from + at * row_bytes, row_bytes, thread, p.row_threads);
  } else {
    write_sum(p, rows, source.z, to, thread);
  }
  if (back == nullptr) return;
  float* weights = reinterpret_cast<float*>(weights_to);
  if (p.sum == by_experts) {
    if (thread == 0) weights[0] = back[at];
    return;
  }
  for (uint32_t e = thread; e < p.k; e += p.row_threads) {
    const bool there = p.sum == by_ranks || rows[e] >= 0;
    weights[e] = p.sum == by_ranks ? back[uint64_t(at) * p.k + e] : there ? back[rows[e]] : 0.0f;
  }
}

template <typename P>
__device__ __forceinline__ void write_back(const P& p, uint32_t at, int4 source, uint64_t to, uint64_t weights_to, uint32_t thread) {
  if (p.sum == by_experts_and_ranks) return write_back_as<true>(p, at, source, to, weights_to, thread);
  write_back_as<false>(p, at, source, to, weights_to, thread);
}

}  // namespace brigade
