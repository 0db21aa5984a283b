// The vectors of a path, `Isa`. It multiplies ROWS by four tokens at a time: as many sums as registers hold. `expand` puts
// the first values, in order, where a bit of the mask is 1, and zeros elsewhere.
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
#include "isa_avx512.h"
#elif ISA_AVX2
#include "isa_avx2.h"
#elif ISA_NEON
#include "isa_neon.h"
#else
#include "isa_portable.h"
#endif
