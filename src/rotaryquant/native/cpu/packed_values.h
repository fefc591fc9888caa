// What a span of packed values adds: logits become probabilities in fp32, probabilities become bytes, and bytes meet
// levels in exact integer products.
#pragma once

#include "span.h"

namespace rq {
namespace RQ_ISA {

// The largest byte of a probability.
constexpr float kMost = (float)kMostBytes;

// Where a span's largest probability weighs at most this much of what a query row has summed so far, one byte of it is
// enough: each of its keys errs by at most half a step, 1/254 or 1/510 of that. Each row decides for itself, so that
// its result does not depend on its neighbours.
constexpr float kCoarseWeight = 1.0f / 64;

// ---- probabilities --------------------------------------------------------------------------------------------

// Logits of NR <= 4 rows from `first` on become probabilities relative to the largest of the span, times the values'
// scales. What the span weighs on the new running maximum is left in s.weight, what everything before it does in
// t.factor.
template <int NR>
RQ_INLINE void softmax_rows(const Tile& t, Span& s, const float* scales, int64_t first) {
  const int64_t begin = s.begin, end = s.end;
  float *rows = t.scores + first * kSpan, shift[VL];
  vf most[4], total[4], largest[4];
  RQ_UNROLL for (int r = 0; r < 4; r++) {
    most[r] = splat(-kInfinity);
    total[r] = largest[r] = (vf){};
  }
  for (int64_t k = begin; k < end; k += VL) {
    RQ_UNROLL for (int r = 0; r < NR; r++) most[r] = maximum(load(rows + r * kSpan + k), most[r]);
  }
  const vf found = over_lanes<Most>(most), before = load(t.top + first), top = maximum(found, before);
  // A row that has seen nothing: no infinity less itself.
  const vf safe = select(top == -kInfinity, (vf){}, top);
  const vf factor = exp2_nonpositive(before - safe), weight = exp2_nonpositive(found - safe);
  store(shift, select(found == -kInfinity, (vf){}, found));
  for (int64_t k = begin; k < end; k += VL) {
    const vf scale = load(scales + k);
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      const vf p = exp2_roughly(load(rows + r * kSpan + k) - shift[r]), scaled = p * scale;
      total[r] += p;
      largest[r] = maximum(scaled, largest[r]);
      store(rows + r * kSpan + k, scaled);
    }
  }
  store_four(t.total + first, load(t.total + first) * factor + over_lanes<Add>(total) * weight);
  store_four(t.top + first, top);
  store_four(t.factor + first, factor);
  store_four(s.weight + first, weight);
  store_four(s.largest + first, over_lanes<Most>(largest));
}

// scales: of the values, for their first group of columns.
RQ_INLINE void packed_softmax(const Tile& t, Span& s, const float* scales, bool masked) {
  for (int64_t r = 0; r < t.count && t.softcap > 0; r++) {
    float* row = t.scores + r * kSpan;
    for (int64_t k = s.begin; k < s.end; k += VL) store(row + k, cap(load(row + k), t.softcap));
  }
  for (int64_t r = 0; r < t.count && s.end - s.begin > s.last - s.first; r++) {
    float* row = t.scores + r * kSpan;
    for (int64_t k = s.begin; k < s.first; k++) row[k] = -kInfinity;
    for (int64_t k = s.last; k < s.end; k++) row[k] = -kInfinity;
  }
  if (masked) hide(t, s.positions, s.last, true);
  for (int64_t first = 0; first < t.count; first += 4) {
#define RQ_CALL(NR) softmax_rows<NR>(t, s, scales, first)
    RQ_FOR_FOUR(t.count - first, RQ_CALL)
#undef RQ_CALL
  }
}

// ---- bytes ----------------------------------------------------------------------------------------------------

// Rows of one pass: their scaled probabilities as bytes, and how much one step of the high ones adds to `out`.
struct Pass {
  int64_t first, rows;
  bool coarse;  // all low bytes are zero
  float step[kPass];
};

RQ_INLINE bool coarse_row(const Tile& t, const Span& s, int64_t r) {
  return s.weight[r] <= kCoarseWeight * t.total[r];
}

// Bytes of NR <= 4 rows of scaled probabilities; the low ones only where there is a place for them.
template <int NR>
RQ_INLINE void round_rows(const Tile& t, const Span& s, int64_t first, const bool* coarse, uint8_t* high,
                          uint8_t* low) {
  const int64_t end = s.end;
  const float* rows = t.scores + first * kSpan;
  float steps[NR];  // per unit of a scaled probability
  for (int r = 0; r < NR; r++) steps[r] = s.largest[first + r] > 0 ? kMost / s.largest[first + r] : 0.0f;
  for (int64_t k = s.begin; k < end; k += VL) {
    vi upper[4] = {}, lower[4] = {};
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      const vf p = load(rows + r * kSpan + k) * steps[r];
      if (!low || coarse[r]) {
        upper[r] = round_to_i32(p);
      } else {
        const vi fine = round_to_i32(p * 128.0f);
        upper[r] = fine >> 7;
        lower[r] = fine & 127;
      }
    }
    store_quads(high + 4 * k, upper[0], upper[1], upper[2], upper[3], true);
    if (low) store_quads(low + 4 * k, lower[0], lower[1], lower[2], lower[3], true);
  }
}

