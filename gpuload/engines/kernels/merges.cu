// Byte-pair merging: in each pre-token, merge the pair of lowest rank, the leftmost of equal ones, until no pair
// merges. `merge` of tokenizer/merges.py does the same in NumPy. One thread per pre-token.
//
// A thread's state is an array of 32-bit words in global memory. The symbols of a pre-token (its ids during merging)
// are divided into blocks of 32, and each block is stored as
//
//     the minimum of rank * 32 + position over its symbols      1 word
//     bits: which symbols still exist                           1 word
//     id and rank of each symbol                                32 * 2 words
//
// where a symbol's rank is the rank of the pair that begins with it, NO_RANK if that pair does not merge. Finding the
// lowest rank takes one step per block. A merge changes the ranks of two symbols and removes one, so it changes at most
// three blocks, whose minimum is computed again. That is n / 32 + 32 to 96 steps per merge instead of n, and removing a
// symbol moves no others.
//
// The states of 32 pre-tokens are interleaved: word k of pre-token i is at group[i / 32] + i % 32 + 32 * k. So when the
// threads of a warp access the same word of their states, the addresses are consecutive (coalesced). Pre-tokens are
// sorted by length, so the threads of a warp take about equally long. Group g of 32 pre-tokens begins at word group[g]
// and is as large as its longest pre-token needs: 32 * (2 * symbols + 2 * blocks) words.

#define NO_RANK (1 << 20)  // higher than every rank; rank * 32 + position fits an int

// The first word of a pre-token's state; its next word is 32 further.
__device__ __forceinline__ int* state_of(i64 pretoken, const i64* group, int* scratch)
{
    return scratch + group[pretoken / 32] + pretoken % 32;
}

// The id of symbol p; its rank is 32 further. Before it there are 2 words for each of p / 32 + 1 blocks and 2 for each
// of p symbols, each with a stride of 32: 32 * (2 * p + 2 * (p / 32 + 1)).
__device__ __forceinline__ int* symbol(int* state, unsigned p)
{
    return state + 64 * (p + p / 32 + 1);
}

// The minimum of block b; its bits are 32 further. A full block has 2 + 64 words with a stride of 32: 2112.
__device__ __forceinline__ int* block(int* state, unsigned b)
{
    return state + 2112 * b;
}

// The rank of a pair, NO_RANK if it does not merge. A slot holds left id (21 bits), right id (21) and rank (20), so a
// look-up without a collision is one load.
__device__ __forceinline__ int pair_rank(const u64* pairs, u64 mask, int left, int right)
{
    const u64 key = (u64)left << 21 | (u64)right;
    for (u64 slot = pair_hash(key) & mask;; slot = (slot + 1) & mask) {
        const u64 found = pairs[slot];
        if (found >> 20 == key) return (int)found & (NO_RANK - 1);
        if (found == EMPTY) return NO_RANK;
    }
}

// Computes the minimum of block b. Positions are the low bits of the numbers compared, so the leftmost of equal ranks
// wins. `there &= there - 1` clears the lowest bit.
__device__ __forceinline__ void settle(int* state, int b)
{
    int lowest = NO_RANK * 32;
    for (unsigned there = block(state, b)[32]; there; there &= there - 1) {
        const int place = __ffs(there) - 1;
        const int pair = symbol(state, 32 * b + place)[32] * 32 + place;
        if (pair < lowest) lowest = pair;
    }
    *block(state, b) = lowest;
}

// The next symbol after p that still exists, or -1. The mask clears the bits up to and including p; for p % 32 = 31,
// 2u << 31 is 0, and so is the mask.
__device__ __forceinline__ int after(int* state, int p, int blocks)
{
    int b = p / 32;
    unsigned there = block(state, b)[32] & (0u - (2u << p % 32));
    while (!there) {
        if (++b == blocks) return -1;
        there = block(state, b)[32];
    }
    return 32 * b + __ffs(there) - 1;
}

// The previous symbol before p that still exists, or -1.
__device__ __forceinline__ int before(int* state, int p)
{
    int b = p / 32;
    unsigned there = block(state, b)[32] & ((1u << p % 32) - 1);
    while (!there) {
        if (--b < 0) return -1;
        there = block(state, b)[32];
    }
    return 32 * b + 31 - __clz(there);
}

// Writes the initial symbols of byte-level pre-tokens: one for each byte with an id; a byte without an id is dropped.
// size[i] is their number. Thread i of `count` works on pre-token number[i].
extern "C" __global__ void lay_bytes(
    i64 count, const int* number, const u8* data, const int* start, const int* length, const int* byte_ids,
    const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const u8* bytes = data + start[number[i]];
        const int end = length[number[i]];
        int symbols = 0;
        for (int k = 0; k < end; k++) {
            const int id = byte_ids[bytes[k]];
            if (id >= 0) *symbol(state, symbols++) = id;
        }
        size[i] = symbols;
    }
}

