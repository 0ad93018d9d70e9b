// Pieces that are one id: added tokens, and entries of the vocabulary. Tables and hash are those of tokenizer/merges.py.
//
// What is known of piece j is one[j]: its id; or, below 0, ~ of how many ids it has, which lie elsewhere. A piece that is
// still to be merged is TO_MERGE there, and one of no ids is NO_IDS.

#define TO_MERGE (-2147483647 - 1)
#define NO_IDS (-1)

// The hash of a piece: FNV-1a, mixed so that both ends are good.
__device__ __forceinline__ u64 word_hash(const u8* bytes, int length)
{
    u64 hash = 0xcbf29ce484222325ull;
    for (int k = 0; k < length; k++) hash = (hash ^ bytes[k]) * 0x100000001b3ull;
    hash = (hash ^ (hash >> 32)) * MIX;
    return hash ^ (hash >> 29);
}

// one[j] for m pieces. No entry is of more than `longest` bytes. Bytes decide, not hashes. A thread per piece.
extern "C" __global__ void look_up_words(
    i64 pieces, const u8* data, const int* start, const int* length, const u64* words, u64 mask, const u8* word_bytes,
    const int* word_offsets, const int* word_ids, int longest, int* one)
{
    EACH_THREAD(j, pieces) {
        const int size = length[j];
        int id = size < 0 ? ~size : size == 0 ? NO_IDS : TO_MERGE;
        if (size > 0 && size <= longest) {
            const u8* bytes = data + start[j];
            const u64 hash = word_hash(bytes, size);
            for (u64 slot = hash & mask; words[slot] != EMPTY; slot = (slot + 1) & mask) {
                const u64 found = words[slot];
                if (found >> 32 != hash >> 32) continue;
                const int entry = (int)found, at = word_offsets[entry];
                if (word_offsets[entry + 1] - at != size) continue;
                int same = 0;
                while (same < size && bytes[same] == word_bytes[at + same]) same++;
                if (same == size) {
                    id = word_ids[entry];
                    break;
                }
            }
        }
        one[j] = id;
    }
}

// All pieces of some texts have no ids. A warp per text.
extern "C" __global__ void drop_pieces(i64 texts, const i64* text, const i64* first, int* one)
{
    EACH_WARP(i, texts) {
        for (i64 j = first[text[i]] + lane; j < first[text[i] + 1]; j += 32) one[j] = NO_IDS;
    }
}

// The ids of all pieces that are one id, each to its place. A thread per piece.
extern "C" __global__ void write_words(i64 pieces, const int* one, const int* offsets, int* out)
{
    EACH_THREAD(j, pieces) {
        if (one[j] >= 0) out[offsets[j]] = one[j];
    }
}
