/* types.c - the weight types of the file format. Sizes of the unsupported ones are known so that their place in a file can be checked and
 * a message can name them. */
#include "quant/quant.h"

#define FLOATS(name, number, bytes, float_type)                                                                                            \
    {                                                                                                                                      \
        name, number, 1, bytes, true, GST_PACK_NONE, float_type                                                                            \
    }
#define BLOCKS(name, number, values, bytes, pack)                                                                                          \
    {                                                                                                                                      \
        name, number, values, bytes, true, pack, GST_F32                                                                                   \
    }
#define FOREIGN(name, number, values, bytes)                                                                                               \
    {                                                                                                                                      \
        name, number, values, bytes, false, GST_PACK_NONE, GST_F32                                                                         \
    }

static const struct quant_type types[] = {
    FLOATS("F32", 0, 4, GST_F32),
    FLOATS("F16", 1, 2, GST_F16),
    FLOATS("BF16", 30, 2, GST_BF16),
    BLOCKS("Q4_0", 2, 32, 18, GST_PACK_Q4_0),
    BLOCKS("Q4_1", 3, 32, 20, GST_PACK_Q4_1),
    BLOCKS("Q5_0", 6, 32, 22, GST_PACK_Q5_0),
    BLOCKS("Q5_1", 7, 32, 24, GST_PACK_Q5_1),
    BLOCKS("Q8_0", 8, 32, 34, GST_PACK_Q8_0),
    BLOCKS("Q4_K", 12, 256, 144, GST_PACK_Q4_K),
    BLOCKS("Q5_K", 13, 256, 176, GST_PACK_Q5_K),
    BLOCKS("Q6_K", 14, 256, 210, GST_PACK_Q6_K),
    FOREIGN("Q8_1", 9, 32, 40),
    FOREIGN("Q2_K", 10, 256, 84),
    FOREIGN("Q3_K", 11, 256, 110),
    FOREIGN("Q8_K", 15, 256, 292),
    FOREIGN("IQ2_XXS", 16, 256, 66),
    FOREIGN("IQ2_XS", 17, 256, 74),
    FOREIGN("IQ3_XXS", 18, 256, 98),
    FOREIGN("IQ1_S", 19, 256, 50),
    FOREIGN("IQ4_NL", 20, 32, 18),
    FOREIGN("IQ3_S", 21, 256, 110),
    FOREIGN("IQ2_S", 22, 256, 82),
    FOREIGN("IQ4_XS", 23, 256, 136),
    FOREIGN("I8", 24, 1, 1),
    FOREIGN("I16", 25, 1, 2),
    FOREIGN("I32", 26, 1, 4),
    FOREIGN("I64", 27, 1, 8),
    FOREIGN("F64", 28, 1, 8),
    FOREIGN("IQ1_M", 29, 256, 56),
    FOREIGN("TQ1_0", 34, 256, 54),
    FOREIGN("TQ2_0", 35, 256, 66),
    FOREIGN("MXFP4", 39, 32, 17),
    FOREIGN("NVFP4", 40, 64, 36),
    FOREIGN("Q1_0", 41, 128, 18),
};

const struct quant_type *quant_type_of(uint32_t number)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].number == number)
            return &types[i];
    return NULL;
}
