/* A barrier that gives its CPU away.
 *
 * An OpenMP runtime may spin for milliseconds. That is harmless while every thread has a CPU of its
 * own, but once another program takes one, the waiting thread burns the time that the late one
 * needs. Here a thread spins for about as long as a step takes and then sleeps.
 */
#ifndef SF_TEAM_H
#define SF_TEAM_H

#include <stdint.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SF_SPINS 1000

typedef struct {
    _Alignas(64) uint32_t arrived;
    uint32_t sleeping;
    _Alignas(64) uint32_t round;
} sf_barrier;

static inline void sf_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void sf_sleep(sf_barrier *b, uint32_t round) {
#if defined(__linux__)
    __atomic_add_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&b->round, __ATOMIC_SEQ_CST) == round)
        syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    __atomic_sub_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
#else
    while (__atomic_load_n(&b->round, __ATOMIC_ACQUIRE) == round) sched_yield();
#endif
}

/* Every one of `threads` threads passes when all have come; what they wrote is then visible. */
static inline void sf_wait(sf_barrier *b, int threads) {
    if (threads == 1) return;
    uint32_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)threads) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->round, round + 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
        if (__atomic_load_n(&b->sleeping, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int i = 0; i < SF_SPINS; i++) {
        if (__atomic_load_n(&b->round, __ATOMIC_ACQUIRE) != round) return;
        sf_pause();
    }
    sf_sleep(b, round);
}

#endif
