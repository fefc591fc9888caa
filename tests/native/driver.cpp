// The CPU kernels as a program without Python, for processors, sanitizers and simulators that Python does not run
// under (CMakeLists.txt, RQ_DRIVER).
//
//   driver isas                          names of the instruction sets, best first
//   driver serve ISA                     answers calls of the native module from stdin on stdout (remote.py)
//   driver bench attention|append ISA HEADS KV_HEADS WIDTH TOKENS    one call, to count its instructions
//
// Every array of a call lies in memory of exactly its size, so that a sanitizer sees each byte read or written beside
// it; without one, guard bytes show what was written.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>

#include "arrays.h"
#include "drive.h"

namespace rq {
namespace {

// ---- what a call is made of ------------------------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 64;
#endif
constexpr unsigned char kGuardByte = 0xA5;

class Buffer {
 public:
  Buffer(uint64_t source, size_t size) : source(source), size(size) {
    memory_ = static_cast<unsigned char*>(std::malloc(size + 2 * kGuard + (size == 0)));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_, kGuardByte, kGuard);
    std::memset(memory_ + kGuard + size, kGuardByte, kGuard);
  }
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;

  unsigned char* data() const { return memory_ + kGuard; }
  void check() const {
    for (size_t i = 0; i < kGuard; i++) {
      require(memory_[i] == kGuardByte && data()[size + i] == kGuardByte, "a kernel wrote beside an array");
    }
  }

  const uint64_t source;  // address of the original in the caller's process
  const size_t size;

 private:
  unsigned char* memory_;
};

void read_exactly(void* to, size_t size) {
  if (size && std::fread(to, 1, size, stdin) != size) refuse("the call ends early");
}

template <typename T>
T read_number() {
  T number;
  read_exactly(&number, sizeof number);
  return number;
}

std::string read_text() {
  std::string text(read_number<uint32_t>(), '\0');
  read_exactly(&text[0], text.size());
  return text;
}

Dtype dtype_named(const std::string& name) {
  if (name == "f32") return Dtype::f32;
  if (name == "bf16") return Dtype::bf16;
  if (name == "f16") return Dtype::f16;
  return name == "u8" ? Dtype::u8 : Dtype::i32;
}

struct Field;
using Fields = std::map<std::string, Field>;

struct Field {
  char kind = 'n';  // none, integer, double, text, array, list of arrays, object
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<Array> arrays;
  std::vector<Buffer*> buffers;  // of `arrays`
  std::shared_ptr<Fields> object;
  bool taken = false;
};

class Call {
 public:
  Call() : op(read_text()), fields_(read_fields()) {}

  static int64_t integer(Fields& fields, const char* name) { return take(fields, name, 'i').integer; }
  static Array array(Fields& fields, const char* name) { return take(fields, name, 'a').arrays[0]; }
  int64_t integer(const char* name) { return integer(fields_, name); }
  int threads() { return static_cast<int>(integer("threads")); }
  static double real(Fields& fields, const char* name) { return take(fields, name, 'd').real; }
  std::string text(const char* name) { return take(fields_, name, 's').text; }
  Array array(const char* name) { return array(fields_, name); }
  static OptionalArray optional(Fields& fields, const char* name) {
    const auto found = fields.find(name);
    if (found == fields.end() || found->second.kind != 'n') return take(fields, name, 'a').arrays[0];
    found->second.taken = true;
    return std::nullopt;
  }
  OptionalArray optional(const char* name) { return optional(fields_, name); }
  Array output(const char* name) {
    Field& field = take(fields_, name, 'a');
    outputs.push_back(field.buffers[0]);
    return field.arrays[0];
  }

  Rotations rotation(const char* name) { return rotation(fields_, name); }

  static Rotations rotation(Fields& fields, const char* name) {
    Fields& f = *take(fields, name, 'o').object;
    return Rotations(take(f, "width", 'i').integer, take(f, "heads", 'i').integer, take(f, "power", 'i').integer,
                     take(f, "base", 'a').arrays[0], optional(f, "signs"), optional(f, "blocks"),
                     optional(f, "matrix"));
  }

  Codec codec(const char* name) { return codec(fields_, name); }

  static Fields& object(Fields& fields, const char* name) { return *take(fields, name, 'o').object; }
  Fields& object(const char* name) { return object(fields_, name); }

  Slabs stream(const char* name, bool written) { return stream(fields_, name, written); }

