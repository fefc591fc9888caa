// The kernels of one instruction set, which table.cpp puts into its `Kernels`.
#pragma once

#include "kernels.h"

namespace rq {
namespace RQ_ISA {

int64_t row_scratch(int64_t width);
int64_t attention_scratch(const AttentionArgs& args);
void rotate(const RotateArgs& args, int64_t batch, int64_t head, int64_t first, int64_t count, char* scratch);
void quantize(const QuantizeArgs& args, int64_t first, int64_t count, char* scratch);
void circles(const CirclesArgs& args, int64_t first, int64_t count);
void weight_rows(const WeightArgs& args, int64_t first, int64_t count);
int weight_terms(const WeightArgs& args);
void rotate_inputs(float* x, int64_t width, int64_t padded, const float* factors, int64_t rotated);
void round_inputs(const float* x, int64_t width, int64_t group, int terms, int8_t* small, float* steps, float* sums);
void repack(const RepackArgs& args, int64_t first, int64_t count);
Met append(const AppendArgs& args, const AppendUnit& unit, char* scratch);
void attention(const AttentionArgs& args, const AttentionUnit& unit, const AttentionPart& part, char* scratch);
int64_t roof_stream(const uint8_t* data, int64_t bytes);
int64_t roof_dot(const uint8_t* data, int64_t bytes, int64_t rounds, int64_t* products);

}  // namespace RQ_ISA
}  // namespace rq
