/* Fuzz target: restore, attach and inspect of whatever bytes. The session must stay usable and, after a refusal, be what it was.
 *
 * The first byte chooses whether the header's checksum is mended (so that what lies behind it is reached); the rest is the image. Corpus:
 * images of the fixture models, made at start from tests/data when the corpus is empty of them. */
#include "model_fixture.h"
#include "session/image.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct fixture fixture;
static struct geist_session *session, *attached;
static uint8_t *start;
static size_t n_start;

/* A sound image to begin from, and the place for a mutated one. */
static void set_up(void)
{
    const char *where = getenv("GEIST_FUZZ_DATA");
    int32_t tokens[70];

    for (int i = 0; i < 70; i++)
        tokens[i] = i * 7 % 497;
    if (!fixture_open(&fixture, where ? where : "tests/data", "qwen35-tiny-gqa-q8_0", GEIST_TIER_AUTO, 1))
        abort();
    session = fixture_session(&fixture, GEIST_KV_F16);
    attached = fixture_session(&fixture, GEIST_KV_F16);
    if (geist_session_prefill(session, tokens, 70) != GEIST_OK)
        abort();
    start = fixture_image(session, &n_start);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int32_t tokens[3] = {1, 2, 3};
    struct geist_image_info info;
    struct geist_bytes area;
    struct image_header h;
    uint8_t *image;
    size_t n;

    if (!session)
        set_up();
    if (size < 8)
        return 0;
    /* The input edits a sound image: (offset, byte) pairs, then a cut; a whole image of random bytes would never pass the magic. */
    n = n_start;
    image = aligned_alloc(GEIST_IMAGE_PAGE, n_start);
    memcpy(image, start, n_start);
    if (data[0] & 1)
        n = ((size_t)data[1] << 16 | (size_t)data[2] << 8 | data[3]) % (n_start + 1);
    for (size_t i = 4; i + 4 < size; i += 5) {
        size_t at = ((size_t)data[i] << 16 | (size_t)data[i + 1] << 8 | data[i + 2]);
        at = data[i + 4] & 1 ? at % n_start : at % sizeof(struct image_header); /* half of the edits go to the header */
        image[at] = data[i + 3];
    }
    memcpy(&h, image, sizeof h);
    if (data[0] & 2) {
        if (data[0] & 4)
            image_plan(&h); /* consistent regions for whatever the counts say */
        h.checksum = image_header_checksum(&h);
        h.id = h.checksum;
        memcpy(image, &h, sizeof h);
    }
    /* the buffer's true end, so that the sanitizer sees a read past it */
    if (n < n_start) {
        uint8_t *shorter = aligned_alloc(GEIST_IMAGE_PAGE, n ? gst_round_up(n, GEIST_IMAGE_PAGE) : GEIST_IMAGE_PAGE);
        memcpy(shorter, image, n);
        free(image);
        image = shorter;
    }

    (void)geist_image_inspect(image, n, &info);
    area = (struct geist_bytes){start, n_start};
    (void)geist_image_verify(image, n, &area, 1, 0);
    if (geist_session_restore(session, image, n) != GEIST_OK) {
        if (geist_session_error(session)[0] == 0)
            abort();
    } else {
        (void)geist_session_prefill(session, tokens, 3);
    }
    if (geist_session_attach(attached, image, n, &area, data[0] & 8 ? 1 : 0) == GEIST_OK)
        (void)geist_session_prefill(attached, tokens, 3);
    geist_session_reset(attached);

    /* usable, and the same numbers as ever */
    if (geist_session_restore(session, start, n_start) != GEIST_OK)
        abort();
    {
        size_t n_now;
        uint8_t *now = fixture_image(session, &n_now);
        if (!now || n_now != n_start || memcmp(now, start, n_start) != 0)
            abort();
        free(now);
    }
    free(image);
    return 0;
}
