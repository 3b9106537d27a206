/* test_gguf.c - the parser.
 *
 * Property: a right file gives exactly what was written into it; each way of being wrong is refused with its status and with words that
 * name the place. Every file lies in memory of exactly its size, so that under AddressSanitizer a read past the end fails the test. Every
 * cut of a right file is refused or, behind the table, still inside bounds. No tolerance anywhere.
 */
#include "check.h"
#include "gguf_writer.h"

#include <errno.h>
#include <math.h>
#include <unistd.h>

static struct geist_engine *engine;

/* Opens what was written; checks status and that the words contain `words` (unless NULL). Returns the file, or NULL. */
static struct geist_gguf *opened_at(struct writer *w, enum geist_status wanted, const char *words, void **memory, int line)
{
    struct geist_gguf *g = NULL;
    enum geist_status got;

    *memory = w_aligned(w->bytes, w->n);
    got = geist_gguf_open_memory(engine, *memory, w->n, &g);
    check_status_at(got, wanted, __FILE__, line, words ? words : "opens");
    if (words && !check_at(strstr(geist_engine_error(engine), words) != NULL, __FILE__, line, words))
        fprintf(stderr, "    the words are: %s\n", geist_engine_error(engine));
    check_at((g == NULL) == (got != GEIST_OK), __FILE__, line, "a file only with success");
    w_free(w);
    return g;
}

static void refused_at(struct writer *w, enum geist_status wanted, const char *words, int line)
{
    void *memory;

    geist_gguf_close(opened_at(w, wanted, words, &memory, line));
    free(memory);
}

#define REFUSED(w, status, words) refused_at((w), (status), (words), __LINE__)
#define BAD(w, words) REFUSED(w, GEIST_E_FORMAT, words)

static const uint64_t dims_64[4] = {64, 1, 1, 1};

/* Everything at once: each scalar type, arrays, strings, two tensors. */
static void write_sample(struct writer *w, uint32_t version)
{
    static const uint64_t dims[2] = {32, 3};

    w_header(w, version, 3, 17);
    w_key(w, "a.u8", GEIST_U8);
    w_u8(w, 200);
    w_key(w, "a.i8", GEIST_I8);
    w_u8(w, 0xff);
    w_key(w, "a.u16", GEIST_U16);
    w_bytes(w, "\x34\x12", 2);
    w_key(w, "a.i16", GEIST_I16);
    w_bytes(w, "\xfe\xff", 2);
    w_key_u32(w, "a.u32", 4000000000u);
    w_key(w, "a.i32", GEIST_I32);
    w_u32(w, 77);
    w_key_f32(w, "a.f32", 1.5f);
    w_key(w, "a.bool", GEIST_BOOL);
    w_u8(w, 1);
    w_key_text(w, "a.text", "hello");
    w_key(w, "a.u64", GEIST_U64);
    w_u64(w, 1ull << 40);
    w_key(w, "a.i64", GEIST_I64);
    w_u64(w, 12);
    w_key(w, "a.f64", GEIST_F64);
    w_u64(w, 0x3fd0000000000000u);
    w_key_array(w, "a.texts", GEIST_STRING, 3);
    w_text(w, "x");
    w_text(w, "");
    w_text(w, "yz");
    w_key_array(w, "a.numbers", GEIST_I32, 2);
    w_u32(w, 5);
    w_u32(w, 6);
    w_key_array(w, "a.none", GEIST_F32, 0);
    w_key_array(w, "a.flags", GEIST_BOOL, 2);
    w_u8(w, 0);
    w_u8(w, 1);
    w_key_text(w, "a.empty", "");
    w_tensor(w, "t.second", 1, dims_64, GGML_F32, 128);
    w_tensor(w, "t.first", 2, dims, GGML_Q8_0, 0);
    w_tensor(w, "t.foreign", 1, dims_64, 99, 0);
    w_pad(w, 32);
    for (int i = 0; i < 128 + 256; i++)
        w_u8(w, (uint8_t)i);
}

