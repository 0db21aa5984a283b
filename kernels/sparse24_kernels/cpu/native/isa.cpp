// A path whose kernels differ in their vectors only. Compiled once for each, with ISA and the flags of its CPUs.
#include "isa.h"

#include "few_tokens.h"
#include "many_tokens.h"

namespace {

template <class V>
int linear_of(const Linear& p) {
  return p.tokens <= WIDTH / 2 && !p.is_product ? few_tokens<V>(p) : many_tokens<V>(p);
}

int linear(const Linear& p) {
  if (p.value_dtype == INT8) return linear_of<int8_t>(p);
  return with_dtype(p.dtype, [&](auto x) { return linear_of<decltype(x)>(p); });
}

int unpack(const Linear& p) {
  return with_dtype(p.dtype, [&](auto x) {
    using X = decltype(x);
    return p.value_dtype == INT8 ? unpack<int8_t, X>(p) : unpack<X, X>(p);
  });
}

}  // namespace

#define MAKE(isa) extern const Path path_##isa = {#isa, linear, unpack};
#define MAKE_EXPANDED(isa) MAKE(isa)
MAKE_EXPANDED(ISA)
