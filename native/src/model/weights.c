/* weights.c - every tensor of a model by name, its shape and type held against the hyperparameters. */
#include "model/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

struct binder {
    struct geist_model *m;
    bool *used; /* owns [n_tensors] */
    char name[GGUF_MAX_NAME_BYTES + 1];
    enum geist_status status; /* the first failure; everything after it is skipped */
};

#define FAIL(b, what, ...) ((b)->status = gst_fail((b)->m->engine->error, (what), __VA_ARGS__))

static const char *layer_tensor(struct binder *b, uint32_t layer, const char *part)
{
    snprintf(b->name, sizeof b->name, "blk.%" PRIu32 ".%s", layer, part);
    return b->name;
}

/* The tensor with dims [d0, d1], d1 = 1 for a vector; NULL after a failure. */
static const struct gguf_tensor *find(struct binder *b, const char *name, uint64_t d0, uint64_t d1)
{
    const struct geist_gguf *g = b->m->gguf;
    const struct gguf_tensor *t;

    if (b->status)
        return NULL;
    t = gguf_tensor_find(g, name);
    if (!t) {
        FAIL(b, GEIST_E_FORMAT, "tensor %s is missing", name);
        return NULL;
    }
    if (t->dims[0] != d0 || t->dims[1] != d1 || t->dims[2] != 1 || t->dims[3] != 1) {
        FAIL(b, GEIST_E_FORMAT,
             "tensor %s: shape [%" PRIu64 ", %" PRIu64 "] expected, [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64 "] found", name, d0,
             d1, t->dims[0], t->dims[1], t->dims[2], t->dims[3]);
        return NULL;
    }
    if (!b->used[t - g->tensors])
        b->m->n_params += d0 * d1;
    b->used[t - g->tensors] = true;
    return t;
}

/* Values that are used one by one: F32, as every converter writes them. */
static const float *floats(struct binder *b, const char *name, uint64_t d0, uint64_t d1)
{
    const struct gguf_tensor *t = find(b, name, d0, d1);

    if (!t)
        return NULL;
    if (t->type != GGML_F32) {
        FAIL(b, GEIST_E_UNSUPPORTED, "tensor %s: type %s; F32 is supported here", name, gguf_tensor_type_name(t));
        return NULL;
    }
    return (const float *)(const void *)t->data; /* alignment is 8 at least */
}

static void matrix(struct binder *b, const char *name, size_t n_rows, size_t n_cols, struct model_matrix *out)
{
    const struct gguf_tensor *t = find(b, name, n_cols, n_rows);

    if (!t)
        return;
    out->tensor = t;
    out->type = quant_type_of(t->type);
    out->n_rows = n_rows;
    out->n_cols = n_cols;
    out->packed.n_rows = n_rows;
    out->packed.n_cols = n_cols;
    if (!out->type || !out->type->supported)
        FAIL(b, GEIST_E_UNSUPPORTED, "tensor %s: type %s; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K are supported",
             name, gguf_tensor_type_name(t));
}

static const float *layer_floats(struct binder *b, uint32_t i, const char *part, uint64_t n)
{
    return floats(b, layer_tensor(b, i, part), n, 1);
}

static void layer_matrix(struct binder *b, uint32_t i, const char *part, size_t n_rows, size_t n_cols, struct model_matrix *out)
{
    matrix(b, layer_tensor(b, i, part), n_rows, n_cols, out);
}

static void bind_attention(struct binder *b, uint32_t i, struct model_layer *l)
{
    const struct model_config *c = &b->m->config;
    size_t n_q = (size_t)c->n_heads * c->head_dim;
    size_t n_kv = (size_t)c->n_kv_heads * c->head_dim;

    layer_matrix(b, i, "attn_q.weight", c->arch == ARCH_QWEN35 ? 2 * n_q : n_q, c->n_embd, &l->attn_q);
    layer_matrix(b, i, "attn_k.weight", n_kv, c->n_embd, &l->attn_k);
    layer_matrix(b, i, "attn_v.weight", n_kv, c->n_embd, &l->attn_v);
    layer_matrix(b, i, "attn_output.weight", c->n_embd, n_q, &l->attn_output);
    if (c->arch != ARCH_LLAMA) {
        l->attn_q_norm = layer_floats(b, i, "attn_q_norm.weight", c->head_dim);
        l->attn_k_norm = layer_floats(b, i, "attn_k_norm.weight", c->head_dim);
    }
}

