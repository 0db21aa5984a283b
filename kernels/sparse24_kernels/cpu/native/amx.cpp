// Many tokens on CPUs with AMX: the weight's tiles are made dense in L1 and multiplied by `tdpbf16ps`. bf16 x; bf16
// values, or int8 ones, which are rounded to bf16 with their scale.
//
// The sum of a row and a token takes the inputs in their order, in fp32, two at a time.
#include <immintrin.h>

#include "bf16_tiles.h"

extern const Path path_avx512_bf16;

namespace {

constexpr int64_t AHEAD = 256;  // values between what is prefetched and what is read
constexpr int64_t LAG = 2;      // steps between writing a dense tile and reading it: then it is in L1

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sixteen packed rows that are made dense tile by tile; of `count` rows, the last one stands for those that miss.
template <class V>
struct Rows {
  const Linear& p;
  const int64_t row, count;
  const uint8_t* mask[16];
  const V *values[16], *end[16];

  Rows(const Linear& p, int64_t row) : p(p), row(row), count(p.rows - row < 16 ? p.rows - row : 16) {
    for (int r = 0; r < 16; r++) {
      const int64_t at = row + (r < count ? r : count - 1);
      mask[r] = p.mask + at * p.k / 8, values[r] = (const V*)p.values + at * values_of(p, p.k);
      end[r] = values[r] + values_of(p, p.k);  // what a damaged mask names behind it is taken for zeros
    }
  }
  // The inputs [j, j + 32), or as many as there are, as a tile; j grows by 32 at a time.
  inline __attribute__((always_inline)) void expand(int64_t j, uint32_t* tile) {
    const int64_t bytes = p.k - j >= 32 ? 4 : (p.k - j) / 8;
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      uint32_t kept = 0;
      memcpy(&kept, mask[r] + j / 8, bytes);
      const int64_t left = end[r] - values[r], named = __builtin_popcount(kept), n = named < left ? named : left;
      const __mmask32 read = n == 32 ? ~0u : (1u << n) - 1;
      __m512i v;
      if constexpr (sizeof(V) == 1) {
        const float scale = scale_of(p, row + (r < count ? r : count - 1), j);
        v = rounded(_mm256_maskz_loadu_epi8(read, values[r]), scale);
      } else {
        v = _mm512_maskz_loadu_epi16(read, values[r]);
      }
      const int64_t jump = left > AHEAD ? 0 : 15 * values_of(p, p.k);  // then the next 16 rows
      __builtin_prefetch(values[r] + AHEAD + jump, 0, 2);
      _mm512_store_si512(tile + r * 16, _mm512_maskz_expand_epi16(kept, v));
      values[r] += n;
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
  if (p.dtype != BF16 || p.tokens <= few || p.is_product) return path_avx512_bf16.linear(p);
  return many_tokens(p, p.value_dtype == INT8 ? multiply_task<int8_t> : multiply_task<bf16>, 2);
}

int unpack(const Linear& p) { return path_avx512_bf16.unpack(p); }

}  // namespace

extern const Path path_amx = {"amx", linear, unpack};
