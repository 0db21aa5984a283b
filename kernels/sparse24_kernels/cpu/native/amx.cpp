// Many tokens on CPUs with AMX: the weight's tiles are made dense in L1 and multiplied by `tdpbf16ps`. bf16 x; bf16
// values, or int8 ones, which are rounded to bf16 with their scale.
//
// The sum of a row and a token takes the inputs in their order, in fp32, two at a time.
#include <immintrin.h>

#include "bf16_tiles.h"

extern const Path path_avx512_bf16;

namespace {

constexpr int64_t PASS = 4;     // blocks of 16 tokens at a time: for more, the weight is read again
constexpr int64_t AHEAD = 512;  // inputs between what is prefetched and what is read
constexpr int64_t LAG = 2;      // steps between writing a dense tile and reading it: then it is in L1

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

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

int linear(const Linear& p) {
  const int64_t few = p.value_dtype == INT8 ? 4 : 2;  // for more, reading x again for every row takes longer
  if (p.dtype != BF16 || p.tokens <= few) return path_avx512_bf16.linear(p);
  return many_tokens(p, p.value_dtype == INT8 ? multiply_task<int8_t> : multiply_task<bf16>, 2);
}

int unpack(const Linear& p) { return path_avx512_bf16.unpack(p); }

}  // namespace

extern const Path path_amx = {"amx", linear, unpack};
