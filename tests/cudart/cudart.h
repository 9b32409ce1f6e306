/*
 * CUDA's runtime without a GPU: what torch's build for CUDA 13 asks of libcudart, done by threads.
 *
 * A stream is a thread that does in order what is queued. Device memory is memory. Kernels do nothing,
 * but for torch's copy of many tensors. What CUDA forbids or may block in is found and counted:
 * pageable memory in an asynchronous copy, calls that end a capture, memory registered for one device,
 * calls that may wait for a stream that hangs (they do wait), contexts on devices. Only for tests:
 * `stand_*` steer it and look into it. run.py builds it.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define API __attribute__((visibility("default"))) int
enum { OK, INVALID = 1, NO_MEMORY = 2, NOT_SUPPORTED = 801, NOT_READY = 600, CAPTURE = 900 };
enum { NO_CAPTURE, CAPTURING, SPOILED, RELAXED = 2, DEVICES = 2, MOST = 1 << 16, NAMES = 256 };

typedef struct mark {
    int done, references;
    double at;
} mark;

typedef struct op {
    struct op *next;
    enum { COPY, SET, MARK, WAIT, HANG, SLEEP, CALL } kind;
    void *to;
    const void *from;
    size_t size;
    mark *mark;
    void (*call)(void *);
} op;

typedef struct stream {
    int device, priority, busy, capture, global;
    uint64_t owner;
    op *first, **last;
    pthread_cond_t more;
    struct graph *graph;
} stream;

typedef struct graph {
    op *first, **last;
} graph;

typedef struct event {
    int device;
    mark *mark;
} event;

typedef struct range {
    const char *begin;
    size_t size;
    int host, device;
} range;


extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern int hanging, sticky, captures;
extern _Thread_local int current, mode;

int said(int code);
int begun(const char *name, int device); /* what every call begins with: the lock, or an error */
int ended(int code);
int forbidden(const char *name); /* while a capture is under way in the global mode */
void awaits_idle(const char *name); /* what a driver may do only when the device is idle */
void counted(const char *name);
void let_go(mark *m);
void start(stream *s, int device, int priority);
stream *of(void *given); /* 0 to 2 are names of the current device's default stream */
void queue(stream *s, op o);

#define BEGIN(device)                          \
    do {                                       \
        int failed_ = begun(__func__, device); \
        if (failed_) return failed_;           \
    } while (0)
#define UNSAFE()                                        \
    do {                                                \
        if (forbidden(__func__)) return ended(CAPTURE); \
    } while (0)
