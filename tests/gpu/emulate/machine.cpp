// A multiprocessor in software: every CUDA thread is a coroutine; blocks run one cluster at a
// time. A thread runs until it must wait for others. Matrix instructions compute each output from
// all lanes' operands in fp64 and round once, which is right but not the card's own rounding:
// equal bits here show equal order, not the card's arithmetic.
#include "machine.h"

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "ptx.cuh"

thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t STACK = 128 * 1024;

// Saves the callee's registers and swaps stacks.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.globl emulator_switch
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

struct Copy {
    uint32_t to, size, bytes;
    const void* from;
};

struct Barrier {
    uint32_t members = 0, arrived = 0;
    uint64_t generation = 0;
    void arrive() {
        if (++arrived == members) open();
    }
    void leave() {
        members--;
        if (members && arrived == members) open();
    }
    void open() {
        arrived = 0;
        generation++;
    }
};

// A barrier in shared memory: arrivals and bytes of its phase.
struct Counter {
    uint32_t members = 0, arrived = 0, phase = 0;
    int64_t bytes = 0;
    void check() {
        if (arrived != members || bytes != 0) return;
        arrived = 0;
        phase++;
    }
    void arrive(int64_t more) {
        arrived++;
        bytes += more;
        check();
    }
    void deliver(int64_t some) {
        bytes -= some;
        check();
    }
};

struct Deposit {
    uint32_t a[4], b[2], at;
    uint64_t word;
};

struct Block;

struct Warp {
    Barrier barrier;
    Deposit deposits[2][32];
};

struct Thread {
    void* stack = nullptr;
    std::unique_ptr<uint8_t[]> memory;
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint32_t number = 0, lane = 0, operations = 0;
    uint64_t cluster_generation = 0;
    bool done = false, moved = false;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Block {
    Index index;
    uint32_t rank = 0;
    std::vector<uint8_t> shared;
    Barrier barrier;
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    std::map<uint32_t, Counter> counters;
};

struct Cluster {
    std::vector<Block> blocks;
    Barrier barrier;
};

Cluster* cluster;
Thread* running;
void* scheduler;
const Launch* launch;

void yield() { emulator_switch(&running->stack, scheduler); }

void wait(const Barrier& barrier, uint64_t generation) {
    while (barrier.generation == generation) yield();
    running->moved = true;  // the scheduler sees that something went on
}

void pass(Barrier& barrier) {
    const uint64_t generation = barrier.generation;
    running->moved = true;
    barrier.arrive();
    if (barrier.generation == generation) wait(barrier, generation);
}

void body() {
    launch->call(launch->args);
    Thread* self = running;
    self->done = self->moved = true;
    self->warp->barrier.leave();
    self->block->barrier.leave();
    for (;;) yield();
}

void prepare(Thread& t) {
    t.memory.reset(new uint8_t[STACK]);
    uintptr_t top = reinterpret_cast<uintptr_t>(t.memory.get() + STACK) & ~uintptr_t(15);
    void** sp = reinterpret_cast<void**>(top);
    *--sp = nullptr;  // keeps the alignment that a call leaves
    *--sp = reinterpret_cast<void*>(body);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    t.stack = sp;
}

void resume(Thread& t) {
    running = &t;
    blockIdx = t.block->index;
    threadIdx = {t.number, 0, 0};
    t.moved = false;
    emulator_switch(&scheduler, t.stack);
}

// What every lane laid down for the instruction that all of the warp now execute.
const Deposit* collect(const Deposit& mine) {
    Thread* t = running;
    Deposit* all = t->warp->deposits[t->operations++ % 2];
    all[t->lane] = mine;
    pass(t->warp->barrier);
    return all;
}

uint8_t* memory_of(Block& block) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block.shared.data()) + 127) / 128 *
                                      128);
}

// A peer's address is the place in its memory with the peer's number above it.
constexpr uint32_t PEER = 24;
Block& peer(uint32_t address) { return cluster->blocks[(address >> PEER) - 1]; }
uint32_t place(uint32_t address) { return address & ((1u << PEER) - 1); }

Counter& counter(Block& block, uint32_t at) {
    const auto found = block.counters.find(at);
    if (found == block.counters.end()) {
        fprintf(stderr, "emulator: %s: no barrier at %u\n", launch->name, at);
        abort();
    }
    return found->second;
}

float half_of(uint32_t pair, int which) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}

void load_matrix(uint32_t (&r)[4], uint32_t at, bool transposed) {
    Deposit mine = {};
    mine.at = at;
    const Deposit* all = collect(mine);
    const uint32_t lane = running->lane;
    for (int m = 0; m < 4; m++) {
        uint16_t v[2];
        for (int i = 0; i < 2; i++) {
            uint32_t row = lane / 4, column = lane % 4 * 2 + i;
            if (transposed) std::swap(row, column);
            memcpy(&v[i], block_memory() + all[m * 8 + row].at + column * 2, 2);
        }
        r[m] = v[0] | static_cast<uint32_t>(v[1]) << 16;
    }
}

}  // namespace

