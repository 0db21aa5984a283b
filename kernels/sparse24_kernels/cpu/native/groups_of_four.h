// Pruning in groups of four: what is read into blocks of groups, each rule, and where its results go.
#pragma once
#include "problem.h"

namespace {

constexpr int N = 64;  // groups in a block
constexpr int64_t TASK = 32768;  // elements of a task at least
typedef float Four[4][N];  // members of the groups of a block

inline float smaller(float a, float b) { return a < b ? a : b; }
inline float larger(float a, float b) { return a > b ? a : b; }

// What is stored is never -0.0.
inline void store(float f, float* to) { *to = f + 0.0f; }
inline void store(float f, uint8_t* to) { *to = (uint8_t)(int)f; }
template <class Y>
inline void store(float f, Y* to) {
  from_float(f, to);
  to->bits = to->bits == 0x8000 ? 0 : to->bits;
}

template <class F>
int parallel(const Pruning& p, int64_t items, int64_t size, const F& f) {
  return p.parallel_for(0, items, size < TASK ? TASK / (size + 1) + 1 : 1, [](int64_t i, int64_t end, void* f) {
    for (; i < end; i++) (*(const F*)f)(i);
  }, (void*)&f);
}

// A block whose groups lie behind each other, or as many elements as there are.
template <class X>
inline void load_row(const X* x, int64_t count, Four to) {
  X whole[4 * N] = {};
  if (count < 4 * N) x = (const X*)memcpy(whole, x, count * sizeof(X));
  for (int g = 0; g < N; g++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) to[i][g] = to_float(x[4 * g + i]);
}

template <class Y>
inline void store_row(const Four from, int64_t count, Y* y) {
  Y whole[4 * N], *to = count < 4 * N ? whole : y;
  for (int g = 0; g < N; g++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(from[i][g], to + 4 * g + i);
  if (count < 4 * N) memcpy(y, whole, count * sizeof(Y));
}

// Four words of random bits for the groups first + i * group_step of the vectors 4 * (four + i * four_step) to + 3.
template <int LANES>
inline void philox(uint64_t key, uint32_t four, int four_step, uint32_t first, int group_step, float to[4][LANES]) {
  for (int i = 0; i < LANES; i++) {
    uint32_t c0 = four + i * four_step, c1 = first + i * group_step, c2 = 0, c3 = 0, k0 = key, k1 = key >> 32;
    for (int round = 0; round < 7; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
      const uint64_t a = (uint64_t)c0 * 0xD2511F53, b = (uint64_t)c2 * 0xCD9E8D57;
      c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c1 = (uint32_t)b, c3 = (uint32_t)a;
    }
    const uint32_t words[4] = {c0, c1, c2, c3};
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) to[w][i] = (float)(int)(words[w] >> 8) * 0x1p-24f;
  }
}

// Each rule: y of x, for the groups of a block, the loop's body for one group.

struct NmMask {
  void operator()(const Four x, const float*, Four y) const {
    for (int g = 0; g < N; g++) {
      int32_t a[4];  // without their sign, the bits of floats compare as integers, NaN above inf
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) a[i] = as_bits(x[i][g]) & 0x7fffffff;
      const int w01 = a[0] >= a[1], w02 = a[0] >= a[2], w03 = a[0] >= a[3];
      const int w12 = a[1] >= a[2], w13 = a[1] >= a[3], w23 = a[2] >= a[3];
      y[0][g] = (float)(w01 + w02 + w03 >= 2);
      y[1][g] = (float)(!w01 + w12 + w13 >= 2);
      y[2][g] = (float)(!w02 + !w12 + w23 >= 2);
      y[3][g] = (float)(!w03 + !w13 + !w23 >= 2);
    }
  }
};

struct Magnitude {
  void operator()(const Four x, const float* u, Four y) const {
    NmMask()(x, u, y);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      for (int g = 0; g < N; g++) y[i][g] *= x[i][g];  // so that a NaN shows
  }
};

struct SoftThreshold {
  float scale;
  void operator()(const Four x, const float*, Four y) const {
    for (int g = 0; g < N; g++) {
      float a[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) a[i] = __builtin_fabsf(x[i][g]);
      const float lows = larger(smaller(a[0], a[1]), smaller(a[2], a[3]));
      const float highs = smaller(larger(a[0], a[1]), larger(a[2], a[3]));
      const float t = smaller(lows, highs), sum = (a[0] + a[1]) + (a[2] + a[3]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const float pruned = (-smaller(larger(x[i][g], -t), t) + x[i][g]) * scale;
        y[i][g] = sum != sum ? sum : pruned;  // NaN of one is NaN of all
      }
    }
  }
};

