/* Property: an image is all or nothing. A bit flipped anywhere in its live bytes or header, a cut anywhere, another model, KV type,
 * numerics version, format or byte order: refused with the right status, the session byte for byte what it was, and the next sound restore
 * right (FINDINGS rows 4, 8). Tolerance: none. */
#include "model_fixture.h"
#include "session/image.h"

struct subject {
    struct geist_session *s; /* holds something of its own */
    uint8_t *before;         /* its flat image */
    size_t n_before;
    const uint8_t *sound; /* an image that fits it */
    size_t n_sound;
};

static void check_refused(struct subject *t, const uint8_t *image, size_t n, enum geist_status wanted, const char *what)
{
    size_t n_after;
    uint8_t *after;
    enum geist_status status = geist_session_restore(t->s, image, n);

    if (!CHECK(status == wanted))
        fprintf(stderr, "  %s: restore said \"%s\": %s\n", what, geist_status_text(status), geist_session_error(t->s));
    CHECK(geist_session_error(t->s)[0] != 0);
    after = fixture_image(t->s, &n_after);
    if (!CHECK(after && n_after == t->n_before && memcmp(after, t->before, n_after) == 0))
        fprintf(stderr, "  %s: the session moved\n", what);
    free(after);
}

/* Restores the sound image, compares, and puts the session back. */
static void check_usable(struct subject *t)
{
    size_t n;
    uint8_t *image;

    CHECK_STATUS(geist_session_restore(t->s, t->sound, t->n_sound), GEIST_OK);
    image = fixture_image(t->s, &n);
    CHECK(image && n == t->n_sound && memcmp(image, t->sound, n) == 0);
    free(image);
    CHECK_STATUS(geist_session_restore(t->s, t->before, t->n_before), GEIST_OK);
}

/* A header field changed by someone who also mends the checksum. */
static void forge(uint8_t *image, void (*change)(struct image_header *h))
{
    struct image_header h;

    memcpy(&h, image, sizeof h);
    change(&h);
    h.checksum = image_header_checksum(&h);
    h.id = h.checksum;
    memcpy(image, &h, sizeof h);
}

static void change_numerics(struct image_header *h)
{
    h->numerics++;
}
static void change_format(struct image_header *h)
{
    h->format++;
}
static void change_order(struct image_header *h)
{
    h->byte_order = __builtin_bswap32(h->byte_order);
}
static void change_model(struct image_header *h)
{
    h->fingerprint[5] ^= 1;
}
static void change_kv(struct image_header *h)
{
    h->kv_type = !h->kv_type;
}
static void change_count(struct image_header *h)
{
    h->n_tokens++;
}
static void change_count_vast(struct image_header *h)
{
    h->n_tokens = (uint64_t)1 << 62;
}
static void change_vocab(struct image_header *h)
{
    h->n_vocab = 4;
    image_plan(h);
}
static void change_layers(struct image_header *h)
{
    h->n_layers++;
}
static void change_offset(struct image_header *h)
{
    h->regions[REGION_RECURRENT].offset += GEIST_IMAGE_PAGE;
}
static void change_bytes(struct image_header *h)
{
    h->regions[REGION_LOGITS].bytes = UINT64_MAX;
}
static void change_size(struct image_header *h)
{
    h->image_bytes = 1;
}
static void change_temperature(struct image_header *h)
{
    h->temperature = -1.0f;
}
static void change_thin(struct image_header *h)
{
    h->flat = 0;
    image_plan(h);
}

static const struct {
    const char *what;
    void (*change)(struct image_header *h);
    enum geist_status wanted;
} forgeries[] = {
    {"numerics version", change_numerics, GEIST_E_MISMATCH},
    {"format version", change_format, GEIST_E_MISMATCH},
    {"byte order", change_order, GEIST_E_MISMATCH},
    {"fingerprint", change_model, GEIST_E_MISMATCH},
    {"KV type", change_kv, GEIST_E_MISMATCH},
    {"token count", change_count, GEIST_E_IMAGE},
    {"vast token count", change_count_vast, GEIST_E_IMAGE},
    {"vocabulary", change_vocab, GEIST_E_MISMATCH},
    {"layers", change_layers, GEIST_E_MISMATCH},
    {"region offset", change_offset, GEIST_E_IMAGE},
    {"region size", change_bytes, GEIST_E_IMAGE},
    {"image size", change_size, GEIST_E_IMAGE},
    {"sampler", change_temperature, GEIST_E_IMAGE},
    {"thin", change_thin, GEIST_E_ARGUMENT},
};

