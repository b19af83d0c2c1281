// What comes behind the sums of rows: a residual, RMSNorm (Zhang and Sennrich), and int8 or fp8 of what comes of it.
//
// sum = round(from) + residual, rounded; normed = sum / sqrt(mean(sum^2) + eps) * weight, each step one operation in f32.
// Squares are added granule by granule, and granules by a tree of adjacent pairs, so that the host's are the same bits.
#pragma once
#include "quantized.cuh"
#include "sums.cuh"

namespace brigade {

// Granules of a row that a thread has.
constexpr uint32_t most_granules = NORM_COLUMNS / 8 / NORM_THREADS;
// Leaves of the tree above a warp's.
constexpr uint32_t most_groups = most_granules * NORM_THREADS / 32;

// What the warps of a row tell each other: the sums of their squares, and their greatest magnitudes. A word of squares for each granule of a
// warp, one of magnitudes for each warp; of squares there are as many as are read at once, and those behind the last count as 0.
enum Meeting : uint32_t { SQUARES, MAGNITUDES, MEETINGS };
__shared__ __align__(16) uint32_t told[MEETINGS][most_groups];

// A row that a block has for itself.
struct Alone {
  static constexpr bool alone = true;
  static constexpr uint32_t rank = 0, size = 1;

  __device__ __forceinline__ uint32_t granule(uint32_t k) const { return k * blockDim.x + threadIdx.x; }

  // What a warp tells all blocks, by one of its lanes or several.
  __device__ __forceinline__ void tell(Meeting meeting, uint32_t at, uint32_t value) const {
    if (threadIdx.x % 32 == 0) told[meeting][at] = value;
  }

  // What all have told.
  __device__ __forceinline__ uint4 squares(uint32_t first, uint32_t count) const {
    __syncthreads();
    const uint4 v = *reinterpret_cast<const uint4*>(&told[SQUARES][first]);
    return make_uint4(first < count ? v.x : 0, first + 1 < count ? v.y : 0, first + 2 < count ? v.z : 0, first + 3 < count ? v.w : 0);
  }
  __device__ __forceinline__ uint32_t magnitude(uint32_t at, uint32_t count) const {
    __syncthreads();
    return at < count ? told[MAGNITUDES][at] : 0;
  }

  // Whether one has failed: so that all stop.
  __device__ __forceinline__ bool stops(bool failed) const { return __syncthreads_or(failed); }

  // How many words will be told in each meeting.
  __device__ __forceinline__ void begin(uint32_t, uint32_t) const {}
  __device__ __forceinline__ void begun() const {}
};

// Of four lanes, `d` apart.
__device__ __forceinline__ float tree_of_four(float x, int d) {
  const float one = __shfl_xor_sync(0xFFFFFFFFu, x, d), two = __shfl_xor_sync(0xFFFFFFFFu, x, 2 * d), three = __shfl_xor_sync(0xFFFFFFFFu, x, 3 * d);
  return __fadd_rn(__fadd_rn(x, one), __fadd_rn(two, three));
}

// Two levels of the tree for the time of one, since what is added does not depend on it.
__device__ __forceinline__ float whole_tree(float x) {
  x = tree_of_four(tree_of_four(x, 1), 4);
  return __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));
}

// The greatest magnitude of a granule, as the bits of an f32. A NaN is above all.
template <uint32_t In>
__device__ __forceinline__ uint32_t greatest_of(uint4 v) {
  if constexpr (In == F32) {
    constexpr uint32_t all = 0x7FFFFFFFu;
    return max(max(v.x & all, v.y & all), max(v.z & all, v.w & all));
  } else {
    using Two = std::conditional_t<In == BF16, __nv_bfloat162, __half2>;
    const auto of = [](uint32_t word) { return __habs2(*reinterpret_cast<const Two*>(&word)); };
    const Two most = __hmax2_nan(__hmax2_nan(of(v.x), of(v.y)), __hmax2_nan(of(v.z), of(v.w)));
    const float2 two = widen(In, *reinterpret_cast<const uint32_t*>(&most));
    return max(__float_as_uint(two.x), __float_as_uint(two.y));
  }
}

// Rows of a kernel whose parameters name them so. The plain ones are whole granules, all of them.
template <typename P, uint32_t In, bool Plain>
struct NormRows {
  using Sum = Result<In, In>;

