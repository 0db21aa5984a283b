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
constexpr int64_t MOST_TOKENS = 512;  // whose x is kept, transposed: for more, all starts again
constexpr int64_t ROWS_AHEAD = 8;     // prefetched, because hardware does not foresee the jump to the next row

// Two rows, or one, times N vectors of tokens and the inputs [begin, end). `x` is [k, N * WIDTH], `sums` a row's.
template <class V, int R, int N>
inline void many_rows(const Linear& p, const float* x, float* sums, int64_t row, int64_t begin, int64_t end) {
  Tokens total[R][N];
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) total[r][n] = ((const Tokens*)sums)[r * N + n];
  const int64_t size = values_of(p, p.k), count = values_of(p, end - begin);
  const V* values = (const V*)p.values + row * size + values_of(p, begin);
  uint8_t places[R][DEPTH + 8] = {};
  float scales[R];
  for (int r = 0; r < R; r++) {
    find_places(p.mask + ((row + r) * p.k + begin) / 8, (end - begin) / 8, places[r]);
    scales[r] = sizeof(V) == 1 ? scale_of(p, row + r, begin) : 1.0f;
    for (int64_t ahead = 0; ahead < count; ahead += 64 / sizeof(V))
      __builtin_prefetch(values + (r + ROWS_AHEAD) * size + ahead);
  }
  x += begin * (N * WIDTH);
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
      float value = to_float(values[r * size + i]);
      if (sizeof(V) == 1) value *= scales[r];
      const Tokens* at = (const Tokens*)(x + places[r][i] * (N * WIDTH));
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) total[r][n] += value * at[n];
    }
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) ((Tokens*)sums)[r * N + n] = total[r][n];
}

// `count` tokens from `token` on, in parts of 4 vectors; the last part has as many vectors as it needs. x of a part is
// [k, its vectors * WIDTH], and starts at x + k * the tokens before it.
struct Many { const Linear& p; float* x; int64_t token, count; int failed; };

inline int64_t vectors_of(const Many& c, int64_t part) {
  const int64_t left = (c.count - part + WIDTH - 1) / WIDTH;
  return left < 4 ? left : 4;
}

template <class X>
inline void transpose_part(const Many& c, int64_t part, int64_t begin, int64_t end) {
  const int64_t k = c.p.k, columns = vectors_of(c, part) * WIDTH;
  const X* from = (const X*)c.p.x + (c.token + part) * k;
  float* to = c.x + part * k;
  for (int64_t j = begin; j < end; j += 8)
    for (int64_t t = 0; t < columns; t++)
      for (int i = 0; i < 8; i++) to[(j + i) * columns + t] = part + t < c.count ? to_float(from[t * k + j + i]) : 0.0f;
}

inline void transpose_task(int64_t begin, int64_t end, void* opaque) {
  const Many& c = *(const Many*)opaque;
  with_type(c.p, [&](auto type) {
    for (int64_t part = 0; part < c.count; part += 4 * WIDTH) transpose_part<decltype(type)>(c, part, 8 * begin, 8 * end);
    return 0;
  });
}

template <class V, int N>
inline void multiply_part(const Many& c, int64_t part, int64_t top, int64_t rows, float* sums) {
  const Linear& p = c.p;
  const float* x = c.x + part * p.k;
  memset(sums, 0, rows * N * WIDTH * 4);
  for (int64_t j = 0; j < p.k; j += DEPTH) {
    const int64_t stop = p.k - j < DEPTH ? p.k : j + DEPTH;
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) many_rows<V, 2, N>(p, x, sums + r * N * WIDTH, top + r, j, stop);
    if (r < rows) many_rows<V, 1, N>(p, x, sums + r * N * WIDTH, top + r, j, stop);
  }
  for (int64_t t = 0; t < N * WIDTH && part + t < c.count; t++)
    for (int64_t r = 0; r < rows; r++) write(p, c.token + part + t, top + r, sums[r * N * WIDTH + t]);
}

template <class V>
void multiply_task(int64_t begin, int64_t end, void* opaque) {
  Many& c = *(Many*)opaque;
  Scratch memory(CHUNK_ROWS * 4 * WIDTH * 4);
  float* sums = (float*)memory.data;
  if (!sums) { __atomic_store_n(&c.failed, 1, __ATOMIC_RELAXED); return; }
  for (int64_t top = begin; top < end; top += CHUNK_ROWS) {
    const int64_t rows = end - top < CHUNK_ROWS ? end - top : CHUNK_ROWS;
    for (int64_t part = 0; part < c.count; part += 4 * WIDTH) {
      const int64_t n = vectors_of(c, part);
      auto multiply = n == 4 ? multiply_part<V, 4> : n == 3 ? multiply_part<V, 3>
                    : n == 2 ? multiply_part<V, 2> : multiply_part<V, 1>;
      multiply(c, part, top, rows, sums);
    }
  }
}

template <class V>
int many_tokens(const Linear& p) {
  const int64_t most = p.tokens < MOST_TOKENS ? round_up(p.tokens, WIDTH) : MOST_TOKENS;
  Scratch x(p.k * most * 4);
  if (!x.data) return 1;
  Many many{p, (float*)x.data, 0, 0, 0};
  int status = 0;
  for (; !status && !many.failed && many.token < p.tokens; many.token += MOST_TOKENS) {
    many.count = p.tokens - many.token < MOST_TOKENS ? p.tokens - many.token : MOST_TOKENS;
    status = p.parallel_for(0, p.k / 8, 128, transpose_task, &many);
    if (!status) status = p.parallel_for(0, p.rows, ROWS_PER_TASK, multiply_task<V>, &many);
  }
  return status ? status : many.failed;
}

// y, the dense [rows, k] of a packed weight, with +0 where nothing was stored; V are the values, Y the weight.
template <class V, class Y>
int unpack(const Linear& p) {
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Linear& p = *(const Linear*)opaque;
    for (; row < end; row++) {
      const V* v = (const V*)p.values + row * values_of(p, p.k);
      Y* y = (Y*)p.y + row * p.k;
      memset((void*)y, 0, p.k * sizeof(Y));
      for (int64_t j = 0; j < p.k; j += STEP) {
        const int64_t size = p.k - j < STEP ? p.k - j : STEP;
        uint8_t places[STEP + 8] = {};
        find_places(p.mask + (row * p.k + j) / 8, size / 8, places);
        for (int64_t i = 0; i < values_of(p, size); i++, v++) {
          if constexpr (sizeof(V) == 1) from_float(to_float(*v) * scale_of(p, row, j), y + j + places[i]);
          else y[j + places[i]] = *v;
        }
      }
    }
  }, (void*)&p);
}

}  // namespace
