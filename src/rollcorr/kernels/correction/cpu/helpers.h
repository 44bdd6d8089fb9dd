/* Threads that stay and wait for the next call. To start a thread, and to sleep until it has ended, would take a tenth of
   the time of a million tokens. Like those of OpenMP, they keep the processors of the thread that first made them.

   They sleep between calls. Awake, they would compete for their cores with the threads of torch, which stay awake for a
   while themselves: a call between operations of torch took 0.7 ms instead of 0.5. Nor are they torch's own: OpenMP waits
   for every thread of a team, so one busy process on two cores made a call 20 times as long. */

#ifndef ROLLCORR_HELPERS_H
#define ROLLCORR_HELPERS_H

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_HELPERS 63
#define PATIENCE 2000 /* looks at whether the helpers are done, before the caller sleeps until they are: some 50 µs on x86 */

typedef void Work(void *); /* takes tasks until none is left; any number of threads do so at once */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t called, finished;
    Work *work; /* of the call that has the helpers; NULL between calls */
    void *argument;
    fenv_t mode;     /* of the caller's arithmetic, such as that tiny numbers become 0 */
    int64_t threads; /* helpers that exist */
    int64_t places;  /* helpers that may still join the call */
    int64_t busy;    /* helpers that have joined it and are at work */
} Helpers;

#define NO_HELPERS                                \
    {.lock = PTHREAD_MUTEX_INITIALIZER,           \
     .called = PTHREAD_COND_INITIALIZER,          \
     .finished = PTHREAD_COND_INITIALIZER}
static Helpers helpers = NO_HELPERS;

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&helpers.lock);
    for (;;) {
        while (helpers.places == 0) pthread_cond_wait(&helpers.called, &helpers.lock);
        Work *work = helpers.work;
        void *argument = helpers.argument;
        fesetenv(&helpers.mode);
        helpers.places--;
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
        helpers.places = wanted < helpers.threads ? wanted : helpers.threads;
        for (int64_t i = 0; i < helpers.places; i++) pthread_cond_signal(&helpers.called);
    }
    pthread_mutex_unlock(&helpers.lock);
    work(argument);
    if (!has_them) return;

    /* No task is left to take. Close the call to helpers that have not joined, then wait for those that have: each has at
       most one task to finish. */
    pthread_mutex_lock(&helpers.lock);
    helpers.places = 0;
    pthread_mutex_unlock(&helpers.lock);
    for (int i = 0; i < PATIENCE && __atomic_load_n(&helpers.busy, __ATOMIC_ACQUIRE) > 0; i++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
    pthread_mutex_lock(&helpers.lock);
    while (helpers.busy > 0) pthread_cond_wait(&helpers.finished, &helpers.lock);
    helpers.work = 0;
    pthread_mutex_unlock(&helpers.lock);
}

#endif
