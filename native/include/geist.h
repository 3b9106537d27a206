/* geist.h - a small inference engine whose sessions can be frozen into plain bytes and continued anywhere.
 *
 * Objects, from the outside in:
 *
 *     engine ── instruction-set tier, threads, scratch memory          one thread of control at a time
 *       └ gguf ── a parsed file: metadata and tensor table             immutable
 *           └ model ── weights bound to a forward pass                 immutable, shared by its sessions
 *               └ session ── one timeline of tokens and its state      one thread at a time
 *
 * One answer: logits depend on the model, the KV type and the tokens up to them, and on nothing else: not on how a
 * prompt was cut into calls, on threads, on the tier, or on having been restored. Bit for bit. GEIST_NUMERICS is
 * raised by any change that moves a bit.
 *
 * Conventions. Fallible calls return enum geist_status and put results last; handles and single values are cleared first. Words for a failure:
 * geist_engine_error / geist_session_error, valid until the next call on that handle. Nothing here prints, exits,
 * reads the environment or keeps global mutable state. Token ids are int32_t. Sizes named x_bytes are bytes, n_x are
 * counts. "borrows" means: the pointed-to memory must outlive the object that borrows it.
 *
 * Thread rule. All calls on one engine and on everything made from it come from one thread at a time; the engine's own
 * threads work inside a call only. Every call that computes sets the floating-point environment it needs on every thread
 * it uses and puts the caller's back.
 *
 * This file is also read by the Python binding's generator: outside the marked lines it uses plain declarations only.
 */
#ifndef GEIST_H
#define GEIST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
/* [cdef] */

#define GEIST_NUMERICS 1      /* version of the numbers: in every image and packed file */
#define GEIST_IMAGE_FORMAT 1  /* version of an image's layout */
#define GEIST_PACKED_LAYOUT 1 /* version of the packed weights' layout */
#define GEIST_KV_BLOCK 64     /* positions in a KV block, counted from position 0 */
#define GEIST_IMAGE_PAGE 4096 /* regions of an image and packed weights start at multiples of this */

enum geist_status {
    GEIST_OK = 0,
    GEIST_E_ARGUMENT = 1,    /* a caller's mistake: NULL, zero, misaligned, out of the documented range */
    GEIST_E_MEMORY = 2,      /* an allocation failed */
    GEIST_E_IO = 3,          /* a file could not be opened or mapped */
    GEIST_E_FORMAT = 4,      /* a GGUF that breaks its own rules; the words name the place */
    GEIST_E_UNSUPPORTED = 5, /* well-formed, but not something this engine does; the words name it */
    GEIST_E_TOKEN = 6,       /* a token id outside the vocabulary; the words give index and id */
    GEIST_E_TOO_LONG = 7,    /* positions would pass the session's limit; the words give both numbers */
    GEIST_E_IMAGE = 8,       /* an image or packed file is damaged: cut, flipped, inconsistent */
    GEIST_E_MISMATCH = 9,    /* an image or packed file is sound, but of another model, KV type, version or byte order */
    GEIST_E_NONFINITE = 10,  /* a wanted logit came out infinite or NaN; the session must be reset or restored */
    GEIST_E_STATE = 11,      /* the call does not fit the session's state, e.g. logits before any token */
    GEIST_E_BUFFER = 12,     /* a result does not fit the caller's buffer */
};

/* The status as a short constant word, e.g. "too long". Never NULL. */
const char *geist_status_text(enum geist_status status);

/* ---- engine ------------------------------------------------------------------------------------------------------ */

enum geist_tier {
    GEIST_TIER_AUTO = 0,   /* the best this machine has */
    GEIST_TIER_SCALAR = 1, /* portable C; the definition of every number */
    GEIST_TIER_AVX2 = 2,   /* AVX2, FMA, F16C */
    GEIST_TIER_AVX512 = 3, /* AVX-512 F, BW, DQ, VL, VNNI */
};

struct geist_engine; /* opaque */

struct geist_engine_options {
    enum geist_tier tier;
    uint32_t n_threads; /* threads that share a pass, the caller's included; 0 means 1; at most 256 */
};

/* GEIST_E_UNSUPPORTED when the machine lacks the tier. `options` may be NULL. */
enum geist_status geist_engine_create(const struct geist_engine_options *options, struct geist_engine **out);
/* Everything made from the engine must be destroyed before. NULL is allowed, here and in every destroy. */
void geist_engine_destroy(struct geist_engine *e);
const char *geist_engine_error(const struct geist_engine *e);
enum geist_tier geist_engine_tier(const struct geist_engine *e);
int geist_tier_available(enum geist_tier tier); /* 1 if this machine can run it */
const char *geist_tier_name(enum geist_tier tier);

