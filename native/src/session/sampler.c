/* sampler.c - the next token from a row of logits: a pure function of (parameters, seed, stream, position, logits, earlier tokens).
 *
 * Order: repeat penalty, temperature, top-k, min-p, top-p, one draw. Equal logits rank by id. Weights are exp((z - max) / temperature) in
 * double by the engine's own functions, summed in an order that depends on the logits alone, so a draw has the same bits everywhere. */
#include "session/session.h"

struct candidate {
    double weight;
    float z;
    int32_t id;
};

void sampler_reset(struct sampler *sampler)
{
    memset(sampler, 0, sizeof *sampler);
    sampler->params.top_p = 1.0f;
    sampler->params.repeat_penalty = 1.0f;
}

static enum geist_status check_ranges(const struct geist_sampler_params *p, char *error)
{
    /* written so that NaN fails */
    if (!(p->temperature >= 0.0f && p->temperature <= 1e6f))
        return gst_fail(error, GEIST_E_ARGUMENT, "temperature %g is not in [0, 1e6]", (double)p->temperature);
    if (p->top_k < 0)
        return gst_fail(error, GEIST_E_ARGUMENT, "top_k %d is negative", (int)p->top_k);
    if (!(p->top_p > 0.0f && p->top_p <= 1.0f))
        return gst_fail(error, GEIST_E_ARGUMENT, "top_p %g is not in (0, 1]", (double)p->top_p);
    if (!(p->min_p >= 0.0f && p->min_p < 1.0f))
        return gst_fail(error, GEIST_E_ARGUMENT, "min_p %g is not in [0, 1)", (double)p->min_p);
    if (!(p->repeat_penalty > 0.0f && p->repeat_penalty <= 1e6f))
        return gst_fail(error, GEIST_E_ARGUMENT, "repeat_penalty %g is not in (0, 1e6]", (double)p->repeat_penalty);
    if (p->repeat_last_n < -1)
        return gst_fail(error, GEIST_E_ARGUMENT, "repeat_last_n %d is below -1", (int)p->repeat_last_n);
    return GEIST_OK;
}

enum geist_status sampler_check(const struct geist_sampler_params *p, char *error)
{
    uint64_t fpenv = gst_fpenv_enter(); /* comparisons, too: a caller that flushes subnormals would turn the smallest top_p into 0 */
    enum geist_status status = check_ranges(p, error);

    gst_fpenv_leave(fpenv);
    return status;
}

size_t sampler_work_bytes(size_t n_vocab)
{
    return gst_round_up(n_vocab * sizeof(struct candidate), 64) + gst_round_up(n_vocab, 64);
}

void sampler_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;

        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* In [0, 1), 53 bits, for this seed, stream and position. */
static double uniform(const struct sampler *s, uint64_t position)
{
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)s->stream, (uint32_t)(s->stream >> 32)};
    uint32_t key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)}, r[4];

    sampler_philox(counter, key, r);
    return (double)((((uint64_t)r[1] << 32 | r[0]) >> 11)) * 0x1p-53;
}

static bool ranks_before(const struct candidate *a, const struct candidate *b)
{
    return a->z > b->z || (a->z == b->z && a->id < b->id);
}

/* A binary heap with the first in rank at the root. */
static void sift_down(struct candidate *heap, size_t n, size_t i)
{
    struct candidate moved = heap[i];

    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n)
            break;
        if (child + 1 < n && ranks_before(&heap[child + 1], &heap[child]))
            child++;
        if (!ranks_before(&heap[child], &moved))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moved;
}

static struct candidate pop(struct candidate *heap, size_t *n)
{
    struct candidate first = heap[0];

    heap[0] = heap[--*n];
    if (*n)
        sift_down(heap, *n, 0);
    return first;
}

/* The penalised logits as candidates in id order; returns the index of the first in rank. */
static size_t gather(const struct sampler *s, const float *logits, size_t n_vocab, const int32_t *tokens, size_t n_tokens,
                     struct candidate *all, uint8_t *seen)
{
    const struct geist_sampler_params *p = &s->params;
    size_t best = 0, n_recent = n_tokens;

