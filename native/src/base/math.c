/* math.c - elementary functions in double from + - * / alone, so that every machine and every build returns the same bits.
 *
 * The C library's versions pick an algorithm by what the CPU has. Here each function reduces its argument to a small interval and sums a
 * Taylor series there, whose coefficients are quotients of exact integers; the first neglected term is named where the series stands.
 * Constants with more digits than a double come from native/tools/make_constants.py. Built with -ffp-contract=off. */
#include "base/base.h"

#define LN2_HIGH 0x1.62e42fee00000p-1 /* 32 bits: k * LN2_HIGH is exact for |k| < 2^21 */
#define LN2_LOW 0x1.a39ef35793c76p-33
#define INV_LN2 0x1.71547652b82fep+0
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define ROUND_MAGIC 0x1.8p52 /* x + magic - magic is the nearest integer for |x| < 2^51 */

/* An unevaluated sum high + low, |low| <= ulp(high) / 2. */
struct pair {
    double high, low;
};

static inline uint64_t bits_of(double x)
{
    uint64_t bits;

    memcpy(&bits, &x, 8);
    return bits;
}

static inline double of_bits(uint64_t bits)
{
    double x;

    memcpy(&x, &bits, 8);
    return x;
}

static inline double nearest(double x)
{
    return (x + ROUND_MAGIC) - ROUND_MAGIC;
}

static inline double magnitude(double x)
{
    return of_bits(bits_of(x) & 0x7fffffffffffffffu);
}

static inline double not_a_number(void)
{
    return of_bits(0x7ff8000000000000u);
}

/* a + b where |a| >= |b| or a = 0. */
static inline struct pair fast_two_sum(double a, double b)
{
    double high = a + b;
    struct pair s = {high, b - (high - a)};

    return s;
}

static inline struct pair two_sum(double a, double b)
{
    double high = a + b;
    double b_part = high - a;
    struct pair s = {high, (a - (high - b_part)) + (b - b_part)};

    return s;
}

/* a * b exactly, by halves of 26 bits; |a|, |b| < 2^996 and a product far from the subnormal range. */
static inline struct pair two_product(double a, double b)
{
    double a_big = a * 134217729.0, b_big = b * 134217729.0; /* 2^27 + 1 */
    double a_high = a_big - (a_big - a), a_low = a - a_high;
    double b_high = b_big - (b_big - b), b_low = b - b_high;
    double high = a * b;
    struct pair p = {high, ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low};

    return p;
}

/* x * 2^k, -1100 <= k <= 1024, x in [0.5, 2]; rounds once more where the result is subnormal. */
static double scale(double x, int k)
{
    if (k > 1000)
        return x * of_bits((uint64_t)(k - 1 + 1023) << 52) * 2.0;
    if (k < -1000)
        return x * of_bits((uint64_t)(k + 200 + 1023) << 52) * 0x1p-200;
    return x * of_bits((uint64_t)(k + 1023) << 52);
}

/* exp(x + low), |low| small against ulp(x) 2^8.
 *
 *     x = k ln 2 + r, |r| <= ln 2 / 2;  exp(x) = 2^k (1 + r + r^2 (1/2! + r/3! + ... + r^12/14!))        next term: r^15/15! < 2^-62 */
static double exp_pair(double x, double low)
{
    double k, high, tail, r, c, p;

    if (x != x)
        return x;
    if (x > 709.79)
        return of_bits(0x7ff0000000000000u);
    if (x < -745.2)
        return 0.0;

    k = nearest(x * INV_LN2);
    high = x - k * LN2_HIGH; /* exact */
    tail = low - k * LN2_LOW;
    r = high + tail;
    c = (high - r) + tail;

    p = 1.0 / 87178291200.0;
    p = p * r + 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    return scale(1.0 + (r + (r * r * p + c)), (int)k);
}

double gst_exp(double x)
{
    return exp_pair(x, 0.0);
}

