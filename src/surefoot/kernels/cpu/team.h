/* Threads that work together: a pool to run a task on, and a barrier inside it.
 *
 * Waiting means spinning for about as long as a step takes and then sleeping, so that a thread
 * that is late because another program has its CPU is not kept from it by the one that waits.
 */
#ifndef SF_TEAM_H
#define SF_TEAM_H

#include <stddef.h>
#include <stdint.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SF_SPINS 1000

typedef void (*sf_task)(void *argument);

/* The calling thread's number in its team, and the team's size. */
extern _Thread_local int sf_me, sf_team;

/* Run task(argument) on `threads` threads at once, the caller being one; returns when all have. */
void sf_run(int threads, sf_task task, void *argument);

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

/* Return once *word is no longer `seen`. `sleeping` counts those who must be woken. */
static inline void sf_await(uint32_t *word, uint32_t seen, uint32_t *sleeping) {
    for (int i = 0; i < SF_SPINS; i++) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return;
        sf_pause();
    }
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
