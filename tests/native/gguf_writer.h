/* gguf_writer.h - writes GGUF bytes for tests, right or wrong as asked: nothing is checked here. */
#ifndef GEIST_GGUF_WRITER_H
#define GEIST_GGUF_WRITER_H

#include "gguf/gguf.h"
#include "quant/quant.h"

#include <stdio.h>
#include <stdlib.h>

struct writer {
    uint8_t *bytes; /* owns */
    size_t n, capacity;
};

static inline void w_bytes(struct writer *w, const void *data, size_t n)
{
    if (w->n + n > w->capacity) {
        w->capacity = 2 * (w->n + n) + 64;
        w->bytes = realloc(w->bytes, w->capacity);
        if (!w->bytes)
            exit(2);
    }
    if (n)
        memcpy(w->bytes + w->n, data, n);
    w->n += n;
}

static inline void w_free(struct writer *w)
{
    free(w->bytes);
    memset(w, 0, sizeof *w);
}

static inline void w_u8(struct writer *w, uint8_t x)
{
    w_bytes(w, &x, 1);
}

static inline void w_u32(struct writer *w, uint32_t x)
{
    w_bytes(w, &x, 4);
}

static inline void w_u64(struct writer *w, uint64_t x)
{
    w_bytes(w, &x, 8);
}

static inline void w_f32(struct writer *w, float x)
{
    w_bytes(w, &x, 4);
}

static inline void w_text(struct writer *w, const char *s)
{
    w_u64(w, strlen(s));
    w_bytes(w, s, strlen(s));
}

static inline void w_zeros(struct writer *w, size_t n)
{
    for (size_t i = 0; i < n; i++)
        w_u8(w, 0);
}

static inline void w_pad(struct writer *w, size_t multiple)
{
    while (w->n % multiple)
        w_u8(w, 0);
}

static inline void w_header(struct writer *w, uint32_t version, uint64_t n_tensors, uint64_t n_values)
{
    w_bytes(w, "GGUF", 4);
    w_u32(w, version);
    w_u64(w, n_tensors);
    w_u64(w, n_values);
}

/* The key and the type; the value comes next. */
static inline void w_key(struct writer *w, const char *key, uint32_t type)
{
    w_text(w, key);
    w_u32(w, type);
}

static inline void w_key_u32(struct writer *w, const char *key, uint32_t x)
{
    w_key(w, key, GEIST_U32);
    w_u32(w, x);
}

static inline void w_key_f32(struct writer *w, const char *key, float x)
{
    w_key(w, key, GEIST_F32);
    w_f32(w, x);
}

static inline void w_key_text(struct writer *w, const char *key, const char *x)
{
    w_key(w, key, GEIST_STRING);
    w_text(w, x);
}

static inline void w_key_array(struct writer *w, const char *key, uint32_t item_type, uint64_t count)
{
    w_key(w, key, GEIST_ARRAY);
    w_u32(w, item_type);
    w_u64(w, count);
}

static inline void w_tensor(struct writer *w, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
    w_text(w, name);
    w_u32(w, n_dims);
    for (uint32_t i = 0; i < n_dims; i++)
        w_u64(w, dims[i]);
    w_u32(w, type);
    w_u64(w, offset);
}

/* The bytes at a multiple of 64, in memory of exactly their size, so that a sanitizer sees the first byte too far. free(). */
static inline void *w_aligned(const void *bytes, size_t n)
{
    void *p = NULL;

    if (posix_memalign(&p, 64, n ? n : 1))
        exit(2);
    if (n)
        memcpy(p, bytes, n);
    return p;
}

/* A change to a parsed file. */
struct edit {
    const char *drop_key;
    const struct writer *values; /* keys and values to add */
    size_t n_values;
    const char *tensor; /* this one is */
    bool drop;          /*     left out, */
    const char *rename; /*     renamed, */
    uint32_t n_dims;    /*     given dims (then its data is zeros), */
    uint64_t dims[4];
    int type;         /*     given a type, where not -1 (then its data is zeros), */
    const void *data; /*     given data */
};

/* The file again with the change made. */
static inline void w_edited(struct writer *w, const struct geist_gguf *g, const struct edit *edit)
{
    size_t n_values = 0, n_tensors = 0, offset = 0;

    for (size_t i = 0; i < g->n_values; i++)
        n_values += !(edit->drop_key && !strcmp(edit->drop_key, g->values[i].key));
    for (size_t i = 0; i < g->n_tensors; i++)
        n_tensors += !(edit->drop && !strcmp(edit->tensor, g->tensors[i].name));
    w_header(w, 3, n_tensors, n_values + edit->n_values);
    for (size_t i = 0; i < g->n_values; i++) {
        const struct geist_value *v = &g->values[i].value;

        if (edit->drop_key && !strcmp(edit->drop_key, g->values[i].key))
            continue;
        w_key(w, g->values[i].key, v->type);
        if (v->type == GEIST_ARRAY) {
            w_u32(w, v->item_type);
            w_u64(w, v->count);
        } else if (v->type == GEIST_STRING) {
            w_u64(w, v->data_bytes);
        }
        w_bytes(w, v->data, v->data_bytes);
    }
    if (edit->values)
        w_bytes(w, edit->values->bytes, edit->values->n);

    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < g->n_tensors; i++) {
            struct gguf_tensor t = g->tensors[i];
            bool edited = edit->tensor && !strcmp(edit->tensor, t.name);

            if (edited && edit->drop)
                continue;
            if (edited && (edit->n_dims || edit->type >= 0)) {
                const struct quant_type *type;
                size_t n = 1;

                if (edit->n_dims) {
                    t.n_dims = edit->n_dims;
                    memcpy(t.dims, edit->dims, sizeof t.dims);
                }
                if (edit->type >= 0)
                    t.type = (uint32_t)edit->type;
                for (uint32_t k = 0; k < t.n_dims; k++)
                    n *= t.dims[k];
                type = quant_type_of(t.type);
                t.data = NULL;
                t.data_bytes = type ? n / type->block_values * type->block_bytes : 64;
            }
            if (pass == 0) {
                w_tensor(w, edited && edit->rename ? edit->rename : t.name, t.n_dims, t.dims, t.type, offset);
                offset += gst_round_up(t.data_bytes, 32);
            } else {
                if (edited && edit->data)
                    w_bytes(w, edit->data, t.data_bytes);
                else if (t.data)
                    w_bytes(w, t.data, t.data_bytes);
                else
                    w_zeros(w, t.data_bytes);
                w_pad(w, 32);
            }
        }
        w_pad(w, 32);
    }
}

#endif
