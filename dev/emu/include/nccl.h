// nccl.h of the emulation: collectives between virtual GPUs, whether they are threads of one process or several
// processes: a communicator is a shared mapping (a file in /dev/shm named by the ncclUniqueId, removed once all ranks
// have it open), so both run the same code. A collective goes through it piece by piece:
//
//   every rank writes what it calls and a piece of its data into its slot | all arrive | each reads what it needs | all arrive
//
// Arrival is a counter per rank and one futex to sleep on: nothing that a killed process could leave locked. All ranks
// compare their calls, so a wrong order is an error that names both. Sums run in order of the ranks, in fp32,
// rounded once: the same bits on every rank and in every run. A rank that waits longer than CUDA_EMU_NCCL_TIMEOUT
// seconds (60) says for whom and gets ncclRemoteError; ncclCommAbort wakes all. Unlike the real ones, calls return when done.
#pragma once
#include "cuda_bf16.h"
#include <array>
#include <climits>
#include <fcntl.h>
#include <functional>
#include <string>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <thread>

#define NCCL_MAJOR 2
#define NCCL_MINOR 27
#define NCCL_PATCH 0
#define NCCL_VERSION_CODE 22700
#define NCCL_UNIQUE_ID_BYTES 128
struct ncclUniqueId { char internal[NCCL_UNIQUE_ID_BYTES]; };
enum ncclResult_t { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclInProgress, ncclNumResults };
enum ncclDataType_t { ncclInt8 = 0, ncclChar = 0, ncclUint8 = 1, ncclInt32 = 2, ncclInt = 2, ncclUint32 = 3, ncclInt64 = 4, ncclUint64 = 5, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat = 7,
                      ncclFloat64 = 8, ncclDouble = 8, ncclBfloat16 = 9, ncclNumTypes };
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };

