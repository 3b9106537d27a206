/* test_model.c - from a file to a bound model.
 *
 * Property: every fixture loads with the geometry it was made with; each missing, misshapen, contradictory or unsupported thing is refused
 * with its status and words that name the key or the tensor; rotation frequencies equal base^(-2i/n) (within 1e-15 relative, the promise of
 * gst_pow being tighter) divided by what the file says; packed weights are the same bytes for any number of threads and hold the file's
 * values; a packed file that is cut, flipped in its header, or another model's is refused and leaves the model unbound.
 */
#include "check.h"
#include "gguf_writer.h"

#include "model/model.h"

#include <math.h>

static struct geist_engine *engine;
static const char *data_dir;

static struct geist_gguf *fixture(const char *name, const char *type)
{
    char path[1024];
    struct geist_gguf *g = NULL;

    snprintf(path, sizeof path, "%s/oracle/models/%s/%s-%s.gguf", data_dir, name, name, type);
    if (!CHECK_STATUS(geist_gguf_open(engine, path, &g), GEIST_OK)) {
        fprintf(stderr, "    %s\n", geist_engine_error(engine));
        exit(2); /* nothing below means anything without the fixtures */
    }
    return g;
}

static struct geist_model *model_of(struct geist_gguf *g)
{
    struct geist_model *m = NULL;

    if (!CHECK_STATUS(geist_model_create(g, &m), GEIST_OK)) {
        fprintf(stderr, "    %s\n", geist_engine_error(engine));
        exit(2);
    }
    return m;
}

static void *pages(size_t n)
{
    void *p = NULL;

    if (posix_memalign(&p, GEIST_IMAGE_PAGE, n))
        exit(2);
    return p;
}

struct geometry {
    const char *name;
    uint32_t n_layers, n_recurrent, n_ff, head_dim, n_rot, n_k_heads, n_v_heads, dk, dv;
    bool tied, neox;
    double eps;
    uint32_t window;
};

static const struct geometry geometries[] = {
    {"llama-tiny", 4, 0, 160, 32, 32, 0, 0, 0, 0, false, false, 1e-5f, 0},
    {"llama3rope-tiny", 2, 0, 160, 32, 32, 0, 0, 0, 0, true, false, 1e-5f, 0},
    {"qwen3-tiny", 4, 0, 160, 32, 32, 0, 0, 0, 0, true, true, 1e-6f, 0},
    {"qwen35-tiny", 8, 6, 96, 64, 16, 2, 2, 32, 32, true, true, 1e-6f, 0},
    {"qwen35-tiny-gqa", 8, 6, 96, 32, 8, 2, 4, 32, 32, true, true, 1e-6f, 0},
    {"qwen35-tiny-mtp", 4, 3, 96, 64, 16, 2, 2, 32, 32, true, true, 1e-6f, 0},
    {"qwen35-kq", 4, 3, 256, 64, 16, 2, 4, 64, 64, true, true, 1e-6f, 0},
    {"gemma3-tiny", 7, 0, 128, 32, 32, 0, 0, 0, 0, true, true, 1e-6f, 24},
};

static void check_geometry(const struct geometry *want, const char *type)
{
    struct geist_gguf *g = fixture(want->name, type);
    struct geist_model *m = model_of(g);
    const struct model_config *c = &m->config;
    struct geist_model_info info;
    uint64_t n_attention = want->n_layers - want->n_recurrent;
    uint64_t channels = 2 * want->n_k_heads * want->dk + want->n_v_heads * want->dv;

    geist_model_get_info(m, &info);
    CHECK(info.n_layers == want->n_layers && info.n_recurrent_layers == want->n_recurrent && info.n_attention_layers == n_attention);
    CHECK(info.n_embd == (strcmp(want->name, "qwen35-kq") ? 64u : 256u) && info.n_ff == want->n_ff && info.n_vocab == 512);
    CHECK(info.n_heads == 4 && info.n_kv_heads == 2 && info.head_dim == want->head_dim && info.n_ctx_train == 1024);
    CHECK(!strncmp(want->name, info.architecture, strlen(info.architecture)));
    CHECK(c->n_rot == want->n_rot && c->rope_neox == want->neox && c->rope_base == (want->window ? 200000 : 50000) &&
          (double)c->eps == want->eps);
    CHECK(c->n_k_heads == want->n_k_heads && c->n_v_heads == want->n_v_heads && c->dk == want->dk && c->dv == want->dv);
    CHECK(c->n_channels == channels && m->tied == want->tied && m->n_recurrent == want->n_recurrent && m->n_attention == n_attention);
    CHECK(info.kv_bytes_per_token == n_attention * 2 * 2 * want->head_dim * 2);
    CHECK(info.recurrent_bytes == 4 * want->n_recurrent * (want->n_v_heads * want->dk * want->dv + 3 * channels));
    CHECK(info.file_bytes == g->n_bytes && info.packed_bytes == geist_model_packed_size(m) && info.packed_bytes % GEIST_IMAGE_PAGE == 0);
    CHECK(info.n_params > 100000 && !m->bound);
    CHECK(c->window == want->window && c->score_scale == (float)(1 / sqrt(want->head_dim)) && c->embd_scale == (want->window ? 8 : 1));
    for (uint32_t i = 0, recurrent = 0, attention = 0; i < want->n_layers; i++) {
        const struct model_layer *l = &m->layers[i];

        CHECK(l->recurrent == (want->n_recurrent && (i + 1) % 4 != 0));
        CHECK(l->index == (l->recurrent ? recurrent++ : attention++));
        CHECK(l->attn_norm && l->ffn_norm && l->ffn_gate.tensor && l->ffn_up.tensor && l->ffn_down.tensor);
        CHECK(l->recurrent ? l->conv_file && l->ssm_a && l->ssm_norm && l->ssm_dt_bias && l->ssm_out.tensor
                           : l->attn_output.tensor != NULL);
        CHECK(!!l->attn_q_norm == (!l->recurrent && c->arch != ARCH_LLAMA));
        CHECK(l->local == (want->window && i != 5) && !!l->mixer_post_norm == (want->window != 0) &&
              !!l->ffn_post_norm == (want->window != 0));
    }
    geist_model_destroy(m);
    geist_gguf_close(g);
}

