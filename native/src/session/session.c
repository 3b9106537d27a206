/* session.c - life of a session, and taking tokens in. Images are in image.c. */
#include "forward/forward.h"
#include "session/session.h"

#include <stdlib.h>

/* ---- life ---- */

enum geist_status geist_session_create(struct geist_model *m, const struct geist_session_options *options, struct geist_session **out)
{
    struct geist_session_options defaults = {GEIST_KV_F16, 0};
    struct geist_session *s;

    if (!out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    if (!m)
        return GEIST_E_ARGUMENT;
    if (!options)
        options = &defaults;
    if (!m->bound)
        return gst_fail(m->engine->error, GEIST_E_STATE, "the model has no packed weights yet");
    if (options->kv_type != GEIST_KV_F16 && options->kv_type != GEIST_KV_F32)
        return gst_fail(m->engine->error, GEIST_E_ARGUMENT, "KV type %d is neither f16 nor f32", (int)options->kv_type);
    if (options->n_ctx > m->config.n_ctx_train)
        return gst_fail(m->engine->error, GEIST_E_ARGUMENT, "n_ctx is %u, but the model was trained for %u positions", options->n_ctx,
                        m->config.n_ctx_train);

    s = gst_alloc(sizeof *s);
    if (!s)
        return gst_fail(m->engine->error, GEIST_E_MEMORY, "no memory for a session");
    s->model = m;
    s->kv_type = options->kv_type;
    s->n_ctx = options->n_ctx ? options->n_ctx : m->config.n_ctx_train;
    state_layout_of(m, s->kv_type, &s->layout);
    sampler_reset(&s->sampler);
    *out = s;
    return GEIST_OK;
}

void geist_session_destroy(struct geist_session *s)
{
    if (!s)
        return;
    session_clear(s);
    gst_free(s->blocks);
    gst_free(s->tokens);
    gst_free(s->recurrent_own);
    gst_free(s->logits_own);
    gst_free(s);
}

void session_clear(struct geist_session *s)
{
    for (size_t i = 0; i < s->n_blocks; i++)
        kv_block_release(s->blocks[i]);
    s->n_blocks = 0;
    s->n_tokens = 0;
    s->recurrent = NULL;
    s->logits = NULL;
    s->parent_id = 0;
    s->n_kept = 0;
    s->broken = false;
}

void geist_session_reset(struct geist_session *s)
{
    if (!s)
        return;
    session_clear(s);
    sampler_reset(&s->sampler);
    s->error[0] = 0;
}

const char *geist_session_error(const struct geist_session *s)
{
    return s ? s->error : "no session";
}

size_t geist_session_position(const struct geist_session *s)
{
    return s ? s->n_tokens : 0;
}

const int32_t *geist_session_tokens(const struct geist_session *s)
{
    return s ? s->tokens : NULL;
}

/* ---- room ---- */

/* A table of `size` byte elements of at least `n`; doubles, so that decoding does not copy it every time. */
static bool grow(void **table, size_t *capacity, size_t n, size_t size)
{
    size_t wanted = *capacity ? *capacity : 64;
    void *bigger;

    if (n <= *capacity)
        return true;
    while (wanted < n)
        wanted *= 2;
    bigger = gst_alloc(wanted * size);
    if (!bigger)
        return false;
    if (*table)
        memcpy(bigger, *table, *capacity * size);
    gst_free(*table);
    *table = bigger;
    *capacity = wanted;
    return true;
}

bool session_reserve_tables(struct geist_session *s, size_t total)
{
    size_t n_blocks = (total + GEIST_KV_BLOCK - 1) / GEIST_KV_BLOCK;
    void *tokens = s->tokens, *blocks = s->blocks;
    bool grown =
        grow(&tokens, &s->token_capacity, total, sizeof *s->tokens) && grow(&blocks, &s->block_capacity, n_blocks, sizeof *s->blocks);

    s->tokens = tokens;
    s->blocks = blocks;
    return grown;
}

enum geist_status session_reserve(struct geist_session *s, size_t n)
{
    size_t total = s->n_tokens + n, n_blocks = (total + GEIST_KV_BLOCK - 1) / GEIST_KV_BLOCK;

