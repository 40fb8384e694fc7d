#include "column.h"

#include <float.h>

#include "amx.h"
#include "exponential.h"
#include "inline.h"
#include "largest.h"
#include "planes.h"

// Tile registers. GCC wants them as plain numbers.
#define SUMS_0 0
#define SUMS_1 1
#define SUMS_2 2
#define SUMS_3 3
#define KEYS 4
#define QUERIES 5
#define VALUES 6
#define WEIGHTS 7

void begin_columns(void) {
    amx_begin(&(AmxShape){{16, 16, 16, 16, 16, 16, 16, 8}, {64, 64, 64, 64, 64, 64, 32, 64}});
}

// Sixteen lines of sixteen pairs of bytes, turned: line i becomes the i-th pair of every line.
INLINE void turn_pairs(const int8_t *from, int32_t from_stride, int8_t *to, int32_t to_stride) {
    __m256i lines[16];
    UNROLLED
    for (int i = 0; i < 16; i++) lines[i] = _mm256_loadu_si256((const __m256i *)(from + i * from_stride));
    UNROLLED
    for (int stage = 0; stage < 4; stage++) {
        __m256i before[16];
        UNROLLED
        for (int i = 0; i < 16; i++) before[i] = lines[i];
        UNROLLED
        for (int i = 0; i < 8; i++) {
            lines[2 * i] = _mm256_unpacklo_epi16(before[i], before[i + 8]);
            lines[2 * i + 1] = _mm256_unpackhi_epi16(before[i], before[i + 8]);
        }
    }
    UNROLLED
    for (int i = 0; i < 8; i++) {  // halves of registers were turned apart
        __m256i *low = (__m256i *)(to + i * to_stride), *high = (__m256i *)(to + (i + 8) * to_stride);
        _mm256_storeu_si256(low, _mm256_permute2x128_si256(lines[2 * i], lines[2 * i + 1], 0x20));
        _mm256_storeu_si256(high, _mm256_permute2x128_si256(lines[2 * i], lines[2 * i + 1], 0x31));
    }
}

void turn_block(CacheBlock from, int32_t head_size, Block *to) {
    int32_t stride = (head_size + CHUNK - 1) / CHUNK * CHUNK;
    for (int32_t i = 0; i < head_size / 2; i += 16) {
        for (int32_t key = 0; key < OSTINATO_BLOCK; key += 16) {
            const int8_t *keys = from.keys + (i * OSTINATO_BLOCK + key) * 2;
            turn_pairs(keys, OSTINATO_BLOCK * 2, to->keys + key * stride + i * 2, stride);
        }
    }
    for (int32_t i = 0; i < head_size; i += 16) {
        turn_pairs(from.values + i * 2, head_size * 2, to->values + i * OSTINATO_BLOCK, OSTINATO_BLOCK);
    }
    to->key_scales = from.key_scales, to->value_scales = from.value_scales;
}

// What 16-bit codes times 8-bit codes came to, by their high and by their low byte: [number][16 queries].
typedef struct {
    _Alignas(64) int32_t high[CHUNK][16], low[CHUNK][16];
} Planes;

// Softmax's weights of a block: its codes as planes [keys/4][16][4], the step of codes, and what sums before are worth.
typedef struct {
    _Alignas(64) uint32_t high[8][16], low[8][16];
    __m512 step, factor;
} Weights;

INLINE __m512 product_at(const Planes *planes, int32_t number) {
    __m512i high = _mm512_load_si512(planes->high[number]), low = _mm512_load_si512(planes->low[number]);
    return _mm512_cvtepi32_ps(joined(high, low));
}

// products [32 keys][16] = keys · queries.
AMX static void score(const Column *column, const Block *block, int32_t head_size, Planes *products) {
    int32_t chunks = (head_size + CHUNK - 1) / CHUNK, stride = chunks * CHUNK;
    const uint8_t *high = column->queries, *low = high + (size_t)chunks * CHUNK * 16;
    _tile_zero(SUMS_0);
    _tile_zero(SUMS_1);
    _tile_zero(SUMS_2);
    _tile_zero(SUMS_3);
    for (int32_t i = 0; i < chunks; i++) {
        const int8_t *keys = block->keys + i * CHUNK;  // past the head's end queries are 0
        size_t begin = (size_t)i * CHUNK * 16;
        _tile_loadd(QUERIES, high + begin, 64);
        _tile_loadd(KEYS, keys, stride);
        _tile_dpbssd(SUMS_0, KEYS, QUERIES);
        _tile_loadd(KEYS, keys + 16 * stride, stride);
        _tile_dpbssd(SUMS_1, KEYS, QUERIES);
        _tile_loadd(QUERIES, low + begin, 64);
        _tile_dpbsud(SUMS_3, KEYS, QUERIES);
        _tile_loadd(KEYS, keys, stride);
        _tile_dpbsud(SUMS_2, KEYS, QUERIES);
    }
    _tile_stored(SUMS_0, products->high[0], 64);
    _tile_stored(SUMS_2, products->low[0], 64);
    _tile_stored(SUMS_1, products->high[16], 64);
    _tile_stored(SUMS_3, products->low[16], 64);
}

