// Codes of canonical rows to bytes and back.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rq {
namespace RQ_ISA {

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
  if constexpr (BITS == 8) {
    memcpy(out, codes, (size_t)width);
  } else {
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
}

RQ_INLINE uint64_t open_gaps(uint64_t x, int lane, int gap, uint64_t even) {
  return (x & even) | ((x << gap) & (even << lane));
}

template <int BITS>
RQ_INLINE void unpack_canonical(const uint8_t* row, int64_t width, uint8_t* codes) {
  if constexpr (BITS == 8) {
    memcpy(codes, row, (size_t)width);
  } else {
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
}

}  // namespace RQ_ISA
}  // namespace rq
