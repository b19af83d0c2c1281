// Messages of which some have several pieces, by an even number of blocks each, where there is no hook (messages.cuh). The kernel of others is quicker for
// those, and so has a file of its own: what is called would share its registers with this one.
#include "messages.cuh"

extern "C" __global__ void __launch_bounds__(MESSAGE_THREADS, 2) brigade_messages_in_teams(const __grid_constant__ MessagesParams p) { carry<2>(p); }
