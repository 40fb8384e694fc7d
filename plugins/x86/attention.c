#include "attention.h"

#include <float.h>
#include <string.h>

#include "attention_amx.h"
#include "exponential.h"
#include "inline.h"
#include "largest.h"
#include "read_ahead.h"

enum {
    MOST_TOGETHER = 6,  // queries that share a load of keys or values
    FEW_QUERIES = 8,    // so many or fewer are not worth columns of sixteen
};

// Some queries of a unit and one block of keys.
typedef struct {
    const int16_t *queries;  // [count][D]
    const float *scales;
    float *sums, *maxima, *weights;
    int32_t first_query, first_key;  // in the unit; in the row
} Part;

// Softmax's weights of a block, times the values' scales: codes times step. `factor`: for what was summed before.
typedef struct {
    _Alignas(64) int16_t codes[OSTINATO_BLOCK];
    float step, factor;
} Weights;

INLINE __m512i two_numbers(const int16_t *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

// scores [count][32] = queries · keys.
INLINE void score(int count, const Part *part, const AttentionScratch *scratch, int32_t head_size, float *scores) {
    __m512i low[MOST_TOGETHER], high[MOST_TOGETHER];
    UNROLLED
    for (int q = 0; q < count; q++) low[q] = high[q] = _mm512_setzero_si512();
    for (int32_t i = 0; i < head_size; i += 2) {
        __m512i first = _mm512_load_si512(scratch->keys[i / 2]), second = _mm512_load_si512(scratch->keys[i / 2] + 16);
        UNROLLED
        for (int q = 0; q < count; q++) {
            __m512i query = two_numbers(part->queries + q * head_size + i);
            low[q] = _mm512_dpwssd_epi32(low[q], first, query);
            high[q] = _mm512_dpwssd_epi32(high[q], second, query);
        }
    }
    UNROLLED
    for (int q = 0; q < count; q++) {
        __m512 scale = _mm512_set1_ps(part->scales[q]);
        _mm512_store_ps(scores + q * 32, _mm512_mul_ps(_mm512_cvtepi32_ps(low[q]), scale));
        _mm512_store_ps(scores + q * 32 + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(high[q]), scale));
    }
}

// sums [count][D] = sums * factor + weights · values, of `width` times 16 of D.
INLINE void add_values(int count, int width, const int16_t *values, int32_t head_size, const Weights *weights,
                       float *sums) {
    __m512i totals[MOST_TOGETHER][4];
    UNROLLED
    for (int q = 0; q < count; q++) {
        UNROLLED
        for (int w = 0; w < width; w++) totals[q][w] = _mm512_setzero_si512();
    }
    for (int key = 0; key < OSTINATO_BLOCK; key += 2, values += 2 * head_size) {
        __m512i numbers[4];
        UNROLLED
        for (int w = 0; w < width; w++) numbers[w] = _mm512_loadu_si512(values + w * 32);
        UNROLLED
        for (int q = 0; q < count; q++) {
            __m512i weight = two_numbers(weights[q].codes + key);
            UNROLLED
            for (int w = 0; w < width; w++) totals[q][w] = _mm512_dpwssd_epi32(totals[q][w], numbers[w], weight);
        }
    }
    UNROLLED
    for (int q = 0; q < count; q++) {
        __m512 factor = _mm512_set1_ps(weights[q].factor), step = _mm512_set1_ps(weights[q].step);
        UNROLLED
        for (int w = 0; w < width; w++) {
            float *place = sums + q * head_size + w * 16;
            __m512 before = _mm512_mul_ps(_mm512_loadu_ps(place), factor);
            _mm512_storeu_ps(place, _mm512_fmadd_ps(step, _mm512_cvtepi32_ps(totals[q][w]), before));
        }
    }
}

// Which of a block's 32 keys the query at `position` sees.
static uint32_t seen_keys(int32_t position, int32_t first_key, int32_t window) {
    int32_t last = position - first_key, first = window ? last - window + 1 : 0;
    if (last < 0 || first > 31) return 0;
    uint32_t seen = last >= 31 ? ~0u : (2u << last) - 1;
    return first > 0 ? seen & (~0u << first) : seen;
}

