/* Property: in a layer with a sliding window a row reads nothing in front of the window, neither whole blocks of it nor the positions of its
 * first block that lie outside: NaN there moves no bit, and NaN at the window's first position does.  Tolerance: none. Reason: what is left
 * out must not be multiplied by 0. */
#include "forward/forward.h"
#include "model_fixture.h"

#include <math.h>

#define N_TOKENS 200

/* Fills keys and values of the local layers at positions [begin, end) with NaN. */
static void poison(struct geist_session *s, size_t begin, size_t end)
{
    const struct model_config *c = &s->model->config;

    for (uint32_t i = 0; i < c->n_layers; i++)
        for (size_t p = begin; p < end && s->model->layers[i].local; p++)
            for (unsigned which = 0; which < 2; which++)
                for (uint32_t h = 0; h < c->n_kv_heads; h++) {
                    uint8_t *block = s->blocks[p / GEIST_KV_BLOCK]->data;
                    float *row =
                        (float *)(void *)(block + state_kv_offset(&s->layout, c->n_kv_heads, s->model->layers[i].index, which, h)) +
                        p % GEIST_KV_BLOCK * c->head_dim;

                    for (uint32_t d = 0; d < c->head_dim; d++)
                        row[d] = NAN;
                }
}

static void check_tier(const char *data, enum geist_tier tier)
{
    struct fixture f;
    int32_t tokens[N_TOKENS + 2];
    uint64_t random = 3;

    if (fixture_open(&f, data, "gemma3-tiny-f32", tier, 1)) {
        size_t window = f.model->config.window, n_vocab = f.model->config.n_vocab;

        CHECK(window == 24);
        for (size_t i = 0; i < N_TOKENS + 2; i++)
            tokens[i] = (int32_t)(fixture_random(&random) % 497);
        /* Where the window begins inside a block, with a block, and with its second position; one token or two, whose windows differ. */
        static const size_t lengths[] = {30, 64 + 23, 64 + 24, 128 + 22, N_TOKENS};
        for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
            for (size_t n_more = 1; n_more <= 2; n_more++) {
                size_t n = lengths[k], begin = n + 1 - window; /* the first position that the next token sees */
                struct geist_session *clean = fixture_session(&f, GEIST_KV_F32), *dirty = fixture_session(&f, GEIST_KV_F32),
                                     *wrong = fixture_session(&f, GEIST_KV_F32);

                CHECK_STATUS(geist_session_prefill(clean, tokens, n), GEIST_OK);
                CHECK_STATUS(geist_session_prefill(dirty, tokens, n), GEIST_OK);
                CHECK_STATUS(geist_session_prefill(wrong, tokens, n), GEIST_OK);
                poison(dirty, 0, begin);
                poison(wrong, begin, begin + 1);
                CHECK_STATUS(geist_session_prefill(clean, tokens + n, n_more), GEIST_OK);
                CHECK_STATUS(geist_session_prefill(dirty, tokens + n, n_more), GEIST_OK);
                CHECK(!memcmp(clean->logits, dirty->logits, n_vocab * sizeof(float)));
                /* With two tokens the last one does not see it, but what the first one left in the layers above. */
                CHECK_STATUS(geist_session_prefill(wrong, tokens + n, n_more), GEIST_E_NONFINITE);
                geist_session_destroy(clean);
                geist_session_destroy(dirty);
                geist_session_destroy(wrong);
            }
    }
    fixture_close(&f);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";

    for (int tier = GEIST_TIER_SCALAR; tier <= GEIST_TIER_AVX512; tier++)
        if (gst_kernels_for(tier))
            check_tier(data, (enum geist_tier)tier);
    return check_done("test_window");
}
