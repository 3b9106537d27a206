/* avx512.c - the tier for AVX-512 F, BW, DQ, VL and VNNI: its quantised products; all else is the shared text. Compiled with those flags.
 */
#if defined(__x86_64__)

#include "geist.h"
#include "kernels/vec16_avx512.h"

#include "kernels/tables.h"
#include "kernels/vector_mixers.h"

#define GROUP_TOKENS 16
#include "kernels/matmul_groups.h"

/* The 32 values of a block of 16 rows as u8, four to a lane: u[g] is group g. */
ALWAYS_INLINE void block_unpack(enum gst_pack pack, const uint8_t *quants, __m512i u[8])
{
    const __m512i low = _mm512_set1_epi8(15);
    if (gst_pack_bits(pack) == 8) {
        UNROLL
        for (size_t i = 0; i < 8; i++)
            u[i] = _mm512_load_si512(quants + i * 64);
        return;
    }
    UNROLL
    for (size_t i = 0; i < 4; i++) {
        __m512i pair = _mm512_load_si512(quants + i * 64);
        u[i] = _mm512_and_si512(pair, low);
        u[i + 4] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
    if (gst_pack_bits(pack) == 5) {
        const __m512i fifth = _mm512_set1_epi8(16);
        __m512i high = _mm512_load_si512(quants + 256);
        UNROLL
        for (unsigned i = 0; i < 8; i++) {
            __m512i moved = i < 4 ? _mm512_slli_epi16(high, 4 - i) : _mm512_srli_epi16(high, i - 4);
            u[i] = _mm512_or_si512(u[i], _mm512_and_si512(moved, fifth));
        }
    }
    if (gst_pack_bits(pack) == 6) {
        const __m512i upper = _mm512_set1_epi8(48);
        UNROLL
        for (unsigned i = 0; i < 8; i++) {
            __m512i high = _mm512_load_si512(quants + 256 + i / 4 * 64);
            __m512i moved = i % 4 < 2 ? _mm512_slli_epi16(high, 4 - 2 * (i % 4)) : _mm512_srli_epi16(high, 2 * (i % 4) - 4);
            u[i] = _mm512_or_si512(u[i], _mm512_and_si512(moved, upper));
        }
    }
}

/* start + the products of groups [begin, end) with one token's activations. vpdpbusd multiplies u8 weights with s8 activations and adds
 * four neighbours to a lane's 32 bits, exactly; a lane is a row. */
ALWAYS_INLINE __m512i block_dot(const __m512i u[8], const int8_t *q, int32_t start, size_t begin, size_t end)
{
    __m512i dot = _mm512_set1_epi32(start);
    UNROLL
    for (size_t i = begin; i < end; i++) {
        int32_t four;
        memcpy(&four, q + 4 * i, 4);
        dot = _mm512_dpbusd_epi32(dot, u[i], _mm512_set1_epi32(four));
    }
    return dot;
}

/* The weights of a block stay in eight registers while the tokens pass; four activations are broadcast at a time. */
ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g, struct vec16 *acc)
{
    const size_t quant_bytes = gst_pack_quant_bytes(pack);
    for (size_t b = 0; b < w->n_blocks; b++) {
        run_prefetch(n_group, w->quants + b * quant_bytes, quant_bytes);
        __m512i u[8];
        block_unpack(pack, w->quants + b * quant_bytes, u);
        struct vec16 d = tile_scale(pack, w, b);
        struct vec16 m = gst_pack_has_minimum(pack) ? tile_minimum(pack, w, b) : d;
        struct vec16 s0 = pack == GST_PACK_Q6_K ? vec16_load_i8(w->factors + b * 32) : d;
        struct vec16 s1 = pack == GST_PACK_Q6_K ? vec16_load_i8(w->factors + b * 32 + 16) : d;

        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            size_t entry = b * n_group + t;
            __m512 dot;
            if (pack == GST_PACK_Q6_K) { /* integers below 2^24 throughout: no rounding */
                __m512 first = _mm512_cvtepi32_ps(block_dot(u, g->q[entry], g->start[entry], 0, 4));
                __m512 second = _mm512_cvtepi32_ps(block_dot(u, g->q[entry], g->start2[entry], 4, 8));
                dot = _mm512_fmadd_ps(second, s1.v, _mm512_mul_ps(first, s0.v));
            } else {
                dot = _mm512_cvtepi32_ps(block_dot(u, g->q[entry], g->start[entry], 0, 8));
            }
            acc[t].v = _mm512_fmadd_ps(dot, _mm512_mul_ps(_mm512_set1_ps(g->scale[entry]), d.v), acc[t].v);
            if (gst_pack_has_minimum(pack))
                acc[t].v = _mm512_fmadd_ps(m.v, _mm512_set1_ps(g->shift[entry]), acc[t].v);
        }
    }
}

const struct gst_kernels gst_kernels_avx512 = {
    .name = "avx512",
    .tier = GEIST_TIER_AVX512,
    VECTOR_KERNELS,
};

#else
typedef int gst_avx512_is_for_x86_64; /* C forbids an empty file */
#endif
