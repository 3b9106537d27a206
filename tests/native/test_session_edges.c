/* Property: what a session is besides its numbers. A fork takes sampler, origin and brokenness along; images carry sampler and origin;
 * the likeliest tokens rank by logit, then id, also among subnormal logits and with flush-to-zero set by the caller; forged numbers in an
 * image (not finite logits, ids outside the vocabulary, too many tokens) are refused or harmless; a logit that is not finite breaks the
 * session until it is reset, wherever among the rows that were asked for it came out; no entry
 * point computes in the caller's floating-point environment or leaves another behind.  Tolerance: none, since all of it is exact. */
#include "gguf_writer.h"
#include "model_fixture.h"
#include "session/image.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define N_TOKENS 150
#define N_VOCAB 512

static const struct geist_sampler_params params = {0.75f, 7, 0.9f, 0.01f, 1.1f, 20};

/* Makes all checksums but those of KV blocks agree again. */
static void mend(uint8_t *image)
{
    struct image_header h;

    memcpy(&h, image, sizeof h);
    for (int i = 0; i < REGION_BLOCKS; i++)
        h.regions[i].checksum = gst_checksum(image + h.regions[i].offset, h.regions[i].bytes);
    h.regions[REGION_BLOCKS].checksum = h.flat ? h.regions[REGION_BLOCK_SUMS].checksum : 0;
    h.checksum = image_header_checksum(&h);
    h.id = h.checksum;
    memcpy(image, &h, sizeof h);
}

static uint8_t *region(uint8_t *image, enum image_region_kind kind)
{
    struct image_header h;

    memcpy(&h, image, sizeof h);
    return image + h.regions[kind].offset;
}

static uint8_t *thin_image(struct geist_session *s, size_t *n)
{
    uint8_t *image;

    *n = geist_session_snapshot_thin_size(s);
    image = aligned_alloc(GEIST_IMAGE_PAGE, *n);
    if (!CHECK(image != NULL))
        exit(2);
    CHECK_STATUS(geist_session_snapshot_thin(s, image, *n), GEIST_OK);
    return image;
}

/* A thin image says where its session came from; forks and restored ones say the same. */
static void check_origin(struct fixture *f, const int32_t *tokens)
{
    struct geist_session *s = fixture_session(f, GEIST_KV_F16), *other = fixture_session(f, GEIST_KV_F16), *fork = NULL;
    struct geist_image_info flat_info, info;
    size_t n_flat, n_thin, n_fork;
    uint8_t *flat, *thin, *of_fork;

    CHECK_STATUS(geist_session_prefill(s, tokens, N_TOKENS), GEIST_OK);
    CHECK_STATUS(geist_session_set_sampler(s, &params, 11, 12), GEIST_OK);
    flat = fixture_image(s, &n_flat);
    CHECK_STATUS(geist_image_inspect(flat, n_flat, &flat_info), GEIST_OK);
    CHECK(flat_info.parent_id == 0 && flat_info.n_kept == 0);

    for (int way = 0; way < 2; way++) {
        if (way == 0)
            CHECK_STATUS(geist_session_restore(other, flat, n_flat), GEIST_OK);
        else
            CHECK_STATUS(geist_session_attach(other, flat, n_flat, NULL, 0), GEIST_OK);
        CHECK(other->sampler.seed == 11 && other->sampler.stream == 12 && !memcmp(&other->sampler.params, &params, sizeof params));
        CHECK_STATUS(geist_session_prefill(other, tokens, 70), GEIST_OK); /* a whole block more */
        thin = thin_image(other, &n_thin);
        CHECK_STATUS(geist_image_inspect(thin, n_thin, &info), GEIST_OK);
        CHECK(info.parent_id == flat_info.id && info.n_kept == N_TOKENS / GEIST_KV_BLOCK * GEIST_KV_BLOCK &&
              info.n_tokens == N_TOKENS + 70);

        CHECK_STATUS(geist_session_fork(other, &fork), GEIST_OK);
        of_fork = thin_image(fork, &n_fork);
        CHECK(n_fork == n_thin && !memcmp(of_fork, thin, n_thin)); /* sampler, parent_id and n_kept are in it */
        geist_session_destroy(fork);
        free(of_fork);
        free(thin);

        { /* a flat image is one of model, tokens and sampler, whatever the origin */
            struct geist_session *plain = fixture_session(f, GEIST_KV_F16);
            CHECK_STATUS(geist_session_prefill(plain, tokens, N_TOKENS), GEIST_OK);
            CHECK_STATUS(geist_session_prefill(plain, tokens, 70), GEIST_OK);
            CHECK_STATUS(geist_session_set_sampler(plain, &params, 11, 12), GEIST_OK);
            CHECK(fixture_same(plain, other));
            geist_session_destroy(plain);
        }
    }
    geist_session_reset(other);
    thin = thin_image(other, &n_thin);
    CHECK_STATUS(geist_image_inspect(thin, n_thin, &info), GEIST_OK);
    CHECK(info.parent_id == 0 && info.n_kept == 0);
    free(thin);
    free(flat);
    geist_session_destroy(s);
    geist_session_destroy(other);
}

