// Blocks of threads on the host, for kernels whose threads wait for each other.
//
// Each thread of a block is a fiber: a stack and a saved context, on the thread of the process that launches the kernel.
// A fiber runs until it waits (at a barrier or a warp collective) or may be interrupted (at an atomic or a fence). Then
// a fiber that can run is chosen at random. So lanes run in any order, and threads of several blocks are interleaved:
//
//   - RESIDENT blocks run at a time, and they start in random order. A kernel in which a block waits for another one
//     must work with both, as on a GPU.
//   - A thread that waits for memory in a loop must have an atomic, a fence or __nanosleep in that loop.
//   - Shared memory is filled with garbage when a block starts.
//
// An error ends the launch: threads of a block at different barriers, some of them finished; lanes of a warp at
// different collectives; a lane that reads from one that does not take part; threads that all wait (deadlock).
#include <csetjmp>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__  // the address sanitizer must be told which stack is in use
extern "C" void __sanitizer_start_switch_fiber(void** saved, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* saved, const void** bottom, size_t* size);
#else
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

namespace fibers {

constexpr unsigned RESIDENT = 3;
constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;        // bytes
constexpr unsigned PATIENCE = 200'000;     // interruptions in a row without any progress: a deadlock

// A place in the source at which threads wait for each other.
struct Site {
    const char* what;
    const char* file;
    int line;
    bool operator==(const Site& other) const
    {
        return line == other.line && what == other.what && file == other.file;  // equal literals are one
    }
    std::string text() const { return std::string(what) + " (" + file + ":" + std::to_string(line) + ")"; }
};

struct Block;

struct Fiber {
    Block* block;
    unsigned thread;  // its number in the block
    bool ended, waits, started = false;
    Site site;              // where it waits, or waited last
    unsigned mask;          // the lanes that it waits for at a collective
    unsigned long long value, argument, result;  // of a collective
    jmp_buf context;
    void* fake_stack = nullptr;  // the sanitizer's
    std::unique_ptr<char[]> stack{new char[STACK]};
};

struct Block {
    unsigned index;
    unsigned ended, at_barrier;
    std::vector<unsigned> arrived;  // for each warp, the lanes that wait at a collective
    std::vector<Fiber> threads;
    std::map<int, std::unique_ptr<char[]>> shared;  // arrays in shared memory, by number of their declaration
};

// A launch. Blocks are kept for later launches, with their fibers.
struct Machine {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Fiber*> ready;
    std::function<void()> kernel;
    std::string error;
    std::minstd_rand chance;
    unsigned idle;  // interruptions since the last progress
    Fiber* running = nullptr;
    jmp_buf context;
    ucontext_t first;
    void* fake_stack = nullptr;
    const void* stack;
    size_t stack_size;
};
inline thread_local Machine* machine = nullptr;  // the launch that this thread of the process is working on

// Stops the running fiber. Returns when the scheduler continues it.
inline void leave()
{
    Fiber& self = *machine->running;
    __sanitizer_start_switch_fiber(&self.fake_stack, machine->stack, machine->stack_size);
    if (!_setjmp(self.context)) _longjmp(machine->context, 1);
    __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
}

[[noreturn]] inline void fail(const std::string& error)
{
    if (machine->error.empty()) machine->error = error;
    for (;;) leave();
}

// Lets other threads run.
inline void pause()
{
    if (!machine) return;  // a kernel that needs no fibers
    machine->idle++;
    machine->ready.push_back(machine->running);
    leave();
}

inline void make_ready(Fiber& fiber)
{
    fiber.waits = false;
    machine->ready.push_back(&fiber);
    machine->idle = 0;
}

// Continues the threads of a block if all of them have arrived at the same barrier.
inline void settle_barrier(Block& block)
{
    if (!block.at_barrier || block.at_barrier + block.ended < block.threads.size()) return;
    const Fiber* first = nullptr;
    for (const Fiber& fiber : block.threads) {
        if (fiber.ended) continue;
        if (!first) first = &fiber;
        if (!(fiber.site == first->site))
            fail("divergent barrier: threads of a block wait at " + first->site.text() + " and " + fiber.site.text());
    }
    if (block.ended)
        fail("divergent barrier: " + std::to_string(block.at_barrier) + " threads of a block wait at "
             + first->site.text() + ", the others have ended");
    block.at_barrier = 0;
    for (Fiber& fiber : block.threads) make_ready(fiber);
}

inline void barrier(Site site)
{
    Fiber& self = *machine->running;
    self.site = site;
    self.waits = true;
    self.block->at_barrier++;
    settle_barrier(*self.block);
    leave();
}

// A warp collective: waits until all lanes of `mask` have arrived with their values. The last one computes the results
// of all of them: result(lanes, lane) for each lane.
template <class Result>
unsigned long long collective(
    Site site, unsigned mask, unsigned long long value, unsigned long long argument, Result result)
{
    Fiber& self = *machine->running;
    const unsigned lane = self.thread % WARP;
    Fiber* lanes = &self - lane;
    self.site = site;
    self.mask = mask;
    self.value = value;
    self.argument = argument;
    self.waits = true;
    if (!(mask >> lane & 1)) fail(site.text() + ": the mask does not contain the calling lane");
    unsigned& arrived = self.block->arrived[self.thread / WARP];
    arrived |= 1u << lane;
    if ((arrived & mask) == mask) {
        for (unsigned k = 0; k < WARP; k++)
            if (mask >> k & 1 && !(lanes[k].site == site && lanes[k].mask == mask))
                fail("divergent warp: lanes wait at " + lanes[k].site.text() + " and " + site.text()
                     + (lanes[k].mask == mask ? "" : " with different masks"));
        for (unsigned k = 0; k < WARP; k++)
            if (mask >> k & 1) lanes[k].result = result(lanes, k);
        for (unsigned k = 0; k < WARP; k++)
            if (mask >> k & 1) make_ready(lanes[k]);
        arrived &= ~mask;
    }
    leave();
    return self.result;
}

template <class T> unsigned long long as_bits(T value)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T> T from_bits(unsigned long long bits)
{
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

inline unsigned mask_or_all(unsigned mask = ~0u)
{
    return mask;
}

inline void sync_warp(Site site, unsigned mask)
{
    collective(site, mask, 0, 0, [](Fiber*, unsigned) { return 0ull; });
}

// source(lane, argument): the lane that a lane reads. If that is not 0 to 31, the lane reads its own value.
template <class T, class Source> T shuffle(Site site, unsigned mask, T value, int argument, Source source)
{
    return from_bits<T>(collective(site, mask, as_bits(value), as_bits(argument), [=](Fiber* lanes, unsigned lane) {
        unsigned from = source((int)lane, from_bits<int>(lanes[lane].argument));
        if (from >= WARP) from = lane;
        if (!(mask >> from & 1))
            fail(site.text() + ": lane " + std::to_string(lane) + " reads from lane " + std::to_string(from)
                 + ", which is not in the mask");
        return lanes[from].value;
    }));
}

inline unsigned ballot(Site site, unsigned mask, bool vote)
{
    return (unsigned)collective(site, mask, vote, 0, [=](Fiber* lanes, unsigned) {
        unsigned long long votes = 0;
        for (unsigned k = 0; k < WARP; k++)
            if (mask >> k & 1) votes |= lanes[k].value << k;
        return votes;
    });
}

// Combines the values of all lanes of the mask in order.
template <class T, class Combine> T reduce(Site site, unsigned mask, T value, Combine combine)
{
    return from_bits<T>(collective(site, mask, as_bits(value), 0, [=](Fiber* lanes, unsigned lane) {
        T all = from_bits<T>(lanes[lane].value);
        for (unsigned k = 0; k < WARP; k++)
            if (mask >> k & 1 && k != lane) all = combine(all, from_bits<T>(lanes[k].value));
        return as_bits(all);
    }));
}

// The memory of a declaration in shared memory, one per block.
inline void* shared_memory(int declaration, size_t size)
{
    std::unique_ptr<char[]>& memory = machine->running->block->shared[declaration];
    if (!memory) {
        memory.reset(new char[size]);
        memset(memory.get(), 0x5a, size);
    }
    return memory.get();
}

// Replaces the value at an address by change(value), at once for all threads. Returns the value before.
template <class T, class Change> T atomic(T* at, Change change)
{
    pause();
    const T old = *at;
    *at = change(old);
    if (machine && *at != old) machine->idle = 0;
    return old;
}

// What every fiber executes: its thread of one block, then of another one.
inline void run_threads()
{
    __sanitizer_finish_switch_fiber(nullptr, &machine->stack, &machine->stack_size);
    Fiber& self = *machine->running;
    for (;;) {
        machine->kernel();
        self.ended = true;
        self.block->ended++;
        machine->idle = 0;
        settle_barrier(*self.block);
        leave();
    }
}

// Continues a fiber until it leaves.
inline void enter(Fiber& fiber)
{
    machine->running = &fiber;
    threadIdx.x = fiber.thread;
    blockIdx.x = fiber.block->index;
    __sanitizer_start_switch_fiber(&machine->fake_stack, fiber.stack.get(), STACK);
    if (!_setjmp(machine->context)) {
        if (fiber.started) _longjmp(fiber.context, 1);
        // Contexts of the C library make system calls, so they are used only once per fiber.
        fiber.started = true;
        getcontext(&machine->first);
        machine->first.uc_stack.ss_sp = fiber.stack.get();
        machine->first.uc_stack.ss_size = STACK;
        makecontext(&machine->first, run_threads, 0);
        setcontext(&machine->first);
    }
    __sanitizer_finish_switch_fiber(machine->fake_stack, nullptr, nullptr);
    machine->running = nullptr;
}

inline void start(Block& block, unsigned index, unsigned threads)
{
    if (block.threads.size() != threads) block.threads = std::vector<Fiber>(threads);
    block.index = index;
    block.ended = block.at_barrier = 0;
    block.arrived.assign(threads / WARP, 0);
    block.shared.clear();
    for (unsigned thread = 0; thread < threads; thread++) {
        Fiber& fiber = block.threads[thread];
        fiber.block = &block;
        fiber.thread = thread;
        fiber.ended = false;
        make_ready(fiber);
    }
}

// Where the threads of all unfinished blocks wait: for the message about a deadlock.
inline std::string waiting()
{
    std::map<std::string, int> counts;
    for (const auto& block : machine->blocks)
        for (const Fiber& fiber : block->threads)
            if (!fiber.ended) counts[fiber.waits ? "at " + fiber.site.text() : "for memory to change"]++;
    std::string text;
    for (const auto& [place, count] : counts)
        text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + place;
    return text;
}

// Runs all blocks of a launch. Returns a description of the error, or null.
inline const char* run_blocks(unsigned blocks, unsigned threads, unsigned seed, std::function<void()> kernel)
{
    static thread_local Machine own;
    machine = &own;
    machine->kernel = std::move(kernel);
    machine->chance.seed(seed + 1);  // 0 is not a valid seed
    machine->error.clear();
    std::vector<unsigned> order(blocks);
    for (unsigned k = 0; k < blocks; k++) order[k] = k;
    std::shuffle(order.begin(), order.end(), machine->chance);
    while (machine->blocks.size() < RESIDENT) machine->blocks.push_back(std::make_unique<Block>());
    machine->ready.clear();
    for (auto& block : machine->blocks) {
        if (order.empty()) break;
        start(*block, order.back(), threads);
        order.pop_back();
    }
    while (!machine->ready.empty() && machine->idle < PATIENCE) {
        std::swap(machine->ready[machine->chance() % machine->ready.size()], machine->ready.back());
        Fiber& fiber = *machine->ready.back();
        machine->ready.pop_back();
        enter(fiber);
        if (!machine->error.empty()) break;
        if (fiber.block->ended == threads && !order.empty()) {
            start(*fiber.block, order.back(), threads);
            order.pop_back();
        }
    }
    if (own.error.empty() && !waiting().empty()) own.error = "deadlock: threads wait, " + waiting();
    machine = nullptr;
    if (own.error.empty()) return nullptr;
    own.blocks.clear();  // their fibers are inside the kernel
    return own.error.c_str();
}

}  // namespace fibers

#define FIBERS_SITE(what) fibers::Site{what, __FILE__, __LINE__}
#define __syncthreads() fibers::barrier(FIBERS_SITE("__syncthreads"))
#define __syncwarp(...) fibers::sync_warp(FIBERS_SITE("__syncwarp"), fibers::mask_or_all(__VA_ARGS__))
#define __shfl_sync(mask, value, from) \
    fibers::shuffle(FIBERS_SITE("__shfl_sync"), mask, value, (int)(from), [](int, int k) { return k & 31; })
#define __shfl_up_sync(mask, value, by) \
    fibers::shuffle(FIBERS_SITE("__shfl_up_sync"), mask, value, (int)(by), [](int lane, int k) { return lane - k; })
#define __shfl_down_sync(mask, value, by) \
    fibers::shuffle(FIBERS_SITE("__shfl_down_sync"), mask, value, (int)(by), [](int lane, int k) { return lane + k; })
#define __shfl_xor_sync(mask, value, by) \
    fibers::shuffle(FIBERS_SITE("__shfl_xor_sync"), mask, value, (int)(by), [](int lane, int k) { return lane ^ k; })
#define __ballot_sync(mask, vote) fibers::ballot(FIBERS_SITE("__ballot_sync"), mask, vote)
#define __any_sync(mask, vote) (fibers::ballot(FIBERS_SITE("__any_sync"), mask, vote) != 0)
#define __all_sync(mask, vote) (fibers::ballot(FIBERS_SITE("__all_sync"), mask, !(vote)) == 0)
#define __reduce_min_sync(mask, value) \
    fibers::reduce(FIBERS_SITE("__reduce_min_sync"), mask, value, [](auto a, auto b) { return b < a ? b : a; })
#define __reduce_max_sync(mask, value) \
    fibers::reduce(FIBERS_SITE("__reduce_max_sync"), mask, value, [](auto a, auto b) { return a < b ? b : a; })
#define __reduce_add_sync(mask, value) \
    fibers::reduce(FIBERS_SITE("__reduce_add_sync"), mask, value, [](auto a, auto b) { return a + b; })
