// A packed weight times few tokens: each value is multiplied by the x that its index picks.
//
// Every path has its own vectors (`Isa`), in fp32. Lane i of a row's sum takes the values i, i + VALUES,
// i + 2 VALUES, ... in this order, by fused multiply-add; then the lanes are added. So a result depends neither on how
// many threads there are nor on the other tokens.
#pragma once
#include "problem.h"

namespace {

constexpr int64_t ROWS_PER_TASK = 32;
constexpr int PREFETCH = 2048;

// x in fp32, each token's row padded with zeros to whole steps.
template <class X>
inline void widen(const Linear& p, int64_t padded, float* to) {
  for (int64_t token = 0; token < p.tokens; token++, to += padded) {
    const X* x = (const X*)p.x + token * p.k;
    for (int64_t j = 0; j < p.k; j++) to[j] = to_float(x[j]);
    for (int64_t j = p.k; j < padded; j++) to[j] = 0.0f;
  }
}

template <class V, int R, int T>
inline void few_rows(const Linear& p, const float* x, int64_t padded, int64_t row, int64_t token) {
  constexpr int STEP = 2 * Isa::VALUES;
  const V* values = (const V*)p.values + row * (p.k / 2);
  const uint8_t* indices = p.indices + row * (p.k / 8);
  x += token * padded;
  typename Isa::Floats sums[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[r][t] = Isa::zero();

  auto step = [&](int64_t j, int r, const V* v, const uint8_t* i) __attribute__((always_inline)) {
    typename Isa::Floats weights = Isa::load(v);
    if constexpr (sizeof(V) == 1) weights = Isa::scaled(weights, scale_of(p, row + r, j));
    auto places = Isa::places(i);
    for (int t = 0; t < T; t++) sums[r][t] = Isa::fma(weights, Isa::pick(places, x + t * padded + j), sums[r][t]);
  };

  int64_t j = 0;
  for (; j + STEP <= p.k; j += STEP)
    for (int r = 0; r < R; r++) {
      const V* v = values + r * (p.k / 2) + j / 2;
      __builtin_prefetch((const char*)v + PREFETCH);
      step(j, r, v, indices + r * (p.k / 8) + j / 8);
    }
  if (j < p.k)
    for (int r = 0; r < R; r++) {  // a whole step of a copy, filled up with zeros
      V v[Isa::VALUES] = {};
      uint8_t i[(Isa::VALUES + 3) / 4] = {};
      memcpy(v, values + r * (p.k / 2) + j / 2, (p.k - j) / 2 * sizeof(V));
      memcpy(i, indices + r * (p.k / 8) + j / 8, (p.k - j) / 8);
      step(j, r, v, i);
    }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) write(p, token + t, row + r, Isa::sum(sums[r][t]));
}

template <class V, int R>
inline void few_rows_all_tokens(const Linear& p, const float* x, int64_t padded, int64_t row) {
  int64_t token = 0;
  for (; token + 4 <= p.tokens; token += 4) few_rows<V, R, 4>(p, x, padded, row, token);
  if (token + 2 <= p.tokens) few_rows<V, R, 2>(p, x, padded, row, token), token += 2;
  if (token < p.tokens) few_rows<V, R, 1>(p, x, padded, row, token);
}

template <class V>
int few_tokens(const Linear& p) {
  const int64_t padded = round_up(p.k, 2 * Isa::VALUES);
  Scratch wide(p.tokens * padded * 4);
  if (!wide.data) return 1;
  with_type(p, [&](auto x) { return widen<decltype(x)>(p, padded, (float*)wide.data), 0; });
  struct Context { const Linear& p; const float* x; int64_t padded; } context{p, (const float*)wide.data, padded};
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Context& c = *(const Context*)opaque;
    for (; row + Isa::ROWS <= end; row += Isa::ROWS) few_rows_all_tokens<V, Isa::ROWS>(c.p, c.x, c.padded, row);
    for (; row < end; row++) few_rows_all_tokens<V, 1>(c.p, c.x, c.padded, row);
  }, &context);
}

}  // namespace