    for (size_t i = 0; i < n_vocab; i++)
        all[i] = (struct candidate){0.0, logits[i], (int32_t)i};
    if (p->repeat_penalty != 1.0f) {
        memset(seen, 0, n_vocab);
        if (p->repeat_last_n >= 0 && (size_t)p->repeat_last_n < n_recent)
            n_recent = (size_t)p->repeat_last_n;
        for (size_t i = n_tokens - n_recent; i < n_tokens; i++) {
            struct candidate *c = &all[tokens[i]];
            if (seen[tokens[i]])
                continue;
            seen[tokens[i]] = 1;
            c->z = c->z > 0.0f ? c->z / p->repeat_penalty : c->z * p->repeat_penalty;
        }
    }
    for (size_t i = 1; i < n_vocab; i++)
        if (ranks_before(&all[i], &all[best]))
            best = i;
    return best;
}

/* Walks `n` candidates in order until their weights exceed u * total. */
static int32_t pick(const struct candidate *list, size_t n, double total, double u)
{
    double target = u * total, sum = 0.0;

    for (size_t i = 0; i < n; i++) {
        sum += list[i].weight;
        if (sum > target)
            return list[i].id;
    }
    /* rounding may leave target at the whole sum: the last with any weight */
    while (n > 1 && list[n - 1].weight == 0.0)
        n--;
    return list[n - 1].id;
}

int32_t sampler_draw(const struct sampler *s, const float *logits, size_t n_vocab, const int32_t *tokens, size_t n_tokens, void *work)
{
    const struct geist_sampler_params *p = &s->params;
    struct candidate *all = work;
    uint8_t *seen = (uint8_t *)work + gst_round_up(n_vocab * sizeof *all, 64);
    size_t best = gather(s, logits, n_vocab, tokens, n_tokens, all, seen);
    size_t n = n_vocab, n_ranked = 0, most = p->top_k > 0 && (size_t)p->top_k < n_vocab ? (size_t)p->top_k : n_vocab;
    double z_max = (double)all[best].z, total = 0.0, kept = 0.0, u = uniform(s, n_tokens);

    if (p->temperature == 0.0f)
        return all[best].id;
    for (size_t i = 0; i < n_vocab; i++)
        all[i].weight = gst_exp(((double)all[i].z - z_max) / (double)p->temperature);

    if (most == n_vocab && p->top_p == 1.0f) { /* nothing needs ranks */
        for (size_t i = 0; i < n_vocab; i++) {
            if (all[i].weight < (double)p->min_p)
                all[i].weight = 0.0;
            total += all[i].weight;
        }
        return pick(all, n_vocab, total, u);
    }

    /* Ranked candidates gather at the end of the array, where the shrinking heap leaves room: the r-th in rank at n_vocab - 1 - r. */
    for (size_t i = n / 2; i-- > 0;)
        sift_down(all, n, i);
    if (most == n_vocab) /* top-p is over all that min-p leaves: that total comes first */
        for (size_t i = 0; i < n_vocab; i++)
            total += all[i].weight < (double)p->min_p ? 0.0 : all[i].weight;
    while (n_ranked < most) {
        struct candidate c = pop(all, &n);
        if (n_ranked && c.weight < (double)p->min_p) /* the first in rank always stays */
            break;
        all[n] = c; /* the slot that pop freed */
        n_ranked++;
        kept += c.weight;
        if (most == n_vocab && kept >= (double)p->top_p * total)
            break;
    }
    /* to rank order */
    for (size_t i = 0, j = n_ranked; i + 1 < j; i++, j--) {
        struct candidate *a = &all[n_vocab - n_ranked + i], *b = &all[n_vocab - n_ranked + j - 1], swap = *a;
        *a = *b;
        *b = swap;
    }
    all += n_vocab - n_ranked;
    if (most < n_vocab && p->top_p < 1.0f) { /* top-p within top-k */
        double limit = (double)p->top_p * kept, sum = 0.0;
        for (size_t i = 0; i < n_ranked; i++) {
            sum += all[i].weight;
            if (sum >= limit) {
                n_ranked = i + 1;
                kept = sum;
                break;
            }
        }
    }
    return pick(all, n_ranked, kept, u);
}
