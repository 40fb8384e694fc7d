#include <string.h>

#include "amx.h"
#include "column.h"
#include "decoder.h"
#include "product.h"

typedef struct {
    OstinatoDecoder *decoder;
    Scratch *scratch;
} Member;

// Where the numbers come from that a matrix takes, and the norm that stands before it, if one does.
typedef struct {
    const float *from;
    int32_t width;
    const float *norm;
    const int32_t *tokens;  // which tokens of `from`, or NULL: all, in order
    int32_t count;
} Source;

static void prepare_token(const Activation *to, const Source *source, int32_t token, float eps) {
    const float *x = source->from + (size_t)(source->tokens ? source->tokens[token] : token) * source->width;
    if (source->norm) {
        normalize_token(to, token, x, source->norm, eps);
    } else {
        quantize_token(to, token, x);
    }
}

// Quantize what the source gives: a few tokens in each thread's own memory, many together.
static Activation prepare(Member me, const Source *source) {
    OstinatoDecoder *d = me.decoder;
    int is_alone = source->count <= ALONE_TOKENS;
    Activation to = is_alone ? me.scratch->own : d->inputs;
    shape_activation(&to, source->count, source->width);
    if (is_alone) {
        for (int32_t token = 0; token < source->count; token++) prepare_token(&to, source, token, d->model.eps);
        return to;
    }
    for (int32_t token; (token = crew_take(&d->crew, 4)) < source->count;) {
        for (int32_t end = token + 4; token < end && token < source->count; token++) {
            prepare_token(&to, source, token, d->model.eps);
        }
    }
    crew_meet(&d->crew);
    return to;
}

static void multiply_all(Member me, const Source *source, const OstinatoMatrix *matrix, Finish finish, float *out) {
    OstinatoDecoder *d = me.decoder;
    Activation by = prepare(me, source);
    Product product = {matrix, &by, finish, out, d->has_amx};
    multiply_share(&d->crew, &product);
    crew_meet(&d->crew);
}

static void embed(Member me) {
    OstinatoDecoder *d = me.decoder;
    for (int32_t token; (token = crew_take(&d->crew, 1)) < d->step.num_tokens;) {
        read_row(&d->model.embedding, d->step.input_ids[token], d->hidden + (size_t)token * d->model.hidden_size);
    }
    crew_meet(&d->crew);
}

static uint8_t *layer_cache(const OstinatoDecoder *d, int32_t layer) {
    return d->caches + d->cache_bytes / d->model.num_layers * layer;
}

static void turn(float *head, const OstinatoDecoder *d, const float *norm, int32_t position) {
    int32_t size = d->model.head_size;
    if (norm) {
        float factor = inverse_rms(head, size, d->model.eps);
        for (int32_t i = 0; i < size; i++) head[i] = head[i] * factor * norm[i];
    }
    size_t line = (size_t)position * (size / 2);
    rotate_head(head, size, d->model.rope_cos + line, d->model.rope_sin + line);
}

// Norm and rotation of a token's heads around one KV head, in place; its key and value go into the cache.
static void write_token(const OstinatoDecoder *d, int32_t layer, int32_t token, int32_t kv_head) {
    const OstinatoLayer *weights = &d->layers[layer];
    int32_t size = d->model.head_size, position = d->positions[token], slot = d->slots[token];
    float *queries = d->qkv + (size_t)token * d->qkv_width + kv_head * d->group * size;
    float *key = d->qkv + (size_t)token * d->qkv_width + d->q_width + kv_head * size;
    for (int32_t g = 0; g < d->group; g++) turn(queries + g * size, d, weights->q_norm, position);
    turn(key, d, weights->k_norm, position);
    size_t number = (size_t)(slot / OSTINATO_BLOCK) * d->model.num_kv_heads + kv_head;
    write_cache(cache_block(layer_cache(d, layer), number, size), slot % OSTINATO_BLOCK, key, key + d->kv_width, size);
}

static void write_share(Member me, int32_t layer) {
    OstinatoDecoder *d = me.decoder;
    int32_t heads = d->model.num_kv_heads;
    for (int32_t token; (token = crew_take(&d->crew, 16)) < d->step.num_tokens;) {
        for (int32_t end = token + 16; token < end && token < d->step.num_tokens; token++) {
            for (int32_t head = 0; head < heads; head++) write_token(d, layer, token, head);
        }
    }
    crew_meet(&d->crew);
}