  static __device__ __forceinline__ uint32_t left(const P& p, uint32_t g) {
    if constexpr (Plain) return lanes<In>;
    const uint32_t all = p.hidden - g * lanes<In>;
    return all < lanes<In> ? all : lanes<In>;
  }

  // Of any rows: granule `i` of all of them.
  static __device__ __noinline__ uint4 any_input(const P& p, uint64_t array, uint32_t i) {
    const uint32_t row = i / p.granules, g = i % p.granules, all = p.hidden - g * lanes<In>;
    return narrow_input<In>(array, uint64_t(row) * p.hidden + g * lanes<In>, all);
  }

  static __device__ __noinline__ void any_output(const P& p, uint64_t array, uint32_t i, uint4 v) {
    const uint32_t row = i / p.granules, g = i % p.granules, all = p.hidden - g * lanes<In>;
    Sum sum;
    sum.part[0] = v;
    narrow_output<In, In>(array, uint64_t(row) * p.hidden + g * lanes<In>, all, sum);
  }

  static __device__ __forceinline__ bool is_wide(const P& p) { return Plain || p.wide != 0; }

  // Where rows are whole granules, they lie in one piece.
  static __device__ __forceinline__ uint4 read(const P& p, uint64_t array, uint32_t i) {
    return Plain || p.wide != 0 ? read_granule(array + 16ull * i) : any_input(p, array, i);
  }

  static __device__ __forceinline__ void write(const P& p, uint64_t array, uint32_t i, uint4 v) {
    if (!is_wide(p)) return any_output(p, array, i, v);
    reinterpret_cast<uint4*>(array)[i] = v;
  }

