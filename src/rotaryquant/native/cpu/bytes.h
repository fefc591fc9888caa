// Vectors of bytes: levels of codes by table, and exact products of four signed bytes at a time.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rq {
namespace RQ_ISA {

#if RQ_LANES == 16
#define RQ_BYTES 64
#elif RQ_LANES == 8
#define RQ_BYTES 32
#else
#define RQ_BYTES 16
#endif

typedef uint8_t vb __attribute__((vector_size(RQ_BYTES)));

RQ_INLINE vb load_bytes(const uint8_t* p) {
  vb v;
  memcpy(&v, p, sizeof v);
  return v;
}
RQ_INLINE void store_bytes(uint8_t* p, vb v) { memcpy(p, &v, sizeof v); }

// Products of unsigned with signed bytes in one instruction.
#if RQ_LANES == 16 || (RQ_LANES == 8 && defined(__AVXVNNI__))
#define RQ_VNNI 1
#else
#define RQ_VNNI 0
#endif

// What is added to a key's level where it is stored as a byte: one side of that product is unsigned.
constexpr int kLevelBias = RQ_VNNI ? 128 : 0;

// The largest byte of a probability: unsigned where the product allows it.
constexpr int kMostBytes = RQ_VNNI ? 255 : 127;

// acc[lane] += sum over j < 4 of (levels[4 * lane + j] - kLevelBias) * four[j], less what the bias adds: the caller
// takes kLevelBias * (sum of all `four`) off. `four`: signed bytes within -127 .. 127.
RQ_INLINE vi dot4(vi acc, vb levels, int32_t four) {
#if RQ_LANES == 16
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)levels, _mm512_set1_epi32(four));
#elif RQ_VNNI
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)levels, _mm256_set1_epi32(four));
#elif RQ_LANES == 8
  const __m256i level = (__m256i)levels;  // |level| <= 128: no sum of two products leaves 16 bits
  const __m256i signed_four = _mm256_sign_epi8(_mm256_set1_epi32(four), level);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(level), signed_four);
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__SSSE3__)
  const __m128i level = (__m128i)levels, signed_four = _mm_sign_epi8(_mm_set1_epi32(four), level);
  const __m128i pairs = _mm_maddubs_epi16(_mm_abs_epi8(level), signed_four);
  return acc + (vi)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)levels, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__aarch64__)
  const int8x16_t level = (int8x16_t)levels, by = vreinterpretq_s8_s32(vdupq_n_s32(four));
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(level), vget_low_s8(by)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(level, by));
  return acc + (vi)vpaddq_s32(low, high);
#elif defined(__SSE2__)
  const __m128i level = (__m128i)levels, by = _mm_set1_epi32(four), zero = _mm_setzero_si128();
  const __m128i wide = _mm_srai_epi16(_mm_unpacklo_epi8(zero, by), 8);  // the four as 16-bit, twice
  const __m128i low = _mm_madd_epi16(_mm_srai_epi16(_mm_unpacklo_epi8(zero, level), 8), wide);
  const __m128i high = _mm_madd_epi16(_mm_srai_epi16(_mm_unpackhi_epi8(zero, level), 8), wide);
  const __m128 even = _mm_shuffle_ps((__m128)low, (__m128)high, _MM_SHUFFLE(2, 0, 2, 0));
  const __m128 odd = _mm_shuffle_ps((__m128)low, (__m128)high, _MM_SHUFFLE(3, 1, 3, 1));
  return acc + (vi)even + (vi)odd;
#else
  int8_t level[16], by[4];
  memcpy(level, &levels, 16);
  memcpy(by, &four, 4);
  for (int l = 0; l < 4; l++) {
    for (int j = 0; j < 4; j++) acc[l] += level[4 * l + j] * by[j];
  }
  return acc;
#endif
}

// The same with unbiased levels and bytes within 0 .. kMostBytes.
RQ_INLINE vi dot4_weights(vi acc, vb levels, int32_t four) {
#if RQ_LANES == 16
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), (__m512i)levels);
#elif RQ_VNNI
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, _mm256_set1_epi32(four), (__m256i)levels);
#else
  return dot4(acc, levels, four);
#endif
}

// Four rows of bytes, interleaved as products want them: out[16 * i + 4 * r + j] is lane 4 * i + j of row r, of
// integers within -127 .. 127, or 0 .. 255 where `weights`.
RQ_INLINE void store_quads(uint8_t* out, vi a, vi b, vi c, vi d, bool weights) {
#if RQ_LANES == 16
  const __m512i ab = _mm512_packs_epi32((__m512i)a, (__m512i)b), cd = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  _mm512_storeu_si512((__m512i*)out, weights ? _mm512_packus_epi16(ab, cd) : _mm512_packs_epi16(ab, cd));
#elif RQ_LANES == 8
  const __m256i ab = _mm256_packs_epi32((__m256i)a, (__m256i)b), cd = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  _mm256_storeu_si256((__m256i*)out, weights ? _mm256_packus_epi16(ab, cd) : _mm256_packs_epi16(ab, cd));
#elif defined(__SSE2__)
  const __m128i ab = _mm_packs_epi32((__m128i)a, (__m128i)b), cd = _mm_packs_epi32((__m128i)c, (__m128i)d);
  _mm_storeu_si128((__m128i*)out, weights ? _mm_packus_epi16(ab, cd) : _mm_packs_epi16(ab, cd));
#elif defined(__aarch64__)
  const int16x8_t ab = vcombine_s16(vmovn_s32((int32x4_t)a), vmovn_s32((int32x4_t)b));
  const int16x8_t cd = vcombine_s16(vmovn_s32((int32x4_t)c), vmovn_s32((int32x4_t)d));
  vst1q_s8((int8_t*)out, vcombine_s8(vmovn_s16(ab), vmovn_s16(cd)));
  (void)weights;
#else
  const vi rows[4] = {a, b, c, d};
  for (int l = 0; l < 16; l++) out[l] = (uint8_t)rows[l / 4][l % 4];
  (void)weights;
#endif
}

