// Attention of one tile of query rows over packed and exact keys: online softmax in fp32, block by block.
//
// Two layouts. Few query rows (decode): vectors run along the head width, so that no lane is wasted on missing
// queries. Many query rows (prefill): vectors run along the query rows, and every unpacked value is broadcast.
#include "codes.h"
#include "kernels.h"
#include "products.h"
#include "reading.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

constexpr int64_t kStep = 32;  // keys unpacked at a time: their levels stay in the first-level cache

// Everything one unit works with. Sizes: `lanes` query rows (count rounded up), narrow or wide layout.
struct Tile {
  const AttentionArgs* args;
  const AttentionUnit* unit;
  bool narrow;             // vectors along the width
  int64_t count, lanes;    // query rows, and with padding
  int64_t key_width, value_width, key_padded, value_padded;
  Unpacker *keys, *values;
  float *q, *q_rotated;    // times `scale`; narrow [lanes][key_padded], wide [key_width][lanes]
  float* scores;           // narrow [lanes][kBlock], wide [kBlock][lanes]
  float *out, *dense_out;  // narrow [lanes][value_padded], wide [value_width][lanes]
  float* levels;           // [kStep][max padded]
  float *top, *total, *factor, *bias, *noise;  // [lanes]
  int32_t* query_positions;            // [lanes], -1 where there is none
  int32_t* dense_index;                // used dense rows
  int64_t first_position, last_position;  // of the tile's queries that have one
  bool pads;                              // some query has no position
};

// Up to kBlock keys and where they come from.
struct Source {
  int64_t count;
  const uint8_t *key_codes, *value_codes;  // null: dense rows
  int64_t first;                           // first row within the block
  bool sealed;
  const int32_t* index;  // dense rows to read
  int32_t positions[kBlock + 16];
  float key_scales[kBlock + 16], value_scales[kBlock + 16];  // 1 where folded into the levels
  const uint16_t *key_groups, *value_groups;
};

struct Arena {
  char* base;  // null: only measure
  int64_t used;
  template <typename T>
  T* take(int64_t count) {
    T* p = base ? (T*)(base + used) : nullptr;
    used += round_up(count * (int64_t)sizeof(T), 64);
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
  Arena arena = {base, 0};
  t.keys = arena.take<Unpacker>(1);
  t.values = arena.take<Unpacker>(1);
  t.q = arena.take<float>(t.lanes * t.key_padded);
  t.q_rotated = arena.take<float>(t.lanes * t.key_padded);
  t.scores = arena.take<float>(t.lanes * kBlock);
  t.out = arena.take<float>(t.lanes * t.value_padded);
  t.dense_out = arena.take<float>(t.lanes * t.value_padded);
  t.levels = arena.take<float>(kStep * larger(t.key_padded, t.value_padded));
  t.top = arena.take<float>(round_up(t.lanes, VL));
  t.total = arena.take<float>(round_up(t.lanes, VL));
  t.factor = arena.take<float>(round_up(t.lanes, VL));
  t.bias = arena.take<float>(round_up(t.lanes, VL));
  t.noise = arena.take<float>(round_up(t.lanes, VL));
  t.query_positions = arena.take<int32_t>(round_up(t.lanes, VL));
  t.dense_index = arena.take<int32_t>(args.dense_rows + 1);
  return arena.used;
}

// Row of q that query row r of the tile stands for.
RQ_INLINE int64_t query_row(const Tile& t, int64_t r, int64_t* head, int64_t* row) {
  const int64_t group = t.args->heads / t.args->kv_heads, index = t.unit->first + r;
  *head = t.unit->kv_head * group + index % group;
  *row = index / group;
  return (t.unit->batch * t.args->heads + *head) * t.args->rows + *row;
}

RQ_INLINE void copy_query(const Tile& t, const float* from, float* to, int64_t r) {
  const float scale = t.args->scale;
  if (t.narrow) {
    for (int64_t i = 0; i < t.key_width; i++) to[r * t.key_padded + i] = from[i] * scale;
  } else {
    for (int64_t i = 0; i < t.key_width; i++) to[i * t.lanes + r] = from[i] * scale;
  }
}

void load_queries(Tile& t) {
  const AttentionArgs& args = *t.args;
  memset(t.q, 0, (size_t)(t.lanes * t.key_padded) * sizeof(float));
  memset(t.q_rotated, 0, (size_t)(t.lanes * t.key_padded) * sizeof(float));
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
    if (args.key_bias) t.bias[r] = args.key_bias[index] * args.scale;
    const float* rotated = args.q_rotated + index * t.key_width;
    copy_query(t, rotated, t.q_rotated, r);
    float energy = 0;
    for (int64_t i = 0; i < t.key_width; i++) energy += rotated[i] * rotated[i];
    t.noise[r] = args.noise_query * args.scale * args.scale * energy;
    if (t.unit->dense) copy_query(t, args.q + index * t.key_width, t.q, r);
  }
}

