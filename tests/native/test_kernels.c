/* test_kernels.c - property: every kernel of every tier this machine has equals the scalar one bit for bit, on random input of odd sizes
 * that holds denormals, both zeros and huge and tiny values, and writes nothing but its outputs. Tolerance: none; where the scalar result
 * is NaN any NaN will do, since only its payload could differ. Reason: a session must continue on any machine with the same numbers; the
 * scalar code is their definition.
 *
 * The definition itself is tested where it claims more than an order: exp within 2 ulp of the C library's double exp, f16 over all values,
 * quantised products against exact integer arithmetic in double. The tiers that ran are printed; with GEIST_REQUIRE_TIER=avx512 (or avx2)
 * in the environment, as in CI, a machine without that tier fails. */
#include "base/base.h"
#include "check.h"
#include "kernels/kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static const struct gst_kernels *scalar, *tier; /* the definition, and who is tested against it */

/* ---- random input ---- */

static uint64_t random_state = 20240607;

static uint32_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static size_t random_below(size_t n)
{
    return random_bits() % n;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Kinds of input. Plain: what a model has. Wild: any finite float, so that sums overflow too. Mixed: plain with denormals, zeros of both
 * signs, huge and tiny values strewn in. Broken: mixed with infinities and NaN. */
enum kind { PLAIN, MIXED, WILD, BROKEN, N_KINDS };

static float plain(void)
{
    return (float)(int32_t)random_bits() / 2147483648.0f;
}

static float random_float(enum kind kind)
{
    if (kind == WILD) {
        uint32_t bits = random_bits();
        return (bits & 0x7f800000u) == 0x7f800000u ? float_of(bits ^ 0x40000000u) : float_of(bits);
    }
    uint32_t r = random_bits() % 64;
    if (kind == PLAIN || r > 9)
        return plain();
    static const float strewn[] = {0.0f, -0.0f, 0x1p-149f, -0x1.8p-130f, 0x1p-126f, 0x1p-101f, 1e30f, -3e-30f, 65504.0f, -100.0f};
    if (kind == BROKEN && r < 3)
        return r == 0 ? NAN : r == 1 ? INFINITY : -INFINITY;
    return strewn[r];
}

static void fill(float *x, size_t n, enum kind kind)
{
    for (size_t i = 0; i < n; i++)
        x[i] = random_float(kind);
}

/* ---- outputs: two copies of a guarded buffer, one for each side ---- */

#define GUARD 64 /* bytes before and behind */
#define SIDES 2

struct output {
    uint8_t *memory[SIDES]; /* owns: guard, n_bytes, guard */
    size_t n_bytes;
};

static void *owned(size_t n)
{
    void *p = malloc(n ? n : 1);
    if (p == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static struct output output_make(size_t n_bytes)
{
    struct output o = {.n_bytes = n_bytes};
    for (int side = 0; side < SIDES; side++) {
        o.memory[side] = owned(n_bytes + 2 * GUARD);
        memset(o.memory[side], 0xa5, n_bytes + 2 * GUARD);
    }
    return o;
}

static void *output_at(const struct output *o, int side)
{
    return o->memory[side] + GUARD;
}

/* Starts both sides from the same content. */
static void output_set(const struct output *o, const void *content)
{
    for (int side = 0; side < SIDES; side++)
        memcpy(output_at(o, side), content, o->n_bytes);
}

static bool guards_whole(const struct output *o)
{
    for (int side = 0; side < SIDES; side++)
        for (size_t i = 0; i < GUARD; i++)
            if (o->memory[side][i] != 0xa5 || o->memory[side][GUARD + o->n_bytes + i] != 0xa5)
                return false;
    return true;
}

static bool same_floats(const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t x, y;
        memcpy(&x, (const uint8_t *)a + 4 * i, 4);
        memcpy(&y, (const uint8_t *)b + 4 * i, 4);
        if (x != y && !(isnan(float_of(x)) && isnan(float_of(y))))
            return false;
    }
    return true;
}

static bool is_half_nan(uint16_t h)
{
    return (h & 0x7fff) > 0x7c00;
}

static bool same_halves(const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t x, y;
        memcpy(&x, (const uint8_t *)a + 2 * i, 2);
        memcpy(&y, (const uint8_t *)b + 2 * i, 2);
        if (x != y && !(is_half_nan(x) && is_half_nan(y)))
            return false;
    }
    return true;
}

enum element { FLOATS, HALVES, BYTES };

/* Whether both sides hold the same and nothing beside them was written; frees the buffer. */
static bool output_agrees(struct output *o, enum element element)
{
    const void *a = output_at(o, 0), *b = output_at(o, 1);
    bool same = element == FLOATS   ? same_floats(a, b, o->n_bytes / 4)
                : element == HALVES ? same_halves(a, b, o->n_bytes / 2)
                                    : memcmp(a, b, o->n_bytes) == 0;
    bool whole = guards_whole(o);
    for (int side = 0; side < SIDES; side++)
        free(o->memory[side]);
    return same && whole;
}

/* What the comparison is worth: it must see one flipped bit, and one byte written behind the end. */
static void test_comparison(void)
{
    float x[37];
    fill(x, 37, MIXED);
    for (size_t bit = 0; bit < 37 * 32; bit += 5) {
        struct output o = output_make(sizeof x);
        output_set(&o, x);
        o.memory[1][GUARD + bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(!output_agrees(&o, FLOATS));
    }
    struct output o = output_make(sizeof x);
    output_set(&o, x);
    CHECK(guards_whole(&o));
    o.memory[1][GUARD + sizeof x] ^= 1;
    CHECK(!output_agrees(&o, FLOATS));

    float zeros[2] = {0.0f, -0.0f}, nans[2] = {NAN, float_of(0xffc12345u)}, finite = 1.0f;
    CHECK(!same_floats(&zeros[0], &zeros[1], 1));
    CHECK(same_floats(&nans[0], &nans[1], 1));
    CHECK(!same_floats(&nans[0], &finite, 1));
}

/* ---- rows ---- */

static const struct gst_kernels *side_kernels(int side)
{
    return side == 0 ? scalar : tier;
}

/* Input of n values that ends with its allocation, so that a sanitizer sees a read behind it. */
static float *input_make(size_t n, enum kind kind)
{
    float *x = owned(n * sizeof(float));
    fill(x, n, kind);
    return x;
}

static void test_rows_of(size_t n, enum kind kind)
{
    float *x = input_make(n, kind), *w = input_make(n, kind);
    float eps = 1e-6f, scale = plain(), number = fabsf(plain()) + 0.25f;

    /* y apart from x (alias 0), y = x (1), y = gate (2) */
    for (int alias = 0; alias < 3; alias++) {
        struct output rms = output_make(4 * n), l2 = output_make(4 * n), sum = output_make(4 * n), silu = output_make(4 * n),
                      gelu = output_make(4 * n), gated = output_make(4 * n), inverse = output_make(4 * n);
        output_set(&rms, x), output_set(&l2, x), output_set(&sum, w), output_set(&inverse, x);
        output_set(&silu, alias == 2 ? w : x), output_set(&gelu, alias == 2 ? w : x), output_set(&gated, alias == 2 ? w : x);
        for (int side = 0; side < SIDES; side++) {
            const struct gst_kernels *k = side_kernels(side);
            float *y = output_at(&rms, side);
            k->rms_norm(alias ? y : x, w, n, eps, y);
            y = output_at(&l2, side);
            k->l2_norm(alias ? y : x, n, eps, scale, y);
            y = output_at(&inverse, side);
            k->scale_by_inverse(alias ? y : x, n, number, y);
            k->add(x, n, output_at(&sum, side));
            y = output_at(&silu, side);
            k->silu_mul(alias == 2 ? y : w, alias == 1 ? y : x, n, y);
            y = output_at(&gelu, side);
            k->gelu_mul(alias == 2 ? y : w, alias == 1 ? y : x, n, y);
            y = output_at(&gated, side);
            k->sigmoid_mul(alias == 2 ? y : w, alias == 1 ? y : x, n, y);
        }
        CHECK(output_agrees(&rms, FLOATS));
        CHECK(output_agrees(&l2, FLOATS));
        CHECK(output_agrees(&inverse, FLOATS));
        CHECK(output_agrees(&sum, FLOATS));
        CHECK(output_agrees(&silu, FLOATS));
        CHECK(output_agrees(&gelu, FLOATS));
        CHECK(output_agrees(&gated, FLOATS));
    }

    struct output sigmoid = output_make(4 * n), exps = output_make(4 * n), halves = output_make(2 * n), wide = output_make(4 * n);
    struct output numbers = output_make(8);
    int finite[SIDES];
    uint16_t *h = owned(2 * n);
    for (size_t i = 0; i < n; i++)
        h[i] = (uint16_t)random_bits();
    for (int side = 0; side < SIDES; side++) {
        const struct gst_kernels *k = side_kernels(side);
        float *pair = output_at(&numbers, side);
        k->sigmoid(x, n, output_at(&sigmoid, side));
        k->exp(x, n, output_at(&exps, side));
        k->f32_to_f16(x, n, output_at(&halves, side));
        k->f16_to_f32(h, n, output_at(&wide, side));
        pair[0] = k->max(x, n);
        pair[1] = k->sum_exp(x, n, scale);
        finite[side] = k->all_finite(x, n);
    }
    CHECK(output_agrees(&sigmoid, FLOATS));
    CHECK(output_agrees(&exps, FLOATS));
    CHECK(output_agrees(&halves, HALVES));
    CHECK(output_agrees(&wide, FLOATS));
    CHECK(output_agrees(&numbers, FLOATS));
    CHECK(finite[0] == finite[1]);
    free(x), free(w), free(h);
}

static void test_rows(void)
{
    for (size_t n = 1; n <= 70; n++)
        for (int kind = 0; kind < N_KINDS; kind++)
            test_rows_of(n, (enum kind)kind);
    test_rows_of(1000, MIXED);
    test_rows_of(4099, PLAIN);
}

/* A row whose terms are all -0 keeps lanes of -0 only if a tail leaves the others alone; zeros of both signs in max; one bad value
 * anywhere. */
static void test_corners(void)
{
    for (size_t n = 1; n <= 40; n++) {
        float *x = owned(4 * n);
        for (size_t i = 0; i < n; i++)
            x[i] = -0.0f;
        CHECK(bits_of(tier->max(x, n)) == 0x80000000u && bits_of(scalar->max(x, n)) == 0x80000000u);
        for (size_t at = 0; at < n; at++) {
            x[at] = 0.0f;
            CHECK(bits_of(tier->max(x, n)) == 0 && bits_of(scalar->max(x, n)) == 0);
            CHECK(tier->all_finite(x, n) == 1);
            x[at] = -NAN;
            CHECK(isnan(tier->max(x, n)) && isnan(scalar->max(x, n)));
            CHECK(tier->all_finite(x, n) == 0 && scalar->all_finite(x, n) == 0);
            x[at] = -INFINITY;
            CHECK(tier->all_finite(x, n) == 0 && scalar->all_finite(x, n) == 0);
            x[at] = -0.0f;
        }
        free(x);
    }
}

/* Products too small for f32 round to -0, here in all sixteen lanes: the sum is -0 only if a tail of one leaves fifteen of them alone. */
static void test_negative_zero_lanes(void)
{
    enum { N = 17 };
    float w[N], x[N], q[N], v[N] = {0};
    uint16_t h[N], b[N], zeros[N] = {0};
    for (size_t i = 0; i < N; i++) {
        w[i] = 0x1p-24f;
        x[i] = q[i] = -0x1p-149f;
        h[i] = gst_f32_to_f16(w[i]);
        b[i] = (uint16_t)(bits_of(w[i]) >> 16);
    }
    const void *matrices[] = {[GST_F32] = w, [GST_F16] = h, [GST_BF16] = b};
    for (int side = 0; side < SIDES; side++) {
        for (int type = 0; type < 3; type++) {
            float y = 1.0f;
            side_kernels(side)->matmul_float(matrices[type], (enum gst_float_type)type, N, 0, 1, x, N, 1, &y, 1);
            CHECK(bits_of(y) == 0x80000000u);
        }
        for (int type = 0; type < 2; type++) {
            float m = -INFINITY, l = 0.0f, o[N] = {0};
            side_kernels(side)->attend(q, matrices[type], type == GST_F16 ? (const void *)zeros : v, (enum gst_float_type)type, 1, N, 1.0f,
                                       &m, &l, o);
            CHECK(bits_of(m) == 0x80000000u && l == 1.0f);
        }
    }
}

static void test_rope(void)
{
    for (size_t half = 1; half <= 70; half++) {
        for (int neox = 0; neox < 2; neox++) {
            enum kind kind = (enum kind)(half % 3);
            float *x = input_make(2 * half, kind), *c = input_make(half, kind), *s = input_make(half, kind);
            struct output y = output_make(8 * half);
            output_set(&y, x);
            for (int side = 0; side < SIDES; side++)
                side_kernels(side)->rope(output_at(&y, side), 2 * half, c, s, neox);
            CHECK(output_agrees(&y, FLOATS));
            free(x), free(c), free(s);
        }
    }
}

/* ---- f16, over every value ---- */

static void test_f16(void)
{
    enum { N = 65536 };
    static uint16_t h[N], back[SIDES][N];
    static float f[SIDES][N];
    for (size_t i = 0; i < N; i++)
        h[i] = (uint16_t)i;
    for (int side = 0; side < SIDES; side++) {
        side_kernels(side)->f16_to_f32(h, N, f[side]);
        side_kernels(side)->f32_to_f16(f[side], N, back[side]);
    }
    CHECK(same_floats(f[0], f[1], N));
    CHECK(same_halves(back[0], h, N));
    CHECK(same_halves(back[1], h, N));
    size_t n_wrong = 0;
    for (size_t i = 0; i < N; i++) {
        int exponent = h[i] >> 10 & 31, mantissa = h[i] & 1023;
        double value = exponent == 31 ? (mantissa ? (double)NAN : (double)INFINITY)
                       : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                      : ldexp(mantissa, -24);
        value = h[i] & 0x8000 ? -value : value;
        n_wrong += !(isnan(value) ? isnan(f[0][i]) : (double)f[0][i] == value && !!signbit(f[0][i]) == h[i] >> 15);
    }
    CHECK(n_wrong == 0);

    /* Rounding: each value, the middle to its neighbour, and one bit to either side of both. */
    enum { M = 0x7c00 * 6 };
    static float x[M];
    static uint16_t y[SIDES][M], wanted[M];
    for (size_t i = 0; i < 0x7c00; i++) {
        float low = f[0][i], high = i + 1 < 0x7c00 ? f[0][i + 1] : 65536.0f; /* infinity stands where 2^16 would */
        float middle = low + (high - low) / 2;
        uint16_t even = (uint16_t)(i % 2 == 0 ? i : i + 1);
        float points[6] = {low,    nextafterf(low, INFINITY),    nextafterf(middle, 0),
                           middle, nextafterf(middle, INFINITY), nextafterf(high, 0)};
        uint16_t halves[6] = {(uint16_t)i, (uint16_t)i, (uint16_t)i, even, (uint16_t)(i + 1), (uint16_t)(i + 1)};
        for (size_t j = 0; j < 6; j++) {
            x[6 * i + j] = i % 3 == 0 ? -points[j] : points[j];
            wanted[6 * i + j] = (uint16_t)(halves[j] | (i % 3 == 0 ? 0x8000 : 0));
        }
    }
    for (int side = 0; side < SIDES; side++) {
        side_kernels(side)->f32_to_f16(x, M, y[side]);
        CHECK(memcmp(y[side], wanted, sizeof wanted) == 0);
    }
}

/* ---- exp ---- */

static double ulps(float got, double exact)
{
    int exponent;
    frexp(exact, &exponent);
    return fabs((double)got - exact) / ldexp(1.0, exponent - 24);
}

/* Tolerance: 2 ulp of the f32 result against double exp, over all exponents of the argument and densely over the whole range. */
static void test_exp(void)
{
    enum { N = 4096 };
    static float x[N], y[SIDES][N];
    double worst = 0;
    size_t n_wrong = 0;
    for (int sweep = 0; sweep < 300; sweep++) {
        for (size_t i = 0; i < N; i++) {
            uint32_t sign = random_bits() << 31;
            if (sweep < 140) /* exponents -126 .. 7 and the denormals */
                x[i] = float_of(sign | (uint32_t)(sweep < 135 ? sweep : 134) << 23 | (random_bits() & 0x7fffffu));
            else
                x[i] = plain() * 90.0f;
        }
        for (int side = 0; side < SIDES; side++)
            side_kernels(side)->exp(x, N, y[side]);
        CHECK(same_floats(y[0], y[1], N));
        for (size_t i = 0; i < N; i++) {
            if (x[i] < -87.3f || x[i] > 88.7f) {
                n_wrong += y[0][i] != (x[i] < 0 ? 0.0f : INFINITY);
            } else {
                double error = ulps(y[0][i], exp((double)x[i]));
                worst = error > worst ? error : worst;
            }
        }
    }
    printf("exp: largest error %.3f ulp\n", worst);
    CHECK(worst <= 2.0);
    CHECK(n_wrong == 0);

    static const float at[] = {0.0f, -0.0f, -INFINITY, INFINITY, -87.3f, 88.7f, -87.30001f, 88.70001f, -FLT_MAX, FLT_MAX, 0x1p-149f};
    enum { N_AT = sizeof at / sizeof at[0] };
    float got[N_AT], nan = NAN;
    for (int side = 0; side < SIDES; side++) {
        side_kernels(side)->exp(at, N_AT, got);
        CHECK(got[0] == 1.0f && got[1] == 1.0f && got[10] == 1.0f);
        CHECK(bits_of(got[2]) == 0 && got[3] == INFINITY);
        CHECK(got[4] >= FLT_MIN && ulps(got[4], exp((double)-87.3f)) <= 2 && ulps(got[5], exp((double)88.7f)) <= 2);
        CHECK(bits_of(got[6]) == 0 && got[7] == INFINITY && bits_of(got[8]) == 0 && got[9] == INFINITY);
        side_kernels(side)->exp(&nan, 1, got);
        CHECK(isnan(got[0]));
    }
}

/* GELU against its tanh form in double, -6 .. 6. Tolerance: u is rounded three times, which exp turns into u times as much; exp is within 2
 * ulp, sum and quotient round once each. Beyond, where exp ends, 0 or the argument. */
static void test_gelu(void)
{
    enum { N = 4096 };
    static float t[N], ones[N], y[SIDES][N];
    double worst = 0;
    for (size_t i = 0; i < N; i++) {
        t[i] = -6.0f + 12.0f * ((float)i + 0.5f) / N;
        ones[i] = 1.0f;
    }
    for (int side = 0; side < SIDES; side++)
        side_kernels(side)->gelu_mul(t, ones, N, y[side]);
    CHECK(same_floats(y[0], y[1], N));
    for (size_t i = 0; i < N; i++) {
        double x = (double)t[i], half_u = sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x), exact = 0.5 * x * (1 + tanh(half_u));
        double error = fabs((double)y[0][i] / exact - 1) / ((6 + 3 * fabs(2 * half_u)) * 0x1p-24);
        worst = error > worst ? error : worst;
    }
    printf("gelu: largest error %.2f of its bound\n", worst);
    CHECK(worst <= 1);

    static const float at[] = {0.0f, -0.0f, 30.0f, -30.0f, FLT_MAX, -FLT_MAX, 1e-30f};
    float got[7];
    for (int side = 0; side < SIDES; side++) {
        side_kernels(side)->gelu_mul(at, ones, 7, got);
        CHECK(bits_of(got[0]) == 0 && bits_of(got[1]) == 0x80000000u && got[2] == 30.0f && got[3] == 0.0f && got[4] == FLT_MAX &&
              got[5] == 0.0f && got[6] == 0.5e-30f);
    }
}

/* ---- quantised products ---- */

static void test_quantize(void)
{
    for (size_t n_blocks = 1; n_blocks <= 40; n_blocks++) {
        size_t n = 32 * n_blocks;
        float *x = input_make(n, (enum kind)(n_blocks % N_KINDS));
        for (size_t i = 0; i < n && n_blocks % 5 == 0; i++)
            x[i] *= 0x1p-101f; /* around the smallest amax that is not taken for zero */
        for (size_t i = 0; i < n && n_blocks % 5 == 1; i++)
            x[i] = (float)((int)random_below(509) - 254) / 2; /* ties */
        if (n_blocks % 5 == 1)
            x[0] = 127.0f;
        struct output q = output_make(n), scale = output_make(4 * n_blocks), sum = output_make(4 * n_blocks);
        for (int side = 0; side < SIDES; side++)
            side_kernels(side)->quantize(x, n, output_at(&q, side), output_at(&scale, side), output_at(&sum, side));

        const int8_t *values = output_at(&q, 1);
        const int32_t *sums = output_at(&sum, 1);
        bool right = true;
        for (size_t b = 0; b < n_blocks; b++) {
            int32_t total = 0;
            for (size_t i = 0; i < 32; i++) {
                total += values[32 * b + i];
                right = right && values[32 * b + i] != -128;
                if (n_blocks % 5 == 1 && b == 0) /* amax 127: x itself, rounded */
                    right = right && values[i] == (int)nearbyintf(x[i]);
            }
            right = right && total == sums[b];
        }
        CHECK(right);
        CHECK(output_agrees(&q, BYTES));
        CHECK(output_agrees(&scale, FLOATS));
        CHECK(output_agrees(&sum, BYTES));
        free(x);
    }
}

static uint16_t half_of(float x)
{
    return gst_f32_to_f16(x);
}

/* A packed matrix of random bytes: every quant there is, -128 and 15 included. Scales of one kind or the other. */
struct matrix {
    struct gst_packed packed;
    uint8_t *memory; /* owns */
};

static struct matrix matrix_make(enum gst_pack pack, size_t n_rows, size_t n_blocks, enum kind kind)
{
    struct gst_tile_parts parts = gst_pack_parts(pack, n_blocks);
    size_t n_tiles = (n_rows + 15) / 16, tile_bytes = (parts.end + 63) / 64 * 64;
    struct matrix m = {.memory = aligned_alloc(64, n_tiles * tile_bytes)};
    if (m.memory == NULL)
        exit(1);
    for (size_t i = 0; i < n_tiles * tile_bytes; i++)
        m.memory[i] = random_below(8) == 0 ? (uint8_t)(random_bits() & 1 ? 0 : 255) : (uint8_t)random_bits();
    for (size_t tile = 0; tile < n_tiles; tile++) {
        for (size_t i = parts.scales; i < parts.factors; i += 2) {
            uint16_t h = kind == PLAIN ? half_of(plain()) : (uint16_t)random_bits();
            if ((h & 0x7c00) == 0x7c00 && kind != BROKEN)
                h ^= 0x4000;
            memcpy(m.memory + tile * tile_bytes + i, &h, 2);
        }
        /* Six bits; of the int8 scales of Q6_K the lowest there is, whose products are the largest, among any others. */
        for (size_t i = parts.factors; i < parts.end; i++) {
            uint8_t *factor = m.memory + tile * tile_bytes + i;
            *factor = pack != GST_PACK_Q6_K ? *factor & 63 : random_below(4) ? *factor : 0x80;
        }
    }
    m.packed = (struct gst_packed){m.memory, tile_bytes, n_rows, 32 * n_blocks};
    return m;
}

static void test_matmul_of(enum gst_pack pack, size_t n_rows, size_t n_blocks, size_t n_tokens, enum kind kind)
{
    size_t group = gst_pack_group(pack);
    n_blocks = (n_blocks + group - 1) / group * group;
    struct matrix w = matrix_make(pack, n_rows, n_blocks, kind);
    size_t n_cols = 32 * n_blocks, n_tiles = (n_rows + 15) / 16, y_stride = n_rows + random_below(3);
    int8_t *q = owned(n_tokens * n_cols);
    float *scale = owned(4 * n_tokens * n_blocks);
    int32_t *sum = owned(4 * n_tokens * n_blocks);
    float *x = input_make(n_tokens * n_cols, kind);
    scalar->quantize(x, n_tokens * n_cols, q, scale, sum);
    if (kind == MIXED) { /* the largest products there are */
        for (size_t b = 0; b < n_tokens * n_blocks; b++) {
            sum[b] = 0;
            for (size_t i = 0; i < 32; i++) {
                q[32 * b + i] = (int8_t)(b % 3 == 0 ? 127 : b % 3 == 1 ? -127 : (int)random_below(255) - 127);
                sum[b] += q[32 * b + i];
            }
        }
    }
    struct gst_qact a = {q, scale, sum};
    size_t begin = random_below(n_tiles), end = begin + 1 + random_below(n_tiles - begin);
    if (random_below(2))
        begin = 0, end = n_tiles;

    struct output y = output_make(4 * ((n_tokens - 1) * y_stride + n_rows));
    for (int side = 0; side < SIDES; side++)
        side_kernels(side)->matmul[pack](&w.packed, begin, end, &a, n_tokens, output_at(&y, side), y_stride);

    /* What lies between rows and in rows of other tiles keeps its filling. */
    const uint8_t *bytes = output_at(&y, 1);
    bool kept = true;
    for (size_t i = 0; i < y.n_bytes; i++) {
        size_t r = i / 4 % y_stride;
        if (r >= n_rows || r / 16 < begin || r / 16 >= end)
            kept = kept && bytes[i] == 0xa5;
    }
    CHECK(kept);
    CHECK(output_agrees(&y, FLOATS));
    free(w.memory), free(q), free(scale), free(sum), free(x);
}

static void test_matmul(void)
{
    for (enum gst_pack pack = 0; pack < GST_PACK_COUNT; pack++) {
        for (size_t n_tokens = 1; n_tokens <= 40; n_tokens++)
            test_matmul_of(pack, 1 + random_below(50), 1 + random_below(9), n_tokens, (enum kind)(n_tokens % N_KINDS));
        for (size_t n_rows = 1; n_rows <= 49; n_rows++)
            test_matmul_of(pack, n_rows, 1 + random_below(4), 1 + random_below(20), (enum kind)(n_rows % N_KINDS));
        /* Rows longer than a run of gathered blocks (512 / tokens), and more tiles than a span holds. */
        test_matmul_of(pack, 40, 35, 16, PLAIN);
        test_matmul_of(pack, 20, 130, 7, PLAIN);
        test_matmul_of(pack, 20, 513, 1, PLAIN);
        test_matmul_of(pack, 33, 260, 3, PLAIN);
        test_matmul_of(pack, 150, 112, 18, PLAIN);
    }
}

/* The definition against the algebra: sum of w * q * scale in double. 32-term integer dots are exact, so that only the f32 chain over the
 * blocks rounds: n_blocks + 1 roundings of terms bounded by the sum of magnitudes. */
static void test_matmul_value(void)
{
    enum { ROWS = 21, BLOCKS = 8, COLS = 32 * BLOCKS };
    for (enum gst_pack pack = 0; pack < GST_PACK_COUNT; pack++) {
        struct matrix w = matrix_make(pack, ROWS, BLOCKS, PLAIN);
        struct gst_tile_parts parts = gst_pack_parts(pack, BLOCKS);
        float *x = input_make(COLS, PLAIN), scale[BLOCKS], y[ROWS];
        int8_t q[COLS];
        int32_t sum[BLOCKS];
        scalar->quantize(x, COLS, q, scale, sum);
        struct gst_qact a = {q, scale, sum};
        tier->matmul[pack](&w.packed, 0, 2, &a, 1, y, ROWS);
        for (size_t r = 0; r < ROWS; r++) {
            const uint8_t *tile = w.memory + r / 16 * w.packed.tile_bytes;
            double exact = 0, magnitude = 0;
            for (size_t k = 0; k < COLS; k++) {
                size_t b = k / 32, i = k % 32;
                size_t at = 2 * (b / gst_pack_group(pack) * 16 + r % 16), low = (i / 4 % 4 * 16 + r % 16) * 4 + i % 4;
                const uint8_t *block = tile + b * gst_pack_quant_bytes(pack), *factors = tile + parts.factors + 32 * b + r % 16;
                uint16_t h[2] = {0, 0};
                memcpy(&h[0], tile + parts.scales + at, 2);
                if (gst_pack_has_minimum(pack))
                    memcpy(&h[1], tile + parts.minimums + at, 2);
                double d = (double)gst_f16_to_f32(h[0]), m = (double)gst_f16_to_f32(h[1]), value = 0;
                int nibble = i < 16 ? block[low] & 15 : block[low] >> 4;
                int fifth = nibble + (block[256 + low % 64] >> i / 4 & 1) * 16;
                int sixth = nibble + (block[256 + i / 16 * 64 + low % 64] >> i / 4 % 4 * 2 & 3) * 16;
                low = (i / 4 * 16 + r % 16) * 4 + i % 4;
                switch (pack) {
                case GST_PACK_Q8_0:
                    value = d * (block[low] - 128);
                    break;
                case GST_PACK_Q4_0:
                    value = d * (nibble - 8);
                    break;
                case GST_PACK_Q4_1:
                    value = d * nibble + m;
                    break;
                case GST_PACK_Q5_0:
                    value = d * (fifth - 16);
                    break;
                case GST_PACK_Q5_1:
                    value = d * fifth + m;
                    break;
                case GST_PACK_Q4_K:
                    value = d * factors[0] * nibble - m * factors[16];
                    break;
                case GST_PACK_Q5_K:
                    value = d * factors[0] * fifth - m * factors[16];
                    break;
                default:
                    value = d * (int8_t)factors[i / 16 * 16] * (sixth - 32);
                }
                exact += value * (double)q[k] * (double)scale[b];
                magnitude += fabs(value * (double)q[k] * (double)scale[b]);
            }
            /* Types with a minimum split a value in two terms that may cancel: up to 31 d + m a value, in K types 63 times that. */
            double split = gst_pack_has_minimum(pack) ? COLS * 32.0 * (gst_pack_group(pack) > 1 ? 63 : 1) : 0;
            double bound = (2 * BLOCKS + 2) * (magnitude + split) * 0x1p-24;
            CHECK(fabs((double)y[r] - exact) <= bound);
        }
        free(w.memory), free(x);
    }
}

/* ---- products with float matrices ---- */

static void test_matmul_float_of(enum gst_float_type type, size_t n_cols, size_t n_rows, size_t n_tokens, enum kind kind)
{
    size_t item = type == GST_F32 ? 4 : 2, x_stride = n_cols + random_below(5), y_stride = n_rows + random_below(5);
    uint8_t *w = owned(n_rows * n_cols * item + 2); /* starts 2 bytes in: 2-byte aligned only */
    for (size_t i = 0; i < n_rows * n_cols; i++) {
        float f = random_float(kind);
        uint32_t bits = bits_of(f);
        uint16_t h = type == GST_F16 ? half_of(f) : (uint16_t)(bits >> 16);
        memcpy(w + 2 + i * item, item == 4 ? (const void *)&bits : (const void *)&h, item);
    }
    float *x = input_make((n_tokens - 1) * x_stride + n_cols, kind);
    size_t begin = random_below(n_rows), end = begin + 1 + random_below(n_rows - begin);
    struct output y = output_make(4 * ((n_tokens - 1) * y_stride + n_rows));
    for (int side = 0; side < SIDES; side++)
        side_kernels(side)->matmul_float(w + 2, type, n_cols, begin, end, x, x_stride, n_tokens, output_at(&y, side), y_stride);
    CHECK(output_agrees(&y, FLOATS));
    free(w), free(x);
}

static void test_matmul_float(void)
{
    for (int type = 0; type < 3; type++) {
        for (size_t n_cols = 1; n_cols <= 70; n_cols++)
            for (int kind = 0; kind < N_KINDS; kind++)
                test_matmul_float_of((enum gst_float_type)type, n_cols, 1 + random_below(13), 1 + random_below(11), (enum kind)kind);
        for (size_t n_tokens = 1; n_tokens <= 40; n_tokens++)
            test_matmul_float_of((enum gst_float_type)type, 100, 9, n_tokens, PLAIN);
    }
}

/* ---- attention ---- */

static void test_attend_of(enum gst_float_type type, size_t n_live, size_t dim, enum kind kind)
{
    /* Two blocks one behind the other: whole, then partial. What lies behind the live positions is not there at all. */
    size_t item = type == GST_F16 ? 2 : 4;
    float *q = input_make(dim, kind);
    struct output m = output_make(4), l = output_make(4), o = output_make(4 * dim);
    float start_m = -INFINITY, start_l = 0.0f, *zeros = calloc(dim, 4);
    if (zeros == NULL)
        exit(1);
    output_set(&m, &start_m), output_set(&l, &start_l), output_set(&o, zeros);
    float scale = 1.0f / sqrtf((float)dim);
    for (int block = 0; block < 2; block++) {
        size_t n = (block == 0 ? 64 : n_live) * dim;
        void *kv[2];
        for (int which = 0; which < 2; which++) {
            float *x = input_make(n, kind);
            kv[which] = owned(n * item);
            if (type == GST_F16)
                scalar->f32_to_f16(x, n, kv[which]);
            else
                memcpy(kv[which], x, n * item);
            free(x);
        }
        for (int side = 0; side < SIDES; side++)
            side_kernels(side)->attend(q, kv[0], kv[1], type, block == 0 ? 64 : n_live, dim, scale, output_at(&m, side),
                                       output_at(&l, side), output_at(&o, side));
        free(kv[0]), free(kv[1]);
    }
    CHECK(output_agrees(&m, FLOATS));
    CHECK(output_agrees(&l, FLOATS));
    CHECK(output_agrees(&o, FLOATS));
    free(q), free(zeros);
}

static void test_attend(void)
{
    for (int type = 0; type < 2; type++) {
        for (size_t n_live = 1; n_live <= 64; n_live++)
            test_attend_of((enum gst_float_type)type, n_live, 1 + random_below(140), (enum kind)(n_live % N_KINDS));
        for (size_t dim = 1; dim <= 70; dim++)
            test_attend_of((enum gst_float_type)type, 1 + random_below(64), dim, (enum kind)(dim % N_KINDS));
        static const size_t dims[] = {64, 80, 96, 128, 256};
        for (size_t i = 0; i < 5; i++)
            test_attend_of((enum gst_float_type)type, 37, dims[i], PLAIN);
    }
}

/* ---- recurrent layers ---- */

static void test_conv_of(size_t width, size_t n_channels, size_t n_tokens, enum kind kind)
{
    size_t begin = random_below(n_channels), end = begin + random_below(n_channels - begin + 1);
    size_t u_stride = n_channels + random_below(3), y_stride = n_channels + random_below(3), n_window = (width - 1) * n_channels;
    float *taps = input_make(width * n_channels, kind), *window = input_make(n_window, kind);
    float *u = input_make((n_tokens - 1) * u_stride + n_channels, kind);
    for (int in_place = 0; in_place < 2; in_place++) {
        struct output y = output_make(4 * ((n_tokens - 1) * y_stride + n_channels)), out = output_make(4 * n_window);
        if (in_place)
            output_set(&out, window);
        for (int side = 0; side < SIDES; side++)
            side_kernels(side)->conv_silu(taps, width, n_channels, begin, end, in_place ? output_at(&out, side) : window, u, u_stride,
                                          n_tokens, output_at(&y, side), y_stride, output_at(&out, side));
        CHECK(output_agrees(&y, FLOATS));
        /* The new window is the end of window and u together. */
        const float *got = output_at(&out, 0);
        bool moved = true;
        for (size_t j = 0; j + 1 < width; j++)
            for (size_t c = begin; c < end; c++) {
                size_t i = n_tokens + j;
                float input = i < width - 1 ? window[i * n_channels + c] : u[(i - (width - 1)) * u_stride + c];
                moved = moved && bits_of(got[j * n_channels + c]) == bits_of(input);
            }
        CHECK(moved);
        CHECK(output_agrees(&out, BYTES));
    }
    free(taps), free(window), free(u);
}

static void test_conv(void)
{
    for (size_t width = 1; width <= 8; width++)
        for (size_t n_tokens = 1; n_tokens <= 12; n_tokens++)
            test_conv_of(width, 1 + random_below(70), n_tokens, (enum kind)(n_tokens % N_KINDS));
    test_conv_of(4, 200, 40, PLAIN);
}

static void test_delta_of(size_t dk, size_t dv, size_t n_tokens, enum kind kind)
{
    size_t begin = random_below(dv), end = begin + random_below(dv - begin + 1);
    if (random_below(2))
        begin = 0, end = dv;
    size_t qk_stride = dk + random_below(4), v_stride = dv + random_below(4), gate_stride = 1 + random_below(3),
           o_stride = dv + random_below(4);
    float *state = input_make(dk * dv, kind), *v = input_make((n_tokens - 1) * v_stride + dv, kind);
    float *q = input_make((n_tokens - 1) * qk_stride + dk, kind), *k = input_make((n_tokens - 1) * qk_stride + dk, kind);
    float *decay = input_make((n_tokens - 1) * gate_stride + 1, kind), *beta = input_make((n_tokens - 1) * gate_stride + 1, kind);

    struct output out[2], o[2];
    for (int in_place = 0; in_place < 2; in_place++) {
        out[in_place] = output_make(4 * dk * dv);
        o[in_place] = output_make(4 * ((n_tokens - 1) * o_stride + dv));
        if (in_place)
            output_set(&out[in_place], state);
        for (int side = 0; side < SIDES; side++) {
            float *to = output_at(&out[in_place], side);
            side_kernels(side)->delta_rule(in_place ? to : state, to, dk, dv, begin, end, q, k, qk_stride, v, v_stride, decay, beta,
                                           gate_stride, n_tokens, output_at(&o[in_place], side), o_stride);
        }
    }
    CHECK(same_floats(output_at(&o[0], 0), output_at(&o[1], 0), o[0].n_bytes / 4));
    for (int in_place = 0; in_place < 2; in_place++) {
        CHECK(output_agrees(&o[in_place], FLOATS));
        CHECK(output_agrees(&out[in_place], FLOATS));
    }
    free(state), free(v), free(q), free(k), free(decay), free(beta);
}

static void test_delta(void)
{
    for (size_t n_tokens = 1; n_tokens <= 40; n_tokens++)
        test_delta_of(1 + random_below(40), 1 + random_below(150), n_tokens, (enum kind)(n_tokens % N_KINDS));
    for (size_t dv = 1; dv <= 70; dv++)
        test_delta_of(1 + random_below(20), dv, 1 + random_below(4), MIXED);
    test_delta_of(128, 128, 5, PLAIN);
    test_delta_of(256, 70, 3, PLAIN);
}

/* ---- the tiers ---- */

static void test_tier(const struct gst_kernels *kernels)
{
    tier = kernels;
    printf("tier %s: ran\n", kernels->name);
    test_comparison();
    test_rows();
    test_corners();
    test_negative_zero_lanes();
    test_rope();
    test_f16();
    test_exp();
    test_gelu();
    test_quantize();
    test_matmul();
    test_matmul_value();
    test_matmul_float();
    test_attend();
    test_conv();
    test_delta();
}

int main(void)
{
    static const char *names[] = {"auto", "scalar", "avx2", "avx512"};
    const char *required = getenv("GEIST_REQUIRE_TIER");
    scalar = gst_kernels_for(GEIST_TIER_SCALAR);
    if (!CHECK(scalar != NULL && scalar->tier == GEIST_TIER_SCALAR))
        return check_done("test_kernels");

    const struct gst_kernels *best = scalar;
    for (int t = GEIST_TIER_SCALAR; t <= GEIST_TIER_AVX512; t++) {
        const struct gst_kernels *kernels = gst_kernels_for(t);
        if (kernels == NULL) {
            printf("tier %s: not on this machine\n", names[t]);
            CHECK(required == NULL || strcmp(required, names[t]) != 0);
            continue;
        }
        CHECK(kernels->tier == t && strcmp(kernels->name, names[t]) == 0);
        best = kernels;
        test_tier(kernels);
    }
    CHECK(gst_kernels_for(GEIST_TIER_AUTO) == best);
    CHECK(gst_kernels_for(-1) == NULL && gst_kernels_for(4) == NULL);
    return check_done("test_kernels");
}
