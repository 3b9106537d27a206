/* attention.c - causal attention over KV blocks, grouped heads; with qwen35's output gate.
 *
 *   q, k, v = W_q h, W_k h, W_v h          qwen35: W_q gives q and a gate per head, side by side
 *   q, k    = rope(norm(q)), rope(norm(k)) norms where the model has them
 *   o_n     = sum over s <= t of softmax_s(q_n . k_s / sqrt(head_dim)) v_s       local layers: t - window < s <= t
 *   out     = W_o (o * sigmoid(gate))      gate in qwen35 only
 */
#include "forward/forward.h"

#include <math.h>

/* Rows that one unit of attention work takes together, so that a block of K and V is used from the cache. */
#define ROWS_TOGETHER 16

struct attention_work {
    const struct pass *p;
    const struct model_layer *layer;
    float *q; /* [T, q_stride]: head n at n * q_head_stride, q_stride = n_heads * q_head_stride */
    size_t q_head_stride;
    float *k, *v; /* [T, n_kv_heads * head_dim] */
    bool gated;   /* the gate of head n lies head_dim behind its q */
    size_t n_groups;
};

/* Norm and RoPE of q and k, k and v into the session's blocks. Rows [begin, end). */
static void prepare_rows(void *context, size_t begin, size_t end)
{
    const struct attention_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;
    const struct state_layout *l = &p->s->layout;
    size_t dim = c->head_dim, half = c->n_rot / 2, kv_width = c->n_kv_heads * dim;

    for (size_t t = begin; t < end; t++) {
        size_t angles = ((w->layer->local ? p->n_tokens : 0) + t) * half;
        const float *cosines = p->cos + angles, *sines = p->sin + angles;
        size_t position = p->start + t, row = position % GEIST_KV_BLOCK;
        uint8_t *block = p->s->blocks[position / GEIST_KV_BLOCK]->data;

        for (size_t n = 0; n < c->n_heads; n++) {
            float *q = w->q + (t * c->n_heads + n) * w->q_head_stride;
            if (w->layer->attn_q_norm)
                p->k->rms_norm(q, w->layer->attn_q_norm, dim, c->eps, q);
            p->k->rope(q, c->n_rot, cosines, sines, c->rope_neox);
        }
        for (uint32_t n = 0; n < c->n_kv_heads; n++) {
            float *k = w->k + t * kv_width + n * dim;
            const float *v = w->v + t * kv_width + n * dim;
            uint8_t *k_row = block + state_kv_offset(l, c->n_kv_heads, w->layer->index, 0, n) + row * dim * l->kv_element_bytes;
            uint8_t *v_row = block + state_kv_offset(l, c->n_kv_heads, w->layer->index, 1, n) + row * dim * l->kv_element_bytes;

            if (w->layer->attn_k_norm)
                p->k->rms_norm(k, w->layer->attn_k_norm, dim, c->eps, k);
            p->k->rope(k, c->n_rot, cosines, sines, c->rope_neox);
            if (p->s->kv_type == GEIST_KV_F16) {
                p->k->f32_to_f16(k, dim, (uint16_t *)(void *)k_row);
                p->k->f32_to_f16(v, dim, (uint16_t *)(void *)v_row);
            } else {
                memcpy(k_row, k, dim * sizeof(float));
                memcpy(v_row, v, dim * sizeof(float));
            }
        }
    }
}

/* The first position that a row at `position` sees. */
static size_t first_seen(const struct attention_work *w, size_t position)
{
    size_t window = w->p->m->config.window;

    return w->layer->local && position + 1 > window ? position + 1 - window : 0;
}

