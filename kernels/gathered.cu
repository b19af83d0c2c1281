// Which rows come, where every rank has the experts of all ranks' tokens: a block for each rank finds its rows for this one, and writes
// them down as that rank would tell of them. That of this rank takes own ids and weights out as well.
#include "params.cuh"
#include "sections.cuh"
#include "steps.cuh"

using namespace brigade;

// Who chooses the slots of a rank's tokens.
struct Chooser {
  uint64_t ids, map;
  uint32_t k, id_bytes, rank, size, placement, experts, copies, per_rank;
};

__device__ __forceinline__ void copy_words(uint64_t to, uint64_t from, uint32_t words) {
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  }
}

extern "C" __global__ void __launch_bounds__(1024) brigade_gathered(const __grid_constant__ GatheredParams p) {
  wait_for_previous_kernel();
  const Group g = group_of(p, p.signature);
  if (is_stopped(g)) return;
  const uint32_t source = blockIdx.x;
  const int32_t* lengths = reinterpret_cast<const int32_t*>(p.lengths);
  const int64_t first = p.ragged ? int64_t(lengths[source]) : int64_t(source) * p.max_tokens;
  const int64_t end = p.ragged ? int64_t(lengths[source + 1]) : first + lengths[source], n = end - first;
  const bool fits = first >= 0 && n >= 0 && end <= int64_t(p.rows) && n <= int64_t(p.max_tokens);
  if (!fits || (source == p.rank && n != int64_t(p.tokens))) {
    // Nothing of it is read.
    if (threadIdx.x != 0) return;
    Waiting w{};
    w.blamed = p.rank, w.slot = source, w.end = End::mismatch;
    w.blamed_expected = source == p.rank ? p.tokens : p.max_tokens, w.seen = uint64_t(n);
    return give_up(g, w);
  }
  const uint64_t ids = p.ids + uint64_t(first) * p.k * p.id_bytes, given = p.weights + uint64_t(first) * p.k * 4;
  const Chooser chooser{ids, p.map, p.k, p.id_bytes, source, p.size, p.placement, p.experts, p.copies, p.per_rank};
  const int32_t begin = int32_t(first_slot(p, p.rank)), behind = int32_t(first_slot(p, p.rank + 1));
  const uint64_t part = p.parts + source * p.parts_stride;
  uint32_t before = 0;
  for (uint32_t start = 0; start < uint32_t(n); start += blockDim.x) {
    const uint32_t t = start + threadIdx.x;
    bool comes = false;
    for (uint32_t e = 0; e < p.k && t < uint32_t(n) && !comes; ++e) {
      const int32_t slot = chosen_slot(chooser, t, e);
      comes = slot >= begin && slot < behind;
    }
    uint32_t all;
    const uint64_t at = before + rank_among(comes, all);
    before += all;
    if (!comes) continue;
    reinterpret_cast<uint32_t*>(part + p.came[token])[at] = t;
    for (uint32_t e = 0; e < p.k; ++e) {
      const int32_t slot = chosen_slot(chooser, t, e);
      const bool here = slot >= begin && slot < behind;
      reinterpret_cast<int32_t*>(part + p.came[slots])[at * p.k + e] = here ? slot - begin : -1;
      if (p.weights == 0) continue;
      const float weight = here ? reinterpret_cast<const float*>(given)[uint64_t(t) * p.k + e] : 0.0f;
      reinterpret_cast<float*>(part + p.came[weights])[at * p.k + e] = weight;
    }
  }
  if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(part) = before;
  if (source != p.rank) return;
  copy_words(p.own_ids, ids, p.tokens * p.k * (p.id_bytes / 4));
  if (p.weights != 0) copy_words(p.own_weights, given, p.tokens * p.k);
}
