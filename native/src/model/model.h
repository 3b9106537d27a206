/* model.h - a loaded model: geometry, weights, constants of its forward pass. Immutable once packed weights are bound. */
#ifndef GEIST_MODEL_H
#define GEIST_MODEL_H

#include "base/base.h"
#include "gguf/gguf.h"
#include "kernels/kernels.h"
#include "quant/quant.h"

/* Caps on geometry, so that products of sizes stay far from overflow and stack buffers suffice. */
#define MODEL_MAX_LAYERS 512u
#define MODEL_MAX_EMBD 65536u
#define MODEL_MAX_FF 262144u
#define MODEL_MAX_HEADS 1024u
#define MODEL_MAX_HEAD_DIM 512u /* head_dim; delta-rule key size <= 256 */
#define MODEL_MAX_VOCAB (1u << 21)
#define MODEL_MAX_CTX (1u << 24)

enum model_arch { ARCH_LLAMA, ARCH_QWEN3, ARCH_QWEN35, ARCH_GEMMA3 };

struct model_config {
    enum model_arch arch;
    uint32_t n_layers; /* that are run: MTP blocks are not counted */
    uint32_t n_embd, n_ff, n_vocab, n_ctx_train;
    uint32_t n_heads, n_kv_heads, head_dim; /* attention */
    uint32_t n_rot;                         /* leading dimensions of a head that RoPE turns; even */
    bool rope_neox;                         /* pairs (i, i + n_rot/2), else (2i, 2i + 1) */
    double rope_base;
    double rope_divisor; /* linear scaling: positions are divided by it; 1 without */
    float eps;
    float score_scale; /* of q . k */
    float embd_scale;  /* of the embedding's rows */
    /* sliding windows (gemma3): a local layer sees `window` positions, its own included, and turns by a base of its own, unscaled */
    uint32_t window; /* 0: no layer is local */
    double rope_base_local;
    bool local[MODEL_MAX_LAYERS]; /* per layer */
    /* gated DeltaNet (qwen35), else 0 */
    uint32_t conv_width, n_k_heads, n_v_heads, dk, dv;
    uint32_t n_channels;              /* of the convolution: 2 n_k_heads dk + n_v_heads dv */
    uint32_t n_mtp;                   /* multi-token-prediction blocks behind the layers; not run */
    bool recurrent[MODEL_MAX_LAYERS]; /* per layer */
};

/* A matrix y = W x, [n_rows, n_cols]. */
struct model_matrix {
    const struct gguf_tensor *tensor;
    const struct quant_type *type;
    size_t n_rows, n_cols;
    struct gst_packed packed; /* tiles NULL until bound, and for float types */
    size_t packed_offset;     /* in the packed weights */
};

struct model_layer {
    bool recurrent, local;
    uint32_t index;                               /* among the layers of its kind: slot of its state */
    const float *attn_norm;                       /* [n_embd] */
    const float *ffn_norm;                        /* [n_embd] before the MLP (post_attention_norm in qwen35) */
    const float *mixer_post_norm, *ffn_post_norm; /* [n_embd] of what mixer and MLP add (gemma3), or NULL */
    struct model_matrix ffn_gate, ffn_up, ffn_down;
    /* attention */
    struct model_matrix attn_q, attn_k, attn_v, attn_output; /* attn_q of qwen35: per head q then gate, [n_heads * 2 * head_dim, n_embd] */
    const float *attn_q_norm, *attn_k_norm;                  /* [head_dim] or NULL */
    /* gated DeltaNet */
    struct model_matrix attn_qkv, attn_gate, ssm_alpha, ssm_beta, ssm_out;
    const float *ssm_dt_bias, *ssm_a; /* [n_v_heads] */
    const float *ssm_norm;            /* [dv] */
    const float *conv_file;           /* [n_channels, conv_width] as in the file */
    const float *conv_taps;           /* [conv_width, n_channels] in the packed weights, once bound */
    size_t conv_offset;
};

struct geist_model {
    struct geist_engine *engine; /* borrows */
    struct geist_gguf *gguf;     /* borrows */
    struct model_config config;
    uint32_t n_attention, n_recurrent;
    struct model_matrix token_embd; /* rows are dequantised from the file; its packed form only where tied */
    struct model_matrix output;     /* = token_embd where the file has no output.weight */
    bool tied;
    const float *output_norm;
    struct model_layer *layers; /* owns [n_layers] */
    /* owns [1 or 2, n_rot / 2]: angle of pair i at position p is p * rope_freq[i]; second, where layers are local, their frequencies */
    double *rope_freq;
    size_t n_rotations; /* 1, or 2 */
    uint64_t n_params;
    size_t packed_bytes;
    bool bound;
    const uint8_t *packed; /* borrows [packed_bytes] once bound */
    uint8_t fingerprint[32];
};

/* config.c: "qwen35", as in general.architecture and before its keys. */
const char *model_arch_name(enum model_arch arch);
/* config.c: reads and checks the hyperparameters; n_vocab is left to model_weights_bind. Words on the engine. */
enum geist_status model_config_read(const struct geist_gguf *g, struct model_config *out);
/* weights.c: looks up every tensor of m->config, fills layers, matrices, norms, rope_freq and n_params, and refuses tensors that no part of
 * the pass would use. */
enum geist_status model_weights_bind(struct geist_model *m);
/* packed.c: gives every packed part its offset and sets packed_bytes; GEIST_E_UNSUPPORTED when that overflows. */
enum geist_status model_packed_plan(struct geist_model *m);

#endif
