// A packed weight times few tokens: the kept values are put where the mask has ones, and multiplied.
//
// Every path has its own vectors (`Isa`), in fp32. Lane i of a row's two sums takes the weights i, i + 2 LANES, ... and
// i + LANES, i + 3 LANES, ... in this order, by fused multiply-add; then all are added. So a result depends neither on
// how many threads there are nor on the other tokens.
#pragma once
#include "problem.h"

namespace {

constexpr int PREFETCH = 4096;  // bytes of values ahead of what is read
constexpr int64_t L1_BYTES = 32 * 1024;

// x in fp32, each token's row padded with zeros to whole steps.
template <class X>
inline void widen(const Linear& p, int64_t padded, float* to) {
  for (int64_t token = 0; token < p.tokens; token++, to += padded) {
    const X* x = (const X*)p.x + token * p.k;
    for (int64_t j = 0; j < p.k; j++) to[j] = to_float(x[j]);
    for (int64_t j = p.k; j < padded; j++) to[j] = 0.0f;
  }
}

// R rows times T tokens.
template <class V, int R, int T>
inline void few_rows(const Linear& p, const float* x, int64_t padded, int64_t row, int64_t token) {
  constexpr int SUMS = 2;  // of a row and a token: the LANES take turns, so that more instructions are independent
  const int64_t size = values_of(p, p.k);
  const uint8_t* mask = p.mask + row * (p.k / 8);
  x += token * padded;
  typename Isa::Floats sums[R][T][SUMS];
  for (auto& tokens : sums)
    for (auto& apart : tokens)
      for (auto& sum : apart) sum = typename Isa::Floats{};

  auto step = [&](int64_t j, int r, const V* v, const uint8_t* m) __attribute__((always_inline)) {
    constexpr bool SCALED = sizeof(V) == 1;
    uint64_t bits = bits_of(m);
    typename Isa::Floats some[T][SUMS];
    for (int t = 0; t < T; t++)
      for (int s = 0; s < SUMS; s++) some[t][s] = SCALED ? typename Isa::Floats{} : sums[r][t][s];
#pragma GCC unroll 16
    for (int i = 0; i < STEP / Isa::LANES; i++, bits >>= Isa::LANES) {
      const unsigned kept = bits & ((1u << Isa::LANES) - 1);
      const typename Isa::Floats weights = Isa::expand(Isa::load(v), kept);
      for (int t = 0; t < T; t++)
        some[t][i % SUMS] = Isa::fma(weights, Isa::load(x + t * padded + j + i * Isa::LANES), some[t][i % SUMS]);
      v += __builtin_popcount(kept);
    }
    const typename Isa::Floats scale = Isa::all(SCALED ? scale_of(p, row + r, j) : 1.0f);
    for (int t = 0; t < T; t++)
      for (int s = 0; s < SUMS; s++) sums[r][t][s] = SCALED ? Isa::fma(some[t][s], scale, sums[r][t][s]) : some[t][s];
  };

  const int64_t whole = whole_steps(p, row + R - 1) * STEP;
  const V* v = (const V*)p.values + row * size;
  int64_t j = 0;
  for (; j < whole; j += STEP, v += p.each)
    for (int r = 0; r < R; r++) {
      for (int64_t ahead = 0; ahead < p.each; ahead += 64 / sizeof(V))
        __builtin_prefetch((const char*)(v + r * size + ahead) + PREFETCH, 0, 2);
      __builtin_prefetch(mask + r * (p.k / 8) + j / 8 + PREFETCH / 16, 0, 2);
      step(j, r, v + r * size, mask + r * (p.k / 8) + j / 8);
    }
  for (; j < p.k; j += STEP)
    for (int r = 0; r < R; r++) {
      const Copied<V, STEP> copied(p, row + r, j);
      step(j, r, copied.values, copied.mask);
    }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) {
      typename Isa::Floats total = sums[r][t][0];
      for (int s = 1; s < SUMS; s++) total = total + sums[r][t][s];
      write(p, token + t, row + r, Isa::sum(total));
    }
}

template <class V, int R>
inline void few_rows_all_tokens(const Linear& p, const float* x, int64_t padded, int64_t row) {
  by_tokens(p.tokens, [&](auto count, int64_t token) { few_rows<V, R, count.value>(p, x, padded, row, token); });
}

template <class V>
int few_tokens(const Linear& p) {
  const int64_t padded = round_up(p.k, STEP);
  Scratch wide(p.tokens * padded * 4);
  if (!wide.data) return 1;
  with_dtype(p.dtype, [&](auto x) { return widen<decltype(x)>(p, padded, (float*)wide.data), 0; });
  struct Context { const Linear& p; const float* x; int64_t padded; } context{p, (const float*)wide.data, padded};
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Context& c = *(const Context*)opaque;
    // Rows that share what is read of x pay off where that does not fit in L1.
    if (c.p.tokens >= 4 && c.p.tokens * c.padded * 4 > L1_BYTES)
      for (; row + Isa::ROWS <= end; row += Isa::ROWS) few_rows_all_tokens<V, Isa::ROWS>(c.p, c.x, c.padded, row);
    for (; row < end; row++) few_rows_all_tokens<V, 1>(c.p, c.x, c.padded, row);
  }, &context);
}

}  // namespace
