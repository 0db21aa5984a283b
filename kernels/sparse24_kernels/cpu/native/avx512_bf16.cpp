// CPUs with AVX-512 VBMI, VNNI and BF16. Few tokens: bf16 values by `vdpbf16ps`, int8 values by `vpdpbusd`. Many tokens
// in bf16: bf16_pairs.h.
//
// With few tokens the kernels pick x by the indices instead of expanding the weights, so each instruction multiplies
// kept values only: `vpmultishiftqb` moves the two bits of every value to a byte, and `vpermb` picks the bytes of x. One
// row at a time is as fast as memory is read, because rows follow each other.
#include <immintrin.h>

#include "bf16_pairs.h"

extern const Path path_avx512;

namespace {

constexpr int64_t ROWS_PER_TASK = 32;
constexpr int PREFETCH = 4096;  // bytes of values ahead of what is read, to L2: L1 waits for too few lines at a time

// The bytes of 128 of x that 64 bytes of values are multiplied by. `places` has 6 bits for each: for the lower half of
// the values in the lower half of x, for the upper half in the upper one.
inline __m512i picked(__m512i places, const void* x) {
  const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512((const char*)x + 64);
  return _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(places, low), 0xffffffff00000000, places, high);
}

// One row times T tokens: 32 bf16 values of 64 weights at a time. Lane i of a sum takes the values 2 i and 2 i + 1 of
// every 32; `vdpbf16ps` rounds to the nearest after each product and takes subnormal numbers for zeros.
template <int T>
inline void bf16_row(const Linear& p, const bf16* x, int64_t padded, int64_t row, int64_t token) {
  constexpr int64_t STEP = 64;
  alignas(64) uint8_t shift[64], first[64];
  for (int byte = 0; byte < 64; byte++) {
    const int value = byte / 2;
    shift[byte] = (2 * value - 1) & 63;  // one less, so that the index counts the two bytes of a bf16
    first[byte] = 8 * (value / 2 % 8) + byte % 2;
  }
  const __m512i shifts = _mm512_load_si512(shift), base = _mm512_load_si512(first);
  const bf16* values = (const bf16*)p.values + row * (p.k / 2);
  const uint8_t* indices = p.indices + row * (p.k / 8);
  x += token * padded;
  __m512 sums[T];
  for (int t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();

  auto step = [&](int64_t j, const bf16* v, const uint8_t* i) __attribute__((always_inline)) {
    int64_t word;
    memcpy(&word, i, 8);
    const __m512i bits = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
    const __m512i places = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi8(6), base, 0xea);  // (bits & 6) | base
    const __m512bh weights = (__m512bh)_mm512_loadu_si512(v);
    for (int t = 0; t < T; t++)
      sums[t] = _mm512_dpbf16_ps(sums[t], weights, (__m512bh)picked(places, x + t * padded + j));
  };

  int64_t j = 0;
  for (; j + STEP <= p.k; j += STEP) {
    __builtin_prefetch((const char*)(values + j / 2) + PREFETCH, 0, 2);
    __builtin_prefetch(indices + j / 8 + PREFETCH / 8, 0, 2);
    step(j, values + j / 2, indices + j / 8);
  }
  if (j < p.k) {  // a whole step of a copy, filled up with zeros
    bf16 v[STEP / 2] = {};
    uint8_t i[STEP / 8] = {};
    memcpy(v, values + j / 2, p.k - j);
    memcpy(i, indices + j / 8, (p.k - j) / 8);
    step(j, v, i);
  }
  for (int t = 0; t < T; t++) write(p, token + t, row, _mm512_reduce_add_ps(sums[t]));
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

// One row times T tokens: 64 int8 values of 128 weights, a group, at a time. The integers of a group are added exactly:
// lane i has the values 4 i to 4 i + 3. Its sum, scaled, is added to the row's by fused multiply-add in fp32.
template <int T>
inline void int8_row(const Linear& p, const uint8_t* x, const float* x_scales, int64_t row, int64_t token) {
  alignas(64) uint8_t shift[64], first[64];
  for (int value = 0; value < 64; value++) shift[value] = 2 * value & 63, first[value] = 4 * (value / 2) & 63;
  const __m512i shifts = _mm512_load_si512(shift), base = _mm512_load_si512(first), zero = _mm512_setzero_si512();
  const __m512i halves = _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1);
  const int64_t groups = groups_of(p.k);
  const int8_t* values = (const int8_t*)p.values + row * (p.k / 2);
  const uint8_t* indices = p.indices + row * (p.k / 8);
  __m512 sums[T];
  for (int t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++, values += GROUP / 2, indices += GROUP / 8) {
    const int64_t left = p.k - g * GROUP;
    const __mmask64 kept = left < GROUP ? (1ull << left / 2) - 1 : ~0ull;
    const __mmask16 read = left < GROUP ? (1u << left / 8) - 1 : 0xffff;
    __builtin_prefetch(values + PREFETCH, 0, 2);
    __builtin_prefetch(indices + PREFETCH / 4, 0, 2);
    const __m512i weights = _mm512_maskz_loadu_epi8(kept, values);
    const __m512i words = _mm512_permutexvar_epi64(halves, _mm512_castsi128_si512(_mm_maskz_loadu_epi8(read, indices)));
    const __m512i bits = _mm512_multishift_epi64_epi8(shifts, words);
    const __m512i places = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi8(3), base, 0xea);  // (bits & 3) | base
    const __m512i excess = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8((char)128), weights);
    const float scale = scale_of(p, row, g * GROUP);
    for (int t = 0; t < T; t++) {
      const int64_t at = (token + t) * groups + g;
      const __m512i sum = _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, picked(places, x + at * GROUP), weights), excess);
      sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale * x_scales[at]), sums[t]);
    }
  }
  for (int t = 0; t < T; t++) write(p, token + t, row, _mm512_reduce_add_ps(sums[t]));
}

