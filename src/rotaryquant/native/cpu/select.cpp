// Chooses among the instruction sets that the kernels were compiled for.
#include <atomic>
#include <cstring>

#if defined(RQ_X86_VNNI)
#include <cpuid.h>
#endif
#if defined(RQ_ARM_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace rq {

namespace {

#if defined(RQ_X86_VNNI)
bool has_avx_vnni() {  // older compilers have no name for it
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}
#endif

#if defined(RQ_ARM_DOTPROD)
bool has_dotprod() {
#if defined(__APPLE__)
  return true;  // since the first of these processors
#elif defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP, which older headers lack
#else
  return false;  // not known how to ask
#endif
}
#endif

// What this processor can run, best first. The checks name exactly what CMakeLists.txt compiles with.
struct Choices {
  const Kernels* kernels[6] = {};
  const char* names[6] = {};

  Choices() {
    int count = 0;
#if defined(RQ_X86_LEVELS)
    __builtin_cpu_init();
    const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    if (has_v4) kernels[count++] = &v4::kernels();
#if defined(RQ_X86_VNNI)
    if (has_v3 && has_avx_vnni()) kernels[count++] = &v3vnni::kernels();
#endif
    if (has_v3) kernels[count++] = &v3::kernels();
    if (__builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1")) kernels[count++] = &v2::kernels();
#elif defined(RQ_ARM_DOTPROD)
    if (has_dotprod()) kernels[count++] = &dotprod::kernels();
#endif
    kernels[count++] = &base::kernels();
    for (int i = 0; i < count; i++) names[i] = kernels[i]->name;
  }
};

const Choices& choices() {
  static const Choices all;
  return all;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* chosen = in_use.load(std::memory_order_relaxed);
  return chosen ? *chosen : *choices().kernels[0];
}

const char* const* available() { return choices().names; }

bool use(const char* name) {
  for (int i = 0; choices().kernels[i]; i++) {
    if (std::strcmp(choices().names[i], name) == 0) {
      in_use = choices().kernels[i];
      return true;
    }
  }
  return false;
}

}  // namespace rq
