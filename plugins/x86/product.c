#include "product.h"

#include <string.h>

#include "amx.h"
#include "exponential.h"
#include "nibbles.h"
#include "read_ahead.h"

enum { CHUNK_PANELS = 8 };  // panels of tokens that a unit has at most

static int uses_amx(const Product *p) {
    return p->has_amx && p->by->count > FEW_TOKENS;
}

// What is taken at once: some pairs of tiles, times a chunk of panels.
typedef struct {
    int32_t tile, tiles;
    int32_t panel, panels;
} Unit;

// How a product is cut: `step` tiles and up to CHUNK_PANELS panels a unit; `columns` units beside each other.
typedef struct {
    int32_t tiles, step, columns, panels, count;
} Cut;

// Columns past the matrix's last row are not there.
static __mmask16 columns_there(const OstinatoMatrix *matrix, int32_t tile) {
    int32_t left = matrix->rows - tile * OSTINATO_TILE;
    return left >= OSTINATO_TILE ? 0xffff : (__mmask16)((1u << left) - 1);
}

static __m512 bias_of(const OstinatoMatrix *matrix, int32_t tile) {
    return matrix->bias ? _mm512_loadu_ps(matrix->bias + (size_t)tile * OSTINATO_TILE) : _mm512_setzero_ps();
}

// A token's products of a tile, scaled, with the bias.
static inline __m512 finished(const Products *products, const float *scales, int32_t t, __m512 bias) {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(products->at[t]), _mm512_set1_ps(scales[t])), bias);
}

static void finish_rows(const Product *p, int32_t tile, int32_t token, int32_t count, const Products *products) {
    __mmask16 there = columns_there(p->matrix, tile);
    __m512 bias = bias_of(p->matrix, tile);
    float *out = p->out + (size_t)token * p->matrix->rows + tile * OSTINATO_TILE;
    for (int32_t t = 0; t < count; t++, out += p->matrix->rows) {
        __m512 number = finished(products, p->by->scales + token, t, bias);
        if (p->finish == ADD) number = _mm512_add_ps(_mm512_maskz_loadu_ps(there, out), number);
        _mm512_mask_storeu_ps(out, there, number);
    }
}

static void finish_gates(const Product *p, int32_t tile, int32_t token, int32_t count, const Products products[PAIR]) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const float *scales = p->by->scales + token;
    __m512 gate_bias = bias_of(p->matrix, tile), up_bias = bias_of(p->matrix, tile + 1);
    float *out = p->out + (size_t)token * (p->matrix->rows / 2) + tile / PAIR * OSTINATO_TILE;
    for (int32_t t = 0; t < count; t++, out += p->matrix->rows / 2) {
        __m512 gate = finished(&products[0], scales, t, gate_bias);
        __m512 up = finished(&products[1], scales, t, up_bias);
        __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
        _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_div_ps(gate, below), up));
    }
}

static void finish_panel(const Product *p, int32_t tile, int32_t tiles, int32_t token, const Products products[PAIR]) {
    int32_t left = p->by->count - token, count = left < PANEL ? left : PANEL;
    if (p->finish == GATE) {
        finish_gates(p, tile, token, count, products);
        return;
    }
    for (int k = 0; k < tiles; k++) finish_rows(p, tile + k, token, count, &products[k]);
}

// A group of one or two tiles; of one, twice the same. `next`: the tile after them, or NULL.
static void find_group(const Product *p, int32_t tile, int32_t tiles, const uint8_t *next, int32_t group,
                       TileGroup of[PAIR]) {
    size_t begin = (size_t)group * p->by->span * block_bytes(p->matrix);
    for (int k = 0; k < PAIR; k++) {
        const uint8_t *from = tile_at(p->matrix, tile + (k < tiles ? k : 0));
        of[k] = (TileGroup){
            .codes = from + begin,
            .next = next ? next + (size_t)k * tile_stride(p->matrix) + begin : NULL,
            .scales = tile_scales(p->matrix, from) + group * OSTINATO_TILE,
            .nibbles = p->matrix->bits == 4,
        };
    }
}

