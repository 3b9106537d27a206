/* gguf.h - a parsed GGUF as the rest of the engine sees it. The public calls on it are in geist.h. */
#ifndef GEIST_GGUF_H
#define GEIST_GGUF_H

#include "base/base.h"

/* Caps on what a file may claim, so that no count can exhaust memory. Named, tested, in one place. */
#define GGUF_MAX_VALUES 65536u /* metadata entries */
#define GGUF_MAX_TENSORS 65536u
#define GGUF_MAX_KEY_BYTES 4096u
#define GGUF_MAX_NAME_BYTES 256u          /* tensor names */
#define GGUF_MAX_STRING_BYTES (64u << 20) /* a metadata string, e.g. a chat template */
#define GGUF_MAX_ARRAY (1u << 26)         /* elements of an array; arrays of arrays are refused */

struct gguf_value {
    char *key; /* owned, NUL-terminated */
    struct geist_value value;
};

struct gguf_tensor {
    char *name;            /* owned, NUL-terminated */
    char unknown_type[16]; /* "?41", where the type number is unknown */
    uint32_t type;
    uint32_t n_dims;
    uint64_t dims[4];    /* dims[0] is the row length; unused ones are 1 */
    const uint8_t *data; /* aliases the file; NULL if the type's size is unknown */
    size_t data_bytes;
};

struct geist_gguf {
    struct geist_engine *engine; /* borrows */
    const uint8_t *bytes;
    size_t n_bytes;
    bool mapped; /* owns the mapping */
    uint32_t version;
    uint32_t alignment;
    size_t n_values, n_tensors;
    struct gguf_value *values;                  /* owns [n_values] */
    struct gguf_tensor *tensors;                /* owns [n_tensors] */
    const struct gguf_value **values_by_key;    /* owns [n_values], sorted */
    const struct gguf_tensor **tensors_by_name; /* owns [n_tensors], sorted */
    size_t values_end;                          /* the file: header and metadata [0, values_end), tensor table [values_end, table_end), */
    size_t table_end;
    size_t data_begin; /* padding, tensor data from here on */
};

/* The type's name: never NULL. */
const char *gguf_tensor_type_name(const struct gguf_tensor *t);
const struct gguf_tensor *gguf_tensor_find(const struct geist_gguf *g, const char *name);
/* Scalars by key, with every integer width of the file accepted and range-checked. *found = false (and GEIST_OK) when absent;
 * GEIST_E_FORMAT with words when it has another type or does not fit. */
enum geist_status gguf_get_u32(const struct geist_gguf *g, const char *key, uint32_t *out, bool *found);
enum geist_status gguf_get_f32(const struct geist_gguf *g, const char *key, float *out, bool *found);
/* A short text (no NUL, fewer than `n` bytes) copied into out [n], NUL-terminated. */
enum geist_status gguf_get_text(const struct geist_gguf *g, const char *key, char *out, size_t n, bool *found);

#endif
