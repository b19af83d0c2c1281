// Products of few rows: out = act(alpha x weight^T + beta c). Nearly all that there is to do is to read the weight. What a sum over ranks follows goes to all of
// them at once, as the sum's kernel would send it (push.cuh). With a gate, a block has both columns of which one is made.
//
// A block has its own columns of the result, that is, whole rows of the weight. Two warps load them through a ring in shared memory, which they
// fill before the kernel in front of this one has ended, where the weight does not come from it: so memory is busy while others communicate.
// Eight warps multiply: each has its part of every stage's inner dimension, and holds sums of all rows for as many columns as registers allow; with
// each pass over these, x is read once. In the end a column's sums are added up in the order of the warps. So bits of an element depend on its row and
// column alone, not on how many there are.
//
// To tensor cores the weight is the left factor, whose fragments have 16 rows, and few rows are the columns of the right one. Elements of the inner
// dimension may be multiplied in any order, if both factors agree: a lane takes 16 bytes of each, where a fragment would have four times four.
#include "activation.cuh"
#include "barriers.cuh"
#include "mma.cuh"
#include "sums.cuh"

using namespace brigade;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace {

constexpr uint32_t multipliers = 8, loaders = 2;
static_assert(FEW_ROWS_THREADS == 32 * (multipliers + loaders));

// Columns that tensor cores multiply together, and how many of the rows; a stage has so many columns.
constexpr uint32_t unit = 16, group = 8;

// Named barrier of the warps that multiply.
__device__ __forceinline__ void multipliers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * multipliers) : "memory"); }

template <uint32_t ROWS>
struct Form {
  static constexpr uint32_t groups = ROWS / group;
  // Elements of the inner dimension in a stage, of which each warp multiplies its own, and a lane 8 of every 32.
  static constexpr uint32_t slice = ROWS == 8 ? 1024 : 512, own = slice / multipliers, loads = own / 32;
  static constexpr uint32_t stages = ROWS == 8 ? 6 : 8;
  // Units of a pass, at most.
  static constexpr uint32_t units = ROWS == 8 ? 4 : 7;
  // From one column's elements to the next: two of them lie in all banks.
  static constexpr uint32_t line_bytes = 2 * slice + 64, stage_bytes = unit * line_bytes;
  // Floats that a warp gives for a unit, and for one of the rows in it.
  static constexpr uint32_t row_sums = unit + 4, sums = row_sums * ROWS;
  static constexpr uint32_t bytes = stages * stage_bytes + multipliers * units * sums * sizeof(float);
};
static_assert(Form<8>::bytes == FEW_ROWS_BYTES_8 && Form<16>::bytes == FEW_ROWS_BYTES_16);

// Stages of a block, in passes over some of its columns, which are as even as can be: slice by slice, and in each unit by unit; with a gate, first those of the
// gate and then those beside them.
template <uint32_t ROWS>
struct Walk {
  uint32_t first, last, pass, column, slice, slices, half = 0, halves;
  __device__ __forceinline__ explicit Walk(const FewRowsParams& p) {
    // What is sent is two columns at a time.
    const uint32_t grain = p.slots != 0 ? 2 : 1;
    first = uint64_t(p.columns / grain) * blockIdx.x / gridDim.x * grain, last = uint64_t(p.columns / grain) * (blockIdx.x + 1) / gridDim.x * grain;
    halves = p.activation == GATED ? 2 : 1;
    const uint32_t all = (last - first + unit - 1) / unit, most = Form<ROWS>::units / halves, passes = max(1u, (all + most - 1) / most);
    pass = (all + passes - 1) / passes * unit;
    column = first, slice = 0, slices = (p.inner + Form<ROWS>::slice - 1) / Form<ROWS>::slice;
  }
  __device__ __forceinline__ bool done() const { return first >= last; }
  __device__ __forceinline__ uint32_t end() const { return min(first + pass, last); }
  __device__ __forceinline__ void next_pass() { column = first += pass, slice = 0; }
  __device__ __forceinline__ void next() {
    if ((column += unit) < end()) return;
    column = first;
    if (++half < halves) return;
    half = 0;
    if (++slice == slices) next_pass();
  }
};

