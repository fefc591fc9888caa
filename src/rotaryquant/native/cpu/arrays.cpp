#include "arrays.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace rq {

namespace {

std::string text(const Dims& numbers) {
  std::string out = "[";
  for (int64_t i = 0; i < numbers.size(); i++) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

std::vector<float> copy_floats(const Array& array, const char* name, const Dims& shape) {
  array.of_type(name, Dtype::f32).of_shape(name, shape).contiguous(name);
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  const float* data = array.at<const float>();
  return std::vector<float>(data, data + count);
}

}  // namespace

void refuse(const std::string& message) { throw std::invalid_argument(message); }

void require(bool ok, const char* message) {
  if (!ok) refuse(message);
}

const Array& Array::of_type(const char* name, Dtype wanted) const {
  if (dtype != wanted) refuse(std::string(name) + " has the wrong dtype");
  return *this;
}

const Array& Array::of_shape(const char* name, const Dims& wanted) const {
  if (!(shape == wanted)) refuse(std::string(name) + " has shape " + text(shape) + "; wanted " + text(wanted));
  return *this;
}

const Array& Array::contiguous(const char* name) const {
  int64_t stride = 1;
  for (int64_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return *this;
    if (shape[i] > 1 && strides[i] != stride) refuse(std::string(name) + " is not contiguous");
    stride *= shape[i];
  }
  return *this;
}

const Array& Array::last_contiguous(const char* name) const {
  const int64_t last = shape.size() - 1;
  if (last < 0 || (shape[last] > 1 && strides[last] != 1)) {
    refuse(std::string(name) + " has a last dimension that is not contiguous");
  }
  return *this;
}

Rows Array::rows() const {
  Rows rows;
  rows.data = at<const void>();
  rows.dtype = dtype;
  rows.batch_stride = strides[0];
  rows.head_stride = strides[1];
  rows.row_stride = strides[2];
  return rows;
}

Rotations::Rotations(int64_t width, int64_t heads, int64_t power, const Array& base, const OptionalArray& signs,
                     const OptionalArray& blocks, const OptionalArray& matrix) {
  require(width >= 8 && width <= kMaxWidth && width % 8 == 0, "rotation: width is out of range");
  require(heads >= 1, "rotation: num_kv_heads is out of range");
  require(base.shape.size() == 2, "rotation: base is not a matrix");
  const int64_t order = base.shape[0];
  shape_.width = width;
  shape_.heads = heads;
  shape_.pitch = (width + 15) / 16 * 16;
  shape_.power = power;
  shape_.order = order;
  require(power == 0 || (power > 0 && (power & (power - 1)) == 0 && power * order == width && order <= 28),
          "rotation: no Hadamard matrix of this width");
  if (matrix) {
    matrix_ = copy_floats(*matrix, "rotation: matrix", {heads, width, width});
    return;
  }
  const float norm = power > 0 ? 1.0f / std::sqrt(static_cast<float>(width)) : 1.0f;
  const Floats sign = signs ? copy_floats(*signs, "rotation: signs", {heads, width}) : Floats();
  if (signs || power > 0) signs_and_norm_ = lay_out_factors(signs ? sign.data() : nullptr, norm);
  if (signs) signs_ = lay_out_factors(sign.data(), 1.0f);
  if (blocks) {
    const Floats block = copy_floats(*blocks, "rotation: blocks", {heads, width / 4, 4, 4});
    blocks_ = lay_out_blocks(block.data(), false, 1.0f);
    inverse_blocks_ = lay_out_blocks(block.data(), true, norm);
  } else if (power > 0) {
    norm_ = lay_out_factors(nullptr, norm);
  }
  if (order == 1) return;
  const Floats entries = copy_floats(base, "rotation: base", {order, order});
  columns_.resize(static_cast<size_t>(order * kOrderPitch));
  inverse_columns_.resize(columns_.size());
  for (int64_t i = 0; i < order; i++) {
    for (int64_t j = 0; j < order; j++) {
      columns_[static_cast<size_t>(j * kOrderPitch + i)] = entries[static_cast<size_t>(i * order + j)];
      inverse_columns_[static_cast<size_t>(i * kOrderPitch + j)] = entries[static_cast<size_t>(i * order + j)];
    }
  }
}

Rotations::Floats Rotations::lay_out_blocks(const float* blocks, bool transposed, float factor) const {
  Floats out(static_cast<size_t>(shape_.heads * 4 * shape_.pitch));
  for (int64_t head = 0; head < shape_.heads; head++) {
    for (int64_t b = 0; b < shape_.width / 4; b++) {
      const float* block = blocks + (head * shape_.width / 4 + b) * 16;
      for (int64_t j = 0; j < 4; j++) {
        for (int64_t i = 0; i < 4; i++) {
          const size_t at = static_cast<size_t>((head * 4 + j) * shape_.pitch + 4 * b + i);
          out[at] = factor * block[transposed ? 4 * j + i : 4 * i + j];
        }
      }
    }
  }
  return out;
}

Rotations::Floats Rotations::lay_out_factors(const float* factors, float factor) const {
  Floats out(static_cast<size_t>(shape_.heads * shape_.pitch));
  for (int64_t head = 0; head < shape_.heads; head++) {
    for (int64_t i = 0; i < shape_.width; i++) {
      const float own = factors ? factors[head * shape_.width + i] : 1.0f;
      out[static_cast<size_t>(head * shape_.pitch + i)] = own * factor;
    }
  }
  return out;
}

Rotation Rotations::tables() const {
  const auto table = [](const Floats& floats) { return floats.empty() ? nullptr : floats.data(); };
  Rotation r = shape_;
  r.forward = {table(signs_and_norm_), table(blocks_), table(columns_), nullptr};
  r.inverse = {table(norm_), table(inverse_blocks_), table(inverse_columns_), table(signs_)};
  r.matrix = table(matrix_);
  return r;
}

Codec make_codec(const std::string& layout, int64_t width, int64_t bits, const std::string& rule, int64_t group,
                 const std::string& scale_dtype, double unit, bool trellis, const Array& levels,
                 const Array& boundaries) {
  Codec c;
  require(width >= 8 && width <= kMaxWidth && width % 8 == 0, "codec: width is out of range");
  require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "codec: bits must be 2, 3, 4 or 8");
  require(group == width || (group == 64 && width % 64 == 0), "codec: scale_group must be the width or 64");
  require(rule == "score" || rule == "value" || rule == "norm", "codec: scale_rule is unknown");
  require(layout == "key" || layout == "value", "codec: layout must be key or value");
  c.keys = layout == "key";
  c.width = width;
  c.bits = bits;
  c.group = group;
  c.rule = rule == "score" ? Rule::score : rule == "value" ? Rule::value : Rule::norm;
  require(scale_dtype == "bf16" || scale_dtype == "fp16", "codec: scale_dtype must be bf16 or fp16");
  c.scale_dtype = scale_dtype == "bf16" ? Dtype::bf16 : Dtype::f16;
  c.unit = static_cast<float>(unit);
  require(!trellis || (bits <= 4 && width % 16 == 0), "codec: a trellis has up to 4 bits and widths of multiples of 16");
  require(!trellis || unit > 0, "codec: a trellis has a unit above 0");
  c.trellis = trellis;
  const int64_t count = (int64_t{1} << bits) * (!trellis ? 1 : bits == 3 ? 8 : 4);
  const float* level = levels.of_type("codec: levels", Dtype::f32).of_shape("codec: levels", {count})
                           .contiguous("codec: levels").at<const float>();
  if (bits == 8) {
    for (int64_t i = 0; i < count; i++) {
      require(level[i] == static_cast<float>(i - 128), "codec: the levels of 8 bits must be -128 .. 127");
    }
    return c;
  }
  std::copy(level, level + count, c.levels);
  if (trellis) {
    for (int64_t i = 0; i < count; i++) {
      require(level[i] == std::floor(level[i]) && std::abs(level[i]) <= 127, "codec: levels must be small integers");
    }
    return c;
  }
  const float* bound = boundaries.of_type("codec: boundaries", Dtype::f32)
                           .of_shape("codec: boundaries", {count - 1}).contiguous("codec: boundaries")
                           .at<const float>();
  std::copy(bound, bound + count - 1, c.boundaries);
  return c;
}

