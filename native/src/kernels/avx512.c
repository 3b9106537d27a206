/* avx512.c - the tier for AVX-512 F, BW, DQ, VL and VNNI: its quantised products; all else is the shared text. Compiled with those flags.
 */
#if defined(__x86_64__)

#include "geist.h"
#include "kernels/vec16_avx512.h"

#include "kernels/tables.h"
#include "kernels/vector_mixers.h"

#define GROUP_TOKENS 16
#include "kernels/matmul_groups.h"

/* vpdpbusd multiplies u8 weights with s8 activations and adds four neighbours to a lane's 32 bits, exactly; a lane is a row. The weights of
 * a block stay in eight registers while the tokens pass; four activations are broadcast at a time. */
ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g, struct vec16 *acc)
{
    const size_t quant_bytes = pack == GST_PACK_Q8_0 ? 512 : 256;
    for (size_t b = 0; b < w->n_blocks; b++) {
        run_prefetch(n_group, w->quants + b * quant_bytes, quant_bytes);
        __m512i u[8];
        if (pack == GST_PACK_Q8_0) {
            UNROLL
            for (size_t i = 0; i < 8; i++)
                u[i] = _mm512_load_si512(w->quants + b * quant_bytes + i * 64);
        } else {
            const __m512i low = _mm512_set1_epi8(15);
            UNROLL
            for (size_t i = 0; i < 4; i++) {
                __m512i pair = _mm512_load_si512(w->quants + b * quant_bytes + i * 64);
                u[i] = _mm512_and_si512(pair, low);
                u[i + 4] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
            }
        }
        __m512 d = vec16_load_f16(w->scales + b * 32).v;
        __m512 m = pack == GST_PACK_Q4_1 ? vec16_load_f16(w->minimums + b * 32).v : d;

        UNROLL
        for (size_t t = 0; t < n_group; t++) {
            size_t entry = b * n_group + t;
            __m512i dot = _mm512_set1_epi32(g->start[entry]);
            UNROLL
            for (size_t i = 0; i < 8; i++) {
                int32_t four;
                memcpy(&four, g->q[entry] + 4 * i, 4);
                dot = _mm512_dpbusd_epi32(dot, u[i], _mm512_set1_epi32(four));
            }
            __m512 scale = _mm512_mul_ps(_mm512_set1_ps(g->scale[entry]), d);
            acc[t].v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc[t].v);
            if (pack == GST_PACK_Q4_1)
                acc[t].v = _mm512_fmadd_ps(m, _mm512_set1_ps(g->shift[entry]), acc[t].v);
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
