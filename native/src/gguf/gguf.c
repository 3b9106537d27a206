/* gguf.c - opens and parses a GGUF file. Nothing in it is believed: every count, length and offset is held against what is there.
 *
 *     "GGUF" version n_tensors n_values │ n_values × (key, type, value) │ n_tensors × (name, n_dims, dims, type, offset) │ pad │ data
 *     0                                                        values_end                                       table_end   data_begin */
#include "gguf/gguf.h"
#include "gguf/cursor.h"
#include "quant/quant.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_BYTES 24
#define VALUE_LEAST_BYTES 14  /* key length, one letter, type, one byte */
#define TENSOR_LEAST_BYTES 33 /* name length, one letter, n_dims, one dim, type, offset */
#define ALIGNMENT_DEFAULT 32u
#define ALIGNMENT_LEAST 8u /* weights are read as floats in place */
#define ALIGNMENT_MOST 65536u

#define FAIL(g, ...) gst_fail((g)->engine->error, GEIST_E_FORMAT, __VA_ARGS__)
#define REFUSE(g, ...) gst_fail((g)->engine->error, GEIST_E_UNSUPPORTED, __VA_ARGS__)

/* Bytes of one value of a type; 0 for strings, arrays and what is no type. */
static size_t scalar_bytes(uint32_t type)
{
    switch (type) {
    case GEIST_U8:
    case GEIST_I8:
    case GEIST_BOOL:
        return 1;
    case GEIST_U16:
    case GEIST_I16:
        return 2;
    case GEIST_U32:
    case GEIST_I32:
    case GEIST_F32:
        return 4;
    case GEIST_U64:
    case GEIST_I64:
    case GEIST_F64:
        return 8;
    default:
        return 0;
    }
}

/* A name of 1..most bytes without NUL, as an owned string. `what` and `index` are for the words. */
static enum geist_status read_name(struct geist_gguf *g, struct cursor *c, const char *what, uint64_t index, uint64_t most, char **out)
{
    size_t at = c->at;
    uint64_t n;
    const uint8_t *p;

    *out = NULL;
    if (!cursor_u64(c, &n))
        return FAIL(g, "%s %" PRIu64 " at byte %zu: the file ends in its length", what, index, at);
    if (n == 0)
        return FAIL(g, "%s %" PRIu64 " at byte %zu: empty", what, index, at);
    if (n > most)
        return FAIL(g, "%s %" PRIu64 " at byte %zu: %" PRIu64 " bytes long, at most %" PRIu64, what, index, at, n, most);
    p = cursor_take(c, n);
    if (!p)
        return FAIL(g, "%s %" PRIu64 " at byte %zu: %" PRIu64 " bytes long, but the file ends after %zu", what, index, at, n,
                    cursor_left(c));
    if (memchr(p, 0, (size_t)n))
        return FAIL(g, "%s %" PRIu64 " at byte %zu: holds a NUL", what, index, at);
    *out = malloc((size_t)n + 1);
    if (!*out)
        return gst_fail(g->engine->error, GEIST_E_MEMORY, "out of memory for %s %" PRIu64, what, index);
    memcpy(*out, p, (size_t)n);
    (*out)[n] = 0;
    return GEIST_OK;
}

static enum geist_status skip_string(struct geist_gguf *g, struct cursor *c, const char *key)
{
    size_t at = c->at;
    uint64_t n;

    if (!cursor_u64(c, &n))
        return FAIL(g, "key %.200s: the file ends in a string's length at byte %zu", key, at);
    if (n > GGUF_MAX_STRING_BYTES)
        return FAIL(g, "key %.200s: a string of %" PRIu64 " bytes at byte %zu, at most %u", key, n, at, GGUF_MAX_STRING_BYTES);
    if (!cursor_take(c, n))
        return FAIL(g, "key %.200s: a string of %" PRIu64 " bytes at byte %zu, but the file ends after %zu", key, n, at, cursor_left(c));
    return GEIST_OK;
}

