// The same products on a CPU with AMX, of two tiles at once. Sums of a group are integers and exact, and what is done
// with them is the same, in the same order: so are the bits.
#pragma once

#include "matrix.h"

enum { PAIR = 2 };  // tiles that are multiplied together

// Before products with activations of `tokens` tokens; amx_end after the last.
void begin_pairs(int32_t tokens);

// products[k] += of[k] * tokens 0..count of a panel, of which the groups are number `group`. Begun for as many as `by`
// has.
// Nibbles are unpacked to `unpacked` [PAIR][span][BYTES_BLOCK], and the groups are then what stands there; what was to
// be read ahead has been.
void multiply_pair(TileGroup of[PAIR], const Activation *by, int32_t panel, int32_t group, int32_t count,
                   uint8_t *const unpacked[PAIR], Products products[PAIR]);
