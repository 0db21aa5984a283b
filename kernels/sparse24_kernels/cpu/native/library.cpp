// The plain C functions that Python calls: which paths this CPU runs, and each operator by a path.
#include "problem.h"

struct Candidate { const Path* path; Prune* const* prune; bool (*runs)(); };

#if defined(__x86_64__)
#include <cpuid.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
extern const Path path_amx, path_avx512_bf16, path_avx512, path_avx2, path_portable;
extern Prune *const prune_avx512, *const prune_avx2, *const prune_portable;

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && has_avx2();
}
static bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
// Linux gives a process the tiles' registers when it asks for them.
static bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 22 & 1) && (d >> 24 & 1) && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
  return false;
#endif
}
static const Candidate candidates[] = {
    {&path_amx, &prune_avx512, has_amx}, {&path_avx512_bf16, &prune_avx512, has_avx512_bf16},
    {&path_avx512, &prune_avx512, has_avx512}, {&path_avx2, &prune_avx2, has_avx2},
    {&path_portable, &prune_portable, [] { return true; }}};
#elif defined(__aarch64__)
extern const Path path_neon, path_portable;
extern Prune *const prune_neon, *const prune_portable;
static const Candidate candidates[] = {
    {&path_neon, &prune_neon, [] { return true; }}, {&path_portable, &prune_portable, [] { return true; }}};
#else
extern const Path path_portable;
extern Prune* const prune_portable;
static const Candidate candidates[] = {{&path_portable, &prune_portable, [] { return true; }}};
#endif

constexpr int COUNT = sizeof candidates / sizeof *candidates;

#pragma GCC visibility push(default)
extern "C" {

// The name of a path, the fastest first; "" where this CPU does not run it, null behind the last one.
const char* sparse24_path(int number) {
  if (number < 0 || number >= COUNT) return nullptr;
  return candidates[number].runs() ? candidates[number].path->name : "";
}

int sparse24_linear(int path, const void* x, const void* values, const uint8_t* mask, const void* scales,
                    const void* bias, void* y, int64_t tokens, int64_t rows, int64_t k, int64_t each, int64_t m, int64_t dtype,
                    int64_t is_product, ParallelFor parallel_for) {
  const int64_t value_dtype = scales ? (int64_t)INT8 : dtype;
  return candidates[path].path->linear({x, values, mask, scales, bias, y, tokens, rows, k, each, dtype, value_dtype,
                                        m == 4 && each == STEP / 2, is_product != 0, parallel_for});
}

int sparse24_unpack(int path, const void* values, const uint8_t* mask, const void* scales, void* y, int64_t rows,
                    int64_t k, int64_t each, int64_t dtype, ParallelFor parallel_for) {
  const int64_t value_dtype = scales ? (int64_t)INT8 : dtype;
  return candidates[path].path->unpack({nullptr, values, mask, scales, nullptr, y, 0, rows, k, each, dtype, value_dtype, false,
                                        false, parallel_for});
}

int sparse24_prune(int path, int64_t rule, const void* x, const uint8_t* mask, void* y, int64_t before, int64_t size,
                   int64_t after, int64_t dtype, int64_t result_dtype, int64_t n, int64_t m, float scale, int64_t key,
                   bool is_packed, ParallelFor parallel_for) {
  const Pruning pruning{rule, x, mask, y, before, size, after, dtype, result_dtype, n, m, scale, (uint64_t)key, is_packed, parallel_for};
  return (*candidates[path].prune)(pruning);
}

}  // extern "C"
#pragma GCC visibility pop
