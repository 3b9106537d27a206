/* fuzz_driver.c - feeds mutated files to a fuzz target where there is no libFuzzer.
 *
 *     fuzz_x CORPUS_DIRECTORY [SECONDS [SEED]]
 *
 * Runs every file of the directory as it is, then mutants for SECONDS (default 10). The seed is printed; a run with the same seed makes the
 * same mutants in the same order. A crash, a sanitizer's finding included, leaves its input in crash.bin of the working directory. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Findings end in SIGABRT, where on_crash waits. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
__attribute__((visibility("default"))) const char *__ubsan_default_options(void);

const char *__asan_default_options(void)
{
    return "abort_on_error=1:handle_abort=0:allocator_may_return_null=1";
}

const char *__ubsan_default_options(void)
{
    return "abort_on_error=1:print_stacktrace=1";
}

#define MAX_FILES 4096
#define MAX_BYTES ((size_t)64 << 20)

struct input {
    uint8_t *bytes; /* owns [capacity] */
    size_t n, capacity;
};

static struct input corpus[MAX_FILES];
static size_t n_corpus;
static struct input now; /* what the target is looking at */
static uint64_t state;

static uint64_t next_random(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t below(size_t n)
{
    return n ? (size_t)(next_random() % n) : 0;
}

static void resize(struct input *x, size_t n)
{
    if (n > x->capacity) {
        x->capacity = n + n / 2 + 64;
        x->bytes = realloc(x->bytes, x->capacity);
        if (!x->bytes)
            exit(2);
    }
    x->n = n;
}

static void on_crash(int number)
{
    int fd = open("crash.bin", O_WRONLY | O_CREAT | O_TRUNC, 0600);

    if (fd >= 0) {
        for (size_t done = 0; done < now.n;) {
            ssize_t k = write(fd, now.bytes + done, now.n - done);

            if (k <= 0)
                break;
            done += (size_t)k;
        }
        close(fd);
    }
    signal(number, SIG_DFL);
    raise(number);
}

/* In order of names, so that a seed means the same everywhere. */
static void read_corpus(const char *path)
{
    struct dirent **entries;
    int n_entries = scandir(path, &entries, NULL, alphasort);

    if (n_entries < 0) {
        perror(path);
        exit(2);
    }
    for (int i = 0; i < n_entries; free(entries[i++])) {
        char name[4096];
        FILE *f;
        long size;

        if (entries[i]->d_name[0] == '.' || n_corpus == MAX_FILES)
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
        f = fopen(name, "rb");
        if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || (size_t)size > MAX_BYTES || fseek(f, 0, SEEK_SET)) {
            fprintf(stderr, "%s: cannot be read\n", name);
            exit(2);
        }
        resize(&corpus[n_corpus], (size_t)size);
        if (fread(corpus[n_corpus].bytes, 1, (size_t)size, f) != (size_t)size)
            exit(2);
        fclose(f);
        n_corpus++;
    }
    free(entries);
}

/* Half of all places lie in the first bytes, where headers are. */
static size_t place(size_t n)
{
    size_t head = n < 4096 ? n : 4096;

    return next_random() & 1 ? below(head) : below(n);
}

static void mutate(struct input *x)
{
    static const uint64_t extremes[] = {0,          1,          2,          0x7f,       0xff,       0xffff,
                                        1ull << 31, 0xffffffff, 1ull << 32, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
    size_t at = place(x->n), n;
    uint64_t value;

    if (x->n < 16) {
        resize(x, 64);
        memset(x->bytes, 0, 64);
    }
    switch (below(10)) {
    case 0: /* a bit */
        x->bytes[at] ^= (uint8_t)(1 << below(8));
        break;
    case 1: /* a byte */
        x->bytes[at] = (uint8_t)next_random();
        break;
    case 2: /* a small step */
        x->bytes[at] = (uint8_t)(x->bytes[at] + (int)below(9) - 4);
        break;
    case 3: /* an integer of 4 or 8 bytes becomes an extreme */
    case 4:
        value = extremes[below(sizeof extremes / sizeof *extremes)];
        n = next_random() & 1 ? 8 : 4;
        if (next_random() & 1)
            at &= ~(size_t)3;
        if (at + n <= x->n)
            memcpy(x->bytes + at, &value, n);
        break;
    case 5: /* cut */
        resize(x, next_random() & 3 ? x->n - below(x->n < 64 ? x->n : 64) : below(x->n) + 1);
        break;
    case 6: /* a chunk twice */
        n = 1 + below(64);
        if (at + n <= x->n && x->n + n < MAX_BYTES) {
            resize(x, x->n + n);
            memmove(x->bytes + at + n, x->bytes + at, x->n - n - at);
        }
        break;
    case 7: /* a chunk less */
        n = 1 + below(64);
        if (at + n < x->n) {
            memmove(x->bytes + at, x->bytes + at + n, x->n - at - n);
            resize(x, x->n - n);
        }
        break;
    case 8: { /* a chunk of another file, or of this one, over this place */
        const struct input *from = next_random() & 1 ? &corpus[below(n_corpus)] : x;
        size_t start = place(from->n);

        n = 1 + below(256);
        if (at + n <= x->n && start + n <= from->n)
            memmove(x->bytes + at, from->bytes + start, n);
        break;
    }
    case 9: { /* the head of this one, the rest of another */
        const struct input *from = &corpus[below(n_corpus)];

        if (at < from->n && below(8) == 0) {
            resize(x, from->n);
            memcpy(x->bytes + at, from->bytes + at, from->n - at);
        }
        break;
    }
    }
}

int main(int argc, char **argv)
{
    double seconds = argc > 2 ? strtod(argv[2], NULL) : 10;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : (uint64_t)time(NULL) ^ (uint64_t)getpid() << 32;
    time_t end;
    unsigned long n_runs = 0;

    if (argc < 2) {
        fprintf(stderr, "usage: %s CORPUS_DIRECTORY [SECONDS [SEED]]\n", argv[0]);
        return 2;
    }
    state = seed;
    printf("seed 0x%llx\n", (unsigned long long)seed);
    fflush(stdout);
    signal(SIGABRT, on_crash);
    signal(SIGFPE, on_crash);
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, on_crash);
    signal(SIGBUS, on_crash);
#endif
    read_corpus(argv[1]);
    if (!n_corpus) {
        fprintf(stderr, "%s: empty\n", argv[1]);
        return 2;
    }
    for (size_t i = 0; i < n_corpus; i++) {
        resize(&now, corpus[i].n);
        if (corpus[i].n)
            memcpy(now.bytes, corpus[i].bytes, corpus[i].n);
        LLVMFuzzerTestOneInput(now.bytes, now.n);
    }
    end = time(NULL) + (time_t)seconds;
    while (time(NULL) < end) {
        const struct input *from = &corpus[below(n_corpus)];
        size_t n_changes = 1 + below(4);

        resize(&now, from->n);
        if (from->n)
            memcpy(now.bytes, from->bytes, from->n);
        for (size_t i = 0; i < n_changes; i++)
            mutate(&now);
        LLVMFuzzerTestOneInput(now.bytes, now.n);
        n_runs++;
    }
    printf("%zu files, %lu mutants\n", n_corpus, n_runs);
    for (size_t i = 0; i < n_corpus; i++)
        free(corpus[i].bytes);
    free(now.bytes);
    return 0;
}
