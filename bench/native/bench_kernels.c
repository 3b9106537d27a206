/* bench_kernels.c - how fast the kernels of each tier are on this machine, on one thread, in the shapes of a 0.8B hybrid model, beside what
 * the core could do at most: loops of nothing but vpdpbusd and nothing but fma, measured in the same run.
 *
 *     bench_kernels [seconds per figure, default 0.3] [tier name, default all] [pack, e.g. Q8_0] [ROWSxCOLS,...] [TOKENS,...]
 *
 * With a pack only its products of these shapes are measured, cold; `python -m bench.gemm` builds it and asks so. By hand:
 *
 *     cmake -S native -B BUILD && cmake --build BUILD --target geist
 *     cc -O3 -std=c11 -D_GNU_SOURCE -Inative/include -Inative/src bench/native/bench_kernels.c BUILD/libgeist.a -lm -pthread
 *
 * It prints and asserts nothing. A product's weights are walked through `cold` (each call takes another of many copies, together far larger
 * than any cache, as a pass does) or `warm` (always the same ones). GMAC/s counts one multiply-add of a weight with an activation as one.
 */
#include "geist.h"
#include "kernels/kernels.h"
#include "limits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double seconds_per_figure = 0.3;

static double now(void)
{
    return limits_now();
}

static uint32_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static float random_float(void)
{
    return (float)(int32_t)(random_bits() & 0xffff) / 32768.0f - 1.0f;
}

