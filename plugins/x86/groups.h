// Inputs in blocks, and blocks in groups that share a scale.
#pragma once

#include "ostinato_x86.h"

enum { MOST_SPAN = 4 };  // 256 inputs: so many products of a weight and a 16-bit number have a sum of 32 bits

static inline int32_t blocks_of(int32_t columns) {
    return (columns + OSTINATO_DEPTH - 1) / OSTINATO_DEPTH;
}

// Blocks of a group.
static inline int32_t span_of(int32_t columns) {
    int32_t span = MOST_SPAN;
    while (blocks_of(columns) % span) span--;
    return span;
}
