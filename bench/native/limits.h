/* limits.h - what a core and its memory could do at most: loops of nothing but vpdpbusd, nothing but fma, and nothing but loads.
 *
 * Each returns a rate per second, or 0 where the machine lacks the instructions. Everything is static, so that one file that is
 * compiled alone can use it. */
#ifndef BENCH_LIMITS_H
#define BENCH_LIMITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static double limits_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Twelve independent sums hide the latency; the empty asm keeps each in a register of its own and the loop as it is. */
#define LIMITS_REPEAT_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define LIMITS_ROUND 500000 /* some milliseconds */

__attribute__((target("avx512f,avx512vnni"))) static double limits_vnni_round(void)
{
    __m512i a[12], u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(2);
#define ZERO(i) a[i] = _mm512_setzero_si512();
    LIMITS_REPEAT_12(ZERO)
#undef ZERO
    double start = limits_now();
    for (size_t i = 0; i < LIMITS_ROUND; i++) {
#define STEP(i)                                                                                                                            \
    a[i] = _mm512_dpbusd_epi32(a[i], u, s);                                                                                                \
    __asm__ volatile("" : "+v"(a[i]));
        LIMITS_REPEAT_12(STEP)
#undef STEP
    }
    return (double)LIMITS_ROUND * 12 * 64 / (limits_now() - start);
}

__attribute__((target("avx512f"))) static double limits_fma512_round(void)
{
    __m512 a[12], u = _mm512_set1_ps(0.5f), s = _mm512_set1_ps(0.25f);
#define ZERO(i) a[i] = _mm512_setzero_ps();
    LIMITS_REPEAT_12(ZERO)
#undef ZERO
    double start = limits_now();
    for (size_t i = 0; i < LIMITS_ROUND; i++) {
#define STEP(i)                                                                                                                            \
    a[i] = _mm512_fmadd_ps(a[i], u, s);                                                                                                    \
    __asm__ volatile("" : "+v"(a[i]));
        LIMITS_REPEAT_12(STEP)
#undef STEP
    }
    return (double)LIMITS_ROUND * 12 * 16 / (limits_now() - start);
}

__attribute__((target("avx2,fma"))) static double limits_fma256_round(void)
{
    __m256 a[12], u = _mm256_set1_ps(0.5f), s = _mm256_set1_ps(0.25f);
#define ZERO(i) a[i] = _mm256_setzero_ps();
    LIMITS_REPEAT_12(ZERO)
#undef ZERO
    double start = limits_now();
    for (size_t i = 0; i < LIMITS_ROUND; i++) {
#define STEP(i)                                                                                                                            \
    a[i] = _mm256_fmadd_ps(a[i], u, s);                                                                                                    \
    __asm__ volatile("" : "+x"(a[i]));
        LIMITS_REPEAT_12(STEP)
#undef STEP
    }
    return (double)LIMITS_ROUND * 12 * 8 / (limits_now() - start);
}

/* Loads of whole cache lines in `n_streams` places at once, `ahead` bytes of prefetch before each (0: none). n: multiple of 4096. */
__attribute__((target("avx512f"))) static uint64_t limits_read512(const uint8_t *p, size_t n, size_t n_streams, size_t ahead)
{
    size_t each = n / n_streams / 256 * 256;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;

    for (size_t i = 0; i < each; i += 256)
        for (size_t stream = 0; stream < n_streams; stream++) {
            const uint8_t *q = p + stream * each + i;
            if (ahead) {
                for (size_t line = 0; line < 256; line += 64)
                    _mm_prefetch((const char *)q + ahead + line, _MM_HINT_T0);
            }
            a = _mm512_add_epi64(a, _mm512_loadu_si512(q));
            b = _mm512_add_epi64(b, _mm512_loadu_si512(q + 64));
            c = _mm512_add_epi64(c, _mm512_loadu_si512(q + 128));
            d = _mm512_add_epi64(d, _mm512_loadu_si512(q + 192));
        }
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}
#endif

/* Best of the rounds that fit into `seconds`, in multiply-adds a second. */
static double limits_best(double (*round)(void), double seconds)
{
    double end = limits_now() + seconds, best = 0;

    do {
        double rate = round();
        best = rate > best ? rate : best;
    } while (limits_now() < end);
    return best;
}

static inline double limits_vpdpbusd(double seconds)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"))
        return limits_best(limits_vnni_round, seconds);
#endif
    (void)seconds;
    (void)limits_best;
    return 0;
}

static inline double limits_fma(double seconds)
{
#if defined(__x86_64__)
    double narrow = 0, wide = 0;

    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        narrow = limits_best(limits_fma256_round, seconds / 2);
    if (__builtin_cpu_supports("avx512f"))
        wide = limits_best(limits_fma512_round, seconds / 2);
    return wide > narrow ? wide : narrow;
#else
    (void)seconds;
    return 0;
#endif
}

static uint64_t limits_read_words(const uint8_t *p, size_t n)
{
    uint64_t sums[8] = {0}, sum = 0, word;

    for (size_t i = 0; i + 64 <= n; i += 64)
        for (size_t j = 0; j < 8; j++) {
            memcpy(&word, p + i + 8 * j, 8);
            sums[j] += word;
        }
    for (size_t j = 0; j < 8; j++)
        sum += sums[j];
    return sum;
}

#define LIMITS_READS 6 /* ways to read: */

/* Reads n bytes (a multiple of 4096) in one of LIMITS_READS ways and returns their sum, by which nothing is left out. */
static inline uint64_t limits_read(const uint8_t *p, size_t n, unsigned way)
{
#if defined(__x86_64__)
    if (way > 0 && __builtin_cpu_supports("avx512f")) {
        static const struct {
            size_t n_streams, ahead;
        } ways[LIMITS_READS] = {{0, 0}, {1, 0}, {1, 1024}, {1, 4096}, {4, 0}, {4, 1024}};
        return limits_read512(p, n, ways[way % LIMITS_READS].n_streams, ways[way % LIMITS_READS].ahead);
    }
#endif
    (void)way;
    return limits_read_words(p, n);
}

#endif
