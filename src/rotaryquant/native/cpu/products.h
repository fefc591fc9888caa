// Small matrix products between unpacked rows and a tile of query rows, blocked for registers.
#pragma once

#include "simd.h"

namespace rq {
namespace RQ_ISA {

// Query rows up to which vectors along the width win over vectors along the query rows (measured).
constexpr int64_t kNarrowRows = RQ_LANES == 16 ? 12 : RQ_LANES;

// ---- narrow: vectors along the width --------------------------------------------------------------------------

// Products of NQ query rows with VL / NQ keys; scores[q * stride + key].
template <int NQ>
RQ_INLINE void dot_block(const float* keys, int64_t padded, const float* q, float* scores, int64_t stride) {
  constexpr int NK = VL / NQ;
  vf acc[VL] = {};
  for (int64_t i = 0; i < padded; i += VL) {
    vf query[NQ];
    RQ_UNROLL for (int a = 0; a < NQ; a++) query[a] = load(q + a * padded + i);
    RQ_UNROLL for (int b = 0; b < NK; b++) {
      const vf key = load(keys + b * padded + i);
      RQ_UNROLL for (int a = 0; a < NQ; a++) acc[sum_source(a * NK + b)] += key * query[a];
    }
  }
  const vf all = sums(acc);
  RQ_UNROLL for (int a = 0; a < NQ; a++) memcpy(scores + a * stride, (const float*)&all + a * NK, NK * sizeof(float));
}

template <int NQ>
RQ_INLINE void dot_rows(const float* keys, int64_t count, int64_t padded, const float* q, float* scores,
                        int64_t stride) {
  for (int64_t k = 0; k < count; k += VL / NQ) dot_block<NQ>(keys + k * padded, padded, q, scores + k, stride);
}

// scores[r][key] of `count` keys [count rounded up to VL][padded] and `rows` query rows [rows rounded up to 4].
RQ_INLINE void narrow_scores(const float* keys, int64_t count, int64_t padded, const float* q, int64_t rows,
                             float* scores, int64_t stride) {
  int64_t r = 0;
  for (; rows - r >= 3; r += 4) dot_rows<4>(keys, count, padded, q + r * padded, scores + r * stride, stride);
  if (rows - r == 2) dot_rows<2>(keys, count, padded, q + r * padded, scores + r * stride, stride);
  if (rows - r == 1) dot_rows<1>(keys, count, padded, q + r * padded, scores + r * stride, stride);
}

// out[r][NV vectors] += sum over keys of p[r][key] * values[key][NV vectors].
template <int NR, int NV>
RQ_INLINE void axpy_block(const float* values, int64_t count, int64_t padded, const float* p, int64_t stride,
                          float* out) {
  vf acc[NR][NV];
  RQ_UNROLL for (int r = 0; r < NR; r++) {
    RQ_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = load(out + r * padded + v * VL);
  }
  for (int64_t k = 0; k < count; k++) {
    vf value[NV];
    RQ_UNROLL for (int v = 0; v < NV; v++) value[v] = load(values + k * padded + v * VL);
    RQ_UNROLL for (int r = 0; r < NR; r++) {
      const vf weight = splat(p[r * stride + k]);
      RQ_UNROLL for (int v = 0; v < NV; v++) acc[r][v] += weight * value[v];
    }
  }
  RQ_UNROLL for (int r = 0; r < NR; r++) {
    RQ_UNROLL for (int v = 0; v < NV; v++) store(out + r * padded + v * VL, acc[r][v]);
  }
}

template <int NR, int NV>
RQ_INLINE void axpy_rows(const float* values, int64_t count, int64_t padded, const float* p, int64_t stride,
                         float* out) {
  int64_t i = 0;
  for (; i + NV * VL <= padded; i += NV * VL) {
    axpy_block<NR, NV>(values + i, count, padded, p, stride, out + i);
  }
  for (; i < padded; i += VL) axpy_block<NR, 1>(values + i, count, padded, p, stride, out + i);
}

RQ_INLINE void narrow_values(const float* values, int64_t count, int64_t padded, const float* p, int64_t stride,
                             int64_t rows, float* out) {
  int64_t r = 0;
  for (; rows - r >= 4; r += 4) {
    axpy_rows<4, MR / 2>(values, count, padded, p + r * stride, stride, out + r * padded);
  }
  for (; rows - r >= 2; r += 2) {
    axpy_rows<2, MR / 2>(values, count, padded, p + r * stride, stride, out + r * padded);
  }
  if (rows - r) axpy_rows<1, MR>(values, count, padded, p + r * stride, stride, out + r * padded);
}

// ---- wide: vectors along the query rows -----------------------------------------------------------------------

// c[i][NV vectors] = (ADD ? c : 0) + sum over k of a(i, k) * b[k][NV vectors], i < MR. a(i, k) lies at
// a[i * lead + k] (BY_ROW) or a[k * lead + i].
template <int NV, bool BY_ROW, bool ADD>
RQ_INLINE void wide_block(const float* a, int64_t lead, int64_t count, const float* b, int64_t lanes, float* c) {
  vf acc[MR][NV] = {};
  if constexpr (ADD) {
    RQ_UNROLL for (int i = 0; i < MR; i++) {
      RQ_UNROLL for (int v = 0; v < NV; v++) acc[i][v] = load(c + i * lanes + v * VL);
    }
  }
  for (int64_t k = 0; k < count; k++) {
    vf row[NV];
    RQ_UNROLL for (int v = 0; v < NV; v++) row[v] = load(b + k * lanes + v * VL);
    RQ_UNROLL for (int i = 0; i < MR; i++) {
      const vf factor = splat(BY_ROW ? a[i * lead + k] : a[k * lead + i]);
      RQ_UNROLL for (int v = 0; v < NV; v++) acc[i][v] += factor * row[v];
    }
  }
  RQ_UNROLL for (int i = 0; i < MR; i++) {
    RQ_UNROLL for (int v = 0; v < NV; v++) store(c + i * lanes + v * VL, acc[i][v]);
  }
}

// scores[key][lanes] of `count` keys [count rounded up to MR][padded] with q [width][lanes].
RQ_INLINE void wide_scores(const float* keys, int64_t count, int64_t width, int64_t padded, const float* q,
                           int64_t lanes, float* scores) {
  int64_t r = 0;
  for (; r + 2 * VL <= lanes; r += 2 * VL) {
    for (int64_t k = 0; k < count; k += MR) {
      wide_block<2, true, false>(keys + k * padded, padded, width, q + r, lanes, scores + k * lanes + r);
    }
  }
  for (; r < lanes; r += VL) {
    for (int64_t k = 0; k < count; k += MR) {
      wide_block<1, true, false>(keys + k * padded, padded, width, q + r, lanes, scores + k * lanes + r);
    }
  }
}

// out[width][lanes] += transpose(values [count][padded]) * p [count][lanes]; the width is a multiple of 8.
RQ_INLINE void wide_values(const float* values, int64_t count, int64_t width, int64_t padded, const float* p,
                           int64_t lanes, float* out) {
  int64_t r = 0;
  for (; r + 2 * VL <= lanes; r += 2 * VL) {
    for (int64_t i = 0; i < width; i += MR) {
      wide_block<2, false, true>(values + i, padded, count, p + r, lanes, out + i * lanes + r);
    }
  }
  for (; r < lanes; r += VL) {
    for (int64_t i = 0; i < width; i += MR) {
      wide_block<1, false, true>(values + i, padded, count, p + r, lanes, out + i * lanes + r);
    }
  }
}

}  // namespace RQ_ISA
}  // namespace rq
