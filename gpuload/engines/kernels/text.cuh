// Shared by the kernels that split texts into pre-tokens (engines/device/pretokenize.py): marks, and access to UTF-8.
//
// The texts lie end to end in `data`, and `marks` has one byte for each byte of text. A section extends from a byte
// marked BEGINS to the next byte with any other mark than GOES_ON. At first the sections are the texts; after the
// search for added tokens, the text between these; at the end, the pre-tokens.
//
// Work is divided into chunks of `step` bytes, wherever texts begin and end. A chunk's thread handles the code points
// whose first byte is in the chunk; it may read bytes before and after it. Texts are valid UTF-8 (checked when they
// were rendered), so reading the bytes of a code point never leaves its text.

enum {
    GOES_ON,  // belongs to the same section as the byte before
    BEGINS,   // the first byte of a section
    NOTHING,  // in no section: white space removed next to an added token, or a part that a split drops
    TOKEN,    // the first byte of an added token
    IN_TOKEN  // a further byte of an added token
};

// Whether a byte is a continuation byte (10xxxxxx), that is, not the first one of a code point.
__device__ __forceinline__ bool continues(u8 byte)
{
    return (byte & 0xc0) == 0x80;
}

// The number of bytes of a code point, from its first byte.
__device__ __forceinline__ int width_of(u8 lead)
{
    return 1 + (lead >= 0xc0) + (lead >= 0xe0) + (lead >= 0xf0);
}

// The code point whose first byte is text[0].
__device__ __forceinline__ int code_point(const u8* text)
{
    const int lead = text[0];
    if (lead < 0x80) return lead;
    if (lead < 0xe0) return (lead & 0x1f) << 6 | (text[1] & 0x3f);
    if (lead < 0xf0) return (lead & 0x0f) << 12 | (text[1] & 0x3f) << 6 | (text[2] & 0x3f);
    return (lead & 0x07) << 18 | (text[1] & 0x3f) << 12 | (text[2] & 0x3f) << 6 | (text[3] & 0x3f);
}

// The position of the code point that ends before `at`. There must be one.
__device__ __forceinline__ i64 back(const u8* data, i64 at)
{
    do at--;
    while (continues(data[at]));
    return at;
}

// The class of the code point at `text`: a look-up in the two-level table of a ClassMap (tokenizer/classes.py). The
// page of ASCII is always block 0, because blocks are numbered in order of appearance: one load for most text.
__device__ __forceinline__ int class_of(const u8* text, const u16* pages, const u8* values)
{
    if (text[0] < 0x80) return values[text[0]];
    const int code = code_point(text);
    return values[(int)pages[code >> 8] << 8 | (code & 255)];
}

// The slot of a pair of 21-bit numbers in a hash table of pairs (tokenizer/hash_tables.py), or EMPTY. A slot holds the
// pair in its high bits, and `below` bits of something else.
__device__ __forceinline__ u64 find_pair(const u64* table, u64 mask, int left, int right, int below)
{
    const u64 key = (u64)left << 21 | (u64)right;
    // Ends: at least half of the slots are empty. EMPTY is the slot of no pair: `key` has 42 bits.
    for (u64 slot = pair_hash(key) & mask;; slot = (slot + 1) & mask) {
        const u64 found = table[slot];
        if (found >> below == key || found == EMPTY) return found;
    }
}

// The text that contains byte `at`, or whatever else `offsets` counts, by binary search: the last one with an offset of
// at most `at`. Empty texts before it have the same offset, so the last one is never empty.
__device__ __forceinline__ i64 text_at(const i64* offsets, i64 texts, i64 at)
{
    i64 text = 0;  // offsets[text] <= at < offsets[above]
    for (i64 above = texts; above - text > 1;) {
        const i64 middle = text + (above - text) / 2;
        if (offsets[middle] <= at) text = middle;
        else above = middle;
    }
    return text;
}

__device__ __forceinline__ i64 least(i64 a, i64 b)
{
    return a < b ? a : b;
}
