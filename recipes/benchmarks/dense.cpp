// What packed layers are compared with on a CPU: dense linear layers for few tokens, written as well as the packed ones
// (AVX-512, 1 or 4 rows by up to 4 tokens at a time, prefetch). Run on torch's threads. Which number of rows is faster
// depends on the CPU: 1 on an AMD EPYC, 4 on a Xeon.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512BF16__) || !defined(__AVX512F__)
#error "the dense kernel needs a CPU with AVX512_BF16"
#endif

using Task = void (*)(int64_t, int64_t, void*);
using ParallelFor = int (*)(int64_t begin, int64_t end, int64_t grain, Task, void*);

namespace {

constexpr int TOKENS = 4, PREFETCH = 1536;  // bytes ahead of what is multiplied

struct Bf16 {
  using Element = uint16_t;
  static void add(__m512& sum, const uint16_t* a, const uint16_t* b) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
  }
  static uint16_t round(float sum) {
    __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(sum));
    uint16_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
  }
};

struct Fp32 {
  using Element = float;
  static void add(__m512& sum, const float* a, const float* b) {
    sum = _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), sum);
  }
  static float round(float sum) { return sum; }
};

template <typename Kind>
struct Problem {
  const typename Kind::Element *x, *weight;
  typename Kind::Element* y;
  int64_t tokens, rows, k;
};

template <typename Kind, int R, int T>
void block(const Problem<Kind>& p, int64_t row, int64_t token) {
  constexpr int STEP = 64 / sizeof(typename Kind::Element), SUMS = T > 1 ? 1 : 2;  // 4 rows: 8 sums or more hide latency
  constexpr int64_t AHEAD = (R == 1 ? 4096 : PREFETCH) / sizeof(typename Kind::Element);
  const auto *weight = p.weight + row * p.k, *x = p.x + token * p.k;
  __m512 sums[R][T][SUMS];
  for (auto& rows : sums)
    for (auto& tokens : rows)
      for (auto& sum : tokens) sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < p.k; j += SUMS * STEP) {
    // Past the end of a row the next rows begin, those of the next block.
    const int64_t ahead = j + AHEAD < p.k ? AHEAD : AHEAD + (R - 1) * p.k;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int s = 0; s < SUMS; s++) {
        const auto* at = weight + r * p.k + j + s * STEP;
        if (R == 1) _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T1);
        else _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) Kind::add(sums[r][t][s], at, x + t * p.k + j + s * STEP);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) {
      __m512 sum = sums[r][t][0];
      if (SUMS == 2) sum = _mm512_add_ps(sum, sums[r][t][SUMS - 1]);
      p.y[(token + t) * p.rows + row + r] = Kind::round(_mm512_reduce_add_ps(sum));
    }
}

template <typename Kind, int R>
void rows(const Problem<Kind>& p, int64_t row) {
  int64_t token = 0;
  for (; token + TOKENS <= p.tokens; token += TOKENS) block<Kind, R, TOKENS>(p, row, token);
  if (p.tokens - token == 3) block<Kind, R, 3>(p, row, token);
  if (p.tokens - token == 2) block<Kind, R, 2>(p, row, token);
  if (p.tokens - token == 1) block<Kind, R, 1>(p, row, token);
}

template <typename Kind, int R>
int linear(const void* x, const void* weight, void* y, int64_t tokens, int64_t rows_, int64_t k, ParallelFor run) {
  using Element = typename Kind::Element;
  Problem<Kind> problem{(const Element*)x, (const Element*)weight, (Element*)y, tokens, rows_, k};
  auto task = [](int64_t begin, int64_t end, void* context) {
    const auto& p = *static_cast<Problem<Kind>*>(context);
    for (int64_t i = begin; i < end; i++) rows<Kind, R>(p, i * R);
  };
  return run(0, rows_ / R, 32 / R, task, &problem);
}

}  // namespace

// `[tokens, k]` times `[rows, k]` -> `[tokens, rows]`, `at_a_time` rows, 1 or 4; rows a multiple of 4, k of 64.
extern "C" int linear_bf16(const void* x, const void* w, void* y, int64_t tokens, int64_t rows, int64_t k,
                           int64_t at_a_time, ParallelFor f) {
  return (at_a_time == 1 ? linear<Bf16, 1> : linear<Bf16, 4>)(x, w, y, tokens, rows, k, f);
}

extern "C" int linear_fp32(const void* x, const void* w, void* y, int64_t tokens, int64_t rows, int64_t k,
                           int64_t at_a_time, ParallelFor f) {
  return (at_a_time == 1 ? linear<Fp32, 1> : linear<Fp32, 4>)(x, w, y, tokens, rows, k, f);
}