    if (!session_reserve_tables(s, total))
        goto no_memory;
    while (s->n_blocks < n_blocks) {
        struct kv_block *b = kv_block_create(&s->layout);
        if (!b)
            goto no_memory;
        s->blocks[s->n_blocks++] = b;
    }
    if (!s->logits_own && !(s->logits_own = gst_alloc_raw(s->model->config.n_vocab * sizeof(float))))
        goto no_memory;
    if (!s->recurrent_own && !(s->recurrent_own = recurrent_create(s->model, &s->layout)))
        goto no_memory;
    if (!s->recurrent) { /* position 0 */
        memset(s->recurrent_own, 0, s->layout.recurrent_bytes);
        s->recurrent = s->recurrent_own;
    }
    return GEIST_OK;

no_memory:
    return gst_fail(s->error, GEIST_E_MEMORY, "no memory for %zu positions", total);
}

/* ---- taking tokens in ---- */

static enum geist_status check_ids(struct geist_session *s, const int32_t *ids, size_t n)
{
    uint32_t n_vocab = s->model->config.n_vocab;

    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= n_vocab)
            return gst_fail(s->error, GEIST_E_TOKEN, "token %zu is %d, outside the vocabulary of %u", i, (int)ids[i], n_vocab);
    return GEIST_OK;
}

static enum geist_status check_tokens(struct geist_session *s, const int32_t *tokens, size_t n)
{
    if (!tokens || n == 0)
        return gst_fail(s->error, GEIST_E_ARGUMENT, "no tokens");
    if (s->broken)
        return gst_fail(s->error, GEIST_E_STATE, "a logit was not finite before; reset, restore or attach the session first");
    if (n > s->n_ctx - s->n_tokens)
        return gst_fail(s->error, GEIST_E_TOO_LONG, "%zu tokens behind %zu are more than the limit of %zu positions", n, s->n_tokens,
                        s->n_ctx);
    return check_ids(s, tokens, n);
}

/* Checked tokens, in passes. `pending`: leave the last row's logits. The output's rows and hidden states are of all n tokens. */
static enum geist_status take_in(struct geist_session *s, const int32_t *tokens, size_t n, bool pending,
                                 const struct forward_output *output)
{
    enum geist_status status = session_reserve(s, n);

    for (size_t done = 0; done < n && status == GEIST_OK;) {
        size_t part = n - done < FORWARD_MAX_ROWS ? n - done : FORWARD_MAX_ROWS;
        struct forward_output rest = output ? *output : (struct forward_output){0};

        if (rest.rows)
            rest.rows += done;
        status = forward_pass(s, tokens + done, part, pending && done + part == n, &rest);
        if (status == GEIST_OK) {
            memcpy(s->tokens + s->n_tokens, tokens + done, part * sizeof *tokens);
            s->n_tokens += part;
        }
        if (status != GEIST_OK && done > 0)
            s->broken = true; /* out of memory half way: neither the old state nor the new one */
        done += part;
    }
    return status;
}

enum geist_status geist_session_prefill(struct geist_session *s, const int32_t *tokens, size_t n)
{
    enum geist_status status;

    if (!s)
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    status = check_tokens(s, tokens, n);
    return status == GEIST_OK ? take_in(s, tokens, n, true, NULL) : status;
}

enum geist_status geist_session_decode(struct geist_session *s, int32_t token)
{
    return geist_session_prefill(s, &token, 1);
}

/* ---- reading the pending logits ---- */

static enum geist_status check_pending(struct geist_session *s)
{
    if (s->broken)
        return gst_fail(s->error, GEIST_E_STATE, "a logit was not finite before; reset, restore or attach the session first");
    if (!s->logits)
        return gst_fail(s->error, GEIST_E_STATE, "no logits before the first token");
    return GEIST_OK;
}

enum geist_status geist_session_logits(struct geist_session *s, const float **out)
{
    enum geist_status status;

    if (!s || !out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    status = check_pending(s);
    if (status == GEIST_OK)
        *out = s->logits;
    return status;
}

enum geist_status geist_session_logprobs(struct geist_session *s, const int32_t *ids, size_t n, float *out)
{
    enum geist_status status;
    uint64_t fpenv;

    if (!s || !ids || !out)
        return GEIST_E_ARGUMENT;
    status = check_pending(s);
    if (status == GEIST_OK)
        status = check_ids(s, ids, n);
    if (status != GEIST_OK)
        return status;
    fpenv = gst_fpenv_enter();
    logprob_at(s->model->engine->kernels, s->logits, s->model->config.n_vocab, ids, n, out);
    gst_fpenv_leave(fpenv);
    return GEIST_OK;
}

enum geist_status geist_session_top(struct geist_session *s, size_t k, int32_t *ids, float *logprobs)
{
    enum geist_status status;
    size_t n_vocab, n = 0;
    uint64_t fpenv;

