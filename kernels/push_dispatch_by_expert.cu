// Rows to their experts as one kernel, of few tokens of a rank, a row for each expert (push_dispatch.cuh).
namespace brigade {
constexpr bool many = false, for_experts = true, in_place = false;
}
#include "push_dispatch.cuh"

extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)
    brigade_push_dispatch_by_expert(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
