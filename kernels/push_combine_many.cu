// Rows back of many tokens, by rank or as each rank's sums of what its experts made: where they lie as the widest accesses want it, without weights that go
// back. Warps take pieces of rows, of which they find out once where each lies. In the kernel of few tokens this would cost each of those what its code
// takes to be fetched.
#include "push_combine.cuh"

// What a warp knows of the rows that a rank's experts made of one token: a lane has that of one expert.
struct Made {
  // The row and its weight, where there is one; those for which there is; the token at its rank.
  uint32_t at;
  float weight;
  uint32_t named, token;
};

template <uint32_t In, uint32_t Out, int Most, bool by_rank>
struct PushMany : PushCombine<In, Out, Most, by_rank> {
  using Base = PushCombine<In, Out, Most, by_rank>;
  using Base::Base, Base::p, Base::peer, Base::place, Base::row_of, Base::position, Base::turn_of, Base::source, Base::which, Base::adders, Base::rows_of;

  // Granules of a piece for each lane: what a thread adds up at once, of all ranks, and what it pushes. Sums of experts' rows are of two granules, and of
  // four rows at once.
  static constexpr uint32_t Added = Most == 2 && by_rank ? 4 : Most < 8 ? 2 : 1, Pushed = by_rank ? 4 : 2, Ahead = 4;
  // No row is shorter than a piece (`PIECE` in cuda/src/push_combine.rs).
  static_assert(32 * Added <= 128 && 32 * Pushed <= 128);

  // Pieces of a row.
  template <uint32_t each>
  __device__ __forceinline__ uint32_t parts() const {
    return (p.granules + 32 * each - 1) / (32 * each);
  }

  // By the largest blocks, which are few. Others push granules in turn: pieces took them longer.
  __device__ __forceinline__ uint32_t push_pieces(uint32_t rows, uint32_t warp, uint32_t warps) const {
    const uint32_t end = p.granules, lane = threadIdx.x % 32;
    uint32_t begun = 0;
#pragma unroll 1
    for (uint32_t n = warp; n < rows * parts<Pushed>(); n += warps) {
      uint32_t s, i;
      const uint32_t q = n / parts<Pushed>(), g = (n - q * parts<Pushed>()) * 32 * Pushed + lane;
      if (!turn_of(q, s, i)) continue;
      const uint32_t at = begins[s] + i;
      const uint64_t from = p.from + 16 * (uint64_t(at) * end + g);
      uint4 v[Pushed];
#pragma unroll
      for (uint32_t k = 0; k < Pushed; ++k) {
        if (g + 32 * k < end) v[k] = *reinterpret_cast<const uint4*>(from + 512 * k);
      }
      const uint64_t to = place(s, row_of(s, uint32_t(source(at).y), p.rank), g);
#pragma unroll
      for (uint32_t k = 0; k < Pushed; ++k) {
        if (g + 32 * k < end) push(to + 512 * k, without_sentinel<In>(v[k]));
      }
      begun += g == 0;
    }
    return begun;
  }

  // By all lanes of a warp.
  __device__ __forceinline__ Made made_of(uint32_t s, uint32_t i) const {
    const uint32_t lane = threadIdx.x % 32;
    const int32_t at = lane < p.k ? rows_of(s, i)[lane] : -1;
    Made made{uint32_t(at), 0.0f, __ballot_sync(0xFFFFFFFFu, at >= 0), 0};
    if (at >= 0) made.weight = reinterpret_cast<const float*>(p.held)[at], made.token = uint32_t(source(uint32_t(at)).y);
    return made;
  }