// products [CHUNK][16] = values · weights, by one plane of them, for `tiles` times 16 numbers of a head.
AMX INLINE void mix_plane(int is_high, int32_t tiles, const int8_t *values, const Weights *weights, Planes *products) {
    int32_t(*out)[16] = is_high ? products->high : products->low;
    _tile_loadd(WEIGHTS, is_high ? weights->high : weights->low, 64);
#define MIX(SUMS, NUMBER)                                                      \
    if (NUMBER < tiles) {                                                      \
        _tile_loadd(VALUES, values + (NUMBER) * 16 * OSTINATO_BLOCK, OSTINATO_BLOCK); \
        _tile_zero(SUMS);                                                      \
        if (is_high) {                                                         \
            _tile_dpbssd(SUMS, VALUES, WEIGHTS);                               \
        } else {                                                               \
            _tile_dpbsud(SUMS, VALUES, WEIGHTS);                               \
        }                                                                      \
        _tile_stored(SUMS, out[(NUMBER) * 16], 64);                            \
    }
    MIX(SUMS_0, 0)
    MIX(SUMS_1, 1)
    MIX(SUMS_2, 2)
    MIX(SUMS_3, 3)
#undef MIX
}

AMX static void mix(const Column *column, const Block *block, int32_t head_size, const Weights *weights,
                    Planes *products) {
    for (int32_t done = 0; done < head_size; done += CHUNK) {
        int32_t count = head_size - done < CHUNK ? head_size - done : CHUNK;
        const int8_t *values = block->values + (size_t)done * OSTINATO_BLOCK;
        mix_plane(1, count / 16, values, weights, products);
        mix_plane(0, count / 16, values, weights, products);
        float *sums = column->sums + (size_t)done * 16;
        for (int32_t i = 0; i < count; i++) {
            __m512 before = _mm512_mul_ps(_mm512_load_ps(sums + i * 16), weights->factor);
            _mm512_store_ps(sums + i * 16, _mm512_fmadd_ps(weights->step, product_at(products, i), before));
        }
    }
}

// Which queries see a key.
INLINE __mmask16 seeing(const Column *column, int32_t key) {
    __m512i ahead = _mm512_sub_epi32(_mm512_load_si512(column->positions), _mm512_set1_epi32(column->first_key + key));
    __mmask16 seen = _mm512_cmpge_epi32_mask(ahead, _mm512_setzero_si512());
    return column->window ? _mm512_mask_cmplt_epi32_mask(seen, ahead, _mm512_set1_epi32(column->window)) : seen;
}

// Products become scores [32][16]; returns the maxima, those before among them.
INLINE __m512 scale_scores(int is_whole, const Column *column, const Block *block, const Planes *products,
                           float (*scores)[16]) {
    const __m512 least = _mm512_set1_ps(-FLT_MAX), scale = _mm512_load_ps(column->scales);
    __m512 tops[2] = {_mm512_load_ps(column->maxima), least};
    for (int key = 0; key < OSTINATO_BLOCK; key += 4) {
        UNROLLED
        for (int i = key; i < key + 4; i++) {
            __m512 score = _mm512_mul_ps(product_at(products, i), scale), by = _mm512_set1_ps(block->key_scales[i]);
            score = is_whole ? _mm512_mul_ps(score, by) : _mm512_mask_mul_ps(least, seeing(column, i), score, by);
            tops[i % 2] = _mm512_max_ps(score, tops[i % 2]);
            _mm512_store_ps(scores[i], score);
        }
    }
    return _mm512_max_ps(tops[1], tops[0]);
}

