// Vectors of the portable path: four values of eight weights, in C++ that every compiler turns into something.
#pragma once
#include "problem.h"

namespace {

struct Isa {
  static constexpr int VALUES = 4;  // taken at a time, of 2 * VALUES weights
  static constexpr int ROWS = 2;    // read at a time, so that as many sums are independent
  struct Floats { float at[4]; };
  struct Places { uint8_t at[4]; };

  static Floats zero() { return {}; }
  template <class V>
  static Floats load(const V* values) {
    return {{to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3])}};
  }
  static Floats scaled(Floats v, float scale) {
    for (float& f : v.at) f *= scale;
    return v;
  }
  static Places places(const uint8_t* indices) {
    int byte = indices[0];
    return {{uint8_t(byte & 3), uint8_t(byte >> 2 & 3), uint8_t(4 + (byte >> 4 & 3)), uint8_t(4 + (byte >> 6))}};
  }
  static Floats pick(Places places, const float* x) {
    return {{x[places.at[0]], x[places.at[1]], x[places.at[2]], x[places.at[3]]}};
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < 4; i++) c.at[i] += a.at[i] * b.at[i];
    return c;
  }
  static float sum(Floats v) { return (v.at[0] + v.at[1]) + (v.at[2] + v.at[3]); }
};

}  // namespace
