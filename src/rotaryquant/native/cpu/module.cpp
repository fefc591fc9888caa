// rotaryquant._native: the Python face of the CPU kernels. Every range is checked here, before any kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>

#include "arrays.h"
#include "drive.h"
#include "pool.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rq {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

StageArgs stage_args(const char* name, const Array& x, const Array& held, int64_t rows, int64_t slot) {
  require(x.shape.size() == 4 && held.shape.size() == 4, "rows must be [batch, heads, columns, width]");
  StageArgs args = {x.rows(), held.rows(), x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.strides[3]};
  require(args.rows == rows, "keys and values differ in columns");
  require(slot >= 0 && slot + rows <= held.shape[2], "columns pass the slots");
  require_floats(name, x);
  held.of_type(name, x.dtype).of_shape(name, {args.batch, args.heads, held.shape[2], args.width}).last_contiguous(name);
  args.to.data = held.at<char>() + slot * args.to.row_stride * (x.dtype == Dtype::f32 ? 4 : 2);
  return args;
}

void py_stage(const Array& keys, const Array& values, const Array& held_keys, const Array& held_values, int64_t slot,
              int threads) {
  const StageArgs first = stage_args("keys", keys, held_keys, keys.shape[2], slot);
  const StageArgs second = stage_args("values", values, held_values, first.rows, slot);
  run_stage(first, threads);
  run_stage(second, threads);
}

void py_rotate(const Array& x, const Array& out, const Rotations& rotations, bool inverse, int threads) {
  require(x.shape.size() == 4, "x must be [batch, heads, rows, width]");
  const Rotation rotation = rotations.tables();
  check_float_rows("x", x, {x.shape[0], rotation.heads, x.shape[2], rotation.width});
  out.of_type("out", Dtype::f32).of_shape("out", x.shape).contiguous("out");
  run_rotate({rotation, x.rows(), out.at<float>(), x.shape[0], x.shape[2], inverse}, threads);
}

void py_quantize(const Array& y, const Codec& codec, const Array& codes, const Array& scales, int threads) {
  require(y.shape.size() == 2, "y must be [rows, width]");
  const int64_t rows = y.shape[0];
  y.of_type("y", Dtype::f32).of_shape("y", {rows, codec.width}).contiguous("y");
  codes.of_type("codes", Dtype::u8).of_shape("codes", {rows, codec.width}).contiguous("codes");
  scales.of_type("scales", codec.scale_dtype).of_shape("scales", {rows, codec.groups()}).contiguous("scales");
  run_quantize({codec, y.at<const float>(), codes.at<uint8_t>(), scales.at<uint16_t>()}, rows, threads);
}

void py_circles(const Array& x, const Array& levels, const Array& codes, int64_t bits, int threads) {
  require(bits >= 2 && bits <= 4, "bits must be 2, 3 or 4");
  require(x.shape.size() == 2, "x must be [circles, 16]");
  const int64_t circles = x.shape[0], classes = bits == 3 ? kClasses<kTrellis + 3> : kClasses<kTrellis + 2>;
  x.of_type("x", Dtype::i32).of_shape("x", {circles, 16}).contiguous("x");
  codes.of_type("codes", Dtype::u8).of_shape("codes", {circles, 16}).contiguous("codes");
  levels.of_type("levels", Dtype::i32).of_shape("levels", {classes, int64_t(1) << bits}).contiguous("levels");
  run_circles({bits, levels.at<const int32_t>(), x.at<const int32_t>(), codes.at<uint8_t>()}, circles, threads);
}

// Rows of a matrix times inputs, all of them; without inputs as many rows as `out` has, from `begin` on, as fp32.
void py_weight(const Weights& weight, const OptionalArray& x, const Array& out, int64_t matrix, int64_t begin,
               int threads) {
  out.of_type("out", Dtype::f32).contiguous("out");
  require(out.shape.size() == 2, "out must have two dimensions");
  WeightArgs args = weight.part(matrix, begin, x ? weight.shape.rows : out.shape[0]);
  args.out = out.at<float>();
  if (!x) {
    out.of_shape("out", {args.rows, args.width});
    return run_weight(args, nullptr, threads);
  }
  require(x->shape.size() == 2, "x must be [tokens, width]");
  args.tokens = x->shape[0];
  x->of_shape("x", {args.tokens, args.width}).contiguous("x");
  require(x->dtype == Dtype::f32 || x->dtype == Dtype::bf16, "x must be fp32 or bf16");
  out.of_shape("out", {args.tokens, args.rows});
  const WeightInputs inputs = {x->at<const void>(), x->dtype, weight.factors(), weight.rotated};
  if (args.tokens > 0) run_weight(args, &inputs, threads);
}

