#define _GNU_SOURCE
#include "amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "inline.h"

#define AMX __attribute__((target("amx-tile,amx-int8")))

enum {
    ASK_PERMISSION = 0x1023,  // arch_prctl: ARCH_REQ_XCOMP_PERM
    TILE_DATA = 18,           // XFEATURE_XTILEDATA
};

// Tile registers: tokens, weights and two of sums, for sixteen tokens and for eight. GCC wants them as plain numbers.
#define SUMS_16_EVEN 0
#define SUMS_16_ODD 1
#define SUMS_8_EVEN 2
#define SUMS_8_ODD 3
#define TOKENS_16 4
#define TOKENS_8 5
#define WEIGHTS 6

enum { AHEAD = 4 };  // groups whose tokens are asked for before they are needed

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

int amx_is_there(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 24 & 1) || !(d >> 25 & 1)) return 0;  // AMX-TILE, AMX-INT8
    return syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
}

AMX void amx_begin(void) {
    _Alignas(64) TileConfig config = {.palette = 1};
    for (int tile = SUMS_16_EVEN; tile <= WEIGHTS; tile++) {
        config.rows[tile] = tile == SUMS_16_EVEN || tile == SUMS_16_ODD || tile == TOKENS_16 ? 16 : 8;
        config.row_bytes[tile] = tile == TOKENS_16 || tile == TOKENS_8 ? 32 : 64;
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic tells of the first bytes only
    _tile_loadconfig(&config);
}

AMX void amx_end(void) {
    _tile_release();
}

#define SUM(SUMS, TOKENS)                         \
    do {                                          \
        _tile_loadd(WEIGHTS, codes, 64);          \
        _tile_loadd(TOKENS, tokens, 32);          \
        _tile_zero(SUMS);                         \
        if (is_signed) {                          \
            _tile_dpbssd(SUMS, TOKENS, WEIGHTS);  \
        } else {                                  \
            _tile_dpbsud(SUMS, TOKENS, WEIGHTS);  \
        }                                         \
    } while (0)

// Begin the sums of a group, even or odd.
AMX INLINE void sum_group(int count, int is_odd, int is_signed, const uint8_t *codes, const int8_t *tokens) {
    if (count == 16 && is_odd) SUM(SUMS_16_ODD, TOKENS_16);
    if (count == 16 && !is_odd) SUM(SUMS_16_EVEN, TOKENS_16);
    if (count == 8 && is_odd) SUM(SUMS_8_ODD, TOKENS_8);
    if (count == 8 && !is_odd) SUM(SUMS_8_EVEN, TOKENS_8);
}

// Sums that were begun, into memory [16][16].
AMX INLINE void keep_sums(int count, int is_odd, int32_t *sums) {
    if (count == 16 && is_odd) _tile_stored(SUMS_16_ODD, sums, 64);
    if (count == 16 && !is_odd) _tile_stored(SUMS_16_EVEN, sums, 64);
    if (count == 8 && is_odd) _tile_stored(SUMS_8_ODD, sums, 64);
    if (count == 8 && !is_odd) _tile_stored(SUMS_8_EVEN, sums, 64);
}

INLINE __m512 halves(const uint8_t *side, int32_t group) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(side + (size_t)group * 32)));
}

// A tile and tokens, from the first group on, and where the sums of an even and of an odd group are kept.
typedef struct {
    const uint8_t *codes, *scales, *minima;
    const int8_t *tokens;
    const float *token_scales, *token_sums;
    int32_t groups;
    int32_t (*kept)[16 * 16];
} Walk;

// One group's sums, scaled and added to the totals.
INLINE void add_group(int count, int is_odd, int is_signed, const Walk *walk, int32_t group, __m512 *totals) {
    const float *scales = walk->token_scales + group * PANEL, *sums = walk->token_sums + group * PANEL;
    __m512 scale = halves(walk->scales, group);
    __m512 minimum = is_signed ? _mm512_setzero_ps() : halves(walk->minima, group);
    UNROLLED
    for (int t = 0; t < count; t++) {
        __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(walk->kept[is_odd] + t * 16));
        totals[t] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(scales[t])), dot, totals[t]);
        if (!is_signed) totals[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[t]), totals[t]);
    }
}

// While a group is added, the next one's sums are kept and those after are begun: none of the three waits for another.
AMX INLINE void take_group(int count, int is_odd, int is_signed, const Walk *walk, int32_t group, __m512 *totals) {
    for (int i = 0; i < count * 32; i += 64) {
        _mm_prefetch((const char *)walk->tokens + (size_t)(group + AHEAD) * 512 + i, _MM_HINT_T0);
    }
    if (group + 1 < walk->groups) keep_sums(count, !is_odd, walk->kept[!is_odd]);
    if (group + 2 < walk->groups) {
        size_t next = (size_t)(group + 2) * 512;
        sum_group(count, is_odd, is_signed, walk->codes + next, walk->tokens + next);
    }
    add_group(count, is_odd, is_signed, walk, group, totals);
}

// Inlined with count, 8 or 16, and the kind of codes known.
AMX INLINE void multiply(int count, int is_signed, const AmxTile *tile, const Activation *by, size_t line, float *out) {
    _Alignas(64) int32_t kept[2][16 * 16];
    __m512 totals[16];
    const Walk walk = {tile->codes,       tile->scales,    tile->minima, by->codes + line * 32,
                       by->scales + line, by->sums + line, by->groups,   kept};
    UNROLLED
    for (int t = 0; t < count; t++) totals[t] = _mm512_setzero_ps();
    sum_group(count, 0, is_signed, walk.codes, walk.tokens);
    keep_sums(count, 0, kept[0]);
    if (walk.groups > 1) sum_group(count, 1, is_signed, walk.codes + 512, walk.tokens + 512);
    for (int32_t group = 0; group < walk.groups; group += 2) {
        take_group(count, 0, is_signed, &walk, group, totals);
        if (group + 1 < walk.groups) take_group(count, 1, is_signed, &walk, group + 1, totals);
    }
    UNROLLED
    for (int t = 0; t < count; t++) _mm512_storeu_ps(out + t * OSTINATO_TILE, totals[t]);
}

AMX void amx_multiply(const AmxTile *tile, const Activation *by, size_t line, int32_t count, float *out) {
    if (tile->minima && count > 8) {
        multiply(16, 0, tile, by, line, out);
    } else if (tile->minima) {
        multiply(8, 0, tile, by, line, out);
    } else if (count > 8) {
        multiply(16, 1, tile, by, line, out);
    } else {
        multiply(8, 1, tile, by, line, out);
    }
}