static void test_right(uint32_t version)
{
    struct writer w = {0};
    struct geist_gguf *g;
    struct geist_value v;
    struct geist_tensor_info t;
    const struct gguf_tensor *found;
    void *memory;
    const char *key;
    uint32_t u;
    float f;
    bool there;
    char text[8];
    uint8_t joined[7] = "!!!!!!!";

    write_sample(&w, version);
    g = opened_at(&w, GEIST_OK, NULL, &memory, __LINE__);
    if (!g)
        return;
    CHECK(geist_gguf_n_values(g) == 17 && geist_gguf_n_tensors(g) == 3);
    CHECK(geist_gguf_value_at(g, 8, &key, &v) && !strcmp(key, "a.text") && v.type == GEIST_STRING && v.data_bytes == 5 && v.count == 1);
    CHECK(!memcmp(v.data, "hello", 5));
    CHECK(!geist_gguf_value_at(g, 17, &key, &v) && key == NULL);
    CHECK(geist_gguf_value(g, "a.texts", &v) && v.type == GEIST_ARRAY && v.item_type == GEIST_STRING && v.count == 3 && v.data_bytes == 27);
    CHECK(geist_value_skip(&v, 0, 0) == 0 && geist_value_skip(&v, 0, 1) == 9 && geist_value_skip(&v, 9, 1) == 17);
    CHECK(geist_value_skip(&v, 0, 2) == 17 && geist_value_skip(&v, 0, 3) == 27 && geist_value_skip(&v, 17, 1) == 27);
    CHECK(geist_value_skip(&v, 0, 4) == 27 && geist_value_skip(&v, 27, UINT64_MAX) == 27);
    geist_value_join(&v, 0xff, joined); /* 27 - 7 * 3 */
    CHECK(!memcmp(joined, "x\xff\xffyz\xff!", 7));
    CHECK(geist_gguf_value(g, "a.numbers", &v) && v.item_type == GEIST_I32 && v.count == 2 && v.data_bytes == 8);
    CHECK(geist_gguf_value(g, "a.none", &v) && v.count == 0 && v.data_bytes == 0);
    CHECK(geist_gguf_value(g, "a.empty", &v) && v.data_bytes == 0);
    CHECK(!geist_gguf_value(g, "a.missing", &v) && v.data == NULL);

    CHECK_STATUS(gguf_get_u32(g, "a.u8", &u, &there), GEIST_OK);
    CHECK(there && u == 200);
    CHECK(gguf_get_u32(g, "a.u16", &u, &there) == GEIST_OK && u == 0x1234);
    CHECK(gguf_get_u32(g, "a.u32", &u, &there) == GEIST_OK && u == 4000000000u);
    CHECK(gguf_get_u32(g, "a.i32", &u, &there) == GEIST_OK && u == 77);
    CHECK(gguf_get_u32(g, "a.i64", &u, &there) == GEIST_OK && u == 12);
    CHECK_STATUS(gguf_get_u32(g, "a.i8", &u, &there), GEIST_E_FORMAT);
    CHECK(strstr(engine->error, "a.i8") && strstr(engine->error, "-1"));
    CHECK_STATUS(gguf_get_u32(g, "a.i16", &u, &there), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_u32(g, "a.u64", &u, &there), GEIST_E_FORMAT);
    CHECK(strstr(engine->error, "1099511627776") != NULL);
    CHECK_STATUS(gguf_get_u32(g, "a.f32", &u, &there), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_u32(g, "a.bool", &u, &there), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_u32(g, "a.numbers", &u, &there), GEIST_E_FORMAT);
    CHECK(gguf_get_u32(g, "b", &u, &there) == GEIST_OK && !there && u == 0);
    CHECK(gguf_get_f32(g, "a.f32", &f, &there) == GEIST_OK && there && f == 1.5f);
    CHECK(gguf_get_f32(g, "a.f64", &f, &there) == GEIST_OK && there && f == 0.25f);
    CHECK_STATUS(gguf_get_f32(g, "a.u8", &f, &there), GEIST_E_FORMAT);
    CHECK(gguf_get_f32(g, "b", &f, &there) == GEIST_OK && !there);
    CHECK(gguf_get_text(g, "a.text", text, sizeof text, &there) == GEIST_OK && there && !strcmp(text, "hello"));
    CHECK_STATUS(gguf_get_text(g, "a.text", text, 5, &there), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_text(g, "a.u8", text, sizeof text, &there), GEIST_E_FORMAT);

    CHECK(geist_gguf_tensor_at(g, 1, &t) && !strcmp(t.name, "t.first") && !strcmp(t.type, "Q8_0") && t.type_number == 8 && t.n_dims == 2);
    CHECK(t.dims[0] == 32 && t.dims[1] == 3 && t.dims[2] == 1 && t.dims[3] == 1 && t.data_bytes == 102);
    CHECK(geist_gguf_tensor_at(g, 2, &t) && !strcmp(t.type, "?99") && t.data_bytes == 0);
    CHECK(!geist_gguf_tensor_at(g, 3, &t) && t.name == NULL);
    found = gguf_tensor_find(g, "t.second");
    CHECK(found && found->data_bytes == 256 && found->data[0] == 128 && (uintptr_t)found->data % 8 == 0);
    CHECK(gguf_tensor_find(g, "t.seconds") == NULL && gguf_tensor_find(g, "") == NULL);
    geist_gguf_close(g);
    free(memory);
}

