/* test_base.c - what every room stands on.
 *
 * Property and tolerance:
 *   exp, log, log1p, sin, cos: within 2 ulp of the C library's long double (error far below 0.01 ulp of a double) on random arguments of
 * all sizes; pow within 1e-14 relative where |y log x| <= 50. Those are the promises of base.h. A table of a few results holds exact bits,
 *     because the promise is one answer on every machine.
 *   f16: equality for all 65536 patterns both ways, and for every midpoint between neighbours and the floats next to it.
 *   SHA-256: published vectors, and equality under any cut of the input. Checksum: equality of the two calls, inequality after any bit
 * flip. threads: every index exactly once, contiguous ranges cut at multiples of the grain, the float environment set in each and put back.
 */
#include "check.h"

#include "base/base.h"

#include <fenv.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define MATH_BITS 0xb50b08048ab5af21u

static uint64_t random_state = 20260211;

static uint64_t random_bits(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double uniform(double low, double high)
{
    return low + (high - low) * ((double)(random_bits() >> 11) * 0x1p-53);
}

/* Distance to the reference in units of the last place of the result. */
static double ulps(double got, long double wanted)
{
    int exponent;
    double nearest = (double)wanted;

    if (isnan(got) || isnan(nearest))
        return isnan(got) && isnan(nearest) ? 0 : 1e30;
    if (isinf(nearest) || isinf(got))
        return got == nearest ? 0 : 1e30;
    frexp(nearest, &exponent);
    if (exponent < -1021)
        exponent = -1021;
    return (double)(fabsl((long double)got - wanted) / ldexpl(1.0L, exponent - 53));
}

static void test_math(void)
{
    double worst_exp = 0, worst_log = 0, worst_log1p = 0, worst_sin = 0, worst_cos = 0, worst_pow = 0;

    for (int i = 0; i < 200000; i++) {
        double x = i & 1 ? uniform(-1, 1) * ldexp(1, (int)(random_bits() % 60) - 50) : uniform(-745, 709.78);
        double y, angle, base, power, error;

        worst_exp = fmax(worst_exp, ulps(gst_exp(x), expl(x)));

        y = i & 1 ? uniform(0.5, 2) : ldexp(uniform(1, 2), (int)(random_bits() % 2098) - 1074);
        worst_log = fmax(worst_log, ulps(gst_log(y), logl(y)));

        y = i & 1 ? uniform(-1, 1) : ldexp(uniform(1, 2), (int)(random_bits() % 1080) - 60);
        if (y > -1)
            worst_log1p = fmax(worst_log1p, ulps(gst_log1p(y), log1pl(y)));

        angle = uniform(-1, 1) * ldexp(1, (int)(random_bits() % 50) - 19);
        if (i % 3 == 0) /* as near to a multiple of pi/2 as a double comes */
            angle = (double)((long double)(random_bits() % 683565275) * 1.57079632679489661923132169163975144L);
        worst_sin = fmax(worst_sin, ulps(gst_sin(angle), sinl(angle)));
        worst_cos = fmax(worst_cos, ulps(gst_cos(angle), cosl(angle)));

        base = i & 1 ? uniform(1, 1e7) : ldexp(uniform(1, 2), (int)(random_bits() % 2000) - 1000);
        power = uniform(-50, 50) / fmax(fabs(log(base)), 1e-3);
        error = (double)fabsl(gst_pow(base, power) / powl(base, power) - 1);
        worst_pow = fmax(worst_pow, error);
    }
    printf("ulp: exp %.3f log %.3f log1p %.3f sin %.3f cos %.3f; pow %.2e\n", worst_exp, worst_log, worst_log1p, worst_sin, worst_cos,
           worst_pow);
    CHECK(worst_exp <= 2);
    CHECK(worst_log <= 2);
    CHECK(worst_log1p <= 2);
    CHECK(worst_sin <= 2);
    CHECK(worst_cos <= 2);
    CHECK(worst_pow <= 1e-14);

    CHECK(gst_exp(0) == 1 && gst_exp(-INFINITY) == 0 && gst_exp(INFINITY) == INFINITY && gst_exp(710) == INFINITY && gst_exp(-746) == 0);
    CHECK(isnan(gst_exp(NAN)) && gst_exp(-745) == 0x1p-1074);
    CHECK(gst_log(1) == 0 && gst_log(0) == -INFINITY && gst_log(INFINITY) == INFINITY && isnan(gst_log(-1)) && isnan(gst_log(NAN)));
    CHECK(gst_log1p(0) == 0 && gst_log1p(-1) == -INFINITY && isnan(gst_log1p(-2)) && gst_log1p(INFINITY) == INFINITY);
    CHECK(gst_log1p(0x1p-60) == 0x1p-60);
    CHECK(gst_sin(0) == 0 && signbit(gst_sin(-0.0)) && gst_cos(0) == 1 && isnan(gst_sin(NAN)) && isnan(gst_cos(INFINITY)));
    CHECK(isnan(gst_sin(0x1.1p30)) && !isnan(gst_sin(0x1p30)) && !isnan(gst_cos(-0x1p30)));
    CHECK(gst_pow(3, 0) == 1 && gst_pow(1, 1e300) == 1 && gst_pow(2, 10) == 1024 && gst_pow(1e7, -1) == 1e-7);
    CHECK(isnan(gst_pow(-2, 2)) && gst_pow(10, 400) == INFINITY && gst_pow(10, -400) == 0 && gst_pow(2, 0x1p-300) == 1);
}

static uint64_t bits(double x)
{
    uint64_t b;

    memcpy(&b, &x, 8);
    return b;
}

/* Exact bits, so that another compiler or machine that rounds once more or less is noticed. Made by this code; the accuracy is test_math's.
 */
static void test_math_bits(void)
{
    uint64_t h = 0;

    for (int i = -2000; i <= 2000; i++) {
        double x = i * 0.34567;

        h = h * 31 + bits(gst_exp(x));
        h = h * 31 + bits(gst_log(2001 + i * 0.9999));
        h = h * 31 + bits(gst_log1p(i * 0.000499));
        h = h * 31 + bits(gst_sin(x * 12345.0));
        h = h * 31 + bits(gst_cos(x * 12345.0));
        h = h * 31 + bits(gst_pow(5e4, i / 2001.0));
    }
    if (!CHECK(h == MATH_BITS))
        fprintf(stderr, "found 0x%016llx\n", (unsigned long long)h);
}

/* The value of a half by its definition. */
static double half_value(uint16_t h)
{
    int exponent = h >> 10 & 31;
    double mantissa = h & 0x3ff;
    double v = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);

    if (exponent == 31)
        v = mantissa != 0 ? NAN : INFINITY;
    return h & 0x8000 ? -v : v;
}