static void test_rope(void)
{
    static const char *names[] = {"llama-tiny", "llama3rope-tiny", "qwen3-tiny", "qwen35-tiny", "gemma3-tiny"};

    for (size_t k = 0; k < 5; k++) {
        struct geist_gguf *g = fixture(names[k], "f32");
        struct geist_model *m = model_of(g);
        const struct gguf_tensor *t = gguf_tensor_find(g, "rope_freqs.weight");
        unsigned n_wrong = 0, n_scaled = 0;

        CHECK((t != NULL) == (k == 1));
        for (uint32_t i = 0; i < m->config.n_rot / 2; i++) {
            double factor = t ? (double)((const float *)(const void *)t->data)[i] : 1;
            double wanted = pow(k == 4 ? 200000 : 50000, -2.0 * i / m->config.n_rot) / factor;

            n_wrong += fabs(m->rope_freq[i] / wanted - 1) > 1e-15;
            if (k == 4) /* local layers have a base of their own */
                n_wrong += fabs(m->rope_freq[m->config.n_rot / 2 + i] / pow(10000, -2.0 * i / m->config.n_rot) - 1) > 1e-15;
            n_scaled += factor != 1;
        }
        CHECK(n_wrong == 0);
        CHECK((n_scaled > 0) == (k == 1) && m->n_rotations == (k == 4 ? 2u : 1u));
        geist_model_destroy(m);
        geist_gguf_close(g);
    }
}

/* Opens the fixture with the edit made and tries to make a model of it. */
static void edited_at(const char *name, const struct edit *edit, enum geist_status wanted, const char *words, int line)
{
    struct geist_gguf *g = fixture(name, "q8_0"), *changed = NULL;
    struct geist_model *m = NULL;
    struct writer w = {0};
    enum geist_status status;
    void *memory;

    w_edited(&w, g, edit);
    memory = w_aligned(w.bytes, w.n);
    status = geist_gguf_open_memory(engine, memory, w.n, &changed);
    if (!status)
        status = geist_model_create(changed, &m);
    check_status_at(status, wanted, __FILE__, line, words ? words : "loads");
    if (status && (!words || !check_at(strstr(geist_engine_error(engine), words) != NULL, __FILE__, line, words)))
        fprintf(stderr, "    the words are: %s\n", geist_engine_error(engine));
    check_at((m != NULL) == (status == GEIST_OK), __FILE__, line, "a model only with success");
    geist_model_destroy(m);
    geist_gguf_close(changed);
    free(memory);
    w_free(&w);
    geist_gguf_close(g);
}

static void value_at(const char *name, const char *drop, struct writer *value, enum geist_status wanted, const char *words, int line)
{
    struct edit edit = {.drop_key = drop, .values = value, .n_values = value->n != 0, .type = -1};

    edited_at(name, &edit, wanted, words, line);
    w_free(value);
}

static void number_at(const char *name, const char *key, uint32_t x, enum geist_status wanted, int line)
{
    struct writer value = {0};

    w_key_u32(&value, key, x);
    value_at(name, key, &value, wanted, wanted ? key : NULL, line);
}

static void float_at(const char *name, const char *key, float x, enum geist_status wanted, int line)
{
    struct writer value = {0};

    w_key_f32(&value, key, x);
    value_at(name, key, &value, wanted, wanted ? key : NULL, line);
}

static void text_at(const char *name, const char *key, const char *x, enum geist_status wanted, int line)
{
    struct writer value = {0};

    w_key_text(&value, key, x);
    value_at(name, key, &value, wanted, wanted ? key : NULL, line);
}

