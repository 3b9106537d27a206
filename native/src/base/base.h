/* base.h - what every room of the engine stands on: the engine handle, error words, checked sizes, bits, threads.
 *
 * Internal. Functions of the library that are not in geist.h carry the prefix gst_ when they cross a file. */
#ifndef GEIST_BASE_H
#define GEIST_BASE_H

#include "geist.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define GST_ERROR_BYTES 512

struct gst_kernels; /* kernels/kernels.h */
struct gst_threads;

struct geist_engine {
    const struct gst_kernels *kernels; /* aliases a constant table */
    struct gst_threads *threads;       /* owns */
    void *scratch;                     /* owns; grown by gst_engine_scratch, 64-byte aligned, contents undefined between calls */
    size_t scratch_bytes;
    char error[GST_ERROR_BYTES];
};

/* Formats words into `error` [GST_ERROR_BYTES] and returns `status`, so that a failure is one line. */
enum geist_status gst_fail(char *error, enum geist_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* At least `n` bytes of the engine's scratch memory, or NULL. Earlier contents and pointers into it are lost. */
void *gst_engine_scratch(struct geist_engine *e, size_t n);

/* 64-byte aligned memory, zeroed; NULL when out of memory. n = 0 gives a valid pointer. Freed with gst_free. */
void *gst_alloc(size_t n);
/* The same without the zeros: for large buffers that are written before they are read. */
void *gst_alloc_raw(size_t n);
void gst_free(void *p);

/* Products and sums that can only say no: false when the result does not fit. */
static inline bool gst_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool gst_add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline size_t gst_round_up(size_t n, size_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

/* IEEE half and bfloat16, exact to float; float to half rounds to nearest even, overflow goes to infinity, NaN stays a (quiet) NaN. */
float gst_f16_to_f32(uint16_t h);
uint16_t gst_f32_to_f16(float f);

static inline float gst_bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* The floating-point environment of every computation: round to nearest, no flush to zero, no denormals-are-zero, exceptions masked.
 * gst_fpenv_enter returns what was there for gst_fpenv_leave. Called at every public entry that computes and on every thread. */
uint64_t gst_fpenv_enter(void);
void gst_fpenv_leave(uint64_t saved);

/* Threads that split one piece of work by output element. The caller's thread takes part. */
enum geist_status gst_threads_create(uint32_t n_threads, struct gst_threads **out);
void gst_threads_destroy(struct gst_threads *t);
uint32_t gst_threads_count(const struct gst_threads *t);
/* Calls work(context, begin, end) over disjoint ranges that cover [0, n), each a multiple of `grain` except the last; returns when all are
 * done. At most one range per thread. Not re-entrant. */
void gst_threads_run(struct gst_threads *t, size_t n, size_t grain, void (*work)(void *context, size_t begin, size_t end), void *context);

/* Double-precision functions made of + - * / and sqrt only, the same bits on every machine; within 2 ulp unless said otherwise. */
double gst_exp(double x);
double gst_log(double x);
double gst_log1p(double x);         /* x > -1 */
double gst_sin(double x);           /* |x| <= 2^30 */
double gst_cos(double x);           /* |x| <= 2^30 */
double gst_pow(double x, double y); /* x > 0, result in the normal range; within 1e-14 relative for |y log x| <= 50 */

/* SHA-256. */
struct gst_sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    uint8_t block[64];
};
void gst_sha256_init(struct gst_sha256 *s);
void gst_sha256_update(struct gst_sha256 *s, const void *data, size_t n);
void gst_sha256_final(struct gst_sha256 *s, uint8_t out[32]);

/* Checksum of a region: eight 64-bit lanes over 64-byte stripes, each lane h = rotl((h ^ word) * odd constant, 29); the tail is padded with
 * zeros and the length mixed in last. Words are little-endian. Detects any change of one word with certainty. */
uint64_t gst_checksum(const void *data, size_t n);
/* The same while copying `n` bytes to `to` (no overlap). */
uint64_t gst_checksum_copy(void *to, const void *data, size_t n);

#endif
