/* model.c - a model's life: hyperparameters, tensors, the plan of the packed weights. */
#include "model/model.h"

#include <stdlib.h>

enum geist_status geist_model_create(struct geist_gguf *g, struct geist_model **out)
{
    struct geist_model *m;
    enum geist_status status;
    uint64_t saved;

    if (!g || !out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    m = calloc(1, sizeof *m);
    if (!m)
        return gst_fail(g->engine->error, GEIST_E_MEMORY, "out of memory for a model");
    m->engine = g->engine;
    m->gguf = g;

    saved = gst_fpenv_enter();
    status = model_config_read(g, &m->config);
    if (!status)
        status = model_weights_bind(m);
    if (!status)
        status = model_packed_plan(m);
    gst_fpenv_leave(saved);

    if (status) {
        geist_model_destroy(m);
        return status;
    }
    *out = m;
    return GEIST_OK;
}

void geist_model_destroy(struct geist_model *m)
{
    if (!m)
        return;
    free(m->layers);
    free(m->rope_freq);
    free(m);
}

void geist_model_get_info(const struct geist_model *m, struct geist_model_info *out)
{
    const struct model_config *c = &m->config;
    uint64_t matrix_floats = (uint64_t)c->n_v_heads * c->dk * c->dv;
    uint64_t window_floats = c->conv_width ? (uint64_t)(c->conv_width - 1) * c->n_channels : 0;

    memset(out, 0, sizeof *out);
    out->architecture = model_arch_name(c->arch);
    out->n_layers = c->n_layers;
    out->n_recurrent_layers = m->n_recurrent;
    out->n_attention_layers = m->n_attention;
    out->n_embd = c->n_embd;
    out->n_ff = c->n_ff;
    out->n_heads = c->n_heads;
    out->n_kv_heads = c->n_kv_heads;
    out->head_dim = c->head_dim;
    out->n_vocab = c->n_vocab;
    out->n_ctx_train = c->n_ctx_train;
    out->n_params = m->n_params;
    out->file_bytes = m->gguf->n_bytes;
    out->packed_bytes = m->packed_bytes;
    out->recurrent_bytes = m->n_recurrent * (matrix_floats + window_floats) * sizeof(float);
    out->kv_bytes_per_token = (uint64_t)m->n_attention * 2 * c->n_kv_heads * c->head_dim * sizeof(uint16_t);
}