/* The sample ends with a tensor's last byte, so that every shorter file is refused. */
static void test_cuts(void)
{
    struct writer w = {0};
    unsigned n_opened = 0, n_other = 0;

    write_sample(&w, 3);
    for (size_t n = 0; n < w.n; n++) {
        void *memory = w_aligned(w.bytes, n);
        struct geist_gguf *g = NULL;
        enum geist_status status = geist_gguf_open_memory(engine, memory, n, &g);

        n_opened += status == GEIST_OK;
        n_other += status != GEIST_E_FORMAT || !engine->error[0] || g != NULL;
        geist_gguf_close(g);
        free(memory);
    }
    CHECK(n_opened == 0);
    CHECK(n_other == 0);
    w_free(&w);
}

static void test_header(void)
{
    struct writer w = {0};
    struct geist_gguf *g;
    void *memory = w_aligned("GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);

    CHECK_STATUS(geist_gguf_open_memory(engine, memory, 24, &g), GEIST_OK);
    CHECK(geist_gguf_n_values(g) == 0 && geist_gguf_n_tensors(g) == 0);
    geist_gguf_close(g);
    CHECK_STATUS(geist_gguf_open_memory(engine, (uint8_t *)memory + 1, 23, &g), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_gguf_open_memory(engine, NULL, 24, &g), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_gguf_open_memory(NULL, memory, 24, &g), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, 24, NULL), GEIST_E_ARGUMENT);
    CHECK_STATUS(geist_gguf_open_memory(engine, memory, 23, &g), GEIST_E_FORMAT);
    free(memory);

    w_bytes(&w, "GGUX", 4);
    w_zeros(&w, 60);
    BAD(&w, "byte 0");
    w_header(&w, 1, 0, 0);
    REFUSED(&w, GEIST_E_UNSUPPORTED, "version 1 at byte 4");
    w_header(&w, 4, 0, 0);
    REFUSED(&w, GEIST_E_UNSUPPORTED, "version 4");
    w_header(&w, 0, 0, 0);
    REFUSED(&w, GEIST_E_UNSUPPORTED, "version 0");
    w_header(&w, 3u << 24, 0, 0);
    REFUSED(&w, GEIST_E_UNSUPPORTED, "big-endian");
    w_header(&w, 3, UINT64_MAX, 0);
    BAD(&w, "byte 8 claims 18446744073709551615 tensors");
    w_header(&w, 3, 0, 1ull << 63);
    BAD(&w, "byte 16 claims 9223372036854775808 keys");
    w_header(&w, 3, 3, 0); /* under the cap, but more than the bytes can hold */
    w_zeros(&w, 98);
    BAD(&w, "byte 8 claims 3 tensors");
    w_header(&w, 3, 0, 3);
    w_zeros(&w, 41);
    BAD(&w, "byte 16 claims 3 keys");
    w_header(&w, 3, 0, GGUF_MAX_VALUES + 1);
    w_zeros(&w, 14 * (GGUF_MAX_VALUES + 1));
    BAD(&w, "claims 65537 keys");
    w_header(&w, 3, GGUF_MAX_TENSORS + 1, 0);
    w_zeros(&w, 33 * (GGUF_MAX_TENSORS + 1));
    BAD(&w, "claims 65537 tensors");
}

