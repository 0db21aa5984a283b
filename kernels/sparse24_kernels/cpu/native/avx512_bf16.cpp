// CPUs with AVX-512 VBMI2, VNNI and BF16. Few tokens: bf16 values by `vdpbf16ps`, int8 values by `vpdpbusd`. More tokens
// in bf16: some rows at a time are made dense in a cache. Many tokens and 2:4: bf16_pairs.h.
//
// `vpexpandw` and `vpexpandb` read as many values as a mask has ones, and put them there. With few tokens one row at a
// time is as fast as memory is read, because rows follow each other.
#include <immintrin.h>

#include "bf16_pairs.h"

extern const Path path_avx512;

namespace {

constexpr int PREFETCH = 8192;  // bytes of values ahead of what is read, to L2: L1 waits for too few lines at a time

// The sums of T vectors, at most four; lanes are added in the same order for any T.
template <int T>
inline void add_lanes(const __m512 (&v)[T], float* to) {
  const __m512 a = v[0], b = v[T > 1 ? 1 : 0], c = v[T > 2 ? 2 : 0], d = v[T > 3 ? 3 : 0];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));  // in each 128 bits, a to d
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  alignas(16) float sums[4];
  _mm_store_ps(sums, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  for (int t = 0; t < T; t++) to[t] = sums[t];
}

// One row times T tokens. Lane i of a sum takes the weights 2 i and 2 i + 1 of every 32, the even 32s and the odd ones
// apart; `vdpbf16ps` rounds to the nearest after each product and takes subnormal numbers for zeros.
template <int T>
inline void bf16_row(const Linear& p, const bf16* x, int64_t padded, int64_t row, int64_t token) {
  const int64_t ahead = PREFETCH / 2 * STEP / p.each / 8;  // bytes of the mask
  x += token * padded;
  __m512 sums[T][2];
  for (int t = 0; t < T; t++) sums[t][0] = sums[t][1] = _mm512_setzero_ps();

  by_steps<bf16, STEP>(p, row, [&](int64_t j, const bf16* v, const uint8_t* mask) __attribute__((always_inline)) {
    __builtin_prefetch((const char*)v + PREFETCH, 0, 2);
    __builtin_prefetch(mask + ahead, 0, 2);
    const uint64_t bits = bits_of(mask);
    const __m512i low = _mm512_maskz_expandloadu_epi16((__mmask32)bits, v);
    const __m512i high = _mm512_maskz_expandloadu_epi16((__mmask32)(bits >> 32), v + __builtin_popcount((uint32_t)bits));
    for (int t = 0; t < T; t++) {
      const bf16* at = x + t * padded + j;
      sums[t][0] = _mm512_dpbf16_ps(sums[t][0], (__m512bh)low, (__m512bh)_mm512_loadu_si512(at));
      sums[t][1] = _mm512_dpbf16_ps(sums[t][1], (__m512bh)high, (__m512bh)_mm512_loadu_si512(at + 32));
    }
  });
  __m512 both[T];
  for (int t = 0; t < T; t++) both[t] = _mm512_add_ps(sums[t][0], sums[t][1]);
  float results[T];
  add_lanes(both, results);
  for (int t = 0; t < T; t++) write(p, token + t, row, results[t]);
}

// x as int8 for each token and GROUP, plus 128, because `vpdpbusd` takes one unsigned operand; and its scales.
// A group with inf or NaN gets the scale NaN, so that the result is NaN.
inline void quantize(const Linear& p, int64_t token, uint8_t* to, float* scales) {
  for (int64_t top = 0; top < p.k; top += GROUP, to += GROUP) {
    const int64_t size = p.k - top < GROUP ? p.k - top : GROUP;
    float group[GROUP] = {}, largest = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < size; i++) {
      group[i] = element(p, p.x, token * p.k + top + i);
      const float magnitude = __builtin_fabsf(group[i]);
      finite &= magnitude < __builtin_inff();
      largest = magnitude > largest ? magnitude : largest;
    }
    const bool usable = finite && largest > 0x1p-100f;
    const __m512 factor = _mm512_set1_ps(usable ? 127.0f / largest : 0.0f);
    scales[top / GROUP] = finite ? largest / 127.0f : __builtin_nanf("");
    for (int i = 0; i < GROUP; i += 16) {
      const __m512 f = finite ? _mm512_loadu_ps(group + i) : _mm512_setzero_ps();
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(f, factor));
      _mm_store_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
    }
  }
}

