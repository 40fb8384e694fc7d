// Paged attention of some tokens of one row to one KV head.
#pragma once

#include "cache.h"
#include "column.h"

enum { MOST_QUERIES = 48 };  // tokens times query heads of a unit, where one token has not more

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
    int has_amx;
} AttentionShape;

// A thread's working memory. Queries, and weights of softmax, are integers of 16 bits with a scale: what is summed up
// of their products with codes is exact, and takes half as many instructions as in floats.
typedef struct {
    _Alignas(64) int16_t keys[MOST_HEAD_SIZE / 2][OSTINATO_BLOCK][2];
    _Alignas(64) int16_t values[OSTINATO_BLOCK / 2 * MOST_HEAD_SIZE * 2];
    int16_t *queries;         // [Q][D], Q queries of a unit
    uint8_t *planes;          // of columns: [Q/16] of 2 * plane_bytes, the high and the low bytes of queries
    float *sums;              // [Q][D], of columns [Q/16][D][16]
    float *scales, *maxima, *weights;  // [Q] of queries, of online softmax
    int32_t *positions;                // of columns: [Q]
} AttentionScratch;

// Bytes of sixteen queries' high or low bytes, [D up to whole chunks / 4][16][4].
static inline size_t plane_bytes(int32_t head_size) {
    return (size_t)((head_size + CHUNK - 1) / CHUNK * CHUNK) * 16;
}

static inline int32_t last_block(const AttentionUnit *unit) {
    return (unit->first + unit->count - 1) / OSTINATO_BLOCK;
}

// The first block that the unit's first token sees.
static inline int32_t first_block(const AttentionUnit *unit, const AttentionShape *shape) {
    int32_t window = shape->sliding_window;
    return window && unit->first >= window ? (unit->first - window + 1) / OSTINATO_BLOCK : 0;
}

static inline CacheBlock block_at(const AttentionUnit *unit, const AttentionShape *shape, int32_t index) {
    size_t number = (size_t)unit->table[index] * shape->num_kv_heads + unit->kv_head;
    return cache_block(shape->blocks, number, shape->head_size);
}

// Codes [D] of a query; returns what they are to be multiplied with.
float quantize_query(const float *query, int32_t head_size, int16_t *codes);

// The unit's attention: a query's bits are the same whatever else the unit has, with AMX and without.
void attend(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch);
