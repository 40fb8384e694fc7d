// Sixteen queries and one block of keys and values, on AMX.
#pragma once

#include "cache.h"

enum { CHUNK = 64 };  // numbers of a head that a tile register holds

// A block whose codes are rows of tile registers.
typedef struct {
    _Alignas(64) int8_t keys[OSTINATO_BLOCK * MOST_HEAD_SIZE];    // [32][D up to whole chunks]
    _Alignas(64) int8_t values[MOST_HEAD_SIZE * OSTINATO_BLOCK];  // [D][32]
    const float *key_scales, *value_scales;
} Block;

// Sixteen queries side by side, so that softmax needs no sums across a register.
typedef struct {
    const uint8_t *queries;  // the high bytes of their codes, then the low ones: [2][D up to whole chunks / 4][16][4]
    float *sums;             // [D][16]
    float *scales, *maxima, *weights;  // [16] of queries, of online softmax
    const int32_t *positions;          // [16]
    int32_t first_key, window;
    int is_whole;  // every query sees every key
} Column;

// Tile registers as attend_column wants them; amx_end when done.
void begin_columns(void);

// A block of the cache, turned. Past the head's end keys hold anything: queries are 0 there.
void turn_block(CacheBlock from, int32_t head_size, Block *to);

void attend_column(const Column *column, const Block *block, int32_t head_size);
