// Rows to their experts as one kernel, which stay where they come (push_dispatch.cuh, places.cuh).
namespace brigade {
constexpr bool many = true, for_experts = false, in_place = true;
}
#include "push_dispatch.cuh"

extern "C" __global__ void __launch_bounds__(Widest)
    brigade_push_dispatch_in_place(const __grid_constant__ PushDispatchParams p) {
  push_dispatch(p);
}
