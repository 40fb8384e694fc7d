#include "activation.h"

void quantize_token(const Activation *to, int32_t token, const float *x) {
    for (int32_t group = 0; group < to->groups; group++, x += 32) {
        quantize_group(to, token, group, _mm512_loadu_ps(x), _mm512_loadu_ps(x + 16));
    }
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
    __m512 factor = _mm512_set1_ps(inverse_rms(x, to->groups * 32, eps));
    for (int32_t group = 0; group < to->groups; group++, x += 32, weight += 32) {
        __m512 low = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), factor), _mm512_loadu_ps(weight));
        __m512 high = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16), factor), _mm512_loadu_ps(weight + 16));
        quantize_group(to, token, group, low, high);
    }
}
