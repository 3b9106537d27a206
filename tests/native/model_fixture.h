/* model_fixture.h - a fixture model, opened, packed and bound; for native tests. */
#ifndef GEIST_MODEL_FIXTURE_H
#define GEIST_MODEL_FIXTURE_H

#include "check.h"
#include "session/session.h"

#include <stdio.h>
#include <stdlib.h>

struct fixture {
    struct geist_engine *engine;
    struct geist_gguf *gguf;
    struct geist_model *model;
    void *packed;
};

static inline void fixture_close(struct fixture *f)
{
    geist_model_destroy(f->model);
    geist_gguf_close(f->gguf);
    geist_engine_destroy(f->engine);
    free(f->packed);
    memset(f, 0, sizeof *f);
}

/* `name` is e.g. "qwen35-tiny-f32": models/<name without the type>/<name>.gguf under <data>/oracle. */
static inline int fixture_open(struct fixture *f, const char *data, const char *name, enum geist_tier tier, uint32_t n_threads)
{
    struct geist_engine_options options = {tier, n_threads};
    const char *cut = strrchr(name, '-');
    char path[1024];
    size_t n;

    memset(f, 0, sizeof *f);
    snprintf(path, sizeof path, "%s/oracle/models/%.*s/%s.gguf", data, (int)(cut - name), name, name);
    if (!CHECK_STATUS(geist_engine_create(&options, &f->engine), GEIST_OK))
        return 0;
    if (!CHECK_STATUS(geist_gguf_open(f->engine, path, &f->gguf), GEIST_OK) ||
        !CHECK_STATUS(geist_model_create(f->gguf, &f->model), GEIST_OK)) {
        fprintf(stderr, "%s: %s\n", path, geist_engine_error(f->engine));
        return 0;
    }
    n = geist_model_packed_size(f->model);
    f->packed = aligned_alloc(GEIST_IMAGE_PAGE, gst_round_up(n, GEIST_IMAGE_PAGE));
    return CHECK(f->packed != NULL) && CHECK_STATUS(geist_model_pack(f->model, f->packed, n), GEIST_OK) &&
           CHECK_STATUS(geist_model_bind(f->model, f->packed, n), GEIST_OK);
}

static inline struct geist_session *fixture_session(struct fixture *f, enum geist_kv_type kv_type)
{
    struct geist_session_options options = {kv_type, 0};
    struct geist_session *s = NULL;

    if (!CHECK_STATUS(geist_session_create(f->model, &options, &s), GEIST_OK))
        fprintf(stderr, "%s\n", geist_engine_error(f->engine));
    return s;
}

/* A small generator, so that a printed seed repeats a run. */
static inline uint32_t fixture_random(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static inline void fixture_tokens(uint64_t *state, int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(fixture_random(state) % 497);
}

/* The flat image of a session, page-aligned, freed by the caller. */
static inline uint8_t *fixture_image(struct geist_session *s, size_t *n)
{
    uint8_t *image;

    *n = geist_session_snapshot_size(s);
    image = aligned_alloc(GEIST_IMAGE_PAGE, *n);
    if (!CHECK(image != NULL) || !CHECK_STATUS(geist_session_snapshot(s, image, *n), GEIST_OK)) {
        free(image);
        return NULL;
    }
    return image;
}

/* Position, tokens, logits, state: everything a flat image holds, compared as bytes. */
static inline int fixture_same(struct geist_session *a, struct geist_session *b)
{
    size_t n_a, n_b;
    uint8_t *x = fixture_image(a, &n_a), *y = fixture_image(b, &n_b);
    int same = x && y && n_a == n_b && memcmp(x, y, n_a) == 0;

    free(x);
    free(y);
    return same;
}

#endif
