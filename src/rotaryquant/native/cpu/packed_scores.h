// Logits of a span of packed keys: exact integer products of levels with rounded queries, times scales.
#pragma once

#include "span.h"

namespace rq {
namespace RQ_ISA {

// dots[r][row] of a strip and `rows` query rows from `first` on; t.levels holds the strip unless `direct`.
template <int KIND>
RQ_INLINE void strip_dots(const Tile& t, const Span& s, int64_t strip, int64_t first, int64_t rows, bool direct,
                          int32_t* dots) {
  const int64_t stride = 4 * t.key_columns;
  const int64_t bytes = kStrip * t.args->keys.code_row, steps = kKeyLoops * t.key_columns / 4;
  const Ahead ahead = first == 0 ? Ahead{s.key_strips[strip + kAheadStrips], bytes / steps} : Ahead{t.levels, 0};
  const uint8_t* q = t.q_high + first * t.key_columns;
  const int32_t* bias = t.q_high_bias + first;
#if RQ_LANES == 16
  if (kBits<KIND> <= 4 && direct) {
    const int64_t chunks = t.key_columns / kChunkColumns;
#define RQ_CALL(NR) key_code_products<KIND, NR>(*t.key_table, s.key_strips[strip], chunks, q, stride, bias, ahead, dots)
    RQ_FOR_ROWS(rows, RQ_CALL)
#undef RQ_CALL
    return;
  }
#else
  (void)direct;
#endif
#define RQ_CALL(NR) key_products<NR>(t.levels, 0, t.key_columns / 4, q, stride, bias, ahead, dots)
  RQ_FOR_ROWS(rows, RQ_CALL)
#undef RQ_CALL
}

// Logits of one strip where each row has one scale and queries one byte. NOISY: half the variance of the codes'
// noise, which is never negative, is taken off.
template <int KIND, bool NOISY>
RQ_INLINE void score_strip(const Tile& t, const Span& s, int64_t strip, bool direct, const float* scales) {
  int32_t dots[kPass * kStrip];
  vf scale[kStrip / VL], square[kStrip / VL];
  RQ_UNROLL for (int64_t i = 0; i < kStrip / VL; i++) {
    scale[i] = load(scales + strip * kStrip + i * VL);
    square[i] = scale[i] * scale[i];
  }
  const float noise_score = t.noise_score;
  for (int64_t first = 0; first < t.count; first += kPass) {
    const int64_t rows = smaller(kPass, t.count - first);
    strip_dots<KIND>(t, s, strip, first, rows, direct, dots);
    const float *steps = t.q_step + first, *biases = t.bias + first, *noises = t.noise + first;
    float* out = t.scores + first * kSpan + strip * kStrip;
    for (int64_t r = 0; r < rows; r++) {
      RQ_UNROLL for (int64_t i = 0; i < kStrip / VL; i++) {
        const vf x = to_f32(load_i32(dots + r * kStrip + i * VL)) * steps[r];
        vf score = x * scale[i] + biases[r];
        if (NOISY) score -= maximum((vf){}, noises[r] - x * x * noise_score) * square[i];
        store(out + r * kSpan + i * VL, score);
      }
    }
  }
}

// scores[r][k] of a strip += products over one group of columns times the group's scale.
RQ_INLINE void add_products(const Tile& t, const uint8_t* q, const int32_t* bias, float factor, int64_t group,
                            int64_t strip, const float* scales) {
  const int64_t groups = t.args->keys.codec.groups(), quads = t.key_columns / 4 / groups;
  const Ahead nothing = {t.levels, 0};
  int32_t dots[kPass * kStrip];
  for (int64_t first = 0; first < t.count; first += kPass) {
    const int64_t rows = smaller(kPass, t.count - first);
    const int32_t* own = bias + group * round_up(t.lanes, VL) + first;
    const uint8_t* queries = q + first * t.key_columns;
#define RQ_CALL(NR) \
  key_products<NR>(t.levels, group * quads, (group + 1) * quads, queries, 4 * t.key_columns, own, nothing, dots)
    RQ_FOR_ROWS(rows, RQ_CALL)
#undef RQ_CALL
    for (int64_t r = 0; r < rows; r++) {
      float* row = t.scores + (first + r) * kSpan + strip * kStrip;
      for (int64_t k = 0; k < kStrip; k += VL) {
        const vf product = to_f32(load_i32(dots + r * kStrip + k)) * load(scales + strip * kStrip + k);
        store(row + k, load(row + k) + product * factor);
      }
    }
  }
}

// The same logits where a row has several scales, or queries two bytes.
template <int KIND>
RQ_INLINE void score_strip_in_parts(const Tile& t, const Span& s, int64_t strip) {
  const Stream& keys = t.args->keys;
  float scales[kSpan];
  for (int64_t r = 0; r < t.count; r++) {
    for (int64_t k = 0; k < kStrip; k += VL) store(t.scores + r * kSpan + strip * kStrip + k, (vf){});
  }
  for (int64_t group = 0; group < keys.codec.groups(); group++) {
    row_scales(keys, s.key_scales, s, group, scales);
    add_products(t, t.q_high, t.q_high_bias, 1.0f, group, strip, scales);
    if (KIND == 8) add_products(t, t.q_low, t.q_low_bias, 1.0f / 128, group, strip, scales);
  }
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kSpan + strip * kStrip;
    for (int64_t k = 0; k < kStrip; k += VL) store(row + k, load(row + k) * t.q_step[r] + t.bias[r]);
  }
}

template <int KIND>
void score_span(const Tile& t, const Span& s) {
  const Stream& keys = t.args->keys;
  const bool in_parts = KIND == 8 || keys.codec.groups() > 1, direct = !in_parts && from_codes<KIND>(t, s);
  float scales[kSpan];
  row_scales(keys, s.key_scales, s, 0, scales);
  for (int64_t strip = s.begin / kStrip; strip < s.end / kStrip; strip++) {
    if (!direct) {
      strip_levels<KIND>(*t.key_table, keys, s.key_strips[strip], s.filled - strip * kStrip, t.key_columns, 0,
                         t.key_columns / kChunkColumns, t.codes, t.levels, kChunkVectors * kVector);
    }
    if (in_parts) score_strip_in_parts<KIND>(t, s, strip);
    else if (t.args->noise_query > 0) score_strip<KIND, true>(t, s, strip, direct, scales);
    else score_strip<KIND, false>(t, s, strip, direct, scales);
  }
}

}  // namespace RQ_ISA
}  // namespace rq