/* Replaces (or adds) a key; a refusal must name it. */
#define NUMBER(name, key, x, status) number_at(name, key, x, status, __LINE__)
#define FLOAT(name, key, x, status) float_at(name, key, x, status, __LINE__)
#define TEXT(name, key, x, status) text_at(name, key, x, status, __LINE__)
#define VALUE(name, key, value, status) value_at(name, key, value, status, key, __LINE__)

static void test_missing_keys(void)
{
    static const char *const required[] = {
        "qwen35.block_count",          "qwen35.context_length",
        "qwen35.embedding_length",     "qwen35.feed_forward_length",
        "qwen35.attention.head_count", "qwen35.attention.head_count_kv",
        "qwen35.attention.key_length", "qwen35.attention.layer_norm_rms_epsilon",
        "qwen35.rope.dimension_count", "qwen35.rope.dimension_sections",
        "qwen35.ssm.conv_kernel",      "qwen35.ssm.state_size",
        "qwen35.ssm.group_count",      "qwen35.ssm.time_step_rank",
        "qwen35.ssm.inner_size",       "general.architecture",
    };
    static const char *const optional[] = {"qwen35.attention.value_length", "qwen35.rope.freq_base", "qwen35.full_attention_interval",
                                           "general.name", "general.file_type"};
    struct writer none = {0};

    for (size_t i = 0; i < sizeof required / sizeof *required; i++)
        value_at("qwen35-tiny", required[i], &none, GEIST_E_FORMAT, required[i], __LINE__);
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++)
        value_at("qwen35-tiny", optional[i], &none, GEIST_OK, NULL, __LINE__);
    value_at("llama-tiny", "llama.attention.head_count_kv", &none, GEIST_E_FORMAT, "blk.0.attn_k.weight",
             __LINE__); /* defaults to 4 heads */
    value_at("llama-tiny", "llama.attention.key_length", &none, GEIST_E_UNSUPPORTED, "llama.attention.value_length",
             __LINE__); /* 64 / 4, not 32 */
    value_at("llama-tiny", "llama.rope.dimension_count", &none, GEIST_OK, NULL, __LINE__);
    value_at("llama-tiny", "llama.vocab_size", &none, GEIST_OK, NULL, __LINE__);
}

