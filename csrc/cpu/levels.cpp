// Which instruction set levels this build has and this machine can run.
#include <atomic>
#include <cstring>

#include "isa.h"

IsaKernels make_isa_portable();
#if defined(__x86_64__)
IsaKernels make_isa_avx512();
IsaKernels make_isa_avxvnni();
IsaKernels make_isa_avx2();
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
IsaKernels make_isa_neon();
#endif

namespace {

constexpr int kMaxLevels = 4;

#if defined(__x86_64__)
// The compiler's own feature test knows no AVX-VNNI before gcc 13: CPUID leaf 7.1, EAX bit 4.
bool has_avxvnni() {
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  asm("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return (eax >> 4 & 1) != 0;
}
#endif

struct Levels {
  IsaKernels kernels[kMaxLevels];
  int count = 0;

  Levels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni")) {
      kernels[count++] = make_isa_avx512();
    }
    if (avx2 && has_avxvnni()) kernels[count++] = make_isa_avxvnni();
    if (avx2) kernels[count++] = make_isa_avx2();
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) kernels[count++] = make_isa_neon();
#endif
    kernels[count++] = make_isa_portable();
  }
};

const Levels& levels() {
  static const Levels instance;
  return instance;
}

std::atomic<int> chosen{0};

}  // namespace

const IsaKernels& isa() { return levels().kernels[chosen.load(std::memory_order_relaxed)]; }

int num_isa_levels() { return levels().count; }

const char* isa_level_name(int index) { return levels().kernels[index].name; }

bool set_isa_level(const char* name) {
  for (int i = 0; i < levels().count; ++i) {
    if (*name == '\0' || std::strcmp(levels().kernels[i].name, name) == 0) {
      chosen.store(i);
      return true;
    }
  }
  return false;
}
