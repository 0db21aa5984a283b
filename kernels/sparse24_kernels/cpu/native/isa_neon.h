// Vectors of the NEON path: four floats.
#pragma once
#include <arm_neon.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int LANES = 4;
  static constexpr int ROWS = 2;
  typedef float32x4_t Floats;

  static Floats load(const float* values) { return vld1q_f32(values); }
  static Floats load(const bf16* values) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)values), 16));
  }
  static Floats load(const fp16* values) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)values))); }
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

}  // namespace