/* `count` values of a fixed size, or strings. */
static enum geist_status read_items(struct geist_gguf *g, struct cursor *c, const char *key, uint32_t type, uint64_t count)
{
    size_t at = c->at, each = scalar_bytes(type), n;
    const uint8_t *p;

    if (type == GEIST_STRING) {
        if (count > cursor_left(c) / 8)
            return FAIL(g, "key %.200s: %" PRIu64 " strings at byte %zu, but the file ends after %zu bytes", key, count, at,
                        cursor_left(c));
        for (uint64_t i = 0; i < count; i++) {
            enum geist_status status = skip_string(g, c, key);

            if (status)
                return status;
        }
        return GEIST_OK;
    }
    if (!gst_mul_size((size_t)count, each, &n) || !(p = cursor_take(c, n)))
        return FAIL(g, "key %.200s: %" PRIu64 " values of %zu bytes at byte %zu, but the file ends after %zu bytes", key, count, each, at,
                    cursor_left(c));
    if (type == GEIST_BOOL)
        for (size_t i = 0; i < n; i++)
            if (p[i] > 1)
                return FAIL(g, "key %.200s: a truth value of %u at byte %zu", key, p[i], at + i);
    return GEIST_OK;
}

static enum geist_status read_value(struct geist_gguf *g, struct cursor *c, const char *key, struct geist_value *v)
{
    size_t at = c->at;
    uint32_t type, item_type;
    uint64_t count = 1;
    enum geist_status status;

    if (!cursor_u32(c, &type))
        return FAIL(g, "key %.200s: the file ends in its type at byte %zu", key, at);
    item_type = type;
    if (type == GEIST_ARRAY) {
        if (!cursor_u32(c, &item_type) || !cursor_u64(c, &count))
            return FAIL(g, "key %.200s: the file ends in an array's type and length at byte %zu", key, at);
        if (item_type == GEIST_ARRAY)
            return REFUSE(g, "key %.200s: an array of arrays at byte %zu", key, at);
        if (count > GGUF_MAX_ARRAY)
            return FAIL(g, "key %.200s: an array of %" PRIu64 " values at byte %zu, at most %u", key, count, at, GGUF_MAX_ARRAY);
    }
    if (item_type != GEIST_STRING && !scalar_bytes(item_type))
        return FAIL(g, "key %.200s: value type %" PRIu32 " at byte %zu does not exist", key, item_type, at);

    v->type = (enum geist_value_type)type;
    v->item_type = (enum geist_value_type)item_type;
    v->count = count;
    at = c->at;
    status = read_items(g, c, key, item_type, count);
    if (status)
        return status;
    v->data = g->bytes + at;
    v->data_bytes = c->at - at;
    if (type == GEIST_STRING) { /* without its length */
        v->data = g->bytes + at + 8;
        v->data_bytes -= 8;
    }
    return GEIST_OK;
}

static int by_key(const void *a, const void *b)
{
    return strcmp((*(const struct gguf_value *const *)a)->key, (*(const struct gguf_value *const *)b)->key);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct gguf_tensor *const *)a)->name, (*(const struct gguf_tensor *const *)b)->name);
}

static int by_place(const void *a, const void *b)
{
    const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a, *t = *(const struct gguf_tensor *const *)b;

    return s->data < t->data ? -1 : s->data > t->data;
}

static enum geist_status read_values(struct geist_gguf *g, struct cursor *c)
{
    enum geist_status status;

    for (size_t i = 0; i < g->n_values; i++) {
        status = read_name(g, c, "key", i, GGUF_MAX_KEY_BYTES, &g->values[i].key);
        if (status)
            return status;
        status = read_value(g, c, g->values[i].key, &g->values[i].value);
        if (status)
            return status;
        g->values_by_key[i] = &g->values[i];
    }
    qsort(g->values_by_key, g->n_values, sizeof *g->values_by_key, by_key);
    for (size_t i = 1; i < g->n_values; i++)
        if (!strcmp(g->values_by_key[i - 1]->key, g->values_by_key[i]->key))
            return FAIL(g, "key %.200s: there twice", g->values_by_key[i]->key);
    return GEIST_OK;
}

