// A product whose tiles wait for their rows: out = act(rows weight^T + bias), rows in parts that arrive one by one, each announced by a flag
// for which the loading thread of a block waits before it touches the part's rows. Of parts that are there nothing is waited for. Where there are
// few of them, it sends own rows to all others itself.
#include "gemm_send.cuh"

using namespace brigade;

#ifdef BRIGADE_HAS_WGMMA

struct Nothing {
  template <typename... Any>
  __device__ __forceinline__ void operator()(Any&&...) {}
  template <typename MayWait>
  __device__ __forceinline__ void look_ahead(const Tile&, MayWait&) {}
};

template <typename In, typename Out, uint32_t COLUMNS>
struct Ends {
  const Parameters& p;
  __device__ __forceinline__ void operator()(uint32_t, const Tile& tile, uint32_t first_row, SumOf<In> (&sums)[COLUMNS / 2], Ring<COLUMNS>&) {
    write_tile<In, Out, COLUMNS>(p, tile, first_row, sums);
  }
  __device__ __forceinline__ void done() {}
};

template <typename In, typename Out, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_flags(const Parameters& p) {
  const auto nothing = [](const Block&) { return Nothing{}; };
  const auto ends = [&p](const Block&) { return Ends<In, Out, COLUMNS>{p}; };
  run_tiles<In, COLUMNS>(p, nothing, ends, [&p](const Block&) { send_rows(p); });
}
#else
template <typename In, typename Out, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_flags(const Parameters&) {
  __trap();  // The host launches it on compute capability 9.0 alone.
}
#endif

#define BRIGADE_GEMM_FLAGS(IN, OUT, TYPES, COLUMNS)                                  \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)                      \
      brigade_gemm_flags_##TYPES##_##COLUMNS(const __grid_constant__ Parameters p) { \
    gemm_flags<IN, OUT, COLUMNS>(p);                                                 \
  }
#define BRIGADE_GEMM_FLAGS_OF(T, TYPE)   \
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 64)     \
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 128)    \
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 192)    \
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 224)    \
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 256)

BRIGADE_GEMM_FLAGS_OF(__half, f16)
BRIGADE_GEMM_FLAGS_OF(__nv_bfloat16, bf16)
BRIGADE_GEMM_FLAGS(int8_t, __half, int8_f16, 128)
BRIGADE_GEMM_FLAGS(int8_t, __half, int8_f16, 256)
BRIGADE_GEMM_FLAGS(int8_t, __nv_bfloat16, int8_bf16, 128)
BRIGADE_GEMM_FLAGS(int8_t, __nv_bfloat16, int8_bf16, 256)
BRIGADE_GEMM_FLAGS(__nv_fp8_e4m3, __half, fp8_f16, 128)
BRIGADE_GEMM_FLAGS(__nv_fp8_e4m3, __half, fp8_f16, 192)
BRIGADE_GEMM_FLAGS(__nv_fp8_e4m3, __nv_bfloat16, fp8_bf16, 128)
BRIGADE_GEMM_FLAGS(__nv_fp8_e4m3, __nv_bfloat16, fp8_bf16, 192)
