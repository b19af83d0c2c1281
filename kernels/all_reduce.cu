// All-reduces that push, as one kernel (push.cuh). In one shot every rank pushes its input to every rank, and all reduce all of
// it. In two, every rank pushes each share of its input to the rank that reduces it, and that pushes the result to every rank.
// Either way values are combined in rank order, so both give the same bits.
//
// A thread does the same granules at every stage, on all ranks, so no thread waits for another of its block. It has one of them
// at each stage in turn: while one is pushed, sums of the one before are taken, and results of the one before that. So links
// are in use all the time, and what is done in a rank's own memory costs none. What a stage waits for depends on earlier
// granules alone, however many threads the ranks have: somebody always goes on.
#include "one_turn.cuh"

using namespace brigade;

// What is rare (a hook, other operations than sums, parts of granules) needs calls, and what lives across calls needs registers or
// memory. So it has a kernel of its own, and the plain one has none of it.
template <uint32_t In, uint32_t Out, int Most, bool TwoShot, bool Plain>
struct AllReduce : Sums<AllReduceParams, In, Out, Most, !Plain> {
  using Base = Sums<AllReduceParams, In, Out, Most, !Plain>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped, Base::slots, Base::peer, Base::reduce;
  using typename Base::Sum;

  // Whether the plain one will do.
  static __device__ __forceinline__ bool is_plain(const AllReduceParams& p) {
    return p.desk == 0 && p.op == Op::sum && p.elements % lanes<In> == 0 && (p.from | p.out) % 16 == 0;
  }

  static __device__ __forceinline__ uint64_t first(uint32_t i) { return uint64_t(i) * lanes<In>; }

  // Whether granule `i` is whole, and lies as the widest accesses want it.
  static __device__ __forceinline__ bool is_wide(const AllReduceParams& p, uint32_t i) {
    return Plain || first(i) + lanes<In> <= p.elements && (p.from | p.out) % 16 == 0;
  }

  // Elements from granule `i` on, in 32 bits.
  static __device__ __forceinline__ uint32_t left(const AllReduceParams& p, uint32_t i) {
    const uint64_t all = p.elements - first(i);
    return all < lanes<In> ? uint32_t(all) : lanes<In>;
  }

  static __device__ __forceinline__ uint4 input(const AllReduceParams& p, uint32_t i) {
    return is_wide(p, i) ? read_granule(p.from + 16ull * i) : narrow_input<In>(p.from, first(i), left(p, i));
  }

  __device__ __forceinline__ void output(uint32_t i, const Sum& sum) const {
    if (!is_wide(p, i)) return narrow_output<In, Out>(p.out, first(i), left(p, i), sum);
#pragma unroll
    for (uint32_t k = 0; k < Sum::parts; ++k) reinterpret_cast<uint4*>(p.out)[uint64_t(i) * Sum::parts + k] = sum.part[k];
  }

  // What a thread pushes in a turn: in one shot a granule for all peers, in two one for each, by distance.
  static constexpr int inputs = TwoShot ? Most - 1 : 1;

  static __device__ __noinline__ uint4 any_input(const AllReduceParams& p, uint32_t i) { return input(p, i); }

  // What a thread pushes of granule `j` of all places, as far as there is such a granule. The state is not needed for this, so it may
  // be on its way together with the state.
  static __device__ __forceinline__ void load(const AllReduceParams& p, uint32_t j, uint4 (&in)[inputs]) {
#pragma unroll
    for (int d = 1; d <= inputs; ++d) {
      in[d - 1] = make_uint4(0, 0, 0, 0);
      const uint32_t i = TwoShot ? peer_of(p, d) * p.share + j : j;
      if (j >= p.share || i >= p.granules || d >= p.size) continue;
      in[d - 1] = Plain ? input(p, i) : any_input(p, i);
    }
  }

  using Places = Targets<AllReduceParams, Most>;

