// Codes of four bits become the bytes that are multiplied: (code * factor + offset) / 256, of 16 bits and without sign.
#pragma once

#include <immintrin.h>

#include "inline.h"
#include "weights.h"

// Factors and offsets of 32 inputs, of each output twice.
typedef struct {
    __m512i factor, offset;
} Steps;

INLINE __m512i twice(const uint8_t *sixteen) {
    const __m512i order = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                           4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    __m256i numbers = _mm256_load_si256((const __m256i *)sixteen);
    return _mm512_permutexvar_epi16(order, _mm512_castsi256_si512(numbers));
}

// Steps of the first or the second 32 inputs of a block.
INLINE Steps steps_at(const uint8_t *block, int half) {
    const uint8_t *numbers = block + NIBBLE_CODES + half * 4 * OSTINATO_TILE;
    return (Steps){twice(numbers), twice(numbers + 2 * OSTINATO_TILE)};
}

// Four inputs of sixteen outputs, of nibbles that are 16-bit numbers: inputs 0 and 2, and 1 and 3.
INLINE __m512i expand(__m512i even, __m512i odd, const Steps *steps) {
    const __m512i high_bytes = _mm512_set1_epi16((short)0xff00);
    even = _mm512_add_epi16(_mm512_mullo_epi16(even, steps->factor), steps->offset);
    odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, steps->factor), steps->offset);
    return _mm512_ternarylogic_epi32(odd, high_bytes, _mm512_srli_epi16(even, 8), 0xea);  // odd & high_bytes | even
}

// Inputs 4j..4j+3 and 32+4j..32+4j+3 of a block, j < 8.
INLINE void expand_two(const uint8_t *block, int j, const Steps steps[2], __m512i into[2]) {
    const __m512i mask = _mm512_set1_epi16(15);
    __m512i four = _mm512_load_si512(block + j * 64);  // nibbles a number
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(four, 8), mask);
    into[0] = expand(_mm512_and_si512(four, mask), odd, &steps[0]);
    into[1] = expand(_mm512_and_si512(_mm512_srli_epi16(four, 4), mask), _mm512_srli_epi16(four, 12), &steps[1]);
}

INLINE void expand_block(const uint8_t *block, uint8_t *into) {
    const Steps steps[2] = {steps_at(block, 0), steps_at(block, 1)};
    UNROLLED
    for (int j = 0; j < 8; j++) {
        __m512i bytes[2];
        expand_two(block, j, steps, bytes);
        _mm512_store_si512(into + j * 64, bytes[0]);
        _mm512_store_si512(into + (j + 8) * 64, bytes[1]);
    }
}
