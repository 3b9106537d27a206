/* packed.c - the packed weights: one block of memory that every tier and every process reads.
 *
 *     0                4096
 *     │ header, padded │ taps of a layer │ matrix │ matrix │ ... │     each part at a multiple of 64, the whole one of 4096
 *
 * Offsets follow from the model alone (model_packed_plan), so the header holds no table: a hash over metadata and tensor table says that
 * both sides mean the same model. The last 8 bytes of the header page are a checksum over the rest of it, in every layout; that of the
 * parts is in the header, and is compared only when asked for, since it reads everything. */
#include "gguf/cursor.h"
#include "gguf/fingerprint.h"
#include "model/model.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#define PART_ALIGNMENT 64
#define HEADER_SUM_AT (GEIST_IMAGE_PAGE - 8)
#define BYTE_ORDER_MARK 0x01020304u
#define TASK_TILES 64 /* tiles of a packing task: some hundred kilobytes */

static const uint8_t magic[8] = {'G', 'E', 'I', 'S', 'T', 'P', 'K', '\n'};

struct header {
    uint8_t magic[8];
    uint32_t byte_order;
    uint32_t layout;   /* GEIST_PACKED_LAYOUT */
    uint32_t numerics; /* GEIST_NUMERICS */
    uint32_t zero;
    uint64_t n_bytes; /* of everything */
    uint8_t table_sum[32];
    uint8_t fingerprint[32];
    uint64_t parts_sum; /* checksum of all that follows the header page */
};
static_assert(sizeof(struct header) == 104, "the header has no padding");

/* Everything that is packed, in order: calls visit(context, layer or NULL, matrix or NULL). */
typedef enum geist_status visit_function(void *context, struct model_layer *layer, struct model_matrix *matrix);

static enum geist_status visit_parts(struct geist_model *m, visit_function *visit, void *context)
{
    enum geist_status status;

    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        struct model_layer *l = &m->layers[i];
        struct model_matrix *matrices[] = {&l->attn_q,    &l->attn_k,   &l->attn_v,  &l->attn_output, &l->attn_qkv, &l->attn_gate,
                                           &l->ssm_alpha, &l->ssm_beta, &l->ssm_out, &l->ffn_gate,    &l->ffn_up,   &l->ffn_down};

        if (l->recurrent) {
            status = visit(context, l, NULL);
            if (status)
                return status;
        }
        for (size_t k = 0; k < sizeof matrices / sizeof *matrices; k++)
            if (matrices[k]->tensor && matrices[k]->type->pack != GST_PACK_NONE) {
                status = visit(context, NULL, matrices[k]);
                if (status)
                    return status;
            }
    }
    return m->output.type->pack != GST_PACK_NONE ? visit(context, NULL, &m->output) : GEIST_OK;
}

static enum geist_status plan_part(void *context, struct model_layer *layer, struct model_matrix *matrix)
{
    struct geist_model *m = context;
    size_t bytes, end;

    if (layer)
        bytes = sizeof(float) * m->config.conv_width * m->config.n_channels;
    else if (!quant_packed_bytes(matrix->type->pack, matrix->n_rows, matrix->n_cols, &matrix->packed.tile_bytes, &bytes))
        bytes = SIZE_MAX;
    if (!gst_add_size(m->packed_bytes, bytes, &end) || end > SIZE_MAX - GEIST_IMAGE_PAGE)
        return gst_fail(m->engine->error, GEIST_E_UNSUPPORTED, "the packed weights do not fit the address space");
    if (layer)
        layer->conv_offset = m->packed_bytes;
    else
        matrix->packed_offset = m->packed_bytes;
    m->packed_bytes = gst_round_up(end, PART_ALIGNMENT);
    return GEIST_OK;
}

enum geist_status model_packed_plan(struct geist_model *m)
{
    enum geist_status status;

    m->packed_bytes = GEIST_IMAGE_PAGE;
    status = visit_parts(m, plan_part, m);
    m->packed_bytes = gst_round_up(m->packed_bytes, GEIST_IMAGE_PAGE);
    return status;
}

size_t geist_model_packed_size(const struct geist_model *m)
{
    return m ? m->packed_bytes : 0;
}

/* ---- packing ---- */

/* A piece of work for one thread: a tensor's sum, some tiles of a matrix, or a layer's taps. */
struct task {
    const struct model_matrix *matrix;
    size_t tile_begin, tile_end;
    const struct model_layer *layer;
    uint32_t tensor; /* where the others are not set */
};

struct pack_job {
    struct geist_model *m;
    uint8_t *buf;
    struct task *tasks; /* owns [n_tasks]; NULL while they are counted */
    size_t n_tasks;
    uint8_t *sums; /* owns [n_tensors][32] */
    _Atomic size_t next;
};

