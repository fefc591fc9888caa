// Products with packed weights (formats/weight.py): a few rows at a time become fp32, close by, and meet every token.
#include "codes.h"
#include "kernels.h"
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

// One token and one row, whose groups are whole sixty-fours: the levels of a group meet its inputs, their sum its scale.
template <int BITS, bool TRELLIS>
RQ_INLINE float multiply_one(const WeightArgs& args, __m512i table, int64_t row) {
  const uint8_t* codes = args.codes + row * args.width * BITS / 8;
  vf total = {};
  for (int64_t first = 0; first < args.width; first += args.group) {
    vf sums[4] = {};
    for (int64_t i = first; i < first + args.group; i += 64, codes += 8 * BITS) {
      const __m512i levels = levels_64<BITS, TRELLIS>(table, codes);
      const float* x = args.x + i;
      sums[0] += sixteen<0>(levels) * load(x);
      sums[1] += sixteen<1>(levels) * load(x + 16);
      sums[2] += sixteen<2>(levels) * load(x + 32);
      sums[3] += sixteen<3>(levels) * load(x + 48);
    }
    total += ((sums[0] + sums[1]) + (sums[2] + sums[3])) * splat(scale_of(args, row, first));
  }
  return sum(total);
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
  if (args.tokens == 1 && args.group % 64 == 0) {
    const __m512i table = _mm512_loadu_si512(args.levels);
    for (int64_t row = first; row < first + count; row++) args.out[row] = multiply_one<BITS, TRELLIS>(args, table, row);
    return;
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

}  // namespace RQ_ISA
}  // namespace rq
