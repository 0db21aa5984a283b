// Pruning, most of it in groups of four, bit for bit as the reference in Python does it. Compilers make vectors of the plain loops,
// so this is compiled once for each path; without fused multiply-add, which the reference does not have.
#include "problem.h"

namespace {

constexpr int N = 64;  // groups in a block
constexpr int64_t PART = 4096, TASK = 32768;  // elements of a row that one item has; elements of a task at least
typedef float Four[4][N];  // members of the groups of a block
struct Uniform { float u[N]; };

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

// Groups along the last dimension; of a random rule, four rows at a time, because they share random words.
template <class X, class Y, bool RANDOM, class Rule>
int along_rows(const Pruning& p, Rule rule) {
  const int64_t total = p.before * p.size, block = 4 * N;
  if (!RANDOM)
    return parallel(p, (total + block - 1) / block, block, [&](int64_t b) {
      Four x, y;
      const int64_t count = total - b * block < block ? total - b * block : block;
      load_row((const X*)p.x + b * block, count, x);
      rule(x, nullptr, y);
      store_row(y, count, (Y*)p.y + b * block);
    });
  return parallel(p, (p.before + 3) / 4, 4 * p.size, [&](int64_t four) {
    Four x, y, u;
    for (int64_t column = 0; column < p.size; column += block) {
      philox<N>(p.key, four, 0, column / 4, 1, u);
      for (int64_t row = 4 * four; row < p.before && row < 4 * four + 4; row++) {
        const int64_t at = row * p.size + column, count = p.size - column < block ? p.size - column : block;
        load_row((const X*)p.x + at, count, x);
        rule(x, u[row % 4], y);
        store_row(y, count, (Y*)p.y + at);
      }
    }
  });
}

// Groups along another dimension.
template <class X, class Y, bool RANDOM, class Rule>
int along_columns(const Pruning& p, Rule rule) {
  const int64_t groups = (p.size + 3) / 4;
  return parallel(p, p.before * groups, 4 * p.after, [&](int64_t item) {
    const int64_t plane = item / groups, group = item % groups, vector = plane * p.after;
    const int64_t members = p.size - 4 * group < 4 ? p.size - 4 * group : 4;
    const X* from = (const X*)p.x + (plane * p.size + 4 * group) * p.after;
    Y* to = (Y*)p.y + (plane * p.size + 4 * group) * p.after;
    Four x = {}, y;
    float words[4][N / 4], u[N];
    for (int64_t column = 0; column < p.after;) {
      // A block begins with the first of four vectors, which share random words.
      const int64_t skipped = RANDOM ? (vector + column) % 4 : 0;
      const int64_t count = p.after - column < N - skipped ? p.after - column : N - skipped;
      for (int i = 0; i < members; i++)
        for (int64_t g = 0; g < count; g++) x[i][g] = to_float(from[i * p.after + column + g]);
      if (RANDOM) {
        philox<N / 4>(p.key, (vector + column) / 4, 1, group, 0, words);
        for (int g = 0; g < N / 4; g++)
#pragma GCC unroll 4
          for (int w = 0; w < 4; w++) u[4 * g + w] = words[w][g];
        if (skipped) memmove(u, u + skipped, (N - skipped) * sizeof *u);
      }
      rule(x, u, y);
      for (int i = 0; i < members; i++)
        for (int64_t g = 0; g < count; g++) store(y[i][g], to + i * p.after + column + g);
      column += count;
    }
  });
}

template <bool RANDOM, class X, class Y, class Rule>
int grouped(const Pruning& p, Rule rule) {
  return p.after == 1 ? along_rows<X, Y, RANDOM>(p, rule) : along_columns<X, Y, RANDOM>(p, rule);
}

// Of each group of any M, member by member: how many others it wins against by magnitude, of equal ones the first. The
// `count` groups of x, at most W, are `group` elements apart, and their members `member`.
constexpr int W = 16, LARGEST_M = 64;
template <class X, class Y>
inline void any_groups(const Pruning& p, const X* x, int64_t member, int64_t group, int64_t count, Y* y) {
  int32_t a[LARGEST_M][W] = {}, wins[LARGEST_M][W] = {};
  float threshold[W] = {};
  for (int64_t i = 0; i < p.m; i++)
    for (int64_t g = 0; g < count; g++) a[i][g] = as_bits(to_float(x[i * member + g * group])) & 0x7fffffff;
  for (int64_t i = 0; i < p.m; i++) {
    int32_t mine[W], won[W];  // copies, which stay in registers
    memcpy(mine, a[i], sizeof mine), memcpy(won, wins[i], sizeof won);
    for (int64_t j = i + 1; j < p.m; j++)
      for (int g = 0; g < W; g++) {
        const int32_t lost = a[j][g] > mine[g];
        won[g] += 1 - lost, wins[j][g] += lost;
      }
    memcpy(wins[i], won, sizeof won);
  }
  const int32_t dropped = p.m - p.n;
  if (p.rule == SOFT_THRESHOLD)
    for (int64_t i = 0; i < p.m; i++)
      for (int g = 0; g < W; g++) threshold[g] = wins[i][g] == dropped - 1 ? as_float(a[i][g]) : threshold[g];
  for (int64_t i = 0; i < p.m; i++)
    for (int64_t g = 0; g < count; g++) {
      const int64_t at = i * member + g * group;
      const float kept = (float)(wins[i][g] >= dropped), f = to_float(x[at]), t = threshold[g];
      store(p.rule == NM_MASK     ? kept
            : p.rule == MAGNITUDE ? f * kept  // so that a NaN shows
                                  : (-smaller(larger(f, -t), t) + f) * p.scale, y + at);
    }
}

template <class X, class Y>
int any_pattern(const Pruning& p) {
  const int64_t groups = p.size / p.m;
  if (p.m > LARGEST_M) return 1;
  if (p.after == 1)
    return parallel(p, (p.before * groups + W - 1) / W, W * p.m, [&](int64_t block) {
      const int64_t first = block * W, left = p.before * groups - first;
      any_groups(p, (const X*)p.x + first * p.m, 1, p.m, left < W ? left : W, (Y*)p.y + first * p.m);
    });
  return parallel(p, p.before * groups, p.m * p.after, [&](int64_t item) {
    const int64_t first = item * p.m * p.after;
    for (int64_t column = 0; column < p.after; column += W) {
      const int64_t at = first + column, left = p.after - column;
      any_groups(p, (const X*)p.x + at, p.after, 1, left < W ? left : W, (Y*)p.y + at);
    }
  });
}

// The parts of rows: f(first element, how many, first byte of packed bits).
template <class F>
int by_parts(const Pruning& p, const F& f) {
  const int64_t parts = (p.size + PART - 1) / PART, bytes = (p.size + 7) / 8;
  return parallel(p, p.before * parts, PART < p.size ? PART : p.size, [&](int64_t item) {
    const int64_t row = item / parts, column = item % parts * PART;
    f(row * p.size + column, p.size - column < PART ? p.size - column : PART, row * bytes + column / 8);
  });
}

// Bit j of the result's byte j is bit j of a byte: eight bools, and back.
inline uint64_t bools_of(uint8_t bits) {
  return (((bits * 0x0101010101010101u) & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

// f(x, bytes of the mask, how many, y) of each part.
template <class X, class Y, class F>
int masked(const Pruning& p, bool is_packed, const F& f) {
  return by_parts(p, [&](int64_t first, int64_t count, int64_t byte) {
    uint64_t bools[PART / 8];
    if (is_packed)
      for (int64_t i = 0; i < (count + 7) / 8; i++) bools[i] = bools_of(p.mask[byte + i]);
    f((const X*)p.x + first, is_packed ? (const uint8_t*)bools : p.mask + first, count, (Y*)p.y + first);
  });
}

template <class X, class Y>
int apply_mask(const Pruning& p) {
  return masked<X, Y>(p, p.rule == BITS, [](const X* x, const uint8_t* keep, int64_t count, Y* y) {
    for (int64_t i = 0; i < count; i++) store(to_float(x[i]) * (float)keep[i], y + i);  // so that a NaN shows
  });
}

// y += scale * (1 - mask) * x, by the fused multiply-add that torch's `add_` has, where the path has one.
int decay(const Pruning& p) {
#if defined(__FMA__) || defined(__aarch64__)
  return masked<float, float>(p, p.rule == DECAY_BITS, [&](const float* x, const uint8_t* keep, int64_t count, float* y) {
    const float scale = p.scale;
    for (int64_t i = 0; i < count; i++) y[i] = __builtin_fmaf(x[i] * (float)(1 - keep[i]), scale, y[i]);
  });
#else
  return (void)p, 1;
#endif
}

int pack_bits(const Pruning& p) {
  return by_parts(p, [&](int64_t first, int64_t count, int64_t byte) {
    const uint8_t* mask = (const uint8_t*)p.x + first;
    for (int64_t i = 0; i < count; i += 8) {
      uint64_t bools = 0;
      memcpy(&bools, mask + i, count - i < 8 ? count - i : 8);
      ((uint8_t*)p.y)[byte + i / 8] = bools * 0x0102040810204080u >> 56;
    }
  });
}

// Of each group of a 2:4 matrix the two that are kept, and their bits: what is not zero, and the first others.
inline void find_kept(const Four x, float first[N], float second[N], uint8_t bits[N]) {
  for (int g = 0; g < N; g++) {
    int32_t keep[4], left = 2, others = 2;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) others -= x[i][g] != 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const int32_t is_zero = x[i][g] == 0;
      keep[i] = is_zero ? others > 0 : left > 0;  // a NaN may fill a group
      others -= is_zero & keep[i], left -= keep[i];
    }
    first[g] = keep[0] ? x[0][g] : keep[1] ? x[1][g] : x[2][g];
    second[g] = keep[3] ? x[3][g] : keep[2] ? x[2][g] : x[1][g];
    bits[g] = keep[0] | keep[1] << 1 | keep[2] << 2 | keep[3] << 3;
  }
}

template <class X>
int pack(const Pruning& p) {
  X* values = (X*)p.y;
  uint8_t* mask = (uint8_t*)(values + p.before * p.size * p.after / 2);
  constexpr int GROUPS = 8;  // of a column at a time: a line of fp32 values
  if (p.after == 1) {
    const int64_t total = p.before * p.size, block = 4 * N;
    return parallel(p, (total + block - 1) / block, block, [&](int64_t b) {
      Four x;
      float kept[2][N];
      uint8_t bits[N];
      const int64_t at = b * block, count = total - at < block ? total - at : block;
      load_row((const X*)p.x + at, count, x);
      find_kept(x, kept[0], kept[1], bits);
      for (int64_t i = 0; i < count / 2; i++) from_float(kept[i % 2][i / 2], values + at / 2 + i);
      for (int64_t i = 0; i < count / 8; i++) mask[at / 8 + i] = bits[2 * i] | bits[2 * i + 1] << 4;
    });
  }
  return parallel(p, p.size / (4 * GROUPS), 4 * GROUPS * p.after, [&](int64_t item) {
    for (int64_t column = 0; column < p.after; column += N) {
      const int64_t count = p.after - column < N ? p.after - column : N;
      float kept[GROUPS][2][N];
      uint8_t bits[GROUPS][N];
      for (int group = 0; group < GROUPS; group++) {
        Four x = {};
        const X* from = (const X*)p.x + (item * GROUPS + group) * 4 * p.after + column;
        for (int i = 0; i < 4; i++)
          for (int64_t g = 0; g < count; g++) x[i][g] = to_float(from[i * p.after + g]);
        find_kept(x, kept[group][0], kept[group][1], bits[group]);
      }
      for (int64_t g = 0; g < count; g++) {
        X* to = values + (column + g) * p.size / 2 + item * 2 * GROUPS;
        uint8_t* to_mask = mask + ((column + g) * p.size + item * 4 * GROUPS) / 8;
#pragma GCC unroll 8
        for (int i = 0; i < GROUPS; i++) from_float(kept[i][0][g], to + 2 * i), from_float(kept[i][1][g], to + 2 * i + 1);
#pragma GCC unroll 4
        for (int i = 0; i < GROUPS / 2; i++) to_mask[i] = bits[2 * i][g] | bits[2 * i + 1][g] << 4;
      }
    }
  });
}

// The best of the 90 transposable masks of a 4 x 4 tile, as the reference finds it.
struct Scored { float score; int32_t bits; };
inline Scored better(Scored a, Scored b) { return {b.score > a.score ? b.score : a.score, b.score > a.score ? b.bits : a.bits}; }
inline Scored operator+(Scored a, Scored b) { return {a.score + b.score, a.bits + b.bits}; }

struct Pairs { Scored of[6]; };  // columns 01, 02, 03, 12, 13, 23
inline Scored all_apart(const Pairs& p) { return better(p.of[1] + p.of[4], p.of[0] + p.of[5]); }
inline Pairs apart(const float* x, const float* y, int x_bits, int y_bits) {
  Pairs pairs;
  constexpr int FIRST[] = {0, 0, 0, 1, 1, 2}, SECOND[] = {1, 2, 3, 2, 3, 3};
#pragma GCC unroll 6
  for (int at = 0; at < 6; at++) {
    const int i = FIRST[at], j = SECOND[at];
    pairs.of[at] = better({x[i] + y[j], (x_bits << i) + (y_bits << j)}, {x[j] + y[i], (x_bits << j) + (y_bits << i)});
  }
  return pairs;
}

template <class X>
int transposable(const Pruning& p) {
  constexpr float HUGE = 0x1.fffffep+127f / 16;
  return parallel(p, p.before / 4, 4 * p.size, [&](int64_t tile_row) {
    Four x[4];
    int32_t found[N];
    for (int64_t column = 0; column < p.size; column += 4 * N) {
      const int64_t at = tile_row * 4 * p.size + column, count = p.size - column < 4 * N ? p.size - column : 4 * N;
#pragma GCC unroll 4
      for (int row = 0; row < 4; row++) load_row((const X*)p.x + at + row * p.size, count, x[row]);
      for (int g = 0; g < N; g++) {
        float rows[4][4], halves[2][4];
#pragma GCC unroll 4
        for (int row = 0; row < 4; row++)
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const float a = __builtin_fabsf(x[row][i][g]);
            rows[row][i] = a <= HUGE ? a : HUGE;
          }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) halves[half][i] = rows[2 * half][i] + rows[2 * half + 1][i];
        const Pairs upper = apart(rows[0], rows[1], 1, 16), lower = apart(rows[2], rows[3], 256, 4096);
        const Pairs between = apart(halves[0], halves[1], 1 + 16, 256 + 4096);
        Scored best = all_apart(between);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) best = better(best, upper.of[i] + lower.of[i] + between.of[5 - i]);
        found[g] = better(best, all_apart(upper) + all_apart(lower)).bits;
      }
#pragma GCC unroll 4
      for (int row = 0; row < 4; row++)
        for (int g = 0; g < count / 4; g++) {
          const uint32_t bools = (found[g] >> 4 * row & 15) * 0x00204081u & 0x01010101u;
          memcpy((uint8_t*)p.y + at + row * p.size + 4 * g, &bools, 4);
        }
    }
  });
}

