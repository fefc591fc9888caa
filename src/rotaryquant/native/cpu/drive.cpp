#include "drive.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "pool.h"

namespace rq {

namespace {

constexpr int64_t kRowsPerUnit = 64;

// Below this many values handled by a loop, waking another thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 16;

int worthwhile(int threads, int64_t values) {
  return static_cast<int>(std::min<int64_t>(threads, values / kWorthAThread + 1));
}

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

void run_row_chunks(int64_t rows, int64_t width, int threads, const std::function<void(int64_t, int64_t)>& chunk) {
  parallel_for(divide_up(rows, kRowsPerUnit), worthwhile(threads, rows * width), [&](int64_t i) {
    const int64_t first = i * kRowsPerUnit;
    chunk(first, std::min(kRowsPerUnit, rows - first));
  });
}

void widen(const uint16_t* __restrict brain, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = uint32_t{brain[i]} << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}

// out (+)= x * factor; a factor of zero adds nothing, whatever x is.
void add_scaled(const float* __restrict x, float factor, int64_t width, bool first, float* __restrict out) {
  if (factor == 0) {
    if (first) std::fill(out, out + width, 0.0f);
  } else if (first) {
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor;
  } else {
    for (int64_t i = 0; i < width; i++) out[i] += x[i] * factor;
  }
}

// Sums of a row's shares on a common maximum, the learned sink logit in the denominator, divided by it.
void join_row(const AttentionArgs& args, const AttentionPart* parts, int64_t shares, int64_t row, int64_t head,
              int64_t index) {
  const int64_t width = args.values.codec.width;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  float top = kNothing;
  bool seen = false;
  for (int64_t s = 0; s < shares; s++) {
    top = std::max(top, parts[s].top[row]);
    seen = seen || !(parts[s].total[row] == 0);
  }
  float* out = args.out + index * width;
  float* dense_out = args.dense_out ? args.dense_out + index * width : nullptr;
  if (!seen) {
    std::fill(out, out + width, 0.0f);
    if (dense_out) std::fill(dense_out, dense_out + width, 0.0f);
    return;
  }
  const float common = args.sink_logits ? std::max(top, args.sink_logits[head]) : top;
  const float base = common == kNothing ? 0.0f : common;
  float total = args.sink_logits ? std::exp(args.sink_logits[head] - base) : 0.0f;
  for (int64_t s = 0; s < shares; s++) total += parts[s].total[row] * std::exp(parts[s].top[row] - base);
  bool first = true, first_dense = true;
  for (int64_t s = 0; s < shares; s++) {
    const float factor = std::exp(parts[s].top[row] - base) / total;
    add_scaled(parts[s].out + row * width, factor, width, first, out);
    first = false;
    if (!dense_out || !parts[s].dense_out) continue;
    add_scaled(parts[s].dense_out + row * width, factor, width, first_dense, dense_out);
    first_dense = false;
  }
  if (dense_out && first_dense) std::fill(dense_out, dense_out + width, 0.0f);
}

void join(const AttentionArgs& args, const AttentionUnit& unit, const AttentionPart* parts, int64_t shares) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t r = 0; r < unit.count; r++) {
    const int64_t head = unit.kv_head * group + (unit.first + r) % group, row = (unit.first + r) / group;
    join_row(args, parts, shares, r, head, (unit.batch * args.heads + head) * args.rows + row);
  }
}

int64_t part_floats(const AttentionArgs& args, int64_t count) {
  return count * (2 + args.values.codec.width * (args.dense_out ? 2 : 1));
}

AttentionPart part_at(const AttentionArgs& args, int64_t count, float* at) {
  AttentionPart part;
  part.top = at;
  part.total = at + count;
  part.out = at + 2 * count;
  part.dense_out = args.dense_out ? part.out + count * args.values.codec.width : nullptr;
  return part;
}

int64_t packed_blocks(const AttentionArgs& args, int64_t batch) {
  return args.packed ? divide_up(args.packed_lens[batch], kBlock) : 0;
}