static void bind_delta_net(struct binder *b, uint32_t i, struct model_layer *l)
{
    const struct model_config *c = &b->m->config;
    size_t n_v = (size_t)c->n_v_heads * c->dv;

    layer_matrix(b, i, "attn_qkv.weight", c->n_channels, c->n_embd, &l->attn_qkv);
    layer_matrix(b, i, "attn_gate.weight", n_v, c->n_embd, &l->attn_gate);
    layer_matrix(b, i, "ssm_alpha.weight", c->n_v_heads, c->n_embd, &l->ssm_alpha);
    layer_matrix(b, i, "ssm_beta.weight", c->n_v_heads, c->n_embd, &l->ssm_beta);
    layer_matrix(b, i, "ssm_out.weight", c->n_embd, n_v, &l->ssm_out);
    l->ssm_dt_bias = layer_floats(b, i, "ssm_dt.bias", c->n_v_heads);
    l->ssm_a = layer_floats(b, i, "ssm_a", c->n_v_heads);
    l->ssm_norm = layer_floats(b, i, "ssm_norm.weight", c->dv);
    l->conv_file = floats(b, layer_tensor(b, i, "ssm_conv1d.weight"), c->conv_width, c->n_channels);
}

static void bind_layer(struct binder *b, uint32_t i)
{
    struct geist_model *m = b->m;
    const struct model_config *c = &m->config;
    struct model_layer *l = &m->layers[i];

    l->recurrent = c->recurrent[i];
    l->local = c->local[i];
    l->index = l->recurrent ? m->n_recurrent++ : m->n_attention++;
    l->attn_norm = layer_floats(b, i, "attn_norm.weight", c->n_embd);
    if (l->recurrent)
        bind_delta_net(b, i, l);
    else
        bind_attention(b, i, l);
    l->ffn_norm = layer_floats(b, i, c->arch == ARCH_QWEN35 ? "post_attention_norm.weight" : "ffn_norm.weight", c->n_embd);
    if (c->arch == ARCH_GEMMA3) {
        l->mixer_post_norm = layer_floats(b, i, "post_attention_norm.weight", c->n_embd);
        l->ffn_post_norm = layer_floats(b, i, "post_ffw_norm.weight", c->n_embd);
    }
    layer_matrix(b, i, "ffn_gate.weight", c->n_ff, c->n_embd, &l->ffn_gate);
    layer_matrix(b, i, "ffn_up.weight", c->n_ff, c->n_embd, &l->ffn_up);
    layer_matrix(b, i, "ffn_down.weight", c->n_embd, c->n_ff, &l->ffn_down);
}

/* The vocabulary is what the embedding has rows for. */
static void bind_vocabulary(struct binder *b)
{
    struct geist_model *m = b->m;
    struct model_config *c = &m->config;
    const struct gguf_tensor *t = gguf_tensor_find(m->gguf, "token_embd.weight");
    char key[64];
    uint32_t claimed;
    bool found;

    if (t && t->dims[1] > MODEL_MAX_VOCAB) {
        FAIL(b, GEIST_E_UNSUPPORTED, "tensor token_embd.weight: %" PRIu64 " rows, at most %u are supported", t->dims[1], MODEL_MAX_VOCAB);
        return;
    }
    c->n_vocab = t ? (uint32_t)t->dims[1] : 0;
    matrix(b, "token_embd.weight", c->n_vocab, c->n_embd, &m->token_embd);
    snprintf(key, sizeof key, "%s.vocab_size", model_arch_name(c->arch));
    if (b->status)
        return;
    b->status = gguf_get_u32(m->gguf, key, &claimed, &found);
    if (b->status)
        return;
    if (found && claimed != c->n_vocab)
        FAIL(b, GEIST_E_FORMAT, "key %s is %" PRIu32 ", but tensor token_embd.weight has %" PRIu32 " rows", key, claimed, c->n_vocab);
    m->output_norm = floats(b, "output_norm.weight", c->n_embd, 1);
    m->tied = !gguf_tensor_find(m->gguf, "output.weight");
    if (m->tied)
        m->output = m->token_embd;
    else
        matrix(b, "output.weight", c->n_vocab, c->n_embd, &m->output);
}

