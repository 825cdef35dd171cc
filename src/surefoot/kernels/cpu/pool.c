/* The threads that share a layer's work.
 *
 * Not OpenMP's: its workers wait by spinning for milliseconds, which on a busy machine takes the
 * very CPU that the late thread needs (rounds were measured ten times slower beside one other busy
 * program), and how they wait can only be set before the runtime is loaded, by whoever loads it.
 * Team.h says how these wait. */
#include <pthread.h>
#include <signal.h>

#include "team.h"

#define MOST_WORKERS 255

int sf_crowded = 0;
_Thread_local int sf_me = 0, sf_team = 1;

typedef struct {
    _Alignas(64) uint32_t posted; /* grows by one for each job */
    uint32_t sleeping;
    sf_task task;
    void *argument;
    int me, team;
} worker;

static worker workers[MOST_WORKERS];
static int started = 0;
static uint32_t finished, waiting; /* workers done with the job; whether its caller sleeps */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;

static void *work(void *argument) {
    worker *self = argument;
    for (uint32_t seen = 0;; seen++) {
        sf_await(&self->posted, seen, &self->sleeping);
        sf_me = self->me;
        sf_team = self->team;
        self->task(self->argument);
        __atomic_add_fetch(&finished, 1, __ATOMIC_SEQ_CST);
        sf_wake(&finished, &waiting);
    }
    return NULL;
}

/* A forked child has none of its parent's threads. */
static void forget(void) {
    started = 0;
    pthread_mutex_init(&busy, NULL);
}

static int start(int wanted) {
    static int registered = 0;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's business */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started < wanted; started++) {
        pthread_t thread;
        workers[started] = (worker){0};
        if (pthread_create(&thread, NULL, work, &workers[started])) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

void sf_run(int threads, sf_task task, void *argument) {
    if (threads > MOST_WORKERS) threads = MOST_WORKERS;
    /* A second caller at the same time works alone; results do not depend on the team. */
    if (threads <= 1 || pthread_mutex_trylock(&busy)) {
        sf_me = 0, sf_team = 1;
        task(argument);
        return;
    }
    int helpers = start(threads - 1);
    if (helpers > threads - 1) helpers = threads - 1;
    __atomic_store_n(&finished, 0, __ATOMIC_SEQ_CST);
    for (int i = 0; i < helpers; i++) {
        worker *w = &workers[i];
        w->task = task, w->argument = argument;
        w->me = i + 1, w->team = helpers + 1;
        __atomic_add_fetch(&w->posted, 1, __ATOMIC_SEQ_CST);
        sf_wake(&w->posted, &w->sleeping);
    }
    sf_me = 0, sf_team = helpers + 1;
    task(argument);
    for (uint32_t seen; (seen = __atomic_load_n(&finished, __ATOMIC_SEQ_CST)) != (uint32_t)helpers;)
        sf_await(&finished, seen, &waiting);
    pthread_mutex_unlock(&busy);
}
