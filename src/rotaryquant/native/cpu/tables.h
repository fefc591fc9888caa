// The kernels of one instruction set, which table.cpp puts into its `Kernels`.
#pragma once

#include "kernels.h"

namespace rq {
namespace RQ_ISA {

int64_t row_scratch(int64_t width);
int64_t attention_scratch(const AttentionArgs& args);
void rotate(const RotateArgs& args, int64_t batch, int64_t head, int64_t first, int64_t count, char* scratch);
void quantize(const QuantizeArgs& args, int64_t first, int64_t count, char* scratch);
void repack(const RepackArgs& args, int64_t first, int64_t count);
Met append(const AppendArgs& args, const AppendUnit& unit, char* scratch);
void attention(const AttentionArgs& args, const AttentionUnit& unit, const AttentionPart& part, char* scratch);

}  // namespace RQ_ISA
}  // namespace rq
