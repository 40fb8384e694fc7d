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

// The units that the caller finds left to do. What `by` holds must be there; who reads the result meets first.
void multiply_share(Crew *crew, const Product *product);
