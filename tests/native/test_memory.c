/* Property: no memory is a refusal. With the k-th allocation of a call failing, for every k, a call on a session says GEIST_E_MEMORY with
 * words, the session stays byte for byte what it was and goes on to the same bits; results are NULL and nothing leaks (which a sanitizer
 * sees). Tolerance: none, because a refused call must not be told from one that never was.
 *
 * This file brings its own gst_alloc, gst_alloc_raw and gst_free, so that the linker leaves base/alloc.c out. */
#include "model_fixture.h"

static long n_left = -1; /* allocations that still succeed; -1: all */
static long n_live;      /* given out and not freed */

void *gst_alloc_raw(size_t n)
{
    void *p;

    if (n_left == 0)
        return NULL;
    if (n_left > 0)
        n_left--;
    p = aligned_alloc(64, gst_round_up(n ? n : 1, 64));
    if (p) {
        memset(p, 0xa5, n); /* what nobody has written shows */
        n_live++;
    }
    return p;
}

void *gst_alloc(size_t n)
{
    void *p = gst_alloc_raw(n);

    if (p)
        memset(p, 0, n);
    return p;
}

void gst_free(void *p)
{
    n_live -= p != NULL;
    free(p);
}

#define N_TOKENS 200 /* three whole blocks and a part; a pass takes 128 */
#define N_MORE 150
#define MOST_ALLOCATIONS 100

struct subject {
    struct fixture f;
    int32_t tokens[N_TOKENS + N_MORE];
    uint8_t *image; /* of N_TOKENS tokens, flat */
    size_t n_image;
    uint8_t *thin, *blocks;
    size_t n_thin, n_blocks;
    uint8_t *after; /* of all tokens */
    size_t n_after;
};

enum call { CALL_PREFILL, CALL_RESTORE, CALL_ATTACH, CALL_ATTACH_THIN, CALL_FORK, CALL_SCORE, CALL_SAMPLE, CALL_DISCARD, CALL_COUNT };
static const char *const call_names[CALL_COUNT] = {"prefill", "restore", "attach", "attach thin", "fork", "score", "sample", "discard"};

static enum geist_status make_call(struct subject *t, struct geist_session *s, enum call call, struct geist_session **fork)
{
    const struct geist_bytes area = {t->blocks, t->n_blocks};
    struct geist_span span = {s, t->tokens + N_TOKENS, NULL, NULL, N_MORE, NULL, 1};
    float scores[N_MORE];
    int32_t id;

    switch (call) {
    case CALL_PREFILL:
        return geist_session_prefill(s, t->tokens + N_TOKENS, N_MORE);
    case CALL_RESTORE:
        return geist_session_restore(s, t->image, t->n_image);
    case CALL_ATTACH:
        return geist_session_attach(s, t->image, t->n_image, NULL, 0);
    case CALL_ATTACH_THIN:
        return geist_session_attach(s, t->thin, t->n_thin, &area, 1);
    case CALL_FORK:
        return geist_session_fork(s, fork);
    case CALL_SCORE:
        return geist_session_score(s, t->tokens + N_TOKENS, N_MORE, scores);
    case CALL_SAMPLE:
        return geist_session_sample(s, &id);
    case CALL_DISCARD:
        return geist_batch_forward(t->f.model, &span, 1);
    case CALL_COUNT:
        break;
    }
    return GEIST_E_ARGUMENT;
}

static int holds(struct geist_session *s, const uint8_t *wanted, size_t n_wanted)
{
    size_t n;
    uint8_t *image = fixture_image(s, &n);
    int same = image && n == n_wanted && memcmp(image, wanted, n) == 0;

    free(image);
    return same;
}

