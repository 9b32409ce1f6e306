/* Devices, errors and memory, and the threads that streams are. */
#include "cudart.h"

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static stream defaults[DEVICES];
static range ranges[MOST];
static size_t range_count, used[DEVICES], memory = (size_t)1 << 34;
static struct {
    const char *name;
    long count;
} calls[NAMES];
int hanging, sticky, captures;
static int refuses, contexts, slow_us;
_Thread_local int current, mode;
static _Thread_local int last;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void counted(const char *name) { /* under the lock */
    for (int i = 0; i < NAMES; i++) {
        if (calls[i].name == NULL) calls[i].name = name;
        if (strcmp(calls[i].name, name) == 0) {
            calls[i].count++;
            return;
        }
    }
}

int said(int code) {
    if (code != OK) last = code;
    return code;
}

/* What every call begins with; ends with the lock held, or in an error. */
int begun(const char *name, int device) {
    pthread_mutex_lock(&lock);
    counted(name);
    if (sticky) {
        pthread_mutex_unlock(&lock);
        return said(sticky);
    }
    if (device >= 0) contexts |= 1 << device;
    return OK;
}
int ended(int code) {
    pthread_mutex_unlock(&lock);
    return said(code);
}

/* What a driver may do only when the device is idle. */
void awaits_idle(const char *name) {
    if (hanging) {
        counted("waited for what hangs");
        fprintf(stderr, "cudart: %s while a stream hangs\n", name);
    }
    while (hanging && !sticky) pthread_cond_wait(&changed, &lock);
}

static range *range_of(const void *at, size_t size, int host) {
    const char *begin = at;
    for (size_t i = 0; i < range_count; i++) {
        range *r = &ranges[i];
        if (r->size && r->host == host && r->begin <= begin && begin + size <= r->begin + r->size)
            return r;
    }
    return NULL;
}

static void add_range(const void *at, size_t size, int host) {
    size_t i = 0;
    while (i < range_count && ranges[i].size) i++;
    if (i == MOST) abort();
    if (i == range_count) range_count++;
    ranges[i] = (range){at, size, host, current};
}

void let_go(mark *m) {
    if (m != NULL && --m->references == 0) free(m);
}

static void run(stream *s, op *o) { /* without the lock; marks and waits with it */
    switch (o->kind) {
    case COPY:
        if (slow_us) nanosleep(&(struct timespec){0, slow_us * 1000L}, NULL);
        memmove(o->to, o->from, o->size);
        break;
    case SET:
        memset(o->to, (int)(intptr_t)o->from, o->size);
        break;
    case SLEEP:
        nanosleep(&(struct timespec){(time_t)(o->size / 1000000), (long)(o->size % 1000000) * 1000},
                  NULL);
        break;
    case CALL:
        o->call(o->to);
        break;
    default:
        pthread_mutex_lock(&lock);
        if (o->kind == WAIT)
            while (!o->mark->done && !sticky) pthread_cond_wait(&changed, &lock);
        if (o->kind == HANG) {
            hanging++;
            pthread_cond_broadcast(&changed);
            while (hanging > 0 && !sticky) pthread_cond_wait(&changed, &lock);
        }
        if (o->kind == MARK) {
            o->mark->at = now();
            o->mark->done = 1;
            pthread_cond_broadcast(&changed);
        }
        if (o->mark != NULL) let_go(o->mark);
        pthread_mutex_unlock(&lock);
    }
    (void)s;
}

static void *work(void *argument) {
    stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (s->first == NULL) {
            s->busy = 0;
            pthread_cond_broadcast(&changed);
            pthread_cond_wait(&s->more, &lock);
        }
        s->busy = 1;
        op *o = s->first;
        s->first = o->next;
        if (s->first == NULL) s->last = &s->first;
        pthread_mutex_unlock(&lock);
        if (!sticky || o->kind == MARK) run(s, o);
        free(o);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

void start(stream *s, int device, int priority) {
    pthread_t thread;
    *s = (stream){.device = device, .priority = priority};
    s->last = &s->first;
    pthread_cond_init(&s->more, NULL);
    if (pthread_create(&thread, NULL, work, s)) abort();
    pthread_detach(thread);
}

stream *of(void *given) { /* 0 to 2 are names of the current device's default stream */
    stream *s = (uintptr_t)given > 2 ? given : &defaults[current];
    if (s->last == NULL) start(s, current, 0);
    return s;
}

void queue(stream *s, op o) { /* under the lock */
    op *made = malloc(sizeof *made);
    *made = o;
    made->next = NULL;
    op ***end = s->capture == CAPTURING ? &s->graph->last : &s->last;
    if (s->capture == CAPTURING && o.mark != NULL) { /* order within one stream is all there is */
        let_go(o.mark);
        free(made);
        return;
    }
    **end = made;
    *end = &made->next;
    pthread_cond_signal(&s->more);
}

int forbidden(const char *name) {
    if (captures && mode != RELAXED) {
        fprintf(stderr, "cudart: %s ends a capture\n", name);
        counted("ended a capture");
        return captures = -1;
    }
    return 0;
}

/* ---- devices ------------------------------------------------------------------------------- */

API cudaGetDeviceCount(int *count) { return *count = DEVICES, OK; }
API cudaGetDevice(int *device) { return *device = current, OK; }
API cudaSetDevice(int device) {
    BEGIN(device);
    current = device;
    return ended(OK);
}
API cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
API cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
API cudaDeviceCanAccessPeer(int *can, int one, int other) {
    return (void)one, (void)other, *can = 0, OK;
}
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, OK;
}
API cudaDeviceGetAttribute(int *value, int which, int device) {
    return (void)which, (void)device, *value = 1, OK;
}
API cudaGetDeviceProperties(void *there, int device) { /* of CUDA 13 */
    struct {
        char name[256], uuid[16], luid[8];
        unsigned mask;
        size_t memory, shared;
        int registers, warp;
        size_t pitch;
        int threads, dimensions[3], grid[3];
        size_t constant;
        int major, minor;
        size_t alignment[2];
        int processors;
    } about = {.name = "a stand-in", .warp = 32, .threads = 1024, .major = 9, .processors = 4};
    about.memory = memory;
    (void)device;
    memset(there, 0, sizeof about + 400);
    memcpy(there, &about, sizeof about);
    return OK;
}
API cudaDeviceSynchronize(void) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    for (stream *s = of(NULL); (s->busy || s->first) && !sticky;) pthread_cond_wait(&changed, &lock);
    return ended(sticky);
}

