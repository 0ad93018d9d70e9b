// Brings texts into Unicode's normal form C (NFC), section by section. The tables, and why this is NFC, are in
// tokenizer/nfc.py.
//
// A group is a code point and all code points after it in its section whose value is a mark's: combining marks, and
// others that may compose with a character before them. A group is changed by itself: its first code point is
// decomposed if NFC does not contain it, then marks are composed with it from left to right, and those that stay are
// sorted by their classes. A text falls back if one of its groups
//   - contains a code point that NFC does not contain and that has no entry in the table,
//   - has a mark that composes behind one of a higher class, or a pair that becomes several code points, or
//   - has more than MOST_MARKS marks. Unicode's Stream-Safe Text Format allows 30 in a row.
// Of such a group, any part may be missing in the result.
//
// One thread per chunk changes the groups that begin in it, which may extend beyond it. Two passes: sizes of chunks,
// prefix sum, writing. Both use `change_groups`, so they agree.

#define MOST_MARKS 32  // bits of an unsigned

// The value of a code point is a sum of the first two for a mark, one of the others, or 0.
enum {
    ORDER = 63,        // the rank of its combining class among all classes, 0 for class 0
    COMPOSES = 64,     // it composes with some character before it
    DECOMPOSES = 128,  // it is not in NFC, and `compositions` says what it becomes
    NEVER = 255        // it is not in NFC, or versions of Unicode differ
};

// Results of a group, as bits.
enum {
    FALLS_BACK = 1,
    CHANGED = 2
};

// What all functions below need: texts, and the tables.
struct NfcText {
    i64 bytes;
    const u8 *data, *marks;
    const u16* pages;
    const u8* values;
    const u64* compositions;
    u64 mask;
};

// The value of a code point.
__device__ __forceinline__ int nfc_value(const NfcText& text, int code)
{
    return text.values[(int)text.pages[code >> 8] << 8 | (code & 255)];
}

// The value of the code point that begins at `at`; 0 after the last one, outside of sections, and, without a look-up,
// for bytes below 0xcc, which begin ASCII or U+0080 to U+02FF.
__device__ __forceinline__ int nfc_value_at(const NfcText& text, i64 at)
{
    if (at >= text.bytes || text.data[at] < 0xcc || text.marks[at] > BEGINS) return 0;
    return nfc_value(text, code_point(text.data + at));
}

// Whether a code point with this value at `at` belongs to the group of the one before.
__device__ __forceinline__ bool joins(const NfcText& text, i64 at, int value)
{
    return value > 0 && value < DECOMPOSES && text.marks[at] == GOES_ON;
}

// What two code points become, 0 if they are not in NFC but not one code point either, -1 if they do not compose.
// Korean syllables compose by a rule (Unicode, section 3.12): leading consonant + vowel, and a syllable without a final
// consonant + final consonant. A syllable's number modulo 28 is its final consonant, 0 for none. All other pairs are in
// a hash table. Its slots are first (21 bits), second (21), result (21).
__device__ __forceinline__ int composed(const NfcText& text, int first, int second)
{
    if (second >= 0x1161 && second <= 0x1175)
        return first >= 0x1100 && first <= 0x1112 ? 0xac00 + ((first - 0x1100) * 21 + second - 0x1161) * 28 : -1;
    if (second >= 0x11a8 && second <= 0x11c2)
        return first >= 0xac00 && first <= 0xd7a3 && (first - 0xac00) % 28 == 0 ? first + second - 0x11a7 : -1;
    const u64 found = find_pair(text.compositions, text.mask, first, second, 21);
    return found == EMPTY ? -1 : (int)found & 0x1fffff;
}

// Writes a code point as UTF-8 at out[to] if `out` is not null. Returns the position after it.
__device__ __forceinline__ i64 put(u8* out, i64 to, int code)
{
    const int size = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
    if (out) {
        for (int k = size - 1; k > 0; k--, code >>= 6) out[to + k] = (u8)(0x80 | (code & 0x3f));
        out[to] = (u8)(size == 1 ? code : (0xf00 >> size & 0xff) | code);
    }
    return to + size;
}

