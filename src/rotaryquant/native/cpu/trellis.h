// A tail-biting trellis (formats/codebook.py): 16 columns are a circle, in which a code and the class of the one before it,
// which is that modulo kClasses, together name a level.
#pragma once

#include "bytes.h"
#include "kernels.h"

namespace rq {
namespace RQ_ISA {

constexpr int kCycle = 16;
constexpr int32_t kFine = 4;  // steps of the integers in which errors are counted, to a level's own

// ---- codes to indices -----------------------------------------------------------------------------------------

// The eight vectors of a chunk (strip.h) with each code as an index of the levels: its class before, then itself.
template <int KIND>
RQ_INLINE void trellis_indices(bool keys, uint8_t* vectors) {
  constexpr int words = 16;  // of four lanes each
  constexpr uint32_t classes = (kClasses<KIND> - 1) * 0x01010101u;
  uint32_t from[8 * words], out[8 * words];
  memcpy(from, vectors, sizeof from);
  for (int v = 0; v < 8; v++) {
    const uint32_t *own = from + words * v, *before = from + words * ((v + 6) % 8);
    for (int i = 0; i < words; i++) {
      // the column before: of keys the byte before, across words that of the four columns before; of values the word before
      const uint32_t b = keys ? own[i] << 8 | before[i] >> 24 : own[(i + words - 1) % words];
      out[words * v + i] = own[i] | (b & classes) << kBits<KIND>;
    }
  }
  memcpy(vectors, out, sizeof out);
}

// ---- values to codes ------------------------------------------------------------------------------------------

// Codes of a circle of integers, in kFine-ths of a level's step, with the least squared error; of equal ones the circle
// that ends with the lowest class, then that with the lowest classes before it, then the lowest codes.
// levels: [classes][codes], in the same steps.
template <int KIND>
RQ_INLINE void trellis_codes(const int32_t* levels, const int32_t* x, uint8_t* codes) {
  constexpr int classes = kClasses<KIND>, all = 1 << kBits<KIND>;
  constexpr int32_t unreached = 1 << 30;
  // One lane for each class that a circle may end with, which is also the one before its first column.
  typedef int32_t Ends __attribute__((vector_size(4 * classes)));
  // Costs are kept times `classes`, so that the smallest sum of a cost and a step also says whence it came.
  Ends cost[classes], came[kCycle][classes];
  uint8_t code[kCycle][classes * classes];
  for (int s = 0; s < classes; s++) {
    for (int e = 0; e < classes; e++) cost[s][e] = s == e ? 0 : unreached;
  }
  for (int i = 0; i < kCycle; i++) {
    int32_t step[classes * classes];
    if constexpr (classes == all) {
      for (int k = 0; k < classes * all; k++) {
        const int32_t error = x[i] - levels[k];
        step[k] = error * error * classes + k / all;
        code[i][k] = (uint8_t)(k % all);
      }
    } else {  // several codes lead to a class: the closest does
      int32_t errors[classes * all];
      for (int k = 0; k < classes * all; k++) errors[k] = (x[i] - levels[k]) * (x[i] - levels[k]);
      for (int b = 0; b < classes; b++) {
        for (int s = 0; s < classes; s++) {
          int best = s;
          for (int c = s + classes; c < all; c += classes) best = errors[b * all + c] < errors[b * all + best] ? c : best;
          step[b * classes + s] = errors[b * all + best] * classes + b;
          code[i][b * classes + s] = (uint8_t)best;
        }
      }
    }
    Ends next[classes];
    RQ_UNROLL for (int s = 0; s < classes; s++) {
      Ends least = cost[0] + step[s];
      RQ_UNROLL for (int b = 1; b < classes; b++) {
        const Ends other = cost[b] + step[classes * b + s];
        least = other < least ? other : least;
      }
      came[i][s] = least & (classes - 1);
      next[s] = least - came[i][s];
    }
    memcpy(cost, next, sizeof cost);
  }
  int end = 0;
  for (int e = 1; e < classes; e++) end = cost[e][e] < cost[end][end] ? e : end;
  for (int i = kCycle - 1, state = end; i >= 0; i--) {
    const int before = came[i][state][end];
    codes[i] = code[i][classes * before + state];
    state = before;
  }
}

}  // namespace RQ_ISA
}  // namespace rq
