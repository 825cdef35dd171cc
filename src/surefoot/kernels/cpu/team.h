/* Threads that work together: a pool to run a task on, and a barrier inside it.
 *
 * Waiting means spinning, because waking a sleeper costs more than most steps take (a virtual CPU
 * that fell idle needs its host to come back). But a thread that spins on a busy machine takes the
 * CPU that the late one needs. Such a machine gives itself away: the spinner finds that it was
 * stopped for a while. Then waits become short, and end in sleep, for the next few rounds.
 */
#ifndef SF_TEAM_H
#define SF_TEAM_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SF_STOPPED_NS 500000   /* no pause instruction takes that long: another thread ran */
#define SF_PATIENCE_NS 2000000 /* about the time between two rounds */
#define SF_HASTE_NS 20000
#define SF_CROWDED_WAITS 2048

/* Others whose parts of some work a thread looks at when it is done with its own: each look is at a
 * cache line that they write. */
#define SF_HELPED 8

typedef void (*sf_task)(void *argument);

/* The calling thread's number in its team, and the team's size. */
extern _Thread_local int sf_me, sf_team;

/* Run task(argument) on `threads` threads at once, the caller being one; returns when all have. */
void sf_run(int threads, sf_task task, void *argument);

/* Whose part of some work the calling thread does in its turn number 0, 1, ...: its own, then that
 * of others; -1: it looks at no more. */
static inline int sf_turn(int turn) {
    return turn < sf_team && turn <= SF_HELPED ? (sf_me + turn) % sf_team : -1;
}

/* The part [first, last) of `count` items that falls to the calling thread. */
static inline void sf_share(int64_t count, int64_t *first, int64_t *last) {
    *first = count * sf_me / sf_team;
    *last = count * (sf_me + 1) / sf_team;
}

static inline void sf_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits left during which the machine counts as busy. */
extern int sf_crowded;

static inline int64_t sf_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Spin until *word is no longer `seen`, with the patience that the machine allows. */
static inline int sf_spin(const uint32_t *word, uint32_t seen) {
    int crowded = __atomic_load_n(&sf_crowded, __ATOMIC_RELAXED);
    int64_t patience = crowded > 0 ? SF_HASTE_NS : SF_PATIENCE_NS;
    int64_t started = 0, last = 0;
    if (crowded > 0) __atomic_store_n(&sf_crowded, crowded - 1, __ATOMIC_RELAXED);
    for (;;) {
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return 1;
            sf_pause();
        }
        int64_t now = sf_now();
        if (!started) started = last = now;
        if (now - last > SF_STOPPED_NS)
            __atomic_store_n(&sf_crowded, SF_CROWDED_WAITS, __ATOMIC_RELAXED);
        if (now - started > patience) return 0;
        last = now;
    }
}

/* Return once *word is no longer `seen`. `sleeping` counts those who must be woken. */
static inline void sf_await(uint32_t *word, uint32_t seen, uint32_t *sleeping) {
    if (sf_spin(word, seen)) return;
#if defined(__linux__)
    __atomic_add_fetch(sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == seen)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    __atomic_sub_fetch(sleeping, 1, __ATOMIC_SEQ_CST);
#else
    (void)sleeping;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == seen) sched_yield();
#endif
}

/* Call after changing *word. */
static inline void sf_wake(uint32_t *word, uint32_t *sleeping) {
#if defined(__linux__)
    if (__atomic_load_n(sleeping, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word, (void)sleeping;
#endif
}

typedef struct {
    _Alignas(64) uint32_t arrived;
    uint32_t sleeping;
    _Alignas(64) uint32_t round;
} sf_barrier;

/* Every thread of the team passes when all have come; what they wrote is then visible. */
static inline void sf_wait(sf_barrier *b) {
    if (sf_team == 1) return;
    uint32_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)sf_team) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->round, round + 1, __ATOMIC_SEQ_CST);
        sf_wake(&b->round, &b->sleeping);
        return;
    }
    sf_await(&b->round, round, &b->sleeping);
}

#endif
