// emu_engine.h: how a CUDA kernel runs, written out for one host thread.
//
// A launch is a grid of blocks; a block is up to 1024 threads that share memory and can wait for each other; 32
// neighbouring threads are a warp, whose lanes can also exchange registers. Blocks can't wait for each other (nobody
// promises that two of them run at the same time), so here they run one after the other. Threads of a block can, so
// each that has to wait gets a stack of its own: a fiber. Nothing runs in parallel. A thread runs until it waits or
// ends, and then picks the next one that is ready:
//
//   __syncthreads()   waits until all threads of the block have come
//   __shfl_sync(), votes, __syncwarp(), mma, ldmatrix: wait until all lanes of the mask have come (meet, below)
//
// The order of warps and of lanes between two such points is random (CUDA_EMU_SEED), as nobody promises any: a kernel
// whose result depends on it lacks a barrier. If nobody is ready and some wait, a barrier was not reached by all.
#pragma once
#include "emu_memory.h"
#include <boost/context/detail/fcontext.hpp>
#include <tuple>
#include <type_traits>

inline constinit thread_local uint3 threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0};
inline constinit thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace emu {
namespace context = boost::context::detail;
#ifdef EMU_ASAN
constexpr size_t STACK_BYTES = 512 << 10;
#else
constexpr size_t STACK_BYTES = 128 << 10;
#endif
constexpr int MAX_THREADS = 1024;
constexpr size_t SHARED_DEFAULT = 48 << 10, SHARED_MOST = 227 << 10; // bytes a block: without asking, and at most

struct Fiber {
    context::fcontext_t at = nullptr; // where it stopped
    char *stack = nullptr;            // lowest byte, above the guard page; null for the host thread's own stack
    void *fake_stack = nullptr;       // AddressSanitizer's
};
struct Copy { void *to; const void *from; int bytes, group; }; // a cp.async on its way
struct Warp { unsigned lanes, ready, waiting; };               // sets of lanes: all, ready to run, waiting in meet()
struct Thread {
    uint3 index;
    Warp *warp;
    int lane;
    Fiber *fiber;        // null: not started, or ended
    const char *waits;   // name of what it waits for, or null
    int line;            // of the __syncthreads
    unsigned mask;       // lanes it waits for
    void *record;        // what it brought to the meeting
    bool ended;
    std::vector<Copy> copies;
    int groups;          // committed groups of copies
};

struct Engine {
    // stacks, reused for ever
    Fiber host;
    Fiber *current = &host;
    std::vector<Fiber *> idle, fibers;
    const void *host_stack = nullptr;
    size_t host_stack_bytes = 0;
    // the running block
    Thread threads[MAX_THREADS] = {};
    Warp warps[MAX_THREADS / 32] = {};
    unsigned ready_warps = 0;
    Warp *warp = nullptr;     // whose lanes run at the moment
    int rotate = 0;           // order of its lanes: which comes first,
    bool backward = false;    // and in which direction
    int count = 0, alive = 0, arrived = 0, barrier_line = 0;
    unsigned generation = 0;
    int votes[2] = {0, 0};    // predicates of this barrier and the one before, which some have yet to read
    dim3 shape = dim3(0, 0, 0);
    void (*run)(void *) = nullptr;
    void *call = nullptr;
    // shared memory
    char *shared;
    size_t shared_used = 0, shared_static = 0, shared_dynamic = 0;
    std::vector<std::pair<char *, size_t>> shared_parts;
    char *dynamic = nullptr;
    uint64_t block_serial = 0;
    char *signal_stack;

    Engine() {
        constexpr size_t bytes = SHARED_MOST + (64 << 10);
        shared = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        signal_stack = (char *)malloc(128 << 10); // for the fault handler: the fiber's own may be what overflowed
        stack_t stack = {}, before;
        stack.ss_sp = signal_stack;
        stack.ss_size = 128 << 10;
        sigaltstack(nullptr, &before);
        if (before.ss_flags & SS_DISABLE) { sigaltstack(&stack, nullptr); }
        if (shared == MAP_FAILED) { fail("out of memory for shared memory"); }
        EMU_HIDE(shared, bytes);
    }
    ~Engine() {
        stack_t none = {}, before;
        none.ss_flags = SS_DISABLE;
        sigaltstack(nullptr, &before);
        if (before.ss_sp == signal_stack) { sigaltstack(&none, nullptr); }
        free(signal_stack);
        EMU_SHOW(shared, SHARED_MOST + (64 << 10));
        munmap(shared, SHARED_MOST + (64 << 10));
        for (Fiber *f : fibers) {
            EMU_SHOW(f->stack, STACK_BYTES);
            munmap(f->stack - 4096, STACK_BYTES + 4096);
            delete f;
        }
    }
};
inline Engine &the_engine() {
    static thread_local Engine e;
    return e;
}
inline constinit thread_local Engine *engine = nullptr; // this host thread's, once it has launched
inline constinit thread_local Thread *self = nullptr;   // the emulated thread that runs

// ----------------------------------------------------------------------------------------------------
// Fibers

inline void switch_to(Fiber *to) {
    Engine &e = *engine;
    Fiber *from = e.current;
    e.current = to;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack ? to->stack : e.host_stack, to->stack ? STACK_BYTES : e.host_stack_bytes);
#endif
    context::transfer_t back = context::jump_fcontext(to->at, from);
    ((Fiber *)back.data)->at = back.fctx; // whoever switched to us stopped there
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}
inline void fiber_main(context::transfer_t from);
inline Fiber *new_fiber() {
    Engine &e = *engine;
    Fiber *f = new Fiber;
    char *pages = (char *)mmap(nullptr, STACK_BYTES + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, 4096, PROT_NONE)) { fail("out of memory for the stack of a thread"); }
    f->stack = pages + 4096;
    EMU_STACK(f->stack, f->stack + STACK_BYTES);
    f->at = context::make_fcontext(f->stack + STACK_BYTES, STACK_BYTES, fiber_main);
    e.fibers.push_back(f);
    return f;
}
inline bool in_stack_guard(const void *p) {
    for (Fiber *f : engine ? engine->fibers : std::vector<Fiber *>()) {
        if (p >= f->stack - 4096 && p < f->stack) { return true; }
    }
    return false;
}

