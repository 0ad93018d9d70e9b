// Shared by kernels that number items in one pass: prefix sums over lanes, threads and tiles.

// The sum of `own` over all tiles before this one: decoupled look-back (Merrill and Garland, 2016). Called by one warp
// of the block that has the tile. Tiles are handed out in order, so those before this one have been started and do not
// wait for it. state[t], 0 at first, becomes 4 * sum + 1 for the sum of tile t alone, or 4 * sum + 2 for that of all tiles
// up to t.
__device__ __forceinline__ u64 sum_of_tiles_before(u64* state, i64 tile, u64 own, int lane)
{
    if (lane == 0) atomicExch(state + tile, own << 2 | (tile ? 1 : 2));
    u64 sum = 0;
    for (i64 high = tile; high > 0; high -= 32) {
        const i64 other = high - 1 - lane;
        u64 found = other < 0 ? 2 : *(volatile u64*)(state + other);
        [[maybe_unused]] int rounds = 0;
        while (__any_sync(ALL_LANES, !found)) {
            __nanosleep(20);
            WAITED(rounds);
            found = other < 0 ? 2 : *(volatile u64*)(state + other);
        }
        const unsigned complete = __ballot_sync(ALL_LANES, (found & 2) != 0);
        u64 part = !complete || lane < __ffs((int)complete) ? found >> 2 : 0;
        for (int by = 16; by; by /= 2) part += __shfl_xor_sync(ALL_LANES, part, by);
        sum += part;
        if (complete) break;
    }
    if (lane == 0 && tile) atomicExch(state + tile, (own + sum) << 2 | 2);
    return sum;
}

// The sum of `value` over the lanes of a warp up to the calling one.
__device__ __forceinline__ int sum_of_lanes(int value, int lane)
{
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, value, by);
        if (lane >= by) value += other;
    }
    return value;
}

// The sum of `value` over the lanes of a warp. Turing has no instruction for it.
__device__ __forceinline__ int sum_of_warp(int value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(ALL_LANES, value, by);
    return value;
#else
    return __reduce_add_sync(ALL_LANES, value);
#endif
}

// The sum of `value` over the threads of a block before the calling one; in `total`, over all of them. `sums` is in
// shared memory. Contains a barrier; the caller needs another one before the next call.
__device__ __forceinline__ int sum_of_threads_before(int value, int* sums, int& total)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = sum_of_lanes(value, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = sum - value;
    total = 0;
    for (int other = 0; other < BLOCK / 32; other++) {
        if (other < warp) before += sums[other];
        total += sums[other];
    }
    return before;
}

// The first of `count` ascending offsets that is at least `at`; `count` if there is none.
__device__ __forceinline__ i64 first_offset(const i64* offsets, i64 count, i64 at)
{
    i64 low = 0;
    for (i64 high = count; low < high;) {
        const i64 middle = low + (high - low) / 2;
        if (offsets[middle] < at) low = middle + 1;
        else high = middle;
    }
    return low;
}