static void test_numbers(void)
{
    NUMBER("llama-tiny", "llama.block_count", 0, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.block_count", MODEL_MAX_LAYERS + 1, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.context_length", 0, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.context_length", MODEL_MAX_CTX + 1, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.context_length", MODEL_MAX_CTX, GEIST_OK);
    NUMBER("llama-tiny", "llama.embedding_length", MODEL_MAX_EMBD + 1, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.embedding_length", 0, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.feed_forward_length", 0, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.feed_forward_length", MODEL_MAX_FF + 1, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.attention.head_count", 0, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.attention.head_count", MODEL_MAX_HEADS + 1, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.attention.head_count_kv", 3, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.attention.key_length", MODEL_MAX_HEAD_DIM + 2, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.attention.value_length", 16, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.rope.dimension_count", 31, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.rope.dimension_count", 34, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.rope.dimension_count", 16, GEIST_OK);
    NUMBER("llama-tiny", "llama.vocab_size", 511, GEIST_E_FORMAT);
    FLOAT("llama-tiny", "llama.attention.layer_norm_rms_epsilon", 0, GEIST_E_FORMAT);
    FLOAT("llama-tiny", "llama.attention.layer_norm_rms_epsilon", -1e-5f, GEIST_E_FORMAT);
    FLOAT("llama-tiny", "llama.attention.layer_norm_rms_epsilon", NAN, GEIST_E_FORMAT);
    NUMBER("llama-tiny", "llama.attention.layer_norm_rms_epsilon", 1, GEIST_E_FORMAT);
    FLOAT("llama-tiny", "llama.rope.freq_base", 0, GEIST_E_FORMAT);
    FLOAT("llama-tiny", "llama.rope.freq_base", INFINITY, GEIST_E_FORMAT);
    TEXT("llama-tiny", "llama.block_count", "4", GEIST_E_FORMAT);
    TEXT("llama-tiny", "general.architecture", "llama4", GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "general.architecture", 1, GEIST_E_FORMAT);

    NUMBER("qwen35-tiny", "qwen35.ssm.conv_kernel", 1, GEIST_E_FORMAT);
    NUMBER("qwen35-tiny", "qwen35.ssm.conv_kernel", 9, GEIST_E_UNSUPPORTED);
    NUMBER("qwen35-tiny", "qwen35.ssm.state_size", 257, GEIST_E_UNSUPPORTED);
    NUMBER("qwen35-tiny", "qwen35.ssm.group_count", 0, GEIST_E_FORMAT);
    NUMBER("qwen35-tiny", "qwen35.ssm.time_step_rank", 3, GEIST_E_FORMAT);
    NUMBER("qwen35-tiny", "qwen35.ssm.inner_size", 65, GEIST_E_FORMAT);
    NUMBER("qwen35-tiny", "qwen35.ssm.inner_size", 2048, GEIST_E_UNSUPPORTED);
    NUMBER("qwen35-tiny", "qwen35.full_attention_interval", 0, GEIST_E_FORMAT);
    NUMBER("qwen35-tiny", "qwen35.full_attention_interval", 9, GEIST_E_UNSUPPORTED);
    NUMBER("qwen35-tiny-mtp", "qwen35.nextn_predict_layers", 5, GEIST_E_FORMAT);
    /* One prediction block too many or too few: a layer's tensors are then missing or those of no layer. */
    value_at("qwen35-tiny-mtp", "qwen35.nextn_predict_layers", &(struct writer){0}, GEIST_E_FORMAT, "blk.4.", __LINE__);
    NUMBER("llama-tiny", "llama.nextn_predict_layers", 1, GEIST_E_UNSUPPORTED);
}

static void test_effects(void)
{
    struct writer value = {0};

    NUMBER("llama-tiny", "llama.expert_count", 8, GEIST_E_UNSUPPORTED);
    NUMBER("llama-tiny", "llama.expert_count", 0, GEIST_OK);
    NUMBER("llama-tiny", "llama.attention.sliding_window", 512, GEIST_E_UNSUPPORTED);
    FLOAT("llama-tiny", "llama.logit_scale", 0.5f, GEIST_E_UNSUPPORTED);
    FLOAT("llama-tiny", "llama.logit_scale", 1, GEIST_OK);
    FLOAT("qwen3-tiny", "qwen3.final_logit_softcapping", 30, GEIST_E_UNSUPPORTED);
    FLOAT("qwen3-tiny", "qwen3.residual_scale", 2, GEIST_E_UNSUPPORTED);
    NUMBER("qwen3-tiny", "qwen3.pooling_type", 3, GEIST_E_UNSUPPORTED);
    NUMBER("qwen3-tiny", "qwen3.never_heard_of", 0, GEIST_E_UNSUPPORTED);
    NUMBER("qwen3-tiny", "qwen35.never_heard_of", 0, GEIST_OK); /* not this file's architecture */
    w_key(&value, "llama.attention.causal", GEIST_BOOL);
    w_u8(&value, 0);
    VALUE("llama-tiny", "llama.attention.causal", &value, GEIST_E_UNSUPPORTED);
    w_key_array(&value, "llama.attention.head_count_kv", GEIST_U32, 4);
    for (int i = 0; i < 4; i++)
        w_u32(&value, 2);
    VALUE("llama-tiny", "llama.attention.head_count_kv", &value, GEIST_E_UNSUPPORTED);
    w_key_array(&value, "llama.feed_forward_length", GEIST_U32, 4);
    for (int i = 0; i < 4; i++)
        w_u32(&value, 160);
    VALUE("llama-tiny", "llama.feed_forward_length", &value, GEIST_E_UNSUPPORTED);

    TEXT("llama-tiny", "llama.rope.scaling.type", "yarn", GEIST_E_UNSUPPORTED);
    TEXT("llama-tiny", "llama.rope.scaling.type", "none", GEIST_OK);
    TEXT("llama-tiny", "llama.rope.scaling.type", "linear", GEIST_OK);
    FLOAT("llama-tiny", "llama.rope.scaling.attn_factor", 2, GEIST_E_UNSUPPORTED);
    FLOAT("llama-tiny", "llama.rope.scaling.factor", 0, GEIST_E_FORMAT);
}

static void test_windows(void)
{
    static const char pattern[] = "gemma3.attention.sliding_window_pattern";
    struct writer none = {0}, value = {0}, w = {0};
    struct edit edit = {.values = &value, .n_values = 1, .type = -1};
    struct geist_gguf *g = fixture("gemma3-tiny", "f32"), *changed = NULL;
    struct geist_model *m;
    void *memory;

    value_at("gemma3-tiny", "gemma3.attention.sliding_window", &none, GEIST_OK, NULL, __LINE__);
    value_at("gemma3-tiny", "gemma3.rope.freq_base_swa", &none, GEIST_OK, NULL, __LINE__);
    value_at("gemma3-tiny", "gemma3.attention.key_length", &none, GEIST_E_FORMAT, "gemma3.attention.key_length", __LINE__);
    value_at("gemma3-tiny", "gemma3.attention.head_count_kv", &none, GEIST_E_FORMAT, "gemma3.attention.head_count_kv", __LINE__);
    NUMBER("gemma3-tiny", "gemma3.attention.sliding_window", 0, GEIST_OK);
    NUMBER("gemma3-tiny", "gemma3.attention.sliding_window", MODEL_MAX_CTX + 1, GEIST_E_UNSUPPORTED);
    FLOAT("gemma3-tiny", "gemma3.rope.freq_base_swa", 0.5f, GEIST_E_FORMAT);
    FLOAT("gemma3-tiny", "gemma3.final_logit_softcapping", 30, GEIST_E_UNSUPPORTED);
    FLOAT("gemma3-tiny", "gemma3.attention.scale", 0.1f, GEIST_E_UNSUPPORTED);
    FLOAT("qwen3-tiny", "qwen3.rope.freq_base_swa", 10000, GEIST_E_UNSUPPORTED);
    NUMBER("gemma3-tiny", pattern, 0, GEIST_E_FORMAT);
    NUMBER("gemma3-tiny", pattern, 2, GEIST_OK);
    NUMBER("qwen3-tiny", "qwen3.attention.sliding_window_pattern", 2, GEIST_E_UNSUPPORTED);
    w_key_array(&value, pattern, GEIST_BOOL, 6);
    w_zeros(&value, 6);
    VALUE("gemma3-tiny", pattern, &value, GEIST_E_FORMAT);
    w_key_array(&value, pattern, GEIST_U8, 7);
    w_zeros(&value, 7);
    VALUE("gemma3-tiny", pattern, &value, GEIST_E_FORMAT);

    /* A list says which layers are local; without a window none is, and there is one table of frequencies. */
    w_key_array(&value, pattern, GEIST_BOOL, 7);
    for (int i = 0; i < 7; i++)
        w_u8(&value, i % 2);
    w_edited(&w, g, &edit);
    memory = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, w.n, &changed), GEIST_OK);
    m = model_of(changed);
    for (uint32_t i = 0; i < 7; i++)
        CHECK(m->layers[i].local == (i % 2 == 1));
    geist_model_destroy(m);
    geist_gguf_close(changed);
    free(memory);
    w_free(&w);
    w_free(&value);

    edit.drop_key = "gemma3.attention.sliding_window";
    edit.n_values = 0;
    w_edited(&w, g, &edit);
    memory = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, w.n, &changed), GEIST_OK);
    m = model_of(changed);
    for (uint32_t i = 0; i < 7; i++)
        CHECK(!m->layers[i].local);
    CHECK(m->n_rotations == 1);
    geist_model_destroy(m);
    geist_gguf_close(changed);
    geist_gguf_close(g);
    free(memory);
    w_free(&w);
}

