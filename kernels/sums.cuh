// Granules of sums: how they are read and written, and how those of all ranks become one.
#pragma once
#include <type_traits>

#include "combine.cuh"
#include "push.cuh"
#include "types.cuh"

namespace brigade {

// Elements of a granule of the input.
template <uint32_t In>
constexpr uint32_t lanes = In == F32 ? 4 : 8;

// A word of canonical NaNs.
template <uint32_t In>
constexpr uint32_t nan_word = In == F32 ? 0x7FC00000u : In == BF16 ? 0x7FC07FC0u : 0x7E007E00u;

template <uint32_t In>
__device__ __forceinline__ uint4 without_sentinel(uint4 v) {
  constexpr uint32_t nan = nan_word<In>;
  return make_uint4(v.x == sentinel ? nan : v.x, v.y == sentinel ? nan : v.y, v.z == sentinel ? nan : v.z,
                    v.w == sentinel ? nan : v.w);
}

template <uint32_t In>
__device__ __forceinline__ void values(uint4 v, float (&x)[lanes<In>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (In == F32) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 two = widen(In, words[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
}

// A granule's result, in 16-byte parts.
template <uint32_t In, uint32_t Out>
struct Result {
  static constexpr uint32_t parts = Out == F32 ? lanes<In> / 4 : 1;
  uint4 part[parts];

  __device__ __forceinline__ void set(const float (&x)[lanes<In>]) {
    if constexpr (Out == F32) {
#pragma unroll
      for (uint32_t i = 0; i < parts; ++i) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = __float_as_uint(canonical(x[4 * i + k]));
        part[i] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    } else {
      part[0] = make_uint4(narrow(Out, x[0], x[1]), narrow(Out, x[2], x[3]), narrow(Out, x[4], x[5]), narrow(Out, x[6], x[7]));
    }
  }
};

// A granule that an earlier kernel wrote. In the order in which it stands here, so that it is on its way when what follows waits.
__device__ __forceinline__ uint4 read_granule(uint64_t at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// Part of a granule, from element `first` of an array on. Not inlined, as all that is rare: what is not fetched between two
// stores does not hold up the second.
template <uint32_t In>
__device__ __noinline__ uint4 narrow_input(uint64_t from, uint64_t first, uint32_t count) {
  using Element = std::conditional_t<In == F32, uint32_t, uint16_t>;
  constexpr uint32_t in_word = 4 / sizeof(Element);
  uint32_t words[4] = {};
  for (uint32_t k = 0; k < lanes<In> && k < count; ++k) {
    words[k / in_word] |= uint32_t(reinterpret_cast<const Element*>(from)[first + k]) << (k % in_word * 16);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <uint32_t In, uint32_t Out>
__device__ __noinline__ void narrow_output(uint64_t to, uint64_t first, uint32_t count, Result<In, Out> sum) {
  using Element = std::conditional_t<Out == F32, uint32_t, uint16_t>;
  const Element* from = reinterpret_cast<const Element*>(sum.part);
  for (uint32_t k = 0; k < lanes<In> && k < count; ++k) reinterpret_cast<Element*>(to)[first + k] = from[k];
}

// A granule's values.
template <uint32_t In>
struct Values {
  float x[lanes<In>];
};

// By other operations than sums.
template <uint32_t In>
__device__ __noinline__ Values<In> combined(uint32_t op, Values<In> a, uint4 with) {
  Values<In> b;
  values<In>(with, b.x);
  for (uint32_t k = 0; k < lanes<In>; ++k) a.x[k] = combine(op, a.x[k], b.x[k]);
  return a;
}

template <uint32_t In>
__device__ __noinline__ Values<In> averaged(uint32_t size, Values<In> a) {
  for (uint32_t k = 0; k < lanes<In>; ++k) a.x[k] = finish(average, size, a.x[k]);
  return a;
}

// One exchange whose granules are combined, of at most `Most` ranks.
template <typename P, uint32_t In, uint32_t Out, int Most, bool Hooked = true>
struct Sums : Pushing<P, Hooked> {
  using Base = Pushing<P, Hooked>;
  using Base::Base, Base::p, Base::flag;
  using Sum = Result<In, Out>;

  // Combines granule `own` of this rank with those of its peers, which lie `stride` granules apart at `slots`, in the order of
  // their distance from this rank. False if they do not come.
  // A herald waits for its peer's arrival too.
  __device__ __forceinline__ bool reduce(uint64_t slots, uint32_t stride, uint4 own, uint32_t op, bool herald, Sum& sum) const {
    uint4 got[Most];
    // Where rank 0 would be, among those behind this one and among those before it.
    const uint64_t step = 16ull * stride, behind = slots - (p.rank + 1) * step, before = behind + p.size * step;
    const auto look = [&] {
      const uint64_t seen = this->arrived(herald);
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        // Nothing of an earlier look stays, which would have to be kept.
        got[r] = own;
        if (r >= p.size || r == p.rank) continue;
        got[r] = peek((r > p.rank ? behind : before) + r * step);
      }
      bool all = seen == flag;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (r >= p.size || r == p.rank) continue;
        if (!is_there(got[r])) all = false;
      }
      return all;
    };
    const auto missing = [&] {
      uint32_t who = herald ? threadIdx.x : p.rank;
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        if (r < p.size && r != p.rank && !is_there(got[r])) who = r;
      }
      return who;
    };
    if (!this->wait(missing, look)) return false;
    sum = combined_of(got, op);
    return true;
  }

  // The granules of all ranks as one.
  __device__ __forceinline__ Sum combined_of(const uint4 (&got)[Most], uint32_t op) const {
    Values<In> all;
    values<In>(got[0], all.x);
    const bool adds = op == Op::sum || op == average;
#pragma unroll
    for (int r = 1; r < Most; ++r) {
      if (r >= p.size) continue;
      if (adds) {
        float y[lanes<In>];
        values<In>(got[r], y);
#pragma unroll
        for (uint32_t k = 0; k < lanes<In>; ++k) all.x[k] = __fadd_rn(all.x[k], y[k]);
      } else {
        all = combined<In>(op, all, got[r]);
      }
    }
    if (op == average) all = averaged<In>(p.size, all);
    Sum sum;
    sum.set(all.x);
    return sum;
  }
};

}  // namespace brigade