// Nibbles become bytes in `into` [span][BYTES_BLOCK], and what is to be read ahead is.
static void unpack_group(TileGroup *of, int32_t span, uint8_t *into) {
    for (int32_t block = 0; block < span; block++) {
        if (of->next) read_ahead(of->next + block * NIBBLE_BLOCK, NIBBLE_BLOCK);
        expand_block(of->codes + block * NIBBLE_BLOCK, into + block * BYTES_BLOCK);
    }
    of->codes = into, of->next = NULL, of->nibbles = 0;
}

static void multiply_groups(const Product *p, const Unit *unit, TileGroup of[PAIR], int32_t group,
                            uint8_t *const unpacked[PAIR], Products (*products)[PAIR]) {
    for (int32_t i = 0; i < unit->panels; i++) {
        int32_t panel = unit->panel + i, left = p->by->count - panel * PANEL, count = left < PANEL ? left : PANEL;
        if (uses_amx(p)) {
            multiply_pair(of, p->by, panel, group, count, unpacked, products[i]);
            continue;
        }
        for (int k = 0; k < PAIR; k++) {
            if (of[k].nibbles && p->by->count > FEW_TOKENS) unpack_group(&of[k], p->by->span, unpacked[k]);
            multiply_group(&of[k], p->by, panel, group, count, &products[i][k]);
            of[k].next = NULL;
        }
    }
}

// `next`: the first tile after these, or NULL.
static void multiply_tiles(const Product *p, const Unit *unit, int32_t tile, int32_t tiles, const uint8_t *next) {
    _Alignas(64) uint8_t bytes[PAIR][MOST_SPAN * BYTES_BLOCK];
    uint8_t *const unpacked[PAIR] = {bytes[0], bytes[1]};
    Products products[CHUNK_PANELS][PAIR];
    memset(products, 0, sizeof products[0] * (size_t)unit->panels);
    for (int32_t group = 0; group < p->by->groups; group++) {
        TileGroup of[PAIR];
        find_group(p, tile, tiles, next, group, of);
        multiply_groups(p, unit, of, group, unpacked, products);
    }
    for (int32_t i = 0; i < unit->panels; i++) {
        finish_panel(p, tile, tiles, (unit->panel + i) * PANEL, products[i]);
    }
}

// `next`: the first tile of the unit after this one, or NULL.
static void multiply_unit(const Product *p, const Unit *unit, const uint8_t *next) {
    for (int32_t tile = unit->tile, end = tile + unit->tiles; tile < end; tile += PAIR) {
        const uint8_t *after = tile + PAIR < end ? tile_at(p->matrix, tile + PAIR) : next;
        multiply_tiles(p, unit, tile, end - tile < PAIR ? end - tile : PAIR, after);
    }
}

// A unit has tiles few enough that no thread waits long for another, enough to be worth taking.
static Cut cut_of(const Product *p) {
    Cut cut = {.tiles = num_tiles(p->matrix), .panels = (p->by->count + PANEL - 1) / PANEL};
    cut.step = cut.tiles < 256 ? PAIR : 4 * PAIR;
    cut.columns = (cut.tiles + cut.step - 1) / cut.step;
    cut.count = (cut.panels + CHUNK_PANELS - 1) / CHUNK_PANELS * cut.columns;
    return cut;
}

static Unit unit_at(const Cut *cut, int32_t number) {
    Unit unit = {.tile = number % cut->columns * cut->step, .panel = number / cut->columns * CHUNK_PANELS};
    unit.tiles = cut->tiles - unit.tile < cut->step ? cut->tiles - unit.tile : cut->step;
    unit.panels = cut->panels - unit.panel < CHUNK_PANELS ? cut->panels - unit.panel : CHUNK_PANELS;
    return unit;
}

void multiply_share(Crew *crew, const Product *p) {
    Cut cut = cut_of(p);
    if (uses_amx(p)) begin_pairs(p->by->count);
    for (int32_t number = crew_take(crew, 1), next; number < cut.count; number = next) {
        next = crew_take(crew, 1);
        Unit unit = unit_at(&cut, number);
        multiply_unit(p, &unit, next < cut.count ? tile_at(p->matrix, unit_at(&cut, next).tile) : NULL);
    }
    if (uses_amx(p)) amx_end();
}
