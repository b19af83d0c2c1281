// Messages between pairs of ranks. A message passes through its sender's slots in the receiver's memory, in pieces that take four slots in turn,
// two in each half, as data that is its own flag (escaped.cuh). The flag of a piece says which message it is of, so that a pair which disagrees
// hears of it; between data and flag no order is needed. Whoever takes a packet leaves its place empty, and the credit for a piece goes back
// when the receiver's last block has taken its share. That for the last piece of a message goes back with the next message from there, in a
// kernel behind this one: so no fence is waited for at the end of a message. Three pieces more can be on their way until then.
//
// A call of all ranks is a message to and from every peer, and a copy of what a rank has for itself. Its arrival is told beside them, and its end is
// that of the messages: nobody can be two calls ahead of a rank whose message it has not had.
#pragma once
#include "copy.cuh"
#include "escaped.cuh"

namespace brigade {

__device__ inline void poison_outputs(const MessagesParams& p) {
  for (uint32_t m = 0; m < p.count; ++m) {
    if (p.peer[m] >= 256) poison(p.local[m], p.bytes[m], p.poison, threadIdx.x, blockDim.x);
  }
}

}  // namespace brigade

using namespace brigade;

__device__ __forceinline__ bool receives_of(const MessagesParams& p, uint32_t message) { return p.peer[message] >= 256; }

__device__ __forceinline__ uint32_t peer_of_message(const MessagesParams& p, uint32_t message) { return p.peer[message] % 256; }

// What this rank has for itself.
__device__ __forceinline__ bool is_own(const MessagesParams& p, uint32_t message) { return peer_of_message(p, message) == p.rank; }

__device__ __forceinline__ uint64_t pieces_of(const MessagesParams& p, uint32_t message) {
  // A division of 64 bits takes long.
  return p.bytes[message] <= p.piece_bytes ? 1 : (p.bytes[message] + p.piece_bytes - 1) / p.piece_bytes;
}

// What a rank counts of the messages to or from a peer. Kernels take two counts of pieces in turn: each reads one and writes the other. Whose turn
// it is follows from a number to which the blocks of a kernel add USE between them, each once it has read it (push.cuh).
struct Counted {
  uint64_t pieces[2];
  uint64_t uses;
  // Blocks that have taken what lies in a slot, some bits for each.
  uint64_t taken;
};

__device__ __forceinline__ Counted* counted_of(const MessagesParams& p, const Group& g, uint32_t message) {
  const uint32_t which = (receives_of(p, message) ? p.size : 0) + peer_of_message(p, message);
  return reinterpret_cast<Counted*>(g.counter(p.counters + 2 * which));
}

// In a place that no peer needs: of `taken`, blocks of a call of all ranks that have read which one it is.
__device__ __forceinline__ Counted* counted_of_calls(const MessagesParams& p, const Group& g) {
  return reinterpret_cast<Counted*>(g.counter(p.counters + 2 * p.rank));
}

// What a block reads as it begins, a lane each word: the counts of its message, the credits of both halves, whether and in which generation the
// group was stopped, the calls of all ranks, and those that ended well.
enum Word : uint32_t { EVEN, ODD, USES, CREDITS, STOP = CREDITS + 2, GENERATION, CALLS, PUSHED, ENDED, WORDS };

__shared__ uint64_t found[WORDS];

__device__ __forceinline__ uint32_t generation_found() { return uint32_t(found[GENERATION]); }

// This rank's arrival in a call of all ranks, as it was found before anybody counted it.
__device__ __forceinline__ uint64_t arrival_of_call(const MessagesParams& p) {
  return pack({generation_found(), p.call_signature, uint32_t(found[CALLS] + (found[PUSHED] >> USE_BITS) + p.arrives)});
}

// A call, which other blocks may count before this one is through.
struct MessageCall : Exchange {
  __device__ uint64_t call() const { return found[ENDED] + 1; }
};

__device__ __forceinline__ MessageCall call_of(const MessagesParams& p) {
  const Group g = group_of(p, p.call_signature);
  return {{g, arrival_of_call(p), g.started_ns()}};
}

// Piece `n` between this rank and a peer.
struct Piece {
  uint64_t n;
  uint64_t bytes;
  // Of the message, in this rank's memory.
  uint64_t local;
  // In the receiver's.
  uint64_t slot;
  uint32_t granules, packets;

