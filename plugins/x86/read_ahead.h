// Memory gives more if it is asked early.
#pragma once

#include <immintrin.h>
#include <stddef.h>

static inline void read_ahead(const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)from + i, _MM_HINT_T0);
}
