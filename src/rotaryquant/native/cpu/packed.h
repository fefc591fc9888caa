// Attention of a tile on packed rows: exact integer products of levels with int8 queries and with probabilities of
// seven or fourteen bits, an fp32 softmax between them.
#pragma once

#include "codes.h"
#include "tile.h"

namespace rq {
namespace RQ_ISA {

// What can still be seen of one block. Rows outside [first, last) have scales of zero.
struct PackedKeys {
  int64_t first, last;    // rows of the block
  int64_t begin, end;     // the same in whole strips
  int64_t filled;         // rows that hold codes
  const uint8_t *key_codes, *value_codes;
  const uint8_t *next_keys, *next_values;  // codes of the block that follows; null: it is the last
  int32_t positions[kBlock];
  // Of each query row: the weight of the block's largest logit on the running maximum.
  float weight[kTile + VL];
};

// Where a block's largest probability weighs at most this much of what a query row has summed so far, seven bits of
// it are enough: 128 probabilities that err by up to half a step of 1/127 are off by half of it, 0.8% of the sum if
// all err on one side. Each row decides for itself, so that its result does not depend on its neighbours.
constexpr float kCoarseWeight = 1.0f / 64;

// ---- levels ---------------------------------------------------------------------------------------------------

RQ_INLINE bool sealed_strip(const Stream& stream, int64_t filled, int64_t strip) {
  return has_strips(stream.codec.width) && (strip + 1) * kStrip <= filled;
}

// Codes of an open strip as rows of bytes, zeros where there are none.
template <int BITS>
RQ_INLINE void open_codes(const Stream& stream, const uint8_t* block, int64_t strip, int64_t filled, int64_t columns,
                          uint8_t* codes) {
  memset(codes, 0, (size_t)(kStrip * columns));
  for (int64_t r = 0; r < smaller(kStrip, filled - strip * kStrip); r++) {
    unpack_canonical<BITS>(block + (strip * kStrip + r) * stream.code_row, stream.codec.width, codes + r * columns);
  }
}

// Levels of `chunks` chunks of a strip from `chunk` on, those of one chunk `step` bytes after those of the last.
template <int BITS>
RQ_INLINE void strip_levels(const LevelTable& table, const Stream& stream, const uint8_t* block, int64_t strip,
                            int64_t filled, int64_t columns, int64_t chunk, int64_t chunks, uint8_t* codes,
                            uint8_t* levels, int64_t step) {
  if (sealed_strip(stream, filled, strip)) {
    const uint8_t* in = block + strip * kStrip * stream.code_row + chunk * chunk_bytes(BITS);
    for (int64_t c = 0; c < chunks; c++) level_chunk<BITS>(table, in + c * chunk_bytes(BITS), levels + c * step);
    return;
  }
  open_codes<BITS>(stream, block, strip, filled, columns, codes);
  for (int64_t c = 0; c < chunks; c++) {
    gather_chunk(codes + (chunk + c) * kChunkColumns, columns, stream.codec.keys, levels + c * step);
    look_up_chunk<BITS>(table, levels + c * step);
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------

// Scales of a block's rows for one group of columns, zeros outside [first, last).
RQ_INLINE void row_scales(const Stream& stream, const uint16_t* scales, const PackedKeys& s, int64_t group,
                          float* out) {
  const uint16_t* from = scales + group * stream.scale_group;
  const bool brain = stream.codec.scale_dtype == Dtype::bf16;
  for (int64_t k = s.begin; k < s.end; k += VL) {
    uint16_t gathered[VL];
    const uint16_t* bits = from + k;
    if (stream.scale_row != 1) {
      for (int64_t i = 0; i < VL; i++) gathered[i] = from[(k + i) * stream.scale_row];
      bits = gathered;
    }
    vf scale = brain ? load_bf16(bits) : load_f16(bits);
    if (k < s.first || k + VL > s.last) {
      const vi row = lane_index() + (int32_t)k;
      scale = select((row >= (int32_t)s.first) & (row < (int32_t)s.last), scale, (vf){});
    }
    store(out + k, scale);
  }
}

// `bytes` bytes of codes of the next block from `offset` on, in so many steps; of what is at hand where there is none.
RQ_INLINE Ahead ahead_of(const Tile& t, const uint8_t* next, int64_t offset, int64_t bytes, int64_t steps) {
  return next ? Ahead{next + offset, bytes / steps} : Ahead{t.levels, 0};
}

// Whether products of a strip are made from its codes: where the levels would not be used again.
template <int BITS>
RQ_INLINE bool from_codes(const Tile& t, const Stream& stream, int64_t filled, int64_t strip) {
  return RQ_LANES == 16 && BITS <= 4 && t.count <= kPass && sealed_strip(stream, filled, strip);
}

// dots[r][row] of a strip and `rows` query rows from `first` on; t.levels holds the strip unless `direct`.
template <int BITS>
RQ_INLINE void strip_dots(const Tile& t, const PackedKeys& s, int64_t strip, int64_t first, int64_t rows, bool direct,
                          int32_t* dots) {
  const int64_t bytes = kStrip * t.args->keys.code_row, stride = 4 * t.key_columns;
  const Ahead ahead =
      ahead_of(t, first == 0 ? s.next_keys : nullptr, strip * bytes, bytes, kKeyLoops * t.key_columns / 4);
  const int8_t* q = t.q_high + first * t.key_columns;
  const int32_t* bias = t.q_high_bias + first;
#if RQ_LANES == 16
  if (BITS <= 4 && direct) {
    const uint8_t* codes = s.key_codes + strip * bytes;
    const int64_t chunks = t.key_columns / kChunkColumns;
#define RQ_CALL(NR) key_code_products<BITS, NR>(*t.key_table, codes, chunks, q, stride, bias, ahead, dots)
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
template <int BITS, bool NOISY>
RQ_INLINE void score_strip(const Tile& t, const PackedKeys& s, int64_t strip, bool direct, const float* scales,
                           const float* squares) {
  int32_t dots[kPass * kStrip];
  for (int64_t first = 0; first < t.count; first += kPass) {
    const int64_t rows = smaller(kPass, t.count - first);
    strip_dots<BITS>(t, s, strip, first, rows, direct, dots);
    for (int64_t r = 0; r < rows; r++) {
      const vf step = splat(t.q_step[first + r]), bias = splat(t.bias[first + r]), noise = splat(t.noise[first + r]);
      float* row = t.scores + (first + r) * kBlock + strip * kStrip;
      RQ_UNROLL for (int64_t k = 0; k < kStrip; k += VL) {
        const vf x = to_f32(load_i32(dots + r * kStrip + k)) * step;
        vf score = x * load(scales + strip * kStrip + k) + bias;
        if (NOISY) score -= maximum((vf){}, noise - x * x * t.noise_score) * load(squares + strip * kStrip + k);
        store(row + k, score);
      }
    }
  }
}

// scores[r][k] of a strip += products over one group of columns times the group's scale.
RQ_INLINE void add_products(const Tile& t, const int8_t* q, const int32_t* sums, float factor, int64_t group,
                            int64_t strip, const float* scales) {
  const int64_t groups = t.args->keys.codec.groups(), quads = t.key_columns / 4 / groups;
  int32_t dots[kPass * kStrip];
  for (int64_t first = 0; first < t.count; first += kPass) {
    const int64_t rows = smaller(kPass, t.count - first);
#define RQ_CALL(NR)                                                                                             \
  key_products<NR>(t.levels, group * quads, (group + 1) * quads, q + first * t.key_columns, 4 * t.key_columns, \
                   sums + group * round_up(t.lanes, VL) + first, Ahead{t.levels, 0}, dots)
    RQ_FOR_ROWS(rows, RQ_CALL)
#undef RQ_CALL
    for (int64_t r = 0; r < rows; r++) {
      float* row = t.scores + (first + r) * kBlock + strip * kStrip;
      for (int64_t k = 0; k < kStrip; k += VL) {
        const vf product = to_f32(load_i32(dots + r * kStrip + k)) * load(scales + strip * kStrip + k);
        store(row + k, load(row + k) + product * factor);
      }
    }
  }
}

// The same logits where a row has several scales, or queries two bytes.
template <int BITS>
RQ_INLINE void score_strip_in_parts(const Tile& t, const PackedKeys& s, const uint16_t* scales, int64_t strip) {
  const Stream& keys = t.args->keys;
  float row_scale[kBlock];
  for (int64_t r = 0; r < t.count; r++) {
    for (int64_t k = 0; k < kStrip; k += VL) store(t.scores + r * kBlock + strip * kStrip + k, (vf){});
  }
  for (int64_t group = 0; group < keys.codec.groups(); group++) {
    row_scales(keys, scales, s, group, row_scale);
    add_products(t, t.q_high, t.q_high_bias, 1.0f, group, strip, row_scale);
    if (BITS == 8) add_products(t, t.q_low, t.q_low_bias, 1.0f / 128, group, strip, row_scale);
  }
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock + strip * kStrip;
    for (int64_t k = 0; k < kStrip; k += VL) store(row + k, load(row + k) * t.q_step[r] + t.bias[r]);
  }
}

template <int BITS>
void score_block(const Tile& t, const PackedKeys& s, const uint16_t* scales) {
  const Stream& keys = t.args->keys;
  const bool in_parts = BITS == 8 || keys.codec.groups() > 1;
  float row_scale[kBlock], square[kBlock];
  row_scales(keys, scales, s, 0, row_scale);
  for (int64_t k = s.begin; k < s.end; k += VL) store(square + k, load(row_scale + k) * load(row_scale + k));
  for (int64_t strip = s.begin / kStrip; strip < s.end / kStrip; strip++) {
    const bool direct = !in_parts && from_codes<BITS>(t, keys, s.filled, strip);
    if (!direct) {
      strip_levels<BITS>(*t.key_table, keys, s.key_codes, strip, s.filled, t.key_columns, 0,
                         t.key_columns / kChunkColumns, t.codes, t.levels, kChunkVectors * kVector);
    }
    if (in_parts) score_strip_in_parts<BITS>(t, s, scales, strip);
    else if (t.args->noise_query > 0) score_strip<BITS, true>(t, s, strip, direct, row_scale, square);
    else score_strip<BITS, false>(t, s, strip, direct, row_scale, square);
  }
}

// ---- probabilities --------------------------------------------------------------------------------------------

// Logits of NR <= 4 rows from `first` on become probabilities relative to the largest of the block. What the block weighs
// on the new running maximum is left in s.weight, what everything before it does in t.factor.
template <int NR>
RQ_INLINE void softmax_rows(const Tile& t, PackedKeys& s, int64_t first) {
  float *rows = t.scores + first * kBlock, shift[VL];
  vf most[4], total[4];
  RQ_UNROLL for (int r = 0; r < 4; r++) {
    most[r] = splat(-kInfinity);
    total[r] = (vf){};
  }
  const int64_t begin = s.begin, end = s.end;
  for (int64_t k = begin; k < end; k += VL) {
    RQ_UNROLL for (int r = 0; r < NR; r++) most[r] = maximum(load(rows + r * kBlock + k), most[r]);
  }
  const vf found = over_lanes<Most>(most), before = load(t.top + first), top = maximum(found, before);
  // A row that has seen nothing: no infinity less itself.
  const vf safe = select(top == -kInfinity, (vf){}, top);
  const vf factor = exp2_nonpositive(before - safe), weight = exp2_nonpositive(found - safe);
  store(shift, select(found == -kInfinity, (vf){}, found));
  for (int64_t k = begin; k < end; k += VL) {
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      const vf p = exp2_roughly(load(rows + r * kBlock + k) - shift[r]);
      total[r] += p;
      store(rows + r * kBlock + k, p);
    }
  }
  store_four(t.total + first, load(t.total + first) * factor + over_lanes<Add>(total) * weight);
  store_four(t.top + first, top);
  store_four(t.factor + first, factor);
  store_four(s.weight + first, weight);
}

RQ_INLINE void packed_softmax(const Tile& t, PackedKeys& s, bool masked) {
  for (int64_t r = 0; r < t.count && t.softcap > 0; r++) {
    float* row = t.scores + r * kBlock;
    for (int64_t k = s.begin; k < s.end; k += VL) store(row + k, cap(load(row + k), t.softcap));
  }
  for (int64_t r = 0; r < t.count && s.end - s.begin > s.last - s.first; r++) {
    float* row = t.scores + r * kBlock;
    for (int64_t k = s.begin; k < s.first; k++) row[k] = -kInfinity;
    for (int64_t k = s.last; k < s.end; k++) row[k] = -kInfinity;
  }
  if (masked) hide(t, s.positions, s.last, true);
  for (int64_t first = 0; first < t.count; first += 4) {
#define RQ_CALL(NR) softmax_rows<NR>(t, s, first)
    RQ_FOR_FOUR(t.count - first, RQ_CALL)
#undef RQ_CALL
  }
}

// ---- values ---------------------------------------------------------------------------------------------------

// Rows of one pass: their probabilities times the values' scales as bytes, and how much one step of the high ones adds
// to `out`.
struct Pass {
  int64_t first, rows;
  bool coarse;  // all low bytes are zero
  int32_t high_bias[kPass], low_bias[kPass];  // what products start from
  float step[kPass];
};

RQ_INLINE bool coarse_row(const Tile& t, const PackedKeys& s, int64_t r) {
  return s.weight[r] <= kCoarseWeight * t.total[r];
}

// `rounded` = probabilities of NR <= 4 rows, none above 1, in steps of 127; the low bytes only where they are asked for.
template <int NR>
RQ_INLINE void round_rows(const PackedKeys& s, const float* rows, const float* steps, const bool* coarse, int8_t* high,
                          int8_t* low) {
  for (int64_t k = s.begin; k < s.end; k += VL) {
    const vf step = load(steps + k);
    vi upper[4] = {}, lower[4] = {};
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      const vf p = load(rows + r * kBlock + k) * step;
      if (!low || coarse[r]) {
        upper[r] = round_to_i32(p);
      } else {
        const vi fine = round_to_i32(p * 128.0f);
        upper[r] = fine >> 7;
        lower[r] = fine & 127;
      }
    }
    store_quads(high + 4 * k, upper[0], upper[1], upper[2], upper[3]);
    if (low) store_quads(low + 4 * k, lower[0], lower[1], lower[2], lower[3]);
  }
}

// What the bias of levels adds to products with four interleaved rows of bytes within 0 .. 127, negated.
RQ_INLINE void sum_rows(const PackedKeys& s, const int8_t* bytes, int32_t* sums) {
  vi sum = {};
  for (int64_t at = 4 * s.begin; at < 4 * s.end; at += RQ_BYTES) {
    sum = dot4(sum, load_bytes((const uint8_t*)bytes + at), kLevelBias ? 0x01010101 : 0);
  }
  if constexpr (VL >= 16) sum += as_i32(swap_lanes<8>(as_f32(sum)));
  if constexpr (VL >= 8) sum += as_i32(swap_lanes<4>(as_f32(sum)));
  sum = -kLevelBias * sum;
  memcpy(sums, &sum, 4 * sizeof(int32_t));
}

// steps[k]: the scale of value k in steps, 127 for `largest`, which is the largest of them.
RQ_INLINE void round_pass(const Tile& t, const PackedKeys& s, const float* steps, float largest, Pass& pass) {
  bool coarse[kPass];
  pass.coarse = true;
  for (int64_t i = 0; i < pass.rows; i++) {
    coarse[i] = coarse_row(t, s, pass.first + i);
    pass.coarse = pass.coarse && coarse[i];
    pass.step[i] = s.weight[pass.first + i] * largest * (1.0f / 127.0f);
  }
  for (int64_t i = 0; i < pass.rows; i += 4) {
    const float* rows = t.scores + (pass.first + i) * kBlock;
    int8_t *high = t.p_high + (pass.first + i) * kBlock, *low = pass.coarse ? nullptr : t.p_low + (pass.first + i) * kBlock;
#define RQ_CALL(NR) round_rows<NR>(s, rows, steps, coarse + i, high, low)
    RQ_FOR_FOUR(pass.rows - i, RQ_CALL)
#undef RQ_CALL
    if (!kLevelBias) continue;
    sum_rows(s, high, pass.high_bias + i);
    if (low) sum_rows(s, low, pass.low_bias + i);
  }
}

// out of the pass = what it was, shrunk, + sums of products with NC chunks of values from `chunk` on.
template <int NC>
RQ_INLINE void add_sums(const Tile& t, const Pass& pass, int64_t chunk, const int32_t* upper, const int32_t* lower) {
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

// sums[r][chunk][column]: products of interleaved bytes of a pass with NC chunks of values from `chunk` on. levels: of
// those chunks; null: they are looked up from their codes.
template <int BITS, int NC>
RQ_INLINE void value_dots(const Tile& t, const PackedKeys& s, const Pass& pass, int64_t chunk, const uint8_t* levels,
                          const int8_t* p, const int32_t* bias, Ahead ahead, int32_t* sums) {
  const int64_t strips = (s.end - s.begin) / kStrip;
#if RQ_LANES == 16
  if (BITS <= 4 && !levels) {
    const int64_t strip_bytes = kStrip * t.args->values.code_row;
    const uint8_t* codes = s.value_codes + s.begin / kStrip * strip_bytes + chunk * chunk_bytes(BITS);
#define RQ_CALL(NR) \
  value_code_products<BITS, NR, NC>(*t.value_table, codes, strip_bytes, strips, p, 4 * kBlock, bias, ahead, sums)
    RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
    return;
  }
#else
  (void)t, (void)chunk;
#endif
#define RQ_CALL(NR) value_products<NR, NC>(levels, strips, p, 4 * kBlock, bias, ahead, sums)
  RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
}

// out of the pass += products of its probabilities with those chunks.
template <int BITS, int NC>
RQ_INLINE void add_values(const Tile& t, const PackedKeys& s, const Pass& pass, int64_t chunk, const uint8_t* levels) {
  const int64_t bytes = kStrips * chunk_bytes(BITS), at = pass.first * kBlock + 4 * s.begin;
  const int64_t steps = kValueLoops * (s.end - s.begin) / kStrip * kChunkVectors;
  const Ahead none = {t.levels, 0};
  const Ahead ahead = ahead_of(t, pass.first == 0 ? s.next_values : nullptr, chunk * bytes, NC * bytes, steps);
  int32_t upper[kPass * NC * kChunkColumns], lower[kPass * NC * kChunkColumns];
  value_dots<BITS, NC>(t, s, pass, chunk, levels, t.p_high + at, pass.high_bias, ahead, upper);
  if (!pass.coarse) value_dots<BITS, NC>(t, s, pass, chunk, levels, t.p_low + at, pass.low_bias, none, lower);
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

// out of all rows += their probabilities times `count` <= kValueChunks chunks of values from `chunk` on.
template <int BITS>
RQ_INLINE void add_chunks(const Tile& t, const PackedKeys& s, const Pass* passes, int64_t num_passes, int64_t chunk,
                          int64_t count) {
  constexpr int pair = kManyRegisters ? 2 : 1;
  const int64_t strips = (s.end - s.begin) / kStrip;
  const bool direct = from_codes<BITS>(t, t.args->values, s.filled, s.end / kStrip - 1);
  const int64_t step = direct ? 0 : strips * kChunkVectors * kVector;
  for (int64_t strip = 0; strip < strips && !direct; strip++) {
    strip_levels<BITS>(*t.value_table, t.args->values, s.value_codes, s.begin / kStrip + strip, s.filled,
                       t.value_columns, chunk, count, t.codes, t.levels + strip * kChunkVectors * kVector, step);
  }
  for (int64_t i = 0; i < num_passes; i++) {
    const uint8_t* levels = direct ? nullptr : t.levels;
    if (count == kValueChunks && passes[i].rows <= 3) {
      add_values<BITS, kValueChunks>(t, s, passes[i], chunk, levels);
      continue;
    }
    int64_t c = 0;
    for (; c + pair <= count; c += pair) {
      add_values<BITS, pair>(t, s, passes[i], chunk + c, levels ? levels + c * step : nullptr);
    }
    for (; c < count; c++) add_values<BITS, 1>(t, s, passes[i], chunk + c, levels ? levels + c * step : nullptr);
  }
}

template <int BITS>
void add_block(const Tile& t, PackedKeys& s, const uint16_t* scales) {
  const Stream& values = t.args->values;
  const int64_t groups = values.codec.groups(), chunks = t.value_columns / kChunkColumns / groups;
  const int64_t num_passes = (t.count + kPass - 1) / kPass;
  Pass passes[kTile / kPass];
  float steps[kBlock];
  for (int64_t group = 0; group < groups; group++) {
    row_scales(values, scales, s, group, steps);
    vf most = {};
    for (int64_t k = s.begin; k < s.end; k += VL) most = maximum(load(steps + k), most);
    const float largest = max_lane(most), per_scale = largest > 0 ? 127.0f / largest : 0.0f;
    for (int64_t k = s.begin; k < s.end; k += VL) store(steps + k, load(steps + k) * per_scale);
    for (int64_t i = 0; i < num_passes; i++) {
      passes[i].first = i * kPass;
      passes[i].rows = smaller(kPass, t.count - i * kPass);
      round_pass(t, s, steps, largest, passes[i]);
    }
    for (int64_t c = 0; c < chunks; c += kValueChunks) {
      add_chunks<BITS>(t, s, passes, num_passes, group * chunks + c, smaller(kValueChunks, chunks - c));
    }
  }
}

// ---- blocks ---------------------------------------------------------------------------------------------------

// Rounds the queries of a tile to bytes. q_rotated in the order of the tile's rows.
RQ_INLINE void round_queries(const Tile& t) {
  const AttentionArgs& args = *t.args;
  const int64_t groups = args.keys.codec.groups(), lanes = round_up(t.lanes, VL), columns = t.key_columns;
  const bool fine = args.keys.codec.bits == 8;
  const int64_t group = groups == 1 ? columns : args.keys.codec.group;
  float rows[4][kMaxPadded];
  for (int64_t first = 0; first < t.lanes; first += 4) {
    float steps[4] = {};  // per unit of a query
    memset(rows, 0, sizeof rows);
    for (int64_t i = 0; i < 4 && first + i < t.count; i++) {
      const int64_t r = first + i;
      t.q_step[r] = 0;
      if (t.query_positions[r] < 0) continue;
      int64_t head, row;
      float* q = rows[i];
      memcpy(q, args.q_rotated + query_row(t, r, &head, &row) * t.key_width, (size_t)t.key_width * sizeof(float));
      vf most = {}, energy = {};
      for (int64_t c = 0; c < columns; c += VL) {
        most = maximum(absolute(load(q + c)), most);
        energy += load(q + c) * load(q + c);
      }
      const float largest = max_lane(most);
      t.noise[r] = args.noise_query * args.scale * args.scale * sum(energy) * kLog2E;
      if (largest == 0) continue;
      t.q_step[r] = largest / 127.0f * args.scale * kLog2E;
      steps[i] = (fine ? 127.0f * 128.0f : 127.0f) / largest;
    }
    for (int64_t g = 0; g < groups; g++) {
      vi high_sum[4] = {}, low_sum[4] = {};
      for (int64_t c = g * group; c < (g + 1) * group; c += VL) {
        vi upper[4], lower[4];
        RQ_UNROLL for (int i = 0; i < 4; i++) {
          const vi step = round_to_i32(load(rows[i] + c) * steps[i]);
          upper[i] = fine ? (step + 64) >> 7 : step;
          lower[i] = fine ? step - (upper[i] << 7) : (vi){};
          high_sum[i] += upper[i];
          low_sum[i] += lower[i];
        }
        store_quads(t.q_high + first * columns + 4 * c, upper[0], upper[1], upper[2], upper[3]);
        if (fine) store_quads(t.q_low + first * columns + 4 * c, lower[0], lower[1], lower[2], lower[3]);
      }
      for (int64_t i = 0; i < 4; i++) {
        t.q_high_bias[g * lanes + first + i] = -kLevelBias * sum_i32(high_sum[i]);
        t.q_low_bias[g * lanes + first + i] = -kLevelBias * sum_i32(low_sum[i]);
      }
    }
  }
}

template <int BITS>
RQ_INLINE void make_table(LevelTable* table, const Codec& codec) {
  *table = make_level_table<BITS>(codec.levels);
}

#define RQ_FOR_BITS(bits, CALL) \
  switch (bits) {               \
    case 2: CALL(2); break;     \
    case 3: CALL(3); break;     \
    case 4: CALL(4); break;     \
    default: CALL(8);           \
  }

RQ_INLINE void attend_packed(const Tile& t, PackedKeys& s) {
  const AttentionArgs& args = *t.args;
  const int64_t batch = t.unit->batch, packed_len = args.packed_lens[batch];
  round_queries(t);
#define RQ_CALL(BITS) make_table<BITS>(t.key_table, args.keys.codec)
  RQ_FOR_BITS(args.keys.codec.bits, RQ_CALL)
#undef RQ_CALL
#define RQ_CALL(BITS) make_table<BITS>(t.value_table, args.values.codec)
  RQ_FOR_BITS(args.values.codec.bits, RQ_CALL)
#undef RQ_CALL
  // Only keys that some query of the tile may see.
  int64_t begin = args.num_sinks, end = packed_len;
  if (args.causal) end = smaller(end, t.last_position + 1);
  if (args.window > 0) begin = larger(begin, t.first_position - args.window + 1);
  for (int64_t i = t.unit->block_begin; i < t.unit->block_end; i++) {
    const int64_t first = larger(begin, i * kBlock), last = smaller(end, (i + 1) * kBlock);
    if (first >= last) continue;
    const int64_t block = args.block_table[batch * args.max_blocks + i];
    s.first = first - i * kBlock;
    s.last = last - i * kBlock;
    s.begin = s.first / kStrip * kStrip;
    s.end = round_up(s.last, kStrip);
    s.filled = smaller(kBlock, packed_len - i * kBlock);
    s.key_codes = args.keys.code_rows(block, t.unit->kv_head);
    s.value_codes = args.values.code_rows(block, t.unit->kv_head);
    const bool more = i + 1 < t.unit->block_end && (i + 1) * kBlock < end;
    const int64_t next = more ? args.block_table[batch * args.max_blocks + i + 1] : 0;
    s.next_keys = more ? args.keys.code_rows(next, t.unit->kv_head) : nullptr;
    s.next_values = more ? args.values.code_rows(next, t.unit->kv_head) : nullptr;
    const bool masked = needs_mask(t, first, last - 1);
    if (masked) {
      for (int64_t k = 0; k < kBlock; k++) s.positions[k] = (int32_t)(i * kBlock + k);
    }
#define RQ_CALL(BITS) score_block<BITS>(t, s, args.keys.scale_rows(block, t.unit->kv_head))
    RQ_FOR_BITS(args.keys.codec.bits, RQ_CALL)
#undef RQ_CALL
    packed_softmax(t, s, masked);
#define RQ_CALL(BITS) add_block<BITS>(t, s, args.values.scale_rows(block, t.unit->kv_head))
    RQ_FOR_BITS(args.values.codec.bits, RQ_CALL)
#undef RQ_CALL
  }
}

}  // namespace RQ_ISA
}  // namespace rq