static void test_keys(void)
{
    struct writer w = {0};
    char long_key[GGUF_MAX_KEY_BYTES + 2];
    void *memory;

    w_header(&w, 3, 0, 1);
    w_u64(&w, UINT64_MAX);
    w_zeros(&w, 32);
    BAD(&w, "key 0 at byte 24: 18446744073709551615 bytes long");
    w_header(&w, 3, 0, 1);
    w_u64(&w, UINT64_MAX - 23); /* byte 24 plus this wraps round */
    w_zeros(&w, 32);
    BAD(&w, "key 0 at byte 24");
    w_header(&w, 3, 0, 1);
    w_u64(&w, 100);
    w_zeros(&w, 32);
    BAD(&w, "key 0 at byte 24: 100 bytes long, but the file ends");
    w_header(&w, 3, 0, 1);
    w_key_u32(&w, "", 7);
    w_zeros(&w, 8);
    BAD(&w, "key 0 at byte 24: empty");
    w_header(&w, 3, 0, 2);
    w_key_u32(&w, "one", 7);
    w_u64(&w, 3);
    w_bytes(&w, "a\0b", 3);
    w_u32(&w, GEIST_U8);
    w_u8(&w, 1);
    BAD(&w, "key 1 at byte 43: holds a NUL");
    memset(long_key, 'k', sizeof long_key - 1);
    long_key[sizeof long_key - 1] = 0;
    w_header(&w, 3, 0, 1);
    w_key_u32(&w, long_key, 7);
    BAD(&w, "4097 bytes long, at most 4096");
    long_key[GGUF_MAX_KEY_BYTES] = 0;
    w_header(&w, 3, 0, 1);
    w_key_u32(&w, long_key, 7);
    geist_gguf_close(opened_at(&w, GEIST_OK, NULL, &memory, __LINE__));
    free(memory);
    w_header(&w, 3, 0, 3);
    w_key_u32(&w, "same.key", 7);
    w_key_u32(&w, "other.key", 7);
    w_key_text(&w, "same.key", "x");
    BAD(&w, "key same.key: there twice");
    w_header(&w, 3, 0, 2);
    w_key_u32(&w, "a", 1);
    w_text(&w, "the.key");
    w_bytes(&w, "\4\0", 2);
    BAD(&w, "key the.key: the file ends in its type");
}

static void test_values(void)
{
    struct writer w = {0};

    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", 13);
    w_zeros(&w, 8);
    BAD(&w, "key the.key: value type 13 at byte 39");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", UINT32_MAX);
    w_zeros(&w, 8);
    BAD(&w, "key the.key: value type 4294967295");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_U64);
    w_zeros(&w, 7);
    BAD(&w, "key the.key: 1 values of 8 bytes at byte 43");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_BOOL);
    w_u8(&w, 2);
    BAD(&w, "key the.key: a truth value of 2 at byte 43");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_BOOL, 2);
    w_u8(&w, 1);
    w_u8(&w, 255);
    BAD(&w, "key the.key: a truth value of 255 at byte 56");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_STRING);
    w_u64(&w, UINT64_MAX - 50);
    BAD(&w, "key the.key: a string of 18446744073709551565 bytes at byte 43");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_STRING);
    w_u64(&w, 9);
    w_zeros(&w, 8);
    BAD(&w, "key the.key: a string of 9 bytes");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_STRING);
    w_zeros(&w, 7);
    BAD(&w, "key the.key: 1 strings at byte 43, but the file ends after 7 bytes");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_STRING, 2);
    w_text(&w, "abc");
    w_zeros(&w, 7);
    BAD(&w, "key the.key: the file ends in a string's length at byte 66");

    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_ARRAY, 1);
    w_u32(&w, GEIST_U8);
    w_u64(&w, 0);
    REFUSED(&w, GEIST_E_UNSUPPORTED, "key the.key: an array of arrays");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", 77, 1);
    w_zeros(&w, 8);
    BAD(&w, "key the.key: value type 77");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_U8, UINT64_MAX);
    BAD(&w, "key the.key: an array of 18446744073709551615 values");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_U64, GGUF_MAX_ARRAY);
    w_zeros(&w, 8);
    BAD(&w, "key the.key: 67108864 values of 8 bytes");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_STRING, 1000);
    w_zeros(&w, 80);
    BAD(&w, "key the.key: 1000 strings");
    w_header(&w, 3, 0, 1);
    w_key_array(&w, "the.key", GEIST_STRING, 3);
    w_text(&w, "a");
    w_u64(&w, 1ull << 60);
    w_zeros(&w, 20);
    BAD(&w, "key the.key: a string of 1152921504606846976 bytes");
    w_header(&w, 3, 0, 1);
    w_key(&w, "the.key", GEIST_ARRAY);
    w_u32(&w, GEIST_U8);
    w_u32(&w, 1);
    BAD(&w, "key the.key: the file ends in an array's type and length");
}

