// The vectors of a path.
#pragma once
#if ISA_AVX512
#define VECTOR_BYTES 64
#include "isa_avx512.h"
#elif ISA_AVX2
#define VECTOR_BYTES 32
#include "isa_avx2.h"
#elif ISA_NEON
#define VECTOR_BYTES 16
#include "isa_neon.h"
#else
#define VECTOR_BYTES 16
#include "isa_portable.h"
#endif
