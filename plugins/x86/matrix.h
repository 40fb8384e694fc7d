// A group of a tile's inputs times some tokens.
#pragma once

#include "activation.h"
#include "weights.h"

enum { FEW_TOKENS = 2 };  // so few are not worth AMX, and are multiplied with 4-bit codes as those are unpacked

// A group of a tile: `codes` its blocks, of 8 bits or, where they are `nibbles`, of 4. `scales` [16]. `next`: what is
// to be read ahead, as many bytes as the codes have, or NULL.
typedef struct {
    const uint8_t *codes, *next;
    const float *scales;
    int nibbles;
} TileGroup;

// products += group * tokens 0..count of a panel, of which the group is number `group`. Of nibbles not more than
// FEW_TOKENS. What tokens past the count get says nothing. A token's products are the same bits whatever the others
// are.
void multiply_group(const TileGroup *of, const Activation *by, int32_t panel, int32_t group, int32_t count,
                    Products *products);

// Row `row` of an 8-bit matrix, as floats [columns].
void read_row(const OstinatoMatrix *matrix, int32_t row, float *out);
