// Rows of any float type as fp32.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rq {
namespace RQ_ISA {

constexpr int64_t kMaxPadded = kMaxWidth + 16;

RQ_INLINE const char* row_address(const Rows& rows, int64_t batch, int64_t head, int64_t row) {
  const int64_t offset = batch * rows.batch_stride + head * rows.head_stride + row * rows.row_stride;
  return (const char*)rows.data + offset * (rows.dtype == Dtype::f32 ? 4 : 2);
}

// `width` values as fp32 in out[0 .. padded), zeros past the width.
RQ_INLINE void load_row(const char* address, Dtype dtype, int64_t width, int64_t padded, float* out) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    memcpy(out, address, (size_t)width * sizeof(float));
    i = width;
  } else {
    const uint16_t* p = (const uint16_t*)address;
    const bool brain = dtype == Dtype::bf16;
    for (; i + VL <= width; i += VL) store(out + i, brain ? load_bf16(p + i) : load_f16(p + i));
    for (; i < width; i++) out[i] = brain ? bf16_to_f32(p[i]) : f16_to_f32(p[i]);
  }
  for (; i < padded; i++) out[i] = 0;
}

}  // namespace RQ_ISA
}  // namespace rq
