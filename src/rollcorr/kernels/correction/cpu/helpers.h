/* Threads that stay and wait for the next call. To start a thread, and to sleep until it has ended, would take a tenth of
   the time of a million tokens. Like those of OpenMP, they keep the processors of the thread that first made them. */

#ifndef ROLLCORR_HELPERS_H
#define ROLLCORR_HELPERS_H

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_HELPERS 63
#define AWAKE 200000  /* ns; how long a helper looks for the next call before it sleeps */
#define PATIENCE 2000 /* looks at whether the helpers are done, before the caller sleeps until they are: some 50 µs on x86 */

typedef void Work(void *); /* takes tasks until none is left; any number of threads do so at once */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t called, finished;
    Work *work; /* of the call that has the helpers; NULL between calls */
    void *argument;
    fenv_t mode;     /* of the caller's arithmetic, such as that tiny numbers become 0 */
    int processor;   /* that the caller was on */
    int64_t threads; /* helpers that exist */
    int64_t places;  /* helpers that may still join the call */
    int64_t busy;    /* helpers that have joined it and are at work */
} Helpers;

#define NO_HELPERS                                \
    {.lock = PTHREAD_MUTEX_INITIALIZER,           \
     .called = PTHREAD_COND_INITIALIZER,          \
     .finished = PTHREAD_COND_INITIALIZER}
static Helpers helpers = NO_HELPERS;

/* With the lock; who looks at it without will see it soon. */
static void set_places(int64_t places) { __atomic_store_n(&helpers.places, places, __ATOMIC_RELAXED); }

#if defined(__linux__)
static int processor(void) { return sched_getcpu(); }
#else
static int processor(void) { return 0; } /* nobody knows, so no helper stays awake */
#endif

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* A hint that this thread only waits. */
static inline void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/* Look for the next call for a while, without the lock, and return with it. The second read of a batch often follows at
   once, or its next part, and a helper that sleeps comes 30 µs late. On the caller's processor a helper would be in its
   way, so there it sleeps. */
static void look_for_a_call(void) {
    if (processor() == helpers.processor) return;
    pthread_mutex_unlock(&helpers.lock);
    for (int64_t end = nanoseconds() + AWAKE; nanoseconds() < end; pause_briefly())
        if (__atomic_load_n(&helpers.places, __ATOMIC_RELAXED) > 0 && pthread_mutex_trylock(&helpers.lock) == 0) return;
    pthread_mutex_lock(&helpers.lock);
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&helpers.lock);
    for (;;) {
        if (helpers.places == 0) look_for_a_call();
        while (helpers.places == 0) pthread_cond_wait(&helpers.called, &helpers.lock);
        Work *work = helpers.work;
        void *argument = helpers.argument;
        fesetenv(&helpers.mode);
        set_places(helpers.places - 1);
        helpers.busy++;
        pthread_mutex_unlock(&helpers.lock);
        work(argument);
        pthread_mutex_lock(&helpers.lock);
        if (__atomic_sub_fetch(&helpers.busy, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&helpers.finished);
    }
    return 0;
}

/* A fork copies no thread but the one that forks, and locks as they were. */
static void forget_helpers(void) {
    static const Helpers none = NO_HELPERS;
    helpers = none;
}

/* Start helpers until there are `wanted`, or until the system refuses. They leave signals to the threads of Python, but
   for those of their own faults. */
static void have_helpers(int64_t wanted) {
    static int forks_are_watched;
    sigset_t every, before;
    if (!forks_are_watched) forks_are_watched = pthread_atfork(0, 0, forget_helpers) == 0;
    if (helpers.threads >= wanted || !forks_are_watched) return;
    sigfillset(&every);
    const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (int i = 0; i < 4; i++) sigdelset(&every, own[i]);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (pthread_t thread; helpers.threads < wanted && pthread_create(&thread, 0, help, 0) == 0; helpers.threads++)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* The caller works with up to `threads` − 1 helpers; alone while another call has them, or where there are none. */
static void work_together(Work *work, void *argument, int64_t threads) {
    int64_t wanted = threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
    if (wanted < 1) {
        work(argument);
        return;
    }
    pthread_mutex_lock(&helpers.lock);
    int has_them = helpers.work == 0;
    if (has_them) {
        have_helpers(wanted);
        helpers.work = work;
        helpers.argument = argument;
        fegetenv(&helpers.mode);
        helpers.processor = processor();
        int64_t places = wanted < helpers.threads ? wanted : helpers.threads;
        set_places(places);
        for (int64_t i = 0; i < places; i++) pthread_cond_signal(&helpers.called);
    }
    pthread_mutex_unlock(&helpers.lock);
    work(argument);
    if (!has_them) return;

    /* No task is left to take. Close the call to helpers that have not joined, then wait for those that have: each has at
       most one task to finish. */
    pthread_mutex_lock(&helpers.lock);
    set_places(0);
    pthread_mutex_unlock(&helpers.lock);
    for (int i = 0; i < PATIENCE && __atomic_load_n(&helpers.busy, __ATOMIC_ACQUIRE) > 0; i++) pause_briefly();
    pthread_mutex_lock(&helpers.lock);
    while (helpers.busy > 0) pthread_cond_wait(&helpers.finished, &helpers.lock);
    helpers.work = 0;
    pthread_mutex_unlock(&helpers.lock);
}

#endif