  // Granule `j` of a place goes to every peer.
  __device__ __forceinline__ void push_inputs(const Places& places, uint32_t j, const uint4 (&in)[inputs]) const {
    const uint64_t offset = buffer * p.buffer_bytes;
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      if (j >= p.share || d >= p.size || (TwoShot ? peer(d) * p.share : 0) + j >= p.granules) continue;
      push(places.at[d - 1] + offset, without_sentinel<In>(in[TwoShot ? d - 1 : 0]));
    }
  }

  // Results lie behind the shares.
  __device__ __forceinline__ uint64_t result(uint32_t to, uint32_t distance, uint32_t j) const {
    const uint64_t slot = uint64_t(distance - 1) * p.share + j;
    return slots(to, buffer) + 16ull * (p.size - 1) * p.share + 16 * slot * Sum::parts;
  }

  __device__ __forceinline__ void push_sum(uint32_t j, const Sum& sum) const {
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      if (d >= p.size) continue;
      const uint64_t to = result(peer(d), p.size - d, j);
#pragma unroll
      for (uint32_t k = 0; k < Sum::parts; ++k) push(to + 16 * k, sum.part[k]);
    }
  }

  // Takes result `j` of every peer's share. False if they do not come.
  __device__ __forceinline__ bool collect(uint32_t j) const {
    // As many as registers hold.
    constexpr int together = Sum::parts == 1 ? Most - 1 : Most / 2;
#pragma unroll 1
    for (uint32_t first = 1; first < p.size; first += together) {
      Sum sums[together];
      const auto granule = [&](int k) { return first + k < p.size ? peer(first + k) * p.share + j : p.granules; };
      const auto has_come = [&](int k) {
        bool all = true;
#pragma unroll
        for (uint32_t i = 0; i < Sum::parts; ++i) all &= is_there(sums[k].part[i]);
        return all || granule(k) >= p.granules;
      };
      const auto look = [&] {
#pragma unroll
        for (int k = 0; k < together; ++k) {
          sums[k] = {};
          if (granule(k) >= p.granules) continue;
#pragma unroll
          for (uint32_t i = 0; i < Sum::parts; ++i) sums[k].part[i] = peek(result(p.rank, first + k, j) + 16 * i);
        }
        bool all = true;
#pragma unroll
        for (int k = 0; k < together; ++k) all &= has_come(k);
        return all;
      };
      const auto missing = [&] {
        uint32_t who = p.rank;
#pragma unroll
        for (int k = 0; k < together; ++k) {
          if (!has_come(k)) who = peer(first + k);
        }
        return who;
      };
      if (!this->wait(missing, look)) return false;
#pragma unroll
      for (int k = 0; k < together; ++k) {
        if (granule(k) < p.granules) output(granule(k), sums[k]);
      }
    }
    return true;
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const AllReduceParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const AllReduce all(p, use, buffer, flag);
    bool there = true;
    const uint32_t before = TwoShot ? p.rank * p.share : 0;
    for (uint32_t i = threadIdx.x; i < p.share && before + i < p.granules && there; i += blockDim.x) {
      Sum sum;
      there = all.reduce(all.slots(p.rank, buffer) + 16ull * i, p.share, make_uint4(0, 0, 0, 0), p.op, false, sum);
    }
    all.have_come(0);
    return there;
  }

  static __device__ __forceinline__ void run(const AllReduceParams& p) {
    const uint32_t mine = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 in[inputs];
    load(p, mine, in);
    Places places(p, p.share, mine);
    AllReduce(p).run(in, places);
  }

  // `in` are the inputs of the first turn.
  __device__ __forceinline__ void run(uint4 (&in)[inputs], Places& places) {
    const uint32_t threads = gridDim.x * blockDim.x;
    // What each turn fills.
    const uint32_t filled = (p.size - 1) * (TwoShot ? 1 + Sum::parts : 1);
    // Turns from stage to stage, in granules. The hook hears of all that has come before anything is taken.
    const uint32_t all = p.share == 0 ? 1 : p.share, lag = this->hooked() ? (all + threads - 1) / threads * threads : threads;
    const uint32_t end = all + (TwoShot ? 2 : 1) * lag;
    bool failed = stopped, herald = this->is_herald();
    this->announce();
    uint32_t stale = 0;
    for (uint32_t turn = 0, j = blockIdx.x * blockDim.x + threadIdx.x; turn < end; turn += threads, j += threads) {
      // Addresses are found anew in every turn: there are no registers to keep them.
      asm volatile("" : "+r"(buffer));
      push_inputs(places, j, in);
      if (turn == 0) stale = this->first_stale();
      this->empty(stale, turn + threads < p.share ? filled : 0xFFFFFFFFu);
      if (turn == 0) this->count(filled * p.share);
      if (this->hooked() && turn == lag) failed |= !await(p, use, buffer, flag);
      if (failed) break;
      // Of a turn that is not there, beyond all shares.
      const uint32_t k = j - lag, i = (TwoShot ? p.rank * p.share : 0) + k;
      if (k < p.share && i < p.granules) {
        Sum sum;
        failed = !reduce(slots(p.rank, buffer) + 16ull * k, p.share, input(p, i), Plain ? uint32_t(Op::sum) : p.op, herald, sum);
        herald = false;
        if (failed) break;
        if constexpr (TwoShot) push_sum(k, sum);
        output(i, sum);
      }
      if constexpr (TwoShot) {
        if (k - lag < p.share) failed = !collect(k - lag);
        if (failed) break;
      }
      load(p, j + threads, in);
#pragma unroll
      for (int d = 1; d < Most; ++d) places.at[d - 1] += 16ull * threads;
    }
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

// The plain kernel, where one turn is enough.
template <uint32_t In, int Most, bool TwoShot>
struct ShortAllReduce : OneTurn<AllReduceParams, In, Most> {
  using Base = OneTurn<AllReduceParams, In, Most>;
  using Turns = AllReduce<In, In, Most, TwoShot, true>;
  using Base::Base, Base::p, Base::buffer, Base::stopped;
  using typename Base::Sources, typename Base::Sum;

  static __device__ __forceinline__ bool is_enough(const AllReduceParams& p) {
    return p.size > 1 && p.share <= gridDim.x * blockDim.x;
  }

  static __device__ __forceinline__ void run(const AllReduceParams& p) {
    const uint32_t j = blockIdx.x * blockDim.x + threadIdx.x;
    const typename Turns::Places places(p, p.share, j);
    Sources from(p, p.base + p.rank * p.stride + p.slots + 16ull * j, p.share);
    const uint32_t nothing = nothing_of(threadIdx.x);
    begin_with(places.bits() | from.bits() | nothing);
    uint4 in[Turns::inputs];
    Turns::load(p, j, in);
    ShortAllReduce(p, nothing).run(j, in, places, from);
  }

  __device__ __forceinline__ void run(uint32_t j, const uint4 (&in)[Turns::inputs], const typename Turns::Places& places,
                                      Sources& from) const {
    const uint64_t offset = buffer * p.buffer_bytes;
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      if (j >= p.share || d >= p.size || (TwoShot ? peer_of(p, d) * p.share : 0) + j >= p.granules) continue;
      push(places.at[d - 1] + offset, without_sentinel<In>(in[TwoShot ? d - 1 : 0]));
    }
    const bool herald = this->is_herald();
    this->announce();
    from.move(offset);
    this->empty();
    this->count((p.size - 1) * (TwoShot ? 2 : 1) * p.share);
    bool failed = stopped;
    // Which granule of all this thread reduces.
    const uint32_t i = (TwoShot ? p.rank * p.share : 0) + j;
    // Where sums lie: behind the shares.
    const uint64_t behind = 16ull * (p.size - 1) * p.share;
    uint4* const out = reinterpret_cast<uint4*>(p.out);
    if (j < p.share && i < p.granules && !failed) {
      Sum sum;
      from.set_own(p, p.from + 16ull * i);
      failed = !this->reduce(from, herald, sum);
      if (!failed) {
        if constexpr (TwoShot) {
#pragma unroll
          for (int d = 1; d < Most; ++d) {
            if (d < p.size) push(places.at[d - 1] + offset + behind, sum.part[0]);
          }
        }
        out[i] = sum.part[0];
      }
    } else if (herald && !failed) {
      failed = !this->await_arrival();
    }
    if constexpr (TwoShot) {
      if (j < p.share && !failed) {
        const auto rank = [&](int k) { return rank_of_peer(p, k); };
        const auto granule = [&](int k) { return rank(k) * p.share + j; };
        const auto is_due = [&](int k) { return k + 1 < p.size && granule(k) < p.granules; };
        uint64_t at[Most - 1];
#pragma unroll
        for (int k = 0; k < Most - 1; ++k) at[k] = (k < p.rank ? from.at[k] : from.at[k + 1]) + behind;
        uint4 sums[Most - 1];
        failed = !this->template await<false>(at, sums, false, is_due, rank);
#pragma unroll
        for (int k = 0; k < Most - 1; ++k) {
          if (is_due(k) && !failed) out[granule(k)] = sums[k];
        }
      }
    }
    this->finish(failed);
  }
};

