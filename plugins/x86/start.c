#include <stdio.h>

#include "decoder.h"

// Everything that a step's arrays index is checked here, so that no wrong number reads or writes elsewhere.
static const char *check_counts(const OstinatoDecoder *d, const OstinatoStep *s) {
    if (s->num_tokens < 1 || s->num_tokens > d->limits.max_step_tokens) return "num_tokens";
    if (s->num_rows < 1 || s->num_rows > d->limits.max_rows) return "num_rows";
    if (s->num_sampled < 0 || s->num_sampled > d->limits.max_step_tokens) return "num_sampled";
    if (s->query_starts[0] != 0 || s->query_starts[s->num_rows] != s->num_tokens) return "query_starts";
    for (int32_t i = 0; i < s->num_tokens; i++) {
        if (s->input_ids[i] < 0 || s->input_ids[i] >= d->model.vocab_size) return "input_ids";
    }
    for (int32_t i = 0; i < s->num_sampled; i++) {
        if (s->logits_indices[i] < 0 || s->logits_indices[i] >= s->num_tokens) return "logits_indices";
    }
    return NULL;
}

static const char *check_row(const OstinatoDecoder *d, const OstinatoStep *s, int32_t row) {
    int32_t count = s->query_starts[row + 1] - s->query_starts[row], context = s->context_lens[row];
    if (count < 1 || s->query_starts[row + 1] > s->num_tokens) return "query_starts";
    if (context < 0 || context > d->model.rope_rows - count) return "context_lens";
    int32_t blocks = (context + count + OSTINATO_BLOCK - 1) / OSTINATO_BLOCK;
    if (blocks > s->table_width) return "block_tables";
    const int32_t *table = s->block_tables + (size_t)row * s->table_width;
    for (int32_t i = 0; i < blocks; i++) {
        if (table[i] < 0 || table[i] >= d->limits.num_blocks) return "block_tables";
    }
    return NULL;
}

// Positions and slots of a row's tokens, and the pieces that its attention is cut into.
static void lay_out(OstinatoDecoder *d, int32_t row) {
    const OstinatoStep *s = &d->step;
    const int32_t *table = s->block_tables + (size_t)row * s->table_width;
    int32_t begin = s->query_starts[row], end = s->query_starts[row + 1], context = s->context_lens[row];
    int32_t most = d->group < MOST_QUERIES ? MOST_QUERIES / d->group : 1;
    if (end - begin > 1) d->has_chunks = 1;
    for (int32_t token = begin; token < end; token++) {
        int32_t position = context + token - begin;
        d->positions[token] = position;
        d->slots[token] = table[position / OSTINATO_BLOCK] * OSTINATO_BLOCK + position % OSTINATO_BLOCK;
        if ((token - begin) % most == 0) {
            int32_t count = end - token < most ? end - token : most;
            d->pieces[d->num_pieces++] = (Piece){row, token, count, position, token};
        }
    }
}

static void find_sampled(OstinatoDecoder *d) {
    const OstinatoStep *s = &d->step;
    for (int32_t i = 0, row = 0; i < s->num_sampled; i++) {
        int32_t token = s->logits_indices[i];
        if (token < s->query_starts[row]) row = 0;  // they need not be in order
        while (token >= s->query_starts[row + 1]) row++;
        d->sampled_pieces[i] = (Piece){row, token, 1, d->positions[token], i};
    }
}

int32_t ostinato_start(OstinatoDecoder *d, const OstinatoStep *step, char *error, size_t size) {
    const char *wrong = check_counts(d, step);
    for (int32_t row = 0; !wrong && row < step->num_rows; row++) wrong = check_row(d, step, row);
    if (wrong) {
        snprintf(error, size, "%s of the step is out of the decoder's bounds", wrong);
        return -1;
    }
    d->step = *step;
    d->num_pieces = d->has_chunks = 0;
    for (int32_t row = 0; row < step->num_rows; row++) lay_out(d, row);
    find_sampled(d);
    crew_start(&d->crew);
    return 0;
}

void ostinato_wait(OstinatoDecoder *decoder) {
    crew_wait(&decoder->crew);
}
