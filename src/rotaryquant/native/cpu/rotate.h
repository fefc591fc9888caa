// Rows through y = B·H·S·x or back, in buffers of fp32 padded to whole vectors.
#pragma once

#include "products.h"
#include "reading.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kTileRows = 8;  // rows rotated at a time

// The rotation of one head.
struct HeadRotation {
  int64_t width, padded, pitch, power, order;
  bool inverse;
  Passage passage;
  const float* matrix;  // dense kind, else null
};

RQ_INLINE HeadRotation rotation_of(const Rotation& rotation, int64_t head, bool inverse) {
  const int64_t pitch = rotation.pitch;
  Passage passage = inverse ? rotation.inverse : rotation.forward;
  if (passage.before) passage.before += head * pitch;
  if (passage.blocks) passage.blocks += head * 4 * pitch;
  if (passage.after) passage.after += head * pitch;
  const float* matrix = rotation.matrix ? rotation.matrix + head * rotation.width * rotation.width : nullptr;
  return {rotation.width, round_up(rotation.width, VL), pitch, rotation.power, rotation.order,
          inverse,        passage,                      matrix};
}

RQ_INLINE void multiply(float* x, const float* factors, int64_t padded) {
  for (int64_t i = 0; i < padded; i += VL) store(x + i, load(x + i) * load(factors + i));
}

// Within every 2 * STRIDE lanes: sums of the two halves, then differences. The product with +-1 is exact.
template <int STRIDE>
RQ_INLINE vf butterfly_within(vf x) {
  const vf sign = (lane_index() & STRIDE) != 0 ? splat(-1.0f) : splat(1.0f);
  return x * sign + swap_lanes<STRIDE>(x);
}

RQ_INLINE vf butterflies_within(vf v, bool all) {
  v = butterfly_within<1>(v);
  v = butterfly_within<2>(v);
  if constexpr (VL >= 8) v = butterfly_within<4>(v);
  if constexpr (VL >= 16) v = all ? butterfly_within<8>(v) : v;
  return v;
}

RQ_INLINE void butterflies(float* x, int64_t width, int64_t stride) {
  for (int64_t first = 0; first < width; first += 2 * stride) {
    float *a = x + first, *b = a + stride;
    int64_t i = 0;
    for (; i + VL <= stride; i += VL) {
      const vf u = load(a + i), v = load(b + i);
      store(a + i, u + v);
      store(b + i, u - v);
    }
    for (; i < stride; i++) {
      const float u = a[i], v = b[i];
      a[i] = u + v;
      b[i] = u - v;
    }
  }
}

RQ_INLINE void apply_base(float* x, const HeadRotation& r) {
  for (int64_t first = 0; first < r.width; first += r.order) {
    vf acc[kOrderPitch / VL] = {};
    for (int64_t j = 0; j < r.order; j++) {
      const float factor = x[first + j];
      RQ_UNROLL for (int v = 0; v < kOrderPitch / VL; v++) {
        acc[v] += factor * load(r.passage.columns + j * kOrderPitch + v * VL);
      }
    }
    memcpy(x + first, acc, (size_t)r.order * sizeof(float));
  }
}

RQ_INLINE void hadamard(float* x, const HeadRotation& r) {
  if (r.order > 1) {
    apply_base(x, r);
    for (int64_t stride = r.order; stride < r.width; stride *= 2) butterflies(x, r.width, stride);
    return;
  }
  for (int64_t i = 0; i < r.padded; i += VL) store(x + i, butterflies_within(load(x + i), r.width >= VL));
  for (int64_t stride = VL; stride < r.width; stride *= 2) butterflies(x, r.width, stride);
}

RQ_INLINE vf apply_blocks(vf v, const float* blocks, int64_t pitch) {
  vf y = spread_in_four<0>(v) * load(blocks);
  y += spread_in_four<1>(v) * load(blocks + pitch);
  y += spread_in_four<2>(v) * load(blocks + 2 * pitch);
  y += spread_in_four<3>(v) * load(blocks + 3 * pitch);
  return y;
}

