// Vectors of the AVX-512 paths: sixteen values of thirty-two weights.
#pragma once
#include <immintrin.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int VALUES = 16;  // taken at a time, of 2 * VALUES weights
  static constexpr int ROWS = 4;     // read at a time, so that as many sums are independent
  typedef __m512 Floats;
  typedef __m512i Places;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static Floats load(const bf16* values) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Floats load(const fp16* values) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)values)); }
  static Floats load(const int8_t* values) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)values)));
  }
  static Floats scaled(Floats v, float scale) { return _mm512_mul_ps(v, _mm512_set1_ps(scale)); }
  // Two bits for each value, and four times the number of its group: a place in thirty-two floats.
  static Places places(const uint8_t* indices) {
    int32_t word;
    memcpy(&word, indices, 4);
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i base = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    __m512i bits = _mm512_srlv_epi32(_mm512_set1_epi32(word), shifts);
    return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(3), base, 0xea);  // (bits & 3) | base
  }
  static Floats pick(Places places, const float* x) {
    return _mm512_permutex2var_ps(_mm512_loadu_ps(x), places, _mm512_loadu_ps(x + 16));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
};

}  // namespace
