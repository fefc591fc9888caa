// What Python hands over: arrays by address, shape and strides, and the checks that keep every kernel inside them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"

namespace rq {

// Sizes or strides of an array.
struct Dims {
  static constexpr int64_t kMost = 8;

  Dims() = default;
  Dims(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) values[count++] = size;
  }
  int64_t size() const { return count; }
  int64_t operator[](int64_t i) const { return values[i]; }
  bool operator==(const Dims& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
  const int64_t* begin() const { return values; }
  const int64_t* end() const { return values + count; }

  int64_t count = 0, values[kMost];
};

// A tensor in this process' memory (tensors.h makes it), which whoever calls keeps alive.
struct Array {
  // Each raises std::invalid_argument naming the field where the array is not what the kernels need.
  const Array& of_type(const char* name, Dtype wanted) const;
  const Array& of_shape(const char* name, const Dims& wanted) const;
  const Array& contiguous(const char* name) const;
  const Array& last_contiguous(const char* name) const;

  template <typename T>
  T* at() const {
    return static_cast<T*>(data);
  }
  Rows rows() const;

  void* data = nullptr;
  Dtype dtype = Dtype::other;
  Dims shape, strides;
};

using OptionalArray = std::optional<Array>;

// A rotation with tables of its own.
struct Rotations {
  // base: [order, order], entries +1 and -1. signs: [heads, width]. blocks: [heads, width / 4, 4, 4]. matrix: [heads,
  // width, width]; replaces the rest.
  Rotations(int64_t width, int64_t heads, int64_t power, const Array& base, const OptionalArray& signs,
            const OptionalArray& blocks, const OptionalArray& matrix);

  Rotation tables() const;  // points into this object, which must outlive it

 private:
  using Floats = std::vector<float>;
  Floats lay_out_blocks(const float* blocks, bool transposed, float factor) const;
  Floats lay_out_factors(const float* factors, float factor) const;

  Rotation shape_;
  Floats matrix_, signs_and_norm_, norm_, signs_, blocks_, inverse_blocks_, columns_, inverse_columns_;  // empty: none
};

Codec make_codec(const std::string& layout, int64_t width, int64_t bits, const std::string& rule, int64_t group,
                 const std::string& scale_dtype, double unit, bool trellis, const Array& levels,
                 const Array& boundaries);

// Slabs of packed rows, with the lists of their addresses.
struct Slabs {
  // As many codes as scales; all of a kind alike in type, shape and strides.
  Slabs(const Codec& codec, int64_t blocks_per_slab, const std::vector<Array>& code_slabs,
        const std::vector<Array>& scale_slabs);

  Stream stream() const;  // points into this object, which must outlive it
  int64_t num_blocks() const { return static_cast<int64_t>(codes.size()) * layout.blocks_per_slab; }

  Stream layout;
  int64_t heads;  // 0 where there are no slabs
  std::vector<uint8_t*> codes;
  std::vector<uint16_t*> scales;
};

// One layer's cache as attention reads it (ops/streams.py, CacheView): everything that stays from one call to the next.
struct View {
  // Points into keys, values and both rotations, which must outlive it, and into the arrays.
  View(const Slabs& keys, const Slabs& values, const Rotations& key_rotation, const Rotations& value_rotation,
       const Array& block_table, const Array& packed_lens, const Array& seq_lens, int64_t num_sinks,
       const OptionalArray& means, const OptionalArray& dense_keys, const OptionalArray& dense_values,
       const OptionalArray& dense_positions);

  AttendArgs attend;   // without queries, options and outputs
  int64_t num_blocks;  // that the slabs hold
};

// Attention on one layer's cache with options that stay from one call to the next (ops/packed_attention, Options).
struct Plan {
  // Points into what the view does, and into sink_logits.
  Plan(const View& view, double scale, bool causal, int64_t window, double softcap, double noise_query,
       double noise_score, const OptionalArray& sink_logits, bool inverse);

  AttendArgs attend;  // without queries, mask and outputs
  int64_t num_blocks;
  OptionalArray sink_logits;
};

// A packed matrix or a stack of them (ops/weights.py, PackedWeight), as it stays from one call to the next.
struct Weights {
  // Points into codes and scales. codes: [rows, width * bits / 8] or [matrices, ...]; scales with as many rows.
  Weights(const Array& codes, const Array& scales, const Array& levels, const OptionalArray& factors, int64_t rotated,
          int64_t bits, int64_t group);

  // Rows begin .. begin + count of one matrix.
  WeightArgs part(int64_t matrix, int64_t begin, int64_t count) const;
  const float* factors() const { return factors_.empty() ? nullptr : factors_.data(); }

  WeightArgs shape;  // without inputs and outputs; its rows are those of a matrix
  int64_t matrices, rotated;

 private:
  std::vector<float> factors_;
};

[[noreturn]] void refuse(const std::string& message);
void require(bool ok, const char* message);
void require_floats(const char* name, const Array& x);
void check_float_rows(const char* name, const Array& x, const Dims& shape);
const int32_t* integers(const char* name, const Array& array, const Dims& shape);

}  // namespace rq
