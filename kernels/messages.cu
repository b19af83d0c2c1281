// Messages between pairs of ranks. A message passes through its sender's slots in the receiver's memory, in pieces that take four slots in turn,
// two in each half, as data that is its own flag (escaped.cuh). The flag of a piece says which message it is of, so that a pair which disagrees
// hears of it; between data and flag no order is needed. Whoever takes a packet leaves its place empty, and the credit for a piece goes back
// when the receiver's last block has taken its share. That for the last piece of a message goes back with the next message from there, in a
// kernel behind this one: so no fence is waited for at the end of a message. Three pieces more can be on their way until then.
//
// A call of all ranks is a message to and from every peer, and a copy of what a rank has for itself. Its arrival is told beside them, and its end is
// that of the messages: nobody can be two calls ahead of a rank whose message it has not had.
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

// This rank's arrival in a call of all ranks. Blocks read it from counters before it is counted there.
__shared__ uint64_t arrival;

__device__ __forceinline__ Exchange call_of(const MessagesParams& p) {
  const Group g = group_of(p, p.call_signature);
  return {g, arrival, g.started_ns()};
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

  __device__ __forceinline__ void send(uint32_t j, const uint4 (&v)[Each]) const {
    uint32_t escaped = 0;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (granule(j, k) < granules) push(at(j, k), escape(v[k], Each * k, escaped));
    }
    store_relaxed_sys(word(j), escaped);
  }

  // Takes a look at a packet.
  __device__ __forceinline__ bool look(uint32_t j, uint4 (&v)[Each], uint32_t& escaped) const {
    escaped = load_relaxed_sys(word(j));
    bool come = escaped != sentinel;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      v[k] = granule(j, k) < granules ? peek(at(j, k)) : make_uint4(0, 0, 0, 0);
      come &= is_there(v[k]);
    }
    return come;
  }

  __device__ __forceinline__ void empty(uint32_t j) const {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      if (granule(j, k) < granules) push(at(j, k), make_uint4(sentinel, sentinel, sentinel, sentinel));
    }
    store_relaxed_sys(word(j), sentinel);
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
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) {
    const uint32_t g = piece.granule(j, k);
    if (g < piece.granules) any_output(piece.local + 16ull * g, piece.left(g), restored(v[k], Each * k, escaped));
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
__device__ __forceinline__ uint64_t flag_of(const MessagesParams& p, const Group& g, uint32_t message, uint64_t epoch) {
  return pack({g.generation(), p.signature[message], uint32_t(epoch)});
}

// Of a piece that comes.
__device__ __forceinline__ Waiting arrival_of(const MessagesParams& p, const Group& g, uint32_t message, uint64_t n) {
  const uint32_t peer = peer_of_message(p, message);
  return {flag_word(p, n, peer), flag_of(p, g, message, n / 2 + 1), Want::exactly, peer, peer};
}

// Of the credit for piece `n`, which went.
__device__ __forceinline__ Waiting credit_of(const MessagesParams& p, const Group& g, uint32_t message, uint64_t n) {
  const uint32_t peer = peer_of_message(p, message);
  return {credit_word(p, n, peer), flag_of(p, g, message, n / 2 + 1), Want::at_least, peer, peer};
}

// What is the matter with a piece that is not there.
__device__ inline Waiting diagnose(const MessagesParams& p, const Exchange& g, uint32_t message, uint64_t n, bool far) {
  Waiting w = arrival_of(p, g, message, n);
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
  const Exchange g = call_of(p);
  const Waiting w = diagnose(p, g, message, n, true);
  if (w.end == End::going_on) return false;
  give_up(g, w);
  return true;
}

__device__ __noinline__ void count_wait(const MessagesParams& p, uint32_t peer, uint64_t since_ns) {
  unsigned long long* state = reinterpret_cast<unsigned long long*>(p.state);
  atomicAdd(state + STATE_WAITS + peer, 1ull);
  atomicAdd(state + STATE_WAITED + peer, (unsigned long long)(globaltimer_ns() - since_ns));
}

// The first packet of this thread in every piece.
__device__ __forceinline__ uint32_t first_packet(const MessagesParams& p) { return blockIdx.x % p.blocks * blockDim.x + threadIdx.x; }

// Gives what was there.
__device__ __forceinline__ uint64_t add_acq_rel_gpu(uint64_t* at, uint64_t more) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(more) : "memory");
  return before;
}