template <int BITS>
void fill_packed(const Unpacker& u, const Stream& stream, const uint8_t* codes, const uint16_t* groups, int64_t first,
                 int64_t count, bool sealed, float* levels) {
  unpack_levels<BITS>(u, codes, stream.code_row, first, count, sealed, levels);
  const Codec& codec = stream.codec;
  if (codec.groups() == 1) return;
  for (int64_t r = 0; r < count; r++) {  // a group is 64 values: whole vectors
    for (int64_t g = 0; g < codec.groups(); g++) {
      const uint16_t bits = groups[(first + r) * stream.scale_row + g * stream.scale_group];
      const float scale = codec.scale_dtype == Dtype::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
      float* at = levels + r * u.padded + g * codec.group;
      for (int64_t i = 0; i < codec.group; i += VL) store(at + i, load(at + i) * scale);
    }
  }
}

// Levels of rows first .. first + count of the source's keys or values, [count][padded].
void fill(const Tile& t, const Source& s, bool keys, int64_t first, int64_t count) {
  const Stream& stream = keys ? t.args->keys : t.args->values;
  const Unpacker& u = keys ? *t.keys : *t.values;
  if (const uint8_t* codes = keys ? s.key_codes : s.value_codes) {
    const uint16_t* groups = keys ? s.key_groups : s.value_groups;
    const int64_t from = s.first + first;
    switch (stream.codec.bits) {
      case 2: return fill_packed<2>(u, stream, codes, groups, from, count, s.sealed, t.levels);
      case 3: return fill_packed<3>(u, stream, codes, groups, from, count, s.sealed, t.levels);
      case 4: return fill_packed<4>(u, stream, codes, groups, from, count, s.sealed, t.levels);
      default: return fill_packed<8>(u, stream, codes, groups, from, count, s.sealed, t.levels);
    }
  }
  const Rows& rows = keys ? t.args->dense_keys : t.args->dense_values;
  for (int64_t r = 0; r < count; r++) {
    const char* address = row_address(rows, t.unit->batch, t.unit->kv_head, s.index[first + r]);
    load_row(address, rows.dtype, u.width, u.padded, t.levels + r * u.padded);
  }
}

// Lanes that may not be seen: key positions and query positions against each other.
RQ_INLINE vi hidden(const AttentionArgs& args, vi query, vi key) {
  vi h = query < 0;
  if (args.causal) h |= key > query;
  if (args.window > 0) h |= query - key >= (int32_t)args.window;
  return h;
}

