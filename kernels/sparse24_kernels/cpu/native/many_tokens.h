// A packed matrix times many tokens: x lies so that a vector holds one input of many tokens, and a zero of the matrix
// costs nothing at all. Compilers make vectors of any path from the type `Tokens`.
//
// Each value is multiplied with `WIDE` vectors from L1, where a block of x has STEP inputs; sums stay in L2. Blocks
// lie in the order in which they are read. The sum of a row and a token takes the values in their order, by multiplying
// and adding in fp32, for any number of tokens or threads.
#pragma once
#include "problem.h"

namespace {

constexpr int WIDTH = Isa::LANES;  // tokens in a vector
typedef float Tokens __attribute__((vector_size(4 * WIDTH)));
constexpr int VECTORS = 8;  // whose sums are in registers: of one row, or of several
// The vectors of a tile. AVX2 has registers for 12, and with 8 a sum would have to be ready in time every time.
constexpr int WIDE = WIDTH == 8 ? 12 : VECTORS;
constexpr int64_t TILE = WIDE * WIDTH;
constexpr int64_t CHUNK = 128;  // rows whose sums stay in L2
constexpr int64_t MOST_TOKENS = (512 + TILE - 1) / TILE * TILE;  // kept in blocks: for more, all starts again

// `count` tokens from `token` on. The block of a step and a tile is [inputs of the step, width of the tile]; the blocks
// of a step lie one behind another.
struct Many { const Linear& p; float* x; int64_t token, count, width; int failed; };

// Vectors in the tile that starts with a token: WIDE, or a power of two, so that VECTORS sums are those of whole rows.
inline int vectors_of(const Many& c, int64_t tile) {
  if (c.count - tile > VECTORS * WIDTH) return WIDE;
  int vectors = VECTORS;
  while (vectors > 1 && vectors / 2 * WIDTH >= c.count - tile) vectors /= 2;
  return vectors;
}

inline int64_t inputs_of(const Linear& p, int64_t j) { return p.k - j < STEP ? p.k - j : STEP; }

// to[j][i] = f(j, from[i][j]) of a square: whole lines of fp32. Constant sizes make it twice as fast.
constexpr int64_t SIDE = 16;
template <class X, class Y, class F>
inline __attribute__((always_inline)) void transpose(const X* from, int64_t stride, int64_t rows, int64_t columns, Y* to,
                                                     int64_t to_stride, const F& f) {
  float square[SIDE][SIDE];
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) square[i][j] = to_float(from[i * stride + j]);
  for (int64_t j = 0; j < columns; j++)
    for (int64_t i = 0; i < rows; i++) from_float(f(i, square[i][j]), to + j * to_stride + i);
}

template <class X, class Y, class F>
inline void transpose_all(const X* from, int64_t stride, int64_t rows, int64_t columns, Y* to, int64_t to_stride, const F& f) {
  for (int64_t i = 0; i < rows; i += SIDE)
    for (int64_t j = 0; j < columns; j += SIDE) {
      const X* at = from + i * stride + j;
      // Hardware does not foresee the next square either.
      for (int64_t row = SIDE; row < 2 * SIDE; row++) __builtin_prefetch(at + row * stride, 0, 2);
      const auto of_row = [&](int64_t row, float x) { return f(i + row, x); };
      if (rows - i >= SIDE && columns - j >= SIDE)
        transpose(at, stride, SIDE, SIDE, to + j * to_stride + i, to_stride, of_row);
      else
        transpose(at, stride, rows - i < SIDE ? rows - i : SIDE, columns - j < SIDE ? columns - j : SIDE,
                  to + j * to_stride + i, to_stride, of_row);
    }
}

// The block of a tile, which starts with an input, from x [tokens, k], or of a product [k, tokens].
template <class X>
inline void pack_block(const Many& c, int64_t j, int64_t tile) {
  const int64_t size = inputs_of(c.p, j), width = vectors_of(c, tile) * WIDTH;
  const int64_t count = c.count - tile < width ? c.count - tile : width, first = c.token + tile;
  float* to = c.x + j * c.width + tile * size;
  if (count < width) memset(to, 0, size * width * 4);
  if (c.p.is_product) {
    for (int64_t i = 0; i < size; i++)
      for (int64_t t = 0; t < count; t++) to[i * width + t] = to_float(((const X*)c.p.x)[(j + i) * c.p.tokens + first + t]);
    return;
  }
  transpose_all((const X*)c.p.x + first * c.p.k + j, c.p.k, count, size, to, width, [](int64_t, float x) { return x; });
}

inline void pack_task(int64_t step, int64_t end, void* opaque) {
  const Many& c = *(const Many*)opaque;
  with_dtype(c.p.dtype, [&](auto type) {
    for (; step < end; step++)
      for (int64_t tile = 0; tile < c.count; tile += TILE) pack_block<decltype(type)>(c, step * STEP, tile);
    return 0;
  });
}

template <int N> constexpr int ROWS_AT_ONCE = N > VECTORS ? 1 : VECTORS / N;

// These rows times N vectors of tokens. Rows have `count` values, their places in the block, and sums.
template <int N>
inline void multiply_rows(const float* x, const float* values, const uint8_t* places, int64_t count, float* sums) {
  constexpr int R = ROWS_AT_ONCE<N>;
  Tokens total[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 12
    for (int n = 0; n < N; n++) total[r][n] = ((const Tokens*)sums)[r * N + n];
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Tokens* at = (const Tokens*)(x + (uint64_t)places[r * count + i] * (N * WIDTH));
      const float value = values[r * count + i];
#pragma GCC unroll 12
      for (int n = 0; n < N; n++) total[r][n] += value * at[n];
    }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 12
    for (int n = 0; n < N; n++) ((Tokens*)sums)[r * N + n] = total[r][n];
}

