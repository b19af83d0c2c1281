// Messages between pairs of ranks. A message passes through its sender's slot in the receiver's memory, in pieces that take the slot's two
// halves in turn, as data that is its own flag (escaped.cuh). The flag of a piece says which message it is of, so that a pair which disagrees
// hears of it; between data and flag no order is needed. Whoever takes a packet leaves its place empty, and the credit for a piece goes back
// when the receiver's last block has taken its share.
#include "escaped.cuh"

using namespace brigade;


__device__ __forceinline__ bool receives_of(const MessagesParams& p, uint32_t message) { return p.peer[message] >= 256; }

__device__ __forceinline__ uint32_t peer_of_message(const MessagesParams& p, uint32_t message) { return p.peer[message] % 256; }

__device__ __forceinline__ uint64_t pieces_of(const MessagesParams& p, uint32_t message) {
  return p.bytes[message] == 0 ? 1 : (p.bytes[message] + p.piece_bytes - 1) / p.piece_bytes;
}

__device__ __forceinline__ uint64_t* counter_of(const MessagesParams& p, const Group& g, uint32_t message) {
  return g.counter(p.counters + (receives_of(p, message) ? p.size : 0) + peer_of_message(p, message));
}

// Piece `n` between this rank and a peer, which is piece `i` of a message.
struct Piece {
  uint64_t n;
  uint64_t bytes;
  // Of the message, in this rank's memory.
  uint64_t local;
  // In the receiver's.
  uint64_t slot;
  uint32_t granules, packets;

  __device__ __forceinline__ Piece(const MessagesParams& p, uint32_t message, uint64_t before, uint64_t i) : n(before + i) {
    const uint64_t start = i * p.piece_bytes, left = p.bytes[message] - start;
    bytes = left < p.piece_bytes ? left : p.piece_bytes;
    local = p.local[message] + start;
    const uint32_t peer = peer_of_message(p, message);
    const uint32_t sender = receives_of(p, message) ? peer : p.rank, receiver = receives_of(p, message) ? p.rank : peer;
    slot = p.base + receiver * p.stride + p.slots + half() * p.half_bytes + sender * p.slot_bytes;
    granules = uint32_t((bytes + 15) / 16);
    packets = (granules + Each - 1) / Each;
  }

