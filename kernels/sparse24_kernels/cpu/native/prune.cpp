// Pruning, most of it in groups of four, bit for bit as the reference in Python does it. Compilers make vectors of the plain loops,
// so this is compiled once for each path; without fused multiply-add, which the reference does not have.
#include "groups_of_four.h"

namespace {

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

constexpr int64_t PART = 4096;  // elements of a row that one item has

// The parts of rows: f(first element, how many, first byte of packed bits).
template <class F>
int by_parts(const Pruning& p, const F& f) {
  const int64_t parts = (p.size + PART - 1) / PART, bytes = (p.size + 7) / 8;
  return parallel(p, p.before * parts, PART < p.size ? PART : p.size, [&](int64_t item) {
    const int64_t row = item / parts, column = item % parts * PART;
    f(row * p.size + column, p.size - column < PART ? p.size - column : PART, row * bytes + column / 8);
  });
}

// f(x, bools of the mask, how many, y) of each part.
template <class X, class Y, class F>
int masked(const Pruning& p, const F& f) {
  return by_parts(p, [&](int64_t first, int64_t count, int64_t byte) {
    uint64_t bools[PART / 8];
    f((const X*)p.x + first, bools_at(p, first, byte, count, bools), count, (Y*)p.y + first);
  });
}

template <class X, class Y>
int apply_mask(const Pruning& p) {
  return masked<X, Y>(p, [](const X* x, const int8_t* keep, int64_t count, Y* y) {
    for (int64_t i = 0; i < count; i++) store(to_float(x[i]) * (float)(keep[i] != 0), y + i);  // so that a NaN shows
  });
}

// y += scale * (1 - mask) * x, by the fused multiply-add that torch's `add_` has, where the path has one.
int decay(const Pruning& p) {
#if defined(__FMA__) || defined(__aarch64__)
  return masked<float, float>(p, [&](const float* x, const int8_t* keep, int64_t count, float* y) {
    const float scale = p.scale;
    for (int64_t i = 0; i < count; i++) y[i] = __builtin_fmaf(x[i] * (float)(keep[i] == 0), scale, y[i]);
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
  if (p.rule == MASK || p.rule == BITS) return p.is_packed ? grouped<false, X, Y>(p, Same{}) : apply_mask<X, Y>(p);
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
    return with_dtype(p.result_dtype, [&](auto y) { return pruned<X, decltype(y)>(p); });
  });
}

}  // namespace

#define MAKE(isa) extern Prune* const prune_##isa = prune;
#define MAKE_EXPANDED(isa) MAKE(isa)
MAKE_EXPANDED(ISA)
