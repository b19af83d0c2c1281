// Rows through queues in their receivers' memory, as brigade-sync's Fifo has them: the count of what was put stands at the receiver,
// that of what was taken at the sender, each on a line of its own, and each side keeps its own count in its own state. A block serves
// one end of one queue, and either sends or receives: with all of them resident, queues that are full in both directions keep
// nobody. A call ends with all of it taken, so that the next one may cut the memory into other entries.
//
// An entry begins with the number of all rows from its sender; behind it lie sections of as many rows as it holds. Entries go to the
// channels in turn, and every channel has one at least, so that the number arrives.
#pragma once
#include "copy.cuh"
#include "hook.cuh"

namespace brigade {

// Words of a line that a counter has for itself, and queues from one rank to another that there are counters for.
constexpr uint32_t line_words = FIFO_LINE_WORDS, most_channels = FIFO_CHANNELS;

// Whether the group is stopped already, as all threads of a block hear it. `failed` may be written again behind this.
__device__ __forceinline__ bool stops_block(const Group& g, bool& failed) {
  if (threadIdx.x == 0) failed = is_stopped(g);
  __syncthreads();
  const bool stopped = failed;
  __syncthreads();
  return stopped;
}

// Which end of which queue a block serves; none of the later blocks does.
struct QueueEnd {
  uint32_t peer;
  uint32_t channel;
  bool receives;
};

template <typename P>
__device__ __forceinline__ uint32_t queue_blocks(const P& p) {
  return 2 * (p.size - 1) * p.channels;
}

// Neighbours first, so that all channels of a pair come to their ends at about the same time.
template <typename P>
__device__ __forceinline__ QueueEnd end_of_block(const P& p) {
  const uint32_t b = blockIdx.x / 2, pairs = p.size - 1;
  const bool receives = blockIdx.x % 2 == 1;
  const uint32_t apart = 1 + b % pairs;
  // Who sends to the next rank receives from the one before.
  return {(receives ? p.rank + p.size - apart : p.rank + apart) % p.size, b / pairs, receives};
}

template <typename P>
__device__ __forceinline__ uint64_t entry_at(const P& p, uint32_t owner, uint32_t from, uint32_t channel, uint32_t n) {
  return p.base + owner * p.stride + p.queues + from * p.queue_bytes + (channel * p.depth + n % p.depth) * p.entry_bytes;
}

// Entries that so many rows take in a channel.
template <typename P>
__device__ __forceinline__ uint32_t entries_of(const P& p, uint32_t rows, uint32_t channel) {
  const uint32_t all = (rows + p.entry_rows - 1) / p.entry_rows;
  return all > channel ? (all - channel + p.channels - 1) / p.channels : 1;
}

// Rows of an entry.
struct Run {
  uint32_t first;
  uint32_t count;
};

template <typename P>
__device__ __forceinline__ Run rows_of_entry(const P& p, uint32_t rows, uint32_t channel, uint32_t n) {
  const uint64_t first = (uint64_t(n) * p.channels + channel) * p.entry_rows;
  return first < rows ? Run{uint32_t(first), min(p.entry_rows, uint32_t(rows - first))} : Run{rows, 0};
}

template <typename P>
__device__ __forceinline__ uint32_t count_word(const P& p, uint32_t channel, bool taken, uint32_t other) {
  return p.queue_words + ((2 * channel + taken) * p.size + other) * line_words;
}

// The own count of an end.
template <typename P>
__device__ __forceinline__ uint64_t* queue_counter(const P& p, const Group& g, const QueueEnd& end) {
  return g.counter(p.queue_counters + ((end.receives ? p.size : 0) + end.peer) * most_channels + end.channel);
}

// Sends `rows` rows of `bytes` bytes each, as a block: `write(entry, run)` writes some of them, by all threads.
template <typename P, typename Write>
__device__ __forceinline__ void send_rows(const P& p, const Group& g, const QueueEnd& end, uint32_t rows, uint64_t bytes,
                                          bool& failed, Write write) {
  uint64_t* counter = queue_counter(p, g, end);
  const uint64_t before = *counter;
  const uint32_t entries = entries_of(p, rows, end.channel), generation = g.generation();
  const uint32_t put = count_word(p, end.channel, false, p.rank), taken = count_word(p, end.channel, true, end.peer);
  uint64_t moved = 0;
  for (uint32_t i = 0; i < entries; ++i) {
    const uint64_t n = before + i;
    if (i >= p.depth) {
      const uint64_t credit = pack({generation, 0, uint32_t(n + 1 - p.depth)});
      const Waiting room = {taken, credit, Want::at_least, end.peer, end.channel};
      if (!wait_for(p, g, STEP_CREDIT, n + 1, room, failed)) return;
    }
    const uint64_t entry = entry_at(p, end.peer, p.rank, end.channel, uint32_t(n));
    const Run run = rows_of_entry(p, rows, end.channel, i);
    if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(entry) = rows;
    write(entry, run);
    moved += run.count * bytes;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      post(p, g, n + 1, end.peer, put, g.flag(n + 1));
    }
  }
  // No guard: nothing is written behind it.
  const Waiting drained = {taken, pack({generation, 0, uint32_t(before + entries)}), Want::at_least, end.peer, end.channel};
  if (!wait_for(p, g, STEP_MEET, 0, drained, failed)) return;
  if (threadIdx.x != 0) return;
  *counter = before + entries;
  if (moved > 0) atomicAdd(reinterpret_cast<unsigned long long*>(g.state) + STATE_MOVED, (unsigned long long)moved);
}

// Receives rows, as a block: `read(entry, rows, run)` takes some of them, by all threads. All of them are `expected`, where that is
// known: else `unknown_rows`.
constexpr uint32_t unknown_rows = 0xFFFFFFFFu;

template <typename P, typename Read>
__device__ __forceinline__ void receive_rows(const P& p, const Group& g, const QueueEnd& end, uint32_t expected, bool& failed,
                                             Read read) {
  uint64_t* counter = queue_counter(p, g, end);
  const uint64_t before = *counter;
  const uint32_t put = count_word(p, end.channel, false, end.peer), taken = count_word(p, end.channel, true, p.rank);
  uint32_t rows = 0, entries = 1;
  for (uint32_t i = 0; i < entries; ++i) {
    const uint64_t n = before + i;
    const Waiting arrival = {put, g.flag(n + 1), Want::since, end.peer, end.channel};
    if (!wait_for(p, g, STEP_WAIT, n + 1, arrival, failed)) return;
    const uint64_t entry = entry_at(p, p.rank, end.peer, end.channel, uint32_t(n));
    if (i == 0) {
      const uint64_t said = *reinterpret_cast<const uint64_t*>(entry);
      if (expected != unknown_rows && said != expected) {
        if (threadIdx.x != 0) return;
        Waiting w{};
        w.blamed = end.peer, w.slot = end.channel, w.blamed_expected = expected, w.seen = said, w.end = End::mismatch;
        return give_up(g, w);
      }
      rows = uint32_t(said);
      entries = entries_of(p, rows, end.channel);
    }
    read(entry, rows, rows_of_entry(p, rows, end.channel, i));
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      post(p, g, n + 1, end.peer, taken, g.flag(n + 1));
    }
  }
  if (threadIdx.x == 0) *counter = before + entries;
}

}  // namespace brigade