static enum geist_status read_alignment(struct geist_gguf *g)
{
    uint32_t alignment;
    bool found;
    enum geist_status status = gguf_get_u32(g, "general.alignment", &alignment, &found);

    if (status)
        return status;
    g->alignment = found ? alignment : ALIGNMENT_DEFAULT;
    if (g->alignment < ALIGNMENT_LEAST || g->alignment > ALIGNMENT_MOST || (g->alignment & (g->alignment - 1)))
        return FAIL(g, "general.alignment is %" PRIu32 ": must be a power of two from %u to %u", g->alignment, ALIGNMENT_LEAST,
                    ALIGNMENT_MOST);
    return GEIST_OK;
}

/* One entry of the table. The offset is kept aside until the data's beginning is known. */
static enum geist_status read_tensor(struct geist_gguf *g, struct cursor *c, size_t index, struct gguf_tensor *t, uint64_t *offset)
{
    const struct quant_type *type;
    size_t n_values = 1, at;
    enum geist_status status = read_name(g, c, "tensor", index, GGUF_MAX_NAME_BYTES, &t->name);

    if (status)
        return status;
    at = c->at;
    if (!cursor_u32(c, &t->n_dims))
        return FAIL(g, "tensor %s: the file ends in its number of dimensions at byte %zu", t->name, at);
    if (t->n_dims < 1 || t->n_dims > 4)
        return FAIL(g, "tensor %s: %" PRIu32 " dimensions at byte %zu, must be 1 to 4", t->name, t->n_dims, at);
    for (uint32_t i = 0; i < 4; i++)
        t->dims[i] = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        at = c->at;
        if (!cursor_u64(c, &t->dims[i]))
            return FAIL(g, "tensor %s: the file ends in its dimensions at byte %zu", t->name, at);
        if (t->dims[i] == 0)
            return FAIL(g, "tensor %s: dimension %" PRIu32 " at byte %zu is 0", t->name, i, at);
        if (t->dims[i] > INT64_MAX || !gst_mul_size(n_values, (size_t)t->dims[i], &n_values))
            return FAIL(g, "tensor %s: dimensions up to byte %zu multiply to more than 64 bits", t->name, c->at);
    }
    at = c->at;
    if (!cursor_u32(c, &t->type) || !cursor_u64(c, offset))
        return FAIL(g, "tensor %s: the file ends in its type and offset at byte %zu", t->name, at);

    type = quant_type_of(t->type);
    if (!type) {
        snprintf(t->unknown_type, sizeof t->unknown_type, "?%" PRIu32, t->type);
        return GEIST_OK;
    }
    if (t->dims[0] % type->block_values)
        return FAIL(g, "tensor %s: rows of %" PRIu64 " values, but %s comes in blocks of %" PRIu32, t->name, t->dims[0], type->name,
                    type->block_values);
    if (!gst_mul_size(n_values / type->block_values, type->block_bytes, &t->data_bytes))
        return FAIL(g, "tensor %s: its size does not fit 64 bits", t->name);
    return GEIST_OK;
}

static enum geist_status read_tensors(struct geist_gguf *g, struct cursor *c, uint64_t *offsets)
{
    for (size_t i = 0; i < g->n_tensors; i++) {
        enum geist_status status = read_tensor(g, c, i, &g->tensors[i], &offsets[i]);

        if (status)
            return status;
        g->tensors_by_name[i] = &g->tensors[i];
    }
    qsort(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, by_name);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (!strcmp(g->tensors_by_name[i - 1]->name, g->tensors_by_name[i]->name))
            return FAIL(g, "tensor %s: there twice", g->tensors_by_name[i]->name);
    return GEIST_OK;
}

