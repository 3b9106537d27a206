/* fingerprint.c - see fingerprint.h. */
#include "gguf/fingerprint.h"

#include <stdatomic.h>
#include <stdlib.h>

static void add_size(struct gst_sha256 *s, uint64_t n)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(n >> 8 * i);
    gst_sha256_update(s, bytes, 8);
}

static void add_head(struct gst_sha256 *s, const struct geist_gguf *g, const char *domain)
{
    gst_sha256_init(s);
    gst_sha256_update(s, domain, strlen(domain) + 1);
    add_size(s, g->values_end);
    add_size(s, g->table_end);
    gst_sha256_update(s, g->bytes, g->table_end);
}

void gguf_tensor_sum(const struct geist_gguf *g, size_t i, uint8_t out[32])
{
    struct gst_sha256 s;

    gst_sha256_init(&s);
    gst_sha256_update(&s, g->tensors[i].data, g->tensors[i].data_bytes);
    gst_sha256_final(&s, out);
}

void gguf_fingerprint_of_sums(const struct geist_gguf *g, const uint8_t *sums, uint8_t out[32])
{
    struct gst_sha256 s;

    add_head(&s, g, "geist model 1");
    gst_sha256_update(&s, sums, 32 * g->n_tensors);
    gst_sha256_final(&s, out);
}

void gguf_table_sum(const struct geist_gguf *g, uint8_t out[32])
{
    struct gst_sha256 s;

    add_head(&s, g, "geist table 1");
    gst_sha256_final(&s, out);
}

struct size_and_index {
    size_t bytes;
    uint32_t index;
};

static int larger_first(const void *a, const void *b)
{
    const struct size_and_index *s = a, *t = b;

    if (s->bytes != t->bytes)
        return s->bytes > t->bytes ? -1 : 1;
    return s->index < t->index ? -1 : s->index > t->index;
}

void gguf_tensors_by_size(const struct geist_gguf *g, uint32_t *order)
{
    struct size_and_index *sorted = calloc(g->n_tensors + 1, sizeof *sorted);

    for (size_t i = 0; i < g->n_tensors; i++) {
        order[i] = (uint32_t)i;
        if (sorted) {
            sorted[i].bytes = g->tensors[i].data_bytes;
            sorted[i].index = (uint32_t)i;
        }
    }
    if (!sorted) /* any order is right, this one is only faster */
        return;
    qsort(sorted, g->n_tensors, sizeof *sorted, larger_first);
    for (size_t i = 0; i < g->n_tensors; i++)
        order[i] = sorted[i].index;
    free(sorted);
}

struct sum_job {
    const struct geist_gguf *g;
    const uint32_t *order; /* [n_tensors] */
    uint8_t *sums;         /* [n_tensors][32] */
    _Atomic size_t next;
};

static void sum_tensors(void *context, size_t begin, size_t end)
{
    struct sum_job *job = context;
    size_t i;

    (void)begin;
    (void)end; /* a range is a thread; the work is taken from `next` */
    while ((i = atomic_fetch_add(&job->next, 1)) < job->g->n_tensors)
        gguf_tensor_sum(job->g, job->order[i], job->sums + 32 * (size_t)job->order[i]);
}

enum geist_status geist_gguf_fingerprint(struct geist_gguf *g, uint8_t out[32])
{
    struct sum_job job = {.g = g};
    uint32_t *order;

    if (!g || !out)
        return GEIST_E_ARGUMENT;
    memset(out, 0, 32);
    order = calloc(g->n_tensors + 1, sizeof *order);
    job.sums = calloc(g->n_tensors + 1, 32);
    if (!order || !job.sums) {
        free(order);
        free(job.sums);
        return gst_fail(g->engine->error, GEIST_E_MEMORY, "out of memory for %zu checksums", g->n_tensors);
    }
    gguf_tensors_by_size(g, order);
    job.order = order;
    gst_threads_run(g->engine->threads, gst_threads_count(g->engine->threads), 1, sum_tensors, &job);
    gguf_fingerprint_of_sums(g, job.sums, out);
    free(order);
    free(job.sums);
    return GEIST_OK;
}
