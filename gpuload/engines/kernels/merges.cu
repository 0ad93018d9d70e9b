// Byte-pair merging: in each pre-token, merge the pair of lowest rank, the leftmost of equal ones, until no pair
// merges. `merge` of tokenizer/merges.py does the same in NumPy. A merge can create a pair of lower rank than all
// others, so the merges of a pre-token are made one after the other.
//
// The symbols of a pre-token (its ids during merging) are numbered by the byte at which they begin. A merge changes one
// symbol and removes the next one. The others keep their numbers; bit p of a mask says whether symbol p exists. Which
// kernel merges a pre-token depends on its length in bytes:
//
//     up to 24       one thread                                     merge_short
//     up to 64       four lanes of a warp                           merge_middle
//     up to 256      one warp                                       merge_long
//     up to 4,096    one warp, with a block's shared memory         merge_longest
//
// All of them have the symbols in shared memory. More lanes per pre-token make it faster, but all pre-tokens together
// slower, because most lanes wait. So each kernel takes what the shared memory of the one before does not hold.
//
// `number` lists the pre-tokens to merge by bins of their lengths, the longest first, so that the threads of a warp get
// pre-tokens of about the same length; bins[b] is the number of those in bin b. Each kernel finds its own among them, and
// writes the ids of pre-token j to ids[to[j]] and after, where there is a place for each of its bytes, and their number
// to made[j].

#define SHORT 24
#define MIDDLE 64
#define LONG 256
#define LONGEST 4096
#define NO_RANK (1 << 20)  // higher than every rank

// The bin of a length: 0 for merge_longest, 1 for merge_long, five for merge_middle, one per length for merge_short.
#define BINS 32
__device__ __forceinline__ constexpr int bin_of(int size)
{
    return size > LONG ? 0 : size > MIDDLE ? 1 : size > SHORT ? 2 + (MIDDLE - size) / 8 : 7 + SHORT - size;
}

// The number of pre-tokens in bins `low` to `high` - 1.
__device__ __forceinline__ int count_in_bins(const int* bins, int low, int high)
{
    int count = 0;
#pragma unroll 1
    for (int bin = low; bin < high; bin++) count += bins[bin];
    return count;
}

// A pair is compared as rank * LONGEST + number of its first symbol, so the leftmost of equal ranks is the lowest. The
// last symbol begins no pair, so no pair is equal to NO_PAIR.
#define NO_PAIR 0xffffffffu

// A tokenizer's tables. With byte fallback (`by_letter`), a character with an id is one symbol. The id of character c
// is letter_blocks[256 * letter_pages[c >> 8] + (c & 255)], negative if there is none.
struct Merges {
    int by_letter;
    const u16* letter_pages;
    const int *letter_blocks, *byte_ids;
    const u64* pairs;
    u64 mask;
    const int* merged;
};

// The symbol that begins at byte k before the first merge, or -1. A byte without an id is dropped.
__device__ __forceinline__ int first_symbol(const Merges& tables, const u8* bytes, int k)
{
    if (tables.by_letter) {
        int first = k;
        while (continues(bytes[first])) first--;  // pre-tokens begin with a character
        const int letter = code_point(bytes + first);
        const int id = tables.letter_blocks[256 * tables.letter_pages[letter >> 8] + (letter & 255)];
        if (id >= 0) return first == k ? id : -1;
    }
    return tables.byte_ids[bytes[k]];
}

// The rank of a pair, NO_RANK if it does not merge. A slot holds left id (21 bits), right id (21) and rank (20), so a
// look-up without a collision is one load.
__device__ __forceinline__ int pair_rank(const Merges& tables, int left, int right)
{
    const u64 found = find_pair(tables.pairs, tables.mask, left, right, 20);
    return found == EMPTY ? NO_RANK : (int)found & (NO_RANK - 1);
}

// The number to compare for the pair that begins with symbol p, NO_PAIR if it does not merge.
__device__ __forceinline__ unsigned pair_at(const Merges& tables, int p, int left, int right)
{
    const int rank = pair_rank(tables, left, right);
    return rank == NO_RANK ? NO_PAIR : (unsigned)rank * LONGEST + p;
}

// The bits of a mask above bit p, and below it.
__device__ __forceinline__ u64 above(u64 bits, int p)
{
    return bits & (~1ull << p);
}