namespace emu {
enum Collective { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV };
inline const char *const collective_names[] = {"nothing", "ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclSend", "ncclRecv"};
inline const char *const nccl_types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"};
inline const char *const nccl_ops[] = {"sum", "prod", "max", "min", "avg"};
inline size_t nccl_bytes(int type) { return std::array<size_t, 10>{1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[(size_t)type]; }

constexpr size_t PIECE = 1 << 18; // bytes
constexpr int MOST_RANKS = 64;
struct Call { int kind, type, op, peer; uint64_t count, number; }; // peer: root, or the other side of send and recv
struct Slot { // of a rank
    std::atomic<uint32_t> joined, arrived;
    uint32_t world;
    Call call;
    alignas(64) unsigned char data[PIECE];
};
struct Channel { // from a rank to a rank, for send and recv
    std::atomic<uint32_t> sent, taken;
    Call call;
    alignas(64) unsigned char data[PIECE];
};
struct Meeting { // the mapping; a new file is all zeros, which is where it begins. world slots, world^2 channels follow.
    std::atomic<uint32_t> bell, aborted;
    static size_t bytes(int world) { return 4096 + (size_t)world * sizeof(Slot) + (size_t)world * world * sizeof(Channel); }
    Slot &slot(int rank) { return ((Slot *)((char *)this + 4096))[rank]; }
    Channel &channel(int world, int from, int to) { return ((Channel *)&slot(world))[from * world + to]; }
};
} // namespace emu
struct ncclComm {
    emu::Meeting *meeting;
    int rank, world, device;
    std::atomic<int> error;      // ncclResult_t
    uint32_t round = 0;          // how often this rank has arrived
    uint64_t number = 0;         // of collectives
};
typedef ncclComm *ncclComm_t;

namespace emu {
inline std::string describe(const Call &c) {
    char text[200];
    if (c.kind == SEND || c.kind == RECV) {
        snprintf(text, sizeof text, "%s(%llu x %s, peer %d)", collective_names[c.kind], (unsigned long long)c.count, nccl_types[c.type], c.peer);
    } else {
        snprintf(text, sizeof text, "%s(%llu x %s%s%s, root %d), its collective %llu", collective_names[c.kind], (unsigned long long)c.count, nccl_types[c.type],
                 c.op >= 0 ? ", " : "", c.op >= 0 ? nccl_ops[c.op] : "", c.peer, (unsigned long long)c.number);
    }
    return text;
}
inline void ring(Meeting *m) {
    m->bell++;
    syscall(SYS_futex, &m->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
inline double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + t.tv_nsec * 1e-9;
}
// Sleeps until ready() or an abort or the timeout; who() names those that are missing.
template <typename Ready, typename Who> ncclResult_t wait_in(ncclComm *comm, const char *what, Ready ready, Who who) {
    Meeting *m = comm->meeting;
    static const int64_t limit = setting("CUDA_EMU_NCCL_TIMEOUT", 60);
    double begin = seconds();
    for (;;) {
        uint32_t heard = m->bell;
        if (m->aborted || comm->error) {
            if (!comm->error) { comm->error = ncclRemoteError; }
            return (ncclResult_t)comm->error.load();
        }
        if (ready()) { return ncclSuccess; }
        if (seconds() - begin >= (double)limit) {
            fprintf(stderr, "emu: nccl: rank %d of %d waited %lld s in %s for %s\n", comm->rank, comm->world, (long long)limit, what, who().c_str());
            comm->error = ncclRemoteError;
            return ncclRemoteError;
        }
        timespec slice = {0, 100000000};
        syscall(SYS_futex, &m->bell, FUTEX_WAIT, heard, &slice, nullptr, 0);
    }
}
inline ncclResult_t arrive(ncclComm *comm, const char *what) {
    Meeting *m = comm->meeting;
    uint32_t round = ++comm->round;
    m->slot(comm->rank).arrived = round;
    ring(m);
    auto here = [&](int r) { return (int32_t)(m->slot(r).arrived - round) >= 0; };
    return wait_in(comm, what, [&] { for (int r = 0; r < comm->world; r++) { if (!here(r)) { return false; } } return true; },
                   [&] {
                       std::string list = "rank";
                       for (int r = 0; r < comm->world; r++) { if (!here(r)) { list += " " + std::to_string(r); } }
                       return list;
                   });
}
// out[i] = op over the ranks of their element first + i
template <typename T, typename Sum> void reduce_as(ncclComm *comm, void *out, size_t count, int op, size_t first) {
    std::vector<Sum> total(count);
    for (int r = 0; r < comm->world; r++) {
        const T *theirs = (const T *)comm->meeting->slot(r).data + first;
        auto each = [&](auto f) { for (size_t i = 0; i < count; i++) { total[i] = f(total[i], (Sum)theirs[i]); } };
        if (r == 0) { each([](Sum, Sum v) { return v; }); }
        else if (op == ncclProd) { each([](Sum a, Sum v) { return (Sum)(a * v); }); }
        else if (op == ncclMax) { each([](Sum a, Sum v) { return v > a ? v : a; }); }
        else if (op == ncclMin) { each([](Sum a, Sum v) { return v < a ? v : a; }); }
        else { each([](Sum a, Sum v) { return (Sum)(a + v); }); }
    }
    for (size_t i = 0; i < count; i++) { ((T *)out)[i] = (T)(op == ncclAvg ? (Sum)(total[i] / (Sum)comm->world) : total[i]); }
}
inline void reduce(ncclComm *comm, void *out, size_t count, int type, int op, size_t first = 0) {
    switch (type) {
    case ncclInt8: return reduce_as<int8_t, int8_t>(comm, out, count, op, first);
    case ncclUint8: return reduce_as<uint8_t, uint8_t>(comm, out, count, op, first);
    case ncclInt32: return reduce_as<int32_t, int32_t>(comm, out, count, op, first);
    case ncclUint32: return reduce_as<uint32_t, uint32_t>(comm, out, count, op, first);
    case ncclInt64: return reduce_as<int64_t, int64_t>(comm, out, count, op, first);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(comm, out, count, op, first);
    case ncclFloat64: return reduce_as<double, double>(comm, out, count, op, first);
    case ncclBfloat16: return reduce_as<__nv_bfloat16, float>(comm, out, count, op, first);
    default: return reduce_as<float, float>(comm, out, count, op, first);
    }
}
struct Work { ncclComm *comm; const void *send; void *recv; Call call; }; // one call of one rank

inline ncclResult_t collective(Work &w) {
    ncclComm *comm = w.comm;
    Meeting *m = comm->meeting;
    Slot &mine = m->slot(comm->rank);
    Call &call = w.call;
    call.number = ++comm->number;
    const char *name = collective_names[call.kind];
    size_t size = nccl_bytes(call.type), total = call.count * size;
    // reduce-scatter: the data is world parts of count elements; a piece is the same stretch of each part
    int parts = call.kind == REDUCE_SCATTER ? comm->world : 1;
    size_t piece = PIECE / parts / size * size, done = 0;
    bool sends = call.kind != BROADCAST || comm->rank == call.peer;
    std::vector<unsigned char> result(PIECE);
    do {
        size_t bytes = std::min(piece, total - done);
        mine.call = call;
        for (int p = 0; sends && p < parts; p++) {
            const char *from = (const char *)w.send + p * total + done;
            if (done == 0) { must_be_written(from, total); }
            memcpy(mine.data + p * bytes, from, bytes);
        }
        if (ncclResult_t error = arrive(comm, name)) { return error; }
        for (int r = 0; r < comm->world; r++) {
            const Call &theirs = m->slot(r).call;
            if (memcmp(&theirs, &call, sizeof call)) {
                fail("nccl: wrong collective order: rank %d calls %s, but rank %d calls %s", comm->rank, describe(call).c_str(), r, describe(theirs).c_str());
            }
        }
        switch (call.kind) {
        case ALL_GATHER:
            for (int r = 0; r < comm->world; r++) { copy((char *)w.recv + r * total + done, m->slot(r).data, bytes); }
            break;
        case BROADCAST: copy((char *)w.recv + done, m->slot(call.peer).data, bytes); break;
        default:
            if (call.kind == REDUCE && comm->rank != call.peer) { break; }
            reduce(comm, result.data(), bytes / size, call.type, call.op, call.kind == REDUCE_SCATTER ? comm->rank * bytes / size : 0);
            copy((char *)w.recv + done, result.data(), bytes);
        }
        if (ncclResult_t error = arrive(comm, name)) { return error; }
        done += bytes;
    } while (done < total);
    return ncclSuccess;
}
inline ncclResult_t point_to_point(Work &w) {
    ncclComm *comm = w.comm;
    bool sends = w.call.kind == SEND;
    Channel &c = sends ? comm->meeting->channel(comm->world, comm->rank, w.call.peer) : comm->meeting->channel(comm->world, w.call.peer, comm->rank);
    size_t total = w.call.count * nccl_bytes(w.call.type), done = 0;
    auto who = [&] { return "rank " + std::to_string(w.call.peer); };
    const char *name = collective_names[w.call.kind];
    if (sends) { must_be_written(w.send, total); }
    do {
        size_t bytes = std::min(PIECE, total - done);
        if (sends) {
            c.call = w.call;
            memcpy(c.data, (const char *)w.send + done, bytes);
            c.sent++;
            ring(comm->meeting);
            if (ncclResult_t error = wait_in(comm, name, [&] { return c.taken == c.sent; }, who)) { return error; }
        } else {
            if (ncclResult_t error = wait_in(comm, name, [&] { return c.sent != c.taken; }, who)) { return error; }
            if (c.call.count != w.call.count || c.call.type != w.call.type) {
                fail("nccl: rank %d calls %s, but rank %d calls %s", comm->rank, describe(w.call).c_str(), w.call.peer, describe(c.call).c_str());
            }
            copy((char *)w.recv + done, c.data, bytes);
            c.taken++;
            ring(comm->meeting);
        }
        done += bytes;
    } while (done < total);
    return ncclSuccess;
}
inline ncclResult_t perform(Work &w) {
    int outer = device;
    device = w.comm->device;
    Now before = now;
    now = {collective_names[w.call.kind], "nccl", w.comm->rank, false, nullptr, nullptr};
    ncclResult_t result;
    {
        Access access;
        result = w.call.kind >= SEND ? point_to_point(w) : collective(w);
    }
    now = before;
    device = outer;
    return result;
}

// A group: its calls run side by side, one host thread for each rank's collectives and for each direction of
// each pair, so that one thread can drive several ranks and a rank can send while it receives.
inline constinit thread_local int group_depth = 0;
struct Job { ncclComm *comm; int line; std::function<ncclResult_t()> run; };
inline std::vector<Job> &group_jobs() { static thread_local std::vector<Job> jobs; return jobs; }
inline ncclResult_t end_group() {
    std::vector<Job> jobs;
    jobs.swap(group_jobs());
    std::vector<std::vector<Job *>> lines;
    for (Job &j : jobs) {
        auto at = std::find_if(lines.begin(), lines.end(), [&](auto &l) { return l[0]->comm == j.comm && l[0]->line == j.line; });
        if (at == lines.end()) { lines.push_back({&j}); } else { at->push_back(&j); }
    }
    std::vector<ncclResult_t> results(lines.size(), ncclSuccess);
    auto run = [&](size_t i) { for (Job *j : lines[i]) { if (results[i] == ncclSuccess) { results[i] = j->run(); } } };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < lines.size(); i++) { threads.emplace_back(run, i); }
    if (!lines.empty()) { run(0); }
    for (std::thread &t : threads) { t.join(); }
    for (ncclResult_t r : results) { if (r) { return r; } }
    return ncclSuccess;
}
inline ncclResult_t submit(Job job) {
    if (!group_depth) { return job.run(); }
    group_jobs().push_back(std::move(job));
    return ncclSuccess;
}
[[gnu::format(printf, 2, 3)]] inline ncclResult_t refuse_nccl(const char *call, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_why(call, format, args);
    va_end(args);
    return ncclInvalidArgument;
}
inline ncclResult_t call_nccl(Collective kind, const void *send, void *recv, size_t count, int type, int op, int peer, ncclComm *comm, cudaStream_t stream) {
    const char *name = collective_names[kind];
    if (!comm) { return refuse_nccl(name, "the communicator is null"); }
    if (type < 0 || type >= ncclNumTypes || type == ncclFloat16) { return refuse_nccl(name, "data type %d isn't emulated", type); }
    if (op >= ncclNumOps || peer < -1 || peer >= comm->world) { return refuse_nccl(name, "reduction %d, root or peer %d of %d ranks", op, peer, comm->world); }
    if (stream_device(stream) >= 0 && stream_device(stream) != comm->device) { return refuse_nccl(name, "the stream belongs to device %d, the communicator to %d", stream_device(stream), comm->device); }
    size_t bytes = count * nccl_bytes(type), world = (size_t)comm->world;
    bool reads = kind != RECV && (kind != BROADCAST || comm->rank == peer), writes = kind != SEND && (kind != REDUCE || comm->rank == peer);
    auto check = [&](const char *what, const void *p, size_t n) {
        Allocation *a = find(p, n == 0);
        const char *wrong = a && a->device >= 0 && a->device != comm->device ? "is memory of another device" : outside(p, n);
        return n && wrong ? refuse_nccl(name, "rank %d: %s buffer %p of %zu bytes %s", comm->rank, what, p, n, wrong) : ncclSuccess;
    };
    ncclResult_t error = reads ? check("send", send, kind == REDUCE_SCATTER ? bytes * world : bytes) : ncclSuccess;
    if (!error && writes) { error = check("receive", recv, kind == ALL_GATHER ? bytes * world : bytes); }
    if (error) { return error; }
    if (comm->error) { return (ncclResult_t)comm->error.load(); }
    Work w = {comm, send, recv, {kind, type, op, peer, count, 0}};
    return submit({comm, kind < SEND ? 0 : kind == SEND ? 1 + peer : -1 - peer, [w]() mutable { return perform(w); }});
}
inline ncclResult_t join(ncclComm_t *out, int world, ncclUniqueId id, int rank, int on_device) {
    const char *name = "ncclCommInitRank";
    if (world < 1 || world > MOST_RANKS || rank < 0 || rank >= world) { return refuse_nccl(name, "rank %d of %d", rank, world); }
    int file = open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)Meeting::bytes(world))) {
        fprintf(stderr, "emu: %s: can't open %s\n", name, id.internal);
        if (file >= 0) { close(file); }
        return ncclSystemError;
    }
    void *map = mmap(nullptr, Meeting::bytes(world), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) { return ncclSystemError; }
    ncclComm *comm = new ncclComm{(Meeting *)map, rank, world, on_device, {0}};
    Slot &mine = comm->meeting->slot(rank);
    if (mine.joined.exchange(1)) { return refuse_nccl(name, "two callers are rank %d", rank); }
    mine.world = (uint32_t)world;
    ncclResult_t error = arrive(comm, name);
    for (int r = 0; !error && r < world; r++) {
        if (comm->meeting->slot(r).world != (uint32_t)world) { error = refuse_nccl(name, "rank %d says %d ranks, rank %d says %u", rank, world, r, comm->meeting->slot(r).world); }
    }
    if (!error) { error = arrive(comm, name); }
    unlink(id.internal); // all have it open
    if (error) {
        munmap(map, Meeting::bytes(world));
        delete comm;
        return error;
    }
    *out = comm;
    return ncclSuccess;
}
} // namespace emu

