/* image.c - a session as bytes: snapshot, restore, attach. The layout is drawn in image.h. */
#include "session/image.h"

/* n_tokens of an image is at most this; keeps all sizes far from overflow. */
#define IMAGE_MAX_TOKENS MODEL_MAX_CTX

static const char *const region_names[REGION_COUNT] = {"tokens", "logits", "recurrent", "tail", "block sums", "blocks"};

void image_plan(struct image_header *h)
{
    uint64_t n_whole = h->n_tokens / GEIST_KV_BLOCK, n_rows = h->n_tokens % GEIST_KV_BLOCK, offset = GEIST_IMAGE_PAGE;
    const uint64_t bytes[REGION_COUNT] = {
        [REGION_TOKENS] = h->n_tokens * sizeof(int32_t),  [REGION_LOGITS] = (uint64_t)h->n_vocab * sizeof(float),
        [REGION_RECURRENT] = h->recurrent_bytes,          [REGION_TAIL] = n_rows * h->kv_bytes_per_token,
        [REGION_BLOCK_SUMS] = n_whole * sizeof(uint64_t), [REGION_BLOCKS] = h->flat ? n_whole * h->kv_block_bytes : 0,
    };

    for (int i = 0; i < REGION_COUNT; i++) {
        struct image_region *r = &h->regions[i];
        memset(r->name, 0, sizeof r->name);
        memcpy(r->name, region_names[i], strlen(region_names[i]));
        r->offset = offset;
        r->bytes = bytes[i];
        offset += gst_round_up(bytes[i], GEIST_IMAGE_PAGE);
    }
    h->image_bytes = offset;
}

uint64_t image_header_checksum(const struct image_header *h)
{
    struct image_header copy = *h;

    copy.checksum = 0;
    copy.id = 0;
    return gst_checksum(&copy, sizeof copy);
}

/* What every image of this session's model and position has in common. */
static void describe(const struct geist_session *s, bool flat, struct image_header *h)
{
    const struct geist_model *m = s->model;

    memset(h, 0, sizeof *h);
    memcpy(h->magic, IMAGE_MAGIC, sizeof h->magic);
    h->byte_order = IMAGE_BYTE_ORDER;
    h->format = GEIST_IMAGE_FORMAT;
    h->numerics = GEIST_NUMERICS;
    h->header_bytes = GEIST_IMAGE_PAGE;
    memcpy(h->fingerprint, m->fingerprint, sizeof h->fingerprint);
    h->flat = flat;
    h->kv_type = (uint32_t)s->kv_type;
    h->n_vocab = m->config.n_vocab;
    h->n_layers = m->config.n_layers;
    h->n_attention = m->n_attention;
    h->n_recurrent = m->n_recurrent;
    h->recurrent_bytes = s->layout.recurrent_bytes;
    h->kv_bytes_per_token = s->layout.kv_bytes_per_token;
    h->kv_block_bytes = s->layout.kv_block_bytes;
    h->n_tokens = s->n_tokens;
    if (!flat) { /* a flat image has no parent: it is a function of model and tokens alone */
        h->parent_id = s->parent_id;
        h->n_kept = s->n_kept;
    }
    h->temperature = s->sampler.params.temperature;
    h->top_p = s->sampler.params.top_p;
    h->min_p = s->sampler.params.min_p;
    h->repeat_penalty = s->sampler.params.repeat_penalty;
    h->top_k = s->sampler.params.top_k;
    h->repeat_last_n = s->sampler.params.repeat_last_n;
    h->seed = s->sampler.seed;
    h->stream = s->sampler.stream;
    image_plan(h);
}

void geist_model_image_geometry(const struct geist_model *m, enum geist_kv_type kv_type, struct geist_image_geometry *out)
{
    struct state_layout l;

    state_layout_of(m, kv_type, &l);
    *out = (struct geist_image_geometry){GEIST_IMAGE_PAGE, m->config.n_vocab, l.recurrent_bytes, l.kv_bytes_per_token, l.kv_block_bytes};
}

