// What a decoder has between and during steps.
#pragma once

#include "attention.h"
#include "crew.h"
#include "matrix.h"

enum { ALONE_TOKENS = 8 };  // so many or fewer: every thread prepares all inputs itself, which is cheaper than meeting

// A thread's working memory.
typedef struct {
    Activation own;  // one panel
    AttentionScratch attention;
} Scratch;

// A row's tokens `first`..`first + count` of the step, the first of them at `position` of the row, and at `line` of
// what they attended to.
typedef struct {
    int32_t row, first, count, position, line;
} Piece;

struct OstinatoDecoder {
    OstinatoModel model;
    OstinatoLayer *layers;
    OstinatoLimits limits;
    OstinatoStep step;
    int32_t num_pieces, has_chunks;  // has_chunks: some row has several tokens
    int32_t q_width, kv_width, qkv_width, group;
    int has_amx;
    float attention_scale;
    Piece *pieces;          // [max_step_tokens] what attention is cut into
    Piece *sampled_pieces;  // [max_step_tokens] the same of the tokens that are sampled, one each
    int32_t *positions;  // [max_step_tokens]
    int32_t *slots;      // [max_step_tokens]
    float *hidden;       // [T, hidden]
    float *sampled;      // [S, hidden] of the last layer, where not all tokens are sampled
    float *qkv;          // [T, qkv_width]
    float *attended;     // [T, q_width], of the last layer [S, q_width] where not all tokens are sampled
    float *gated;        // [T, intermediate]
    Activation inputs;   // of hidden, attended or gated
    uint8_t *caches;     // [layers][num_blocks][Hkv] blocks
    size_t cache_bytes;
    Scratch *scratch;  // [threads]
    Crew crew;
};

// One member's part of the step that `context`, a decoder, holds.
void run_step(void *context, int32_t member);
