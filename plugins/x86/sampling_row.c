// A row from logits to token and logprobs.
#include <stdlib.h>
#include <string.h>

#include "sampling.h"

static const float GREEDY_BELOW = 1e-5f;  // a temperature under this is argmax

static Draw refuse_row(const Row *row, int32_t *top_ids, float *top_logprobs) {
    for (int32_t i = 0; i < row->num_logprobs; i++) top_ids[i] = NO_TOKEN, top_logprobs[i] = -INFINITY;
    return (Draw){NO_TOKEN, row->num_logprobs < 0 ? NAN : -INFINITY};
}

static int compare_ranks(const void *one, const void *other) {
    uint64_t first = *(const uint64_t *)one, second = *(const uint64_t *)other;
    return first < second ? -1 : first > second;
}

// Integers in strict order: the greater logit's is less, of equal ones the lower id's.
static uint64_t rank_of(float logit, int32_t id) {
    uint32_t bits;
    logit += 0.0f;  // -0 is 0
    memcpy(&bits, &logit, sizeof bits);
    uint32_t descending = bits >> 31 ? bits : ~bits & 0x7fffffff;
    return (uint64_t)descending << 32 | (uint32_t)id;
}

// The k best of `logits` [V] in strict order as ranks.
static void rank_best(const float *logits, const Peaks *peaks, int32_t k, SamplingScratch *scratch) {
    int32_t count = gather(logits, scratch->vocab_size, bound_of_best(peaks, k, scratch), scratch), kept = 0;
    memcpy(scratch->left, scratch->candidates, (size_t)count * sizeof(float));
    Edge edge = find_edge(scratch->left, NULL, count, k);
    for (int32_t i = 0, ties = 0; i < count; i++) {
        float logit = scratch->candidates[i];
        if (logit > edge.value || (logit == edge.value && ties++ < edge.ties)) {
            scratch->ranks[kept++] = rank_of(logit, scratch->ids[i]);
        }
    }
    qsort(scratch->ranks, (size_t)kept, sizeof *scratch->ranks, compare_ranks);
}

// The token's logprob and the k best, of the distribution before mask and temperature.
static float report(const float *adjusted, int32_t token, int32_t k, SamplingScratch *scratch, int32_t *top_ids,
                    float *top_logprobs) {
    double greatest = scratch->peaks.greatest;
    weigh(adjusted, scratch->vocab_size, softness(scratch->peaks.greatest, 1.0), scratch->weights);
    double log_mass = log(sum_lines(scratch->weights, scratch->vocab_size, scratch->running));
    if (k) rank_best(adjusted, &scratch->peaks, k, scratch);
    for (int32_t i = 0; i < k; i++) {
        top_ids[i] = (int32_t)(uint32_t)scratch->ranks[i];
        top_logprobs[i] = (float)(adjusted[top_ids[i]] - greatest - log_mass);
    }
    return (float)(adjusted[token] - greatest - log_mass);
}

Draw sample_row(const Row *row, SamplingScratch *scratch, int32_t *top_ids, float *top_logprobs) {
    int32_t size = scratch->vocab_size;
    const float *adjusted = row->logits;
    if (is_adjusted(row)) {
        adjust(row, size, scratch->adjusted);
        adjusted = scratch->adjusted;
    }
    find_peaks(adjusted, size, &scratch->peaks);
    if (!isfinite(scratch->peaks.greatest)) return refuse_row(row, top_ids, top_logprobs);
    const float *legal = adjusted;
    const Peaks *peaks = &scratch->peaks;
    if (row->allowed && is_hidden(row->allowed, size)) {
        hide(adjusted, row->allowed, size, scratch->hidden);
        legal = scratch->hidden, peaks = &scratch->hidden_peaks;
        find_peaks(legal, size, &scratch->hidden_peaks);
        if (peaks->greatest == -INFINITY) return refuse_row(row, top_ids, top_logprobs);
    }
    int is_drawn = row->temperature >= GREEDY_BELOW && row->top_k != 1;
    int32_t token = is_drawn ? draw(row, legal, peaks, scratch) : peaks->id;
    if (row->num_logprobs < 0) return (Draw){token, NAN};
    return (Draw){token, report(adjusted, token, row->num_logprobs, scratch, top_ids, top_logprobs)};
}