  __device__ __forceinline__ uint32_t half() const { return uint32_t(n & 1); }
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
__device__ __noinline__ void send_any(const MessagesParams& p, uint32_t message, uint64_t before, uint64_t i, uint32_t j) {
  const Piece piece(p, message, before, i);
  uint4 v[Each] = {};
#pragma unroll
  for (uint32_t k = 0; k < Each; ++k) {
    const uint32_t g = piece.granule(j, k);
    if (g < piece.granules) v[k] = any_input(piece.local + 16ull * g, piece.left(g));
  }
  piece.send(j, v);
}

__device__ __noinline__ void write_any(const MessagesParams& p, uint32_t message, uint64_t before, uint64_t i, uint32_t j) {
  const Piece piece(p, message, before, i);
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
  return p.ring + (uint32_t(n & 1) * p.size + sender) * p.pieces;
}

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
__device__ inline Waiting diagnose(const MessagesParams& p, const Group& g, uint32_t message, uint64_t n, bool far) {
  Waiting w = arrival_of(p, g, message, n);
  w.uncounted = true;
  w.looks = (far ? long_glance : glance) - 1;
  look(g, w);
  if (w.end == End::there) {
    const bool late = globaltimer_ns() - g.started_ns() >= most_ns(g);
    w.end = is_stopped(g) ? End::stopped : late ? End::timeout : End::going_on;
  }
  return w;
}

// Now and then, while a piece is waited for. The host is far away.
__device__ __noinline__ bool is_hope(const MessagesParams& p, uint32_t message, uint64_t n, bool far) {
  return diagnose(p, group_of(p, p.call_signature), message, n, far).end == End::going_on;
}

// There is none: leaves a record, if nobody else has, and stops the group.
__device__ __noinline__ void give_up_on(const MessagesParams& p, uint32_t message, uint64_t n) {
  const Group g = group_of(p, p.call_signature);
  give_up(g, diagnose(p, g, message, n, true));
}

__device__ __noinline__ void count_wait(const MessagesParams& p, uint32_t peer, uint64_t since_ns) {
  unsigned long long* state = reinterpret_cast<unsigned long long*>(p.state);
  atomicAdd(state + STATE_WAITS + peer, 1ull);
  atomicAdd(state + STATE_WAITED + peer, (unsigned long long)(globaltimer_ns() - since_ns));
}

// Looks until `look` is true, as one thread. False if the group was stopped, or is now.
template <typename Look>
__device__ __forceinline__ bool await(const MessagesParams& p, uint32_t message, uint64_t n, Look look) {
  constexpr uint32_t looks_between = 256;
  bool hopeless = false;
  uint64_t since_ns = 0;
  for (uint32_t spins = 1; !look(); ++spins) {
    if (spins == 1 && threadIdx.x == 0 && blockIdx.x % p.blocks == 0) since_ns = globaltimer_ns();
    if (hopeless) {
      give_up_on(p, message, n);
      return false;
    }
    // What a rank says last is that it is gone: all that it sent would be there. So there is one more look.
    if (spins % looks_between == 0) hopeless = !is_hope(p, message, n, spins / looks_between % 16 == 0);
  }
  if (since_ns != 0) count_wait(p, peer_of_message(p, message), since_ns);
  return true;
}

// This block's share of a piece. False if the group was stopped.
__device__ __forceinline__ bool send(const MessagesParams& p, const Group& g, uint32_t message, uint64_t before, uint64_t i, bool& failed) {
  const Piece piece(p, message, before, i);
  const uint32_t block = blockIdx.x % p.blocks, peer = peer_of_message(p, message);
  if (piece.n >= 2 && !wait_for(p, g, STEP_CREDIT, piece.epoch(), credit_of(p, g, message, piece.n - 2), failed)) return false;
  if (block == 0 && threadIdx.x == 0) {
    const uint32_t word = flag_word(p, piece.n, p.rank);
    const bool tells = g.desk == 0 || consult(p, g.signature, step_bits(STEP_POST, peer, word), piece.epoch(), blockIdx.x) == Answer::go_on;
    if (tells) store_relaxed_sys(g.word(peer, word), flag_of(p, g, message, piece.epoch()));
  }
  for (uint32_t j = block * blockDim.x + threadIdx.x; j < piece.packets; j += p.blocks * blockDim.x) {
    if (!piece.is_wide(j)) {
      send_any(p, message, before, i, j);
      continue;
    }
    uint4 v[Each];
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) v[k] = reinterpret_cast<const uint4*>(piece.local)[piece.granule(j, k)];
    piece.send(j, v);
  }
  return true;
}