// Of keys and values that are not written, which are one a piece, who attends writes them.
static void attend_share(Member me, int32_t layer, const Piece *pieces, int32_t num_pieces, int is_written) {
    OstinatoDecoder *d = me.decoder;
    AttentionShape shape = {layer_cache(d, layer), d->model.num_kv_heads, d->group, d->model.head_size,
                            d->model.sliding_window, d->attention_scale, d->has_amx};
    if (d->has_amx) begin_columns();
    int32_t heads = d->model.num_kv_heads, count = num_pieces * heads, width = d->group * d->model.head_size;
    for (int32_t unit; (unit = crew_take(&d->crew, 1)) < count;) {
        const Piece *piece = &pieces[num_pieces - 1 - unit / heads];  // the longest of a prompt first
        int32_t head = unit % heads;
        if (!is_written) write_token(d, layer, piece->first, head);
        AttentionUnit part = {
            .table = d->step.block_tables + (size_t)piece->row * d->step.table_width,
            .first = piece->position,
            .count = piece->count,
            .kv_head = head,
            .queries = d->qkv + (size_t)piece->first * d->qkv_width + (size_t)head * width,
            .out = d->attended + (size_t)piece->line * d->q_width + (size_t)head * width,
            .query_stride = (size_t)d->qkv_width,
            .out_stride = (size_t)d->q_width,
        };
        attend(&part, &shape, &me.scratch->attention);
    }
    if (d->has_amx) amx_end();
    crew_meet(&d->crew);
}

// What comes after attention, for tokens of `attended`, whose state is in `hidden`.
static void run_rest(Member me, const OstinatoLayer *layer, const Source *attended, float *hidden) {
    OstinatoDecoder *d = me.decoder;
    multiply_all(me, attended, &layer->attention_out, ADD, hidden);
    Source middle = {hidden, d->model.hidden_size, layer->mlp_norm, NULL, attended->count};
    multiply_all(me, &middle, &layer->gate_up, GATE, d->gated);
    Source gated = {d->gated, d->model.intermediate_size, NULL, NULL, attended->count};
    multiply_all(me, &gated, &layer->down, ADD, hidden);
}

static void multiply_qkv(Member me, int32_t layer) {
    OstinatoDecoder *d = me.decoder;
    Source state = {d->hidden, d->model.hidden_size, d->layers[layer].attention_norm, NULL, d->step.num_tokens};
    multiply_all(me, &state, &d->layers[layer].qkv, STORE, d->qkv);
}

static void run_layer(Member me, int32_t number) {
    OstinatoDecoder *d = me.decoder;
    multiply_qkv(me, number);
    if (d->has_chunks) write_share(me, number);  // else nobody waits for another's key
    attend_share(me, number, d->pieces, d->num_pieces, d->has_chunks);
    Source attended = {d->attended, d->q_width, NULL, NULL, d->step.num_tokens};
    run_rest(me, &d->layers[number], &attended, d->hidden);
}

// After keys and values, the last layer goes on with the tokens that are sampled; what it makes of them is `sampled`.
static void run_last_layer(Member me) {
    OstinatoDecoder *d = me.decoder;
    const OstinatoStep *step = &d->step;
    int32_t number = d->model.num_layers - 1, hidden = d->model.hidden_size;
    multiply_qkv(me, number);
    write_share(me, number);
    for (int32_t i; (i = crew_take(&d->crew, 1)) < step->num_sampled;) {
        const float *from = d->hidden + (size_t)step->logits_indices[i] * hidden;
        memcpy(d->sampled + (size_t)i * hidden, from, sizeof(float) * (size_t)hidden);
    }
    crew_meet(&d->crew);
    if (!step->num_sampled) return;
    attend_share(me, number, d->sampled_pieces, step->num_sampled, 1);
    Source attended = {d->attended, d->q_width, NULL, NULL, step->num_sampled};
    run_rest(me, &d->layers[number], &attended, d->sampled);
}

void run_step(void *context, int32_t member) {
    OstinatoDecoder *d = context;
    Member me = {d, &d->scratch[member]};
    int32_t last = d->model.num_layers - 1, hidden = d->model.hidden_size;
    Source sampled = {d->hidden, hidden, d->model.final_norm, d->step.logits_indices, d->step.num_sampled};
    embed(me);
    for (int32_t layer = 0; layer < last; layer++) run_layer(me, layer);
    if (d->step.num_sampled < d->step.num_tokens) {
        run_last_layer(me);
        sampled.from = d->sampled, sampled.tokens = NULL;
    } else {
        run_layer(me, last);
    }
    if (sampled.count) multiply_all(me, &sampled, &d->model.head, STORE, d->step.logits);
}
