// Rows of a step, over a few threads where it pays.
#include "sampler.h"

#include <stdio.h>
#include <stdlib.h>

#include "crew.h"
#include "sampling.h"

enum {
    DRAWN = 4,                // a row that is more than an argmax takes so many times the work of one
    WORTH_A_THREAD = 400000,  // logits of argmax rows: some 50 us, more than it takes a thread to wake
};

struct OstinatoSampler {
    int32_t vocab_size, num_threads;
    OstinatoSampling step;
    atomic_int next;  // the row that nobody has taken yet; not the crew's, of which the caller is no member
    SamplingScratch *scratch;  // [threads], the caller's first
    void *memory;
    Crew crew;  // the others
};

static Row row_of(const OstinatoSampling *step, int32_t row, int32_t vocab_size) {
    int32_t k = step->num_logprobs[row];
    return (Row){
        .logits = step->logits + (size_t)row * vocab_size,
        .uniform = step->uniforms[row],
        .temperature = step->temperature[row],
        .top_p = step->top_p[row],
        .min_p = step->min_p[row],
        .repetition = step->repetition[row],
        .presence = step->presence[row],
        .frequency = step->frequency[row],
        .top_k = step->top_k[row],
        .num_logprobs = k < vocab_size ? k : vocab_size,
        .num_biases = step->num_biases,
        .allowed = step->allowed ? step->allowed + (size_t)row * step->mask_words : NULL,
        .prompt_counts = step->prompt_counts ? step->prompt_counts[row] : NULL,
        .output_counts = step->output_counts ? step->output_counts[row] : NULL,
        .bias_ids = step->bias_ids + (size_t)row * step->num_biases,
        .bias_values = step->bias_values + (size_t)row * step->num_biases,
    };
}

static void take_rows(OstinatoSampler *sampler, int32_t member) {
    const OstinatoSampling *step = &sampler->step;
    for (int32_t at; (at = atomic_fetch_add(&sampler->next, 1)) < step->num_rows;) {
        Row row = row_of(step, at, sampler->vocab_size);
        int32_t *ids = step->top_ids + (size_t)at * step->num_slots;
        float *logprobs = step->top_logprobs + (size_t)at * step->num_slots;
        Draw drawn = sample_row(&row, &sampler->scratch[member], ids, logprobs);
        step->tokens[at] = drawn.token, step->logprobs[at] = drawn.logprob;
        for (int32_t slot = row.num_logprobs < 0 ? 0 : row.num_logprobs; slot < step->num_slots; slot++) {
            ids[slot] = NO_TOKEN, logprobs[slot] = NAN;
        }
    }
}

static void help(void *context, int32_t member) {
    take_rows(context, member + 1);
}

static int is_worth_a_thread(const OstinatoSampler *sampler) {
    const OstinatoSampling *step = &sampler->step;
    int64_t work = 0;
    for (int32_t row = 0; row < step->num_rows; row++) {
        int is_more = step->temperature[row] > 0.0f || step->num_logprobs[row] >= 0;
        work += (int64_t)sampler->vocab_size * (is_more ? DRAWN : 1);
    }
    return sampler->num_threads > 1 && step->num_rows > 1 && work >= WORTH_A_THREAD;
}

int32_t ostinato_sample(OstinatoSampler *sampler, const OstinatoSampling *step, char *error, size_t error_size) {
    for (int32_t i = 0; i < step->num_rows * step->num_biases; i++) {
        if (step->bias_ids[i] >= sampler->vocab_size) {
            snprintf(error, error_size, "row %d biases token %d of a vocabulary of %d", i / step->num_biases,
                     step->bias_ids[i], sampler->vocab_size);
            return -1;
        }
    }
    for (int32_t row = 0; row < step->num_rows; row++) {
        if (step->num_logprobs[row] > step->num_slots) {
            snprintf(error, error_size, "row %d asks for %d logprobs, there is room for %d", row,
                     step->num_logprobs[row], step->num_slots);
            return -1;
        }
    }
    sampler->step = *step;
    atomic_store(&sampler->next, 0);
    int is_shared = is_worth_a_thread(sampler);
    if (is_shared) crew_start(&sampler->crew);
    take_rows(sampler, 0);
    if (is_shared) crew_wait(&sampler->crew);
    return 0;
}

// A piece of `memory`, or of nothing while it is only measured.
static void *piece(char *memory, size_t *begin, size_t count, size_t size) {
    void *found = memory ? memory + *begin : NULL;
    *begin += (count * size + LANES * size + 63) / 64 * 64;
    return found;
}

// The scratch of a thread in `memory`; its size in bytes.
static size_t lay_out(SamplingScratch *scratch, int32_t vocab_size, char *memory) {
    size_t begin = 0, count = (size_t)vocab_size, peaks = (size_t)num_peaks(vocab_size);
    float **arrays[] = {&scratch->adjusted,   &scratch->hidden, &scratch->weights,
                        &scratch->candidates, &scratch->left,   &scratch->left_weights};
    scratch->vocab_size = vocab_size;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        // `left` also takes a row's peaks, of which a small vocabulary has more than it has tokens.
        *arrays[i] = piece(memory, &begin, count > peaks ? count : peaks, sizeof(float));
    }
    scratch->ids = piece(memory, &begin, count, sizeof(int32_t));
    scratch->ranks = piece(memory, &begin, count, sizeof(uint64_t));
    scratch->running = piece(memory, &begin, count / LINE + 1, sizeof(double));
    scratch->peaks.maxima = piece(memory, &begin, peaks, sizeof(float));
    scratch->hidden_peaks.maxima = piece(memory, &begin, peaks, sizeof(float));
    return begin;
}

static int make_scratch(OstinatoSampler *sampler) {
    SamplingScratch measured;
    size_t size = lay_out(&measured, sampler->vocab_size, NULL), threads = (size_t)sampler->num_threads;
    sampler->scratch = calloc(threads, sizeof *sampler->scratch);
    sampler->memory = aligned_alloc(64, threads * size);
    if (!sampler->scratch || !sampler->memory) return 0;
    for (size_t i = 0; i < threads; i++) {
        lay_out(&sampler->scratch[i], sampler->vocab_size, (char *)sampler->memory + i * size);
    }
    return 1;
}

static void free_sampler(OstinatoSampler *sampler) {
    free(sampler->scratch), free(sampler->memory), free(sampler);
}

OstinatoSampler *ostinato_sampler_open(int32_t vocab_size, int32_t num_threads, char *error, size_t error_size) {
    OstinatoSampler *sampler = aligned_alloc(64, sizeof *sampler);
    int refused = 12;  // ENOMEM
    if (sampler) {
        *sampler = (OstinatoSampler){.vocab_size = vocab_size, .num_threads = num_threads};
        if (make_scratch(sampler)) {
            refused = num_threads < 2 ? 0 : crew_open(&sampler->crew, num_threads - 1, help, sampler);
        }
        if (!refused) return sampler;
        free_sampler(sampler);
    }
    snprintf(error, error_size, "memory or %d threads were refused (error %d)", num_threads, refused);
    return NULL;
}

void ostinato_sampler_close(OstinatoSampler *sampler) {
    if (sampler->num_threads > 1) crew_close(&sampler->crew);
    free_sampler(sampler);
}
