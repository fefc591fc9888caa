// A tail-biting trellis of 3-bit codes (formats/codebook.py, trellis): 16 columns are a circle, in which a code and the one
// before it together name one of 64 levels.
#pragma once

#include "bytes.h"
#include "kernels.h"

namespace rq {
namespace RQ_ISA {

constexpr int kCycle = 16, kStates = 8;
constexpr int32_t kFine = 4;  // steps of the integers in which errors are counted, to a level's own

// ---- codes to indices -----------------------------------------------------------------------------------------

// The eight vectors of a chunk (strip.h) with each code c after code b as 8b + c.
RQ_INLINE void trellis_indices(bool keys, uint8_t* vectors) {
  constexpr int words = 16;  // of four lanes each
  uint32_t from[8 * words], out[8 * words];
  memcpy(from, vectors, sizeof from);
  for (int v = 0; v < 8; v++) {
    const uint32_t *own = from + words * v, *before = from + words * ((v + 6) % 8);
    for (int i = 0; i < words; i++) {
      // the column before: of keys the byte before, across words that of the four columns before; of values the word before
      const uint32_t b = keys ? own[i] << 8 | before[i] >> 24 : own[(i + words - 1) % words];
      out[words * v + i] = own[i] | b << 3;
    }
  }
  memcpy(vectors, out, sizeof out);
}

// ---- values to codes ------------------------------------------------------------------------------------------

// One lane for each code that a circle may end with, which is also the one before its first.
typedef int32_t Ends __attribute__((vector_size(4 * kStates)));

// Codes of a circle of integers, in kFine-ths of a level's step, with the least squared error; of equal ones the circle
// with the lowest last code, and then the lowest codes before it. levels: [64], in the same steps.
RQ_INLINE void trellis_codes(const int32_t* levels, const int32_t* x, uint8_t* codes) {
  constexpr int32_t unreached = 1 << 30;
  // Costs are kept times kStates, so that the smallest sum of a cost and a step also says whence it came.
  Ends cost[kStates], came[kCycle][kStates];
  for (int s = 0; s < kStates; s++) {
    for (int e = 0; e < kStates; e++) cost[s][e] = s == e ? 0 : unreached;
  }
  for (int i = 0; i < kCycle; i++) {
    int32_t step[kStates * kStates];
    for (int k = 0; k < kStates * kStates; k++) {
      const int32_t error = x[i] - levels[k];
      step[k] = error * error * kStates + k / kStates;
    }
    Ends next[kStates];
    RQ_UNROLL for (int s = 0; s < kStates; s++) {
      Ends least = cost[0] + step[s];
      RQ_UNROLL for (int b = 1; b < kStates; b++) {
        const Ends other = cost[b] + step[kStates * b + s];
        least = other < least ? other : least;
      }
      came[i][s] = least & (kStates - 1);
      next[s] = least - came[i][s];
    }
    memcpy(cost, next, sizeof cost);
  }
  int end = 0;
  for (int e = 1; e < kStates; e++) end = cost[e][e] < cost[end][end] ? e : end;
  for (int i = kCycle - 1, state = end; i >= 0; i--) {
    codes[i] = (uint8_t)state;
    state = came[i][state][end];
  }
}

}  // namespace RQ_ISA
}  // namespace rq
