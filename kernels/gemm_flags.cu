// A product whose tiles wait for their rows: out = act(rows weight^T + bias), rows in parts that arrive one by one. The thread that loads
// waits for the flag of a part before it touches the part's rows.
//
// Factors of 8 bits have scales, one for each row (or part) and one for each column (or for all), which the end multiplies by as `finish.cu`
// does. Sums of int8 are exact; those of fp8 are taken of 128 products at a time, and added up in f32, since tensor cores keep fewer bits.
#include "gemm_tiles.cuh"

using namespace brigade;

#ifdef BRIGADE_HAS_WGMMA

template <typename In, typename Out, uint32_t COLUMNS>
__device__ __forceinline__ void gemm_flags(const Parameters& p) {
  let_next_kernel_start();
  extern __shared__ uint8_t memory[];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = base + stages<COLUMNS> * stage_bytes<COLUMNS>, empty = full + 8 * stages<COLUMNS>;
  uint32_t* tiles = reinterpret_cast<uint32_t*>(memory + (empty + 8 * stages<COLUMNS> - shared_address(memory)));
  // Answers take about a microsecond. Whatever counted tiles before had ended when steps let this kernel begin.
  uint32_t first_tile = 0;
  if (threadIdx.x == 0) {
    first_tile = next_tile(p);
    map_is_wanted(p.part_word[0] == 0 ? p.own_map : p.rows_map);
    map_is_wanted(p.weight_map);
    for (uint32_t s = 0; s < stages<COLUMNS>; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2);
    }
    barriers_made();
  }
  __syncthreads();
  // What is above touches nothing else of an earlier kernel's.
  if (p.begins_early == 0) wait_for_previous_kernel();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) load<In, COLUMNS>(p, first_tile, base, full, empty, tiles, [](auto&&...) {});
  } else {
    more_registers<232>();
    multiply<In, COLUMNS>(p, base, full, empty, tiles, [&](const Tile& tile, uint32_t first_row, SumOf<In>(&sums)[COLUMNS / 2], Ring<COLUMNS>&) {
      write_tile<In, Out, COLUMNS>(p, tile, first_row, sums);
    });
  }
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
  BRIGADE_GEMM_FLAGS(T, T, TYPE, 176)    \
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