/* Linear scaling is of global layers only; 62 layers are the 27B model, whose scores are scaled by its width over its heads. */
static void test_gemma3_scales(void)
{
    struct geist_gguf *g = fixture("gemma3-tiny", "f32"), *changed = NULL;
    struct geist_model *m = model_of(g), *scaled = NULL;
    struct writer value = {0}, w = {0};
    struct edit edit = {.values = &value, .n_values = 2, .type = -1};
    struct model_config c;
    size_t half = m->config.n_rot / 2;
    void *memory;

    w_key_text(&value, "gemma3.rope.scaling.type", "linear");
    w_key_f32(&value, "gemma3.rope.scaling.factor", 8);
    w_edited(&w, g, &edit);
    memory = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, w.n, &changed), GEIST_OK);
    scaled = model_of(changed);
    for (size_t i = 0; i < half; i++)
        CHECK(scaled->rope_freq[i] == m->rope_freq[i] / 8 && scaled->rope_freq[half + i] == m->rope_freq[half + i]);
    geist_model_destroy(scaled);
    geist_gguf_close(changed);
    free(memory);
    w_free(&w);
    w_free(&value);

    edit.n_values = 1;
    edit.drop_key = "gemma3.block_count";
    w_key_u32(&value, "gemma3.block_count", 62);
    w_edited(&w, g, &edit);
    memory = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, w.n, &changed), GEIST_OK);
    CHECK_STATUS(model_config_read(changed, &c), GEIST_OK);
    CHECK(c.score_scale == 0.25f && m->config.score_scale == (float)(1 / sqrt(32))); /* 64 / 4 heads; heads of 32 */
    CHECK(!c.local[59] && c.local[60] && c.local[61]);
    geist_model_destroy(m);
    geist_gguf_close(changed);
    geist_gguf_close(g);
    free(memory);
    w_free(&w);
    w_free(&value);
}

static void test_linear_scaling(void)
{
    struct geist_gguf *g = fixture("llama-tiny", "f32"), *changed = NULL;
    struct geist_model *m = model_of(g), *scaled = NULL;
    struct writer value = {0}, w = {0};
    struct edit edit = {.values = &value, .n_values = 2, .type = -1};
    unsigned n_wrong = 0;
    void *memory;

    w_key_text(&value, "llama.rope.scaling.type", "linear");
    w_key_f32(&value, "llama.rope.scaling.factor", 4);
    w_edited(&w, g, &edit);
    memory = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, w.n, &changed), GEIST_OK);
    scaled = model_of(changed);
    for (uint32_t i = 0; i < m->config.n_rot / 2; i++)
        n_wrong += scaled->rope_freq[i] != m->rope_freq[i] / 4; /* a power of two: exact */
    CHECK(n_wrong == 0);
    geist_model_destroy(scaled);
    geist_model_destroy(m);
    geist_gguf_close(changed);
    geist_gguf_close(g);
    free(memory);
    w_free(&w);
    w_free(&value);
}