// ----------------------------------------------------------------------------------------------------
// The scheduler

// Takes the next thread that is ready, or null: the lanes of one warp up to where they wait, then another warp.
inline Thread *pick() {
    Engine &e = *engine;
    auto choose = [](unsigned set, int rotate, bool backward) {
        unsigned turned = (set >> rotate) | (set << ((32 - rotate) & 31));
        return ((backward ? 31 - __builtin_clz(turned) : __builtin_ctz(turned)) + rotate) & 31;
    };
    if (!e.warp || !e.warp->ready) {
        if (!e.ready_warps) { return nullptr; }
        unsigned bits = random_bits();
        e.warp = &e.warps[choose(e.ready_warps, bits & 31, bits & 32)];
        e.rotate = bits >> 6 & 31;
        e.backward = bits >> 11 & 1;
    }
    int lane = choose(e.warp->ready, e.rotate, e.backward);
    e.warp->ready &= ~(1u << lane);
    int w = (int)(e.warp - e.warps);
    if (!e.warp->ready) { e.ready_warps &= ~(1u << w); }
    return &e.threads[w * 32 + lane];
}
inline void become(Thread *t) {
    self = t;
    threadIdx = t->index;
    now.thread = &t->index;
}
inline void resume(Thread *t) {
    Engine &e = *engine;
    become(t);
    Fiber *f = t->fiber;
    if (!f && e.idle.empty()) { f = new_fiber(); }
    if (!f) {
        f = e.idle.back();
        e.idle.pop_back();
    }
    switch_to(f);
}
[[noreturn]] inline void stalled();
// The running thread waits: the others run until somebody has made it ready and picked it.
[[gnu::noinline]] inline void wait_for(const char *what) {
    Thread *me = self, *next = pick();
    me->waits = what;
    if (!next) { stalled(); }
    resume(next);
    become(me);
    me->waits = nullptr;
}
inline void fiber_main(context::transfer_t from) {
    ((Fiber *)from.data)->at = from.fctx;
    Engine &e = *engine;
    Fiber *me = e.current;
#ifdef EMU_ASAN
    const void *low;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
    if (from.data == &e.host) {
        e.host_stack = low;
        e.host_stack_bytes = bytes;
    }
#endif
    for (;;) {
        Thread *t = self;
        t->fiber = me;
        e.run(e.call);
        t->fiber = nullptr;
        t->ended = true;
        if (!t->copies.empty()) { t->copies.clear(); }
        t->groups = 0;
        e.alive--;
        Thread *next = pick();
        if (next && !next->fiber) { // the fast path: threads that never wait run on one stack, one after the other
            become(next);
            continue;
        }
        e.idle.push_back(me);
        if (next) {
            resume(next);
        } else if (e.alive == 0) {
            switch_to(&e.host);
        } else {
            stalled();
        }
    }
}

