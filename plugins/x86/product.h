// A matrix times all tokens of a step, shared out among threads.
#pragma once

#include "decoder.h"

typedef enum {
    STORE,  // out = product
    ADD,    // out += product
    GATE,   // gated = codes of silu(gate) * up
} Finish;

typedef struct {
    const OstinatoMatrix *matrix;
    const Activation *by;
    int32_t num_tokens;
    Finish finish;
    float *out;  // [T, rows]
    const Activation *gated;
    int has_amx;
} Product;

// The units that the caller finds left to do. What `by` holds must be there; who reads the result meets first.
void multiply_share(Crew *crew, const Product *product, Scratch *scratch);