std::vector<AttentionUnit> tiles(const AttentionArgs& args) {
  std::vector<AttentionUnit> units;
  const int64_t queries = args.rows * (args.heads / args.kv_heads);
  for (int64_t b = 0; b < args.batch; b++) {
    for (int64_t h = 0; h < args.kv_heads; h++) {
      for (int64_t first = 0; first < queries; first += kTile) {
        const int64_t count = std::min(kTile, queries - first);
        units.push_back({b, h, first, count, 0, packed_blocks(args, b), true});
      }
    }
  }
  return units;
}

// Shares of each tile's keys: the fewest of which no thread gets over an eighth more than its part, each at least eight
// blocks. A share starts without a sum to tell what matters little (packed_values.h), so that more of them cost more.
int64_t shares_per_tile(const AttentionArgs& args, int64_t num_tiles, int threads) {
  int64_t longest = 0;
  for (int64_t b = 0; b < args.batch; b++) longest = std::max(longest, packed_blocks(args, b));
  int64_t shares = 1;
  for (; shares < longest / 8; shares++) {
    const int64_t units = num_tiles * shares;
    if (8 * divide_up(units, threads) * threads <= 9 * units) break;
  }
  return shares;
}

// Values a call handles: unpacking every key counts once, its products once per four query rows.
int64_t attention_values(const AttentionArgs& args) {
  int64_t keys = args.batch * args.dense_rows;
  for (int64_t b = 0; b < args.batch; b++) keys += packed_blocks(args, b) * kBlock;
  return keys * args.keys.codec.width * (args.kv_heads + args.heads * args.rows / 4);
}

}  // namespace

void run_stage(const StageArgs& args, int threads) {
  const int64_t size = args.from.dtype == Dtype::f32 ? 4 : 2, values = args.batch * args.heads * args.rows * args.width;
  const auto offset = [&](const Rows& rows, int64_t pair, int64_t row) {
    return size * (pair / args.heads * rows.batch_stride + pair % args.heads * rows.head_stride + row * rows.row_stride);
  };
  parallel_for(args.batch * args.heads, worthwhile(threads, values), [&](int64_t pair) {
    for (int64_t row = 0; row < args.rows; row++) {
      char* to = static_cast<char*>(const_cast<void*>(args.to.data)) + offset(args.to, pair, row);
      const char* from = static_cast<const char*>(args.from.data) + offset(args.from, pair, row);
      if (args.column_stride == 1) {
        std::memcpy(to, from, static_cast<size_t>(size * args.width));
        continue;
      }
      for (int64_t i = 0; i < args.width; i++) {
        std::memcpy(to + i * size, from + i * size * args.column_stride, static_cast<size_t>(size));
      }
    }
  });
}

void run_rotate(const RotateArgs& args, int threads) {
  const Kernels& kernel = rq::kernels();
  const int64_t heads = args.rotation.heads, chunks = divide_up(args.rows, kRowsPerUnit);
  const int64_t values = args.batch * heads * args.rows * args.rotation.width;
  const int64_t scratch = kernel.row_scratch(args.rotation.width);
  parallel_for(args.batch * heads * chunks, worthwhile(threads, values), [&](int64_t i) {
    const int64_t first = i % chunks * kRowsPerUnit, pair = i / chunks;
    kernel.rotate(args, pair / heads, pair % heads, first, std::min(kRowsPerUnit, args.rows - first),
                  thread_scratch(scratch));
  });
}

void run_quantize(const QuantizeArgs& args, int64_t rows, int threads) {
  const Kernels& kernel = rq::kernels();
  const int64_t scratch = kernel.row_scratch(args.codec.width);
  run_row_chunks(rows, args.codec.width, threads, [&](int64_t first, int64_t count) {
    kernel.quantize(args, first, count, thread_scratch(scratch));
  });
}

void run_circles(const CirclesArgs& args, int64_t circles, int threads) {
  const Kernels& kernel = rq::kernels();
  constexpr int64_t work = 4096;  // of a circle, in the row values that run_row_chunks counts
  run_row_chunks(circles, work, threads, [&](int64_t first, int64_t count) { kernel.circles(args, first, count); });
}