// One shot that the kernel in front sends, this rank's own part too (few_rows.cu), while this one has its place already: as SentNorm of all_reduce_norm.cu.
template <uint32_t In>
struct SentAllReduce : OneTurn<AllReduceParams, In, 4> {
  using Base = OneTurn<AllReduceParams, In, 4>;
  using Base::Base, Base::p, Base::buffer, Base::stopped;
  using typename Base::Sources, typename Base::Sum;

  static __device__ __forceinline__ void run(const AllReduceParams& p) {
    const uint32_t j = blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t slot = p.base + p.rank * p.stride + p.slots + 16ull * j;
    Sources from(p, slot, p.share);
    let_next_kernel_start();
    SentAllReduce(p, nothing_of(threadIdx.x)).run(j, from);
  }

  __device__ __forceinline__ void run(uint32_t j, Sources& from) const {
    const bool herald = this->is_herald();
    bool failed = stopped;
    this->announce();
    from.move(buffer * p.buffer_bytes);
    this->empty();
    this->count(p.size * p.share);
    if (j < p.share && !failed) {
      Sum sum;
      failed = !this->reduce_sent(from, herald, sum);
      if (!failed) reinterpret_cast<uint4*>(p.out)[j] = sum.part[0];
    } else if (herald && !failed) {
      failed = !this->await_arrival();
    }
    // So who waits for this one has both behind it.
    wait_for_previous_kernel();
    this->finish(failed);
  }
};

