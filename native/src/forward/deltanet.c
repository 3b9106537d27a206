/* deltanet.c - the gated DeltaNet layer (Yang et al., "Gated Delta Networks", 2024; docs/qwen35.md has every convention).
 *
 *   u, z, a, b = W_qkv h, W_gate h, W_alpha h, W_beta h
 *   q | k | v  = silu(causal depthwise convolution of u)
 *   q, k       = q / |q| / sqrt(dk), k / |k|
 *   decay      = exp(ssm_a * softplus(a + dt)),  beta = sigmoid(b)
 *   S <- decay S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q          per value head, token by token
 *   out        = W_out (RMS(o) * silu(z))
 */
#include "forward/forward.h"

#define L2_EPS 1e-6f /* the architecture's constant, not the metadata's RMS epsilon */
#define COLUMNS 64   /* of a state, together: [dk, 64] floats stay in the first-level cache for all tokens of a pass */

struct delta_work {
    const struct pass *p;
    const struct model_layer *layer;
    const float *u;       /* [T, n_channels] before the convolution */
    float *y;             /* [T, n_channels] q | k | v behind it */
    const float *a, *b;   /* [T, n_v_heads] */
    float *decay, *beta;  /* [T, n_v_heads] */
    const uint8_t *from;  /* the layer's state before the pass ... */
    uint8_t *to;          /* ... and after; may be the same memory */
    size_t column_groups; /* of a head */
};

static void convolve_channels(void *context, size_t begin, size_t end)
{
    const struct delta_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;

    p->k->conv_silu(w->layer->conv_taps, c->conv_width, c->n_channels, begin, end, (const float *)(const void *)w->from, w->u,
                    c->n_channels, p->n_tokens, w->y, c->n_channels, (float *)(void *)w->to);
}

/* Norms of q and k, decay and beta of rows [begin, end). The gates are few: double precision, scalar. */
static void prepare_rows(void *context, size_t begin, size_t end)
{
    const struct delta_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;
    float q_scale = (float)(1.0 / __builtin_sqrt((double)c->dk));

    for (size_t t = begin; t < end; t++) {
        float *q = w->y + t * c->n_channels, *k = q + (size_t)c->n_k_heads * c->dk;

        for (size_t n = 0; n < c->n_k_heads; n++) {
            p->k->l2_norm(q + n * c->dk, c->dk, L2_EPS, q_scale, q + n * c->dk);
            p->k->l2_norm(k + n * c->dk, c->dk, L2_EPS, 1.0f, k + n * c->dk);
        }
        for (size_t n = 0; n < c->n_v_heads; n++) {
            size_t i = t * c->n_v_heads + n;
            double step = (double)w->a[i] + (double)w->layer->ssm_dt_bias[n];
            double softplus = step > 20.0 ? step : gst_log1p(gst_exp(step));

            w->decay[i] = (float)gst_exp((double)w->layer->ssm_a[n] * softplus);
            w->beta[i] = (float)(1.0 / (1.0 + gst_exp(-(double)w->b[i])));
        }
    }
}

/* Unit i is value head i / column_groups and its columns [64 (i mod column_groups), ...). */
static void advance_units(void *context, size_t begin, size_t end)
{
    const struct delta_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;
    const float *from = (const float *)(const void *)(w->from + p->s->layout.window_bytes);
    float *to = (float *)(void *)(w->to + p->s->layout.window_bytes);
    size_t width = (size_t)c->n_v_heads * c->dv;

    for (size_t unit = begin; unit < end; unit++) {
        size_t head = unit / w->column_groups, first = unit % w->column_groups * COLUMNS;
        size_t last = first + COLUMNS < c->dv ? first + COLUMNS : c->dv;
        size_t k_head = head % c->n_k_heads; /* value heads are tiled over the key heads in a GGUF */
        const float *q = w->y + k_head * c->dk, *k = q + (size_t)c->n_k_heads * c->dk;
        const float *v = w->y + 2 * (size_t)c->n_k_heads * c->dk + head * c->dv;

        p->k->delta_rule(from + head * c->dk * c->dv, to + head * c->dk * c->dv, c->dk, c->dv, first, last, q, k, c->n_channels, v,
                         c->n_channels, w->decay + head, w->beta + head, c->n_v_heads, p->n_tokens, p->mixed + head * c->dv, width);
    }
}

/* o = RMS(o) * silu(z), head by head. */
static void gate_rows(void *context, size_t begin, size_t end)
{
    const struct delta_work *w = context;
    const struct pass *p = w->p;
    const struct model_config *c = &p->m->config;
    size_t width = (size_t)c->n_v_heads * c->dv;

    for (size_t t = begin; t < end; t++) {
        float *o = p->mixed + t * width;
        for (size_t n = 0; n < c->n_v_heads; n++)
            p->k->rms_norm(o + n * c->dv, w->layer->ssm_norm, c->dv, c->eps, o + n * c->dv);
        p->k->silu_mul(p->gate + t * width, o, width, o);
    }
}

void deltanet_layer(struct pass *p, const struct model_layer *layer, const uint8_t *from, uint8_t *to)
{
    const struct model_config *c = &p->m->config;
    size_t gates = p->n_tokens * c->n_v_heads, width = (size_t)c->n_v_heads * c->dv;
    struct stage_input in = {p->h, c->n_embd, p->n_tokens, false};
    struct stage_input mixed = {p->mixed, width, p->n_tokens, false};
    float *a = p->narrow, *b = p->narrow + gates;
    struct delta_work work = {
        .p = p,
        .layer = layer,
        .u = p->wide,
        .y = p->wide2,
        .a = a,
        .b = b,
        .decay = p->narrow + 2 * gates,
        .beta = p->narrow + 3 * gates,
        .from = from,
        .to = to,
        .column_groups = (c->dv + COLUMNS - 1) / COLUMNS,
    };

    stage_matmul(p, &layer->attn_qkv, &in, p->wide, c->n_channels);
    stage_matmul(p, &layer->attn_gate, &in, p->gate, width);
    stage_matmul(p, &layer->ssm_alpha, &in, a, c->n_v_heads);
    stage_matmul(p, &layer->ssm_beta, &in, b, c->n_v_heads);

    gst_threads_run(p->threads, c->n_channels, GST_TILE_ROWS, convolve_channels, &work);
    gst_threads_run(p->threads, p->n_tokens, 1, prepare_rows, &work);
    gst_threads_run(p->threads, c->n_v_heads * work.column_groups, 1, advance_units, &work);
    gst_threads_run(p->threads, p->n_tokens, 1, gate_rows, &work);

    stage_matmul(p, &layer->ssm_out, &mixed, p->out, c->n_embd);
}