// Looks until `look` is true. False if the group was stopped, or is now. Lanes that come here together leave together, as in push.cuh.
template <typename Look>
__device__ __forceinline__ bool await(const MessagesParams& p, uint32_t message, uint64_t n, Look look) {
  constexpr uint32_t looks_between = 256;
  const uint32_t together = __activemask();
  bool there, hopeless = false;
  uint64_t since_ns = 0;
  for (uint32_t spins = 1; there = look(), !__all_sync(together, there); ++spins) {
    if (spins == 1 && !there && first_packet(p) == 0) since_ns = globaltimer_ns();
    if (spins % looks_between != 0) continue;
    const bool lost = !there && hopeless && give_up_on(p, message, n);
    if (__any_sync(together, lost)) return false;
    hopeless = !there && !is_hope(p, message, n, spins / looks_between % 16 == 0);
    // What a rank says last is that it is gone: all that it sent would be there. So there are some more looks.
    if (__any_sync(together, hopeless)) spins += looks_between - 16;
  }
  if (since_ns != 0) count_wait(p, peer_of_message(p, message), since_ns);
  return true;
}

// Loads packet `j`, which this thread sends: all of it is on its way at once.
__device__ __forceinline__ void load(const Piece& piece, uint32_t j, uint4 (&v)[Each]) {
  if (j >= piece.packets || !piece.is_wide(j)) return;
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) v[k] = reinterpret_cast<const uint4*>(piece.local)[piece.granule(j, k)];
}

// Whether a piece can go: the one before in its slot has been taken.
__device__ __forceinline__ bool is_credited(const MessagesParams& p, const Group& g, uint32_t message, uint64_t n) {
  if (n < most_pieces) return true;
  const Waiting credit = credit_of(p, g, message, n - most_pieces);
  return progress(load_acquire_sys(g.word(p.rank, credit.word)), credit.expected, credit.want) == Progress::there;
}

// Waits as one thread, for the block: for the credit of piece `n`, or where there is a hook for its flag. What is rare takes nothing by
// reference but the parameters, and is not inlined, so that what is usual is short.
__device__ __noinline__ bool wait_long(const MessagesParams& p, uint32_t message, uint64_t op, uint64_t n) {
  __shared__ bool failed;
  const Exchange g = call_of(p);
  // A credit is asked about as part of the piece that it is waited for.
  const uint64_t epoch = (op == STEP_CREDIT ? n + most_pieces : n) / 2 + 1;
  const bool well = wait_for(p, g, op, epoch, op == STEP_CREDIT ? credit_of(p, g, message, n) : arrival_of(p, g, message, n), failed);
  // All have read it before the next wait.
  __syncthreads();
  return well;
}

// This block's share of a piece. Of the first, packets are `loaded`, and it is known whether it is `credited`. False if the group was stopped.
__device__ __forceinline__ bool send(const MessagesParams& p, const Group& g, uint32_t message, const Piece& piece, uint4 (&v)[Each], bool loaded,
                                     bool credited) {
  const uint32_t peer = peer_of_message(p, message);
  if (piece.n >= most_pieces && !credited && !wait_long(p, message, STEP_CREDIT, piece.n - most_pieces)) return false;
  if (first_packet(p) == 0) {
    const uint32_t word = flag_word(p, piece.n, p.rank);
    const bool tells = g.desk == 0 || consult(p, g.signature, step_bits(STEP_POST, peer, word), piece.epoch(), blockIdx.x) == Answer::go_on;
    if (tells) store_relaxed_sys(g.word(peer, word), flag_of(p, g, message, piece.epoch()));
  }
  for (uint32_t j = first_packet(p); j < piece.packets; j += p.blocks * blockDim.x) {
    if (!loaded) load(piece, j, v);
    loaded = false;
    if (piece.is_wide(j)) {
      piece.send(j, v);
    } else {
      send_any(p, message, piece.n, piece.local, j);
    }
  }
  return true;
}