/* Binds the table to the bytes behind it: aligned, inside the file, none over another. `places` [n_tensors] is scratch. */
static enum geist_status place_tensors(struct geist_gguf *g, const uint64_t *offsets, const struct gguf_tensor **places)
{
    size_t n_places = 0, n_data;

    g->data_begin = gst_round_up(g->table_end, g->alignment);
    if (g->data_begin > g->n_bytes) {
        if (g->n_tensors)
            return FAIL(g, "the file ends at byte %zu, before the tensor data at %zu", g->n_bytes, g->data_begin);
        g->data_begin = g->n_bytes;
    }
    n_data = g->n_bytes - g->data_begin;

    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];

        if (offsets[i] % g->alignment)
            return FAIL(g, "tensor %s: offset %" PRIu64 " is no multiple of the alignment %" PRIu32, t->name, offsets[i], g->alignment);
        if (offsets[i] > n_data || t->data_bytes > n_data - offsets[i])
            return FAIL(g, "tensor %s: %zu bytes at offset %" PRIu64 " of the data pass the file's end, which is at offset %zu", t->name,
                        t->data_bytes, offsets[i], n_data);
        if (t->unknown_type[0])
            continue;
        t->data = g->bytes + g->data_begin + offsets[i];
        places[n_places++] = t;
    }
    qsort(places, n_places, sizeof *places, by_place);
    for (size_t i = 1; i < n_places; i++)
        if ((size_t)(places[i]->data - places[i - 1]->data) < places[i - 1]->data_bytes)
            return FAIL(g, "tensor %s: its data at byte %zu overlaps that of tensor %s", places[i]->name,
                        (size_t)(places[i]->data - g->bytes), places[i - 1]->name);
    return GEIST_OK;
}

static enum geist_status read_header(struct geist_gguf *g, struct cursor *c)
{
    const uint8_t *magic = cursor_take(c, 4);
    uint64_t n_tensors, n_values;

    if (!magic || memcmp(magic, "GGUF", 4))
        return FAIL(g, "not a GGUF: byte 0 does not begin the letters GGUF");
    if (!cursor_u32(c, &g->version))
        return FAIL(g, "the file ends in the header, at byte %zu", g->n_bytes);
    if (g->version && !(g->version & 0xffff))
        return REFUSE(g, "a big-endian GGUF (version bytes at byte 4); only little-endian files are read");
    if (g->version != 2 && g->version != 3)
        return REFUSE(g, "GGUF version %" PRIu32 " at byte 4; versions 2 and 3 are read", g->version);
    if (!cursor_u64(c, &n_tensors) || !cursor_u64(c, &n_values))
        return FAIL(g, "the file ends in the header, at byte %zu of %d", g->n_bytes, HEADER_BYTES);
    if (n_tensors > GGUF_MAX_TENSORS || n_tensors > cursor_left(c) / TENSOR_LEAST_BYTES)
        return FAIL(g, "the header at byte 8 claims %" PRIu64 " tensors; at most %u, and %zu bytes follow", n_tensors, GGUF_MAX_TENSORS,
                    cursor_left(c));
    if (n_values > GGUF_MAX_VALUES || n_values > cursor_left(c) / VALUE_LEAST_BYTES)
        return FAIL(g, "the header at byte 16 claims %" PRIu64 " keys; at most %u, and %zu bytes follow", n_values, GGUF_MAX_VALUES,
                    cursor_left(c));
    g->n_tensors = (size_t)n_tensors;
    g->n_values = (size_t)n_values;
    return GEIST_OK;
}

static enum geist_status parse(struct geist_gguf *g)
{
    struct cursor c = {g->bytes, g->n_bytes, 0};
    uint64_t *offsets = NULL;
    const struct gguf_tensor **places = NULL;
    enum geist_status status = read_header(g, &c);