__device__ __forceinline__ bool receive(const MessagesParams& p, const Group& g, uint32_t message, uint64_t before, uint64_t i, bool& failed) {
  const Piece piece(p, message, before, i);
  const uint32_t block = blockIdx.x % p.blocks, peer = peer_of_message(p, message);
  // The hook hears of it before anything is taken.
  if (g.desk != 0 && !wait_for(p, g, STEP_WAIT, piece.epoch(), arrival_of(p, g, message, piece.n), failed)) return false;
  const uint64_t* flag = g.word(p.rank, flag_word(p, piece.n, peer));
  const uint64_t expected = flag_of(p, g, message, piece.epoch());
  // One thread looks for the flag.
  bool herald = threadIdx.x == 0, there = true;
  for (uint32_t j = block * blockDim.x + threadIdx.x; j < piece.packets && there; j += p.blocks * blockDim.x) {
    uint4 v[Each];
    uint32_t escaped;
    there = await(p, message, piece.n, [&] { return piece.look(j, v, escaped) & (!herald || load_relaxed_sys(flag) == expected); });
    herald = false;
    if (!there) break;
    if (piece.is_wide(j)) {
#pragma unroll
      for (uint32_t k = 0; k < Each; ++k) {
        reinterpret_cast<uint4*>(piece.local)[piece.granule(j, k)] = restored(v[k], Each * k, escaped);
      }
    } else {
      write_any(p, message, before, i, j);
    }
    piece.empty(j);
  }
  if (herald && there) there = await(p, message, piece.n, [&] { return load_relaxed_sys(flag) == expected; });
  if (!__syncthreads_and(there)) return false;
  if (threadIdx.x == 0) {
    __threadfence();
    // Behind the count, half a word for each half: no more than one piece of a half is read at a time.
    unsigned long long* readers = reinterpret_cast<unsigned long long*>(counter_of(p, g, message) + 1);
    const uint32_t shift = 32 * piece.half();
    const uint32_t done = uint32_t(atomicAdd(readers, 1ull << shift) >> shift);
    if (done + 1 == p.blocks) {
      atomicAdd(readers, 0ull - ((unsigned long long)p.blocks << shift));
      __threadfence_system();
      post(p, g, piece.epoch(), peer, credit_word(p, piece.n, p.rank), flag_of(p, g, message, piece.epoch()));
    }
  }
  return true;
}

// Whether this block is the last to leave.
__device__ __forceinline__ bool is_last(const Group& g) {
  __threadfence();
  unsigned int* out = reinterpret_cast<unsigned int*>(g.state + STATE_OUT);
  return atomicInc(out, gridDim.x - 1) == gridDim.x - 1;
}

// Counts the messages, and the call if it is nothing else. False if the group was stopped, so that what came may not be whole.
__device__ __forceinline__ bool count(const MessagesParams& p, const Group& g) {
  for (uint32_t m = 0; m < p.count; ++m) *counter_of(p, g, m) += pieces_of(p, m);
  if (p.alone == 0) return true;
  if (is_stopped(g)) {
    say_stopped(g.report, g.generation());
    return false;
  }
  g.state[STATE_CALLS] += 1;
  g.state[STATE_MOVED] += p.moved_bytes;
  return true;
}

// Two blocks find room on a multiprocessor, so that the groups of many ranks do.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_messages(const __grid_constant__ MessagesParams p) {
  wait_for_previous_kernel();
  __shared__ bool failed, poisons;
  const uint32_t message = blockIdx.x / p.blocks;
  const Group g = group_of(p, p.call_signature);
  const uint64_t before = *counter_of(p, g, message), pieces = pieces_of(p, message);
  if (threadIdx.x == 0) {
    // Each block says so: the last, but a little later than the first.
    if (p.alone != 0) g.state[STATE_STARTED] = globaltimer_ns();
    failed = is_stopped(g);
    if (failed) say_stopped(g.report, g.generation());
  }
  __syncthreads();
  bool going_on = !failed;
  for (uint64_t i = 0; i < pieces && going_on; ++i) {
    going_on = receives_of(p, message) ? receive(p, g, message, before, i, failed) : send(p, g, message, before, i, failed);
  }
  // No guard: nothing is written behind it.
  if (going_on && !receives_of(p, message) && p.confirmed != 0) {
    wait_for(p, g, STEP_MEET, 0, credit_of(p, g, message, before + pieces - 1), failed);
  }
  // The last block to leave advances the counters, which the others have read by then.
  __syncthreads();
  if (threadIdx.x == 0) poisons = is_last(g) && !count(p, g);
  __syncthreads();
  if (!poisons) return;
  for (uint32_t m = 0; m < p.count; ++m) {
    if (receives_of(p, m)) poison(p.local[m], p.bytes[m], p.poison, threadIdx.x, blockDim.x);
  }
}
