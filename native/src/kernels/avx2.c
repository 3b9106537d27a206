/* avx2.c - the tier for AVX2, FMA and F16C: its quantised products; all else is the shared text. Compiled with those flags. */
#if defined(__x86_64__)

#include "geist.h"
#include "kernels/vec16_avx2.h"

#include "kernels/tables.h"
#include "kernels/vector_mixers.h"

#define GROUP_TOKENS 4
#include "kernels/matmul_groups.h"

/* vpmaddubsw multiplies u8 with s8 and adds two neighbours to 16 bits, saturating.
 * Q8_0: |w| (128 at most) with a's sign flipped where w < 0: two products are 2 * 128 * 127 at most, which fits. u8 = w + 128 itself would
 * not. Q4: u4 * a; the pairs of all eight groups are 8 * 2 * 15 * 127 = 30,480 at most, so that a whole block adds up in 16 bits. */
ALWAYS_INLINE void block_dots(enum gst_pack pack, size_t n_group, const uint8_t *quants, const int8_t (*q)[GST_QUANT_BLOCK],
                              const int32_t *start, __m256i (*dot)[2])
{
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
    UNROLL
    for (size_t t = 0; t < n_group; t++)
        dot[t][0] = dot[t][1] = _mm256_setzero_si256();

    UNROLL
    for (size_t i = 0; i < 8; i++) {
        const __m256i *at = (const __m256i *)(const void *)(quants + (pack == GST_PACK_Q8_0 ? i : i % 4) * 64);
        __m256i w[2], magnitude[2];
        UNROLL
        for (size_t h = 0; h < 2; h++) {
            w[h] = _mm256_load_si256(at + h);
            if (pack == GST_PACK_Q8_0) {
                w[h] = _mm256_xor_si256(w[h], sign);
                magnitude[h] = _mm256_abs_epi8(w[h]);
            } else {
                magnitude[h] = _mm256_and_si256(i < 4 ? w[h] : _mm256_srli_epi16(w[h], 4), low);
            }
        }
        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            int32_t four;
            memcpy(&four, q[t] + 4 * i, 4);
            __m256i a = _mm256_set1_epi32(four);
            UNROLL
            for (size_t h = 0; h < 2; h++) {
                if (pack == GST_PACK_Q8_0) {
                    __m256i pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(a, w[h]));
                    dot[t][h] = _mm256_add_epi32(dot[t][h], _mm256_madd_epi16(pairs, ones));
                } else {
                    dot[t][h] = _mm256_add_epi16(dot[t][h], _mm256_maddubs_epi16(magnitude[h], a));
                }
            }
        }
    }
    if (pack != GST_PACK_Q8_0) {
        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            __m256i offset = _mm256_set1_epi32(start[t]);
            dot[t][0] = _mm256_add_epi32(_mm256_madd_epi16(dot[t][0], ones), offset);
            dot[t][1] = _mm256_add_epi32(_mm256_madd_epi16(dot[t][1], ones), offset);
        }
    }
}

ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g, struct vec16 *acc)
{
    const size_t quant_bytes = pack == GST_PACK_Q8_0 ? 512 : 256;
    for (size_t b = 0; b < w->n_blocks; b++) {
        run_prefetch(n_group, w->quants + b * quant_bytes, quant_bytes);
        __m256i dot[GROUP_TOKENS][2];
        block_dots(pack, n_group, w->quants + b * quant_bytes, g->q + b * n_group, g->start + b * n_group, dot);
        struct vec16 d = vec16_load_f16(w->scales + b * 32);
        struct vec16 m = pack == GST_PACK_Q4_1 ? vec16_load_f16(w->minimums + b * 32) : d;

        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            size_t entry = b * n_group + t;
            struct vec16 value = {_mm256_cvtepi32_ps(dot[t][0]), _mm256_cvtepi32_ps(dot[t][1])};
            acc[t] = vec16_fma(value, vec16_mul(vec16_set1(g->scale[entry]), d), acc[t]);
            if (pack == GST_PACK_Q4_1)
                acc[t] = vec16_fma(m, vec16_set1(g->shift[entry]), acc[t]);
        }
    }
}

const struct gst_kernels gst_kernels_avx2 = {
    .name = "avx2",
    .tier = GEIST_TIER_AVX2,
    VECTOR_KERNELS,
};

#else
typedef int gst_avx2_is_for_x86_64; /* C forbids an empty file */
#endif
