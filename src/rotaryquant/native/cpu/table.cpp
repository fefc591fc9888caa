// The table of kernels of the instruction set this file is compiled for.
#include "tables.h"

#define RQ_TEXT2(x) #x
#define RQ_TEXT(x) RQ_TEXT2(x)

namespace rq {
namespace RQ_ISA {

const Kernels& kernels() {
  static const Kernels table = {RQ_TEXT(RQ_ISA), row_scratch,   attention_scratch, rotate, quantize, circles,   weight_rows,
                                weight_terms,    rotate_inputs, round_inputs,      repack, append,   attention, roof_stream,
                                roof_dot};
  return table;
}

}  // namespace RQ_ISA
}  // namespace rq
