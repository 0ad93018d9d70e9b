// Whole-word look-ups: pre-tokens that become one id. The tables are those of tokenizer/merges.py.

#define TO_MERGE (-1)  // instead of an id: the pre-token is no entry and has to be merged
#define SHORT_WORD 16  // longer pre-tokens have a table of their own

// The bytes of a pre-token of 1 to 16 bytes, padded with zeros, as two little-endian words.
//
// A pre-token may begin at any address, but words are loaded from multiples of 8. One to three of these contain it.
// They also contain other bytes, up to 7 before and 7 after it, which need not belong to `data`: if they do not, at
// either end of `data`, bytes are loaded one by one.
__device__ __forceinline__ ulonglong2 padded_word(i64 bytes, const u8* data, i64 start, int size)
{
    const int before = (int)((u64)(data + start) % 8);
    const int words = (before + size + 7) / 8;
    u64 low = 0, high = 0;
    if (start >= before && start - before + 8 * words <= bytes) {
        const u64* word = (const u64*)(data + start - before);
        const u64 first = word[0], second = words > 1 ? word[1] : 0, third = words > 2 ? word[2] : 0;
        // Shifts by 1 and then by 63 - 8 * before: one by 64 would be undefined.
        low = first >> 8 * before | second << 1 << (63 - 8 * before);
        high = second >> 8 * before | third << 1 << (63 - 8 * before);
    } else {
        for (int k = 0; k < size; k++) (k < 8 ? low : high) |= (u64)data[start + k] << 8 * (k % 8);
    }
    // Clear the bytes after the pre-token.
    low &= size < 8 ? ~0ull >> (64 - 8 * size) : ~0ull;
    high &= size > 8 ? ~0ull >> (128 - 8 * size) : 0;
    return {low, high};
}

// The id of a pre-token of 1 to 16 bytes, or TO_MERGE. A slot has 32 bytes, one sector of memory: a padded word, the
// number of its bytes, 0 if the slot is empty, and the id. The hash is `hash_words` of tokenizer/hash_tables.py.
__device__ __forceinline__ int short_word(i64 bytes, const u8* data, i64 start, int size, const u64* words, u64 mask)
{
    const ulonglong2 wanted = padded_word(bytes, data, start, size);
    for (u64 slot = pair_hash(wanted.x ^ wanted.y * MIX) & mask;; slot = (slot + 1) & mask) {
        const ulonglong2 word = ((const ulonglong2*)words)[2 * slot], rest = ((const ulonglong2*)words)[2 * slot + 1];
        if (word.x == wanted.x && word.y == wanted.y && rest.x == (u64)size) return (int)rest.y;
        if (rest.x == 0) return TO_MERGE;
    }
}

// The hash of a pre-token: 64-bit FNV-1a, mixed so that both the low bits (the slot) and the high bits (the tag)
// are usable; `hash_bytes` of tokenizer/hash_tables.py.
__device__ __forceinline__ u64 bytes_hash(const u8* bytes, int size)
{
    u64 hash = 0xcbf29ce484222325ull;
    for (int k = 0; k < size; k++) hash = (hash ^ bytes[k]) * 0x100000001b3ull;
    hash = (hash ^ (hash >> 32)) * MIX;
    return hash ^ (hash >> 29);
}

// The id of a longer pre-token, or TO_MERGE. A slot holds the high half of an entry's hash as a tag, and the entry's
// number. Equal tags do not imply equal bytes, so these are compared.
__device__ __forceinline__ int long_word(
    const u8* bytes, int size, const u64* words, u64 mask, const u8* word_bytes, const int* offsets, const int* ids)
{
    const u64 hash = bytes_hash(bytes, size);
    for (u64 slot = hash & mask; words[slot] != EMPTY; slot = (slot + 1) & mask) {
        const u64 found = words[slot];
        if (found >> 32 != hash >> 32) continue;
        const int entry = (int)found, at = offsets[entry];
        if (offsets[entry + 1] - at != size) continue;
        int same = 0;
        while (same < size && bytes[same] == word_bytes[at + same]) same++;
        if (same == size) return ids[entry];
    }
    return TO_MERGE;
}
