/* config.c - hyperparameters out of a file's metadata.
 *
 * Every key under the architecture's prefix must be one we know: read here, without influence on logits, or at the one value at which it
 * has none. A key nobody understands may change every number, so it is refused, not ignored. */
#include "gguf/cursor.h"
#include "model/model.h"

#include <inttypes.h>
#include <stdio.h>

#define KEY_BYTES 128

enum key_rule_kind {
    KEY_READ,       /* by the code below */
    KEY_NO_EFFECT,  /* informative, or only meaningful together with a key that is refused */
    KEY_ONLY_VALUE, /* fine at `value` only */
};

struct key_rule {
    const char *suffix;
    enum key_rule_kind kind;
    double value;
};

static const struct key_rule key_rules[] = {
    {"block_count", KEY_READ, 0},
    {"context_length", KEY_READ, 0},
    {"embedding_length", KEY_READ, 0},
    {"feed_forward_length", KEY_READ, 0},
    {"vocab_size", KEY_READ, 0},
    {"attention.head_count", KEY_READ, 0},
    {"attention.head_count_kv", KEY_READ, 0},
    {"attention.key_length", KEY_READ, 0},
    {"attention.value_length", KEY_READ, 0},
    {"attention.layer_norm_rms_epsilon", KEY_READ, 0},
    {"rope.dimension_count", KEY_READ, 0},
    {"rope.freq_base", KEY_READ, 0},
    {"rope.scaling.type", KEY_READ, 0},
    {"rope.scaling.factor", KEY_READ, 0},
    {"rope.scale_linear", KEY_READ, 0},
    /* Of scaling types other than none and linear, which are refused by type. */
    {"rope.scaling.original_context_length", KEY_NO_EFFECT, 0},
    {"rope.scaling.finetuned", KEY_NO_EFFECT, 0},
    {"rope.scaling.yarn_ext_factor", KEY_NO_EFFECT, 0},
    {"rope.scaling.yarn_attn_factor", KEY_NO_EFFECT, 0},
    {"rope.scaling.yarn_beta_fast", KEY_NO_EFFECT, 0},
    {"rope.scaling.yarn_beta_slow", KEY_NO_EFFECT, 0},
    {"rope.scaling.yarn_log_multiplier", KEY_NO_EFFECT, 0},
    {"rope.scaling.attn_factor", KEY_ONLY_VALUE, 1},
    {"tensor_data_layout", KEY_NO_EFFECT, 0},
    {"expert_count", KEY_ONLY_VALUE, 0},
    {"expert_used_count", KEY_ONLY_VALUE, 0},
    {"expert_shared_count", KEY_ONLY_VALUE, 0},
    {"attention.causal", KEY_ONLY_VALUE, 1},
    {"attention.clamp_kqv", KEY_ONLY_VALUE, 0},
    {"attention.max_alibi_bias", KEY_ONLY_VALUE, 0},
    {"attn_logit_softcapping", KEY_ONLY_VALUE, 0},
    {"final_logit_softcapping", KEY_ONLY_VALUE, 0},
    {"logit_scale", KEY_ONLY_VALUE, 1},
    {"embedding_scale", KEY_ONLY_VALUE, 1},
    {"residual_scale", KEY_ONLY_VALUE, 1},
    {"use_parallel_residual", KEY_ONLY_VALUE, 0},
    {"pooling_type", KEY_ONLY_VALUE, 0},
};

static const struct key_rule key_rules_qwen35[] = {
    {"nextn_predict_layers", KEY_READ, 0},    {"full_attention_interval", KEY_READ, 0}, {"attention.recurrent_layers", KEY_READ, 0},
    {"rope.dimension_sections", KEY_READ, 0}, {"ssm.conv_kernel", KEY_READ, 0},         {"ssm.state_size", KEY_READ, 0},
    {"ssm.group_count", KEY_READ, 0},         {"ssm.time_step_rank", KEY_READ, 0},      {"ssm.inner_size", KEY_READ, 0},
};

static const struct key_rule key_rules_gemma3[] = {
    {"attention.sliding_window", KEY_READ, 0},
    {"attention.sliding_window_pattern", KEY_READ, 0},
    {"rope.freq_base_swa", KEY_READ, 0},
};

static const struct key_rule key_rules_others[] = {{"attention.sliding_window", KEY_ONLY_VALUE, 0}};

