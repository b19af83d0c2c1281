// The tensor cores and bulk copies of compute capability 9.0, as PTX's manual has them: one function for each
// instruction that kernels here use.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "barriers.cuh"
#include "registers.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BRIGADE_HAS_WGMMA 1

namespace brigade {

// Copies a box of a matrix to shared memory, and counts its bytes at the barrier. `map` says shape, box and swizzle.
__device__ __forceinline__ void load_box(uint32_t to, const void* map, uint32_t column, uint32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Fetches a map before the first copy by it does.
__device__ __forceinline__ void map_is_wanted(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What this thread has seen written, its bulk copies see too.
__device__ __forceinline__ void bulk_copies_follow() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A matrix in shared memory whose rows are 128 bytes of its inner dimension, swizzled over 8 rows.
__device__ __forceinline__ uint64_t inner_major(uint32_t at) {
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(8 * 128 >> 4) << 32 | uint64_t(1) << 62;
}

// Products of a warp group are started in order, committed in groups, and waited for.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Sums are not read before this: to the compiler, a wait says nothing about registers.
template <int N>
__device__ __forceinline__ void products_done(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int N>
__device__ __forceinline__ void products_done(int32_t (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

#define BRIGADE_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define BRIGADE_D32(i) BRIGADE_D8(i), BRIGADE_D8(i + 8), BRIGADE_D8(i + 16), BRIGADE_D8(i + 24)
#define BRIGADE_I8(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define BRIGADE_I32(i) BRIGADE_I8(i), BRIGADE_I8(i + 8), BRIGADE_I8(i + 16), BRIGADE_I8(i + 24)
#define BRIGADE_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define BRIGADE_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BRIGADE_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BRIGADE_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define BRIGADE_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define BRIGADE_R112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d[64, N] of a warp group = a[64, K] times b[N, K]^T, plus d if `adds`; K is 32 bytes. OPTIONS are factors of 1, and that neither is transposed,
// as far as a type has that.
#define BRIGADE_PRODUCT(SUM, TYPE, K, OPTIONS, N, REGISTERS, A, B, ADDS, ...)                                                   \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" ADDS ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N K "." SUM "." TYPE "." TYPE " {" REGISTERS "}, %" A ", %" B ", adds" OPTIONS ";\n}" \
               : __VA_ARGS__                                                                                                    \
               : "l"(a), "l"(b), "r"(int(adds)))
#define BRIGADE_PRODUCT16(TYPE, ...) BRIGADE_PRODUCT("f32", TYPE, "k16", ", 1, 1, 0, 0", __VA_ARGS__)

#define BRIGADE_PRODUCTS(NAME, TYPE)                                                                                  \
  __device__ __forceinline__ void product(NAME, float(&d)[16], uint64_t a, uint64_t b, bool adds) {                   \
    BRIGADE_PRODUCT16(TYPE, 32, BRIGADE_R16, "16", "17", "18", BRIGADE_D8(0), BRIGADE_D8(8));                           \
  }                                                                                                                   \
  __device__ __forceinline__ void product(NAME, float(&d)[32], uint64_t a, uint64_t b, bool adds) {                   \
    BRIGADE_PRODUCT16(TYPE, 64, BRIGADE_R0, "32", "33", "34", BRIGADE_D32(0));                                          \
  }                                                                                                                   \
  __device__ __forceinline__ void product(NAME, float(&d)[64], uint64_t a, uint64_t b, bool adds) {                   \
    BRIGADE_PRODUCT16(TYPE, 128, BRIGADE_R0 BRIGADE_R32, "64", "65", "66", BRIGADE_D32(0), BRIGADE_D32(32));            \
  }                                                                                                                   \
  __device__ __forceinline__ void product(NAME, float(&d)[96], uint64_t a, uint64_t b, bool adds) {                   \
    BRIGADE_PRODUCT16(TYPE, 192, BRIGADE_R0 BRIGADE_R32 BRIGADE_R64, "96", "97", "98", BRIGADE_D32(0), BRIGADE_D32(32), \
                    BRIGADE_D32(64));                                                                                 \
  }                                                                                                                   \
  __device__ __forceinline__ void product(NAME, float(&d)[112], uint64_t a, uint64_t b, bool adds) {                  \
    BRIGADE_PRODUCT16(TYPE, 224, BRIGADE_R0 BRIGADE_R32 BRIGADE_R64 BRIGADE_R96, "112", "113", "114", BRIGADE_D32(0),   \
                    BRIGADE_D32(32), BRIGADE_D32(64), BRIGADE_D8(96), BRIGADE_D8(104));                               \
  }                                                                                                                   \
  __device__ __forceinline__ void product(NAME, float(&d)[128], uint64_t a, uint64_t b, bool adds) {                  \
    BRIGADE_PRODUCT16(TYPE, 256, BRIGADE_R0 BRIGADE_R32 BRIGADE_R64 BRIGADE_R96 BRIGADE_R112, "128", "129", "130",      \
                    BRIGADE_D32(0), BRIGADE_D32(32), BRIGADE_D32(64), BRIGADE_D32(96));                               \
  }

BRIGADE_PRODUCTS(__half, "f16")
BRIGADE_PRODUCTS(__nv_bfloat16, "bf16")

// Sums of fp8 keep fewer bits on the way than f32 has: who wants those adds parts itself.
#define BRIGADE_PRODUCT_FP8(...) BRIGADE_PRODUCT("f32", "e4m3", "k32", ", 1, 1", __VA_ARGS__)
__device__ __forceinline__ void product(__nv_fp8_e4m3, float(&d)[64], uint64_t a, uint64_t b, bool adds) {
  BRIGADE_PRODUCT_FP8(128, BRIGADE_R0 BRIGADE_R32, "64", "65", "66", BRIGADE_D32(0), BRIGADE_D32(32));
}
__device__ __forceinline__ void product(__nv_fp8_e4m3, float(&d)[96], uint64_t a, uint64_t b, bool adds) {
  BRIGADE_PRODUCT_FP8(192, BRIGADE_R0 BRIGADE_R32 BRIGADE_R64, "96", "97", "98", BRIGADE_D32(0), BRIGADE_D32(32), BRIGADE_D32(64));
}

#define BRIGADE_PRODUCT_INT8(...) BRIGADE_PRODUCT("s32", "s8", "k32", "", __VA_ARGS__)
__device__ __forceinline__ void product(int8_t, int32_t(&d)[64], uint64_t a, uint64_t b, bool adds) {
  BRIGADE_PRODUCT_INT8(128, BRIGADE_R0 BRIGADE_R32, "64", "65", "66", BRIGADE_I32(0), BRIGADE_I32(32));
}
__device__ __forceinline__ void product(int8_t, int32_t(&d)[128], uint64_t a, uint64_t b, bool adds) {
  BRIGADE_PRODUCT_INT8(256, BRIGADE_R0 BRIGADE_R32 BRIGADE_R64 BRIGADE_R96 BRIGADE_R112, "128", "129", "130", BRIGADE_I32(0), BRIGADE_I32(32),
                       BRIGADE_I32(64), BRIGADE_I32(96));
}

}  // namespace brigade
#endif
