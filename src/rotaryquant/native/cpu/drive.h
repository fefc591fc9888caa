// Whole ops: cuts them into units, runs the units on threads, joins what they leave. Arguments are checked already.
#pragma once

#include <vector>

#include "kernels.h"

namespace rq {

// Exact rows on their way into slots: `to` lies at the first of them and has the same dtype.
struct StageArgs {
  Rows from, to;
  int64_t batch, heads, rows, width;
  int64_t column_stride;  // of `from`
};

void run_stage(const StageArgs& args, int threads);
void run_rotate(const RotateArgs& args, int threads);
void run_quantize(const QuantizeArgs& args, int64_t rows, int threads);
void run_circles(const CirclesArgs& args, int64_t circles, int threads);
// Without inputs: rows to fp32. With them `args` has everything but what is made of them.
void run_weight(WeightArgs args, const WeightInputs* inputs, int threads);
void run_repack(const RepackArgs& args, int64_t blocks, int threads);

// batch * heads + head of the first row that was not finite (inputs before scales within a batch row), or -1.
int64_t run_append(const AppendArgs& args, const std::vector<AppendUnit>& units, int threads);

// On codes: rotated queries in, rotated outputs out.
void run_attention(const AttentionArgs& args, int threads);

// The whole of it: queries rotated, means added, outputs rotated back.
void run_attend(const AttendArgs& args, int threads);

}  // namespace rq
