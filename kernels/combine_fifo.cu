// Rows back from their experts through queues. `list` says which rows go back to each rank; then, in one launch, each travels with its
// place among those from its sender, and is put there: as in the parts of halves, for the kernel that adds them up.
#include "back.cuh"
#include "fifo.cuh"
#include "params.cuh"
#include "slots.cuh"

using namespace brigade;

enum Back : uint32_t { row = 0, weights = 1, place = 2 };

// The rows for a rank: how many, and which.
__device__ __forceinline__ uint32_t* list_of(const CombineFifoParams& p, uint32_t rank) {
  return reinterpret_cast<uint32_t*>(p.list) + rank * (uint64_t(p.max_rows) + 1);
}

// A block for each rank, in the order of rows.
extern "C" __global__ void __launch_bounds__(1024) brigade_combine_fifo_list(const __grid_constant__ CombineFifoParams p) {
  wait_for_previous_kernel();
  if (is_stopped(group_of(p, p.signature))) return;
  uint32_t* list = list_of(p, blockIdx.x);
  uint32_t next = 0;
  for (uint32_t start = 0; start < p.capacity; start += blockDim.x) {
    const uint32_t at = start + threadIdx.x;
    bool mine = false;
    if (at < p.capacity) {
      const int4 source = reinterpret_cast<const int4*>(p.sources)[at];
      mine = source.x == int32_t(blockIdx.x) && goes_back(p, source);
    }
    uint32_t all;
    const uint32_t i = next + rank_among(mine, all);
    next += all;
    if (mine && i < p.max_rows) list[1 + i] = at;
  }
  if (threadIdx.x == 0) list[0] = min(next, p.max_rows);
}

// Two blocks find room on a multiprocessor, as with messages, whose places they take.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_combine_fifo_exchange(const __grid_constant__ CombineFifoParams p) {
  wait_for_previous_kernel();
  __shared__ bool failed;
  const Group g = group_of(p, p.signature);
  if (stops_block(g, failed)) return;
  const uint32_t thread = threadIdx.x % p.row_threads, group = threadIdx.x / p.row_threads;
  const uint32_t groups = blockDim.x / p.row_threads;
  const uint64_t row_bytes = row_bytes_back(p), weight_bytes = 4 * weights_back(p);
  const int4* sources = reinterpret_cast<const int4*>(p.sources);
  const uint32_t waiting = queue_blocks(p);
  if (blockIdx.x >= waiting) {
    const uint32_t* list = list_of(p, p.rank);
    const uint64_t part = p.parts + p.rank * p.parts_stride;
    const uint32_t step = (gridDim.x - waiting) * groups;
    for (uint32_t i = (blockIdx.x - waiting) * groups + group; i < list[0]; i += step) {
      const uint32_t at = list[1 + i], to = place_back(p, sources[at]);
      if (to >= p.max_rows) continue;
      write_back(p, at, sources[at], part + p.came_rows + to * row_bytes, part + p.came_weights + to * weight_bytes, thread);
    }
    return;
  }
  const QueueEnd end = end_of_block(p);
  if (end.receives) {
    const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.sent_offsets) + end.peer;
    // By expert there may be several rows for one that was sent.
    const uint32_t expected = p.sum == by_experts ? unknown_rows : offsets[1] - offsets[0];
    const uint64_t part = p.parts + end.peer * p.parts_stride;
    receive_rows(p, g, end, expected, failed, [&](uint64_t entry, uint32_t, Run run) {
      for (uint32_t i = group; i < run.count; i += groups) {
        const uint32_t to = reinterpret_cast<const uint32_t*>(entry + p.section[place])[i];
        if (to >= p.max_rows) continue;
        copy_bytes(part + p.came_rows + to * row_bytes, entry + p.section[row] + i * row_bytes, row_bytes, thread, p.row_threads);
        copy_bytes(part + p.came_weights + to * weight_bytes, entry + p.section[weights] + i * weight_bytes, weight_bytes, thread,
                   p.row_threads);
      }
    });
  } else {
    const uint32_t* list = list_of(p, end.peer);
    send_rows(p, g, end, list[0], row_bytes + weight_bytes + 4, failed, [&](uint64_t entry, Run run) {
      for (uint32_t i = group; i < run.count; i += groups) {
        const uint32_t at = list[1 + run.first + i];
        write_back(p, at, sources[at], entry + p.section[row] + i * row_bytes, entry + p.section[weights] + i * weight_bytes, thread);
        if (thread == 0) reinterpret_cast<uint32_t*>(entry + p.section[place])[i] = place_back(p, sources[at]);
      }
    });
  }
}
