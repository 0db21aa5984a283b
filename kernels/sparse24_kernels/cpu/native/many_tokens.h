// A packed weight times many tokens: x lies transposed, so that a vector holds one input of many tokens, and a zero of
// the weight costs nothing at all. Compilers make vectors of any path from the type `Tokens`.
//
// The sum of a row and a token takes the values in their order, by multiplying and adding in fp32.
#pragma once
#include "problem.h"

namespace {

constexpr int WIDTH = VECTOR_BYTES / 4;  // tokens in a vector
typedef float Tokens __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
constexpr int64_t DEPTH = 128;        // inputs that are multiplied before the next row: 4 vectors of each fit in L1
constexpr int64_t CHUNK_ROWS = 256;   // rows whose sums stay in L2
constexpr int64_t ROWS_AHEAD = 8;     // prefetched, because hardware does not foresee the jump to the next row

// Two rows, or one, times N vectors of tokens and the inputs [begin, end). `x` is [k, N * WIDTH], `sums` a row's.
template <class V, int R, int N>
inline void many_rows(const Linear& p, const float* x, float* sums, int64_t row, int64_t begin, int64_t end) {
  Tokens total[R][N];
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) total[r][n] = ((const Tokens*)sums)[r * N + n];
  for (int64_t j = begin; j < end; j += 8)
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
      const V* v = (const V*)p.values + ((row + r) * p.k + j) / 2;
      __builtin_prefetch(v + ROWS_AHEAD * p.k / 2);
      const float scale = sizeof(V) == 1 ? scale_of(p, row + r, j) : 1.0f;
      const unsigned byte = p.indices[((row + r) * p.k + j) / 8];
      const float* eight = x + j * (N * WIDTH);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        float value = to_float(v[i]);
        if (sizeof(V) == 1) value *= scale;
        const Tokens* at = (const Tokens*)(eight + (i / 2 * 4 + (byte >> 2 * i & 3)) * (N * WIDTH));
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) total[r][n] += value * at[n];
      }
    }
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) ((Tokens*)sums)[r * N + n] = total[r][n];
}

struct Many { const Linear& p; float* x; int64_t token; int failed; };

// `COUNT` tokens of x from `many.token` on, as columns of [k, COUNT] in fp32; zeros for those behind the last one.
template <class X, int COUNT>
inline void transpose_tokens(const Many& many, int64_t begin, int64_t end) {
  const int64_t k = many.p.k, count = many.p.tokens - many.token < COUNT ? many.p.tokens - many.token : COUNT;
  const X* x = (const X*)many.p.x + many.token * k;
  for (int64_t j = begin; j < end; j += 8)
    for (int t = 0; t < COUNT; t++)
      for (int i = 0; i < 8; i++) many.x[(j + i) * COUNT + t] = t < count ? to_float(x[t * k + j + i]) : 0.0f;
}

template <class V, int N>
int many_chunk(Many& many) {  // N * WIDTH tokens from many.token on, or as many as there are
  auto transpose = [](int64_t begin, int64_t end, void* opaque) {
    const Many& c = *(const Many*)opaque;
    with_type(c.p, [&](auto type) { return transpose_tokens<decltype(type), N * WIDTH>(c, 8 * begin, 8 * end), 0; });
  };
  auto multiply = [](int64_t begin, int64_t end, void* opaque) {
    Many& c = *(Many*)opaque;
    const Linear& p = c.p;
    Scratch memory(CHUNK_ROWS * N * WIDTH * 4);
    float* sums = (float*)memory.data;
    if (!sums) { c.failed = 1; return; }
    for (int64_t top = begin; top < end; top += CHUNK_ROWS) {
      const int64_t rows = end - top < CHUNK_ROWS ? end - top : CHUNK_ROWS;
      memset(sums, 0, rows * N * WIDTH * 4);
      for (int64_t j = 0; j < p.k; j += DEPTH) {
        const int64_t stop = p.k - j < DEPTH ? p.k : j + DEPTH;
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) many_rows<V, 2, N>(p, c.x, sums + r * N * WIDTH, top + r, j, stop);
        if (r < rows) many_rows<V, 1, N>(p, c.x, sums + r * N * WIDTH, top + r, j, stop);
      }
      for (int64_t t = 0; t < N * WIDTH && c.token + t < p.tokens; t++)
        for (int64_t r = 0; r < rows; r++) write(p, c.token + t, top + r, sums[r * N * WIDTH + t]);
    }
  };
  int status = many.p.parallel_for(0, many.p.k / 8, 128, transpose, &many);
  return status ? status : many.p.parallel_for(0, many.p.rows, ROWS_PER_TASK, multiply, &many);
}

template <class V>
int many_tokens(const Linear& p) {
  Scratch x(p.k * 4 * WIDTH * 4);
  if (!x.data) return 1;
  Many many{p, (float*)x.data, 0, 0};
  int status = 0;
  while (!status && !many.failed && many.token < p.tokens) {
    const int64_t vectors = (p.tokens - many.token + WIDTH - 1) / WIDTH;
    status = vectors >= 4 ? many_chunk<V, 4>(many)
           : vectors == 3 ? many_chunk<V, 3>(many)
           : vectors == 2 ? many_chunk<V, 2>(many)
                          : many_chunk<V, 1>(many);
    many.token += (vectors < 4 ? vectors : 4) * WIDTH;
  }
  return status ? status : many.failed;
}

// y, the dense [rows, k] of a packed weight, with +0 where nothing was stored; V are the values, Y the weight.
template <class V, class Y>
int unpack(const Linear& p) {
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Linear& p = *(const Linear*)opaque;
    for (; row < end; row++) {
      Y* y = (Y*)p.y + row * p.k;
      memset((void*)y, 0, p.k * sizeof(Y));
      for (int64_t j = 0; j < p.k; j += 8) {
        const V* v = (const V*)p.values + (row * p.k + j) / 2;
        const int byte = p.indices[(row * p.k + j) / 8];
        for (int i = 0; i < 4; i++) {
          Y* to = y + j + i / 2 * 4 + (byte >> 2 * i & 3);
          if constexpr (sizeof(V) == 1) from_float(to_float(v[i]) * scale_of(p, row, j), to);
          else *to = v[i];
        }
      }
    }
  }, (void*)&p);
}

}  // namespace
