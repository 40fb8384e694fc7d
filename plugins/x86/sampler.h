// FusedSampling in C: what the runtime calls to sample a step's logits, as plugins/fused_sampling.py defines it.
#pragma once

#include "ostinato_x86.h"

// S rows of V logits; M biases a row, W words of 32 bits a mask, room for K logprobs. All arrays are C-contiguous.
typedef struct {
    int32_t num_rows, num_biases, mask_words, num_slots;  // S, M, W, K
    const float *logits;                                  // [S, V]
    const float *uniforms, *temperature;                  // [S], as all that follow
    const int32_t *top_k;
    const float *top_p, *min_p, *repetition, *presence, *frequency;
    const int32_t *num_logprobs;           // -1: none, 0: the token's, k: the token's and the k best; k <= K
    const int32_t *allowed;                // [S, W], or NULL: all tokens
    const int32_t *bias_ids;               // [S, M], negative: none
    const float *bias_values;              // [S, M]
    const int32_t *const *prompt_counts;   // [S] of [V], each or all NULL: nothing counted
    const int32_t *const *output_counts;
    int32_t *tokens;                       // [S], written: -1 where a row has no legal token
    float *logprobs;                       // [S], written: NaN where none was asked for
    int32_t *top_ids;                      // [S, K], written: -1 past a row's own k
    float *top_logprobs;                   // [S, K], written: NaN past a row's own k
} OstinatoSampling;

typedef struct OstinatoSampler OstinatoSampler;

// For rows of `vocab_size` logits, a few at once: the caller of ostinato_sample is one of `num_threads`. NULL and a
// text in `error` where threads or memory are refused.
OSTINATO_API OstinatoSampler *ostinato_sampler_open(int32_t vocab_size, int32_t num_threads, char *error,
                                                    size_t error_size);

// 0, or -1 and a text in `error`: then nothing was written. One caller at a time.
OSTINATO_API int32_t ostinato_sample(OstinatoSampler *sampler, const OstinatoSampling *step, char *error,
                                     size_t error_size);

OSTINATO_API void ostinato_sampler_close(OstinatoSampler *sampler);
