/* fuzz_gguf.c - any bytes as a GGUF: parse, ask for everything, take the fingerprint, make a model, pack and bind small ones.
 *
 * Property: nothing is read or written out of bounds, nothing overflows, every refusal has words, and whatever loads can be packed. */
#include "gguf_writer.h"

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define PACK_MOST (4u << 20) /* larger ones only cost time */

static void fail(const char *what)
{
    fprintf(stderr, "fuzz_gguf: %s\n", what);
    abort();
}

static void ask(const struct geist_gguf *g)
{
    struct geist_tensor_info t;
    struct geist_value v, again;
    const char *key;
    volatile uint8_t sink = 0;
    uint32_t u;
    float f;
    bool found;

    for (size_t i = 0; geist_gguf_value_at(g, i, &key, &v); i++) {
        if (!geist_gguf_value(g, key, &again) || again.data != v.data)
            fail("a key does not find its value");
        for (size_t k = 0; k < v.data_bytes; k++)
            sink ^= ((const uint8_t *)v.data)[k];
        (void)gguf_get_u32(g, key, &u, &found);
        (void)gguf_get_f32(g, key, &f, &found);
    }
    for (size_t i = 0; geist_gguf_tensor_at(g, i, &t); i++) {
        const struct gguf_tensor *found_tensor = gguf_tensor_find(g, t.name);

        if (found_tensor != &g->tensors[i] || !t.type[0])
            fail("a name does not find its tensor");
        if (t.data_bytes)
            sink ^= found_tensor->data[0] ^ found_tensor->data[t.data_bytes - 1];
    }
    (void)sink;
}

static void pack(struct geist_model *m)
{
    size_t n = geist_model_packed_size(m);
    void *buf = NULL;

    if (n > PACK_MOST || posix_memalign(&buf, GEIST_IMAGE_PAGE, n))
        return;
    if (geist_model_pack(m, buf, n) || geist_model_bind(m, buf, n))
        fail("a model that loads cannot be packed and bound");
    free(buf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct geist_engine *engine;
    struct geist_gguf *g = NULL;
    struct geist_model *m = NULL;
    void *memory;
    uint8_t sum[32];

    if (!engine && geist_engine_create(NULL, &engine))
        fail("no engine");
    engine->error[0] = 0;
    memory = w_aligned(data, n);
    if (geist_gguf_open_memory(engine, memory, n, &g)) {
        if (!engine->error[0])
            fail("refused without words");
    } else {
        ask(g);
        if (geist_gguf_fingerprint(g, sum))
            fail("no fingerprint");
        engine->error[0] = 0;
        if (!geist_model_create(g, &m))
            pack(m);
        else if (!engine->error[0])
            fail("refused without words");
        geist_model_destroy(m);
        geist_gguf_close(g);
    }
    free(memory);
    return 0;
}