void run_weight(WeightArgs args, const WeightInputs* inputs, int threads) {
  const Kernels& kernel = rq::kernels();
  thread_local std::vector<float> memory;
  if (inputs) {
    const int terms = kernel.weight_terms(args);
    const int64_t groups = args.width / args.group, integers = terms * args.width;
    args.x_row = divide_up(args.width, 16) * 16;
    const size_t needed = static_cast<size_t>(args.tokens * (args.x_row + 2 * groups + divide_up(integers, 4)));
    if (memory.size() < needed) memory.resize(needed);
    float *x = memory.data(), *steps = x + args.tokens * args.x_row, *sums = steps + args.tokens * groups;
    int8_t* small = reinterpret_cast<int8_t*>(sums + args.tokens * groups);
    for (int64_t t = 0; t < args.tokens; t++) {
      float* row = x + t * args.x_row;
      if (inputs->dtype == Dtype::bf16) {
        widen(static_cast<const uint16_t*>(inputs->x) + t * args.width, args.width, row);
      } else {
        std::copy_n(static_cast<const float*>(inputs->x) + t * args.width, args.width, row);
      }
      std::fill(row + args.width, row + args.x_row, 0.0f);
      if (inputs->factors) kernel.rotate_inputs(row, args.width, args.x_row, inputs->factors, inputs->rotated);
      if (terms == 0) continue;
      kernel.round_inputs(row, args.width, args.group, terms, small + t * integers, steps + t * groups,
                          sums + t * groups);
    }
    args.x = x;
    args.small = terms > 0 ? small : nullptr;
    args.steps = steps;
    args.sums = sums;
  }
  run_row_chunks(args.rows, args.width * std::max<int64_t>(args.tokens, 1), threads,
                 [&](int64_t first, int64_t count) { kernel.weight_rows(args, first, count); });
}

void run_repack(const RepackArgs& args, int64_t blocks, int threads) {
  const Kernels& kernel = rq::kernels();
  const int64_t strips = blocks * divide_up(args.rows, kStrip);
  run_row_chunks(strips, kStrip * args.width, threads,
                 [&](int64_t first, int64_t count) { kernel.repack(args, first, count); });
}

int64_t run_append(const AppendArgs& args, const std::vector<AppendUnit>& units, int threads) {
  const Kernels& kernel = rq::kernels();
  const int64_t scratch = kernel.row_scratch(args.rotation.width);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first_bad{kNone};  // orders by batch row, then inputs before scales, then head
  int64_t rows = 0;
  for (const AppendUnit& unit : units) rows += unit.count;
  parallel_for(static_cast<int64_t>(units.size()), worthwhile(threads, rows * args.rotation.width), [&](int64_t i) {
    const AppendUnit& unit = units[static_cast<size_t>(i)];
    const Met met = kernel.append(args, unit, thread_scratch(scratch));
    if (met == Met::nothing) return;
    const int64_t rank = (2 * unit.batch + (met == Met::bad_scale)) * args.heads + unit.head;
    int64_t known = first_bad.load();
    while (rank < known && !first_bad.compare_exchange_weak(known, rank)) {
    }
  });
  const int64_t rank = first_bad.load();
  if (rank == kNone) return -1;
  return rank / (2 * args.heads) * args.heads + rank % args.heads;
}

void run_attention(const AttentionArgs& args, int threads) {
  const Kernels& kernel = rq::kernels();
  const std::vector<AttentionUnit> units = tiles(args);
  const int64_t num_tiles = static_cast<int64_t>(units.size());
  threads = worthwhile(threads, attention_values(args));
  const int64_t scratch = kernel.attention_scratch(args);
  const int64_t shares = shares_per_tile(args, num_tiles, threads);
  if (shares == 1) {
    const int64_t part_bytes = part_floats(args, kTile) * static_cast<int64_t>(sizeof(float));
    parallel_for(num_tiles, threads, [&](int64_t i) {
      // Last tiles first: under a causal order they see the most keys.
      const AttentionUnit& unit = units[static_cast<size_t>(num_tiles - 1 - i)];
      char* memory = thread_scratch(scratch + part_bytes + 64);
      const AttentionPart part = part_at(args, unit.count, reinterpret_cast<float*>(memory));
      kernel.attention(args, unit, part, memory + (part_bytes + 63) / 64 * 64);
      join(args, unit, &part, 1);
    });
    return;
  }
  const int64_t stride = part_floats(args, units[0].count);  // the first tile has as many rows as any
  const std::unique_ptr<float[]> memory(new float[static_cast<size_t>(num_tiles * shares * stride)]);
  std::vector<AttentionPart> parts(static_cast<size_t>(num_tiles * shares));
  parallel_for(num_tiles * shares, threads, [&](int64_t i) {
    AttentionUnit unit = units[static_cast<size_t>(i / shares)];
    const int64_t share = i % shares, blocks = unit.block_end;
    unit.block_begin = blocks * share / shares;
    unit.block_end = blocks * (share + 1) / shares;
    unit.dense = share == shares - 1;
    parts[static_cast<size_t>(i)] = part_at(args, unit.count, memory.get() + i * stride);
    kernel.attention(args, unit, parts[static_cast<size_t>(i)], thread_scratch(scratch));
  });
  for (int64_t i = 0; i < num_tiles; i++) {
    join(args, units[static_cast<size_t>(i)], &parts[static_cast<size_t>(i * shares)], shares);
  }
}

