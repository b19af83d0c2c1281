// Sums of one turn: a thread has at most one granule of each place. What such a call takes is the way from the state to the stores, and
// from the data to the result; so addresses are found while the state is on its way, and none is found twice. Without hooks, in parts of
// whole granules.
#pragma once
#include "sums.cuh"

namespace brigade {

// What the kernel before this one wrote is there.
__device__ __forceinline__ void begin() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// The same, when these addresses have been found: from parameters alone, so the kernel before this one may still run. None is 0, but
// a way out that depends on them is what the assembler does not move behind the wait.
__device__ __forceinline__ void begin_with(uint64_t addresses) {
  asm volatile("{.reg .pred q; setp.eq.u64 q, %0, 0; @q exit;}" ::"l"(addresses));
  begin();
}

// Where granule `j` of this rank goes, in the first buffer of every peer, by distance.
template <typename P, int Most>
struct Targets {
  uint64_t at[Most - 1];

  // Places of so many granules.
  __device__ __forceinline__ Targets(const P& p, uint32_t place, uint32_t j) {
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      at[d - 1] = p.base + peer_of(p, d) * p.stride + p.slots + 16ull * (uint64_t(p.size - 1 - d) * place + j);
      // Not later, where there are registers for them.
      if constexpr (Most <= 4) asm volatile("" : "+l"(at[d - 1]));
    }
  }

  // Of all addresses.
  __device__ __forceinline__ uint64_t bits() const {
    uint64_t all = 0;
#pragma unroll
    for (int d = 1; d < Most; ++d) all |= at[d - 1];
    return all;
  }
};

// The peers, in the order of their ranks.
template <typename P>
__device__ __forceinline__ uint32_t rank_of_peer(const P& p, int k) {
  return k + (k >= p.rank);
}

template <typename P, uint32_t In, int Most>
struct OneTurn : Sums<P, In, In, Most, false> {
  using Base = Sums<P, In, In, Most, false>;
  using Base::Base, Base::p, Base::flag;
  using typename Base::Sum;

  // Where this rank finds a granule of every rank, by rank, so that none has to be put in its place when it has come. Its own lies behind those of its
  // peers where it is sent, too.
  struct Sources {
    uint64_t at[Most];

    // `nearest` is that of the next rank; places have so many granules.
    __device__ __forceinline__ Sources(const P& p, uint64_t nearest, uint32_t place) {
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        // In place of a rank that there is not, some peer: so all places can be looked at.
        const uint32_t of = r < p.size ? r : p.rank == 0;
        // How many ranks are nearer, of those behind this one.
        const uint32_t nearer = of > p.rank ? of - p.rank - 1 : of + p.size - 1 - p.rank;
        at[r] = nearest + 16ull * nearer * place;
        asm volatile("" : "+l"(at[r]));
      }
    }

    __device__ __forceinline__ uint64_t bits() const {
      uint64_t all = 0;
#pragma unroll
      for (int r = 0; r < Most; ++r) all |= at[r];
      return all;
    }

    __device__ __forceinline__ void move(uint64_t bytes) {
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        at[r] += bytes;
        asm volatile("" : "+l"(at[r]));
      }
    }

    // Where it is not sent: what can be read.
    __device__ __forceinline__ void set_own(const P& p, uint64_t address) {
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        at[r] = r == p.rank ? address : at[r];
        asm volatile("" : "+l"(at[r]));
      }
    }
  };

  // Looks at a granule of so many ranks until none is missing of which `is_due`: at all of them if they can all be read, without a branch, so that
  // none waits for another. A herald waits for its peer's arrival too. False if they do not come.
  template <bool All, int N, typename Due, typename Rank>
  __device__ __forceinline__ bool await(const uint64_t (&at)[N], uint4 (&got)[N], bool herald, Due is_due, Rank rank) const {
    const uint64_t* arrival = this->arrival(p.rank, threadIdx.x);
    asm volatile("" : "+l"(arrival));
    const auto look = [&] {
      bool all = this->arrived(arrival, herald) == flag;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        // Nothing of an earlier look stays, which would have to be kept.
        if (!All) got[k] = make_uint4(0, 0, 0, 0);
        if (All || is_due(k)) got[k] = peek(at[k]);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) all &= is_there(got[k]) | (All && !is_due(k));
      return all;
    };
    const auto missing = [&] {
      uint32_t who = herald ? threadIdx.x : p.rank;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (is_due(k) && rank(k) < p.size && !is_there(got[k])) who = rank(k);
      }
      return who;
    };
    return this->wait(missing, look);
  }

  // The sum of what every rank has sent, but for this one, whose own may be what it is.
  __device__ __forceinline__ bool reduce(const Sources& from, bool herald, Sum& sum) const {
    return reduce(from, herald, sum, [&](int r) { return r != p.rank; });
  }

  // The same where this one has sent its own, too.
  __device__ __forceinline__ bool reduce_sent(const Sources& from, bool herald, Sum& sum) const {
    return reduce(from, herald, sum, [](int) { return true; });
  }

  template <typename Due>
  __device__ __forceinline__ bool reduce(const Sources& from, bool herald, Sum& sum, Due is_due) const {
    uint4 got[Most];
    if (!await<true>(from.at, got, herald, is_due, [](int r) { return r; })) return false;
    sum = this->combined_of(got, Op::sum);
    return true;
  }

  // The end, by a herald that has had no granule to look for.
  __device__ __forceinline__ bool await_arrival() const {
    return this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
  }
};

}  // namespace brigade
