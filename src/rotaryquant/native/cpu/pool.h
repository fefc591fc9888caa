// Threads that share one loop at a time.
#pragma once

#include <cstdint>
#include <functional>

namespace rq {

// Calls body(index) for every index in [0, count) on up to `threads` threads, the caller's included, and returns
// when all are done. On borrowed threads, else on workers of our own; on the caller alone where those are busy with
// another loop. Our own workers are never joined, so that nothing can hang at exit; a forked child starts without any.
void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& body);

// GOMP_parallel of the OpenMP runtime whose threads the process already has. They wait for work where the last parallel
// loop left them, often still awake, and workers of our own would have to take their processors away from them.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// Runs loops on the threads of that runtime from now on, except for a while after one of them kept a loop waiting;
// null: on workers of our own. Forked children never borrow.
void borrow_threads(Parallel parallel);

// At least `bytes` of memory aligned to 64 bytes, this thread's own, kept until the thread ends or asks for more.
char* thread_scratch(int64_t bytes);

}  // namespace rq