// Minus infinity where the mask tensor, the order or the window hides a key.
void hide(const Tile& t, const Source& s) {
  const AttentionArgs& args = *t.args;
  const int64_t row_step = t.narrow ? kBlock : 1, key_step = t.narrow ? 1 : t.lanes;
  for (int64_t a = 0; a < (t.narrow ? t.lanes : s.count); a++) {
    for (int64_t b = 0; b < (t.narrow ? s.count : t.lanes); b += VL) {
      float* at = t.scores + a * (t.narrow ? kBlock : t.lanes) + b;
      const vi h = t.narrow ? hidden(args, splat_i32(t.query_positions[a]), load_i32(s.positions + b))
                            : hidden(args, load_i32(t.query_positions + b), splat_i32(s.positions[a]));
      store(at, select(h, splat(-kInfinity), load(at)));
    }
  }
  if (!args.mask) return;
  for (int64_t r = 0; r < t.count; r++) {
    int64_t head, row;
    query_row(t, r, &head, &row);
    const uint8_t* seen =
        args.mask + t.unit->batch * args.mask_batch + head * args.mask_head + row * args.mask_row;
    for (int64_t k = 0; k < s.count; k++) {
      if (!seen[s.positions[k] * args.mask_column]) t.scores[r * row_step + k * key_step] = -kInfinity;
    }
  }
}

RQ_INLINE vf cap(vf score, float softcap) {
  return softcap > 0 ? softcap * tanh_saturating(score * (1.0f / softcap)) : score;
}

// Score of a packed key, its product with the query times its scale lowered by half the variance of its noise.
RQ_INLINE vf lowered(vf score, vf row_scale, vf noise, float noise_score) {
  return score - maximum((vf){}, noise * row_scale * row_scale - noise_score * score * score);
}

// New maximum of each row, and the factor by which what was summed before must shrink.
RQ_INLINE void raise_top(const Tile& t, int64_t r, vf block_top, vf* safe) {
  const vf old = load(t.top + r), top = maximum(block_top, old);
  *safe = select(top == -kInfinity, (vf){}, top);  // a row that has seen nothing must not subtract infinities
  store(t.factor + r, exp_nonpositive(old - *safe));
  store(t.top + r, top);
}

// Products in `scores` become probabilities, times the value's scale, relative to the running maximum.
void softmax_wide(const Tile& t, const Source& s, bool masked) {
  const float softcap = t.args->softcap;
  const bool noisy = s.key_codes && t.args->noise_query > 0;
  for (int64_t r = 0; r < t.lanes; r += VL) {
    const vf bias = s.key_codes ? load(t.bias + r) : (vf){};
    const vf noise = load(t.noise + r);
    vf block_top = splat(-kInfinity);
    for (int64_t k = 0; k < s.count; k++) {
      float* at = t.scores + k * t.lanes + r;
      vf score = load(at) * s.key_scales[k];
      if (noisy) score = lowered(score, splat(s.key_scales[k]), noise, t.args->noise_score);
      score = cap(score + bias, softcap);
      store(at, score);
      block_top = maximum(score, block_top);
    }
    if (masked) continue;
    store(t.factor + r, block_top);
  }
  if (masked) {
    hide(t, s);
    for (int64_t r = 0; r < t.lanes; r += VL) {
      vf block_top = splat(-kInfinity);
      for (int64_t k = 0; k < s.count; k++) block_top = maximum(load(t.scores + k * t.lanes + r), block_top);
      store(t.factor + r, block_top);
    }
  }
  for (int64_t r = 0; r < t.lanes; r += VL) {
    vf safe, sum = {};
    raise_top(t, r, load(t.factor + r), &safe);
    for (int64_t k = 0; k < s.count; k++) {
      float* at = t.scores + k * t.lanes + r;
      const vf p = exp_nonpositive(load(at) - safe);
      sum += p;
      store(at, p * s.value_scales[k]);
    }
    store(t.total + r, load(t.total + r) * load(t.factor + r) + sum);
  }
}

