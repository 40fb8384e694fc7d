#define _GNU_SOURCE
#include "crew.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 600 };  // pauses, 50 ns each or so, before a thread sleeps: a phase takes less, a pause of a server more

typedef struct {
    Crew *crew;
    int32_t member;
} Place;

static void sleep_while(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(atomic_uint *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

// Sleepers are counted before they look, and words change before sleepers are counted: nobody sleeps past a change.
static void await_change(Crew *crew, atomic_uint *word, unsigned old) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) return;
        _mm_pause();
    }
    atomic_fetch_add(&crew->sleepers, 1);
    while (atomic_load(word) == old) sleep_while(word, old);
    atomic_fetch_sub(&crew->sleepers, 1);
}

static void change(Crew *crew, atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&crew->sleepers)) wake_all(word);
}

void crew_meet(Crew *crew) {
    unsigned phase = atomic_load_explicit(&crew->phase, memory_order_acquire);
    if (atomic_fetch_add(&crew->arrived, 1) == crew->size - 1) {
        atomic_store_explicit(&crew->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&crew->next, 0, memory_order_relaxed);
        change(crew, &crew->phase);
    } else {
        await_change(crew, &crew->phase, phase);
    }
}

static void *live(void *argument) {
    Place place = *(Place *)argument;
    free(argument);
    Crew *crew = place.crew;
    for (unsigned seen = 0;; seen++) {
        await_change(crew, &crew->started, seen);
        if (atomic_load(&crew->is_closing)) return NULL;
        crew->work(crew->context, place.member);
        crew_meet(crew);
        if (place.member == 0) {
            atomic_fetch_add(&crew->done, 1);
            wake_all(&crew->done);
        }
    }
}

int crew_open(Crew *crew, int32_t size, void (*work)(void *, int32_t), void *context) {
    crew->size = size, crew->work = work, crew->context = context;
    crew->threads = calloc((size_t)size, sizeof *crew->threads);
    if (!crew->threads) return 12;  // ENOMEM
    for (int32_t member = 0; member < size; member++) {
        Place *place = malloc(sizeof *place);
        if (place) *place = (Place){crew, member};
        int refused = place ? pthread_create(&crew->threads[member], NULL, live, place) : 12;
        if (refused) {
            free(place);
            crew_close(crew);
            return refused;
        }
        crew->num_running++;
    }
    return 0;
}

void crew_start(Crew *crew) {
    change(crew, &crew->started);
}

// Sleeps at once: whoever waits would spin on a processor that a member needs.
void crew_wait(Crew *crew) {
    unsigned started = atomic_load(&crew->started), done;
    while ((done = atomic_load(&crew->done)) != started) sleep_while(&crew->done, done);
}

void crew_close(Crew *crew) {
    crew_wait(crew);
    atomic_store(&crew->is_closing, 1);
    atomic_fetch_add(&crew->started, 1);
    wake_all(&crew->started);
    for (int32_t member = 0; member < crew->num_running; member++) pthread_join(crew->threads[member], NULL);
    free(crew->threads);
    crew->threads = NULL, crew->num_running = 0;
}
