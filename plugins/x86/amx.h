// The same products on a CPU with AMX, whose tiles multiply 16 tokens with 16 outputs at once. Sums of 32 products are
// integers and exact, and what is done with them is the same, in the same order: so are the bits.
#pragma once

#include "activation.h"

// Whether this CPU has AMX for int8 and the system lets this process use it.
int amx_is_there(void);

// A thread's tiles, before and after its products of a step.
void amx_begin(void);
void amx_end(void);

// What amx_multiply takes of a tile. `codes` [K/32][8][16][4]: unsigned where there are minima, else signed.
typedef struct {
    const uint8_t *codes, *scales, *minima;
} AmxTile;

// Products of a tile and `count` tokens, 1 to 16, from `line` of the activation on: [16][16] floats, of which those of
// tokens past the count say nothing.
void amx_multiply(const AmxTile *tile, const Activation *by, size_t line, int32_t count, float *products);