/* Ranks among equal and among subnormal logits, in whatever environment the caller has. */
static void check_top(struct fixture *f, uint8_t *image, size_t n)
{
    struct geist_session *s = fixture_session(f, GEIST_KV_F16);
    float *logits = (float *)(void *)region(image, REGION_LOGITS), logprobs[N_VOCAB];
    int32_t ids[N_VOCAB];

    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = -1.0f - (float)(i % 3);
    logits[3] = 0x1p-140f;
    logits[7] = 0x1p-139f;
    logits[9] = 0x1p-139f;
    logits[2] = 0.0f;
    mend(image);
    CHECK_STATUS(geist_session_restore(s, image, n), GEIST_OK);
    CHECK_STATUS(geist_session_top(s, N_VOCAB, ids, logprobs), GEIST_OK);
    CHECK(ids[0] == 7 && ids[1] == 9 && ids[2] == 3 && ids[3] == 2);
    for (int i = 5; i < N_VOCAB; i++)
        CHECK(logits[ids[i - 1]] > logits[ids[i]] || (logits[ids[i - 1]] == logits[ids[i]] && ids[i - 1] < ids[i]));
    CHECK_STATUS(geist_session_top(s, 3, ids, logprobs), GEIST_OK);
    CHECK(ids[0] == 7 && ids[1] == 9 && ids[2] == 3);
#if defined(__x86_64__)
    {
        unsigned before = _mm_getcsr(), flushing = before | 0x8040; /* results and operands that are subnormal count as 0 */
        const struct geist_sampler_params narrow = {1.0f, 0, 0x1p-140f, 0.0f, 1.0f, 0};
        enum geist_status top, set, restored;
        struct image_header h;

        _mm_setcsr(flushing);
        top = geist_session_top(s, 3, ids, logprobs);
        set = geist_session_set_sampler(s, &narrow, 1, 1);
        _mm_setcsr(before);
        CHECK_STATUS(top, GEIST_OK);
        CHECK(ids[0] == 7 && ids[1] == 9 && ids[2] == 3);
        CHECK_STATUS(set, GEIST_OK);

        memcpy(&h, image, sizeof h);
        h.top_p = 0x1p-140f;
        memcpy(image, &h, sizeof h);
        mend(image);
        _mm_setcsr(flushing);
        restored = geist_session_restore(s, image, n);
        CHECK(_mm_getcsr() == flushing);
        _mm_setcsr(before);
        CHECK_STATUS(restored, GEIST_OK);
    }
#endif
    geist_session_destroy(s);
}

