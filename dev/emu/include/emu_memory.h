// emu_memory.h: device memory of the emulated GPUs, and what is checked about it.
//
// An allocation lies between two guards that nobody may touch (1 MiB of addresses, no memory):
//
//     | guard | slack | start ... size bytes ... | slack | guard |
//
// so that a wild index faults at once and the fault handler names the kernel, block and thread. Slack and fresh memory
// hold a poison pattern (0xff: every float and bf16 of it is a NaN); AddressSanitizer, where it is on, watches the
// slack too; without it damage is found after the kernel. Freed memory stays mapped without access.
// Where the CPU has protection keys (x86), host code that touches device memory faults as well.
#pragma once
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_HIDE(p, n) __asan_poison_memory_region(p, n)
#define EMU_SHOW(p, n) __asan_unpoison_memory_region(p, n)
#else
#define EMU_HIDE(p, n) ((void)(p), (void)(n))
#define EMU_SHOW(p, n) ((void)(p), (void)(n))
#endif
#if __has_include(<valgrind/memcheck.h>) // costs nothing where valgrind doesn't run
#include <valgrind/memcheck.h>
#define EMU_UNDEFINED(p, n) (void)VALGRIND_MAKE_MEM_UNDEFINED(p, n)
#define EMU_STACK(low, high) (void)VALGRIND_STACK_REGISTER(low, high)
#else
#define EMU_UNDEFINED(p, n) ((void)0)
#define EMU_STACK(low, high) ((void)0)
#endif

namespace emu {
inline int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoll(text, nullptr, 0) : otherwise;
}
// Memory that nobody has written: in the first, and in the second run of a kernel in check mode.
inline const unsigned char poison_bytes[2] = {(unsigned char)setting("CUDA_EMU_POISON", 0xff), 0x7b};
constexpr size_t GUARD = 1 << 20; // bytes that nobody may touch, on each side of an allocation

// What this host thread is doing, for messages.
struct Now {
    const char *operation, *file;
    int line;
    bool kernel;
    const uint3 *block, *thread;
};
inline constinit thread_local Now now = {};
inline constinit thread_local int device = 0;       // cudaSetDevice
inline constinit thread_local int poison_side = 0;  // index into poison_bytes
inline bool failing;