RQ_INLINE void round_pass(const Tile& t, const Span& s, Pass& pass) {
  bool coarse[kPass];
  pass.coarse = true;
  for (int64_t i = 0; i < pass.rows; i++) {
    coarse[i] = coarse_row(t, s, pass.first + i);
    pass.coarse = pass.coarse && coarse[i];
    pass.step[i] = s.weight[pass.first + i] * s.largest[pass.first + i] * (1.0f / kMost);
  }
  for (int64_t i = 0; i < pass.rows; i += 4) {
    const int64_t first = pass.first + i, at = first * kSpan;
    uint8_t *high = t.p_high + at, *low = pass.coarse ? nullptr : t.p_low + at;
#define RQ_CALL(NR) round_rows<NR>(t, s, first, coarse + i, high, low)
    RQ_FOR_FOUR(pass.rows - i, RQ_CALL)
#undef RQ_CALL
  }
}

// Scaled probabilities of all rows with the scales of another group of columns instead of those before.
RQ_INLINE void change_scales(const Tile& t, Span& s, const float* before, const float* scales) {
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kSpan;
    s.largest[r] = 0;
    for (int64_t k = s.begin; k < s.end; k++) {
      row[k] = before[k] != 0 ? row[k] / before[k] * scales[k] : 0.0f;
      s.largest[r] = row[k] > s.largest[r] ? row[k] : s.largest[r];
    }
  }
}

// ---- products -------------------------------------------------------------------------------------------------

// sums[r][chunk][column]: products of interleaved bytes of a pass with NC chunks of values from `chunk` on. levels: of
// those chunks; null: they are looked up from their codes.
template <int KIND, int NC>
RQ_INLINE void value_dots(const Tile& t, const Span& s, const Pass& pass, int64_t chunk, const uint8_t* levels,
                          const uint8_t* p, int32_t* sums) {
  const int64_t strips = (s.end - s.begin) / kStrip, stride = 4 * kSpan;
#if RQ_LANES == 16
  if (kBits<KIND> <= 4 && !levels) {
    const uint8_t* const* codes = s.value_strips + s.begin / kStrip;
    const int64_t offset = chunk * chunk_bytes(kBits<KIND>), next = offset + NC * chunk_bytes(kBits<KIND>);
    const bool last = (chunk + NC) * kChunkColumns >= t.value_columns;
#define RQ_CALL(NR)                                                                                               \
  value_code_products<KIND, NR, NC>(*t.value_table, codes, offset, strips, p, stride, last ? codes + strips : codes, \
                                    last ? 0 : next, sums)
    RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
    return;
  }
#else
  (void)t, (void)chunk;
#endif
#define RQ_CALL(NR) value_products<NR, NC>(levels, strips, p, stride, sums)
  RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
}