/* Checksums agree, the numbers are hostile. */
static void check_forged(struct fixture *f, const uint8_t *sound, size_t n)
{
    struct geist_session_options small_options = {GEIST_KV_F16, N_TOKENS - 1};
    struct geist_session *s = fixture_session(f, GEIST_KV_F16), *small = NULL, *fork = NULL;
    static const int32_t bad_ids[] = {-1, N_VOCAB, INT32_MAX, INT32_MIN}, next[3] = {1, 2, 3};
    uint8_t *image = aligned_alloc(GEIST_IMAGE_PAGE, n);
    struct image_header h;
    const float *logits;
    int32_t id;

    for (size_t i = 0; i < sizeof bad_ids / sizeof *bad_ids; i++) {
        memcpy(image, sound, n);
        memcpy(region(image, REGION_TOKENS) + 4 * (N_TOKENS - 1), &bad_ids[i], 4);
        mend(image);
        CHECK_STATUS(geist_session_restore(s, image, n), GEIST_E_IMAGE);
        CHECK_STATUS(geist_session_attach(s, image, n, NULL, 0), GEIST_E_IMAGE);
    }

    CHECK_STATUS(geist_session_create(f->model, &small_options, &small), GEIST_OK);
    CHECK_STATUS(geist_session_restore(small, sound, n), GEIST_E_TOO_LONG);
    CHECK_STATUS(geist_session_attach(small, sound, n, NULL, 0), GEIST_E_TOO_LONG);
    CHECK(geist_session_position(small) == 0);
    geist_session_destroy(small);

    /* n_kept is whole blocks and no more than there are */
    for (uint64_t kept = 1; kept <= 192; kept += 191) {
        memcpy(image, sound, n);
        memcpy(&h, image, sizeof h);
        h.n_kept = kept;
        memcpy(image, &h, sizeof h);
        mend(image);
        CHECK_STATUS(geist_session_restore(s, image, n), GEIST_E_IMAGE);
    }

    /* the id is the checksum */
    memcpy(image, sound, n);
    memcpy(&h, image, sizeof h);
    h.id ^= 1;
    memcpy(image, &h, sizeof h);
    CHECK_STATUS(geist_session_restore(s, image, n), GEIST_E_IMAGE);

    /* Logits that are not finite, with the largest where a heap of NaN does not find it: refused, or a token of the vocabulary is drawn. */
    memcpy(image, sound, n);
    {
        float *z = (float *)(void *)region(image, REGION_LOGITS);
        for (int i = 0; i < N_VOCAB; i++)
            z[i] = __builtin_nanf("");
        z[0] = -50.0f;
        z[2] = 50.0f;
    }
    memcpy(&h, image, sizeof h);
    h.temperature = 1.0f;
    h.min_p = h.top_p = 0.5f;
    memcpy(image, &h, sizeof h);
    mend(image);
    if (geist_session_attach(s, image, n, NULL, 0) == GEIST_OK) {
        CHECK_STATUS(geist_session_sample(s, &id), GEIST_OK);
        CHECK(id >= 0 && id < N_VOCAB);
    }

    /* A state that is not finite: the pass says so, and nothing helps but a reset, a restore or an attach. Forks are broken, too. */
    memcpy(image, sound, n);
    memset(region(image, REGION_RECURRENT), 0xff, 4096);
    mend(image);
    CHECK_STATUS(geist_session_attach(s, image, n, NULL, 0), GEIST_OK);
    CHECK_STATUS(geist_session_prefill(s, next, 3), GEIST_E_NONFINITE);
    for (int round = 0; round < 2; round++) {
        struct geist_session *broken = round ? fork : s;
        uint8_t *buf = aligned_alloc(GEIST_IMAGE_PAGE, n);
        float lp;

        CHECK_STATUS(geist_session_prefill(broken, next, 1), GEIST_E_STATE);
        CHECK_STATUS(geist_session_logits(broken, &logits), GEIST_E_STATE);
        CHECK_STATUS(geist_session_sample(broken, &id), GEIST_E_STATE);
        CHECK_STATUS(geist_session_score(broken, next, 2, &lp), GEIST_E_STATE);
        CHECK_STATUS(geist_session_snapshot(broken, buf, n), GEIST_E_STATE);
        CHECK_STATUS(geist_session_snapshot_blocks(broken, 0, 1, buf, n), GEIST_E_STATE);
        free(buf);
        if (round == 0)
            CHECK_STATUS(geist_session_fork(s, &fork), GEIST_OK);
    }
    CHECK_STATUS(geist_session_restore(s, sound, n), GEIST_OK);
    CHECK_STATUS(geist_session_attach(fork, sound, n, NULL, 0), GEIST_OK);
    CHECK_STATUS(geist_session_prefill(s, next, 3), GEIST_OK);
    CHECK_STATUS(geist_session_prefill(fork, next, 3), GEIST_OK);
    CHECK(fixture_same(s, fork));

    geist_session_destroy(fork);
    geist_session_destroy(s);
    free(image);
}

