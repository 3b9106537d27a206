/* forward.c - a pass, in the order of the paper.
 *
 *   x = embedding[token]                                                     gemma3: times sqrt(n_embd)
 *   for each layer:  x = x + mixer(RMS(x));  x = x + W_down (silu(W_gate h) * W_up h), h = RMS(x)
 *                    gemma3: x = x + RMS(mixer(RMS(x))), and so with the MLP; GELU in place of SiLU
 *   logits = W_out RMS(x)
 */
#include "forward/forward.h"

/* Rows whose logits are computed together: [rows, n_vocab] floats are large. */
#define LOGIT_ROWS 8

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Hands out 64-byte aligned pieces; with base NULL it only counts. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *c, size_t n)
{
    void *piece = c->base ? c->base + c->used : NULL;

    c->used += gst_round_up(n, 64);
    return piece;
}

static void carve_pass(struct carver *c, const struct model_config *g, struct pass *p)
{
    size_t T = p->n_tokens, f = sizeof(float), angles = p->m->n_rotations * T * (g->n_rot / 2);
    size_t attention = (size_t)g->n_heads * g->head_dim, delta = (size_t)g->n_v_heads * g->dv;
    size_t q_width = attention * (g->arch == ARCH_QWEN35 ? 2 : 1);
    size_t wide = max_size(max_size(q_width, g->n_channels), g->n_ff);
    size_t mixed = max_size(attention, delta);
    size_t widest_k = max_size(max_size(mixed, g->n_ff), g->n_embd);

    p->x = carve(c, T * g->n_embd * f);
    p->h = carve(c, T * g->n_embd * f);
    p->out = carve(c, T * g->n_embd * f);
    p->wide = carve(c, T * wide * f);
    p->wide2 = carve(c, T * max_size(g->n_channels, g->n_ff) * f);
    p->mixed = carve(c, T * mixed * f);
    p->gate = carve(c, T * delta * f);
    p->narrow = carve(c, 4 * T * g->n_v_heads * f);
    p->kv = carve(c, 2 * T * g->n_kv_heads * g->head_dim * f);
    p->soft = carve(c, 2 * T * g->n_heads * f);
    p->cos = carve(c, angles * f);
    p->sin = carve(c, angles * f);
    p->q = carve(c, T * widest_k);
    p->q_scale = carve(c, T * (widest_k / GST_QUANT_BLOCK) * f);
    p->q_sum = carve(c, T * (widest_k / GST_QUANT_BLOCK) * sizeof(int32_t));
}

static void embed(struct pass *p, const int32_t *tokens)
{
    const struct model_matrix *e = &p->m->token_embd;
    size_t row_bytes = e->n_cols / e->type->block_values * e->type->block_bytes;

    for (size_t t = 0; t < p->n_tokens; t++)
        quant_dequantize_row(e->type, e->tensor->data + (size_t)tokens[t] * row_bytes, e->n_cols, p->x + t * e->n_cols);
    if (p->m->config.embd_scale != 1)
        for (size_t i = 0; i < p->n_tokens * e->n_cols; i++)
            p->x[i] = p->x[i] * p->m->config.embd_scale;
}

static void rope_rows(void *context, size_t begin, size_t end)
{
    const struct pass *p = context;
    size_t half = p->m->config.n_rot / 2;

    for (size_t k = 0; k < p->m->n_rotations; k++)
        for (size_t t = begin; t < end; t++)
            for (size_t i = 0; i < half; i++) {
                double angle = (double)(p->start + t) * p->m->rope_freq[k * half + i];
                size_t at = (k * p->n_tokens + t) * half + i;

                p->cos[at] = (float)gst_cos(angle);
                p->sin[at] = (float)gst_sin(angle);
            }
}

static void add_rows(void *context, size_t begin, size_t end)
{
    const struct pass *p = context;

    p->k->add(p->out + begin, end - begin, p->x + begin);
}

static void activate(void *context, size_t begin, size_t end)
{
    const struct pass *p = context;

    if (p->m->config.arch == ARCH_GEMMA3)
        p->k->gelu_mul(p->wide + begin, p->wide2 + begin, end - begin, p->wide + begin);
    else
        p->k->silu_mul(p->wide + begin, p->wide2 + begin, end - begin, p->wide + begin);
}

static void mlp(struct pass *p, const struct model_layer *layer)
{
    const struct model_config *c = &p->m->config;
    struct stage_input in = {p->h, c->n_embd, p->n_tokens, false};
    struct stage_input hidden = {p->wide, c->n_ff, p->n_tokens, false};

    stage_matmul(p, &layer->ffn_gate, &in, p->wide, c->n_ff);
    stage_matmul(p, &layer->ffn_up, &in, p->wide2, c->n_ff);
    gst_threads_run(p->threads, p->n_tokens * c->n_ff, GST_TILE_ROWS, activate, p);
    stage_matmul(p, &layer->ffn_down, &hidden, p->out, c->n_embd);
}