// ----------------------------------------------------------------------------------------------------
// Waiting for each other

// __syncthreads and its votes: how many threads came with a predicate.
inline int barrier(const char *what, int predicate, int line) {
    Engine &e = *engine;
    if (!self) { fail("%s outside of a kernel", what); }
    if (e.arrived == 0) { e.barrier_line = line; }
    if (e.barrier_line != line) {
        fail("comes to the %s of line %d while %d threads wait at the one of line %d", what, line, e.arrived, e.barrier_line);
    }
    unsigned g = e.generation & 1;
    e.votes[g] += predicate != 0;
    self->line = line;
    if (++e.arrived < e.count) {
        wait_for(what);
        return e.votes[g];
    }
    e.arrived = 0;
    e.generation++;
    e.votes[g ^ 1] = 0;
    for (int w = 0; w * 32 < e.count; w++) {
        e.warps[w].ready = e.warps[w].lanes;
        e.ready_warps |= 1u << w;
    }
    e.warp = nullptr;
    self->warp->ready &= ~(1u << self->lane); // goes on at once
    if (!self->warp->ready) { e.ready_warps &= ~(1u << (self->warp - e.warps)); }
    return e.votes[g];
}

// Lanes of a warp bring a record each; the last to come computes what all of them get (resolve) and all go on.
inline void meet(const char *what, unsigned mask, void *record, void (*resolve)(void **records, unsigned mask)) {
    Engine &e = *engine;
    Thread *me = self;
    if (!me) { fail("%s outside of a kernel", what); }
    Warp *warp = me->warp;
    unsigned bit = 1u << me->lane;
    if (!(mask & bit)) { fail("lane %d calls %s with mask 0x%08x, which leaves it out", me->lane, what, mask); }
    me->mask = mask;
    me->record = record;
    warp->waiting |= bit;
    if ((warp->waiting & mask) != mask) {
        wait_for(what);
        return;
    }
    void *records[32];
    Thread *lanes = me - me->lane;
    for (unsigned left = mask; left; left &= left - 1) {
        Thread *t = lanes + __builtin_ctz(left);
        if (t != me && (t->mask != mask || (t->waits != what && strcmp(t->waits, what)))) {
            fail("lane %d calls %s with mask 0x%08x while lane %d waits in %s with mask 0x%08x", me->lane, what, mask, t->lane, t->waits, t->mask);
        }
        records[t->lane] = t->record;
    }
    resolve(records, mask);
    warp->waiting &= ~mask;
    warp->ready |= mask & ~bit;
    if (warp->ready) { e.ready_warps |= 1u << (warp - e.warps); }
    if (random_bits() & 1) { e.warp = nullptr; } // perhaps another warp comes next
}

[[noreturn]] inline void stalled() {
    Engine &e = *engine;
    int at_barrier = 0, ended = 0;
    Thread *first = nullptr, *missing = nullptr, *in_warp = nullptr;
    for (Thread *t = e.threads; t < e.threads + e.count; t++) {
        bool here = !t->ended && t->waits && !strncmp(t->waits, "__syncthreads", 13);
        ended += t->ended;
        at_barrier += here;
        if (here && !first) { first = t; }
        if (!here && !missing) { missing = t; }
        if (!t->ended && !here && !in_warp) { in_warp = t; }
    }
    if (in_warp) {
        now.thread = &in_warp->index;
        unsigned absent = in_warp->mask & ~in_warp->warp->waiting;
        Thread *other = in_warp - in_warp->lane + __builtin_ctz(absent);
        bool exists = in_warp->warp->lanes & (1u << __builtin_ctz(absent));
        fail("waits in %s with mask 0x%08x for lanes 0x%08x that never come (lane %d %s%s)", in_warp->waits, in_warp->mask, absent,
             __builtin_ctz(absent), !exists ? "doesn't exist in this block" : other->ended ? "has ended" : "waits in ",
             exists && !other->ended ? other->waits : "");
    }
    now.thread = &first->index;
    fail("barrier not reached by all: %d threads wait at the __syncthreads of line %d, %d have ended without it, among them thread (%u,%u,%u)",
         at_barrier, first->line, ended, missing->index.x, missing->index.y, missing->index.z);
}

