// Enough of CUDA C++ to compile kernels for the host: qualifiers, the grid's indices, atomics, bits, vector types.
// The grid itself is a loop around each kernel; host_kernels.py writes it.
#include <algorithm>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static thread_local dim3 blockIdx, threadIdx, blockDim, gridDim;

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

template <class T> T atomicMin(T* at, T value)
{
    const T old = *at;
    *at = std::min(old, value);
    return old;
}

template <class T> T atomicMax(T* at, T value)
{
    const T old = *at;
    *at = std::max(old, value);
    return old;
}

// The lowest set bit's number from 1, 0 for none; how many bits are above the highest set one.
inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}

inline int __clz(int bits)
{
    return bits ? __builtin_clz(bits) : 32;
}
