/* Property: logits and state depend on model and tokens alone. However a prompt is cut into calls, on any tier, with any number of threads,
 * after other prompts in the same session, through a fork, a flat image or thin image and blocks: flat images (tokens, logits, recurrent
 * state, KV) are equal as bytes.  Tolerance: none, because a replay must be exact. */
#include "model_fixture.h"

static const char *const models[] = {"llama-tiny-q8_0",      "llama-tiny-f32",      "qwen3-tiny-q8_0", "qwen35-tiny-q8_0",
                                     "qwen35-tiny-gqa-q8_0", "qwen35-tiny-gqa-f32", "gemma3-tiny-q8_0"};
#define N_MODELS (sizeof models / sizeof *models)

/* Prefill in random pieces. */
static void prefill_cut(struct geist_session *s, const int32_t *tokens, size_t n, uint64_t *random)
{
    for (size_t done = 0; done < n;) {
        size_t part = 1 + fixture_random(random) % (fixture_random(random) % 4 ? 20 : 150);
        if (part > n - done)
            part = n - done;
        CHECK_STATUS(geist_session_prefill(s, tokens + done, part), GEIST_OK);
        done += part;
    }
}

/* The reference of a prompt: one call, scalar tier, one thread. */
static uint8_t *reference(const char *data, const char *name, enum geist_kv_type kv, const int32_t *tokens, size_t n, size_t *n_image)
{
    struct fixture f;
    uint8_t *image = NULL;

    if (fixture_open(&f, data, name, GEIST_TIER_SCALAR, 1)) {
        struct geist_session *s = fixture_session(&f, kv);
        if (CHECK_STATUS(geist_session_prefill(s, tokens, n), GEIST_OK))
            image = fixture_image(s, n_image);
        geist_session_destroy(s);
    }
    fixture_close(&f);
    return image;
}

static void check_equals(struct geist_session *s, const uint8_t *wanted, size_t n_wanted, const char *what)
{
    size_t n;
    uint8_t *image = fixture_image(s, &n);

    if (!CHECK(image && n == n_wanted && memcmp(image, wanted, n) == 0))
        fprintf(stderr, "  %s\n", what);
    free(image);
}

/* Everything that may not matter, on one tier and thread count. */
static void check_ways(const char *data, const char *name, enum geist_tier tier, uint32_t n_threads, enum geist_kv_type kv,
                       const int32_t *tokens, size_t n, const uint8_t *wanted, size_t n_wanted, uint64_t *random)
{
    struct fixture f;
    struct geist_session *s, *other, *fork = NULL;
    size_t cut = 1 + fixture_random(random) % n, n_image;
    uint8_t *image;

    if (!fixture_open(&f, data, name, tier, n_threads)) {
        fixture_close(&f);
        return;
    }
    s = fixture_session(&f, kv);
    other = fixture_session(&f, kv);

    prefill_cut(s, tokens, n, random);
    check_equals(s, wanted, n_wanted, "cut at random");

    /* after unrelated prompts, reset (FINDINGS row 1) */
    geist_session_reset(s);
    prefill_cut(s, tokens, cut, random);

    /* flat image into a session that held something else, at random cuts (FINDINGS row 6) */
    {
        int32_t noise[100];
        fixture_tokens(random, noise, 100);
        CHECK_STATUS(geist_session_prefill(other, noise, 1 + fixture_random(random) % 100), GEIST_OK);
    }
    image = fixture_image(s, &n_image);
    CHECK_STATUS(geist_session_restore(other, image, n_image), GEIST_OK);
    CHECK(fixture_same(s, other));
    if (cut < n)
        prefill_cut(other, tokens + cut, n - cut, random);
    check_equals(other, wanted, n_wanted, "restored from a flat image");

    /* attached to the flat image in place; the image must not move */
    {
        uint8_t *before = aligned_alloc(GEIST_IMAGE_PAGE, n_image);
        memcpy(before, image, n_image);
        CHECK_STATUS(geist_session_attach(other, image, n_image, NULL, 0), GEIST_OK);
        CHECK_STATUS(geist_session_fork(other, &fork), GEIST_OK);
        if (cut < n)
            prefill_cut(other, tokens + cut, n - cut, random);
        check_equals(other, wanted, n_wanted, "attached to a flat image");
        CHECK(memcmp(before, image, n_image) == 0);
        /* the fork of the attached session, later */
        if (cut < n)
            prefill_cut(fork, tokens + cut, n - cut, random);
        check_equals(fork, wanted, n_wanted, "fork of an attached session");
        geist_session_destroy(fork);
        fork = NULL;
        free(before);
    }

    /* thin image and blocks, in two areas as a chain of contexts has them */
    {
        size_t n_thin = geist_session_snapshot_thin_size(s), n_whole = cut / GEIST_KV_BLOCK, first = n_whole / 2;
        struct geist_image_geometry g;
        struct geist_bytes kv_areas[2];
        uint8_t *thin = aligned_alloc(GEIST_IMAGE_PAGE, n_thin), *a, *b;

        geist_model_image_geometry(f.model, kv, &g);
        kv_areas[0].n = first * g.kv_block_bytes;
        kv_areas[1].n = (n_whole - first) * g.kv_block_bytes;
        kv_areas[0].data = a = aligned_alloc(GEIST_IMAGE_PAGE, kv_areas[0].n + GEIST_IMAGE_PAGE);
        kv_areas[1].data = b = aligned_alloc(GEIST_IMAGE_PAGE, kv_areas[1].n + GEIST_IMAGE_PAGE);
        CHECK_STATUS(geist_session_snapshot_thin(s, thin, n_thin), GEIST_OK);
        CHECK_STATUS(geist_session_snapshot_blocks(s, 0, first, a, kv_areas[0].n), GEIST_OK);
        CHECK_STATUS(geist_session_snapshot_blocks(s, first, n_whole - first, b, kv_areas[1].n), GEIST_OK);
        CHECK_STATUS(geist_image_verify(thin, n_thin, kv_areas, 2, 0), GEIST_OK);
        CHECK_STATUS(geist_session_attach(other, thin, n_thin, kv_areas, 2), GEIST_OK);
        CHECK(fixture_same(s, other));
        if (cut < n)
            prefill_cut(other, tokens + cut, n - cut, random);
        check_equals(other, wanted, n_wanted, "attached to a thin image and blocks");
        /* a session that outgrew its attachment keeps its blocks until it is reset */
        geist_session_reset(other);
        free(thin);
        free(a);
        free(b);
    }

    /* forks: the parent does not move, the child goes on */
    CHECK_STATUS(geist_session_fork(s, &fork), GEIST_OK);
    if (cut < n)
        prefill_cut(fork, tokens + cut, n - cut, random);
    check_equals(fork, wanted, n_wanted, "forked");
    {
        size_t n_after;
        uint8_t *after = fixture_image(s, &n_after);
        CHECK(after && n_after == n_image && memcmp(after, image, n_image) == 0);
        free(after);
    }
    geist_session_destroy(s); /* before its fork: shared blocks are counted */
    check_equals(fork, wanted, n_wanted, "fork outlives its parent");

    geist_session_destroy(fork);
    geist_session_destroy(other);
    fixture_close(&f);
    free(image);
}

