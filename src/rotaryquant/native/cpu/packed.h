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
  int32_t positions[kBlock];
  // Of each query row: the weight of the block's largest logit on the running maximum, and the largest probability
  // times a value's scale.
  float weight[kTile], largest[kTile];
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

// Logits of one strip where each row has one scale and queries one byte. NOISY: half the variance of the codes'
// noise, which is never negative, is taken off.
template <bool NOISY>
RQ_INLINE void score_strip(const Tile& t, int64_t strip, const float* scales, const float* squares) {
  int32_t dots[kPass * kStrip];
  for (int64_t first = 0; first < t.count; first += kPass) {
    const int64_t rows = smaller(kPass, t.count - first);
#define RQ_CALL(NR)                                                                                   \
  key_products<NR>(t.levels, 0, t.key_columns / 4, t.q_high + first * t.key_columns, t.key_columns, \
                   t.q_high_sum + first, dots)
    RQ_FOR_ROWS(rows, RQ_CALL)
#undef RQ_CALL
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
  key_products<NR>(t.levels, group * quads, (group + 1) * quads, q + first * t.key_columns, t.key_columns, \
                   sums + group * round_up(t.lanes, VL) + first, dots)
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
    add_products(t, t.q_high, t.q_high_sum, 1.0f, group, strip, row_scale);
    if (BITS == 8) add_products(t, t.q_low, t.q_low_sum, 1.0f / 128, group, strip, row_scale);
  }
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock + strip * kStrip;
    for (int64_t k = 0; k < kStrip; k += VL) store(row + k, load(row + k) * t.q_step[r] + t.bias[r]);
  }
}

template <int BITS>
void score_block(const Tile& t, const PackedKeys& s, const uint16_t* scales) {
  const Stream& keys = t.args->keys;
  const LevelTable& table = *t.key_table;
  const bool in_parts = BITS == 8 || keys.codec.groups() > 1;
  float row_scale[kBlock], square[kBlock];
  row_scales(keys, scales, s, 0, row_scale);
  for (int64_t k = s.begin; k < s.end; k += VL) store(square + k, load(row_scale + k) * load(row_scale + k));
  for (int64_t strip = s.begin / kStrip; strip < s.end / kStrip; strip++) {
    strip_levels<BITS>(table, keys, s.key_codes, strip, s.filled, t.key_columns, 0, t.key_columns / kChunkColumns,
                       t.codes, t.levels, kChunkVectors * kVector);
    if (in_parts) score_strip_in_parts<BITS>(t, s, scales, strip);
    else if (t.args->noise_query > 0) score_strip<true>(t, strip, row_scale, square);
    else score_strip<false>(t, strip, row_scale, square);
  }
}

// ---- probabilities --------------------------------------------------------------------------------------------

// Logits become probabilities relative to the largest of the block, times the values' scales. What the block weighs
// on the new running maximum is left in s.weight, what everything before it does in t.factor.
RQ_INLINE void packed_softmax(const Tile& t, PackedKeys& s, const float* scales, bool masked) {
  for (int64_t r = 0; r < t.count && t.softcap > 0; r++) {
    float* row = t.scores + r * kBlock;
    for (int64_t k = s.begin; k < s.end; k += VL) store(row + k, cap(load(row + k), t.softcap));
  }
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock;
    for (int64_t k = s.begin; k < s.first; k++) row[k] = -kInfinity;
    for (int64_t k = s.last; k < s.end; k++) row[k] = -kInfinity;
  }
  if (masked) hide(t, s.positions, s.last, true);
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock;
    vf most = splat(-kInfinity);
    for (int64_t k = s.begin; k < s.end; k += VL) most = maximum(load(row + k), most);
    const float found = max_lane(most), top = found > t.top[r] ? found : t.top[r];
    const float safe = top == -kInfinity ? 0.0f : top, own = found == -kInfinity ? 0.0f : found;
    const vf weights = exp2_nonpositive(lane_index() == 0 ? splat(t.top[r] - safe) : splat(found - safe));
    t.factor[r] = weights[0];
    s.weight[r] = weights[1];
    t.top[r] = top;
    vf total = {}, largest = {};
    for (int64_t k = s.begin; k < s.end; k += VL) {
      const vf p = exp2_nonpositive(load(row + k) - own), scaled = p * load(scales + k);
      total += p;
      largest = maximum(scaled, largest);
      store(row + k, scaled);
    }
    s.largest[r] = max_lane(largest);
    t.total[r] = t.total[r] * t.factor[r] + sum(total) * s.weight[r];
  }
}

// Sum of bytes within 0 .. 127 where products need it to take the bias of levels off, times the bias.
RQ_INLINE int32_t bias_of(const int8_t* bytes, int64_t begin, int64_t end) {
  if (!kLevelBias) return 0;
  vi sum = {};
  const int64_t whole = begin + (end - begin) / RQ_BYTES * RQ_BYTES;
  for (int64_t k = begin; k < whole; k += RQ_BYTES) sum = dot4(sum, load_bytes((const uint8_t*)bytes + k), 0x01010101);
  int32_t total = sum_i32(sum);
  for (int64_t k = whole; k < end; k++) total += bytes[k];
  return kLevelBias * total;
}

