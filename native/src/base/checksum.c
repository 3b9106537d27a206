/* checksum.c - a fast checksum against damage, not against an adversary.
 *
 *     bytes   | word 0 | word 1 | ... | word 7 |  a stripe of 64
 *     lanes      h0       h1             h7       h = rotl((h ^ word) * odd, 29)
 *
 * Every step is a bijection of the lane for a given word and of the word for a given lane, and so is the fold of the lanes at the end: a
 * change of a single word, wherever it is, changes the result. */
#include "base/base.h"

#define LANES 8
#define ODD 0x9e3779b97f4a7c15u /* 2^64 / golden ratio, odd */

static inline uint64_t mix(uint64_t h, uint64_t word)
{
    h = (h ^ word) * ODD;
    return h << 29 | h >> 35;
}

static inline void stripe(uint64_t lane[LANES], const uint8_t *p)
{
    uint64_t word[LANES];

    memcpy(word, p, sizeof word);
    for (int i = 0; i < LANES; i++)
        lane[i] = mix(lane[i], word[i]);
}

static inline void start(uint64_t lane[LANES])
{
    for (int i = 0; i < LANES; i++)
        lane[i] = ODD * (uint64_t)(i + 1);
}

/* The last n < 64 bytes at p, then the lanes and the length become one word. */
static inline uint64_t finish(uint64_t lane[LANES], const uint8_t *p, size_t n, size_t n_all)
{
    uint64_t h = 0;

    if (n) {
        uint8_t tail[64] = {0};

        memcpy(tail, p, n);
        stripe(lane, tail);
    }
    for (int i = 0; i < LANES; i++)
        h = mix(h, lane[i]);
    h = mix(h, n_all);
    h ^= h >> 32;
    return h;
}

uint64_t gst_checksum(const void *data, size_t n)
{
    const uint8_t *p = data;
    uint64_t lane[LANES];
    size_t whole = n & ~(size_t)63;

    start(lane);
    for (size_t i = 0; i < whole; i += 64)
        stripe(lane, p + i);
    return finish(lane, n ? p + whole : p, n - whole, n);
}

uint64_t gst_checksum_copy(void *to, const void *data, size_t n)
{
    const uint8_t *p = data;
    uint8_t *q = to;
    uint64_t lane[LANES];
    size_t whole = n & ~(size_t)63;

    start(lane);
    for (size_t i = 0; i < whole; i += 64) {
        stripe(lane, p + i);
        memcpy(q + i, p + i, 64);
    }
    if (n - whole)
        memcpy(q + whole, p + whole, n - whole);
    return finish(lane, n ? p + whole : p, n - whole, n);
}