static void check_model(const char *data, const char *name, const char *other_name, uint64_t *random)
{
    struct fixture f, other;
    struct subject t = {0};
    struct image_header h;
    uint8_t *sound = NULL, *copy = NULL;
    int32_t tokens[150];

    if (!fixture_open(&f, data, name, GEIST_TIER_AUTO, 1) || !fixture_open(&other, data, other_name, GEIST_TIER_AUTO, 1))
        return;
    fixture_tokens(random, tokens, 150);
    t.s = fixture_session(&f, GEIST_KV_F16);
    CHECK_STATUS(geist_session_prefill(t.s, tokens, 150), GEIST_OK);
    t.sound = sound = fixture_image(t.s, &t.n_sound);
    copy = aligned_alloc(GEIST_IMAGE_PAGE, t.n_sound);
    geist_session_reset(t.s);
    CHECK_STATUS(geist_session_prefill(t.s, tokens + 50, 70), GEIST_OK);
    t.before = fixture_image(t.s, &t.n_before);
    memcpy(&h, sound, sizeof h);

    /* a bit flipped in each region, and in each field of the header */
    for (int i = 0; i < REGION_COUNT; i++) {
        CHECK(h.regions[i].bytes > 0);
        for (int round = 0; round < 8; round++) {
            size_t at = h.regions[i].offset + (round == 0   ? 0
                                               : round == 1 ? h.regions[i].bytes - 1
                                                            : fixture_random(random) % h.regions[i].bytes);
            memcpy(copy, sound, t.n_sound);
            copy[at] ^= (uint8_t)(1u << fixture_random(random) % 8);
            check_refused(&t, copy, t.n_sound, GEIST_E_IMAGE, h.regions[i].name);
            CHECK_STATUS(geist_image_verify(copy, t.n_sound, NULL, 0, 0), GEIST_E_IMAGE);
        }
        check_usable(&t);
    }
    for (size_t at = 0; at < sizeof h; at++) {
        enum geist_status wanted = GEIST_E_IMAGE, got;
        memcpy(copy, sound, t.n_sound);
        copy[at] ^= (uint8_t)(1u << fixture_random(random) % 8);
        if (at >= offsetof(struct image_header, format) && at < offsetof(struct image_header, format) + 4)
            wanted = GEIST_E_MISMATCH; /* versions are read before the checksum, which a later one may compute otherwise */
        got = geist_session_restore(t.s, copy, t.n_sound);
        if (!CHECK(got == wanted))
            fprintf(stderr, "  header byte %zu: %s\n", at, geist_status_text(got));
    }
    check_usable(&t);

    /* cut at every region's edges and in between */
    for (int i = 0; i < REGION_COUNT; i++) {
        check_refused(&t, sound, h.regions[i].offset, GEIST_E_IMAGE, "cut");
        check_refused(&t, sound, h.regions[i].offset + h.regions[i].bytes / 2, GEIST_E_IMAGE, "cut");
    }
    check_refused(&t, sound, t.n_sound - 1, GEIST_E_IMAGE, "cut by a byte");
    check_refused(&t, sound, 100, GEIST_E_IMAGE, "cut in the header");
    check_usable(&t);

    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        memcpy(copy, sound, t.n_sound);
        forge(copy, forgeries[i].change);
        check_refused(&t, copy, t.n_sound, forgeries[i].wanted, forgeries[i].what);
    }
    check_usable(&t);

    /* an image of another model of the same shape's family, whole */
    {
        struct geist_session *s = fixture_session(&other, GEIST_KV_F16);
        size_t n;
        uint8_t *image;
        CHECK_STATUS(geist_session_prefill(s, tokens, 10), GEIST_OK);
        image = fixture_image(s, &n);
        check_refused(&t, image, n, GEIST_E_MISMATCH, "another model's image");
        free(image);
        geist_session_destroy(s);
    }
    /* a session of the other KV type */
    {
        struct geist_session *s = fixture_session(&f, GEIST_KV_F32);
        CHECK_STATUS(geist_session_restore(s, sound, t.n_sound), GEIST_E_MISMATCH);
        CHECK(geist_session_position(s) == 0);
        geist_session_destroy(s);
    }
    /* thin: too few blocks, a harmed block, areas that are not aligned */
    {
        struct geist_image_geometry g;
        struct geist_bytes area;
        struct geist_session *s = fixture_session(&f, GEIST_KV_F16), *attached = fixture_session(&f, GEIST_KV_F16);
        size_t n;
        uint8_t *thin, *blocks;

        geist_model_image_geometry(f.model, GEIST_KV_F16, &g);
        CHECK_STATUS(geist_session_prefill(s, tokens, 150), GEIST_OK);
        n = geist_session_snapshot_thin_size(s);
        thin = aligned_alloc(GEIST_IMAGE_PAGE, n);
        blocks = aligned_alloc(GEIST_IMAGE_PAGE, 2 * g.kv_block_bytes);
        CHECK_STATUS(geist_session_snapshot_thin(s, thin, n), GEIST_OK);
        CHECK_STATUS(geist_session_snapshot_thin(s, thin, n - 1), GEIST_E_BUFFER);
        CHECK_STATUS(geist_session_snapshot_blocks(s, 0, 2, blocks, 2 * g.kv_block_bytes), GEIST_OK);
        CHECK_STATUS(geist_session_snapshot_blocks(s, 0, 3, blocks, 3 * g.kv_block_bytes), GEIST_E_ARGUMENT);
        CHECK_STATUS(geist_session_snapshot_blocks(s, 0, 2, blocks, g.kv_block_bytes), GEIST_E_BUFFER);
        area = (struct geist_bytes){blocks, g.kv_block_bytes};
        CHECK_STATUS(geist_session_attach(attached, thin, n, &area, 1), GEIST_E_IMAGE);
        CHECK_STATUS(geist_session_attach(attached, thin, n, NULL, 0), GEIST_E_IMAGE);
        area = (struct geist_bytes){blocks + 64, 2 * g.kv_block_bytes};
        CHECK_STATUS(geist_session_attach(attached, thin, n, &area, 1), GEIST_E_ARGUMENT);
        CHECK(geist_session_position(attached) == 0);
        area = (struct geist_bytes){blocks, 2 * g.kv_block_bytes};
        CHECK_STATUS(geist_image_verify(thin, n, &area, 1, 0), GEIST_OK);
        blocks[g.kv_block_bytes + 7] ^= 4;
        CHECK_STATUS(geist_image_verify(thin, n, &area, 1, 0), GEIST_E_IMAGE);
        blocks[g.kv_block_bytes + 7] ^= 4;
        blocks[7] ^= 4;
        CHECK_STATUS(geist_image_verify(thin, n, &area, 1, 1), GEIST_OK); /* block 0 is taken as verified before */
        blocks[7] ^= 4;
        CHECK_STATUS(geist_session_attach(attached, thin, n, &area, 1), GEIST_OK);
        CHECK(fixture_same(s, attached));
        geist_session_destroy(attached);
        geist_session_destroy(s);
        free(thin);
        free(blocks);
    }
    /* sizes follow from geometry and token count alone */
    {
        static const size_t counts[] = {1, 2, 63, 64, 65, 128, 150};
        struct geist_image_geometry g;
        struct geist_session *s = fixture_session(&f, GEIST_KV_F16);

        geist_model_image_geometry(f.model, GEIST_KV_F16, &g);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            size_t n = counts[i], page = GEIST_IMAGE_PAGE;
            size_t thin = g.header_bytes + gst_round_up(4 * n, page) + gst_round_up(4 * g.n_vocab, page) +
                          gst_round_up(g.recurrent_bytes, page) + gst_round_up(n % 64 * g.kv_bytes_per_token, page) +
                          gst_round_up(8 * (n / 64), page);
            geist_session_reset(s);
            CHECK_STATUS(geist_session_prefill(s, tokens, n), GEIST_OK);
            CHECK(geist_session_snapshot_thin_size(s) == thin);
            CHECK(geist_session_snapshot_size(s) == thin + n / 64 * g.kv_block_bytes);
        }
        geist_session_destroy(s);
    }
    /* an empty session, too, is an image */
    {
        struct geist_session *s = fixture_session(&f, GEIST_KV_F16);
        struct geist_image_info info;
        const float *logits;
        size_t n;
        uint8_t *image = fixture_image(s, &n);
        CHECK_STATUS(geist_image_inspect(image, n, &info), GEIST_OK);
        CHECK(info.n_tokens == 0 && info.flat == 1);
        CHECK_STATUS(geist_session_restore(t.s, image, n), GEIST_OK);
        CHECK(geist_session_position(t.s) == 0);
        CHECK_STATUS(geist_session_logits(t.s, &logits), GEIST_E_STATE);
        CHECK_STATUS(geist_session_prefill(t.s, tokens, 150), GEIST_OK);
        CHECK_STATUS(geist_session_prefill(s, tokens, 150), GEIST_OK);
        CHECK(fixture_same(s, t.s));
        free(image);
        geist_session_destroy(s);
    }

    geist_session_destroy(t.s);
    free(t.before);
    free(sound);
    free(copy);
    fixture_close(&f);
    fixture_close(&other);
}

int main(int argc, char **argv)
{
    const char *data = argc > 1 ? argv[1] : "tests/data";
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 20261129, random = seed;

    printf("seed %llu\n", (unsigned long long)seed);
    check_model(data, "qwen35-tiny-gqa-q8_0", "qwen35-tiny-q8_0", &random);
    return check_done("test_image");
}
