// Codes to bytes and back, and packed rows straight to fp32 levels (layouts: formats/kv.py, sealed_bit_order).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rq {
namespace RQ_ISA {

// ---- bytes, one code each -------------------------------------------------------------------------------------

RQ_INLINE uint64_t load_u64(const uint8_t* p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

// Every second lane of LANE bits moves down to follow the one below it.
RQ_INLINE uint64_t close_gaps(uint64_t x, int lane, int gap, uint64_t even) {
  return (x & even) | ((x & (even << lane)) >> gap);
}

// Canonical bytes of `width` codes, eight codes (BITS bytes) at a time. The codes are below 2^BITS.
template <int BITS>
RQ_INLINE void pack_canonical(const uint8_t* codes, int64_t width, uint8_t* out) {
  constexpr int gap = 8 - BITS;
  constexpr uint64_t one = (1u << BITS) - 1, two = (1u << 2 * BITS) - 1, four = (1ull << 4 * BITS) - 1;
  for (int64_t i = 0; i < width; i += 8, out += BITS) {
    uint64_t x = load_u64(codes + i);
    x = close_gaps(x, 8, gap, one * 0x0001000100010001ull);
    x = close_gaps(x, 16, 2 * gap, two * 0x0000000100000001ull);
    x = close_gaps(x, 32, 4 * gap, four);
    memcpy(out, &x, BITS);
  }
}

RQ_INLINE uint64_t open_gaps(uint64_t x, int lane, int gap, uint64_t even) {
  return (x & even) | ((x << gap) & (even << lane));
}

template <int BITS>
RQ_INLINE void unpack_canonical(const uint8_t* row, int64_t width, uint8_t* codes) {
  constexpr int gap = 8 - BITS;
  constexpr uint64_t one = (1u << BITS) - 1, two = (1u << 2 * BITS) - 1, four = (1ull << 4 * BITS) - 1;
  for (int64_t i = 0; i < width; i += 8, row += BITS) {
    uint64_t x = 0;
    memcpy(&x, row, BITS);
    x = open_gaps(x, 32, 4 * gap, four);
    x = open_gaps(x, 16, 2 * gap, two * 0x0000000100000001ull);
    x = open_gaps(x, 8, gap, one * 0x0001000100010001ull);
    memcpy(codes + i, &x, 8);
  }
}

// A plane of `count` codes in fields of SIZE bits: code i in byte i mod n at field i div n, n bytes in all.
template <int SIZE, int SHIFT>
RQ_INLINE void pack_plane(const uint8_t* __restrict codes, int64_t width, uint8_t* __restrict out) {
  const int64_t n = width * SIZE / 8;
  constexpr uint8_t mask = (1 << SIZE) - 1;
  for (int64_t i = 0; i < n; i++) {
    uint8_t byte = 0;
    RQ_UNROLL for (int f = 0; f < 8 / SIZE; f++) {
      byte = (uint8_t)(byte | ((codes[f * n + i] >> SHIFT) & mask) << (SIZE * f));
    }
    out[i] = byte;
  }
}

template <int SIZE, int SHIFT>
RQ_INLINE void unpack_plane(const uint8_t* __restrict plane, int64_t width, uint8_t* __restrict codes) {
  const int64_t n = width * SIZE / 8;
  constexpr uint8_t mask = (1 << SIZE) - 1;
  for (int f = 0; f < 8 / SIZE; f++) {
    for (int64_t i = 0; i < n; i++) {
      uint8_t field = (uint8_t)((plane[i] >> (SIZE * f)) & mask);
      codes[f * n + i] = SHIFT ? (uint8_t)(codes[f * n + i] | field << SHIFT) : field;
    }
  }
}

template <int BITS>
RQ_INLINE void pack_row(const uint8_t* codes, int64_t width, bool sealed, uint8_t* out) {
  if constexpr (BITS == 8) {
    memcpy(out, codes, (size_t)width);
  } else if (!sealed) {
    pack_canonical<BITS>(codes, width, out);
  } else if constexpr (BITS == 3) {
    pack_plane<2, 0>(codes, width, out);
    pack_plane<1, 2>(codes, width, out + width / 4);
  } else {
    pack_plane<BITS, 0>(codes, width, out);
  }
}

template <int BITS>
RQ_INLINE void unpack_row(const uint8_t* row, int64_t width, bool sealed, uint8_t* codes) {
  if constexpr (BITS == 8) {
    memcpy(codes, row, (size_t)width);
  } else if (!sealed) {
    unpack_canonical<BITS>(row, width, codes);
  } else if constexpr (BITS == 3) {
    unpack_plane<2, 0>(row, width, codes);
    unpack_plane<1, 2>(row + width / 4, width, codes);
  } else {
    unpack_plane<BITS, 0>(row, width, codes);
  }
}

// ---- rows to fp32 levels --------------------------------------------------------------------------------------

// Where lane l of chunk c finds its field in a plane held in one register: 32-bit word and shift.
struct PlaneMap {
  int32_t word[kMaxWidth + 16];
  int32_t shift[kMaxWidth + 16];
};

// How the rows of one stream turn into levels. Built once per unit of work.
struct Unpacker {
  enum Path { kStraight, kHalved, kPermuted, kBytes };
  int64_t width, padded;  // padded: lanes written per row, a multiple of VL
  Path path;              // of sealed rows
  float levels[16];
  PlaneMap low, high;
};

RQ_INLINE int plane_size(int bits) { return bits == 3 ? 2 : bits; }

RQ_INLINE void map_plane(PlaneMap& map, int64_t width, int size) {
  const int64_t n = width * size / 8;
  for (int64_t i = 0; i < round_up(width, VL); i++) {
    const int64_t byte = i < width ? i % n : 0, field = i < width ? i / n : 0;
    map.word[i] = (int32_t)(byte / 4);
    map.shift[i] = (int32_t)(8 * (byte % 4) + size * field);
  }
}

RQ_INLINE void prepare(Unpacker& u, int64_t width, int bits, const float* levels) {
  u.width = width;
  u.padded = round_up(width, VL);
  if (bits == 8) return;
  for (int i = 0; i < 16; i++) u.levels[i] = levels[i % (1 << bits)];
  const int64_t low_bytes = width * plane_size(bits) / 8, high_bytes = bits == 3 ? width / 8 : low_bytes;
  if (high_bytes % VL == 0) {
    u.path = Unpacker::kStraight;
  } else if (VL == 16 && bits == 3 && 2 * high_bytes == VL) {
    u.path = Unpacker::kHalved;
  } else if (VL >= 8 && low_bytes <= 4 * VL) {
    u.path = Unpacker::kPermuted;
    map_plane(u.low, width, plane_size(bits));
    if (bits == 3) map_plane(u.high, width, 1);
  } else {
    u.path = Unpacker::kBytes;
  }
}

// Planes whose sections are whole vectors: every lane of a vector has the same field.
template <int BITS>
RQ_INLINE void straight(const Unpacker& u, const Table<BITS>& table, const uint8_t* row, float* out) {
  if constexpr (BITS == 3) {
    const int64_t n = u.width / 8;
    for (int64_t k = 0; k < n; k += VL) {
      const vi even = load_u8(row + k), odd = load_u8(row + n + k), high = load_u8(row + 2 * n + k) << 2;
      RQ_UNROLL for (int f = 0; f < 8; f++) {
        const vi low = (f % 2 ? odd : even) >> (2 * (f / 2));
        store(out + f * n + k, lookup<3>(table, merge_bits(3, low, high >> f)));
      }
    }
  } else {
    const int64_t n = u.width * BITS / 8;
    for (int64_t k = 0; k < n; k += VL) {
      const vi bytes = load_u8(row + k);
      RQ_UNROLL for (int f = 0; f < 8 / BITS; f++) store(out + f * n + k, lookup<BITS>(table, bytes >> (BITS * f)));
    }
  }
}

// 3 bits where a section of the high plane is half a vector (width 64): the upper lanes are one section ahead.
RQ_INLINE void halved(const Table<3>& table, const uint8_t* row, float* out) {
#if RQ_LANES == 16
  const vi low = load_u8(row);
  const __m128i twice = _mm_set1_epi64x((long long)load_u64(row + VL));
  const vi high = shift_right((vi)_mm512_cvtepu8_epi32(twice), lane_index() >> 3) << 2;
  RQ_UNROLL for (int f = 0; f < 4; f++) {
    store(out + f * VL, lookup<3>(table, merge_bits(3, low >> (2 * f), high >> (2 * f))));
  }
#else
  (void)table, (void)row, (void)out;  // `prepare` never chooses this path
#endif
}

// `bytes` <= 4 * VL bytes as 32-bit words in one register, zeros behind them.
RQ_INLINE vi load_plane(const uint8_t* p, int64_t bytes) {
#if RQ_LANES == 16
  return (vi)_mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), p);
#else
  uint8_t copy[4 * VL] = {0};
  memcpy(copy, p, (size_t)bytes);
  vi v;
  memcpy(&v, copy, sizeof v);
  return v;
#endif
}

