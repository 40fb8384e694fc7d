#include "attention_amx.h"

#include <float.h>
#include <string.h>

#include "read_ahead.h"

// Codes of a query as planes.
static void place_query(const int16_t *codes, int32_t head_size, uint8_t *high, uint8_t *low) {
    for (int32_t i = 0; i < head_size; i += 16) {
        __m256i both = _mm256_load_si256((const __m256i *)(codes + i));
        uint32_t parts[2][4];
        _mm_storeu_si128((__m128i *)parts[0], _mm256_cvtepi16_epi8(_mm256_srli_epi16(both, 8)));
        _mm_storeu_si128((__m128i *)parts[1], _mm256_cvtepi16_epi8(both));
        for (int32_t j = 0; j < 4; j++) {
            memcpy(high + (size_t)(i / 4 + j) * 64, parts[0] + j, 4);
            memcpy(low + (size_t)(i / 4 + j) * 64, parts[1] + j, 4);
        }
    }
}

static void begin(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch) {
    int32_t queries = unit->count * shape->group, size = shape->head_size, columns = (queries + 15) / 16;
    size_t plane = plane_bytes(size);
    _Alignas(64) int16_t codes[MOST_HEAD_SIZE];
    memset(scratch->planes, 0, plane * 2 * (size_t)columns);
    memset(scratch->sums, 0, sizeof(float) * 16 * (size_t)columns * size);
    for (int32_t q = 0; q < columns * 16; q++) {
        scratch->maxima[q] = -FLT_MAX;
        scratch->weights[q] = scratch->scales[q] = 0;
        scratch->positions[q] = unit->first + (q < queries ? q / shape->group : unit->count - 1);
        if (q >= queries) continue;
        const float *query = unit->queries + q / shape->group * unit->query_stride + q % shape->group * size;
        scratch->scales[q] = shape->scale * quantize_query(query, size, codes);
        uint8_t *high = scratch->planes + plane * 2 * (size_t)(q / 16) + q % 16 * 4;
        place_query(codes, size, high, high + plane);
    }
}

static void finish(const AttentionUnit *unit, const AttentionShape *shape, const AttentionScratch *scratch) {
    const __m512i lines = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int32_t q = 0; q < unit->count * shape->group; q++) {
        float *out = unit->out + q / shape->group * unit->out_stride + q % shape->group * shape->head_size;
        const float *sums = scratch->sums + (size_t)(q / 16) * 16 * shape->head_size + q % 16;
        const __m512 share = _mm512_set1_ps(1.0f / scratch->weights[q]);
        for (int32_t i = 0; i < shape->head_size; i += 16) {
            _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_i32gather_ps(lines, sums + i * 16, 4), share));
        }
    }
}

// Sixteen queries from `first` on, or as many as there are, and a block.
static Column column_at(const AttentionUnit *unit, const AttentionShape *shape, const AttentionScratch *scratch,
                        int32_t first, int32_t first_key) {
    int32_t position = unit->first + first / shape->group, window = shape->sliding_window;
    int32_t last = unit->first + unit->count - 1;
    return (Column){
        .queries = scratch->planes + plane_bytes(shape->head_size) * 2 * (size_t)(first / 16),
        .sums = scratch->sums + (size_t)first * shape->head_size,
        .scales = scratch->scales + first,
        .maxima = scratch->maxima + first,
        .weights = scratch->weights + first,
        .positions = scratch->positions + first,
        .first_key = first_key,
        .window = window,
        .is_whole = position >= first_key + OSTINATO_BLOCK - 1 && (!window || last - first_key < window),
    };
}

void attend_columns(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch) {
    int32_t queries = unit->count * shape->group, last = last_block(unit);
    Block block;
    begin(unit, shape, scratch);
    for (int32_t index = first_block(unit, shape); index <= last; index++) {
        int32_t first_key = index * OSTINATO_BLOCK;
        if (index < last) read_ahead(block_at(unit, shape, index + 1).keys, cache_block_bytes(shape->head_size));
        turn_block(block_at(unit, shape, index), shape->head_size, &block);
        for (int32_t q = 0; q < queries; q += 16) {
            int32_t end = q + 16 < queries ? q + 16 : queries;
            if (unit->first + (end - 1) / shape->group < first_key) continue;  // all of them lie before the block
            Column column = column_at(unit, shape, scratch, q, first_key);
            attend_column(&column, &block, shape->head_size);
        }
    }
    finish(unit, shape, scratch);
}
