// Sealed strips: 32 rows of a block as vectors of 64 codes, in the order in which attention multiplies them
// (formats/kv.py, sealed_bit_order).
//
// Four neighbouring lanes of a vector hold what one 32-bit product adds up: four columns of a key, four rows of
// values. 16 columns of a strip are a chunk of eight vectors, 64 * BITS bytes:
//   keys:   lane 4i + j of vector 2q + h holds column 4q + j of row 16h + i
//   values: lane 4i + j of vector v holds column i of row 4v + j
// At 2, 4 and 8 bits 64-byte plane p has the next 8 / BITS vectors as fields from the lowest bit up. At 3 bits plane
// p < 3 has vectors 2p and 2p + 1 in the low six bits of its bytes; the six bits above those of the three planes are
// vectors 6 and 7. A field within the low six bits indexes a 64-entry table as it is.
#pragma once

#include "bytes.h"
#include "kernels.h"
#include "trellis.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kChunkColumns = 16, kChunkVectors = 8, kVector = 64;

RQ_INLINE int64_t chunk_bytes(int bits) { return kVector * bits; }

// ---- between rows of bytes and vectors ------------------------------------------------------------------------

typedef uint8_t v16 __attribute__((vector_size(16)));

RQ_INLINE v16 load_16(const uint8_t* p) {
  v16 v;
  memcpy(&v, p, 16);
  return v;
}
RQ_INLINE void store_16(uint8_t* p, v16 v) { memcpy(p, &v, 16); }

#if defined(__clang__)
#define RQ_SHUFFLE_16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RQ_SHUFFLE_16(a, b, ...) __builtin_shuffle(a, b, (v16){__VA_ARGS__})
#endif

