/* lookup.c - what a parsed file answers: values and tensors by place and by name. */
#include "gguf/cursor.h"
#include "gguf/gguf.h"
#include "quant/quant.h"

#include <inttypes.h>
#include <stdlib.h>

static int key_against(const void *key, const void *item)
{
    return strcmp(key, (*(const struct gguf_value *const *)item)->key);
}

static int name_against(const void *name, const void *item)
{
    return strcmp(name, (*(const struct gguf_tensor *const *)item)->name);
}

static const struct gguf_value *value_find(const struct geist_gguf *g, const char *key)
{
    const struct gguf_value **found = bsearch(key, g->values_by_key, g->n_values, sizeof *g->values_by_key, key_against);

    return found ? *found : NULL;
}

const struct gguf_tensor *gguf_tensor_find(const struct geist_gguf *g, const char *name)
{
    const struct gguf_tensor **found = bsearch(name, g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, name_against);

    return found ? *found : NULL;
}

const char *gguf_tensor_type_name(const struct gguf_tensor *t)
{
    return t->unknown_type[0] ? t->unknown_type : quant_type_of(t->type)->name;
}

size_t geist_gguf_n_values(const struct geist_gguf *g)
{
    return g->n_values;
}

int geist_gguf_value_at(const struct geist_gguf *g, size_t i, const char **key, struct geist_value *out)
{
    memset(out, 0, sizeof *out);
    *key = NULL;
    if (i >= g->n_values)
        return 0;
    *key = g->values[i].key;
    *out = g->values[i].value;
    return 1;
}

int geist_gguf_value(const struct geist_gguf *g, const char *key, struct geist_value *out)
{
    const struct gguf_value *v = value_find(g, key);

    memset(out, 0, sizeof *out);
    if (!v)
        return 0;
    *out = v->value;
    return 1;
}

/* The strings of an array were walked when the file was parsed, so their lengths hold. */
size_t geist_value_skip(const struct geist_value *array, size_t at, uint64_t n)
{
    const uint8_t *data = array->data;

    for (; n && at < array->data_bytes; n--)
        at += 8 + (size_t)cursor_read_u64(data + at);
    return at;
}

void geist_value_join(const struct geist_value *array, uint8_t end, uint8_t *out)
{
    const uint8_t *p = array->data;

    for (uint64_t i = 0; i < array->count; i++) {
        size_t n = (size_t)cursor_read_u64(p);

        memcpy(out, p + 8, n);
        out[n] = end;
        out += n + 1;
        p += 8 + n;
    }
}

size_t geist_gguf_n_tensors(const struct geist_gguf *g)
{
    return g->n_tensors;
}

int geist_gguf_tensor_at(const struct geist_gguf *g, size_t i, struct geist_tensor_info *out)
{
    const struct gguf_tensor *t;

    memset(out, 0, sizeof *out);
    if (i >= g->n_tensors)
        return 0;
    t = &g->tensors[i];
    out->name = t->name;
    out->type = gguf_tensor_type_name(t);
    out->type_number = t->type;
    out->n_dims = t->n_dims;
    memcpy(out->dims, t->dims, sizeof out->dims);
    out->data_bytes = t->data_bytes;
    return 1;
}

/* An integer of any width as sign and magnitude; false for other types. */
static bool integer_of(const struct geist_value *v, bool *negative, uint64_t *magnitude)
{
    const uint8_t *p = v->data;
    int64_t i;

    switch (v->type) {
    case GEIST_U8:
        *magnitude = p[0];
        *negative = false;
        return true;
    case GEIST_U16:
        *magnitude = (uint64_t)(p[0] | p[1] << 8);
        *negative = false;
        return true;
    case GEIST_U32:
        *magnitude = cursor_read_u32(p);
        *negative = false;
        return true;
    case GEIST_U64:
        *magnitude = cursor_read_u64(p);
        *negative = false;
        return true;
    case GEIST_I8:
        i = (int8_t)p[0];
        break;
    case GEIST_I16:
        i = (int16_t)(p[0] | p[1] << 8);
        break;
    case GEIST_I32:
        i = (int32_t)cursor_read_u32(p);
        break;
    case GEIST_I64:
        i = (int64_t)cursor_read_u64(p);
        break;
    default:
        return false;
    }
    *negative = i < 0;
    *magnitude = i < 0 ? -(uint64_t)i : (uint64_t)i;
    return true;
}

static const char *type_text(const struct geist_value *v)
{
    switch (v->type) {
    case GEIST_F32:
    case GEIST_F64:
        return "a float";
    case GEIST_BOOL:
        return "a truth value";
    case GEIST_STRING:
        return "a string";
    case GEIST_ARRAY:
        return "an array";
    default:
        return "an integer";
    }
}

enum geist_status gguf_get_u32(const struct geist_gguf *g, const char *key, uint32_t *out, bool *found)
{
    const struct gguf_value *v = value_find(g, key);
    uint64_t magnitude;
    bool negative;

    *out = 0;
    *found = v != NULL;
    if (!v)
        return GEIST_OK;
    if (!integer_of(&v->value, &negative, &magnitude))
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: %s where an integer is expected", key, type_text(&v->value));
    if ((negative && magnitude) || magnitude > UINT32_MAX)
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: %s%" PRIu64 " does not fit an unsigned 32-bit integer", key,
                        negative ? "-" : "", magnitude);
    *out = (uint32_t)magnitude;
    return GEIST_OK;
}

enum geist_status gguf_get_f32(const struct geist_gguf *g, const char *key, float *out, bool *found)
{
    const struct gguf_value *v = value_find(g, key);
    float x;

    *out = 0;
    *found = v != NULL;
    if (!v)
        return GEIST_OK;
    if (v->value.type == GEIST_F32) {
        memcpy(&x, v->value.data, 4);
    } else if (v->value.type == GEIST_F64) {
        double wide;

        memcpy(&wide, v->value.data, 8);
        x = wide >= -3.4028234663852886e38 && wide <= 3.4028234663852886e38 ? (float)wide : __builtin_inff();
    } else {
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: %s where a float is expected", key, type_text(&v->value));
    }
    if (!(x - x == 0))
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: not a finite 32-bit float", key);
    *out = x;
    return GEIST_OK;
}

enum geist_status gguf_get_text(const struct geist_gguf *g, const char *key, char *out, size_t n, bool *found)
{
    const struct gguf_value *v = value_find(g, key);

    memset(out, 0, n);
    *found = v != NULL;
    if (!v)
        return GEIST_OK;
    if (v->value.type != GEIST_STRING)
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: %s where a string is expected", key, type_text(&v->value));
    if (v->value.data_bytes >= n || memchr(v->value.data, 0, v->value.data_bytes))
        return gst_fail(g->engine->error, GEIST_E_FORMAT, "key %.200s: longer than %zu bytes, or holds a NUL", key, n - 1);
    memcpy(out, v->value.data, v->value.data_bytes);
    return GEIST_OK;
}