void softmax_narrow(const Tile& t, const Source& s, bool masked) {
  const float softcap = t.args->softcap;
  const bool noisy = s.key_codes && t.args->noise_query > 0;
  for (int64_t r = 0; r < t.count; r++) {
    const float bias = s.key_codes ? t.bias[r] : 0.0f;
    for (int64_t k = 0; k < s.count; k += VL) {
      float* at = t.scores + r * kBlock + k;
      const vf row_scale = load(s.key_scales + k);
      vf score = load(at) * row_scale;
      if (noisy) score = lowered(score, row_scale, splat(t.noise[r]), t.args->noise_score);
      store(at, cap(score + bias, softcap));
    }
  }
  if (masked) hide(t, s);
  for (int64_t r = 0; r < t.count; r++) {
    float* row = t.scores + r * kBlock;
    for (int64_t k = s.count; k < round_up(s.count, VL); k++) row[k] = -kInfinity;
    vf block_top = splat(-kInfinity);
    for (int64_t k = 0; k < s.count; k += VL) block_top = maximum(load(row + k), block_top);
    const float top = t.top[r] > max_lane(block_top) ? t.top[r] : max_lane(block_top);
    const float safe = top == -kInfinity ? 0.0f : top;
    t.factor[r] = exp_nonpositive(t.top[r] - safe);
    t.top[r] = top;
    vf total = {};
    for (int64_t k = 0; k < s.count; k += VL) {
      const vf p = exp_nonpositive(load(row + k) - safe);
      total += p;
      store(row + k, p * load(s.value_scales + k));
    }
    t.total[r] = t.total[r] * t.factor[r] + sum(total);
  }
}

void shrink(const Tile& t, float* out) {
  if (t.narrow) {
    for (int64_t r = 0; r < t.count; r++) {
      float* row = out + r * t.value_padded;
      for (int64_t i = 0; i < t.value_padded; i += VL) store(row + i, load(row + i) * t.factor[r]);
    }
    return;
  }
  for (int64_t i = 0; i < t.value_width; i++) {
    float* row = out + i * t.lanes;
    for (int64_t r = 0; r < t.lanes; r += VL) store(row + r, load(row + r) * load(t.factor + r));
  }
}

void attend(const Tile& t, const Source& s, bool masked) {
  const bool packed = s.key_codes != nullptr;
  const float* q = packed ? t.q_rotated : t.q;
  for (int64_t k = 0; k < s.count; k += kStep) {
    const int64_t count = smaller(kStep, s.count - k);
    fill(t, s, true, k, count);
    if (t.narrow) narrow_scores(t.levels, count, t.key_padded, q, t.count, t.scores + k, kBlock);
    else wide_scores(t.levels, count, t.key_width, t.key_padded, q, t.lanes, t.scores + k * t.lanes);
  }
  if (t.narrow) softmax_narrow(t, s, masked);
  else softmax_wide(t, s, masked);
  shrink(t, t.out);
  if (t.args->dense_out) shrink(t, t.dense_out);
  float* out = packed ? t.out : t.dense_out;
  for (int64_t k = 0; k < s.count; k += kStep) {
    const int64_t count = smaller(kStep, s.count - k);
    fill(t, s, false, k, count);
    if (t.narrow) narrow_values(t.levels, count, t.value_padded, t.scores + k, kBlock, t.count, out);
    else wide_values(t.levels, count, t.value_width, t.value_padded, t.scores + k * t.lanes, t.lanes, out);
  }
}

// Whether some pair of these keys and the tile's queries is hidden.
RQ_INLINE bool needs_mask(const Tile& t, int64_t first_key, int64_t last_key) {
  const AttentionArgs& args = *t.args;
  return args.mask || t.pads || (args.causal && last_key > t.first_position) ||
         (args.window > 0 && t.last_position - first_key >= args.window);
}