  // It begins at `from`.
  __device__ __forceinline__ Piece(const MessagesParams& p, uint32_t message, uint64_t number, uint64_t from) : n(number), local(from) {
    const uint64_t left = p.local[message] + p.bytes[message] - from;
    bytes = left < p.piece_bytes ? left : p.piece_bytes;
    const uint32_t peer = peer_of_message(p, message);
    const uint32_t sender = receives_of(p, message) ? peer : p.rank, receiver = receives_of(p, message) ? p.rank : peer;
    slot = p.base + receiver * p.stride + p.slots + half() * p.half_bytes + (2 * sender + second()) * p.slot_bytes;
    granules = uint32_t((bytes + 15) / 16);
    packets = (granules + Each - 1) / Each;
  }

  __device__ __forceinline__ uint32_t half() const { return uint32_t(n & 1); }
  // Which slot of the half it takes.
  __device__ __forceinline__ uint32_t second() const { return uint32_t(n >> 1 & 1); }
  __device__ __forceinline__ uint64_t epoch() const { return n / 2 + 1; }

  // Granules of a packet lie so far apart that those which threads access together lie together.
  __device__ __forceinline__ uint32_t granule(uint32_t j, uint32_t k) const { return k * packets + j; }
  __device__ __forceinline__ uint64_t at(uint32_t j, uint32_t k) const { return slot + 16ull * granule(j, k); }
  __device__ __forceinline__ uint32_t* word(uint32_t j) const { return reinterpret_cast<uint32_t*>(slot + 16ull * granules) + j; }

  __device__ __forceinline__ uint32_t left(uint32_t i) const {
    const uint64_t all = bytes - 16ull * i;
    return all < 16 ? uint32_t(all) : 16;
  }

  // Whether a packet has four whole granules, which lie as the widest accesses want it.
  __device__ __forceinline__ bool is_wide(uint32_t j) const { return local % 16 == 0 && 16ull * (granule(j, Each - 1) + 1) <= bytes; }

  // Of a wide packet.
  __device__ __forceinline__ void load(uint32_t j, uint4 (&v)[Each]) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) v[k] = reinterpret_cast<const uint4*>(local)[granule(j, k)];
  }

  __device__ __forceinline__ void store(uint32_t j, const uint4 (&v)[Each]) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) reinterpret_cast<uint4*>(local)[granule(j, k)] = v[k];
  }

  __device__ __forceinline__ void send(uint32_t j, const uint4 (&v)[Each]) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (granule(j, k) < granules) push(at(j, k), pushable(v[k]));
    }
    push_more(v, word(j));
  }

  // Takes a look at a packet.
  __device__ __forceinline__ bool look(uint32_t j, uint4 (&v)[Each], uint32_t& escaped) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) v[k] = granule(j, k) < granules ? peek(at(j, k)) : make_uint4(0, 0, 0, 0);
    return is_complete(greatest(v), word(j), escaped);
  }

  // The word beside it, too, if there was one.
  __device__ __forceinline__ void empty(uint32_t j, bool more) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (granule(j, k) < granules) push(at(j, k), make_uint4(sentinel, sentinel, sentinel, sentinel));
    }
    if (more) store_relaxed_sys(word(j), sentinel);
  }
};

// Packets of other forms are rare.
__device__ __noinline__ void send_any(const MessagesParams& p, uint32_t message, uint64_t n, uint64_t from, uint32_t j) {
  const Piece piece(p, message, n, from);
  uint4 v[Each] = {};
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) {
    const uint32_t g = piece.granule(j, k);
    if (g < piece.granules) v[k] = any_input(piece.local + 16ull * g, piece.left(g));
  }
  piece.send(j, v);
}

__device__ __noinline__ void write_any(const MessagesParams& p, uint32_t message, uint64_t n, uint64_t from, uint32_t j) {
  const Piece piece(p, message, n, from);
  uint4 v[Each];
  uint32_t escaped;
  piece.look(j, v, escaped);
  restore(v, escaped);
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) {
    const uint32_t g = piece.granule(j, k);
    if (g < piece.granules) any_output(piece.local + 16ull * g, piece.left(g), v[k]);
  }
}