/* ---- writing ---- */

static size_t snapshot_size(const struct geist_session *s, bool flat)
{
    struct image_header h;

    if (!s)
        return 0;
    describe(s, flat, &h);
    return h.image_bytes;
}

size_t geist_session_snapshot_size(const struct geist_session *s)
{
    return snapshot_size(s, true);
}

size_t geist_session_snapshot_thin_size(const struct geist_session *s)
{
    return snapshot_size(s, false);
}

/* Copies a region's live bytes (zeros where `from` is NULL) and clears its padding. */
static void put(uint8_t *buf, struct image_region *r, const void *from)
{
    uint8_t *to = buf + r->offset;

    if (from) {
        r->checksum = gst_checksum_copy(to, from, r->bytes);
    } else {
        memset(to, 0, r->bytes);
        r->checksum = gst_checksum(to, r->bytes);
    }
    memset(to + r->bytes, 0, gst_round_up(r->bytes, GEIST_IMAGE_PAGE) - r->bytes);
}

static enum geist_status snapshot(struct geist_session *s, bool flat, void *buf, size_t n)
{
    struct image_header h;
    size_t n_whole, n_rows;
    uint8_t *out = buf;
    uint64_t *sums;

    if (!s || !buf)
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    if (s->broken)
        return gst_fail(s->error, GEIST_E_STATE, "a logit was not finite before; there is nothing worth keeping");
    describe(s, flat, &h);
    if (n < h.image_bytes)
        return gst_fail(s->error, GEIST_E_BUFFER, "the image has %llu bytes, the buffer %zu", (unsigned long long)h.image_bytes, n);
    n_whole = s->n_tokens / GEIST_KV_BLOCK;
    n_rows = s->n_tokens % GEIST_KV_BLOCK;

    put(out, &h.regions[REGION_TOKENS], s->tokens);
    put(out, &h.regions[REGION_LOGITS], s->logits);
    put(out, &h.regions[REGION_RECURRENT], s->recurrent);

    put(out, &h.regions[REGION_TAIL], NULL);
    if (n_rows)
        kv_tail_pack(s->model, &s->layout, s->blocks[n_whole]->data, n_rows, out + h.regions[REGION_TAIL].offset);
    h.regions[REGION_TAIL].checksum = gst_checksum(out + h.regions[REGION_TAIL].offset, h.regions[REGION_TAIL].bytes);

    put(out, &h.regions[REGION_BLOCK_SUMS], NULL);
    sums = (uint64_t *)(void *)(out + h.regions[REGION_BLOCK_SUMS].offset);
    for (size_t i = 0; i < n_whole; i++) {
        uint64_t sum;
        if (flat && !s->blocks[i]->summed) {
            s->blocks[i]->checksum = gst_checksum_copy(out + h.regions[REGION_BLOCKS].offset + i * s->layout.kv_block_bytes,
                                                       s->blocks[i]->data, s->layout.kv_block_bytes);
            s->blocks[i]->summed = true;
        } else if (flat) {
            memcpy(out + h.regions[REGION_BLOCKS].offset + i * s->layout.kv_block_bytes, s->blocks[i]->data, s->layout.kv_block_bytes);
        }
        sum = kv_block_checksum(&s->layout, s->blocks[i]);
        memcpy(&sums[i], &sum, sizeof sum);
    }
    h.regions[REGION_BLOCK_SUMS].checksum = gst_checksum(sums, h.regions[REGION_BLOCK_SUMS].bytes);
    h.regions[REGION_BLOCKS].checksum = flat ? h.regions[REGION_BLOCK_SUMS].checksum : 0;

    h.checksum = image_header_checksum(&h);
    h.id = h.checksum;
    memset(out, 0, GEIST_IMAGE_PAGE);
    memcpy(out, &h, sizeof h);
    return GEIST_OK;
}

enum geist_status geist_session_snapshot(struct geist_session *s, void *buf, size_t n)
{
    return snapshot(s, true, buf, n);
}