RQ_INLINE vi fields(vi plane, const PlaneMap& map, int64_t i) {
#if RQ_LANES == 16
  const vi words = (vi)_mm512_permutexvar_epi32((__m512i)load_i32(map.word + i), (__m512i)plane);
#elif RQ_LANES == 8
  const vi words = (vi)_mm256_permutevar8x32_epi32((__m256i)plane, (__m256i)load_i32(map.word + i));
#else
  vi words;
  for (int l = 0; l < VL; l++) words[l] = plane[map.word[i + l]];
#endif
  return shift_right(words, load_i32(map.shift + i));
}

// Planes short enough for one register, whatever their sections: each lane fetches its own word and shift.
template <int BITS>
RQ_INLINE void permuted(const Unpacker& u, const Table<BITS>& table, const uint8_t* row, float* out) {
  const int64_t low_bytes = u.width * plane_size(BITS) / 8;
  const vi low = load_plane(row, low_bytes);
  if constexpr (BITS == 3) {
    const vi high = load_plane(row + low_bytes, u.width / 8);
    for (int64_t i = 0; i < u.padded; i += VL) {
      store(out + i, lookup<3>(table, merge_bits(3, fields(low, u.low, i), fields(high, u.high, i) << 2)));
    }
  } else {
    for (int64_t i = 0; i < u.padded; i += VL) store(out + i, lookup<BITS>(table, fields(low, u.low, i)));
  }
}

