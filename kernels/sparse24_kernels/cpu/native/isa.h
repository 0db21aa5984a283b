// The vectors of a path.
#pragma once
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

}  // namespace

#if ISA_AVX512
#define VECTOR_BYTES 64
#include "isa_avx512.h"
#elif ISA_AVX2
#define VECTOR_BYTES 32
#include "isa_avx2.h"
#elif ISA_NEON
#define VECTOR_BYTES 16
#include "isa_neon.h"
#else
#define VECTOR_BYTES 16
#include "isa_portable.h"
#endif
