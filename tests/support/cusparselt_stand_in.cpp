// cuSPARSELt on the CPU's memory, for tests of calls of it: calls are recorded, and what breaks a known rule is refused.
// Its compressed [m, k] has the m x k / 2 values by rows, then for each group of four half a byte: the places of its two.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

struct Struct {  // of any kind; knows where it was made and by whom, so that a moved, ended or foreign one is noticed
  const void* self;
  char kind;
  std::thread::id thread;
  int64_t rows, columns, leading;
  int type, order, number;  // of a matmul, whether b is transposed; of a selection, the algorithm
  const Struct *a, *b, *c;
  const uint16_t* bias;
  bool is(char k) const { return self == this && kind == k && thread == std::this_thread::get_id(); }
};
static_assert(sizeof(Struct) <= 512, "as the real ones");
static std::mutex lock;
static std::string calls, failing;
static int versions[3] = {0, 8, 0};
static size_t workspace_bytes = 0;
static bool early_bias = false;  // a library that reads the bias' address when the plan is made

template <typename... Numbers>
static int enter(const char* name, bool right, Numbers... numbers) {  // the status of a call
  std::lock_guard<std::mutex> guard(lock);
  calls += name;
  ((calls += " " + std::to_string(numbers)), ...);
  calls += "\n";
  return failing == name ? 10 : right ? 0 : 3;
}
static bool aligned(const void* p) { return p && reinterpret_cast<uintptr_t>(p) % 16 == 0; }
static int make(int status, Struct* x, char kind, Struct made) {
  if (status || !aligned(x)) return status ? status : 3;
  return *x = made, x->self = x, x->kind = kind, x->thread = std::this_thread::get_id(), 0;
}
static int end(const char* name, Struct* x, char kind) {
  int status = enter(name, x->self == x && x->kind == kind);
  return x->kind = 'x', status;
}
static double decode(uint16_t x, int type) {  // of bf16 or fp16
  int f = type == 14 ? 7 : 10, exponent = (x & 0x7fff) >> f, bias = (1 << (14 - f)) - 1;
  double value = std::ldexp((exponent ? 1 << f : 0) + (x & ((1 << f) - 1)), (exponent ? exponent : 1) - bias - f);
  return x >> 15 ? -value : value;
}
static uint16_t encode(double x, int type) {  // of 0 and normal numbers
  int f = type == 14 ? 7 : 10, exponent, bias = (1 << (14 - f)) - 1;
  double whole = std::nearbyint(std::ldexp(std::frexp(std::fabs(x), &exponent), f + 1));
  return x == 0 ? 0 : (x < 0) << 15 | (((exponent - 1 + bias) << f) + (int(whole) - (1 << f)));
}

