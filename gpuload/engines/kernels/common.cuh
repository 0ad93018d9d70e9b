// Shared by all kernels. engines/device/kernel_source.py concatenates all files, this one first, and compiles them as one
// source. There are no #includes, because CuPy caches machine code by its source and would not notice a change in an
// included file.
//
// Rules, so that the same source also runs on the host (engines/device/host_build.py):
//   - A kernel is `extern "C" __global__ void`. Its parameters are pointers and numbers of the types below; their
//     declarations are parsed to check the arguments of every launch.
//   - On the host, a kernel in which threads wait for each other (barriers, warp collectives) or that uses shared memory
//     is much slower than one without, because each thread gets a stack of its own (fibers.h). A loop
//     that waits for memory contains an atomic, a fence or __nanosleep.
//   - Arrays in shared memory are declared one at a time: `__shared__ int sums[8];`
//   - Every loop over items has the size of the grid as its stride, so any number of blocks gives the same result.
//   - Items are counted in 64 bits: rows, bytes and grid strides can exceed 2^31.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define BLOCK 256  // threads per block, as in engines/device/kernels.py
#define ALL_LANES 0xffffffffu
#define LOSS (1 << 30)      // the bits of ids, as in core/marks.py: the token has loss,
#define CHOSEN (1 << 29)    // or only one sequence of a pair has it
#define REJECTED (1 << 28)
#define WEIGHT(bits) ((bits) >> 21 & 127)  // the number of the weight of its loss
#define IDS ((1 << 21) - 1)
#define NO_LABEL (-100)     // the label of a token without loss, as in engines/host/packs.py

// Counts the rounds in which a thread waits for another one. A build that bounds them stops the kernel with an error
// where it would wait for ever.
#ifdef GPULOAD_MOST_SPINS
#define WAITED(rounds) \
    if (++(rounds) > GPULOAD_MOST_SPINS) __trap()
#else
#define WAITED(rounds)
#endif

// Runs the body for items i = 0 ... n - 1, one thread per item.
#define EACH_THREAD(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// The same with one warp per item; `lane` is the thread's number in its warp. blockDim is a multiple of 32, so the
// threads of a warp have the same item.
#define EACH_WARP(i, n)                                                                                    \
    const int lane = threadIdx.x % 32;                                                                     \
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; i < (n); i += (i64)gridDim.x * blockDim.x / 32)

// The same with one block per item.
#define EACH_BLOCK(i, n) for (i64 i = blockIdx.x; i < (n); i += gridDim.x)

// A hash of one integer: the finalizer of SplitMix64 (Steele et al., 2014).
__device__ __forceinline__ u64 mixed(u64 x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Constants of the hash tables of tokenizer/hash_tables.py: 64-bit slots, open addressing with linear probing.
#define EMPTY 0xffffffffffffffffull
#define MIX 0xbf58476d1ce4e5b9ull

// The hash of a pair of 21-bit numbers, given as left << 21 | right; `hash_pairs` of hash_tables.py.
__device__ __forceinline__ u64 pair_hash(u64 key)
{
    key *= 0x9e3779b97f4a7c15ull;
    return (key ^ (key >> 32)) * MIX >> 32;
}
