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
  for (uint32_t s = 0; s < p.sections; ++s) {
    const uint64_t bytes = p.row_bytes[s], target = part + section[s] + i * bytes;
    if (bytes == 0 || !(all || says_which(s))) continue;
    if (s == token) {
      if (thread == 0) *reinterpret_cast<uint32_t*>(target) = from;
    } else if (s == slots || s == weights) {
      const int32_t begin = int32_t(first_slot(p, to)), end = int32_t(first_slot(p, to + 1));
      for (uint32_t e = thread; e < p.k; e += p.row_threads) {
        const uint64_t entry = uint64_t(from) * p.k + e;
        const int32_t slot = reinterpret_cast<const int32_t*>(p.from[slots])[entry];
        const bool theirs = slot >= begin && slot < end;
        if (s == slots) {
          reinterpret_cast<int32_t*>(target)[e] = theirs ? slot - begin : -1;
        } else {
          reinterpret_cast<float*>(target)[e] = theirs ? reinterpret_cast<const float*>(p.from[weights])[entry] : 0.0f;
        }
      }
    } else {
      copy_bytes(target, p.from[s] + from * bytes, bytes, thread, p.row_threads);
    }
  }
}

}  // namespace brigade