Slabs::Slabs(const Codec& codec, int64_t blocks_per_slab, const std::vector<Array>& code_slabs,
             const std::vector<Array>& scale_slabs)
    : heads(0) {
  require(blocks_per_slab >= 1, "stream: blocks_per_slab must be positive");
  require(code_slabs.size() == scale_slabs.size(), "stream: codes and scales differ in their number of slabs");
  layout.codec = codec;
  layout.blocks_per_slab = blocks_per_slab;
  if (code_slabs.empty()) return;
  const Array &c = code_slabs[0], &s = scale_slabs[0];
  require(c.shape.size() == 4, "stream: codes must be [blocks, heads, 128, bytes]");
  heads = c.shape[1];
  c.last_contiguous("stream: codes");
  // A sealed strip is one piece of memory.
  require(c.strides[2] == codec.code_bytes(), "stream: rows of codes are not adjacent");
  for (const Array& slab : code_slabs) {
    slab.of_type("stream: codes", Dtype::u8)
        .of_shape("stream: codes", {blocks_per_slab, heads, kBlock, codec.code_bytes()});
    require(slab.strides == c.strides, "stream: slabs of codes differ in their strides");
    codes.push_back(slab.at<uint8_t>());
  }
  for (const Array& slab : scale_slabs) {
    slab.of_type("stream: scales", codec.scale_dtype)
        .of_shape("stream: scales", {blocks_per_slab, heads, kBlock, codec.groups()});
    require(slab.strides == s.strides, "stream: slabs of scales differ in their strides");
    scales.push_back(slab.at<uint16_t>());
  }
  layout.code_block = c.strides[0];
  layout.code_head = c.strides[1];
  layout.code_row = c.strides[2];
  layout.scale_block = s.strides[0];
  layout.scale_head = s.strides[1];
  layout.scale_row = s.strides[2];
  layout.scale_group = s.strides[3];
}