/* x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); x positive, finite. */
static double split(double x, double *k)
{
    int64_t exponent = 0;
    uint64_t bits;

    if (x < 0x1p-1022) {
        x = x * 0x1p54;
        exponent = -54;
    }
    bits = bits_of(x);
    exponent += (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    if (bits > 0x3ff6a09e667f3bcdu) { /* above sqrt(2): halve */
        bits -= (uint64_t)1 << 52;
        exponent++;
    }
    *k = (double)exponent;
    return of_bits(bits) - 1.0;
}

/* 2 s^2/3 + 2 s^4/5 + ... + 2 s^24/25, so that log(1 + f) = 2 atanh(s) = s (2 + this), s = f / (2 + f), |s| < 0.1716.
 * Next term: 2 s^26/27 < 2^-69. */
static double atanh_tail(double s)
{
    double z = s * s;
    double p = 2.0 / 25.0;

    p = p * z + 2.0 / 23.0;
    p = p * z + 2.0 / 21.0;
    p = p * z + 2.0 / 19.0;
    p = p * z + 2.0 / 17.0;
    p = p * z + 2.0 / 15.0;
    p = p * z + 2.0 / 13.0;
    p = p * z + 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    return p * z;
}

/* log(1 + f) + k ln 2. With 2 s = f - s f the leading term f is exact: log(1 + f) = f - s (f - tail). */
static double log_sum(double f, double k)
{
    double s = f / (2.0 + f);
    double correction = s * (f - atanh_tail(s));

    if (k == 0.0)
        return f - correction;
    return k * LN2_HIGH - ((correction - k * LN2_LOW) - f);
}

/* What log says of arguments that are not positive and finite; else false. */
static bool log_special(double x, double *out)
{
    if (x != x)
        *out = x;
    else if (x < 0.0)
        *out = not_a_number();
    else if (x == 0.0)
        *out = of_bits(0xfff0000000000000u);
    else if (bits_of(x) == 0x7ff0000000000000u)
        *out = x;
    else
        return false;
    return true;
}

double gst_log(double x)
{
    double f, k, special;

    if (log_special(x, &special))
        return special;
    f = split(x, &k);
    return log_sum(f, k);
}

double gst_log1p(double x)
{
    double u, lost, special;

    if (x > -0.25 && x < 0.375) { /* f = x itself, nothing is lost by adding 1 */
        if (magnitude(x) < 0x1p-54)
            return x;
        return log_sum(x, 0.0);
    }
    u = 1.0 + x;
    if (log_special(u, &special))
        return special;
    lost = x >= 1.0 ? 1.0 - (u - x) : x - (u - 1.0); /* 1 + x = u + lost exactly */
    return gst_log(u) + lost / u;
}

/* log(x) to about 2^-60 relative; x positive, finite. */
static struct pair log_pair(double x)
{
    double k, f = split(x, &k);
    double denominator = 2.0 + f;
    double denominator_low = f - (denominator - 2.0);
    double s = f / denominator;
    struct pair back = two_product(s, denominator);
    double s_low = (((f - back.high) - back.low) - s * denominator_low) / denominator;
    struct pair sum = two_sum(k * LN2_HIGH, 2.0 * s);
    double low = sum.low + (k * LN2_LOW + (2.0 * s_low + s * atanh_tail(s)));

    return fast_two_sum(sum.high, low);
}

double gst_pow(double x, double y)
{
    struct pair l, p;

    if (y == 0.0 || x == 1.0)
        return 1.0;
    if (!(x > 0.0) || y != y || magnitude(x) > 0x1.fffffffffffffp1023)
        return not_a_number();
    l = log_pair(x);
    p.high = y * l.high;
    if (!(magnitude(p.high) < 746.0)) /* far outside the range of results */
        return gst_exp(p.high);
    if (magnitude(p.high) < 0x1p-200)
        return 1.0;
    p = two_product(y, l.high);
    return exp_pair(p.high, p.low + y * l.low);
}

/* x = k pi/2 + r, |r| <= pi/4 (a little more), |x| <= 2^30: r as a pair, k mod 4. Each piece of pi/2 has 23 bits, so k (at most 30 bits)
 * times a piece is exact; the sums keep what they lose. The pieces reach down to 2^-161, r is never below 2^-70 for these x. */
static struct pair reduce(double x, unsigned *quadrant)
{
    static const double pieces[7] = {
        0x1.921fb40000000p+0,  0x1.4442d00000000p-24,  0x1.8469800000000p-48,  0x1.3198a00000000p-69,
        0x1.701b800000000p-92, 0x1.cd12900000000p-115, 0x1.2704400000000p-142,
    };
    double k = nearest(x * TWO_OVER_PI);
    struct pair r = {x, 0.0};

    for (int i = 0; i < 7; i++) {
        struct pair sum = two_sum(r.high, -(k * pieces[i]));

        r = two_sum(sum.high, sum.low + r.low);
    }
    *quadrant = (unsigned)((int64_t)k & 3);
    return r;
}

/* sin(r + low) = r - r^3/3! + ... + r^17/17!. Next term: r^19/19! < 2^-63 r. */
static double sin_series(double r, double low)
{
    double z = r * r;
    double p = 1.0 / 355687428096000.0;

    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return r + (z * r * p + low * (1.0 - 0.5 * z));
}

/* cos(r + low) = 1 - r^2/2 + r^4/4! - ... + r^16/16!. Next term: r^18/18! < 2^-58. */
static double cos_series(double r, double low)
{
    double z = r * r;
    double half = 0.5 * z;
    double one = 1.0 - half;
    double p = 1.0 / 20922789888000.0;

    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    return one + (((1.0 - one) - half) + (z * z * p - r * low));
}

/* sin(x + turns * pi/2) */
static double circle(double x, unsigned turns)
{
    unsigned quadrant;
    struct pair r;
    double y;

    if (!(magnitude(x) <= 0x1p30))
        return not_a_number();
    r = reduce(x, &quadrant);
    quadrant = (quadrant + turns) & 3;
    y = quadrant & 1 ? cos_series(r.high, r.low) : sin_series(r.high, r.low);
    return quadrant & 2 ? -y : y;
}

double gst_sin(double x)
{
    if (magnitude(x) < 0x1p-27) /* also keeps the sign of 0 */
        return x;
    return circle(x, 0);
}

double gst_cos(double x)
{
    return circle(x, 1);
}
