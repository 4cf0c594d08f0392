// CUDA's arithmetic, conversion and bit intrinsics, and the half and bf16 functions that NVIDIA's headers keep for
// device code. Approximate instructions are computed exactly rounded here. Included by cuda_host.hpp.
#pragma once

#define CUDA_HOST_MIN_MAX(T)                             \
  inline T min(T a, T b) { return b < a ? b : a; }       \
  inline T max(T a, T b) { return a < b ? b : a; }
CUDA_HOST_MIN_MAX(int)
CUDA_HOST_MIN_MAX(unsigned)
CUDA_HOST_MIN_MAX(long)
CUDA_HOST_MIN_MAX(unsigned long)
CUDA_HOST_MIN_MAX(long long)
CUDA_HOST_MIN_MAX(unsigned long long)
#undef CUDA_HOST_MIN_MAX
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

// Inlined, so that a fault is told with the line of the call.
#define CUDA_HOST_INLINE __attribute__((always_inline)) inline
template <class T>
CUDA_HOST_INLINE T __ldg(const T* p) { return *p; }
template <class T>
CUDA_HOST_INLINE T __ldcs(const T* p) { return *p; }
template <class T>
CUDA_HOST_INLINE T __ldcg(const T* p) { return *p; }
template <class T>
CUDA_HOST_INLINE T __ldca(const T* p) { return *p; }
template <class T>
CUDA_HOST_INLINE void __stcs(T* p, T value) { *p = value; }
template <class T>
CUDA_HOST_INLINE void __stcg(T* p, T value) { *p = value; }
template <class T>
CUDA_HOST_INLINE void __stwt(T* p, T value) { *p = value; }
#undef CUDA_HOST_INLINE

inline float rsqrtf(float x) { return float(1 / std::sqrt(double(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float exp10f(float x) { return float(std::pow(10.0, double(x))); }
inline float __saturatef(float x) { return x >= 1 ? 1.0f : x > 0 ? x : 0.0f; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

inline int __float_as_int(float x) { return int(cuda_host::to_bits(x)); }
inline unsigned __float_as_uint(float x) { return unsigned(cuda_host::to_bits(x)); }
inline float __int_as_float(int x) { return cuda_host::from_bits<float>(unsigned(x)); }
inline float __uint_as_float(unsigned x) { return cuda_host::from_bits<float>(x); }
inline long long __double_as_longlong(double x) { return (long long)cuda_host::to_bits(x); }
inline double __longlong_as_double(long long x) { return cuda_host::from_bits<double>(uint64_t(x)); }

namespace cuda_host {

// cvt of PTX: saturates. NaN becomes 0, but the number of only the highest bit where either side has 64 bits.
template <class T, class From>
inline T to_integer(From from, double (*round)(double)) {
  const double x = round(double(from));
  if (x != x) return sizeof(T) == 8 || sizeof(From) == 8 ? T(1) << (8 * sizeof(T) - 1) : 0;
  if (x <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(x);
}

}  // namespace cuda_host

#define CUDA_HOST_TO_INTEGER(FROM, T, NAME)                                                            \
  inline T NAME##_rn(FROM x) { return cuda_host::to_integer<T>(x, nearbyint); }                        \
  inline T NAME##_rz(FROM x) { return cuda_host::to_integer<T>(x, trunc); }                            \
  inline T NAME##_rd(FROM x) { return cuda_host::to_integer<T>(x, floor); }                            \
  inline T NAME##_ru(FROM x) { return cuda_host::to_integer<T>(x, ceil); }
CUDA_HOST_TO_INTEGER(float, int, __float2int)
CUDA_HOST_TO_INTEGER(float, unsigned, __float2uint)
CUDA_HOST_TO_INTEGER(float, long long, __float2ll)
CUDA_HOST_TO_INTEGER(float, unsigned long long, __float2ull)
CUDA_HOST_TO_INTEGER(double, int, __double2int)
CUDA_HOST_TO_INTEGER(double, unsigned, __double2uint)
CUDA_HOST_TO_INTEGER(double, long long, __double2ll)
CUDA_HOST_TO_INTEGER(double, unsigned long long, __double2ull)
#undef CUDA_HOST_TO_INTEGER
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline double __int2double_rn(int x) { return double(x); }
inline double __uint2double_rn(unsigned x) { return double(x); }
inline double __ll2double_rn(long long x) { return double(x); }
inline double __ull2double_rn(unsigned long long x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15;
    unsigned byte = unsigned(bytes >> (8 * (s & 7))) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c = int(unsigned(c) + unsigned(int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i)));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += unsigned(uint8_t(a >> 8 * i)) * uint8_t(b >> 8 * i);
  return c;
}
inline long long clock64() { return 0; }
inline int clock() { return 0; }

namespace cuda_host {

// a * b + c for a final rounding to a narrower type: the product of two halves is exact in double, and an inexact sum is
// rounded to odd, so that rounding it again gives what a single rounding would.
inline double fma_to_odd(double a, double b, double c) {
  const double product = a * b;
  double sum = product + c;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  if (error != 0 && error == error && (to_bits(sum) & 1) == 0) sum = nextafter(sum, error > 0 ? INFINITY : -INFINITY);
  return sum;
}

}  // namespace cuda_host

inline __half __hfma(__half a, __half b, __half c) {
  return __double2half(cuda_host::fma_to_odd(__half2float(a), __half2float(b), __half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(cuda_host::fma_to_odd(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

// Functions that NVIDIA's headers define for device code only: computed in float (or better) and rounded once.
#define CUDA_HOST_HALF_MATH(T, PAIR, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                                         \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hexp, h2exp, exp, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                         \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hexp2, h2exp2, exp2, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                      \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hlog, h2log, log, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                         \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hlog2, h2log2, log2, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                      \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hsqrt, h2sqrt, sqrt, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                      \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hrsqrt, h2rsqrt, 1 / sqrt, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, hrcp, h2rcp, 1 / double, TO_FLOAT, FROM_DOUBLE, PAIR_OF)                  \
  CUDA_HOST_HALF_FUNCTION(T, PAIR, htanh, h2tanh, tanh, TO_FLOAT, FROM_DOUBLE, PAIR_OF)
#define CUDA_HOST_HALF_FUNCTION(T, PAIR, NAME, NAME2, FUNCTION, TO_FLOAT, FROM_DOUBLE, PAIR_OF)              \
  inline T NAME(T x) { return FROM_DOUBLE(FUNCTION(double(TO_FLOAT(x)))); }                                  \
  inline PAIR NAME2(PAIR x) { return PAIR_OF(NAME(x.x), NAME(x.y)); }
CUDA_HOST_HALF_MATH(__half, __half2, __half2float, __double2half, __halves2half2)
CUDA_HOST_HALF_MATH(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __double2bfloat16, __halves2bfloat162)
#undef CUDA_HOST_HALF_MATH
#undef CUDA_HOST_HALF_FUNCTION
inline int __half2int_rn(__half x) { return __float2int_rn(__half2float(x)); }
