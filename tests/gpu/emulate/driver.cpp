// A driver library whose card is machine.cpp. It has the functions that the kernels' own loader
// and lab call. Device addresses are host addresses; each allocation ends at a page that may not
// be touched, so a kernel that runs over the end of a buffer dies there.
#include <dlfcn.h>
#include <sys/mman.h>

#include <map>
#include <string>
#include <vector>

#include "machine.h"

namespace {

// Kernels by unit, from the symbols of the compiled units (names.inc is made by the build).
struct Named {
    const char* name;
    void* function;
};
#define KERNEL(name) extern "C" void name();
#include "names.inc"
#undef KERNEL
#define KERNEL(name) {#name, reinterpret_cast<void*>(name)},
const Named KERNELS[] = {
#include "names.inc"
};
#undef KERNEL

// Parameter blocks are passed by value in memory, where the callee reads as much as it has.
struct Words {
    uint64_t words[32];
};

const Named* target;

void call(const void* args) {
    reinterpret_cast<void (*)(Words)>(target->function)(*static_cast<const Words*>(args));
}

std::map<uintptr_t, std::pair<void*, size_t>> allocations;
bool loaded = false;

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cuInit(unsigned) { return 0; }
API cuDriverGetVersion(int* v) { return *v = 13000, 0; }
API cuDeviceGet(int* d, int) { return *d = 0, 0; }
API cuDeviceGetCount(int* n) { return *n = 1, 0; }
API cuDeviceGetName(char* name, int size, int) {
    return snprintf(name, size, "emulated card"), 0;
}
API cuDeviceGetAttribute(int* v, int attribute, int) {
    switch (attribute) {
        case 16: *v = 4; break;             // multiprocessors
        case 75: *v = 9; break;             // capability
        case 76: *v = 0; break;
        case 81: *v = 228 * 1024; break;    // shared memory of a multiprocessor
        case 97: *v = 227 * 1024; break;    // of a block, at most
        default: *v = 0;                    // no memory pools among others
    }
    return 0;
}
API cuDevicePrimaryCtxRetain(void** c, int) {
    loaded = false;  // a new context has to load its modules
    return *c = reinterpret_cast<void*>(16), 0; }
API cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API cuCtxGetCurrent(void** c) { return *c = reinterpret_cast<void*>(16), 0; }
API cuCtxSetCurrent(void*) { return 0; }
API cuCtxSynchronize() { return 0; }
API cuStreamCreate(void** s, unsigned) { return *s = reinterpret_cast<void*>(32), 0; }
API cuStreamDestroy_v2(void*) { return 0; }
API cuStreamSynchronize(void*) { return 0; }
API cuStreamQuery(void*) { return 0; }
// Copies are over when their call returns: nothing is ever waited for.
API cuEventCreate(void** event, unsigned) {
    static int any;
    *event = &any;
    return 0;
}
API cuEventDestroy_v2(void*) { return 0; }
API cuEventRecord(void*, void*) { return 0; }
API cuEventSynchronize(void*) { return 0; }
API cuStreamWaitEvent(void*, void*, unsigned) { return 0; }

API cuMemAlloc_v2(uint64_t* p, size_t bytes) {
    const size_t page = 4096, whole = (bytes + page - 1) / page * page;
    void* base = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return 2;
    mprotect(static_cast<uint8_t*>(base) + whole, page, PROT_NONE);
    const uintptr_t at = reinterpret_cast<uintptr_t>(base) + (whole - (bytes + 63) / 64 * 64);
    allocations[at] = {base, whole + page};
    return *p = at, 0;
}
API cuMemFree_v2(uint64_t p) {
    const auto found = allocations.find(p);
    if (found == allocations.end()) return 1;
    munmap(found->second.first, found->second.second);
    allocations.erase(found);
    return 0;
}
API cuMemHostAlloc(void** p, size_t bytes, unsigned) { return *p = calloc(bytes, 1), 0; }
API cuMemFreeHost(void* p) { return free(p), 0; }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    return *free = size_t(8) << 30, *total = size_t(8) << 30, 0;
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    return memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    return memcpy(to, reinterpret_cast<const void*>(from), bytes), 0;
}
API cuMemsetD8Async(uint64_t to, unsigned char v, size_t bytes, void*) {
    return memset(reinterpret_cast<void*>(to), v, bytes), 0;
}

// All kernels belong to the first module that is loaded.
API cuModuleLoadData(void** m, const void*) {
    *m = reinterpret_cast<void*>(loaded ? 64 : 48);
    loaded = true;
    return 0;
}
API cuModuleUnload(void*) { return 0; }
API cuModuleGetFunctionCount(unsigned* n, void* m) {
    return *n = m == reinterpret_cast<void*>(48) ? sizeof(KERNELS) / sizeof(*KERNELS) : 0, 0;
}
API cuModuleEnumerateFunctions(void** functions, unsigned n, void*) {
    for (unsigned i = 0; i < n; i++) functions[i] = const_cast<Named*>(&KERNELS[i]);
    return 0;
}
API cuFuncGetName(const char** name, void* f) {
    return *name = static_cast<Named*>(f)->name, 0;
}
API cuFuncGetAttribute(int* v, int, void*) { return *v = 0, 0; }
API cuFuncSetAttribute(void*, int, int) { return 0; }
API cuOccupancyMaxActiveClusters(int* n, void*, const void*) { return *n = 1, 0; }
API cuGetErrorString(int, const char** s) { return *s = "emulated error", 0; }
API cuGetErrorName(int, const char** s) { return *s = "emulated error", 0; }

namespace {

struct Recorded {
    Launch launch;
    const Named* target;
    Words args;
};

bool recording = false;
std::vector<Recorded> record;

}  // namespace

API cuStreamBeginCapture_v2(void*, int) { return record.clear(), recording = true, 0; }
API cuStreamEndCapture(void*, void** graph) {
    recording = false;
    return *graph = new std::vector<Recorded>(record), 0;
}
API cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    return *exec = graph, 0;
}
API cuGraphLaunch(void* exec, void*) {
    for (Recorded& r : *static_cast<std::vector<Recorded>*>(exec)) {
        target = r.target;
        r.launch.args = &r.args;
        run(r.launch);
    }
    return 0;
}
API cuGraphExecDestroy(void*) { return 0; }
API cuGraphDestroy(void* graph) { return delete static_cast<std::vector<Recorded>*>(graph), 0; }

API cuLaunchKernelEx(const uint32_t* config, void* f, void** params, void**) {
    target = static_cast<const Named*>(f);
    const std::string name = target->name;
    const bool clustered = name.rfind("linear_", 0) == 0 && name.rfind("linear_large", 0) != 0;
    Launch launch;
    launch.name = target->name;
    launch.call = call;
    launch.args = params[0];
    launch.grid = {config[0], config[1], config[2]};
    launch.threads = config[3];
    launch.cluster = clustered ? 8 : 1;
    launch.shared = config[6];
    if (recording) {
        Recorded r = {launch, target, {}};
        memcpy(&r.args, params[0], sizeof(r.args));
        record.push_back(r);
        return 0;
    }
    run(launch);
    return 0;
}