inline const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage",
                                        "remote process exited or there was a network error", "NCCL operation in progress"};
    return (unsigned)result < 8 ? texts[result] : "unknown result code";
}
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
inline ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static std::atomic<int> number{0};
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/emu_nccl_%d_%d_%lx", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", (int)getpid(), number++, (unsigned long)t.tv_nsec);
    return ncclSuccess;
}
inline ncclResult_t ncclGroupStart() { emu::group_depth++; return ncclSuccess; }
inline ncclResult_t ncclGroupEnd() {
    if (emu::group_depth < 1) { return ncclInvalidUsage; }
    return --emu::group_depth ? ncclSuccess : emu::end_group();
}
inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId id, int rank) {
    int on = emu::device;
    return emu::submit({nullptr, rank, [=] { return emu::join(comm, world, id, rank, on); }});
}
inline ncclResult_t ncclCommInitAll(ncclComm_t *comms, int world, const int *devices) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    ncclGroupStart();
    for (int r = 0; r < world; r++) {
        int on = devices ? devices[r] : r;
        if (on >= emu::device_count()) { emu::refuse_nccl("ncclCommInitAll", "device %d of %d", on, emu::device_count()); }
        emu::submit({nullptr, r, [=] { return on < emu::device_count() ? emu::join(&comms[r], world, id, r, on) : ncclInvalidArgument; }});
    }
    return ncclGroupEnd();
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { *count = comm->world; return ncclSuccess; }
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
inline ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = comm->error ? (ncclResult_t)comm->error.load() : comm->meeting->aborted ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    munmap(comm->meeting, emu::Meeting::bytes(comm->world));
    delete comm;
    return ncclSuccess;
}
// Wakes every rank that waits, with ncclRemoteError. The communicator stays allocated: another thread may be inside it.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->meeting->aborted = 1;
    emu::ring(comm->meeting);
    return ncclSuccess;
}
inline ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::ALL_REDUCE, send, recv, count, type, op, -1, comm, stream);
}
inline ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::REDUCE, send, recv, count, type, op, root, comm, stream);
}
inline ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recvcount, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::REDUCE_SCATTER, send, recv, recvcount, type, op, -1, comm, stream);
}
inline ncclResult_t ncclAllGather(const void *send, void *recv, size_t sendcount, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::ALL_GATHER, send, recv, sendcount, type, -1, -1, comm, stream);
}
inline ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::BROADCAST, send, recv, count, type, -1, root, comm, stream);
}
inline ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::SEND, send, nullptr, count, type, -1, peer, comm, stream);
}
inline ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return emu::call_nccl(emu::RECV, nullptr, recv, count, type, -1, peer, comm, stream);
}