#define API(name, ...) int cusparseLt##name(__VA_ARGS__)
extern "C" {
const char* stand_in_calls() { return calls.c_str(); }
void stand_in_set(const char* fails, int minor, size_t workspace, bool early) {
  calls.clear(), failing = fails, versions[1] = minor, workspace_bytes = workspace, early_bias = early;
}
API(GetProperty, int part, int* value) { return *value = versions[part], 0; }
API(Init, Struct* h) { return make(enter("Init", true), h, 'h', {}); }
API(Destroy, Struct* h) { return end("Destroy", h, 'h'); }
API(StructuredDescriptorInit, Struct* h, Struct* x, int64_t m, int64_t k, int64_t ld, uint32_t align, int type, int order, int half) {
  bool right = h->is('h') && ld == k && align == 16 && (type == 14 || type == 2) && order == 2 && half == 0;
  return make(enter("Sparse", right, m, k), x, 's', {0, 0, {}, m, k, ld, type, order});
}
API(DenseDescriptorInit, Struct* h, Struct* x, int64_t m, int64_t n, int64_t ld, uint32_t align, int type, int order) {
  bool right = h->is('h') && align == 16 && ld == (order == 2 ? n : m);
  return make(enter("Dense", right, m, n, order), x, 'd', {0, 0, {}, m, n, ld, type, order});
}
API(MatDescriptorDestroy, Struct* x) { return end("Matrix destroyed", x, x->kind == 's' ? 's' : 'd'); }
API(SpMMACompressedSize2, Struct* h, Struct* x, size_t* size, size_t* buffer) {
  return *size = x->rows * x->columns * 9 / 8, *buffer = 16, h->is('h') && x->is('s') ? 0 : 3;
}
API(SpMMACompress2, Struct* h, Struct* x, int is_a, int op, const uint16_t* dense, uint16_t* out, void* buffer, void* stream) {
  bool right = h->is('h') && x->is('s') && is_a && !op && aligned(dense) && aligned(out) && aligned(buffer) && !stream;
  int64_t groups = x->rows * x->columns / 4;
  for (int64_t g = 0; g < groups && right; g++) {
    int two[3] = {0, 0, 0}, found = 0;
    for (int i = 0; i < 4 && found < 3; i++) if (dense[4 * g + i]) two[found++] = i;
    if (found < 2) two[1] = two[0] ^ 1;
    right = found < 3;
    for (int i = 0; i < 2; i++) out[2 * g + i] = dense[4 * g + two[i]];
    uint8_t &byte = reinterpret_cast<uint8_t*>(out + 2 * groups)[g / 2], both = two[0] | two[1] << 2;
    byte = g % 2 ? (byte & 15) | both << 4 : both;
  }
  return enter("Compress", right);
}
API(MatmulDescriptorInit, Struct* h, Struct* x, int opA, int opB, Struct* a, Struct* b, Struct* c, Struct* d, int compute) {
  bool right = h->is('h') && !opA && a->is('s') && b->is('d') && c->is('d') && c == d && compute == 2 && c->rows == a->rows;
  right = right && (opB ? b->columns : b->rows) == a->columns && (opB ? b->rows : b->columns) == c->columns;
  return make(enter("Descriptor", right), x, 'g', {0, 0, {}, 0, 0, 0, 0, 0, opB, a, b, c});
}
API(MatmulDescSetAttribute, Struct* h, Struct* x, int what, const void* data, size_t size) {
  return std::memcpy(&x->bias, data, 8), enter("Bias", h->is('h') && x->is('g') && what == 8 && size == 8);
}
API(MatmulAlgSelectionInit, Struct* h, Struct* x, Struct* gemm, int algorithm) {
  return make(enter("Selection", h->is('h') && gemm->is('g') && !algorithm), x, 'i', {0, 0, {}, 0, 0, 0, 0, 0, 0, gemm});
}
API(MatmulAlgSetAttribute, Struct* h, Struct* x, int what, const int* data, size_t size) {
  return x->number = *data, enter("Algorithm", h->is('h') && x->is('i') && what == 0 && size == 4 && *data < 50, *data);
}
#ifndef VERSION_0_7
API(MatmulAlgSelectionDestroy, Struct* x) { return end("Selection destroyed", x, 'i'); }
#endif
API(MatmulPlanInit, Struct* h, Struct* x, Struct* gemm, Struct* chosen) {
  bool right = h->is('h') && gemm->is('g') && chosen->is('i') && chosen->a == gemm;
  return make(enter("Plan", right), x, 'p', {0, 0, {}, 0, 0, 0, 0, 0, chosen->number, gemm, chosen, h, gemm->bias});
}
API(MatmulGetWorkspace, Struct* h, Struct* x, size_t* size) { return *size = workspace_bytes, h->is('h') && x->is('p') ? 0 : 3; }
API(MatmulPlanDestroy, Struct* x) { return end("Plan destroyed", x, 'p'); }
API(Matmul, Struct* h, Struct* x, const float* alpha, const uint16_t* A, const uint16_t* B, const float* beta, const void* C, uint16_t* D, void* workspace, void** streams, int count) {
  const Struct *g = x->a, *a = g->a, *b = g->b, *d = g->c;
  bool right = h->is('h') && x->is('p') && x->c == h && g->is('g') && x->b->is('i') && a->is('s') && b->is('d') && d->is('d');
  right = right && aligned(A) && aligned(B) && aligned(D) && C == D && *alpha == 1 && *beta == 0 && count == 1 && !*streams;
  const uint16_t* bias = early_bias ? x->bias : g->bias;
  right = right && aligned(workspace) == (workspace_bytes > 0) && !bias == !x->bias && d->columns % 16 == 0;
  int64_t m = a->rows, k = a->columns, n = d->columns;
  const uint8_t* places = reinterpret_cast<const uint8_t*>(A + m * k / 2);
  for (int64_t i = 0; i < m && right; i++) for (int64_t j = 0; j < n; j++) {
    double sum = bias ? decode(bias[i], a->type) : 0;
    for (int64_t v = i * k / 2; v < (i + 1) * k / 2; v++) {
      int64_t at = v % (k / 2) / 2 * 4 + (places[v / 4] >> v % 4 * 2 & 3);
      sum += decode(A[v], a->type) * decode(B[g->number ? j * b->leading + at : at * b->leading + j], a->type);
    }
    D[d->order == 1 ? j * d->leading + i : i * d->leading + j] = encode(sum, a->type);
  }
  return enter("Matmul", right, m, n, k, x->number);
}
}
