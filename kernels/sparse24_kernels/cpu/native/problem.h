// What the kernels of one path share: the problem, element types, and the table of functions that a path gives.
// Everything here has internal linkage, because every path compiles it with other flags.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

// torch's thread pool: `torch_parallel_for` of libtorch_cpu runs task(begin, end, context) on parts of a range.
typedef void (*Task)(int64_t begin, int64_t end, void* context);
typedef int (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Task task, void* context);

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3 };

constexpr int64_t GROUP = 128;  // weights that share a scale, where the values are int8
constexpr int64_t STEP = 64;    // weights that are expanded at a time; the M of a pattern divides it
constexpr int64_t ROWS_PER_TASK = 32;

// y [tokens, rows] = x [tokens, k] times a packed [rows, k], plus bias. All matrices are row-major and contiguous.
struct Linear {
  const void* x;           // of `dtype`, as are bias, y and scales
  const void* values;   // [rows, k * each / STEP] of `value_dtype`: that of x, or int8
  const uint8_t* mask;  // [rows, k / 8], the lowest bit first
  const void* scales;   // [rows, ceil(k / GROUP)], or null
  const void* bias;     // [rows], or null
  void* y;
  int64_t tokens, rows, k, each, dtype, value_dtype;  // `each` values of STEP weights
  bool is_24;                                         // whether two of every four are kept
  bool is_product;                                    // x is [k, tokens], and y [rows, tokens]
  ParallelFor parallel_for;
};

// What a path computes. Each function returns 0, or another number where it has no memory.
struct Path {
  const char* name;
  int (*linear)(const Linear&);
  int (*unpack)(const Linear&);  // y is the dense [rows, k]; x, bias and tokens are unused
};

enum Rule : int64_t { MAGNITUDE, SOFT_THRESHOLD, MASK, BITS, NM_MASK, MVUE, TRANSPOSABLE, PACK_BITS, DECAY, DECAY_BITS };

// What is made of x, [before, size, after] in groups of m along `size`, or where a rule has no groups along another
// dimension a matrix [before, size]. All contiguous.
struct Pruning {
  int64_t rule;
  const void* x;        // of `dtype`; of PACK_BITS bytes of 0 and 1
  const uint8_t* mask;  // of MASK and DECAY bytes like x, of BITS and DECAY_BITS [before, ceil(size / 8)]
  void* y;              // of `result_dtype`; of NM_MASK and TRANSPOSABLE bytes of 0 and 1, of PACK_BITS packed bits.
                        // Where it is packed, values [before * after, size / 2] in fp32, then their mask
  int64_t before, size, after, dtype, result_dtype, n, m;  // m above 64: no path has it
  float scale;   // of SOFT_THRESHOLD, and of DECAY its strength
  uint64_t key;  // of MVUE
  bool is_packed;  // of a matrix, whose groups are 2:4 and `size` a multiple of 32
  ParallelFor parallel_for;
};

// Returns 0, or another number where a thread failed or the path lacks the rule.
typedef int Prune(const Pruning&);

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

inline float to_float(float f) { return f; }
inline float to_float(int8_t i) { return i; }
inline float to_float(bf16 b) { return as_float((uint32_t)b.bits << 16); }
inline float to_float(fp16 h) {
  uint32_t sign = (uint32_t)(h.bits & 0x8000) << 16, rest = (uint32_t)(h.bits & 0x7fff) << 13;
  const uint32_t subnormal = as_bits((float)(h.bits & 0x3ff) * 0x1p-24f);  // or zero; also where fp32 flushes its own
  if (rest >= 0x0f800000) return as_float(sign | rest | 0x7f800000);       // inf and NaN
  return as_float(sign | (rest < 0x00800000 ? subnormal : rest + 0x38000000));
}

// Rounds to the nearest, ties to even, as torch does. NaN stays NaN.
inline void from_float(float f, float* to) { *to = f; }
inline void from_float(float f, bf16* to) {
  uint32_t bits = as_bits(f);
  to->bits = f != f ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void from_float(float f, fp16* to) {
  uint32_t bits = as_bits(f), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) rest = 0x7e00;        // NaN
  else if (rest >= 0x477ff000) rest = 0x7c00;  // rounds to inf
  else if (rest < 0x38800000) rest = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);  // a subnormal number, or zero
  else rest = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  to->bits = sign | rest;
}

// Values of the first `weights` of a row.
inline int64_t values_of(const Linear& p, int64_t weights) { return weights * p.each / STEP; }

