// The low-latency exchange, after DeepEP's low-latency dispatch and combine: every row has a place at its receiver that its sender
// knows, whatever else is sent. Each half of it is a launch (in_turn.cuh): what sends waits for the half's credits, and tells of each row
// behind it; what receives takes rows as they come, and may do so while its own rank still sends. Credits are given when the slot is used again.
//
// There: a rank first tells all others which of their experts its tokens name, and then writes the tokens into its part of the halves of all, each
// at the token's own place, with their weights if they have any; a row goes once to a rank. The receiver packs the rows of each of its
// experts, by source and token, and with weights it writes down which row each expert of a token got. Where a row lies among those of its source, the
// source has counted; behind how many of other sources, their numbers of rows say: so each row is packed by itself. Back: there is a place for each expert
// of each token at the rank that has the token; where a rank adds a token's rows before they go, their sum takes the place of the first. The
// sums are in f32, products rounded before they are added, never fused, so that the host's are the same bits.
//
// Words that tell, of each sender at each receiver (crates/plan/src/low_latency.rs): how many tokens it has; of each token, whether its row has
// come, and which of the receiver's experts its experts are, and their how manieth rows there it is; of each of the receiver's experts, how many rows it
// gets. On the way back, of each expert of each token whether its row has come.
#include "low_latency_back.cuh"
#include "low_latency_there.cuh"

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_send(const __grid_constant__ LowLatencyParams p) {
  count_none();
  const Tokens mine(p);
  __syncthreads();
  wait_for_previous_kernel();
  // What is read first is on its way before it is known whether it may go.
  OwnRows rows(p, mine);
  Entry looked;
  if (threadIdx.x / 32 == blockDim.x / 32 - 1) looked = Entry(p, mine.first, mine.end, 0);
  // How many tokens there are.
  const auto post = [&](const Said& said, uint32_t use) {
    const uint32_t to = threadIdx.x;
    if (to == p.rank || said.has_peer(p)) store_relaxed_sys(words_of(p, to, p.rank), told(use, p.tokens));
  };
  const bool well = enter_send(p, post, [&] { count_rows(p, mine.first, 0); });
  if (well) {
    tell_all(p, mine, looked);
    rows.send();
  }
  leave_send(p, well);
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_receive(const __grid_constant__ LowLatencyParams p) {
  bool well = enter_receive(p, [&] { return find_tokens(p); });
  if (well) well = tell_counts(p) && receive_rows(p);
  end_receive(p, !__syncthreads_or(!well));
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  RowsBack rows(p);
  const bool well = enter_send(p);
  if (well) rows.send();
  leave_send(p, well);
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_back_sums(const __grid_constant__ LowLatencyParams p) {
  wait_for_previous_kernel();
  SumsBack sums(p);
  const bool well = enter_send(p);
  if (well) sums.send();
  leave_send(p, well);
}

extern "C" __global__ void __launch_bounds__(most_threads, 2) brigade_low_latency_sum(const __grid_constant__ LowLatencyParams p) {
  bool well = enter_receive<quick_looks>(p);
  if (well) well = add_up_rows(p);
  end_receive(p, !__syncthreads_or(!well));
}