  // Granules of what a rank's experts made of a token, added in the order of those and rounded: one of each 32 from `g` on.
  template <uint32_t each>
  __device__ __forceinline__ void added(const Made& made, uint32_t g, uint4 (&sums)[each]) const {
    // What is added to it is the sum, if it is a zero, too.
    Adding<In> all[each];
#pragma unroll
    for (uint32_t n = 0; n < each; ++n) {
      all[n].any = true;
#pragma unroll
      for (uint32_t i = 0; i < lanes<In>; ++i) all[n].x[i] = -0.0f;
    }
    const uint64_t start = p.from + 16ull * g;
#pragma unroll 1
    for (uint32_t left = made.named; left != 0;) {
      // Where there are no more, the last one is loaded again, and not added: loads that are none would keep what was there.
      uint32_t lane = __ffs(left) - 1;
      const uint32_t some = left;
      uint4 v[Ahead][each];
#pragma unroll
      for (uint32_t i = 0; i < Ahead; ++i) {
        lane = left == 0 ? lane : __ffs(left) - 1, left &= left - 1;
        const uint64_t from = start + uint64_t(__shfl_sync(0xFFFFFFFFu, made.at, lane)) * (16 * p.granules);
#pragma unroll
        for (uint32_t n = 0; n < each; ++n) v[i][n] = *reinterpret_cast<const uint4*>(from + 512 * n);
      }
      uint32_t more = some;
#pragma unroll
      for (uint32_t i = 0; i < Ahead; ++i) {
        if (more == 0) break;
        const float weight = __shfl_sync(0xFFFFFFFFu, made.weight, __ffs(more) - 1);
        more &= more - 1;
#pragma unroll
        for (uint32_t n = 0; n < each; ++n) all[n].add(v[i][n], weight);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < each; ++n) {
      Result<In, In> sum;
      sum.set(all[n].x);
      sums[n] = sum.part[0];
    }
  }

  // The same as `push_pieces`, of sums of what this rank's experts made.
  __device__ __forceinline__ uint32_t push_sums(uint32_t rows, uint32_t warp, uint32_t warps) const {
    uint32_t begun = 0;
#pragma unroll 1
    for (uint32_t n = warp; n < rows * parts<Pushed>(); n += warps) {
      uint32_t s, i;
      const uint32_t q = n / parts<Pushed>(), start = (n - q * parts<Pushed>()) * 32 * Pushed;
      const uint32_t g = min(start, p.granules - 32 * Pushed) + threadIdx.x % 32;
      if (!turn_of(q, s, i)) continue;
      const Made made = made_of(s, i);
      if (made.named == 0) continue;
      uint4 sums[Pushed];
      added(made, g, sums);
      const uint32_t t = __shfl_sync(0xFFFFFFFFu, made.token, __ffs(made.named) - 1);
      const uint64_t to = place(s, row_of(s, t, p.rank), g);
#pragma unroll
      for (uint32_t k = 0; k < Pushed; ++k) {
        if (g + 32 * k >= start) push(to + 512 * k, sums[k]);
      }
      begun += g == 0;
    }
    return begun;
  }

  // Adds up a piece of a token's rows, once they are there. The last of a row ends with it, and gives no granules of the one before.
  __device__ __forceinline__ bool add_piece(uint32_t t, uint32_t part) const {
    const uint32_t start = part * 32 * Added, g = min(start, p.granules - 32 * Added) + threadIdx.x % 32;
    uint64_t from[Most];
    uint32_t named = 0;
#pragma unroll
    for (uint32_t r = 0; r < Most; ++r) {
      const int32_t i = r < p.size ? position(t, r) : -1;
      const bool is_own = by_rank && r == p.rank;
      from[r] = is_own ? p.from + 16 * (uint64_t(begins[r] + i) * p.granules + g) : place(p.rank, row_of(p.rank, t, r), g);
      named |= uint32_t(i >= 0) << r;
    }
    const uint32_t own = 1u << p.rank, awaited = named & ~own, looked_at = by_rank ? named : awaited;
    uint4 got[Added][Most];
    uint4 sums[Added] = {};
    if constexpr (!by_rank) {
      if (named & own) added(made_of(p.rank, position(t, p.rank)), g, sums);
    }
    // Own rows are looked at beside those of peers: loaded before, they would be waited for. Sums of them are made before.
    const auto look = [&] {
      bool come = true;
#pragma unroll
      for (uint32_t r = 0; r < Most; ++r) {
#pragma unroll
        for (uint32_t n = 0; n < Added; ++n) {
          got[n][r] = make_uint4(0, 0, 0, 0);
          if (looked_at >> r & 1) got[n][r] = peek(from[r] + 512 * n);
        }
      }
#pragma unroll
      for (uint32_t r = 0; r < Most; ++r) {
#pragma unroll
        for (uint32_t n = 0; n < Added; ++n) come &= !(awaited >> r & 1) || is_there(got[n][r]);
      }
      return come;
    };
    const auto missing = [&] {
      uint32_t who = p.rank;
#pragma unroll
      for (uint32_t r = 0; r < Most; ++r) {
#pragma unroll
        for (uint32_t n = 0; n < Added; ++n) {
          if ((awaited >> r & 1) && !is_there(got[n][r])) who = r;
        }
      }
      return who;
    };
    if (!this->wait(missing, look)) return false;
#pragma unroll
    for (uint32_t n = 0; n < Added; ++n) {
      if (g + 32 * n < start) continue;
      Adding<In> parts{};
#pragma unroll
      for (uint32_t r = 0; r < Most; ++r) {
        if (named >> r & 1) parts.add(!by_rank && r == p.rank ? sums[n] : got[n][r]);
      }
      this->template give<true>(t * p.granules + g + 32 * n, t, g + 32 * n, parts);
    }
    return true;
  }

  // A block's share of own tokens, of which warps take what is next. Whoever has given up is not `there`: all lanes of its warp leave with it.
  __device__ __forceinline__ bool add_pieces(bool there) const {
#pragma unroll 1
    while (__all_sync(0xFFFFFFFFu, there)) {
      const uint32_t n = next_of(item) * adders() + which(), t = n / parts<Added>();
      if (t >= p.tokens) break;
      there = add_piece(t, n - t * parts<Added>());
    }
    return there;
  }

  // Of at least two blocks, without a hook.
  __device__ __forceinline__ void run(uint32_t rows, uint32_t first) const {
    bool failed = !this->begin(rows, first);
    const uint32_t all = failed ? 0 : this->to_push(), mine = which() * blockDim.x + threadIdx.x;
    this->tally(p.moved_bytes);
    if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) this->fill(p.weight_granules + p.tokens * (p.size - 1) * p.granules);
    if (blockIdx.x % 2 == 0) {
      const uint32_t threads = (gridDim.x + 1) / 2 * blockDim.x;
      if constexpr (!by_rank) {
        this->count_moved(push_sums(all / p.granules, mine / 32, threads / 32));
      } else if (this->is_wide()) {
        this->count_moved(push_pieces(all / p.granules, mine / 32, threads / 32));
        this->empty_by(mine, threads);
      } else {
        this->count_moved(this->template push_rows_as_they_are<true>(mine, all, threads));
      }
    } else {
      const bool there = !failed && this->add_waits();
      if (!this->is_wide()) this->empty_by(mine, adders() * blockDim.x);
      failed = !add_pieces(there);
    }
    if (this->is_herald() && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == this->flag; });
    this->finish(failed);
  }
};

#define OF_TYPES(NAME, IN, OUT, MOST)                                                \
  PUSH_COMBINE(many_##NAME##_##MOST, true, PushMany<IN, OUT, MOST, true>)            \
  PUSH_COMBINE(many_experts_##NAME##_##MOST, false, PushMany<IN, OUT, MOST, false>)

#define FOR_RANKS(NAME, IN, OUT) \
  OF_TYPES(NAME, IN, OUT, 2)     \
  OF_TYPES(NAME, IN, OUT, 4)     \
  OF_TYPES(NAME, IN, OUT, 8)

FOR_RANKS(f32_f32, F32, F32)
FOR_RANKS(f16_f16, F16, F16)
FOR_RANKS(bf16_bf16, BF16, BF16)
FOR_RANKS(f16_f32, F16, F32)
FOR_RANKS(bf16_f32, BF16, F32)
