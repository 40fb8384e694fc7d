#include "activation.h"

#include "inline.h"
#include "largest.h"

#define TOP 32512.0f   // 127 * 256: the largest number whose high byte, rounded, is one

// x, or x * factor * weight where there is a weight.
INLINE __m512 sixteen(const float *x, const float *weight, __m512 factor, int32_t at) {
    __m512 numbers = _mm512_loadu_ps(x + at);
    return weight ? _mm512_mul_ps(_mm512_mul_ps(numbers, factor), _mm512_loadu_ps(weight + at)) : numbers;
}

INLINE float largest(const float *x, const float *weight, __m512 factor, int32_t columns) {
    __m512i size[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int32_t i = 0; i < columns; i += 32) {
        UNROLLED
        for (int k = 0; k < 2; k++) {
            size[k] = _mm512_max_epi32(size[k], size_bits(sixteen(x, weight, factor, i + 16 * k)));
        }
    }
    return largest_of(_mm512_max_epi32(size[0], size[1]));
}

// Inlined with a weight or without.
INLINE void write_token(const Activation *to, int32_t token, const float *x, const float *weight, __m512 factor) {
    float top = largest(x, weight, factor, to->columns);
    int32_t panel = token / PANEL, line = token % PANEL, *offsets = to->offsets + (size_t)panel * to->groups * PANEL;
    int8_t *codes = to->codes + (size_t)panel * to->blocks * PANEL_BLOCK + line * LINE;
    const __m512 steps = _mm512_set1_ps(top < LEAST ? 0.0f : TOP / top);
    const __m512i half = _mm512_set1_epi32(128);
    __m512i sum = _mm512_setzero_si512();
    for (int32_t block = 0; block < to->blocks; block++, codes += PANEL_BLOCK) {
        UNROLLED
        for (int k = 0; k < 4; k++) {
            int32_t at = block * OSTINATO_DEPTH + 16 * k;
            __m512i number = _mm512_setzero_si512();
            if (at < to->columns) number = _mm512_cvtps_epi32(_mm512_mul_ps(sixteen(x, weight, factor, at), steps));
            sum = _mm512_add_epi32(sum, number);
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, half), 8);  // then the low byte has a sign
            _mm_store_si128((__m128i *)(codes + 16 * k), _mm512_cvtepi32_epi8(high));
            _mm_store_si128((__m128i *)(codes + OSTINATO_DEPTH + 16 * k), _mm512_cvtepi32_epi8(number));
        }
        if ((block + 1) % to->span == 0) {
            offsets[block / to->span * PANEL + line] = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(sum));
            sum = _mm512_setzero_si512();
        }
    }
    to->scales[token] = top < LEAST ? 0.0f : top / TOP;
}

void quantize_token(const Activation *to, int32_t token, const float *x) {
    write_token(to, token, x, NULL, _mm512_setzero_ps());
}

float inverse_rms(const float *x, int32_t count, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int32_t i = 0; i < count; i += 16) {
        __m512 part = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)count;
    return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
}

void normalize_token(const Activation *to, int32_t token, const float *x, const float *weight, float eps) {
    write_token(to, token, x, weight, _mm512_set1_ps(inverse_rms(x, to->columns, eps)));
}
