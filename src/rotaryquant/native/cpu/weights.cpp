// Products with packed weights (formats/weight.py). With AVX-512 levels meet inputs rounded to 8 bits as they come out
// of a table, whole groups in integers; at 8 bits, whose own error is as small as that of such inputs, also what the
// rounding left. Elsewhere a few rows at a time become fp32, close by, and meet every token.
#include "codes.h"
#include "kernels.h"
#include "rotate.h"
#include "simd.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

constexpr int kTogether = 4;         // rows that share a load of the inputs
constexpr int64_t kColumns = 1024;   // of a row that are held at a time
constexpr int64_t kCircle = 16;      // columns of a trellis' circle

RQ_INLINE float scale_of(const WeightArgs& args, int64_t row, int64_t column) {
  const int64_t at = row * (args.width / args.group) + column / args.group;
  return args.scale_dtype == Dtype::f32 ? ((const float*)args.scales)[at] : bf16_to_f32(((const uint16_t*)args.scales)[at]);
}

#if RQ_LANES == 16
// For each of eight words the bytes its eight codes lie in, and at which bits.
template <int BITS>
struct Spread {
  alignas(64) uint8_t from[64], at[64];
  constexpr Spread() : from(), at() {
    for (int i = 0; i < 64; i++) {
      const int byte = i / 8 * BITS + (i % 8 < BITS ? i % 8 : 0);
      from[i] = (uint8_t)byte;
      at[i] = (uint8_t)(i % 8 * BITS);
    }
  }
};

// 64 codes, a byte each.
template <int BITS>
RQ_INLINE __m512i spread_codes(const uint8_t* codes) {
  if constexpr (BITS == 8) {
    return _mm512_loadu_si512(codes);
  } else {
    static constexpr Spread<BITS> spread;
    const __m512i packed = _mm512_maskz_loadu_epi8((1ull << 8 * BITS) - 1, codes);
    const __m512i words = _mm512_permutexvar_epi8(_mm512_load_si512(spread.from), packed);
    const __m512i bits = _mm512_multishift_epi64_epi8(_mm512_load_si512(spread.at), words);
    return _mm512_and_si512(bits, _mm512_set1_epi8((1 << BITS) - 1));
  }
}

// Scales of columns first .. first + count of a row, one for every 16 of them; groups are whole sixteens.
RQ_INLINE void scales_of_16(const WeightArgs& args, int64_t row, int64_t first, int64_t count, float* scales) {
  int64_t column = first, rest = args.group - first % args.group;
  float scale = scale_of(args, row, column);
  for (int64_t j = 0; j < count / 16; j++) {
    scales[j] = scale;
    rest -= 16;
    column += 16;
    if (rest == 0 && j + 1 < count / 16) {
      rest = args.group;
      scale = scale_of(args, row, column);
    }
  }
}

// Levels of 64 columns, a byte each.
template <int BITS, bool TRELLIS>
RQ_INLINE __m512i levels_64(__m512i table, const uint8_t* codes) {
  __m512i index = spread_codes<BITS>(codes);
  if constexpr (BITS == 8) return _mm512_xor_si512(index, _mm512_set1_epi8((char)0x80));
  if constexpr (TRELLIS) {  // the 16 bytes of a circle are a part of the vector that turns in itself
    const __m512i before = _mm512_alignr_epi8(index, index, 15);
    const __m512i of = _mm512_and_si512(before, _mm512_set1_epi8((char)(kClasses<kTrellis + BITS> - 1)));
    index = _mm512_or_si512(index, _mm512_slli_epi16(of, BITS));
  }
  return _mm512_permutexvar_epi8(index, table);
}

// Sixteen of them as fp32.
template <int PART>
RQ_INLINE vf sixteen(__m512i levels) {
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(levels, PART)));
}

// Levels of 64 columns, times the scale of each sixteen.
template <int BITS, bool TRELLIS>
RQ_INLINE void decode_64(__m512i table, const uint8_t* codes, const float* scales, float* out) {
  const __m512i levels = levels_64<BITS, TRELLIS>(table, codes);
  store(out, sixteen<0>(levels) * splat(scales[0]));
  store(out + 16, sixteen<1>(levels) * splat(scales[1]));
  store(out + 32, sixteen<2>(levels) * splat(scales[2]));
  store(out + 48, sixteen<3>(levels) * splat(scales[3]));
}

constexpr int64_t kGroups = 64;  // of a row that are gone through at a time

