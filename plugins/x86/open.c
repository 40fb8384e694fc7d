#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "amx.h"
#include "decoder.h"

static int refuse(char *error, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

static int refuse(char *error, size_t size, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(error, size, format, values);
    va_end(values);
    return -1;
}

int32_t ostinato_version(void) {
    return OSTINATO_X86_VERSION;
}

static int is_matrix(const OstinatoMatrix *matrix, int32_t rows, int32_t columns) {
    return matrix->rows == rows && matrix->columns == columns && (matrix->bits == 4 || matrix->bits == 8) &&
           matrix->tiles && (uintptr_t)matrix->tiles % 64 == 0 && columns % 32 == 0;
}

static int check_layers(const OstinatoModel *m, char *error, size_t size) {
    int32_t q_width = m->num_q_heads * m->head_size, kv_width = m->num_kv_heads * m->head_size;
    for (int32_t i = 0; i < m->num_layers; i++) {
        const OstinatoLayer *layer = &m->layers[i];
        if (!is_matrix(&layer->qkv, q_width + 2 * kv_width, m->hidden_size) ||
            !is_matrix(&layer->attention_out, m->hidden_size, q_width) ||
            !is_matrix(&layer->gate_up, 2 * m->intermediate_size, m->hidden_size) ||
            !is_matrix(&layer->down, m->hidden_size, m->intermediate_size) || !layer->attention_norm ||
            !layer->mlp_norm || !layer->q_norm != !layer->k_norm) {
            return refuse(error, size, "layer %d has matrices that do not fit the model's sizes", i);
        }
    }
    return 0;
}

static int check_model(const OstinatoModel *m, const OstinatoLimits *limits, char *error, size_t size) {
    if (m->hidden_size % 32 || m->intermediate_size % 32 || m->num_q_heads * m->head_size % 32) {
        return refuse(error, size,
                      "hidden size %d, intermediate size %d and %d heads of %d are not all multiples of 32",
                      m->hidden_size, m->intermediate_size, m->num_q_heads, m->head_size);
    }
    if (m->head_size % 16 || m->head_size < 16 || m->head_size > MOST_HEAD_SIZE) {
        return refuse(error, size, "heads of size %d: wanted is a multiple of 16 up to %d", m->head_size,
                      MOST_HEAD_SIZE);
    }
    if (m->num_kv_heads < 1 || m->num_q_heads % m->num_kv_heads || m->num_layers < 1 || m->vocab_size < 1) {
        return refuse(error, size, "%d query heads, %d KV heads, %d layers: not a model", m->num_q_heads,
                      m->num_kv_heads, m->num_layers);
    }
    if (limits->max_rows < 1 || limits->max_step_tokens < limits->max_rows || limits->num_blocks < 1 ||
        limits->num_blocks > INT32_MAX / OSTINATO_BLOCK || limits->num_threads < 1) {
        return refuse(error, size, "limits of %d rows, %d tokens, %d blocks, %d threads: not usable", limits->max_rows,
                      limits->max_step_tokens, limits->num_blocks, limits->num_threads);
    }
    if (!is_matrix(&m->embedding, m->vocab_size, m->hidden_size) || m->embedding.bits != 8 ||
        !is_matrix(&m->head, m->vocab_size, m->hidden_size)) {
        return refuse(error, size, "embedding or head does not fit the model's sizes");
    }
    return check_layers(m, error, size);
}

// Zeros at a multiple of 64 bytes; NULL where memory is refused.
static void *zeros(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes ? bytes : 64);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static int make_activation(Activation *to, int32_t tokens, int32_t columns) {
    size_t panels = (size_t)((tokens + PANEL - 1) / PANEL), blocks = (size_t)blocks_of(columns);
    to->codes = zeros(panels * blocks * PANEL_BLOCK);
    to->offsets = zeros(panels * blocks * PANEL * sizeof(int32_t));  // a group may be one block
    to->scales = zeros(panels * PANEL * sizeof(float));
    return to->codes && to->offsets && to->scales;
}

static void free_activation(Activation *of) {
    free(of->codes), free(of->offsets), free(of->scales);
}

static int32_t larger(int32_t one, int32_t other) {
    return one > other ? one : other;
}

static int32_t widest(const OstinatoDecoder *d) {
    return larger(larger(d->model.hidden_size, d->q_width), d->model.intermediate_size);
}

static int make_scratch(Scratch *to, const OstinatoDecoder *d) {
    int32_t most = (larger(d->group, MOST_QUERIES) + 15) / 16 * 16;
    size_t queries = (size_t)most * d->model.head_size * sizeof(float);
    AttentionScratch *a = &to->attention;
    a->queries = zeros(queries / 2), a->sums = zeros(queries);
    a->planes = zeros(plane_bytes(d->model.head_size) * 2 * (size_t)(most / 16));
    a->scales = zeros(most * sizeof(float)), a->positions = zeros(most * sizeof(int32_t));
    a->maxima = zeros(most * sizeof(float)), a->weights = zeros(most * sizeof(float));
    return make_activation(&to->own, ALONE_TOKENS, widest(d)) && a->queries && a->planes && a->sums && a->scales &&
           a->positions && a->maxima && a->weights;
}

static int make_memory(OstinatoDecoder *d) {
    const OstinatoModel *m = &d->model;
    size_t tokens = (size_t)d->limits.max_step_tokens;
    d->pieces = zeros(tokens * sizeof *d->pieces), d->sampled_pieces = zeros(tokens * sizeof *d->pieces);
    d->positions = zeros(tokens * 4), d->slots = zeros(tokens * 4);
    d->hidden = zeros(tokens * m->hidden_size * 4), d->sampled = zeros(tokens * m->hidden_size * 4);
    d->qkv = zeros(tokens * d->qkv_width * 4);
    d->attended = zeros(tokens * d->q_width * 4);
    d->gated = zeros(tokens * m->intermediate_size * 4);
    d->scratch = zeros(sizeof(Scratch) * (size_t)d->limits.num_threads);
    d->cache_bytes = (size_t)m->num_layers * d->limits.num_blocks * m->num_kv_heads * cache_block_bytes(m->head_size);
    void *caches = mmap(NULL, d->cache_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    d->caches = caches == MAP_FAILED ? NULL : caches;
    int there = d->pieces && d->sampled_pieces && d->positions && d->slots && d->hidden && d->sampled && d->qkv &&
                d->attended && d->gated && d->scratch && d->caches;
    for (int32_t i = 0; there && i < d->limits.num_threads; i++) there = make_scratch(&d->scratch[i], d);
    return there && make_activation(&d->inputs, (int32_t)tokens, widest(d));
}

static void free_memory(OstinatoDecoder *d) {
    for (int32_t i = 0; d->scratch && i < d->limits.num_threads; i++) {
        Scratch *of = &d->scratch[i];
        free_activation(&of->own);
        free(of->attention.queries), free(of->attention.planes), free(of->attention.sums);
        free(of->attention.scales), free(of->attention.positions);
        free(of->attention.maxima), free(of->attention.weights);
    }
    free_activation(&d->inputs);
    free(d->pieces), free(d->sampled_pieces), free(d->positions), free(d->slots), free(d->hidden), free(d->sampled);
    free(d->qkv), free(d->attended), free(d->gated), free(d->scratch), free(d->layers);
    if (d->caches) munmap(d->caches, d->cache_bytes);
    free(d);
}

OstinatoDecoder *ostinato_open(const OstinatoModel *model, const OstinatoLimits *limits, char *error, size_t size) {
    if (check_model(model, limits, error, size)) return NULL;
    OstinatoDecoder *d = zeros(sizeof *d);
    OstinatoLayer *layers = zeros(sizeof *layers * (size_t)model->num_layers);
    if (!d || !layers) {
        free(d), free(layers);
        refuse(error, size, "memory was refused");
        return NULL;
    }
    d->model = *model, d->limits = *limits;
    d->layers = memcpy(layers, model->layers, sizeof *layers * (size_t)model->num_layers);
    d->group = model->num_q_heads / model->num_kv_heads;
    d->q_width = model->num_q_heads * model->head_size, d->kv_width = model->num_kv_heads * model->head_size;
    d->qkv_width = d->q_width + 2 * d->kv_width;
    d->attention_scale = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss((float)model->head_size)));
    d->has_amx = amx_is_there();
    int refused = make_memory(d) ? crew_open(&d->crew, limits->num_threads, run_step, d) : 12;
    if (refused) {
        refuse(error, size, "memory or %d threads were refused (error %d)", limits->num_threads, refused);
        free_memory(d);
        return NULL;
    }
    return d;
}

void ostinato_close(OstinatoDecoder *decoder) {
    crew_close(&decoder->crew);
    free_memory(decoder);
}