__device__ __forceinline__ u64 below(u64 bits, int p)
{
    return bits & ((1ull << p) - 1);
}

__device__ __forceinline__ unsigned lower(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

// The minimum over the lanes of a warp. Turing has no instruction for it.
__device__ __forceinline__ unsigned lowest_of_warp(unsigned value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int by = 16; by; by /= 2) value = lower(value, __shfl_xor_sync(ALL_LANES, value, by));
    return value;
#else
    return __reduce_min_sync(ALL_LANES, value);
#endif
}

// The symbols of a thread in merge_short. 6 bytes for each: 21 bits of id and 20 of the rank of the pair that begins
// with it. Consecutive threads use consecutive words, so the lanes of a warp use different banks, whatever symbols they
// are at. A thread uses only its own words: no barrier is needed.
struct ShortState {
    unsigned* words;  // id, and above it the low 4 bits of the rank
    u16* highs;       // the other bits of the rank
};

__device__ __forceinline__ int id_of(const ShortState& state, int p)
{
    return (int)(state.words[p * BLOCK] & 0x1fffff);
}

__device__ __forceinline__ int rank_of(const ShortState& state, int p)
{
    return state.highs[p * BLOCK] << 4 | (int)(state.words[p * BLOCK] >> 21);
}

// Looks up the pair of the symbols p and q, and stores its rank. Returns 1 << p if it merges, else 0.
__device__ __forceinline__ unsigned join(const Merges& tables, const ShortState& state, int p, int q)
{
    const int id = id_of(state, p), rank = pair_rank(tables, id, id_of(state, q));
    if (rank == NO_RANK) return 0;
    state.words[p * BLOCK] = (unsigned)(id | (rank & 15) << 21);
    state.highs[p * BLOCK] = (u16)(rank >> 4);
    return 1u << p;
}

// Pre-tokens of at most SHORT bytes. One thread per pre-token.
extern "C" __global__ void merge_short(
    const int* bins, const int* number, const u8* data, const int* start, const int* length, const int* to, int by_letter,
    const u16* letter_pages, const int* letter_blocks, const int* byte_ids, const u64* pairs, u64 mask,
    const int* merged, int* ids, int* made)
{
    __shared__ unsigned words[SHORT * BLOCK];
    __shared__ u16 highs[SHORT * BLOCK];
    const ShortState state = {words + threadIdx.x, highs + threadIdx.x};
    const Merges tables = {by_letter, letter_pages, letter_blocks, byte_ids, pairs, mask, merged};
    number += count_in_bins(bins, 0, bin_of(SHORT));
    EACH_THREAD(i, count_in_bins(bins, bin_of(SHORT), BINS)) {
        const int j = number[i], size = length[j];
        unsigned there = 0;    // the symbols that exist
        unsigned merging = 0;  // those that begin a pair that merges
        int last = -1;
        for (int p = 0; p < size; p++) {
            const int id = first_symbol(tables, data + start[j], p);
            if (id < 0) continue;
            state.words[p * BLOCK] = (unsigned)id;
            there |= 1u << p;
            if (last >= 0) merging |= join(tables, state, last, p);
            last = p;
        }
        while (merging) {
            int lowest = NO_RANK, p = 0;  // the leftmost of equal ranks, because they are compared from left to right
            for (unsigned left = merging; left; left &= left - 1) {  // clears the lowest bit
                const int at = __ffs(left) - 1, rank = rank_of(state, at);
                if (rank < lowest) {
                    lowest = rank;
                    p = at;
                }
            }
            // Symbol p becomes the merged id, and the symbol after it is removed. The pairs that begin with p and with
            // the symbol before p are new.
            const int gone = __ffs((unsigned)above(there, p)) - 1;
            there ^= 1u << gone;
            state.words[p * BLOCK] = (unsigned)merged[lowest];
            const unsigned after = (unsigned)above(there, p), before = (unsigned)below(there, p);
            merging &= ~(1u << gone | 1u << p);
            if (after) merging |= join(tables, state, p, __ffs(after) - 1);
            if (before) {
                last = 31 - __clz(before);
                merging = (merging & ~(1u << last)) | join(tables, state, last, p);
            }
        }
        int* out = ids + to[j];
        for (unsigned left = there; left; left &= left - 1) *out++ = id_of(state, __ffs(left) - 1);
        made[j] = __popc(there);
    }
}

