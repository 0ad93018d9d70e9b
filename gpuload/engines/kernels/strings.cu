// Operations and predicates on texts. Text i is data[start[i] : start[i] + length[i]]; operations change only these
// bounds. `apply_operations` and `holds` of template/program.py do the same in plain Python.

// Kernels that read whole texts divide them into parts of `step` bytes, one warp per part, so that a long text does not
// wait for a single warp. The parts of text i are first[i] to first[i + 1] - 1; an empty text has one, too. Usually every
// text is one part, and no search is needed.
__device__ __forceinline__ i64 text_of_part(const i64* first, i64 texts, i64 parts, i64 part)
{
    return parts == texts ? part : text_at(first, texts, part);
}

// place[i]: the position in data of the first (`last`: of the last) occurrence of `needle` in text i. The caller has
// filled place with a number higher (lower) than all positions, which remains if there is no occurrence.
//
// One warp per part. Lane k tries the positions k, k + 32 and so on of the part, counted from the text's beginning
// (`last`: from its end), and stops at its first match. The minimum (maximum) over lanes and parts does not depend on
// their order.
extern "C" __global__ void find(
    i64 parts, i64 step, const i64* first, i64 texts, const u8* data, const i64* start, const i64* length,
    const u8* needle, i64 size, int last, i64* place)
{
    EACH_WARP(part, parts) {
        const i64 i = text_of_part(first, texts, parts, part), low = (part - first[i]) * step;
        const i64 positions = length[i] - size + 1;  // may be negative
        const i64 end = least(low + step, positions);
        for (i64 k = low + lane; k < end; k += 32) {
            const i64 at = start[i] + (last ? positions - 1 - k : k);
            // If another lane or part has found a better position, this lane can only find worse ones. `volatile`: read
            // from memory each time, because others write it.
            const i64 known = *(volatile const i64*)(place + i);
            if (last ? known > at : known < at) break;
            i64 same = 0;
            while (same < size && data[at + same] == needle[same]) same++;
            if (same == size) {
                if (last) atomicMax(place + i, at);
                else atomicMin(place + i, at);
                break;
            }
        }
    }
}

// Sets found[i] if text i contains one of several needles: needle n is bytes bounds[n] to bounds[n + 1] - 1 of `needle`,
// and begins[byte] says whether one begins with that byte. One warp per part, one lane per position.
extern "C" __global__ void contains_any(
    i64 parts, i64 step, const i64* first, i64 texts, const u8* data, const i64* start, const i64* length,
    const bool* begins, int needles, const i64* bounds, const u8* needle, bool* found)
{
    EACH_WARP(part, parts) {
        const i64 i = text_of_part(first, texts, parts, part), low = (part - first[i]) * step;
        const i64 end = least(low + step, length[i]);
        for (i64 k = low + lane; k < end; k += 32) {
            const u8* at = data + start[i] + k;
            if (!begins[*at]) continue;
            for (int n = 0; n < needles; n++) {
                const i64 size = bounds[n + 1] - bounds[n];
                i64 same = 0;
                while (same < size && k + same < length[i] && at[same] == needle[bounds[n] + same]) same++;
                if (same == size) found[i] = true;
            }
        }
    }
}

// answer[i]: whether text i starts (`at_end`: ends) with `affix`; with `whole`, whether it is equal to it. One thread
// per text: affixes are short.
extern "C" __global__ void has_affix(
    i64 texts, const u8* data, const i64* start, const i64* length, const u8* affix, i64 size, int at_end, int whole,
    bool* answer)
{
    EACH_THREAD(i, texts) {
        bool same = whole ? length[i] == size : length[i] >= size;
        const i64 at = start[i] + (at_end ? length[i] - size : 0);
        for (i64 k = 0; same && k < size; k++) same = data[at + k] == affix[k];
        answer[i] = same;
    }
}

