/* forward.h - one pass of tokens through the model. Internal; sessions call it, native tests look inside through it. */
#ifndef GEIST_FORWARD_H
#define GEIST_FORWARD_H

#include "session/session.h"

/* Most rows of one pass; longer prompts take several. A cut moves no bit. */
#define FORWARD_MAX_ROWS 128

struct forward_output {
    /* Called for each row with rows[i] != 0, in order; logits [n_vocab] are scratch. NULL rows: none. */
    const uint8_t *rows; /* [n_tokens] */
    void (*sink)(void *context, size_t row, const float *logits);
    void *context;
    /* For tests: inputs of every layer and the last one's output, [n_layers + 1, n_tokens, n_embd], or NULL. */
    float *hidden;
};

/* Takes in 1 <= n <= FORWARD_MAX_ROWS tokens, checked before, for which session_reserve has made room. With `pending`, the logits of the
 * last row become the session's pending ones. Does not touch n_tokens and tokens. GEIST_E_NONFINITE if a wanted logit is not finite. */
enum geist_status forward_pass(struct geist_session *s, const int32_t *tokens, size_t n, bool pending, const struct forward_output *output);

/* ---- between the files of this room ---- */

/* One pass's rows and scratch. T = n_tokens. All buffers are the engine's scratch memory, 64-byte aligned. */
struct pass {
    struct geist_session *s;
    const struct geist_model *m;
    const struct gst_kernels *k;
    struct gst_threads *threads;
    size_t n_tokens; /* T */
    size_t start;    /* position of row 0 */

    float *x;         /* [T, n_embd] residual stream */
    float *h;         /* [T, n_embd] normed input of a stage */
    float *out;       /* [T, n_embd] what a stage adds to x */
    float *wide;      /* [T, widest mixer or MLP row] */
    float *wide2;     /* the same */
    float *mixed;     /* [T, widest mixer output] heads, side by side */
    float *gate;      /* [T, n_v_heads * dv] z of the DeltaNet */
    float *narrow;    /* [4, T, n_v_heads] a, b, decay, beta of the DeltaNet */
    float *kv;        /* [2, T, n_kv_heads * head_dim] k and v */
    float *soft;      /* [2, n_heads, T] m and l of the online softmax */
    float *cos, *sin; /* [n_rotations, T, n_rot / 2]; the second where layers are local */

    /* the rounded form of a stage's input, for quantised matrices */
    int8_t *q;      /* [T, widest K] */
    float *q_scale; /* [T, widest K / 32] */
    int32_t *q_sum; /* [T, widest K / 32] */
};

/* A stage's input, rounded when a quantised matrix asks for it first. */
struct stage_input {
    const float *x; /* [T, n_cols] */
    size_t n_cols, n_tokens;
    bool rounded;
};

/* y [T, y_stride] = W x */
void stage_matmul(struct pass *p, const struct model_matrix *w, struct stage_input *in, float *y, size_t y_stride);
/* y [T, n] = RMS norm of x's rows */
void stage_norm(struct pass *p, const float *x, const float *w, float *y);

void attention_layer(struct pass *p, const struct model_layer *layer);                                  /* h -> out */
void deltanet_layer(struct pass *p, const struct model_layer *layer, const uint8_t *from, uint8_t *to); /* h -> out; states of the layer */

#endif