/* rope_freq[i] = base^(-2i / n_rot) / divisor, and in Llama 3 each divided by a factor of the file. Behind them those of local layers. */
static void bind_rope(struct binder *b)
{
    struct geist_model *m = b->m;
    const struct model_config *c = &m->config;
    size_t half = c->n_rot / 2;
    const float *factors = NULL;

    if (b->status)
        return;
    if (c->arch == ARCH_LLAMA && gguf_tensor_find(m->gguf, "rope_freqs.weight"))
        factors = floats(b, "rope_freqs.weight", half, 1);
    if (b->status)
        return;
    m->n_rotations = c->window ? 2 : 1;
    m->rope_freq = calloc(m->n_rotations * half, sizeof *m->rope_freq);
    if (!m->rope_freq) {
        FAIL(b, GEIST_E_MEMORY, "out of memory for %zu rotation frequencies", half);
        return;
    }
    for (size_t k = 0; k < m->n_rotations * half; k++) {
        size_t i = k % half;
        double base = k < half ? c->rope_base : c->rope_base_local, divisor = k < half ? c->rope_divisor : 1;
        double f = gst_pow(base, -(2.0 * (double)i) / (double)c->n_rot) / divisor;

        if (factors) {
            if (!(factors[i] > 0) || !(factors[i] - factors[i] == 0)) {
                FAIL(b, GEIST_E_FORMAT, "tensor rope_freqs.weight: factor %zu is %g, must be positive", i, (double)factors[i]);
                return;
            }
            f /= (double)factors[i];
        }
        m->rope_freq[k] = f;
        /* Angles at the last position must stay where sine and cosine are defined. */
        if (!(f * (double)c->n_ctx_train <= 0x1p30)) {
            FAIL(b, GEIST_E_UNSUPPORTED, "rotation frequency %zu is %g: too large for %" PRIu32 " positions", i, f, c->n_ctx_train);
            return;
        }
    }
}

static bool is_mtp(const struct model_config *c, const char *name)
{
    unsigned long block;
    char *end;

    if (strncmp(name, "blk.", 4) || name[4] < '0' || name[4] > '9')
        return false;
    block = strtoul(name + 4, &end, 10);
    return *end == '.' && block >= c->n_layers && block < (unsigned long)c->n_layers + c->n_mtp;
}

/* What nobody looked up would be left out of the pass, and the results would be another model's. */
static void check_unused(struct binder *b)
{
    const struct geist_gguf *g = b->m->gguf;

    for (size_t i = 0; !b->status && i < g->n_tensors; i++)
        if (!b->used[i] && !is_mtp(&b->m->config, g->tensors[i].name))
            FAIL(b, GEIST_E_UNSUPPORTED, "tensor %s: this architecture does not use it here", g->tensors[i].name);
}

enum geist_status model_weights_bind(struct geist_model *m)
{
    struct binder b = {.m = m, .status = GEIST_OK};

    b.used = calloc(m->gguf->n_tensors + 1, sizeof *b.used);
    m->layers = calloc(m->config.n_layers, sizeof *m->layers);
    if (!b.used || !m->layers) {
        free(b.used);
        return gst_fail(m->engine->error, GEIST_E_MEMORY, "out of memory for %" PRIu32 " layers", m->config.n_layers);
    }
    bind_vocabulary(&b);
    for (uint32_t i = 0; !b.status && i < m->config.n_layers; i++)
        bind_layer(&b, i);
    bind_rope(&b);
    check_unused(&b);
    free(b.used);
    return b.status;
}
