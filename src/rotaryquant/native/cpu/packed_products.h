// Products of packed rows with a tile of query rows, in integers: levels and queries (or probabilities) are signed
// bytes, sums are exact. Loops take at most kPass query rows at a time.
#pragma once

#include "strip.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kPass = 8;

// Calls CALL(n) with the number of rows as a constant.
#define RQ_FOR_ROWS(n, CALL) \
  switch (n) {               \
    case 1: CALL(1); break;  \
    case 2: CALL(2); break;  \
    case 3: CALL(3); break;  \
    case 4: CALL(4); break;  \
    case 5: CALL(5); break;  \
    case 6: CALL(6); break;  \
    case 7: CALL(7); break;  \
    default: CALL(8);        \
  }

RQ_INLINE int32_t four_bytes(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return four;
}

// dots[r][row] = levels of a strip's 32 rows times q[r], over columns [4 * begin, 4 * end), a multiple of 16.
// bias: kLevelBias times the sum of those columns of each q.
template <int NR>
RQ_INLINE void key_products(const uint8_t* levels, int64_t begin, int64_t end, const int8_t* q, int64_t stride,
                            const int32_t* bias, int32_t* dots) {
  constexpr int NH = VL == 16 ? 2 : 1;                    // vectors of rows at a time
  constexpr int NU = NR == 1 ? 4 : NR <= 3 ? 2 : 1;       // independent sums, to hide the latency of a product
  for (int64_t row = 0; row < kStrip; row += NH * VL) {
    const uint8_t* from = levels + kVector * (row / 16) + 4 * (row % 16);
    vi acc[NU][NR][NH] = {};
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int h = 0; h < NH; h++) acc[0][r][h] = kLevelBias ? splat_i32(-bias[r]) : (vi){};
    }
    for (int64_t c = begin; c < end; c += NU) {
      RQ_UNROLL for (int u = 0; u < NU; u++) {
        vb level[NH];
        RQ_UNROLL for (int h = 0; h < NH; h++) level[h] = load_bytes(from + kVector * (2 * (c + u) + h));
        RQ_UNROLL for (int r = 0; r < NR; r++) {
          const int32_t four = four_bytes(q + r * stride + 4 * (c + u));
          RQ_UNROLL for (int h = 0; h < NH; h++) acc[u][r][h] = dot4(acc[u][r][h], level[h], four);
        }
      }
    }
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int h = 0; h < NH; h++) {
        vi sum = acc[0][r][h];
        RQ_UNROLL for (int u = 1; u < NU; u++) sum += acc[u][r][h];
        memcpy(dots + r * kStrip + row + h * VL, &sum, sizeof sum);
      }
    }
  }
}

// sums[r][chunk][column] = p[r] times levels of NC chunks (16 columns each) of `strips` strips.
// levels: [NC][strips][8 vectors]; p: a row each `stride` bytes, 32 * strips of them; bias: kLevelBias times its sum.
template <int NR, int NC>
RQ_INLINE void value_products(const uint8_t* levels, int64_t strips, const int8_t* p, int64_t stride,
                              const int32_t* bias, int32_t* sums) {
  for (int64_t column = 0; column < kChunkColumns; column += VL) {
    vi acc[NR][NC];
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int c = 0; c < NC; c++) acc[r][c] = kLevelBias ? splat_i32(-bias[r]) : (vi){};
    }
    for (int64_t v = 0; v < strips * kChunkVectors; v++) {
      vb level[NC];
      RQ_UNROLL for (int c = 0; c < NC; c++) {
        level[c] = load_bytes(levels + kVector * (c * strips * kChunkVectors + v) + 4 * column);
      }
      RQ_UNROLL for (int r = 0; r < NR; r++) {
        const int32_t four = four_bytes(p + r * stride + 4 * v);
        RQ_UNROLL for (int c = 0; c < NC; c++) acc[r][c] = dot4(acc[r][c], level[c], four);
      }
    }
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int c = 0; c < NC; c++) {
        memcpy(sums + (r * NC + c) * kChunkColumns + column, &acc[r][c], sizeof acc[r][c]);
      }
    }
  }
}

}  // namespace RQ_ISA
}  // namespace rq
