// Compiled beside the kernels in tests: single kernels, called from Python.
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "attention_amx.h"
#include "exponential.h"
#include "nibbles.h"
#include "product.h"

OSTINATO_API int32_t probe_amx(void) {
    return amx_is_there();
}

OSTINATO_API void probe_exponential(const float *x, float *out, int32_t count) {
    for (int32_t i = 0; i < count; i += 16) _mm512_storeu_ps(out + i, exponential(_mm512_loadu_ps(x + i)));
}

static Activation room_for(int32_t tokens, int32_t columns) {
    Activation of = {0};
    shape_activation(&of, tokens, columns);
    size_t panels = (size_t)tokens / PANEL + 1, codes = panels * of.blocks * PANEL_BLOCK;
    of.codes = aligned_alloc(64, codes);
    memset(of.codes, 0x7f, codes);  // what other tokens left
    of.offsets = malloc(panels * of.groups * PANEL * sizeof *of.offsets);
    of.scales = malloc(panels * PANEL * sizeof *of.scales);
    return of;
}

static void drop(Activation *activation) {
    free(activation->codes), free(activation->offsets), free(activation->scales);
}

// numbers [T, K up to a multiple of 64] and scales [T] of x [T, K], normed where `norm` [K] is given.
OSTINATO_API void probe_quantize(const float *x, const float *norm, int32_t tokens, int32_t columns, int32_t *numbers,
                                 float *scales) {
    Activation to = room_for(tokens, columns);
    for (int32_t t = 0; t < tokens; t++) {
        if (norm) {
            normalize_token(&to, t, x + (size_t)t * columns, norm, 1e-5f);
        } else {
            quantize_token(&to, t, x + (size_t)t * columns);
        }
        const int8_t *codes = group_codes(&to, t / PANEL, 0) + t % PANEL * LINE;
        for (int32_t i = 0; i < to.blocks * OSTINATO_DEPTH; i++) {
            const int8_t *high = codes + i / OSTINATO_DEPTH * PANEL_BLOCK + i % OSTINATO_DEPTH;
            *numbers++ = 256 * high[0] + high[OSTINATO_DEPTH];
        }
        scales[t] = to.scales[t];
    }
    drop(&to);
}

// x [T, K] times a matrix: out [T, N]; or, where it `is_gated`, silu(gate) * up [T, N/2].
OSTINATO_API void probe_multiply(const OstinatoMatrix *matrix, const float *x, int32_t tokens, int32_t has_amx,
                                 int32_t is_gated, float *out) {
    Activation by = room_for(tokens, matrix->columns);
    for (int32_t t = 0; t < tokens; t++) quantize_token(&by, t, x + (size_t)t * matrix->columns);
    Crew crew = {0};
    Product product = {matrix, &by, is_gated ? GATE : STORE, out, has_amx};
    multiply_share(&crew, &product);
    drop(&by);
}

// A block of nibbles as bytes [16][16][4].
OSTINATO_API void probe_expand(const uint8_t *block, uint8_t *into) {
    expand_block(block, into);
}

static AttentionScratch *scratch_for(const AttentionShape *shape) {
    size_t most = (size_t)(shape->group > MOST_QUERIES ? shape->group : MOST_QUERIES) + 15 & ~(size_t)15;
    AttentionScratch *scratch = aligned_alloc(64, sizeof *scratch);
    scratch->queries = aligned_alloc(64, most * shape->head_size * 2);
    scratch->planes = aligned_alloc(64, plane_bytes(shape->head_size) * 2 * most / 16);
    scratch->sums = aligned_alloc(64, most * shape->head_size * 4);
    scratch->scales = aligned_alloc(64, most * 4), scratch->positions = aligned_alloc(64, most * 4);
    scratch->maxima = aligned_alloc(64, most * 4), scratch->weights = aligned_alloc(64, most * 4);
    return scratch;
}

// Keys and values [T, D] of one KV head written to blocks of `table`, then its queries [T, group, D] from `first` on
// attend; out [T - first, group, D].
OSTINATO_API void probe_attend(AttentionShape *shape, const float *keys, const float *values, const float *queries,
                               const int32_t *table, int32_t tokens, int32_t first, float *out) {
    int32_t size = shape->head_size, width = shape->group * size;
    for (int32_t t = 0; t < tokens; t++) {
        CacheBlock block = cache_block(shape->blocks, (size_t)table[t / 32], size);
        write_cache(block, t % 32, keys + (size_t)t * size, values + (size_t)t * size, size);
    }
    AttentionScratch *scratch = scratch_for(shape);
    int32_t most = shape->group < MOST_QUERIES ? MOST_QUERIES / shape->group : 1;
    if (shape->has_amx) begin_columns();
    for (int32_t t = first; t < tokens; t += most) {
        AttentionUnit unit = {table, t, tokens - t < most ? tokens - t : most, 0, queries + (size_t)t * width,
                              out + (size_t)(t - first) * width, (size_t)width, (size_t)width};
        attend(&unit, shape, scratch);
    }
    if (shape->has_amx) amx_end();
    free(scratch->queries), free(scratch->planes), free(scratch->sums);
    free(scratch->scales), free(scratch->positions), free(scratch->maxima), free(scratch->weights), free(scratch);
}
