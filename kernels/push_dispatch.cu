// Rows to their experts as one kernel, of few tokens of a rank, one source behind the other (push_dispatch.cuh).
namespace brigade {
constexpr bool many = false, for_experts = false;
}
#include "push_dispatch.cuh"

// As many blocks find room as those of all-reduces.
extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)
    brigade_push_dispatch(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
