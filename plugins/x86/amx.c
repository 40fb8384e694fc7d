#define _GNU_SOURCE
#include "amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    ASK_PERMISSION = 0x1023,  // arch_prctl: ARCH_REQ_XCOMP_PERM
    TILE_DATA = 18,           // XFEATURE_XTILEDATA
};

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

AMX void amx_begin(const AmxShape *shape) {
    _Alignas(64) TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = shape->rows[tile];
        config.row_bytes[tile] = shape->row_bytes[tile];
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic tells of the first bytes only
    _tile_loadconfig(&config);
}

AMX void amx_end(void) {
    _tile_release();
}