  // This thread's granules of a row, from granule `first` of an array on.
  template <typename Part, uint32_t Each>
  static __device__ __forceinline__ void read_row(const P& p, Part part, uint64_t array, uint32_t first, uint4 (&to)[Each]) {
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = part.granule(k);
      to[k] = make_uint4(0, 0, 0, 0);
      if (g < p.granules) to[k] = read(p, array, first + g);
    }
  }

  // Adds the residual to granule `g` of a row, and gives the sum of its squares.
  static __device__ __forceinline__ float add(const P& p, uint32_t g, uint4& h, uint4 residual) {
    float x[lanes<In>], r[lanes<In>];
    values<In>(h, x);
    values<In>(residual, r);
#pragma unroll
    for (uint32_t i = 0; i < lanes<In>; ++i) x[i] = __fadd_rn(x[i], r[i]);
    Sum sum;
    sum.set(x);
    h = sum.part[0];
    values<In>(h, x);
    float q = __fmul_rn(x[0], x[0]);
    const uint32_t whole = left(p, g);
#pragma unroll
    for (uint32_t i = 1; i < lanes<In>; ++i) {
      if (i < whole) q = __fadd_rn(q, __fmul_rn(x[i], x[i]));
    }
    return q;
  }

  static __device__ __forceinline__ float inverse_of(const P& p, float squares) {
    // By a power of two a product is the quotient, to the bit.
    const float hidden = float(p.hidden), part = __uint_as_float((254u << 23) - __float_as_uint(hidden));
    const float mean = (p.hidden & (p.hidden - 1)) == 0 ? __fmul_rn(squares, part) : __fdiv_rn(squares, hidden);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, __uint_as_float(p.eps))));
  }

  static __device__ __forceinline__ uint4 normed(uint4 h, uint4 weight, float inverse) {
    float x[lanes<In>], w[lanes<In>];
    values<In>(h, x);
    values<In>(weight, w);
#pragma unroll
    for (uint32_t i = 0; i < lanes<In>; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), w[i]);
    Sum normed;
    normed.set(x);
    return normed.part[0];
  }

  // Gives a granule that is normed as it is wanted; of int8 its greatest magnitude alone, if it is greater.
  static __device__ __forceinline__ void give(const P& p, uint32_t row, uint32_t g, uint4 v, uint32_t& greatest) {
    if (__builtin_expect(p.form == NORM_PLAIN, 1)) {
      write(p, p.normed, row * p.granules + g, v);
    } else if (p.form == NORM_FP8) {
      quantize(p, row, g, v, Divisor(__uint_as_float(p.scale)), F8E4M3);
    } else if (is_wide(p)) {
      greatest = max(greatest, greatest_of<In>(v));
    } else {
      float x[lanes<In>];
      values<In>(v, x);
      const uint32_t whole = left(p, g);
      for (uint32_t i = 0; i < lanes<In>; ++i) {
        if (i < whole) greatest = max(greatest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
      }
    }
  }

  // What comes behind the sums `h` of a row, by all threads of the blocks that share it.
  template <typename Part, uint32_t Each>
  static __device__ __forceinline__ void norm(const P& p, Part part, uint32_t row, uint4 (&h)[Each],
                                              const uint4 (&residual)[Each], const uint4 (&weight)[Each]) {
    // All have read what was told of the row before: they met when they took this one.
    const uint32_t count = (p.granules + 31) / 32;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = part.granule(k);
      if (k * part.size * blockDim.x >= p.granules) break;
      float q = 0;
      if (g < p.granules) q = add(p, g, h[k], residual[k]);
      if (Part::alone && g < p.granules) write(p, p.sum, row * p.granules + g, h[k]);
      q = whole_tree(q);
      if (g / 32 < count) part.tell(SQUARES, g / 32, __float_as_uint(q));
    }
    // Half of a warp has them all, four in each lane.
    static_assert(most_groups == 64);
    const uint4 of = part.squares(threadIdx.x % 16 * 4, count);
    const float four = __fadd_rn(__fadd_rn(__uint_as_float(of.x), __uint_as_float(of.y)), __fadd_rn(__uint_as_float(of.z), __uint_as_float(of.w)));
    const float squares = tree_of_four(tree_of_four(four, 1), 4);
    const float inverse = inverse_of(p, squares);
    uint32_t greatest = 0;
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = part.granule(k);
      if (k * part.size * blockDim.x >= p.granules) break;
      if (g >= p.granules) continue;
      // Not before blocks have met, whom it would keep waiting.
      if (!Part::alone) write(p, p.sum, row * p.granules + g, h[k]);
      h[k] = normed(h[k], weight[k], inverse);
      give(p, row, g, h[k], greatest);
    }
    if (__builtin_expect(p.form == NORM_INT8, 0)) by_row(p, part, row, greatest, h);
  }

  // int8, by the greatest magnitude of the row.
  template <typename Part, uint32_t Each>
  static __device__ __forceinline__ void by_row(const P& p, Part part, uint32_t row, uint32_t greatest, const uint4 (&h)[Each]) {
    greatest = __reduce_max_sync(0xFFFFFFFFu, greatest);
    const uint32_t warps = blockDim.x / 32, lane = threadIdx.x % 32;
    part.tell(MAGNITUDES, part.rank * warps + threadIdx.x / 32, greatest);
    greatest = __reduce_max_sync(0xFFFFFFFFu, part.magnitude(lane, part.size * warps));
    const float scale = scale_of(greatest, I8);
    if (threadIdx.x == 0 && part.rank == 0) reinterpret_cast<float*>(p.scales)[row] = scale;
    const Divisor by(scale);
#pragma unroll
    for (uint32_t k = 0; k < Each; ++k) {
      const uint32_t g = part.granule(k);
      if (g < p.granules) quantize(p, row, g, h[k], by, I8);
    }
  }

  static __device__ __forceinline__ uint8_t* bytes_of(const P& p, uint32_t row, uint32_t g) {
    return reinterpret_cast<uint8_t*>(p.normed) + uint64_t(row) * p.hidden + g * lanes<In>;
  }

  // Of any rows, by any scale.
  static __device__ __noinline__ void any_quantize(const P& p, uint32_t row, uint32_t g, uint4 v, Divisor by, uint32_t type) {
    float x[lanes<In>];
    values<In>(v, x);
    const auto q = quantized(x, by, type);
    for (uint32_t i = 0; i < left(p, g); ++i) bytes_of(p, row, g)[i] = uint8_t(q.words[i / 4] >> (i % 4 * 8));
  }

  static __device__ __forceinline__ void quantize(const P& p, uint32_t row, uint32_t g, uint4 v, Divisor by, uint32_t type) {
    if (!is_wide(p) || by.inverse == 0.0f) return any_quantize(p, row, g, v, by, type);
    float x[lanes<In>];
    values<In>(v, x);
    const auto q = quantized(x, by, type);
    if constexpr (In == F32) {
      *reinterpret_cast<uint32_t*>(bytes_of(p, row, g)) = q.words[0];
    } else {
      *reinterpret_cast<uint2*>(bytes_of(p, row, g)) = make_uint2(q.words[0], q.words[1]);
    }
  }
};

}  // namespace brigade
