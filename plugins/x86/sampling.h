// One row of FusedSampling, by vector passes over the vocabulary: nothing is sorted but the few logprobs asked for.
//
//   logits ─ adjust ─ peaks ─┬─ report: mass of all, the k best
//                            └─ hide ─ peaks ─ edge of top-k, top-p, min-p ─ candidates in order of id ─ crossing
//
// Every step works on this row and this thread's scratch alone, in an order that follows from the row.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

enum {
    LANES = 16,
    LINE = 256,             // weights whose sum is kept, when a point of the running mass is looked for
    PEAK_BLOCK = 64 * LANES,  // logits whose greatest, lane by lane, are kept
    NO_TOKEN = -1,
};

typedef struct {
    const float *logits;
    float uniform, temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k, num_logprobs, num_biases;
    const int32_t *allowed, *prompt_counts, *output_counts;  // or NULL
    const int32_t *bias_ids;
    const float *bias_values;
} Row;

typedef struct {
    int32_t token;
    float logprob;
} Draw;

// A row's greatest logit, where it stands first, and the greatest of every PEAK_BLOCK logits, lane by lane.
typedef struct {
    float *maxima;
    float greatest;  // NaN if any is
    int32_t id;
} Peaks;

// Where truncation cuts: logits above `value` stay, and of those equal to it the first `ties`.
typedef struct {
    float value;
    int32_t ties;
} Edge;

// exp((logit - greatest) / temperature) is what a logit weighs; 1 / temperature in two parts.
typedef struct {
    float greatest, factor, factor_rest;
} Softness;

// A thread's working memory; V = vocab_size, and room for a vector past each end.
typedef struct {
    int32_t vocab_size;
    float *adjusted, *hidden;           // [V] the row after bias and penalties, and after its mask
    float *weights;                     // [V]
    float *candidates;                  // [V] logits, in order of id
    int32_t *ids;                       // [V] theirs
    float *left, *left_weights;         // [V] what `find_edge` has not decided yet
    uint64_t *ranks;                    // [V]
    double *running;                    // [V / LINE] mass up to each line's end
    Peaks peaks, hidden_peaks;
} SamplingScratch;

static inline __mmask16 live_lanes(int32_t at, int32_t count) {
    return count - at >= LANES ? 0xffff : (__mmask16)((1u << (count - at)) - 1);
}

// Logits at `at`; -inf past the end.
static inline __m512 load_logits(const float *logits, int32_t at, int32_t count) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), live_lanes(at, count), logits + at);
}

// sampling_adjust.c
int is_adjusted(const Row *row);
void adjust(const Row *row, int32_t vocab_size, float *adjusted);
int is_hidden(const int32_t *allowed, int32_t vocab_size);
void hide(const float *logits, const int32_t *allowed, int32_t vocab_size, float *hidden);

// sampling_peaks.c
void find_peaks(const float *logits, int32_t count, Peaks *peaks);
int32_t num_peaks(int32_t count);

// sampling_mass.c
Softness softness(float greatest, double temperature);
void weigh(const float *logits, int32_t count, Softness by, float *weights);
double sum_lines(const float *weights, int32_t count, double *running);
int32_t find_crossing(const float *weights, int32_t count, const double *running, double target);

// sampling_edge.c
int32_t gather(const float *logits, int32_t count, float bound, SamplingScratch *scratch);
float bound_of_best(const Peaks *peaks, int32_t k, SamplingScratch *scratch);
Edge find_edge(float *logits, float *weights, int32_t count, double target);
void drop(const float *logits, int32_t count, Edge edge, float *weights);

// sampling_draw.c
int32_t draw(const Row *row, const float *logits, const Peaks *peaks, SamplingScratch *scratch);

// sampling_row.c: room for num_logprobs in `top_ids` and `top_logprobs`.
Draw sample_row(const Row *row, SamplingScratch *scratch, int32_t *top_ids, float *top_logprobs);
