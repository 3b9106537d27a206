/* Property: a draw is a function of (parameters, seed, stream, position, logits, recent tokens); greedy ties go to the lower id;
 * frequencies follow the distribution that the parameters define.  Tolerance: exact, but for frequencies, which get five standard
 * deviations over 20,000 positions. */
#include "check.h"
#include "session/session.h"

#include <math.h>
#include <stdlib.h>

#define N 50

static const struct geist_sampler_params neutral = {1.0f, 0, 1.0f, 0.0f, 1.0f, 0};

static int32_t draw(struct geist_sampler_params p, uint64_t seed, uint64_t stream, const float *logits, const int32_t *tokens, size_t n)
{
    struct sampler s = {p, seed, stream};
    void *work = gst_alloc(sampler_work_bytes(N));
    int32_t id = sampler_draw(&s, logits, N, tokens, n, work);

    gst_free(work);
    return id;
}

/* Draws at many positions against the probabilities wanted. */
static void check_frequencies(struct geist_sampler_params p, const float *logits, const double *wanted)
{
    enum { DRAWS = 20000 };
    static int32_t tokens[DRAWS];
    double counts[N] = {0};

    for (size_t i = 0; i < DRAWS; i++)
        counts[draw(p, 7, 3, logits, tokens, i)] += 1;
    for (size_t i = 0; i < N; i++) {
        double mean = DRAWS * wanted[i], deviation = sqrt(DRAWS * wanted[i] * (1 - wanted[i]));
        if (!CHECK(fabs(counts[i] - mean) <= 5 * deviation))
            fprintf(stderr, "  id %zu: %g draws, wanted %g +- %g\n", i, counts[i], mean, deviation);
    }
}

/* Softmax of logits / temperature over the ids that `keep` admits. */
static void softmax(const float *logits, double temperature, const int *keep, double *p)
{
    double total = 0;

    for (size_t i = 0; i < N; i++)
        total += p[i] = keep && !keep[i] ? 0 : exp((double)logits[i] / temperature);
    for (size_t i = 0; i < N; i++)
        p[i] /= total;
}

static void check_philox(void)
{
    /* known answers of the reference implementation's kat_vectors: all zeros, all ones, digits of pi */
    static const struct {
        uint32_t counter[4], key[2], wanted[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t out[4];
        sampler_philox(cases[i].counter, cases[i].key, out);
        CHECK(memcmp(out, cases[i].wanted, sizeof out) == 0);
    }
}

int main(void)
{
    float logits[N];
    int32_t tokens[4] = {5, 6, 5, 40};
    double wanted[N];
    int keep[N];
    struct geist_sampler_params p;

    check_philox();
    for (int i = 0; i < N; i++)
        logits[i] = (float)((i * 37) % N) * 0.1f - 2.0f; /* all distinct: rank 0 is the largest */

    /* greedy, ties to the lower id */
    p = neutral;
    p.temperature = 0.0f;
    {
        float tied[N];
        memcpy(tied, logits, sizeof tied);
        tied[11] = tied[30] = 9.0f;
        CHECK(draw(p, 1, 1, tied, tokens, 4) == 11);
    }

    /* the same draw again; others for another seed, stream, position */
    {
        int differ[3] = {0, 0, 0};
        for (uint64_t seed = 0; seed < 50; seed++) {
            int32_t id = draw(neutral, seed, 0, logits, tokens, 2);
            CHECK(id == draw(neutral, seed, 0, logits, tokens, 2));
            differ[0] += id != draw(neutral, seed + 1000, 0, logits, tokens, 2);
            differ[1] += id != draw(neutral, seed, 1, logits, tokens, 2);
            differ[2] += id != draw(neutral, seed, 0, logits, tokens, 3);
        }
        CHECK(differ[0] > 25 && differ[1] > 25 && differ[2] > 25);
    }

    softmax(logits, 1.0, NULL, wanted);
    check_frequencies(neutral, logits, wanted);

    p = neutral;
    p.temperature = 0.5f;
    softmax(logits, 0.5, NULL, wanted);
    check_frequencies(p, logits, wanted);

    /* top-k 3: the three largest logits; ties at the edge keep the lower id */
    p = neutral;
    p.top_k = 3;
    for (int i = 0; i < N; i++)
        keep[i] = (i * 37) % N >= N - 3;
    softmax(logits, 1.0, keep, wanted);
    check_frequencies(p, logits, wanted);
    {
        float tied[N];
        memset(tied, 0, sizeof tied);
        for (size_t i = 0; i < 200; i++)
            CHECK(draw(p, i, 0, tied, tokens, 0) < 3);
    }

    /* top-p: the smallest set of largest probabilities that reaches it */
    p = neutral;
    p.top_p = 0.5f;
    {
        double sum = 0;
        softmax(logits, 1.0, NULL, wanted);
        memset(keep, 0, sizeof keep);
        for (int rank = N - 1; rank >= 0 && sum < 0.5; rank--)
            for (int i = 0; i < N; i++)
                if ((i * 37) % N == rank) {
                    keep[i] = 1;
                    sum += wanted[i];
                }
    }
    softmax(logits, 1.0, keep, wanted);
    check_frequencies(p, logits, wanted);

    /* min-p: at least that share of the largest probability */
    p = neutral;
    p.min_p = 0.5f;
    for (int i = 0; i < N; i++)
        keep[i] = exp((double)logits[i] - 2.9) >= 0.5;
    softmax(logits, 1.0, keep, wanted);
    check_frequencies(p, logits, wanted);
    p.top_k = 40; /* the ranked way gives the same distribution */
    check_frequencies(p, logits, wanted);
    p.top_k = 0;
    p.top_p = 0.9999999f;
    check_frequencies(p, logits, wanted);

    /* repeat penalty: 5 (twice, but once penalised), 6 and 40 are recent; only 5 and 40 with repeat_last_n = 2 */
    {
        float flat[N];
        for (int i = 0; i < N; i++)
            flat[i] = 1.0f;
        flat[40] = -1.0f;
        p = neutral;
        p.temperature = 0.0f;
        p.repeat_penalty = 2.0f;
        p.repeat_last_n = -1;
        flat[5] = 1.9f;
        CHECK(draw(p, 0, 0, flat, tokens, 4) == 0); /* 1.9 / 2 < 1 */
        flat[5] = 2.1f;
        CHECK(draw(p, 0, 0, flat, tokens, 4) == 5); /* penalised once, not twice */
        p.repeat_last_n = 1;
        flat[5] = 1.9f;
        CHECK(draw(p, 0, 0, flat, tokens, 4) == 5); /* only 40 is recent */
        p.repeat_last_n = 0;
        CHECK(draw(p, 0, 0, flat, tokens, 4) == 5);
    }
    return check_done("test_sampler");
}
