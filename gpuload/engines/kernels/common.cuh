// What all kernels share. launch.py puts this file in front of the others and compiles them as one source, so there are
// no includes: CuPy keeps compiled code by its source, and would not notice that an included file changed.
//
// Rules that let the same source run on the host, one thread after the other (tests/host_kernels.py):
//   - a kernel is `extern "C" __global__ void`; its parameters are pointers and integers of the types below;
//   - threads of one kernel do not wait for each other: no shared memory, no barriers, no warp votes;
//   - every loop over items steps by the size of the grid, so that any grid gives the same result;
//   - items are counted in 64 bits.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

// A thread for each of n items.
#define EACH_THREAD(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// A warp for each of n items; `lane` is the thread's number in it. blockDim is a multiple of 32.
#define EACH_WARP(i, n)                                                                                    \
    const int lane = threadIdx.x % 32;                                                                     \
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; i < (n); i += (i64)gridDim.x * blockDim.x / 32)

// A block for each of n items.
#define EACH_BLOCK(i, n) for (i64 i = blockIdx.x; i < (n); i += gridDim.x)

// An integer that spreads: equal inputs stay equal, near ones end far apart (the finalizer of SplitMix64).
__device__ __forceinline__ u64 mixed(u64 x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The hash tables of tokenizer/merges.py: 64-bit words, open addressing, the next slot where one is taken.
#define EMPTY 0xffffffffffffffffull
#define MIX 0xbf58476d1ce4e5b9ull

// Of a pair of numbers of 21 bits, as one: the left one << 21 | the right one.
__device__ __forceinline__ u64 pair_hash(u64 key)
{
    key *= 0x9e3779b97f4a7c15ull;
    return (key ^ (key >> 32)) * MIX >> 32;
}
