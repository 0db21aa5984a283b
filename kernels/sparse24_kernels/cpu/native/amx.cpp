// Many tokens on CPUs with AMX: the weight's tiles are made dense in L1 and multiplied by `tdpbf16ps`. bf16 x; bf16
// values, or int8 ones, which are rounded to bf16 with their scale.
//
// The sum of a row and a token takes the inputs in their order, in fp32, two at a time.
#include <immintrin.h>

#include "problem.h"

extern const Path path_avx512_bf16;

namespace {

constexpr int64_t TILE = 256;   // 32-bit words in a tile: 16 rows of 64 bytes
constexpr int64_t PASS = 4;     // blocks of 16 tokens at a time: for more, the weight is read again
constexpr int64_t MOST_BLOCKS = 32;  // whose x is kept as tiles: for more, all starts again
constexpr int64_t AHEAD = 512;  // inputs between what is prefetched and what is read
constexpr int64_t LAG = 2;      // steps between writing a dense tile and reading it: then it is in L1

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

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
  __m512 bias = _mm512_setzero_ps();
  if (p.bias)
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const bf16*)p.bias + row)), 16));
  __m512i sums[16];
  for (int r = 0; r < 16; r++) sums[r] = _mm512_load_si512(tile + r * 16);
  transpose(sums);
  for (int64_t t = 0; t < 16 && t < tokens; t++) {
    __m256i y = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_castsi512_ps(sums[t]), bias));
    _mm256_mask_storeu_epi16((bf16*)p.y + (token + t) * p.rows + row, some, y);
  }
}

// The masks of the weights of 16 rows, a bit per weight, from the indices of up to 512 inputs.
inline void masks_of(const uint8_t* const indices[16], int64_t begin, int64_t n, uint32_t kept[16][16]) {
  // The indices of four weights are a nibble, and so is their mask.
  const __m512i masks = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 9, 3, 2, 6, 10, 5, 6, 4, 12, 9, 10, 12, 8));
  const __m512i low = _mm512_set1_epi8(15);
  const __mmask64 read = n >= 512 ? ~0ull : (1ull << n / 8) - 1;
  for (int r = 0; r < 16; r++) {
    const __m512i bytes = _mm512_maskz_loadu_epi8(read, indices[r] + begin / 8);
    const __m512i first = _mm512_shuffle_epi8(masks, _mm512_and_si512(bytes, low));
    const __m512i second = _mm512_shuffle_epi8(masks, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
    _mm512_store_si512(kept[r], _mm512_maskz_mov_epi8(read, _mm512_or_si512(first, _mm512_slli_epi16(second, 4))));
  }
}

// Sixteen packed rows that are made dense tile by tile; of `count` rows, the last one stands for those that miss.
template <class V>
struct Rows {
  const Linear& p;
  const int64_t row, count;
  const uint8_t* indices[16];
  const V* values[16];
  alignas(64) uint32_t kept[16][16];

  Rows(const Linear& p, int64_t row) : p(p), row(row), count(p.rows - row < 16 ? p.rows - row : 16) {
    for (int r = 0; r < 16; r++) {
      const int64_t at = (row + (r < count ? r : count - 1)) * p.k;
      indices[r] = p.indices + at / 8, values[r] = (const V*)p.values + at / 2;
    }
  }
  // The inputs [j, j + 32), or as many as there are, as a tile; j grows by 32 at a time.
  inline __attribute__((always_inline)) void expand(int64_t j, uint32_t* tile) {
    const int64_t step = j / 32 % 16;
    if (step == 0) masks_of(indices, j, p.k - j, kept);
    const __mmask16 left = p.k - j >= 32 ? 0xffff : (1u << (p.k - j) / 2) - 1;
    const int64_t ahead = j + AHEAD < p.k ? (j + AHEAD) / 2 : 8 * p.k + (j + AHEAD - p.k) / 2;  // then the next 16 rows
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      __m256i v;
      if constexpr (sizeof(V) == 1) {
        const __m512 f = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(left, values[r] + j / 2)));
        const float scale = scale_of(p, row + (r < count ? r : count - 1), j);
        v = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(f, _mm512_set1_ps(scale)));
      } else {
        v = _mm256_maskz_loadu_epi16(left, values[r] + j / 2);
      }
      __builtin_prefetch(values[r] + ahead, 0, 2);
      _mm512_store_si512(tile + r * 16, _mm512_maskz_expand_epi16(kept[r][step], _mm512_castsi256_si512(v)));
    }
  }
};