// Bytes of a and b in turn: of their first halves, of their second.
RQ_INLINE v16 zip_low(v16 a, v16 b) {
  return RQ_SHUFFLE_16(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
RQ_INLINE v16 zip_high(v16 a, v16 b) {
  return RQ_SHUFFLE_16(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// The eight vectors of the 16 columns from `rows` on; row r at rows + r * stride.
RQ_INLINE void gather_chunk(const uint8_t* rows, int64_t stride, bool keys, uint8_t* vectors) {
  if (keys) {
    for (int64_t r = 0; r < kStrip; r++) {
      for (int64_t q = 0; q < 4; q++) {
        memcpy(vectors + kVector * (2 * q + r / 16) + 4 * (r % 16), rows + r * stride + 4 * q, 4);
      }
    }
    return;
  }
  for (int64_t v = 0; v < kChunkVectors; v++) {  // zipping rows 0 with 2 and 1 with 3, then both, puts them in turn
    const uint8_t* row = rows + 4 * v * stride;
    const v16 a = load_16(row), b = load_16(row + stride), c = load_16(row + 2 * stride), d = load_16(row + 3 * stride);
    const v16 even = zip_low(a, c), odd = zip_low(b, d), even2 = zip_high(a, c), odd2 = zip_high(b, d);
    store_16(vectors + kVector * v, zip_low(even, odd));
    store_16(vectors + kVector * v + 16, zip_high(even, odd));
    store_16(vectors + kVector * v + 32, zip_low(even2, odd2));
    store_16(vectors + kVector * v + 48, zip_high(even2, odd2));
  }
}

RQ_INLINE void scatter_chunk(const uint8_t* vectors, bool keys, uint8_t* rows, int64_t stride) {
  for (int64_t v = 0; v < kChunkVectors; v++) {
    for (int64_t l = 0; l < kVector; l++) {
      const int64_t i = l / 4, j = l % 4;
      const int64_t row = keys ? 16 * (v % 2) + i : 4 * v + j, column = keys ? 4 * (v / 2) + j : i;
      rows[row * stride + column] = vectors[kVector * v + l];
    }
  }
}

// ---- between vectors of codes and their bytes -----------------------------------------------------------------

// Whether 32 rows of this width are reordered when they are sealed.
RQ_INLINE bool has_strips(int64_t width) { return width % kChunkColumns == 0; }

// Vectors v of a chunk as fields of bytes, those of one plane or of what is left of three.
RQ_INLINE vb field(const uint8_t* vectors, int v, int shift) {
  return load_bytes(vectors + kVector * v) << (uint8_t)shift;
}

template <int BITS>
RQ_INLINE void pack_chunk(const uint8_t* vectors, uint8_t* out) {
  for (int64_t at = 0; at < kVector; at += RQ_BYTES) {
    const uint8_t* from = vectors + at;
    if constexpr (BITS == 3) {
      const vb rest = field(from, 6, 0) | field(from, 7, 3);
      RQ_UNROLL for (int p = 0; p < 3; p++) {
        const vb own = field(from, 2 * p, 0) | field(from, 2 * p + 1, 3);
        store_bytes(out + kVector * p + at, own | (rest >> (uint8_t)(2 * p)) << (uint8_t)6);
      }
    } else {
      constexpr int per_plane = 8 / BITS;
      RQ_UNROLL for (int p = 0; p < BITS; p++) {
        vb plane = {};
        RQ_UNROLL for (int f = 0; f < per_plane; f++) plane |= field(from, per_plane * p + f, BITS * f);
        store_bytes(out + kVector * p + at, plane);
      }
    }
  }
}

template <int BITS>
RQ_INLINE void unpack_chunk(const uint8_t* in, uint8_t* vectors) {
  constexpr uint8_t mask = (uint8_t)((1 << BITS) - 1);
  for (int64_t at = 0; at < kVector; at += RQ_BYTES) {
    vb rest = {};
    RQ_UNROLL for (int p = 0; p < BITS; p++) {
      constexpr int per_plane = BITS == 3 ? 2 : 8 / BITS;
      const vb plane = load_bytes(in + kVector * p + at);
      RQ_UNROLL for (int f = 0; f < per_plane; f++) {
        store_bytes(vectors + kVector * (per_plane * p + f) + at, (plane >> (uint8_t)(BITS * f)) & mask);
      }
      if constexpr (BITS == 3) rest |= (plane >> (uint8_t)6) << (uint8_t)(2 * p);
    }
    if constexpr (BITS == 3) {
      store_bytes(vectors + kVector * 6 + at, rest & mask);
      store_bytes(vectors + kVector * 7 + at, rest >> (uint8_t)3);
    }
  }
}

// Rows of codes, each `stride` bytes, to a sealed strip and back.
template <int BITS>
RQ_INLINE void pack_strip(const uint8_t* rows, int64_t stride, int64_t width, bool keys, uint8_t* out) {
  uint8_t vectors[kChunkVectors * kVector];
  for (int64_t column = 0; column < width; column += kChunkColumns, out += chunk_bytes(BITS)) {
    gather_chunk(rows + column, stride, keys, vectors);
    pack_chunk<BITS>(vectors, out);
  }
}

template <int BITS>
RQ_INLINE void unpack_strip(const uint8_t* in, int64_t width, bool keys, uint8_t* rows, int64_t stride) {
  uint8_t vectors[kChunkVectors * kVector];
  for (int64_t column = 0; column < width; column += kChunkColumns, in += chunk_bytes(BITS)) {
    unpack_chunk<BITS>(in, vectors);
    scatter_chunk(vectors, keys, rows + column, stride);
  }
}

// ---- vectors of levels ---------------------------------------------------------------------------------

// Eight vectors of codes become vectors of levels. keys: their layout.
template <int KIND>
RQ_INLINE void look_up_chunk(const LevelTable& table, bool keys, uint8_t* vectors) {
  if constexpr (kPaths<KIND>) trellis_indices<KIND>(keys, vectors);
  else (void)keys;
  for (int64_t at = 0; at < kChunkVectors * kVector; at += RQ_BYTES) {
    const vb codes = load_bytes(vectors + at);
    if constexpr (KIND == 8) store_bytes(vectors + at, codes + (uint8_t)(table.bias - 128));
    else if constexpr (kPaths<KIND>) store_bytes(vectors + at, look_up_64(table, codes));
    else store_bytes(vectors + at, look_up(table, codes));
  }
}

#if RQ_LANES == 16
// The planes of one chunk of sealed codes; at 3 bits the last one is made of what the others have left.
template <int BITS>
struct Planes {
  __m512i at[BITS == 3 ? 4 : BITS];
};

// Bits of `yes` where the mask repeated in every byte is set, of `no` elsewhere.
RQ_INLINE __m512i merge(int mask, __m512i yes, __m512i no) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), yes, no, 0xca);
}

template <int BITS>
RQ_INLINE Planes<BITS> load_planes(const uint8_t* in) {
  Planes<BITS> planes;
  RQ_UNROLL for (int p = 0; p < BITS; p++) planes.at[p] = _mm512_loadu_si512(in + kVector * p);
  if constexpr (BITS == 3) {
    const __m512i a = _mm512_srli_epi16(planes.at[0], 6), b = _mm512_srli_epi16(planes.at[1], 4);
    planes.at[3] = merge(0x0f, merge(0x03, a, b), _mm512_srli_epi16(planes.at[2], 2));
  }
  return planes;
}

RQ_INLINE __m512i look_up_merged(__m512i table, int mask, __m512i codes, __m512i classes) {
  return _mm512_permutexvar_epi8(merge(mask, codes, classes), table);
}

// Of keys: for each code of plane p the one of the column before it, in the same field of the same lane. That is the
// byte before it, and before a byte that begins four columns the last of the four columns before.
template <int BITS>
RQ_INLINE __m512i columns_before(const Planes<BITS>& planes, int p) {
  __m512i quads = planes.at[(p + (BITS == 2 ? 1 : 3)) % (BITS == 2 ? 2 : 4)];
  // at 2 bits a plane has two quads of columns: the second follows the first
  if (BITS == 2) quads = merge(0xf0, _mm512_slli_epi16(planes.at[p], 4), _mm512_srli_epi16(quads, 4));
  const __m512i last = _mm512_set1_epi32((int)0xff000000);
  return _mm512_rol_epi32(_mm512_ternarylogic_epi32(last, quads, planes.at[p], 0xca), 8);
}

// Levels of vector v of a chunk of keys or values, of at most 4 bits. A field that reaches into the top two bits of its
// byte is shifted to where another table of the same codes reads it. Of a trellis the codes before those of a plane are a
// vector themselves: their fields lie where those of the plane do, and one of them moves beside its successor.
template <int KIND, bool KEYS>
RQ_INLINE __m512i level_vector(const LevelTable& table, const Planes<kBits<KIND>>& planes, int v) {
  constexpr int BITS = kBits<KIND>, per_plane = 8 / BITS;
  const int field = v % per_plane, p = v / per_plane;
  const __m512i plane = planes.at[p];
  if constexpr (kPaths<KIND>) {
    const __m512i before = KEYS ? columns_before<BITS>(planes, p) : _mm512_alignr_epi32(plane, plane, 15);
    if constexpr (BITS == 2) {
      if (field == 0) return look_up_merged(table.at[0], 0x03, plane, _mm512_slli_epi16(before, 2));
      if (field == 1) return look_up_merged(table.at[1], 0x0c, plane, _mm512_slli_epi16(before, 2));
      if (field == 2) return look_up_merged(table.at[2], 0x30, plane, _mm512_srli_epi16(before, 2));
      return look_up_merged(table.at[2], 0x30, _mm512_srli_epi16(plane, 2), _mm512_srli_epi16(before, 4));
    }
    if constexpr (BITS == 3) {
      if (field == 0) return look_up_merged(table.at[0], 0x07, plane, _mm512_slli_epi16(before, 3));
      return look_up_merged(table.at[1], 0x38, plane, _mm512_srli_epi16(before, 3));
    }
    if (field == 0) return look_up_merged(table.at[0], 0x0f, plane, _mm512_slli_epi16(before, 4));
    return look_up_merged(table.at[1], 0x3c, _mm512_srli_epi16(plane, 2), _mm512_srli_epi16(before, 4));
  }
  if (BITS == 4 && field == 1) return _mm512_permutexvar_epi8(_mm512_srli_epi16(plane, 4), table.at[0]);
  if (BITS == 2 && field == 3) return _mm512_permutexvar_epi8(_mm512_srli_epi16(plane, 2), table.at[2]);
  return _mm512_permutexvar_epi8(plane, table.at[field]);
}

template <int KIND, bool KEYS>
RQ_INLINE void level_vectors(const LevelTable& table, const uint8_t* in, uint8_t* levels) {
  const Planes<kBits<KIND>> planes = load_planes<kBits<KIND>>(in);
  RQ_UNROLL for (int v = 0; v < kChunkVectors; v++) {
    _mm512_storeu_si512(levels + kVector * v, level_vector<KIND, KEYS>(table, planes, v));
  }
}
#endif

// Levels of one chunk, eight vectors of bytes.
template <int KIND>
RQ_INLINE void level_chunk(const LevelTable& table, bool keys, const uint8_t* in, uint8_t* levels) {
  if constexpr (KIND == 8) {
    memcpy(levels, in, kChunkVectors * kVector);
    look_up_chunk<8>(table, keys, levels);
    return;
  }
#if RQ_LANES == 16
  if (keys) level_vectors<KIND, true>(table, in, levels);
  else level_vectors<KIND, false>(table, in, levels);
#else
  unpack_chunk<kBits<KIND>>(in, levels);
  look_up_chunk<KIND>(table, keys, levels);
#endif
}

}  // namespace RQ_ISA
}  // namespace rq