// Strips characters from texts: moves their bounds, in place. `left` and `right` say on which sides. One thread per
// text.
//
// The characters to strip: single[b] says whether ASCII byte b is one; codes has the `wide` others, ascending, each as
// the number that its UTF-8 bytes form, the first byte in the highest place. Comparing bytes is enough: UTF-8 is
// self-synchronizing, so bytes at a text's end that equal a character's encoding are that character.
extern "C" __global__ void strip(
    i64 texts, const u8* data, i64* start, i64* length, const bool* single, i64 wide, const i64* codes, int left,
    int right)
{
    EACH_THREAD(i, texts) {
        i64 low = start[i], high = low + length[i];
        for (int side = 0; side < 2; side++) {
            if (side ? !right : !left) continue;
            while (low < high) {
                const u8 byte = data[side ? high - 1 : low];
                i64 step = byte < 0x80 && single[byte] ? 1 : 0;
                if (byte >= 0x80 && wide) {
                    // The first or last character of what remains: its code, and its number of bytes.
                    i64 code = 0, size = 0;
                    if (side) {
                        while (size < 4 && size < high - low) {
                            const u8 next = data[high - 1 - size];
                            code |= (i64)next << (8 * size++);
                            if ((next & 0xc0) != 0x80) break;
                        }
                    } else {
                        do code = code << 8 | data[low + size++];
                        while (size < 4 && size < high - low && (data[low + size] & 0xc0) == 0x80);
                    }
                    for (i64 k = 0; k < wide && codes[k] <= code; k++)
                        if (codes[k] == code) step = size;
                }
                if (!step) break;
                if (side) high -= step;
                else low += step;
            }
        }
        start[i] = low;
        length[i] = high - low;
    }
}

// Whether byte k of a text is valid UTF-8 at its position. That depends only on the three bytes before it and the three
// after it. The rules are those of Unicode, table 3-7.
__device__ __forceinline__ bool valid_at(const u8* text, i64 length, i64 k)
{
    const u8 byte = text[k];
    if (byte < 0x80) return true;
    if (byte < 0xc0) {  // a continuation byte: the lead byte before it must be long enough to include it
        for (i64 back = 1; back <= 3 && back <= k; back++) {
            const u8 lead = text[k - back];
            if (lead < 0x80 || lead >= 0xc0) return lead >= (back == 1 ? 0xc0 : back == 2 ? 0xe0 : 0xf0);
        }
        return false;
    }
    if (byte < 0xc2 || byte > 0xf4) return false;
    const int size = byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    bool good = k + size <= length;
    for (int next = 1; good && next < size; next++) good = (text[k + next] & 0xc0) == 0x80;
    if (good && byte == 0xe0) good = text[k + 1] >= 0xa0;  // overlong: fits in two bytes
    if (good && byte == 0xed) good = text[k + 1] < 0xa0;   // surrogates, U+D800 to U+DFFF
    if (good && byte == 0xf0) good = text[k + 1] >= 0x90;  // overlong: fits in three bytes
    if (good && byte == 0xf4) good = text[k + 1] < 0x90;   // above U+10FFFF
    return good;
}

// Sets bad[i] if text i is not valid UTF-8; the caller has filled it with false. One warp per part; its lanes read words
// of 8 bytes.
extern "C" __global__ void not_utf8(
    i64 parts, i64 step, const i64* first, i64 texts, const u8* data, const i64* start, const i64* length, bool* bad)
{
    EACH_WARP(part, parts) {
        const i64 i = text_of_part(first, texts, parts, part), low = (part - first[i]) * step;
        const i64 end = least(low + step, length[i]);
        const u8* text = data + start[i];
        // The bytes before the first whole word of 8 in memory, then words, of which most are ASCII.
        const i64 head = least(low + (8 - ((u64)(text + low) & 7)) % 8, end);
        bool good = low + lane >= head || valid_at(text, length[i], low + lane);
        for (i64 k = head + 8 * lane; good && k < end; k += 8 * 32) {
            if (k + 8 <= end && !(*(const u64*)(text + k) & 0x8080808080808080ull)) continue;
            for (i64 at = k; good && at < least(k + 8, end); at++) good = valid_at(text, length[i], at);
        }
        if (!good) bad[i] = true;
    }
}

// hash[i]: a hash of text i. One thread per text, for short texts (roles).
extern "C" __global__ void hash_texts(i64 texts, const u8* data, const i64* start, const i64* length, i64* hash)
{
    EACH_THREAD(i, texts) {
        u64 sum = (u64)length[i];
        for (i64 k = 0; k < length[i]; k++) sum = mixed(sum ^ data[start[i] + k]);
        hash[i] = (i64)sum;
    }
}

// same[i]: whether text i equals text other[i]. One thread per text.
extern "C" __global__ void same_texts(
    i64 texts, const u8* data, const i64* start, const i64* length, const i64* other, bool* same)
{
    EACH_THREAD(i, texts) {
        const i64 j = other[i];
        bool alike = length[i] == length[j];
        for (i64 k = 0; alike && k < length[i]; k++) alike = data[start[i] + k] == data[start[j] + k];
        same[i] = alike;
    }
}
