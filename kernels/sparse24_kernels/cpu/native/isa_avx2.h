// Vectors of the AVX2 path: eight values of sixteen weights.
#pragma once
#include <immintrin.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int VALUES = 8;  // taken at a time, of 2 * VALUES weights
  static constexpr int ROWS = 2;    // read at a time, so that as many sums are independent
  typedef __m256 Floats;
  typedef __m256i Places;

  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats load(const float* values) { return _mm256_loadu_ps(values); }
  static Floats load(const bf16* values) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Floats load(const fp16* values) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)values)); }
  static Floats load(const int8_t* values) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)values)));
  }
  static Floats scaled(Floats v, float scale) { return _mm256_mul_ps(v, _mm256_set1_ps(scale)); }
  // Two bits for each value, and 4 for the second group of each half: a place in eight floats.
  static Places places(const uint8_t* indices) {
    uint16_t word;
    memcpy(&word, indices, 2);
    const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), base = _mm256_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4);
    __m256i bits = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    return _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(3)), base);
  }
  static Floats pick(Places places, const float* x) {
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), places);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + 8), places);
    return _mm256_blend_ps(low, high, 0xf0);
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(Floats v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

}  // namespace