enum geist_status geist_session_snapshot_thin(struct geist_session *s, void *buf, size_t n)
{
    return snapshot(s, false, buf, n);
}

enum geist_status geist_session_snapshot_blocks(struct geist_session *s, size_t first_block, size_t n_blocks, void *buf, size_t n)
{
    size_t n_whole, bytes;

    if (!s || (!buf && n_blocks))
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    n_whole = s->n_tokens / GEIST_KV_BLOCK;
    if (s->broken)
        return gst_fail(s->error, GEIST_E_STATE, "a logit was not finite before; there is nothing worth keeping");
    if (first_block > n_whole || n_blocks > n_whole - first_block)
        return gst_fail(s->error, GEIST_E_ARGUMENT, "blocks %zu to %zu were asked for; %zu are whole", first_block, first_block + n_blocks,
                        n_whole);
    if (!gst_mul_size(n_blocks, s->layout.kv_block_bytes, &bytes) || n < bytes)
        return gst_fail(s->error, GEIST_E_BUFFER, "%zu blocks do not fit a buffer of %zu bytes", n_blocks, n);
    for (size_t i = 0; i < n_blocks; i++)
        memcpy((uint8_t *)buf + i * s->layout.kv_block_bytes, s->blocks[first_block + i]->data, s->layout.kv_block_bytes);
    return GEIST_OK;
}

/* ---- reading ---- */

/* Copies the header out of `image` and checks that it is one, that it is unharmed, and that `n` bytes hold what it says. */
static enum geist_status read_header(const void *image, size_t n, struct image_header *h, char *error)
{
    struct image_header plan;

    if (!image || n < GEIST_IMAGE_PAGE)
        return gst_fail(error, GEIST_E_IMAGE, "%zu bytes are too few for an image's header", image ? n : 0);
    memcpy(h, image, sizeof *h);
    if (memcmp(h->magic, IMAGE_MAGIC, sizeof h->magic) != 0)
        return gst_fail(error, GEIST_E_IMAGE, "no image begins here");
    if (h->byte_order == __builtin_bswap32(IMAGE_BYTE_ORDER))
        return gst_fail(error, GEIST_E_MISMATCH, "the image was made on a machine of the other byte order");
    if (h->byte_order != IMAGE_BYTE_ORDER)
        return gst_fail(error, GEIST_E_IMAGE, "the image's byte-order mark is damaged");
    if (h->format != GEIST_IMAGE_FORMAT)
        return gst_fail(error, GEIST_E_MISMATCH, "the image has format %u, this engine reads %d", h->format, GEIST_IMAGE_FORMAT);
    if (h->checksum != image_header_checksum(h) || h->id != h->checksum)
        return gst_fail(error, GEIST_E_IMAGE, "the image's header is damaged");
    if (h->numerics != GEIST_NUMERICS)
        return gst_fail(error, GEIST_E_MISMATCH, "the image was made with numerics version %u, this engine has %d", h->numerics,
                        GEIST_NUMERICS);

    /* From here on only a forged header can fail; its numbers are still not trusted. */
    if (h->header_bytes != GEIST_IMAGE_PAGE || h->flat > 1 || h->kv_type > GEIST_KV_F32 || h->n_tokens > IMAGE_MAX_TOKENS ||
        h->n_vocab > MODEL_MAX_VOCAB || h->recurrent_bytes > (uint64_t)1 << 40 || h->kv_bytes_per_token > (uint64_t)1 << 32 ||
        h->kv_block_bytes != gst_round_up(GEIST_KV_BLOCK * h->kv_bytes_per_token, GEIST_IMAGE_PAGE) || h->n_kept > h->n_tokens ||
        h->n_kept % GEIST_KV_BLOCK)
        return gst_fail(error, GEIST_E_IMAGE, "the image's header contradicts itself");
    plan = *h;
    image_plan(&plan);
    for (int i = 0; i < REGION_COUNT; i++)
        if (memcmp(plan.regions[i].name, h->regions[i].name, sizeof plan.regions[i].name) != 0 ||
            plan.regions[i].offset != h->regions[i].offset || plan.regions[i].bytes != h->regions[i].bytes)
            return gst_fail(error, GEIST_E_IMAGE, "region \"%s\" of the image is not where it belongs", region_names[i]);
    if (plan.image_bytes != h->image_bytes)
        return gst_fail(error, GEIST_E_IMAGE, "the image's size contradicts its regions");
    if (n < h->image_bytes)
        return gst_fail(error, GEIST_E_IMAGE, "the image has %llu bytes, only %zu are here", (unsigned long long)h->image_bytes, n);
    return GEIST_OK;
}

