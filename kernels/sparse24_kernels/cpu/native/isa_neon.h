// Vectors of the NEON path: four values of eight weights.
#pragma once
#include <arm_neon.h>

#include "problem.h"

namespace {

struct Isa {
  static constexpr int VALUES = 4;  // taken at a time, of 2 * VALUES weights
  static constexpr int ROWS = 4;    // read at a time, so that as many sums are independent
  typedef float32x4_t Floats;
  typedef uint8x16_t Places;

  static Floats zero() { return vdupq_n_f32(0); }
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
  static Floats scaled(Floats v, float scale) { return vmulq_n_f32(v, scale); }
  // Two bits for each value, and 4 for those of the second group, as the places of four bytes in thirty-two.
  static Places places(const uint8_t* indices) {
    const int32x4_t shifts = {0, -2, -4, -6};
    const uint32x4_t base = {0x03020100, 0x03020100, 0x13121110, 0x13121110};
    uint32x4_t place = vandq_u32(vshlq_u32(vdupq_n_u32(indices[0]), shifts), vdupq_n_u32(3));
    return vreinterpretq_u8_u32(vmlaq_n_u32(base, place, 0x04040404));
  }
  static Floats pick(Places places, const float* x) {
    uint8x16x2_t eight = {{vreinterpretq_u8_f32(vld1q_f32(x)), vreinterpretq_u8_f32(vld1q_f32(x + 4))}};
    return vreinterpretq_f32_u8(vqtbl2q_u8(eight, places));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static float sum(Floats v) { return vaddvq_f32(v); }
};

}  // namespace
