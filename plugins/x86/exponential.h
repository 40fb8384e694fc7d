// exp(x) of 16 floats to about 1 ulp; exp(0) is exactly 1. Too small gives 0, too large infinity, NaN stays NaN. What
// would be subnormal is 0: making such a number takes a processor a hundred times as long.
#pragma once

#include <immintrin.h>

static inline __m512 exponential(__m512 x) {
    __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);  // or NaN
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), x);  // min gives its second argument where one is NaN
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);  // Cephes' minimax polynomial
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), rest);
    return _mm512_maskz_scalef_ps(is_normal, _mm512_add_ps(sum, _mm512_set1_ps(1.0f)), whole);
}