/* Does a sound image belong to this session? Sets nothing. */
static enum geist_status check_fits(struct geist_session *s, const void *image, const struct image_header *h)
{
    struct image_header own;
    const struct geist_sampler_params params = {h->temperature, h->top_k, h->top_p, h->min_p, h->repeat_penalty, h->repeat_last_n};

    describe(s, h->flat, &own);
    if (memcmp(own.fingerprint, h->fingerprint, sizeof own.fingerprint) != 0)
        return gst_fail(s->error, GEIST_E_MISMATCH, "the image is of another model");
    if (own.kv_type != h->kv_type)
        return gst_fail(s->error, GEIST_E_MISMATCH, "the image holds %s keys and values, the session %s ones",
                        h->kv_type == GEIST_KV_F32 ? "f32" : "f16", own.kv_type == GEIST_KV_F32 ? "f32" : "f16");
    if (own.n_vocab != h->n_vocab || own.n_layers != h->n_layers || own.n_attention != h->n_attention ||
        own.n_recurrent != h->n_recurrent || own.recurrent_bytes != h->recurrent_bytes || own.kv_bytes_per_token != h->kv_bytes_per_token ||
        own.kv_block_bytes != h->kv_block_bytes)
        return gst_fail(s->error, GEIST_E_MISMATCH, "the image's geometry is not this model's");
    if (h->n_tokens > s->n_ctx)
        return gst_fail(s->error, GEIST_E_TOO_LONG, "the image holds %llu tokens, the session at most %zu", (unsigned long long)h->n_tokens,
                        s->n_ctx);
    if (sampler_check(&params, s->error) != GEIST_OK)
        return GEIST_E_IMAGE;
    for (uint64_t i = 0; i < h->n_tokens; i++) {
        int32_t id;
        memcpy(&id, (const uint8_t *)image + h->regions[REGION_TOKENS].offset + i * sizeof id, sizeof id);
        if (id < 0 || (uint32_t)id >= h->n_vocab)
            return gst_fail(s->error, GEIST_E_IMAGE, "token %llu of the image is %d, outside the vocabulary of %u", (unsigned long long)i,
                            (int)id, h->n_vocab);
    }
    return GEIST_OK;
}

static void take_header(struct geist_session *s, const void *image, const struct image_header *h)
{
    if (h->n_tokens)
        memcpy(s->tokens, (const uint8_t *)image + h->regions[REGION_TOKENS].offset, h->regions[REGION_TOKENS].bytes);
    s->n_tokens = h->n_tokens;
    s->sampler.params = (struct geist_sampler_params){h->temperature, h->top_k, h->top_p, h->min_p, h->repeat_penalty, h->repeat_last_n};
    s->sampler.seed = h->seed;
    s->sampler.stream = h->stream;
    s->parent_id = h->id;
    s->n_kept = h->n_tokens / GEIST_KV_BLOCK * GEIST_KV_BLOCK;
    s->broken = false;
}

/* `fresh` has become what `s` shall be: exchanges everything but the words, so that nothing can fail half way. */
static void swap_state(struct geist_session *s, struct geist_session *fresh)
{
    struct geist_session old = *s;
    char error[GST_ERROR_BYTES];

    memcpy(error, s->error, sizeof error);
    *s = *fresh;
    *fresh = old;
    memcpy(s->error, error, sizeof error);
}

