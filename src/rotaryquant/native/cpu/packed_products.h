// Products of packed rows with a tile of query rows, in integers: levels, queries and probabilities are bytes, sums are
// exact. Loops take at most kPass query rows at a time.
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

#define RQ_FOR_FOUR(n, CALL) \
  switch (n) {               \
    case 1: CALL(1); break;  \
    case 2: CALL(2); break;  \
    case 3: CALL(3); break;  \
    default: CALL(4);        \
  }

// Rows of queries or probabilities are interleaved four by four, so that one address serves all of a product: four
// bytes of row r from 4 * quad on lie at [r / 4 * stride + 16 * quad + 4 * (r % 4)].
RQ_INLINE int32_t four_bytes(const uint8_t* rows, int64_t stride, int64_t r, int64_t quad) {
  int32_t four;
  memcpy(&four, rows + r / 4 * stride + 16 * quad + 4 * (r % 4), 4);
  return four;
}

// Codes that later products will read, fetched a little in each step so that memory has the time to answer.
struct Ahead {
  const uint8_t* from;
  int64_t per_step;  // bytes
};

RQ_INLINE void fetch(Ahead ahead, int64_t step) { __builtin_prefetch(ahead.from + step * ahead.per_step); }

// So many strips before they are read.
constexpr int64_t kAheadStrips = 8;

// Loops of `key_products` over a strip, each of which fetches for every quad of columns.
constexpr int64_t kKeyHalves = VL == 16 ? 2 : 1, kKeyLoops = kStrip / (kKeyHalves * VL);