static void test_f16(void)
{
    unsigned n_wrong = 0;

    for (uint32_t h = 0; h < 65536; h++) {
        double wanted = half_value((uint16_t)h);
        float got = gst_f16_to_f32((uint16_t)h);

        if (isnan(wanted)) {
            uint16_t back = gst_f32_to_f16(got);

            n_wrong += !isnan(got) || (back & 0x7e00) != 0x7e00 || (back & 0x8000) != (h & 0x8000);
        } else {
            n_wrong += (double)got != wanted || !signbit(got) != !signbit(wanted) || gst_f32_to_f16(got) != h;
        }
    }
    CHECK(n_wrong == 0);

    /* Between neighbours a and b: below the middle to a, above to b, the middle itself to the even one; 65520 is the middle to infinity. */
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float a = gst_f16_to_f32((uint16_t)h);
        float b = h == 0x7bff ? 65536.0f : gst_f16_to_f32((uint16_t)(h + 1));
        float middle = (a + b) / 2;
        uint16_t even = (uint16_t)(h & 1 ? h + 1 : h);

        n_wrong += gst_f32_to_f16(middle) != even || gst_f32_to_f16(-middle) != (even | 0x8000);
        n_wrong += gst_f32_to_f16(nextafterf(middle, 0)) != h || gst_f32_to_f16(nextafterf(middle, INFINITY)) != h + 1;
    }
    CHECK(n_wrong == 0);
    CHECK(gst_f32_to_f16(1e30f) == 0x7c00 && gst_f32_to_f16(-INFINITY) == 0xfc00 && gst_f32_to_f16(1e-30f) == 0);
    CHECK(gst_f32_to_f16(-1e-40f) == 0x8000);
    CHECK(gst_bf16_to_f32(0x3f80) == 1 && gst_bf16_to_f32(0xc040) == -3 && isnan(gst_bf16_to_f32(0x7fc0)));
}

static void sha_hex(const void *data, size_t n, char out[65])
{
    struct gst_sha256 s;
    uint8_t sum[32];

    gst_sha256_init(&s);
    gst_sha256_update(&s, data, n);
    gst_sha256_final(&s, sum);
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", sum[i]);
}