/* ---- gguf -------------------------------------------------------------------------------------------------------- */

struct geist_gguf; /* opaque */

/* GGUF value types, numbered as in the file format. */
enum geist_value_type {
    GEIST_U8 = 0,
    GEIST_I8 = 1,
    GEIST_U16 = 2,
    GEIST_I16 = 3,
    GEIST_U32 = 4,
    GEIST_I32 = 5,
    GEIST_F32 = 6,
    GEIST_BOOL = 7,
    GEIST_STRING = 8,
    GEIST_ARRAY = 9,
    GEIST_U64 = 10,
    GEIST_I64 = 11,
    GEIST_F64 = 12,
};

/* A metadata value, aliasing the file's bytes (little-endian, unaligned). For a string `data` is its text without the
 * length; for an array it is `count` elements one behind the other, strings each as a uint64 length and the bytes. */
struct geist_value {
    enum geist_value_type type;
    enum geist_value_type item_type; /* of an array's elements; else as `type` */
    uint64_t count;                  /* elements of an array; else 1 */
    const void *data;
    size_t data_bytes;
};

struct geist_tensor_info {
    const char *name; /* NUL-terminated */
    const char *type; /* e.g. "Q8_0", "?41" if the number is unknown to this engine */
    uint32_t type_number;
    uint32_t n_dims;
    uint64_t dims[4];    /* dims[0] is the row length, as in the file; unused ones are 1 */
    uint64_t data_bytes; /* 0 if the type's size is unknown */
};

/* Opens and maps a file read-only. Keep it unchanged while it is open. Borrows `e`. */
enum geist_status geist_gguf_open(struct geist_engine *e, const char *path, struct geist_gguf **out);
/* Parses `n` bytes at `data`, 64-byte aligned, borrowed. */
enum geist_status geist_gguf_open_memory(struct geist_engine *e, const void *data, size_t n, struct geist_gguf **out);
void geist_gguf_close(struct geist_gguf *g);
size_t geist_gguf_n_values(const struct geist_gguf *g);
/* The i-th key (NUL-terminated, owned by `g`) and value; 0 if there is none, else 1. */
int geist_gguf_value_at(const struct geist_gguf *g, size_t i, const char **key, struct geist_value *out);
int geist_gguf_value(const struct geist_gguf *g, const char *key, struct geist_value *out);
/* Of an array of strings: the place, in its bytes, of the string that comes n behind the one at place `at`; `data_bytes` where there
 * is none. `at` is 0 or a place that was returned. */
size_t geist_value_skip(const struct geist_value *array, size_t at, uint64_t n);
/* Of an array of strings: their bytes without the lengths, the byte `end` behind each, into `out`: data_bytes - 7 * count bytes. */
void geist_value_join(const struct geist_value *array, uint8_t end, uint8_t *out);
size_t geist_gguf_n_tensors(const struct geist_gguf *g);
int geist_gguf_tensor_at(const struct geist_gguf *g, size_t i, struct geist_tensor_info *out);

/* ---- model ------------------------------------------------------------------------------------------------------- */

struct geist_model; /* opaque */

struct geist_model_info {
    const char *architecture; /* "llama", "qwen3", "qwen35" */
    uint32_t n_layers, n_recurrent_layers, n_attention_layers;
    uint32_t n_embd, n_ff, n_heads, n_kv_heads, head_dim;
    uint32_t n_vocab;
    uint32_t n_ctx_train; /* positions the model was trained for: the upper limit of a session */
    uint64_t n_params;
    uint64_t file_bytes, packed_bytes;
    uint64_t recurrent_bytes;    /* fixed state of a session: convolution windows and delta-rule matrices, without padding */
    uint64_t kv_bytes_per_token; /* f16 */
};

/* Binds the tensors to a forward pass: every tensor is looked up, its shape and type checked. Borrows `g` and its engine.
 * The model cannot compute until packed weights are bound. Errors: on the engine. */
enum geist_status geist_model_create(struct geist_gguf *g, struct geist_model **out);
void geist_model_destroy(struct geist_model *m);
void geist_model_get_info(const struct geist_model *m, struct geist_model_info *out);