static void one_tensor(struct writer *w, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset, size_t n_data)
{
    w_header(w, 3, 1, 0);
    w_tensor(w, "the.tensor", n_dims, dims, type, offset);
    w_pad(w, 32);
    w_zeros(w, n_data);
}

static void test_tensors(void)
{
    struct writer w = {0};
    uint64_t dims[5] = {32, 2, 1, 1, 1};
    char name[GGUF_MAX_NAME_BYTES + 2];
    void *memory;

    w_header(&w, 3, 1, 0);
    w_u64(&w, UINT64_MAX - 31);
    w_zeros(&w, 64);
    BAD(&w, "tensor 0 at byte 24");
    w_header(&w, 3, 1, 0);
    w_tensor(&w, "", 1, dims, GGML_F32, 0);
    w_zeros(&w, 200);
    BAD(&w, "tensor 0 at byte 24: empty");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    w_header(&w, 3, 1, 0);
    w_tensor(&w, name, 1, dims, GGML_F32, 0);
    BAD(&w, "tensor 0 at byte 24: 257 bytes long");

    one_tensor(&w, 0, dims, GGML_F32, 0, 400);
    BAD(&w, "tensor the.tensor: 0 dimensions at byte 42");
    one_tensor(&w, 5, dims, GGML_F32, 0, 400);
    BAD(&w, "tensor the.tensor: 5 dimensions");
    w_header(&w, 3, 1, 0);
    w_text(&w, "the.tensor");
    w_u32(&w, UINT32_MAX);
    w_zeros(&w, 100);
    BAD(&w, "tensor the.tensor: 4294967295 dimensions");
    dims[1] = 0;
    one_tensor(&w, 2, dims, GGML_F32, 0, 400);
    BAD(&w, "tensor the.tensor: dimension 1 at byte 54 is 0");
    dims[1] = UINT64_MAX;
    one_tensor(&w, 2, dims, GGML_F32, 0, 400);
    BAD(&w, "tensor the.tensor: dimensions");
    dims[0] = 1ull << 32;
    dims[1] = 1ull << 32;
    one_tensor(&w, 2, dims, GGML_F32, 0, 400); /* 2^64 values */
    BAD(&w, "tensor the.tensor: dimensions up to byte 62 multiply");
    dims[1] = 1ull << 31;
    one_tensor(&w, 2, dims, GGML_F32, 0, 400); /* 2^65 bytes */
    BAD(&w, "tensor the.tensor: its size");
    dims[0] = 33;
    dims[1] = 1;
    one_tensor(&w, 2, dims, GGML_Q8_0, 0, 400);
    BAD(&w, "tensor the.tensor: rows of 33 values, but Q8_0 comes in blocks of 32");
    dims[0] = 16; /* the product is a multiple of a block, the row is not */
    dims[1] = 2;
    one_tensor(&w, 2, dims, GGML_Q4_0, 0, 400);
    BAD(&w, "tensor the.tensor: rows of 16 values");
    dims[0] = 128;
    one_tensor(&w, 1, dims, 12, 0, 400);
    BAD(&w, "Q4_K comes in blocks of 256");

    one_tensor(&w, 1, dims_64, GGML_F32, 16, 400);
    BAD(&w, "tensor the.tensor: offset 16 is no multiple of the alignment 32");
    one_tensor(&w, 1, dims_64, GGML_F32, 0, 255);
    BAD(&w, "tensor the.tensor: 256 bytes at offset 0");
    one_tensor(&w, 1, dims_64, GGML_F32, 256, 300);
    BAD(&w, "tensor the.tensor: 256 bytes at offset 256 of the data pass the file's end, which is at offset 300");
    one_tensor(&w, 1, dims_64, GGML_F32, UINT64_MAX - 31, 400); /* offset plus size wraps round */
    BAD(&w, "tensor the.tensor: 256 bytes at offset 18446744073709551584");
    one_tensor(&w, 1, dims_64, 99, 512, 400);
    BAD(&w, "tensor the.tensor: 0 bytes at offset 512");
    w_header(&w, 3, 1, 0);
    w_tensor(&w, "the.tensor", 1, dims_64, GGML_F32, 0);
    BAD(&w, "before the tensor data at 96");

    w_header(&w, 3, 2, 0);
    w_tensor(&w, "one", 1, dims_64, GGML_F32, 0);
    w_tensor(&w, "one", 1, dims_64, GGML_F32, 256);
    w_pad(&w, 32);
    w_zeros(&w, 512);
    BAD(&w, "tensor one: there twice");
    w_header(&w, 3, 2, 0);
    w_tensor(&w, "one", 1, dims_64, GGML_F32, 224);
    w_tensor(&w, "two", 1, dims_64, GGML_F32, 0);
    w_pad(&w, 32);
    w_zeros(&w, 512);
    BAD(&w, "tensor one: its data at byte 320 overlaps that of tensor two");
    w_header(&w, 3, 2, 0);
    w_tensor(&w, "one", 1, dims_64, GGML_F32, 0);
    w_tensor(&w, "two", 1, dims_64, GGML_F32, 0);
    w_pad(&w, 32);
    w_zeros(&w, 512);
    BAD(&w, "overlaps");

    w_header(&w, 3, 1, 1); /* another alignment moves data and offsets */
    w_key_u32(&w, "general.alignment", 128);
    w_tensor(&w, "the.tensor", 1, dims_64, GGML_F32, 128);
    w_pad(&w, 128);
    w_zeros(&w, 384);
    geist_gguf_close(opened_at(&w, GEIST_OK, NULL, &memory, __LINE__));
    free(memory);
}

