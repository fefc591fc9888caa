// What attention of one tile of query rows works with. Softmax runs in base 2: logits are in units of ln 2.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "packed_products.h"
#include "products.h"
#include "reading.h"

namespace rq {
namespace RQ_ISA {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr int64_t kDenseStep = 32;   // exact keys read at a time: they stay in the first-level cache
constexpr int64_t kValueChunks = 4;  // chunks of values that products take at a time
constexpr int64_t kHeldChunks = RQ_LANES == 16 ? 2 : 4;  // of which levels are held
constexpr int64_t kStrips = kBlock / kStrip;
// Packed blocks that are scored before any of them is weighed, so that what a softmax costs beyond its keys is paid
// less often. Each takes room for levels and scores in the caches close by.
constexpr int64_t kSpanBlocks = RQ_LANES == 16 ? 4 : 1;
constexpr int64_t kSpan = kSpanBlocks * kBlock;
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kRedZone = 64;  // bytes between buffers that nothing may touch
#else
constexpr int64_t kRedZone = 0;
#endif

// Sizes: `lanes` query rows (count rounded up); columns are widths rounded up to whole chunks.
struct Tile {
  const AttentionArgs* args;
  const AttentionUnit* unit;
  int64_t count, lanes;
  int64_t key_width, value_width, key_columns, value_columns;
  // Softmax state of each query row, and what scoring adds.
  float *top, *total, *factor, *bias, *noise;
  int32_t* query_positions;               // -1 where there is none
  int64_t first_position, last_position;  // of the tile's queries that have one
  bool pads;                              // some query has no position
  float softcap, noise_score;             // in units of ln 2
  float* scores;                          // packed and narrow [lanes][kSpan], wide [kBlock][lanes]
  // Packed rows.
  // Rotated queries as 128 * high + low steps, [lanes / 4][key_columns / 4][4 rows][4]; low only at 8 bits.
  uint8_t *q_high, *q_low;
  float* q_step;           // [lanes], of `high`, times the scale
  int32_t *q_high_bias, *q_low_bias;  // [groups][lanes]: what products with a group's columns start from
  uint8_t *levels, *codes;          // one strip of keys or kHeldChunks chunks of values; one strip of codes
  LevelTable *key_table, *value_table;
  uint8_t *p_high, *p_low;  // probabilities in the same way, [lanes / 4][kSpan / 4][4 rows][4]
  float* out;                       // [lanes][value_columns]
  // Exact rows: vectors along the width where there are few query rows (narrow), else along the query rows (wide).
  bool narrow;
  int64_t key_padded, value_padded;
  float* q;          // times the scale; narrow [lanes][key_padded], wide [key_width][lanes]
  float* dense_out;  // narrow [lanes][value_padded], wide [value_width][lanes]
  float* rows;       // [kDenseStep][padded]
  int32_t* index;    // exact rows that are used
};

struct Arena {
  char* base;  // null: only measure
  int64_t used;
  template <typename T>
  T* take(int64_t count) {
    T* p = base ? (T*)(base + used) : nullptr;
    const int64_t size = count * (int64_t)sizeof(T), taken = round_up(size, 64) + kRedZone;
#if defined(__SANITIZE_ADDRESS__)
    if (base) ASAN_POISON_MEMORY_REGION(base + used + size, (size_t)(taken - size));
#endif
    used += taken;
    return p;
  }
};

// Lays the tile out in scratch; with a null base it only measures.
RQ_INLINE int64_t lay_out(Tile& t, const AttentionArgs& args, int64_t count, char* base) {
  t.args = &args;
  t.count = count;
  t.narrow = count <= kNarrowRows;
  t.lanes = round_up(count, t.narrow ? 4 : VL);
  t.key_width = args.keys.codec.width;
  t.value_width = args.values.codec.width;
  t.key_padded = round_up(t.key_width, VL);
  t.value_padded = round_up(t.value_width, VL);
  t.key_columns = round_up(t.key_width, kChunkColumns);
  t.value_columns = round_up(t.value_width, kChunkColumns);
  Arena arena = {base, 0};
  const int64_t lanes = round_up(t.lanes, VL) + VL;  // four rows are read as a whole vector
  t.top = arena.take<float>(lanes);
  t.total = arena.take<float>(lanes);
  t.factor = arena.take<float>(lanes);
  t.bias = arena.take<float>(lanes);
  t.noise = arena.take<float>(lanes);
  t.query_positions = arena.take<int32_t>(lanes);
  t.scores = arena.take<float>(t.lanes * kSpan);
  if (args.packed) {
    const int64_t groups = args.keys.codec.groups();
    t.q_high = arena.take<uint8_t>(t.lanes * t.key_columns);
    t.q_low = arena.take<uint8_t>(t.lanes * t.key_columns);
    t.q_step = arena.take<float>(lanes);
    t.q_high_bias = arena.take<int32_t>(groups * lanes);
    t.q_low_bias = arena.take<int32_t>(groups * lanes);
    const int64_t value_levels = kHeldChunks * kSpanBlocks * kStrips * kChunkVectors * kVector;
    t.levels = arena.take<uint8_t>(larger(kStrip * t.key_columns, value_levels));
    t.codes = arena.take<uint8_t>(kStrip * larger(t.key_columns, t.value_columns));
    t.key_table = arena.take<LevelTable>(1);
    t.value_table = arena.take<LevelTable>(1);
    t.p_high = arena.take<uint8_t>(t.lanes * kSpan);
    t.p_low = arena.take<uint8_t>(t.lanes * kSpan);
    t.out = arena.take<float>(t.lanes * t.value_columns);
  }
  if (args.dense_out) {
    t.q = arena.take<float>(t.lanes * t.key_padded);
    t.dense_out = arena.take<float>(t.lanes * t.value_padded);
    t.rows = arena.take<float>(kDenseStep * larger(t.key_padded, t.value_padded));
    t.index = arena.take<int32_t>(args.dense_rows + 1);
  }
  return arena.used;
}

// Row of q that query row r of the tile stands for.
RQ_INLINE int64_t query_row(const Tile& t, int64_t r, int64_t* head, int64_t* row) {
  const int64_t group = t.args->heads / t.args->kv_heads, index = t.unit->first + r;
  *head = t.unit->kv_head * group + index % group;
  *row = index / group;
  return (t.unit->batch * t.args->heads + *head) * t.args->rows + *row;
}

RQ_INLINE vf cap(vf score, float softcap) {
  return softcap > 0 ? softcap * tanh_saturating(score * (1.0f / softcap)) : score;
}

// Whether some pair of keys at these positions and the tile's queries is hidden.
RQ_INLINE bool needs_mask(const Tile& t, int64_t first_key, int64_t last_key) {
  const AttentionArgs& args = *t.args;
  return args.mask || t.pads || (args.causal && last_key > t.first_position) ||
         (args.window > 0 && t.last_position - first_key >= args.window);
}

// Lanes that may not be seen: key positions and query positions against each other.
RQ_INLINE vi hidden(const AttentionArgs& args, vi query, vi key) {
  vi h = query < 0;
  if (args.causal) h |= key > query;
  if (args.window > 0) h |= query - key >= (int32_t)args.window;
  return h;
}

// Minus infinity where the mask tensor, the order or the window hides a key. positions [count rounded up to VL].
RQ_INLINE void hide(const Tile& t, const int32_t* positions, int64_t count, bool by_row) {
  const AttentionArgs& args = *t.args;
  for (int64_t a = 0; a < (by_row ? t.count : count); a++) {
    for (int64_t b = 0; b < (by_row ? count : t.lanes); b += VL) {
      float* at = t.scores + a * (by_row ? kSpan : t.lanes) + b;
      const vi h = by_row ? hidden(args, splat_i32(t.query_positions[a]), load_i32(positions + b))
                          : hidden(args, load_i32(t.query_positions + b), splat_i32(positions[a]));
      store(at, select(h, splat(-kInfinity), load(at)));
    }
  }
  if (!args.mask) return;
  for (int64_t r = 0; r < t.count; r++) {
    int64_t head, row;
    query_row(t, r, &head, &row);
    const uint8_t* seen = args.mask + t.unit->batch * args.mask_batch + head * args.mask_head + row * args.mask_row;
    for (int64_t k = 0; k < count; k++) {
      if (positions[k] < 0 || seen[positions[k] * args.mask_column]) continue;
      t.scores[by_row ? r * kSpan + k : k * t.lanes + r] = -kInfinity;
    }
  }
}

}  // namespace RQ_ISA
}  // namespace rq