/* Packed weights: the quantised matrices (and a few small tensors) rearranged once for all tiers, position-independent,
 * in memory the caller provides, GEIST_IMAGE_PAGE aligned. */
size_t geist_model_packed_size(const struct geist_model *m);
/* Writes them, and the model's fingerprint over metadata, tensor table and each tensor's SHA-256, with the engine's threads.
 * `n` must be geist_model_packed_size. */
enum geist_status geist_model_pack(struct geist_model *m, void *buf, size_t n);
/* Uses packed weights written by geist_model_pack for the same file; borrowed, never written. Refuses another layout, numerics,
 * size or tensor table (GEIST_E_MISMATCH, GEIST_E_IMAGE). Only once per model. */
enum geist_status geist_model_bind(struct geist_model *m, const void *packed, size_t n);
/* Compares the bound packed weights with the checksum they were written with: reads all of them. GEIST_E_IMAGE if a bit differs. */
enum geist_status geist_model_verify(const struct geist_model *m);
/* The fingerprint kept in the bound packed weights, 32 bytes. GEIST_E_STATE before bind. */
enum geist_status geist_model_fingerprint(const struct geist_model *m, uint8_t out[32]);
/* The fingerprint computed anew from the file's bytes. */
enum geist_status geist_gguf_fingerprint(struct geist_gguf *g, uint8_t out[32]);

/* ---- session ----------------------------------------------------------------------------------------------------- */

struct geist_session; /* opaque */

enum geist_kv_type { GEIST_KV_F16 = 0, GEIST_KV_F32 = 1 };

struct geist_session_options {
    enum geist_kv_type kv_type;
    uint32_t n_ctx; /* most positions; 0: the model's n_ctx_train; more than that is GEIST_E_ARGUMENT */
};

/* Borrows `m`. Errors: on the engine. `options` may be NULL. */
enum geist_status geist_session_create(struct geist_model *m, const struct geist_session_options *options, struct geist_session **out);
void geist_session_destroy(struct geist_session *s);
/* Back to position 0: nothing of what was is left. The sampler's parameters go to greedy. */
void geist_session_reset(struct geist_session *s);
const char *geist_session_error(const struct geist_session *s);
size_t geist_session_position(const struct geist_session *s); /* tokens taken in so far */
/* The ids from position 0 on; borrowed until the session changes. */
const int32_t *geist_session_tokens(const struct geist_session *s);

/* Takes in `n` >= 1 tokens; the logits after the last are pending then. Ids and length are checked before anything moves. */
enum geist_status geist_session_prefill(struct geist_session *s, const int32_t *tokens, size_t n);
/* The same for one token. */
enum geist_status geist_session_decode(struct geist_session *s, int32_t token);
/* Pending logits, float[n_vocab], borrowed until the session changes. GEIST_E_STATE at position 0. */
enum geist_status geist_session_logits(struct geist_session *s, const float **out);
/* log-softmax of the pending logits over the whole vocabulary at `n` ids: float[n], each <= 0. */
enum geist_status geist_session_logprobs(struct geist_session *s, const int32_t *ids, size_t n, float *out);
/* The k likeliest next tokens, likeliest first, ties to the lower id: ids[k], logprobs[k]; 1 <= k <= min(1024, n_vocab). */
enum geist_status geist_session_top(struct geist_session *s, size_t k, int32_t *ids, float *logprobs);
/* Log-probability of each of `n` >= 1 tokens as a continuation: out[i] = log p(tokens[i] | session, tokens[0..i-1]). The session
 * does not move. */
enum geist_status geist_session_score(struct geist_session *s, const int32_t *tokens, size_t n, float *out);

struct geist_sampler_params {
    float temperature;     /* 0: greedy, ties to the lower id; else up to 1e6 */
    int32_t top_k;         /* 0: off */
    float top_p;           /* 1: off; in (0, 1] */
    float min_p;           /* 0: off; in [0, 1) */
    float repeat_penalty;  /* 1: off; in (0, 1e6]: logits of recent tokens are divided by it if positive, else multiplied */
    int32_t repeat_last_n; /* how many tokens back are recent; 0: none, -1: all */
};

/* Draws are a function of (seed, stream, position) and the pending logits alone. GEIST_E_ARGUMENT names a value out of range. */
enum geist_status geist_session_set_sampler(struct geist_session *s, const struct geist_sampler_params *params, uint64_t seed,
                                            uint64_t stream);
/* Draws the next token from the pending logits; does not take it in. */
enum geist_status geist_session_sample(struct geist_session *s, int32_t *out);