// Calls f<4>, f<2> and f<1> with the first token of each part.
#define FOR_TOKENS(tokens, f)                                     \
  {                                                               \
    int64_t token = 0;                                            \
    for (; token + 4 <= (tokens); token += 4) f(4);               \
    if (token + 2 <= (tokens)) { f(2); token += 2; }              \
    if (token < (tokens)) f(1);                                   \
  }

int few_tokens_bf16(const Linear& p) {
  const int64_t padded = round_up(p.k, 64);
  Scratch copy(p.tokens * padded * 2);
  if (!copy.data) return 1;
  for (int64_t token = 0; token < p.tokens; token++) {
    bf16* to = (bf16*)copy.data + token * padded;
    memcpy(to, (const bf16*)p.x + token * p.k, p.k * 2);
    memset((void*)(to + p.k), 0, (padded - p.k) * 2);
  }
  struct Context { const Linear& p; const bf16* x; int64_t padded; } context{p, (const bf16*)copy.data, padded};
  return p.parallel_for(0, p.rows, ROWS_PER_TASK, [](int64_t row, int64_t end, void* opaque) {
    const Context& c = *(const Context*)opaque;
#define ROW(T) bf16_row<T>(c.p, c.x, c.padded, row, token)
    for (; row < end; row++) FOR_TOKENS(c.p.tokens, ROW)
#undef ROW
  }, &context);
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
#define ROW(T) int8_row<T>(c.p, c.x, c.scales, row, token)
    for (; row < end; row++) FOR_TOKENS(c.p.tokens, ROW)
#undef ROW
  }, &context);
}

int linear(const Linear& p) {
  if (p.value_dtype == INT8 && p.tokens <= 4) return few_tokens_int8(p);
  if (p.dtype != BF16) return path_avx512.linear(p);
  if (p.value_dtype == BF16 && p.tokens <= 8) return few_tokens_bf16(p);
  return many_tokens(p, p.value_dtype == INT8 ? multiply_task<int8_t> : multiply_task<bf16>, 4);
}

int unpack(const Linear& p) { return path_avx512.unpack(p); }

}  // namespace

extern const Path path_avx512_bf16 = {"avx512_bf16", linear, unpack};
