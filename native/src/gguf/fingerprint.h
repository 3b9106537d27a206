/* fingerprint.h - what makes a file the same model: a SHA-256 over domain, sizes, header and metadata, tensor table, and the SHA-256 of
 * each tensor's data in table order. Padding between tensors, and what an unknown type holds, are not in it. */
#ifndef GEIST_FINGERPRINT_H
#define GEIST_FINGERPRINT_H

#include "gguf/gguf.h"

/* The SHA-256 of tensor i's data; any thread, any order. */
void gguf_tensor_sum(const struct geist_gguf *g, size_t i, uint8_t out[32]);
/* The fingerprint from all sums [n_tensors][32]. */
void gguf_fingerprint_of_sums(const struct geist_gguf *g, const uint8_t *sums, uint8_t out[32]);
/* A SHA-256 over metadata and tensor table alone: tells files of different models apart at once. */
void gguf_table_sum(const struct geist_gguf *g, uint8_t out[32]);
/* Indices of tensors [n_tensors], largest data first, so that threads which take one after the other end together. */
void gguf_tensors_by_size(const struct geist_gguf *g, uint32_t *order);

#endif