/* The session, made anew for each failure, without the engine's scratch memory so that its growth fails too. */
static void check_call(struct subject *t, enum call call, int attached)
{
    for (long k = 0; k < MOST_ALLOCATIONS; k++) {
        struct geist_session *s = fixture_session(&t->f, GEIST_KV_F16), *fork = NULL;
        enum geist_status status;

        if (attached)
            CHECK_STATUS(geist_session_attach(s, t->image, t->n_image, NULL, 0), GEIST_OK);
        else
            CHECK_STATUS(geist_session_restore(s, t->image, t->n_image), GEIST_OK);
        gst_free(t->f.engine->scratch);
        t->f.engine->scratch = NULL;
        t->f.engine->scratch_bytes = 0;
        t->f.engine->error[0] = 0;

        n_left = k;
        status = make_call(t, s, call, &fork);
        n_left = -1;
        if (status == GEIST_OK) {
            CHECK(k > 0 || call == CALL_PREFILL); /* something was allocated: the check before meant something */
            geist_session_destroy(fork);
            geist_session_destroy(s);
            return;
        }
        if (!CHECK_STATUS(status, GEIST_E_MEMORY) || !CHECK(fork == NULL))
            fprintf(stderr, "  %s, allocation %ld\n", call_names[call], k);
        if (!CHECK((call == CALL_FORK ? geist_engine_error(t->f.engine) : geist_session_error(s))[0] != 0))
            fprintf(stderr, "  %s, allocation %ld: no words\n", call_names[call], k);
        if (!CHECK(holds(s, t->image, t->n_image)))
            fprintf(stderr, "  %s, allocation %ld: the session moved\n", call_names[call], k);
        CHECK_STATUS(geist_session_prefill(s, t->tokens + N_TOKENS, N_MORE), GEIST_OK);
        if (!CHECK(holds(s, t->after, t->n_after)))
            fprintf(stderr, "  %s, allocation %ld: other bits afterwards\n", call_names[call], k);
        geist_session_destroy(s);
    }
    CHECK(0); /* it never had enough */
}

static void check_model(const char *data, const char *name)
{
    struct subject t;
    uint64_t random = 5;
    long n_before;

    memset(&t, 0, sizeof t);
    if (fixture_open(&t.f, data, name, GEIST_TIER_AUTO, 1)) {
        struct geist_session *s = fixture_session(&t.f, GEIST_KV_F16);
        struct geist_image_geometry g;

        geist_model_image_geometry(t.f.model, GEIST_KV_F16, &g);
        fixture_tokens(&random, t.tokens, N_TOKENS + N_MORE);
        CHECK_STATUS(geist_session_prefill(s, t.tokens, N_TOKENS), GEIST_OK);
        t.image = fixture_image(s, &t.n_image);
        t.n_thin = geist_session_snapshot_thin_size(s);
        t.thin = aligned_alloc(GEIST_IMAGE_PAGE, t.n_thin);
        t.n_blocks = N_TOKENS / GEIST_KV_BLOCK * g.kv_block_bytes;
        t.blocks = aligned_alloc(GEIST_IMAGE_PAGE, t.n_blocks);
        CHECK_STATUS(geist_session_snapshot_thin(s, t.thin, t.n_thin), GEIST_OK);
        CHECK_STATUS(geist_session_snapshot_blocks(s, 0, N_TOKENS / GEIST_KV_BLOCK, t.blocks, t.n_blocks), GEIST_OK);
        CHECK_STATUS(geist_session_prefill(s, t.tokens + N_TOKENS, N_MORE), GEIST_OK);
        t.after = fixture_image(s, &t.n_after);
        geist_session_destroy(s);

        n_before = n_live - (t.f.engine->scratch != NULL);
        for (int call = 0; call < CALL_COUNT; call++) {
            check_call(&t, (enum call)call, 0);
            check_call(&t, (enum call)call, 1);
        }
        CHECK(n_live - (t.f.engine->scratch != NULL) == n_before); /* sessions, blocks, branches: all gone */
        free(t.image);
        free(t.thin);
        free(t.blocks);
        free(t.after);
    }
    fixture_close(&t.f);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";

    check_model(data, "qwen35-tiny-gqa-q8_0");
    check_model(data, "llama-tiny-q8_0");
    return check_done("test_memory");
}
