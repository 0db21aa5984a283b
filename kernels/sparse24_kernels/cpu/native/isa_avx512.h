// Vectors of the AVX-512 paths: sixteen floats.
#pragma once
#include <immintrin.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int LANES = 16;
  static constexpr int ROWS = 2;
  typedef __m512 Floats;

  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static Floats load(const bf16* values) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Floats load(const fp16* values) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)values)); }
  static Floats load(const int8_t* values) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)values)));
  }
  static Floats all(float f) { return _mm512_set1_ps(f); }
  static Floats expand(Floats values, unsigned mask) { return _mm512_maskz_expand_ps(mask, values); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
};

}  // namespace