// dots[r][row] = levels of a strip's 32 rows times q[r], over columns [4 * begin, 4 * end), a multiple of 16.
// bias: what each sum starts from, -kLevelBias times the sum of those columns of each q.
template <int NR>
RQ_INLINE void key_products(const uint8_t* levels, int64_t begin, int64_t end, const uint8_t* q, int64_t stride,
                            const int32_t* bias, Ahead ahead, int32_t* dots) {
  constexpr int NH = kKeyHalves;                     // vectors of rows at a time
  constexpr int NU = NR <= 2 ? 4 : NR <= 4 ? 2 : 1;  // independent sums, to hide the latency of a product
  for (int64_t loop = 0; loop < kKeyLoops; loop++) {
    const int64_t row = loop * NH * VL;
    const uint8_t* from = levels + kVector * (row / 16) + 4 * (row % 16);
    vi acc[NU][NR][NH] = {};
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int h = 0; h < NH; h++) acc[0][r][h] = kLevelBias ? splat_i32(bias[r]) : (vi){};
    }
    for (int64_t c = begin; c < end; c += NU) {
      RQ_UNROLL for (int u = 0; u < NU; u++) {
        fetch(ahead, loop * (end - begin) + c + u);
        vb level[NH];
        RQ_UNROLL for (int h = 0; h < NH; h++) level[h] = load_bytes(from + kVector * (2 * (c + u) + h));
        RQ_UNROLL for (int r = 0; r < NR; r++) {
          const int32_t four = four_bytes(q, stride, r, c + u);
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
// levels: [NC][strips][8 vectors].
template <int NR, int NC>
RQ_INLINE void value_products(const uint8_t* levels, int64_t strips, const uint8_t* p, int64_t stride, int32_t* sums) {
  constexpr int NU = NR * NC <= 4 ? 2 : 1;  // independent sums, to hide the latency of a product
  for (int64_t column = 0; column < kChunkColumns; column += VL) {
    vi acc[NU][NR][NC] = {};
    for (int64_t v = 0; v < strips * kChunkVectors; v += NU) {
      RQ_UNROLL for (int u = 0; u < NU; u++) {
        vb level[NC];
        RQ_UNROLL for (int c = 0; c < NC; c++) {
          level[c] = load_bytes(levels + kVector * (c * strips * kChunkVectors + v + u) + 4 * column);
        }
        RQ_UNROLL for (int r = 0; r < NR; r++) {
          const int32_t four = four_bytes(p, stride, r, v + u);
          RQ_UNROLL for (int c = 0; c < NC; c++) acc[u][r][c] = dot4_weights(acc[u][r][c], level[c], four);
        }
      }
    }
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      RQ_UNROLL for (int c = 0; c < NC; c++) {
        vi sum = acc[0][r][c];
        RQ_UNROLL for (int u = 1; u < NU; u++) sum += acc[u][r][c];
        memcpy(sums + (r * NC + c) * kChunkColumns + column, &sum, sizeof sum);
      }
    }
  }
}

#if RQ_LANES == 16
// ---- the same from sealed codes -------------------------------------------------------------------------------
//
// Looking levels up keeps one of two vector ports busy, products either of them: one loop of both takes less time than
// two loops. Worth it where no later pass needs the levels again; only this instruction set has registers enough.

// dots[r][row] as above, over all columns of one sealed strip of `chunks` chunks.
template <int KIND, int NR>
RQ_INLINE void key_code_products(const LevelTable& table, const uint8_t* codes, int64_t chunks, const uint8_t* q,
                                 int64_t stride, const int32_t* bias, Ahead ahead, int32_t* dots) {
  constexpr int BITS = kBits<KIND>, NU = NR <= 2 ? 4 : NR <= 4 ? 2 : 1;
  vi acc[NU][NR][2] = {};
  RQ_UNROLL for (int r = 0; r < NR; r++) acc[0][r][0] = acc[0][r][1] = splat_i32(bias[r]);
  for (int64_t chunk = 0; chunk < chunks; chunk++, codes += chunk_bytes(BITS)) {
    const Planes<BITS> planes = load_planes<BITS>(codes);
    RQ_UNROLL for (int quad = 0; quad < 4; quad++) {
      const vb upper = (vb)level_vector<KIND, true>(table, planes, 2 * quad);
      const vb lower = (vb)level_vector<KIND, true>(table, planes, 2 * quad + 1);
      fetch(ahead, 4 * chunk + quad);
      RQ_UNROLL for (int r = 0; r < NR; r++) {
        const int32_t four = four_bytes(q, stride, r, 4 * chunk + quad);
        acc[quad % NU][r][0] = dot4(acc[quad % NU][r][0], upper, four);
        acc[quad % NU][r][1] = dot4(acc[quad % NU][r][1], lower, four);
      }
    }
  }
  RQ_UNROLL for (int r = 0; r < NR; r++) {
    RQ_UNROLL for (int h = 0; h < 2; h++) {
      vi sum = acc[0][r][h];
      RQ_UNROLL for (int u = 1; u < NU; u++) sum += acc[u][r][h];
      memcpy(dots + r * kStrip + h * VL, &sum, sizeof sum);
    }
  }
}

// sums[r][chunk][column] as above, from NC chunks at `offset` bytes of each of `strips` sealed strips. next: what will
// be read after these, the chunks of kAheadStrips strips.
template <int KIND, int NR, int NC>
RQ_INLINE void value_code_products(const LevelTable& table, const uint8_t* const* codes, int64_t offset, int64_t strips,
                                   const uint8_t* p, int64_t stride, const uint8_t* const* next, int64_t next_offset,
                                   int32_t* sums) {
  constexpr int BITS = kBits<KIND>, NU = NR * NC <= 2 ? 4 : NR * NC <= 6 ? 2 : 1;
  vi acc[NU][NR][NC] = {};
  for (int64_t strip = 0; strip < strips; strip++) {
    const uint8_t* chunks = codes[strip] + offset;
    const int64_t later = strip + kAheadStrips;
    const Ahead ahead = {later < strips ? codes[later] + offset : next[later - strips] + next_offset, NC * BITS * 8};
    Planes<BITS> planes[NC];
    RQ_UNROLL for (int c = 0; c < NC; c++) planes[c] = load_planes<BITS>(chunks + c * chunk_bytes(BITS));
    RQ_UNROLL for (int v = 0; v < kChunkVectors; v++) {
      vb level[NC];
      RQ_UNROLL for (int c = 0; c < NC; c++) level[c] = (vb)level_vector<KIND, false>(table, planes[c], v);
      fetch(ahead, v);
      if (NC * BITS * 8 > 64) fetch({ahead.from + 32 * NC * BITS / 8, ahead.per_step}, v);
      RQ_UNROLL for (int r = 0; r < NR; r++) {
        const int32_t four = four_bytes(p, stride, r, strip * kChunkVectors + v);
        RQ_UNROLL for (int c = 0; c < NC; c++) acc[v % NU][r][c] = dot4_weights(acc[v % NU][r][c], level[c], four);
      }
    }
  }
  RQ_UNROLL for (int r = 0; r < NR; r++) {
    RQ_UNROLL for (int c = 0; c < NC; c++) {
      vi sum = acc[0][r][c];
      RQ_UNROLL for (int u = 1; u < NU; u++) sum += acc[u][r][c];
      memcpy(sums + (r * NC + c) * kChunkColumns, &sum, sizeof sum);
    }
  }
}
#endif

}  // namespace RQ_ISA
}  // namespace rq
