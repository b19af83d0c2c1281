// All-to-all of rows that lists name, in one launch: a block for each end of each queue, and behind those some that take own rows to
// where they go.
#include "fifo.cuh"
#include "params.cuh"

using namespace brigade;

// Some of the numbers of a list.
struct Numbers {
  const int32_t* at;
  uint32_t count;
  bool good;
};

// Those for a rank, or from it. Offsets that decrease or leave the list are no good: then the group is stopped.
__device__ inline Numbers numbers_of(const Group& g, uint64_t offsets, uint64_t list, uint32_t length, uint32_t rank) {
  const int32_t* at = reinterpret_cast<const int32_t*>(offsets) + rank;
  const uint32_t first = uint32_t(at[0]), last = uint32_t(at[1]);
  const bool good = first <= last && last <= length;
  if (!good && threadIdx.x == 0) {
    const bool begins = first > length;
    Waiting w{};
    w.blamed = g.rank, w.slot = rank + !begins, w.blamed_expected = length, w.seen = begins ? first : last, w.end = End::overflow;
    give_up(g, w);
  }
  return {reinterpret_cast<const int32_t*>(list) + (good ? first : 0), good ? last - first : 0, good};
}

// A row of zeros.
__device__ inline void clear_bytes(uint64_t to, uint64_t bytes, uint32_t thread, uint32_t threads) {
  for (uint64_t i = thread; i < bytes; i += threads) reinterpret_cast<uint8_t*>(to)[i] = 0;
}

// All sections of one row of `from`, to where a function says.
template <typename To>
__device__ __forceinline__ void give_row(const AllToAllRowsParams& p, int32_t row, uint32_t thread, To to) {
  for (uint32_t s = 0; s < p.payloads; ++s) {
    const uint64_t bytes = p.row_bytes[s];
    if (uint32_t(row) < p.from_rows) {
      copy_bytes(to(s), p.from[s] + uint32_t(row) * bytes, bytes, thread, p.row_threads);
    } else {
      clear_bytes(to(s), bytes, thread, p.row_threads);
    }
  }
}

// Two blocks find room on a multiprocessor, as with messages, whose places they take.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_all_to_all_rows(const __grid_constant__ AllToAllRowsParams p) {
  wait_for_previous_kernel();
  __shared__ bool failed;
  const Group g = group_of(p, p.signature);
  if (stops_block(g, failed)) return;
  const uint32_t thread = threadIdx.x % p.row_threads, group = threadIdx.x / p.row_threads;
  const uint32_t groups = blockDim.x / p.row_threads;
  const uint32_t waiting = queue_blocks(p);
  if (blockIdx.x >= waiting) {
    const Numbers sent = numbers_of(g, p.send_offsets, p.send_rows, p.send_length, p.rank);
    const Numbers came = numbers_of(g, p.recv_offsets, p.recv_rows, p.recv_length, p.rank);
    if (!sent.good || !came.good) return;
    if (sent.count != came.count) {
      if (threadIdx.x != 0) return;
      Waiting w{};
      w.blamed = p.rank, w.blamed_expected = came.count, w.seen = sent.count, w.end = End::mismatch;
      return give_up(g, w);
    }
    const uint32_t step = (gridDim.x - waiting) * groups;
    for (uint32_t i = (blockIdx.x - waiting) * groups + group; i < sent.count; i += step) {
      const uint32_t place = uint32_t(came.at[i]);
      if (place >= p.to_rows) continue;
      give_row(p, sent.at[i], thread, [&](uint32_t s) { return p.to[s] + place * p.row_bytes[s]; });
    }
    return;
  }
  const QueueEnd end = end_of_block(p);
  if (end.receives) {
    const Numbers came = numbers_of(g, p.recv_offsets, p.recv_rows, p.recv_length, end.peer);
    if (!came.good) return;
    receive_rows(p, g, end, came.count, failed, [&](uint64_t entry, uint32_t, Run run) {
      for (uint32_t i = group; i < run.count; i += groups) {
        const uint32_t place = uint32_t(came.at[run.first + i]);
        if (place >= p.to_rows) continue;
        for (uint32_t s = 0; s < p.payloads; ++s) {
          const uint64_t bytes = p.row_bytes[s];
          copy_bytes(p.to[s] + place * bytes, entry + p.section[s] + i * bytes, bytes, thread, p.row_threads);
        }
      }
    });
  } else {
    const Numbers sent = numbers_of(g, p.send_offsets, p.send_rows, p.send_length, end.peer);
    if (!sent.good) return;
    uint64_t all = 0;
    for (uint32_t s = 0; s < p.payloads; ++s) all += p.row_bytes[s];
    send_rows(p, g, end, sent.count, all, failed, [&](uint64_t entry, Run run) {
      for (uint32_t i = group; i < run.count; i += groups) {
        give_row(p, sent.at[run.first + i], thread, [&](uint32_t s) { return entry + p.section[s] + i * p.row_bytes[s]; });
      }
    });
  }
}
