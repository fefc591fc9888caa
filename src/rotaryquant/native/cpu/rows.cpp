// Kernels on single rows: rotate, quantize, pack and the fused write.
#include "codes.h"
#include "kernels.h"
#include "quantize.h"
#include "rotate.h"
#include "strip.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

struct RowScratch {
  HeadRotation rotation;
  float rows[kTileRows * kMaxPadded], spare[kTileRows * kMaxPadded];
  float wanted[kMaxPadded];
  int64_t stride;  // of `codes`
  uint8_t codes[kStrip * kMaxPadded];
};

// False where x holds NaN or infinity.
RQ_INLINE bool all_finite(const float* x, int64_t padded) {
  vi bad = {};
  for (int64_t i = 0; i < padded; i += VL) bad |= ~(vi)(absolute(load(x + i)) <= kLargest);
  int32_t any = 0;
  for (int l = 0; l < VL; l++) any |= bad[l];
  return any == 0;
}

RQ_INLINE void subtract(float* x, const float* mean, int64_t width) {
  for (int64_t i = 0; i < width; i++) x[i] -= mean[i];
}

// Rows first .. first + count of a strip, from x to codes. False: met a row or a scale that is not finite.
template <int KIND>
Met code_rows(const AppendArgs& args, const AppendUnit& unit, RowScratch& s, const float* mean, int64_t first,
              int64_t count, uint8_t* codes) {
  const Codec& codec = args.stream.codec;
  const int64_t padded = round_up(codec.width, VL), stride = s.stride;
  uint16_t* scales = args.stream.scale_rows(unit.block, unit.head);
  const float* feedback = args.feedback ? args.feedback + unit.head * codec.width * codec.width : nullptr;
  Met met = Met::nothing;
  for (int64_t tile = 0; tile < count; tile += kTileRows) {
    const int64_t rows = smaller(kTileRows, count - tile);
    for (int64_t i = 0; i < rows; i++) {
      float* row = s.rows + i * padded;
      const int64_t from = unit.source + first - unit.offset + tile + i;
      load_row(row_address(args.x, unit.batch, unit.head, from), args.x.dtype, codec.width, padded, row);
      if (!all_finite(row, padded)) return Met::bad_input;
      if (mean) subtract(row, mean, codec.width);
    }
    rotate_rows(s.rotation, s.rows, rows, s.spare);
    for (int64_t i = 0; i < rows; i++) {
      uint16_t* row_scales = scales + (first + tile + i) * args.stream.scale_row;
      if (!quantize_row<KIND>(codec, s.rows + i * padded, codes + (tile + i) * stride, row_scales,
                              args.stream.scale_group, feedback, s.wanted)) {
        met = Met::bad_scale;  // an input that is not finite in a later row still takes precedence
      }
    }
  }
  return met;
}

template <int KIND>
Met append_rows(const AppendArgs& args, const AppendUnit& unit, RowScratch& s, const float* mean) {
  constexpr int BITS = kBits<KIND>;
  const Stream& stream = args.stream;
  const int64_t width = stream.codec.width, end = unit.offset + unit.count;
  uint8_t* block = stream.code_rows(unit.block, unit.head);
  s.stride = round_up(width, VL);
  Met met = Met::nothing;
  for (int64_t row = unit.offset; row < end;) {
    const int64_t strip = row / kStrip * kStrip, stop = smaller(end, strip + kStrip);
    const bool full = stop == strip + kStrip && has_strips(width);
    for (int64_t r = strip; full && r < row; r++) {  // rows that earlier calls left open
      unpack_canonical<BITS>(block + r * stream.code_row, width, s.codes + (r - strip) * s.stride);
    }
    const Met one = code_rows<KIND>(args, unit, s, mean, row, stop - row, s.codes + (row - strip) * s.stride);
    if (one == Met::bad_input) return one;
    if (one == Met::bad_scale) met = one;
    if (full) {
      pack_strip<BITS>(s.codes, s.stride, width, stream.codec.keys, block + strip * stream.code_row);
    } else {
      for (int64_t r = row; r < stop; r++) {
        pack_canonical<BITS>(s.codes + (r - strip) * s.stride, width, block + r * stream.code_row);
      }
    }
    row = stop;
  }
  return met;
}

template <int KIND>
void quantize_rows(const QuantizeArgs& args, int64_t first, int64_t count, RowScratch& s) {
  const Codec& codec = args.codec;
  const int64_t width = codec.width, padded = round_up(width, VL);
  for (int64_t r = first; r < first + count; r++) {
    load_row((const char*)(args.y + r * width), Dtype::f32, width, padded, s.rows);
    quantize_row<KIND>(codec, s.rows, s.codes, args.scales + r * codec.groups(), 1, nullptr, s.wanted);
    memcpy(args.codes + r * width, s.codes, (size_t)width);
  }
}

