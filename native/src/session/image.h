/* image.h - the bytes of an image. Internal; native tests make damaged ones through it.
 *
 *   page 0            struct image_header, the rest zero
 *   then, each at a multiple of GEIST_IMAGE_PAGE and padded with zeros, in this order:
 *   TOKENS            int32 [n_tokens]
 *   LOGITS            f32 [n_vocab], pending; zero at position 0
 *   RECURRENT         the session's recurrent region; zero at position 0
 *   TAIL              the partial last KV block, compact: [layer][K, V][n_kv_heads][n_tokens mod 64][head_dim]
 *   BLOCK_SUMS        uint64 [n_tokens div 64], checksum of every whole block from position 0 on
 *   BLOCKS            the whole blocks, flat images only
 *
 * All integers little-endian. Region sizes follow from geometry and token count (geist_image_geometry in geist.h), so an image's size is
 * known before it is made; a header that says otherwise is refused. */
#ifndef GEIST_IMAGE_H
#define GEIST_IMAGE_H

#include "session/session.h"

#define IMAGE_MAGIC "GEISTIMG"
#define IMAGE_BYTE_ORDER 0x01020304u

enum image_region_kind { REGION_TOKENS, REGION_LOGITS, REGION_RECURRENT, REGION_TAIL, REGION_BLOCK_SUMS, REGION_BLOCKS, REGION_COUNT };

struct image_region {
    char name[16];
    uint64_t offset;
    uint64_t bytes;    /* live ones; the padding behind them is zero */
    uint64_t checksum; /* of the live bytes; of BLOCKS: of the block sums, since each block has its own */
};

struct image_header {
    char magic[8];
    uint32_t byte_order;
    uint32_t format;
    uint32_t numerics;
    uint32_t header_bytes;
    uint64_t checksum; /* of the header with this field and `id` zero */
    uint64_t id;       /* the same value: a hash over everything, since region checksums are in the header */
    uint8_t fingerprint[32];
    uint32_t flat;
    uint32_t kv_type;
    uint32_t n_vocab, n_layers;
    uint32_t n_attention, n_recurrent;
    uint64_t recurrent_bytes, kv_bytes_per_token, kv_block_bytes;
    uint64_t n_tokens;
    uint64_t parent_id, n_kept;
    uint64_t image_bytes;
    float temperature, top_p, min_p, repeat_penalty;
    int32_t top_k, repeat_last_n;
    uint64_t seed, stream;
    struct image_region regions[REGION_COUNT];
};

_Static_assert(sizeof(struct image_header) <= GEIST_IMAGE_PAGE, "the header is one page");

/* Fills offsets and sizes of all regions and image_bytes from flat, n_tokens and geometry in `h`. */
void image_plan(struct image_header *h);
/* The header's checksum as it should be. */
uint64_t image_header_checksum(const struct image_header *h);

#endif
