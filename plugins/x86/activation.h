// What a matrix is multiplied with: tokens of 16-bit numbers with a scale each, in panels of 16 tokens.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "groups.h"

enum {
    PANEL = 16,
    LINE = 2 * OSTINATO_DEPTH,      // bytes of a token in a block: high ones, then low ones
    PANEL_BLOCK = PANEL * LINE,
};

// A number is scale * (256 high + low), both signed: so it is multiplied as two numbers of 8 bits.
typedef struct {
    int8_t *codes;     // [panels][K/64][16][2][64] zeros past the last input
    int32_t *offsets;  // [panels][groups][16] -128 * sum of numbers: what unsigned weights' products have too much
    float *scales;     // [panels][16]
    int32_t count;     // tokens that it holds
    int32_t columns, blocks, span, groups;
} Activation;

// Of a panel and a tile.
typedef struct {
    _Alignas(64) float at[PANEL][OSTINATO_TILE];  // token, output
} Products;

// `of` is to hold `count` tokens of so many inputs; its memory must suffice.
static inline void shape_activation(Activation *of, int32_t count, int32_t columns) {
    of->count = count, of->columns = columns, of->blocks = blocks_of(columns), of->span = span_of(columns);
    of->groups = of->blocks / of->span;
}

// Codes [span][16][2][64] and offsets [16] of a panel's group.
static inline const int8_t *group_codes(const Activation *of, int32_t panel, int32_t group) {
    return of->codes + ((size_t)panel * of->blocks + (size_t)group * of->span) * PANEL_BLOCK;
}

static inline const int32_t *group_offsets(const Activation *of, int32_t panel, int32_t group) {
    return of->offsets + ((size_t)panel * of->groups + group) * PANEL;
}

// Token number `token` of `to` becomes x [K]: to nearest, halves to even. What is almost nothing is nothing; of NaN and
// of infinity the scale is that.
void quantize_token(const Activation *to, int32_t token, const float *x);

// The same of x's root mean square norm, times `weight` [K].
void normalize_token(const Activation *to, int32_t token, const float *x, const float *weight, float eps);

// 1 / sqrt(mean(x^2) + eps) of x [count], count % 16 == 0; always summed in the same order.
float inverse_rms(const float *x, int32_t count, float eps);