  Slabs stream(Fields& fields, const char* name, bool written) {
    Fields& f = *take(fields, name, 'o').object;
    for (const char* slabs : {"codes", "scales"}) {
      for (Buffer* buffer : take(f, slabs, 'l').buffers) {
        if (written) outputs.push_back(buffer);
      }
    }
    return Slabs(codec(f, "codec"), take(f, "blocks_per_slab", 'i').integer, take(f, "codes", 'l').arrays,
                 take(f, "scales", 'l').arrays);
  }

  Weights weights(const char* name) {
    Fields& f = object(name);
    return Weights(array(f, "codes"), array(f, "scales"), array(f, "levels"), optional(f, "factors"),
                   integer(f, "rotated"), integer(f, "bits"), integer(f, "group"));
  }

  // Refuses a call of which something was left unread: this program and the native module have grown apart.
  void finish() const { check_taken(fields_); }

  void check_buffers() const {
    for (const auto& buffer : buffers_) buffer->check();
  }

  const std::string op;
  std::vector<Buffer*> outputs;

 private:
  Fields read_fields() {
    Fields fields;
    for (uint32_t n = read_number<uint32_t>(); n > 0; n--) {
      const std::string name = read_text();
      Field field;
      field.kind = read_number<char>();
      if (field.kind == 'i') field.integer = read_number<int64_t>();
      else if (field.kind == 'd') field.real = read_number<double>();
      else if (field.kind == 's') field.text = read_text();
      else if (field.kind == 'a') read_array(field);
      else if (field.kind == 'o') field.object = std::make_shared<Fields>(read_fields());
      else if (field.kind == 'l') {
        for (uint32_t i = read_number<uint32_t>(); i > 0; i--) read_array(field);
      }
      fields[name] = field;
    }
    return fields;
  }

  void read_array(Field& field) {
    const uint64_t source = read_number<uint64_t>();
    Array array;
    array.dtype = dtype_named(read_text());
    array.shape.count = array.strides.count = read_number<uint32_t>();
    for (Dims* dims : {&array.shape, &array.strides}) {
      for (int64_t i = 0; i < dims->count; i++) dims->values[i] = read_number<int64_t>();
    }
    buffers_.push_back(std::make_unique<Buffer>(source, read_number<uint64_t>()));
    Buffer& buffer = *buffers_.back();
    read_exactly(buffer.data(), buffer.size);
    array.data = buffer.data();
    field.arrays.push_back(array);
    field.buffers.push_back(&buffer);
  }

  static Field& take(Fields& fields, const char* name, char kind) {
    const auto found = fields.find(name);
    if (found == fields.end() || found->second.kind != kind) refuse(std::string("the call has no field ") + name);
    found->second.taken = true;
    return found->second;
  }

  static Codec codec(Fields& fields, const char* name) {
    Fields& f = *take(fields, name, 'o').object;
    return make_codec(take(f, "layout", 's').text, take(f, "width", 'i').integer, take(f, "bits", 'i').integer,
                      take(f, "rule", 's').text, take(f, "group", 'i').integer, take(f, "scale_dtype", 's').text,
                      take(f, "unit", 'd').real, take(f, "trellis", 'i').integer != 0,
                      take(f, "levels", 'a').arrays[0], take(f, "boundaries", 'a').arrays[0]);
  }

  static void check_taken(const Fields& fields) {
    for (const auto& [name, field] : fields) {
      if (!field.taken) refuse("field " + name + " of the call is unknown here");
      if (field.object) check_taken(*field.object);
    }
  }

