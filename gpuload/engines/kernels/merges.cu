// Byte-pair merging, a thread per piece: the pair of lowest rank, the leftmost of equals, until none is left. The
// definition is merges.merge of tokenizer/merges.py.
//
// A piece's state lies in global memory, words of 32 bits: for every 32 symbols a block,
//     the lowest rank in it * 32 + the place of that pair, which symbols are still there as bits, 32 * { id, rank }
// A symbol's rank is that of the pair it is the left one of, NO_RANK where that does not merge. To find the lowest rank
// is to look at each block once, and a merge changes one block, at most three: n / 32 + 32 steps instead of n.
//
// The states of 32 pieces lie interleaved, so that the threads of a warp, at the same place each in its own piece, read
// neighbouring words. Pieces are sorted by length: neighbours take equally long. Group g of 32 pieces begins at word
// group[g], and is as large as its longest piece needs.

#define NO_RANK (1 << 20)

// Where a piece's state begins; its next word is 32 further.
__device__ __forceinline__ int* state_of(i64 piece, const i64* group, int* scratch)
{
    return scratch + group[piece / 32] + piece % 32;
}

// The id of symbol p; its rank is 32 further.
__device__ __forceinline__ int* symbol(int* state, unsigned p)
{
    return state + 64 * (p + p / 32 + 1);
}

// The lowest pair of block b; its bits are 32 further.
__device__ __forceinline__ int* block(int* state, unsigned b)
{
    return state + 2112 * b;
}

// The rank of a pair: one load where nothing collides.
__device__ __forceinline__ int pair_rank(const u64* pairs, u64 mask, int left, int right)
{
    const u64 key = (u64)left << 21 | (u64)right;
    for (u64 slot = pair_hash(key) & mask;; slot = (slot + 1) & mask) {
        const u64 found = pairs[slot];
        if (found >> 20 == key) return (int)found & (NO_RANK - 1);
        if (found == EMPTY) return NO_RANK;
    }
}

// Finds the lowest pair of block b anew. Of equal ranks the leftmost is the lowest number.
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

// The nearest symbol after p that is still there, -1 for none.
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

// The nearest symbol before p that is still there, -1 for none.
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

// The symbols that pieces begin as: one for each byte that has an id. size[i] is how many.
// Piece i of `count` is number piece[i] of all.
extern "C" __global__ void lay_bytes(
    i64 count, const int* piece, const u8* data, const int* start, const int* length, const int* byte_ids,
    const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const u8* bytes = data + start[piece[i]];
        const int end = length[piece[i]];
        int symbols = 0;
        for (int k = 0; k < end; k++) {
            const int id = byte_ids[bytes[k]];
            if (id >= 0) *symbol(state, symbols++) = id;
        }
        size[i] = symbols;
    }
}

// The same where characters are merged: one for each character that has an id, else one for each of its bytes.
// The id of character c is letter_blocks[256 * letter_pages[c >> 8] + (c & 255)], below 0 for none. Pieces are UTF-8.
extern "C" __global__ void lay_letters(
    i64 count, const int* piece, const u8* data, const int* start, const int* length, const u16* letter_pages,
    const int* letter_blocks, const int* byte_ids, const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const u8* bytes = data + start[piece[i]];
        const int end = length[piece[i]];
        int symbols = 0;
        bool known = false;  // whether the character that byte k is of has an id
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

// Merges `count` pieces. size[i] symbols become size[i] ids, at the places of the first symbols.
extern "C" __global__ void merge_pieces(
    i64 count, const u64* pairs, u64 mask, const int* merged, const i64* group, int* scratch, int* size)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        const int symbols = size[i], blocks = (symbols + 31) / 32;

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
            int lowest = NO_RANK * 32, p = 0;
            for (int b = 0; b < blocks; b++) {
                const int pair = *block(state, b);
                if (pair / 32 < lowest / 32) {
                    lowest = pair;
                    p = 32 * b + pair % 32;
                }
            }
            if (lowest >= NO_RANK * 32) break;

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

        int ids = 0;
        for (int b = 0; b < blocks; b++)
            for (unsigned there = block(state, b)[32]; there; there &= there - 1)
                *symbol(state, ids++) = *symbol(state, 32 * b + __ffs(there) - 1);
        size[i] = ids;
    }
}

// The ids of merged pieces, one piece after the other: those of piece i begin at offsets[i].
extern "C" __global__ void collect(
    i64 count, const i64* group, int* scratch, const int* offsets, int* ids)
{
    EACH_THREAD(i, count) {
        int* state = state_of(i, group, scratch);
        for (int k = 0; k < offsets[i + 1] - offsets[i]; k++) ids[offsets[i] + k] = *symbol(state, k);
    }
}

// The same ids to where their pieces' ids go: those of piece number piece[i] of all to to[piece[i]].
extern "C" __global__ void write_merged(
    i64 count, const int* piece, const int* offsets, const int* ids, const int* to, int* out)
{
    EACH_THREAD(i, count) {
        int* target = out + to[piece[i]];
        for (int k = offsets[i]; k < offsets[i + 1]; k++) *target++ = ids[k];
    }
}
