// Rows back by rank of many tokens: where they lie as the widest accesses want it, without weights of their own. Warps take pieces of rows, of which they
// find out once where each lies. In the kernel of few tokens this would cost each of those what its code takes to be fetched.
#include "push_combine.cuh"

template <uint32_t In, uint32_t Out, int Most>
struct PushMany : PushCombine<In, Out, Most, true> {
  using Base = PushCombine<In, Out, Most, true>;
  using Base::Base, Base::p, Base::peer, Base::place, Base::row_of, Base::position, Base::turn_of, Base::source, Base::which, Base::adders;

  // Granules of a piece for each lane: what a thread adds up at once, of all ranks, and what it pushes.
  static constexpr uint32_t Added = Most == 2 ? 4 : Most == 4 ? 2 : 1, Pushed = 4;
  // No row is shorter than a piece that is added (`PIECE` in cuda/src/push_combine.rs).
  static_assert(32 * Added <= 128);

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

  // Adds up a piece of a token's rows, once they are there. The last of a row ends with it, and gives no granules of the one before.
  __device__ __forceinline__ bool add_piece(uint32_t t, uint32_t part) const {
    const uint32_t start = part * 32 * Added, g = min(start, p.granules - 32 * Added) + threadIdx.x % 32;
    uint64_t from[Most];
    uint32_t named = 0;
#pragma unroll
    for (uint32_t r = 0; r < Most; ++r) {
      const int32_t i = r < p.size ? position(t, r) : -1;
      const bool is_own = r == p.rank;
      from[r] = is_own ? p.from + 16 * (uint64_t(begins[r] + i) * p.granules + g) : place(p.rank, row_of(p.rank, t, r), g);
      named |= uint32_t(i >= 0) << r;
    }
    const uint32_t awaited = named & ~(1u << p.rank);
    // Own rows are looked at beside those of peers: loaded before, they would be waited for.
    uint4 got[Added][Most];
    const auto look = [&] {
      bool come = true;
#pragma unroll
      for (uint32_t r = 0; r < Most; ++r) {
#pragma unroll
        for (uint32_t n = 0; n < Added; ++n) {
          got[n][r] = make_uint4(0, 0, 0, 0);
          if (named >> r & 1) got[n][r] = peek(from[r] + 512 * n);
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
        if (named >> r & 1) parts.add(got[n][r]);
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
      if (this->is_wide()) {
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

#define FOR_RANKS(NAME, IN, OUT)                              \
  PUSH_COMBINE(many_##NAME##_2, true, PushMany<IN, OUT, 2>)   \
  PUSH_COMBINE(many_##NAME##_4, true, PushMany<IN, OUT, 4>)   \
  PUSH_COMBINE(many_##NAME##_8, true, PushMany<IN, OUT, 8>)

FOR_RANKS(f32_f32, F32, F32)
FOR_RANKS(f16_f16, F16, F16)
FOR_RANKS(bf16_bf16, BF16, BF16)
FOR_RANKS(f16_f32, F16, F32)
FOR_RANKS(bf16_f32, BF16, F32)
