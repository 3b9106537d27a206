/* stage.c - matrix products and norms over all rows of a pass, split over the engine's threads by output element. */
#include "forward/forward.h"

struct round_work {
    const struct pass *p;
    const struct stage_input *in;
};

static void round_rows(void *context, size_t begin, size_t end)
{
    const struct round_work *w = context;
    size_t n_cols = w->in->n_cols, n_blocks = n_cols / GST_QUANT_BLOCK;

    for (size_t t = begin; t < end; t++)
        w->p->k->quantize(w->in->x + t * n_cols, n_cols, w->p->q + t * n_cols, w->p->q_scale + t * n_blocks, w->p->q_sum + t * n_blocks);
}

struct product_work {
    const struct pass *p;
    const struct model_matrix *w;
    const struct stage_input *in;
    float *y;
    size_t y_stride;
};

static void product_tiles(void *context, size_t begin, size_t end)
{
    const struct product_work *w = context;
    struct gst_qact act = {w->p->q, w->p->q_scale, w->p->q_sum};

    w->p->k->matmul[w->w->type->pack](&w->w->packed, begin, end, &act, w->in->n_tokens, w->y, w->y_stride);
}

static void product_rows(void *context, size_t begin, size_t end)
{
    const struct product_work *w = context;

    w->p->k->matmul_float(w->w->tensor->data, w->w->type->float_type, w->w->n_cols, begin, end, w->in->x, w->in->n_cols, w->in->n_tokens,
                          w->y, w->y_stride);
}

void stage_matmul(struct pass *p, const struct model_matrix *w, struct stage_input *in, float *y, size_t y_stride)
{
    struct product_work work = {p, w, in, y, y_stride};

    if (w->type->pack == GST_PACK_NONE) {
        gst_threads_run(p->threads, w->n_rows, GST_TILE_ROWS, product_rows, &work);
        return;
    }
    if (!in->rounded) {
        struct round_work round = {p, in};
        gst_threads_run(p->threads, in->n_tokens, 1, round_rows, &round);
        in->rounded = true;
    }
    gst_threads_run(p->threads, (w->n_rows + GST_TILE_ROWS - 1) / GST_TILE_ROWS, 1, product_tiles, &work);
}

struct norm_work {
    const struct pass *p;
    const float *x, *w;
    float *y;
};

static void norm_rows(void *context, size_t begin, size_t end)
{
    const struct norm_work *w = context;
    size_t n = w->p->m->config.n_embd;

    for (size_t t = begin; t < end; t++)
        w->p->k->rms_norm(w->x + t * n, w->w, n, w->p->m->config.eps, w->y + t * n);
}

void stage_norm(struct pass *p, const float *x, const float *w, float *y)
{
    struct norm_work work = {p, x, w, y};

    gst_threads_run(p->threads, p->n_tokens, 1, norm_rows, &work);
}