  std::vector<std::unique_ptr<Buffer>> buffers_;
  Fields fields_;
};

// ---- calls of the native module (module.cpp has the checks that are left out here) ------------------------------

void call_stage(Call& in) {
  const Array keys = in.array("keys"), values = in.array("values");
  const Array held_keys = in.output("held_keys"), held_values = in.output("held_values");
  const int64_t slot = in.integer("slot");
  const int threads = in.threads();
  in.finish();
  for (const auto& [x, held] : {std::pair(keys, held_keys), std::pair(values, held_values)}) {
    StageArgs args = {x.rows(), held.rows(), x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.strides[3]};
    args.to.data = held.at<char>() + slot * args.to.row_stride * (x.dtype == Dtype::f32 ? 4 : 2);
    run_stage(args, threads);
  }
}

void call_rotate(Call& in) {
  const Array x = in.array("x"), out = in.output("out");
  const Rotations rotation = in.rotation("rotation");
  const bool inverse = in.integer("inverse") != 0;
  const int threads = in.threads();
  in.finish();
  run_rotate({rotation.tables(), x.rows(), out.at<float>(), x.shape[0], x.shape[2], inverse}, threads);
}

void call_quantize(Call& in) {
  const Array y = in.array("y"), codes = in.output("codes"), scales = in.output("scales");
  const Codec codec = in.codec("codec");
  const int threads = in.threads();
  in.finish();
  run_quantize({codec, y.at<const float>(), codes.at<uint8_t>(), scales.at<uint16_t>()}, y.shape[0], threads);
}

void call_circles(Call& in) {
  const Array x = in.array("x"), levels = in.array("levels"), codes = in.output("codes");
  const CirclesArgs args = {in.integer("bits"), levels.at<const int32_t>(), x.at<const int32_t>(), codes.at<uint8_t>()};
  const int threads = in.threads();
  in.finish();
  run_circles(args, x.shape[0], threads);
}

void call_weight(Call& in) {
  const Weights weight = in.weights("weight");
  const OptionalArray x = in.optional("x");
  const Array out = in.output("out");
  const int64_t matrix = in.integer("matrix"), begin = in.integer("begin");
  const int threads = in.threads();
  in.finish();
  WeightArgs args = weight.part(matrix, begin, x ? weight.shape.rows : out.shape[0]);
  args.out = out.at<float>();
  if (!x) return run_weight(args, nullptr, threads);
  args.tokens = x->shape[0];
  const WeightInputs inputs = {x->at<const void>(), x->dtype, weight.factors(), weight.rotated};
  run_weight(args, &inputs, threads);
}

Step step_named(const std::string& name) {
  if (name == "pack") return Step::pack;
  if (name == "unpack") return Step::unpack;
  if (name == "unpack_sealed") return Step::unpack_sealed;
  return name == "seal" ? Step::seal : Step::unseal;
}

void call_repack(Call& in) {
  const Array rows = in.array("rows"), out = in.output("out");
  const Step step = step_named(in.text("step"));
  const bool keys = in.text("layout") == "key";
  const RepackArgs args = {step, in.integer("bits"), in.integer("width"), rows.shape[1], keys,
                           rows.at<const uint8_t>(), out.at<uint8_t>()};
  const int threads = in.threads();
  in.finish();
  run_repack(args, rows.shape[0], threads);
}

int64_t call_append(Call& in) {
  const Array x = in.array("x"), table = in.array("block_table");
  const Rotations rotation = in.rotation("rotation");
  const Slabs slabs = in.stream("stream", true);
  const int32_t* begin = in.array("src_begin").at<const int32_t>();
  const int32_t* counts = in.array("counts").at<const int32_t>();
  const int32_t* target = in.array("dst_begin").at<const int32_t>();
  const OptionalArray mean = in.optional("mean"), feedback = in.optional("feedback");
  const int threads = in.threads();
  in.finish();
  AppendArgs args;
  args.rotation = rotation.tables();
  args.stream = slabs.stream();
  args.x = x.rows();
  args.heads = args.rotation.heads;
  if (mean) {
    args.mean.data = mean->at<const void>();
    args.mean.batch_stride = mean->strides[0];
    args.mean.head_stride = mean->strides[1];
  }
  if (feedback) args.feedback = feedback->at<const float>();
  std::vector<AppendUnit> units;
  for (int64_t b = 0; b < x.shape[0]; b++) {
    for (int64_t done = 0; done < counts[b];) {
      const int64_t position = target[b] + done, offset = position % kBlock;
      const int64_t take = std::min<int64_t>(kBlock - offset, counts[b] - done);
      const int64_t block = table.at<const int32_t>()[b * table.shape[1] + position / kBlock];
      for (int64_t h = 0; h < args.heads; h++) units.push_back({b, h, begin[b] + done, take, block, offset});
      done += take;
    }
  }
  return run_append(args, units, threads);
}

void read_mask(AttentionArgs& args, const Array& mask) {
  args.mask = mask.at<const uint8_t>();
  args.mask_batch = mask.strides[0];
  args.mask_head = mask.shape[1] == 1 ? 0 : mask.strides[1];
  args.mask_row = mask.strides[2];
  args.mask_column = mask.strides[3];
}

void call_attention(Call& in) {
  Fields &asked = in.object("plan"), &fields = Call::object(asked, "view");
  const Slabs keys = in.stream(fields, "keys", false), values = in.stream(fields, "values", false);
  const Rotations key_rotation = in.rotation(fields, "key_rotation");
  const Rotations value_rotation = in.rotation(fields, "value_rotation");
  const View view(keys, values, key_rotation, value_rotation, Call::array(fields, "block_table"),
                  Call::array(fields, "packed_lens"), Call::array(fields, "seq_lens"),
                  Call::integer(fields, "num_sinks"), Call::optional(fields, "means"),
                  Call::optional(fields, "dense_keys"), Call::optional(fields, "dense_values"),
                  Call::optional(fields, "dense_positions"));
  const Plan plan(view, Call::real(asked, "scale"), Call::integer(asked, "causal") != 0, Call::integer(asked, "window"),
                  Call::real(asked, "softcap"), Call::real(asked, "noise_query"), Call::real(asked, "noise_score"),
                  Call::optional(asked, "sink_logits"), Call::integer(asked, "inverse") != 0);
  const Array q = in.array("q");
  const OptionalArray mask = in.optional("mask");
  AttendArgs attend = plan.attend;
  AttentionArgs& args = attend.codes;
  args.heads = q.shape[1];
  args.rows = q.shape[2];
  attend.dtype = q.dtype;
  attend.q = q.at<const void>();
  if (mask) read_mask(args, *mask);
  attend.out = in.output("out").at<void>();
  const int threads = in.threads();
  in.finish();
  run_attend(attend, threads);
}

int64_t answer(Call& in) {
  if (in.op == "append") return call_append(in);
  if (in.op == "stage") call_stage(in);
  else if (in.op == "rotate") call_rotate(in);
  else if (in.op == "quantize") call_quantize(in);
  else if (in.op == "circles") call_circles(in);
  else if (in.op == "weight") call_weight(in);
  else if (in.op == "repack") call_repack(in);
  else if (in.op == "attention") call_attention(in);
  else refuse("the call " + in.op + " is unknown here");
  return 0;
}

template <typename T>
void write_number(T number) {
  std::fwrite(&number, sizeof number, 1, stdout);
}

void refuse_call(const char* reason) {
  write_number<char>(1);
  write_number<uint32_t>(static_cast<uint32_t>(std::strlen(reason)));
  std::fputs(reason, stdout);
}

int serve() {
  for (int next; (next = std::getc(stdin)) != EOF;) {
    std::ungetc(next, stdin);
    Call in;
    try {
      const int64_t result = answer(in);
      in.check_buffers();
      write_number<char>(0);
      write_number<int64_t>(result);
      write_number<uint32_t>(static_cast<uint32_t>(in.outputs.size()));
      for (const Buffer* buffer : in.outputs) {
        write_number<uint64_t>(buffer->source);
        write_number<uint64_t>(buffer->size);
        std::fwrite(buffer->data(), 1, buffer->size, stdout);
      }
    } catch (const std::exception& error) {
      refuse_call(error.what());
    }
    std::fflush(stdout);
  }
  return 0;
}

// ---- one call whose instructions are counted --------------------------------------------------------------------

Codec bench_codec(int64_t width, bool keys) {
  Codec codec;
  codec.width = codec.group = width;
  codec.bits = 3;
  codec.keys = keys;
  codec.rule = keys ? Rule::score : Rule::value;
  for (int i = 0; i < 8; i++) codec.levels[i] = static_cast<float>(32 * i - 112);
  for (int i = 0; i < 7; i++) codec.boundaries[i] = 0.6f * static_cast<float>(i - 3);
  return codec;
}

// Blocks of random codes, all scales 1: a cache of any contents takes the same instructions.
struct BenchStream {
  BenchStream(const Codec& codec, int64_t heads, int64_t blocks, std::mt19937& random)
      : codes(static_cast<size_t>(blocks * heads * kBlock * codec.code_bytes())),
        scales(static_cast<size_t>(blocks * heads * kBlock), 0x3f80) {
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
    stream.codec = codec;
    stream.blocks_per_slab = blocks;
    code_slab = codes.data();
    scale_slab = scales.data();
    stream.codes = &code_slab;
    stream.scales = &scale_slab;
    stream.code_row = codec.code_bytes();
    stream.code_head = kBlock * stream.code_row;
    stream.code_block = heads * stream.code_head;
    stream.scale_row = 1;
    stream.scale_head = kBlock;
    stream.scale_block = heads * kBlock;
  }

  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
  uint8_t* code_slab;
  uint16_t* scale_slab;
  Stream stream;
};

std::vector<float> bench_rows(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<size_t>(count));
  for (float& value : rows) value = normal(random);
  return rows;
}