// ----------------------------------------------------------------------------------------------------
// Shared memory: dynamic first, then a part for each __shared__ variable when a thread of the block first comes to it.
// Each is aligned as declared and no better (so that UBSan sees a float4 in an array of float), holds poison,
// and is followed by a guard zone.

constexpr size_t SHARED_GUARD = 64;
// unwritten shared memory: every other byte differs from unwritten device memory, and bf16 and float of it are NaNs, too
inline void poison_shared(char *p, size_t bytes) {
    for (size_t i = 0; i < bytes && i < 16; i++) { p[i] = (char)(poison_bytes[poison_side] ^ !(i & 1)); }
    for (size_t done = 16; done < bytes; done *= 2) { memcpy(p + done, p, std::min(done, bytes - done)); }
}
inline void *shared_part(size_t bytes, size_t alignment) {
    Engine &e = *engine;
    size_t begin = round_up(e.shared_used, 2 * alignment) + alignment;
    e.shared_used = begin + bytes + SHARED_GUARD;
    char *part = e.shared + begin;
    EMU_SHOW(part, bytes);
    poison_shared(part, bytes);
    EMU_UNDEFINED(part, bytes);
#ifndef EMU_ASAN
    memset(part + bytes, 0xa5, SHARED_GUARD);
#endif
    e.shared_parts.push_back({part, bytes});
    return part;
}
// The Tag is the type of a lambda, so that every declaration in every instance of a template has its own part.
template <typename T, typename Tag> T &shared(Tag, size_t alignment = alignof(T)) {
    static constinit thread_local struct { uint64_t serial; void *part; } known = {0, nullptr};
    Engine &e = *engine;
    if (known.serial != e.block_serial) {
        e.shared_static += sizeof(T);
        if (e.shared_static > SHARED_DEFAULT) { fail("%zu bytes of static shared memory, at most %zu are allowed", e.shared_static, SHARED_DEFAULT); }
        if (e.shared_static + e.shared_dynamic > SHARED_MOST) {
            fail("%zu bytes of static and %zu of dynamic shared memory, at most %zu are allowed", e.shared_static, e.shared_dynamic, SHARED_MOST);
        }
        known = {e.block_serial, shared_part(sizeof(T), alignment)};
    }
    return *(T *)known.part;
}
inline unsigned char *dynamic_shared() { return (unsigned char *)engine->dynamic; }
inline bool in_shared(const void *p, size_t bytes) {
    for (auto &[part, size] : engine->shared_parts) {
        if ((char *)p >= part && (char *)p + bytes <= part + size) { return true; }
    }
    return false;
}

// ----------------------------------------------------------------------------------------------------
// Blocks and launches

inline void run_block() {
    Engine &e = *engine;
    static std::atomic<uint64_t> serial{0};
    e.block_serial = ++serial;
    EMU_HIDE(e.shared, round_up(e.shared_used, 8)); // what the last block has used; the rest is hidden
    e.shared_parts.clear();
    e.shared_used = e.shared_static = 0;
    e.dynamic = (char *)shared_part(e.shared_dynamic, 16);
    e.alive = e.count;
    e.arrived = 0;
    e.votes[0] = e.votes[1] = 0;
    for (int i = 0; i < e.count; i++) { e.threads[i].ended = false; }
    for (int w = 0; w * 32 < e.count; w++) {
        e.warps[w].waiting = 0;
        e.warps[w].ready = e.warps[w].lanes;
        e.ready_warps |= 1u << w;
    }
    e.warp = nullptr;
    resume(pick());
    self = nullptr;
    now.thread = nullptr;
#ifndef EMU_ASAN
    for (auto &[part, bytes] : e.shared_parts) {
        for (size_t i = 0; i < SHARED_GUARD; i++) {
            if ((unsigned char)part[bytes + i] != 0xa5) { fail("wrote past the end of %zu bytes of shared memory", bytes); }
        }
    }
#endif
}
inline void shape_block(dim3 shape) {
    Engine &e = *engine;
    e.count = (int)(shape.x * shape.y * shape.z);
    if (shape.x == e.shape.x && shape.y == e.shape.y && shape.z == e.shape.z) { return; }
    e.shape = shape;
    for (int i = 0; i < e.count; i++) {
        Thread &t = e.threads[i];
        t.index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
        t.warp = &e.warps[i / 32];
        t.lane = i % 32;
    }
    for (int w = 0; w * 32 < e.count; w++) { e.warps[w].lanes = e.count - w * 32 >= 32 ? ~0u : (1u << (e.count - w * 32)) - 1; }
}