Stream Slabs::stream() const {
  Stream out = layout;
  out.codes = codes.data();
  out.scales = scales.data();
  return out;
}

void require_floats(const char* name, const Array& x) {
  const bool floats = x.dtype == Dtype::f32 || x.dtype == Dtype::bf16 || x.dtype == Dtype::f16;
  if (!floats) refuse(std::string(name) + " is not a float tensor");
}

void check_float_rows(const char* name, const Array& x, const Dims& shape) {
  x.of_shape(name, shape).last_contiguous(name);
  require_floats(name, x);
}

const int32_t* integers(const char* name, const Array& array, const Dims& shape) {
  return array.of_type(name, Dtype::i32).of_shape(name, shape).contiguous(name).at<const int32_t>();
}

View::View(const Slabs& keys, const Slabs& values, const Rotations& key_rotation, const Rotations& value_rotation,
           const Array& block_table, const Array& packed_lens, const Array& seq_lens, int64_t num_sinks,
           const OptionalArray& means, const OptionalArray& dense_keys, const OptionalArray& dense_values,
           const OptionalArray& dense_positions)
    : attend(), num_blocks(std::min(keys.num_blocks(), values.num_blocks())) {
  AttentionArgs& args = attend.codes;
  attend.key_rotation = key_rotation.tables();
  attend.value_rotation = value_rotation.tables();
  const int64_t heads = args.kv_heads = attend.key_rotation.heads, width = keys.layout.codec.width;
  require(attend.value_rotation.heads == heads, "the rotations differ in num_kv_heads");
  require(attend.key_rotation.width == width && attend.value_rotation.width == values.layout.codec.width,
          "a rotation and its stream differ in width");
  args.keys = keys.stream();
  args.values = values.stream();
  require(block_table.shape.size() == 2, "block_table must be [batch, max_blocks]");
  args.batch = block_table.shape[0];
  args.max_blocks = block_table.shape[1];
  args.block_table = integers("block_table", block_table, {args.batch, args.max_blocks});
  args.packed_lens = integers("packed_lens", packed_lens, {args.batch});
  args.seq_lens = integers("seq_lens", seq_lens, {args.batch});
  args.packed = !keys.codes.empty() && !values.codes.empty();
  require(!args.packed || (keys.heads == heads && values.heads == heads), "the slabs differ in num_kv_heads");
  require(num_sinks >= 0, "num_sinks is negative");
  args.num_sinks = num_sinks;
  if (means) {
    attend.means = means->of_type("means", Dtype::f32).of_shape("means", {args.batch, heads, width})
                       .contiguous("means").at<const float>();
  }
  attend.dense = dense_keys && dense_values && dense_positions;
  if (!attend.dense) return;
  require(dense_keys->shape.size() == 4, "dense_keys must be [batch, heads, dense, width]");
  args.dense_rows = dense_keys->shape[2];
  check_float_rows("dense_keys", *dense_keys, {args.batch, heads, args.dense_rows, width});
  check_float_rows("dense_values", *dense_values, {args.batch, heads, args.dense_rows, args.values.codec.width});
  args.dense_positions = integers("dense_positions", *dense_positions, {args.batch, args.dense_rows});
  args.dense_keys = dense_keys->rows();
  args.dense_values = dense_values->rows();
}

