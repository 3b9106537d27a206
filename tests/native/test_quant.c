/* test_quant.c - weight types.
 *
 * Property: sizes as in the file format; dequantised values equal, bit for bit, those of the `gguf` package (quant_vectors.h); a packed
 * matrix holds exactly the values of its rows, read back here by the drawing in kernels.h and nothing else, for odd numbers of rows and for
 * any cut of the work; every byte of the tiles is written. No tolerance.
 */
#include "check.h"
#include "quant_vectors.h"

#include "quant/quant.h"

#include <stdlib.h>

static uint64_t random_state = 7;

static uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static void test_types(void)
{
    static const struct {
        const char *name;
        uint32_t number, values, bytes;
        bool supported;
    } known[] = {{"F32", 0, 1, 4, true},       {"F16", 1, 1, 2, true},       {"Q4_0", 2, 32, 18, true},     {"Q4_1", 3, 32, 20, true},
                 {"Q5_0", 6, 32, 22, true},    {"Q5_1", 7, 32, 24, true},    {"Q8_0", 8, 32, 34, true},     {"Q4_K", 12, 256, 144, true},
                 {"Q5_K", 13, 256, 176, true}, {"Q6_K", 14, 256, 210, true}, {"Q3_K", 11, 256, 110, false}, {"IQ4_XS", 23, 256, 136, false},
                 {"BF16", 30, 1, 2, true},     {"MXFP4", 39, 32, 17, false}};

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const struct quant_type *t = quant_type_of(known[i].number);

        if (CHECK(t != NULL))
            CHECK(!strcmp(t->name, known[i].name) && t->number == known[i].number && t->block_values == known[i].values &&
                  t->block_bytes == known[i].bytes && t->supported == known[i].supported);
    }
    CHECK(!quant_type_of(4) && !quant_type_of(5) && !quant_type_of(31) && !quant_type_of(UINT32_MAX));
    CHECK(quant_type_of(GGML_Q8_0)->pack == GST_PACK_Q8_0 && quant_type_of(GGML_F32)->pack == GST_PACK_NONE);
    CHECK(quant_type_of(GGML_F16)->float_type == GST_F16 && quant_type_of(GGML_BF16)->float_type == GST_BF16);
}

static void compare(uint32_t number, const uint8_t *bytes, const uint32_t *values, size_t n)
{
    const struct quant_type *t = quant_type_of(number);
    float y[512];
    uint8_t shifted[4 * 512 + 1]; /* rows lie anywhere */

    memset(y, 0xff, sizeof y);
    memcpy(shifted + 1, bytes, n / t->block_values * t->block_bytes);
    quant_dequantize_row(t, shifted + 1, n, y);
    if (!CHECK(!memcmp(y, values, 4 * n)))
        fprintf(stderr, "    type %s\n", t->name);
}

static void test_dequantize(void)
{
    static const float floats[4] = {1, -0.0f, 1e-45f, 3e38f};
    float y[4];

    compare(GGML_F16, f16_bytes, f16_values, 128);
    compare(GGML_BF16, bf16_bytes, bf16_values, 128);
    compare(GGML_Q8_0, q8_0_bytes, q8_0_values, 128);
    compare(GGML_Q4_0, q4_0_bytes, q4_0_values, 128);
    compare(GGML_Q4_1, q4_1_bytes, q4_1_values, 128);
    compare(GGML_Q5_0, q5_0_bytes, q5_0_values, 128);
    compare(GGML_Q5_1, q5_1_bytes, q5_1_values, 128);
    compare(GGML_Q4_K, q4_k_bytes, q4_k_values, 512);
    compare(GGML_Q5_K, q5_k_bytes, q5_k_values, 512);
    compare(GGML_Q6_K, q6_k_bytes, q6_k_values, 512);
    quant_dequantize_row(quant_type_of(GGML_F32), floats, 4, y);
    CHECK(!memcmp(y, floats, sizeof y));
}