// What products of groups first .. first + count of a row count for one token, and the sum of what they count without
// levels that lie as much above zero as the lowest lies below.
RQ_INLINE __m512 factors_of(const WeightArgs& args, int64_t row, int64_t token, int64_t first, int64_t count,
                            float* factors) {
  const int64_t groups = args.width / args.group, at = row * groups + first;
  const float* steps = args.steps + token * groups + first;
  const float* sums = args.sums + token * groups + first;
  __m512 less = _mm512_setzero_ps();
  for (int64_t g = 0; g < count; g += 16) {
    const __mmask16 some = (__mmask16)(count - g >= 16 ? 0xffff : (1 << (count - g)) - 1);
    const __m512 scales =
        args.scale_dtype == Dtype::f32
            ? _mm512_maskz_loadu_ps(some, (const float*)args.scales + at + g)
            : _mm512_castsi512_ps(_mm512_slli_epi32(
                  _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const uint16_t*)args.scales + at + g)), 16));
    const __m512 both = _mm512_mul_ps(scales, _mm512_maskz_loadu_ps(some, steps + g));
    _mm512_storeu_ps(factors + g, both);
    less = _mm512_fmadd_ps(both, _mm512_maskz_loadu_ps(some, sums + g), less);
  }
  return _mm512_mul_ps(less, _mm512_set1_ps((float)args.lowest));
}

// NT tokens from `token` on and one row, whose groups are whole sixty-fours. table: levels less the lowest.
template <int BITS, bool TRELLIS, int NT>
RQ_INLINE void multiply_rounded(const WeightArgs& args, __m512i table, int64_t row, int64_t token) {
  const uint8_t* codes = args.codes + row * args.width * BITS / 8;
  const int64_t groups = args.width / args.group;
  const int8_t* x = args.small + token * args.width;
  float factors[NT][kGroups];
  __m512 total[NT];
  for (int64_t first = 0; first < groups; first += kGroups) {
    const int64_t count = smaller(kGroups, groups - first);
    RQ_UNROLL for (int t = 0; t < NT; t++) {
      const __m512 less = factors_of(args, row, token + t, first, count, factors[t]);
      total[t] = first == 0 ? less : _mm512_add_ps(total[t], less);
    }
    for (int64_t g = 0; g < count; g++, x += args.group) {
      __m512i sums[NT] = {};
      for (int64_t i = 0; i < args.group; i += 64, codes += 8 * BITS) {
        const __m512i levels = levels_64<BITS, TRELLIS>(table, codes);
        RQ_UNROLL for (int t = 0; t < NT; t++) {
          sums[t] = _mm512_dpbusd_epi32(sums[t], levels, _mm512_loadu_si512(x + t * args.width + i));
        }
      }
      RQ_UNROLL for (int t = 0; t < NT; t++) {
        total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), _mm512_set1_ps(factors[t][g]), total[t]);
      }
    }
  }
  RQ_UNROLL for (int t = 0; t < NT; t++) args.out[(token + t) * args.rows + row] = _mm512_reduce_add_ps(total[t]);
}

constexpr float kFine = 1.0f / 254.0f;  // a step of the second term of an input, in steps of the first

// The same of 8-bit codes, which are levels less the lowest, in groups of 32, with inputs of two terms.
template <int NT>
RQ_INLINE void multiply_rounded_8(const WeightArgs& args, int64_t row, int64_t token) {
  const uint8_t* codes = args.codes + row * args.width;
  const int64_t groups = args.width / args.group;
  const int8_t* x = args.small + token * 2 * args.width;
  const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  float factors[NT][kGroups];
  __m512 total[NT];
  for (int64_t first = 0; first < groups; first += kGroups) {
    const int64_t count = smaller(kGroups, groups - first);
    RQ_UNROLL for (int t = 0; t < NT; t++) {
      const __m512 less = factors_of(args, row, token + t, first, count, factors[t]);
      total[t] = first == 0 ? less : _mm512_add_ps(total[t], less);
    }
    for (int64_t g = 0; g < count; g += 2, codes += 64, x += 64) {
      const __mmask64 some = count - g >= 2 ? ~0ull : ~0ull >> 32;
      const __m512i levels = _mm512_maskz_loadu_epi8(some, codes);
      RQ_UNROLL for (int t = 0; t < NT; t++) {
        const int8_t* own = x + t * 2 * args.width;
        const __m512i coarse = _mm512_maskz_loadu_epi8(some, own), fine = _mm512_maskz_loadu_epi8(some, own + args.width);
        const __m512i zero = _mm512_setzero_si512();
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, levels, fine)),
                                           _mm512_set1_ps(kFine),
                                           _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, levels, coarse)));
        const __m512 two = _mm512_maskz_loadu_ps((__mmask16)(count - g >= 2 ? 3 : 1), factors[t] + g);
        total[t] = _mm512_fmadd_ps(sum, _mm512_permutexvar_ps(halves, two), total[t]);
      }
    }
  }
  RQ_UNROLL for (int t = 0; t < NT; t++) args.out[(token + t) * args.rows + row] = _mm512_reduce_add_ps(total[t]);
}

