// Threads that go through a step together: they share units of work by a counter, and meet between phases.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    _Alignas(64) atomic_int next;      // the unit that nobody has taken yet
    _Alignas(64) atomic_int arrived;   // at the phase's end
    _Alignas(64) atomic_uint phase;    // counts meetings
    _Alignas(64) atomic_uint started;  // counts steps begun
    atomic_uint done;                  // counts steps done
    atomic_int sleepers;
    atomic_int is_closing;
    int32_t size, num_running;
    void (*work)(void *context, int32_t member);
    void *context;
    pthread_t *threads;
} Crew;

// 0, or what pthread_create returned: then no thread is left.
int crew_open(Crew *crew, int32_t size, void (*work)(void *, int32_t), void *context);
void crew_start(Crew *crew);
void crew_wait(Crew *crew);
void crew_close(Crew *crew);

// All members' work before is done, and seen by all; the counter of units is 0 again.
void crew_meet(Crew *crew);

// The first of `count` units that the caller is to do, or one past the last where there are none left.
static inline int32_t crew_take(Crew *crew, int32_t count) {
    return atomic_fetch_add_explicit(&crew->next, count, memory_order_relaxed);
}
