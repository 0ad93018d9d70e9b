// Rewrites text before it is split: prepends a prefix to sections and replaces every space in them. Bytes outside of
// sections (added tokens, removed white space) are copied. Two passes: sizes of chunks, prefix sum, writing.

#define UNLESS_SPACE 1  // sections that begin with a space, or with what replaces it, have no prefix
#define FIRST_ONLY 2    // only a section at the beginning of its text has a prefix

// The length of the prefix of the byte at `at`, not 0 only at the beginning of a section. `front` is the length of the
// prefix, `blank` the length of what replaces a space (one character), `flags` are those above.
__device__ __forceinline__ int prefix_at(
    const u8* data, i64 at, u8 mark, int front, int flags, int blank, const u8* blank_text, i64 texts,
    const i64* offsets)
{
    if (mark != BEGINS || front == 0) return 0;
    if (flags & UNLESS_SPACE) {
        if (data[at] == ' ') return 0;
        int same = 0;  // the first byte of a character determines its length, so this does not leave the text
        while (same < blank && data[at + same] == blank_text[same]) same++;
        if (same == blank) return 0;
    }
    return flags & FIRST_ONLY && offsets[text_at(offsets, texts, at)] != at ? 0 : front;
}

// The number of bytes that a byte becomes, without the prefix.
__device__ __forceinline__ int replaced(u8 byte, u8 mark, int blank)
{
    return byte == ' ' && mark <= BEGINS ? blank : 1;
}

// The number of bytes that bytes `at` to `end` - 1 become.
__device__ __forceinline__ int rewritten(
    const u8* data, const u8* marks, i64 at, i64 end, int front, int flags, int blank, const u8* blank_text, i64 texts,
    const i64* offsets)
{
    int size = 0;
    for (; at < end; at++)
        size += replaced(data[at], marks[at], blank)
            + prefix_at(data, at, marks[at], front, flags, blank, blank_text, texts, offsets);
    return size;
}

// sizes[c]: the number of bytes that chunk c becomes. One thread per chunk.
extern "C" __global__ void rewritten_sizes(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int front, int flags, int blank,
    const u8* blank_text, i64 texts, const i64* offsets, int* sizes)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        sizes[chunk] = rewritten(data, marks, chunk * step, end, front, flags, blank, blank_text, texts, offsets);
    }
}

// moved[t]: the new position of byte offsets[t]. place is the prefix sum of sizes. One thread per offset, of which
// there is one more than texts: it adds up the sizes from the beginning of the chunk.
extern "C" __global__ void rewritten_offsets(
    i64 step, const u8* data, const u8* marks, int front, int flags, int blank, const u8* blank_text, i64 texts,
    const i64* offsets, const i64* place, i64* moved)
{
    EACH_THREAD(t, texts + 1) {
        const i64 chunk = offsets[t] / step;
        moved[t] = place[chunk]
            + rewritten(data, marks, chunk * step, offsets[t], front, flags, blank, blank_text, texts, offsets);
    }
}

// Writes the new bytes and their marks. Of the bytes that one byte becomes, the first has its mark. One thread per
// chunk.
extern "C" __global__ void rewrite(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int front, int flags, int blank,
    const u8* blank_text, i64 texts, const i64* offsets, const u8* front_text, const i64* place, u8* out, u8* out_marks)
{
    EACH_THREAD(chunk, chunks) {
        i64 there = place[chunk];
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++) {
            const u8 byte = data[at], mark = marks[at];
            const int before = prefix_at(data, at, mark, front, flags, blank, blank_text, texts, offsets);
            const int own = replaced(byte, mark, blank);
            const bool is_blank = byte == ' ' && mark <= BEGINS;
            for (int k = 0; k < before + own; k++) {
                out[there + k] = k < before ? front_text[k] : is_blank ? blank_text[k - before] : byte;
                out_marks[there + k] = k == 0 ? mark : (u8)GOES_ON;
            }
            there += before + own;
        }
    }
}
