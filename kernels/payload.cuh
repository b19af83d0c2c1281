// Rows as they travel back from their experts: as they are, or cast by blocks of 128 columns (crates/host/src/payload.rs).
//
// A thread has eight columns, from `i` on, and sixteen threads of a warp a block. All threads of a warp come here together; some may be behind
// the last column.
#pragma once
#include "back.cuh"
#include "cast.cuh"
#include "logfmt.cuh"

namespace brigade {

// 1 to 3 is fp8, with scales of the format before it.
enum Payload : uint32_t { as_is = 0, fp8 = 1, as_logfmt = 4 };

constexpr uint32_t block_columns = 128;

// Of so many threads that stand side by side.
template <uint32_t threads>
__device__ __forceinline__ uint32_t greatest_of(uint32_t x) {
#pragma unroll
  for (uint32_t d = threads / 2; d > 0; d /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
  return x;
}

// Rounded to a type, and wide again.
__device__ __forceinline__ Eight rounded(uint32_t type, Eight x) {
  if (type == F32) return x;
#pragma unroll
  for (uint32_t j = 0; j < 8; j += 2) {
    const float2 two = widen(type, narrow(type, x.v[j], x.v[j + 1]));
    x.v[j] = two.x, x.v[j + 1] = two.y;
  }
  return x;
}

// As fp8, with scales elsewhere.
struct Fp8 {
  uint2 values;
  float scale;

  __device__ __forceinline__ Fp8(uint32_t format, const Eight& x, bool there) {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) most = max(most, there ? __float_as_uint(x.v[j]) & 0x7FFFFFFFu : 0);
    scale = scale_as(format, greatest_of<16>(most));
    const auto q = quantized(x.v, Divisor(scale), F8E4M3);
    values = make_uint2(q.words[0], q.words[1]);
  }

  __device__ __forceinline__ void store(uint32_t format, uint64_t to, uint64_t scales, uint32_t i) const {
    *reinterpret_cast<uint2*>(to + i) = values;
    if (i % block_columns == 0) store_scale(format, scales, i / block_columns, scale);
  }
};

__device__ __forceinline__ void store_fp8(uint32_t format, uint64_t values, uint64_t scales, uint32_t i, const Eight& x, bool there) {
  const Fp8 cast(format, x, there);
  if (there) cast.store(format, values, scales, i);
}

// Into the place of a row. What belongs to its values begins `p.row_bytes[0]` bytes behind them.
template <typename P>
__device__ __forceinline__ void store_payload(const P& p, uint64_t place, uint32_t i, const Eight& x) {
  const bool there = i < p.hidden;
  if (p.payload == as_logfmt) {
    const uint32_t block = i / block_columns;
    return logfmt::store(place + block * logfmt::codes, place + p.row_bytes[0] + block * logfmt::beside, x, there);
  }
  store_fp8(p.payload - fp8, place, place + p.row_bytes[0], i, x, there);
}

template <typename P>
__device__ __forceinline__ Eight load_payload(const P& p, uint64_t place, uint32_t i) {
  if (p.payload == as_logfmt) {
    const uint32_t block = i / block_columns;
    return logfmt::load(place + block * logfmt::codes, place + p.row_bytes[0] + block * logfmt::beside, i % block_columns);
  }
  const float scale = load_scale(p.payload - fp8, place + p.row_bytes[0], i / block_columns);
  const uint2 both = *reinterpret_cast<const uint2*>(place + i);
  const uint32_t words[2] = {both.x, both.y};
  Eight x;
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) x.v[j] = __fmul_rn(fp8_value(uint8_t(words[j / 4] >> (j % 4 * 8))), scale);
  return x;
}

}  // namespace brigade
