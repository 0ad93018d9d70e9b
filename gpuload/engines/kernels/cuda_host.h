// The part of CUDA C++ that the kernels use, for a host compiler: qualifiers, grid indices, atomics, bit functions and
// vector types. host_build.py puts fibers.h, with barriers, collectives and shared memory, behind the grid indices.
//
// Threads of a kernel that does not need fibers run one after the other. Those of the others are interrupted only at
// atomics, fences, barriers and collectives. So atomics are plain reads and writes in both.
#include <algorithm>
#include <cstdlib>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static thread_local dim3 blockIdx, threadIdx, blockDim, gridDim;

#include "fibers.h"

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <class T> T atomicAdd(T* at, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T old) { return (T)(old + value); });
}

template <class T> T atomicMin(T* at, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T old) { return std::min(old, value); });
}

template <class T> T atomicMax(T* at, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T old) { return std::max(old, value); });
}

template <class T> T atomicOr(T* at, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T old) { return old | value; });
}

template <class T> T atomicExch(T* at, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T) { return value; });
}

template <class T> T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value)
{
    return fibers::atomic(at, [=](T old) { return old == expected ? value : old; });
}

inline void __trap()
{
    std::abort();
}

inline void __threadfence()
{
    fibers::pause();
}

inline void __nanosleep(unsigned)
{
    fibers::pause();
}

// As CUDA defines them: the position of the lowest set bit counted from 1, 0 if there is none; the number of zero bits
// above the highest set one, of which __builtin_clz(0) is undefined; and the number of set bits. For 32 and 64 bits.
inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}

inline int __ffsll(long long bits)
{
    return __builtin_ffsll(bits);
}

inline int __clz(int bits)
{
    return bits ? __builtin_clz(bits) : 32;
}

inline int __clzll(long long bits)
{
    return bits ? __builtin_clzll(bits) : 64;
}

inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}

inline int __popcll(unsigned long long bits)
{
    return __builtin_popcountll(bits);
}