// One line on stderr; also called from signal handlers.
inline void report(const char *what) {
    char line[2048];
    int n = snprintf(line, sizeof line, "emu: ");
    auto add = [&](auto... values) { if (n < (int)sizeof line - 2) { n += snprintf(line + n, sizeof line - n, values...); } };
    if (now.operation) { add("%s%s (%s:%d)", now.kernel ? "kernel " : "", now.operation, now.file, now.line); }
    if (now.block) { add(", block (%u,%u,%u)", now.block->x, now.block->y, now.block->z); }
    if (now.thread) { add(", thread (%u,%u,%u)", now.thread->x, now.thread->y, now.thread->z); }
    add("%s%s", now.operation ? ": " : "", what);
    if (n > (int)sizeof line - 2) { n = sizeof line - 2; }
    line[n++] = '\n';
    if (write(2, line, n) < 0) { }
}
[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char *format, ...) {
    char what[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fflush(stdout);
    failing = true;
    report(what);
    abort();
}

// ----------------------------------------------------------------------------------------------------
// The heap

struct Allocation {
    char *start;
    size_t size;
    int device;           // -1: host memory of cudaMallocHost
    const char *file;     // who allocated it
    int line;
    char *pages;          // with the guards
    size_t page_bytes;
    bool freed;
    std::unique_ptr<char[]> twin; // check mode: the same memory in the second run
    char *low() const { return pages + GUARD; }
    char *high() const { return pages + page_bytes - GUARD; }
};
struct Heap {
    std::map<uintptr_t, Allocation> blocks; // by address
    std::deque<uintptr_t> freed;
    std::mutex lock;
    size_t used[64] = {};
    bool check = setting("CUDA_EMU_CHECK", 0) != 0;
    int key = -1; // protection key of device memory
};
inline Heap &heap();

// The allocation that p points into, or null. end: one past its last byte counts too.
inline Allocation *find(const void *p, bool end = false) {
    Heap &h = heap();
    std::lock_guard<std::mutex> guard(h.lock);
    auto next = h.blocks.upper_bound((uintptr_t)p);
    if (next == h.blocks.begin()) { return nullptr; }
    Allocation &a = std::prev(next)->second;
    return !a.freed && (const char *)p < a.start + a.size + end ? &a : nullptr;
}
// A range of device memory that an API call works on: null if it is all inside one allocation, else what is wrong.
inline const char *outside(const void *p, size_t bytes) {
    Allocation *a = find(p, bytes == 0);
    if (!a) { return "isn't in an allocation of device memory"; }
    return (const char *)p + bytes <= a->start + a->size ? nullptr : "reaches past the end of its allocation";
}

// While one of these exists, this host thread may touch device memory.
inline constinit thread_local int access_depth = 0;
struct Access {
    Access() { if (access_depth++ == 0) { set(0); } }
    ~Access() { if (--access_depth == 0) { set(PKEY_DISABLE_ACCESS); } }
    Access(const Access &) = delete;
    static void set(unsigned rights) { if (heap().key >= 0) { pkey_set(heap().key, rights); } }
};

// A fault is a wild pointer of a kernel (or of host code): say which, then let the default action follow.
inline struct sigaction old_actions[NSIG];
inline bool (*is_stack_guard)(const void *) = nullptr;
inline void on_signal(int signal, siginfo_t *info, void *) {
    char what[600];
    const char *p = (const char *)info->si_addr;
    if (signal == SIGABRT) {
        snprintf(what, sizeof what, "aborted");
    } else if (is_stack_guard && is_stack_guard(p)) {
        snprintf(what, sizeof what, "the stack of this thread overflowed (large local arrays, deep recursion)");
    } else {
        snprintf(what, sizeof what, "%s at address %p, which is no device memory", signal == SIGFPE ? "arithmetic error" : "access", p);
        Heap &h = heap();
        if (signal != SIGFPE && h.lock.try_lock()) {
            for (auto &[key, a] : h.blocks) {
                if (p < a.pages || p >= a.pages + a.page_bytes) { continue; }
                char site[200];
                snprintf(site, sizeof site, "%zu bytes of device %d, allocated at %s:%d", a.size, a.device, a.file, a.line);
                if (a.freed) {
                    snprintf(what, sizeof what, "use after free of %s, at offset %td", site, p - a.start);
                } else if (p >= a.low() && p < a.high()) {
                    snprintf(what, sizeof what, "host code touches device memory: %s", site);
                } else {
                    snprintf(what, sizeof what, "out of bounds, at offset %td of %s", p - a.start, site);
                }
            }
            h.lock.unlock();
        }
    }
    if (!failing && (signal != SIGABRT || now.kernel)) { report(what); }
    failing = true;
    sigaction(signal, &old_actions[signal], nullptr); // returning repeats the fault, now for the sanitizer or the core dump
    if (signal == SIGABRT) { raise(signal); }
}
inline void report_leaks();
inline void start_checks(Heap &h) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) { sigaction(s, &action, &old_actions[s]); }
    h.key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#ifdef EMU_ASAN
    __sanitizer_set_death_callback([] { if (!failing && now.operation) { failing = true; report("stopped by the sanitizer (see above)"); } });
#endif
    if (setting("CUDA_EMU_LEAKS", 0)) { atexit(report_leaks); }
}
inline Heap &heap() {
    static Heap *h = [] { Heap *fresh = new Heap; start_checks(*fresh); return fresh; }();
    return *h;
}

inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline char *allocate(size_t size, int on_device, const char *file, int line) {
    Heap &h = heap();
    size_t room = round_up(size, 256), bytes = round_up(room, 4096) + 2 * GUARD;
    char *pages = (char *)mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) { return nullptr; }
    bool locked = on_device >= 0 && h.key >= 0;
    if (locked ? pkey_mprotect(pages + GUARD, bytes - 2 * GUARD, PROT_READ | PROT_WRITE, h.key)
               : mprotect(pages + GUARD, bytes - 2 * GUARD, PROT_READ | PROT_WRITE)) {
        munmap(pages, bytes);
        return nullptr;
    }
    char *start = pages + bytes - GUARD - room;
    Access access;
    memset(pages + GUARD, poison_bytes[0], bytes - 2 * GUARD);
    EMU_HIDE(pages + GUARD, start - pages - GUARD);
    EMU_HIDE(start + size, room - size);
    EMU_UNDEFINED(start, size);
    std::unique_ptr<char[]> twin;
    if (h.check && on_device >= 0) {
        twin.reset(new char[size]);
        memset(twin.get(), poison_bytes[1], size);
    }
    std::lock_guard<std::mutex> guard(h.lock);
    h.blocks[(uintptr_t)start] = {start, size, on_device, file, line, pages, bytes, false, std::move(twin)};
    if (on_device >= 0) { h.used[on_device] += size; }
    return start;
}
// false: p is no start of an allocation (of this kind)
inline bool release(void *p, bool on_device) {
    Heap &h = heap();
    std::lock_guard<std::mutex> guard(h.lock);
    auto at = h.blocks.find((uintptr_t)p);
    if (at == h.blocks.end() || at->second.freed || (at->second.device >= 0) != on_device) { return false; }
    Allocation &a = at->second;
    EMU_SHOW(a.low(), a.high() - a.low());
    if (on_device) { h.used[a.device] -= a.size; }
    a.twin.reset();
    a.freed = true;
    mprotect(a.pages, a.page_bytes, PROT_NONE);
    madvise(a.pages, a.page_bytes, MADV_DONTNEED);
    h.freed.push_back((uintptr_t)p);
    if (h.freed.size() > 4096) { // the oldest may be mapped again
        auto oldest = h.blocks.find(h.freed.front());
        munmap(oldest->second.pages, oldest->second.page_bytes);
        h.blocks.erase(oldest);
        h.freed.pop_front();
    }
    return true;
}

// Names every allocation of device memory that is left; the number of them.
inline int check_leaks() {
    int leaks = 0;
    for (auto &[key, a] : heap().blocks) {
        if (a.freed || a.device < 0) { continue; }
        fprintf(stderr, "emu: leak: %zu bytes of device %d, allocated at %s:%d\n", a.size, a.device, a.file, a.line);
        leaks++;
    }
    return leaks;
}
inline void report_leaks() {
    if (check_leaks()) {
        fflush(nullptr);
        _exit(1);
    }
}

#ifndef EMU_ASAN // AddressSanitizer has seen it already
inline void check_slack() {
    auto intact = [](const char *from, const char *to) { // all poison: the first is, and each equals its neighbour
        return from == to || ((unsigned char)*from == poison_bytes[poison_side] && !memcmp(from, from + 1, to - from - 1));
    };
    Heap &h = heap();
    std::lock_guard<std::mutex> guard(h.lock);
    for (auto &[key, a] : h.blocks) {
        if (a.freed || a.device != device) { continue; }
        bool before = !intact(a.low(), a.start);
        if (!before && intact(a.start + a.size, a.high())) { continue; }
        now.block = now.thread = nullptr;
        fail("wrote %s an allocation of %zu bytes of device %d, allocated at %s:%d", before ? "before" : "past the end of",
             a.size, a.device, a.file, a.line);
    }
}
inline void fill_slack(Allocation &a) {
    memset(a.low(), poison_bytes[poison_side], a.start - a.low());
    memset(a.start + a.size, poison_bytes[poison_side], a.high() - a.start - a.size);
}
#else
inline void check_slack() { }
inline void fill_slack(Allocation &) { }
#endif

// ----------------------------------------------------------------------------------------------------
// Operations on device memory, and check mode (CUDA_EMU_CHECK=1): every kernel runs twice, on two copies of the
// device's memory that differ wherever nobody has written yet (the allocation and its twin), with the warps in another
// order. A byte that the kernel wrote and that differs between the two depends on memory that was never written, or on
// the order of the warps. A third run, second memory with the first order, tells which.

inline uint64_t random_state_of(uint64_t seed) { return seed * 0x9e3779b97f4a7c15 + 1; }
inline constinit thread_local uint64_t random_state = 0;
inline unsigned random_bits() { // xorshift
    if (!random_state) { random_state = random_state_of(setting("CUDA_EMU_SEED", 1)); }
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return (unsigned)((random_state ^= random_state << 17) >> 16);
}

