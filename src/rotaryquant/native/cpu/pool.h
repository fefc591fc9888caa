// Threads that share one loop at a time.
#pragma once

#include <cstdint>
#include <functional>

namespace rq {

// Calls body(index) for every index in [0, count) on up to `threads` threads, the caller's included, and returns
// when all are done. Runs on the caller alone where the workers are busy with another loop. The workers are never
// joined, so that nothing can hang at exit, and a forked child starts without any.
void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& body);

// At least `bytes` of memory aligned to 64 bytes, this thread's own, kept until the thread ends or asks for more.
char* thread_scratch(int64_t bytes);

}  // namespace rq
