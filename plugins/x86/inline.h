// Kernels are written once, inlined with their counts known, and unrolled, so that sums stay in registers.
#pragma once

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