// The flag of piece `n` of a message in the receiver's memory.
__device__ __forceinline__ uint32_t flag_word(const MessagesParams& p, uint64_t n, uint32_t sender) {
  return p.ring + (uint32_t(n & 1) * p.size + sender) * p.pieces + uint32_t(n >> 1 & 1);
}

// Slots of a sender.
constexpr uint32_t most_pieces = 4;

// The word in which a rank finds the credits of another.
__device__ __forceinline__ uint32_t credit_word(const MessagesParams& p, uint64_t n, uint32_t receiver) {
  return p.ring + 2 * p.size * p.pieces + uint32_t(n & 1) * p.size + receiver;
}

// Flags of data are signed by the message, arrivals by the call.
__device__ __forceinline__ uint64_t flag_of(const MessagesParams& p, uint32_t message, uint64_t epoch) {
  return pack({generation_found(), p.signature[message], uint32_t(epoch)});
}

// Of a piece that comes.
__device__ __forceinline__ Waiting arrival_of(const MessagesParams& p, uint32_t message, uint64_t n) {
  const uint32_t peer = peer_of_message(p, message);
  return {flag_word(p, n, peer), flag_of(p, message, n / 2 + 1), Want::exactly, peer, peer};
}

// Of the credit for piece `n`, which went.
__device__ __forceinline__ Waiting credit_of(const MessagesParams& p, uint32_t message, uint64_t n) {
  const uint32_t peer = peer_of_message(p, message);
  return {credit_word(p, n, peer), flag_of(p, message, n / 2 + 1), Want::at_least, peer, peer};
}

// What is the matter with a piece that is not there.
__device__ inline Waiting diagnose(const MessagesParams& p, const MessageCall& g, uint32_t message, uint64_t n, bool far) {
  Waiting w = arrival_of(p, message, n);
  w.uncounted = true;
  w.looks = (far ? long_glance : glance) - 1;
  look(g, w);
  if (w.end != End::there) return w;
  // The flag is, and its data is not.
  w.end = End::going_on;
  w.blamed = w.peer, w.blamed_expected = w.expected;
  if (is_stopped(g)) {
    w.end = End::stopped;
  } else if (globaltimer_ns() - g.started_ns() >= most_ns(g)) {
    w.end = End::timeout;
  } else if (far && is_stop_asked(g)) {
    w.end = End::stopped;
  } else if (far && find_peer(g, false, w.blamed, w.seen)) {
    w.blamed_expected = g.flag(g.epoch());
    w.end = End::mismatch;
  } else if (far && (load_acquire_sys(reinterpret_cast<const uint64_t*>(g.report + REPORT_DEPARTED)) >> w.peer & 1)) {
    w.end = End::lost;
  }
  return w;
}

// Now and then, while a piece is waited for. The host is far away.
__device__ __noinline__ bool is_hope(const MessagesParams& p, uint32_t message, uint64_t n, bool far) {
  return diagnose(p, call_of(p), message, n, far).end == End::going_on;
}

// There is none: leaves a record, if nobody else has, and stops the group. False if there is hope again.
__device__ __noinline__ bool give_up_on(const MessagesParams& p, uint32_t message, uint64_t n) {
  const MessageCall g = call_of(p);
  const Waiting w = diagnose(p, g, message, n, true);
  if (w.end == End::going_on) return false;
  give_up(g, w);
  return true;
}

__device__ __noinline__ void count_wait_since(const MessagesParams& p, uint32_t peer, uint64_t since_ns) {
  count_wait(group_of(p, p.call_signature), peer, globaltimer_ns() - since_ns);
}

// Blocks of a message that carry the same pieces. Where there are two teams for a message of more than one piece, they take pieces in turn: so each has one
// half of its own, in which credits come in order.
template <uint32_t Most>
struct Team {
  uint32_t of_message, is_second, as_block, of_blocks;

  __device__ __forceinline__ Team(const MessagesParams& p, uint32_t message) : of_message(p.bytes[message] > p.piece_bytes && !is_own(p, message) ? Most : 1) {
    const uint32_t block = blockIdx.x - message * p.blocks, bit = of_message - 1;
    is_second = block & bit, as_block = block >> bit, of_blocks = p.blocks >> bit;
  }