// Dynamic shared memory that a kernel may have, by device and kernel (cudaFuncSetAttribute).
inline std::map<std::pair<int, const void *>, int> shared_limits;
inline std::mutex shared_limits_lock;

template <typename P> void check_argument(int position, P value) {
    if constexpr (std::is_pointer_v<P> && !std::is_function_v<std::remove_pointer_t<P>>) {
        if (!value) { return; }
        Allocation *a = find((const void *)value, true);
        if (!a) { fail("argument %d is %p, which is no device memory (host memory, or freed?)", position, (const void *)value); }
        if (a->device >= 0 && a->device != device) { fail("argument %d is memory of device %d, the kernel runs on device %d", position, a->device, device); }
    }
}

// What the transform makes of kernel<<<grid, block, shared, stream>>>(arguments):
// emu::Launch(grid, block, shared, stream).emu_kernel(name, kernel)(arguments)
struct Launch {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    Launch(dim3 grid_, dim3 block_, size_t shared_ = 0, cudaStream_t stream_ = nullptr) : grid(grid_), block(block_), shared(shared_), stream(stream_) { }

    template <typename... P>
    auto emu_kernel(const char *name, void (*function)(P...), const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return [=, launch = *this](std::type_identity_t<P>... arguments) {
            Now what = {name, file, line, true, nullptr, nullptr};
            launch.check(what, (const void *)function);
            Now outer = now;
            now = what;
            int position = 0;
            (check_argument(++position, arguments), ...);
            now = outer;
            note_launch(name);
            std::tuple<void (*)(P...), P...> call(function, arguments...);
            operate(what, [&] {
                launch.blocks(&call, [](void *data) {
                    std::apply([](auto f, auto &...values) { f(values...); }, *(std::tuple<void (*)(P...), P...> *)data);
                });
            });
        };
    }
    void check(Now what, const void *function) const {
        Now outer = now;
        now = what;
        if (self) { fail("launched from a kernel"); }
        if (!function) { fail("bad launch: the kernel is a null pointer"); }
        if (stream_device(stream) >= 0 && stream_device(stream) != device) {
            fail("bad launch: the stream belongs to device %d, the current device is %d", stream_device(stream), device);
        }
        uint64_t threads = (uint64_t)block.x * block.y * block.z;
        if (threads == 0 || threads > MAX_THREADS || block.x > 1024 || block.y > 1024 || block.z > 64) {
            fail("bad launch: block (%u,%u,%u), expected 1 to 1024 threads (z at most 64)", block.x, block.y, block.z);
        }
        if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
            fail("bad launch: grid (%u,%u,%u), expected 1 to (2147483647,65535,65535)", grid.x, grid.y, grid.z);
        }
        size_t limit = SHARED_DEFAULT;
        if (shared > limit) {
            std::lock_guard<std::mutex> guard(shared_limits_lock);
            auto at = shared_limits.find({device, function});
            if (at != shared_limits.end()) { limit = (size_t)at->second; }
        }
        if (shared > limit) {
            fail("bad launch: %zu bytes of dynamic shared memory, at most %zu are allowed here (cudaFuncSetAttribute raises it to %zu)", shared, limit, SHARED_MOST);
        }
        now = outer;
    }
    void blocks(void *call, void (*run)(void *)) const {
        engine = &the_engine();
        is_stack_guard = in_stack_guard;
        Engine &e = *engine;
        shape_block(block);
        e.shared_dynamic = shared;
        e.call = call;
        e.run = run;
        blockDim = block;
        gridDim = grid;
        now.block = &blockIdx;
        for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++) {
            for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
                for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) { run_block(); }
            }
        }
        now.block = nullptr;
    }
};
#define EMU_TEXT_(...) #__VA_ARGS__
#define EMU_TEXT(...) EMU_TEXT_(__VA_ARGS__)
} // namespace emu
