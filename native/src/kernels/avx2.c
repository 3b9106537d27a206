/* avx2.c - the tier for AVX2, FMA and F16C: its quantised products; all else is the shared text. Compiled with those flags. */
#if defined(__x86_64__)

#include "geist.h"
#include "kernels/vec16_avx2.h"

#include "kernels/tables.h"
#include "kernels/vector_mixers.h"

#define GROUP_TOKENS 4
#include "kernels/matmul_groups.h"

/* Half h (rows 0..7, 8..15) of group i of a block, as u8 = w + offset. */
ALWAYS_INLINE __m256i block_half(enum gst_pack pack, const uint8_t *quants, unsigned i, size_t h)
{
    const unsigned bits = gst_pack_bits(pack);
    const __m256i *at = (const __m256i *)(const void *)quants + h;
    if (bits == 8)
        return _mm256_load_si256(at + 2 * i);

    __m256i w = _mm256_load_si256(at + 2 * (i % 4));
    __m256i u = _mm256_and_si256(i < 4 ? w : _mm256_srli_epi16(w, 4), _mm256_set1_epi8(15));
    if (bits == 5) {
        __m256i high = _mm256_load_si256(at + 8);
        __m256i moved = i < 4 ? _mm256_slli_epi16(high, (int)(4 - i)) : _mm256_srli_epi16(high, (int)(i - 4));
        u = _mm256_or_si256(u, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }
    if (bits == 6) {
        __m256i high = _mm256_load_si256(at + 8 + i / 4 * 2);
        __m256i moved = i % 4 < 2 ? _mm256_slli_epi16(high, (int)(4 - 2 * (i % 4))) : _mm256_srli_epi16(high, (int)(2 * (i % 4) - 4));
        u = _mm256_or_si256(u, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
    }
    return u;
}

/* start + the products of groups [begin, end) of a block with the activations of n_group tokens; lanes are rows.
 *
 * vpmaddubsw multiplies u8 with s8 and adds two neighbours to 16 bits, saturating.
 * 8 bits: |w| (128 at most) with a's sign flipped where w < 0: two products are 2 * 128 * 127 at most, which fits. u8 = w + 128 itself would
 * not. Fewer bits: u * a, and as many groups as fit add up in 16 bits: 8 * 2 * 15 * 127 = 30,480 of four bits, 4 * 2 * 31 * 127 = 31,496 of
 * five, 2 * 2 * 63 * 127 = 32,004 of six. */
ALWAYS_INLINE void block_dots(enum gst_pack pack, size_t n_group, const uint8_t *quants, const int8_t (*q)[GST_QUANT_BLOCK],
                              const int32_t *start, unsigned begin, unsigned end, __m256i (*dot)[2])
{
    const unsigned bits = gst_pack_bits(pack), n_fit = bits == 8 ? 1 : bits == 4 ? 8 : bits == 5 ? 4 : 2;
    const __m256i ones = _mm256_set1_epi16(1), sign = _mm256_set1_epi8(-128);
    __m256i pairs[GROUP_TOKENS][2];
    UNROLL
    for (size_t t = 0; t < n_group; t++)
        dot[t][0] = dot[t][1] = bits == 8 ? _mm256_setzero_si256() : _mm256_set1_epi32(start[t]);

    UNROLL
    for (unsigned i = begin; i < end; i++) {
        __m256i w[2], magnitude[2];
        UNROLL
        for (size_t h = 0; h < 2; h++) {
            w[h] = block_half(pack, quants, i, h);
            if (bits == 8)
                w[h] = _mm256_xor_si256(w[h], sign);
            magnitude[h] = bits == 8 ? _mm256_abs_epi8(w[h]) : w[h];
        }
        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            int32_t four;
            memcpy(&four, q[t] + 4 * i, 4);
            __m256i a = _mm256_set1_epi32(four);
            UNROLL
            for (size_t h = 0; h < 2; h++) {
                __m256i two = _mm256_maddubs_epi16(magnitude[h], bits == 8 ? _mm256_sign_epi8(a, w[h]) : a);
                pairs[t][h] = (i - begin) % n_fit == 0 ? two : _mm256_add_epi16(pairs[t][h], two);
                if ((i - begin) % n_fit == n_fit - 1)
                    dot[t][h] = _mm256_add_epi32(dot[t][h], _mm256_madd_epi16(pairs[t][h], ones));
            }
        }
    }
}

ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g, struct vec16 *acc)
{
    const size_t quant_bytes = gst_pack_quant_bytes(pack);
    for (size_t b = 0; b < w->n_blocks; b++) {
        const uint8_t *quants = w->quants + b * quant_bytes;
        run_prefetch(n_group, quants, quant_bytes);
        __m256i dot[GROUP_TOKENS][2], dot2[GROUP_TOKENS][2];
        if (pack == GST_PACK_Q6_K) {
            block_dots(pack, n_group, quants, g->q + b * n_group, g->start + b * n_group, 0, 4, dot);
            block_dots(pack, n_group, quants, g->q + b * n_group, g->start2 + b * n_group, 4, 8, dot2);
        } else {
            block_dots(pack, n_group, quants, g->q + b * n_group, g->start + b * n_group, 0, 8, dot);
        }
        struct vec16 d = tile_scale(pack, w, b);
        struct vec16 m = gst_pack_has_minimum(pack) ? tile_minimum(pack, w, b) : d;
        struct vec16 s0 = pack == GST_PACK_Q6_K ? vec16_load_i8(w->factors + b * 32) : d;
        struct vec16 s1 = pack == GST_PACK_Q6_K ? vec16_load_i8(w->factors + b * 32 + 16) : d;

        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            size_t entry = b * n_group + t;
            struct vec16 value = {_mm256_cvtepi32_ps(dot[t][0]), _mm256_cvtepi32_ps(dot[t][1])};
            if (pack == GST_PACK_Q6_K) { /* integers below 2^24 throughout: no rounding */
                struct vec16 second = {_mm256_cvtepi32_ps(dot2[t][0]), _mm256_cvtepi32_ps(dot2[t][1])};
                value = vec16_fma(second, s1, vec16_mul(value, s0));
            }
            acc[t] = vec16_fma(value, vec16_mul(vec16_set1(g->scale[entry]), d), acc[t]);
            if (gst_pack_has_minimum(pack))
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
