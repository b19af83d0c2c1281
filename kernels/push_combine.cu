// Rows back by rank of few tokens, or of whatever kind, and rows back for experts.
#include "push_combine.cuh"

#define OF_TYPES(NAME, IN, OUT, MOST)                                           \
  PUSH_COMBINE(NAME##_##MOST, true, PushCombine<IN, OUT, MOST, true>)           \
  PUSH_COMBINE(experts_##NAME##_##MOST, false, PushCombine<IN, OUT, MOST, false>)

#define FOR_RANKS(NAME, IN, OUT) \
  OF_TYPES(NAME, IN, OUT, 2)     \
  OF_TYPES(NAME, IN, OUT, 4)     \
  OF_TYPES(NAME, IN, OUT, 8)

FOR_RANKS(f32_f32, F32, F32)
FOR_RANKS(f16_f16, F16, F16)
FOR_RANKS(bf16_bf16, BF16, BF16)
FOR_RANKS(f16_f32, F16, F32)
FOR_RANKS(bf16_f32, BF16, F32)
