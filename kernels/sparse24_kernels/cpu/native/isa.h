// The vectors of a path, `Isa`: sixteen floats with AVX-512, eight with AVX2, four with NEON, and four in C++ that any
// compiler takes. It multiplies ROWS by four tokens at a time: as many sums as registers hold. `expand` puts the first
// values, in order, where a bit of the mask is 1, and zeros elsewhere.
#pragma once
#if ISA_AVX512 || ISA_AVX2
#include <immintrin.h>
#elif ISA_NEON
#include <arm_neon.h>
#endif

#include "problem.h"

namespace {

// For each mask of eight, which of the values goes to a place, one byte each; -1 where none does.
struct Ranks {
  int64_t of[256] = {};
  constexpr Ranks() {
    for (int mask = 0; mask < 256; mask++)
      for (int bit = 0, n = 0; bit < 8; bit++) of[mask] |= (int64_t)(uint64_t)(mask >> bit & 1 ? n++ : 255) << 8 * bit;
  }
};

#if ISA_AVX512
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
#elif ISA_AVX2
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
#elif ISA_NEON
struct Isa {
  static constexpr int LANES = 4;
  static constexpr int ROWS = 2;
  typedef float32x4_t Floats;

  static Floats load(const float* values) { return vld1q_f32(values); }
  static Floats load(const bf16* values) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)values), 16));
  }
  static Floats load(const fp16* values) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)values)));
  }
  static Floats load(const int8_t* values) {
    uint32_t four;
    memcpy(&four, values, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  }
  static Floats all(float f) { return vdupq_n_f32(f); }
  static Floats expand(Floats values, unsigned mask) {
    static constexpr Ranks ranks;
    const int8x8_t rank = vreinterpret_s8_u64(vdup_n_u64(ranks.of[mask]));
    const int32x4_t wide = vmovl_s16(vget_low_s16(vmovl_s8(rank)));  // -1 leads outside, and so to zero
    const uint8x16_t bytes = vreinterpretq_u8_s32(vmlaq_n_s32(vdupq_n_s32(0x03020100), wide, 0x04040404));
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(values), bytes));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static float sum(Floats v) { return vaddvq_f32(v); }
};
#else
struct Isa {
  static constexpr int LANES = 4;
  static constexpr int ROWS = 1;
  typedef float Floats __attribute__((vector_size(16)));

  template <class V>
  static Floats load(const V* values) {
    return Floats{to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3])};
  }
  static Floats all(float f) { return Floats{f, f, f, f}; }
  static Floats expand(Floats values, unsigned mask) {
    Floats to = {};
    for (int i = 0, n = 0; i < 4; i++)
      if (mask >> i & 1) to[i] = values[n++];
    return to;
  }
  static Floats fma(Floats a, Floats b, Floats c) { return c + a * b; }
  static float sum(Floats v) { return (v[0] + v[1]) + (v[2] + v[3]); }
};
#endif

}  // namespace
