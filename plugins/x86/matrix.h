// One tile of a matrix times a panel of tokens.
#pragma once

#include "activation.h"

// How products are made: what a tile's codes were turned into before, if anything.
typedef enum {
    PACKED,    // as they are in the file; best for a few tokens
    UNPACKED,  // 4-bit codes a byte each; 8-bit ones as they are
    AMX_CODES, // a byte each, signed where the matrix has 8 bits
} Codes;

typedef struct {
    _Alignas(64) float at[PANEL][OSTINATO_TILE];  // token, output
} Products;

static inline size_t tile_stride(const OstinatoMatrix *matrix) {
    size_t groups = (size_t)matrix->columns / 32, size = groups * (matrix->bits == 8 ? 544 : 320);
    return (size + 63) / 64 * 64;
}

static inline int32_t num_tiles(const OstinatoMatrix *matrix) {
    return (matrix->rows + OSTINATO_TILE - 1) / OSTINATO_TILE;
}

// The form of codes for so many tokens of a step.
Codes codes_for(const OstinatoMatrix *matrix, int32_t num_tokens, int has_amx);

// One tile and how it is multiplied. `codes`: what unpack_tile gave. `next`: the tile that comes after this one, to be
// read ahead once, or NULL.
typedef struct {
    const OstinatoMatrix *matrix;
    int32_t tile;
    Codes form;
    const uint8_t *codes, *next;
} TileWork;

// A tile's codes in the work's form, [K/32][8][16][4] in `into`, or where they are if that is their form.
const uint8_t *unpack_tile(TileWork *work, uint8_t *into);

// Products of a tile and tokens 0..count of a panel, count <= 16, without bias. A token's product is the same bits
// whatever the others are, in any form.
void multiply_tile(const TileWork *work, const Activation *by, int32_t panel, int32_t count, Products *products);

// Row `row` of an 8-bit matrix, as floats [columns].
void read_row(const OstinatoMatrix *matrix, int32_t row, float *out);