// out of the pass = what it was on the new maximum, and products of its probabilities with those chunks.
template <int KIND, int NC>
RQ_INLINE void add_values(const Tile& t, const Span& s, const Pass& pass, int64_t chunk, const uint8_t* levels) {
  const int64_t at = pass.first * kSpan + 4 * s.begin;
  int32_t upper[kPass * NC * kChunkColumns], lower[kPass * NC * kChunkColumns];
  value_dots<KIND, NC>(t, s, pass, chunk, levels, t.p_high + at, upper);
  if (!pass.coarse) value_dots<KIND, NC>(t, s, pass, chunk, levels, t.p_low + at, lower);
  for (int64_t r = 0; r < pass.rows; r++) {
    float* out = t.out + (pass.first + r) * t.value_columns + chunk * kChunkColumns;
    const vf step = splat(pass.step[r]), factor = splat(t.factor[pass.first + r]);
    RQ_UNROLL for (int64_t i = 0; i < NC * kChunkColumns; i += VL) {
      vf sum = to_f32(load_i32(upper + r * NC * kChunkColumns + i));
      if (!pass.coarse) sum += to_f32(load_i32(lower + r * NC * kChunkColumns + i)) * (1.0f / 128.0f);
      store(out + i, load(out + i) * factor + sum * step);
    }
  }
}

// The same of all rows, with `count` <= kValueChunks chunks.
template <int KIND>
RQ_INLINE void add_chunks(const Tile& t, const Span& s, const Pass* passes, int64_t num_passes, int64_t chunk,
                          int64_t count) {
  constexpr int pair = kManyRegisters ? 2 : 1;
  const int64_t strips = (s.end - s.begin) / kStrip, step = strips * kChunkVectors * kVector;
  const bool direct = from_codes<KIND>(t, s);
  for (int64_t i = 0; i < strips && !direct; i++) {
    const int64_t strip = s.begin / kStrip + i;
    strip_levels<KIND>(*t.value_table, t.args->values, s.value_strips[strip], s.filled - strip * kStrip,
                       t.value_columns, chunk, count, t.codes, t.levels + i * kChunkVectors * kVector, step);
  }
  for (int64_t i = 0; i < num_passes; i++) {
    if (count == kValueChunks && passes[i].rows <= 3) {
      add_values<KIND, kValueChunks>(t, s, passes[i], chunk, direct ? nullptr : t.levels);
      continue;
    }
    int64_t c = 0;
    for (; c + pair <= count; c += pair) {
      add_values<KIND, pair>(t, s, passes[i], chunk + c, direct ? nullptr : t.levels + c * step);
    }
    for (; c < count; c++) add_values<KIND, 1>(t, s, passes[i], chunk + c, direct ? nullptr : t.levels + c * step);
  }
}

// Probabilities are scaled for the first group of columns.
template <int KIND>
void add_span(const Tile& t, Span& s) {
  const Stream& values = t.args->values;
  const int64_t groups = values.codec.groups(), chunks = t.value_columns / kChunkColumns / groups;
  const int64_t num_passes = (t.count + kPass - 1) / kPass;
  Pass passes[kTile / kPass];
  for (int64_t group = 0; group < groups; group++) {
    if (group > 0) {
      float scales[2][kSpan];
      row_scales(values, s.value_scales, s, group - 1, scales[0]);
      row_scales(values, s.value_scales, s, group, scales[1]);
      change_scales(t, s, scales[0], scales[1]);
    }
    for (int64_t i = 0; i < num_passes; i++) {
      passes[i].first = i * kPass;
      passes[i].rows = smaller(kPass, t.count - i * kPass);
      round_pass(t, s, passes[i]);
    }
    const int64_t step = from_codes<KIND>(t, s) ? kValueChunks : kHeldChunks;
    for (int64_t c = 0; c < chunks; c += step) {
      add_chunks<KIND>(t, s, passes, num_passes, group * chunks + c, smaller(step, chunks - c));
    }
  }
}

}  // namespace RQ_ISA
}  // namespace rq
