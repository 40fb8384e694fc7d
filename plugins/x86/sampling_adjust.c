// Bias, penalties and mask: float32 operations in the oracle's order, so that every kernel ranks the same numbers.
#include <string.h>

#include "sampling.h"

static int is_penalised(const Row *row) {
    return row->repetition != 1.0f || row->presence != 0.0f || row->frequency != 0.0f;
}

int is_adjusted(const Row *row) {
    int adjusted = is_penalised(row) && (row->prompt_counts || row->output_counts);
    for (int32_t i = 0; i < row->num_biases; i++) adjusted |= row->bias_ids[i] >= 0;
    return adjusted;
}

static __m512i load_counts(const int32_t *counts, int32_t at, __mmask16 live) {
    return counts ? _mm512_maskz_loadu_epi32(live, counts + at) : _mm512_setzero_si512();
}

static __m512 penalise(const Row *row, __m512 logits, __m512i in_prompt, __m512i in_output) {
    __m512i zero = _mm512_setzero_si512();
    __mmask16 given = _mm512_cmpgt_epi32_mask(in_output, zero);
    __mmask16 seen = given | _mm512_cmpgt_epi32_mask(in_prompt, zero);
    if (!seen) return logits;
    __mmask16 positive = _mm512_cmp_ps_mask(logits, _mm512_setzero_ps(), _CMP_GT_OQ);
    __m512 repetition = _mm512_set1_ps(row->repetition);
    logits = _mm512_mask_mul_ps(logits, seen & ~positive, logits, repetition);
    logits = _mm512_mask_div_ps(logits, seen & positive, logits, repetition);
    logits = _mm512_mask_sub_ps(logits, given, logits, _mm512_set1_ps(row->presence));
    __m512 frequent = _mm512_mul_ps(_mm512_set1_ps(row->frequency), _mm512_cvtepi32_ps(in_output));
    return _mm512_mask_sub_ps(logits, given, logits, frequent);
}

void adjust(const Row *row, int32_t vocab_size, float *adjusted) {
    memcpy(adjusted, row->logits, (size_t)vocab_size * sizeof *adjusted);
    for (int32_t i = 0; i < row->num_biases; i++) {
        if (row->bias_ids[i] >= 0) adjusted[row->bias_ids[i]] += row->bias_values[i];
    }
    if (!is_penalised(row) || !(row->prompt_counts || row->output_counts)) return;
    for (int32_t at = 0; at < vocab_size; at += LANES) {
        __mmask16 live = live_lanes(at, vocab_size);
        __m512 logits = _mm512_maskz_loadu_ps(live, adjusted + at);
        __m512i in_prompt = load_counts(row->prompt_counts, at, live);
        __m512i in_output = load_counts(row->output_counts, at, live);
        _mm512_mask_storeu_ps(adjusted + at, live, penalise(row, logits, in_prompt, in_output));
    }
}

int is_hidden(const int32_t *allowed, int32_t vocab_size) {
    int32_t whole = vocab_size / 32;
    uint32_t all = ~0u;
    for (int32_t word = 0; word < whole; word++) all &= (uint32_t)allowed[word];
    uint32_t last = (1u << vocab_size % 32) - 1;
    return all != ~0u || (last && ((uint32_t)allowed[whole] & last) != last);
}

void hide(const float *logits, const int32_t *allowed, int32_t vocab_size, float *hidden) {
    __m512 never = _mm512_set1_ps(-INFINITY);
    for (int32_t at = 0; at < vocab_size; at += LANES) {
        __mmask16 live = live_lanes(at, vocab_size), legal = (__mmask16)((uint32_t)allowed[at / 32] >> at % 32);
        _mm512_mask_storeu_ps(hidden + at, live, _mm512_mask_loadu_ps(never, live & legal, logits + at));
    }
}
