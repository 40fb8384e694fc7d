// The largest of numbers without their signs, from which a scale for their codes follows.
#pragma once

#include <immintrin.h>
#include <string.h>

#define LEAST 1e-30f  // numbers that are all below are nothing: what a largest code is divided by must not be too small

// As integers, bits of floats without a sign have the floats' order, and NaN is on top.
static inline __m512i size_bits(__m512 numbers) {
    return _mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x7fffffff));
}

// The largest number, NaN if one is, of such bits.
static inline float largest_of(__m512i bits) {
    int32_t most = _mm512_reduce_max_epi32(bits);
    float top;
    memcpy(&top, &most, sizeof top);
    return top;
}