struct Mvue {
  void operator()(const Four x, const float* u, Four y) const {
    for (int g = 0; g < N; g++) {
      float a[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) a[i] = __builtin_fabsf(x[i][g]);
      const float high01 = larger(a[0], a[1]), high23 = larger(a[2], a[3]), largest = larger(high01, high23);
      const float others = smaller(high01, high23) + smaller(a[0], a[1]) + smaller(a[2], a[3]);
      const float least = smaller(largest * 0.5f + others * 0.5f, others), pick = least > 0 ? least : largest;
      const float end0 = smaller(a[0], pick), end1 = smaller(a[1], pick) + end0, end2 = smaller(a[2], pick) + end1;
      const float first = u[g] * pick, second = first + pick, sum = (a[0] + a[1]) + (a[2] + a[3]);
      const float first0 = first < end0, first1 = first < end1, second1 = second < end1, second2 = second < end2;
      const float picked[4] = {first0, larger(first1 - first0, second1), larger(1 - first1, second2 - second1), 1 - second2};
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const float sign = (float)(x[i][g] > 0) - (float)(x[i][g] < 0), estimate = larger(a[i], pick) * sign * picked[i];
        y[i][g] = sum != sum ? sum : estimate;
      }
    }
  }
};

struct Same {  // of what was masked as it was read
  void operator()(const Four x, const float*, Four y) const { memcpy(y, x, sizeof(Four)); }
};
template <class Rule> constexpr bool IS_MASKED = false;
template <> constexpr bool IS_MASKED<Same> = true;

