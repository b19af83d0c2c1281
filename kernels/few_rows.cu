// Products of few rows: out = act(alpha x weight^T + beta c). Nearly all that there is to do is to read the weight. What a sum over ranks follows goes to all of
// them at once, as the sum's kernel would send it (push.cuh). With a gate, a block has both columns of which one is made.
//
// A block has its own columns of the result, that is, whole rows of the weight. Two warps load them through a ring in shared memory, which they
// fill before the kernel in front of this one has ended, where the weight does not come from it: so memory is busy while others communicate.
// Eight warps multiply: each has its part of every stage's inner dimension, and holds sums of all rows for as many columns as registers allow; with
// each pass over these, x is read once. In the end a column's sums are added up in the order of the warps, of 8 rows at a time. So bits of an element depend
// on its row and column alone, not on how many there are.
//
// Adapters of rows are taken along. Their first factors go through the ring as well, in the first pass, and of a cluster of blocks each has its slices of them. It gives its sums
// to all of them before the pass ends, and what they gave is added up in their order. So an element ends with its column of the second factor.
//
// To tensor cores the weight is the left factor, whose fragments have 16 rows, and few rows are the columns of the right one. Elements of the inner
// dimension may be multiplied in any order, if both factors agree: a lane takes 16 bytes of each, where a fragment would have four times four.
#include "activation.cuh"
#include "few_rows_adapters.cuh"
#include "registers.cuh"

using namespace brigade;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace {

// By a warp, its part of every stage's columns.
template <uint32_t ROWS, bool LOW>
__device__ __forceinline__ void load(const FewRowsParams& p, uint32_t which, Ring<ROWS> ring) {
  constexpr uint32_t slice = Form<ROWS>::slice, part = unit / loaders;
  const uint32_t lane = threadIdx.x % 32, line = which * part + lane;
  Walk<ROWS> at(p);
  bool waited = p.settled == 0;
  for (const uint32_t begin = at.first; !at.done();) {
    const uint32_t barrier = ring.full + 8 * ring.stage, bytes = 2 * min(slice, p.inner - at.slice * slice);
    const uint32_t before = min(at.end() - at.column, which * part), lines = min(at.end() - at.column - before, part);
    barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) barrier_expect(barrier, lines * bytes);
    __syncwarp();
    if (lane < lines) {
      const uint64_t from = p.weight + 2 * ((at.half * p.columns + at.column + line) * p.weight_stride + at.slice * slice);
      load_line(ring.at() + line * Form<ROWS>::line_bytes, from, bytes, barrier);
    }
    const uint32_t here = at.slice, pass = at.first;
    at.next(), ring.next();
    if constexpr (LOW) {
      const LowWalk low(at.slices);
      const bool all_columns = at.slice != here || at.first != pass;
      if (pass != begin || !all_columns || !low.has(low.behind(here))) continue;
      if (!waited) wait_for_previous_kernel();
      waited = true;
      load_low<ROWS>(p, low.behind(here), which, ring);
    }
  }
}

// In which buffer what is sent goes: found before the next kernel begins, which counts.
__shared__ uint32_t buffer;

// Two elements to all ranks, this one too, whose own part lies behind those of its peers.
template <typename T>
__device__ __forceinline__ void send(const FewRowsParams& p, uint32_t row, uint32_t column, float low, float high) {
  constexpr uint32_t type = std::is_same_v<T, __half> ? F16 : BF16;
  const uint32_t two = narrow(type, low, high), word = two == sentinel ? nan_word<type> : two;
  const uint64_t place = 2ull * p.rows * p.columns, at = p.base + p.slots + buffer * p.buffer_bytes + 2ull * (row * p.columns + column);
  for (uint32_t d = 0; d < p.size; ++d) {
    store_relaxed_sys(reinterpret_cast<uint32_t*>(at + peer_of(p, d) * p.stride + (p.size - 1 - d) * place), word);
  }
}

