// Rows to their experts through queues, in one launch: what comes lies as in the parts of halves, for the kernels that go on with it.
#include "fifo.cuh"
#include "params.cuh"
#include "sections.cuh"

using namespace brigade;

// Two blocks find room on a multiprocessor, as with messages, whose places they take.
extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2)
    brigade_dispatch_fifo(const __grid_constant__ DispatchFifoParams p) {
  wait_for_previous_kernel();
  __shared__ bool failed;
  const Group g = group_of(p, p.signature);
  if (stops_block(g, failed)) return;
  const uint32_t thread = threadIdx.x % p.row_threads, group = threadIdx.x / p.row_threads;
  const uint32_t groups = blockDim.x / p.row_threads;
  const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.sent_offsets);
  const uint32_t* sent = reinterpret_cast<const uint32_t*>(p.sent);
  const uint32_t waiting = queue_blocks(p);
  if (blockIdx.x >= waiting) {
    const uint32_t first = offsets[p.rank], rows = offsets[p.rank + 1] - first;
    const uint64_t part = p.parts + p.rank * p.parts_stride;
    if (blockIdx.x == waiting && threadIdx.x == 0) *reinterpret_cast<uint64_t*>(part) = rows;
    const uint32_t step = (gridDim.x - waiting) * groups;
    for (uint32_t i = (blockIdx.x - waiting) * groups + group; i < rows; i += step) {
      write_sections(p, p.came, part, i, p.rank, sent[first + i], true, thread);
    }
    return;
  }
  const QueueEnd end = end_of_block(p);
  if (end.receives) {
    const uint64_t part = p.parts + end.peer * p.parts_stride;
    receive_rows(p, g, end, unknown_rows, failed, [&](uint64_t entry, uint32_t rows, Run run) {
      // Never more than a rank has tokens.
      const uint32_t count = run.first < p.max_tokens ? min(run.count, p.max_tokens - run.first) : 0;
      if (end.channel == 0 && threadIdx.x == 0) *reinterpret_cast<uint64_t*>(part) = min(rows, p.max_tokens);
      for (uint32_t s = 0; s < p.sections; ++s) {
        const uint64_t bytes = p.row_bytes[s];
        copy_bytes(part + p.came[s] + run.first * bytes, entry + p.section[s], count * bytes, threadIdx.x, blockDim.x);
      }
    });
  } else {
    const uint32_t first = offsets[end.peer];
    uint64_t all = 0;
    for (uint32_t s = 0; s < p.sections; ++s) all += p.row_bytes[s];
    send_rows(p, g, end, offsets[end.peer + 1] - first, all, failed, [&](uint64_t entry, Run run) {
      for (uint32_t i = group; i < run.count; i += groups) {
        write_sections(p, p.section, entry, i, end.peer, sent[first + run.first + i], true, thread);
      }
    });
  }
}
