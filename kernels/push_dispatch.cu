// Rows to their experts as one kernel, of few tokens of a rank, one source behind the other (push_dispatch.cuh).
namespace brigade {
constexpr bool many = false, for_experts = false, in_place = false;
}
#include "push_dispatch.cuh"

extern "C" __global__ void __launch_bounds__(Widest)
    brigade_push_dispatch(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