Step step_named(const std::string& name) {
  if (name == "pack") return Step::pack;
  if (name == "unpack") return Step::unpack;
  if (name == "unpack_sealed") return Step::unpack_sealed;
  if (name == "seal") return Step::seal;
  if (name == "unseal") return Step::unseal;
  refuse("step=" + name + " is unknown");
}

void py_repack(const std::string& step_name, const Array& in, const Array& out, int64_t bits, int64_t width,
               const std::string& layout, int threads) {
  const Step step = step_named(step_name);
  require(bits == 2 || bits == 3 || bits == 4 || bits == 8, "bits must be 2, 3, 4 or 8");
  require(width >= 8 && width <= kMaxWidth && width % 8 == 0, "width is out of range");
  require(in.shape.size() == 3, "rows must be [blocks, rows, bytes]");
  const bool sealing = step == Step::seal || step == Step::unseal || step == Step::unpack_sealed;
  require(!sealing || layout == "key" || layout == "value", "layout must be key or value");
  const int64_t blocks = in.shape[0], rows = in.shape[1], packed = width * bits / 8;
  const bool to_codes = step == Step::unpack || step == Step::unpack_sealed;
  in.of_type("rows", Dtype::u8).of_shape("rows", {blocks, rows, step == Step::pack ? width : packed}).contiguous("rows");
  out.of_type("out", Dtype::u8).of_shape("out", {blocks, rows, to_codes ? width : packed}).contiguous("out");
  run_repack({step, bits, width, rows, layout == "key", in.at<const uint8_t>(), out.at<uint8_t>()}, blocks, threads);
}

std::vector<AppendUnit> append_units(const Array& x, const Slabs& slabs, const Array& table, const int32_t* source,
                                     const int32_t* counts, const int32_t* target) {
  const int64_t batch = x.shape[0], heads = x.shape[1], rows = x.shape[2];
  require(table.shape.size() == 2, "block_table must be [batch, max_blocks]");
  const int64_t max_blocks = table.shape[1];
  const int32_t* blocks = integers("block_table", table, {batch, max_blocks});
  std::vector<AppendUnit> units;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t begin = source[b], count = counts[b], start = target[b];
    require(begin >= 0 && count >= 0 && begin + count <= rows, "src_begin and counts pass the rows of x");
    require(start >= 0 && (count == 0 || (start + count - 1) / kBlock < max_blocks),
            "dst_begin and counts pass the columns of block_table");
    for (int64_t done = 0; done < count;) {
      const int64_t offset = (start + done) % kBlock, take = std::min(kBlock - offset, count - done);
      const int64_t block = blocks[b * max_blocks + (start + done) / kBlock];
      require(block >= 0 && block < slabs.num_blocks(), "block_table names a block that no slab has");
      for (int64_t h = 0; h < heads; h++) units.push_back({b, h, begin + done, take, block, offset});
      done += take;
    }
  }
  return units;
}

int64_t py_append(const Array& x, const Rotations& rotations, const Slabs& slabs, const Array& table,
                  const Array& src_begin, const Array& counts, const Array& dst_begin, const OptionalArray& mean,
                  const OptionalArray& feedback, int threads) {
  require(x.shape.size() == 4, "x must be [batch, heads, rows, width]");
  const Rotation rotation = rotations.tables();
  const int64_t batch = x.shape[0], heads = rotation.heads, width = rotation.width;
  check_float_rows("x", x, {batch, heads, x.shape[2], width});
  require(slabs.layout.codec.width == width, "the stream and the rotation differ in width");
  require(slabs.heads == heads || slabs.codes.empty(), "the stream and the rotation differ in num_kv_heads");
  AppendArgs args;
  args.rotation = rotation;
  args.stream = slabs.stream();
  args.x = x.rows();
  args.heads = heads;
  if (mean) {
    mean->of_type("mean", Dtype::f32).of_shape("mean", {batch, heads, width}).last_contiguous("mean");
    args.mean.data = mean->at<const void>();
    args.mean.batch_stride = mean->strides[0];
    args.mean.head_stride = mean->strides[1];
  }
  if (feedback) {
    require(args.stream.codec.groups() == 1, "feedback needs one scale a row");
    args.feedback = feedback->of_type("feedback", Dtype::f32).of_shape("feedback", {heads, width, width})
                        .contiguous("feedback").at<const float>();
  }
  const std::vector<AppendUnit> units =
      append_units(x, slabs, table, integers("src_begin", src_begin, {batch}), integers("counts", counts, {batch}),
                   integers("dst_begin", dst_begin, {batch}));
  return run_append(args, units, threads);
}

