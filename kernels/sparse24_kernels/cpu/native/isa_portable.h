// Vectors of the portable path: four floats, in C++ that every compiler turns into something.
#pragma once
#include "problem.h"

namespace {

struct Isa {
  static constexpr int LANES = 4;
  static constexpr int ROWS = 1;  // multiplied at a time by four tokens: as many sums as registers hold
  struct Floats { float at[4]; };

  static Floats zero() { return {}; }
  template <class V>
  static Floats load(const V* values) {
    return {{to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3])}};
  }
  static Floats all(float f) { return {{f, f, f, f}}; }
  static Floats add(Floats a, Floats b) {
    for (int i = 0; i < 4; i++) a.at[i] += b.at[i];
    return a;
  }
  // The first values, in order, where a bit of the mask is 1; zeros elsewhere.
  static Floats expand(Floats values, unsigned mask) {
    Floats to = {};
    for (int i = 0, n = 0; i < 4; i++)
      if (mask >> i & 1) to.at[i] = values.at[n++];
    return to;
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < 4; i++) c.at[i] += a.at[i] * b.at[i];
    return c;
  }
  static float sum(Floats v) { return (v.at[0] + v.at[1]) + (v.at[2] + v.at[3]); }
};

}  // namespace
