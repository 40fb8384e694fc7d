// The greatest logits: of a row, and of each of its blocks, which bound the k-th best of all.
#include "sampling.h"

int32_t num_peaks(int32_t count) {
    return (count + PEAK_BLOCK - 1) / PEAK_BLOCK * LANES;
}

// Lane by lane the greatest of a whole block; `strange` gets bits where a logit is NaN.
static __m512 block_peaks(const float *logits, __mmask16 *strange) {
    __m512 one = _mm512_set1_ps(-INFINITY), other = one;
    for (int32_t at = 0; at < PEAK_BLOCK; at += 2 * LANES) {
        __m512 first = _mm512_loadu_ps(logits + at), second = _mm512_loadu_ps(logits + at + LANES);
        *strange |= _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q);
        one = _mm512_max_ps(first, one), other = _mm512_max_ps(second, other);
    }
    return _mm512_max_ps(one, other);
}

static __m512 end_peaks(const float *logits, int32_t count, __mmask16 *strange) {
    __m512 peaks = _mm512_set1_ps(-INFINITY);
    for (int32_t at = 0; at < count; at += LANES) {
        __m512 some = load_logits(logits, at, count);
        *strange |= _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
        peaks = _mm512_max_ps(some, peaks);
    }
    return peaks;
}

// The first place of a value that is there.
static int32_t find_first(const float *logits, int32_t count, const Peaks *peaks) {
    __m512 wanted = _mm512_set1_ps(peaks->greatest);
    int32_t block = 0;
    while (!_mm512_cmp_ps_mask(_mm512_loadu_ps(peaks->maxima + block * LANES), wanted, _CMP_EQ_OQ)) block++;
    for (int32_t at = block * PEAK_BLOCK;; at += LANES) {
        __mmask16 equal = _mm512_cmp_ps_mask(load_logits(logits, at, count), wanted, _CMP_EQ_OQ);
        if (equal) return at + __builtin_ctz(equal);
    }
}

void find_peaks(const float *logits, int32_t count, Peaks *peaks) {
    __m512 greatest = _mm512_set1_ps(-INFINITY);
    __mmask16 strange = 0;
    for (int32_t at = 0; at < count; at += PEAK_BLOCK) {
        int32_t left = count - at;
        __m512 some = left < PEAK_BLOCK ? end_peaks(logits + at, left, &strange) : block_peaks(logits + at, &strange);
        _mm512_storeu_ps(peaks->maxima + at / PEAK_BLOCK * LANES, some);
        greatest = _mm512_max_ps(greatest, some);
    }
    peaks->greatest = strange ? NAN : _mm512_reduce_max_ps(greatest);
    peaks->id = strange ? NO_TOKEN : find_first(logits, count, peaks);
}