static void test_layer_kinds(void)
{
    struct writer value = {0};
    static const int32_t sections[][4] = {{3, 3, 1, 0}, {3, 3, 2, 1}, {3, 3, -2, 8}};

    /* The list overrides the interval: layer 3 would then need DeltaNet tensors, layer 0 attention ones. */
    w_key_array(&value, "qwen35.attention.recurrent_layers", GEIST_BOOL, 8);
    for (int i = 0; i < 8; i++)
        w_u8(&value, i != 3 && i != 7);
    VALUE("qwen35-tiny", "qwen35.attention.recurrent_layers", &value, GEIST_OK);
    w_key_array(&value, "qwen35.attention.recurrent_layers", GEIST_BOOL, 8);
    for (int i = 0; i < 8; i++)
        w_u8(&value, i != 0);
    value_at("qwen35-tiny", NULL, &value, GEIST_E_FORMAT, "tensor blk.0.attn_q.weight is missing", __LINE__);
    w_key_array(&value, "qwen35.attention.recurrent_layers", GEIST_BOOL, 7);
    w_zeros(&value, 7);
    VALUE("qwen35-tiny", "qwen35.attention.recurrent_layers", &value, GEIST_E_FORMAT);
    w_key_array(&value, "qwen35.attention.recurrent_layers", GEIST_U8, 8);
    w_zeros(&value, 8);
    VALUE("qwen35-tiny", "qwen35.attention.recurrent_layers", &value, GEIST_E_FORMAT);

    for (size_t k = 0; k < 3; k++) {
        w_key_array(&value, "qwen35.rope.dimension_sections", GEIST_I32, 4);
        w_bytes(&value, sections[k], sizeof sections[k]);
        VALUE("qwen35-tiny", "qwen35.rope.dimension_sections", &value, k == 0 ? GEIST_E_UNSUPPORTED : k == 1 ? GEIST_OK : GEIST_E_FORMAT);
    }
    w_key_array(&value, "qwen35.rope.dimension_sections", GEIST_I32, 2);
    w_zeros(&value, 8);
    VALUE("qwen35-tiny", "qwen35.rope.dimension_sections", &value, GEIST_E_FORMAT);
}