Array bench_array(std::vector<float>& values, const Dims& shape) {
  Array array;
  array.data = values.data();
  array.dtype = Dtype::f32;
  array.shape = array.strides = shape;
  int64_t stride = 1;
  for (int64_t i = shape.size(); i-- > 0; stride *= shape[i]) array.strides.values[i] = stride;
  return array;
}

void bench_attention(int64_t heads, int64_t kv_heads, int64_t width, int64_t tokens, std::mt19937& random) {
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  const BenchStream keys(bench_codec(width, true), kv_heads, blocks, random);
  const BenchStream values(bench_codec(width, false), kv_heads, blocks, random);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(i);
  const int32_t length = static_cast<int32_t>(tokens);
  const std::vector<float> q = bench_rows(heads * width, random);
  std::vector<float> out(q.size());
  AttentionArgs args = {};
  args.batch = args.rows = 1;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.q = args.q_rotated = q.data();
  args.keys = keys.stream;
  args.values = values.stream;
  args.packed = args.causal = true;
  args.block_table = table.data();
  args.packed_lens = args.seq_lens = &length;
  args.max_blocks = blocks;
  args.scale = 1e-3f;          // logits of about one nat
  args.noise_query = 1e-6f;    // presets take the noise of codes off
  args.noise_score = 1e-4f;
  args.out = out.data();
  run_attention(args, 1);
}