static enum geist_status damaged(struct geist_session *s, enum image_region_kind kind)
{
    return gst_fail(s->error, GEIST_E_IMAGE, "region \"%s\" of the image is damaged", region_names[kind]);
}

/* Copies a region and compares its checksum on the way. */
static bool get(const uint8_t *image, const struct image_header *h, enum image_region_kind kind, void *to)
{
    const struct image_region *r = &h->regions[kind];

    return gst_checksum_copy(to, image + r->offset, r->bytes) == r->checksum;
}

static enum geist_status restore_into(struct geist_session *s, const uint8_t *image, const struct image_header *h,
                                      struct geist_session *fresh)
{
    size_t n_whole = h->n_tokens / GEIST_KV_BLOCK, n_rows = h->n_tokens % GEIST_KV_BLOCK;
    const struct image_region *tail = &h->regions[REGION_TAIL], *sums = &h->regions[REGION_BLOCK_SUMS];
    enum geist_status status;

    fresh->recurrent_own = recurrent_create(s->model, &s->layout);
    if (h->n_tokens)
        fresh->recurrent = fresh->recurrent_own; /* about to be written whole: spares its zeroing */
    status = session_reserve(fresh, h->n_tokens);
    if (status != GEIST_OK)
        return gst_fail(s->error, status, "%s", fresh->error);
    if (!get(image, h, REGION_TOKENS, fresh->tokens))
        return damaged(s, REGION_TOKENS);
    if (!get(image, h, REGION_LOGITS, fresh->logits_own))
        return damaged(s, REGION_LOGITS);
    if (!get(image, h, REGION_RECURRENT, fresh->recurrent_own))
        return damaged(s, REGION_RECURRENT);
    if (gst_checksum(image + tail->offset, tail->bytes) != tail->checksum)
        return damaged(s, REGION_TAIL);
    if (gst_checksum(image + sums->offset, sums->bytes) != sums->checksum || h->regions[REGION_BLOCKS].checksum != sums->checksum)
        return damaged(s, REGION_BLOCK_SUMS);
    if (n_rows)
        kv_tail_unpack(s->model, &s->layout, image + tail->offset, n_rows, fresh->blocks[n_whole]->data);
    for (size_t i = 0; i < n_whole; i++) {
        struct kv_block *b = fresh->blocks[i];
        uint64_t sum;
        memcpy(&sum, image + sums->offset + i * sizeof sum, sizeof sum);
        b->checksum =
            gst_checksum_copy(b->data, image + h->regions[REGION_BLOCKS].offset + i * s->layout.kv_block_bytes, s->layout.kv_block_bytes);
        b->summed = true;
        if (b->checksum != sum)
            return gst_fail(s->error, GEIST_E_IMAGE, "block %zu of the image is damaged", i);
    }
    take_header(fresh, image, h);
    if (h->n_tokens)
        fresh->logits = fresh->logits_own;
    else
        fresh->recurrent = NULL;
    return GEIST_OK;
}

/* A session like `s`, at position 0. */
static enum geist_status create_like(struct geist_session *s, struct geist_session **out)
{
    struct geist_session_options options = {s->kv_type, (uint32_t)s->n_ctx};
    enum geist_status status = geist_session_create(s->model, &options, out);

    return status == GEIST_OK ? status : gst_fail(s->error, status, "%s", s->model->engine->error);
}

enum geist_status geist_session_restore(struct geist_session *s, const void *buf, size_t n)
{
    struct geist_session *fresh = NULL;
    struct image_header h;
    enum geist_status status;

    if (!s || !buf)
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    status = read_header(buf, n, &h, s->error);
    if (status == GEIST_OK && !h.flat)
        status = gst_fail(s->error, GEIST_E_ARGUMENT, "a thin image cannot be restored alone; attach it with its blocks");
    if (status == GEIST_OK)
        status = check_fits(s, buf, &h);
    if (status == GEIST_OK)
        status = create_like(s, &fresh);
    if (status == GEIST_OK)
        status = restore_into(s, buf, &h, fresh);
    if (status == GEIST_OK)
        swap_state(s, fresh);
    geist_session_destroy(fresh);
    return status;
}