static void test_tensors(void)
{
    static const char *const names[] = {"llama-tiny", "qwen3-tiny", "qwen35-tiny", "llama3rope-tiny", "gemma3-tiny"};
    static const float zero_factors[16];

    /* Each tensor left out: named, but for those that may be absent. */
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        struct geist_gguf *g = fixture(names[k], "q8_0");

        for (size_t i = 0; i < g->n_tensors; i++) {
            const char *name = g->tensors[i].name;
            bool may = !strcmp(name, "output.weight") || !strcmp(name, "rope_freqs.weight");
            struct edit edit = {.tensor = name, .drop = true, .type = -1};
            struct edit shape = {.tensor = name, .n_dims = 2, .type = -1};
            struct edit type = {.tensor = name, .type = 11}; /* Q3_K */

            if (!strncmp(name, "blk.", 4) && strncmp(name, "blk.0.", 6) && strncmp(name, "blk.3.", 6))
                continue; /* the others are like these two */
            edited_at(names[k], &edit, may ? GEIST_OK : GEIST_E_FORMAT, may ? NULL : name, __LINE__);
            memcpy(shape.dims, g->tensors[i].dims, sizeof shape.dims);
            if (shape.dims[1] > 1) { /* a row more: of the embedding too, as the output or vocab_size disagrees, or nothing does */
                shape.dims[1] += 1;
                edited_at(names[k], &shape, !strcmp(name, "token_embd.weight") && strncmp(names[k], "llama", 5) ? GEIST_OK : GEIST_E_FORMAT,
                          name, __LINE__);
            } else {
                shape.dims[0] += 1;
                edited_at(names[k], &shape, GEIST_E_FORMAT, name, __LINE__);
            }
            if (g->tensors[i].dims[0] % 256 == 0)
                edited_at(names[k], &type, GEIST_E_UNSUPPORTED, name, __LINE__);
        }
        geist_gguf_close(g);
    }

    /* Types: floats must be F32, matrices any of eleven. */
    edited_at("qwen3-tiny", &(struct edit){.tensor = "output_norm.weight", .type = GGML_F16}, GEIST_E_UNSUPPORTED,
              "output_norm.weight: type F16", __LINE__);
    edited_at("qwen35-tiny", &(struct edit){.tensor = "blk.0.ssm_conv1d.weight", .type = GGML_BF16}, GEIST_E_UNSUPPORTED,
              "blk.0.ssm_conv1d.weight: type BF16", __LINE__);
    edited_at("qwen3-tiny", &(struct edit){.tensor = "blk.1.ffn_up.weight", .type = 20}, GEIST_E_UNSUPPORTED,
              "blk.1.ffn_up.weight: type IQ4_NL", __LINE__);
    edited_at("qwen3-tiny", &(struct edit){.tensor = "blk.1.ffn_up.weight", .type = 77}, GEIST_E_UNSUPPORTED,
              "blk.1.ffn_up.weight: type ?77", __LINE__);
    for (size_t k = 0; k < 8; k++)
        edited_at("qwen35-tiny",
                  &(struct edit){.tensor = k % 2 ? "blk.0.attn_qkv.weight" : "token_embd.weight",
                                 .type = (int[]){GGML_F32, GGML_F16, GGML_BF16, GGML_Q8_0, GGML_Q4_0, GGML_Q4_1, GGML_Q5_0, GGML_Q5_1}[k]},
                  GEIST_OK, NULL, __LINE__);
    for (size_t k = 0; k < 3; k++)
        edited_at("qwen35-kq",
                  &(struct edit){.tensor = k % 2 ? "blk.0.attn_qkv.weight" : "token_embd.weight",
                                 .type = (int[]){GGML_Q4_K, GGML_Q5_K, GGML_Q6_K}[k]},
                  GEIST_OK, NULL, __LINE__);
    edited_at("qwen3-tiny", &(struct edit){.tensor = "blk.0.ffn_up.weight", .n_dims = 3, .dims = {64, 80, 2, 1}, .type = -1},
              GEIST_E_FORMAT, "blk.0.ffn_up.weight: shape [64, 160] expected, [64, 80, 2, 1] found", __LINE__);

    /* What nobody uses. */
    edited_at("llama-tiny", &(struct edit){.tensor = "blk.0.attn_q.weight", .rename = "blk.0.attn_q.other", .type = -1}, GEIST_E_FORMAT,
              "blk.0.attn_q.weight is missing", __LINE__);
    edited_at("llama-tiny", &(struct edit){.tensor = "output.weight", .rename = "blk.0.attn_q.bias", .type = -1}, GEIST_E_UNSUPPORTED,
              "blk.0.attn_q.bias", __LINE__);
    edited_at("llama-tiny", &(struct edit){.tensor = "output.weight", .rename = "blk.7.ffn_up.weight", .type = -1}, GEIST_E_UNSUPPORTED,
              "blk.7.ffn_up.weight", __LINE__);
    edited_at("qwen35-tiny-mtp", &(struct edit){.tensor = "blk.4.nextn.enorm.weight", .rename = "blk.5.nextn.enorm.weight", .type = -1},
              GEIST_E_UNSUPPORTED, "blk.5.nextn.enorm.weight", __LINE__);
    edited_at("qwen35-tiny-mtp", &(struct edit){.tensor = "blk.4.nextn.enorm.weight", .drop = true, .type = -1}, GEIST_OK, NULL, __LINE__);
    edited_at("llama3rope-tiny", &(struct edit){.tensor = "rope_freqs.weight", .data = zero_factors, .type = -1}, GEIST_E_FORMAT,
              "rope_freqs.weight: factor 0", __LINE__);
}