/* Unit i is head i / n_groups and rows [16 (i mod n_groups), ...). Block by block, so that the rows share it. */
static void attend_units(void *context, size_t begin, size_t end)
{
    const struct attention_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;
    const struct state_layout *l = &p->s->layout;
    enum gst_float_type kv_type = p->s->kv_type == GEIST_KV_F16 ? GST_F16 : GST_F32;
    size_t dim = c->head_dim, width = c->n_heads * dim, row_bytes = dim * l->kv_element_bytes;

    for (size_t unit = begin; unit < end; unit++) {
        size_t head = unit / w->n_groups, first = unit % w->n_groups * ROWS_TOGETHER;
        size_t last = first + ROWS_TOGETHER < p->n_tokens ? first + ROWS_TOGETHER : p->n_tokens;
        uint32_t kv_head = (uint32_t)(head / (c->n_heads / c->n_kv_heads));
        size_t k_offset = state_kv_offset(l, c->n_kv_heads, w->layer->index, 0, kv_head);
        size_t v_offset = state_kv_offset(l, c->n_kv_heads, w->layer->index, 1, kv_head);
        float *m = p->soft + head * p->n_tokens, *sum = p->soft + (c->n_heads + head) * p->n_tokens;

        for (size_t t = first; t < last; t++) {
            m[t] = -INFINITY;
            sum[t] = 0.0f;
            memset(p->mixed + t * width + head * dim, 0, dim * sizeof(float));
        }
        for (size_t b = first_seen(w, p->start + first) / GEIST_KV_BLOCK; b * GEIST_KV_BLOCK <= p->start + last - 1; b++) {
            const uint8_t *block = p->s->blocks[b]->data;
            size_t block_begin = b * GEIST_KV_BLOCK;

            for (size_t t = first; t < last; t++) {
                /* What this row sees of the block: from the window's begin up to its own position. */
                size_t begin_seen = first_seen(w, p->start + t), end_seen = p->start + t + 1;
                size_t from = begin_seen > block_begin ? begin_seen - block_begin : 0;
                size_t to = end_seen > block_begin ? end_seen - block_begin : 0;

                to = to < GEIST_KV_BLOCK ? to : GEIST_KV_BLOCK;
                if (from >= to)
                    continue;
                p->k->attend(w->q + (t * c->n_heads + head) * w->q_head_stride, block + k_offset + from * row_bytes,
                             block + v_offset + from * row_bytes, kv_type, to - from, dim, c->score_scale, &m[t], &sum[t],
                             p->mixed + t * width + head * dim);
            }
        }
        for (size_t t = first; t < last; t++) {
            float *o = p->mixed + t * width + head * dim;
            p->k->scale_by_inverse(o, dim, sum[t], o);
            if (w->gated)
                p->k->sigmoid_mul(w->q + (t * c->n_heads + head) * w->q_head_stride + dim, o, dim, o);
        }
    }
}

void attention_layer(struct pass *p, const struct model_layer *layer)
{
    const struct model_config *c = &p->m->config;
    size_t kv_width = (size_t)c->n_kv_heads * c->head_dim;
    struct stage_input in = {p->h, c->n_embd, p->n_tokens, false};
    struct stage_input mixed = {p->mixed, (size_t)c->n_heads * c->head_dim, p->n_tokens, false};
    struct attention_work work = {
        .p = p,
        .layer = layer,
        .q = p->wide,
        .q_head_stride = layer->attn_q.n_rows / c->n_heads,
        .k = p->kv,
        .v = p->kv + p->n_tokens * kv_width,
        .gated = c->arch == ARCH_QWEN35,
        .n_groups = (p->n_tokens + ROWS_TOGETHER - 1) / ROWS_TOGETHER,
    };

    stage_matmul(p, &layer->attn_q, &in, work.q, layer->attn_q.n_rows);
    stage_matmul(p, &layer->attn_k, &in, work.k, kv_width);
    stage_matmul(p, &layer->attn_v, &in, work.v, kv_width);

    gst_threads_run(p->threads, p->n_tokens, 1, prepare_rows, &work);
    gst_threads_run(p->threads, c->n_heads * work.n_groups, 1, attend_units, &work);

    stage_matmul(p, &layer->attn_output, &mixed, p->out, c->n_embd);
}
