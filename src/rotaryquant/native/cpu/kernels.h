// What the kernels are given: plain numbers and addresses, already checked (module.cpp), and the table of kernels
// of one instruction set. Offsets are elements of the array they belong to, always 64-bit.
#pragma once

#include <cstdint>

namespace rq {

constexpr int64_t kBlock = 128;      // positions in a block (formats/kv.py)
constexpr int64_t kStrip = 32;       // rows sealed together
constexpr int64_t kMaxWidth = 1024;  // widest row; fixes the size of the kernels' own buffers

enum class Dtype { f32, bf16, f16, u8, i32, other };
enum class Rule { score, value, norm };
enum class Step { pack, unpack, unpack_sealed, seal, unseal };

// Rows [batch, head, row, width] with the last dimension contiguous.
struct Rows {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// One way through a rotation, laid out for vectors (arrays.cpp): factors of a head fill `pitch` floats each, zeros past
// the width. Null: there are none.
struct Passage {
  const float* before = nullptr;   // [heads, pitch], factors before everything else
  const float* blocks = nullptr;   // [heads, 4, pitch]: y[4b + i] = sum over j of blocks[j][4b + i] * x[4b + j]
  const float* columns = nullptr;  // [order, kOrderPitch], of the base matrix; where it has more than one
  const float* after = nullptr;    // [heads, pitch], factors after everything else
};

constexpr int64_t kOrderPitch = 32;

// y = blocks · Hadamard · before · x and back, after · transpose(Hadamard) · blocks · before · y; or a dense matrix.
// Hadamard = Sylvester(power) x base of so many rows; power 0: none. Its norm is part of a factor before it.
struct Rotation {
  int64_t width = 0, heads = 0, pitch = 0;
  int64_t power = 0, order = 1;
  Passage forward, inverse;
  const float* matrix = nullptr;  // [heads, width, width] or null; replaces the rest
};

// Kinds of codes that templates are made for: so many bits, or kTrellis more, where a code names its level together with
// the one before it (trellis.h), of which only the class counts: what is left of it modulo kClasses.
constexpr int kTrellis = 64;
template <int KIND>
constexpr bool kPaths = KIND > kTrellis;
template <int KIND>
constexpr int kBits = kPaths<KIND> ? KIND - kTrellis : KIND;
template <int KIND>
constexpr int kClasses = !kPaths<KIND> ? 1 : kBits<KIND> == 3 ? 8 : 4;

struct Codec {
  int64_t width = 0, bits = 0, group = 0;
  bool keys = false;          // layout of sealed strips: of keys, or of values
  bool trellis = false;
  Rule rule = Rule::norm;
  Dtype scale_dtype = Dtype::bf16;
  float unit = 0;
  float levels[64] = {};      // up to 4 bits 2^bits, of a trellis for each class before; at 8 bits a level is code - 128
  float boundaries[16] = {};  // 2^bits - 1 of them
  int64_t groups() const { return width / group; }
  int64_t code_bytes() const { return width * bits / 8; }
  int64_t kind() const { return trellis ? kTrellis + bits : bits; }
};

// Packed rows: block b at slab b / blocks_per_slab, all slabs with the same strides. Scales count in elements.
struct Stream {
  Codec codec;
  int64_t blocks_per_slab = 1;
  uint8_t* const* codes = nullptr;
  uint16_t* const* scales = nullptr;
  int64_t code_block = 0, code_head = 0, code_row = 0;
  int64_t scale_block = 0, scale_head = 0, scale_row = 0, scale_group = 1;