static void test_alignment(void)
{
    static const uint32_t bad[] = {0, 1, 4, 24, 33, 131072, UINT32_MAX};
    struct writer w = {0};
    void *memory;

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        w_header(&w, 3, 0, 1);
        w_key_u32(&w, "general.alignment", bad[i]);
        BAD(&w, "general.alignment is");
    }
    w_header(&w, 3, 0, 1);
    w_key_text(&w, "general.alignment", "32");
    BAD(&w, "general.alignment: a string");
    w_header(&w, 3, 0, 1);
    w_key_u32(&w, "general.alignment", 65536);
    geist_gguf_close(opened_at(&w, GEIST_OK, NULL, &memory, __LINE__));
    free(memory);
}

static void test_floats(void)
{
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    struct writer w = {0};
    double wide = 1e300;
    struct geist_gguf *g;
    void *memory;
    float f;
    bool found;

    w_header(&w, 3, 0, 4);
    for (int i = 0; i < 3; i++)
        w_key_f32(&w, i == 0 ? "f0" : i == 1 ? "f1" : "f2", bad[i]);
    w_key(&w, "f3", GEIST_F64);
    w_bytes(&w, &wide, 8);
    g = opened_at(&w, GEIST_OK, NULL, &memory, __LINE__);
    CHECK_STATUS(gguf_get_f32(g, "f0", &f, &found), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_f32(g, "f1", &f, &found), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_f32(g, "f2", &f, &found), GEIST_E_FORMAT);
    CHECK_STATUS(gguf_get_f32(g, "f3", &f, &found), GEIST_E_FORMAT);
    CHECK(strstr(engine->error, "f3") != NULL);
    geist_gguf_close(g);
    free(memory);
}