typedef struct {
    __m512 keys[2], values[2];
} Scales;

static __m256i to_codes(__m512 numbers, __m512 factor) {
    return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(numbers, factor)));
}

// One query's scores [32] become weights; its maximum and sum of weights go on.
static void soften(const float *scores, uint32_t seen, const Scales *scales, float *maximum, float *weight,
                   Weights *weights) {
    const __m512 least = _mm512_set1_ps(-FLT_MAX);
    const __mmask16 seen_low = (__mmask16)seen, seen_high = (__mmask16)(seen >> 16);
    __m512 low = _mm512_mask_mul_ps(least, seen_low, _mm512_load_ps(scores), scales->keys[0]);
    __m512 high = _mm512_mask_mul_ps(least, seen_high, _mm512_load_ps(scores + 16), scales->keys[1]);
    float top = _mm512_reduce_max_ps(_mm512_max_ps(low, high)), before = *maximum;
    float now = top > before ? top : before;
    const __m512 shift = _mm512_set1_ps(now);
    low = _mm512_maskz_mov_ps(seen_low, exponential(_mm512_sub_ps(low, shift)));
    high = _mm512_maskz_mov_ps(seen_high, exponential(_mm512_sub_ps(high, shift)));
    weights->factor = now == before ? 1.0f : _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - now)));
    *weight = *weight * weights->factor + _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    *maximum = now;
    // Masked once more: 0 times a later token's scale is NaN where that is NaN.
    low = _mm512_maskz_mul_ps(seen_low, low, scales->values[0]);
    high = _mm512_maskz_mul_ps(seen_high, high, scales->values[1]);
    top = largest_of(_mm512_max_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high)));
    const __m512 factor = _mm512_set1_ps(top < LEAST ? 0.0f : 32767.0f / top);
    weights->step = top < LEAST ? 0.0f : top / 32767.0f;
    _mm256_store_si256((__m256i *)weights->codes, to_codes(low, factor));
    _mm256_store_si256((__m256i *)(weights->codes + 16), to_codes(high, factor));
}

INLINE void attend_part(int count, const Part *part, const AttentionUnit *unit, const AttentionShape *shape,
                        const Scales *scales, const AttentionScratch *scratch) {
    _Alignas(64) float scores[MOST_TOGETHER * 32];
    Weights weights[MOST_TOGETHER];
    score(count, part, scratch, shape->head_size, scores);
    UNROLLED
    for (int q = 0; q < count; q++) {
        int32_t position = unit->first + (part->first_query + q) / shape->group;
        uint32_t seen = seen_keys(position, part->first_key, shape->sliding_window);
        soften(scores + q * 32, seen, scales, part->maxima + q, part->weights + q, weights + q);
    }
    int32_t size = shape->head_size, done = 0;
    const int16_t *values = scratch->values;
    for (; done + 64 <= size; done += 64) add_values(count, 4, values + 2 * done, size, weights, part->sums + done);
    for (; done + 32 <= size; done += 32) add_values(count, 2, values + 2 * done, size, weights, part->sums + done);
    if (done < size) add_values(count, 1, values + 2 * done, size, weights, part->sums + done);
}

#define ATTEND(COUNT)                                                                                       \
    static void attend_##COUNT(const Part *part, const AttentionUnit *unit, const AttentionShape *shape,    \
                               const Scales *scales, const AttentionScratch *scratch) {                     \
        attend_part(COUNT, part, unit, shape, scales, scratch);                                             \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(6)

// Codes of 16 bits. Scales of keys past the last one that anybody sees are 0: what is there is not read.
static Scales read_block(CacheBlock block, int32_t head_size, int32_t num_keys, AttentionScratch *scratch) {
    int16_t *keys = &scratch->keys[0][0][0];
    for (int32_t i = 0; i < OSTINATO_BLOCK * head_size; i += 32) {
        _mm512_store_si512(keys + i, _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)(block.keys + i))));
        __m256i values = _mm256_load_si256((const __m256i *)(block.values + i));
        _mm512_store_si512(scratch->values + i, _mm512_cvtepi8_epi16(values));
    }
    uint32_t there = num_keys >= 32 ? ~0u : (1u << num_keys) - 1;
    return (Scales){
        {_mm512_maskz_loadu_ps((__mmask16)there, block.key_scales),
         _mm512_maskz_loadu_ps((__mmask16)(there >> 16), block.key_scales + 16)},
        {_mm512_maskz_loadu_ps((__mmask16)there, block.value_scales),
         _mm512_maskz_loadu_ps((__mmask16)(there >> 16), block.value_scales + 16)},
    };
}