/* ---- images: a session as bytes ---------------------------------------------------------------------------------- */

struct geist_bytes {
    const void *data;
    size_t n;
};

/* Flat images hold everything. Buffers are GEIST_IMAGE_PAGE aligned for attach; any alignment for restore. */
size_t geist_session_snapshot_size(const struct geist_session *s);
/* `n` must be at least the size; exactly geist_session_snapshot_size bytes are written, all of them defined. */
enum geist_status geist_session_snapshot(struct geist_session *s, void *buf, size_t n);
/* Validates everything, then becomes the image; on any error the session is byte for byte what it was. `n` may exceed the
 * image (a rounded mapping); the rest is ignored. */
enum geist_status geist_session_restore(struct geist_session *s, const void *buf, size_t n);
/* A second session at the same point; whole KV blocks are shared inside the engine, the parent never moves by it. */
enum geist_status geist_session_fork(const struct geist_session *src, struct geist_session **out);

/* Restore without the copy. `image` is flat (n_kv = 0) or thin (n_kv areas of whole KV blocks, in order from position 0: those of
 * all ancestors, then the context's own). Image and areas are page-aligned, never written, and must outlive the session and its
 * forks. Checks header, sizes, fingerprint and that areas cover the blocks; checksums are geist_image_verify's. */
enum geist_status geist_session_attach(struct geist_session *s, const void *image, size_t n, const struct geist_bytes *kv, size_t n_kv);
/* A thin image lacks the whole KV blocks; its partial last block stays in it. */
size_t geist_session_snapshot_thin_size(const struct geist_session *s);
enum geist_status geist_session_snapshot_thin(struct geist_session *s, void *buf, size_t n);
/* Whole KV blocks first_block .. first_block + n_blocks - 1, each kv_block_bytes (see geist_image_geometry). */
enum geist_status geist_session_snapshot_blocks(struct geist_session *s, size_t first_block, size_t n_blocks, void *buf, size_t n);

/* From these an image's size follows without a session. With up(x) rounding up to GEIST_IMAGE_PAGE and n tokens:
 *   thin = header_bytes + up(4 n) + up(4 n_vocab) + up(recurrent_bytes) + up((n mod 64) * kv_bytes_per_token) + up(8 * (n div 64))
 *   flat = thin + (n div 64) * kv_block_bytes */
struct geist_image_geometry {
    uint64_t header_bytes, n_vocab, recurrent_bytes, kv_bytes_per_token, kv_block_bytes;
};
void geist_model_image_geometry(const struct geist_model *m, enum geist_kv_type kv_type, struct geist_image_geometry *out);

struct geist_image_info {
    uint32_t format, numerics;
    uint32_t flat; /* 1: holds its KV blocks, 0: thin */
    enum geist_kv_type kv_type;
    uint8_t fingerprint[32];
    uint64_t id;        /* a hash over everything in the image */
    uint64_t parent_id; /* image the session was attached to or restored from, 0 if none */
    uint64_t n_kept;    /* positions whose whole blocks were the parent's */
    uint64_t n_tokens;
    uint64_t image_bytes;
    const int32_t *tokens; /* [n_tokens], in the image */
};
/* Reads an image's header without a model: checks its form, the header's own checksum and that `n` holds all regions. */
enum geist_status geist_image_inspect(const void *image, size_t n, struct geist_image_info *out);
/* Checks every region's checksum, and with areas given, those of the blocks from `first_block` on (blocks before it are taken as
 * verified before). No session is needed. */
enum geist_status geist_image_verify(const void *image, size_t n, const struct geist_bytes *kv, size_t n_kv, size_t first_block);

/* ---- one pass over spans ----------------------------------------------------------------------------------------- */

struct geist_span {
    struct geist_session *session;
    const int32_t *tokens;  /* [n_tokens] */
    const int32_t *parents; /* [n_tokens] or NULL for a chain */
    const uint8_t *rows;    /* [n_tokens], 1 where logits are wanted, or NULL for none */
    size_t n_tokens;
    float *logits; /* [wanted rows, n_vocab], the caller's */
    int discard;   /* 0: the session takes the tokens in; 1: it stays as it is */
};

/* This version takes one span whose parents are NULL; more is GEIST_E_UNSUPPORTED. */
enum geist_status geist_batch_forward(struct geist_model *m, const struct geist_span *spans, size_t n_spans);

/* [/cdef] */
#ifdef __cplusplus
}
#endif

#endif
