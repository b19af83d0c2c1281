// Numbers of one type become numbers of another, with the bits that brigade-host gives: to a narrower float rounded once, to
// nearest, ties to even; to an integer truncated and saturated, a NaN to 0.
#include "params.cuh"
#include "sync.cuh"
#include "types.cuh"

using namespace brigade;

// A number of any type: an integer as sign and magnitude, or a float.
struct Number {
  bool integer;
  bool negative;
  uint64_t magnitude;
  double value;
};

__device__ __forceinline__ Number of_signed(int64_t x) {
  return {true, x < 0, x < 0 ? 0 - uint64_t(x) : uint64_t(x), 0};
}

__device__ __forceinline__ Number of_unsigned(uint64_t x) { return {true, false, x, 0}; }

__device__ __forceinline__ Number of_float(double x) { return {false, false, 0, x}; }

template <typename T>
__device__ __forceinline__ T at(uint64_t array, uint64_t i) {
  return reinterpret_cast<const T*>(array)[i];
}

__device__ __forceinline__ Number load(uint32_t type, uint64_t from, uint64_t i) {
  switch (type) {
    case U8: return of_unsigned(at<uint8_t>(from, i));
    case I8: return of_signed(at<int8_t>(from, i));
    case U16: return of_unsigned(at<uint16_t>(from, i));
    case I16: return of_signed(at<int16_t>(from, i));
    case U32: return of_unsigned(at<uint32_t>(from, i));
    case I32: return of_signed(at<int32_t>(from, i));
    case U64: return of_unsigned(at<uint64_t>(from, i));
    case I64: return of_signed(at<int64_t>(from, i));
    case F64: return of_float(at<double>(from, i));
    default: return of_float(double(load_float(type, from, i)));
  }
}

// The nearest f32 with its last bit set where it is not the number itself: a second rounding then gives what one rounding of
// the number gives (Boldo and Melquiond: Emulation of a FMA and correctly rounded sums, 2008).
__device__ __forceinline__ float to_odd(double x) {
  const float near = __double2float_rz(x);
  return double(near) == x || isnan(x) ? near : __uint_as_float(__float_as_uint(near) | 1u);
}

// The same from an integer to f64.
__device__ __forceinline__ double to_odd(Number n) {
  double near = __ull2double_rz(n.magnitude);
  if (__double2ull_rz(near) != n.magnitude) near = __longlong_as_double(__double_as_longlong(near) | 1);
  return n.negative ? -near : near;
}

// Between `least` (a magnitude below 0) and `most`.
__device__ __forceinline__ uint64_t to_integer(Number n, uint64_t least, uint64_t most) {
  if (!n.integer) {
    if (isnan(n.value)) return 0;
    n.negative = n.value < 0;
    const double size = fabs(n.value);
    n.magnitude = size >= 18446744073709551616.0 ? ~0ull : __double2ull_rz(size);
  }
  if (n.negative) return 0 - (n.magnitude < least ? n.magnitude : least);
  return n.magnitude < most ? n.magnitude : most;
}

__device__ __forceinline__ double to_double(Number n) {
  if (!n.integer) return n.value;
  const double size = __ull2double_rn(n.magnitude);
  return n.negative ? -size : size;
}

template <typename T>
__device__ __forceinline__ void put(uint64_t array, uint64_t i, T x) {
  reinterpret_cast<T*>(array)[i] = x;
}

__device__ __forceinline__ void store(uint32_t type, uint64_t out, uint64_t i, Number n) {
  switch (type) {
    case U8: return put(out, i, uint8_t(to_integer(n, 0, 0xFF)));
    case I8: return put(out, i, uint8_t(to_integer(n, 0x80, 0x7F)));
    case U16: return put(out, i, uint16_t(to_integer(n, 0, 0xFFFF)));
    case I16: return put(out, i, uint16_t(to_integer(n, 0x8000, 0x7FFF)));
    case U32: return put(out, i, uint32_t(to_integer(n, 0, 0xFFFFFFFFull)));
    case I32: return put(out, i, uint32_t(to_integer(n, 0x80000000ull, 0x7FFFFFFFull)));
    case U64: return put(out, i, to_integer(n, 0, ~0ull));
    case I64: return put(out, i, to_integer(n, 1ull << 63, ~0ull >> 1));
    case F64: {
      const double x = to_double(n);
      return put(out, i, isnan(x) ? __longlong_as_double(0x7FF8000000000000ll) : x);
    }
    default: {
      const double x = n.integer ? to_odd(n) : n.value;
      return store_float(type, out, i, type == F32 ? __double2float_rn(x) : to_odd(x));
    }
  }
}

extern "C" __global__ void brigade_convert(const __grid_constant__ ConvertParams p) {
  wait_for_previous_kernel();
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.elements; i += threads) {
    store(p.out_type, p.out, i, load(p.from_type, p.from, i));
  }
}
