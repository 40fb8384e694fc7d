// AMX, whose tile registers multiply sixteen lines with sixteen columns of bytes, 64 deep, at once.
#pragma once

#include <immintrin.h>
#include <stdint.h>

// A function that uses AMX.
#define AMX __attribute__((target("amx-tile,amx-int8")))

// Of each tile register: its rows and the bytes of a row.
typedef struct {
    uint8_t rows[8];
    uint16_t row_bytes[8];
} AmxShape;

// Whether this CPU has AMX for int8 and the system lets this process use it.
int amx_is_there(void);

// A thread's tile registers take a shape, whatever they had before; and none.
void amx_begin(const AmxShape *shape);
void amx_end(void);