    if (status)
        return status;
    g->values = calloc(g->n_values + 1, sizeof *g->values);
    g->values_by_key = calloc(g->n_values + 1, sizeof *g->values_by_key);
    g->tensors = calloc(g->n_tensors + 1, sizeof *g->tensors);
    g->tensors_by_name = calloc(g->n_tensors + 1, sizeof *g->tensors_by_name);
    offsets = calloc(g->n_tensors + 1, sizeof *offsets);
    places = calloc(g->n_tensors + 1, sizeof *places);
    if (!g->values || !g->values_by_key || !g->tensors || !g->tensors_by_name || !offsets || !places) {
        status = gst_fail(g->engine->error, GEIST_E_MEMORY, "out of memory for %zu keys and %zu tensors", g->n_values, g->n_tensors);
        goto done;
    }

    status = read_values(g, &c);
    if (status)
        goto done;
    g->values_end = c.at;
    status = read_alignment(g);
    if (status)
        goto done;
    status = read_tensors(g, &c, offsets);
    if (status)
        goto done;
    g->table_end = c.at;
    status = place_tensors(g, offsets, places);

done:
    free(places);
    free(offsets);
    return status;
}

static enum geist_status create(struct geist_engine *e, const uint8_t *bytes, size_t n, bool mapped, struct geist_gguf **out)
{
    struct geist_gguf *g = calloc(1, sizeof *g);
    enum geist_status status;

    if (!g) {
        if (mapped)
            munmap((void *)(uintptr_t)bytes, n);
        return gst_fail(e->error, GEIST_E_MEMORY, "out of memory for a GGUF");
    }
    g->engine = e;
    g->bytes = bytes;
    g->n_bytes = n;
    g->mapped = mapped;
    status = parse(g);
    if (status) {
        geist_gguf_close(g);
        return status;
    }
    *out = g;
    return GEIST_OK;
}

enum geist_status geist_gguf_open_memory(struct geist_engine *e, const void *data, size_t n, struct geist_gguf **out)
{
    if (!e || !out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    if (!data || (uintptr_t)data % 64)
        return gst_fail(e->error, GEIST_E_ARGUMENT, "a GGUF in memory must be at a multiple of 64 bytes");
    if (n < HEADER_BYTES)
        return gst_fail(e->error, GEIST_E_FORMAT, "not a GGUF: %zu bytes, the header alone has %d", n, HEADER_BYTES);
    return create(e, data, n, false, out);
}

enum geist_status geist_gguf_open(struct geist_engine *e, const char *path, struct geist_gguf **out)
{
    struct stat s;
    void *p;
    int fd, number;

    if (!e || !out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    if (!path)
        return gst_fail(e->error, GEIST_E_ARGUMENT, "no path");
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe of that name must not hold us */
    if (fd < 0)
        return gst_fail(e->error, GEIST_E_IO, "%.300s: cannot be opened: %s", path, strerror(errno));
    if (fstat(fd, &s) || !S_ISREG(s.st_mode)) {
        close(fd);
        return gst_fail(e->error, GEIST_E_IO, "%.300s: not a regular file", path);
    }
    if (s.st_size < HEADER_BYTES) {
        close(fd);
        return gst_fail(e->error, GEIST_E_FORMAT, "%.300s: not a GGUF: %lld bytes, the header alone has %d", path, (long long)s.st_size,
                        HEADER_BYTES);
    }
    p = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    number = errno;
    close(fd);
    if (p == MAP_FAILED)
        return gst_fail(e->error, GEIST_E_IO, "%.300s: cannot be mapped: %s", path, strerror(number));
    return create(e, p, (size_t)s.st_size, true, out);
}

void geist_gguf_close(struct geist_gguf *g)
{
    if (!g)
        return;
    for (size_t i = 0; g->values && i < g->n_values; i++)
        free(g->values[i].key);
    for (size_t i = 0; g->tensors && i < g->n_tensors; i++)
        free(g->tensors[i].name);
    free(g->values);
    free(g->tensors);
    free(g->values_by_key);
    free(g->tensors_by_name);
    if (g->mapped)
        munmap((void *)(uintptr_t)g->bytes, g->n_bytes);
    free(g);
}