/* Walks areas block by block. */
struct area_walk {
    const struct geist_bytes *kv;
    size_t n_kv, area, offset;
};

static const uint8_t *next_block(struct area_walk *w, size_t block_bytes)
{
    const uint8_t *block;

    while (w->area < w->n_kv && w->offset + block_bytes > w->kv[w->area].n) {
        w->area++;
        w->offset = 0;
    }
    if (w->area == w->n_kv)
        return NULL;
    block = (const uint8_t *)w->kv[w->area].data + w->offset;
    w->offset += block_bytes;
    return block;
}

static bool page_aligned(const void *p)
{
    return (uintptr_t)p % GEIST_IMAGE_PAGE == 0;
}

/* Words about areas that do not cover `n_whole` blocks one by one. */
static enum geist_status check_areas(const struct image_header *h, const struct geist_bytes *kv, size_t n_kv, char *error)
{
    uint64_t n_whole = h->n_tokens / GEIST_KV_BLOCK, n = 0;

    if (h->flat)
        return n_kv ? gst_fail(error, GEIST_E_ARGUMENT, "a flat image holds its blocks; %zu areas were given", n_kv) : GEIST_OK;
    for (size_t i = 0; i < n_kv; i++) {
        if (!kv || !kv[i].data || !page_aligned(kv[i].data))
            return gst_fail(error, GEIST_E_ARGUMENT, "area %zu of KV blocks is missing or not page-aligned", i);
        n += h->kv_block_bytes ? kv[i].n / h->kv_block_bytes : 0;
    }
    if (h->kv_block_bytes && n < n_whole)
        return gst_fail(error, GEIST_E_IMAGE, "the image needs %llu KV blocks, the areas hold %llu", (unsigned long long)n_whole,
                        (unsigned long long)n);
    return GEIST_OK;
}

/* Tables, tail and tokens of `fresh`; recurrent state and logits stay where they are, in the image. */
static enum geist_status attach_into(struct geist_session *s, const uint8_t *image, const struct image_header *h,
                                     const struct geist_bytes *kv, size_t n_kv, struct geist_session *fresh)
{
    size_t n_whole = h->n_tokens / GEIST_KV_BLOCK, n_rows = h->n_tokens % GEIST_KV_BLOCK;
    struct geist_bytes own = {image + h->regions[REGION_BLOCKS].offset, h->regions[REGION_BLOCKS].bytes};
    struct area_walk walk = {h->flat ? &own : kv, h->flat ? 1 : n_kv, 0, 0};

    if (!session_reserve_tables(fresh, h->n_tokens))
        goto no_memory;
    for (size_t i = 0; i < n_whole; i++) {
        struct kv_block *b = kv_block_alias(next_block(&walk, s->layout.kv_block_bytes));
        if (!b)
            goto no_memory;
        memcpy(&b->checksum, image + h->regions[REGION_BLOCK_SUMS].offset + i * sizeof b->checksum, sizeof b->checksum);
        b->summed = true;
        fresh->blocks[fresh->n_blocks++] = b;
    }
    if (n_rows) {
        struct kv_block *b = kv_block_create(&s->layout);
        if (!b)
            goto no_memory;
        kv_tail_unpack(s->model, &s->layout, image + h->regions[REGION_TAIL].offset, n_rows, b->data);
        fresh->blocks[fresh->n_blocks++] = b;
    }
    take_header(fresh, image, h);
    if (h->n_tokens) {
        fresh->recurrent = image + h->regions[REGION_RECURRENT].offset;
        fresh->logits = (const float *)(const void *)(image + h->regions[REGION_LOGITS].offset);
    }
    return GEIST_OK;

no_memory:
    return gst_fail(s->error, GEIST_E_MEMORY, "no memory to attach an image of %llu tokens", (unsigned long long)h->n_tokens);
}