// One query row's scaled probabilities as bytes: 128 * high + low steps of their largest / (127 * 128).
RQ_INLINE void round_coarsely(const PackedKeys& s, const float* row, float largest, int8_t* high, int8_t* low) {
  const vf per_step = splat(largest > 0 ? 127.0f / largest : 0.0f);
  for (int64_t k = s.begin; k < s.end; k += VL) store_u8((uint8_t*)high + k, round_to_i32(load(row + k) * per_step));
  if (low) memset(low + s.begin, 0, (size_t)(s.end - s.begin));
}

RQ_INLINE void round_finely(const PackedKeys& s, const float* row, float largest, int8_t* high, int8_t* low) {
  const vf per_step = splat(largest > 0 ? 127.0f * 128.0f / largest : 0.0f);
  for (int64_t k = s.begin; k < s.end; k += VL) {
    const vi step = round_to_i32(load(row + k) * per_step);
    store_u8((uint8_t*)high + k, step >> 7);
    store_u8((uint8_t*)low + k, step & 127);
  }
}

// ---- values ---------------------------------------------------------------------------------------------------

// Rows of one pass: their probabilities as bytes, and how much a step of them adds to `out`.
struct Pass {
  int64_t first, rows;
  bool coarse;  // all low bytes are zero
  int32_t high_sum[kPass], low_sum[kPass];
  float step[kPass];
};

// out of the pass += products of its probabilities with NC chunks of values from `chunk` on, whose levels are given.
template <int NC>
RQ_INLINE void add_values(const Tile& t, const PackedKeys& s, const Pass& pass, int64_t chunk, const uint8_t* levels) {
  const int64_t strips = (s.end - s.begin) / kStrip;
  const int8_t *high = t.p_high + pass.first * kBlock + s.begin, *low = t.p_low + pass.first * kBlock + s.begin;
  int32_t upper[kPass * NC * kChunkColumns], lower[kPass * NC * kChunkColumns];
#define RQ_CALL(NR) value_products<NR, NC>(levels, strips, high, kBlock, pass.high_sum, upper)
  RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
  if (!pass.coarse) {
#define RQ_CALL(NR) value_products<NR, NC>(levels, strips, low, kBlock, pass.low_sum, lower)
    RQ_FOR_ROWS(pass.rows, RQ_CALL)
#undef RQ_CALL
  }
  for (int64_t r = 0; r < pass.rows; r++) {
    float* out = t.out + (pass.first + r) * t.value_columns + chunk * kChunkColumns;
    const vf step = splat(pass.step[r]), factor = splat(t.factor[pass.first + r]);
    for (int64_t i = 0; i < NC * kChunkColumns; i += VL) {
      vf sum = to_f32(load_i32(upper + r * NC * kChunkColumns + i)) * 128.0f;
      if (!pass.coarse) sum += to_f32(load_i32(lower + r * NC * kChunkColumns + i));
      store(out + i, load(out + i) * factor + sum * step);
    }
  }
}

RQ_INLINE bool coarse_row(const Tile& t, const PackedKeys& s, int64_t r) {
  return s.weight[r] <= kCoarseWeight * t.total[r];
}

// Probabilities of a pass, which `scores` holds times the values' scales, become bytes.
RQ_INLINE void round_pass(const Tile& t, const PackedKeys& s, Pass& pass) {
  pass.coarse = true;
  for (int64_t i = 0; i < pass.rows; i++) pass.coarse = pass.coarse && coarse_row(t, s, pass.first + i);
  for (int64_t i = 0; i < pass.rows; i++) {
    const int64_t r = pass.first + i;
    const float* row = t.scores + r * kBlock;
    int8_t *high = t.p_high + r * kBlock, *low = t.p_low + r * kBlock;
    if (coarse_row(t, s, r)) round_coarsely(s, row, s.largest[r], high, pass.coarse ? nullptr : low);
    else round_finely(s, row, s.largest[r], high, low);
    pass.step[i] = s.weight[r] * s.largest[r] * (1.0f / (127.0f * 128.0f));
    pass.high_sum[i] = bias_of(high, s.begin, s.end);
    pass.low_sum[i] = pass.coarse ? 0 : bias_of(low, s.begin, s.end);
  }
}

// `scores` times the scales of another group of columns instead of those before.
RQ_INLINE void change_scales(const Tile& t, PackedKeys& s, const float* before, const float* scales) {
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock;
    s.largest[r] = 0;
    for (int64_t k = s.begin; k < s.end; k++) {
      row[k] = before[k] != 0 ? row[k] / before[k] * scales[k] : 0.0f;
      s.largest[r] = row[k] > s.largest[r] ? row[k] : s.largest[r];
    }
  }
}