// One row times T tokens, GROUP weights at a time. The integers of a group are added exactly: lane i has the weights 4 i
// to 4 i + 3 of either half. Its sum, scaled, is added to the row's by fused multiply-add in fp32.
template <int T>
inline void int8_row(const Linear& p, const uint8_t* x, const float* x_scales, int64_t row, int64_t token) {
  static_assert(GROUP == 2 * STEP, "a group is two steps");
  const int64_t groups = groups_of(p.k), size = 2 * p.each, ahead = PREFETCH * STEP / p.each / 8;
  const __m512i zero = _mm512_setzero_si512(), offset = _mm512_set1_epi8((char)128);
  const __mmask64 first = size < 64 ? (1ull << size) - 1 : ~0ull, rest = size > 64 ? ~0ull >> (128 - size) : 0;
  __m512 sums[T];
  for (int t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();

  by_steps<int8_t, GROUP>(p, row, [&](int64_t j, const int8_t* v, const uint8_t* mask) __attribute__((always_inline)) {
    __builtin_prefetch(v + PREFETCH, 0, 2);
    __builtin_prefetch(mask + ahead, 0, 2);
    const __m512i low = _mm512_maskz_expandloadu_epi8(bits_of(mask), v);
    const __m512i high = _mm512_maskz_expandloadu_epi8(bits_of(mask + 8), v + p.each);
    __m512i excess = _mm512_dpbusd_epi32(zero, offset, _mm512_maskz_loadu_epi8(first, v));
    if (rest) excess = _mm512_dpbusd_epi32(excess, offset, _mm512_maskz_loadu_epi8(rest, v + 64));
    excess = _mm512_sub_epi32(zero, excess);
    const int64_t g = (uint64_t)j / GROUP;  // signed, it costs one token 10 %
    const float scale = scale_of(p, row, g * GROUP);
    for (int t = 0; t < T; t++) {
      const int64_t at = (token + t) * groups + g;
      const __m512i half = _mm512_dpbusd_epi32(excess, _mm512_loadu_si512(x + at * GROUP), low);
      const __m512i sum = _mm512_dpbusd_epi32(half, _mm512_loadu_si512(x + at * GROUP + STEP), high);
      sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale * x_scales[at]), sums[t]);
    }
  });
  float results[T];
  add_lanes(sums, results);
  for (int t = 0; t < T; t++) write(p, token + t, row, results[t]);
}

// x, each token's row padded with zeros to whole steps.
inline void pad(const Linear& p, int64_t padded, bf16* to) {
  for (int64_t token = 0; token < p.tokens; token++, to += padded) {
    memcpy((void*)to, (const bf16*)p.x + token * p.k, p.k * 2);
    memset((void*)(to + p.k), 0, (padded - p.k) * 2);
  }
}

struct Padded { const Linear& p; const bf16* x; int64_t padded; };

int few_tokens_bf16(const Linear& p) {
  const int64_t padded = round_up(p.k, STEP);
  Scratch copy(p.tokens * padded * 2);
  if (!copy.data) return 1;
  pad(p, padded, (bf16*)copy.data);
  Padded context{p, (const bf16*)copy.data, padded};
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Padded& c = *(const Padded*)opaque;
    for (; row < end; row++)
      by_tokens(c.p.tokens, [&](auto count, int64_t token) { bf16_row<count.value>(c.p, c.x, c.padded, row, token); });
  }, &context);
}

// A row made dense, padded with zeros to whole steps. int8 values are rounded to bf16 with their scale.
template <class V>
inline void expand_row(const Linear& p, int64_t row, bf16* to) {
  by_steps<V, STEP>(p, row, [&](int64_t j, const V* v, const uint8_t* mask) __attribute__((always_inline)) {
    __builtin_prefetch((const char*)v + PREFETCH / 2, 0, 2);
    const uint64_t bits = bits_of(mask);
    if constexpr (sizeof(V) == 1) {
      const float scale = scale_of(p, row, j);
      alignas(64) int8_t bytes[STEP];
      _mm512_store_si512(bytes, _mm512_maskz_expandloadu_epi8(bits, v));
      for (int i = 0; i < STEP; i += 32)
        _mm512_storeu_si512(to + j + i, rounded(_mm256_load_si256((const __m256i*)(bytes + i)), scale));
    } else {
      _mm512_storeu_si512(to + j, _mm512_maskz_expandloadu_epi16((__mmask32)bits, v));
      v += __builtin_popcount((uint32_t)bits);
      _mm512_storeu_si512(to + j + 32, _mm512_maskz_expandloadu_epi16((__mmask32)(bits >> 32), v));
    }
  });
}

constexpr int64_t PAIRED_TOKENS = 17;        // the fewest for which a 2:4 weight takes pairs
constexpr int64_t MOST_ROWS = 48;            // made dense at a time
constexpr int64_t DENSE_BYTES = 256 * 1024;  // of them, which stay in L2

