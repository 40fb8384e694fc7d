// The KV cache: int8 codes and a float32 scale a token and head, in blocks of 32 tokens.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "ostinato_x86.h"

enum { MOST_HEAD_SIZE = 256 };

// A block of one KV head is contiguous: keys [D/2][32][2], values [16][D][2], key scales [32], value scales [32]. Two
// inputs of each of 16 keys, or two keys' number of each of 16 of D, are what one instruction takes.
typedef struct {
    int8_t *keys, *values;
    float *key_scales, *value_scales;
} CacheBlock;

static inline size_t cache_block_bytes(int32_t head_size) {
    return (size_t)OSTINATO_BLOCK * (2 * (size_t)head_size + 2 * sizeof(float));
}

static inline CacheBlock cache_block(uint8_t *blocks, size_t number, int32_t head_size) {
    size_t size = (size_t)OSTINATO_BLOCK * head_size;
    int8_t *keys = (int8_t *)(blocks + number * cache_block_bytes(head_size));
    float *scales = (float *)(keys + 2 * size);
    return (CacheBlock){keys, keys + size, scales, scales + OSTINATO_BLOCK};
}

// Turn a head x [D] by the angles [D/2] of its token; its two halves are the pairs.
void rotate_head(float *x, int32_t head_size, const float *cos, const float *sin);

// Token number `offset` of the block becomes key and value [D], quantized as plugins/cache_codes.py says.
void write_cache(CacheBlock block, int32_t offset, const float *key, const float *value, int32_t head_size);
