/* Property: the filters of the sampler together, at their exact edges, on four tokens of probability 0.4, 0.3, 0.2, 0.1: which ids can be
 * drawn at all; and the repeat penalty on either side of 0. Tolerance: exact, since it is about sets; every id that may be drawn has a
 * share of a quarter or more, so that 400 positions miss one with probability below 1e-49. */
#include "check.h"
#include "session/session.h"

#include <math.h>

#define N 4

static unsigned drawn(struct geist_sampler_params p, const float *logits)
{
    struct sampler s = {p, 5, 6};
    static const int32_t tokens[400];
    void *work = gst_alloc(sampler_work_bytes(N));
    unsigned ids = 0;

    for (size_t n = 0; n < 400; n++) {
        int32_t id = sampler_draw(&s, logits, N, tokens, n, work);
        if (CHECK(id >= 0 && id < N))
            ids |= 1u << id;
    }
    gst_free(work);
    return ids;
}

static int32_t greedy(float penalty, int32_t last_n, const float *logits, const int32_t *tokens, size_t n)
{
    struct sampler s = {{0.0f, 0, 1.0f, 0.0f, penalty, last_n}, 0, 0};
    void *work = gst_alloc(sampler_work_bytes(N));
    int32_t id = sampler_draw(&s, logits, N, tokens, n, work);

    gst_free(work);
    return id;
}

int main(void)
{
    /* id 2 is the likeliest; the mask of a set has bit i for id i */
    const float logits[N] = {logf(0.3f), logf(0.1f), logf(0.4f), logf(0.2f)}, tied[N] = {1.0f, 2.0f, 2.0f, 2.0f};
    static const struct {
        struct geist_sampler_params p;
        unsigned ids;
    } cases[] = {
        {{1.0f, 3, 0.60f, 0.0f, 1.0f, 0}, 1u << 2 | 1u << 0},           /* of 0.9 that top-k leaves: 0.4 < 0.54 <= 0.7 */
        {{1.0f, 3, 0.40f, 0.0f, 1.0f, 0}, 1u << 2},                     /* 0.36 <= 0.4 */
        {{1.0f, 3, 0.80f, 0.0f, 1.0f, 0}, 1u << 2 | 1u << 0 | 1u << 3}, /* 0.7 < 0.72 */
        {{1.0f, 0, 0.75f, 0.4f, 1.0f, 0}, 1u << 2 | 1u << 0},           /* of 0.9 that min-p leaves: 0.4 < 0.675 <= 0.7 */
        {{1.0f, 0, 0.72f, 0.0f, 1.0f, 0}, 1u << 2 | 1u << 0 | 1u << 3}, /* of 1: 0.7 < 0.72 */
        {{1.0f, 0, 1e-30f, 0.0f, 1.0f, 0}, 1u << 2},
        {{1.0f, 2, 1e-30f, 0.0f, 1.0f, 0}, 1u << 2},
        {{1.0f, 1, 1.0f, 0.0f, 1.0f, 0}, 1u << 2},
        {{1.0f, 4, 0.72f, 0.0f, 1.0f, 0}, 1u << 2 | 1u << 0 | 1u << 3}, /* top-k of everything is none */
        {{1.0f, INT32_MAX, 1.0f, 0.8f, 1.0f, 0}, 1u << 2},
        {{1.0f, 3, 1.0f, 0.7f, 1.0f, 0}, 1u << 2 | 1u << 0}, /* 0.3 / 0.4 */
        {{1e-30f, 0, 1.0f, 0.0f, 1.0f, 0}, 1u << 2},
        {{1e-30f, 3, 0.9f, 0.1f, 1.0f, 0}, 1u << 2},
        {{1e6f, 0, 1.0f, 0.9f, 1.0f, 0}, 15u}, /* all alike */
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned ids = drawn(cases[i].p, logits);
        if (!CHECK(ids == cases[i].ids))
            fprintf(stderr, "  case %zu: ids %x, wanted %x\n", i, ids, cases[i].ids);
    }
    CHECK(drawn((struct geist_sampler_params){1e-30f, 0, 1.0f, 0.0f, 1.0f, 0}, tied) == 14u); /* no temperature parts equal logits */
    CHECK(drawn((struct geist_sampler_params){1e-30f, 2, 1.0f, 0.0f, 1.0f, 0}, tied) == 6u);  /* lower ids rank first */
    CHECK(drawn((struct geist_sampler_params){1.0f, 0, 1e-30f, 0.0f, 1.0f, 0}, tied) == 2u);

    {
        static const int32_t recent[2] = {0, 1};
        static const float small[N] = {0.8f, 0.1f, 0.5f, 0.0f}, negative[N] = {-0.5f, -3.0f, -0.75f, -4.0f};
        CHECK(greedy(2.0f, -1, small, recent, 2) == 2);    /* 0.8 / 2 < 0.5 */
        CHECK(greedy(2.0f, 1, small, recent, 2) == 0);     /* only id 1 is recent */
        CHECK(greedy(2.0f, -1, negative, recent, 2) == 2); /* -0.5 * 2 < -0.75 */
        CHECK(greedy(0.5f, -1, small, recent, 2) == 0);
    }
    return check_done("test_sampler_limits");
}
