#include "matrix_amx.h"

#include "amx.h"
#include "inline.h"
#include "nibbles.h"
#include "planes.h"
#include "read_ahead.h"

// Tile registers. GCC wants plain numbers.
#define HIGH_0 0
#define LOW_0 1
#define HIGH_1 2
#define LOW_1 3
#define TOKENS_HIGH 4
#define TOKENS_LOW 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

// Of up to 8 tokens, high and low bytes are lines of one register: HIGH_0 and HIGH_1 then hold sums of both.
void begin_pairs(int32_t tokens) {
    uint8_t lines = (uint8_t)(tokens <= PANEL / 2 ? 2 * tokens : tokens < PANEL ? tokens : PANEL);
    amx_begin(&(AmxShape){{lines, lines, lines, lines, lines, lines, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}});
}

// Of one tile: a token's high and low bytes.
typedef struct {
    _Alignas(64) int32_t at[PANEL][2][OSTINATO_TILE];
} Sums;

// The blocks of a pair: where they are, or, of nibbles, where they are unpacked to.
INLINE void prepare_blocks(int nibbles, const TileGroup of[PAIR], int32_t block, uint8_t *const unpacked[PAIR]) {
    const int size = nibbles ? NIBBLE_BLOCK : BYTES_BLOCK;
    for (int k = 0; k < PAIR; k++) {
        if (of[k].next) read_ahead(of[k].next + block * size, (size_t)size);
        if (nibbles) expand_block(of[k].codes + block * NIBBLE_BLOCK, unpacked[k] + block * BYTES_BLOCK);
    }
}

// A panel's tokens of a group, and those that come after them, or NULL.
typedef struct {
    const int8_t *codes, *next;
    int32_t span;
} Tokens;

// While a block is multiplied, the next one is unpacked. Inlined with the kind known. `few`: up to 8 tokens.
AMX INLINE void sum_pair(int few, int nibbles, const TileGroup of[PAIR], const Tokens *tokens,
                         uint8_t *const unpacked[PAIR], Sums sums[PAIR]) {
    const uint8_t *codes[PAIR] = {nibbles ? unpacked[0] : of[0].codes, nibbles ? unpacked[1] : of[1].codes};
    const int stride = few ? OSTINATO_DEPTH : LINE, step = few ? 64 : 128;
    _tile_zero(HIGH_0);
    _tile_zero(HIGH_1);
    if (!few) _tile_zero(LOW_0);
    if (!few) _tile_zero(LOW_1);
    prepare_blocks(nibbles, of, 0, unpacked);
    for (int32_t block = 0; block < tokens->span; block++) {
        const int8_t *lines = tokens->codes + block * PANEL_BLOCK;
        _tile_loadd(TOKENS_HIGH, lines, stride);
        _tile_loadd(WEIGHTS_0, codes[0] + block * BYTES_BLOCK, 64);
        _tile_dpbsud(HIGH_0, TOKENS_HIGH, WEIGHTS_0);
        _tile_loadd(WEIGHTS_1, codes[1] + block * BYTES_BLOCK, 64);
        _tile_dpbsud(HIGH_1, TOKENS_HIGH, WEIGHTS_1);
        if (!few) {
            _tile_loadd(TOKENS_LOW, lines + OSTINATO_DEPTH, LINE);
            _tile_dpbsud(LOW_0, TOKENS_LOW, WEIGHTS_0);
            _tile_dpbsud(LOW_1, TOKENS_LOW, WEIGHTS_1);
            if (tokens->next) read_ahead(tokens->next + block * PANEL_BLOCK, PANEL_BLOCK);
        }
        if (block + 1 < tokens->span) prepare_blocks(nibbles, of, block + 1, unpacked);
    }
    _tile_stored(HIGH_0, sums[0].at[0][0], step);
    _tile_stored(HIGH_1, sums[1].at[0][0], step);
    if (!few) _tile_stored(LOW_0, sums[0].at[0][1], step);
    if (!few) _tile_stored(LOW_1, sums[1].at[0][1], step);
}

// A group's sums, less what unsigned codes add, scaled. Inlined with the count known, 8 or 16.
INLINE void add_sums(int count, const TileGroup *of, const int32_t *offsets, const Sums *sums, Products *products) {
    const __m512 scale = _mm512_load_ps(of->scales);
    UNROLLED
    for (int t = 0; t < count; t++) {
        __m512i high = _mm512_load_si512(sums->at[t][0]), low = _mm512_load_si512(sums->at[t][1]);
        __m512i both = _mm512_add_epi32(joined(high, low), _mm512_set1_epi32(offsets[t]));
        __m512 total = _mm512_load_ps(products->at[t]);
        _mm512_store_ps(products->at[t], _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), scale, total));
    }
}

AMX static void sum_any_pair(int few, const TileGroup of[PAIR], const Tokens *tokens, uint8_t *const unpacked[PAIR],
                             Sums sums[PAIR]) {
    if (few && of[0].nibbles) {
        sum_pair(1, 1, of, tokens, unpacked, sums);
    } else if (few) {
        sum_pair(1, 0, of, tokens, unpacked, sums);
    } else if (of[0].nibbles) {
        sum_pair(0, 1, of, tokens, unpacked, sums);
    } else {
        sum_pair(0, 0, of, tokens, unpacked, sums);
    }
}

void multiply_pair(TileGroup of[PAIR], const Activation *by, int32_t panel, int32_t group, int32_t count,
                   uint8_t *const unpacked[PAIR], Products products[PAIR]) {
    Sums sums[PAIR];
    int is_last = (panel + 1) * PANEL >= by->count;
    Tokens tokens = {group_codes(by, panel, group), is_last ? NULL : group_codes(by, panel + 1, group), by->span};
    sum_any_pair(by->count <= PANEL / 2, of, &tokens, unpacked, sums);
    for (int k = 0; k < PAIR; k++) {
        if (count > PANEL / 2) {
            add_sums(16, &of[k], group_offsets(by, panel, group), &sums[k], &products[k]);
        } else {
            add_sums(8, &of[k], group_offsets(by, panel, group), &sums[k], &products[k]);
        }
        if (of[k].nibbles) of[k].codes = unpacked[k], of[k].nibbles = 0;
        of[k].next = NULL;
    }
}