#if defined(__x86_64__)
/* Towards zero, subnormals flushed, and every exception a signal: a computation outside of the engine's own environment ends this program.
 */
#define HOSTILE_MXCSR 0xe040u
#define IN_HOSTILE(call)                                                                                                                   \
    do {                                                                                                                                   \
        unsigned before_ = _mm_getcsr(), after_;                                                                                           \
        enum geist_status status_;                                                                                                         \
        _mm_setcsr(HOSTILE_MXCSR);                                                                                                         \
        status_ = (call);                                                                                                                  \
        after_ = _mm_getcsr();                                                                                                             \
        _mm_setcsr(before_);                                                                                                               \
        CHECK_STATUS(status_, GEIST_OK);                                                                                                   \
        CHECK(after_ == HOSTILE_MXCSR);                                                                                                    \
    } while (0)

static void check_environment(struct fixture *f, const int32_t *tokens)
{
    struct geist_session *s = fixture_session(f, GEIST_KV_F16), *t = fixture_session(f, GEIST_KV_F16), *fork = NULL;
    struct geist_span span = {s, tokens, NULL, NULL, 3, NULL, 1};
    float x[9], y[9];
    int32_t ids[9], wanted[9];
    size_t n;
    uint8_t *image;

    CHECK_STATUS(geist_session_prefill(s, tokens, N_TOKENS), GEIST_OK);
    IN_HOSTILE(geist_session_prefill(t, tokens, N_TOKENS));
    CHECK_STATUS(geist_session_set_sampler(s, &params, 11, 12), GEIST_OK);
    IN_HOSTILE(geist_session_set_sampler(t, &params, 11, 12));
    CHECK(fixture_same(s, t));
    CHECK_STATUS(geist_session_logprobs(s, tokens, 9, x), GEIST_OK);
    IN_HOSTILE(geist_session_logprobs(s, tokens, 9, y));
    CHECK(!memcmp(x, y, sizeof x));
    CHECK_STATUS(geist_session_top(s, 9, wanted, x), GEIST_OK);
    IN_HOSTILE(geist_session_top(s, 9, ids, y));
    CHECK(!memcmp(x, y, sizeof x) && !memcmp(ids, wanted, sizeof ids));
    CHECK_STATUS(geist_session_score(s, tokens, 9, x), GEIST_OK);
    IN_HOSTILE(geist_session_score(s, tokens, 9, y));
    CHECK(!memcmp(x, y, sizeof x));
    CHECK_STATUS(geist_session_sample(s, wanted), GEIST_OK);
    IN_HOSTILE(geist_session_sample(s, ids));
    CHECK(ids[0] == wanted[0]);
    IN_HOSTILE(geist_batch_forward(f->model, &span, 1));
    IN_HOSTILE(geist_session_fork(s, &fork));
    image = fixture_image(s, &n);
    IN_HOSTILE(geist_session_restore(t, image, n));
    IN_HOSTILE(geist_session_attach(fork, image, n, NULL, 0));
    IN_HOSTILE(geist_session_decode(t, 5));
    IN_HOSTILE(geist_session_decode(fork, 5));
    CHECK_STATUS(geist_session_decode(s, 5), GEIST_OK);
    CHECK(fixture_same(s, t) && fixture_same(s, fork));
    geist_session_destroy(fork);
    geist_session_destroy(s);
    geist_session_destroy(t);
    free(image);
}
#endif

