// Texts that are not surely in Unicode's normal form C; tables are those of tokenizer/nfc.py.

// The furthest that is looked back for the letter that a mark stands on. Unicode's own limit for streams is 30 marks.
#define MOST_MARKS 32

// Whether the second code point melts into the first, which it stands on.
__device__ __forceinline__ bool melts(const u64* melting, u64 mask, int first, int second)
{
    if (second >= 0x1161 && second <= 0x1175) return first >= 0x1100 && first <= 0x1112;
    if (second >= 0x11a8 && second <= 0x11c2) return first >= 0xac00 && first <= 0xd7a3 && (first - 0xac00) % 28 == 0;
    return has_pair(melting, mask, first, second);
}

// left[t] becomes true where text t is not surely in the form; the caller has filled it with false, and marked where
// texts begin. A thread per chunk.
extern "C" __global__ void not_nfc(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, i64 texts, const i64* offsets, const u16* pages,
    const u8* values, const u64* melting, u64 mask, bool* left)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++) {
            if (data[at] < 0xcc) continue;  // up to U+02FF all is well, and other bytes are not the first
            const int value = class_of(data + at, pages, values);
            if (value == 0) continue;
            bool good = value != 255;
            if (good && marks[at] != BEGINS) {
                const int order = value & 63;
                i64 letter = back(data, at);
                int above = class_of(data + letter, pages, values);
                const int next_to = above & 63;
                good = above != 255 && (order == 0 || next_to <= order);
                // It melts into the letter it stands on, over marks of lower kinds; others stand between them.
                if (value & 64 && (next_to == 0 || next_to < order)) {
                    int most = MOST_MARKS;
                    while (above & 63 && above != 255 && marks[letter] != BEGINS && --most) {
                        letter = back(data, letter);
                        above = class_of(data + letter, pages, values);
                    }
                    good = good && most && !melts(melting, mask, code_point(data + letter), code_point(data + at));
                }
            }
            if (!good) {
                const i64 text = text_at(offsets, texts, at);
                left[text] = true;
                at = offsets[text + 1] - 1;
            }
        }
    }
}

// Texts that are left have no sections. A thread per chunk.
extern "C" __global__ void leave(
    i64 chunks, i64 bytes, i64 step, u8* marks, i64 texts, const i64* offsets, const bool* left)
{
    EACH_THREAD(chunk, chunks) {
        i64 at = chunk * step;
        const i64 end = least(at + step, bytes);
        for (i64 text = text_at(offsets, texts, at); at < end; at++) {
            while (offsets[text + 1] <= at) text++;
            if (left[text]) marks[at] = NOTHING;
        }
    }
}
