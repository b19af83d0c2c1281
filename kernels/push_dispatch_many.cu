// Rows to their experts as one kernel, of many tokens of a rank, one source behind the other (push_dispatch.cuh). It knows the ways of more tokens
// than the kernel of few, which is quicker for those.
namespace brigade {
constexpr bool many = true, for_experts = false;
}
#include "push_dispatch.cuh"

extern "C" __global__ void __launch_bounds__(ALL_REDUCE_THREADS, 2)
    brigade_push_dispatch_many(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
