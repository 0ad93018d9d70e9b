// Operations and questions on texts that only move their bounds. Text i is data[start[i] : start[i] + length[i]].
// The definition of each is program.apply_operations and program.holds.

// place[i]: where text i has `needle` for the first time (or the last), as an index into data. The caller has filled
// place with a number above (below) all indices, and finds it there still where the text has no needle.
// A warp per text, so that one long text does not keep a single thread busy. The least (greatest) of what the lanes find
// does not depend on their order.
extern "C" __global__ void find(
    i64 texts, const u8* data, const i64* start, const i64* length, const u8* needle, i64 size, int last, i64* place)
{
    EACH_WARP(i, texts) {
        const i64 ways = length[i] - size + 1;
        for (i64 k = lane; k < ways; k += 32) {
            const i64 at = start[i] + (last ? ways - 1 - k : k);
            // Another lane may have been here first, and nothing better lies further on.
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

// answer[i]: whether text i starts (at_end: ends) with `affix`; with `whole`, whether it is that. A thread per text.
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

// Move bounds past characters at the sides, in place. A thread per text.
//
// single[b]: whether the byte b is one of the characters; codes: the characters of more bytes, each as the number that
// its bytes are (the first byte highest), ascending. UTF-8 is self-synchronizing: bytes at a text's side that equal a
// character's encoding are that character.
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
                    // The character at this side: its code, and how many bytes that is.
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

// bad[i] becomes true where text i is not UTF-8; the caller has filled it with false. A warp per text.
// Whether a byte is in its place shows in the three bytes before it and the three after it, so lanes need no order.
extern "C" __global__ void not_utf8(i64 texts, const u8* data, const i64* start, const i64* length, bool* bad)
{
    EACH_WARP(i, texts) {
        const u8* text = data + start[i];
        for (i64 k = lane; k < length[i]; k += 32) {
            const u8 byte = text[k];
            if (byte < 0x80) continue;
            bool good = false;
            if (byte < 0xc0) {  // one that continues: there is a first byte before it, and it reaches this far
                for (i64 back = 1; back <= 3 && back <= k; back++) {
                    const u8 lead = text[k - back];
                    if (lead >= 0x80 && lead < 0xc0) continue;
                    good = lead >= (back == 1 ? 0xc0 : back == 2 ? 0xe0 : 0xf0);
                    break;
                }
            } else if (byte >= 0xc2 && byte <= 0xf4) {
                const int size = byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
                good = k + size <= length[i];
                for (int next = 1; good && next < size; next++) good = (text[k + next] & 0xc0) == 0x80;
                if (good && byte == 0xe0) good = text[k + 1] >= 0xa0;  // what fits in fewer bytes
                if (good && byte == 0xed) good = text[k + 1] < 0xa0;   // halves of surrogate pairs
                if (good && byte == 0xf0) good = text[k + 1] >= 0x90;
                if (good && byte == 0xf4) good = text[k + 1] < 0x90;  // beyond the last code point
            }
            if (!good) {
                bad[i] = true;
                break;
            }
        }
    }
}

// wide[i] becomes true where text i has a byte beyond ASCII; the caller has filled it with false. A warp per text.
extern "C" __global__ void not_ascii(i64 texts, const u8* data, const i64* start, const i64* length, bool* wide)
{
    EACH_WARP(i, texts) {
        for (i64 k = lane; k < length[i]; k += 32) {
            if (data[start[i] + k] >= 0x80) {
                wide[i] = true;
                break;
            }
        }
    }
}

// hash[i]: a number that equal texts share. A thread per text: for short ones (roles).
extern "C" __global__ void hash_texts(i64 texts, const u8* data, const i64* start, const i64* length, i64* hash)
{
    EACH_THREAD(i, texts) {
        u64 sum = (u64)length[i];
        for (i64 k = 0; k < length[i]; k++) sum = mixed(sum ^ data[start[i] + k]);
        hash[i] = (i64)sum;
    }
}

// same[i]: whether text i is the same as text other[i]. A thread per text.
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