/* ---- errors -------------------------------------------------------------------------------- */

API cudaGetLastError(void) {
    int code = sticky ? sticky : last;
    return last = OK, code;
}
API cudaPeekAtLastError(void) { return sticky ? sticky : last; }
__attribute__((visibility("default"))) const char *cudaGetErrorString(int code) {
    return code == NO_MEMORY ? "out of memory" : "what the stand-in was told to fail with";
}
__attribute__((visibility("default"))) const char *cudaGetErrorName(int code) {
    return code == OK ? "cudaSuccess" : "cudaErrorOfStandIn";
}

/* ---- memory -------------------------------------------------------------------------------- */

static int allocated(void **made, size_t size, int host) {
    if (!host && used[current] + size > memory) return NO_MEMORY;
    *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*made == MAP_FAILED) return NO_MEMORY;
    add_range(*made, size, host);
    if (!host) used[current] += size;
    return OK;
}
static int freed(void *at, int host) {
    range *r = range_of(at, 1, host);
    if (at == NULL) return OK;
    if (r == NULL || r->begin != at) return INVALID;
    if (!host) used[r->device] -= r->size;
    munmap(at, r->size);
    r->size = 0;
    return OK;
}
API cudaMalloc(void **made, size_t size) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    return ended(allocated(made, size, 0));
}
API cudaFree(void *at) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    return ended(freed(at, 0));
}
API cudaHostAlloc(void **made, size_t size, unsigned flags) {
    (void)flags;
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    return ended(allocated(made, size, 1));
}
API cudaFreeHost(void *at) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    return ended(freed(at, 1));
}
API cudaHostRegister(void *at, size_t size, unsigned flags) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    if (refuses) return ended(refuses);
    if (!(flags & 1)) counted("registered for one device only");
    add_range(at, size, 1);
    return ended(OK);
}
API cudaHostUnregister(void *at) {
    BEGIN(current);
    UNSAFE();
    awaits_idle(__func__);
    range *r = range_of(at, 1, 1);
    if (r == NULL || r->begin != at) return ended(713);
    return r->size = 0, ended(OK);
}
API cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    BEGIN(current);
    return *total = memory, *free_bytes = memory - used[current], ended(OK);
}
API cudaPointerGetAttributes(void *about, const void *at) {
    struct {
        int type, device;
        const void *there, *here;
    } found = {0, 0, at, at};
    BEGIN(current);
    found.type = range_of(at, 1, 1) ? 1 : range_of(at, 1, 0) ? 2 : 0;
    memcpy(about, &found, sizeof found);
    return ended(OK);
}
API cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *given) {
    stream *s = of(given);
    (void)kind;
    BEGIN(s->device);
    int there = range_of(to, size, 0) || range_of(to, size, 1);
    int here = range_of(from, size, 0) || range_of(from, size, 1);
    if (size) queue(s, (op){.kind = COPY, .to = to, .from = from, .size = size});
    if (!there || !here) { /* such a copy is done when the call returns */
        counted("pageable");
        while ((s->busy || s->first) && !sticky) pthread_cond_wait(&changed, &lock);
    }
    return ended(OK);
}
API cudaMemsetAsync(void *to, int value, size_t size, void *given) {
    stream *s = of(given);
    BEGIN(s->device);
    queue(s, (op){.kind = SET, .to = to, .from = (void *)(intptr_t)value, .size = size});
    return ended(OK);
}

/* ---- for tests ----------------------------------------------------------------------------- */

API stand_count(const char *name) {
    for (int i = 0; i < NAMES && calls[i].name; i++)
        if (strcmp(calls[i].name, name) == 0) return (int)calls[i].count;
    return 0;
}
API stand_contexts(void) { return contexts; }
API stand_refuse(int code) { return refuses = code, OK; }
API stand_slow(int microseconds) { return slow_us = microseconds, OK; }
API stand_memory(size_t bytes) { return memory = bytes, OK; }
