// A decoder's step on a CPU with AVX-512 VNNI: what the builder lays out, and what the runtime calls.
//
// builder/c_compiler.py compiles every .c file of this folder into kernels.so, with clang; GCC 12 takes them too, with
// -std=c11 -O3 -march=x86-64-v4 -mavx512vnni -ffp-contract=off -fvisibility=hidden -fPIC -pthread, to the same results.
// No sum hangs on how loops are vectorized, and no instruction is used that processors answer differently: a row's
// logits are the same bits whatever its neighbours, its chunks, the number of threads, with AMX or without.
//
// A matrix [N, K], K % 32 == 0, is cut into tiles of 16 outputs; N and K are filled up, K to a multiple of 64, with
// zeros. Inputs share a scale in groups of n blocks of 64: n is the greatest divisor of K/64 up to 4 (groups.h).
// A tile is contiguous, tiles follow each other, and each begins at a multiple of 64 bytes:
//
//   blocks [K/64]    scales [K/64/n][16] f32
//
// A block of 8 bits, and what one of 4 bits is made before it is multiplied:
//
//   codes [16][16][4] u8              byte [j][o][i] = code of output o, input 4 j + i;  weight = scale * (code - 128)
//
// so that it is what AMX multiplies at once, and 64 bytes of it what VNNI does. A block of 4 bits:
//
//   nibbles [8][16][4] u8             low ones: j of 0 to 7; high ones: j of 8 to 15
//   steps [2][factor, offset][16] i16, u16    of inputs 0 to 31 and 32 to 63
//
//   code = (nibble * factor + offset) / 256, rounded down, in 16 bits without sign
//
// gate_up alternates a tile of gate and a tile of up. Tables and biases are plain float32.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define OSTINATO_X86_VERSION 2  // of these structs and of the layout; kernels.so and the runtime must agree
#define OSTINATO_BLOCK 32       // tokens of a cache block
#define OSTINATO_DEPTH 64       // inputs of a block of codes
#define OSTINATO_TILE 16        // outputs of a tile

typedef struct {
    const uint8_t *tiles;
    const float *bias;  // [rows filled up to tiles], or NULL; of gate_up in the order of its tiles
    int32_t bits;       // 4 or 8
    int32_t rows, columns;
} OstinatoMatrix;

typedef struct {
    OstinatoMatrix qkv;            // [(Hq + 2 Hkv) D, hidden]
    OstinatoMatrix attention_out;  // [hidden, Hq D]
    OstinatoMatrix gate_up;        // [2 intermediate, hidden]
    OstinatoMatrix down;           // [hidden, intermediate]
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float *q_norm, *k_norm;            // [D], or NULL both
} OstinatoLayer;

typedef struct {
    int32_t vocab_size, hidden_size, intermediate_size, num_layers;
    int32_t num_q_heads, num_kv_heads, head_size;
    int32_t sliding_window;  // keys that a query sees, its own among them; 0 = all before it
    int32_t rope_rows;       // positions that the tables have
    float eps;
    const float *rope_cos, *rope_sin;  // [rope_rows, D / 2]
    const float *final_norm;           // [hidden]
    OstinatoMatrix embedding;          // [vocab, hidden], 8 bits; the same as the head where they are tied
    OstinatoMatrix head;               // [vocab, hidden]
    const OstinatoLayer *layers;       // [num_layers]
} OstinatoModel;

typedef struct {
    int32_t max_rows, max_step_tokens, num_blocks;
    int32_t num_threads;
} OstinatoLimits;

// One step: T tokens of B rows, S of them sampled, ragged and unpadded. All arrays are C-contiguous.
typedef struct {
    int32_t num_tokens, num_rows, num_sampled, table_width;  // T, B, S, P
    const int32_t *input_ids;       // [T]
    const int32_t *query_starts;    // [B+1]
    const int32_t *context_lens;    // [B] tokens cached before this step
    const int32_t *block_tables;    // [B, P]
    const int32_t *logits_indices;  // [S]
    float *logits;                  // [S, vocab], written
} OstinatoStep;

typedef struct OstinatoDecoder OstinatoDecoder;

#define OSTINATO_API __attribute__((visibility("default")))

OSTINATO_API int32_t ostinato_version(void);

// NULL and a text in `error` where the model can't be run so, or threads or memory are refused. The structs are copied;
// what they point to must stay. Caches are zeros.
OSTINATO_API OstinatoDecoder *ostinato_open(const OstinatoModel *model, const OstinatoLimits *limits, char *error,
                                            size_t error_size);

// Begin a step on the decoder's threads. 0, or -1 and a text in `error`: then nothing was begun. The arrays must stay
// until ostinato_wait. One step at a time.
OSTINATO_API int32_t ostinato_start(OstinatoDecoder *decoder, const OstinatoStep *step, char *error,
                                    size_t error_size);

// Block until the step is done.
OSTINATO_API void ostinato_wait(OstinatoDecoder *decoder);

// Waits for a running step, ends the threads, gives memory back.
OSTINATO_API void ostinato_close(OstinatoDecoder *decoder);