enum geist_status geist_session_attach(struct geist_session *s, const void *image, size_t n, const struct geist_bytes *kv, size_t n_kv)
{
    struct geist_session *fresh = NULL;
    struct image_header h;
    enum geist_status status;

    if (!s || !image)
        return GEIST_E_ARGUMENT;
    s->error[0] = 0;
    if (!page_aligned(image))
        return gst_fail(s->error, GEIST_E_ARGUMENT, "the image is not page-aligned");
    status = read_header(image, n, &h, s->error);
    if (status == GEIST_OK)
        status = check_fits(s, image, &h);
    if (status == GEIST_OK)
        status = check_areas(&h, kv, n_kv, s->error);
    if (status == GEIST_OK)
        status = create_like(s, &fresh);
    if (status == GEIST_OK)
        status = attach_into(s, image, &h, kv, n_kv, fresh);
    if (status == GEIST_OK) {
        swap_state(s, fresh);
        /* the memory for the next pass's results stays with the session */
        s->recurrent_own = fresh->recurrent_own;
        s->logits_own = fresh->logits_own;
        fresh->recurrent_own = NULL;
        fresh->logits_own = NULL;
    }
    geist_session_destroy(fresh);
    return status;
}

/* ---- images without a session ---- */

enum geist_status geist_image_inspect(const void *image, size_t n, struct geist_image_info *out)
{
    char error[GST_ERROR_BYTES];
    struct image_header h;
    enum geist_status status;

    if (!out)
        return GEIST_E_ARGUMENT;
    memset(out, 0, sizeof *out);
    status = read_header(image, n, &h, error);
    if (status != GEIST_OK)
        return status;
    out->format = h.format;
    out->numerics = h.numerics;
    out->flat = h.flat;
    out->kv_type = (enum geist_kv_type)h.kv_type;
    memcpy(out->fingerprint, h.fingerprint, sizeof out->fingerprint);
    out->id = h.id;
    out->parent_id = h.parent_id;
    out->n_kept = h.n_kept;
    out->n_tokens = h.n_tokens;
    out->image_bytes = h.image_bytes;
    out->tokens = (const int32_t *)(const void *)((const uint8_t *)image + h.regions[REGION_TOKENS].offset);
    return GEIST_OK;
}

enum geist_status geist_image_verify(const void *image, size_t n, const struct geist_bytes *kv, size_t n_kv, size_t first_block)
{
    char error[GST_ERROR_BYTES];
    struct image_header h;
    const uint8_t *bytes = image;
    enum geist_status status = read_header(image, n, &h, error);
    struct area_walk walk = {kv, n_kv, 0, 0};
    struct geist_bytes own;

    if (status != GEIST_OK)
        return status;
    for (int i = 0; i < REGION_BLOCKS; i++)
        if (gst_checksum(bytes + h.regions[i].offset, h.regions[i].bytes) != h.regions[i].checksum)
            return GEIST_E_IMAGE;
    if (h.flat) {
        if (h.regions[REGION_BLOCKS].checksum != h.regions[REGION_BLOCK_SUMS].checksum)
            return GEIST_E_IMAGE;
        own = (struct geist_bytes){bytes + h.regions[REGION_BLOCKS].offset, h.regions[REGION_BLOCKS].bytes};
        walk = (struct area_walk){&own, 1, 0, 0};
        first_block = 0;
    } else if (n_kv == 0) {
        return GEIST_OK;
    }
    status = check_areas(&h, h.flat ? NULL : kv, h.flat ? 0 : n_kv, error);
    for (size_t i = 0; i < h.n_tokens / GEIST_KV_BLOCK && status == GEIST_OK; i++) {
        const uint8_t *block = next_block(&walk, h.kv_block_bytes);
        uint64_t sum;
        if (i < first_block)
            continue;
        memcpy(&sum, bytes + h.regions[REGION_BLOCK_SUMS].offset + i * sizeof sum, sizeof sum);
        if (gst_checksum(block, h.kv_block_bytes) != sum)
            status = GEIST_E_IMAGE;
    }
    return status;
}
