// Compiled beside the kernels in tests: single kernels, called from Python.
#include <stdlib.h>

#include "amx.h"
#include "exponential.h"
#include "product.h"

OSTINATO_API int32_t probe_amx(void) {
    return amx_is_there();
}

OSTINATO_API void probe_exponential(const float *x, float *out, int32_t count) {
    for (int32_t i = 0; i < count; i += 16) _mm512_storeu_ps(out + i, exponential(_mm512_loadu_ps(x + i)));
}

static Activation room_for(int32_t tokens, int32_t columns) {
    size_t lines = ((size_t)tokens + PANEL) * (columns / 32) * PANEL;
    return (Activation){malloc(lines * 32), malloc(lines * 4), malloc(lines * 4), malloc(lines * 4), columns / 32};
}

static void drop(Activation *activation) {
    free(activation->codes), free(activation->scales), free(activation->sums), free(activation->offsets);
}

// codes [T, K] and scales [T, K/32] of x [T, K], normed where `norm` [K] is given.
static void spread(const Activation *of, int32_t tokens, int8_t *codes, float *scales) {
    for (int32_t t = 0; t < tokens; t++) {
        for (int32_t g = 0; g < of->groups; g++) {
            size_t line = panel_lines(of, t, g);
            memcpy(codes + ((size_t)t * of->groups + g) * 32, of->codes + line * 32, 32);
            scales[t * of->groups + g] = of->scales[line];
        }
    }
}

OSTINATO_API void probe_quantize(const float *x, const float *norm, int32_t tokens, int32_t columns, int8_t *codes,
                                 float *scales) {
    Activation to = room_for(tokens, columns);
    for (int32_t t = 0; t < tokens; t++) {
        if (norm) {
            normalize_token(&to, t, x + (size_t)t * columns, norm, 1e-5f);
        } else {
            quantize_token(&to, t, x + (size_t)t * columns);
        }
    }
    spread(&to, tokens, codes, scales);
    drop(&to);
}

// x [T, K] times a matrix: out [T, N]; or, with `gated`, codes and scales of silu(gate) * up [T, N/2].
OSTINATO_API void probe_multiply(const OstinatoMatrix *matrix, const float *x, int32_t tokens, int32_t has_amx,
                                 float *out, int8_t *codes, float *scales) {
    Activation by = room_for(tokens, matrix->columns), gated = room_for(tokens, matrix->rows / 2 + 32);
    gated.groups = matrix->rows / 64;
    for (int32_t t = 0; t < tokens; t++) quantize_token(&by, t, x + (size_t)t * matrix->columns);
    Crew crew = {0};
    Scratch *scratch = aligned_alloc(64, sizeof *scratch);
    scratch->unpacked = aligned_alloc(64, (size_t)matrix->columns * 16);
    Product product = {matrix, &by, tokens, codes ? GATE : STORE, out, &gated, has_amx};
    if (has_amx) amx_begin();
    multiply_share(&crew, &product, scratch);
    if (has_amx) amx_end();
    if (codes) spread(&gated, tokens, codes, scales);
    free(scratch->unpacked), free(scratch), drop(&by), drop(&gated);
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
    AttentionScratch *scratch = aligned_alloc(64, sizeof *scratch);
    scratch->queries = malloc(4096 * 48 * 4), scratch->sums = malloc(4096 * 48 * 4);
    scratch->scales = malloc(4096), scratch->maxima = malloc(4096), scratch->weights = malloc(4096);
    int32_t most = shape->group < MOST_QUERIES ? MOST_QUERIES / shape->group : 1;
    for (int32_t t = first; t < tokens; t += most) {
        AttentionUnit unit = {table, t, tokens - t < most ? tokens - t : most, 0, queries + (size_t)t * width,
                              out + (size_t)(t - first) * width, (size_t)width, (size_t)width};
        attend(&unit, shape, scratch);
    }
    free(scratch->queries), free(scratch->sums), free(scratch->scales), free(scratch->maxima), free(scratch->weights);
    free(scratch);
}
