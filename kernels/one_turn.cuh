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

  // Where this rank finds a granule of every peer, in the order of their ranks.
  struct Sources {
    uint64_t at[Most - 1];

    // `nearest` is that of the next rank; places have so many granules.
    __device__ __forceinline__ Sources(const P& p, uint64_t nearest, uint32_t place) {
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) {
        // How many peers are nearer, of those behind this rank.
        const uint32_t nearer = k >= p.rank ? k - p.rank : k + p.size - 1 - p.rank;
        at[k] = nearest + 16ull * nearer * place;
        asm volatile("" : "+l"(at[k]));
      }
    }

    __device__ __forceinline__ uint64_t bits() const {
      uint64_t all = 0;
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) all |= at[k];
      return all;
    }

    __device__ __forceinline__ void move(uint64_t bytes) {
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) {
        at[k] += bytes;
        asm volatile("" : "+l"(at[k]));
      }
    }
  };

  using Granules = uint4[Most - 1];

  // Looks for a granule of every peer of which `is_due`. A herald waits for its peer's arrival too. False if they do not come.
  template <typename Due>
  __device__ __forceinline__ bool await(const Sources& from, Granules& got, bool herald, Due is_due) const {
    return await(from, got, herald, is_due, [] { return true; });
  }

  // The same, and for what is looked for beside them.
  template <typename Due, typename Beside>
  __device__ __forceinline__ bool await(const Sources& from, Granules& got, bool herald, Due is_due, Beside beside) const {
    const uint64_t* arrival = this->arrival(p.rank, threadIdx.x);
    asm volatile("" : "+l"(arrival));
    const auto look = [&] {
      bool all = this->arrived(arrival, herald) == flag;
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) {
        // Nothing of an earlier look stays, which would have to be kept.
        got[k] = make_uint4(0, 0, 0, 0);
        if (is_due(k)) got[k] = peek(from.at[k]);
      }
      all &= beside();
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) all &= is_there(got[k]);
      return all;
    };
    const auto missing = [&] {
      uint32_t who = herald ? threadIdx.x : p.rank;
#pragma unroll
      for (int k = 0; k < Most - 1; ++k) {
        if (!is_there(got[k])) who = rank_of_peer(p, k);
      }
      return who;
    };
    return this->wait(missing, look);
  }

  // The sum of what every peer sent and this rank's own.
  __device__ __forceinline__ bool reduce(const Sources& from, uint4 own, bool herald, Sum& sum) const {
    return reduce(from, [&](uint4& mine) { return mine = own, true; }, herald, sum);
  }

  // The same, where this rank's own is looked for too.
  template <typename Own>
  __device__ __forceinline__ bool reduce(const Sources& from, Own look_for_own, bool herald, Sum& sum) const {
    Granules got;
    uint4 own;
    if (!await(from, got, herald, [&](int k) { return k + 1 < p.size; }, [&] { return look_for_own(own); })) return false;
    uint4 all[Most];
#pragma unroll
    for (int r = 0; r < Most; ++r) {
      all[r] = own;
      if (r < p.rank && r < Most - 1) all[r] = got[r];
      if (r > p.rank) all[r] = got[r - 1];
    }
    sum = this->combined_of(all, Op::sum);
    return true;
  }

  // The end, by a herald that has had no granule to look for.
  __device__ __forceinline__ bool await_arrival() const {
    return this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
  }
};

}  // namespace brigade
