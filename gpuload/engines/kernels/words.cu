// Whole-word look-ups: pre-tokens that become one id. The tables are those of tokenizer/merges.py.
//
// known[j] is what is known of pre-token j. If it is not negative, it is the pre-token's only id. Otherwise it is
// ~(number of ids), which are stored elsewhere: NO_IDS is ~0. TO_MERGE marks pre-tokens that still have to be merged.

#define TO_MERGE (-2147483647 - 1)
#define NO_IDS (-1)

// The hash of a pre-token: 64-bit FNV-1a, mixed so that both the low bits (the slot) and the high bits (the tag) are
// usable; `hash_bytes` of tokenizer/hash_tables.py.
__device__ __forceinline__ u64 word_hash(const u8* bytes, int length)
{
    u64 hash = 0xcbf29ce484222325ull;
    for (int k = 0; k < length; k++) hash = (hash ^ bytes[k]) * 0x100000001b3ull;
    hash = (hash ^ (hash >> 32)) * MIX;
    return hash ^ (hash >> 29);
}

// Looks up m pre-tokens. One thread per pre-token.
//
// A negative length is an added token's ~id. No entry has more than `longest` bytes, so longer pre-tokens are not
// hashed. A slot holds the high half of an entry's hash as a tag, and the entry's number. Equal tags do not imply equal
// bytes, so these are compared.
extern "C" __global__ void look_up_words(
    i64 pretokens, const u8* data, const int* start, const int* length, const u64* words, u64 mask,
    const u8* word_bytes, const int* word_offsets, const int* word_ids, int longest, int* known)
{
    EACH_THREAD(j, pretokens) {
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
        known[j] = id;
    }
}

// Sets all pre-tokens of some texts to no ids: texts that fall back. One warp per text.
extern "C" __global__ void drop_pretokens(i64 texts, const i64* text, const i64* first, int* known)
{
    EACH_WARP(i, texts) {
        for (i64 j = first[text[i]] + lane; j < first[text[i] + 1]; j += 32) known[j] = NO_IDS;
    }
}

// Writes the ids of all pre-tokens that have one. One thread per pre-token; its ids begin at out[offsets[j]].
extern "C" __global__ void write_words(i64 pretokens, const int* known, const int* offsets, int* out)
{
    EACH_THREAD(j, pretokens) {
        if (known[j] >= 0) out[offsets[j]] = known[j];
    }
}
