// Rewrites text before it is split: prepends a prefix to each section and replaces every space in it. Bytes outside of
// sections (added tokens, removed white space) are copied. Two passes: sizes of chunks, prefix sum, writing.

// The number of bytes that one byte becomes. `front` is the length of the prefix; with `once`, sections that begin with
// a space have none. `blank` is the length of the replacement of a space.
__device__ __forceinline__ int rewritten(u8 byte, u8 mark, int front, int once, int blank)
{
    if (mark > BEGINS) return 1;
    return (byte == ' ' ? blank : 1) + (mark == BEGINS && !(once && byte == ' ') ? front : 0);
}

// sizes[c]: the number of bytes that chunk c becomes. One thread per chunk.
extern "C" __global__ void rewritten_sizes(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int front, int once, int blank, int* sizes)
{
    EACH_THREAD(chunk, chunks) {
        int size = 0;
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++) size += rewritten(data[at], marks[at], front, once, blank);
        sizes[chunk] = size;
    }
}

// moved[t]: the new position of byte offsets[t]. place is the prefix sum of sizes. One thread per offset: it adds up
// the sizes from the beginning of the chunk.
extern "C" __global__ void rewritten_offsets(
    i64 count, const i64* offsets, i64 step, const u8* data, const u8* marks, int front, int once, int blank,
    const i64* place, i64* moved)
{
    EACH_THREAD(t, count) {
        const i64 chunk = offsets[t] / step;
        i64 there = place[chunk];
        for (i64 at = chunk * step; at < offsets[t]; at++) there += rewritten(data[at], marks[at], front, once, blank);
        moved[t] = there;
    }
}

// Writes the new bytes and their marks. Of the bytes that one byte becomes, the first has its mark. One thread per
// chunk.
extern "C" __global__ void rewrite(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int front, int once, int blank,
    const u8* front_text, const u8* blank_text, const i64* place, u8* out, u8* out_marks)
{
    EACH_THREAD(chunk, chunks) {
        i64 there = place[chunk];
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++) {
            const u8 byte = data[at], mark = marks[at];
            const bool is_text = mark <= BEGINS;
            const int size = rewritten(byte, mark, front, once, blank);
            const int own = is_text && byte == ' ' ? blank : 1;
            for (int k = 0; k < size; k++) {
                const int of_own = k - (size - own);  // negative in the prefix
                out[there + k] = of_own < 0 ? front_text[k] : is_text && byte == ' ' ? blank_text[of_own] : byte;
                out_marks[there + k] = k == 0 ? mark : (u8)GOES_ON;
            }
            there += size;
        }
    }
}