static void add_task(struct pack_job *job, struct task task)
{
    if (job->tasks)
        job->tasks[job->n_tasks] = task;
    job->n_tasks++;
}

static enum geist_status add_part(void *context, struct model_layer *layer, struct model_matrix *matrix)
{
    struct pack_job *job = context;

    if (layer) {
        add_task(job, (struct task){.layer = layer});
    } else {
        size_t n_tiles = (matrix->n_rows + GST_TILE_ROWS - 1) / GST_TILE_ROWS;

        for (size_t t = 0; t < n_tiles; t += TASK_TILES)
            add_task(job,
                     (struct task){.matrix = matrix, .tile_begin = t, .tile_end = t + TASK_TILES < n_tiles ? t + TASK_TILES : n_tiles});
    }
    return GEIST_OK;
}

/* Sums first, largest tensor first: they cannot be split, so that nothing long is left for the end. */
static void add_tasks(struct pack_job *job, const uint32_t *order)
{
    job->n_tasks = 0;
    for (size_t i = 0; i < job->m->gguf->n_tensors; i++)
        add_task(job, (struct task){.tensor = order[i]});
    (void)visit_parts(job->m, add_part, job); /* add_part does not fail */
}

/* [n_channels, width] of the file to [width, n_channels], and zeros up to the next part. */
static void transpose_taps(const struct model_config *c, const float *from, uint8_t *to)
{
    float *taps = (float *)(void *)to;
    size_t bytes = sizeof *taps * c->conv_width * c->n_channels;

    for (size_t k = 0; k < c->conv_width; k++)
        for (size_t ch = 0; ch < c->n_channels; ch++)
            taps[k * c->n_channels + ch] = from[ch * c->conv_width + k];
    memset(to + bytes, 0, gst_round_up(bytes, PART_ALIGNMENT) - bytes);
}

static void run_tasks(void *context, size_t begin, size_t end)
{
    struct pack_job *job = context;
    size_t i;

    (void)begin;
    (void)end; /* a range is a thread; the tasks are taken from `next` */
    while ((i = atomic_fetch_add(&job->next, 1)) < job->n_tasks) {
        const struct task *t = &job->tasks[i];

        if (t->matrix)
            quant_pack(t->matrix->type->pack, t->matrix->tensor->data, t->matrix->n_rows, t->matrix->n_cols, t->tile_begin, t->tile_end,
                       job->buf + t->matrix->packed_offset);
        else if (t->layer)
            transpose_taps(&job->m->config, t->layer->conv_file, job->buf + t->layer->conv_offset);
        else
            gguf_tensor_sum(job->m->gguf, t->tensor, job->sums + 32 * (size_t)t->tensor);
    }
}

static void write_header(const struct geist_model *m, const uint8_t *sums, uint8_t *buf)
{
    struct header h = {
        .byte_order = BYTE_ORDER_MARK, .layout = GEIST_PACKED_LAYOUT, .numerics = GEIST_NUMERICS, .n_bytes = m->packed_bytes};
    uint64_t sum;

    memcpy(h.magic, magic, sizeof magic);
    gguf_table_sum(m->gguf, h.table_sum);
    gguf_fingerprint_of_sums(m->gguf, sums, h.fingerprint);
    h.parts_sum = gst_checksum(buf + GEIST_IMAGE_PAGE, m->packed_bytes - GEIST_IMAGE_PAGE);
    memset(buf, 0, GEIST_IMAGE_PAGE);
    memcpy(buf, &h, sizeof h);
    sum = gst_checksum(buf, HEADER_SUM_AT);
    memcpy(buf + HEADER_SUM_AT, &sum, 8);
}

enum geist_status geist_model_pack(struct geist_model *m, void *buf, size_t n)
{
    struct pack_job job = {.m = m, .buf = buf};
    uint32_t *order = NULL;
    enum geist_status status = GEIST_OK;

    if (!m)
        return GEIST_E_ARGUMENT;
    if (!buf || (uintptr_t)buf % GEIST_IMAGE_PAGE || n != m->packed_bytes)
        return gst_fail(m->engine->error, GEIST_E_ARGUMENT, "packed weights need %zu bytes at a multiple of %d", m->packed_bytes,
                        GEIST_IMAGE_PAGE);

    order = calloc(m->gguf->n_tensors + 1, sizeof *order);
    job.sums = calloc(m->gguf->n_tensors + 1, 32);
    if (!order || !job.sums)
        goto no_memory;
    gguf_tensors_by_size(m->gguf, order);
    add_tasks(&job, order); /* counts */
    job.tasks = calloc(job.n_tasks + 1, sizeof *job.tasks);
    if (!job.tasks)
        goto no_memory;
    add_tasks(&job, order);

