/* Streams, events, graphs of one stream, and kernels. */
#include "cudart.h"

static struct {
    const void *function;
    int copies, loaded;
} kernels[MOST];

/* ---- streams and events -------------------------------------------------------------------- */

API cudaStreamCreateWithPriority(void **made, unsigned flags, int priority) {
    (void)flags;
    BEGIN(current);
    awaits_idle(__func__);
    stream *s = *made = calloc(1, sizeof *s);
    start(s, current, priority);
    return ended(OK);
}
API cudaStreamGetPriority(void *given, int *priority) {
    return *priority = of(given)->priority, OK;
}
API cudaStreamIsCapturing(void *given, int *status) {
    stream *s = of(given);
    BEGIN(s->device);
    return *status = s->capture, ended(OK);
}
API cudaStreamGetCaptureInfo(void *given, int *status, unsigned long long *id, void **made,
                             void **nodes, void **edges, size_t *count) {
    stream *s = of(given);
    BEGIN(s->device);
    *status = s->capture;
    if (id) *id = 1;
    if (made) *made = s->graph;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return ended(OK);
}
API cudaStreamQuery(void *given) {
    stream *s = of(given);
    BEGIN(s->device);
    UNSAFE();
    return ended(s->busy || s->first ? NOT_READY : OK);
}
API cudaStreamSynchronize(void *given) {
    stream *s = of(given);
    BEGIN(s->device);
    UNSAFE();
    while ((s->busy || s->first) && !sticky) pthread_cond_wait(&changed, &lock);
    return ended(sticky);
}
API cudaStreamWaitEvent(void *given, event *e, unsigned flags) {
    stream *s = of(given);
    (void)flags;
    BEGIN(s->device);
    if (e->mark != NULL) {
        e->mark->references++;
        queue(s, (op){.kind = WAIT, .mark = e->mark});
    }
    return ended(OK);
}
API cudaEventCreateWithFlags(event **made, unsigned flags) {
    (void)flags;
    BEGIN(current);
    *made = calloc(1, sizeof **made);
    (*made)->device = current;
    return ended(OK);
}
API cudaEventCreate(event **made) { return cudaEventCreateWithFlags(made, 0); }
API cudaEventDestroy(event *e) {
    BEGIN(-1);
    let_go(e->mark);
    free(e);
    return ended(OK);
}
API cudaEventRecordWithFlags(event *e, void *given, unsigned flags) {
    stream *s = of(given);
    (void)flags;
    BEGIN(s->device);
    if (e->device != s->device) return ended(INVALID);
    let_go(e->mark);
    e->mark = calloc(1, sizeof *e->mark);
    e->mark->references = 2;
    queue(s, (op){.kind = MARK, .mark = e->mark});
    return ended(OK);
}
API cudaEventRecord(event *e, void *given) { return cudaEventRecordWithFlags(e, given, 0); }
API cudaEventQuery(event *e) {
    BEGIN(e->device);
    UNSAFE();
    return ended(e->mark == NULL || e->mark->done ? OK : NOT_READY);
}
API cudaEventSynchronize(event *e) {
    BEGIN(e->device);
    UNSAFE();
    while (e->mark != NULL && !e->mark->done && !sticky) pthread_cond_wait(&changed, &lock);
    return ended(sticky);
}
API cudaEventElapsedTime(float *ms, event *one, event *other) {
    return *ms = (float)((other->mark->at - one->mark->at) * 1e3), OK;
}
API cudaLaunchHostFunc(void *given, void (*call)(void *), void *argument) {
    stream *s = of(given);
    BEGIN(s->device);
    queue(s, (op){.kind = CALL, .call = call, .to = argument});
    return ended(OK);
}

/* ---- graphs: of one stream ----------------------------------------------------------------- */

