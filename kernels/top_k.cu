// A router's choice: a warp for each token, which has its scores in registers, takes the best of them k times, and lets lane i weigh the
// one that was taken i-th.
//
// Scores are compared as integers that order as they do: above 0x80000000 the positive ones, below the negative; 1 is a NaN, and 0 one
// that is not there, or was taken.
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

namespace {

enum Weighting : uint32_t { SOFTMAX_OF_CHOSEN, SOFTMAX, SIGMOID };

constexpr uint32_t all_lanes = 0xFFFFFFFFu;

__device__ __forceinline__ uint32_t key_of(float score) {
  if (isnan(score)) return 1;
  // -0 becomes +0.
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(uint32_t key) {
  if (key <= 1) return __uint_as_float(0x7FC00000u);
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (uint32_t other = 16; other > 0; other /= 2) x += __shfl_xor_sync(all_lanes, x, other);
  return x;
}

// One token of up to 32 * EACH experts.
template <uint32_t EACH>
__device__ __forceinline__ void choose(const TopKParams& p, uint64_t token) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t keys[EACH];
#pragma unroll
  for (uint32_t i = 0; i < EACH; ++i) {
    const uint32_t expert = i * 32 + lane;
    keys[i] = expert < p.experts ? key_of(load_float(p.scores_type, p.scores, token * p.experts + expert)) : 0;
  }
  uint32_t best = 0, chosen = 0, key = 0;
  float all = 0.0f;
  for (uint32_t turn = 0; turn < p.k; ++turn) {
    uint32_t mine = 0, where = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
      if (keys[i] > mine) mine = keys[i], where = i * 32 + lane;
    }
    const uint32_t most = __reduce_max_sync(all_lanes, mine);
    if (turn == 0) {
      best = most;
      if (p.weighting == SOFTMAX) {
#pragma unroll
        for (uint32_t i = 0; i < EACH; ++i) {
          if (keys[i] != 0) all += expf(score_of(keys[i]) - score_of(best));
        }
      }
    }
    const uint32_t expert = __reduce_min_sync(all_lanes, mine == most ? where : all_lanes);
    if (lane == turn) chosen = expert, key = most;
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
      if (i * 32 + lane == expert) keys[i] = 0;
    }
  }
  const bool has_one = lane < p.k;
  const float score = score_of(key);
  float part = 0.0f;
  if (has_one) part = p.weighting == SIGMOID ? 1.0f / (1.0f + expf(-score)) : expf(score - score_of(best));
  const float sum = sum_of_lanes(p.weighting == SOFTMAX ? all : part);
  if (!has_one) return;
  const uint64_t to = token * p.k + lane;
  reinterpret_cast<int32_t*>(p.ids)[to] = int32_t(chosen);
  reinterpret_cast<float*>(p.weights)[to] = canonical(p.factor * (part / sum));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) brigade_top_k(const __grid_constant__ TopKParams p) {
  wait_for_previous_kernel();
  const uint64_t warps = uint64_t(gridDim.x) * (blockDim.x / 32);
  for (uint64_t token = uint64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; token < p.tokens; token += warps) {
    if (p.experts <= 128) choose<4>(p, token);
    else if (p.experts <= 256) choose<8>(p, token);
    else choose<32>(p, token);
  }
}