// exp(score - top) of a key, which goes on as it is and, times the value's scale, in `scores`.
INLINE __m512 weigh_key(int is_whole, const Column *column, const Block *block, int key, __m512 top,
                        float (*scores)[16], __m512i *largest) {
    __m512 weight = exponential(_mm512_sub_ps(_mm512_load_ps(scores[key]), top));
    __m512 by = _mm512_set1_ps(block->value_scales[key]), scaled;
    if (is_whole) {
        scaled = _mm512_mul_ps(weight, by);
    } else {
        __mmask16 seen = seeing(column, key);
        weight = _mm512_maskz_mov_ps(seen, weight);
        scaled = _mm512_maskz_mul_ps(seen, weight, by);  // a later token's scale may be NaN
    }
    *largest = _mm512_max_epi32(*largest, _mm512_castps_si512(scaled));
    _mm512_store_ps(scores[key], scaled);
    return weight;
}

// The sum of weights in the order in which a register's lanes are added.
INLINE __m512 sum_weights(int is_whole, const Column *column, const Block *block, __m512 top,
                          float (*scores)[16], __m512i *largest) {
    _Alignas(64) float pairs[16][16];
    __m512 sums[16];
    for (int key = 0; key < 16; key += 2) {
        UNROLLED
        for (int i = key; i < key + 2; i++) {
            __m512 low = weigh_key(is_whole, column, block, i, top, scores, largest);
            __m512 high = weigh_key(is_whole, column, block, i + 16, top, scores, largest);
            _mm512_store_ps(pairs[i], _mm512_add_ps(low, high));
        }
    }
    UNROLLED
    for (int i = 0; i < 8; i++) sums[i] = _mm512_add_ps(_mm512_load_ps(pairs[i]), _mm512_load_ps(pairs[i + 8]));
    UNROLLED
    for (int half = 4; half; half /= 2) {
        UNROLLED
        for (int i = 0; i < half; i++) sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
    }
    return sums[0];
}

// Four keys' codes of 16 bits as their high and their low bytes.
INLINE void split(const float (*scores)[16], __m512 factor, uint32_t *high, uint32_t *low) {
    const __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
    const __mmask32 odd_halves = 0xaaaaaaaa;
    __m512i codes[4];
    UNROLLED
    for (int i = 0; i < 4; i++) codes[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores[i]), factor));
    __m512i even = _mm512_mask_mov_epi16(codes[0], odd_halves, _mm512_slli_epi32(codes[2], 16));
    __m512i odd = _mm512_mask_mov_epi16(codes[1], odd_halves, _mm512_slli_epi32(codes[3], 16));
    _mm512_store_si512(low, _mm512_mask_mov_epi8(even, odd_bytes, _mm512_slli_epi32(odd, 8)));
    _mm512_store_si512(high, _mm512_mask_mov_epi8(_mm512_srli_epi32(even, 8), odd_bytes, odd));
}

// Products become weights; the maxima and sums of weights go on.
INLINE void soften(int is_whole, const Column *column, const Block *block, const Planes *products,
                   Weights *weights) {
    _Alignas(64) float scores[OSTINATO_BLOCK][16];
    __m512 before = _mm512_load_ps(column->maxima);
    __m512 top = scale_scores(is_whole, column, block, products, scores);
    __m512i bits = _mm512_setzero_si512();
    __m512 sum = sum_weights(is_whole, column, block, top, scores, &bits);
    weights->factor = exponential(_mm512_sub_ps(before, top));
    __m512 weight = _mm512_mul_ps(_mm512_load_ps(column->weights), weights->factor);
    _mm512_store_ps(column->weights, _mm512_add_ps(weight, sum));
    _mm512_store_ps(column->maxima, top);
    const __m512 most = _mm512_set1_ps(32767.0f), largest = _mm512_castsi512_ps(bits);
    __mmask16 is_some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(LEAST), _CMP_NLT_UQ);
    weights->step = _mm512_maskz_div_ps(is_some, largest, most);
    __m512 factor = _mm512_maskz_div_ps(is_some, most, largest);
    UNROLLED
    for (int i = 0; i < 8; i++) split(scores + 4 * i, factor, weights->high[i], weights->low[i]);
}

void attend_column(const Column *column, const Block *block, int32_t head_size) {
    Planes products;
    Weights weights;
    score(column, block, head_size, &products);
    if (column->is_whole) {
        soften(1, column, block, &products, &weights);
    } else {
        soften(0, column, block, &products, &weights);
    }
    mix(column, block, head_size, &weights, &products);
}