  __device__ __forceinline__ uint32_t teams() const { return of_message; }
  __device__ __forceinline__ uint32_t which() const { return is_second; }
  __device__ __forceinline__ uint32_t block() const { return as_block; }
  __device__ __forceinline__ uint32_t blocks() const { return of_blocks; }
};

// All of them, which nobody keeps in registers.
template <>
struct Team<1> {
  const MessagesParams& p;

  __device__ __forceinline__ Team(const MessagesParams& parameters, uint32_t) : p(parameters) {}

  __device__ __forceinline__ uint32_t teams() const { return 1; }
  __device__ __forceinline__ uint32_t which() const { return 0; }
  __device__ __forceinline__ uint32_t block() const { return blockIdx.x % p.blocks; }
  __device__ __forceinline__ uint32_t blocks() const { return p.blocks; }
};

// From one packet of a thread to the next.
template <typename Team>
__device__ __forceinline__ uint32_t stride_of(const Team& team) {
  return team.blocks() * blockDim.x;
}

// The first packet of this thread in every piece: each block has as many as another, those of a warp together.
template <typename Team>
__device__ __forceinline__ uint32_t first_packet(const Team& team) {
  return (threadIdx.x / 32 * team.blocks() + team.block()) * 32 + threadIdx.x % 32;
}

// The first block of a message says what is said once.
__device__ __forceinline__ bool is_first_block(const MessagesParams& p) { return blockIdx.x % p.blocks == 0; }

// One thread of a block looks for flags, and says and counts what its block does: of the last warp, which may have no packets. The hook has one desk for
// a block, and is asked by its first thread.
__device__ __forceinline__ bool is_herald(const MessagesParams& p) { return threadIdx.x == (p.desk == 0 ? blockDim.x - 32 : 0); }

// Gives what was there.
__device__ __forceinline__ uint64_t add_acq_rel_gpu(uint64_t* at, uint64_t more) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(more) : "memory");
  return before;
}

// Looks until `look` is true. False if the group was stopped, or is now. Lanes that come here together leave together, as in push.cuh.
template <typename Look>
__device__ __forceinline__ bool await(const MessagesParams& p, uint32_t message, uint64_t n, bool tells, Look look) {
  constexpr uint32_t looks_between = 256;
  const uint32_t together = __activemask();
  bool there, hopeless = false;
  uint64_t since_ns = 0;
  for (uint32_t spins = 1; there = look(), !__all_sync(together, there); ++spins) {
    if (spins == 1 && !there && tells) since_ns = globaltimer_ns();
    if (spins % looks_between != 0) continue;
    const bool lost = !there && hopeless && give_up_on(p, message, n);
    if (__any_sync(together, lost)) return false;
    hopeless = !there && !is_hope(p, message, n, spins / looks_between % 16 == 0);
    // What a rank says last is that it is gone: all that it sent would be there. So there are some more looks.
    if (__any_sync(together, hopeless)) spins += looks_between - 16;
  }
  if (since_ns != 0) count_wait_since(p, peer_of_message(p, message), since_ns);
  return true;
}

// Whether a piece can go, as was found: the one before in its slot has been taken.
__device__ __forceinline__ bool is_credited(const MessagesParams& p, uint32_t message, uint64_t n) {
  if (n < most_pieces) return true;
  const Waiting credit = credit_of(p, message, n - most_pieces);
  return progress(found[CREDITS + (n & 1)], credit.expected, credit.want) == Progress::there;
}

// By the first warp, before the block meets.
__device__ __forceinline__ void find(const MessagesParams& p, const Group& g, uint32_t message) {
  const uint32_t k = threadIdx.x;
  if (k >= WORDS) return;
  const uint64_t* at = reinterpret_cast<const uint64_t*>(counted_of(p, g, message)) + k;
  if (k >= CREDITS) at = g.word(p.rank, k < STOP ? credit_word(p, k - CREDITS, peer_of_message(p, message)) : p.stop);
  if (k >= GENERATION) at = g.state + (k == GENERATION ? STATE_GENERATION : k == CALLS ? STATE_COUNTERS : k == PUSHED ? STATE_USES : STATE_CALLS);
  // Credits order what is written behind them.
  found[k] = load_acquire_sys(at);
}