// How many steps of a row may be read in place. The bits of a damaged mask lead to up to STEP values of each step, so
// the steps at the end of the matrix, as the last one of a row with k % STEP, are read from a `Copied`.
inline int64_t whole_steps(const Linear& p, int64_t row) {
  const int64_t left = (p.rows - row) * values_of(p, p.k) - STEP, safe = left < 0 ? 0 : left / p.each + 1;
  return safe < p.k / STEP ? safe : p.k / STEP;
}

// Up to N weights of a row from j on, filled up with zeros.
template <class V, int N>
struct Copied {
  V values[N] = {};
  uint8_t mask[N / 8] = {};
  Copied(const Linear& p, int64_t row, int64_t j) {
    const int64_t n = p.k - j < N ? p.k - j : N;
    memcpy((void*)values, (const V*)p.values + row * values_of(p, p.k) + values_of(p, j), values_of(p, n) * sizeof(V));
    memcpy(mask, p.mask + (row * p.k + j) / 8, n / 8);
  }
};

// Calls f(j, values, mask) for each N weights of a row from j on: in place, or at the end of the matrix in a `Copied`.
template <class V, int N, class F>
inline __attribute__((always_inline)) void by_steps(const Linear& p, int64_t row, const F& f) {
  const V* values = (const V*)p.values + row * values_of(p, p.k);
  const uint8_t* mask = p.mask + row * (p.k / 8);
  const int64_t whole = whole_steps(p, row) / (N / STEP) * N;
  int64_t j = 0;
  for (; j < whole; j += N, values += N / STEP * p.each) f(j, values, mask + j / 8);
  for (; j < p.k; j += N) {
    const Copied<V, N> copied(p, row, j);
    f(j, copied.values, copied.mask);
  }
}

inline uint64_t bits_of(const uint8_t* mask) { uint64_t bits; memcpy(&bits, mask, 8); return bits; }

// The places of the ones in a byte, in order, one byte each.
struct PlacesOfByte {
  uint64_t of[256] = {};
  constexpr PlacesOfByte() {
    for (int byte = 0; byte < 256; byte++)
      for (int bit = 0, n = 0; bit < 8; bit++)
        if (byte >> bit & 1) of[byte] |= (uint64_t)bit << 8 * n++;
  }
};
constexpr PlacesOfByte PLACES_OF_BYTE;

// The places of the ones in `bytes` bytes of a mask, in order; `places` has 8 * (bytes + 1). Of 2:4, four of each byte.
template <bool IS_24 = false>
inline void find_places(const uint8_t* mask, int64_t bytes, uint8_t* places) {
  for (int64_t byte = 0; byte < bytes; byte++) {
    const uint64_t found = PLACES_OF_BYTE.of[mask[byte]] + byte * 0x0808080808080808;
    memcpy(places, &found, IS_24 ? 4 : 8);
    places += IS_24 ? 4 : __builtin_popcount(mask[byte]);
  }
}

// Calls f with 4, 2 or 1 as a type and the first token, of each part of `tokens`.
template <int N> struct Count { static constexpr int value = N; };
template <class F>
inline __attribute__((always_inline)) void by_tokens(int64_t tokens, const F& f) {
  int64_t token = 0;
  for (; token + 4 <= tokens; token += 4) f(Count<4>{}, token);
  if (token + 2 <= tokens) f(Count<2>{}, token), token += 2;
  if (token < tokens) f(Count<1>{}, token);
}

inline int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory for one call.
struct Scratch {
  explicit Scratch(int64_t bytes) : data(aligned_alloc(64, round_up(bytes + 1, 64))) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data;
};

// Calls f with a zero of a type.
template <class F>
inline int with_dtype(int64_t dtype, F f) {
  return dtype == FP32 ? f(float{}) : dtype == BF16 ? f(bf16{}) : f(fp16{});
}

// An element of x, scales or bias.
inline float element(const Linear& p, const void* of, int64_t i) {
  return p.dtype == FP32 ? ((const float*)of)[i]
       : p.dtype == BF16 ? to_float(((const bf16*)of)[i]) : to_float(((const fp16*)of)[i]);
}

// What int8 values of a row are multiplied by, in the group that has `column`.
inline float scale_of(const Linear& p, int64_t row, int64_t column) {
  return element(p, p.scales, row * groups_of(p.k) + column / GROUP);
}

inline void write(const Linear& p, int64_t token, int64_t row, float sum) {
  const int64_t i = token * p.rows + row;
  if (p.bias) sum += element(p, p.bias, row);
  if (p.dtype == FP32) ((float*)p.y)[i] = sum;
  else if (p.dtype == BF16) from_float(sum, (bf16*)p.y + i);
  else from_float(sum, (fp16*)p.y + i);
}

}  // namespace