void row_scales(const Stream& stream, const uint16_t* groups, int64_t first, int64_t count, float* scales) {
  const bool brain = stream.codec.scale_dtype == Dtype::bf16;
  for (int64_t r = 0; r < count; r++) {
    const uint16_t bits = groups[(first + r) * stream.scale_row];
    scales[r] = stream.codec.groups() > 1 ? 1.0f : brain ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  for (int64_t r = count; r < round_up(count, VL); r++) scales[r] = 0;
}

void attend_packed(const Tile& t, Source& s) {
  const AttentionArgs& args = *t.args;
  const int64_t batch = t.unit->batch, packed_len = args.packed_lens[batch];
  // Only keys that some query of the tile may see.
  int64_t begin = args.num_sinks, end = packed_len;
  if (args.causal) end = smaller(end, t.last_position + 1);
  if (args.window > 0) begin = larger(begin, t.first_position - args.window + 1);
  for (int64_t i = t.unit->block_begin; i < t.unit->block_end; i++) {
    const int64_t first = larger(begin, i * kBlock), last = smaller(end, (i + 1) * kBlock);
    if (first >= last) continue;
    const int64_t block = args.block_table[batch * args.max_blocks + i];
    s.count = last - first;
    s.first = first - i * kBlock;
    s.sealed = (i + 1) * kBlock <= packed_len;
    s.key_codes = args.keys.code_rows(block, t.unit->kv_head);
    s.value_codes = args.values.code_rows(block, t.unit->kv_head);
    s.key_groups = args.keys.scale_rows(block, t.unit->kv_head);
    s.value_groups = args.values.scale_rows(block, t.unit->kv_head);
    row_scales(args.keys, s.key_groups, s.first, s.count, s.key_scales);
    row_scales(args.values, s.value_groups, s.first, s.count, s.value_scales);
    for (int64_t k = 0; k < s.count; k++) s.positions[k] = (int32_t)(first + k);
    attend(t, s, needs_mask(t, first, last - 1));
  }
}

void attend_dense(const Tile& t, Source& s) {
  const AttentionArgs& args = *t.args;
  const int32_t* positions = args.dense_positions + t.unit->batch * args.dense_rows;
  int64_t used = 0;  // unused slots may hold anything, NaN included: they are never read
  for (int64_t i = 0; i < args.dense_rows; i++) {
    const int64_t position = positions[i];
    if (position < 0 || (args.causal && position > t.last_position)) continue;
    if (args.window > 0 && t.first_position - position >= args.window) continue;
    t.dense_index[used++] = (int32_t)i;
  }
  s.key_codes = s.value_codes = nullptr;
  for (int64_t k = 0; k < kBlock; k++) s.key_scales[k] = s.value_scales[k] = 1.0f;
  for (int64_t start = 0; start < used; start += kBlock) {
    s.count = smaller(kBlock, used - start);
    s.index = t.dense_index + start;
    int64_t first = INT64_MAX, last = 0;
    for (int64_t k = 0; k < s.count; k++) {
      s.positions[k] = positions[s.index[k]];
      first = smaller(first, s.positions[k]);
      last = larger(last, s.positions[k]);
    }
    attend(t, s, needs_mask(t, first, last));
  }
}

void write_part(const Tile& t, const float* from, float* to) {
  for (int64_t r = 0; r < t.count; r++) {
    for (int64_t i = 0; i < t.value_width; i++) {
      to[r * t.value_width + i] = t.narrow ? from[r * t.value_padded + i] : from[i * t.lanes + r];
    }
  }
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& args) {
  Tile wide, narrow;
  return larger(lay_out(wide, args, kTile, nullptr), lay_out(narrow, args, kNarrowRows, nullptr)) +
         (int64_t)sizeof(Source) + 64;
}

void attention(const AttentionArgs& args, const AttentionUnit& unit, const AttentionPart& part, char* scratch) {
  Tile t;
  t.unit = &unit;
  Source& s = *(Source*)(scratch + round_up(lay_out(t, args, unit.count, scratch), 64));
  load_queries(t);
  memset(t.out, 0, (size_t)(t.lanes * t.value_padded) * sizeof(float));
  memset(t.dense_out, 0, (size_t)(t.lanes * t.value_padded) * sizeof(float));
  prepare(*t.keys, t.key_width, (int)args.keys.codec.bits, args.keys.codec.levels);
  prepare(*t.values, t.value_width, (int)args.values.codec.bits, args.values.codec.levels);
  if (t.last_position >= 0) {
    if (args.packed) attend_packed(t, s);
    if (unit.dense && args.dense_out) attend_dense(t, s);
  }
  for (int64_t r = 0; r < t.count; r++) {
    part.top[r] = t.top[r];
    part.total[r] = t.total[r];
  }
  write_part(t, t.out, part.out);
  if (part.dense_out) write_part(t, t.dense_out, part.dense_out);
}

}  // namespace RQ_ISA
}  // namespace rq