struct reader {
    const struct geist_gguf *g;
    const char *prefix; /* "qwen35" */
    char key[KEY_BYTES];
};

#define FORMAT(r, ...) gst_fail((r)->g->engine->error, GEIST_E_FORMAT, __VA_ARGS__)
#define REFUSE(r, ...) gst_fail((r)->g->engine->error, GEIST_E_UNSUPPORTED, __VA_ARGS__)

static const char *full_key(struct reader *r, const char *suffix)
{
    snprintf(r->key, sizeof r->key, "%s.%s", r->prefix, suffix);
    return r->key;
}

/* An integer in [least, most]. Absent: `fallback`, or an error where that is 0. */
static enum geist_status read_u32(struct reader *r, const char *suffix, uint32_t least, uint32_t most, uint32_t fallback, uint32_t *out)
{
    const char *key = full_key(r, suffix);
    struct geist_value v;
    enum geist_status status;
    bool found;

    if (geist_gguf_value(r->g, key, &v) && v.type == GEIST_ARRAY)
        return REFUSE(r, "key %s: one value per layer; only one for all layers is supported", key);
    status = gguf_get_u32(r->g, key, out, &found);
    if (status)
        return status;
    if (!found) {
        if (!fallback)
            return FORMAT(r, "key %s is missing", key);
        *out = fallback;
        return GEIST_OK;
    }
    if (*out < least)
        return FORMAT(r, "key %s is %" PRIu32 ", must be at least %" PRIu32, key, *out, least);
    if (*out > most)
        return REFUSE(r, "key %s is %" PRIu32 ", at most %" PRIu32 " is supported", key, *out, most);
    return GEIST_OK;
}

/* A float in [least, most]. Absent: `fallback`, or an error where that is 0. */
static enum geist_status read_f32(struct reader *r, const char *suffix, double least, double most, float fallback, float *out)
{
    const char *key = full_key(r, suffix);
    bool found;
    enum geist_status status = gguf_get_f32(r->g, key, out, &found);

    if (status)
        return status;
    if (!found) {
        if (fallback == 0)
            return FORMAT(r, "key %s is missing", key);
        *out = fallback;
        return GEIST_OK;
    }
    if (!((double)*out >= least && (double)*out <= most))
        return FORMAT(r, "key %s is %g, must be from %g to %g", key, (double)*out, least, most);
    return GEIST_OK;
}

static const struct key_rule *rule_find(const struct key_rule *rules, size_t n, const char *suffix)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(rules[i].suffix, suffix))
            return &rules[i];
    return NULL;
}

static bool value_is(const struct geist_gguf *g, const char *key, const struct geist_value *v, double wanted)
{
    uint32_t integer;
    float real;
    bool found;

    if (v->type == GEIST_BOOL)
        return *(const uint8_t *)v->data == wanted;
    if (v->type == GEIST_F32 || v->type == GEIST_F64)
        return gguf_get_f32(g, key, &real, &found) == GEIST_OK && (double)real == wanted;
    return gguf_get_u32(g, key, &integer, &found) == GEIST_OK && integer == wanted;
}

static enum geist_status check_keys(struct reader *r, enum model_arch arch)
{
    size_t n_prefix = strlen(r->prefix);

    for (size_t i = 0; i < r->g->n_values; i++) {
        const char *key = r->g->values[i].key;
        const struct key_rule *rule;

        if (strncmp(key, r->prefix, n_prefix) || key[n_prefix] != '.')
            continue;
        rule = rule_find(key_rules, sizeof key_rules / sizeof *key_rules, key + n_prefix + 1);
        if (!rule && arch == ARCH_QWEN35)
            rule = rule_find(key_rules_qwen35, sizeof key_rules_qwen35 / sizeof *key_rules_qwen35, key + n_prefix + 1);
        if (!rule && arch == ARCH_GEMMA3)
            rule = rule_find(key_rules_gemma3, sizeof key_rules_gemma3 / sizeof *key_rules_gemma3, key + n_prefix + 1);
        else if (!rule)
            rule = rule_find(key_rules_others, sizeof key_rules_others / sizeof *key_rules_others, key + n_prefix + 1);
        if (!rule)
            return REFUSE(r, "key %.200s: not known for this architecture, and may change the results", key);
        if (rule->kind == KEY_ONLY_VALUE && !value_is(r->g, key, &r->g->values[i].value, rule->value))
            return REFUSE(r, "key %.200s: supported at %g only", key, rule->value);
    }
    return GEIST_OK;
}

