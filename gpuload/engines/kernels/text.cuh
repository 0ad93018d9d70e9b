// What the kernels that cut texts into pieces share (engines/pieces.py): marks, and UTF-8 that is known to be valid.
//
// Texts lie end to end in `data`, and `marks` has a byte for each of theirs. A section is the bytes from one BEGINS to
// the next byte that is marked at all: a text at first, then what is left between added tokens, and pieces at last.
// Work is by chunks of `step` bytes, whatever lies in them; what concerns a code point is done where its first byte is.

enum {
    GOES_ON,  // with the byte before it
    BEGINS,   // a section
    NOTHING,  // belongs to no section: white space that an added token swallowed, what a split drops
    TOKEN,    // the first byte of an added token
    IN_TOKEN  // its other bytes
};

__device__ __forceinline__ bool continues(u8 byte)
{
    return (byte & 0xc0) == 0x80;
}

// How many bytes a code point has.
__device__ __forceinline__ int width_of(u8 lead)
{
    return 1 + (lead >= 0xc0) + (lead >= 0xe0) + (lead >= 0xf0);
}

__device__ __forceinline__ int code_point(const u8* text)
{
    const int lead = text[0];
    if (lead < 0x80) return lead;
    if (lead < 0xe0) return (lead & 0x1f) << 6 | (text[1] & 0x3f);
    if (lead < 0xf0) return (lead & 0x0f) << 12 | (text[1] & 0x3f) << 6 | (text[2] & 0x3f);
    return (lead & 0x07) << 18 | (text[1] & 0x3f) << 12 | (text[2] & 0x3f) << 6 | (text[3] & 0x3f);
}

// Where the code point begins that ends before `at`.
__device__ __forceinline__ i64 back(const u8* data, i64 at)
{
    do at--;
    while (continues(data[at]));
    return at;
}

// What a ClassMap (tokenizer/classes.py) says of the code point at `text`. Its first page is block 0.
__device__ __forceinline__ int class_of(const u8* text, const u16* pages, const u8* values)
{
    if (text[0] < 0x80) return values[text[0]];
    const int code = code_point(text);
    return values[(int)pages[code >> 8] << 8 | (code & 255)];
}

// Whether a hash set has a pair of numbers of 21 bits.
__device__ __forceinline__ bool has_pair(const u64* set, u64 mask, int left, int right)
{
    const u64 key = (u64)left << 21 | (u64)right;
    u64 slot = pair_hash(key) & mask;
    while (set[slot] != key && set[slot] != EMPTY) slot = (slot + 1) & mask;
    return set[slot] == key;
}

// The text that byte `at` is of: the last one that begins there or before, so never an empty one.
__device__ __forceinline__ i64 text_at(const i64* offsets, i64 texts, i64 at)
{
    i64 text = 0;
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
