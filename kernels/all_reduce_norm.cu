// All-reduce, residual and RMSNorm (Zhang and Sennrich) in one kernel that pushes (push.cuh; fused as TensorRT-LLM does). All blocks
// push, and in two shots reduce, granules of any row, as in all_reduce.cu: the warps of a row are on many multiprocessors, since one
// of them sends little. Then a block takes whole rows, of any rank: in two shots a rank pushes the sums of its share to itself, too.
// What comes behind the sums is norm.cuh's.
#include "cluster.cuh"
#include "norm.cuh"
#include "one_turn.cuh"

namespace brigade {

__device__ inline void poison_outputs(const AllReduceNormParams& p) {
  for (int i = 0; i < 3; ++i) poison(p.poisoned[i], p.poisoned_bytes[i], p.poison[i], threadIdx.x, blockDim.x);
}

}  // namespace brigade

using namespace brigade;

// Blocks that share a row: a cluster, where there are few rows. What its warps tell goes to all of them, and is its own flag, as what ranks send
// each other is: a barrier of the cluster would wait for all that threads have stored before, which is on its way to peers, and one that
// counts what comes (st.async) takes as long again as the way. No sum of squares and no magnitude has the bits of the sentinel.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Where block `to` of the cluster has what this one has there, in its shared memory.
__device__ __forceinline__ uint64_t place_of(const void* here, uint32_t to) {
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(to));
  return there;
}
__device__ __forceinline__ void tell_block(uint64_t at, uint32_t value) {
  asm volatile("st.relaxed.cluster.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
#else
__device__ __forceinline__ uint64_t place_of(const void*, uint32_t) { return 0; }
__device__ __forceinline__ void tell_block(uint64_t, uint32_t) {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
#endif

// What this block has been told, in shared memory.
__device__ __forceinline__ uint4 told_words(uint32_t at) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t told_word(uint32_t at) {
  uint32_t v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// A row that the blocks of a cluster share.
struct Shared {
  static constexpr bool alone = false;
  // `here` is what this block is told, and `there` the same of the block to which this lane tells it.
  uint32_t rank, size, here;
  uint64_t there;

  __device__ __forceinline__ Shared()
      : rank(cluster_rank()), size(cluster_size()), here(uint32_t(__cvta_generic_to_shared(told))), there(place_of(told, threadIdx.x % 32 % size)) {
    // Not later.
    asm volatile("" : "+r"(here), "+l"(there));
  }

  __device__ __forceinline__ uint32_t granule(uint32_t k) const { return (k * size + rank) * blockDim.x + threadIdx.x; }

  static __device__ __forceinline__ uint32_t offset(Meeting meeting, uint32_t at) { return 4 * (meeting * most_groups + at); }

  __device__ __forceinline__ void tell(Meeting meeting, uint32_t at, uint32_t value) const {
    if (threadIdx.x % 32 < size) tell_block(there + offset(meeting, at), value);
  }

  // As long as the longest wait for a peer: all blocks of a cluster tell what they have then, or nothing that counts.
  __device__ __forceinline__ uint4 squares(uint32_t first, uint32_t) const {
    uint4 v;
    do v = told_words(here + offset(SQUARES, first));
    while (!__all_sync(0xFFFFFFFFu, is_there(v)));
    return v;
  }
  __device__ __forceinline__ uint32_t magnitude(uint32_t at, uint32_t) const {
    uint32_t v;
    do v = told_word(here + offset(MAGNITUDES, at));
    while (!__all_sync(0xFFFFFFFFu, v != sentinel));
    return v;
  }

  // They meet in any case, so all go on; what they write is poisoned later.
  __device__ __forceinline__ bool stops(bool) const { return false; }

  // Nobody tells others anything before all are there.
  __device__ __forceinline__ void begin(uint32_t squares, uint32_t magnitudes) const {
    for (uint32_t i = threadIdx.x; i < most_groups; i += blockDim.x) {
      told[SQUARES][i] = i < squares ? sentinel : 0;
      told[MAGNITUDES][i] = i < magnitudes ? sentinel : 0;
    }
    cluster_arrive();
  }
  __device__ __forceinline__ void begun() const { cluster_wait(); }
};

// The plain one has neither a hook nor parts of granules (all_reduce.cu says why).
template <uint32_t In, int Most, bool TwoShot, bool Plain>
struct AllReduceNorm : Sums<AllReduceNormParams, In, In, Most, !Plain> {
  using Base = Sums<AllReduceNormParams, In, In, Most, !Plain>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped, Base::slots, Base::peer, Base::reduce;
  using typename Base::Sum;
  using Rows = NormRows<AllReduceNormParams, In, Plain>;
  // Granules of a row that a thread has.
  using Row = uint4[most_granules];

  static __device__ __forceinline__ bool is_plain(const AllReduceNormParams& p) { return p.desk == 0 && p.wide != 0; }

  // Granules of a place, and of all rows.
  static __device__ __forceinline__ uint32_t place_of(const AllReduceNormParams& p) { return (TwoShot ? p.share : p.rows) * p.granules; }
  __device__ __forceinline__ uint32_t place() const { return place_of(p); }
  __device__ __forceinline__ uint32_t all() const { return p.rows * p.granules; }

  // Where the rank `distance` behind `to` has granule `j` of its share there.
  __device__ __forceinline__ uint64_t slot(uint32_t to, uint32_t distance, uint32_t j) const {
    return slots(to, buffer) + 16 * (uint64_t(distance - 1) * place() + j);
  }

  // And of its sums: behind the shares, the rank's own ones last.
  __device__ __forceinline__ uint64_t result(uint32_t to, uint32_t distance, uint32_t j) const {
    return slot(to, p.size - 1 + (distance == 0 ? p.size : distance), j);
  }

  // What a thread pushes in a turn: in one shot a granule for all peers, in two one for each, by distance.
  static constexpr int inputs = TwoShot ? Most - 1 : 1;

  // The state is not needed for this, so it may be on its way together with the state.
  static __device__ __forceinline__ void load(const AllReduceNormParams& p, uint32_t j, uint4 (&in)[inputs]) {
    const uint32_t place = place_of(p);
#pragma unroll
    for (int d = 1; d <= inputs; ++d) {
      in[d - 1] = make_uint4(0, 0, 0, 0);
      const uint32_t i = TwoShot ? peer_of(p, d) * place + j : j;
      if (j < place && i < p.rows * p.granules && d < p.size) in[d - 1] = Rows::read(p, p.from, i);
    }
  }

  __device__ __forceinline__ void push_inputs(uint32_t j, const uint4 (&in)[inputs]) const {
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      if (j >= place() || d >= p.size || (TwoShot ? peer(d) * place() : 0) + j >= all()) continue;
      push(slot(peer(d), p.size - d, j), without_sentinel<In>(in[TwoShot ? d - 1 : 0]));
    }
  }

  // In two shots: granule `j` of this rank's share. False if it does not come.
  __device__ __forceinline__ bool reduce_share(uint32_t j, bool& herald) const {
    const uint32_t i = p.rank * place() + j;
    if (j >= place() || i >= all()) return true;
    Sum sum;
    const bool there = reduce(slot(p.rank, 1, j), place(), Rows::read(p, p.from, i), Op::sum, herald, sum);
    herald = false;
#pragma unroll
    for (int d = 0; d < Most; ++d) {
      if (there && d < p.size) push(result(peer(d), d == 0 ? 0 : p.size - d, j), sum.part[0]);
    }
    return there;
  }

  // This thread's sums of row `j` of the share of `owner`.
  __device__ __forceinline__ bool take(uint32_t owner, uint32_t j, bool& herald, Row& h) const {
    bool there = true;
    if constexpr (TwoShot) {
      const uint32_t distance = owner >= p.rank ? owner - p.rank : owner + p.size - p.rank;
      const uint64_t from = result(p.rank, distance, j * p.granules);
      const auto look = [&] {
        bool all = true;
#pragma unroll
        for (uint32_t k = 0; k < most_granules; ++k) {
          const uint32_t g = k * blockDim.x + threadIdx.x;
          h[k] = make_uint4(0, 0, 0, 0);
          if (g < p.granules) h[k] = peek(from + 16ull * g);
        }
#pragma unroll
        for (uint32_t k = 0; k < most_granules; ++k) all &= is_there(h[k]);
        return all;
      };
      there = this->wait([&] { return owner; }, look);
    } else {
#pragma unroll
      for (uint32_t k = 0; k < most_granules; ++k) {
        const uint32_t g = k * blockDim.x + threadIdx.x, i = j * p.granules + g;
        if (g >= p.granules || !there) break;
        Sum sum;
        there = reduce(slot(p.rank, 1, i), place(), Rows::read(p, p.from, i), Op::sum, herald, sum);
        herald = false;
        h[k] = sum.part[0];
      }
    }
    return there;
  }

  // Row `j` of the share of `owner`, by all threads of the block. False for all of them if one has failed.
  __device__ __forceinline__ bool norm_row(uint32_t owner, uint32_t j, bool failed, bool& herald) const {
    const uint32_t row = TwoShot ? owner * p.share + j : j;
    if (row >= p.rows) return true;
    constexpr Alone alone;
    // On their way while sums are waited for.
    Row h = {}, residual, weight;
    Rows::read_row(p, alone, p.residual, row * p.granules, residual);
    const bool there = !failed && take(owner, j, herald, h);
    if (!__syncthreads_and(there)) return false;
    // On its way until all have met.
    Rows::read_row(p, alone, p.weight, 0, weight);
    Rows::norm(p, alone, row, h, residual, weight);
    return true;
  }

  // Where there is a hook: waits until all parts have come, and tells it.
  static __device__ __noinline__ bool await(const AllReduceNormParams& p, uint32_t use, uint32_t buffer, uint64_t flag) {
    const AllReduceNorm norm(p, use, buffer, flag);
    bool there = true;
    const uint32_t before = TwoShot ? p.rank * norm.place() : 0;
    for (uint32_t j = threadIdx.x; j < norm.place() && before + j < norm.all() && there; j += blockDim.x) {
      Sum sum;
      there = norm.reduce(norm.slot(p.rank, 1, j), norm.place(), make_uint4(0, 0, 0, 0), Op::sum, false, sum);
    }
    norm.have_come(0);
    return there;
  }

  static __device__ __forceinline__ void run(const AllReduceNormParams& p) {
    // The warps of a block are far apart, so that few rows are pushed by many blocks.
    const uint32_t mine = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
    uint4 in[inputs];
    load(p, mine, in);
    AllReduceNorm(p).run(mine, in);
  }

  // `in` are the inputs of the first turn, from granule `j` of every place.
  __device__ __forceinline__ void run(uint32_t j, uint4 (&in)[inputs]) {
    const uint32_t threads = gridDim.x * blockDim.x, owners = TwoShot ? p.size : 1;
    const uint32_t filled = TwoShot ? 2 * p.size - 1 : p.size - 1;
    const uint32_t some = place() == 0 ? 1 : place(), lag = this->hooked() ? (some + threads - 1) / threads * threads : threads;
    const uint32_t stages = (TwoShot ? 2 : 1) * lag;
    bool failed = stopped, herald = this->is_herald(), go_on = true;
    this->announce();
    uint32_t stale = 0, done = 0;
    for (uint32_t turn = 0; turn < some + stages && go_on; turn += threads, j += threads) {
      asm volatile("" : "+r"(buffer));
      push_inputs(j, in);
      if (turn == 0) stale = this->first_stale();
      this->empty(stale, turn + threads < some ? filled : 0xFFFFFFFFu);
      if (turn == 0) this->count(filled * place());
      if (this->hooked() && turn == lag) failed |= !await(p, use, buffer, flag);
      if (TwoShot && !failed) failed = !reduce_share(j - lag, herald);
      // Whole rows of what all have pushed by now.
      const uint32_t pushed = turn < stages ? 0 : turn - stages + threads, ready = (pushed < place() ? pushed : place()) / p.granules;
      for (uint32_t i = blockIdx.x; i < (ready - done) * owners && go_on; i += gridDim.x) {
        go_on = norm_row(TwoShot ? peer(i % p.size) : 0, done + i / owners, failed, herald);
      }
      done = ready;
      load(p, j + threads, in);
    }
    failed |= !go_on;
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

// The plain kernel, where one turn is enough, and there is a block for each row, or a cluster of them.
template <uint32_t In, int Most, bool TwoShot, typename Part>
struct ShortNorm : OneTurn<AllReduceNormParams, In, Most> {
  using Base = OneTurn<AllReduceNormParams, In, Most>;
  using Turns = AllReduceNorm<In, Most, TwoShot, true>;
  using Base::Base, Base::p, Base::flag, Base::use, Base::buffer, Base::stopped;
  using typename Base::Sources, typename Base::Sum;
  // Granules of a row that a thread has.
  static constexpr uint32_t each = TwoShot && std::is_same_v<Part, Alone> ? most_granules : 1;
  using Row = uint4[each];

  static __device__ __forceinline__ bool is_enough(const AllReduceNormParams& p, Part part) {
    return p.size > 1 && Turns::place_of(p) <= gridDim.x * blockDim.x &&
           (TwoShot ? p.share * p.size : p.rows) * part.size <= gridDim.x && p.granules <= each * blockDim.x * part.size;
  }

  // In the first buffer, where this rank finds what comes.
  static __device__ __forceinline__ uint64_t slots(const AllReduceNormParams& p) { return p.base + p.rank * p.stride + p.slots; }

  // All that follows from parameters is found before the kernel in front of this one has ended.
  static __device__ __forceinline__ void run(const AllReduceNormParams& p, Part part) {
    // The warps of a block are far apart, so that few rows are pushed by many blocks.
    const uint32_t j = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32, place = Turns::place_of(p);
    const uint32_t which = blockIdx.x / part.size;
    const Targets<AllReduceNormParams, Most> to(p, place, j);
    Sources from(p, slots(p) + 16ull * (TwoShot ? j : which * p.granules + part.granule(0)), place);
    part.begin((p.granules + 31) / 32, part.size * (blockDim.x / 32));
    const uint32_t nothing = nothing_of(threadIdx.x);
    begin_with(to.bits() | from.bits() | nothing);
    uint4 in[Turns::inputs];
    Turns::load(p, j, in);
    ShortNorm(p, nothing).run(j, place, part, which, in, to, from);
  }

  __device__ __forceinline__ void run(uint32_t j, uint32_t place, Part part, uint32_t which, const uint4 (&in)[Turns::inputs],
                                      const Targets<AllReduceNormParams, Most>& to, Sources& from) const {
    const uint64_t offset = buffer * p.buffer_bytes;
    const uint32_t all = p.rows * p.granules;
#pragma unroll
    for (int d = 1; d < Most; ++d) {
      if (j >= place || d >= p.size || (TwoShot ? peer_of(p, d) * place : 0) + j >= all) continue;
      push(to.at[d - 1] + offset, without_sentinel<In>(in[TwoShot ? d - 1 : 0]));
    }
    bool herald = this->is_herald(), failed = stopped;
    this->announce();
    from.move(offset);
    this->empty();
    this->count((TwoShot ? 2 * p.size - 1 : p.size - 1) * place);
    if constexpr (TwoShot) {
      const uint32_t i = p.rank * place + j;
      if (j < place && i < all && !failed) {
        Sum sum;
        from.set_own(p, p.from + 16ull * i);
        failed = !this->reduce(from, herald, sum);
        herald = false;
        if (!failed) {
          // Behind the shares; own ones last.
          const uint64_t behind = offset + 16ull * (p.size - 1) * place;
#pragma unroll
          for (int d = 1; d < Most; ++d) {
            if (d < p.size) push(to.at[d - 1] + behind, sum.part[0]);
          }
          push(slots(p) + offset + 16 * (2ull * (p.size - 1) * place + j), sum.part[0]);
        }
      }
    }
    part.begun();
    const uint32_t distance = TwoShot ? which % p.size : 0, index = TwoShot ? which / p.size : which;
    const uint32_t row = TwoShot ? peer_of(p, distance) * p.share + index : index;
    if (row < p.rows && (!TwoShot || index < p.share)) {
      // On their way while sums are waited for.
      Row h = {}, residual, weight;
      Turns::Rows::read_row(p, part, p.residual, row * p.granules, residual);
      if (each == 1) Turns::Rows::read_row(p, part, p.weight, 0, weight);
      if constexpr (TwoShot) {
        const uint64_t nearer = p.size - 2 + (distance == 0 ? p.size : distance);
        failed = failed || !take(part, slots(p) + offset + 16 * (nearer * place + index * p.granules), peer_of(p, distance), h);
      } else if (part.granule(0) < p.granules && !failed) {
        Sum sum;
        from.set_own(p, p.from + 16ull * (row * p.granules + part.granule(0)));
        failed = !this->reduce(from, herald, sum);
        herald = false;
        h[0] = sum.part[0];
      }
      if (part.stops(failed)) {
        failed = true;
      } else {
        // There are registers for one of them.
        if (each > 1) Turns::Rows::read_row(p, part, p.weight, 0, weight);
        Turns::Rows::norm(p, part, row, h, residual, weight);
      }
    }
    if (herald && !failed) failed = !this->await_arrival();
    this->finish(failed);
  }

  // This thread's sums of a row that lie from `from` on, by `owner`. False if they do not come.
  __device__ __forceinline__ bool take(Part part, uint64_t from, uint32_t owner, Row& h) const {
    const auto look = [&] {
#pragma unroll
      for (uint32_t k = 0; k < each; ++k) {
        const uint32_t g = part.granule(k);
        h[k] = make_uint4(0, 0, 0, 0);
        if (g < p.granules) h[k] = peek(from + 16ull * g);
      }
      bool all = true;
#pragma unroll
      for (uint32_t k = 0; k < each; ++k) all &= is_there(h[k]);
      return all;
    };
    return this->wait([&] { return owner; }, look);
  }
};

// One shot of few rows that the kernel in front sends, this rank's own part too (few_rows.cu), while this one has its place already. It let this one begin behind its own
// wait, so all in front of it has ended; and what was written there is read past a first-level cache that may hold what was there before.
template <uint32_t In>
struct SentNorm : OneTurn<AllReduceNormParams, In, 4> {
  using Base = OneTurn<AllReduceNormParams, In, 4>;
  using Rows = NormRows<AllReduceNormParams, In, true>;
  using Base::Base, Base::p, Base::buffer, Base::stopped;
  using typename Base::Sources, typename Base::Sum;

  static __device__ __forceinline__ void run(const AllReduceNormParams& p) {
    const Shared part;
    const uint32_t place = p.rows * p.granules, row = blockIdx.x / part.size, i = row * p.granules + part.granule(0);
    const uint64_t slot = p.base + p.rank * p.stride + p.slots + 16ull * i;
    Sources from(p, slot, place);
    part.begin((p.granules + 31) / 32, part.size * (blockDim.x / 32));
    let_next_kernel_start();
    SentNorm(p, nothing_of(threadIdx.x)).run(part, place, row, i, from);
  }

  // Granule `i` of every place.
  __device__ __forceinline__ void run(Shared part, uint32_t place, uint32_t row, uint32_t i, Sources& from) const {
    bool herald = this->is_herald(), failed = stopped;
    this->announce();
    from.move(buffer * p.buffer_bytes);
    this->empty();
    this->count(p.size * place);
    part.begun();
    if (row < p.rows) {
      uint4 h[1] = {}, residual[1] = {}, weight[1] = {};
      if (part.granule(0) < p.granules) {
        residual[0] = peek(p.residual + 16ull * i), weight[0] = peek(p.weight + 16ull * part.granule(0));
        Sum sum;
        failed = failed || !this->reduce_sent(from, herald, sum);
        herald = false;
        if (!failed) h[0] = sum.part[0];
      }
      // Who has seen all words knows that nobody reads the product's rows any more, over which these may go.
      if (failed) wait_for_previous_kernel();
      Rows::norm(p, part, row, h, residual, weight);
    }
    if (herald && !failed) failed = !this->await_arrival();
    // So who waits for this one has both behind it.
    wait_for_previous_kernel();
    this->finish(failed);
  }
};

// Where there are many rows, in two shots: every other block pushes and adds up, and the rest take rows, in the order in which they come. Where all
// do one thing after the other, nothing is on its way while the last rows are normed. Who has pushed takes one of the last rows, which come at once.
template <uint32_t In, int Most>
struct ManyRows : AllReduceNorm<In, Most, true, true> {
  using Base = AllReduceNorm<In, Most, true, true>;
  using Base::Base, Base::p, Base::flag, Base::buffer, Base::stopped, Base::place;

  // A block takes so many rows and then asks whether the group was stopped: where no row lacks it would not hear of it, and write rows that others have poisoned.
  static constexpr uint32_t rows_between = 8;

  static __device__ __forceinline__ bool pushes() { return blockIdx.x % 2 == 0; }
  static __device__ __forceinline__ uint32_t blocks() { return (gridDim.x + pushes()) / 2; }

  static __device__ __forceinline__ void run(const AllReduceNormParams& p) {
    const uint32_t j = (threadIdx.x / 32 * blocks() + blockIdx.x / 2) * 32 + threadIdx.x % 32;
    uint4 in[Base::inputs] = {};
    if (pushes()) Base::load(p, j, in);
    ManyRows(p).run(j, in);
  }

  __device__ __forceinline__ void run(uint32_t j, uint4 (&in)[Base::inputs]) {
    const uint32_t threads = blocks() * blockDim.x;
    const uint32_t rows = p.share * p.size, last = rows - (gridDim.x + 1) / 2;
    bool failed = stopped, herald = this->is_herald(), go_on = true;
    this->announce();
    this->count((2 * p.size - 1) * place());
    if (pushes()) {
      // Who has failed pushes nothing more, as elsewhere: so others stop as well.
#pragma unroll 1
      for (uint32_t turn = 0; turn < place() + threads && !failed; turn += threads, j += threads) {
        asm volatile("" : "+r"(buffer));
        this->push_inputs(j, in);
        failed = !this->reduce_share(j - threads, herald);
        Base::load(p, j + threads, in);
      }
    } else {
      this->empty_by(blockIdx.x / 2 * blockDim.x + threadIdx.x, threads);
    }
#pragma unroll 1
    for (uint32_t i = (pushes() ? last : 0) + blockIdx.x / 2, n = 1; i < (pushes() ? rows : last) && go_on; i += blocks(), ++n) {
      if (n % rows_between == 0 && threadIdx.x == 0) failed |= this->is_stopped_now();
      go_on = this->norm_row(this->peer(i % p.size), i / p.size, failed, herald);
    }
    failed |= !go_on;
    if (herald && !failed) failed = !this->wait([] { return threadIdx.x; }, [&] { return this->arrived(true) == flag; });
    this->finish(failed);
  }
};

template <typename Kernel>
__device__ __noinline__ void in_general(const AllReduceNormParams& p) {
  Kernel::run(p);
}

// Whether one turn was enough.
template <uint32_t In, int Most, bool TwoShot, typename Part>
__device__ __forceinline__ bool in_one_turn(const AllReduceNormParams& p, Part part) {
  using Kernel = ShortNorm<In, Most, TwoShot, Part>;
  if (!Kernel::is_enough(p, part)) return false;
  Kernel::run(p, part);
  return true;
}

template <uint32_t In, int Most, bool TwoShot>
__device__ __forceinline__ void all_reduce_norm(const AllReduceNormParams& p) {
  using Kernel = AllReduceNorm<In, Most, TwoShot, true>;
  const bool plain = Kernel::is_plain(p);
  if constexpr (Most <= 4) {
    if (plain && in_one_turn<In, Most, TwoShot>(p, Alone())) return;
  }
  begin();
  if (!plain) return in_general<AllReduceNorm<In, Most, TwoShot, false>>(p);
  Kernel::run(p);
}

#define NORM(NAME, IN, MOST, TWO)                                                              \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS)                                   \
      brigade_all_reduce_norm_##NAME##_##MOST(const __grid_constant__ AllReduceNormParams p) { \
    all_reduce_norm<IN, MOST, TWO>(p);                                                         \
  }

// By clusters, in kernels of their own, which need not spill what the rest would. As many blocks find room as of the rest, by their threads.
// The host launches them for what one turn is enough for, and nothing else: they could do nothing else.
#define CLUSTERS(NAME, IN, TWO)                                                                \
  extern "C" __global__ void __launch_bounds__(NORM_CLUSTER_THREADS, 4)                         \
      brigade_all_reduce_norm_##NAME##_cluster(const __grid_constant__ AllReduceNormParams p) { \
    in_one_turn<IN, 4, TWO>(p, Shared());                                                      \
  }

#define SENT(NAME, IN)                                                                             \
  extern "C" __global__ void __launch_bounds__(NORM_CLUSTER_THREADS, 4)                              \
      brigade_all_reduce_norm_sent_##NAME(const __grid_constant__ AllReduceNormParams p) {           \
    SentNorm<IN>::run(p);                                                                          \
  }

#define FOR_RANKS(NAME, IN, TWO) \
  NORM(NAME, IN, 4, TWO)         \
  NORM(NAME, IN, 8, TWO)         \
  CLUSTERS(NAME, IN, TWO)

// As many blocks find room as of the rest.
#define MANY(NAME, IN, MOST)                                                                       \
  extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)                              \
      brigade_all_reduce_norm_two_##NAME##_many_##MOST(const __grid_constant__ AllReduceNormParams p) { \
    begin();                                                                                       \
    ManyRows<IN, MOST>::run(p);                                                                    \
  }

#define FOR_ALGORITHMS(NAME, IN)      \
  FOR_RANKS(one_##NAME, IN, false)    \
  FOR_RANKS(two_##NAME, IN, true)     \
  MANY(NAME, IN, 4)                   \
  MANY(NAME, IN, 8)

FOR_ALGORITHMS(f32, F32)
FOR_ALGORITHMS(f16, F16)
FOR_ALGORITHMS(bf16, BF16)
SENT(f16, F16)
SENT(bf16, BF16)