template <typename T, uint32_t ROWS, bool LOW>
__device__ __forceinline__ void multiply(const FewRowsParams& p, float* all, Ring<ROWS> ring, LowSums<ROWS>* exchange) {
  using F = Form<ROWS>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quarter = lane % 4;
  Walk<ROWS> at(p);
  const LowWalk low_at(at.slices);
  for (const uint32_t begin = at.first; !at.done(); at.next_pass()) {
    const uint32_t columns = at.end() - at.first, beside = (columns + unit - 1) / unit, units = at.halves * beside;
    float sums[F::units][F::groups][4] = {};
    Low<ROWS> low = {};
    Fragment<ROWS> x, next;
    x.read(p, 0);
    // Rows of a column that a thread ends. What it first needs of second factors it asks for while there is still something to multiply.
    constexpr uint32_t together = LOW ? 2 : 1;
    Second<T> second;
    if constexpr (LOW) fetch_second(p, at.first, at.end());
#pragma unroll 1
    for (uint32_t slice = 0; slice < at.slices; ++slice) {
      // Some stages are left: the sum's kernel has its place when words come, and does not ask for them long before.
      if (p.slots != 0 && threadIdx.x == 0 && at.end() == at.last && (slice + 2 == at.slices || at.slices == 1)) let_next_kernel_start();
      next.read(p, slice + 1);
      if constexpr (LOW) {
        const uint32_t row = threadIdx.x / columns * together;
        if (slice + 1 == at.slices && row < min(group, p.rows)) second.read(p, row, at.first + threadIdx.x % columns, 0);
      }
#pragma unroll
      for (uint32_t u = 0; u < F::units; ++u) {
        if (u >= units) break;
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        uint4 w[F::loads][2];
        const uint32_t from = ring.at() + line * F::line_bytes + 2 * (warp * F::own + 8 * quarter);
#pragma unroll
        for (uint32_t i = 0; i < F::loads; ++i) {
          w[i][0] = load_sixteen(from + 64 * i), w[i][1] = load_sixteen(from + 64 * i + unit / 2 * F::line_bytes);
        }
        uint32_t seen = 0;
#pragma unroll
        for (uint32_t i = 0; i < F::loads; ++i) seen ^= w[i][0].x ^ w[i][1].x;
        give_back(ring.empty + 8 * ring.stage, seen, p.zero);
        ring.next();
#pragma unroll
        for (uint32_t i = 0; i < F::loads; ++i) {
          // Beyond the inner dimension lies what was there before, which may be no number.
          if (Fragment<ROWS>::first_of(slice) + 32 * i >= p.inner) w[i][0] = w[i][1] = make_uint4(0, 0, 0, 0);
          const uint32_t first[4] = {w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y};
          const uint32_t second[4] = {w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w};
#pragma unroll
          for (uint32_t g = 0; g < F::groups; ++g) {
            brigade::multiply<T>(sums[u][g], first, x.of[i][g].x, x.of[i][g].y);
            brigade::multiply<T>(sums[u][g], second, x.of[i][g].z, x.of[i][g].w);
          }
        }
      }
      if constexpr (LOW) {
        const uint32_t behind = low_at.behind(slice);
        const bool has = at.first == begin && low_at.has(behind);
        if (behind != slice) x = next;
        if (has) multiply_low<T>(p, behind, x, ring, low);
        if (at.first == begin && low_at.ends_behind(slice)) give_low<ROWS>(all, low, *exchange);
      }
      x = next;
    }
    if constexpr (LOW) {
      if (at.first == begin) take_low<ROWS>(p, *exchange);
    }
#pragma unroll
    for (uint32_t g = 0; g < F::groups; ++g) {
      const uint32_t begin_row = group * g;
      if (begin_row >= p.rows) break;
      const uint32_t rows = min(group, p.rows - begin_row), ends = columns * ((rows + together - 1) / together);
      // Sums of the group before have been read.
      multipliers_meet();
#pragma unroll
      for (uint32_t u = 0; u < F::units; ++u) lay_down<ROWS>(all, u, sums[u][g]);
      multipliers_meet();
      // Of a column of unit `before` or a later one.
      const auto sum_of = [&](uint32_t row, uint32_t in, uint32_t before = 0) {
        return __fmul_rn(p.alpha, sum_of_warps<ROWS>(all, row - begin_row, before * unit + in));
      };
      if (p.slots != 0) {
        for (uint32_t i = 2 * threadIdx.x; i < columns * rows; i += 64 * multipliers) {
          const uint32_t row = begin_row + i / columns, in = i % columns;
          send<T>(p, row, at.first + in, sum_of(row, in), sum_of(row, in + 1));
        }
        continue;
      }
      for (uint32_t i = threadIdx.x; i < ends; i += 32 * multipliers) {
        const uint32_t first = begin_row + i / columns * together, in = i % columns, column = at.first + in;
        float added[together] = {};
        if constexpr (LOW) {
          if (g != 0 || i != threadIdx.x) second.read(p, first, column, 0);
          of_adapters<T>(p, exchange->given[0], first, column, second, added);
        }
#pragma unroll
        for (uint32_t r = 0; r < together; ++r) {
          const uint32_t row = first + r;
          if (row >= p.rows) break;
          float sum = sum_of(row, in);
          if (p.activation == GATED) {
            // Both are rounded, as where the gate is a kernel of its own.
            const float2 two = widen(p.out_type, narrow(p.out_type, sum, sum_of(row, in, beside)));
            store_float(p.out_type, p.out, uint64_t(row) * p.columns + column, gated(two.x, two.y));
            continue;
          }
          if (LOW && p.width[row] != 0) sum = __fadd_rn(sum, added[r]);
          if (p.bias != 0) sum = __fadd_rn(sum, __fmul_rn(p.beta, load_float(p.bias_type, p.bias, row * p.bias_stride + column)));
          store_float(p.out_type, p.out, uint64_t(row) * p.columns + column, activate(p.activation, sum));
        }
      }
    }
  }
}