static enum geist_status read_rope(struct reader *r, struct model_config *c)
{
    enum geist_status status;
    char type[32];
    float base, factor, legacy;
    bool found;

    status = read_u32(r, "rope.dimension_count", 2, c->head_dim, c->arch == ARCH_QWEN35 ? 0 : c->head_dim, &c->n_rot);
    if (status)
        return status;
    if (c->n_rot % 2)
        return FORMAT(r, "key %s is %" PRIu32 ": dimensions are turned in pairs", full_key(r, "rope.dimension_count"), c->n_rot);
    status = read_f32(r, "rope.freq_base", 1, 1e12, 10000, &base);
    if (status)
        return status;
    c->rope_base = (double)base;
    c->rope_neox = c->arch != ARCH_LLAMA;

    status = gguf_get_text(r->g, full_key(r, "rope.scaling.type"), type, sizeof type, &found);
    if (status)
        return status;
    if (found && strcmp(type, "none") && strcmp(type, "linear"))
        return REFUSE(r, "key %s is %s; none and linear are supported", r->key, type);
    status = read_f32(r, "rope.scaling.factor", 1e-3, 1e6, 1, &factor);
    if (status)
        return status;
    status = read_f32(r, "rope.scale_linear", 1e-3, 1e6, 1, &legacy);
    if (status)
        return status;
    if (factor != 1 && legacy != 1 && factor != legacy)
        return FORMAT(r, "key %s is %g, but rope.scaling.factor is %g", full_key(r, "rope.scale_linear"), (double)legacy, (double)factor);
    c->rope_divisor = !strcmp(type, "none") ? 1 : (double)(factor != 1 ? factor : legacy);
    return GEIST_OK;
}

static enum geist_status read_attention(struct reader *r, struct model_config *c)
{
    bool own_sizes = c->arch == ARCH_QWEN35 || c->arch == ARCH_GEMMA3; /* the format's defaults would be wrong there */
    enum geist_status status;
    uint32_t value_length;

    status = read_u32(r, "attention.head_count", 1, MODEL_MAX_HEADS, 0, &c->n_heads);
    if (status)
        return status;
    status = read_u32(r, "attention.head_count_kv", 1, MODEL_MAX_HEADS, own_sizes ? 0 : c->n_heads, &c->n_kv_heads);
    if (status)
        return status;
    if (c->n_heads % c->n_kv_heads)
        return FORMAT(r, "key %s: %" PRIu32 " heads are no multiple of %" PRIu32 " KV heads", full_key(r, "attention.head_count_kv"),
                      c->n_heads, c->n_kv_heads);
    status = read_u32(r, "attention.key_length", 2, MODEL_MAX_HEAD_DIM, own_sizes ? 0 : c->n_embd / c->n_heads, &c->head_dim);
    if (status)
        return status;
    if (c->head_dim > MODEL_MAX_HEAD_DIM) /* by the default */
        return REFUSE(r, "heads of %" PRIu32 " values, at most %u are supported", c->head_dim, MODEL_MAX_HEAD_DIM);
    status = read_u32(r, "attention.value_length", 1, UINT32_MAX, c->head_dim, &value_length);
    if (status)
        return status;
    if (value_length != c->head_dim)
        return REFUSE(r, "key %s is %" PRIu32 "; only the key length, %" PRIu32 ", is supported", full_key(r, "attention.value_length"),
                      value_length, c->head_dim);
    c->score_scale = (float)(1.0 / __builtin_sqrt((double)c->head_dim));
    return read_rope(r, c);
}

/* The first three sections of the multimodal rotation must cover all pairs: then, for text, it is the plain one. */
static enum geist_status check_sections(struct reader *r, const struct model_config *c)
{
    const char *key = full_key(r, "rope.dimension_sections");
    struct geist_value v;
    int64_t sum = 0;