// Lengths and tables are written between calls.
void check_blocks(const AttentionArgs& args, int64_t num_blocks) {
  for (int64_t b = 0; b < args.batch; b++) {
    const int64_t needed = (int64_t{args.packed_lens[b]} + kBlock - 1) / kBlock;
    require(args.packed_lens[b] >= 0, "packed_lens holds a negative length");
    require(needed <= args.max_blocks, "packed_lens passes the columns of block_table");
    for (int64_t i = 0; i < needed; i++) {
      const int64_t block = args.block_table[b * args.max_blocks + i];
      require(block >= 0 && block < num_blocks, "block_table names a block that no slab has");
    }
  }
}

void set_mask(AttentionArgs& args, const Array& mask) {
  require(mask.shape.size() == 4, "mask must be [batch, 1 or heads, rows, positions]");
  const int64_t mask_heads = mask.shape[1] == 1 ? 1 : args.heads, columns = mask.shape[3];
  mask.of_type("mask", Dtype::u8).of_shape("mask", {args.batch, mask_heads, args.rows, columns});
  for (int64_t b = 0; b < args.batch; b++) {
    require(!args.packed || args.packed_lens[b] <= columns, "mask has fewer columns than packed positions");
    for (int64_t i = 0; i < args.dense_rows; i++) {
      const int32_t position = args.dense_positions[b * args.dense_rows + i];
      require(position < columns || position >= args.seq_lens[b], "mask has fewer columns than dense_positions");
    }
  }
  args.mask = mask.at<const uint8_t>();
  args.mask_batch = mask.strides[0];
  args.mask_head = mask_heads == 1 ? 0 : mask.strides[1];
  args.mask_row = mask.strides[2];
  args.mask_column = mask.strides[3];
}

void py_attention(const Array& q, const Plan& plan, const OptionalArray& mask, const Array& out, int threads) {
  AttendArgs attend = plan.attend;
  AttentionArgs& args = attend.codes;
  require(q.shape.size() == 4, "q must be [batch, heads, rows, width]");
  args.heads = q.shape[1];
  args.rows = q.shape[2];
  require(args.kv_heads >= 1 && args.heads % args.kv_heads == 0, "num_heads is not a multiple of num_kv_heads");
  attend.dtype = q.dtype;
  require(q.dtype == Dtype::f32 || q.dtype == Dtype::bf16, "q must be float32 or bfloat16");
  attend.q = q.of_shape("q", {args.batch, args.heads, args.rows, args.keys.codec.width}).contiguous("q").at<void>();
  check_blocks(args, plan.num_blocks);
  if (plan.sink_logits) plan.sink_logits->of_shape("sink_logits", {args.heads});
  if (mask) set_mask(args, *mask);
  attend.out = out.of_type("out", q.dtype)
                   .of_shape("out", {args.batch, args.heads, args.rows, args.values.codec.width})
                   .contiguous("out").at<void>();
  run_attend(attend, threads);
}

constexpr int64_t kRoofStep = 512;       // bytes that every instruction set reads in whole steps
constexpr int64_t kRoofChunk = 1 << 16;  // bytes that a thread takes at a time

// Does once what a roof is the rate of, for Python to time. Returns the bytes read, or the multiply-adds done.
int64_t py_roof(const std::string& kind, const Array& data, int64_t rounds, int threads) {
  require(data.shape.size() == 1 && data.shape[0] > 0 && data.shape[0] % kRoofStep == 0,
          "data must be [bytes], a multiple of 512 of them");
  require(rounds >= 1 && rounds <= INT32_MAX && threads >= 1, "rounds and threads must be at least 1");
  const int64_t bytes = data.of_type("data", Dtype::u8).contiguous("data").shape[0];
  const uint8_t* from = data.at<const uint8_t>();
  const Kernels& kernel = kernels();
  if (kind == "stream") {
    for (int64_t round = 0; round < rounds; round++) {
      parallel_for((bytes + kRoofChunk - 1) / kRoofChunk, threads, [&](int64_t i) {
        kernel.roof_stream(from + i * kRoofChunk, std::min(kRoofChunk, bytes - i * kRoofChunk));
      });
    }
    return rounds * bytes;
  }
  if (kind != "dot") refuse("kind=" + kind + " is unknown; valid: stream, dot");
  std::atomic<int64_t> done{0};
  parallel_for(threads, threads, [&](int64_t) {
    int64_t products = 0;
    kernel.roof_dot(from, bytes, (rounds + threads - 1) / threads, &products);
    done += products;
  });
  return done;
}