// The rotation of presets: signs, Hadamard, blocks; so that widths are powers of two.
void bench_append(int64_t heads, int64_t width, int64_t tokens, std::mt19937& random) {
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  const BenchStream keys(bench_codec(width, true), heads, blocks, random);
  const std::vector<float> rows = bench_rows(heads * tokens * width, random);
  std::vector<float> signs = bench_rows(heads * width, random), matrices = bench_rows(heads * width * 4, random);
  std::vector<float> one = {1};
  const Rotations rotation(width, heads, width, bench_array(one, {1, 1}), bench_array(signs, {heads, width}),
                           bench_array(matrices, {heads, width / 4, 4, 4}), std::nullopt);
  AppendArgs args;
  args.rotation = rotation.tables();
  args.heads = heads;
  args.stream = keys.stream;
  args.x.data = rows.data();
  args.x.row_stride = width;
  args.x.head_stride = args.x.batch_stride = tokens * width;
  std::vector<AppendUnit> units;
  for (int64_t first = 0; first < tokens; first += kBlock) {
    for (int64_t h = 0; h < heads; h++) {
      units.push_back({0, h, first, std::min(kBlock, tokens - first), first / kBlock, 0});
    }
  }
  if (run_append(args, units, 1) != -1) refuse("the benchmark's rows are not finite");
}

int bench(const std::string& op, char** numbers) {
  std::mt19937 random(1);
  const int64_t heads = std::atoll(numbers[0]), kv_heads = std::atoll(numbers[1]), width = std::atoll(numbers[2]);
  const int64_t tokens = std::atoll(numbers[3]);
  require(kv_heads > 0 && heads % kv_heads == 0 && tokens > 0, "HEADS must be a multiple of KV_HEADS");
  require(width >= 16 && width <= kMaxWidth && (width & (width - 1)) == 0, "WIDTH must be a power of two from 16 on");
  if (op == "attention") bench_attention(heads, kv_heads, width, tokens, random);
  else bench_append(kv_heads, width, tokens, random);
  return 0;
}

int run(int count, char** words) {
  const std::string mode = count > 1 ? words[1] : "";
  if (mode == "isas" && count == 2) {
    for (const char* const* name = available(); *name; name++) std::puts(*name);
    return 0;
  }
  const bool serves = mode == "serve" && count == 3, measures = mode == "bench" && count == 8;
  if (!serves && !measures) {
    std::fputs("usage: driver isas | serve ISA | bench attention|append ISA HEADS KV_HEADS WIDTH TOKENS\n", stderr);
    return 2;
  }
  const char* isa = words[serves ? 2 : 3];
  if (!use(isa)) refuse(std::string("instruction set ") + isa + " is not available here");
  return serves ? serve() : bench(words[2], words + 4);
}

}  // namespace
}  // namespace rq

int main(int count, char** words) {
  try {
    return rq::run(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "driver: %s\n", error.what());
    return 1;
  }
}
