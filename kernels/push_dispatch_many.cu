// Rows to their experts as one kernel, of many tokens of a rank, one source behind the other (push_dispatch.cuh). It knows the ways of more tokens
// than the kernel of few, which is quicker for those.
namespace brigade {
constexpr bool many = true, for_experts = false, in_place = false;
}
#include "push_dispatch.cuh"

extern "C" __global__ void __launch_bounds__(Widest)
    brigade_push_dispatch_many(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
