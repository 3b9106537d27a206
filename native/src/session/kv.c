/* kv.c - where a session's state lies, and its KV blocks. */
#include "session/session.h"

void state_layout_of(const struct geist_model *m, enum geist_kv_type kv_type, struct state_layout *out)
{
    const struct model_config *c = &m->config;

    memset(out, 0, sizeof *out);
    if (m->n_recurrent) {
        out->window_bytes = gst_round_up((size_t)(c->conv_width - 1) * c->n_channels * sizeof(float), 64);
        out->matrix_bytes = gst_round_up((size_t)c->n_v_heads * c->dk * c->dv * sizeof(float), 64);
    }
    out->recurrent_bytes = m->n_recurrent * (out->window_bytes + out->matrix_bytes);
    out->kv_element_bytes = kv_type == GEIST_KV_F32 ? 4 : 2;
    out->kv_head_bytes = (size_t)GEIST_KV_BLOCK * c->head_dim * out->kv_element_bytes;
    out->kv_bytes_per_token = (size_t)m->n_attention * 2 * c->n_kv_heads * c->head_dim * out->kv_element_bytes;
    out->kv_block_bytes = gst_round_up(GEIST_KV_BLOCK * out->kv_bytes_per_token, GEIST_IMAGE_PAGE);
}

uint8_t *recurrent_create(const struct geist_model *m, const struct state_layout *l)
{
    uint8_t *state = gst_alloc_raw(l->recurrent_bytes);
    size_t window = (size_t)(m->config.conv_width - 1) * m->config.n_channels * sizeof(float);
    size_t matrix = (size_t)m->config.n_v_heads * m->config.dk * m->config.dv * sizeof(float);

    /* a pass writes windows and matrices whole; what rounds them up is never written */
    for (uint32_t i = 0; state && i < m->n_recurrent; i++) {
        memset(state + state_window_offset(l, i) + window, 0, l->window_bytes - window);
        memset(state + state_matrix_offset(l, i) + matrix, 0, l->matrix_bytes - matrix);
    }
    return state;
}

struct kv_block *kv_block_create(const struct state_layout *l)
{
    struct kv_block *b = gst_alloc(sizeof *b);

    if (!b)
        return NULL;
    b->data = gst_alloc_raw(l->kv_block_bytes);
    if (!b->data) {
        gst_free(b);
        return NULL;
    }
    /* positions are written before they are read; only the rounding is never written */
    memset(b->data + GEIST_KV_BLOCK * l->kv_bytes_per_token, 0, l->kv_block_bytes - GEIST_KV_BLOCK * l->kv_bytes_per_token);
    b->n_refs = 1;
    b->owned = true;
    return b;
}

struct kv_block *kv_block_alias(const void *data)
{
    struct kv_block *b = gst_alloc(sizeof *b);

    if (!b)
        return NULL;
    b->data = (uint8_t *)(uintptr_t)data; /* only whole blocks are aliased, and those are never written */
    b->n_refs = 1;
    return b;
}

void kv_block_release(struct kv_block *b)
{
    if (!b || --b->n_refs > 0)
        return;
    if (b->owned)
        gst_free(b->data);
    gst_free(b);
}

/* One walk over all heads' rows, in the order of a block; a compact tail has the same order with fewer rows. */
static size_t n_head_runs(const struct geist_model *m)
{
    return (size_t)m->n_attention * 2 * m->config.n_kv_heads;
}

void kv_rows_copy(const struct geist_model *m, const struct state_layout *l, const uint8_t *from, size_t n_rows, uint8_t *to)
{
    for (size_t i = 0; i < n_head_runs(m); i++)
        memcpy(to + i * l->kv_head_bytes, from + i * l->kv_head_bytes, n_rows * m->config.head_dim * l->kv_element_bytes);
}

void kv_tail_pack(const struct geist_model *m, const struct state_layout *l, const uint8_t *block, size_t n_rows, uint8_t *tail)
{
    size_t run = n_rows * m->config.head_dim * l->kv_element_bytes;

    for (size_t i = 0; i < n_head_runs(m); i++)
        memcpy(tail + i * run, block + i * l->kv_head_bytes, run);
}

void kv_tail_unpack(const struct geist_model *m, const struct state_layout *l, const uint8_t *tail, size_t n_rows, uint8_t *block)
{
    size_t run = n_rows * m->config.head_dim * l->kv_element_bytes;

    for (size_t i = 0; i < n_head_runs(m); i++)
        memcpy(block + i * l->kv_head_bytes, tail + i * run, run);
}

uint64_t kv_block_checksum(const struct state_layout *l, struct kv_block *b)
{
    if (!b->summed) {
        b->checksum = gst_checksum(b->data, l->kv_block_bytes);
        b->summed = true;
    }
    return b->checksum;
}