/* Value k of row r, from the drawing. */
static float unpacked(enum gst_pack pack, const uint8_t *tiles, size_t tile_bytes, size_t n_cols, size_t row, size_t k)
{
    size_t n_blocks = n_cols / 32, b = k / 32, group = k % 32 / 4, i = k % 4, r = row % 16;
    const uint8_t *tile = tiles + row / 16 * tile_bytes;
    static const size_t block_bytes[] = {512, 256, 256, 320, 320, 256, 320, 384};
    bool wide = pack >= GST_PACK_Q4_K;
    size_t n_scales = wide ? n_blocks / 8 : n_blocks, scale = wide ? b / 8 : b;
    const uint8_t *quants = tile + b * block_bytes[pack];
    const uint8_t *scales = tile + n_blocks * block_bytes[pack], *minimums = scales + 32 * n_scales;
    const uint8_t *factors = minimums + (pack == GST_PACK_Q6_K ? 0 : 32 * n_scales) + 32 * b;
    uint16_t d, m = 0;
    float w;

    memcpy(&d, scales + 2 * (16 * scale + r), 2);
    if (pack == GST_PACK_Q4_1 || pack == GST_PACK_Q5_1 || pack == GST_PACK_Q4_K || pack == GST_PACK_Q5_K)
        memcpy(&m, minimums + 2 * (16 * scale + r), 2);
    if (pack == GST_PACK_Q8_0)
        return gst_f16_to_f32(d) * (float)(quants[64 * group + 4 * r + i] - 128);
    w = (float)(group < 4 ? quants[64 * group + 4 * r + i] & 15 : quants[64 * (group - 4) + 4 * r + i] >> 4);
    if (block_bytes[pack] == 320)
        w += (float)(16 * (quants[256 + 4 * r + i] >> group & 1));
    if (block_bytes[pack] == 384)
        w += (float)(16 * (quants[256 + 64 * (group / 4) + 4 * r + i] >> 2 * (group % 4) & 3));
    switch (pack) {
    case GST_PACK_Q4_0:
        return gst_f16_to_f32(d) * (w - 8);
    case GST_PACK_Q5_0:
        return gst_f16_to_f32(d) * (w - 16);
    case GST_PACK_Q4_K:
    case GST_PACK_Q5_K:
        return gst_f16_to_f32(d) * (float)factors[r] * w - gst_f16_to_f32(m) * (float)factors[16 + r];
    case GST_PACK_Q6_K:
        return gst_f16_to_f32(d) * (float)(int8_t)factors[16 * (k % 32 / 16) + r] * (w - 32);
    default:
        return gst_f16_to_f32(d) * w + gst_f16_to_f32(m);
    }
}

static void test_pack(uint32_t number, size_t n_rows, size_t n_cols)
{
    const struct quant_type *t = quant_type_of(number);
    size_t row_bytes = n_cols / t->block_values * t->block_bytes, tile_bytes, bytes, n_tiles = (n_rows + 15) / 16;
    uint8_t *rows = malloc(n_rows * row_bytes), *tiles, *again;
    float *y = malloc(n_cols * sizeof *y);
    unsigned n_wrong = 0;

    if (!CHECK(quant_packed_bytes(t->pack, n_rows, n_cols, &tile_bytes, &bytes)))
        return;
    CHECK(tile_bytes % 64 == 0 && bytes == n_tiles * tile_bytes);
    for (size_t i = 0; i < n_rows * row_bytes; i++)
        rows[i] = (uint8_t)random_u32();
    for (size_t i = 0; i < n_rows * row_bytes; i += t->block_bytes) { /* finite scales */
        rows[i + (number == GGML_Q6_K ? 209 : 1)] &= 0xbf;
        rows[i + 3] &= number == GGML_Q4_1 || number == GGML_Q5_1 || number == GGML_Q4_K || number == GGML_Q5_K ? 0xbf : 0xff;
    }
    tiles = malloc(bytes);
    again = malloc(bytes);
    memset(tiles, 0x11, bytes);
    memset(again, 0xee, bytes);
    quant_pack(t->pack, rows, n_rows, n_cols, 0, n_tiles, tiles);
    for (size_t at = 0; at < n_tiles;) { /* in pieces, over other old contents */
        size_t take = 1 + random_u32() % 3;

        take = take < n_tiles - at ? take : n_tiles - at;
        quant_pack(t->pack, rows, n_rows, n_cols, at, at + take, again);
        at += take;
    }
    CHECK(!memcmp(tiles, again, bytes));

    for (size_t r = 0; r < n_rows; r++) {
        quant_dequantize_row(t, rows + r * row_bytes, n_cols, y);
        for (size_t k = 0; k < n_cols; k++) {
            float w = unpacked(t->pack, tiles, tile_bytes, n_cols, r, k);

            n_wrong += memcmp(&w, &y[k], 4) != 0;
        }
    }
    for (size_t r = n_rows; r < 16 * n_tiles; r++) /* rows that are not there: zero */
        for (size_t k = 0; k < n_cols; k++)
            n_wrong += unpacked(t->pack, tiles, tile_bytes, n_cols, r, k) != 0;
    CHECK(n_wrong == 0);
    free(again);
    free(tiles);
    free(y);
    free(rows);
}

