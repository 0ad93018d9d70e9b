// Byte-pair merging of long pre-tokens; see merges.cu.

// Where a warp merges a longer pre-token: arrays in shared memory. Symbols are divided into blocks of 32, and lows[b] is
// the lowest pair of block b. A merge changes at most three blocks, and finding the lowest pair takes one step per 1,024
// symbols.
struct State {
    int* symbols;      // (32 * blocks,)
    unsigned* pairs;   // (32 * blocks,) the pair that begins with each symbol; NO_PAIR for those that do not exist
    unsigned* there;   // (blocks,) which symbols exist
    unsigned* lows;    // (blocks,)
};

// The next symbol after p that exists, or -1.
__device__ __forceinline__ int symbol_after(const State& state, int p, int blocks)
{
    int b = p / 32;
    unsigned bits = (unsigned)above(state.there[b], p % 32);
    while (!bits) {
        if (++b == blocks) return -1;
        bits = state.there[b];
    }
    return 32 * b + __ffs(bits) - 1;
}

// The previous symbol before p that exists, or -1.
__device__ __forceinline__ int symbol_before(const State& state, int p)
{
    int b = p / 32;
    unsigned bits = (unsigned)below(state.there[b], p % 32);
    while (!bits) {
        if (--b < 0) return -1;
        bits = state.there[b];
    }
    return 32 * b + 31 - __clz(bits);
}

// Computes the lowest pair of block b.
__device__ __forceinline__ void settle(const State& state, int b, int lane)
{
    const unsigned lowest = lowest_of_warp(state.pairs[32 * b + lane]);
    if (lane == 0) state.lows[b] = lowest;
}

// Merges pre-token j by one warp.
__device__ __forceinline__ void merge_by_warp(
    const Merges& tables, const State& state, int j, int lane, const u8* data, const int* start, const int* length,
    const int* to, int* ids, int* made)
{
    const int size = length[j], blocks = (size + 31) / 32;
    __syncwarp();  // the pre-token before has been written
    for (int b = 0; b < blocks; b++) {
        const int p = 32 * b + lane, id = p < size ? first_symbol(tables, data + start[j], p) : -1;
        state.symbols[p] = id;
        const unsigned there = __ballot_sync(ALL_LANES, id >= 0);
        if (lane == 0) state.there[b] = there;
    }
    __syncwarp();
    for (int b = 0; b < blocks; b++) {
        const int p = 32 * b + lane;
        const int next = state.there[b] >> lane & 1 ? symbol_after(state, p, blocks) : -1;
        state.pairs[p] = next < 0 ? NO_PAIR : pair_at(tables, p, state.symbols[p], state.symbols[next]);
        settle(state, b, lane);
    }
    __syncwarp();
    for (;;) {
        unsigned lowest = NO_PAIR;
        for (int b = lane; b < blocks; b += 32) lowest = lower(lowest, state.lows[b]);
        lowest = lowest_of_warp(lowest);
        if (lowest == NO_PAIR) break;
        // As in merge_middle.
        const int p = (int)(lowest % LONGEST), joined = tables.merged[lowest / LONGEST];
        const int gone = symbol_after(state, p, blocks);
        const int next = symbol_after(state, gone, blocks), last = symbol_before(state, p);
        __syncwarp();  // all lanes have read the masks
        if (lane == 0) {
            state.there[gone / 32] ^= 1u << gone % 32;
            state.symbols[p] = joined;
            state.pairs[gone] = NO_PAIR;
        }
        const int left = lane == 0 ? p : last, right = lane == 0 ? next : p;
        if (lane == 0 && right < 0) state.pairs[p] = NO_PAIR;
        else if (lane < 2 && left >= 0)
            state.pairs[left] = pair_at(
                tables, left, lane == 0 ? joined : state.symbols[left], lane == 0 ? state.symbols[right] : joined);
        __syncwarp();
        settle(state, p / 32, lane);
        if (last >= 0 && last / 32 != p / 32) settle(state, last / 32, lane);
        if (gone / 32 != p / 32) settle(state, gone / 32, lane);
        __syncwarp();
    }
    int count = 0;
    for (int b = 0; b < blocks; b++) {
        const unsigned there = state.there[b];
        if (there >> lane & 1) ids[to[j] + count + __popc((unsigned)below(there, lane))] = state.symbols[32 * b + lane];
        count += __popc(there);
    }
    if (lane == 0) made[j] = count;
}

// Pre-tokens of at most LONG bytes. One warp per pre-token.
extern "C" __global__ void merge_long(
    const int* bins, const int* number, const u8* data, const int* start, const int* length, const int* to, int by_letter,
    const u16* letter_pages, const int* letter_blocks, const int* byte_ids, const u64* pairs, u64 mask,
    const int* merged, int* ids, int* made)
{
    __shared__ int symbols[BLOCK / 32 * LONG];
    __shared__ unsigned beginning[BLOCK / 32 * LONG];
    __shared__ unsigned there[BLOCK / 32 * LONG / 32];
    __shared__ unsigned lows[BLOCK / 32 * LONG / 32];
    const int from = threadIdx.x / 32 * LONG;
    const State state = {symbols + from, beginning + from, there + from / 32, lows + from / 32};
    const Merges tables = {by_letter, letter_pages, letter_blocks, byte_ids, pairs, mask, merged};
    number += bins[bin_of(LONGEST)];
    EACH_WARP(i, bins[bin_of(LONG)]) merge_by_warp(tables, state, number[i], lane, data, start, length, to, ids, made);
}

// Pre-tokens of at most LONGEST bytes. One block per pre-token, of which one warp works: more of them would save steps
// when they search for the lowest pair, at most three for each merge, but wait for each other twice.
extern "C" __global__ void merge_longest(
    const int* bins, const int* number, const u8* data, const int* start, const int* length, const int* to, int by_letter,
    const u16* letter_pages, const int* letter_blocks, const int* byte_ids, const u64* pairs, u64 mask,
    const int* merged, int* ids, int* made)
{
    __shared__ int symbols[LONGEST];
    __shared__ unsigned beginning[LONGEST];
    __shared__ unsigned there[LONGEST / 32];
    __shared__ unsigned lows[LONGEST / 32];
    if (threadIdx.x >= 32) return;
    const State state = {symbols, beginning, there, lows};
    const Merges tables = {by_letter, letter_pages, letter_blocks, byte_ids, pairs, mask, merged};
    EACH_BLOCK(i, bins[bin_of(LONGEST)])
        merge_by_warp(tables, state, number[i], threadIdx.x, data, start, length, to, ids, made);
}
