// A decoder's step on a CPU with AVX-512 VNNI: what the builder lays out, and what the runtime calls.
//
// builder/c_compiler.py compiles every .c file of this folder into kernels.so, with clang; GCC 12 takes them too, with
// -std=c11 -O3 -march=x86-64-v4 -mavx512vnni -ffp-contract=off -fvisibility=hidden -fPIC -pthread, to the same results.
// No sum hangs on how loops are vectorized, and no instruction is used that processors answer differently: a row's
// logits are the same bits whatever its neighbours, its chunks, the number of threads, with AMX or without.
//
// A matrix [N, K], K % 32 == 0, is cut into tiles of 16 outputs; N is filled up with zeros. A tile is contiguous, tiles
// follow each other, and each begins at a multiple of 64 bytes:
//
//   8 bits   codes [K/32][8][16][4] u8    scales [K/32][16] f16                           fill up to 64 bytes
//   4 bits   codes [K/32][4][16][4] u8    scales [K/32][16] f16    minima [K/32][16] f16
//
//   8 bits   byte [g][j][o][i] = code of output o, input 32 g + 4 j + i      weight = scale * (code - 128)
//   4 bits   its low nibble is that, its high nibble that of j + 4           weight = scale * code + minimum
//
// gate_up alternates a tile of gate and a tile of up. Tables and biases are plain float32.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define OSTINATO_X86_VERSION 1  // of these structs and of the layout; kernels.so and the runtime must agree
#define OSTINATO_BLOCK 32       // tokens of a cache block
#define OSTINATO_GROUP 32       // inputs that share a scale
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
