// Weights as they lie in memory, and as they are multiplied: bytes, of which 128 means nothing.
#pragma once

#include <stddef.h>

#include "groups.h"

enum {
    BYTES_BLOCK = OSTINATO_DEPTH * OSTINATO_TILE,  // of 8-bit codes, and of weights as they are multiplied
    NIBBLE_CODES = BYTES_BLOCK / 2,                // of 4-bit codes, without what they are multiplied with
    NIBBLE_BLOCK = NIBBLE_CODES + 2 * 2 * OSTINATO_TILE * 2,
};

static inline size_t block_bytes(const OstinatoMatrix *matrix) {
    return matrix->bits == 8 ? BYTES_BLOCK : NIBBLE_BLOCK;
}

static inline size_t tile_stride(const OstinatoMatrix *matrix) {
    size_t blocks = (size_t)blocks_of(matrix->columns);
    return blocks * block_bytes(matrix) + blocks / (size_t)span_of(matrix->columns) * OSTINATO_TILE * sizeof(float);
}

static inline int32_t num_tiles(const OstinatoMatrix *matrix) {
    return (matrix->rows + OSTINATO_TILE - 1) / OSTINATO_TILE;
}

static inline const uint8_t *tile_at(const OstinatoMatrix *matrix, int32_t tile) {
    return matrix->tiles + tile_stride(matrix) * (size_t)tile;
}

// Scales [groups][16] of a tile.
static inline const float *tile_scales(const OstinatoMatrix *matrix, const uint8_t *tile) {
    return (const float *)(tile + (size_t)blocks_of(matrix->columns) * block_bytes(matrix));
}