// Bit j of the result's byte j is bit j of a byte: eight bools.
inline uint64_t bools_of(uint8_t bits) {
  return (((bits * 0x0101010101010101u) & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

// The mask's bools for `count` elements, true where not 0: its own, or made in `buffer` of the bits from a byte on.
inline const int8_t* bools_at(const Pruning& p, int64_t element, int64_t byte, int64_t count, uint64_t* buffer) {
  if (p.rule != BITS && p.rule != DECAY_BITS) return (const int8_t*)p.mask + element;
  for (int64_t i = 0; i < (count + 7) / 8; i++) buffer[i] = bools_of(p.mask[byte + i]);
  return (const int8_t*)buffer;
}

inline float either(int is_first, float a, float b) { return as_float((as_bits(a) & -is_first) | (as_bits(b) & (is_first - 1))); }

// The two of a group that are packed: the first that are not zero, and then the first others. Values lie one behind the
// other, and the bits of a group's mask in a byte.
inline void pick(const Four y, float values[2 * N], uint8_t bits[N]) {
  int32_t codes[N];
  for (int g = 0; g < N; g++) {  // without a branch, so that compilers make vectors
    const int n1 = y[1][g] != 0, n2 = y[2][g] != 0, n3 = y[3][g] != 0;
    const int may0 = (y[0][g] != 0) | (n1 + n2 + n3 < 2), may1 = n1 | !(n2 | n3);
    const int second1 = may0 & may1, second2 = !second1 & n2 & (may0 | may1);
    values[2 * g] = either(may0, y[0][g], either(may1, y[1][g], y[2][g])) + 0.0f;  // never -0.0
    values[2 * g + 1] = either(second1, y[1][g], either(second2, y[2][g], y[3][g])) + 0.0f;
    codes[g] = may0 | may1 << 1 | (second2 | !(may0 | may1)) << 2 | !(second1 | second2) << 3;
  }
  for (int g = 0; g < N; g++) bits[g] = codes[g];
}

// Where results go: the rows of a block from an element on; the same columns of several groups' members.
template <class Y>
struct Dense {
  static constexpr int GROUPS = 1;  // at a time along another dimension
  const Pruning& p;
  void rows(const Four y, int64_t at, int64_t count) const { store_row(y, count, (Y*)p.y + at); }
  void columns(const Four* y, int64_t at, int64_t, int64_t members, int64_t count) const {
    for (int64_t i = 0; i < members; i++)
      for (int64_t g = 0; g < count; g++) store(y[i / 4][i % 4][g], (Y*)p.y + at + i * p.after + g);
  }
};

struct PackedValues {
  static constexpr int GROUPS = 8;  // whose values fill a line
  const Pruning& p;
  uint8_t* mask() const { return (uint8_t*)((float*)p.y + p.before * p.size * p.after / 2); }
  void rows(const Four y, int64_t at, int64_t count) const {
    float values[2 * N];
    uint8_t bits[N], *to_mask = mask() + at / 8;
    pick(y, values, bits);
    memcpy((float*)p.y + at / 2, values, count * 2);
    for (int64_t i = 0; i < count / 8; i++) to_mask[i] = bits[2 * i] | bits[2 * i + 1] << 4;
  }
  void columns(const Four* y, int64_t, int64_t first, int64_t, int64_t count) const {
    const int64_t group = first / p.after, column = first % p.after, step = p.size / 2, mask_step = p.size / 8;
    float* to = (float*)p.y + column * step + 2 * group;
    float values[GROUPS][2 * N];
    uint8_t bits[GROUPS][N], *to_mask = mask() + column * mask_step + group / 2;
    for (int i = 0; i < GROUPS; i++) pick(y[i], values[i], bits[i]);
    for (int64_t g = 0; g < count; g++, to += step, to_mask += mask_step) {
#pragma GCC unroll 8
      for (int i = 0; i < GROUPS; i++) memcpy(to + 2 * i, &values[i][2 * g], 8);
#pragma GCC unroll 4
      for (int i = 0; i < GROUPS / 2; i++) to_mask[i] = bits[2 * i][g] | bits[2 * i + 1][g] << 4;
    }
  }
};

// Groups along the last dimension; of a random rule, four rows at a time, because they share random words.
template <class X, bool RANDOM, class Rule, class Result>
int along_rows(const Pruning& p, const Rule& rule, const Result& result) {
  const int64_t total = p.before * p.size, block = 4 * N;
  if (!RANDOM)
    return parallel(p, (total + block - 1) / block, block, [&](int64_t b) {
      Four x, y, keep;
      uint64_t bools[block / 8];
      const int64_t at = b * block, count = total - at < block ? total - at : block;
      load_row((const X*)p.x + at, count, x);
      if constexpr (IS_MASKED<Rule>) {
        load_row(bools_at(p, at, at / 8, count, bools), count, keep);
        for (int i = 0; i < 4; i++)
          for (int g = 0; g < N; g++) x[i][g] *= (float)(keep[i][g] != 0);  // so that a NaN shows
      }
      rule(x, nullptr, y);
      result.rows(y, at, count);
    });
  return parallel(p, (p.before + 3) / 4, 4 * p.size, [&](int64_t four) {
    Four x, y, u;
    for (int64_t column = 0; column < p.size; column += block) {
      philox<N>(p.key, four, 0, column / 4, 1, u);
      for (int64_t row = 4 * four; row < p.before && row < 4 * four + 4; row++) {
        const int64_t at = row * p.size + column, count = p.size - column < block ? p.size - column : block;
        load_row((const X*)p.x + at, count, x);
        rule(x, u[row % 4], y);
        result.rows(y, at, count);
      }
    }
  });
}

// Groups along another dimension, several at a time.
template <class X, bool RANDOM, class Rule, class Result>
int along_columns(const Pruning& p, const Rule& rule, const Result& result) {
  constexpr int GROUPS = Result::GROUPS, BLOCK = 4 * GROUPS;
  const int64_t blocks = (p.size + BLOCK - 1) / BLOCK;
  return parallel(p, p.before * blocks, BLOCK * p.after, [&](int64_t item) {
    const int64_t plane = item / blocks, first = item % blocks * BLOCK, vector = plane * p.after;
    const int64_t members = p.size - first < BLOCK ? p.size - first : BLOCK, row = plane * p.size + first;
    Four x[GROUPS] = {}, y[GROUPS];
    float words[4][N / 4], u[N];
    uint64_t bools[N / 8];
    for (int64_t column = 0; column < p.after;) {
      // A block begins with the first of four vectors, which share random words.
      const int64_t skipped = RANDOM ? (vector + column) % 4 : 0;
      const int64_t count = p.after - column < N - skipped ? p.after - column : N - skipped;
      for (int64_t i = 0; i < members; i++) {
        const int64_t at = (row + i) * p.after + column;
        float* to = x[i / 4][i % 4];
        for (int64_t g = 0; g < count; g++) to[g] = to_float(((const X*)p.x)[at + g]);
        if (GROUPS > 1)  // hardware does not foresee so many rows
          for (int64_t line = 0; line < N; line += 64 / sizeof(X)) __builtin_prefetch((const X*)p.x + at + N + line);
        if constexpr (IS_MASKED<Rule>) {
          const int8_t* keep = bools_at(p, at, (row + i) * ((p.after + 7) / 8) + column / 8, count, bools);
          for (int64_t g = 0; g < count; g++) to[g] *= (float)(keep[g] != 0);
        }
      }
      for (int64_t group = 0; 4 * group < members; group++) {
        if (RANDOM) {
          philox<N / 4>(p.key, (vector + column) / 4, 1, first / 4 + group, 0, words);
          for (int g = 0; g < N / 4; g++)
#pragma GCC unroll 4
            for (int w = 0; w < 4; w++) u[4 * g + w] = words[w][g];
          if (skipped) memmove(u, u + skipped, (N - skipped) * sizeof *u);
        }
        rule(x[group], u, y[group]);
      }
      result.columns(y, row * p.after + column, first / 4 * p.after + column, members, count);
      column += count;
    }
  });
}

template <bool RANDOM, class X, class Y, class Rule>
int grouped(const Pruning& p, const Rule& rule) {
  const auto to = [&](const auto& result) {
    return p.after == 1 ? along_rows<X, RANDOM>(p, rule, result) : along_columns<X, RANDOM>(p, rule, result);
  };
  return p.is_packed ? to(PackedValues{p}) : to(Dense<Y>{p});
}

}  // namespace
