/* Property: on the F32 fixtures with f32 KV, the inputs of every layer, keys, values, convolution windows and delta-rule matrices after 17
 * tokens are those of the float reference (transformers in float32, tests/data/SOURCES.md).  Tolerance: 1e-5 of each array's largest value,
 * because both sides are float32 with sums in different orders; a wrong convention costs 1e-2 or more (docs/qwen35.md, "What each
 * convention is worth"). */
#include "forward/forward.h"
#include "model_fixture.h"

#include <math.h>

#define TOLERANCE 1e-5

/* One array of a states file (make_states.py). */
struct record {
    char name[25];
    uint32_t n;
    float *values; /* owned; int32 bits for tokens */
};

struct states {
    struct record records[64];
    size_t n;
};

static int states_read(struct states *s, const char *data, const char *name)
{
    char path[1024];
    FILE *f;

    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "%s/oracle/states/%s.bin", data, name);
    f = fopen(path, "rb");
    if (!CHECK(f != NULL))
        return 0;
    while (s->n < 64) {
        struct record *r = &s->records[s->n];
        if (fread(r->name, 24, 1, f) != 1 || fread(&r->n, 4, 1, f) != 1)
            break;
        r->values = malloc(r->n * 4 + 4);
        if (!CHECK(fread(r->values, 4, r->n, f) == r->n))
            break;
        s->n++;
    }
    fclose(f);
    return CHECK(s->n >= 4);
}

static const struct record *states_find(const struct states *s, const char *prefix, unsigned layer)
{
    char name[25];

    snprintf(name, sizeof name, prefix, layer);
    for (size_t i = 0; i < s->n; i++)
        if (strcmp(s->records[i].name, name) == 0)
            return &s->records[i];
    CHECK(!"array in the states file");
    fprintf(stderr, "  %s\n", name);
    return NULL;
}

/* Largest difference by the largest value; got(i) through an index function's result array. */
static double compare(const char *model, const char *what, const float *got, const float *wanted, size_t n)
{
    double most = 0, worst = 0;

    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)wanted[i]);
        if (fabs((double)wanted[i]) > most)
            most = fabs((double)wanted[i]);
        if (!(d <= worst))
            worst = d;
    }
    if (!CHECK(worst <= TOLERANCE * most))
        fprintf(stderr, "  %s %s: %g of %g\n", model, what, worst, most);
    return worst / most;
}

static void check_model(const char *data, const char *name, enum geist_tier tier)
{
    struct fixture f;
    struct states states;
    double worst = 0;

    if (fixture_open(&f, data, name, tier, 1) && states_read(&states, data, name)) {
        const struct model_config *c = &f.model->config;
        struct geist_session *s = fixture_session(&f, GEIST_KV_F32);
        const struct record *tokens = states_find(&states, "tokens_17", 0), *hidden = states_find(&states, "hidden_17", 0);
        float *got = malloc((c->n_layers + 1) * 17 * c->n_embd * sizeof(float)), *one = malloc(sizeof(float) << 20);
        struct forward_output output = {.hidden = got};

        CHECK_STATUS(session_reserve(s, 17), GEIST_OK);
        CHECK_STATUS(forward_pass(s, (const int32_t *)(const void *)tokens->values, 17, true, &output), GEIST_OK);
        if (CHECK(hidden->n == (c->n_layers + 1) * 17 * c->n_embd))
            for (unsigned i = 0; i <= c->n_layers; i++) {
                size_t n = 17 * (size_t)c->n_embd;
                double d = compare(name, "hidden", got + i * n, hidden->values + i * n, n);
                worst = d > worst ? d : worst;
            }
        for (unsigned i = 0; i < c->n_layers; i++) {
            const struct model_layer *layer = &f.model->layers[i];

            if (layer->recurrent) {
                const struct record *rec = states_find(&states, "rec_17_L%u", i), *conv = states_find(&states, "conv_17_L%u", i);
                const float *window = (const float *)(const void *)(s->recurrent + state_window_offset(&s->layout, layer->index));
                const float *matrix = (const float *)(const void *)(s->recurrent + state_matrix_offset(&s->layout, layer->index));
                size_t taps = c->conv_width - 1;

                if (CHECK(rec && rec->n == (size_t)c->n_v_heads * c->dk * c->dv))
                    compare(name, "delta-rule state", matrix, rec->values, rec->n);
                if (CHECK(conv && conv->n == taps * c->n_channels)) {
                    for (size_t ch = 0; ch < c->n_channels; ch++) /* the reference has [channel][tap] */
                        for (size_t t = 0; t < taps; t++)
                            one[ch * taps + t] = window[t * c->n_channels + ch];
                    compare(name, "convolution window", one, conv->values, conv->n);
                }
                continue;
            }
            if (layer->local)
                continue; /* the reference keeps a ring of its own there; what follows from it is in the hidden states */
            for (unsigned which = 0; which < 2; which++) {
                const struct record *kv = states_find(&states, which ? "v_17_L%u" : "k_17_L%u", i);
                if (!CHECK(kv && kv->n == (size_t)c->n_kv_heads * 17 * c->head_dim))
                    continue;
                for (uint32_t h = 0; h < c->n_kv_heads; h++)
                    for (size_t t = 0; t < 17; t++) {
                        const float *row = (const float *)(const void *)(s->blocks[0]->data + state_kv_offset(&s->layout, c->n_kv_heads,
                                                                                                              layer->index, which, h)) +
                                           t * c->head_dim;
                        if (c->arch == ARCH_LLAMA && which == 0) {
                            /* the reference pairs (i, i + half), a llama GGUF (2i, 2i + 1): the same numbers in another place */
                            size_t half = c->n_rot / 2;
                            float *to = one + (h * 17 + t) * c->head_dim;
                            memcpy(to, row, c->head_dim * sizeof(float));
                            for (size_t p = 0; p < half; p++) {
                                to[p] = row[2 * p];
                                to[p + half] = row[2 * p + 1];
                            }
                        } else {
                            memcpy(one + (h * 17 + t) * c->head_dim, row, c->head_dim * sizeof(float));
                        }
                    }
                compare(name, which ? "values" : "keys", one, kv->values, kv->n);
            }
        }
        printf("%s on %s: hidden states within %.2g\n", name, geist_tier_name(geist_engine_tier(f.engine)), worst);
        for (size_t i = 0; i < states.n; i++)
            free(states.records[i].values);
        free(got);
        free(one);
        geist_session_destroy(s);
    }
    fixture_close(&f);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";
    static const char *const models[] = {"llama-tiny-f32",      "llama3rope-tiny-f32", "qwen3-tiny-f32", "qwen35-tiny-f32",
                                         "qwen35-tiny-gqa-f32", "qwen35-tiny-mtp-f32", "qwen35-kq-f32",  "gemma3-tiny-f32"};

    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        check_model(data, models[i], GEIST_TIER_SCALAR);
        check_model(data, models[i], GEIST_TIER_AUTO);
    }
    return check_done("test_oracle");
}