static void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");

    if (!CHECK(f != NULL))
        return;
    CHECK(fwrite(bytes, 1, n, f) == n);
    CHECK(fclose(f) == 0);
}

static void test_files(const char *data_dir)
{
    char dir[] = "/tmp/test_gguf_XXXXXX", path[256], fixture[1024];
    struct geist_gguf *g, *again;
    struct writer w = {0};
    uint8_t one[32], two[32], zero[32] = {0};
    void *memory;

    if (!CHECK(mkdtemp(dir) != NULL))
        return;
    snprintf(path, sizeof path, "%s/x.gguf", dir);
    CHECK_STATUS(geist_gguf_open(engine, path, &g), GEIST_E_IO);
    CHECK(strstr(engine->error, path) && strstr(engine->error, strerror(ENOENT)) && g == NULL);
    CHECK_STATUS(geist_gguf_open(engine, dir, &g), GEIST_E_IO);
    CHECK(strstr(engine->error, "not a regular file") != NULL);
    write_file(path, "", 0);
    CHECK_STATUS(geist_gguf_open(engine, path, &g), GEIST_E_FORMAT);
    CHECK(strstr(engine->error, "0 bytes") != NULL);
    write_file(path, "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 23);
    CHECK_STATUS(geist_gguf_open(engine, path, &g), GEIST_E_FORMAT);
    CHECK_STATUS(geist_gguf_open(engine, NULL, &g), GEIST_E_ARGUMENT);

    /* A file and the same bytes in memory have the same fingerprint; any byte of metadata, table or data that is changed gives another. */
    write_sample(&w, 3);
    write_file(path, w.bytes, w.n);
    if (CHECK_STATUS(geist_gguf_open(engine, path, &g), GEIST_OK)) {
        unsigned n_same = 0, n_changed = 0;
        size_t data_begin = g->data_begin;

        CHECK_STATUS(geist_gguf_fingerprint(g, one), GEIST_OK);
        geist_gguf_close(g);
        CHECK(memcmp(one, zero, 32));
        for (size_t i = 0; i <= w.n; i++) {
            bool padding = i >= data_begin + 102 && i < data_begin + 128;

            memory = w_aligned(w.bytes, w.n);
            if (i < w.n)
                ((uint8_t *)memory)[i] ^= 1;
            if (geist_gguf_open_memory(engine, memory, w.n, &again) == GEIST_OK) {
                CHECK_STATUS(geist_gguf_fingerprint(again, two), GEIST_OK);
                if (i == w.n)
                    CHECK(!memcmp(one, two, 32));
                else if (!padding && (i < again->table_end || i >= data_begin))
                    n_same += !memcmp(one, two, 32);
                n_changed++;
                geist_gguf_close(again);
            }
            free(memory);
        }
        CHECK(n_same == 0);
        CHECK(n_changed > 400);
    }
    w_free(&w);
    unlink(path);
    rmdir(dir);

    snprintf(fixture, sizeof fixture, "%s/oracle/models/llama-tiny/llama-tiny-q8_0.gguf", data_dir);
    if (CHECK_STATUS(geist_gguf_open(engine, fixture, &g), GEIST_OK)) {
        struct geist_value v;

        CHECK(geist_gguf_n_values(g) == 26 && geist_gguf_n_tensors(g) == 39);
        CHECK(geist_gguf_value(g, "tokenizer.ggml.tokens", &v) && v.count == 512 && v.item_type == GEIST_STRING);
        CHECK(geist_gguf_value(g, "general.architecture", &v) && v.data_bytes == 5 && !memcmp(v.data, "llama", 5));
        geist_gguf_close(g);
    }
    geist_gguf_close(NULL);
}

int main(int argc, char **argv)
{
    struct geist_engine_options options = {GEIST_TIER_AUTO, 2};

    if (argc < 2 || geist_engine_create(&options, &engine))
        return 2;
    test_right(3);
    test_right(2);
    test_cuts();
    test_header();
    test_keys();
    test_values();
    test_tensors();
    test_alignment();
    test_floats();
    test_files(argv[1]);
    geist_engine_destroy(engine);
    return check_done("test_gguf");
}
