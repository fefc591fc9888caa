// Attention of a tile on the exact rows of a cache, in fp32: sinks, and what is not packed yet.
#pragma once

#include "tile.h"

namespace rq {
namespace RQ_ISA {

// Up to kBlock exact rows. positions: -1 past the count.
struct DenseKeys {
  int64_t count;
  const int32_t* index;
  int32_t positions[kBlock];
};

// Rows first .. first + count as fp32 [count][padded].
RQ_INLINE void read_dense(const Tile& t, const DenseKeys& s, bool keys, int64_t first, int64_t count) {
  const Rows& rows = keys ? t.args->dense_keys : t.args->dense_values;
  const int64_t width = keys ? t.key_width : t.value_width, padded = keys ? t.key_padded : t.value_padded;
  for (int64_t r = 0; r < count; r++) {
    const char* address = row_address(rows, t.unit->batch, t.unit->kv_head, s.index[first + r]);
    load_row(address, rows.dtype, width, padded, t.rows + r * padded);
  }
}

// Products in `scores` become probabilities relative to the running maximum.
RQ_INLINE void dense_softmax_wide(const Tile& t, const DenseKeys& s, bool masked) {
  for (int64_t i = 0; i < s.count * t.lanes; i += VL) store(t.scores + i, cap(load(t.scores + i), t.softcap));
  if (masked) hide(t, s.positions, s.count, false);
  for (int64_t r = 0; r < t.lanes; r += VL) {
    vf top = load(t.top + r);
    const vf old = top;
    for (int64_t k = 0; k < s.count; k++) top = maximum(load(t.scores + k * t.lanes + r), top);
    const vf safe = select(top == -kInfinity, (vf){}, top);  // a row that has seen nothing: no infinity less itself
    const vf factor = exp2_nonpositive(old - safe);
    vf sum = load(t.total + r) * factor;
    for (int64_t k = 0; k < s.count; k++) {
      float* at = t.scores + k * t.lanes + r;
      const vf p = exp2_nonpositive(load(at) - safe);
      sum += p;
      store(at, p);
    }
    store(t.top + r, top);
    store(t.factor + r, factor);
    store(t.total + r, sum);
  }
}

RQ_INLINE void dense_softmax_narrow(const Tile& t, const DenseKeys& s, bool masked) {
  const int64_t count = round_up(s.count, VL);
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kSpan;
    for (int64_t k = 0; k < count; k += VL) store(row + k, cap(load(row + k), t.softcap));
  }
  if (masked) hide(t, s.positions, count, true);
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kSpan;
    for (int64_t k = s.count; k < count; k++) row[k] = -kInfinity;
    vf most = splat(-kInfinity);
    for (int64_t k = 0; k < count; k += VL) most = maximum(load(row + k), most);
    const float found = max_lane(most), top = found > t.top[r] ? found : t.top[r];
    const float safe = top == -kInfinity ? 0.0f : top;
    t.factor[r] = exp2_nonpositive(splat(t.top[r] - safe))[0];
    t.top[r] = top;
    vf total = {};
    for (int64_t k = 0; k < count; k += VL) {
      const vf p = exp2_nonpositive(load(row + k) - safe);
      total += p;
      store(row + k, p);
    }
    t.total[r] = t.total[r] * t.factor[r] + sum(total);
  }
}

RQ_INLINE void shrink_dense(const Tile& t) {
  if (t.narrow) {
    for (int64_t r = 0; r < t.count; r++) {
      float* row = t.dense_out + r * t.value_padded;
      for (int64_t i = 0; i < t.value_padded; i += VL) store(row + i, load(row + i) * t.factor[r]);
    }
    return;
  }
  for (int64_t i = 0; i < t.value_width; i++) {
    float* row = t.dense_out + i * t.lanes;
    for (int64_t r = 0; r < t.lanes; r += VL) store(row + r, load(row + r) * load(t.factor + r));
  }
}

RQ_INLINE void attend_dense_rows(const Tile& t, const DenseKeys& s, bool masked) {
  for (int64_t k = 0; k < s.count; k += kDenseStep) {
    const int64_t count = smaller(kDenseStep, s.count - k);
    read_dense(t, s, true, k, count);
    if (t.narrow) narrow_scores(t.rows, count, t.key_padded, t.q, t.count, t.scores + k, kSpan);
    else wide_scores(t.rows, count, t.key_width, t.key_padded, t.q, t.lanes, t.scores + k * t.lanes);
  }
  if (t.narrow) dense_softmax_narrow(t, s, masked);
  else dense_softmax_wide(t, s, masked);
  shrink_dense(t);
  for (int64_t k = 0; k < s.count; k += kDenseStep) {
    const int64_t count = smaller(kDenseStep, s.count - k);
    read_dense(t, s, false, k, count);
    if (t.narrow) narrow_values(t.rows, count, t.value_padded, t.scores + k, kSpan, t.count, t.dense_out);
    else wide_values(t.rows, count, t.value_width, t.value_padded, t.scores + k * t.lanes, t.lanes, t.dense_out);
  }
}

RQ_INLINE void attend_dense(const Tile& t, DenseKeys& s) {
  const AttentionArgs& args = *t.args;
  const int32_t* positions = args.dense_positions + t.unit->batch * args.dense_rows;
  const int64_t held = args.seq_lens[t.unit->batch];
  int64_t used = 0;  // unused slots may hold anything, NaN included: they are never read
  for (int64_t i = 0; i < args.dense_rows; i++) {
    const int64_t position = positions[i];
    if (position < 0 || position >= held || (args.causal && position > t.last_position)) continue;
    if (args.window > 0 && t.first_position - position >= args.window) continue;
    t.index[used++] = (int32_t)i;
  }
  for (int64_t start = 0; start < used; start += kBlock) {
    s.count = smaller(kBlock, used - start);
    s.index = t.index + start;
    int64_t first = INT64_MAX, last = 0;
    for (int64_t k = 0; k < kBlock; k++) {
      s.positions[k] = k < s.count ? positions[s.index[k]] : -1;
      if (k >= s.count) continue;
      first = smaller(first, s.positions[k]);
      last = larger(last, s.positions[k]);
    }
    attend_dense_rows(t, s, needs_mask(t, first, last));
  }
}

}  // namespace RQ_ISA
}  // namespace rq