RQ_INLINE void multiply_rows_rounded_8(const WeightArgs& args, int64_t first, int64_t count) {
  for (int64_t row = first; row < first + count; row++) {
    int64_t token = 0;
    for (; token + 4 <= args.tokens; token += 4) multiply_rounded_8<4>(args, row, token);
    for (; token < args.tokens; token++) multiply_rounded_8<1>(args, row, token);
  }
}

template <int BITS, bool TRELLIS>
RQ_INLINE void multiply_rows_rounded(const WeightArgs& args, int64_t first, int64_t count) {
  const __m512i table = _mm512_sub_epi8(_mm512_loadu_si512(args.levels), _mm512_set1_epi8(args.lowest));
  for (int64_t row = first; row < first + count; row++) {
    int64_t token = 0;
    for (; token + 4 <= args.tokens; token += 4) multiply_rounded<BITS, TRELLIS, 4>(args, table, row, token);
    for (; token < args.tokens; token++) multiply_rounded<BITS, TRELLIS, 1>(args, table, row, token);
  }
}
#endif

// Columns first .. first + count of a row, times their scales; both are multiples of eight, of a trellis of circles.
template <int BITS, bool TRELLIS>
RQ_INLINE void decode(const WeightArgs& args, int64_t row, int64_t first, int64_t count, float* out) {
  const uint8_t* codes = args.codes + (row * args.width + first) * BITS / 8;
  int64_t i = 0;
#if RQ_LANES == 16
  if (args.group % 16 == 0) {
    const __m512i table = _mm512_loadu_si512(args.levels);
    float scales[kColumns / 16];
    scales_of_16(args, row, first, count, scales);
    for (; i + 64 <= count; i += 64) decode_64<BITS, TRELLIS>(table, codes + i * BITS / 8, scales + i / 16, out + i);
  }
#endif
  uint8_t index[kColumns];
  const int64_t left = count - i;
  if (left == 0) return;
  unpack_canonical<BITS>(codes + i * BITS / 8, left, index);
  if constexpr (TRELLIS) {
    constexpr int classes = kClasses<kTrellis + BITS>;
    for (int64_t j = 0; j < left; j += kCircle) {
      uint8_t own[kCircle];
      memcpy(own, index + j, sizeof own);
      index[j] = (uint8_t)(own[0] | (own[kCircle - 1] & (classes - 1)) << BITS);
      for (int k = 1; k < kCircle; k++) index[j + k] = (uint8_t)(own[k] | (own[k - 1] & (classes - 1)) << BITS);
    }
  }
  for (int64_t j = 0; j < left;) {
    const int64_t column = first + i + j, stop = smaller(left, j + args.group - column % args.group);
    const float scale = scale_of(args, row, column);
    for (; j < stop; j++) {
      const int8_t level = BITS == 8 ? (int8_t)(index[j] ^ 0x80) : args.levels[index[j] & 63];
      out[i + j] = (float)level * scale;
    }
  }
}

// out[token][row] (+)= weights of so many rows times each token's inputs; all of them padded with zeros to whole vectors.
template <int ROWS>
RQ_INLINE void multiply(const WeightArgs& args, const float (*weights)[kColumns], int64_t row, int64_t first,
                        int64_t padded) {
  for (int64_t t = 0; t < args.tokens; t++) {
    const float* x = args.x + t * args.x_row + first;
    vf sums[ROWS][2] = {};
    int64_t i = 0;
    for (; i + 2 * VL <= padded; i += 2 * VL) {
      const vf a = load(x + i), b = load(x + i + VL);
      RQ_UNROLL for (int r = 0; r < ROWS; r++) {
        sums[r][0] += a * load(weights[r] + i);
        sums[r][1] += b * load(weights[r] + i + VL);
      }
    }
    for (; i < padded; i += VL) {
      const vf a = load(x + i);
      RQ_UNROLL for (int r = 0; r < ROWS; r++) sums[r][0] += a * load(weights[r] + i);
    }
    float* out = args.out + t * args.rows + row;
    RQ_UNROLL for (int r = 0; r < ROWS; r++) {
      const float found = sum(sums[r][0] + sums[r][1]);
      out[r] = first == 0 ? found : out[r] + found;
    }
  }
}