// R dense rows times T tokens: lane i of a sum takes the weights 2 i and 2 i + 1 of every 32. Sums of a token are
// MOST_ROWS apart.
template <int R, int T>
inline void dense_block(const bf16* weight, const bf16* x, int64_t padded, float* to) {
  __m512 sums[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[r][t] = _mm512_setzero_ps();
  for (int64_t j = 0; j < padded; j += 32) {
    __m512bh at[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) at[t] = (__m512bh)_mm512_loadu_si512(x + t * padded + j);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const __m512bh w = (__m512bh)_mm512_load_si512(weight + r * padded + j);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], w, at[t]);
    }
  }
  for (int r = 0; r < R; r++) {
    float results[T];
    add_lanes(sums[r], results);
    for (int t = 0; t < T; t++) to[t * MOST_ROWS + r] = results[t];
  }
}

template <int T>
inline void dense_rows(const Padded& c, const bf16* weight, int64_t row, int64_t rows, int64_t token) {
  alignas(64) float sums[T * MOST_ROWS];
  const bf16* x = c.x + token * c.padded;
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) dense_block<6, T>(weight + r * c.padded, x, c.padded, sums + r);
  for (; r + 2 <= rows; r += 2) dense_block<2, T>(weight + r * c.padded, x, c.padded, sums + r);
  if (r < rows) dense_block<1, T>(weight + r * c.padded, x, c.padded, sums + r);
  for (int t = 0; t < T; t++)
    for (r = 0; r < rows; r += 16) {
      const __mmask16 some = rows - r >= 16 ? 0xffff : (1u << (rows - r)) - 1;
      __m512 sum = _mm512_load_ps(sums + t * MOST_ROWS + r);
      if (c.p.bias) sum = _mm512_add_ps(sum, bias_of(c.p, row + r, some));
      bf16* to = (bf16*)c.p.y + (token + t) * c.p.rows + row + r;
      _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

template <class V>
int more_tokens(const Linear& p) {
  const int64_t padded = round_up(p.k, STEP);
  Scratch copy(p.tokens * padded * 2);
  if (!copy.data) return 1;
  pad(p, padded, (bf16*)copy.data);
  struct Context : Padded { int failed; } context{{p, (const bf16*)copy.data, padded}, 0};
  const int status = p.parallel_for(0, p.rows, MOST_ROWS, [](int64_t begin, int64_t end, void* opaque) {
    Context& c = *(Context*)opaque;
    const int64_t fit = DENSE_BYTES / (c.padded * 2) / 6 * 6, rows = fit < 6 ? 6 : fit < MOST_ROWS ? fit : MOST_ROWS;
    Scratch dense(rows * c.padded * 2);
    bf16* weight = (bf16*)dense.data;
    if (!weight) { __atomic_store_n(&c.failed, 1, __ATOMIC_RELAXED); return; }
    for (int64_t row = begin; row < end; row += rows) {
      const int64_t stop = row + rows < end ? row + rows : end;
      for (int64_t r = row; r < stop; r++) expand_row<V>(c.p, r, weight + (r - row) * c.padded);
      by_tokens(c.p.tokens, [&](auto count, int64_t token) { dense_rows<count.value>(c, weight, row, stop - row, token); });
    }
  }, &context);
  return status ? status : context.failed;
}

int few_tokens_int8(const Linear& p) {
  const int64_t groups = groups_of(p.k);
  Scratch x(p.tokens * groups * GROUP), scales(p.tokens * groups * 4);
  if (!x.data || !scales.data) return 1;
  struct Context { const Linear& p; uint8_t* x; float* scales; } context{p, (uint8_t*)x.data, (float*)scales.data};
  for (int64_t token = 0; token < p.tokens; token++)
    quantize(p, token, context.x + token * groups * GROUP, context.scales + token * groups);
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Context& c = *(const Context*)opaque;
    for (; row < end; row++)
      by_tokens(c.p.tokens, [&](auto count, int64_t token) { int8_row<count.value>(c.p, c.x, c.scales, row, token); });
  }, &context);
}

int linear(const Linear& p) {
  if (p.value_dtype == INT8 && p.tokens <= 8 && !p.is_product) return few_tokens_int8(p);
  if (p.dtype != BF16 || p.is_product) return path_avx512.linear(p);
  if (p.value_dtype == BF16 && p.tokens <= 4) return few_tokens_bf16(p);
  if (p.is_24 && p.tokens >= PAIRED_TOKENS)
    return many_tokens(p, p.value_dtype == INT8 ? multiply_task<int8_t> : multiply_task<bf16>, 4);
  return p.value_dtype == INT8 ? more_tokens<int8_t>(p) : more_tokens<bf16>(p);
}

int unpack(const Linear& p) {
  if (p.value_dtype == INT8 || p.dtype == FP32 || p.k % STEP) return path_avx512.unpack(p);
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Linear& p = *(const Linear*)opaque;
    for (; row < end; row++) expand_row<bf16>(p, row, (bf16*)p.y + row * p.k);
  }, (void*)&p);
}

}  // namespace

extern const Path path_avx512_bf16 = {"avx512_bf16", linear, unpack};