// The same for tokenizers with byte fallback: one symbol for each character with an id, and for other characters one
// for each byte. The id of character c is letter_blocks[256 * letter_pages[c >> 8] + (c & 255)], negative if there is
// none.
extern "C" __global__ void lay_letters(
    i64 count, const int* number, const u8* data, const int* start, const int* length, const u16* letter_pages,
    const int* letter_blocks, const int* byte_ids, const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const u8* bytes = data + start[number[i]];
        const int end = length[number[i]];
        int symbols = 0;
        bool known = false;  // whether the character that contains byte k has an id
        for (int k = 0; k < end; k++) {
            int id = -1;
            if (!continues(bytes[k])) {
                const int letter = code_point(bytes + k);
                id = letter_blocks[256 * letter_pages[letter >> 8] + (letter & 255)];
                known = id >= 0;
            }
            if (!known) id = byte_ids[bytes[k]];
            if (id >= 0) *symbol(state, symbols++) = id;
        }
        size[i] = symbols;
    }
}

// Merges `count` pre-tokens. size[i] is the number of symbols before and of ids after; the ids replace the first
// symbols.
extern "C" __global__ void merge_pretokens(
    i64 count, const u64* pairs, u64 mask, const int* merged, const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const int symbols = size[i], blocks = (symbols + 31) / 32;

        // Fill in ranks, bits and minima. `id` is the symbol at p, loaded one step before.
        int id = symbols ? *symbol(state, 0) : 0;
        for (int b = 0; b < blocks; b++) {
            const int here = symbols - 32 * b < 32 ? symbols - 32 * b : 32;
            for (int p = 32 * b; p < 32 * b + here; p++) {
                int rank = NO_RANK;
                if (p + 1 < symbols) {
                    const int next = *symbol(state, p + 1);
                    rank = pair_rank(pairs, mask, id, next);
                    id = next;
                }
                symbol(state, p)[32] = rank;
            }
            block(state, b)[32] = (int)(0xffffffffu >> (32 - here));
            settle(state, b);
        }

        for (;;) {
            // The lowest rank of all blocks, compared without the position: the first block with it is the leftmost.
            int lowest = NO_RANK * 32, p = 0;
            for (int b = 0; b < blocks; b++) {
                const int pair = *block(state, b);
                if (pair / 32 < lowest / 32) {
                    lowest = pair;
                    p = 32 * b + pair % 32;
                }
            }
            if (lowest >= NO_RANK * 32) break;

            // Symbol p becomes the merged id, the symbol after it is removed. Then the pairs that begin with p and with
            // the symbol before p are new.
            const int gone = after(state, p, blocks);
            block(state, gone / 32)[32] ^= 1 << gone % 32;
            id = merged[lowest / 32];
            *symbol(state, p) = id;
            const int next = after(state, gone, blocks), last = before(state, p);
            symbol(state, p)[32] = next < 0 ? NO_RANK : pair_rank(pairs, mask, id, *symbol(state, next));
            if (last >= 0) {
                symbol(state, last)[32] = pair_rank(pairs, mask, *symbol(state, last), id);
                if (last / 32 != p / 32) settle(state, last / 32);
            }
            settle(state, p / 32);
            if (gone / 32 != p / 32) settle(state, gone / 32);
        }

        // Move the remaining ids to the front. ids never exceeds the position that is read.
        int ids = 0;
        for (int b = 0; b < blocks; b++)
            for (unsigned there = block(state, b)[32]; there; there &= there - 1)
                *symbol(state, ids++) = *symbol(state, 32 * b + __ffs(there) - 1);
        size[i] = ids;
    }
}

// Copies the ids of merged pre-tokens out of the states, end to end: those of thread i begin at ids[offsets[i]].
extern "C" __global__ void collect(
    i64 count, const i64* group, int* scratch, const int* offsets, int* ids)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        for (int k = 0; k < offsets[i + 1] - offsets[i]; k++) ids[offsets[i] + k] = *symbol(state, k);
    }
}

// Copies these ids to their final positions: those of pre-token number[i] begin at out[to[number[i]]].
extern "C" __global__ void write_merged(
    i64 count, const int* number, const int* offsets, const int* ids, const int* to, int* out)
{
    EACH_THREAD(i, count) {
        int* target = out + to[number[i]];
        for (int k = offsets[i]; k < offsets[i + 1]; k++) *target++ = ids[k];
    }
}
