/* Property: every tier takes the same side where a kernel's definition has an edge: the smallest block that is rounded at all, blocks that
 * are not finite, signed zeros in 16-lane sums.  Tolerance: none; the definition names the side. */
#include "check.h"
#include "kernels/kernels.h"

#include <math.h>
#include <string.h>

static void check_quantize(const struct gst_kernels *k)
{
    const float edge = 0x1p-100f, below = nextafterf(edge, 0.0f);
    const struct {
        float largest;
        int rounds;
    } cases[] = {{edge, 1},        {nextafterf(edge, 1.0f), 1}, {below, 0}, {0x1p-101f, 0}, {0x1p-149f, 0}, {0.0f, 0}, {3.4e38f, 1},
                 {-0x1.8p-101f, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int place = 0; place < 32; place += 31) {
            float x[32] = {0}, scale = -1.0f;
            int32_t sum = -1;
            int8_t q[32];

            memset(q, 99, sizeof q);
            x[place] = cases[i].largest;
            k->quantize(x, 32, q, &scale, &sum);
            for (int j = 0; j < 32; j++)
                if (!CHECK(q[j] == (j == place && cases[i].rounds ? 127 : 0)))
                    fprintf(stderr, "  %s: case %zu, value %d is %d\n", k->name, i, j, q[j]);
            CHECK(sum == (cases[i].rounds ? 127 : 0));
            CHECK(scale == (cases[i].rounds ? cases[i].largest / 127.0f : 0.0f) && !signbit(scale));
        }
    for (int i = 0; i < 3; i++) {
        const float odd[3] = {INFINITY, -INFINITY, NAN};
        float x[32] = {1.0f, -2.0f}, scale = 0.0f;
        int32_t sum = -1;
        int8_t q[32];

        x[17] = odd[i];
        k->quantize(x, 32, q, &scale, &sum);
        CHECK(isnan(scale) && sum == 0 && q[0] == 0 && q[1] == 0 && q[17] == 0);
    }
}

/* A sum over nothing but -0 is +0 in a lane that starts from +0; a lane without a term stays +0. */
static void check_zeros(const struct gst_kernels *k)
{
    static const float minus[20] = {-0.0f, -0.0f, -0.0f}, ones[20] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

    for (size_t n = 1; n <= 20; n++) {
        float y = 7.0f;
        k->matmul_float(minus, GST_F32, n, 0, 1, ones, n, 1, &y, 1);
        CHECK(y == 0.0f && !signbit(y));
    }
}

/* With one key the softmax is 1: the sum of weights is 1, and the merge of a block far below leaves everything as it was. */
static void check_attend(const struct gst_kernels *k)
{
    for (size_t dim = 1; dim <= 70; dim += 23) {
        float q[70], key[70], value[70], o[70] = {0}, m = -INFINITY, l = 0.0f, o_before[70];

        for (size_t d = 0; d < dim; d++) {
            q[d] = 1.0f;
            key[d] = 0.5f;
            value[d] = 0.1f * (float)d - 1.0f;
        }
        k->attend(q, key, value, GST_F32, 1, dim, 1.0f, &m, &l, o);
        CHECK(m == 0.5f * (float)dim && l == 1.0f);
        CHECK(memcmp(o, value, dim * sizeof *o) == 0);
        memcpy(o_before, o, sizeof o);
        for (size_t d = 0; d < dim; d++)
            key[d] = -200.0f;
        k->attend(q, key, value, GST_F32, 1, dim, 1.0f, &m, &l, o); /* exp of less than -87.3 is 0 */
        CHECK(m == 0.5f * (float)dim && l == 1.0f);
        CHECK(memcmp(o, o_before, sizeof o) == 0);
    }
}

int main(void)
{
    for (int tier = GEIST_TIER_SCALAR; tier <= GEIST_TIER_AVX512; tier++) {
        const struct gst_kernels *k = gst_kernels_for(tier);
        if (!k) {
            printf("tier %s: not on this machine\n", geist_tier_name((enum geist_tier)tier));
            continue;
        }
        check_quantize(k);
        check_zeros(k);
        check_attend(k);
    }
    return check_done("test_kernel_edges");
}
