#include "matrix.h"

#include <string.h>

#include "inline.h"
#include "nibbles.h"
#include "planes.h"
#include "read_ahead.h"

enum { MOST_TOKENS = 8 };  // whose sums stay in registers

INLINE __m512i four_inputs(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, sizeof word);
    return _mm512_set1_epi32(word);
}

// Sums of high and of low bytes, of some tokens: two of each where only few would wait for each other.
typedef struct {
    __m512i high[2][MOST_TOKENS], low[2][MOST_TOKENS];
} Sums;

// Four inputs of sixteen outputs, times `count` tokens.
INLINE void add_four(int count, int j, __m512i weights, const int8_t *tokens, Sums *sums) {
    const int way = count < 4 ? j % 2 : 0;
    UNROLLED
    for (int t = 0; t < count; t++) {
        const int8_t *inputs = tokens + t * LINE + 4 * j;
        sums->high[way][t] = _mm512_dpbusd_epi32(sums->high[way][t], weights, four_inputs(inputs));
        sums->low[way][t] = _mm512_dpbusd_epi32(sums->low[way][t], weights, four_inputs(inputs + OSTINATO_DEPTH));
    }
}

INLINE void add_block(int count, int nibbles, const uint8_t *block, const int8_t *tokens, Sums *sums) {
    if (nibbles) {
        const Steps steps[2] = {steps_at(block, 0), steps_at(block, 1)};
        UNROLLED
        for (int j = 0; j < 8; j++) {
            __m512i weights[2];
            expand_two(block, j, steps, weights);
            add_four(count, j, weights[0], tokens, sums);
            add_four(count, j + 8, weights[1], tokens, sums);
        }
        return;
    }
    UNROLLED
    for (int j = 0; j < 16; j++) add_four(count, j, _mm512_load_si512(block + j * 64), tokens, sums);
}

// A group's sum of one token, less what unsigned codes add.
INLINE __m512 group_sum(const Sums *sums, int t, int32_t offset) {
    __m512i high = _mm512_add_epi32(sums->high[0][t], sums->high[1][t]);
    __m512i low = _mm512_add_epi32(sums->low[0][t], sums->low[1][t]);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(joined(high, low), _mm512_set1_epi32(offset)));
}

// Inlined with count and kind known.
INLINE void multiply(int count, int nibbles, const TileGroup *of, const int8_t *tokens, const int32_t *offsets,
                     int32_t span, float *products) {
    const int size = nibbles ? NIBBLE_BLOCK : BYTES_BLOCK;
    Sums sums;
    UNROLLED
    for (int t = 0; t < count; t++) {
        sums.high[0][t] = sums.high[1][t] = sums.low[0][t] = sums.low[1][t] = _mm512_setzero_si512();
    }
    for (int32_t block = 0; block < span; block++) {
        if (of->next) read_ahead(of->next + block * size, (size_t)size);
        add_block(count, nibbles, of->codes + block * size, tokens + (size_t)block * PANEL_BLOCK, &sums);
    }
    const __m512 scale = _mm512_load_ps(of->scales);
    UNROLLED
    for (int t = 0; t < count; t++) {
        float *place = products + t * OSTINATO_TILE;
        _mm512_store_ps(place, _mm512_fmadd_ps(group_sum(&sums, t, offsets[t]), scale, _mm512_load_ps(place)));
    }
}

// A count that no kernel is made for takes the next larger one; what it makes of tokens that are none is not used.
void multiply_group(const TileGroup *of, const Activation *by, int32_t panel, int32_t group, int32_t count,
                    Products *products) {
    for (int32_t line = 0; line < count; line += MOST_TOKENS) {
        const int8_t *tokens = group_codes(by, panel, group) + line * LINE;
        const int32_t *offsets = group_offsets(by, panel, group) + line;
        int32_t left = count - line, span = by->span;
        float *out = products->at[line];
        if (of->nibbles && left == 1) {
            multiply(1, 1, of, tokens, offsets, span, out);
        } else if (of->nibbles) {
            multiply(2, 1, of, tokens, offsets, span, out);
        } else if (left == 1) {
            multiply(1, 0, of, tokens, offsets, span, out);
        } else if (left == 2) {
            multiply(2, 0, of, tokens, offsets, span, out);
        } else if (left <= 4) {
            multiply(4, 0, of, tokens, offsets, span, out);
        } else {
            multiply(8, 0, of, tokens, offsets, span, out);
        }
    }
}

void read_row(const OstinatoMatrix *matrix, int32_t row, float *out) {
    const uint8_t *tile = tile_at(matrix, row / OSTINATO_TILE);
    const float *scales = tile_scales(matrix, tile) + row % OSTINATO_TILE;
    int32_t output = row % OSTINATO_TILE, inputs = span_of(matrix->columns) * OSTINATO_DEPTH;
    for (int32_t i = 0; i < matrix->columns; i++) {
        out[i] = scales[i / inputs * OSTINATO_TILE] * (float)(tile[i / 4 * 64 + output * 4 + i % 4] - 128);
    }
}
