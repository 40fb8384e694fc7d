// A matrix times all tokens of a step, shared out among threads.
#pragma once

#include "decoder.h"
#include "matrix_amx.h"

typedef enum {
    STORE,  // out = product
    ADD,    // out += product
    GATE,   // out = silu(gate) * up of a product whose tiles are gate, up, gate, up
} Finish;

typedef struct {
    const OstinatoMatrix *matrix;
    const Activation *by;
    Finish finish;
    float *out;  // [T, rows], of GATE [T, rows / 2]
    int has_amx;
} Product;

enum { CHUNK_PANELS = 8 };  // panels of tokens that a unit has at most

// Few tokens are multiplied with nibbles as they are.
static inline int uses_amx(const Product *p) {
    return p->has_amx && p->by->count > FEW_TOKENS;
}

// The units that the caller finds left to do. What `by` holds must be there; who reads the result meets first.
void multiply_share(Crew *crew, const Product *product);
