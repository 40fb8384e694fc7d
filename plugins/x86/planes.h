// Products of numbers of 16 bits, which are multiplied by their high and by their low bytes.
#pragma once

#include <immintrin.h>

// What leaves 32 bits on the way comes back.
static inline __m512i joined(__m512i high, __m512i low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}
