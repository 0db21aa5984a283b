// Vectors of the AVX2 path: eight floats.
#pragma once
#include <immintrin.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int LANES = 8;
  static constexpr int ROWS = 1;
  typedef __m256 Floats;

  static Floats load(const float* values) { return _mm256_loadu_ps(values); }
  static Floats load(const bf16* values) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Floats load(const fp16* values) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)values)); }
  static Floats load(const int8_t* values) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)values)));
  }
  static Floats all(float f) { return _mm256_set1_ps(f); }
  static Floats expand(Floats values, unsigned mask) {
    static constexpr Ranks ranks;
    const __m256i rank = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(ranks.of[mask]));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values, rank), Floats{}, _mm256_castsi256_ps(rank));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(Floats v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

}  // namespace