    if (!s || !ids || !logprobs)
        return GEIST_E_ARGUMENT;
    n_vocab = s->model->config.n_vocab;
    if (k == 0 || k > 1024 || k > n_vocab)
        return gst_fail(s->error, GEIST_E_ARGUMENT, "the %zu likeliest tokens were asked for; 1 to 1024 of %zu can be", k, n_vocab);
    status = check_pending(s);
    if (status != GEIST_OK)
        return status;
    fpenv = gst_fpenv_enter();
    /* insertion into a sorted list: most ids fail the first comparison; equal logits keep the lower id in front */
    for (size_t i = 0; i < n_vocab; i++) {
        size_t at = n;
        if (n == k && !(s->logits[i] > s->logits[ids[n - 1]]))
            continue;
        while (at > 0 && s->logits[i] > s->logits[ids[at - 1]])
            at--;
        if (n < k)
            n++;
        memmove(ids + at + 1, ids + at, (n - 1 - at) * sizeof *ids);
        ids[at] = (int32_t)i;
    }
    gst_fpenv_leave(fpenv);
    return geist_session_logprobs(s, ids, k, logprobs);
}

/* ---- scoring ---- */

struct score_sink {
    const struct geist_session *s;
    const int32_t *tokens;
    float *out;
};

static void score_row(void *context, size_t row, const float *logits)
{
    const struct score_sink *sink = context;

    logprob_at(sink->s->model->engine->kernels, logits, sink->s->model->config.n_vocab, sink->tokens + row + 1, 1, sink->out + row + 1);
}

enum geist_status geist_session_score(struct geist_session *s, const int32_t *tokens, size_t n, float *out)
{
    struct geist_session *branch = NULL;
    enum geist_status status;

    if (!s || !out)
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    status = check_tokens(s, tokens, n);
    if (status == GEIST_OK)
        status = geist_session_logprobs(s, tokens, 1, out);
    if (status != GEIST_OK || n == 1)
        return status;

    status = session_branch(s, &branch);
    if (status != GEIST_OK)
        return gst_fail(s->error, status, "%s", s->model->engine->error);
    for (size_t done = 0; done + 1 < n && status == GEIST_OK;) {
        size_t part = n - 1 - done < FORWARD_MAX_ROWS ? n - 1 - done : FORWARD_MAX_ROWS;
        struct score_sink sink = {s, tokens + done, out + done};
        uint8_t rows[FORWARD_MAX_ROWS];

        memset(rows, 1, sizeof rows);
        status = take_in(branch, tokens + done, part, false, &(struct forward_output){.rows = rows, .sink = score_row, .context = &sink});
        done += part;
    }
    if (status != GEIST_OK)
        memcpy(s->error, branch->error, sizeof s->error);
    geist_session_destroy(branch);
    return status;
}

/* ---- sampling ---- */

enum geist_status geist_session_set_sampler(struct geist_session *s, const struct geist_sampler_params *params, uint64_t seed,
                                            uint64_t stream)
{
    enum geist_status status;

    if (!s || !params)
        return GEIST_E_ARGUMENT;
    status = sampler_check(params, s->error);
    if (status == GEIST_OK)
        s->sampler = (struct sampler){*params, seed, stream};
    return status;
}

enum geist_status geist_session_sample(struct geist_session *s, int32_t *out)
{
    enum geist_status status;
    uint64_t fpenv;
    void *work;

    if (!s || !out)
        return GEIST_E_ARGUMENT;
    *out = -1;
    status = check_pending(s);
    if (status != GEIST_OK)
        return status;
    work = gst_engine_scratch(s->model->engine, sampler_work_bytes(s->model->config.n_vocab));
    if (!work)
        return gst_fail(s->error, GEIST_E_MEMORY, "no memory to sample from %u logits", s->model->config.n_vocab);
    fpenv = gst_fpenv_enter();
    *out = sampler_draw(&s->sampler, s->logits, s->model->config.n_vocab, s->tokens, s->n_tokens, work);
    gst_fpenv_leave(fpenv);
    return GEIST_OK;
}

/* ---- forks ---- */

enum geist_status session_branch(const struct geist_session *src, struct geist_session **out)
{
    struct geist_session *s = NULL;
    size_t n_whole = src->n_tokens / GEIST_KV_BLOCK, n_rows = src->n_tokens % GEIST_KV_BLOCK;
    struct geist_session_options options = {src->kv_type, (uint32_t)src->n_ctx};
    enum geist_status status = geist_session_create(src->model, &options, &s);