// The sums of 16 rows and N blocks of 16 tokens, N tiles; `x` has the tiles of a block after those of another. Making
// the weights dense and multiplying take turns tile by tile, so that they overlap.
template <class V, int N>
inline void multiply_rows(const Linear& p, int64_t row, const uint32_t* x, float* sums) {
  alignas(64) uint32_t ring[4][TILE];
  const int64_t steps = (p.k + 31) / 32, block = steps * TILE;
  Rows<V> rows(p, row);
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (N > 2) _tile_zero(2);
  if (N > 3) _tile_zero(3);
  auto multiply = [&](int64_t step) __attribute__((always_inline)) {
    const uint32_t* at = x + step * TILE;
    _tile_loadd(4, ring[step % 4], 64);
    _tile_loadd(5, at, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (N > 1) { _tile_loadd(6, at + block, 64); _tile_dpbf16ps(1, 4, 6); }
    if (N > 2) { _tile_loadd(7, at + 2 * block, 64); _tile_dpbf16ps(2, 4, 7); }
    if (N > 3) { _tile_loadd(5, at + 3 * block, 64); _tile_dpbf16ps(3, 4, 5); }
  };
  for (int64_t step = 0; step < steps; step++) {
    rows.expand(step * 32, ring[step % 4]);
    if (step >= LAG) multiply(step - LAG);
  }
  for (int64_t step = steps > LAG ? steps - LAG : 0; step < steps; step++) multiply(step);
  _tile_stored(0, sums, 64);
  if (N > 1) _tile_stored(1, sums + TILE, 64);
  if (N > 2) _tile_stored(2, sums + 2 * TILE, 64);
  if (N > 3) _tile_stored(3, sums + 3 * TILE, 64);
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

template <class V>
void multiply_task(int64_t begin, int64_t end, void* opaque) {
  const Many& c = *(const Many*)opaque;
  const int64_t steps = (c.p.k + 31) / 32, top = begin * 16, stop = end * 16 < c.p.rows ? end * 16 : c.p.rows;
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[PASS * TILE];
  for (int64_t first = 0; first < c.blocks; first += PASS) {
    const int64_t n = c.blocks - first < PASS ? c.blocks - first : PASS;
    auto multiply = n == 1 ? multiply_rows<V, 1> : n == 2 ? multiply_rows<V, 2>
                  : n == 3 ? multiply_rows<V, 3> : multiply_rows<V, 4>;
    for (int64_t row = top; row < stop; row += 16) {
      multiply(c.p, row, c.x + first * steps * TILE, sums);
      for (int64_t block = 0; block < n; block++) {
        const int64_t token = c.token + (first + block) * 16;
        write_tile(c.p, sums + block * TILE, row, c.p.rows - row, token, c.p.tokens - token);
      }
    }
  }
  _tile_release();
}

template <class V>
int many_tokens(const Linear& p) {
  const int64_t steps = (p.k + 31) / 32, all = (p.tokens + 15) / 16, most = all < MOST_BLOCKS ? all : MOST_BLOCKS;
  Scratch x(most * steps * TILE * 4);
  if (!x.data) return 1;
  Many many{p, (uint32_t*)x.data, 0, 0};
  int status = 0;
  for (int64_t block = 0; !status && block < all; block += most) {
    many.token = block * 16, many.blocks = all - block < most ? all - block : most;
    status = p.parallel_for(0, steps, 32, pair_task, &many);
    if (!status) status = p.parallel_for(0, (p.rows + 15) / 16, 2, multiply_task<V>, &many);
  }
  return status;
}

int linear(const Linear& p) {
  const int64_t few = p.value_dtype == INT8 ? 4 : 2;  // for more, reading x again for every row takes longer
  if (p.dtype != BF16 || p.tokens <= few) return path_avx512_bf16.linear(p);
  return p.value_dtype == INT8 ? many_tokens<int8_t>(p) : many_tokens<bf16>(p);
}

int unpack(const Linear& p) { return path_avx512_bf16.unpack(p); }

}  // namespace

extern const Path path_amx = {"amx", linear, unpack};