  uint8_t* code_rows(int64_t block, int64_t head) const {
    return codes[block / blocks_per_slab] + block % blocks_per_slab * code_block + head * code_head;
  }
  uint16_t* scale_rows(int64_t block, int64_t head) const {
    return scales[block / blocks_per_slab] + block % blocks_per_slab * scale_block + head * scale_head;
  }
};

struct RotateArgs {
  Rotation rotation;
  Rows x;
  float* out;  // [batch, heads, rows, width], contiguous
  int64_t batch, rows;
  bool inverse;
};

struct QuantizeArgs {
  Codec codec;
  const float* y;    // [rows, width]
  uint8_t* codes;    // [rows, width]
  uint16_t* scales;  // [rows, groups]
};

// Circles of a trellis on their own: integers in, in the steps of `levels`, [classes][codes].
struct CirclesArgs {
  int64_t bits;
  const int32_t* levels;
  const int32_t* x;  // [circles, 16]
  uint8_t* codes;    // [circles, 16]
};

// A packed matrix, and inputs to multiply it with; x null: its rows become fp32 instead, [rows, width].
struct WeightArgs {
  int64_t kind, width, rows, group;  // kind: bits, of a trellis kTrellis more
  const uint8_t* codes;              // [rows, width * bits / 8]
  const void* scales;                // [rows, width / group], bf16 or fp32
  Dtype scale_dtype;
  int8_t lowest;                     // of all levels
  alignas(64) int8_t levels[64];     // of a trellis for each class before; not for 8 bits, where a level is code - 128
  const float* x;                    // [tokens, x_row], zeros behind the width up to whole vectors of any kind
  int64_t tokens, x_row;
  float* out;                        // [tokens, rows]
  // Inputs as integers for rows that meet them so (`weight_terms`), else null: [tokens, terms, width], the second term
  // in steps of a 254th; the step of each group and the sum of its integers in steps, [tokens, width / group].
  const int8_t* small;
  const float* steps;
  const float* sums;
};

// Inputs as they come: [tokens, width], of fp32 or bf16. factors: [width], signs over the root of `rotated`, the
// columns that a Hadamard matrix mixes, a power of two from 8 on; null: inputs are taken as they are.
struct WeightInputs {
  const void* x;
  Dtype dtype;
  const float* factors;
  int64_t rotated;
};

// Blocks of `rows` rows each. A unit is one strip, whole or not.
struct RepackArgs {
  Step step;
  int64_t bits, width, rows;
  bool keys;
  const uint8_t* in;
  uint8_t* out;
};

struct AppendArgs {
  Rotation rotation;
  Stream stream;
  Rows x;
  Rows mean;  // one row per batch row and head; data null: none
  // [heads, width, width]: what the error of a column adds to those of later blocks of 16 before they are coded; null: none
  const float* feedback = nullptr;
  int64_t heads;
};

// Rows of one head and batch row that go into one block.
struct AppendUnit {
  int64_t batch, head, source, count, block, offset;
};

// What a unit met: nothing, a non-finite input row, or a scale that its type cannot hold.
enum class Met { nothing, bad_scale, bad_input };

struct AttentionArgs {
  int64_t batch, heads, kv_heads, rows;  // heads = group * kv_heads
  const float *q, *q_rotated;            // [batch, heads, rows, key width], contiguous
  Stream keys, values;
  bool packed;  // whether there are packed rows at all
  const int32_t *block_table, *packed_lens, *seq_lens;
  int64_t max_blocks;
  int64_t num_sinks;
  Rows dense_keys, dense_values;  // data null: none
  const int32_t* dense_positions;
  int64_t dense_rows;
  float scale, softcap;
  bool causal;
  int64_t window;
  const float* sink_logits;  // [heads] or null
  const float* key_bias;     // [batch, heads, rows] or null
  const uint8_t* mask;       // null: none
  // Lowering of packed logits for the noise of their codes: by noise_query · |scale · q|² · (row scale)² less
  // noise_score · (scale · q·k)², where positive. Both 0: none.
  float noise_query, noise_score;
  int64_t mask_batch, mask_head, mask_row, mask_column;
  float *out, *dense_out;  // [batch, heads, rows, value width]; dense_out null: none
};

// Attention from queries to outputs in the original space. `codes` has everything but q, q_rotated, key_bias, out and
// dense_out, which are made on the way.
struct AttendArgs {
  AttentionArgs codes;
  bool dense;  // whether there are exact rows
  Rotation key_rotation, value_rotation;
  const float* means;  // [batch, kv_heads, key width], taken off the keys; null: none
  bool inverse;        // rotate the packed part of the output back
  Dtype dtype;         // of q and out: f32 or bf16
  const void* q;       // [batch, heads, rows, key width], contiguous
  void* out;           // [batch, heads, rows, value width], contiguous
};

// One tile of query rows of one batch row and KV head, over one share of its keys. Query row t of a KV head is
// row t / group of head t % group, so that a tile spans few positions.
struct AttentionUnit {
  int64_t batch, kv_head, first, count;  // query rows [first, first + count)
  int64_t block_begin, block_end;        // packed blocks
  bool dense;                            // whether the dense rows belong to this share
};

// Softmax state of a share, for merging: `out` and `dense_out` not yet divided by `total`.
struct AttentionPart {
  float *top, *total;      // [count]
  float *out, *dense_out;  // [count, value width]
};

constexpr int64_t kTile = 64;  // query rows of a unit at most

struct Kernels {
  const char* name;
  // Scratch bytes for `rotate`, `append` and `quantize`; for `attention`.
  int64_t (*row_scratch)(int64_t width);
  int64_t (*attention_scratch)(const AttentionArgs&);
  void (*rotate)(const RotateArgs&, int64_t batch, int64_t head, int64_t first, int64_t count, char* scratch);
  void (*quantize)(const QuantizeArgs&, int64_t first, int64_t count, char* scratch);
  void (*circles)(const CirclesArgs&, int64_t first, int64_t count);
  void (*weight_rows)(const WeightArgs&, int64_t first, int64_t count);
  int (*weight_terms)(const WeightArgs&);
  void (*rotate_inputs)(float* x, int64_t width, int64_t padded, const float* factors, int64_t rotated);
  void (*round_inputs)(const float* x, int64_t width, int64_t group, int terms, int8_t* small, float* steps,
                       float* sums);
  void (*repack)(const RepackArgs&, int64_t first, int64_t count);
  Met (*append)(const AppendArgs&, const AppendUnit&, char* scratch);
  void (*attention)(const AttentionArgs&, const AttentionUnit&, const AttentionPart&, char* scratch);
  // Roofs, for benchmarks: read a multiple of 512 bytes once; multiply all of them in each round, several times over,
  // and count the multiply-adds. What they return depends on every byte, so that none can be left out.
  int64_t (*roof_stream)(const uint8_t* data, int64_t bytes);
  int64_t (*roof_dot)(const uint8_t* data, int64_t bytes, int64_t rounds, int64_t* products);
};

// The kernels compiled for each instruction set; only those this build has are defined.
namespace base {
const Kernels& kernels();
}
namespace v2 {
const Kernels& kernels();
}
namespace v3 {
const Kernels& kernels();
}
namespace v3vnni {
const Kernels& kernels();
}
namespace v4 {
const Kernels& kernels();
}
namespace dotprod {
const Kernels& kernels();
}

// The kernels in use: the best for this processor until `use` names others.
const Kernels& kernels();

// Names of the instruction sets that both this build and this processor have, best first, null-terminated.
const char* const* available();

// Switches to one of them; false where it is not available.
bool use(const char* name);

}  // namespace rq