    *out = NULL;
    if (status != GEIST_OK)
        return status;
    if (!session_reserve_tables(s, src->n_tokens))
        goto no_memory;
    for (; s->n_blocks < n_whole; s->n_blocks++) {
        s->blocks[s->n_blocks] = src->blocks[s->n_blocks];
        s->blocks[s->n_blocks]->n_refs++;
    }
    if (n_rows) {
        struct kv_block *b = kv_block_create(&s->layout);
        if (!b)
            goto no_memory;
        kv_rows_copy(s->model, &s->layout, src->blocks[n_whole]->data, n_rows, b->data);
        s->blocks[s->n_blocks++] = b;
    }
    if (src->n_tokens) {
        memcpy(s->tokens, src->tokens, src->n_tokens * sizeof *s->tokens);
        s->recurrent = src->recurrent;
        s->logits = src->logits;
    }
    s->n_tokens = src->n_tokens;
    s->sampler = src->sampler;
    s->parent_id = src->parent_id;
    s->n_kept = src->n_kept;
    s->broken = src->broken;
    *out = s;
    return GEIST_OK;

no_memory:
    geist_session_destroy(s);
    return gst_fail(src->model->engine->error, GEIST_E_MEMORY, "no memory to branch off at position %zu", src->n_tokens);
}

/* What lies in an image outlives parent and fork; what is the parent's own is copied. */
static enum geist_status own_copies(struct geist_session *s, const struct geist_session *src)
{
    if (src->n_tokens && src->recurrent == src->recurrent_own) {
        s->recurrent_own = recurrent_create(s->model, &s->layout);
        if (!s->recurrent_own)
            return gst_fail(src->model->engine->error, GEIST_E_MEMORY, "no memory for a fork's recurrent state");
        memcpy(s->recurrent_own, src->recurrent, s->layout.recurrent_bytes);
        s->recurrent = s->recurrent_own;
    }
    if (src->logits && src->logits == src->logits_own) {
        s->logits_own = gst_alloc_raw(s->model->config.n_vocab * sizeof(float));
        if (!s->logits_own)
            return gst_fail(src->model->engine->error, GEIST_E_MEMORY, "no memory for a fork's logits");
        memcpy(s->logits_own, src->logits, s->model->config.n_vocab * sizeof(float));
        s->logits = s->logits_own;
    }
    return GEIST_OK;
}

enum geist_status geist_session_fork(const struct geist_session *src, struct geist_session **out)
{
    struct geist_session *s;
    enum geist_status status;

    if (!out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    if (!src)
        return GEIST_E_ARGUMENT;
    status = session_branch(src, &s);
    if (status != GEIST_OK)
        return status;
    status = own_copies(s, src);
    if (status != GEIST_OK) {
        geist_session_destroy(s);
        return status;
    }
    *out = s;
    return GEIST_OK;
}

/* ---- passes over spans ---- */

struct span_sink {
    float *next; /* the caller's row to fill */
    size_t n_vocab;
};

static void span_row(void *context, size_t row, const float *logits)
{
    struct span_sink *sink = context;

    (void)row;
    memcpy(sink->next, logits, sink->n_vocab * sizeof(float));
    sink->next += sink->n_vocab;
}

enum geist_status geist_batch_forward(struct geist_model *m, const struct geist_span *spans, size_t n_spans)
{
    struct geist_session *branch = NULL, *s;
    struct forward_output output = {0};
    struct span_sink sink;
    enum geist_status status;

    if (!m || !spans || n_spans == 0 || !spans->session || spans->session->model != m || (spans->rows && !spans->logits))
        return GEIST_E_ARGUMENT;
    s = spans->session;
    s->error[0] = 0;
    if (n_spans > 1)
        return gst_fail(s->error, GEIST_E_UNSUPPORTED, "a pass over %zu spans; this version takes one", n_spans);
    if (spans->parents)
        return gst_fail(s->error, GEIST_E_UNSUPPORTED, "a span that is a tree; this version takes chains");
    status = check_tokens(s, spans->tokens, spans->n_tokens);
    if (status != GEIST_OK)
        return status;

    sink = (struct span_sink){spans->logits, m->config.n_vocab};
    if (spans->rows)
        output = (struct forward_output){.rows = spans->rows, .sink = span_row, .context = &sink};
    if (!spans->discard)
        return take_in(s, spans->tokens, spans->n_tokens, true, &output);

    status = session_branch(s, &branch);
    if (status != GEIST_OK)
        return gst_fail(s->error, status, "%s", m->engine->error);
    status = take_in(branch, spans->tokens, spans->n_tokens, false, &output);
    if (status != GEIST_OK)
        memcpy(s->error, branch->error, sizeof s->error);
    geist_session_destroy(branch);
    return status;
}
