/* session.h - one timeline: its tokens and the state the model keeps about them.
 *
 * The state lies in three places:
 *
 *   recurrent   one flat region, f32: per recurrent layer the convolution window, then the delta-rule matrices
 *               [layer 0: window [conv_width - 1, n_channels] | S [n_v_heads, dk, dv]] [layer 1: ...] ...
 *   blocks      KV of 64 positions each, behind a table of pointers; a whole block never changes again and may be shared
 *               [attention layer 0: K | V] [layer 1: K | V] ...      K, V: [n_kv_heads, 64, head_dim]
 *   logits      of the last position, f32 [n_vocab]
 *
 * `recurrent` and `logits` may point into an image the session was attached to; the next pass reads them there and writes its results
 * to memory of the session's own. */
#ifndef GEIST_SESSION_H
#define GEIST_SESSION_H

#include "base/base.h"
#include "model/model.h"

/* Where everything lies, a function of model and KV type. Sizes in bytes. */
struct state_layout {
    size_t recurrent_bytes;
    size_t window_bytes, matrix_bytes; /* of one layer, each rounded up to 64 */
    size_t kv_element_bytes;           /* 2 or 4 */
    size_t kv_head_bytes;              /* one head's 64 rows of K or V */
    size_t kv_bytes_per_token;         /* all layers, K and V */
    size_t kv_block_bytes;             /* 64 positions, rounded up to GEIST_IMAGE_PAGE */
};

void state_layout_of(const struct geist_model *m, enum geist_kv_type kv_type, struct state_layout *out);

/* Byte offsets in the recurrent region; `index` counts recurrent layers. */
static inline size_t state_window_offset(const struct state_layout *l, uint32_t index)
{
    return index * (l->window_bytes + l->matrix_bytes);
}

static inline size_t state_matrix_offset(const struct state_layout *l, uint32_t index)
{
    return state_window_offset(l, index) + l->window_bytes;
}

/* Byte offset in a KV block of a head's [64, head_dim] rows; `index` counts attention layers, which = 0 for K, 1 for V. */
static inline size_t state_kv_offset(const struct state_layout *l, uint32_t n_kv_heads, uint32_t index, uint32_t which, uint32_t head)
{
    return (((size_t)index * 2 + which) * n_kv_heads + head) * l->kv_head_bytes;
}

struct kv_block {
    uint8_t *data; /* [kv_block_bytes]; owns, or aliases an attached image's area (then never written) */
    size_t n_refs; /* sessions that hold it */
    bool owned;
    bool summed; /* `checksum` is that of the whole block */
    uint64_t checksum;
};

struct sampler {
    struct geist_sampler_params params;
    uint64_t seed, stream;
};

struct geist_session {
    struct geist_model *model; /* borrows */
    struct state_layout layout;
    enum geist_kv_type kv_type;
    size_t n_ctx;

    size_t n_tokens;
    int32_t *tokens; /* owns [token_capacity] */
    size_t token_capacity;

    struct kv_block **blocks; /* owns the table [block_capacity]; holds one reference to each of the n_blocks */
    size_t n_blocks, block_capacity;

    const uint8_t *recurrent; /* the state now: recurrent_own, or in an image; NULL at position 0 */
    uint8_t *recurrent_own;   /* owns [recurrent_bytes], or NULL until a pass needs it */
    const float *logits;      /* [n_vocab] of the last position: logits_own, or in an image; NULL at position 0 */
    float *logits_own;        /* owns [n_vocab], or NULL */

    struct sampler sampler;
    uint64_t parent_id; /* image it was attached to or restored from */
    size_t n_kept;      /* positions in whole blocks of that image */
    bool broken;        /* a non-finite logit came out: only reset, restore and attach help */
    char error[GST_ERROR_BYTES];
};

/* Grows tokens, block table, blocks and own buffers so that `n` more tokens fit; moves nothing of the state. */
enum geist_status session_reserve(struct geist_session *s, size_t n);
/* Only the tables, for `total` positions in all; false when out of memory. */
bool session_reserve_tables(struct geist_session *s, size_t total);
/* A branch shares whole blocks with `src`, copies the partial one, and reads recurrent state and logits where `src` has them, without a
 * copy: `src` must not change while the branch lives. */
enum geist_status session_branch(const struct geist_session *src, struct geist_session **out);
/* Drops state, tokens and references; keeps own buffers. */
void session_clear(struct geist_session *s);

/* session/kv.c */
/* Memory for a recurrent region; undefined but for the padding between its parts, which is zero. NULL when out of memory. */
uint8_t *recurrent_create(const struct geist_model *m, const struct state_layout *l);
/* A block of the session's own; its positions are undefined. */
struct kv_block *kv_block_create(const struct state_layout *l);
struct kv_block *kv_block_alias(const void *data);
void kv_block_release(struct kv_block *b);
/* Copies the first n_rows positions of every head from block to block ... */
void kv_rows_copy(const struct geist_model *m, const struct state_layout *l, const uint8_t *from, size_t n_rows, uint8_t *to);
/* ... and between a block [..., 64, head_dim] and a compact tail [..., n_rows, head_dim]. */
void kv_tail_pack(const struct geist_model *m, const struct state_layout *l, const uint8_t *block, size_t n_rows, uint8_t *tail);
void kv_tail_unpack(const struct geist_model *m, const struct state_layout *l, const uint8_t *tail, size_t n_rows, uint8_t *block);
/* Of a whole block, kept once taken. */
uint64_t kv_block_checksum(const struct state_layout *l, struct kv_block *b);

/* session/logprob.c: log-softmax at ids, of one row of logits [n_vocab]. */
void logprob_at(const struct gst_kernels *k, const float *logits, size_t n_vocab, const int32_t *ids, size_t n, float *out);

/* session/sampler.c */
void sampler_reset(struct sampler *sampler);
/* Words into `error` when a value is out of its range. */
enum geist_status sampler_check(const struct geist_sampler_params *params, char *error);
/* `work` is scratch of sampler_work_bytes(n_vocab). `tokens` [n_tokens] are those before the draw. */
size_t sampler_work_bytes(size_t n_vocab);
int32_t sampler_draw(const struct sampler *sampler, const float *logits, size_t n_vocab, const int32_t *tokens, size_t n_tokens,
                     void *work);
/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). */
void sampler_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
