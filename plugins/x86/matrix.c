#include "matrix.h"

#include "amx.h"
#include "inline.h"

typedef enum { FOUR_BITS, EIGHT_BITS, FOUR_AS_BYTES } Kind;

typedef struct {
    const uint8_t *codes, *scales, *minima;
    const uint8_t *next;  // bytes to read ahead, or NULL
} Tile;

// Where the parts of a tile are.
static Tile tile_at(const OstinatoMatrix *matrix, int32_t tile) {
    size_t groups = (size_t)matrix->columns / 32;
    const uint8_t *codes = matrix->tiles + tile_stride(matrix) * tile;
    const uint8_t *scales = codes + groups * (matrix->bits == 8 ? 512 : 256);
    return (Tile){codes, scales, scales + groups * 32, NULL};
}

INLINE void load_codes(Kind kind, const uint8_t *codes, int32_t group, __m512i into[8]) {
    if (kind == FOUR_BITS) {
        const __m512i low = _mm512_set1_epi8(15);
        UNROLLED
        for (int j = 0; j < 4; j++) {
            __m512i both = _mm512_loadu_si512(codes + (size_t)group * 256 + j * 64);
            into[j] = _mm512_and_si512(both, low);
            into[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    } else {
        UNROLLED
        for (int j = 0; j < 8; j++) into[j] = _mm512_loadu_si512(codes + (size_t)group * 512 + j * 64);
    }
}

// A group's share of the next tile: memory gives more if it is asked early, and asked for one tile ahead.
INLINE void read_ahead(Kind kind, const uint8_t *next, int32_t group) {
    const int size = kind == EIGHT_BITS ? 544 : 320;
    for (int i = 0; i < size; i += 64) _mm_prefetch((const char *)next + (size_t)group * size + i, _MM_HINT_T0);
}

INLINE __m512 load_halves(const uint8_t *side, int32_t group) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(side + (size_t)group * 32)));
}

INLINE __m512i four_inputs(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, sizeof word);
    return _mm512_set1_epi32(word);
}

// All groups of a tile times `count` tokens from `line` of the activation on. Inlined with count and kind known.
INLINE void multiply(Kind kind, int count, const Tile *tile, const Activation *by, size_t line, float *products) {
    __m512 totals[8];
    UNROLLED
    for (int t = 0; t < count; t++) totals[t] = _mm512_setzero_ps();
    for (int32_t group = 0; group < by->groups; group++, line += PANEL) {
        __m512i codes[8];
        if (tile->next) read_ahead(kind, tile->next, group);
        load_codes(kind, tile->codes, group, codes);
        __m512 scale = load_halves(tile->scales, group);
        __m512 minimum = kind == EIGHT_BITS ? _mm512_setzero_ps() : load_halves(tile->minima, group);
        UNROLLED
        for (int t = 0; t < count; t++) {
            const int8_t *inputs = by->codes + (line + t) * 32;
            __m512i dot = kind == EIGHT_BITS ? _mm512_set1_epi32(by->offsets[line + t]) : _mm512_setzero_si512();
            UNROLLED
            for (int j = 0; j < 8; j++) dot = _mm512_dpbusd_epi32(dot, codes[j], four_inputs(inputs + 4 * j));
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(by->scales[line + t]));
            totals[t] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dot), totals[t]);
            if (kind != EIGHT_BITS) totals[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(by->sums[line + t]), totals[t]);
        }
    }
    UNROLLED
    for (int t = 0; t < count; t++) _mm512_storeu_ps(products + t * OSTINATO_TILE, totals[t]);
}

// A count that no kernel is made for takes the next larger one; what it makes of tokens that are none is not used.
INLINE void multiply_some(Kind kind, int32_t count, const Tile *tile, const Activation *by, size_t line, float *out) {
    if (count == 1) {
        multiply(kind, 1, tile, by, line, out);
    } else if (count == 2) {
        multiply(kind, 2, tile, by, line, out);
    } else if (count <= 4) {
        multiply(kind, 4, tile, by, line, out);
    } else {
        multiply(kind, 8, tile, by, line, out);
    }
}

static void multiply_four(int32_t count, const Tile *tile, const Activation *by, size_t line, float *out) {
    multiply_some(FOUR_BITS, count, tile, by, line, out);
}

static void multiply_eight(int32_t count, const Tile *tile, const Activation *by, size_t line, float *out) {
    multiply_some(EIGHT_BITS, count, tile, by, line, out);
}

static void multiply_bytes(int32_t count, const Tile *tile, const Activation *by, size_t line, float *out) {
    multiply_some(FOUR_AS_BYTES, count, tile, by, line, out);
}

void multiply_tile(const TileWork *work, const Activation *by, int32_t panel, int32_t count, Products *products) {
    Tile parts = tile_at(work->matrix, work->tile);
    parts.codes = work->codes, parts.next = work->next;
    if (work->form == AMX_CODES) {
        AmxTile tile = {parts.codes, parts.scales, work->matrix->bits == 4 ? parts.minima : NULL};
        amx_multiply(&tile, by, panel_lines(by, panel * PANEL, 0), count, products->at[0]);
        return;
    }
    for (int32_t first = 0; first < count; first += 8) {
        size_t line = panel_lines(by, panel * PANEL + first, 0);
        float *out = products->at[first];
        if (work->matrix->bits == 8) {
            multiply_eight(count - first, &parts, by, line, out);
        } else if (work->form == PACKED) {
            multiply_four(count - first, &parts, by, line, out);
        } else {
            multiply_bytes(count - first, &parts, by, line, out);
        }
    }
}

Codes codes_for(const OstinatoMatrix *matrix, int32_t num_tokens, int has_amx) {
    if (has_amx && num_tokens > 8) return AMX_CODES;
    return matrix->bits == 4 && num_tokens > 8 ? UNPACKED : PACKED;
}

const uint8_t *unpack_tile(TileWork *work, uint8_t *into) {
    const OstinatoMatrix *matrix = work->matrix;
    const uint8_t *from = tile_at(matrix, work->tile).codes;
    if (work->form == PACKED || (work->form == UNPACKED && matrix->bits == 8)) return from;
    Kind kind = matrix->bits == 4 ? FOUR_BITS : EIGHT_BITS;
    for (int32_t group = 0; group < matrix->columns / 32; group++) {
        __m512i bytes[8];
        if (work->next) read_ahead(kind, work->next, group);
        load_codes(kind, from, group, bytes);
        UNROLLED
        for (int j = 0; j < 8; j++) {
            if (matrix->bits == 8) bytes[j] = _mm512_xor_si512(bytes[j], _mm512_set1_epi8(-128));  // code - 128
            _mm512_storeu_si512(into + (size_t)group * 512 + j * 64, bytes[j]);
        }
    }
    work->next = NULL;
    return into;
}

void read_row(const OstinatoMatrix *matrix, int32_t row, float *out) {
    Tile parts = tile_at(matrix, row / OSTINATO_TILE);
    int32_t output = row % OSTINATO_TILE;
    for (int32_t group = 0; group < matrix->columns / 32; group++) {
        float scales[OSTINATO_TILE];
        _mm512_storeu_ps(scales, load_halves(parts.scales, group));
        const uint8_t *codes = parts.codes + (size_t)group * 512 + output * 4;
        for (int i = 0; i < 32; i++) *out++ = scales[output] * (float)(codes[i / 4 * 64 + i % 4] - 128);
    }
}
