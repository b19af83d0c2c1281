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

// A row that a lane names, or none.
struct Named {
  uint64_t row;
  float weight;
  bool there;
};

// Adds up the rows that the lanes of a warp name, in their order: of `known` type, which suit the widest access, or of `type`. By `threads`
// threads, of whole warps, which name the same ones; `give(i, sum)` takes the sum of eight columns from `i` on. Where there is no row it is
// 0, or, if something is to be added to it, -0, which changes nothing.
template <uint32_t known, bool weighted, typename Give>
__device__ __forceinline__ void add_rows(uint32_t type, uint32_t hidden, bool whole, Named mine, bool more, uint32_t thread,
                                         uint32_t threads, Give give) {
  // Loads that are under way at once: of rows, and of a row.
  constexpr int at_once = known == any_type ? 1 : 2, columns = known == any_type ? 1 : 2;
  const uint32_t all = __ballot_sync(0xFFFFFFFFu, mine.there), next = threads * 8;
  const float none = all != 0 || more ? -0.0f : 0.0f;
  // All lanes go on as long as one of a warp does, since they tell each other.
  for (uint32_t warp = thread / 32 * 256; warp < hidden; warp += columns * next) {
    const uint32_t first = warp + thread % 32 * 8;
    Eight sum[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[c].v[i] = none;
    }
    for (uint32_t left = all; left != 0;) {
      Held<known> x[at_once][columns];
      float weight[at_once];
      uint32_t found = 0;
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        const int from = max(__ffs(int(left)) - 1, 0);
        found |= uint32_t(left != 0) << n;
        const uint64_t row = __shfl_sync(0xFFFFFFFFu, mine.row, from);
        if (weighted) weight[n] = __shfl_sync(0xFFFFFFFFu, mine.weight, from);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          if (left != 0 && first + c * next < hidden) x[n][c] = Held<known>(type, row, first + c * next, hidden, whole);
        }
        left &= left - 1;
      }
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        if (!(found >> n & 1)) break;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          const Eight one = x[n][c].eight();
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[c].v[i] = __fadd_rn(sum[c].v[i], weighted ? __fmul_rn(one.v[i], weight[n]) : one.v[i]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      if (first + c * next < hidden) give(first + c * next, sum[c]);
    }
  }
}

// Writes the sum of a token's rows.
template <typename P>
__device__ __forceinline__ void write_sum(const P& p, const int32_t* rows, uint64_t to, uint32_t thread) {
  const uint32_t lane = thread % 32;
  const int32_t at = lane < p.k ? rows[lane] : -1;
  Named mine{p.from, 0.0f, at >= 0};
  if (mine.there) mine.row += uint32_t(at) * row_bytes_back(p), mine.weight = reinterpret_cast<const float*>(p.held)[at];
  const bool whole = is_whole(p.from | to, p.hidden);
  auto give = [&](uint32_t i, const Eight& sum) { store(p.from_type, to, i, p.hidden, whole, sum); };
  switch (whole ? p.from_type : any_type) {
    case BF16: return add_rows<BF16, true>(BF16, p.hidden, true, mine, false, thread, p.row_threads, give);
    case F16: return add_rows<F16, true>(F16, p.hidden, true, mine, false, thread, p.row_threads, give);
    default: return add_rows<any_type, true>(p.from_type, p.hidden, whole, mine, false, thread, p.row_threads, give);
  }
}

// Writes what goes back for row `at`: itself, or, where `sums` go back, the sum of the rank's rows of the token. By `p.row_threads`
// threads, of whole warps where there are sums, of which this one is `thread`.
template <bool sums, typename P>
__device__ __forceinline__ void write_row_back(const P& p, uint32_t at, int4 source, uint64_t to, uint32_t thread) {
  if constexpr (sums) return write_sum(p, rows_of_token(p, source), to, thread);
  const uint64_t row_bytes = row_bytes_back(p);
  copy_bytes(to, p.from + at * row_bytes, row_bytes, thread, p.row_threads);
}

// The weights beside it.
template <typename P>
__device__ __forceinline__ void write_weights_back(const P& p, uint32_t at, int4 source, uint64_t to, uint32_t thread) {
  const float* back = reinterpret_cast<const float*>(p.back);
  if (back == nullptr) return;
  const int32_t* rows = rows_of_token(p, source);
  float* weights = reinterpret_cast<float*>(to);
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
  if (p.sum == by_experts_and_ranks) {
    write_row_back<true>(p, at, source, to, thread);
  } else {
    write_row_back<false>(p, at, source, to, thread);
  }
  write_weights_back(p, at, source, weights_to, thread);
}

}  // namespace brigade