RQ_INLINE void apply_blocks(float* x, const HeadRotation& r) {
  for (int64_t i = 0; i < r.padded; i += VL) store(x + i, apply_blocks(load(x + i), r.passage.blocks + i, r.pitch));
}

// A row of NV whole vectors in registers, where the Hadamard matrix is Sylvester's.
template <int NV>
RQ_INLINE void rotate_in_registers(const HeadRotation& r, float* x) {
  const Passage& by = r.passage;
  vf v[NV];
  RQ_UNROLL for (int i = 0; i < NV; i++) {
    v[i] = load(x + i * VL);
    if (by.before) v[i] *= load(by.before + i * VL);
    if (r.inverse && by.blocks) v[i] = apply_blocks(v[i], by.blocks + i * VL, r.pitch);
    v[i] = butterflies_within(v[i], true);
  }
  RQ_UNROLL for (int stride = 1; stride < NV; stride *= 2) {
    RQ_UNROLL for (int i = 0; i < NV; i++) {
      if (i & stride) continue;
      const vf a = v[i], b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  }
  RQ_UNROLL for (int i = 0; i < NV; i++) {
    if (!r.inverse && by.blocks) v[i] = apply_blocks(v[i], by.blocks + i * VL, r.pitch);
    if (by.after) v[i] *= load(by.after + i * VL);
    store(x + i * VL, v[i]);
  }
}

// False: the row does not fit.
RQ_INLINE bool rotate_in_registers(const HeadRotation& r, float* x) {
  if (r.power != r.width) return false;
  switch (r.width / VL) {
    case 2: rotate_in_registers<2>(r, x); return true;
    case 4: rotate_in_registers<4>(r, x); return true;
    case 8: rotate_in_registers<8>(r, x); return true;
    case 16:
      if constexpr (!kManyRegisters) return false;
      rotate_in_registers<16>(r, x);
      return true;
    default: return false;
  }
}

// One row through a dense matrix whose rows are not whole vectors: out = matrix · x.
RQ_INLINE void dense_forward(const float* matrix, const float* x, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i++) {
    const float* row = matrix + i * width;
    vf acc = {};
    int64_t j = 0;
    for (; j + VL <= width; j += VL) acc += load(x + j) * load(row + j);
    out[i] = sum(acc);
    for (; j < width; j++) out[i] += row[j] * x[j];
  }
}

// The same with the transpose.
RQ_INLINE void dense_inverse(const float* matrix, const float* x, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i++) out[i] = 0;
  for (int64_t j = 0; j < width; j++) {
    for (int64_t i = 0; i < width; i++) out[i] += x[j] * matrix[j * width + i];
  }
}

// Every row becomes its rotation; x [kTileRows][padded], zeros past the width. `spare` has the same size.
RQ_INLINE void rotate_dense(const HeadRotation& r, float* x, int64_t rows, float* spare) {
  if (r.width == r.padded) {
    if (r.inverse) {
      memset(spare, 0, (size_t)(rows * r.width) * sizeof(float));
      narrow_values(r.matrix, r.width, r.width, x, r.width, rows, spare);
    } else {
      narrow_scores(r.matrix, r.width, r.width, x, rows, spare, r.width);
    }
    memcpy(x, spare, (size_t)(rows * r.width) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < rows; i++) {
    if (r.inverse) dense_inverse(r.matrix, x + i * r.padded, r.width, spare);
    else dense_forward(r.matrix, x + i * r.padded, r.width, spare);
    memcpy(x + i * r.padded, spare, (size_t)r.width * sizeof(float));
  }
}

RQ_INLINE void rotate_rows(const HeadRotation& r, float* x, int64_t rows, float* spare) {
  if (r.matrix) return rotate_dense(r, x, rows, spare);
  const Passage& by = r.passage;
  for (int64_t i = 0; i < rows; i++, x += r.padded) {
    if (rotate_in_registers(r, x)) continue;
    if (by.before) multiply(x, by.before, r.padded);
    if (r.inverse && by.blocks) apply_blocks(x, r);
    if (r.power) hadamard(x, r);
    if (!r.inverse && by.blocks) apply_blocks(x, r);
    if (by.after) multiply(x, by.after, r.padded);
  }
}

}  // namespace RQ_ISA
}  // namespace rq