    if (!geist_gguf_value(r->g, key, &v))
        return FORMAT(r, "key %s is missing", key);
    if (v.type != GEIST_ARRAY || (v.item_type != GEIST_I32 && v.item_type != GEIST_U32) || v.count < 3 || v.count > 4)
        return FORMAT(r, "key %s: must be an array of 3 or 4 integers of 32 bits", key);
    for (size_t i = 0; i < 3; i++) {
        int64_t section = (int32_t)cursor_read_u32((const uint8_t *)v.data + 4 * i);

        if (section < 0)
            return FORMAT(r, "key %s: section %zu is negative", key, i);
        sum += section;
    }
    if (sum != c->n_rot / 2)
        return REFUSE(r, "key %s: the first three add up to %" PRId64 "; only %" PRIu32 ", half of the turned dimensions, is supported",
                      key, sum, c->n_rot / 2);
    return GEIST_OK;
}

static enum geist_status read_layer_kinds(struct reader *r, struct model_config *c, uint32_t n_blocks)
{
    struct geist_value v;
    uint32_t interval, n_attention = 0;
    enum geist_status status = read_u32(r, "full_attention_interval", 1, UINT32_MAX, 4, &interval);

    if (status)
        return status;
    for (uint32_t i = 0; i < c->n_layers; i++)
        c->recurrent[i] = (i + 1) % interval != 0;
    if (geist_gguf_value(r->g, full_key(r, "attention.recurrent_layers"), &v)) {
        if (v.type != GEIST_ARRAY || v.item_type != GEIST_BOOL || (v.count != n_blocks && v.count != c->n_layers))
            return FORMAT(r, "key %s: must be an array of %" PRIu32 " truth values", r->key, n_blocks);
        for (uint32_t i = 0; i < c->n_layers; i++)
            c->recurrent[i] = ((const uint8_t *)v.data)[i] != 0;
    }
    for (uint32_t i = 0; i < c->n_layers; i++)
        n_attention += !c->recurrent[i];
    if (!n_attention)
        return REFUSE(r, "none of the %" PRIu32 " layers is an attention layer (%s.full_attention_interval, recurrent_layers)", c->n_layers,
                      r->prefix);
    return GEIST_OK;
}

static enum geist_status read_delta_net(struct reader *r, struct model_config *c)
{
    enum geist_status status;
    uint32_t inner;

    status = read_u32(r, "ssm.conv_kernel", 2, 8, 0, &c->conv_width);
    if (status)
        return status;
    status = read_u32(r, "ssm.state_size", 1, 256, 0, &c->dk);
    if (status)
        return status;
    status = read_u32(r, "ssm.group_count", 1, MODEL_MAX_HEADS, 0, &c->n_k_heads);
    if (status)
        return status;
    status = read_u32(r, "ssm.time_step_rank", 1, MODEL_MAX_HEADS, 0, &c->n_v_heads);
    if (status)
        return status;
    if (c->n_v_heads % c->n_k_heads)
        return FORMAT(r, "key %s: %" PRIu32 " value heads are no multiple of %" PRIu32 " key heads", full_key(r, "ssm.time_step_rank"),
                      c->n_v_heads, c->n_k_heads);
    status = read_u32(r, "ssm.inner_size", 1, MODEL_MAX_HEADS * MODEL_MAX_HEAD_DIM, 0, &inner);
    if (status)
        return status;
    if (inner % c->n_v_heads)
        return FORMAT(r, "key %s: %" PRIu32 " is no multiple of %" PRIu32 " value heads", full_key(r, "ssm.inner_size"), inner,
                      c->n_v_heads);
    c->dv = inner / c->n_v_heads;
    if (c->dv > MODEL_MAX_HEAD_DIM)
        return REFUSE(r, "key %s: value heads of %" PRIu32 ", at most %u are supported", full_key(r, "ssm.inner_size"), c->dv,
                      MODEL_MAX_HEAD_DIM);
    c->n_channels = 2 * c->n_k_heads * c->dk + c->n_v_heads * c->dv;
    return GEIST_OK;
}

/* Gemma 3: five local layers to a global one, unless the file says otherwise; scales of embedding and scores. */
static enum geist_status read_gemma3(struct reader *r, struct model_config *c)
{
    struct geist_value v;
    uint32_t period = 6;
    float base;
    bool found;
    enum geist_status status = gguf_get_u32(r->g, full_key(r, "attention.sliding_window"), &c->window, &found);