API cudaThreadExchangeStreamCaptureMode(int *wanted) {
    int before = mode;
    mode = *wanted;
    return *wanted = before, OK;
}
API cudaStreamBeginCapture(void *given, int how) {
    stream *s = of(given);
    BEGIN(s->device);
    s->capture = CAPTURING;
    s->graph = calloc(1, sizeof *s->graph);
    s->graph->last = &s->graph->first;
    captures = how == 0 ? 1 : 0;
    return ended(OK);
}
API cudaStreamEndCapture(void *given, void **made) {
    stream *s = of(given);
    BEGIN(s->device);
    int spoiled = captures < 0;
    s->capture = NO_CAPTURE;
    captures = 0;
    *made = spoiled ? NULL : s->graph;
    return ended(spoiled ? 901 : OK);
}
API cudaGraphInstantiateWithFlags(void **made, void *given, unsigned long long flags) {
    return (void)flags, *made = given, OK;
}
API cudaGraphLaunch(void *given, void *there) {
    stream *s = of(there);
    BEGIN(s->device);
    for (op *o = ((graph *)given)->first; o; o = o->next) queue(s, *o);
    return ended(OK);
}
API cudaGraphGetNodes(void *given, void **nodes, size_t *count) {
    *count = 0;
    for (op *o = ((graph *)given)->first; o; o = o->next) ++*count;
    return (void)nodes, OK;
}
API cudaGraphDestroy(void *given) { return (void)given, OK; }
API cudaGraphExecDestroy(void *given) { return (void)given, OK; }

/* ---- kernels ------------------------------------------------------------------------------- */

void **__cudaRegisterFatBinary(void *binary) { return (void)binary, calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return (void)handle, 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t size, int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant;
    (void)global;
}
static size_t slot_of(const void *function) {
    size_t i = ((uintptr_t)function >> 4) % MOST;
    while (kernels[i].function != NULL && kernels[i].function != function) i = (i + 1) % MOST;
    kernels[i].function = function;
    return i;
}
static int functions;
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int limit, void *tid, void *bid, void *block, void *grid, int *size) {
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)size;
    if (++functions > MOST - 100) return;
    pthread_mutex_lock(&lock);
    size_t i = slot_of(host);
    /* torch's multi_tensor_apply_kernel over two lists with Copy of bytes */
    if (strstr(name, "multi_tensor_apply_kernel") && strstr(name, "TensorListMetadataILi2E") &&
        strstr(name, "CopyIhhE"))
        kernels[i].copies = 1;
    pthread_mutex_unlock(&lock);
}
typedef struct dim3 {
    unsigned x, y, z;
} dim3;
static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *given) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = given;
    return 0;
}
unsigned __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **given) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *given = pushed.stream;
    return 0;
}

typedef struct two_lists { /* TensorListMetadata<2> */
    char *there[2][64];
    int64_t size[64];
    unsigned char tensor[320];
    int chunk[320];
    int first;
} two_lists;

static void copy_lists(stream *s, const two_lists *lists, unsigned blocks, int64_t most) {
    for (unsigned b = 0; b < blocks; b++) {
        int t = lists->tensor[b];
        int64_t begin = most * lists->chunk[b], size = lists->size[t] - begin;
        if (size > most) size = most;
        queue(s, (op){.kind = COPY,
                      .to = lists->there[1][t] + begin,
                      .from = lists->there[0][t] + begin,
                      .size = (size_t)size});
    }
}
API cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                     void *given) {
    stream *s = of(given);
    (void)block, (void)shared;
    BEGIN(s->device);
    size_t i = slot_of(function);
    if (!kernels[i].loaded) awaits_idle("loading a kernel");
    kernels[i].loaded = 1;
    if (kernels[i].copies) copy_lists(s, arguments[1 - 1], grid.x, 65536);
    return ended(OK);
}
API __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                       size_t shared, void *given) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, given);
}
API __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
API cudaFuncGetAttributes(void *about, const void *function) {
    (void)function;
    return memset(about, 0, 56), ((int *)about)[6] = 1024, OK;
}
API cudaFuncSetAttribute(const void *f, int which, int value) {
    return (void)f, (void)which, (void)value, OK;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int size, size_t m) {
    return (void)f, (void)size, (void)m, *count = 1, OK;
}

/* ---- for tests ----------------------------------------------------------------------------- */

API stand_sleep(void *given, size_t microseconds) {
    pthread_mutex_lock(&lock);
    queue(of(given), (op){.kind = SLEEP, .size = microseconds});
    return ended(OK);
}
API stand_hang(void *given) { /* returns when it does */
    pthread_mutex_lock(&lock);
    int before = hanging;
    queue(of(given), (op){.kind = HANG});
    while (hanging == before) pthread_cond_wait(&changed, &lock);
    return ended(OK);
}
API stand_go_on(void) {
    pthread_mutex_lock(&lock);
    hanging = 0;
    pthread_cond_broadcast(&changed);
    return ended(OK);
}
API stand_fail(int code) {
    pthread_mutex_lock(&lock);
    sticky = code;
    pthread_cond_broadcast(&changed);
    return ended(OK);
}