// out of all rows += their probabilities times `count` <= kValueChunks chunks of values from `chunk` on.
template <int BITS>
RQ_INLINE void add_chunks(const Tile& t, const PackedKeys& s, const Pass* passes, int64_t num_passes, int64_t chunk,
                          int64_t count) {
  const int64_t strips = (s.end - s.begin) / kStrip, step = strips * kChunkVectors * kVector;
  for (int64_t strip = 0; strip < strips; strip++) {
    strip_levels<BITS>(*t.value_table, t.args->values, s.value_codes, s.begin / kStrip + strip, s.filled,
                       t.value_columns, chunk, count, t.codes, t.levels + strip * kChunkVectors * kVector, step);
  }
  for (int64_t i = 0; i < num_passes; i++) {
    if (count == kValueChunks && passes[i].rows <= 3) {
      add_values<kValueChunks>(t, s, passes[i], chunk, t.levels);
      continue;
    }
    constexpr int pair = kManyRegisters ? 2 : 1;
    int64_t c = 0;
    for (; c + pair <= count; c += pair) add_values<pair>(t, s, passes[i], chunk + c, t.levels + c * step);
    for (; c < count; c++) add_values<1>(t, s, passes[i], chunk + c, t.levels + c * step);
  }
}

template <int BITS>
void add_block(const Tile& t, PackedKeys& s, const uint16_t* scales) {
  const Stream& values = t.args->values;
  const int64_t groups = values.codec.groups(), chunks = t.value_columns / kChunkColumns / groups;
  const int64_t num_passes = (t.count + kPass - 1) / kPass;
  Pass passes[kTile / kPass];
  float row_scale[2][kBlock];
  for (int64_t group = 0; group < groups; group++) {
    if (group > 0) {
      row_scales(values, scales, s, group - 1, row_scale[0]);
      row_scales(values, scales, s, group, row_scale[1]);
      change_scales(t, s, row_scale[0], row_scale[1]);
    }
    for (int64_t i = 0; i < num_passes; i++) {
      passes[i].first = i * kPass;
      passes[i].rows = smaller(kPass, t.count - i * kPass);
      round_pass(t, s, passes[i]);
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
  memset(t.q_high, 0, (size_t)(t.lanes * columns));
  memset(t.q_low, 0, (size_t)(t.lanes * columns));
  memset(t.q_high_sum, 0, (size_t)(groups * lanes) * sizeof(int32_t));
  memset(t.q_low_sum, 0, (size_t)(groups * lanes) * sizeof(int32_t));
  const bool fine = args.keys.codec.bits == 8;
  const int64_t group = groups == 1 ? columns : args.keys.codec.group;
  float q[kMaxPadded];
  memset(q, 0, sizeof q);
  for (int64_t r = 0; r < t.count; r++) {
    t.q_step[r] = 0;
    if (t.query_positions[r] < 0) continue;
    int64_t head, row;
    memcpy(q, args.q_rotated + query_row(t, r, &head, &row) * t.key_width, (size_t)t.key_width * sizeof(float));
    vf most = {}, energy = {};
    for (int64_t i = 0; i < columns; i += VL) {
      most = maximum(absolute(load(q + i)), most);
      energy += load(q + i) * load(q + i);
    }
    const float largest = max_lane(most), steps = fine ? 127.0f * 128.0f : 127.0f;
    t.noise[r] = args.noise_query * args.scale * args.scale * sum(energy) * kLog2E;
    if (largest == 0) continue;
    t.q_step[r] = largest / 127.0f * args.scale * kLog2E;
    for (int64_t g = 0; g < groups; g++) {
      vi high_sum = {}, low_sum = {};
      for (int64_t i = g * group; i < (g + 1) * group; i += VL) {
        const vi step = round_to_i32(load(q + i) * (steps / largest));
        const vi upper = fine ? (step + 64) >> 7 : step, lower = fine ? step - (upper << 7) : (vi){};
        store_u8((uint8_t*)t.q_high + r * columns + i, upper);
        store_u8((uint8_t*)t.q_low + r * columns + i, lower);
        high_sum += upper;
        low_sum += lower;
      }
      t.q_high_sum[g * lanes + r] = kLevelBias * sum_i32(high_sum);
      t.q_low_sum[g * lanes + r] = kLevelBias * sum_i32(low_sum);
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
    const bool masked = needs_mask(t, first, last - 1);
    if (masked) {
      for (int64_t k = 0; k < kBlock; k++) s.positions[k] = (int32_t)(i * kBlock + k);
    }
#define RQ_CALL(BITS) score_block<BITS>(t, s, args.keys.scale_rows(block, t.unit->kv_head))
    RQ_FOR_BITS(args.keys.codec.bits, RQ_CALL)
#undef RQ_CALL
    float value_scales[kBlock];
    row_scales(args.values, args.values.scale_rows(block, t.unit->kv_head), s, 0, value_scales);
    packed_softmax(t, s, value_scales, masked);
#define RQ_CALL(BITS) add_block<BITS>(t, s, args.values.scale_rows(block, t.unit->kv_head))
    RQ_FOR_BITS(args.values.codec.bits, RQ_CALL)
#undef RQ_CALL
  }
}

}  // namespace RQ_ISA
}  // namespace rq