// Pre-tokens of at most MIDDLE bytes. Four lanes per pre-token; lane `own` of them has the symbols own, own + 4 and so
// on. Lanes without a pre-token, or whose pre-token is finished, go through the same steps, because the collectives are
// those of the whole warp.
extern "C" __global__ void merge_middle(
    const int* bins, const int* number, const u8* data, const int* start, const int* length, const int* to, int by_letter,
    const u16* letter_pages, const int* letter_blocks, const int* byte_ids, const u64* pairs, u64 mask,
    const int* merged, int* ids, int* made)
{
    // Symbol p of the warp's pre-token g is at 8 * p + g. So the lanes of a warp use different banks if all of them are
    // at symbol own + 4 * k for the same k.
    __shared__ int symbols[BLOCK / 4 * MIDDLE];
    __shared__ unsigned beginning[BLOCK / 4 * MIDDLE];
    const Merges tables = {by_letter, letter_pages, letter_blocks, byte_ids, pairs, mask, merged};
    number += count_in_bins(bins, 0, bin_of(MIDDLE));
    const int count = count_in_bins(bins, bin_of(MIDDLE), bin_of(SHORT));
    EACH_WARP(warp, (count + 7) / 8) {
        const int own = lane % 4, g = lane / 4, from = threadIdx.x / 32 * (8 * MIDDLE) + g;
        int* symbol = symbols + from;
        unsigned* pair = beginning + from;  // the pair that begins with each symbol; NO_PAIR: there is none
        const i64 i = 8 * warp + g;
        const int j = i < count ? number[i] : 0, size = i < count ? length[j] : 0;
        u64 there = 0;  // the symbols that exist
        __syncwarp();   // all lanes have read the symbols of the pre-token before
#pragma unroll 1  // unrolled, these loops would need too many registers
        for (int k = 0; k < MIDDLE / 4; k++) {
            const int p = 4 * k + own, id = p < size ? first_symbol(tables, data + start[j], p) : -1;
            symbol[8 * p] = id;
            there |= (u64)(__ballot_sync(ALL_LANES, id >= 0) >> 4 * g & 0xf) << 4 * k;
        }
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < MIDDLE / 4; k++) {
            const int p = 4 * k + own;
            const u64 after = there >> p & 1 ? above(there, p) : 0;
            pair[8 * p] = after ? pair_at(tables, p, symbol[8 * p], symbol[8 * (__ffsll(after) - 1)]) : NO_PAIR;
        }
        for (;;) {
            unsigned lowest = NO_PAIR;
#pragma unroll 1
            for (int p = own; p < size; p += 16)
                for (int k = 0; k < 16; k += 4) lowest = lower(lowest, pair[8 * (p + k)]);
            for (int by = 2; by; by /= 2) lowest = lower(lowest, __shfl_xor_sync(ALL_LANES, lowest, by));
            if (!__any_sync(ALL_LANES, lowest != NO_PAIR)) break;
            __syncwarp();  // all lanes have read the pairs: shuffles do not order accesses to memory
            if (lowest != NO_PAIR) {
                // As in merge_short. All four lanes compute the same p, gone, last and next. Lane 0 looks up the pair
                // that begins with symbol p, lane 1 the one before it.
                const int p = (int)(lowest % LONGEST), joined = merged[lowest / LONGEST];
                const int gone = __ffsll(above(there, p)) - 1;
                there ^= 1ull << gone;
                const int last = 63 - __clzll(below(there, p)), next = __ffsll(above(there, p)) - 1;  // -1: none
                if (own == 2) symbol[8 * p] = joined;
                if (own == 3) pair[8 * gone] = NO_PAIR;
                if (own == 0 && next < 0) pair[8 * p] = NO_PAIR;
                if (own < 2 && (own ? last : next) >= 0) {
                    const int at = own ? last : p;
                    pair[8 * at] = pair_at(tables, at, own ? symbol[8 * last] : joined, own ? joined : symbol[8 * next]);
                }
            }
            __syncwarp();
        }
#pragma unroll 1
        for (int k = 0; k < MIDDLE / 4; k++) {
            const int p = 4 * k + own;
            if (there >> p & 1) ids[to[j] + __popcll(below(there, p))] = symbol[8 * p];
        }
        if (own == 0 && i < count) made[j] = __popcll(there);
    }
}
