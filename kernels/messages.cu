// Messages, of which each piece is carried by all blocks (messages.cuh).
#include "messages.cuh"

extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2) brigade_messages(const __grid_constant__ MessagesParams p) { carry<1>(p); }
