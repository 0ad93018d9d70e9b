// Text rewritten before it is split: something is put in front of each section, something else stands for each blank.
// What is not of a section is copied as it is.

// How many bytes become of one. `front` bytes are put in front of a section (with `once`, of one that does not begin
// with a blank), `blank` bytes stand for a blank.
__device__ __forceinline__ int rewritten(u8 byte, u8 mark, int front, int once, int blank)
{
    if (mark > BEGINS) return 1;
    return (byte == ' ' ? blank : 1) + (mark == BEGINS && !(once && byte == ' ') ? front : 0);
}

// sizes[c]: how many bytes become of chunk c. A thread per chunk.
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

// moved[t]: where byte offsets[t] comes to lie; chunk c comes to lie at place[c]. A thread per offset.
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

// The bytes, and their marks. A thread per chunk.
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
                const int of_own = k - (size - own);  // below 0 for what is put in front
                out[there + k] = of_own < 0 ? front_text[k] : is_text && byte == ' ' ? blank_text[of_own] : byte;
                out_marks[there + k] = k == 0 ? mark : (u8)GOES_ON;
            }
            there += size;
        }
    }
}