static void test_sha256(void)
{
    static uint8_t buf[1000000];
    char hex[65];
    uint8_t whole[32], parts[32];
    struct gst_sha256 s;
    bool same = true;

    sha_hex("", 0, hex);
    CHECK(!strcmp(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
    sha_hex("abc", 3, hex);
    CHECK(!strcmp(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    sha_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, hex);
    CHECK(!strcmp(hex, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
    memset(buf, 'a', sizeof buf);
    sha_hex(buf, sizeof buf, hex);
    CHECK(!strcmp(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));

    for (size_t n = 0; n < 300; n++) {
        for (size_t i = 0; i < n; i++)
            buf[i] = (uint8_t)random_bits();
        gst_sha256_init(&s);
        gst_sha256_update(&s, buf, n);
        gst_sha256_final(&s, whole);
        gst_sha256_init(&s);
        for (size_t done = 0; done < n;) {
            size_t take = random_bits() % 70;

            take = take < n - done ? take : n - done;
            gst_sha256_update(&s, buf + done, take);
            done += take;
        }
        gst_sha256_final(&s, parts);
        same = same && !memcmp(whole, parts, 32);
    }
    CHECK(same);
}

static void test_checksum(void)
{
    uint8_t data[300], copy[300];
    unsigned n_same = 0, n_differ = 0, n_missed = 0;

    for (size_t n = 0; n <= sizeof data; n++) {
        uint64_t sum;

        for (size_t i = 0; i < n; i++)
            data[i] = (uint8_t)random_bits();
        sum = gst_checksum(data, n);
        memset(copy, 0xee, sizeof copy);
        n_same += gst_checksum_copy(copy, data, n) == sum && !memcmp(copy, data, n) && (n == sizeof copy || copy[n] == 0xee);
        for (size_t bit = 0; bit < 8 * n; bit++) {
            data[bit / 8] ^= (uint8_t)(1 << bit % 8);
            n_missed += gst_checksum(data, n) == sum;
            data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        /* The length counts: zeros behind are not nothing. */
        if (n < sizeof data) {
            data[n] = 0;
            n_differ += gst_checksum(data, n + 1) != sum;
        }
    }
    CHECK(n_same == sizeof data + 1);
    CHECK(n_missed == 0);
    CHECK(n_differ == sizeof data);

    /* Order counts, within a lane and across lanes. */
    memset(data, 0, 192);
    data[0] = 1;
    data[64] = 2;
    data[72] = 3;
    memcpy(copy, data, 192);
    copy[0] = 2;
    copy[64] = 1;
    CHECK(gst_checksum(data, 192) != gst_checksum(copy, 192));
    memcpy(copy, data, 192);
    copy[64] = 3;
    copy[72] = 2;
    CHECK(gst_checksum(data, 192) != gst_checksum(copy, 192));
}

static void test_alloc(void)
{
    size_t sum;
    uint8_t *p = gst_alloc(1000);
    void *empty = gst_alloc(0);
    bool zero = true;

    for (int i = 0; i < 1000; i++)
        zero = zero && !p[i];
    CHECK(p && (uintptr_t)p % 64 == 0 && zero);
    CHECK(empty != NULL);
    CHECK(gst_alloc(SIZE_MAX) == NULL && gst_alloc(SIZE_MAX - 63) == NULL);
    CHECK(!gst_mul_size(SIZE_MAX / 2, 3, &sum) && gst_mul_size(6, 7, &sum) && sum == 42);
    CHECK(!gst_add_size(SIZE_MAX, 1, &sum) && gst_round_up(65, 64) == 128);
    gst_free(p);
    gst_free(empty);
    gst_free(NULL);
}

static void test_error(void)
{
    char error[GST_ERROR_BYTES];
    char name[2 * GST_ERROR_BYTES];

    CHECK(gst_fail(error, GEIST_E_FORMAT, "key %s at %d", "a\nb\x1b[31m", 7) == GEIST_E_FORMAT);
    CHECK(!strcmp(error, "key a?b?[31m at 7"));
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    CHECK(gst_fail(error, GEIST_E_IO, "%s", name) == GEIST_E_IO && strlen(error) == GST_ERROR_BYTES - 1);
    for (int i = 0; i <= GEIST_E_BUFFER; i++)
        CHECK(geist_status_text((enum geist_status)i)[0] && strcmp(geist_status_text((enum geist_status)i), "unknown"));
    CHECK(!strcmp(geist_status_text((enum geist_status)99), "unknown"));
    CHECK(!strcmp(geist_status_text(GEIST_E_TOO_LONG), "too long"));
}

/* Rounding upward and, where the machine has them, subnormals switched off: what must not reach a computation. On x86-64 the mode of the
 * vector unit is not the one that fegetround reports. */
static void environment_spoil(void)
{
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

static void environment_mend(void)
{
    fesetround(FE_TONEAREST);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() & ~0x8040u);
#endif
}

static bool environment_is_spoiled(void)
{
#if defined(__x86_64__)
    return (_mm_getcsr() & 0x8040) == 0x8040 && (_mm_getcsr() & 0x6000) == _MM_ROUND_UP;
#else
    return fegetround() == FE_UPWARD;
#endif
}

static bool environment_is_right(void)
{
    volatile double tiny = 0x1p-1060, three = 3;

    return tiny * 0.5 == 0x1p-1061 && 1 / three < 0x1.5555555555556p-2 && -1 / three > -0x1.5555555555556p-2;
}

struct cover {
    uint8_t *count; /* [n] */
    size_t n, grain;
    _Atomic unsigned n_ranges, n_wrong;
};

static void cover_range(void *context, size_t begin, size_t end)
{
    struct cover *c = context;

    atomic_fetch_add(&c->n_ranges, 1);
    if (begin >= end || begin % c->grain || (end % c->grain && end != c->n))
        atomic_fetch_add(&c->n_wrong, 1);
    for (size_t i = begin; i < end; i++)
        c->count[i]++;
    if (!environment_is_right())
        atomic_fetch_add(&c->n_wrong, 1);
}

static void test_threads(void)
{
    static const uint32_t teams[] = {1, 2, 3, 7};
    uint8_t count[1000];
    struct gst_threads *t;

    CHECK_STATUS(gst_threads_create(0, &t), GEIST_E_ARGUMENT);
    for (size_t k = 0; k < sizeof teams / sizeof *teams; k++) {
        unsigned n_wrong = 0;

        if (!CHECK_STATUS(gst_threads_create(teams[k], &t), GEIST_OK))
            return;
        CHECK(gst_threads_count(t) == teams[k]);
        for (int round = 0; round < 3000; round++) {
            size_t n = random_bits() % 200 ? random_bits() % (round % 2 ? 9 : sizeof count) : 0;
            struct cover c = {count, n, 1 + random_bits() % 17, 0, 0};
            size_t n_units = (n + c.grain - 1) / c.grain;

            memset(count, 0, sizeof count);
            if (round % 100 == 0) { /* let the workers fall asleep, and set what they must not inherit */
                struct timespec pause = {0, 1000000};

                nanosleep(&pause, NULL);
                environment_spoil();
            }
            gst_threads_run(t, n, c.grain, cover_range, &c);
            if (round % 100 == 0) {
                n_wrong += !environment_is_spoiled();
                environment_mend();
            }
            for (size_t i = 0; i < n; i++)
                n_wrong += count[i] != 1;
            n_wrong += c.n_wrong + (c.n_ranges != (n_units < teams[k] ? n_units : teams[k]));
        }
        CHECK(n_wrong == 0);
        gst_threads_destroy(t);
    }
    gst_threads_destroy(NULL);
}

static void test_fpenv(void)
{
    uint64_t saved;
    bool right;

    environment_spoil();
    saved = gst_fpenv_enter();
    right = environment_is_right();
    gst_fpenv_leave(saved);
    CHECK(environment_is_spoiled());
    environment_mend();
    CHECK(right);
}

static void test_engine(void)
{
    struct geist_engine_options options = {GEIST_TIER_SCALAR, 3};
    struct geist_engine *e = NULL;
    uint8_t *scratch;

    CHECK(geist_tier_available(GEIST_TIER_SCALAR) && geist_tier_available(GEIST_TIER_AUTO) && !geist_tier_available((enum geist_tier)9));
    CHECK(!strcmp(geist_tier_name(GEIST_TIER_AVX512), "avx512") && !strcmp(geist_tier_name((enum geist_tier)9), "unknown"));
    if (CHECK_STATUS(geist_engine_create(&options, &e), GEIST_OK)) {
        CHECK(geist_engine_tier(e) == GEIST_TIER_SCALAR && geist_engine_error(e)[0] == 0 && gst_threads_count(e->threads) == 3);
        scratch = gst_engine_scratch(e, 1000);
        CHECK(scratch && (uintptr_t)scratch % 64 == 0 && gst_engine_scratch(e, 500) == scratch);
        CHECK(gst_engine_scratch(e, SIZE_MAX) == NULL && gst_engine_scratch(e, 5000) != NULL);
        geist_engine_destroy(e);
    }
    options.n_threads = 257;
    CHECK_STATUS(geist_engine_create(&options, &e), GEIST_E_ARGUMENT);
    CHECK(e == NULL);
    options.n_threads = 0;
    options.tier = (enum geist_tier)9;
    CHECK_STATUS(geist_engine_create(&options, &e), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_engine_create(NULL, NULL), GEIST_E_ARGUMENT);
    if (CHECK_STATUS(geist_engine_create(NULL, &e), GEIST_OK))
        CHECK(gst_threads_count(e->threads) == 1);
    geist_engine_destroy(e);
    geist_engine_destroy(NULL);
}

int main(void)
{
    test_math();
    test_math_bits();
    test_f16();
    test_sha256();
    test_checksum();
    test_alloc();
    test_error();
    test_threads();
    test_fpenv();
    test_engine();
    return check_done("test_base");
}