// Changes the group that begins at `at`, and moves `at` behind it. The result is written at out[to] if `out` is not
// null. Returns the position after it. Adds to `results`; if that is FALLS_BACK, `at` may still be within the group.
__device__ __forceinline__ i64 change_group(const NfcText& text, i64& at, u8* out, i64 to, int& results)
{
    int marks = 0;
    bool good = true;
    int value = nfc_value_at(text, at);
    do {
        // The letter that marks compose with: the group's first code point, or a mark of class 0 that does not compose,
        // such as a vowel sign that composes with some other letters.
        int letter = code_point(text.data + at), second = -1;
        at += width_of(text.data[at]);
        int last = value & ORDER;  // the highest class of marks that stay; 0 if none does, so that nothing is in between
        if (value == NEVER) {
            good = false;
        } else if (value == DECOMPOSES) {
            results |= CHANGED;
            second = composed(text, 1, letter);
            letter = composed(text, 0, letter);
            last = second < 0 ? 0 : nfc_value(text, second) & ORDER;
        }
        const u8* const first = text.data + at;
        const bool begins_with_mark = last > 0;  // which cannot be sorted with the others
        bool sorted = true;
        unsigned stays = 0;  // bit k: mark k after the letter does not compose
        for (unsigned bit = 1; good; bit <<= 1) {
            value = nfc_value_at(text, at);
            if (!joins(text, at, value)) break;
            const int order = value & ORDER;
            const bool in_order = order == 0 || last <= order;
            // A mark that stays and has the same class blocks it; if it has class 0, any mark does.
            int made = -1;
            if (value & COMPOSES && (order == 0 ? last == 0 : last != order))
                made = composed(text, letter, code_point(text.data + at));
            if (made < 0 && order == 0) break;
            good = made != 0 && (in_order || (made < 0 && !begins_with_mark)) && marks++ < MOST_MARKS;
            if (!good) break;
            if (made > 0) letter = made;
            else stays |= bit;
            if (!in_order) sorted = false;
            else if (made < 0) last = order;
            if (made > 0 || !in_order) results |= CHANGED;
            at += width_of(text.data[at]);
        }
        to = put(out, to, letter);
        if (second >= 0) to = put(out, to, second);
        // Marks that stay, class by class; in one pass if they are sorted.
        for (int order = sorted || !out ? last : 1; order <= last; order++) {
            unsigned left = stays;
            for (const u8* mark = first; left; left >>= 1, mark += width_of(*mark)) {
                const int code = code_point(mark);
                if (left & 1 && (sorted || !out || (nfc_value(text, code) & ORDER) == order))
                    to = put(out, to, code);
            }
        }
        if (good && joins(text, at, value)) good = marks++ < MOST_MARKS;
        else break;
    } while (good);
    if (!good) results |= FALLS_BACK;
    return to;
}

// Changes all groups that begin in bytes `at` to `end` - 1; `at` is the beginning of a chunk. The result is written at
// out[to], with its marks, if `out` is not null. Returns the position after it. If `fallback` is not null, sets
// fallback[t] for every text t that falls back, found[0] if there is any, and found[1] if any group is changed.
__device__ __forceinline__ i64 change_groups(
    const NfcText& text, i64 at, i64 end, i64 texts, const i64* offsets, bool* fallback, bool* found, u8* out,
    u8* out_marks, i64 to)
{
    while (at < end) {
        const u8 byte = text.data[at];
        const int value = nfc_value_at(text, at);
        // Part of a group that began in the chunk before, or the rest of one that falls back.
        if (byte >= 0x80 && text.marks[at] == GOES_ON && (continues(byte) || joins(text, at, value))) {
            at++;
            continue;
        }
        const i64 next = at + (byte < 0x80 || text.marks[at] > BEGINS ? 1 : width_of(byte));
        if (value == 0 && !joins(text, next, nfc_value_at(text, next))) {
            for (; at < next; at++, to++) {
                if (!out) continue;
                out[to] = text.data[at];
                out_marks[to] = text.marks[at];
            }
            continue;
        }
        const i64 from = at;
        int results = 0;
        if (out) out_marks[to] = text.marks[from];
        to = change_group(text, at, out, to, results);
        if (fallback && results & FALLS_BACK) fallback[text_at(offsets, texts, from)] = found[0] = true;
        if (fallback && results & CHANGED) found[1] = true;
    }
    return to;
}

// sizes[c]: the number of bytes that the groups of chunk c become. Sets fallback[t] for texts that fall back, found[0]
// if there is any, and found[1] if any group is changed; the caller has filled them with false. One thread per chunk.
extern "C" __global__ void nfc_sizes(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, const u16* pages, const u8* values,
    const u64* compositions, u64 mask, i64 texts, const i64* offsets, int* sizes, bool* fallback, bool* found)
{
    const NfcText text = {bytes, data, marks, pages, values, compositions, mask};
    EACH_THREAD(chunk, chunks) {
        const i64 at = chunk * step, end = least(at + step, bytes);
        sizes[chunk] = (int)change_groups(text, at, end, texts, offsets, fallback, found, nullptr, nullptr, 0);
    }
}

// moved[t]: the new position of byte offsets[t]. place is the prefix sum of sizes. One thread per offset, of which
// there is one more than texts.
extern "C" __global__ void nfc_offsets(
    i64 step, i64 bytes, const u8* data, const u8* marks, const u16* pages, const u8* values, const u64* compositions,
    u64 mask, i64 texts, const i64* offsets, const i64* place, i64* moved)
{
    const NfcText text = {bytes, data, marks, pages, values, compositions, mask};
    EACH_THREAD(t, texts + 1) {
        const i64 end = offsets[t], chunk = end / step, to = place[chunk];
        moved[t] = change_groups(text, chunk * step, end, texts, offsets, nullptr, nullptr, nullptr, nullptr, to);
    }
}

// Writes the new bytes and their marks, where the caller has filled out_marks with GOES_ON. One thread per chunk.
extern "C" __global__ void write_nfc(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, const u16* pages, const u8* values,
    const u64* compositions, u64 mask, i64 texts, const i64* offsets, const i64* place, u8* out, u8* out_marks)
{
    const NfcText text = {bytes, data, marks, pages, values, compositions, mask};
    EACH_THREAD(chunk, chunks) {
        const i64 at = chunk * step, end = least(at + step, bytes);
        change_groups(text, at, end, texts, offsets, nullptr, nullptr, out, out_marks, place[chunk]);
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
            while (text + 1 < texts && offsets[text + 1] <= at) text++;  // also past empty texts
            if (fallback[text]) marks[at] = NOTHING;
        }
    }
}
