// What a row has on the way to its experts, section by section (crates/plan/src/dispatch.rs has the same list).
#pragma once
#include "copy.cuh"
#include "slots.cuh"

namespace brigade {

enum Section : uint32_t { row = 0, scales = 1, token = 2, slots = 3, weights = 4, beside = 5 };

// Whether it is one of those that say which row it is.
__device__ __forceinline__ bool says_which(uint32_t section) { return section >= token && section <= weights; }

// Writes what `to` gets of own row `from`, as row `i` of sections of which each begins at `part + section[..]`; or nothing but what says
// which row it is. By `p.row_threads` threads, of which this one is `thread`.
template <typename P>
__device__ __forceinline__ void write_sections(const P& p, const uint64_t* section, uint64_t part, uint32_t i, uint32_t to,
                                               uint32_t from, bool all, uint32_t thread) {
  auto target = [&](uint32_t s) { return part + section[s] + i * p.row_bytes[s]; };
  if (p.row_bytes[token] != 0 && thread == 0) *reinterpret_cast<uint32_t*>(target(token)) = from;
  if (p.row_bytes[slots] != 0) {
    const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
    for (uint32_t e = thread; e < p.k; e += p.row_threads) {
      const uint64_t entry = uint64_t(from) * p.k + e;
      const int32_t slot = reinterpret_cast<const int32_t*>(p.from[slots])[entry];
      // On its way at the same time.
      const float weight = p.row_bytes[weights] != 0 ? reinterpret_cast<const float*>(p.from[weights])[entry] : 0.0f;
      const bool theirs = slot >= begin && slot < end;
      reinterpret_cast<int32_t*>(target(slots))[e] = theirs ? slot - begin : -1;
      if (p.row_bytes[weights] != 0) reinterpret_cast<float*>(target(weights))[e] = theirs ? weight : 0.0f;
    }
  }
  for (uint32_t s = 0; all && s < p.sections; ++s) {
    if (says_which(s)) continue;
    copy_bytes(target(s), p.from[s] + from * p.row_bytes[s], p.row_bytes[s], thread, p.row_threads);
  }
}

}  // namespace brigade