static void attend_block(const AttentionUnit *unit, const AttentionShape *shape, const Scales *scales,
                         int32_t first_key, AttentionScratch *scratch) {
    int32_t queries = unit->count * shape->group, size = shape->head_size;
    for (int32_t q = 0, count; q < queries; q += count) {
        int32_t left = queries - q;
        count = left >= 6 ? 6 : left == 5 ? 4 : left;
        int32_t last = unit->first + (q + count - 1) / shape->group;
        if (last < first_key) continue;  // all of them lie before the block
        Part part = {scratch->queries + (size_t)q * size, scratch->scales + q,      scratch->sums + (size_t)q * size,
                     scratch->maxima + q, scratch->weights + q, q, first_key};
        switch (count) {
            case 1: attend_1(&part, unit, shape, scales, scratch); break;
            case 2: attend_2(&part, unit, shape, scales, scratch); break;
            case 3: attend_3(&part, unit, shape, scales, scratch); break;
            case 4: attend_4(&part, unit, shape, scales, scratch); break;
            default: attend_6(&part, unit, shape, scales, scratch);
        }
    }
}

float quantize_query(const float *query, int32_t head_size, int16_t *codes) {
    __m512i size = _mm512_setzero_si512();
    for (int32_t i = 0; i < head_size; i += 16) size = _mm512_max_epi32(size, size_bits(_mm512_loadu_ps(query + i)));
    float top = largest_of(size);
    const __m512 factor = _mm512_set1_ps(top < LEAST ? 0.0f : 32767.0f / top);
    for (int32_t i = 0; i < head_size; i += 16) {
        _mm256_storeu_si256((__m256i *)(codes + i), to_codes(_mm512_loadu_ps(query + i), factor));
    }
    return top < LEAST ? 0.0f : top / 32767.0f;
}

static void begin(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch) {
    int32_t queries = unit->count * shape->group, size = shape->head_size;
    for (int32_t q = 0; q < queries; q++) {
        const float *query = unit->queries + q / shape->group * unit->query_stride + q % shape->group * size;
        scratch->scales[q] = shape->scale * quantize_query(query, size, scratch->queries + (size_t)q * size);
        scratch->maxima[q] = -FLT_MAX;
        scratch->weights[q] = 0;
    }
    memset(scratch->sums, 0, sizeof(float) * (size_t)queries * size);
}

static void finish(const AttentionUnit *unit, const AttentionShape *shape, const AttentionScratch *scratch) {
    for (int32_t q = 0; q < unit->count * shape->group; q++) {
        float *out = unit->out + q / shape->group * unit->out_stride + q % shape->group * shape->head_size;
        float share = 1.0f / scratch->weights[q];
        for (int32_t i = 0; i < shape->head_size; i++) out[i] = scratch->sums[q * shape->head_size + i] * share;
    }
}

static void attend_rows(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch) {
    begin(unit, shape, scratch);
    for (int32_t index = first_block(unit, shape), last = last_block(unit); index <= last; index++) {
        int32_t first_key = index * OSTINATO_BLOCK, num_keys = unit->first + unit->count - first_key;
        if (index < last) read_ahead(block_at(unit, shape, index + 1).keys, cache_block_bytes(shape->head_size));
        Scales scales = read_block(block_at(unit, shape, index), shape->head_size, num_keys, scratch);
        attend_block(unit, shape, &scales, first_key, scratch);
    }
    finish(unit, shape, scratch);
}

void attend(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch) {
    if (shape->has_amx && unit->count * shape->group > FEW_QUERIES) {
        attend_columns(unit, shape, scratch);
    } else {
        attend_rows(unit, shape, scratch);
    }
}
