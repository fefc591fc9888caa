// Packed blocks that attention takes at a time, as strips of codes and rows of scales.
#pragma once

#include "codes.h"
#include "tile.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kSpanStrips = kSpanBlocks * kStrips;

// Keys are counted from the first of a span's blocks; rows outside [first, last) have scales of zero.
struct Span {
  int64_t first, last;  // keys that can still be seen
  int64_t begin, end;   // the same in whole strips
  int64_t filled;       // keys that hold codes
  bool sealed;          // whether all their strips are
  // Codes of each strip and of those that follow, to be fetched ahead; where none follow, of the last again.
  const uint8_t *key_strips[kSpanStrips + kAheadStrips], *value_strips[kSpanStrips + kAheadStrips];
  const uint16_t *key_scales[kSpanBlocks], *value_scales[kSpanBlocks];
  int32_t positions[kSpan];
  // Of each query row: the weight of the span's largest logit on the running maximum, and the largest probability
  // times a value's scale.
  float weight[kTile + VL], largest[kTile + VL];
};

RQ_INLINE void list_strips(const Stream& stream, int64_t block, int64_t head, const uint8_t** strips) {
  const uint8_t* codes = stream.code_rows(block, head);
  for (int64_t i = 0; i < kStrips; i++) strips[i] = codes + i * kStrip * stream.code_row;
}

// The blocks from `index` on that are taken together: up to the next multiple of kSpanBlocks, so that a query's blocks
// are divided in the same way whatever else a tile holds.
RQ_INLINE int64_t open_span(const AttentionArgs& args, const AttentionUnit& unit, int64_t packed_len, int64_t index,
                            Span& s) {
  const Stream &keys = args.keys, &values = args.values;
  const int32_t* table = args.block_table + unit.batch * args.max_blocks + index;
  const int64_t left = unit.block_end - index, blocks = smaller(left, kSpanBlocks - index % kSpanBlocks);
  for (int64_t i = 0; i < blocks + kAheadStrips / kStrips; i++) {
    const int64_t block = table[smaller(i, left - 1)];
    list_strips(keys, block, unit.kv_head, s.key_strips + i * kStrips);
    list_strips(values, block, unit.kv_head, s.value_strips + i * kStrips);
    if (i >= blocks) continue;
    s.key_scales[i] = keys.scale_rows(block, unit.kv_head);
    s.value_scales[i] = values.scale_rows(block, unit.kv_head);
  }
  s.filled = smaller(blocks * kBlock, packed_len - index * kBlock);
  s.sealed = has_strips(keys.codec.width) && has_strips(values.codec.width) && s.filled % kStrip == 0;
  return blocks;
}

// ---- levels ---------------------------------------------------------------------------------------------------

// Codes of an open strip as rows of bytes, zeros where there are none.
template <int BITS>
RQ_INLINE void open_codes(const Stream& stream, const uint8_t* strip, int64_t rows, int64_t columns, uint8_t* codes) {
  memset(codes, 0, (size_t)(kStrip * columns));
  for (int64_t r = 0; r < rows; r++) {
    unpack_canonical<BITS>(strip + r * stream.code_row, stream.codec.width, codes + r * columns);
  }
}

// Levels of `chunks` chunks of a strip with `rows` rows from `chunk` on, those of one chunk `step` bytes after those of
// the last.
template <int KIND>
RQ_INLINE void strip_levels(const LevelTable& table, const Stream& stream, const uint8_t* strip, int64_t rows,
                            int64_t columns, int64_t chunk, int64_t chunks, uint8_t* codes, uint8_t* levels,
                            int64_t step) {
  if (rows >= kStrip && has_strips(stream.codec.width)) {
    const int64_t bytes = chunk_bytes(kBits<KIND>);
    const uint8_t* in = strip + chunk * bytes;
    for (int64_t c = 0; c < chunks; c++) {
      level_chunk<KIND>(table, stream.codec.keys, in + c * bytes, levels + c * step);
    }
    return;
  }
  open_codes<kBits<KIND>>(stream, strip, smaller(rows, kStrip), columns, codes);
  for (int64_t c = 0; c < chunks; c++) {
    gather_chunk(codes + (chunk + c) * kChunkColumns, columns, stream.codec.keys, levels + c * step);
    look_up_chunk<KIND>(table, stream.codec.keys, levels + c * step);
  }
}

// Whether products are made from codes: where the levels would not be used again.
template <int KIND>
RQ_INLINE bool from_codes(const Tile& t, const Span& s) {
  return RQ_LANES == 16 && kBits<KIND> <= 4 && t.count <= kPass && s.sealed;
}

// ---- scales ---------------------------------------------------------------------------------------------------

// `count` scales of one block, a multiple of VL.
RQ_INLINE void load_scales(const Stream& stream, const uint16_t* from, int64_t count, float* out) {
  uint16_t gathered[kBlock];
  if (stream.scale_row != 1) {
    for (int64_t i = 0; i < count; i++) gathered[i] = from[i * stream.scale_row];
    from = gathered;
  }
  if (stream.codec.scale_dtype == Dtype::bf16) {
    for (int64_t i = 0; i < count; i += VL) store(out + i, load_bf16(from + i));
  } else {
    for (int64_t i = 0; i < count; i += VL) store(out + i, load_f16(from + i));
  }
}

// Scales of a span's rows for one group of columns, zeros outside [first, last).
RQ_INLINE void row_scales(const Stream& stream, const uint16_t* const* blocks, const Span& s, int64_t group,
                          float* out) {
  for (int64_t block = s.begin / kBlock; block * kBlock < s.end; block++) {
    const int64_t first = larger(block * kBlock, s.begin), last = smaller((block + 1) * kBlock, s.end);
    const uint16_t* from = blocks[block] + group * stream.scale_group + (first - block * kBlock) * stream.scale_row;
    load_scales(stream, from, last - first, out + first);
  }
  for (int64_t k = s.begin; k < s.first; k++) out[k] = 0;
  for (int64_t k = s.last; k < s.end; k++) out[k] = 0;
}

}  // namespace RQ_ISA
}  // namespace rq