Plan::Plan(const View& view, double scale, bool causal, int64_t window, double softcap, double noise_query,
           double noise_score, const OptionalArray& sink_logits_, bool inverse)
    : attend(view.attend), num_blocks(view.num_blocks), sink_logits(sink_logits_) {
  AttentionArgs& args = attend.codes;
  attend.inverse = inverse;
  args.scale = static_cast<float>(scale);
  args.causal = causal;
  args.window = std::min<int64_t>(std::max<int64_t>(window, 0), INT32_MAX);
  args.softcap = static_cast<float>(softcap);
  args.noise_query = static_cast<float>(noise_query);
  args.noise_score = static_cast<float>(noise_score);
  if (sink_logits) {
    args.sink_logits = sink_logits->of_type("sink_logits", Dtype::f32).contiguous("sink_logits").at<const float>();
  }
}

Weights::Weights(const Array& codes, const Array& scales, const Array& levels, const OptionalArray& factors,
                 int64_t rotated, int64_t bits, int64_t group)
    : shape(), matrices(1), rotated(rotated) {
  require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "bits must be 2, 3, 4 or 8");
  const int64_t dims = codes.shape.size();
  require((dims == 2 || dims == 3) && codes.shape[dims - 1] * 8 % bits == 0, "codes must be [rows, width * bits / 8]");
  const int64_t rows = codes.shape[dims - 2], width = codes.shape[dims - 1] * 8 / bits;
  require(width > 0 && width % 8 == 0 && group > 0 && width % group == 0 && group % 8 == 0, "group is out of range");
  if (dims == 3) matrices = codes.shape[0];
  codes.of_type("codes", Dtype::u8).contiguous("codes");
  require(scales.dtype == Dtype::bf16 || scales.dtype == Dtype::f32, "scales must be bf16 or fp32");
  scales.of_shape("scales", dims == 3 ? Dims{matrices, rows, width / group} : Dims{rows, width / group});
  scales.contiguous("scales");
  shape.kind = bits;
  shape.width = width;
  shape.rows = rows;
  shape.group = group;
  shape.codes = codes.at<const uint8_t>();
  shape.scales = scales.at<const void>();
  shape.scale_dtype = scales.dtype;
  levels.of_type("levels", Dtype::u8).contiguous("levels");
  require(levels.shape.size() == 1, "levels must be a list");
  if (bits < 8) {
    const int64_t count = levels.shape[0], plain = int64_t(1) << bits;
    const int64_t classes = bits == 3 ? kClasses<kTrellis + 3> : kClasses<kTrellis + 2>;
    require(count == plain || count == classes * plain, "levels are those of no grid");
    if (count != plain) {
      require(width % 16 == 0 && group % 16 == 0, "a trellis has whole circles of 16 columns");
      shape.kind = kTrellis + bits;
    }
    std::memcpy(shape.levels, levels.at<const uint8_t>(), static_cast<size_t>(count));
    shape.lowest = *std::min_element(shape.levels, shape.levels + count);
  } else {
    shape.lowest = -128;
  }
  if (factors) {
    factors_ = copy_floats(*factors, "factors", {width});
    require(rotated >= 8 && (rotated & (rotated - 1)) == 0 && width % rotated == 0, "rotated is out of range");
  }
}

WeightArgs Weights::part(int64_t matrix, int64_t begin, int64_t count) const {
  require(matrix >= 0 && matrix < matrices, "matrix is out of range");
  require(begin >= 0 && count >= 0 && begin <= shape.rows - count, "rows are out of range");
  WeightArgs args = shape;
  const int64_t row = matrix * shape.rows + begin, bits = shape.kind % kTrellis;
  const int64_t scale_bytes = shape.scale_dtype == Dtype::f32 ? 4 : 2;
  args.rows = count;
  args.codes += row * shape.width * bits / 8;
  args.scales = static_cast<const uint8_t*>(shape.scales) + row * (shape.width / shape.group) * scale_bytes;
  return args;
}

}  // namespace rq