template <typename Kernel>
__device__ __noinline__ void in_general(const AllReduceParams& p) {
  Kernel::run(p);
}

template <uint32_t In, uint32_t Out, int Most, bool TwoShot>
__device__ __forceinline__ void all_reduce(const AllReduceParams& p) {
  using Kernel = AllReduce<In, Out, Most, TwoShot, true>;
  const bool plain = Kernel::is_plain(p);
  if constexpr (In == Out && Most <= 4) {
    if (plain && ShortAllReduce<In, Most, TwoShot>::is_enough(p)) return ShortAllReduce<In, Most, TwoShot>::run(p);
  }
  begin();
  if (!plain) return in_general<AllReduce<In, Out, Most, TwoShot, false>>(p);
  Kernel::run(p);
}

// Two blocks find room on a multiprocessor, as those of messages do, which have the same places.
#define ALL_REDUCE(NAME, IN, OUT, MOST, TWO)                                          \
  extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)                 \
      brigade_all_reduce_##NAME##_##MOST(const __grid_constant__ AllReduceParams p) { \
    all_reduce<IN, OUT, MOST, TWO>(p);                                                \
  }

#define FOR_RANKS(NAME, IN, OUT, TWO) \
  ALL_REDUCE(NAME, IN, OUT, 2, TWO)   \
  ALL_REDUCE(NAME, IN, OUT, 4, TWO)   \
  ALL_REDUCE(NAME, IN, OUT, 8, TWO)

#define FOR_ALGORITHMS(NAME, IN, OUT)         \
  FOR_RANKS(one_##NAME, IN, OUT, false)       \
  FOR_RANKS(two_##NAME, IN, OUT, true)

#define SENT(NAME, IN)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2) brigade_all_reduce_sent_##NAME(const __grid_constant__ AllReduceParams p) { \
    SentAllReduce<IN>::run(p);                                                                                                     \
  }

SENT(f16, F16)
SENT(bf16, BF16)
FOR_ALGORITHMS(f32_f32, F32, F32)
FOR_ALGORITHMS(f16_f16, F16, F16)
FOR_ALGORITHMS(bf16_bf16, BF16, BF16)
FOR_ALGORITHMS(f16_f32, F16, F32)
FOR_ALGORITHMS(bf16_f32, BF16, F32)
