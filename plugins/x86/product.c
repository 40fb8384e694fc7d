#include "product.h"

#include "exponential.h"

typedef struct {
    int32_t tile, tiles;    // the unit's
    int32_t panel, panels;  // and its panels
    int32_t first, count;   // and its tokens
} Unit;

// Columns past the matrix's last row are not there.
static __mmask16 columns_there(const OstinatoMatrix *matrix, int32_t tile) {
    int32_t left = matrix->rows - tile * OSTINATO_TILE;
    return left >= OSTINATO_TILE ? 0xffff : (__mmask16)((1u << left) - 1);
}

static __m512 biased(const OstinatoMatrix *matrix, int32_t tile, const float *product) {
    __m512 number = _mm512_load_ps(product);
    return matrix->bias ? _mm512_add_ps(number, _mm512_loadu_ps(matrix->bias + (size_t)tile * OSTINATO_TILE)) : number;
}

// `next`: the first tile of the unit after this one, or NULL.
static void multiply_unit(const Product *p, const Unit *unit, const uint8_t *next, Scratch *scratch) {
    size_t stride = tile_stride(p->matrix);
    TileWork work = {.matrix = p->matrix, .form = codes_for(p->matrix, p->num_tokens, p->has_amx)};
    for (int32_t i = 0; i < unit->tiles; i++) {
        work.tile = unit->tile + i;
        work.next = i + 1 < unit->tiles ? p->matrix->tiles + stride * (work.tile + 1) : next;
        work.codes = unpack_tile(&work, scratch->unpacked);
        for (int32_t panel = 0; panel < unit->panels; panel++, work.next = NULL) {
            int32_t left = unit->count - panel * PANEL, count = left < PANEL ? left : PANEL;
            multiply_tile(&work, p->by, unit->panel + panel, count, &scratch->products[i][panel]);
        }
    }
}

static void finish_rows(const Product *p, const Unit *unit, Scratch *scratch) {
    for (int32_t i = 0; i < unit->tiles; i++) {
        int32_t tile = unit->tile + i;
        __mmask16 there = columns_there(p->matrix, tile);
        for (int32_t t = 0; t < unit->count; t++) {
            __m512 number = biased(p->matrix, tile, scratch->products[i][t / PANEL].at[t % PANEL]);
            float *out = p->out + (size_t)(unit->first + t) * p->matrix->rows + tile * OSTINATO_TILE;
            if (p->finish == ADD) number = _mm512_add_ps(_mm512_maskz_loadu_ps(there, out), number);
            _mm512_mask_storeu_ps(out, there, number);
        }
    }
}

static __m512 gate_by(__m512 gate, __m512 up) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    return _mm512_mul_ps(_mm512_div_ps(gate, below), up);
}

// Four tiles, gate up gate up, are 32 numbers of the MLP: one group.
static void finish_gates(const Product *p, const Unit *unit, Scratch *scratch) {
    for (int32_t t = 0; t < unit->count; t++) {
        __m512 sides[MOST_TILES];
        for (int i = 0; i < MOST_TILES; i++) {
            sides[i] = biased(p->matrix, unit->tile + i, scratch->products[i][t / PANEL].at[t % PANEL]);
        }
        quantize_group(p->gated, unit->first + t, unit->tile / MOST_TILES, gate_by(sides[0], sides[1]),
                       gate_by(sides[2], sides[3]));
    }
}

// How many tiles a unit has: few enough that no thread waits long for another, enough to be worth taking.
static int32_t unit_tiles(const Product *p, int32_t tiles) {
    if (p->finish == GATE) return MOST_TILES;
    return tiles < 64 && p->num_tokens <= PANEL ? 1 : tiles < 256 ? 2 : MOST_TILES;
}

static Unit unit_at(const Product *p, int32_t number, int32_t step, int32_t columns) {
    int32_t chunk = CHUNK_PANELS * PANEL, tiles = num_tiles(p->matrix);
    Unit unit = {.tile = number % columns * step, .first = number / columns * chunk};
    unit.tiles = tiles - unit.tile < step ? tiles - unit.tile : step;
    unit.count = p->num_tokens - unit.first < chunk ? p->num_tokens - unit.first : chunk;
    unit.panel = unit.first / PANEL;
    unit.panels = (unit.count + PANEL - 1) / PANEL;
    return unit;
}

void multiply_share(Crew *crew, const Product *p, Scratch *scratch) {
    int32_t tiles = num_tiles(p->matrix), step = unit_tiles(p, tiles), columns = (tiles + step - 1) / step;
    int32_t chunk = CHUNK_PANELS * PANEL, count = (p->num_tokens + chunk - 1) / chunk * columns;
    size_t stride = tile_stride(p->matrix);
    for (int32_t number = crew_take(crew, 1), next; number < count; number = next) {
        next = crew_take(crew, 1);
        Unit unit = unit_at(p, number, step, columns);
        multiply_unit(p, &unit, next < count ? p->matrix->tiles + stride * (next % columns * step) : NULL, scratch);
        if (p->finish == GATE) {
            finish_gates(p, &unit, scratch);
        } else {
            finish_rows(p, &unit, scratch);
        }
    }
}