/* The value at (row, k) of a packed matrix, by quant_dequantize_row's file row (test_quant shows that tiles hold the rows). */
static void test_pack(const char *name)
{
    struct geist_gguf *g = fixture(name, "q8_0"), *other = fixture("llama3rope-tiny", "q8_0");
    struct geist_model *m = model_of(g), *m_other = model_of(other);
    struct geist_engine_options options = {GEIST_TIER_AUTO, 3};
    struct geist_engine *team = NULL, *mine = engine;
    size_t n = geist_model_packed_size(m);
    uint8_t *one = pages(n), *two = pages(n + GEIST_IMAGE_PAGE), *page = pages(GEIST_IMAGE_PAGE), fingerprint[32], anew[32];
    unsigned n_wrong = 0;

    memset(one, 0x55, n);
    memset(two, 0xaa, n);
    CHECK_STATUS(geist_model_pack(m, one, n - 1), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_pack(m, one + 64, n), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_pack(m, one, n), GEIST_OK);
    CHECK_STATUS(geist_engine_create(&options, &team), GEIST_OK);
    m->engine = team; /* the same by three threads, over other old bytes */
    CHECK_STATUS(geist_model_pack(m, two, n), GEIST_OK);
    m->engine = mine;
    geist_engine_destroy(team);
    CHECK(!memcmp(one, two, n));

    CHECK_STATUS(geist_model_fingerprint(m, fingerprint), GEIST_E_STATE);
    CHECK_STATUS(geist_model_bind(m, two + 64, n), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_bind(m, NULL, n), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_bind(m, two, n - GEIST_IMAGE_PAGE), GEIST_E_IMAGE);
    CHECK_STATUS(geist_model_bind(m, two, n + GEIST_IMAGE_PAGE), GEIST_E_IMAGE);
    CHECK_STATUS(geist_model_bind(m, two, 100), GEIST_E_IMAGE);
    CHECK_STATUS(geist_model_bind(m_other, two, n), GEIST_E_MISMATCH);
    CHECK(strstr(geist_engine_error(engine), "another model") != NULL);
    for (size_t bit = 0; bit < 8 * GEIST_IMAGE_PAGE; bit++) { /* every bit of the header page */
        two[bit / 8] ^= (uint8_t)(1 << bit % 8);
        n_wrong += geist_model_bind(m, two, n) != GEIST_E_IMAGE || m->bound;
        two[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK(n_wrong == 0);
    /* A sound header of another layout, numerics, size or table; the fields are at bytes 12, 16, 24 and 32. */
    for (size_t k = 0; k < 5; k++) {
        static const size_t at[] = {8, 12, 16, 24, 32};
        uint64_t sum;

        memcpy(page, two, GEIST_IMAGE_PAGE);
        two[at[k]] ^= 0x40;
        sum = gst_checksum(two, GEIST_IMAGE_PAGE - 8);
        memcpy(two + GEIST_IMAGE_PAGE - 8, &sum, 8);
        CHECK_STATUS(geist_model_bind(m, two, n), GEIST_E_MISMATCH);
        memcpy(two, page, GEIST_IMAGE_PAGE);
    }
    CHECK(!m->bound);

    CHECK_STATUS(geist_model_bind(m, two, n), GEIST_OK);
    CHECK(m->bound);
    CHECK_STATUS(geist_model_bind(m, two, n), GEIST_E_STATE);
    CHECK_STATUS(geist_model_fingerprint(m, fingerprint), GEIST_OK);
    CHECK_STATUS(geist_gguf_fingerprint(g, anew), GEIST_OK);
    CHECK(!memcmp(fingerprint, anew, 32));
    CHECK_STATUS(geist_gguf_fingerprint(other, anew), GEIST_OK);
    CHECK(memcmp(fingerprint, anew, 32));

    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        const struct model_layer *l = &m->layers[i];
        const struct model_config *c = &m->config;
        const struct model_matrix *x = &l->ffn_down;
        uint8_t *tiles = calloc(1, n);
        size_t tile_bytes, bytes;

        CHECK(quant_packed_bytes(x->type->pack, x->n_rows, x->n_cols, &tile_bytes, &bytes) && tile_bytes == x->packed.tile_bytes);
        quant_pack(x->type->pack, x->tensor->data, x->n_rows, x->n_cols, 0, (x->n_rows + 15) / 16, tiles);
        CHECK((uintptr_t)x->packed.tiles % 64 == 0 && !memcmp(x->packed.tiles, tiles, bytes));
        free(tiles);
        for (uint32_t ch = 0; l->recurrent && ch < c->n_channels; ch++)
            for (uint32_t k = 0; k < c->conv_width; k++)
                n_wrong += l->conv_taps[k * c->n_channels + ch] != l->conv_file[ch * c->conv_width + k];
    }
    CHECK(n_wrong == 0);
    CHECK(m->output.packed.tiles != NULL && (m->token_embd.packed.tiles != NULL) == m->tied);
    CHECK(m->token_embd.packed.tiles == NULL || m->token_embd.packed.tiles == m->output.packed.tiles);

    geist_model_destroy(m_other);
    geist_model_destroy(m);
    geist_gguf_close(other);
    geist_gguf_close(g);
    free(page);
    free(two);
    free(one);
}

static void test_arguments(void)
{
    struct geist_model *m;
    uint8_t out[32];

    CHECK_STATUS(geist_model_create(NULL, &m), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_pack(NULL, out, 32), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_model_bind(NULL, out, 32), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_gguf_fingerprint(NULL, out), GEIST_E_ARGUMENT);
    geist_model_destroy(NULL);
}

int main(int argc, char **argv)
{
    if (argc < 2 || geist_engine_create(NULL, &engine))
        return 2;
    data_dir = argv[1];
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++) {
        check_geometry(&geometries[i], "f32");
        check_geometry(&geometries[i], "q8_0");
    }
    test_rope();
    test_missing_keys();
    test_numbers();
    test_effects();
    test_windows();
    test_gemma3_scales();
    test_linear_scaling();
    test_layer_kinds();
    test_tensors();
    test_pack("llama-tiny");
    test_pack("qwen35-tiny-gqa");
    test_arguments();
    geist_engine_destroy(engine);
    return check_done("test_model");
}