namespace {

constexpr size_t kKeptFloats = size_t{1} << 17;

// Rotates query or output rows of every batch row and KV head, whose query heads lie one after the other.
void rotate_heads(const AttentionArgs& args, const Rotation& rotation, const float* x, float* out, bool inverse,
                  int threads) {
  const int64_t rows = args.heads / args.kv_heads * args.rows;
  RotateArgs rotate = {rotation, {}, out, args.batch, rows, inverse};
  rotate.x.data = x;
  rotate.x.row_stride = rotation.width;
  rotate.x.head_stride = rows * rotation.width;
  rotate.x.batch_stride = args.kv_heads * rows * rotation.width;
  run_rotate(rotate, threads);
}

// To nearest, ties to even; NaN stays NaN.
void narrow(const float* __restrict x, int64_t count, uint16_t* __restrict brain) {
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    brain[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest);
  }
}

// q · mean of every query row.
void multiply_means(const AttentionArgs& args, const float* means, float* bias) {
  const int64_t width = args.keys.codec.width, rows = args.heads / args.kv_heads * args.rows;
  for (int64_t i = 0; i < args.batch * args.kv_heads * rows; i++) {
    const float *q = args.q + i * width, *mean = means + i / rows * width;
    float sums[16] = {};
    for (int64_t j = 0; j < width; j += 8) {
      for (int64_t l = 0; l < 8; l++) sums[l] += q[j + l] * mean[j + l];
    }
    bias[i] = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }
}

}  // namespace

void run_attend(const AttendArgs& attend, int threads) {
  AttentionArgs args = attend.codes;
  const bool brain = attend.dtype == Dtype::bf16;
  const int64_t rows = args.batch * args.heads * args.rows;
  const int64_t key_values = rows * args.keys.codec.width, values = rows * args.values.codec.width;
  const size_t needed = static_cast<size_t>((brain ? 2 : 1) * key_values + rows + 3 * values);
  thread_local std::vector<float> kept;  // for the few rows of a decode step; a prompt's are given back
  std::vector<float> own;
  std::vector<float>& memory = needed <= kKeptFloats ? kept : own;
  if (memory.size() < needed) memory.resize(needed);
  float *q_rotated = memory.data(), *bias = q_rotated + key_values, *out = bias + rows, *dense_out = out + values;
  float *result = brain ? dense_out + values : static_cast<float*>(attend.out), *q = dense_out + 2 * values;
  if (brain) widen(static_cast<const uint16_t*>(attend.q), key_values, q);
  args.q = brain ? q : static_cast<const float*>(attend.q);
  if (args.packed) rotate_heads(args, attend.key_rotation, args.q, q_rotated, false, threads);
  args.q_rotated = q_rotated;
  if (attend.means) {
    multiply_means(args, attend.means, bias);
    args.key_bias = bias;
  }
  args.out = args.packed && attend.inverse ? out : result;
  args.dense_out = attend.dense ? dense_out : nullptr;
  run_attention(args, threads);
  if (args.packed && attend.inverse) rotate_heads(args, attend.value_rotation, out, result, true, threads);
  for (int64_t i = 0; attend.dense && i < values; i++) result[i] += dense_out[i];
  if (brain) narrow(result, values, static_cast<uint16_t*>(attend.out));
}

}  // namespace rq
