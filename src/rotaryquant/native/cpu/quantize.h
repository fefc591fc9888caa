// One rotated row to codes and scales (the rules: ops/quantize/reference.py).
#pragma once

#include "codes.h"
#include "kernels.h"
#include "simd.h"
#include "trellis.h"

namespace rq {
namespace RQ_ISA {

struct Sums {
  float squares, dot, level_squares;
};

// 2^n as a product of two factors that are both normal, for the exponents -n .. n of any finite fp32.
struct PowerOfTwo {
  float first, second;
};

RQ_INLINE PowerOfTwo power_of_two(int n) {
  const int half = n / 2;
  return {bits_to_f32((uint32_t)(half + 127) << 23), bits_to_f32((uint32_t)(n - half + 127) << 23)};
}

// Exponent e with 2^e <= x < 2^(e+1) for finite x > 0, subnormals included.
RQ_INLINE int exponent(float x) {
  const int e = (int)(f32_to_bits(x) >> 23);
  return e ? e - 127 : (int)(f32_to_bits(x * 0x1p64f) >> 23) - 127 - 64;
}

RQ_INLINE float largest_magnitude(const float* y, int64_t count) {
  vf m = {};
  for (int64_t i = 0; i < count; i += VL) m = maximum(absolute(load(y + i)), m);
  return max_lane(m);
}

// Codes and sums of a group whose values are factor * z; z is near 1 and `rms` is its root mean square.
template <int BITS>
RQ_INLINE Sums code_group(const Codec& codec, float* z, int64_t count, float rms, uint8_t* codes) {
  constexpr int last = (1 << BITS) - 1;
  const Table<BITS> table = make_table<BITS>(codec.levels);
  vf bounds[last];
  RQ_UNROLL for (int k = 0; k < last; k++) bounds[k] = splat(codec.boundaries[k] * rms);
  vf squares = {}, dot = {}, level_squares = {};
  for (int64_t i = 0; i < count; i += VL) {
    const vf v = load(z + i);
    vi code = {};
    RQ_UNROLL for (int k = 0; k < last; k++) code -= (vi)(v >= bounds[k]);
    vf level = lookup<BITS>(table, code);
    if (i + VL > count) level = lane_index() < (int32_t)(count - i) ? level : (vf){};
    squares += v * v;
    dot += v * level;
    level_squares += level * level;
    store_u8(codes + i, code);
  }
  return {sum(squares), sum(dot), sum(level_squares)};
}

// 8 bits: the uniform grid whose step follows the group's largest magnitude.
RQ_INLINE Sums code_group_int8(float* z, int64_t count, float largest, uint8_t* codes) {
  const float steps = 127.0f / largest;
  vf squares = {}, dot = {}, level_squares = {};
  for (int64_t i = 0; i < count; i += VL) {
    const vf v = load(z + i);
    const vf shifted = v * steps + 128.5f;  // positive, so that truncation is the floor
    const vi code = __builtin_convertvector(shifted, vi);
    const vf level = to_f32(code) - 128.0f;
    squares += v * v;
    dot += v * level;
    level_squares += level * level;
    store_u8(codes + i, code);
  }
  return {sum(squares), sum(dot), sum(level_squares)};
}

// A trellis: circles of 16 values, each coded as a whole.
template <int KIND>
RQ_INLINE Sums code_group_trellis(const Codec& codec, const float* z, int64_t count, float rms, uint8_t* codes) {
  constexpr int classes = kClasses<KIND>, codes_each = 1 << kBits<KIND>;
  int32_t levels[classes * codes_each], x[kCycle];
  for (int k = 0; k < classes * codes_each; k++) levels[k] = kFine * (int32_t)codec.levels[k];
  const float steps = (float)kFine / codec.unit;
  Sums s = {0, 0, 0};
  for (int64_t i = 0; i < count; i += kCycle) {
    for (int j = 0; j < kCycle; j++) x[j] = rms > 0 ? (int32_t)__builtin_floorf(z[i + j] / rms * steps + 0.5f) : 0;
    trellis_codes<KIND>(levels, x, codes + i);
    for (int j = 0; j < kCycle; j++) {
      const int before = codes[i + (j + kCycle - 1) % kCycle] % classes;
      const float level = codec.levels[codes_each * before + codes[i + j]], v = z[i + j];
      s.squares += v * v;
      s.dot += v * level;
      s.level_squares += level * level;
    }
  }
  return s;
}

// Level of column j of a block of `count`.
template <int KIND>
RQ_INLINE float level_of(const Codec& codec, const uint8_t* codes, int64_t j) {
  if constexpr (kPaths<KIND>) {
    const int before = codes[(j + kCycle - 1) % kCycle] % kClasses<KIND>;
    return codec.levels[(before << kBits<KIND>) + codes[j]];
  }
  return codec.levels[codes[j]];
}

// As above, block after block of columns; `wanted` has room for a row, in which the errors so far are added to z.
template <int KIND>
RQ_INLINE Sums code_group_with_feedback(const Codec& codec, const float* z, int64_t count, float rms,
                                        const float* feedback, float* wanted, uint8_t* codes) {
  const float unit = codec.unit * rms;
  memcpy(wanted, z, (size_t)round_up(count, VL) * sizeof(float));
  Sums s = {0, 0, 0};
  for (int64_t i = 0; i < count; i += kCycle) {
    const int64_t columns = smaller(kCycle, count - i);
    float errors[kCycle] = {};
    if constexpr (kPaths<KIND>) code_group_trellis<KIND>(codec, wanted + i, columns, rms, codes + i);
    else code_group<KIND>(codec, wanted + i, columns, rms, codes + i);
    for (int64_t j = 0; j < columns; j++) {
      const float level = level_of<KIND>(codec, codes + i, j), v = z[i + j];
      errors[j] = v - level * unit;
      s.squares += v * v;
      s.dot += v * level;
      s.level_squares += level * level;
    }
    for (int64_t k = i + kCycle; k < count; k += VL) {  // past the width, rows of the factors read zeros of the next
      vf total = load(wanted + k);
      for (int64_t j = 0; j < kCycle; j++) total += errors[j] * load(feedback + (i + j) * count + k);
      store(wanted + k, total);
    }
  }
  return s;
}

RQ_INLINE void fill_codes(uint8_t* codes, int64_t count, int32_t code) {
  for (int64_t i = 0; i < count; i += VL) store_u8(codes + i, splat_i32(code));
}

// Scale of one group. y [count rounded up to whole vectors] is overwritten; zeros past count. feedback: of the row's
// head, with room for a row in `wanted`; null: none.
template <int KIND>
RQ_INLINE float quantize_group(const Codec& codec, float* y, int64_t count, uint8_t* codes, const float* feedback,
                               float* wanted) {
  const float largest = largest_magnitude(y, count);
  if (largest == 0) {
    bool zero = true;  // NaN escapes the maximum
    for (int64_t i = 0; i < count; i++) zero &= y[i] == 0;
    if constexpr (kPaths<KIND>) code_group_trellis<KIND>(codec, y, count, 0, codes);
    else fill_codes(codes, count, KIND == 8 ? 128 : 1 << (kBits<KIND> - 1));
    return zero ? 0.0f : kInfinity;
  }
  if (!(largest <= kLargest)) {
    fill_codes(codes, count, 0);
    return kInfinity;
  }
  // Dividing by a power of two is exact and keeps squares from vanishing and overflowing.
  const int e = exponent(largest);
  const PowerOfTwo down = power_of_two(-e), up = power_of_two(e);
  vf squares = {};
  for (int64_t i = 0; i < count; i += VL) {
    const vf z = load(y + i) * down.first * down.second;
    store(y + i, z);
    squares += z * z;
  }
  const float top = largest * down.first * down.second;
  const float rms = __builtin_sqrtf(sum(squares) / (float)count);
  Sums s;
  if constexpr (KIND == 8) s = code_group_int8(y, count, top, codes);
  else if (feedback) s = code_group_with_feedback<KIND>(codec, y, count, rms, feedback, wanted, codes);
  else if constexpr (kPaths<KIND>) s = code_group_trellis<KIND>(codec, y, count, rms, codes);
  else s = code_group<KIND>(codec, y, count, rms, codes);
  float scale;
  if (codec.rule == Rule::norm) scale = KIND == 8 ? top / 127.0f : rms * codec.unit;
  else if (codec.rule == Rule::score) scale = s.squares / s.dot;
  else scale = s.dot / s.level_squares;
  if (!(s.squares <= kLargest)) scale = kInfinity;
  return scale * up.first * up.second;
}

RQ_INLINE uint16_t round_scale(float scale, Dtype dtype) {
  return dtype == Dtype::bf16 ? f32_to_bf16(scale) : f32_to_f16(scale);
}

RQ_INLINE bool finite_scale(uint16_t scale, Dtype dtype) {
  const uint16_t exponent_bits = dtype == Dtype::bf16 ? 0x7f80 : 0x7c00;
  return (scale & exponent_bits) != exponent_bits;
}

// Codes [width rounded up to whole vectors] and scales of y [same], which is overwritten. False: a scale is not
// finite. Groups other than the whole row are whole vectors themselves. feedback, wanted: as of a group, with one group.
template <int KIND>
RQ_INLINE bool quantize_row(const Codec& codec, float* y, uint8_t* codes, uint16_t* scales, int64_t scale_stride,
                            const float* feedback, float* wanted) {
  bool finite = true;
  for (int64_t g = 0; g < codec.groups(); g++) {
    const int64_t at = g * codec.group;
    const float scale = quantize_group<KIND>(codec, y + at, codec.group, codes + at, feedback, wanted);
    scales[g * scale_stride] = round_scale(scale, codec.scale_dtype);
    finite &= finite_scale(scales[g * scale_stride], codec.scale_dtype);
  }
  return finite;
}

}  // namespace RQ_ISA
}  // namespace rq
