/* limits.c - limits.h as a shared library, for the measurements in Python (bench/limits.py compiles it):
 *
 *     cc -O3 -shared -fPIC -o limits.so limits.c
 */
#include "limits.h"

double bench_vpdpbusd(double seconds);
double bench_fma(double seconds);
unsigned bench_read_ways(void);
uint64_t bench_read(const uint8_t *p, size_t n, unsigned way);

double bench_vpdpbusd(double seconds)
{
    return limits_vpdpbusd(seconds);
}

double bench_fma(double seconds)
{
    return limits_fma(seconds);
}

unsigned bench_read_ways(void)
{
    return LIMITS_READS;
}

uint64_t bench_read(const uint8_t *p, size_t n, unsigned way)
{
    return limits_read(p, n, way);
}
