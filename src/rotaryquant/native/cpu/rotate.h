// Rows through y = B·H·S·x or back, in buffers of fp32 padded to whole vectors.
#pragma once

#include "products.h"
#include "reading.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kTileRows = 8;  // rows rotated at a time
constexpr int64_t kMaxOrder = 28;
constexpr int64_t kOrderPadded = 32;

// The rotation of one head, with factors laid out for vectors. Built once per unit of work.
struct HeadRotation {
  int64_t width, padded, power, order;
  bool inverse;
  const float* matrix;  // dense kind, else null
  bool has_pre, has_post, has_blocks;
  float pre[kMaxPadded], post[kMaxPadded];         // factors before and after everything else
  float blocks[4][kMaxPadded];                     // y[4b + i] = sum over j of blocks[j][4b + i] * x[4b + j]
  float columns[kMaxOrder * kOrderPadded];         // of the base matrix, or of its transpose
};

RQ_INLINE void lay_out_blocks(HeadRotation& r, const float* blocks, float factor) {
  for (int64_t b = 0; b < r.width / 4; b++) {
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < 4; i++) {
        r.blocks[j][4 * b + i] = factor * blocks[16 * b + (r.inverse ? 4 * j + i : 4 * i + j)];
      }
    }
  }
  for (int j = 0; j < 4; j++) {
    for (int64_t i = r.width; i < r.padded; i++) r.blocks[j][i] = 0;
  }
}

RQ_INLINE void fill(float* out, int64_t padded, int64_t width, const float* factors, float factor) {
  for (int64_t i = 0; i < padded; i++) out[i] = i < width ? (factors ? factors[i] * factor : factor) : 0.0f;
}

// The norm 1/sqrt(width) of H goes into a factor that precedes H, so that no sum overflows before it shrinks.
RQ_INLINE void prepare(HeadRotation& r, const Rotation& rotation, int64_t head, bool inverse) {
  r.width = rotation.width;
  r.padded = round_up(r.width, VL);
  r.power = rotation.power;
  r.order = rotation.order;
  r.inverse = inverse;
  r.matrix = rotation.matrix ? rotation.matrix + head * r.width * r.width : nullptr;
  r.has_pre = r.has_post = r.has_blocks = false;
  if (r.matrix) return;
  const bool hadamard = r.power > 0;
  const float norm = hadamard ? 1.0f / __builtin_sqrtf((float)r.width) : 1.0f;
  const float* signs = rotation.signs ? rotation.signs + head * r.width : nullptr;
  r.has_blocks = rotation.blocks != nullptr;
  if (r.has_blocks) lay_out_blocks(r, rotation.blocks + head * r.width * 4, inverse ? norm : 1.0f);
  if (!inverse) {
    r.has_pre = signs || hadamard;
    if (r.has_pre) fill(r.pre, r.padded, r.width, signs, norm);
  } else {
    r.has_pre = hadamard && !r.has_blocks;
    if (r.has_pre) fill(r.pre, r.padded, r.width, nullptr, norm);
    r.has_post = signs != nullptr;
    if (r.has_post) fill(r.post, r.padded, r.width, signs, 1.0f);
  }
  if (r.order > 1) {
    for (int64_t j = 0; j < r.order; j++) {
      for (int64_t i = 0; i < kOrderPadded; i++) {
        const float entry = i >= r.order ? 0.0f : rotation.base[inverse ? j * r.order + i : i * r.order + j];
        r.columns[j * kOrderPadded + i] = entry;
      }
    }
  }
}

RQ_INLINE void multiply(float* x, const float* factors, int64_t padded) {
  for (int64_t i = 0; i < padded; i += VL) store(x + i, load(x + i) * load(factors + i));
}

template <int STRIDE>
RQ_INLINE vf butterfly_within(vf x) {
  const vf sign = as_f32((lane_index() & STRIDE) != 0 ? splat_i32((int32_t)0x80000000) : (vi){});
  return swap_lanes<STRIDE>(x) + as_f32(as_i32(x) ^ as_i32(sign));
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
    vf acc[kOrderPadded / VL] = {};
    for (int64_t j = 0; j < r.order; j++) {
      const float factor = x[first + j];
      RQ_UNROLL for (int v = 0; v < kOrderPadded / VL; v++) {
        acc[v] += factor * load(r.columns + j * kOrderPadded + v * VL);
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
  for (int64_t i = 0; i < r.padded; i += VL) {
    vf v = load(x + i);
    v = butterfly_within<1>(v);
    v = butterfly_within<2>(v);
    if constexpr (VL >= 8) v = butterfly_within<4>(v);
    if constexpr (VL >= 16) v = r.width >= 16 ? butterfly_within<8>(v) : v;
    store(x + i, v);
  }
  for (int64_t stride = VL; stride < r.width; stride *= 2) butterflies(x, r.width, stride);
}

RQ_INLINE void apply_blocks(float* x, const HeadRotation& r) {
  for (int64_t i = 0; i < r.padded; i += VL) {
    const vf v = load(x + i);
    vf y = spread_in_four<0>(v) * load(r.blocks[0] + i);
    y += spread_in_four<1>(v) * load(r.blocks[1] + i);
    y += spread_in_four<2>(v) * load(r.blocks[2] + i);
    y += spread_in_four<3>(v) * load(r.blocks[3] + i);
    store(x + i, y);
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
  for (int64_t i = 0; i < rows; i++, x += r.padded) {
    if (r.has_pre) multiply(x, r.pre, r.padded);
    if (r.inverse && r.has_blocks) apply_blocks(x, r);
    if (r.power) hadamard(x, r);
    if (!r.inverse && r.has_blocks) apply_blocks(x, r);
    if (r.has_post) multiply(x, r.post, r.padded);
  }
}

}  // namespace RQ_ISA
}  // namespace rq