// Waits as one thread, for the block: for the credit of piece `n`, or where there is a hook for its flag. What is rare takes nothing by
// reference but the parameters, and is not inlined, so that what is usual is short.
__device__ __noinline__ bool wait_long(const MessagesParams& p, uint32_t message, uint64_t op, uint64_t n) {
  __shared__ bool failed;
  const MessageCall g = call_of(p);
  // A credit is asked about as part of the piece that it is waited for.
  const uint64_t epoch = (op == STEP_CREDIT ? n + most_pieces : n) / 2 + 1;
  const bool well = wait_for(p, g, op, epoch, op == STEP_CREDIT ? credit_of(p, message, n) : arrival_of(p, message, n), failed);
  // All have read it before the next wait.
  __syncthreads();
  return well;
}

// By the herald: says which message a piece is of.
template <typename Team>
__device__ __forceinline__ void say(const MessagesParams& p, const Group& g, uint32_t message, const Team& team, uint64_t n) {
  if (team.block() != 0) return;
  const uint32_t peer = peer_of_message(p, message), word = flag_word(p, n, p.rank);
  const bool says = g.desk == 0 || consult(p, g.signature, step_bits(STEP_POST, peer, word), n / 2 + 1, blockIdx.x) == Answer::go_on;
  if (says) store_relaxed_sys(g.word(peer, word), flag_of(p, message, n / 2 + 1));
}

__device__ __forceinline__ Piece piece_of(const MessagesParams& p, uint32_t message, uint64_t before, uint64_t i) {
  return Piece(p, message, before + i, p.local[message] + i * p.piece_bytes);
}

// This block's share of a message, of whose first piece packets have gone already, if it has `begun`: one of each thread. False if the group was stopped.
template <typename Team>
__device__ __forceinline__ bool send(const MessagesParams& p, uint32_t message, const Team& team, uint64_t before, bool begun) {
  const Group g = group_of(p, p.call_signature);
  for (uint64_t i = team.which(), pieces = pieces_of(p, message); i < pieces; i += team.teams()) {
    const Piece piece = piece_of(p, message, before, i);
    if (!begun) {
      if (piece.n >= most_pieces && !wait_long(p, message, STEP_CREDIT, piece.n - most_pieces)) return false;
      if (is_herald(p)) say(p, g, message, team, piece.n);
    }
    for (uint32_t j = first_packet(team) + (begun ? stride_of(team) : 0); j < piece.packets; j += stride_of(team)) {
      if (piece.is_wide(j)) {
        uint4 v[Each];
        piece.load(j, v);
        piece.send(j, v);
      } else {
        send_any(p, message, piece.n, piece.local, j);
      }
    }
    begun = false;
  }
  return true;
}

// Whether all blocks have taken their shares of piece `n`, of which this one's is the last.
template <typename Team>
__device__ __forceinline__ bool has_taken_all(const Team& team, uint64_t* taken, uint64_t n) {
  constexpr uint32_t bits = 64 / most_pieces;
  if (team.blocks() == 1) return true;
  const uint32_t at = bits * uint32_t(n % most_pieces);
  if ((uint32_t(add_acq_rel_gpu(taken, 1ull << at) >> at) & ((1u << bits) - 1)) + 1 != team.blocks()) return false;
  atomicAdd(reinterpret_cast<unsigned long long*>(taken), 0ull - ((unsigned long long)team.blocks() << at));
  return true;
}

// Takes a packet of this thread, if it has one; the herald looks for the flag too, and for the stop, once a piece, so that nobody writes for long beside
// whoever poisons. False if the group was stopped.
__device__ __forceinline__ bool take(const MessagesParams& p, const Group& g, uint32_t message, const Piece& piece, uint32_t j, bool herald) {
  const bool any = j < piece.packets;
  if (!any && !herald) return true;
  uint4 v[Each];
  uint32_t escaped;
  bool stopped = false;
  // One thread tells how long it was.
  const bool tells = is_first_block(p) && (threadIdx.x == 0 || piece.packets == 0);
  const bool there = await(p, message, piece.n, tells, [&] {
    const bool come = !any || piece.look(j, v, escaped);
    if (!herald) return come;
    stopped = load_relaxed_sys(g.word(p.rank, g.stop)) == generation_found();
    const uint32_t word = flag_word(p, piece.n, peer_of_message(p, message));
    return come && load_relaxed_sys(g.word(p.rank, word)) == flag_of(p, message, piece.epoch());
  });
  if (!there || stopped || !any) return there && !stopped;
  const bool more = has_more(v);
  if (piece.is_wide(j)) {
    restore(v, escaped);
    piece.store(j, v);
  } else {
    write_any(p, message, piece.n, piece.local, j);
  }
  piece.empty(j, more);
  return true;
}

