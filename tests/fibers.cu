// Kernels for test_fibers.py: what threads that wait for each other can do, and what they must not do.

// Reverses each block of 256 numbers through shared memory.
extern "C" __global__ void reverse(i64 blocks, int* values)
{
    __shared__ int copies[256];
    EACH_BLOCK(b, blocks) {
        copies[threadIdx.x] = values[256 * b + threadIdx.x];
        __syncthreads();
        values[256 * b + threadIdx.x] = copies[255 - threadIdx.x];
        __syncthreads();
    }
}

// sums[i]: the sum of values[0] to values[i] within each warp, by shuffles.
__device__ __forceinline__ int scanned(int value)
{
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, value, by);
        if ((int)threadIdx.x % 32 >= by) value += other;
    }
    return value;
}

extern "C" __global__ void scan_warps(i64 count, const int* values, int* sums)
{
    EACH_THREAD(i, count) sums[i] = scanned(values[i]);
}

// out: twelve numbers per thread, one from each collective. The upper and the lower half of a warp take part in
// different calls at the end.
extern "C" __global__ void collectives(i64 count, const int* values, int* out)
{
    const unsigned all = 0xffffffffu;
    EACH_THREAD(i, count) {
        const int lane = threadIdx.x % 32, value = values[i];
        int* mine = out + 12 * i;
        mine[0] = __shfl_sync(all, value, (lane + 5) % 32);
        mine[1] = __shfl_up_sync(all, value, 3);
        mine[2] = __shfl_down_sync(all, value, 3);
        mine[3] = __shfl_xor_sync(all, value, 9);
        mine[4] = (int)__ballot_sync(all, value & 1);
        mine[5] = __any_sync(all, value == 7);
        mine[6] = __all_sync(all, value < 90);
        mine[7] = (int)__reduce_min_sync(all, (unsigned)value);
        mine[8] = (int)__reduce_add_sync(all, (unsigned)value);
        const u64 wide = __shfl_sync(all, (u64)value << 40, 31);
        mine[9] = (int)(wide >> 40);
        __syncwarp();
        if (lane < 16) mine[10] = (int)__reduce_max_sync(0x0000ffffu, (unsigned)value);
        else mine[10] = (int)__reduce_max_sync(0xffff0000u, (unsigned)value);
        mine[11] = __popc((unsigned)value);
    }
}

// Prefix sums in one pass over tiles of 256 numbers (decoupled look-back, Merrill and Garland, 2016). A block takes the
// next tile by a ticket, so that all tiles before it have been started. state[t]: 0, or sum of tile t * 4 + 1, or sum
// up to and including tile t * 4 + 2.
extern "C" __global__ void scan_tiles(i64 count, const int* values, int* ticket, u64* state, i64* sums)
{
    __shared__ int tile;
    __shared__ int warp_sums[8];
    __shared__ u64 before;
    if (threadIdx.x == 0) tile = atomicAdd(ticket, 1);
    __syncthreads();
    const i64 i = 256 * (i64)tile + threadIdx.x;
    int sum = scanned(i < count ? values[i] : 0);
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int warp = 0; warp < (int)threadIdx.x / 32; warp++) sum += warp_sums[warp];
    if (threadIdx.x == 255) {
        atomicExch(state + tile, (u64)sum * 4 + 1);
        u64 total = 0;
        for (int other = tile - 1; other >= 0;) {
            const u64 found = atomicAdd(state + other, 0);
            if (!found) continue;  // not yet known
            total += found / 4;
            if (found % 4 == 2) break;
            other--;
        }
        atomicExch(state + tile, (total + sum) * 4 + 2);
        before = total;
    }
    __syncthreads();
    if (i < count) sums[i] = (i64)before + sum;
}

// The same order of waiting without a ticket: a block waits for the one before it, which may not have been started.
extern "C" __global__ void wait_for_block_before(i64 blocks, int* done)
{
    if (threadIdx.x == 0 && blockIdx.x < blocks) {
        while (blockIdx.x > 0 && !*(volatile int*)(done + blockIdx.x - 1)) __nanosleep(100);
        done[blockIdx.x] = 1;
        __threadfence();
    }
}

// counts: six numbers changed by all threads.
extern "C" __global__ void count_atomically(i64 count, const int* values, int* counts)
{
    EACH_THREAD(i, count) {
        atomicAdd(counts, values[i]);
        atomicMin(counts + 1, values[i]);
        atomicMax(counts + 2, values[i]);
        atomicOr(counts + 3, 1 << values[i] % 32);
        while (atomicCAS(counts + 4, 0, 1)) __nanosleep(20);  // a lock
        const int old = counts[5];
        __threadfence();
        counts[5] = old + values[i];
        atomicExch(counts + 4, 0);
    }
}

// order: the threads in the order in which they ran.
extern "C" __global__ void run_order(i64 count, int* next, int* order)
{
    EACH_THREAD(i, count) {
        __syncwarp();
        order[atomicAdd(next, 1)] = (int)i;
    }
}

// What is in shared memory that nobody has written.
extern "C" __global__ void unwritten(int* out)
{
    __shared__ int garbage[2];
    if (threadIdx.x >= 2) return;
    out[threadIdx.x] = garbage[threadIdx.x];
    garbage[threadIdx.x] = 0;
}

extern "C" __global__ void write_behind_shared_memory(int by)
{
    __shared__ int small[4];
    if (threadIdx.x == 0) small[by] = 1;
}

// The errors, one for each value of `kind`.
extern "C" __global__ void go_wrong(int kind)
{
    if (kind == 0) {
        if (threadIdx.x < 100) __syncthreads();
    } else if (kind == 1) {
        if (threadIdx.x < 100) __syncthreads();
        else __syncthreads();
    } else if (kind == 2) {
        if (threadIdx.x % 32 < 31) __syncwarp();
    } else if (kind == 3) {
        if (threadIdx.x % 2) __syncwarp();
        else __ballot_sync(0xffffffffu, 1);
    } else if (kind == 4) {
        if (threadIdx.x % 2) __syncwarp(0xfffffffeu);
        else __syncwarp();
    } else if (kind == 5) {
        if (threadIdx.x % 32 < 16) __shfl_down_sync(0x0000ffffu, 1, 1);
    } else if (kind == 6) {
        if (threadIdx.x == 0) __syncwarp();
        else __syncthreads();
    } else if (kind == 7) {
        if (threadIdx.x % 32) __syncwarp(1);
    }
}

// Needs no fibers: nothing here, nor in what it calls, waits.
__device__ __forceinline__ int doubled(int value)
{
    return 2 * value;
}

extern "C" __global__ void double_all(i64 count, int* values)
{
    EACH_THREAD(i, count) values[i] = doubled(values[i]);
}