// Whether all blocks have taken their shares of piece `n`, of which this one's is the last.
__device__ __forceinline__ bool has_taken_all(const MessagesParams& p, uint64_t* taken, uint64_t n) {
  constexpr uint32_t bits = 64 / most_pieces;
  if (p.blocks == 1) return true;
  const uint32_t at = bits * uint32_t(n % most_pieces);
  if ((uint32_t(add_acq_rel_gpu(taken, 1ull << at) >> at) & ((1u << bits) - 1)) + 1 != p.blocks) return false;
  atomicAdd(reinterpret_cast<unsigned long long*>(taken), 0ull - ((unsigned long long)p.blocks << at));
  return true;
}

__device__ __forceinline__ bool receive(const MessagesParams& p, const Group& g, uint32_t message, const Piece& piece, bool last) {
  const uint32_t peer = peer_of_message(p, message);
  // The hook hears of it before anything is taken.
  if (g.desk != 0 && !wait_long(p, message, STEP_WAIT, piece.n)) return false;
  const uint64_t* flag = g.word(p.rank, flag_word(p, piece.n, peer));
  const uint64_t expected = flag_of(p, g, message, piece.epoch());
  // One thread looks for the flag, with its first packet, if it has one; and for the stop, once a piece, so that nobody writes for long beside
  // whoever poisons.
  bool herald = threadIdx.x == 0, there = true, stopped = false;
  for (uint32_t j = first_packet(p); j < piece.packets || herald; j += p.blocks * blockDim.x) {
    uint4 v[Each];
    uint32_t escaped;
    const bool any = j < piece.packets;
    there = await(p, message, piece.n, [&] {
      const bool come = !any || piece.look(j, v, escaped);
      if (!herald) return come;
      stopped = is_stopped(g);
      return come && load_relaxed_sys(flag) == expected;
    });
    there &= !stopped;
    herald = false;
    if (!any || !there) break;
    if (piece.is_wide(j)) {
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        reinterpret_cast<uint4*>(piece.local)[piece.granule(j, k)] = restored(v[k], Each * k, escaped);
      }
    } else {
      write_any(p, message, piece.n, piece.local, j);
    }
    piece.empty(j);
  }
  if (!__syncthreads_and(there)) return false;
  if (!last && threadIdx.x == 0 && has_taken_all(p, &counted_of(p, g, message)->taken, piece.n)) {
    // Its release is behind what all blocks have read and emptied.
    post(p, g, piece.epoch(), peer, credit_word(p, piece.n, p.rank), flag_of(p, g, message, piece.epoch()));
  }
  return true;
}

// Gives the credit for the last piece of a message that an earlier kernel has taken. It may bear any message's signature.
__device__ __forceinline__ void give_back(const MessagesParams& p, const Group& g, uint32_t message, uint64_t n) {
  const uint32_t peer = peer_of_message(p, message), word = credit_word(p, n, p.rank);
  if (g.desk != 0) return post(p, g, n / 2 + 1, peer, word, flag_of(p, g, message, n / 2 + 1));
  store_relaxed_sys(g.word(peer, word), flag_of(p, g, message, n / 2 + 1));
}

// Nothing that was there is waited for.
__device__ __forceinline__ void add(uint64_t* at, uint64_t more) { atomicAdd(reinterpret_cast<unsigned long long*>(at), (unsigned long long)more); }

// By one thread of each block of a message that has read the counts.
__device__ __forceinline__ void count(const MessagesParams& p, const Group& g, uint32_t message, uint64_t use, uint64_t pieces) {
  Counted* counted = counted_of(p, g, message);
  // The first block adds what is left of USE.
  const bool first = blockIdx.x % p.blocks == 0;
  const uint64_t share = USE >> (32 - __clz(p.blocks));
  add(&counted->uses, first ? USE - share * (p.blocks - 1) : share);
  if (first) counted->pieces[(use + 1) % 2] = pieces;
}