    if (status)
        return status;
    if (c->window > MODEL_MAX_CTX)
        return REFUSE(r, "key %s is %" PRIu32 ", at most %u is supported", r->key, c->window, MODEL_MAX_CTX);
    status = read_f32(r, "rope.freq_base_swa", 1, 1e12, 10000, &base);
    if (status)
        return status;
    c->rope_base_local = (double)base;
    if (geist_gguf_value(r->g, full_key(r, "attention.sliding_window_pattern"), &v) && v.type == GEIST_ARRAY) {
        if (v.item_type != GEIST_BOOL || v.count != c->n_layers)
            return FORMAT(r, "key %s: must be an array of %" PRIu32 " truth values", r->key, c->n_layers);
        for (uint32_t i = 0; i < c->n_layers; i++)
            c->local[i] = c->window && ((const uint8_t *)v.data)[i] != 0;
    } else {
        status = read_u32(r, "attention.sliding_window_pattern", 1, UINT32_MAX, period, &period);
        if (status)
            return status;
        for (uint32_t i = 0; i < c->n_layers; i++)
            c->local[i] = c->window && i % period != period - 1;
    }
    c->embd_scale = (float)__builtin_sqrt((double)c->n_embd);
    /* The 27B model alone, told by its 62 layers, scales scores by its width over its heads (168) and not by the size of a head (128); no
     * key says so. */
    if (c->n_layers == 62)
        c->score_scale = (float)(1.0 / __builtin_sqrt((double)(c->n_embd / c->n_heads)));
    return GEIST_OK;
}

static enum geist_status read_layers(struct reader *r, struct model_config *c)
{
    enum geist_status status;
    uint32_t n_blocks;
    bool found;

    status = read_u32(r, "block_count", 1, MODEL_MAX_LAYERS, 0, &n_blocks);
    if (status)
        return status;
    c->n_layers = n_blocks;
    if (c->arch != ARCH_QWEN35)
        return GEIST_OK;
    status = gguf_get_u32(r->g, full_key(r, "nextn_predict_layers"), &c->n_mtp, &found);
    if (status)
        return status;
    if (c->n_mtp >= n_blocks)
        return FORMAT(r, "key %s is %" PRIu32 ", but there are %" PRIu32 " blocks in all", r->key, c->n_mtp, n_blocks);
    c->n_layers = n_blocks - c->n_mtp;
    return read_layer_kinds(r, c, n_blocks);
}

static enum geist_status read_all(struct reader *r, struct model_config *c)
{
    enum geist_status status = check_keys(r, c->arch);

    if (status)
        return status;
    status = read_u32(r, "context_length", 1, MODEL_MAX_CTX, 0, &c->n_ctx_train);
    if (status)
        return status;
    status = read_u32(r, "embedding_length", 1, MODEL_MAX_EMBD, 0, &c->n_embd);
    if (status)
        return status;
    status = read_u32(r, "feed_forward_length", 1, MODEL_MAX_FF, 0, &c->n_ff);
    if (status)
        return status;
    status = read_f32(r, "attention.layer_norm_rms_epsilon", 1e-30, 1, 0, &c->eps);
    if (status)
        return status;
    status = read_layers(r, c);
    if (status)
        return status;
    status = read_attention(r, c);
    if (status)
        return status;
    c->embd_scale = 1;
    if (c->arch == ARCH_GEMMA3)
        return read_gemma3(r, c);
    if (c->arch == ARCH_QWEN35) {
        status = check_sections(r, c);
        if (status)
            return status;
        status = read_delta_net(r, c);
    }
    return status;
}

static const char *const arch_names[] = {
    [ARCH_LLAMA] = "llama", [ARCH_QWEN3] = "qwen3", [ARCH_QWEN35] = "qwen35", [ARCH_GEMMA3] = "gemma3"};

const char *model_arch_name(enum model_arch arch)
{
    return arch_names[arch];
}

enum geist_status model_config_read(const struct geist_gguf *g, struct model_config *out)
{
    struct reader r = {.g = g};
    char name[64];
    bool found;
    enum geist_status status;

    memset(out, 0, sizeof *out);
    status = gguf_get_text(g, "general.architecture", name, sizeof name, &found);
    if (status)
        return status;
    if (!found)
        return FORMAT(&r, "key general.architecture is missing");
    for (size_t i = 0; i < sizeof arch_names / sizeof *arch_names; i++)
        if (!strcmp(name, arch_names[i])) {
            r.prefix = arch_names[i];
            out->arch = (enum model_arch)i;
        }
    if (!r.prefix)
        return REFUSE(&r, "general.architecture is %s; llama, qwen3, qwen35 and gemma3 are supported", name);
    return read_all(&r, out);
}
