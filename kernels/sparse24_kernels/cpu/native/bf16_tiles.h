// What the paths with instructions for bf16 share for many tokens: x as tiles, and tiles of sums.
#pragma once
#include <immintrin.h>

#include "problem.h"

namespace {

constexpr int64_t TILE = 256;        // 32-bit words in a tile: 16 rows of 64 bytes
constexpr int64_t PASS = 4;          // blocks of 16 tokens at a time: for more, the weight is read again
constexpr int64_t MOST_BLOCKS = 32;  // whose x is kept as tiles: for more, all starts again

// int8 values times their scale, rounded to bf16.
inline __m512i rounded(__m256i bytes, float scale) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  const __m512 factor = _mm512_set1_ps(scale);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, factor), _mm512_mul_ps(low, factor));
}

// The bias of 16 rows, or of `some` of them.
inline __m512 bias_of(const Linear& p, int64_t row, __mmask16 some) {
  const __m256i bias = _mm256_maskz_loadu_epi16(some, (const bf16*)p.bias + row);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16));
}

// Transposes 16 x 16 words.
inline void transpose(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)  // rows[i + j] has the columns j, j + 4, j + 8, j + 12 of four rows
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}

// x of 16 tokens as the second operand's tile: pairs of inputs downwards, tokens to the right.
inline void pair_tiles(const Linear& p, int64_t token, int64_t step, uint32_t* tile) {
  const int64_t left = p.k - step * 32;
  const __mmask32 read = left >= 32 ? ~0u : (1u << left) - 1;
  __m512i rows[16];
  for (int t = 0; t < 16; t++)
    rows[t] = token + t < p.tokens ? _mm512_maskz_loadu_epi16(read, (const bf16*)p.x + (token + t) * p.k + step * 32)
                                   : _mm512_setzero_si512();
  transpose(rows);
  for (int i = 0; i < 16; i++) _mm512_store_si512(tile + i * 16, rows[i]);
}

// A tile of sums, rows downwards, to y, tokens downwards; of `rows` rows and `tokens` tokens.
inline void write_tile(const Linear& p, const float* tile, int64_t row, int64_t rows, int64_t token, int64_t tokens) {
  const __mmask16 some = rows >= 16 ? 0xffff : (1u << rows) - 1;
  const __m512 bias = p.bias ? bias_of(p, row, some) : _mm512_setzero_ps();
  __m512i sums[16];
  for (int r = 0; r < 16; r++) sums[r] = _mm512_load_si512(tile + r * 16);
  transpose(sums);
  for (int64_t t = 0; t < 16 && t < tokens; t++) {
    __m256i y = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_castsi512_ps(sums[t]), bias));
    _mm256_mask_storeu_epi16((bf16*)p.y + (token + t) * p.rows + row, some, y);
  }
}

// `blocks` blocks of 16 tokens from `token` on; x has their tiles, a block's after those of the block before.
struct Many { const Linear& p; uint32_t* x; int64_t token, blocks; };

void pair_task(int64_t begin, int64_t end, void* opaque) {
  const Many& c = *(const Many*)opaque;
  const int64_t steps = (c.p.k + 31) / 32;
  for (int64_t block = 0; block < c.blocks; block++)
    for (int64_t step = begin; step < end; step++)
      pair_tiles(c.p, c.token + block * 16, step, c.x + (block * steps + step) * TILE);
}

// `multiply` gets blocks of 16 rows, `grain` or more at a time.
int many_tokens(const Linear& p, Task multiply, int64_t grain) {
  const int64_t steps = (p.k + 31) / 32, all = (p.tokens + 15) / 16, most = all < MOST_BLOCKS ? all : MOST_BLOCKS;
  Scratch x(most * steps * TILE * 4);
  if (!x.data) return 1;
  Many many{p, (uint32_t*)x.data, 0, 0};
  int status = 0;
  for (int64_t block = 0; !status && block < all; block += most) {
    many.token = block * 16, many.blocks = all - block < most ? all - block : most;
    status = p.parallel_for(0, steps, 32, pair_task, &many);
    if (!status) status = p.parallel_for(0, (p.rows + 15) / 16, grain, multiply, &many);
  }
  return status;
}

}  // namespace
