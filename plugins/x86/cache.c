#include "cache.h"

#include <string.h>

#include "largest.h"

void rotate_head(float *restrict x, int32_t head_size, const float *restrict cos, const float *restrict sin) {
    int32_t half = head_size / 2;
    for (int32_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

// Codes [D] of a head, and its scale.
static float quantize_head(const float *x, int32_t head_size, int8_t *codes) {
    __m512i size = _mm512_setzero_si512();
    for (int32_t i = 0; i < head_size; i += 16) size = _mm512_max_epi32(size, size_bits(_mm512_loadu_ps(x + i)));
    float scale = largest_of(size) / 127.0f;
    const __m512 divisor = _mm512_set1_ps(scale > 0 ? scale : 1.0f), most = _mm512_set1_ps(127.0f);
    for (int32_t i = 0; i < head_size; i += 16) {
        __m512 unit = _mm512_div_ps(_mm512_loadu_ps(x + i), divisor);  // past the top where the scale is subnormal
        unit = _mm512_max_ps(_mm512_min_ps(unit, most), _mm512_sub_ps(_mm512_setzero_ps(), most));
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(unit)));
    }
    return scale;
}

void write_cache(CacheBlock block, int32_t offset, const float *key, const float *value, int32_t head_size) {
    int8_t codes[MOST_HEAD_SIZE];
    block.key_scales[offset] = quantize_head(key, head_size, codes);
    for (int32_t i = 0; i < head_size; i += 2) memcpy(block.keys + (i / 2 * OSTINATO_BLOCK + offset) * 2, codes + i, 2);
    block.value_scales[offset] = quantize_head(value, head_size, codes);
    int8_t *values = block.values + (size_t)(offset / 2 * 2) * head_size + offset % 2;
    for (int32_t i = 0; i < head_size; i++) values[i * 2] = codes[i];
}