// Levels of 2^BITS codes as bytes, to which `bias` was added.
struct LevelTable {
  uint8_t bias;  // at 8 bits all that is used: a level is its code less 128
#if RQ_LANES == 16
  // Indexed by six bits, of which at[f] uses field f.
  __m512i at[3];
#else
  uint8_t entries[64];
#endif
};

// Where indices of a trellis' tables have the code and the class before it, by bits and table (strip.h, level_vector).
constexpr int kCodeAt[5][3] = {{}, {}, {0, 2, 4}, {0, 3, 0}, {0, 2, 0}};
constexpr int kClassAt[5][3] = {{}, {}, {2, 4, 2}, {3, 0, 3}, {4, 0, 4}};

template <int KIND>
RQ_INLINE LevelTable make_level_table(const float* levels, int bias) {
  LevelTable table;
  table.bias = (uint8_t)bias;
  if (KIND == 8) return table;
  uint8_t entries[64];
  constexpr int count_of_levels = kClasses<KIND> << kBits<KIND>;
  for (int i = 0; i < 64; i++) entries[i] = (uint8_t)((int)levels[i % count_of_levels] + bias);
#if RQ_LANES == 16
  uint8_t count[64];
  for (int i = 0; i < 64; i++) count[i] = (uint8_t)i;
  const vb index = load_bytes(count), all = load_bytes(entries);
  RQ_UNROLL for (int t = 0; t < 3; t++) {
    constexpr int bits = kBits<KIND>;
    vb code = index >> (uint8_t)(kPaths<KIND> ? kCodeAt[bits][t] : bits * t) & (uint8_t)((1 << bits) - 1);
    if (kPaths<KIND>) {
      code |= (index >> (uint8_t)kClassAt[bits][t] & (uint8_t)(kClasses<KIND> - 1)) << (uint8_t)bits;
    }
    table.at[t] = _mm512_permutexvar_epi8((__m512i)code, (__m512i)all);
  }
#else
  memcpy(table.entries, entries, sizeof entries);
#endif
  return table;
}

// Levels of codes below 2^BITS.
RQ_INLINE vb look_up(const LevelTable& table, vb codes) {
#if RQ_LANES == 16
  return (vb)_mm512_permutexvar_epi8((__m512i)codes, table.at[0]);
#elif RQ_LANES == 8
  const __m128i entries = _mm_loadu_si128((const __m128i*)table.entries);
  return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)codes);
#elif defined(__SSSE3__)
  return (vb)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table.entries), (__m128i)codes);
#elif defined(__aarch64__)
  return (vb)vqtbl1q_u8(vld1q_u8(table.entries), (uint8x16_t)codes);
#else
  uint8_t code[16];  // levels gather in words: a vector read from bytes just written would wait for them
  memcpy(code, &codes, 16);
  uint64_t words[2] = {0, 0};
  for (int l = 0; l < 16; l++) words[l / 8] |= (uint64_t)table.entries[code[l]] << (8 * (l % 8));
  vb levels;
  memcpy(&levels, words, 16);
  return levels;
#endif
}

// Entries of six-bit indices.
RQ_INLINE vb look_up_64(const LevelTable& table, vb index) {
#if RQ_LANES == 16
  return look_up(table, index);
#elif RQ_LANES == 8
  const __m256i at = (__m256i)index, fourth = _mm256_slli_epi16(at, 3), fifth = _mm256_slli_epi16(at, 2);
  __m256i part[4];
  RQ_UNROLL for (int i = 0; i < 4; i++) {
    const __m128i entries = _mm_loadu_si128((const __m128i*)(table.entries + 16 * i));
    part[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), at);
  }
  const __m256i low = _mm256_blendv_epi8(part[0], part[1], fourth), high = _mm256_blendv_epi8(part[2], part[3], fourth);
  return (vb)_mm256_blendv_epi8(low, high, fifth);
#elif defined(__SSE4_1__)
  const __m128i at = (__m128i)index, fourth = _mm_slli_epi16(at, 3), fifth = _mm_slli_epi16(at, 2);
  __m128i part[4];
  RQ_UNROLL for (int i = 0; i < 4; i++) {
    part[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(table.entries + 16 * i)), at);
  }
  const __m128i low = _mm_blendv_epi8(part[0], part[1], fourth), high = _mm_blendv_epi8(part[2], part[3], fourth);
  return (vb)_mm_blendv_epi8(low, high, fifth);
#elif defined(__aarch64__)
  const uint8x16x4_t entries = {{vld1q_u8(table.entries), vld1q_u8(table.entries + 16), vld1q_u8(table.entries + 32),
                                 vld1q_u8(table.entries + 48)}};
  return (vb)vqtbl4q_u8(entries, (uint8x16_t)index);
#else
  return look_up(table, index);
#endif
}

}  // namespace RQ_ISA
}  // namespace rq