// The same of a message that is received. The credit for its last piece goes back with the next one. Neither is a function that is called: those read
// parameters through memory.
template <typename Team>
__device__ __forceinline__ bool receive(const MessagesParams& p, uint32_t message, const Team& team, uint64_t before, bool begun) {
  const Group g = group_of(p, p.call_signature);
  for (uint64_t i = team.which(), pieces = pieces_of(p, message); i < pieces; i += team.teams()) {
    const Piece piece = piece_of(p, message, before, i);
    // The hook hears of it before anything is taken.
    if (!begun && g.desk != 0 && !wait_long(p, message, STEP_WAIT, piece.n)) return false;
    bool there = true, herald = !begun && is_herald(p);
    for (uint32_t j = first_packet(team) + (begun ? stride_of(team) : 0); there && (j < piece.packets || herald); j += stride_of(team)) {
      there = take(p, g, message, piece, j, herald);
      herald = false;
    }
    begun = false;
    if (!__syncthreads_and(there)) return false;
    if (i + 1 < pieces && threadIdx.x == 0 && has_taken_all(team, &counted_of(p, g, message)->taken, piece.n)) {
      // Its release is behind what all blocks have read and emptied.
      post(p, g, piece.epoch(), peer_of_message(p, message), credit_word(p, piece.n, p.rank), flag_of(p, message, piece.epoch()));
    }
  }
  return true;
}

// By the herald: gives the credit for the last piece of a message that an earlier kernel has taken. It may bear any message's signature.
template <typename Team>
__device__ __forceinline__ void give_back(const MessagesParams& p, const Group& g, uint32_t message, const Team& team, uint64_t n) {
  // By those who give later credits of its half.
  if (team.block() != 0 || team.which() + 1 != team.teams()) return;
  const uint32_t peer = peer_of_message(p, message), word = credit_word(p, n, p.rank);
  if (g.desk != 0) return post(p, g, n / 2 + 1, peer, word, flag_of(p, message, n / 2 + 1));
  store_relaxed_sys(g.word(peer, word), flag_of(p, message, n / 2 + 1));
}

// Nothing that was there is waited for.
__device__ __forceinline__ void add(uint64_t* at, uint64_t more) { atomicAdd(reinterpret_cast<unsigned long long*>(at), (unsigned long long)more); }

// By one thread of each block of a message, once it has read the counts.
__device__ __forceinline__ void count(const MessagesParams& p, const Group& g, uint32_t message, uint64_t pieces) {
  Counted* counted = counted_of(p, g, message);
  // The first block adds what is left of USE.
  const bool first = is_first_block(p);
  const uint64_t share = USE >> (32 - __clz(p.blocks));
  add(&counted->uses, first ? USE - share * (p.blocks - 1) : share);
  if (first) counted->pieces[((found[USES] >> USE_BITS) + 1) % 2] = pieces;
}

// The share of a block of what this rank has for itself. Nobody copies for long beside whoever poisons.
__device__ __noinline__ bool copy_own(const MessagesParams& p, uint32_t message) {
  const Group g = group_of(p, p.call_signature);
  const Team<1> team(p, message);
  bool stopped = false;
  // In parts, none of which takes long; large ones at once kept messages from coming.
  const uint64_t many = 4096ull * stride_of(team), most = many < p.piece_bytes ? many : p.piece_bytes;
  for (uint64_t at = 0; at < p.bytes[message]; at += most) {
    stopped = is_stopped(g);
    if (stopped) break;
    const uint64_t left = p.bytes[message] - at;
    copy_bytes(p.local[message] + at, p.own + at, left < most ? left : most, first_packet(team), stride_of(team));
  }
  return !__syncthreads_or(stopped);
}

