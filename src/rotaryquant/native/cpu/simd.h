// Vectors of fp32 lanes for whatever instruction set this file is compiled for.
//
// The kernel sources are compiled once per instruction set, each time into its own namespace RQ_ISA. Everything
// here is force-inlined or has internal linkage: a shared symbol compiled with AVX-512 could otherwise be the copy
// that the linker keeps for older machines. For the same reason kernel sources use no templates of the standard
// library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(__GNUC__)
#error "the kernels need GCC or Clang (vector extensions)"
#endif

#define RQ_INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define RQ_UNROLL _Pragma("unroll")
#else
#define RQ_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define RQ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef RQ_SHUFFLE
#define RQ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

namespace rq {
namespace RQ_ISA {

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define RQ_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define RQ_LANES 8
#else
#define RQ_LANES 4
#endif

constexpr int VL = RQ_LANES;
#if RQ_LANES == 16 || defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32 of them
#else
constexpr bool kManyRegisters = false;
#endif
// Rows of a register block of matrix products: 16 accumulators where there are many registers, else 8.
constexpr int MR = kManyRegisters ? 8 : 4;

typedef float vf __attribute__((vector_size(4 * RQ_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * RQ_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * RQ_LANES)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.40282347e38f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

RQ_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
RQ_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
RQ_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

RQ_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
RQ_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
RQ_INLINE vi load_i32(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
RQ_INLINE vf splat(float x) { return x - (vf){}; }
RQ_INLINE vi splat_i32(int32_t x) { return x + (vi){}; }
RQ_INLINE vi as_i32(vf v) { return (vi)v; }
RQ_INLINE vf as_f32(vi v) { return (vf)v; }
RQ_INLINE vf to_f32(vi v) { return __builtin_convertvector(v, vf); }
RQ_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
// b where either is NaN. Compilers make two instructions of the comparison.
RQ_INLINE vf maximum(vf a, vf b) {
#if RQ_LANES == 16
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif RQ_LANES == 8
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}
RQ_INLINE vf absolute(vf v) { return as_f32(as_i32(v) & 0x7fffffff); }

RQ_INLINE vi lane_index() {
#if RQ_LANES == 16
  return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif RQ_LANES == 8
  return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
  return (vi){0, 1, 2, 3};
#endif
}

// Lane l of the result is lane l ^ STRIDE of v, STRIDE a power of two.
template <int STRIDE>
RQ_INLINE vf swap_lanes(vf v) {
#if RQ_LANES == 16
  if constexpr (STRIDE == 8) return RQ_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (STRIDE == 4) return RQ_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if constexpr (STRIDE == 2) return RQ_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  if constexpr (STRIDE == 1) return RQ_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif RQ_LANES == 8
  if constexpr (STRIDE == 4) return RQ_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  if constexpr (STRIDE == 2) return RQ_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  if constexpr (STRIDE == 1) return RQ_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  if constexpr (STRIDE == 2) return RQ_SHUFFLE(v, v, 2, 3, 0, 1);
  if constexpr (STRIDE == 1) return RQ_SHUFFLE(v, v, 1, 0, 3, 2);
#endif
  return v;
}

// Within every four lanes, all take lane J.
template <int J>
RQ_INLINE vf spread_in_four(vf v) {
#if RQ_LANES == 16
  return RQ_SHUFFLE(v, v, J, J, J, J, 4 + J, 4 + J, 4 + J, 4 + J, 8 + J, 8 + J, 8 + J, 8 + J, 12 + J, 12 + J, 12 + J,
                    12 + J);
#elif RQ_LANES == 8
  return RQ_SHUFFLE(v, v, J, J, J, J, 4 + J, 4 + J, 4 + J, 4 + J);
#else
  return RQ_SHUFFLE(v, v, J, J, J, J);
#endif
}

struct Add {
  static inline __attribute__((always_inline)) vf of(vf a, vf b) { return a + b; }
};
struct Most {
  static inline __attribute__((always_inline)) vf of(vf a, vf b) { return maximum(a, b); }
};

// One step of a transposing sum, or of another operation: halves of groups of 2 * HALF lanes are added, a's groups
// before b's.
template <int HALF, typename Op = Add>
RQ_INLINE vf fold(vf a, vf b) {
#if RQ_LANES == 16
  if constexpr (HALF == 8)
    return Op::of(RQ_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                  RQ_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  if constexpr (HALF == 4)
    return Op::of(RQ_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                  RQ_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  if constexpr (HALF == 2)
    return Op::of(RQ_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  RQ_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  return Op::of(RQ_SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
                RQ_SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
#elif RQ_LANES == 8
  if constexpr (HALF == 4)
    return Op::of(RQ_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11), RQ_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
  if constexpr (HALF == 2)
    return Op::of(RQ_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13), RQ_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
  return Op::of(RQ_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14), RQ_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
#else
  if constexpr (HALF == 2) return Op::of(RQ_SHUFFLE(a, b, 0, 1, 4, 5), RQ_SHUFFLE(a, b, 2, 3, 6, 7));
  return Op::of(RQ_SHUFFLE(a, b, 0, 2, 4, 6), RQ_SHUFFLE(a, b, 1, 3, 5, 7));
#endif
}

// Sums, or another operation, over the lanes of each of four vectors, in the first four lanes; the others repeat them.
template <typename Op>
RQ_INLINE vf over_lanes(const vf* v) {
#if RQ_LANES == 16
  const vf pairs = fold<4, Op>(fold<8, Op>(v[0], v[1]), fold<8, Op>(v[2], v[3])), halves = fold<2, Op>(pairs, pairs);
  const vf all = fold<1, Op>(halves, halves);
  return RQ_SHUFFLE(all, all, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
#elif RQ_LANES == 8
  const vf halves = fold<2, Op>(fold<4, Op>(v[0], v[1]), fold<4, Op>(v[2], v[3])), all = fold<1, Op>(halves, halves);
  return RQ_SHUFFLE(all, all, 0, 4, 1, 5, 0, 4, 1, 5);
#else
  return fold<1, Op>(fold<2, Op>(v[0], v[1]), fold<2, Op>(v[2], v[3]));
#endif
}

RQ_INLINE void store_four(float* p, vf v) { memcpy(p, &v, 4 * sizeof(float)); }

// Sums of VL vectors as the lanes of one: lane p is the sum of v[sum_source(p)].
constexpr int sum_source(int p) { return (p % 4) * (VL / 4) + p / 4; }

RQ_INLINE vf sums(vf* v) {
#if RQ_LANES == 16
  RQ_UNROLL for (int i = 0; i < 8; i++) v[i] = fold<8>(v[2 * i], v[2 * i + 1]);
  RQ_UNROLL for (int i = 0; i < 4; i++) v[i] = fold<4>(v[2 * i], v[2 * i + 1]);
#elif RQ_LANES == 8
  RQ_UNROLL for (int i = 0; i < 4; i++) v[i] = fold<4>(v[2 * i], v[2 * i + 1]);
#endif
  return fold<1>(fold<2>(v[0], v[1]), fold<2>(v[2], v[3]));
}

RQ_INLINE float sum(vf v) {
  if constexpr (VL >= 16) v += swap_lanes<8>(v);
  if constexpr (VL >= 8) v += swap_lanes<4>(v);
  v += swap_lanes<2>(v);
  v += swap_lanes<1>(v);
  return v[0];
}
RQ_INLINE float max_lane(vf v) {
  if constexpr (VL >= 16) v = maximum(swap_lanes<8>(v), v);
  if constexpr (VL >= 8) v = maximum(swap_lanes<4>(v), v);
  v = maximum(swap_lanes<2>(v), v);
  v = maximum(swap_lanes<1>(v), v);
  return v[0];
}

// The low byte of each lane.
RQ_INLINE void store_u8(uint8_t* p, vi v) {
#if RQ_LANES == 16
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < VL; i++) p[i] = (uint8_t)v[i];
#endif
}

RQ_INLINE vi load_u16(const uint16_t* p) {
#if RQ_LANES == 16
  return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif RQ_LANES == 8
  return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  return (vi){p[0], p[1], p[2], p[3]};
#endif
}

RQ_INLINE float bits_to_f32(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
RQ_INLINE uint32_t f32_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

RQ_INLINE float bf16_to_f32(uint16_t h) { return bits_to_f32((uint32_t)h << 16); }

RQ_INLINE uint16_t f32_to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits = f32_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

RQ_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return bits_to_f32(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // 2^112 moves the exponent bias from 15 to 127, subnormals included
  return bits_to_f32(f32_to_bits(bits_to_f32(rest << 13) * 0x1p112f) | sign);
}

RQ_INLINE uint16_t f32_to_f16(float x) {  // to nearest, ties to even
  uint32_t bits = f32_to_bits(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
  if (rest < 0x38800000u) {  // below 2^-14: adding 0.5 aligns the last bit kept, 2^-24, with the last of the sum
    return (uint16_t)(sign | (f32_to_bits(bits_to_f32(rest) + 0.5f) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1)) >> 13));
}

RQ_INLINE vf load_bf16(const uint16_t* p) { return as_f32(load_u16(p) << 16); }

RQ_INLINE vf load_f16(const uint16_t* p) {
#if RQ_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif RQ_LANES == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vf v;
  for (int i = 0; i < VL; i++) v[i] = f16_to_f32(p[i]);
  return v;
#endif
}

// A table of 2^BITS levels in registers, and the levels of lanes that each hold a code in their low BITS bits;
// whatever the lanes hold above those bits does not matter.
template <int BITS>
struct Table {
#if RQ_LANES == 16
  vf all;  // repeated up to 16 entries: the permutation reads four bits of each lane
#elif RQ_LANES == 8
  vf low, high;
#else
  float entries[16];
#endif
};

template <int BITS>
RQ_INLINE Table<BITS> make_table(const float* levels) {
  constexpr int count = 1 << BITS;
  float repeated[16];
  for (int i = 0; i < 16; i++) repeated[i] = levels[i % count];
  Table<BITS> table;
#if RQ_LANES == 16
  table.all = load(repeated);
#elif RQ_LANES == 8
  table.low = load(repeated);
  table.high = load(repeated + 8);
#else
  for (int i = 0; i < 16; i++) table.entries[i] = repeated[i];
#endif
  return table;
}

template <int BITS>
RQ_INLINE vf lookup(const Table<BITS>& table, vi codes) {
#if RQ_LANES == 16
  return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table.all);
#elif RQ_LANES == 8
  vf low = (vf)_mm256_permutevar8x32_ps((__m256)table.low, (__m256i)codes);
  if constexpr (BITS < 4) return low;
  vf high = (vf)_mm256_permutevar8x32_ps((__m256)table.high, (__m256i)codes);
  return (vf)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(codes << 28));
#elif defined(__aarch64__)
  uint8x16x4_t bytes;
  for (int i = 0; i < 4; i++) bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(table.entries + 4 * i));
  vi at = (codes & 15) * 0x04040404 + 0x03020100;
  return (vf)vqtbl4q_u8(bytes, (uint8x16_t)at);
#else
  vf v;
  for (int i = 0; i < VL; i++) v[i] = table.entries[codes[i] & 15];
  return v;
#endif
}

struct Exp {
  vf scale, minus_one;  // e^x = scale * (1 + minus_one)
};

// e^x split into a power of two and the rest, for -87.3 <= x <= 0.
RQ_INLINE Exp exp_parts(vf x) {
  vf shifted = x * 1.44269504f + kRounder;
  vi power = as_i32(shifted) - (int32_t)0x4b400000;
  vf n = shifted - kRounder;
  vf r = x - n * 0.693359375f;  // ln 2 in two parts; the product with the first is exact
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.0f / 5040.0f);  // Taylor, |r| <= ln(2)/2: the next term is below 6e-9
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  return {as_f32((power + 127) << 23), p * r * r + r};
}

// 2^x for x <= 0 as a polynomial of least relative error that is 1 at 0, times a power of two; exactly 0 far below,
// -infinity included. NaN stays NaN. ROUGH: of degree 3, else 5.
template <bool ROUGH>
RQ_INLINE vf exp2_parts(vf x) {
#if RQ_LANES == 16
  // On [0, 1): the power is the floor of x, which scalef takes itself.
  const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -infinity
  vf p = ROUGH ? splat(0.0770670399f) : splat(0.00186713005f) * r + 0.00901703071f;
  if constexpr (!ROUGH) p = p * r + 0.0557999127f;
  p = p * r + (ROUGH ? 0.227644995f : 0.240164444f);
  p = p * r + (ROUGH ? 0.695116758f : 0.693151295f);
  p = p * r + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const vf shifted = x + kRounder, r = x - (shifted - kRounder);  // on [-1/2, 1/2]
  vf p = ROUGH ? splat(0.0550089329f) : splat(0.00132647273f) * r + 0.00967151299f;
  if constexpr (!ROUGH) p = p * r + 0.0555073358f;
  p = p * r + (ROUGH ? 0.242210954f : 0.240222424f);
  p = p * r + (ROUGH ? 0.693282902f : 0.693147004f);
  p = p * r + 1.0f;
  const vi power = as_i32(shifted) - (int32_t)0x4b400000;
  return x < -126.0f ? (vf){} : p * as_f32((power + 127) << 23);
#endif
}

// To 3e-7.
RQ_INLINE vf exp2_nonpositive(vf x) { return exp2_parts<false>(x); }

// To 1e-4: for what is rounded to a byte or two afterwards.
RQ_INLINE vf exp2_roughly(vf x) { return exp2_parts<true>(x); }

// To the nearest integer, ties to even; for |x| < 2^22.
RQ_INLINE vi round_to_i32(vf x) {
#if RQ_LANES == 16
  return (vi)_mm512_cvtps_epi32((__m512)x);
#else
  return as_i32(x + kRounder) - (int32_t)0x4b400000;
#endif
}

RQ_INLINE int32_t sum_i32(vi v) {
  int32_t total = 0;
#if RQ_LANES == 16
  total = _mm512_reduce_add_epi32((__m512i)v);
#else
  for (int l = 0; l < VL; l++) total += v[l];
#endif
  return total;
}

// tanh by expm1(-2|x|): accurate to a few ulp near 0 and saturating without overflow.
RQ_INLINE vf tanh_saturating(vf x) {
  vf twice = absolute(x) * -2.0f;
  twice = twice < -80.0f ? splat(-80.0f) : twice;
  Exp e = exp_parts(twice);
  vf expm1 = e.scale * e.minus_one + (e.scale - 1.0f);
  vf y = -expm1 / (expm1 + 2.0f);
  return as_f32(as_i32(y) | (as_i32(x) & (int32_t)0x80000000));
}

}  // namespace RQ_ISA
}  // namespace rq