template <uint32_t ROWS>
struct Ring {
  uint32_t base, full, empty, stage = 0, phase = 0;
  __device__ __forceinline__ Ring(const void* memory, const uint64_t* barriers)
      : base(shared_address(memory)), full(shared_address(barriers)), empty(full + 8 * Form<ROWS>::stages) {}
  __device__ __forceinline__ uint32_t at() const { return base + stage * Form<ROWS>::stage_bytes; }
  __device__ __forceinline__ void next() {
    if (++stage == Form<ROWS>::stages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void load_line(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ uint4 load_sixteen(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// By a warp, its part of every stage's columns.
template <uint32_t ROWS>
__device__ __forceinline__ void load(const FewRowsParams& p, uint32_t which, Ring<ROWS> ring) {
  constexpr uint32_t slice = Form<ROWS>::slice, part = unit / loaders;
  const uint32_t lane = threadIdx.x % 32, line = which * part + lane;
  for (Walk<ROWS> at(p); !at.done(); at.next(), ring.next()) {
    const uint32_t barrier = ring.full + 8 * ring.stage, bytes = 2 * min(slice, p.inner - at.slice * slice);
    const uint32_t before = min(at.end() - at.column, which * part), lines = min(at.end() - at.column - before, part);
    barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) barrier_expect(barrier, lines * bytes);
    __syncwarp();
    if (lane < lines) {
      const uint64_t from = p.weight + 2 * ((at.half * p.columns + at.column + line) * p.weight_stride + at.slice * slice);
      load_line(ring.at() + line * Form<ROWS>::line_bytes, from, bytes, barrier);
    }
  }
}

// This lane's elements of a slice, of one of the rows in each group.
template <uint32_t ROWS>
struct Fragment {
  uint4 of[Form<ROWS>::loads][Form<ROWS>::groups];
  __device__ __forceinline__ void read(const FewRowsParams& p, uint32_t slice) {
#pragma unroll
    for (uint32_t i = 0; i < Form<ROWS>::loads; ++i) {
#pragma unroll
      for (uint32_t g = 0; g < Form<ROWS>::groups; ++g) {
        const uint32_t at = first_of(slice) + 32 * i, row = group * g + threadIdx.x % 32 / 4;
        of[i][g] = make_uint4(0, 0, 0, 0);
        if (at < p.inner && row < p.rows) of[i][g] = *reinterpret_cast<const uint4*>(p.x + 2 * (row * p.x_stride + at));
      }
    }
  }
  static __device__ __forceinline__ uint32_t first_of(uint32_t slice) {
    return slice * Form<ROWS>::slice + threadIdx.x / 32 * Form<ROWS>::own + threadIdx.x % 4 * 8;
  }
};

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

template <typename T, uint32_t ROWS>
__device__ __forceinline__ void multiply(const FewRowsParams& p, float* all, Ring<ROWS> ring) {
  using F = Form<ROWS>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quarter = lane % 4;
  for (Walk<ROWS> at(p); !at.done(); at.next_pass()) {
    const uint32_t columns = at.end() - at.first, beside = (columns + unit - 1) / unit, units = at.halves * beside;
    float sums[F::units][F::groups][4] = {};
    Fragment<ROWS> x, next;
    x.read(p, 0);
#pragma unroll 1
    for (uint32_t slice = 0; slice < at.slices; ++slice) {
      // Some stages are left: the sum's kernel has its place when words come, and does not ask for them long before.
      if (p.slots != 0 && threadIdx.x == 0 && at.end() == at.last && (slice + 2 == at.slices || at.slices == 1)) let_next_kernel_start();
      next.read(p, slice + 1);
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
        reads_are_done();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + 8 * ring.stage);
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
      x = next;
    }
    // Sums of the pass before have been read.
    multipliers_meet();
#pragma unroll
    for (uint32_t u = 0; u < F::units; ++u) {
#pragma unroll
      for (uint32_t g = 0; g < F::groups; ++g) {
        float* to = all + (warp * F::units + u) * F::sums + (group * g + 2 * quarter) * F::row_sums + line;
        to[0] = sums[u][g][0], to[F::row_sums] = sums[u][g][1];
        to[unit / 2] = sums[u][g][2], to[F::row_sums + unit / 2] = sums[u][g][3];
      }
    }
    multipliers_meet();
    // Of a column of unit `before` or a later one.
    const auto sum_of = [&](uint32_t row, uint32_t in, uint32_t before = 0) {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t w = 0; w < multipliers; ++w) sum += all[(w * F::units + before + in / unit) * F::sums + row * F::row_sums + in % unit];
      return __fmul_rn(p.alpha, sum);
    };
    if (p.slots != 0) {
      for (uint32_t i = 2 * threadIdx.x; i < columns * p.rows; i += 64 * multipliers) {
        const uint32_t row = i / columns, in = i % columns;
        send<T>(p, row, at.first + in, sum_of(row, in), sum_of(row, in + 1));
      }
      continue;
    }
    for (uint32_t i = threadIdx.x; i < columns * p.rows; i += 32 * multipliers) {
      const uint32_t row = i / columns, in = i % columns, column = at.first + in;
      float sum = sum_of(row, in);
      if (p.activation == GATED) {
        // Both are rounded, as where the gate is a kernel of its own.
        const float2 two = widen(p.out_type, narrow(p.out_type, sum, sum_of(row, in, beside)));
        store_float(p.out_type, p.out, uint64_t(row) * p.columns + column, gated(two.x, two.y));
        continue;
      }
      if (p.bias != 0) sum = __fadd_rn(sum, __fmul_rn(p.beta, load_float(p.bias_type, p.bias, row * p.bias_stride + column)));
      store_float(p.out_type, p.out, uint64_t(row) * p.columns + column, activate(p.activation, sum));
    }
  }
}

template <typename T, uint32_t ROWS>
__device__ __forceinline__ void few_rows(const FewRowsParams& p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(8) uint64_t barriers[2 * Form<ROWS>::stages];
  const Ring<ROWS> ring(memory, barriers);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Form<ROWS>::stages; ++i) {
      barrier_init(ring.full + 8 * i, loaders);
      barrier_init(ring.empty + 8 * i, multipliers);
    }
    barriers_made();
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / 32;
  if (warp >= multipliers) {
    if (p.settled == 0) wait_for_previous_kernel();
    load<ROWS>(p, warp - multipliers, ring);
    return;
  }
  wait_for_previous_kernel();
  if (threadIdx.x == 0 && p.slots == 0) let_next_kernel_start();
  if (threadIdx.x == 0 && p.slots != 0) buffer = buffer_of(read_word(reinterpret_cast<const uint64_t*>(p.state) + STATE_USES), p.buffers);
  multiply<T, ROWS>(p, reinterpret_cast<float*>(memory + Form<ROWS>::stages * Form<ROWS>::stage_bytes), ring);
}

}  // namespace

#define BRIGADE_FEW_ROWS(p, T, ROWS) few_rows<T, ROWS>(p)
#else
// The host does not launch it here.
#define BRIGADE_FEW_ROWS(p, T, ROWS)
#endif

#define FEW(NAME, T, ROWS)                                        \
  extern "C" __global__ void __launch_bounds__(FEW_ROWS_THREADS, 1) \
      brigade_few_rows_##NAME##_##ROWS(const __grid_constant__ FewRowsParams p) { \
    BRIGADE_FEW_ROWS(p, T, ROWS);                                 \
  }

FEW(f16, __half, 8)
FEW(f16, __half, 16)
FEW(bf16, __nv_bfloat16, 8)
FEW(bf16, __nv_bfloat16, 16)
