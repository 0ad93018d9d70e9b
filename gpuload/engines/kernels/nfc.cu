// The quick check for Unicode's normal form C (NFC). The tables, and what the check tests, are in tokenizer/nfc.py.

// How far the check looks back for the base character of a mark. Unicode's Stream-Safe Text Format allows 30 marks in a
// row; a text with more falls back.
#define MOST_MARKS 32

// Whether the second code point composes with the first. Korean syllables compose by a rule (Unicode, section 3.12):
// leading consonant + vowel, and a syllable without a final consonant + final consonant. A syllable's number modulo 28
// is its final consonant, 0 for none. All other pairs are in the hash set.
__device__ __forceinline__ bool composes(const u64* composing, u64 mask, int first, int second)
{
    if (second >= 0x1161 && second <= 0x1175) return first >= 0x1100 && first <= 0x1112;
    if (second >= 0x11a8 && second <= 0x11c2) return first >= 0xac00 && first <= 0xd7a3 && (first - 0xac00) % 28 == 0;
    return has_pair(composing, mask, first, second);
}

// Sets fallback[t] for every text t that is not surely in NFC. The caller has filled it with false and marked the first
// bytes of texts. One thread per chunk; it also looks at code points before the chunk, back to the text's beginning.
extern "C" __global__ void not_nfc(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, i64 texts, const i64* offsets, const u16* pages,
    const u8* values, const u64* composing, u64 mask, bool* fallback)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++) {
            // Bytes below 0xcc are ASCII, continuation bytes, or lead bytes of U+0080 to U+02FF, which are always in
            // NFC.
            if (data[at] < 0xcc) continue;
            // value: 255 (NEVER), or the rank of the combining class in the low 6 bits (ORDER) and 64 (COMPOSES).
            const int value = class_of(data + at, pages, values);
            if (value == 0) continue;
            bool good = value != 255;
            if (good && marks[at] != BEGINS) {
                const int order = value & 63;
                i64 letter = back(data, at);
                int above = class_of(data + letter, pages, values);
                const int next_to = above & 63;
                // Canonical order: combining classes of consecutive marks do not decrease, except to 0.
                good = above != 255 && (order == 0 || next_to <= order);
                // A mark composes with its base character if no mark between them has the same or a higher class, which
                // would block it. Classes are in order, so the mark before it decides. Skip the marks to find the base.
                if (value & 64 && (next_to == 0 || next_to < order)) {
                    int most = MOST_MARKS;
                    while (above & 63 && above != 255 && marks[letter] != BEGINS && --most) {
                        letter = back(data, letter);
                        above = class_of(data + letter, pages, values);
                    }
                    good = good && most && !composes(composing, mask, code_point(data + letter), code_point(data + at));
                }
            }
            if (!good) {
                const i64 text = text_at(offsets, texts, at);
                fallback[text] = true;
                at = offsets[text + 1] - 1;  // continue with the next text
            }
        }
    }
}

// Marks all bytes of the texts in `fallback` as NOTHING, so that they have no pre-tokens. One thread per chunk.
extern "C" __global__ void skip_texts(
    i64 chunks, i64 bytes, i64 step, u8* marks, i64 texts, const i64* offsets, const bool* fallback)
{
    EACH_THREAD(chunk, chunks) {
        i64 at = chunk * step;
        const i64 end = least(at + step, bytes);
        for (i64 text = text_at(offsets, texts, at); at < end; at++) {
            while (offsets[text + 1] <= at) text++;  // also past empty texts
            if (fallback[text]) marks[at] = NOTHING;
        }
    }
}