/* A model whose logit 5 is 3e38 times the first value of the last hidden row: not finite at some positions, finite at others. */
static void check_one_row(struct fixture *f)
{
    const struct gguf_tensor *output = gguf_tensor_find(f->gguf, "output.weight");
    struct edit edit = {.tensor = "output.weight", .type = -1};
    struct writer w = {0};
    struct fixture hot = {.engine = f->engine};
    struct geist_session *s = NULL;
    enum { N = 16 };
    int32_t tokens[N];
    uint64_t random = 9;
    int fails[N], n_fails = 0, after_a_failure = 0;
    float *weights, scores[N], *logits = malloc(N * N_VOCAB * sizeof *logits);
    uint8_t rows[N];
    void *bytes;
    size_t n;

    if (!CHECK(output && output->type == GGML_F32 && logits))
        exit(2);
    weights = malloc(output->data_bytes);
    memcpy(weights, output->data, output->data_bytes);
    memset(weights + 5 * output->dims[0], 0, output->dims[0] * sizeof *weights);
    weights[5 * output->dims[0]] = 3e38f;
    edit.data = weights;
    w_edited(&w, f->gguf, &edit);
    bytes = w_aligned(w.bytes, w.n);
    CHECK_STATUS(geist_gguf_open_memory(hot.engine, bytes, w.n, &hot.gguf), GEIST_OK);
    CHECK_STATUS(geist_model_create(hot.gguf, &hot.model), GEIST_OK);
    n = geist_model_packed_size(hot.model);
    hot.packed = aligned_alloc(GEIST_IMAGE_PAGE, n);
    CHECK_STATUS(geist_model_pack(hot.model, hot.packed, n), GEIST_OK);
    CHECK_STATUS(geist_model_bind(hot.model, hot.packed, n), GEIST_OK);
    s = fixture_session(&hot, GEIST_KV_F16);
    fixture_tokens(&random, tokens, N);

    for (size_t i = 0; i < N; i++) { /* which rows alone are refused */
        enum geist_status status;
        geist_session_reset(s);
        status = geist_session_prefill(s, tokens, i + 1);
        CHECK(status == GEIST_OK || status == GEIST_E_NONFINITE);
        fails[i] = status != GEIST_OK;
        n_fails += fails[i];
        after_a_failure += i > 0 && fails[i - 1] && !fails[i];
    }
    CHECK(n_fails > 0 && n_fails < N && after_a_failure > 0);
    for (size_t i = 0; i + 1 < N; i++) { /* the two last rows of a pass */
        struct geist_span span = {s, tokens, NULL, rows, i + 2, logits, 1};
        geist_session_reset(s);
        memset(rows, 0, sizeof rows);
        rows[i] = rows[i + 1] = 1;
        CHECK_STATUS(geist_batch_forward(hot.model, &span, 1), fails[i] || fails[i + 1] ? GEIST_E_NONFINITE : GEIST_OK);
        CHECK(geist_session_position(s) == 0);
    }
    for (size_t i = 0; i + 2 < N; i++) { /* a score asks for every row but the last token's; the session stays sound */
        geist_session_reset(s);
        if (geist_session_prefill(s, tokens, i + 1) != GEIST_OK)
            continue;
        CHECK_STATUS(geist_session_score(s, tokens + i + 1, 2, scores), fails[i + 1] ? GEIST_E_NONFINITE : GEIST_OK);
        CHECK(geist_session_position(s) == i + 1);
        CHECK_STATUS(geist_session_logprobs(s, tokens, 1, scores), GEIST_OK);
    }

    geist_session_destroy(s);
    geist_model_destroy(hot.model);
    geist_gguf_close(hot.gguf);
    free(hot.packed);
    free(bytes);
    free(weights);
    free(logits);
    w_free(&w);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";
    uint64_t random = 3;
    struct fixture f;

    if (fixture_open(&f, data, "qwen35-tiny-gqa-q8_0", GEIST_TIER_AUTO, 1)) {
        struct geist_session *s = fixture_session(&f, GEIST_KV_F16);
        int32_t tokens[N_TOKENS];
        size_t n;
        uint8_t *sound, *copy;

        fixture_tokens(&random, tokens, N_TOKENS);
        CHECK(f.model->config.n_vocab == N_VOCAB);
        CHECK_STATUS(geist_session_prefill(s, tokens, N_TOKENS), GEIST_OK);
        sound = fixture_image(s, &n);
        copy = aligned_alloc(GEIST_IMAGE_PAGE, n);
        memcpy(copy, sound, n);
        geist_session_destroy(s);

        check_origin(&f, tokens);
        check_top(&f, copy, n);
#if defined(__x86_64__)
        check_environment(&f, tokens);
#endif
        check_forged(&f, sound, n);
        free(sound);
        free(copy);
    }
    fixture_close(&f);
    if (fixture_open(&f, data, "llama-tiny-f32", GEIST_TIER_AUTO, 1))
        check_one_row(&f);
    fixture_close(&f);
    return check_done("test_session_edges");
}