static void *memory(size_t n)
{
    void *p = aligned_alloc(64, (n + 63) / 64 * 64);
    if (p == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    memset(p, 0, n);
    return p;
}

static float *floats(size_t n)
{
    float *p = memory(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        p[i] = random_float();
    return p;
}

/* ---- what a core can do ---- */

static double peak_integer, peak_float, peak_read;

static void measure_peaks(void)
{
    peak_float = limits_fma(0.1);
    peak_integer = limits_vpdpbusd(0.1);
    const size_t n = (size_t)512 << 20;
    uint8_t *bytes = memory(n);
    memset(bytes, 1, n);
    volatile uint64_t sink = 0;
    for (unsigned way = 0; way < 2 * LIMITS_READS; way++) {
        double start = now();
        sink += limits_read(bytes, n, way % LIMITS_READS);
        double rate = (double)n / (now() - start);
        peak_read = rate > peak_read ? rate : peak_read;
    }
    free(bytes);
    printf("peak of this core: vpdpbusd %.0f GMAC/s, f32 fma %.1f GMAC/s, reading memory %.1f GB/s\n", peak_integer / 1e9, peak_float / 1e9,
           peak_read / 1e9);
}

static void print_rate(double rate, double peak, const char *unit)
{
    printf(" %8.1f %s", rate / 1e9, unit);
    if (peak > 0)
        printf(" (%4.1f %%)", 100 * rate / peak);
    printf("\n");
}

/* ---- quantised products ---- */

static const char *pack_name(enum gst_pack pack)
{
    static const char *const names[] = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};
    return names[pack];
}

static void bench_matmul(const struct gst_kernels *kernels, enum gst_pack pack, size_t n_rows, size_t n_cols, size_t n_tokens, int cold)
{
    size_t n_blocks = n_cols / GST_QUANT_BLOCK, n_tiles = (n_rows + 15) / 16;
    size_t tile_bytes = (gst_pack_parts(pack, n_blocks).end + 63) / 64 * 64;
    size_t matrix_bytes = n_tiles * tile_bytes, n_copies = cold ? ((size_t)400 << 20) / matrix_bytes + 1 : 1;

    uint8_t *tiles = memory(matrix_bytes * n_copies);
    for (size_t i = 0; i < matrix_bytes; i += 2) {
        uint16_t small = (uint16_t)(0x1c00 | (random_bits() & 0x3ff)); /* as f16 d: about 2^-8; as quants: anything */
        memcpy(tiles + i, &small, 2);
    }
    for (size_t i = 1; i < n_copies; i++)
        memcpy(tiles + i * matrix_bytes, tiles, matrix_bytes);
    float *x = floats(n_tokens * n_cols), *y = memory(n_tokens * n_rows * sizeof(float));
    int8_t *q = memory(n_tokens * n_cols);
    float *scale = memory(n_tokens * n_blocks * sizeof(float));
    int32_t *sum = memory(n_tokens * n_blocks * sizeof(int32_t));
    kernels->quantize(x, n_tokens * n_cols, q, scale, sum);
    struct gst_qact a = {q, scale, sum};

    double elapsed = 0, macs = 0, start = now();
    for (size_t call = 0; elapsed < seconds_per_figure; call++) {
        struct gst_packed w = {tiles + (call % n_copies) * matrix_bytes, tile_bytes, n_rows, n_cols};
        kernels->matmul[pack](&w, 0, n_tiles, &a, n_tokens, y, n_rows);
        macs += (double)n_rows * (double)n_cols * (double)n_tokens;
        elapsed = now() - start;
    }
    printf("%-7s matmul %s %5zu x %4zu %s T=%-3zu", kernels->name, pack_name(pack), n_rows, n_cols, cold ? "cold" : "warm", n_tokens);
    double bytes = macs / (double)n_tokens / ((double)n_rows * (double)n_cols) * (double)matrix_bytes;
    printf(" %6.1f GB/s", bytes / elapsed / 1e9);
    print_rate(macs / elapsed, peak_integer, "GMAC/s");
    free(tiles), free(x), free(y), free(q), free(scale), free(sum);
}

static void bench_matmul_float(const struct gst_kernels *kernels, enum gst_float_type type, size_t n_rows, size_t n_cols, size_t n_tokens)
{
    float *w = floats(n_rows * n_cols), *x = floats(n_tokens * n_cols), *y = memory(n_rows * n_tokens * sizeof(float));
    kernels->f32_to_f16(w, n_rows * n_cols / 2, (uint16_t *)(void *)w);
    double elapsed = 0, macs = 0, start = now();
    while (elapsed < seconds_per_figure) {
        kernels->matmul_float(w, type, n_cols, 0, n_rows, x, n_cols, n_tokens, y, n_rows);
        macs += (double)n_rows * (double)n_cols * (double)n_tokens;
        elapsed = now() - start;
    }
    printf("%-7s matmul %s %5zu x %4zu warm T=%-3zu            ", kernels->name,
           type == GST_F32   ? "F32 "
           : type == GST_F16 ? "F16 "
                             : "BF16",
           n_rows, n_cols, n_tokens);
    print_rate(macs / elapsed, peak_float, "GMAC/s");
    free(w), free(x), free(y);
}

/* ---- attention and state ---- */

static void bench_attend(const struct gst_kernels *kernels, enum gst_float_type type, size_t dim)
{
    const size_t n_blocks = 64; /* 4096 positions */
    float *k = floats(n_blocks * 64 * dim), *v = floats(n_blocks * 64 * dim), *q = floats(dim), *o = floats(dim);
    if (type == GST_F16) {
        kernels->f32_to_f16(k, n_blocks * 64 * dim, (uint16_t *)(void *)k);
        kernels->f32_to_f16(v, n_blocks * 64 * dim, (uint16_t *)(void *)v);
    }
    size_t block_bytes = 64 * dim * (type == GST_F16 ? 2 : 4);
    double elapsed = 0, macs = 0, start = now();
    while (elapsed < seconds_per_figure) {
        float m = -__builtin_inff(), l = 0;
        for (size_t b = 0; b < n_blocks; b++)
            kernels->attend(q, (const char *)k + b * block_bytes, (const char *)v + b * block_bytes, type, 64, dim, 0.06f, &m, &l, o);
        macs += 2.0 * 64 * (double)(n_blocks * dim);
        elapsed = now() - start;
    }
    printf("%-7s attend %s dim %-4zu 4096 positions              ", kernels->name, type == GST_F16 ? "F16" : "F32", dim);
    print_rate(macs / elapsed, peak_float, "GMAC/s");
    free(k), free(v), free(q), free(o);
}

static void bench_delta(const struct gst_kernels *kernels, size_t n_tokens)
{
    enum { N_HEADS = 288, DK = 128, DV = 128 }; /* 18 layers of 16 heads: the state lies in memory, 18.9 MB */
    float *state = memory((size_t)N_HEADS * DK * DV * sizeof(float));
    float *q = floats(n_tokens * DK), *k = floats(n_tokens * DK), *v = floats(n_tokens * DV), *o = floats(n_tokens * DV);
    float *decay = floats(n_tokens), *beta = floats(n_tokens);
    for (size_t t = 0; t < n_tokens; t++) {
        decay[t] = 0.9f;
        beta[t] = 0.1f;
    }
    for (size_t i = 0; i < n_tokens * DK; i++)
        k[i] *= 0.1f;

    double elapsed = 0, tokens = 0, start = now();
    while (elapsed < seconds_per_figure) {
        for (size_t h = 0; h < N_HEADS; h++) {
            float *s = state + h * DK * DV;
            kernels->delta_rule(s, s, DK, DV, 0, DV, q, k, DK, v, DV, decay, beta, 1, n_tokens, o, DV);
        }
        tokens += (double)n_tokens;
        elapsed = now() - start;
    }
    printf("%-7s delta_rule 288 heads 128 x 128 T=%-3zu %6.3f ms a token", kernels->name, n_tokens, 1e3 * elapsed / tokens);
    print_rate(tokens * N_HEADS * DK * DV * 4 / elapsed, peak_float, "Gop/s "); /* a multiplication and three fma an element */
    free(state), free(q), free(k), free(v), free(o), free(decay), free(beta);
}

static void bench_rows(const struct gst_kernels *kernels)
{
    enum { N = 3584 };
    float *x = floats(N), *g = floats(N), *y = floats(N);
    static int8_t q[N];
    static float scale[N / 32];
    static int32_t sum[N / 32];
    const char *names[] = {"quantize", "rms_norm", "silu_mul", "exp"};
    for (int which = 0; which < 4; which++) {
        double elapsed = 0, values = 0, start = now();
        while (elapsed < seconds_per_figure / 4) {
            for (int i = 0; i < 16; i++) {
                if (which == 0)
                    kernels->quantize(x, N, q, scale, sum);
                else if (which == 1)
                    kernels->rms_norm(x, g, N, 1e-6f, y);
                else if (which == 2)
                    kernels->silu_mul(g, x, N, y);
                else
                    kernels->exp(x, N, y);
            }
            values += 16.0 * N;
            elapsed = now() - start;
        }
        printf("%-7s %-8s rows of 3584                              ", kernels->name, names[which]);
        print_rate(values / elapsed, 0, "G values/s");
    }
    free(x), free(g), free(y);
}

static void bench_tier(const struct gst_kernels *kernels)
{
    static const size_t tokens[] = {1, 4, 16, 64, 256};
    int scalar = kernels->tier == GEIST_TIER_SCALAR;
    for (enum gst_pack pack = 0; pack < GST_PACK_COUNT; pack++) {
        for (size_t i = 0; i < sizeof tokens / sizeof tokens[0] && !(scalar && i > 1); i++) {
            bench_matmul(kernels, pack, 3584, 1024, tokens[i], 0);
            bench_matmul(kernels, pack, 3584, 1024, tokens[i], 1);
        }
    }
    bench_matmul(kernels, GST_PACK_Q8_0, 1024, 3584, 1, 1);
    if (!scalar)
        bench_matmul(kernels, GST_PACK_Q8_0, 1024, 3584, 64, 1);
    for (int type = 0; type < 3; type++) {
        bench_matmul_float(kernels, (enum gst_float_type)type, 256, 1024, 1);
        bench_matmul_float(kernels, (enum gst_float_type)type, 256, 1024, 64);
    }
    bench_attend(kernels, GST_F16, 256);
    bench_attend(kernels, GST_F32, 256);
    bench_attend(kernels, GST_F16, 64);
    bench_delta(kernels, 1);
    bench_delta(kernels, 16);
    bench_delta(kernels, 100);
    bench_rows(kernels);
}

/* Products of one pack, in the shapes "ROWSxCOLS,..." and for "TOKENS,..." at a time. */
static int bench_products(const struct gst_kernels *kernels, const char *pack_text, const char *shapes, const char *tokens)
{
    enum gst_pack pack = 0;
    while (pack < GST_PACK_COUNT && strcmp(pack_name(pack), pack_text))
        pack++;
    if (pack == GST_PACK_COUNT) {
        fprintf(stderr, "no pack is called %s\n", pack_text);
        return 1;
    }
    for (const char *s = shapes; *s; s += strcspn(s, ","), s += *s == ',')
        for (const char *t = tokens; *t; t += strcspn(t, ","), t += *t == ',') {
            size_t n_rows, n_cols, n_tokens;
            if (sscanf(s, "%zux%zu", &n_rows, &n_cols) != 2 || sscanf(t, "%zu", &n_tokens) != 1 || !n_rows || !n_tokens || !n_cols ||
                n_cols % (pack < GST_PACK_Q4_K ? 32 : 256)) {
                fprintf(stderr, "%s for %s are no products\n", s, t);
                return 1;
            }
            bench_matmul(kernels, pack, n_rows, n_cols, n_tokens, 1);
        }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && atof(argv[1]) > 0)
        seconds_per_figure = atof(argv[1]);
    measure_peaks();
    if (argc == 6)
        for (int tier = GEIST_TIER_AVX512; tier >= GEIST_TIER_SCALAR; tier--) {
            const struct gst_kernels *kernels = gst_kernels_for(tier);
            if (kernels != NULL && strcmp(argv[2], kernels->name) == 0)
                return bench_products(kernels, argv[3], argv[4], argv[5]);
        }
    for (int tier = GEIST_TIER_AVX512; tier >= GEIST_TIER_SCALAR; tier--) {
        const struct gst_kernels *kernels = gst_kernels_for(tier);
        if (kernels != NULL && (argc < 3 || strcmp(argv[2], kernels->name) == 0))
            bench_tier(kernels);
    }
    return 0;
}
