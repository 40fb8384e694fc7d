// Where a strict order of logits (descending, then by id) is cut so that what stays reaches a mass, or a number.
#include "sampling.h"

// Logits that reach the bound and their ids become the scratch's candidates; their number.
int32_t gather(const float *logits, int32_t count, float bound, SamplingScratch *scratch) {
    __m512 least = _mm512_set1_ps(bound);
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int32_t found = 0;
    for (int32_t at = 0; at < count; at += LANES) {
        __m512 some = load_logits(logits, at, count);
        __mmask16 high = _mm512_cmp_ps_mask(some, least, _CMP_GE_OQ) & live_lanes(at, count);
        if (!high) continue;
        __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(at), lanes);
        _mm512_storeu_ps(scratch->candidates + found, _mm512_maskz_compress_ps(high, some));
        _mm512_storeu_si512(scratch->ids + found, _mm512_maskz_compress_epi32(high, ids));
        found += __builtin_popcount(high);
    }
    return found;
}

typedef struct {
    float *logits, *weights;  // weights may be NULL: each is 1
    int32_t count;
    float least, greatest;
} Part;

static Part part_of(float *logits, float *weights, int32_t count) {
    __m512 least = _mm512_set1_ps(INFINITY), greatest = _mm512_set1_ps(-INFINITY);
    for (int32_t at = 0; at < count; at += LANES) {
        __mmask16 live = live_lanes(at, count);
        __m512 some = _mm512_maskz_loadu_ps(live, logits + at);
        least = _mm512_mask_min_ps(least, live, least, some);
        greatest = _mm512_mask_max_ps(greatest, live, greatest, some);
    }
    return (Part){logits, weights, count, _mm512_reduce_min_ps(least), _mm512_reduce_max_ps(greatest)};
}

static double mass_above(const Part *part, float middle) {
    __m512 border = _mm512_set1_ps(middle);
    __m512d low = _mm512_setzero_pd(), high = low;
    int32_t number = 0;
    for (int32_t at = 0; at < part->count; at += LANES) {
        __mmask16 live = live_lanes(at, part->count);
        __m512 some = _mm512_maskz_loadu_ps(live, part->logits + at);
        __mmask16 above = _mm512_mask_cmp_ps_mask(live, some, border, _CMP_GT_OQ);
        number += __builtin_popcount(above);
        if (!part->weights) continue;
        __m512 weights = _mm512_maskz_loadu_ps(above, part->weights + at);
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weights)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weights, 1)));
    }
    return part->weights ? _mm512_reduce_add_pd(_mm512_add_pd(low, high)) : (double)number;
}

// Only what is above the middle stays in the part, or only what is not. What is written was read before.
static void halve(Part *part, float middle, int is_upper) {
    __m512 border = _mm512_set1_ps(middle), least = _mm512_set1_ps(INFINITY), greatest = _mm512_set1_ps(-INFINITY);
    int32_t kept = 0;
    for (int32_t at = 0; at < part->count; at += LANES) {
        __mmask16 live = live_lanes(at, part->count);
        __m512 some = _mm512_maskz_loadu_ps(live, part->logits + at);
        __mmask16 above = _mm512_cmp_ps_mask(some, border, _CMP_GT_OQ);
        __mmask16 stays = live & (is_upper ? above : (__mmask16)~above);
        if (part->weights) {
            __m512 weights = _mm512_maskz_loadu_ps(live, part->weights + at);
            _mm512_storeu_ps(part->weights + kept, _mm512_maskz_compress_ps(stays, weights));
        }
        _mm512_storeu_ps(part->logits + kept, _mm512_maskz_compress_ps(stays, some));
        least = _mm512_mask_min_ps(least, stays, least, some);
        greatest = _mm512_mask_max_ps(greatest, stays, greatest, some);
        kept += __builtin_popcount(stays);
    }
    part->count = kept;
    part->least = _mm512_reduce_min_ps(least), part->greatest = _mm512_reduce_max_ps(greatest);
}

static int32_t count_ties(const Part *part, double above, double target) {
    double weight = part->weights ? part->weights[0] : 1.0, wanted = (target - above) / weight;
    int32_t most = part->count, ties = wanted < most ? (int32_t)wanted : most;
    while (ties > 1 && above + (ties - 1) * weight >= target) ties--;
    while (ties < most && above + ties * weight < target) ties++;
    return ties < 1 ? 1 : ties;
}

// The shortest run of ranks whose mass reaches the target, at least one and at most all. Arrays are used up; `weights`
// may be NULL: each is 1. The interval of values that the edge is in is halved until it is one value.
Edge find_edge(float *logits, float *weights, int32_t count, double target) {
    Part part = part_of(logits, weights, count);
    double above = 0.0;
    while (part.least < part.greatest) {
        float middle = 0.5f * part.least + 0.5f * part.greatest;
        if (!(middle >= part.least && middle < part.greatest)) middle = part.least;  // rounded to an end, or past it
        double upper = mass_above(&part, middle);
        int is_upper = above + upper >= target;
        if (!is_upper) above += upper;
        halve(&part, middle, is_upper);
    }
    return (Edge){part.least, count_ties(&part, above, target)};
}

// A value that k logits reach at least; none of the k best is below it.
float bound_of_best(const Peaks *peaks, int32_t k, SamplingScratch *scratch) {
    int32_t count = num_peaks(scratch->vocab_size);
    if (k > count) return -INFINITY;
    for (int32_t at = 0; at < count; at += LANES) {
        _mm512_storeu_ps(scratch->left + at, _mm512_loadu_ps(peaks->maxima + at));
    }
    return find_edge(scratch->left, NULL, count, k).value;
}

// What the edge cuts off weighs nothing.
void drop(const float *logits, int32_t count, Edge edge, float *weights) {
    __m512 border = _mm512_set1_ps(edge.value);
    int32_t left = edge.ties;
    for (int32_t at = 0; at < count; at += LANES) {
        __mmask16 live = live_lanes(at, count);
        __m512 some = _mm512_maskz_loadu_ps(live, logits + at);
        __mmask16 stays = _mm512_mask_cmp_ps_mask(live, some, border, _CMP_GT_OQ);
        __mmask16 equal = _mm512_mask_cmp_ps_mask(live, some, border, _CMP_EQ_OQ);
        if (equal) {
            equal = left < LANES ? (__mmask16)_pdep_u32((1u << left) - 1, equal) : equal;
            left -= __builtin_popcount(equal);
        }
        _mm512_mask_storeu_ps(weights + at, live & (__mmask16) ~(stays | equal), _mm512_setzero_ps());
    }
}