std::vector<std::string> py_available() {
  std::vector<std::string> names;
  for (const char* const* name = available(); *name; name++) names.emplace_back(*name);
  return names;
}

void py_use(const std::string& name) {
  if (!use(name.c_str())) refuse("instruction set " + name + " is not available here");
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of rotaryquant on tensors in memory; use them through rotaryquant.ops.";
  m.def("read_tensors", &read_tensors, "type"_a, "Take tensors of this class, torch.Tensor, as arrays from now on.");
  nb::class_<Rotations>(m, "Rotation").def(
      nb::init<int64_t, int64_t, int64_t, const Array&, const OptionalArray&, const OptionalArray&,
               const OptionalArray&>(),
      "width"_a, "heads"_a, "power"_a, "base"_a, "signs"_a.none(), "blocks"_a.none(), "matrix"_a.none());
  nb::class_<Codec>(m, "Codec");
  m.def("codec", &make_codec, "layout"_a, "width"_a, "bits"_a, "rule"_a, "group"_a, "scale_dtype"_a, "unit"_a,
        "trellis"_a, "levels"_a,
        "boundaries"_a);
  nb::class_<Slabs>(m, "Stream").def(
      nb::init<const Codec&, int64_t, const std::vector<Array>&, const std::vector<Array>&>(), "codec"_a,
      "blocks_per_slab"_a, "codes"_a, "scales"_a);
  nb::class_<Weights>(m, "Weight").def(
      nb::init<const Array&, const Array&, const Array&, const OptionalArray&, int64_t, int64_t, int64_t>(), "codes"_a,
      "scales"_a, "levels"_a, "factors"_a.none(), "rotated"_a, "bits"_a, "group"_a);
  nb::class_<View>(m, "View").def(
      nb::init<const Slabs&, const Slabs&, const Rotations&, const Rotations&, const Array&, const Array&, const Array&,
               int64_t, const OptionalArray&, const OptionalArray&, const OptionalArray&, const OptionalArray&>(),
      "keys"_a, "values"_a, "key_rotation"_a, "value_rotation"_a, "block_table"_a, "packed_lens"_a, "seq_lens"_a,
      "num_sinks"_a, "means"_a.none(), "dense_keys"_a.none(), "dense_values"_a.none(), "dense_positions"_a.none(),
      nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
  nb::class_<Plan>(m, "Plan").def(
      nb::init<const View&, double, bool, int64_t, double, double, double, const OptionalArray&, bool>(), "view"_a,
      "scale"_a, "causal"_a, "window"_a, "softcap"_a, "noise_query"_a, "noise_score"_a, "sink_logits"_a.none(),
      "inverse"_a, nb::keep_alive<1, 2>());
  m.def("stage", &py_stage, "keys"_a, "values"_a, "held_keys"_a, "held_values"_a, "slot"_a, "threads"_a, Release());
  m.def("rotate", &py_rotate, "x"_a, "out"_a, "rotation"_a, "inverse"_a, "threads"_a, Release());
  m.def("quantize", &py_quantize, "y"_a, "codec"_a, "codes"_a, "scales"_a, "threads"_a, Release());
  m.def("circles", &py_circles, "x"_a, "levels"_a, "codes"_a, "bits"_a, "threads"_a, Release());
  m.def("weight", &py_weight, "weight"_a, "x"_a.none(), "out"_a, "matrix"_a, "begin"_a, "threads"_a, Release());
  m.def("repack", &py_repack, "step"_a, "rows"_a, "out"_a, "bits"_a, "width"_a, "layout"_a, "threads"_a,
        Release());
  m.def("append", &py_append, "x"_a, "rotation"_a, "stream"_a, "block_table"_a, "src_begin"_a, "counts"_a,
        "dst_begin"_a, "mean"_a.none(), "feedback"_a.none(), "threads"_a, Release());
  m.def("attention", &py_attention, "q"_a, "plan"_a, "mask"_a.none(), "out"_a, "threads"_a, Release());
  m.def("borrow_threads", [](uint64_t address) { borrow_threads(reinterpret_cast<Parallel>(address)); }, "address"_a,
        "Run loops on threads of the OpenMP runtime with GOMP_parallel at this address; 0: on threads of our own.");
  m.def("roof", &py_roof, "kind"_a, "data"_a, "rounds"_a, "threads"_a, Release());
  m.def("instruction_sets", &py_available, "Instruction sets of this build that this processor has, best first.");
  m.def("instruction_set", [] { return std::string(kernels().name); }, "The instruction set in use.");
  m.def("use_instruction_set", &py_use, "name"_a, "Switch all kernels to one of `instruction_sets`.");
}

}  // namespace rq
