// A draw: the edge of top-k, top-p and min-p together, then the token at which the kept mass crosses the uniform.
#include <float.h>
#include <limits.h>
#include <string.h>

#include "sampling.h"

static const double LIKELY = 0x1p-14;  // a share of the mass that top-p seldom cuts under, with few tokens above it
static const double MARGIN = 0.5;      // of a bound for candidates, far above what rounding does

typedef struct {
    const Row *row;
    const float *logits;
    const Peaks *peaks;
    SamplingScratch *scratch;
    Softness softness;
    int32_t num_candidates;
} Trial;

// The stricter of two.
static Edge earlier(Edge one, Edge other) {
    if (one.value != other.value) return one.value > other.value ? one : other;
    return one.ties < other.ties ? one : other;
}

// The least float whose weight is at least `weight`, at most the greatest.
static float logit_of(const Trial *trial, double weight) {
    double exact = trial->peaks->greatest + trial->row->temperature * log(weight);
    if (exact <= -FLT_MAX) return -FLT_MAX;
    if (exact >= trial->peaks->greatest) return trial->peaks->greatest;
    float rounded = (float)exact;
    return rounded < exact ? nextafterf(rounded, INFINITY) : rounded;
}

// Candidates from a bound on, and what they weigh: their mass.
static double choose(Trial *trial, float bound) {
    SamplingScratch *scratch = trial->scratch;
    float finite = bound < -FLT_MAX ? -FLT_MAX : bound;
    trial->num_candidates = gather(trial->logits, scratch->vocab_size, finite, scratch);
    weigh(scratch->candidates, trial->num_candidates, trial->softness, scratch->weights);
    return sum_lines(scratch->weights, trial->num_candidates, scratch->running);
}

static Edge edge_of(const Trial *trial, int is_mass, double target) {
    SamplingScratch *scratch = trial->scratch;
    size_t size = (size_t)trial->num_candidates * sizeof(float);
    memcpy(scratch->left, scratch->candidates, size);
    if (is_mass) memcpy(scratch->left_weights, scratch->weights, size);
    return find_edge(scratch->left, is_mass ? scratch->left_weights : NULL, trial->num_candidates, target);
}

static Edge cut_top_k(Trial *trial, int32_t k) {
    SamplingScratch *scratch = trial->scratch;
    choose(trial, bound_of_best(trial->peaks, k, scratch));
    Edge edge = edge_of(trial, 0, k);
    if (trial->row->top_p >= 1.0f) return edge;
    drop(scratch->candidates, trial->num_candidates, edge, scratch->weights);
    double mass = sum_lines(scratch->weights, trial->num_candidates, scratch->running);
    return earlier(edge, edge_of(trial, 1, trial->row->top_p * mass));
}

static Edge cut_top_p(Trial *trial) {
    SamplingScratch *scratch = trial->scratch;
    double p = trial->row->top_p;
    weigh(trial->logits, scratch->vocab_size, trial->softness, scratch->weights);
    double mass = sum_lines(scratch->weights, scratch->vocab_size, scratch->running);
    // What weighs less than (1 - p) * mass / V each amounts to less than 1 - p: the cut is never under it.
    double sure = (1.0 - p) * mass / scratch->vocab_size, likely = LIKELY * mass;
    if (likely <= sure || choose(trial, logit_of(trial, likely * MARGIN)) < p * mass) {
        choose(trial, logit_of(trial, sure * MARGIN));
    }
    return edge_of(trial, 1, p * mass);
}

static Edge cut_min_p(const Trial *trial) {
    return (Edge){logit_of(trial, trial->row->min_p), INT_MAX};
}

// `logits` [V] are the row's after its mask, of which some are finite.
int32_t draw(const Row *row, const float *logits, const Peaks *peaks, SamplingScratch *scratch) {
    Trial trial = {row, logits, peaks, scratch, softness(peaks->greatest, row->temperature), 0};
    int32_t k = row->top_k > 0 && row->top_k < scratch->vocab_size ? row->top_k : 0, has_min_p = row->min_p > 0.0f;
    if (!k && row->top_p >= 1.0f && !has_min_p) {
        weigh(logits, scratch->vocab_size, trial.softness, scratch->weights);
        double mass = sum_lines(scratch->weights, scratch->vocab_size, scratch->running);
        return find_crossing(scratch->weights, scratch->vocab_size, scratch->running, row->uniform * mass);
    }
    Edge edge = {-INFINITY, INT_MAX};
    if (k) {
        edge = cut_top_k(&trial, k);
    } else if (row->top_p < 1.0f) {
        edge = cut_top_p(&trial);
    } else {
        choose(&trial, logit_of(&trial, row->min_p));
    }
    if (has_min_p) edge = earlier(edge, cut_min_p(&trial));
    drop(scratch->candidates, trial.num_candidates, edge, scratch->weights);
    double mass = sum_lines(scratch->weights, trial.num_candidates, scratch->running);
    int32_t at = find_crossing(scratch->weights, trial.num_candidates, scratch->running, row->uniform * mass);
    return scratch->ids[at];
}