template <typename T, uint32_t ROWS, bool LOW>
__device__ __forceinline__ void few_rows(const FewRowsParams& p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(8) uint64_t barriers[2 * Form<ROWS>::stages];
  const Ring<ROWS> ring(memory, barriers);
  LowSums<ROWS>* exchange = nullptr;
  if constexpr (LOW) {
    __shared__ LowSums<ROWS> of_cluster;
    exchange = &of_cluster;
  }
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Form<ROWS>::stages; ++i) {
      barrier_init(ring.full + 8 * i, loaders);
      barrier_init(ring.empty + 8 * i, multipliers);
    }
    if constexpr (LOW) barrier_init(shared_address(&exchange->barrier), 1);
    barriers_made();
    if constexpr (LOW) barrier_expect(shared_address(&exchange->barrier), sizeof(exchange->given));
  }
  if constexpr (LOW) cluster_meets();
  else __syncthreads();
  const uint32_t warp = threadIdx.x / 32;
  // Sums of 16 rows by both weight and first factors take more registers than a thread is launched with.
  constexpr bool is_large = LOW && ROWS == 16;
  if (warp >= multipliers) {
    if constexpr (is_large) fewer_registers<40>();
    if (warp >= multipliers + loaders) return;
    if (p.settled == 0) wait_for_previous_kernel();
    load<ROWS, LOW>(p, warp - multipliers, ring);
    return;
  }
  if constexpr (is_large) more_registers<232>();
  wait_for_previous_kernel();
  if (threadIdx.x == 0 && p.slots == 0) let_next_kernel_start();
  if (threadIdx.x == 0 && p.slots != 0) buffer = buffer_of(read_word(reinterpret_cast<const uint64_t*>(p.state) + STATE_USES), p.buffers);
  multiply<T, ROWS, LOW>(p, reinterpret_cast<float*>(memory + Form<ROWS>::stages * Form<ROWS>::stage_bytes), ring, exchange);
}

}  // namespace

#define BRIGADE_FEW_ROWS(p, T, ROWS, LOW) few_rows<T, ROWS, LOW>(p)
#else
// The host does not launch it here.
#define BRIGADE_FEW_ROWS(p, T, ROWS, LOW)
#endif

#define FEW(NAME, T, ROWS, LOW)                                                   \
  extern "C" __global__ void __launch_bounds__(FEW_ROWS_THREADS, 1)               \
      brigade_few_rows_##NAME##_##ROWS(const __grid_constant__ FewRowsParams p) { \
    BRIGADE_FEW_ROWS(p, T, ROWS, LOW);                                            \
  }

FEW(f16, __half, 8, false)
FEW(f16, __half, 16, false)
FEW(bf16, __nv_bfloat16, 8, false)
FEW(bf16, __nv_bfloat16, 16, false)
// In clusters of FEW_LOW_BLOCKS.
FEW(low_f16, __half, 8, true)
FEW(low_f16, __half, 16, true)
FEW(low_bf16, __nv_bfloat16, 8, true)
FEW(low_bf16, __nv_bfloat16, 16, true)