// Strip number `index` of all blocks: whole, or the rows that a block has left.
template <int BITS>
void repack_strip(const RepackArgs& args, int64_t index) {
  const int64_t strips = (args.rows + kStrip - 1) / kStrip, first = index % strips * kStrip, width = args.width;
  const int64_t count = smaller(kStrip, args.rows - first), packed = width * BITS / 8;
  const bool full = count == kStrip && has_strips(width);
  const bool from_codes = args.step == Step::pack;
  const bool to_codes = args.step == Step::unpack || args.step == Step::unpack_sealed;
  const int64_t row = index / strips * args.rows + first;
  const uint8_t* in = args.in + row * (from_codes ? width : packed);
  uint8_t* out = args.out + row * (to_codes ? width : packed);
  uint8_t codes[kStrip * kMaxWidth];
  if (from_codes) {
    for (int64_t i = 0; i < count * width; i++) codes[i] = (uint8_t)(in[i] & ((1 << BITS) - 1));
  } else if (full && args.step != Step::unpack && args.step != Step::seal) {
    unpack_strip<BITS>(in, width, args.keys, codes, width);
  } else {
    for (int64_t r = 0; r < count; r++) unpack_canonical<BITS>(in + r * packed, width, codes + r * width);
  }
  if (to_codes) {
    memcpy(out, codes, (size_t)(count * width));
  } else if (full && args.step == Step::seal) {
    pack_strip<BITS>(codes, width, width, args.keys, out);
  } else {
    for (int64_t r = 0; r < count; r++) pack_canonical<BITS>(codes + r * width, width, out + r * packed);
  }
}

template <int BITS>
void repack_strips(const RepackArgs& args, int64_t first, int64_t count) {
  for (int64_t i = first; i < first + count; i++) repack_strip<BITS>(args, i);
}

}  // namespace

int64_t row_scratch(int64_t) { return (int64_t)sizeof(RowScratch); }

void rotate(const RotateArgs& args, int64_t batch, int64_t head, int64_t first, int64_t count, char* scratch) {
  RowScratch& s = *(RowScratch*)scratch;
  const int64_t width = args.rotation.width;
  s.rotation = rotation_of(args.rotation, head, args.inverse);
  const int64_t padded = s.rotation.padded;
  for (int64_t tile = first; tile < first + count; tile += kTileRows) {
    const int64_t rows = smaller(kTileRows, first + count - tile);
    for (int64_t i = 0; i < rows; i++) {
      load_row(row_address(args.x, batch, head, tile + i), args.x.dtype, width, padded, s.rows + i * padded);
    }
    rotate_rows(s.rotation, s.rows, rows, s.spare);
    float* out = args.out + ((batch * args.rotation.heads + head) * args.rows + tile) * width;
    for (int64_t i = 0; i < rows; i++) memcpy(out + i * width, s.rows + i * padded, (size_t)width * sizeof(float));
  }
}

void quantize(const QuantizeArgs& args, int64_t first, int64_t count, char* scratch) {
  RowScratch& s = *(RowScratch*)scratch;
  switch (args.codec.kind()) {
    case 66: return quantize_rows<66>(args, first, count, s);
    case 67: return quantize_rows<67>(args, first, count, s);
    case 68: return quantize_rows<68>(args, first, count, s);
    case 2: return quantize_rows<2>(args, first, count, s);
    case 3: return quantize_rows<3>(args, first, count, s);
    case 4: return quantize_rows<4>(args, first, count, s);
    default: return quantize_rows<8>(args, first, count, s);
  }
}

void circles(const CirclesArgs& args, int64_t first, int64_t count) {
  for (int64_t i = kCycle * first; i < kCycle * (first + count); i += kCycle) {
    switch (args.bits) {
      case 2: trellis_codes<kTrellis + 2>(args.levels, args.x + i, args.codes + i); break;
      case 3: trellis_codes<kTrellis + 3>(args.levels, args.x + i, args.codes + i); break;
      default: trellis_codes<kTrellis + 4>(args.levels, args.x + i, args.codes + i);
    }
  }
}

void repack(const RepackArgs& args, int64_t first, int64_t count) {
  switch (args.bits) {
    case 2: return repack_strips<2>(args, first, count);
    case 3: return repack_strips<3>(args, first, count);
    case 4: return repack_strips<4>(args, first, count);
    default: return repack_strips<8>(args, first, count);
  }
}

Met append(const AppendArgs& args, const AppendUnit& unit, char* scratch) {
  RowScratch& s = *(RowScratch*)scratch;
  s.rotation = rotation_of(args.rotation, unit.head, false);
  const float* mean = args.mean.data ? (const float*)row_address(args.mean, unit.batch, unit.head, 0) : nullptr;
  switch (args.stream.codec.kind()) {
    case 66: return append_rows<66>(args, unit, s, mean);
    case 67: return append_rows<67>(args, unit, s, mean);
    case 68: return append_rows<68>(args, unit, s, mean);
    case 2: return append_rows<2>(args, unit, s, mean);
    case 3: return append_rows<3>(args, unit, s, mean);
    case 4: return append_rows<4>(args, unit, s, mean);
    default: return append_rows<8>(args, unit, s, mean);
  }
}

}  // namespace RQ_ISA
}  // namespace rq
