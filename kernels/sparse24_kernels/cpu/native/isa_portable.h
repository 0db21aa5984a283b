// Vectors of the portable path: four floats, in C++ that every compiler turns into something.
#pragma once
#include "problem.h"

namespace {

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

}  // namespace
