// Kernels on single rows: rotate, quantize, pack and the fused write.
#include "codes.h"
#include "kernels.h"
#include "quantize.h"
#include "rotate.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

struct RowScratch {
  HeadRotation rotation;
  float rows[kTileRows * kMaxPadded], spare[kTileRows * kMaxPadded];
  uint8_t codes[kMaxPadded];
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

template <int BITS>
Met append_rows(const AppendArgs& args, const AppendUnit& unit, RowScratch& s, const float* mean) {
  const Stream& stream = args.stream;
  const Codec& codec = stream.codec;
  const bool sealed = unit.offset + unit.count == kBlock;
  uint8_t* codes = stream.code_rows(unit.block, unit.head);
  uint16_t* scales = stream.scale_rows(unit.block, unit.head);
  const int64_t padded = round_up(codec.width, VL);
  if (sealed && BITS < 8) {
    for (int64_t r = 0; r < unit.offset; r++) {  // rows that earlier calls left open
      unpack_row<BITS>(codes + r * stream.code_row, codec.width, false, s.codes);
      pack_row<BITS>(s.codes, codec.width, true, codes + r * stream.code_row);
    }
  }
  Met met = Met::nothing;
  for (int64_t first = 0; first < unit.count; first += kTileRows) {
    const int64_t count = smaller(kTileRows, unit.count - first);
    for (int64_t i = 0; i < count; i++) {
      float* row = s.rows + i * padded;
      const char* source = row_address(args.x, unit.batch, unit.head, unit.source + first + i);
      load_row(source, args.x.dtype, codec.width, padded, row);
      if (!all_finite(row, padded)) return Met::bad_input;
      if (mean) subtract(row, mean, codec.width);
    }
    rotate_rows(s.rotation, s.rows, count, s.spare);
    for (int64_t i = 0; i < count; i++) {
      const int64_t r = unit.offset + first + i;
      uint16_t* row_scales = scales + r * stream.scale_row;
      if (!quantize_row<BITS>(codec, s.rows + i * padded, s.codes, row_scales, stream.scale_group)) {
        met = Met::bad_scale;  // an input that is not finite in a later row still takes precedence
      }
      pack_row<BITS>(s.codes, codec.width, sealed, codes + r * stream.code_row);
    }
  }
  return met;
}

template <int BITS>
void quantize_rows(const QuantizeArgs& args, int64_t first, int64_t count, RowScratch& s) {
  const Codec& codec = args.codec;
  const int64_t width = codec.width, padded = round_up(width, VL);
  for (int64_t r = first; r < first + count; r++) {
    load_row((const char*)(args.y + r * width), Dtype::f32, width, padded, s.rows);
    quantize_row<BITS>(codec, s.rows, s.codes, args.scales + r * codec.groups(), 1);
    memcpy(args.codes + r * width, s.codes, (size_t)width);
  }
}

template <int BITS>
void repack_rows(const RepackArgs& args, int64_t first, int64_t count) {
  const int64_t packed = args.width * BITS / 8;
  const bool from_codes = args.step == Step::pack;
  const bool to_codes = args.step == Step::unpack || args.step == Step::unpack_sealed;
  const int64_t in_bytes = from_codes ? args.width : packed, out_bytes = to_codes ? args.width : packed;
  const bool sealed_in = args.step == Step::unpack_sealed || args.step == Step::unseal;
  uint8_t codes[kMaxWidth];
  for (int64_t r = first; r < first + count; r++) {
    const uint8_t* in = args.in + r * in_bytes;
    uint8_t* out = args.out + r * out_bytes;
    if (from_codes) {
      for (int64_t i = 0; i < args.width; i++) codes[i] = (uint8_t)(in[i] & ((1 << BITS) - 1));
    } else {
      unpack_row<BITS>(in, args.width, sealed_in, codes);
    }
    if (to_codes) memcpy(out, codes, (size_t)args.width);
    else pack_row<BITS>(codes, args.width, args.step == Step::seal, out);
  }
}

}  // namespace

int64_t row_scratch(int64_t) { return (int64_t)sizeof(RowScratch); }

void rotate(const RotateArgs& args, int64_t batch, int64_t head, int64_t first, int64_t count, char* scratch) {
  RowScratch& s = *(RowScratch*)scratch;
  const int64_t width = args.rotation.width;
  prepare(s.rotation, args.rotation, head, args.inverse);
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
  switch (args.codec.bits) {
    case 2: return quantize_rows<2>(args, first, count, s);
    case 3: return quantize_rows<3>(args, first, count, s);
    case 4: return quantize_rows<4>(args, first, count, s);
    default: return quantize_rows<8>(args, first, count, s);
  }
}

void repack(const RepackArgs& args, int64_t first, int64_t count) {
  switch (args.bits) {
    case 2: return repack_rows<2>(args, first, count);
    case 3: return repack_rows<3>(args, first, count);
    case 4: return repack_rows<4>(args, first, count);
    default: return repack_rows<8>(args, first, count);
  }
}

Met append(const AppendArgs& args, const AppendUnit& unit, char* scratch) {
  RowScratch& s = *(RowScratch*)scratch;
  prepare(s.rotation, args.rotation, unit.head, false);
  const float* mean = args.mean.data ? (const float*)row_address(args.mean, unit.batch, unit.head, 0) : nullptr;
  switch (args.stream.codec.bits) {
    case 2: return append_rows<2>(args, unit, s, mean);
    case 3: return append_rows<3>(args, unit, s, mean);
    case 4: return append_rows<4>(args, unit, s, mean);
    default: return append_rows<8>(args, unit, s, mean);
  }
}

}  // namespace RQ_ISA
}  // namespace rq