/* Scores are those of teacher forcing, and leave the session as it was (FINDINGS rows 11, 12). */
static void check_scores(const char *data, const char *name, uint64_t *random)
{
    struct fixture f;

    if (fixture_open(&f, data, name, GEIST_TIER_AUTO, 1)) {
        struct geist_session *s = fixture_session(&f, GEIST_KV_F16), *forced = fixture_session(&f, GEIST_KV_F16);
        int32_t tokens[300];
        float scores[160];
        size_t n_context = 1 + fixture_random(random) % 130, n_label = 1 + fixture_random(random) % 150, n_before;
        uint8_t *before;

        fixture_tokens(random, tokens, 300);
        CHECK_STATUS(geist_session_prefill(s, tokens, n_context), GEIST_OK);
        CHECK_STATUS(geist_session_prefill(forced, tokens, n_context), GEIST_OK);
        before = fixture_image(s, &n_before);
        CHECK_STATUS(geist_session_score(s, tokens + n_context, n_label, scores), GEIST_OK);
        for (size_t i = 0; i < n_label; i++) {
            float wanted = 1.0f;
            CHECK_STATUS(geist_session_logprobs(forced, tokens + n_context + i, 1, &wanted), GEIST_OK);
            CHECK(memcmp(&wanted, &scores[i], sizeof wanted) == 0);
            CHECK(scores[i] <= 0.0f);
            CHECK_STATUS(geist_session_decode(forced, tokens[n_context + i]), GEIST_OK);
        }
        {
            size_t n_after;
            uint8_t *after = fixture_image(s, &n_after);
            CHECK(after && n_after == n_before && memcmp(before, after, n_before) == 0);
            free(after);
        }
        /* a pass over a discard span gives the rows' logits and moves nothing; a keep span moves it */
        {
            uint8_t rows[3] = {1, 0, 1};
            const float *logits;
            float *wanted = malloc(2 * 512 * sizeof(float)), *got = malloc(2 * 512 * sizeof(float));
            struct geist_span span = {s, tokens, NULL, rows, 3, got, 1};
            struct geist_session *fork = NULL;
            CHECK_STATUS(geist_session_fork(s, &fork), GEIST_OK);
            CHECK_STATUS(geist_session_decode(fork, tokens[0]), GEIST_OK);
            CHECK_STATUS(geist_session_logits(fork, &logits), GEIST_OK);
            memcpy(wanted, logits, 512 * sizeof(float));
            CHECK_STATUS(geist_session_prefill(fork, tokens + 1, 2), GEIST_OK);
            CHECK_STATUS(geist_session_logits(fork, &logits), GEIST_OK);
            memcpy(wanted + 512, logits, 512 * sizeof(float));
            CHECK_STATUS(geist_batch_forward(f.model, &span, 1), GEIST_OK);
            CHECK(memcmp(wanted, got, 2 * 512 * sizeof(float)) == 0);
            CHECK(geist_session_position(s) == n_context);
            span.discard = 0;
            CHECK_STATUS(geist_batch_forward(f.model, &span, 1), GEIST_OK);
            CHECK(memcmp(wanted, got, 2 * 512 * sizeof(float)) == 0);
            CHECK(fixture_same(s, fork));
            geist_session_destroy(fork);
            free(wanted);
            free(got);
        }
        free(before);
        geist_session_destroy(s);
        geist_session_destroy(forced);
    }
    fixture_close(&f);
}

