/* tables.h - the tables that tiers.c chooses from. Each is defined in the file of its tier; the vector ones exist on x86-64 only. */
#ifndef GEIST_TABLES_H
#define GEIST_TABLES_H

#include "kernels/kernels.h"

extern const struct gst_kernels gst_kernels_scalar;
#if defined(__x86_64__)
extern const struct gst_kernels gst_kernels_avx2;
extern const struct gst_kernels gst_kernels_avx512;
#endif

#endif
