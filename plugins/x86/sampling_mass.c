// Weights in float32, their sums in float64 and in one order: by lines of 256, and line after line.
#include "exponential.h"
#include "sampling.h"

Softness softness(float greatest, double temperature) {
    double factor = 1.0 / temperature;
    return (Softness){greatest, (float)factor, (float)(factor - (float)factor)};
}

// What weighs less than e^-87 weighs nothing: smaller floats are subnormal, and each costs a hundred normal ones.
void weigh(const float *logits, int32_t count, Softness by, float *weights) {
    __m512 greatest = _mm512_set1_ps(by.greatest), least = _mm512_set1_ps(-1e30f);  // not -inf, which times 0 is NaN
    __m512 lightest = _mm512_set1_ps(-87.0f);
    __m512 factor = _mm512_set1_ps(by.factor), rest = _mm512_set1_ps(by.factor_rest);
    for (int32_t at = 0; at < count; at += LANES) {
        __m512 below = _mm512_max_ps(least, _mm512_sub_ps(load_logits(logits, at, count), greatest));
        __m512 power = _mm512_fmadd_ps(below, factor, _mm512_mul_ps(below, rest));
        __mmask16 counts = _mm512_cmp_ps_mask(power, lightest, _CMP_GE_OQ);
        __m512 some = _mm512_maskz_mov_ps(counts, exponential(_mm512_max_ps(power, lightest)));
        _mm512_mask_storeu_ps(weights + at, live_lanes(at, count), some);
    }
}

static double sum_line(const float *weights, int32_t count) {
    __m512d low = _mm512_setzero_pd(), high = low;
    for (int32_t at = 0; at < count; at += LANES) {
        __m512 some = _mm512_maskz_loadu_ps(live_lanes(at, count), weights + at);
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(some)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(some, 1)));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

// The mass of all; `running` gets it up to each line's end.
double sum_lines(const float *weights, int32_t count, double *running) {
    double sum = 0.0;
    for (int32_t at = 0; at < count; at += LINE) {
        sum += sum_line(weights + at, count - at < LINE ? count - at : LINE);
        running[at / LINE] = sum;
    }
    return sum;
}

// Where the running mass first exceeds `target`, which is less than all of it.
int32_t find_crossing(const float *weights, int32_t count, const double *running, double target) {
    int32_t line = 0, last = (count - 1) / LINE, at, found = 0;
    while (line < last && !(running[line] > target)) line++;
    double sum = line ? running[line - 1] : 0.0;
    for (at = line * LINE; at < count && at < (line + 1) * LINE; at++) {
        sum += weights[at];
        if (weights[at] > 0.0f) found = at;  // where the line's own sum was greater by a rounding, its last weight
        if (sum > target) break;
    }
    return found;
}
