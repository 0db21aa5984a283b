// Many tokens on CPUs with AMX: the weight's tiles are made dense in L1 and multiplied by `tdpbf16ps`. bf16 x; bf16
// values, or int8 ones, which are rounded to bf16 with their scale.
//
// The sum of a row and a token takes the inputs in their order, in fp32, two at a time.
#include <immintrin.h>

#include "problem.h"

extern const Path path_avx512_bf16;

namespace {

constexpr int64_t TILE = 256;         // 32-bit words in a tile: 16 rows of 64 bytes
constexpr int64_t PASS = 4;           // blocks of 16 tokens that are multiplied at a time
constexpr int64_t WHOLE = 64;         // tokens up to which whole rows of the weight are read, one after the other
constexpr int64_t PANEL = 256;        // inputs that more tokens are multiplied by at a time: x of PASS blocks fits in L1
constexpr int64_t AMX_TOKENS = 256;   // tokens at a time, and ...
constexpr int64_t AMX_ROWS = 256;     // ... rows, whose sums stay in L2
constexpr int64_t AHEAD = 512;        // inputs between what is prefetched and what is read
constexpr int64_t LAG = 2;            // steps between writing a dense tile and reading it

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

  Rows(const Linear& p, int64_t row, int64_t count) : p(p), row(row), count(count < 16 ? count : 16) {
    for (int r = 0; r < 16; r++) {
      const int64_t at = (row + (r < this->count ? r : this->count - 1)) * p.k;
      indices[r] = p.indices + at / 8, values[r] = (const V*)p.values + at / 2;
    }
  }
  // The inputs [j, j + 32), or to `end`, as a tile; j grows from `begin` by 32 at a time.
  inline __attribute__((always_inline)) void expand(int64_t begin, int64_t j, int64_t end, bool whole, uint32_t* tile) {
    const int64_t step = (j - begin) / 32 % 16;
    if (step == 0) masks_of(indices, j, end - j, kept);
    const __mmask16 left = end - j >= 32 ? 0xffff : (1u << (end - j) / 2) - 1;
    // Ahead in these rows, and then in the next sixteen; or in those at once, where a panel is all that is read here.
    const int64_t next = whole ? j + AHEAD : j + p.k;
    const int64_t ahead = next < p.k ? next / 2 : 8 * p.k + (next - p.k) / 2;
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

// 16 rows times N blocks of tokens and the inputs [begin, end): adds to `sums` [N] tiles; `b` is x's tiles, of which a
// block has `stride`. Making the weights dense and multiplying take turns tile by tile, so that they overlap; a tile is
// read LAG steps after it is written.
template <class V, int N>
inline void tile_rows(const Linear& p, int64_t row, int64_t begin, int64_t end, float* sums, const uint32_t* b) {
  alignas(64) uint32_t ring[4][TILE];
  Rows<V> rows(p, row, p.rows - row);
  const int64_t steps = (end - begin + 31) / 32, stride = steps * TILE;
  _tile_loadd(0, sums, 64);
  if (N > 1) _tile_loadd(1, sums + TILE, 64);
  if (N > 2) _tile_loadd(2, sums + 2 * TILE, 64);
  if (N > 3) _tile_loadd(3, sums + 3 * TILE, 64);
  auto multiply = [&](int64_t step) __attribute__((always_inline)) {
    const uint32_t* x = b + step * TILE;
    _tile_loadd(4, ring[step % 4], 64);
    _tile_loadd(5, x, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (N > 1) { _tile_loadd(6, x + stride, 64); _tile_dpbf16ps(1, 4, 6); }
    if (N > 2) { _tile_loadd(7, x + 2 * stride, 64); _tile_dpbf16ps(2, 4, 7); }
    if (N > 3) { _tile_loadd(5, x + 3 * stride, 64); _tile_dpbf16ps(3, 4, 5); }
  };
  for (int64_t step = 0; step < steps; step++) {
    rows.expand(begin, begin + step * 32, end, begin == 0 && end == p.k, ring[step % 4]);
    if (step >= LAG) multiply(step - LAG);
  }
  for (int64_t step = steps > LAG ? steps - LAG : 0; step < steps; step++) multiply(step);
  _tile_stored(0, sums, 64);
  if (N > 1) _tile_stored(1, sums + TILE, 64);
  if (N > 2) _tile_stored(2, sums + 2 * TILE, 64);
  if (N > 3) _tile_stored(3, sums + 3 * TILE, 64);
}

// x is [panels][blocks of 16 tokens][tiles of the panel], so that what one panel needs lies together.
struct Amx { const Linear& p; uint32_t* x; int64_t token, blocks, panel; int failed; };

template <class V>
void amx_rows(int64_t begin, int64_t end, void* opaque) {
  Amx& c = *(Amx*)opaque;
  const Linear& p = c.p;
  const int64_t chunk = c.panel < p.k ? AMX_ROWS : 16, stride = c.blocks * TILE;  // of the sums of 16 rows
  Scratch memory(chunk / 16 * stride * 4);
  float* sums = (float*)memory.data;
  if (!sums) { c.failed = 1; return; }
  const TileConfig config;
  _tile_loadconfig(&config);
  begin *= 16, end = end * 16 < p.rows ? end * 16 : p.rows;
  for (int64_t top = begin; top < end; top += chunk) {
    const int64_t stop = end - top < chunk ? end : top + chunk;
    memset(sums, 0, chunk / 16 * stride * 4);
    for (int64_t j = 0; j < p.k; j += c.panel) {
      const int64_t until = p.k - j < c.panel ? p.k : j + c.panel;
      const uint32_t* b = c.x + j / 32 * c.blocks * TILE;
      for (int64_t block = 0; block < c.blocks; block += PASS, b += PASS * ((until - j + 31) / 32) * TILE) {
        const int64_t n = c.blocks - block;
        auto multiply = n == 1 ? tile_rows<V, 1> : n == 2 ? tile_rows<V, 2> : n == 3 ? tile_rows<V, 3> : tile_rows<V, 4>;
        for (int64_t row = top; row < stop; row += 16)
          multiply(p, row, j, until, sums + (row - top) / 16 * stride + block * TILE, b);
      }
    }
    for (int64_t row = top; row < stop; row += 16)
      for (int64_t block = 0; block < c.blocks; block++) {
        const int64_t token = c.token + block * 16;
        write_tile(p, sums + (row - top) / 16 * stride + block * TILE, row, stop - row, token, p.tokens - token);
      }
  }
  _tile_release();
}

template <class V>
int many_tokens(const Linear& p) {
  const int64_t all = (p.k + 31) / 32, most = p.tokens < AMX_TOKENS ? (p.tokens + 15) / 16 : AMX_TOKENS / 16;
  Scratch x(most * all * TILE * 4);
  if (!x.data) return 1;
  Amx c{p, (uint32_t*)x.data, 0, 0, p.tokens <= WHOLE ? round_up(p.k, 32) : PANEL, 0};
  for (; c.token < p.tokens; c.token += AMX_TOKENS) {
    const int64_t left = p.tokens - c.token;
    c.blocks = left < AMX_TOKENS ? (left + 15) / 16 : AMX_TOKENS / 16;
    int status = p.parallel_for(0, all, 64, [](int64_t begin, int64_t end, void* opaque) {
      const Amx& c = *(const Amx*)opaque;
      const int64_t all = (c.p.k + 31) / 32, panel = c.panel / 32;
      for (int64_t step = begin; step < end; step++) {
        const int64_t first = step / panel * panel, steps = all - first < panel ? all - first : panel;
        for (int64_t block = 0; block < c.blocks; block++)
          pair_tiles(c.p, c.token + block * 16, step, c.x + (first * c.blocks + block * steps + step - first) * TILE);
      }
    }, &c);
    if (!status) status = p.parallel_for(0, (p.rows + 15) / 16, 2, amx_rows<V>, &c);
    if (status || c.failed) return 1;
  }
  return 0;
}

int linear(const Linear& p) {
  if (p.dtype != BF16 || p.tokens <= 4) return path_avx512_bf16.linear(p);
  return p.value_dtype == INT8 ? many_tokens<int8_t>(p) : many_tokens<bf16>(p);
}

int unpack(const Linear& p) { return path_avx512_bf16.unpack(p); }

}  // namespace

extern const Path path_amx = {"amx", linear, unpack};