template <int BITS, bool TRELLIS>
void weight_rows_of(const WeightArgs& args, int64_t first, int64_t count) {
  if (args.x == nullptr) {
    for (int64_t row = first; row < first + count; row++) {
      for (int64_t begin = 0; begin < args.width; begin += kColumns) {
        const int64_t columns = smaller(kColumns, args.width - begin);
        decode<BITS, TRELLIS>(args, row, begin, columns, args.out + row * args.width + begin);
      }
    }
    return;
  }
#if RQ_LANES == 16
  if constexpr (BITS == 8) {
    if (args.small) return multiply_rows_rounded_8(args, first, count);
  } else {
    if (args.small) return multiply_rows_rounded<BITS, TRELLIS>(args, first, count);
  }
#endif
  alignas(64) float weights[kTogether][kColumns];
  for (int64_t row = first; row < first + count; row += kTogether) {
    const int64_t rows = smaller(kTogether, first + count - row);
    for (int64_t begin = 0; begin < args.width; begin += kColumns) {
      const int64_t columns = smaller(kColumns, args.width - begin), padded = round_up(columns, VL);
      for (int64_t r = 0; r < rows; r++) {
        decode<BITS, TRELLIS>(args, row + r, begin, columns, weights[r]);
        for (int64_t i = columns; i < padded; i++) weights[r][i] = 0;
      }
      if (rows == kTogether) {
        multiply<kTogether>(args, weights, row, begin, padded);
      } else {
        for (int64_t r = 0; r < rows; r++) multiply<1>(args, weights + r, row + r, begin, padded);
      }
    }
  }
}

}  // namespace

void weight_rows(const WeightArgs& args, int64_t first, int64_t count) {
  switch (args.kind) {
    case 2: return weight_rows_of<2, false>(args, first, count);
    case 3: return weight_rows_of<3, false>(args, first, count);
    case 4: return weight_rows_of<4, false>(args, first, count);
    case kTrellis + 2: return weight_rows_of<2, true>(args, first, count);
    case kTrellis + 3: return weight_rows_of<3, true>(args, first, count);
    case kTrellis + 4: return weight_rows_of<4, true>(args, first, count);
    default: return weight_rows_of<8, false>(args, first, count);
  }
}

// Terms of inputs as integers, 0 where they are met in fp32.
int weight_terms(const WeightArgs& args) {
  if (RQ_LANES < 16) return 0;
  return args.kind == 8 ? args.group == 32 ? 2 : 0 : args.group % 64 == 0 ? 1 : 0;
}

// In place: signs and norm, then a Hadamard matrix of every `rotated` columns.
void rotate_inputs(float* x, int64_t width, int64_t padded, const float* factors, int64_t rotated) {
  int64_t i = 0;
  for (; i + VL <= width; i += VL) store(x + i, load(x + i) * load(factors + i));
  for (; i < width; i++) x[i] *= factors[i];
  for (i = 0; i < padded; i += VL) store(x + i, butterflies_within(load(x + i), rotated >= VL));
  for (int64_t stride = VL; stride < rotated; stride *= 2) butterflies(x, width, stride);
}

// Each group of columns to integers of 8 bits, its largest to 127, and with two terms what that leaves to such integers
// again. A group that is not finite has a step that is not.
void round_inputs(const float* x, int64_t width, int64_t group, int terms, int8_t* small, float* steps, float* sums) {
#if RQ_LANES == 16
  for (int64_t first = 0; first < width; first += group, steps++, sums++) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 none = 0;
    for (int64_t i = first; i < first + group; i += 16) {
      const __m512 v = _mm512_loadu_ps(x + i);
      most = _mm512_max_ps(most, _mm512_abs_ps(v));
      none |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    }
    const float top = _mm512_reduce_max_ps(most);
    if (none || top > 3.4028234e38f) {
      for (int term = 0; term < terms; term++) memset(small + term * width + first, 0, (size_t)group);
      *steps = __builtin_nanf("");
      *sums = 0;
      continue;
    }
    const __m512 factor = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
    __m512i total = _mm512_setzero_si512(), fine = _mm512_setzero_si512();
    for (int64_t i = first; i < first + group; i += 16) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), factor);
      const __m512i whole = _mm512_cvtps_epi32(v);
      total = _mm512_add_epi32(total, whole);
      _mm_storeu_si128((__m128i*)(small + i), _mm512_cvtepi32_epi8(whole));
      if (terms == 1) continue;
      const __m512 left = _mm512_mul_ps(_mm512_sub_ps(v, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(254.0f));
      const __m512i second = _mm512_cvtps_epi32(left);
      fine = _mm512_add_epi32(fine, second);
      _mm_storeu_si128((__m128i*)(small + width + i), _mm512_cvtepi32_epi8(second));
    }
    *steps = top / 127.0f;
    *sums = (float)_mm512_reduce_add_epi32(total) + kFine * (float)_mm512_reduce_add_epi32(fine);
  }
#else
  (void)x, (void)width, (void)group, (void)terms, (void)small, (void)steps, (void)sums;  // `weight_terms` is 0
#endif
}

}  // namespace RQ_ISA
}  // namespace rq
