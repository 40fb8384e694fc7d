// Paged attention of some tokens of one row to one KV head.
#pragma once

#include "cache.h"

enum {
    MOST_QUERIES = 48,    // tokens times query heads of a unit, where one token has not more
    MOST_HEAD_SIZE = 256,
};

// Tokens at positions first..first+count of a row, whose keys and values are in the cache up to the last of them.
typedef struct {
    const int32_t *table;  // the row's blocks
    int32_t first, count;
    int32_t kv_head;
    const float *queries;  // of the first token's first query head of this KV head; a token is `query_stride` further
    float *out;            // in the same way
    size_t query_stride, out_stride;
} AttentionUnit;

typedef struct {
    uint8_t *blocks;  // a layer's cache: [num_blocks][Hkv] blocks
    int32_t num_kv_heads, group, head_size;  // group: query heads a KV head
    int32_t sliding_window;
    float scale;
} AttentionShape;

// A thread's working memory. Queries, and weights of softmax, are integers of 16 bits with a scale: what is summed up
// of their products with codes is exact, and takes half as many instructions as in floats.
typedef struct {
    _Alignas(64) int16_t keys[MOST_HEAD_SIZE / 2][OSTINATO_BLOCK][2];
    _Alignas(64) int16_t values[OSTINATO_BLOCK / 2 * MOST_HEAD_SIZE * 2];
    int16_t *queries;         // [Q][D], Q queries of a unit
    float *sums;              // [Q][D]
    float *scales, *maxima, *weights;  // [Q] of queries, of online softmax
} AttentionScratch;

void attend(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch);