void run(const Launch& what) {
    launch = &what;
    blockDim = {what.threads, 1, 1};
    gridDim = what.grid;
    const uint32_t blocks = what.grid.x * what.grid.y * what.grid.z;
    for (uint32_t first = 0; first < blocks; first += what.cluster) {
        Cluster now;
        cluster = &now;
        now.barrier.members = what.cluster * what.threads;
        now.blocks.resize(what.cluster);
        for (uint32_t b = 0; b < what.cluster; b++) {
            Block& block = now.blocks[b];
            const uint32_t i = first + b;
            block.index = {i % what.grid.x, i / what.grid.x % what.grid.y,
                           i / what.grid.x / what.grid.y};
            block.rank = b;
            block.shared.assign(what.shared + 128, 0xff);  // reads of nothing are NaN
            block.barrier.members = what.threads;
            block.warps.resize((what.threads + 31) / 32);
            block.threads.resize(what.threads);
            for (uint32_t t = 0; t < what.threads; t++) {
                Thread& thread = block.threads[t];
                thread.block = &block;
                thread.warp = &block.warps[t / 32];
                thread.warp->barrier.members++;
                thread.number = t;
                thread.lane = t % 32;
                prepare(thread);
            }
        }
        for (bool left = true; left;) {
            left = false;
            bool moved = false;
            for (Block& block : now.blocks)
                for (size_t w = 0; w < block.warps.size(); w++)
                    for (bool again = true; again;) {
                        again = false;
                        for (size_t t = w * 32; t < std::min<size_t>(w * 32 + 32, what.threads); t++)
                            if (!block.threads[t].done) {
                                resume(block.threads[t]);
                                again |= block.threads[t].moved;
                            }
                        moved |= again;
                    }
            for (Block& block : now.blocks)
                for (Thread& t : block.threads) left |= !t.done;
            if (left && !moved) {
                fprintf(stderr, "emulator: %s: all threads wait for each other\n", what.name);
                abort();
            }
        }
    }
}

uint8_t* block_memory() { return memory_of(*running->block); }

void __syncthreads() { pass(running->block->barrier); }
void __syncwarp() { pass(running->warp->barrier); }

uint64_t exchange_xor(uint64_t word, uint32_t mask) {
    Deposit mine = {};
    mine.word = word;
    const uint32_t lane = running->lane;
    return collect(mine)[lane ^ mask].word;
}

uint32_t shared_address(const void* p) {
    return static_cast<const uint8_t*>(p) - block_memory();
}

void copy_async16(uint32_t to, const void* from, uint32_t bytes) {
    running->open.push_back({to, 16, bytes, from});
}

void copy_commit() {
    running->groups.push_back(std::move(running->open));
    running->open.clear();
}

void copy_wait_for(uint32_t pending) {
    while (running->groups.size() > pending) {
        for (const Copy& c : running->groups.front()) {
            memcpy(block_memory() + c.to, c.from, c.bytes);
            memset(block_memory() + c.to + c.bytes, 0, c.size - c.bytes);
        }
        running->groups.pop_front();
    }
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Deposit mine = {};
    memcpy(mine.a, a, sizeof(a));
    mine.b[0] = b0;
    mine.b[1] = b1;
    const Deposit* all = collect(mine);
    const uint32_t lane = running->lane, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const uint32_t n = t * 2 + i % 2;
        double sum = c[i];
        for (uint32_t k = 0; k < 16; k++) {
            const uint32_t from = k % 8 / 2, part = k / 8;
            sum += static_cast<double>(half_of(all[g * 4 + from].a[i / 2 + part * 2], k % 2)) *
                   half_of(all[n * 4 + from].b[part], k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
}

void load_matrix4(uint32_t (&r)[4], uint32_t at) { load_matrix(r, at, false); }
void load_matrix4_transposed(uint32_t (&r)[4], uint32_t at) { load_matrix(r, at, true); }

uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 2; i++)
        r |= static_cast<uint32_t>(__float2bfloat16_rn(half_of(a, i) * half_of(b, i)).bits) << 16 * i;
    return r;
}

uint32_t cluster_rank() { return running->block->rank; }

void cluster_arrive() {
    running->cluster_generation = cluster->barrier.generation;
    running->moved = true;
    cluster->barrier.arrive();
}

void cluster_wait() {
    if (cluster->barrier.generation == running->cluster_generation)
        wait(cluster->barrier, running->cluster_generation);
}

void barrier_init(uint32_t at, uint32_t arrivals) {
    Counter fresh;
    fresh.members = arrivals;
    running->block->counters[at] = fresh;
}
void barrier_arrive(uint32_t at) {
    running->moved = true;
    counter(*running->block, at).arrive(0);
}
void barrier_expect(uint32_t at, uint32_t bytes) {
    running->moved = true;
    counter(*running->block, at).arrive(bytes);
}
void barrier_wait(uint32_t at, uint32_t parity) {
    const Counter& c = counter(*running->block, at);
    while (c.phase % 2 == parity) yield();
    running->moved = true;
}
void barrier_arrive_copied(uint32_t at) {
    copy_commit();
    copy_wait_for(0);
    barrier_arrive(at);
}
uint32_t peer_address(uint32_t at, uint32_t rank) { return at | (rank + 1) << PEER; }
void barrier_arrive_peer(uint32_t address) {
    running->moved = true;
    counter(peer(address), place(address)).arrive(0);
}
void send16(uint32_t address, const float (&v)[4], uint32_t barrier) {
    running->moved = true;
    memcpy(memory_of(peer(address)) + place(address), v, 16);
    counter(peer(barrier), place(barrier)).deliver(16);
}