template <typename Body> void run_twice(Body &body) {
    struct Copies { Allocation *a; std::unique_ptr<char[]> first, after; };
    std::vector<Copies> all;
    {
        std::lock_guard<std::mutex> guard(heap().lock);
        for (auto &[key, a] : heap().blocks) {
            if (!a.freed && a.device == device) { all.push_back({&a, nullptr, nullptr}); }
        }
    }
    auto save = [](Allocation *a) {
        std::unique_ptr<char[]> copy(new char[a->size]);
        memcpy(copy.get(), a->start, a->size);
        return copy;
    };
    auto second_run = [&](uint64_t order) {
        poison_side = 1;
        for (auto &c : all) { memcpy(c.a->start, c.a->twin.get(), c.a->size); fill_slack(*c.a); }
        random_state = order;
        body();
        check_slack();
        poison_side = 0;
        for (auto &c : all) { fill_slack(*c.a); }
    };
    for (auto &c : all) { c.first = save(c.a); }
    random_bits();
    uint64_t order = random_state;
    body();
    check_slack();
    for (auto &c : all) { c.after = save(c.a); }
    second_run(random_state);
    for (auto &c : all) {
        for (size_t i = 0; i < c.a->size; i++) {
            if (c.after[i] == c.a->start[i] || (c.after[i] == c.first[i] && c.a->start[i] == c.a->twin[i])) { continue; }
            second_run(order);
            bool ordered = c.a->start[i] == c.after[i];
            now.block = now.thread = nullptr;
            fail("%s: offset %zu of %zu bytes of device %d, allocated at %s:%d", ordered
                 ? "the result depends on the order of the warps (missing barrier?)"
                 : "the result depends on memory that was never written", i, c.a->size, device, c.a->file, c.a->line);
        }
    }
    for (auto &c : all) {
        memcpy(c.a->twin.get(), c.a->start, c.a->size);
        memcpy(c.a->start, c.after.get(), c.a->size);
    }
}
// Runs what a kernel or library call does to the memory of the current device, under its name.
template <typename Body> void operate(Now what, Body body) {
    Now outer = now;
    now = what;
    {
        Access access;
        if (heap().check) { run_twice(body); } else { body(); }
        check_slack();
    }
    now = outer;
}
// CUDA_EMU_LAUNCHES=FILE: each process appends a line there for each kernel it launches: its name, and "checked" in check mode.
inline void note_launch(const char *name) {
    static const char *const path = getenv("CUDA_EMU_LAUNCHES");
    if (!path || !*path) { return; }
    static std::mutex lock;
    static std::set<const char *> noted;
    std::lock_guard<std::mutex> guard(lock);
    if (!noted.insert(name).second) { return; }
    char line[300];
    int n = snprintf(line, sizeof line, "%.250s%s\n", name, heap().check ? " checked" : "");
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line, (size_t)n) != n || close(file) != 0) { fail("CUDA_EMU_LAUNCHES=%s: cannot write", path); }
}
// In check mode: where the second run sees the byte at p; null outside of device memory.
inline char *twin_of(const void *p) {
    Allocation *a = heap().check ? find(p) : nullptr;
    return a && a->twin ? a->twin.get() + ((const char *)p - a->start) : nullptr;
}
// In check mode: stops if bytes that leave a device were never written.
inline void must_be_written(const void *p, size_t bytes) {
    char *twin = twin_of(p);
    for (size_t i = 0; twin && i < bytes; i++) {
        if (twin[i] != ((const char *)p)[i]) { fail("reads device memory that was never written, at byte %zu of %zu", i, bytes); }
    }
}
// memcpy between any two memories
inline void copy(void *to, const void *from, size_t bytes) {
    Access access;
    char *to_twin = twin_of(to), *from_twin = twin_of(from);
    if (from_twin && !to_twin) { must_be_written(from, bytes); }
    if (to_twin) { memmove(to_twin, from_twin ? from_twin : from, bytes); }
    memmove(to, from, bytes);
}
inline void fill(void *to, int value, size_t bytes) {
    Access access;
    if (char *twin = twin_of(to)) { memset(twin, value, bytes); }
    memset(to, value, bytes);
}
} // namespace emu
