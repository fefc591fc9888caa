// Attention of a tile on packed rows: rounds its queries, then takes span after span.
#pragma once

#include "packed_scores.h"
#include "packed_values.h"

namespace rq {
namespace RQ_ISA {

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
        store_quads(t.q_high + first * columns + 4 * c, upper[0], upper[1], upper[2], upper[3], false);
        if (fine) store_quads(t.q_low + first * columns + 4 * c, lower[0], lower[1], lower[2], lower[3], false);
      }
      for (int64_t i = 0; i < 4; i++) {
        t.q_high_bias[g * lanes + first + i] = -kLevelBias * sum_i32(high_sum[i]);
        t.q_low_bias[g * lanes + first + i] = -kLevelBias * sum_i32(low_sum[i]);
      }
    }
  }
}

#define RQ_FOR_KIND(kind, CALL)           \
  switch (kind) {                         \
    case 2: CALL(2); break;               \
    case 3: CALL(3); break;               \
    case 4: CALL(4); break;               \
    case 66: CALL(66); break;             \
    case 67: CALL(67); break;             \
    case 68: CALL(68); break;             \
    default: CALL(8);                     \
  }

RQ_INLINE void attend_packed(const Tile& t, Span& s) {
  const AttentionArgs& args = *t.args;
  const Codec &keys = args.keys.codec, &values = args.values.codec;
  const int64_t packed_len = args.packed_lens[t.unit->batch];
  round_queries(t);
#define RQ_CALL(KIND) *t.key_table = make_level_table<KIND>(keys.levels, kLevelBias)
  RQ_FOR_KIND(keys.kind(), RQ_CALL)
#undef RQ_CALL
#define RQ_CALL(KIND) *t.value_table = make_level_table<KIND>(values.levels, 0)
  RQ_FOR_KIND(values.kind(), RQ_CALL)
#undef RQ_CALL
  // Only keys that some query of the tile may see.
  int64_t begin = args.num_sinks, end = packed_len;
  if (args.causal) end = smaller(end, t.last_position + 1);
  if (args.window > 0) begin = larger(begin, t.first_position - args.window + 1);
  for (int64_t i = larger(t.unit->block_begin, begin / kBlock), blocks; i < t.unit->block_end; i += blocks) {
    blocks = open_span(args, *t.unit, packed_len, i, s);
    const int64_t first = larger(begin, i * kBlock), last = smaller(end, (i + blocks) * kBlock);
    if (first >= last) break;
    s.first = first - i * kBlock;
    s.last = last - i * kBlock;
    s.begin = s.first / kStrip * kStrip;
    s.end = round_up(s.last, kStrip);
    const bool masked = needs_mask(t, first, last - 1);
    if (masked) {
      for (int64_t k = 0; k < blocks * kBlock; k++) s.positions[k] = (int32_t)(i * kBlock + k);
    }
#define RQ_CALL(KIND) score_span<KIND>(t, s)
    RQ_FOR_KIND(keys.kind(), RQ_CALL)
#undef RQ_CALL
    float scales[kSpan];
    row_scales(args.values, s.value_scales, s, 0, scales);
    packed_softmax(t, s, scales, masked);
#define RQ_CALL(KIND) add_span<KIND>(t, s)
    RQ_FOR_KIND(values.kind(), RQ_CALL)
#undef RQ_CALL
  }
}

}  // namespace RQ_ISA
}  // namespace rq
