/* A thread that lets the copy engine bring bundles which the device asked for.
 *
 * The device asks from inside a captured CUDA graph, through a mailbox in pinned memory, a dozen times in a
 * millisecond: too often for Python. Each word of a message carries its number in the upper half, so a message is
 * whole when all its words carry the same. `words` words name a bundle each (layer << 16 | expert + 1, 0 for none), and
 * one more says how many bundles were used so far.
 *
 * Copies and the numbers that follow them are queued on one stream: a lane holds the bundle whose message's number
 * stands beside it. A message that was missed is never served, nor one that comes while copies for the last but one are
 * still under way, which would only be late; who asked for it reads host memory itself.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_WORDS = 16 };
enum { SPINS = 100000, NAP_NS = 50000, NAP_MOST_NS = 1000000 }; /* awake for some milliseconds after each message */
enum { WINDOW = 512, LEAST_USED = 4, PAUSE_S = 2 };  /* one in LEAST_USED must be used, else nothing is asked for */

/* cuMemcpyHtoDAsync, cuStreamWriteValue32, cuCtxSetCurrent; CUdeviceptr is 64 bits wide. */
typedef int (*copy_function)(uint64_t, const void *, size_t, void *);
typedef int (*write_function)(void *, uint64_t, uint32_t, unsigned);
typedef int (*current_function)(void *);

struct layer {
    const char *store;
    uint64_t record_bytes;
    uint64_t experts;
};

struct route {
    copy_function copy;
    write_function write;
    current_function make_current;
    void *context;
    void *stream;
    const _Atomic uint64_t *box; /* words + 1, and one for the number of the last message whose copies are done */
    const struct layer *layers;
    uint64_t layer_count;
    uint64_t lanes; /* on the device: words lanes for even layers, then as many for odd ones */
    uint64_t lane_bytes;
    uint64_t arrived; /* on the device: uint32 for each lane */
    uint64_t enabled; /* on the device: uint32, and behind it how often somebody waited in vain */
    uint64_t words;
};

struct courier {
    struct route route;
    pthread_t thread;
    _Atomic int over;
    _Atomic int error;
    _Atomic uint64_t brought;
    _Atomic uint32_t used;
    uint32_t window_brought, window_used;
    uint32_t queued; /* the number of the last message that was served */
    int judged; /* whether it was this thread that switched asking off */
    time_t pardoned; /* when asking was last allowed, or switched off */
};

static time_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int check(struct courier *courier, int code) {
    if (code != 0) courier->error = code;
    return code;
}

/* Whether a whole message stands in the box; fills `words` of `count`. */
static int look(const _Atomic uint64_t *box, uint64_t count, uint64_t *words) {
    for (uint64_t i = 0; i < count; i++) words[i] = atomic_load_explicit(&box[i], memory_order_relaxed);
    for (uint64_t i = 1; i < count; i++)
        if (words[i] >> 32 != words[0] >> 32) return 0;
    return 1;
}

static void bring(struct courier *courier, const uint64_t *words) {
    const struct route *route = &courier->route;
    uint32_t number = words[0] >> 32;
    for (uint64_t place = 0; place < route->words; place++) {
        uint64_t layer = words[place] >> 16 & 0xffff, expert = words[place] & 0xffff;
        if (expert == 0 || layer >= route->layer_count || expert > route->layers[layer].experts) continue;
        const struct layer *from = &route->layers[layer];
        uint64_t lane = (layer & 1) * route->words + place;
        if (check(courier, route->copy(route->lanes + lane * route->lane_bytes,
                                       from->store + (expert - 1) * from->record_bytes, from->record_bytes,
                                       route->stream)) ||
            check(courier, route->write(route->stream, route->arrived + 4 * lane, number, 0)))
            return;
        courier->brought++;
        courier->window_brought++;
    }
    courier->queued = number;
    check(courier, route->write(route->stream, (uint64_t)&route->box[route->words + 1], number, 0));
}

/* Whether all but the last served message's copies are done. */
static int ready(const struct courier *courier, uint32_t before) {
    const struct route *route = &courier->route;
    uint32_t done = atomic_load_explicit(&route->box[route->words + 1], memory_order_relaxed);
    return done == courier->queued || done == before;
}

/* Guesses that are mostly wrong take the link's time for nothing: stop asking, and try again later. Who waited in vain
 * is counted anew for each window: what is rare may go on for hours. */
static void judge(struct courier *courier, uint32_t used) {
    const struct route *route = &courier->route;
    courier->used = used;
    if (courier->window_brought < WINDOW || check(courier, route->write(route->stream, route->enabled + 4, 0, 0)))
        return;
    if ((used - courier->window_used) * LEAST_USED < courier->window_brought) {
        check(courier, route->write(route->stream, route->enabled, 0, 0));
        courier->judged = 1;
        courier->pardoned = now();
    }
    courier->window_brought = 0;
    courier->window_used = used;
}

/* Nobody asks: because guesses were wrong, or messages not served, or nothing runs. Let it be tried again. */
static void pardon(struct courier *courier) {
    const struct route *route = &courier->route;
    if (now() < courier->pardoned + PAUSE_S) return;
    courier->pardoned = now();
    if (check(courier, route->write(route->stream, route->enabled + 4, 0, 0)) || !courier->judged) return;
    courier->judged = 0;
    check(courier, route->write(route->stream, route->enabled, 1, 0));
}

static void *run(void *argument) {
    struct courier *courier = argument;
    const struct route *route = &courier->route;
    uint64_t words[MOST_WORDS];
    static const uint32_t off = 0;
    uint32_t last = 0, before = 0, idle = 0;
    long nap = NAP_NS;
    check(courier, route->make_current(route->context));
    while (!courier->over && !courier->error) {
        if (look(route->box, route->words + 1, words) && words[0] >> 32 != last) {
            last = words[0] >> 32;
            if (ready(courier, before)) {
                before = courier->queued;
                bring(courier, words);
            }
            judge(courier, (uint32_t)words[route->words]);
            idle = 0;
            nap = NAP_NS;
        } else if (++idle < SPINS) {
            relax();
        } else {
            nanosleep(&(struct timespec){0, nap}, NULL);
            nap = 2 * nap < NAP_MOST_NS ? 2 * nap : NAP_MOST_NS;
            idle = SPINS;
            pardon(courier);
        }
    }
    /* By a copy: the write may be what failed. Who still asks would wait for nothing. */
    if (courier->error) route->copy(route->enabled, &off, sizeof off, route->stream);
    return NULL;
}

/* NULL where the words are too many or no thread can be made. Layers, stores, box and lanes must outlive it. */
struct courier *courier_start(const struct route *route) {
    if (route->words + 1 > MOST_WORDS) return NULL;
    struct courier *courier = calloc(1, sizeof *courier);
    if (courier == NULL) return NULL;
    courier->route = *route;
    if (pthread_create(&courier->thread, NULL, run, courier) != 0) {
        free(courier);
        return NULL;
    }
    pthread_setname_np(courier->thread, "vvllm-courier");
    return courier;
}

uint64_t courier_brought(struct courier *courier) { return courier->brought; }

uint32_t courier_used(struct courier *courier) { return courier->used; }

int courier_error(struct courier *courier) { return courier->error; }

/* What it counted may still be asked for, by other threads too: it is not freed. */
void courier_stop(struct courier *courier) {
    courier->over = 1;
    pthread_join(courier->thread, NULL);
}