// The share of a block of what this rank has for itself. Nobody copies for long beside whoever poisons.
__device__ __noinline__ bool copy_own(const MessagesParams& p, uint32_t message) {
  const Group g = group_of(p, p.call_signature);
  for (uint64_t at = 0; at < p.bytes[message]; at += p.piece_bytes) {
    if (is_stopped(g)) return false;
    const uint64_t left = p.bytes[message] - at;
    copy_bytes(p.local[message] + at, p.own + at, left < p.piece_bytes ? left : p.piece_bytes, first_packet(p), p.blocks * blockDim.x);
  }
  return true;
}

// Whether all blocks have read which call this is, the last of them this one.
__device__ __forceinline__ bool is_last_to_read(const MessagesParams& p, const Group& g) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(&counted_of_calls(p, g)->taken), 1ull) + 1 == gridDim.x;
}

// Tells each peer which call this is, by a thread of the first block for each.
__device__ __forceinline__ void announce(const MessagesParams& p) {
  const Exchange g = call_of(p);
  if (threadIdx.x < p.size && threadIdx.x != p.rank) store_relaxed_sys(g.word(threadIdx.x, g.arrivals() + p.rank), arrival);
}

// The next call is another.
__device__ __forceinline__ void count_call(const MessagesParams& p, const Group& g) {
  counted_of_calls(p, g)->taken = 0;
  add(g.counter(0), 1);
}

// Two blocks find room on a multiprocessor, so that the groups of many ranks do.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_messages(const __grid_constant__ MessagesParams p) {
  wait_for_previous_kernel();
  if (p.lets_next != 0) let_next_kernel_start();
  __shared__ bool failed, credited;
  __shared__ uint64_t before;
  const uint32_t message = blockIdx.x / p.blocks;
  const bool receives = receives_of(p, message);
  const Group g = group_of(p, p.call_signature);
  const uint64_t pieces = pieces_of(p, message);
  uint4 v[Each] = {};
  const auto piece = [&](uint64_t i) { return Piece(p, message, before + i, p.local[message] + i * p.piece_bytes); };
  if (!receives) load(Piece(p, message, 0, p.local[message]), first_packet(p), v);
  bool counts_call = false;
  if (threadIdx.x == 0) {
    const Counted* counted = counted_of(p, g, message);
    const uint64_t even = read_word(&counted->pieces[0]), odd = read_word(&counted->pieces[1]), use = read_word(&counted->uses) >> USE_BITS;
    const uint64_t calls = read_word(g.counter(0)), pushed = read_word(g.state + STATE_USES) >> USE_BITS;
    failed = is_stopped(g);
    before = use % 2 == 0 ? even : odd;
    arrival = g.flag(calls + pushed + p.arrives);
    // Each block says so: the last, but a little later than the first.
    g.state[STATE_STARTED] = globaltimer_ns();
    if (failed) say_stopped(g.report, g.generation());
    // Where there is a hook, it is asked first.
    credited = !receives && g.desk == 0 && is_credited(p, g, message, before);
    if (!is_own(p, message)) count(p, g, message, use, before + pieces);
    if (p.arrives != 0) counts_call = is_last_to_read(p, g);
  }
  __syncthreads();
  if (p.arrives != 0 && blockIdx.x == 0) announce(p);
  bool going_on = !failed;
  if (is_own(p, message)) {
    going_on = going_on && copy_own(p, message);
  } else {
    if (going_on && receives && before > 0 && first_packet(p) == 0) give_back(p, g, message, before - 1);
    for (uint64_t i = 0; i < pieces && going_on; ++i) {
      going_on = receives ? receive(p, g, message, piece(i), i + 1 == pieces) : send(p, g, message, piece(i), v, i == 0, i == 0 && credited);
    }
  }
  if (counts_call) count_call(p, g);
  if (!going_on) return poison_all(p);
  // To know that no other message fails behind this one would be one more way to memory.
  if (message == p.count - 1 && first_packet(p) == 0) {
    add(g.state + STATE_CALLS, 1);
    add(g.state + STATE_MOVED, p.moved_bytes);
  }
}