    memset(job.buf + n - GEIST_IMAGE_PAGE, 0, GEIST_IMAGE_PAGE); /* parts end somewhere in the last page */
    gst_threads_run(m->engine->threads, gst_threads_count(m->engine->threads), 1, run_tasks, &job);
    write_header(m, job.sums, buf);
    goto done;

no_memory:
    status = gst_fail(m->engine->error, GEIST_E_MEMORY, "out of memory for packing");
done:
    free(job.tasks);
    free(job.sums);
    free(order);
    return status;
}

/* ---- binding ---- */

static enum geist_status bind_part(void *context, struct model_layer *layer, struct model_matrix *matrix)
{
    const uint8_t *packed = context;

    if (layer)
        layer->conv_taps = (const float *)(const void *)(packed + layer->conv_offset);
    else
        matrix->packed.tiles = packed + matrix->packed_offset;
    return GEIST_OK;
}

static enum geist_status check_header(const struct geist_model *m, const uint8_t *packed, size_t n, struct header *h)
{
    char *error = m->engine->error;
    uint8_t table_sum[32];
    uint64_t sum;

    if (n < GEIST_IMAGE_PAGE)
        return gst_fail(error, GEIST_E_IMAGE, "packed weights: cut at byte %zu, inside the header of %d", n, GEIST_IMAGE_PAGE);
    memcpy(h, packed, sizeof *h);
    memcpy(&sum, packed + HEADER_SUM_AT, 8);
    if (memcmp(h->magic, magic, sizeof magic))
        return gst_fail(error, GEIST_E_IMAGE, "packed weights: byte 0 does not begin with their mark");
    if (gst_checksum(packed, HEADER_SUM_AT) != sum)
        return gst_fail(error, GEIST_E_IMAGE, "packed weights: the header's checksum does not agree");
    if (h->byte_order != BYTE_ORDER_MARK)
        return gst_fail(error, GEIST_E_MISMATCH, "packed weights: of another byte order");
    if (h->layout != GEIST_PACKED_LAYOUT || h->numerics != GEIST_NUMERICS)
        return gst_fail(error, GEIST_E_MISMATCH, "packed weights: layout %" PRIu32 ", numerics %" PRIu32 "; this engine has %d and %d",
                        h->layout, h->numerics, GEIST_PACKED_LAYOUT, GEIST_NUMERICS);
    gguf_table_sum(m->gguf, table_sum);
    if (memcmp(h->table_sum, table_sum, 32))
        return gst_fail(error, GEIST_E_MISMATCH, "packed weights: of another model (metadata or tensor table differ)");
    if (h->n_bytes != m->packed_bytes)
        return gst_fail(error, GEIST_E_MISMATCH, "packed weights: made for %" PRIu64 " bytes, this model has %zu", h->n_bytes,
                        m->packed_bytes);
    if (n != m->packed_bytes)
        return gst_fail(error, GEIST_E_IMAGE, "packed weights: %zu bytes, must be %zu", n, m->packed_bytes);
    return GEIST_OK;
}

enum geist_status geist_model_bind(struct geist_model *m, const void *packed, size_t n)
{
    struct header h;
    enum geist_status status;

    if (!m)
        return GEIST_E_ARGUMENT;
    if (m->bound)
        return gst_fail(m->engine->error, GEIST_E_STATE, "the model has packed weights already");
    if (!packed || (uintptr_t)packed % GEIST_IMAGE_PAGE)
        return gst_fail(m->engine->error, GEIST_E_ARGUMENT, "packed weights must be at a multiple of %d", GEIST_IMAGE_PAGE);
    status = check_header(m, packed, n, &h);
    if (status)
        return status;
    (void)visit_parts(m, bind_part, (void *)(uintptr_t)packed);
    if (m->tied)
        m->token_embd.packed = m->output.packed;
    memcpy(m->fingerprint, h.fingerprint, 32);
    m->packed = packed;
    m->bound = true;
    return GEIST_OK;
}

enum geist_status geist_model_verify(const struct geist_model *m)
{
    struct header h;

    if (!m)
        return GEIST_E_ARGUMENT;
    if (!m->bound)
        return gst_fail(m->engine->error, GEIST_E_STATE, "no packed weights are bound");
    memcpy(&h, m->packed, sizeof h);
    if (gst_checksum(m->packed + GEIST_IMAGE_PAGE, m->packed_bytes - GEIST_IMAGE_PAGE) != h.parts_sum)
        return gst_fail(m->engine->error, GEIST_E_IMAGE, "packed weights: their checksum does not agree");
    return GEIST_OK;
}

enum geist_status geist_model_fingerprint(const struct geist_model *m, uint8_t out[32])
{
    if (!m || !out)
        return GEIST_E_ARGUMENT;
    memset(out, 0, 32);
    if (!m->bound)
        return gst_fail(m->engine->error, GEIST_E_STATE, "no packed weights are bound");
    memcpy(out, m->fingerprint, 32);
    return GEIST_OK;
}