template <int BITS>
RQ_INLINE void through_bytes(const Unpacker& u, const Table<BITS>& table, const uint8_t* row, float* out) {
  uint8_t codes[kMaxWidth + 16];
  unpack_row<BITS>(row, u.width, true, codes);
  memset(codes + u.width, 0, 16);
  for (int64_t i = 0; i < u.padded; i += VL) store(out + i, lookup<BITS>(table, load_u8(codes + i)));
}

// Canonical rows: eight codes lie in one 32-bit word at byte BITS * (i / 8). Reads up to 8 bytes past the row.
template <int BITS>
RQ_INLINE void canonical(const Unpacker& u, const Table<BITS>& table, const uint8_t* row, float* out) {
  const vi shifts = (lane_index() & 7) * BITS;
  for (int64_t i = 0; i < u.padded; i += VL) {
    int32_t word[2] = {0, 0};
    memcpy(&word[0], row + BITS * (i / 8), 4);
#if RQ_LANES == 16
    memcpy(&word[1], row + BITS * (i / 8 + 1), 4);
    const vi words = (vi)_mm512_mask_set1_epi32(_mm512_set1_epi32(word[0]), 0xff00, word[1]);
#else
    const vi words = splat_i32(word[0]);
#endif
    store(out + i, lookup<BITS>(table, shift_right(words, shifts + (int32_t)(BITS * (i % 8)))));
  }
}

template <int BITS>
RQ_INLINE void sealed(const Unpacker& u, const Table<BITS>& table, const uint8_t* row, float* out) {
  if (u.path == Unpacker::kStraight) return straight<BITS>(u, table, row, out);
  if constexpr (BITS == 3) {
    if (u.path == Unpacker::kHalved) return halved(table, row, out);
  }
  if (u.path == Unpacker::kPermuted) return permuted<BITS>(u, table, row, out);
  through_bytes<BITS>(u, table, row, out);
}

// 8 bits: a level is its code - 128. Reads up to VL bytes past the row.
RQ_INLINE void int8_levels(const Unpacker& u, const uint8_t* row, float* out) {
  for (int64_t i = 0; i < u.padded; i += VL) store(out + i, to_f32(load_u8(row + i) - 128));
}

// Vector loads may pass the end of a row by up to 16 bytes. Where no more rows follow it in its block, the row is
// read from a copy.
RQ_INLINE const uint8_t* readable(const uint8_t* row, int64_t index, int64_t bytes, uint8_t* copy) {
  if (index < kBlock - 16) return row;
  memcpy(copy, row, (size_t)bytes);
  memset(copy + bytes, 0, 16);
  return copy;
}

// Levels of rows first .. first + count of a block, out[row][0 .. padded): those past the width are finite.
template <int BITS>
RQ_INLINE void unpack_levels(const Unpacker& u, const uint8_t* codes, int64_t stride, int64_t first, int64_t count,
                             bool is_sealed, float* out) {
  uint8_t copy[kMaxWidth + 16];
  if constexpr (BITS == 8) {
    for (int64_t r = first; r < first + count; r++, out += u.padded) {
      int8_levels(u, u.padded == u.width ? codes + r * stride : readable(codes + r * stride, r, u.width, copy), out);
    }
  } else {
    const Table<BITS> table = make_table<BITS>(u.levels);
    for (int64_t r = first; r < first + count; r++, out += u.padded) {
      const uint8_t* row = codes + r * stride;
      if (is_sealed) sealed<BITS>(u, table, row, out);
      else canonical<BITS>(u, table, readable(row, r, u.width * BITS / 8, copy), out);
    }
  }
}

}  // namespace RQ_ISA
}  // namespace rq