// Whether all blocks have read which call this is, the last of them this one.
__device__ __forceinline__ bool is_last_to_read(const MessagesParams& p, const Group& g) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(&counted_of_calls(p, g)->taken), 1ull) + 1 == gridDim.x;
}

// Tells a peer which call this is.
__device__ __forceinline__ void announce(const MessagesParams& p, uint32_t peer) {
  const Exchange g{group_of(p, p.call_signature), arrival_of_call(p), 0};
  if (peer < p.size && peer != p.rank) store_relaxed_sys(g.word(peer, g.arrivals() + p.rank), g.arrived);
}

// The next call is another.
__device__ __forceinline__ void count_call(const MessagesParams& p, const Group& g) {
  counted_of_calls(p, g)->taken = 0;
  add(g.counter(0), 1);
}

// Two blocks find room on a multiprocessor, so that the groups of many ranks do. Code that runs once takes long, so what most messages need stands by
// itself in front of what there may be more: a packet of each thread, in a slot that is free.
template <uint32_t Teams>
__device__ __forceinline__ void carry(const MessagesParams& p) {
  wait_for_previous_kernel();
  if (p.lets_next != 0) let_next_kernel_start();
  const uint32_t message = blockIdx.x / p.blocks;
  const bool receives = receives_of(p, message), own = is_own(p, message), herald = is_herald(p);
  const Group g = group_of(p, p.call_signature);
  // What is sent is loaded before it is known which piece it is.
  const Team<Teams> team(p, message);
  Piece piece = piece_of(p, message, 0, team.which());
  const uint32_t j = first_packet(team);
  const bool wide = j < piece.packets && piece.is_wide(j);
  uint4 v[Each];
  if (!receives && wide) piece.load(j, v);
  find(p, g, message);
  // Each block says so: the last, but a little later than the first.
  if (threadIdx.x == 32) g.state[STATE_STARTED] = globaltimer_ns();
  __syncthreads();
  const uint64_t before = found[found[USES] >> USE_BITS & 1];
  piece = piece_of(p, message, before, team.which());
  bool going_on = found[STOP] != found[GENERATION], counts_call = false;
  // Where there is a hook, it is asked first.
  const bool hooked = g.desk != 0, sends = going_on && !receives, begins = sends && !hooked && is_credited(p, message, before + team.which());
  if (p.arrives != 0 && blockIdx.x == 0) announce(p, threadIdx.x - (blockDim.x - 32));
  if (herald) {
    if (begins) say(p, g, message, team, piece.n);
    if (going_on && receives && !own && before > 0) give_back(p, g, message, team, before - 1);
    if (!own) count(p, g, message, before + pieces_of(p, message));
    if (p.arrives != 0) counts_call = is_last_to_read(p, g);
  }
  // Whoever receives gives the credit for all pieces of a message but its last.
  const bool more = pieces_of(p, message) > team.which() + (receives ? 1 : team.teams()) || piece.packets > stride_of(team);
  if (sends) {
    if (begins && wide) {
      piece.send(j, v);
    } else if (begins && j < piece.packets) {
      send_any(p, message, piece.n, piece.local, j);
    }
    if (more || !begins) going_on = send(p, message, team, before, begins);
  } else if (going_on && own) {
    going_on = copy_own(p, message);
  } else if (going_on) {
    if (!hooked) going_on = __syncthreads_and(take(p, g, message, piece, j, herald));
    if (more || hooked) going_on = going_on && receive(p, message, team, before, !hooked);
  }
  if (counts_call) count_call(p, g);
  if (!going_on) return poison_all(p);
  // Where a hook is asked, steps count calls of all ranks.
  const bool counts_end = p.collective != MADE_TOGETHER || p.arrives != 0;
  // Behind the last that may fail, of two teams the second. To know that no other does behind it would be one more way to memory.
  const uint32_t last = p.count - (p.count > 1 && is_own(p, p.count - 1) ? 2 : 1), teller = Teams > 1 && p.bytes[message] > p.piece_bytes;
  if (counts_end && message == last && blockIdx.x % p.blocks == teller && threadIdx.x == 0) {
    add(g.state + STATE_CALLS, 1);
    add(g.state + STATE_MOVED, p.moved_bytes);
  }
}