template <class X, class Y>
int pruned(const Pruning& p) {
  if (p.rule == MASK || p.rule == BITS) return apply_mask<X, Y>(p);
  if (p.n != 2 || p.m != 4) return any_pattern<X, Y>(p);
  if (p.rule == MAGNITUDE) return grouped<false, X, Y>(p, Magnitude{});
  return grouped<false, X, Y>(p, SoftThreshold{p.scale});
}

int prune(const Pruning& p) {
  if (p.rule == PACK_BITS) return pack_bits(p);
  if (p.rule == DECAY || p.rule == DECAY_BITS) return decay(p);
  return with_dtype(p.dtype, [&](auto x) {
    using X = decltype(x);
    if (p.rule == NM_MASK && (p.n != 2 || p.m != 4)) return any_pattern<X, uint8_t>(p);
    if (p.rule == NM_MASK) return grouped<false, X, uint8_t>(p, NmMask{});
    if (p.rule == MVUE) return grouped<true, X, X>(p, Mvue{});
    if (p.rule == TRANSPOSABLE) return transposable<X>(p);
    if (p.rule == PACK) return pack<X>(p);
    return with_dtype(p.result_dtype, [&](auto y) { return pruned<X, decltype(y)>(p); });
  });
}

}  // namespace

#define MAKE(isa) extern Prune* const prune_##isa = prune;
#define MAKE_EXPANDED(isa) MAKE(isa)
MAKE_EXPANDED(ISA)
