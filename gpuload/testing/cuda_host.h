// The part of CUDA C++ that the kernels use, for a host compiler: qualifiers, grid indices, atomics, bit functions and
// vector types. host_kernels.py generates a loop over blocks and threads around each kernel, which sets these indices.
// Threads run one after the other, so atomics are plain reads and writes.
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

// As CUDA defines them: the position of the lowest set bit counted from 1, 0 if there is none; and the number of zero
// bits above the highest set one. __builtin_clz(0) is undefined.
inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}

inline int __clz(int bits)
{
    return bits ? __builtin_clz(bits) : 32;
}