/* Logits of the rows in `rows` [n_rows <= LOGIT_ROWS] into y [n_rows, n_vocab]; uses h and the rounding buffers. */
static bool head(struct pass *p, const size_t *rows, size_t n_rows, float *y)
{
    const struct model_config *c = &p->m->config;
    struct stage_input in = {p->h, c->n_embd, n_rows, false};
    bool finite = true;

    for (size_t i = 0; i < n_rows; i++)
        p->k->rms_norm(p->x + rows[i] * c->n_embd, p->m->output_norm, c->n_embd, c->eps, p->h + i * c->n_embd);
    stage_matmul(p, &p->m->output, &in, y, c->n_vocab);
    for (size_t i = 0; i < n_rows; i++)
        finite = finite && p->k->all_finite(y + i * c->n_vocab, c->n_vocab);
    return finite;
}

static bool all_heads(struct pass *p, const struct forward_output *output, float *logits)
{
    size_t rows[LOGIT_ROWS], n_rows = 0;

    for (size_t t = 0; t < p->n_tokens; t++) {
        if (output->rows[t])
            rows[n_rows++] = t;
        if (n_rows == 0 || (n_rows < LOGIT_ROWS && t + 1 < p->n_tokens))
            continue;
        if (!head(p, rows, n_rows, logits))
            return false;
        for (size_t i = 0; i < n_rows; i++)
            output->sink(output->context, rows[i], logits + i * p->m->config.n_vocab);
        n_rows = 0;
    }
    return true;
}

enum geist_status forward_pass(struct geist_session *s, const int32_t *tokens, size_t n, bool pending, const struct forward_output *output)
{
    const struct geist_model *m = s->model;
    const struct model_config *c = &m->config;
    struct pass p = {.s = s, .m = m, .k = m->engine->kernels, .threads = m->engine->threads, .n_tokens = n, .start = s->n_tokens};
    bool wants_rows = output && output->rows, finite = true;
    size_t stream = n * c->n_embd;
    struct carver carver = {NULL, 0};
    float *logits;

    /* count, then carve */
    carve_pass(&carver, c, &p);
    carve(&carver, wants_rows ? (size_t)LOGIT_ROWS * c->n_vocab * sizeof(float) : 0);
    carver = (struct carver){gst_engine_scratch(m->engine, carver.used), 0};
    if (!carver.base)
        return gst_fail(s->error, GEIST_E_MEMORY, "no memory for the scratch buffers of a pass of %zu tokens", n);
    carve_pass(&carver, c, &p);
    logits = carve(&carver, wants_rows ? (size_t)LOGIT_ROWS * c->n_vocab * sizeof(float) : 0);

    uint64_t fpenv = gst_fpenv_enter();

    embed(&p, tokens);
    if (m->n_attention)
        gst_threads_run(p.threads, n, 1, rope_rows, &p);

    for (uint32_t i = 0; i < c->n_layers; i++) {
        const struct model_layer *layer = &m->layers[i];

        if (output && output->hidden)
            memcpy(output->hidden + i * stream, p.x, stream * sizeof(float));

        stage_norm(&p, p.x, layer->attn_norm, p.h);
        if (layer->recurrent) {
            size_t offset = state_window_offset(&s->layout, layer->index);
            deltanet_layer(&p, layer, s->recurrent + offset, s->recurrent_own + offset);
        } else {
            attention_layer(&p, layer);
        }
        if (layer->mixer_post_norm)
            stage_norm(&p, p.out, layer->mixer_post_norm, p.out);
        gst_threads_run(p.threads, stream, GST_TILE_ROWS, add_rows, &p);

        stage_norm(&p, p.x, layer->ffn_norm, p.h);
        mlp(&p, layer);
        if (layer->ffn_post_norm)
            stage_norm(&p, p.out, layer->ffn_post_norm, p.out);
        gst_threads_run(p.threads, stream, GST_TILE_ROWS, add_rows, &p);
    }
    s->recurrent = s->recurrent_own;

    if (output && output->hidden)
        memcpy(output->hidden + c->n_layers * stream, p.x, stream * sizeof(float));
    if (wants_rows)
        finite = all_heads(&p, output, logits);
    if (finite && pending) {
        size_t last = n - 1;
        finite = head(&p, &last, 1, s->logits_own);
        s->logits = s->logits_own;
    }

    gst_fpenv_leave(fpenv);
    if (!finite) {
        s->broken = true;
        return gst_fail(s->error, GEIST_E_NONFINITE, "a logit at one of the positions %zu to %zu is not finite", p.start, p.start + n - 1);
    }
    return GEIST_OK;
}
