// A packed 2:4 weight times many tokens, in bf16, by `vdpbf16ps`: a lane is a token, and one instruction multiplies the two
// values of a group of four by the two inputs that they belong to. A dense weight takes two.
//
// Two of four inputs can be paired in six ways. x lies in L1 as all six, and the mask says which is read. int8 values
// are rounded to bf16 with their scale. A sum takes the inputs in their order, in fp32, two at a time.
#pragma once
#include "bf16_tiles.h"

namespace {

constexpr int64_t DEPTH = 64;        // inputs that are multiplied before the next row: their pairs fill 24 kB of L1
constexpr int64_t CHUNK_ROWS = 256;  // rows whose sums stay in L2
constexpr int64_t ROWS_AHEAD = 16;   // prefetched, because hardware does not foresee the jump to the next row
constexpr int PAIRS = 6;             // (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)

// Where the pair lies that the mask of a group names; masks that no packed weight has name one as well.
template <int N>
struct Places {
  uint16_t of[16] = {};
  constexpr Places() {
    constexpr int named[PAIRS] = {3, 5, 9, 6, 10, 12};
    for (int pair = 0; pair < PAIRS; pair++) of[named[pair]] = pair * N * 64;
  }
};

// All pairs of `tiles` tiles of x in N blocks, which are `block` words apart: N vectors of each, group by group.
template <int N>
inline void pair_up(const uint32_t* x, int64_t block, int64_t tiles, uint32_t* to) {
  constexpr __mmask32 odd = 0xaaaaaaaa;
  for (int64_t group = 0; group < tiles * 8; group++, x += 32, to += PAIRS * N * 16)
    for (int n = 0; n < N; n++) {
      const __m512i a = _mm512_load_si512(x + n * block), b = _mm512_load_si512(x + n * block + 16);
      const __m512i a1 = _mm512_srli_epi32(a, 16), b0 = _mm512_slli_epi32(b, 16);
      const __m512i pairs[PAIRS] = {a, _mm512_mask_blend_epi16(odd, a, b0), _mm512_mask_blend_epi16(odd, a, b),
                                    _mm512_mask_blend_epi16(odd, a1, b0), _mm512_mask_blend_epi16(odd, a1, b), b};
      for (int pair = 0; pair < PAIRS; pair++) _mm512_store_si512(to + (pair * N + n) * 16, pairs[pair]);
    }
}

// R rows times N blocks of 16 tokens and some groups of four inputs. Rows are `stride` values apart, and their masks
// `k / 8` bytes; the sums of a block are CHUNK_ROWS * 16 behind those of the block before.
template <int R, int N>
inline void multiply_groups(const bf16* values, int64_t stride, const uint8_t* mask, int64_t k, int64_t groups,
                            const uint32_t* pairs, float* sums) {
  static constexpr Places<N> places;
  __m512 total[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) total[r][n] = _mm512_load_ps(sums + (n * CHUNK_ROWS + r) * 16);
  const char* x = (const char*)pairs;
  for (int64_t g = 0; g < groups; g += 2, x += 2 * PAIRS * N * 64)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const unsigned byte = mask[r * (k / 8) + g / 2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        int32_t two;
        memcpy(&two, values + r * stride + 2 * (g + half), 4);
        const char* at = x + half * PAIRS * N * 64 + places.of[half ? byte >> 4 : byte & 15];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
          total[r][n] = _mm512_dpbf16_ps(total[r][n], (__m512bh)_mm512_load_si512(at + n * 64),
                                         (__m512bh)_mm512_set1_epi32(two));
      }
    }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) _mm512_store_ps(sums + (n * CHUNK_ROWS + r) * 16, total[r][n]);
}

// R rows from `row` on times N blocks and the inputs [j, j + size), at most DEPTH.
template <class V, int R, int N>
inline void multiply_rows(const Linear& p, int64_t row, int64_t j, int64_t size, const uint32_t* pairs, float* sums) {
  const V* values = (const V*)p.values + (row * p.k + j) / 2;
  const uint8_t* mask = p.mask + (row * p.k + j) / 8;
  for (int r = 0; r < R; r++) {
    __builtin_prefetch(values + (r + ROWS_AHEAD) * (p.k / 2));
    __builtin_prefetch(values + (r + ROWS_AHEAD) * (p.k / 2) + DEPTH / 2 - 1);  // rows begin anywhere in a line
    __builtin_prefetch(mask + (r + ROWS_AHEAD) * (p.k / 8));
  }
  if constexpr (sizeof(V) == 2) {
    multiply_groups<R, N>(values, p.k / 2, mask, p.k, size / 4, pairs, sums);
  } else {
    alignas(64) bf16 scaled[R][DEPTH / 2];
    const __mmask32 read = size < DEPTH ? (1u << size / 2) - 1 : ~0u;
    for (int r = 0; r < R; r++) {
      const __m256i bytes = _mm256_maskz_loadu_epi8(read, values + r * (p.k / 2));
      _mm512_store_si512(scaled[r], rounded(bytes, scale_of(p, row + r, j)));
    }
    multiply_groups<R, N>(scaled[0], DEPTH / 2, mask, p.k, size / 4, pairs, sums);
  }
}

// Up to CHUNK_ROWS rows from `top` on times N blocks of tokens from `token` on; x has their tiles.
template <class V, int N>
inline void multiply_blocks(const Linear& p, int64_t top, int64_t rows, const uint32_t* x, int64_t token, float* sums) {
  constexpr int R = N == 1 ? 8 : 4;  // as many sums as hide how long an instruction takes
  alignas(64) uint32_t pairs[DEPTH / 4 * PAIRS * N * 16];
  const int64_t block = (p.k + 31) / 32 * TILE;
  memset(sums, 0, N * CHUNK_ROWS * 16 * 4);
  for (int64_t j = 0; j < p.k; j += DEPTH) {
    const int64_t size = p.k - j < DEPTH ? p.k - j : DEPTH;
    pair_up<N>(x + j / 32 * TILE, block, (size + 31) / 32, pairs);
    int64_t r = 0;
    for (; r + R <= rows; r += R) multiply_rows<V, R, N>(p, top + r, j, size, pairs, sums + r * 16);
    for (; r < rows; r++) multiply_rows<V, 1, N>(p, top + r, j, size, pairs, sums + r * 16);
  }
  for (int64_t n = 0; n < N; n++)
    for (int64_t r = 0; r < rows; r += 16) {
      const int64_t first = token + n * 16;
      write_tile(p, sums + (n * CHUNK_ROWS + r) * 16, top + r, rows - r, first, p.tokens - first);
    }
}

template <class V>
void multiply_task(int64_t begin, int64_t end, void* opaque) {
  const Many& c = *(const Many*)opaque;
  const Linear& p = c.p;
  const int64_t stop = end * 16 < p.rows ? end * 16 : p.rows, block = (p.k + 31) / 32 * TILE;
  alignas(64) float sums[PASS * CHUNK_ROWS * 16];
  for (int64_t top = begin * 16; top < stop; top += CHUNK_ROWS)
    for (int64_t first = 0; first < c.blocks; first += PASS) {
      const int64_t n = c.blocks - first < PASS ? c.blocks - first : PASS;
      auto multiply = n == 1 ? multiply_blocks<V, 1> : n == 2 ? multiply_blocks<V, 2>
                    : n == 3 ? multiply_blocks<V, 3> : multiply_blocks<V, 4>;
      const int64_t rows = stop - top < CHUNK_ROWS ? stop - top : CHUNK_ROWS;
      multiply(p, top, rows, c.x + first * block, c.token + first * 16, sums);
    }
}

}  // namespace
