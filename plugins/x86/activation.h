// What a matrix is multiplied with: tokens of int8 codes, each 32 with a scale of their own, in panels of 16 tokens.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "ostinato_x86.h"

enum { PANEL = 16 };

// Of a panel, group g and token t: codes at [g][t][32], the other arrays at [g][t].
typedef struct {
    int8_t *codes;     // [panels][K/32][16][32]
    float *scales;     // [panels][K/32][16]
    float *sums;       // [panels][K/32][16] scale * sum of codes: what minima are multiplied with
    int32_t *offsets;  // [panels][K/32][16] -128 * sum of codes: where a sum of products with unsigned codes begins
    int32_t groups;    // K/32
} Activation;

static inline size_t panel_lines(const Activation *to, int32_t token, int32_t group) {
    return ((size_t)(token / PANEL) * to->groups + group) * PANEL + token % PANEL;
}

// Codes of 32 numbers: to nearest, halves to even. A group that is almost nothing is nothing; NaN gives scale NaN.
static inline void quantize_group(const Activation *to, int32_t token, int32_t group, __m512 low, __m512 high) {
    // Bits of floats without sign, as integers, have the floats' order, and NaN is the largest.
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    __m512i size = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), no_sign),
                                    _mm512_and_si512(_mm512_castps_si512(high), no_sign));
    int32_t bits = _mm512_reduce_max_epi32(size);
    float top;
    memcpy(&top, &bits, sizeof top);
    size_t line = panel_lines(to, token, group);
    __m512 factor = _mm512_set1_ps(top < 1e-30f ? 0.0f : 127.0f / top);
    __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
    __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
    _mm_storeu_si128((__m128i *)(to->codes + line * 32), _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(to->codes + line * 32 + 16), _mm512_cvtsepi32_epi8(second));
    float scale = top < 1e-30f ? 0.0f : top / 127.0f;
    int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    to->scales[line] = scale;
    to->sums[line] = scale * (float)sum;
    to->offsets[line] = (int32_t)(-128u * (uint32_t)sum);  // of NaN, whose sum is any number, it may wrap
}

// Token number `token` of `to` becomes x [K], as it is.
void quantize_token(const Activation *to, int32_t token, const float *x);

// The same of x's root mean square norm, times `weight` [K].
void normalize_token(const Activation *to, int32_t token, const float *x, const float *weight, float eps);

// 1 / sqrt(mean(x^2) + eps) of x [count], count % 16 == 0; always summed in the same order.
float inverse_rms(const float *x, int32_t count, float eps);