/* Refusals leave the session as it was and say where. */
static void check_refusals(const char *data)
{
    struct fixture f;

    if (fixture_open(&f, data, "qwen35-tiny-q8_0", GEIST_TIER_AUTO, 1)) {
        struct geist_session_options options = {GEIST_KV_F16, 10}, too_long = {GEIST_KV_F16, 1u << 30};
        struct geist_session *s = NULL;
        int32_t tokens[11] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, ids[2] = {0, 512};
        const float *logits;
        float out[11];
        size_t n;
        uint8_t *before;

        CHECK_STATUS(geist_session_create(f.model, &too_long, &s), GEIST_E_ARGUMENT);
        CHECK_STATUS(geist_session_create(f.model, &options, &s), GEIST_OK);
        CHECK_STATUS(geist_session_logits(s, &logits), GEIST_E_STATE);
        CHECK_STATUS(geist_session_prefill(s, tokens, 0), GEIST_E_ARGUMENT);
        CHECK_STATUS(geist_session_prefill(s, tokens, 3), GEIST_OK);
        before = fixture_image(s, &n);

        CHECK_STATUS(geist_session_prefill(s, tokens, 8), GEIST_E_TOO_LONG);
        CHECK(strstr(geist_session_error(s), "8 tokens behind 3") && strstr(geist_session_error(s), "10 positions"));
        tokens[2] = 512;
        CHECK_STATUS(geist_session_prefill(s, tokens, 4), GEIST_E_TOKEN);
        CHECK(strstr(geist_session_error(s), "token 2 is 512") != NULL);
        tokens[2] = -1;
        CHECK_STATUS(geist_session_score(s, tokens, 4, out), GEIST_E_TOKEN);
        CHECK_STATUS(geist_session_logprobs(s, ids, 2, out), GEIST_E_TOKEN);
        CHECK_STATUS(geist_session_top(s, 0, ids, out), GEIST_E_ARGUMENT);
        {
            struct geist_sampler_params params = {-1.0f, 0, 1.0f, 0.0f, 1.0f, 0};
            CHECK_STATUS(geist_session_set_sampler(s, &params, 1, 1), GEIST_E_ARGUMENT);
            CHECK(strstr(geist_session_error(s), "temperature") != NULL);
        }
        {
            struct geist_span two[2] = {{s, tokens, NULL, NULL, 1, NULL, 0}, {s, tokens, NULL, NULL, 1, NULL, 0}};
            CHECK_STATUS(geist_batch_forward(f.model, two, 2), GEIST_E_UNSUPPORTED);
        }
        {
            size_t n_after;
            uint8_t *after = fixture_image(s, &n_after);
            CHECK(after && n_after == n && memcmp(before, after, n) == 0);
            free(after);
        }
        tokens[2] = 3;
        CHECK_STATUS(geist_session_prefill(s, tokens, 7), GEIST_OK);
        CHECK_STATUS(geist_session_decode(s, 1), GEIST_E_TOO_LONG);
        free(before);
        geist_session_destroy(s);
    }
    fixture_close(&f);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 20261129, random = seed;
    static const size_t lengths[] = {1, 2, 63, 64, 65, 130, 128, 200};

    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < N_MODELS; i++) {
        for (int round = 0; round < 3; round++) {
            size_t n = lengths[fixture_random(&random) % 8], n_wanted = 0;
            enum geist_kv_type kv = fixture_random(&random) % 3 ? GEIST_KV_F16 : GEIST_KV_F32;
            int32_t tokens[200];
            uint8_t *wanted;

            fixture_tokens(&random, tokens, n);
            wanted = reference(data, models[i], kv, tokens, n, &n_wanted);
            for (int tier = GEIST_TIER_SCALAR; wanted && tier <= GEIST_TIER_AVX512; tier++) {
                if (!geist_tier_available((enum geist_tier)tier)) {
                    printf("tier %s: not on this machine\n", geist_tier_name((enum geist_tier)tier));
                    continue;
                }
                check_ways(data, models[i], (enum geist_tier)tier, 1 + fixture_random(&random) % 3, kv, tokens, n, wanted, n_wanted,
                           &random);
            }
            free(wanted);
        }
        check_scores(data, models[i], &random);
    }
    check_refusals(data);
    return check_done("test_session");
}