static void test_sizes(void)
{
    size_t tile_bytes, bytes;

    CHECK(quant_packed_bytes(GST_PACK_Q8_0, 17, 64, &tile_bytes, &bytes) && tile_bytes == 2 * (512 + 32) && bytes == 2 * tile_bytes);
    CHECK(quant_packed_bytes(GST_PACK_Q4_0, 16, 32, &tile_bytes, &bytes) && tile_bytes == 320 && bytes == 320);
    CHECK(quant_packed_bytes(GST_PACK_Q4_1, 1, 32, &tile_bytes, &bytes) && tile_bytes == 320);
    CHECK(quant_packed_bytes(GST_PACK_Q4_0, 16, 96, &tile_bytes, &bytes) && tile_bytes == 896); /* 864 and padding */
    CHECK(quant_packed_bytes(GST_PACK_Q5_0, 16, 32, &tile_bytes, &bytes) && tile_bytes == 384); /* 352 */
    CHECK(quant_packed_bytes(GST_PACK_Q5_1, 16, 64, &tile_bytes, &bytes) && tile_bytes == 768);
    CHECK(quant_packed_bytes(GST_PACK_Q4_K, 16, 256, &tile_bytes, &bytes) && tile_bytes == 8 * 256 + 64 + 8 * 32);
    CHECK(quant_packed_bytes(GST_PACK_Q5_K, 33, 512, &tile_bytes, &bytes) && tile_bytes == 16 * 320 + 128 + 16 * 32 &&
          bytes == 3 * tile_bytes);
    CHECK(quant_packed_bytes(GST_PACK_Q6_K, 16, 256, &tile_bytes, &bytes) && tile_bytes == 3392); /* 8 * 384 + 32 + 8 * 32 and padding */
    CHECK(!quant_packed_bytes(GST_PACK_Q4_K, 16, 128, &tile_bytes, &bytes));
    CHECK(!quant_packed_bytes(GST_PACK_Q8_0, 16, 33, &tile_bytes, &bytes) && bytes == 0);
    CHECK(!quant_packed_bytes(GST_PACK_NONE, 16, 32, &tile_bytes, &bytes));
    CHECK(!quant_packed_bytes(GST_PACK_Q8_0, SIZE_MAX, 1024, &tile_bytes, &bytes));
    CHECK(!quant_packed_bytes(GST_PACK_Q8_0, 16, SIZE_MAX - 31, &tile_bytes, &bytes));
}

int main(void)
{
    static const uint32_t numbers[] = {GGML_Q8_0, GGML_Q4_0, GGML_Q4_1, GGML_Q5_0, GGML_Q5_1}, wide[] = {GGML_Q4_K, GGML_Q5_K, GGML_Q6_K};

    test_types();
    test_dequantize();
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        test_pack(numbers[i], 1, 32);
        test_pack(numbers[i], 16, 64);
        test_pack(numbers[i], 17, 96);
        test_pack(numbers[i], 50, 160);
        test_pack(numbers[i], 100, 32);
    }
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        test_pack(wide[i], 1, 256);
        test_pack(wide[i], 16, 512);
        test_pack(wide[i], 17, 768);
        test_pack(wide[i], 50, 1280);
    }
    test_sizes();
    return check_done("test_quant");
}
