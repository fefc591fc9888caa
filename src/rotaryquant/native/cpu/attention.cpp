// Attention of one tile of query rows over exact and packed keys: one online softmax, block by block.
//
// The exact rows come first: they hold the sinks and the newest tokens, on which most of the weight falls, so that
// packed blocks meet a running sum that tells how exactly their probabilities are needed (packed.h, kCoarseWeight).
#include "dense.h"
#include "packed.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

RQ_INLINE void copy_query(const Tile& t, const float* from, int64_t r) {
  const float scale = t.args->scale * kLog2E;
  if (t.narrow) {
    for (int64_t i = 0; i < t.key_width; i++) t.q[r * t.key_padded + i] = from[i] * scale;
  } else {
    for (int64_t i = 0; i < t.key_width; i++) t.q[i * t.lanes + r] = from[i] * scale;
  }
}

void load_queries(Tile& t) {
  const AttentionArgs& args = *t.args;
  const bool dense = args.dense_out && t.unit->dense;
  if (dense) memset(t.q, 0, (size_t)(t.lanes * t.key_padded) * sizeof(float));
  t.softcap = args.softcap * kLog2E;
  t.noise_score = args.noise_score / kLog2E;
  t.pads = false;
  t.first_position = INT64_MAX;
  t.last_position = -1;
  for (int64_t r = 0; r < round_up(t.lanes, VL); r++) {
    t.top[r] = -kInfinity;
    t.total[r] = t.bias[r] = t.noise[r] = 0;
    t.query_positions[r] = -1;
  }
  for (int64_t r = 0; r < t.count; r++) {
    int64_t head, row;
    const int64_t index = query_row(t, r, &head, &row);
    const int64_t position = args.seq_lens[t.unit->batch] - args.rows + row;
    if (position < 0) {
      t.pads = true;
      continue;
    }
    t.query_positions[r] = (int32_t)position;
    t.first_position = smaller(t.first_position, position);
    t.last_position = larger(t.last_position, position);
    if (args.key_bias) t.bias[r] = args.key_bias[index] * args.scale * kLog2E;
    if (dense) copy_query(t, args.q + index * t.key_width, r);
  }
}

void write_part(const Tile& t, const AttentionPart& part, const float* weight) {
  for (int64_t r = 0; r < t.count; r++) {
    part.top[r] = t.top[r] * kLn2;
    part.total[r] = t.total[r];
    for (int64_t i = 0; i < t.value_width; i++) {
      part.out[r * t.value_width + i] = t.args->packed ? t.out[r * t.value_columns + i] : 0.0f;
    }
    if (!part.dense_out) continue;
    for (int64_t i = 0; i < t.value_width; i++) {
      const float sum = t.narrow ? t.dense_out[r * t.value_padded + i] : t.dense_out[i * t.lanes + r];
      part.dense_out[r * t.value_width + i] = sum * weight[r];
    }
  }
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& args) {
  constexpr int64_t counts[] = {kTile, kNarrowRows};
  int64_t most = 0;
  for (int64_t count : counts) {
    Tile tile;
    most = larger(most, lay_out(tile, args, count, nullptr));
  }
  return most + round_up((int64_t)sizeof(Span), 64) + (int64_t)sizeof(DenseKeys) + 64;
}

void attention(const AttentionArgs& args, const AttentionUnit& unit, const AttentionPart& part, char* scratch) {
  Tile t;
  t.unit = &unit;
  const int64_t used = lay_out(t, args, unit.count, scratch);
  Span& span = *(Span*)(scratch + used);
  DenseKeys& dense = *(DenseKeys*)(scratch + used + round_up((int64_t)sizeof(Span), 64));
  load_queries(t);
  if (args.packed) memset(t.out, 0, (size_t)(t.lanes * t.value_columns) * sizeof(float));
  if (args.dense_out) memset(t.dense_out, 0, (size_t)(t.lanes * t.value_padded) * sizeof(float));
  float dense_top[kTile], weight[kTile];
  if (t.last_position >= 0 && unit.dense && args.dense_out) attend_dense(t, dense);
  for (int64_t r = 0; r < t.count; r++) dense_top[r] = t.top[r];
  if (t.last_position >= 0 && args.packed) attend_packed(t, span);
  for (int64_t r = 0; r < t.count; r++) {
    const float shift = dense_top[r] == -kInfinity ? -kInfinity : dense_top[r] - t.top[r];
    weight[r] = exp2_nonpositive(splat(shift))[0];
  }
  write_part(t, part, weight);
}

}  // namespace RQ_ISA
}  // namespace rq
