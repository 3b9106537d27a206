/* threads.c - a team of threads that splits one loop at a time.
 *
 *     caller:  lock, write the job, raise `call`, wake sleepers, unlock ── own range ── wait until n_left is 0
 *     worker:  watch `call`: spin a little, then sleep ── if it takes part: its range, n_left - 1
 *
 * `call` holds a generation and how many threads take part, in one word: a worker that does not take part reads nothing else, so that
 * the caller need not wait for it before it writes the next job. */
#include "base/base.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define THREADS_SPINS 2000 /* some tens of microseconds: longer than the gap between two loops of one pass */
#define CALL_STOP 0xffffu  /* in place of the number of threads */

struct worker {
    struct gst_threads *team; /* borrows */
    uint32_t index;
    pthread_t thread;
};

struct gst_threads {
    uint32_t n_threads;
    struct worker *workers; /* owns [n_threads - 1] */
    uint32_t n_started;

    _Atomic uint64_t call;   /* generation * 65536 + threads that take part, or CALL_STOP */
    _Atomic uint32_t n_left; /* workers that have not finished their range */
    pthread_mutex_t mutex;   /* guards the sleeping: */
    pthread_cond_t wake, done;
    uint32_t n_sleeping;
    bool caller_sleeps;

    /* The job; written by the caller before `call` is raised. */
    void (*work)(void *context, size_t begin, size_t end);
    void *context;
    size_t n, grain, n_units, n_ranges;
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Range `i` of n_ranges: contiguous, whole units of `grain`, as even as they go. */
static void run_range(const struct gst_threads *t, size_t i)
{
    size_t each = t->n_units / t->n_ranges, more = t->n_units % t->n_ranges;
    size_t first = i * each + (i < more ? i : more);
    size_t last = first + each + (i < more);
    size_t begin = first * t->grain;
    size_t end = last == t->n_units ? t->n : last * t->grain;
    uint64_t saved = gst_fpenv_enter();

    t->work(t->context, begin, end);
    gst_fpenv_leave(saved);
}

static uint64_t wait_for_call(struct gst_threads *t, uint64_t seen)
{
    uint64_t call;

    for (int i = 0; i < THREADS_SPINS; i++) {
        call = atomic_load_explicit(&t->call, memory_order_acquire);
        if (call != seen)
            return call;
        relax();
    }
    pthread_mutex_lock(&t->mutex);
    t->n_sleeping++;
    while ((call = atomic_load_explicit(&t->call, memory_order_acquire)) == seen)
        pthread_cond_wait(&t->wake, &t->mutex);
    t->n_sleeping--;
    pthread_mutex_unlock(&t->mutex);
    return call;
}

static void *worker_main(void *argument)
{
    struct worker *w = argument;
    struct gst_threads *t = w->team;
    uint64_t seen = 0;

    for (;;) {
        seen = wait_for_call(t, seen);
        if ((seen & 0xffff) == CALL_STOP)
            return NULL;
        if (w->index >= (seen & 0xffff))
            continue;
        run_range(t, w->index);
        if (atomic_fetch_sub_explicit(&t->n_left, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&t->mutex);
            if (t->caller_sleeps)
                pthread_cond_signal(&t->done);
            pthread_mutex_unlock(&t->mutex);
        }
    }
}

static void raise_call(struct gst_threads *t, uint64_t who)
{
    pthread_mutex_lock(&t->mutex);
    atomic_store_explicit(&t->call, ((atomic_load_explicit(&t->call, memory_order_relaxed) >> 16) + 1) << 16 | who, memory_order_release);
    if (t->n_sleeping)
        pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mutex);
}

enum geist_status gst_threads_create(uint32_t n_threads, struct gst_threads **out)
{
    struct gst_threads *t;
    sigset_t all, before;

    *out = NULL;
    if (n_threads < 1 || n_threads >= CALL_STOP)
        return GEIST_E_ARGUMENT;
    t = calloc(1, sizeof *t);
    if (!t)
        return GEIST_E_MEMORY;
    t->n_threads = n_threads;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    pthread_cond_init(&t->done, NULL);
    t->workers = calloc(n_threads, sizeof *t->workers);
    if (!t->workers)
        goto fail;

    /* Signals are the host program's business: none is delivered to a thread it does not know. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; t->n_started < n_threads - 1; t->n_started++) {
        struct worker *w = &t->workers[t->n_started];

        w->team = t;
        w->index = t->n_started + 1;
        if (pthread_create(&w->thread, NULL, worker_main, w))
            break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (t->n_started < n_threads - 1)
        goto fail;
    *out = t;
    return GEIST_OK;

fail:
    gst_threads_destroy(t);
    return GEIST_E_MEMORY;
}

void gst_threads_destroy(struct gst_threads *t)
{
    if (!t)
        return;
    raise_call(t, CALL_STOP);
    for (uint32_t i = 0; i < t->n_started; i++)
        pthread_join(t->workers[i].thread, NULL);
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    free(t->workers);
    free(t);
}

uint32_t gst_threads_count(const struct gst_threads *t)
{
    return t->n_threads;
}

void gst_threads_run(struct gst_threads *t, size_t n, size_t grain, void (*work)(void *context, size_t begin, size_t end), void *context)
{
    size_t n_units;

    if (!n)
        return;
    if (!grain)
        grain = 1;
    n_units = n / grain + (n % grain != 0);

    /* Between jobs no worker reads these: those that took part in the last one have counted n_left down. */
    t->work = work;
    t->context = context;
    t->n = n;
    t->grain = grain;
    t->n_units = n_units;
    t->n_ranges = n_units < t->n_threads ? n_units : t->n_threads;
    if (t->n_ranges > 1) {
        atomic_store_explicit(&t->n_left, (uint32_t)t->n_ranges - 1, memory_order_relaxed);
        raise_call(t, t->n_ranges);
    }
    run_range(t, 0);
    if (t->n_ranges <= 1)
        return;

    for (int i = 0; i < THREADS_SPINS; i++) {
        if (!atomic_load_explicit(&t->n_left, memory_order_acquire))
            return;
        relax();
    }
    pthread_mutex_lock(&t->mutex);
    t->caller_sleeps = true;
    while (atomic_load_explicit(&t->n_left, memory_order_acquire))
        pthread_cond_wait(&t->done, &t->mutex);
    t->caller_sleeps = false;
    pthread_mutex_unlock(&t->mutex);
}
