// What this processor can do at best: the roofs that benchmarks hold the other kernels against.
#include "bytes.h"
#include "tables.h"

namespace rq {
namespace RQ_ISA {

namespace {

// Independent sums, enough to hide the latency of a product; each byte loaded is multiplied by each.
constexpr int kSums = kManyRegisters ? 8 : 4;

RQ_INLINE int64_t folded(vb v) {
  int64_t words[RQ_BYTES / 8], all = 0;
  memcpy(words, &v, sizeof v);
  for (int i = 0; i < RQ_BYTES / 8; i++) all ^= words[i];
  return all;
}

}  // namespace

int64_t roof_stream(const uint8_t* data, int64_t bytes) {
  vb sums[8] = {};
  for (int64_t at = 0; at + 8 * RQ_BYTES <= bytes; at += 8 * RQ_BYTES) {
    RQ_UNROLL for (int i = 0; i < 8; i++) sums[i] ^= load_bytes(data + at + i * RQ_BYTES);
  }
  for (int i = 1; i < 8; i++) sums[0] ^= sums[i];
  return folded(sums[0]);
}

int64_t roof_dot(const uint8_t* data, int64_t bytes, int64_t rounds, int64_t* products) {
  vi all = {};
  for (int64_t round = 0; round < rounds; round++) {
    vi sums[2][kSums] = {};
    for (int64_t at = 0; at + 2 * RQ_BYTES <= bytes; at += 2 * RQ_BYTES) {
      const vb one = load_bytes(data + at), two = load_bytes(data + at + RQ_BYTES);
      RQ_UNROLL for (int i = 0; i < kSums; i++) {
        const int32_t four = (int32_t)round ^ (0x01010101 * i);  // of this round: no round can be the last one's
        sums[0][i] = dot4(sums[0][i], one, four);
        sums[1][i] = dot4(sums[1][i], two, four);
      }
    }
    RQ_UNROLL for (int i = 0; i < kSums; i++) all ^= sums[0][i] ^ sums[1][i];
  }
  *products = rounds * (bytes / (2 * RQ_BYTES)) * 2 * RQ_BYTES * kSums;
  return folded((vb)all);
}

}  // namespace RQ_ISA
}  // namespace rq