template <int N>
inline void multiply_tile(const float* x, const float* values, const uint8_t* places, int64_t count, int64_t rows,
                          float* sums) {
  constexpr int R = ROWS_AT_ONCE<N>;
  for (int64_t row = 0; row < rows; row += R) {
    // Hardware does not foresee the next block, whose lines are fetched while this one is multiplied.
    for (int64_t line = 0; line < R * STEP * TILE / CHUNK; line += 16)
      __builtin_prefetch(x + STEP * TILE + row * (STEP * TILE / CHUNK) + line, 0, 2);
    multiply_rows<N>(x, values + row * count, places + row * count, count, sums + row * N * WIDTH);
  }
}

template <class Y>
inline void write_tile(const Many& c, int64_t tile, int64_t top, int64_t rows, const float* sums) {
  const int64_t width = vectors_of(c, tile) * WIDTH, first = c.token + tile;
  const int64_t count = c.count - tile < width ? c.count - tile : width;
  if (c.p.is_product) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < count; t++) from_float(sums[r * width + t], (Y*)c.p.y + (top + r) * c.p.tokens + first + t);
    return;
  }
  float bias[CHUNK] = {};
  for (int64_t r = 0; c.p.bias && r < rows; r++) bias[r] = to_float(((const Y*)c.p.bias)[top + r]);
  transpose_all(sums, width, rows, count, (Y*)c.p.y + first * c.p.rows + top, c.p.rows,
                [&](int64_t row, float sum) { return sum + bias[row]; });
}

// What a step's values are multiplied from: fp32, and their places, of up to CHUNK rows; zeros fill up the last VECTORS.
struct Block {
  float values[CHUNK * STEP];
  uint8_t places[CHUNK * STEP + STEP + 8];
};

template <class V>
inline void decode(const Linear& p, int64_t top, int64_t rows, int64_t j, Block& block) {
  const int64_t size = inputs_of(p, j), count = values_of(p, size);
  for (int64_t r = 0; r < rows; r++) {
    const V* values = (const V*)p.values + (top + r) * values_of(p, p.k) + values_of(p, j);
    const float scale = sizeof(V) == 1 ? scale_of(p, top + r, j) : 1.0f;
    memset(block.places + r * count, 0, count);  // a damaged mask has fewer
    (p.is_24 ? find_places<true> : find_places<false>)(p.mask + ((top + r) * p.k + j) / 8, size / 8, block.places + r * count);
    for (int64_t i = 0; i < count; i++) block.values[r * count + i] = to_float(values[i]) * scale;
    for (int64_t ahead = count; ahead < 2 * count; ahead += 64 / sizeof(V)) __builtin_prefetch(values + ahead, 0, 2);
  }
  const int64_t missing = round_up(rows, VECTORS) - rows;
  memset(block.places + rows * count, 0, missing * count);
  memset((void*)(block.values + rows * count), 0, missing * count * 4);
}

template <class V>
void multiply_task(int64_t begin, int64_t end, void* opaque) {
  Many& c = *(Many*)opaque;
  Scratch memory(sizeof(Block) + CHUNK * c.width * 4);
  if (!memory.data) { __atomic_store_n(&c.failed, 1, __ATOMIC_RELAXED); return; }
  Block& block = *(Block*)((char*)memory.data + CHUNK * c.width * 4);
  float* sums = (float*)memory.data;
  for (int64_t top = begin; top < end; top += CHUNK) {
    const int64_t rows = end - top < CHUNK ? end - top : CHUNK;
    memset(sums, 0, CHUNK * c.width * 4);
    for (int64_t j = 0; j < c.p.k; j += STEP) {
      const int64_t size = inputs_of(c.p, j), count = values_of(c.p, size);
      decode<V>(c.p, top, rows, j, block);
      for (int64_t tile = 0; tile < c.count; tile += TILE) {
        const int n = vectors_of(c, tile);
        auto multiply = n == WIDE ? multiply_tile<WIDE> : n == 8 ? multiply_tile<8> : n == 4 ? multiply_tile<4>
                      : n == 2    ? multiply_tile<2> : multiply_tile<1>;
        multiply(c.x + j * c.width + tile * size, block.values, block.places, count, rows, sums + tile * CHUNK);
      }
    }
    with_dtype(c.p.dtype, [&](auto type) {
      for (int64_t tile = 0; tile < c.count; tile += TILE) write_tile<decltype(type)>(c, tile, top, rows, sums + tile * CHUNK);
      return 0;
    });
  }
}

template <class V>
int many_tokens(const Linear& p) {
  Many many{p, nullptr, 0, p.tokens < MOST_TOKENS ? p.tokens : MOST_TOKENS, 0, 0};
  Scratch x(p.k * round_up(many.count, TILE) * 4);
  if (!x.data) return 1;
  many.x = (float*)x.data;
  int status = 0;
  for (; !status && !many.failed && many.token < p.tokens; many.token += MOST_TOKENS) {
    many.count = p.tokens - many.token < MOST_TOKENS ? p.tokens - many.token : MOST_TOKENS;
    const int64_t last = (many.count - 1) / TILE * TILE;
    many.width = last + vectors_of(many, last) * WIDTH;
    status = p.parallel_for(0, (p.k + STEP - 1) / STEP, 1, pack_task, &many);
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
