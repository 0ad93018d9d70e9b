// Loss masks (engines/device/spans.py): where the answers of texts are, and which tokens they have.

// Where answers begin and end, in bytes of their text. One thread per row.
//
// Row r of `rows` has the pieces bounds[r] to bounds[r + 1] - 1 (gather.cu) and the answers first[r] to first[r + 1] - 1.
// Piece p begins at byte offsets[p] of all texts. The answers are described by as many entries of `table`, beginning with
// entry number[r]: the piece of the row with which an answer begins, the one before which it ends, and the bits of its
// tokens.
extern "C" __global__ void lay_answers(
    i64 rows, const i64* bounds, const i64* first, const i64* number, const i64* table, const i64* offsets, i64* start,
    i64* end, int* bits)
{
    EACH_THREAD(row, rows) {
        const i64* piece = offsets + bounds[row];
        const i64* entry = table + 3 * number[row];
        for (i64 answer = first[row]; answer < first[row + 1]; answer++, entry += 3) {
            start[answer] = piece[entry[0]] - piece[0];
            end[answer] = piece[entry[1]] - piece[0];
            bits[answer] = (int)entry[2];
        }
    }
}

// Clears exact[r] for texts in which some token is not the bytes at its place, or the last one does not end with the text.
// One thread per token: most have a few bytes, and neighbouring threads read neighbouring bytes of text.
//
// Token t of `tokens` is ids[begin + t]; the tokens of text r are those from ids_offsets[r], counted in `ids`. They lie end
// to end, beginning with the text: token t has the bytes places[t] to places[t + 1] - 1 of what all tokens make together,
// so its place in the text is that minus the place of the text's first token. The bytes of id i are those of `known`
// from known_offsets[i] to known_offsets[i + 1] - 1. An id without bytes matches no text.
extern "C" __global__ void match_tokens(
    i64 tokens, i64 begin, const int* ids, i64 texts, const i64* ids_offsets, const i64* places, const i64* offsets,
    const u8* data, const i64* known_offsets, const u8* known, bool* exact)
{
    EACH_THREAD(t, tokens) {
        const i64 text = text_at(ids_offsets, texts, begin + t), size = places[t + 1] - places[t];
        const i64 at = offsets[text] + places[t] - places[ids_offsets[text] - begin];
        const bool is_last = begin + t + 1 == ids_offsets[text + 1];
        bool same = size > 0 && (is_last ? at + size == offsets[text + 1] : at + size < offsets[text + 1]);
        const u8* bytes = known + known_offsets[ids[begin + t]];
        for (i64 k = 0; same && k < size; k++) same = data[at + k] == bytes[k];
        if (!same) exact[text] = false;
    }
}

// The bytes of a token of a text without the spaces that are trimmed from its offsets: `begin` to `end` - 1, counted from
// the text's first byte; none if all are trimmed.
//
// Token k of the text begins at places[k] - places[0]; `ids` are its tokens. leading[i] and trailing[i] are the bytes that
// are trimmed of id i, with `keeps_first` not a single space with which the text begins.
struct Extent { i64 begin, end; };

__device__ __forceinline__ Extent without_spaces(
    i64 token, const i64* places, const int* ids, const int* leading, const int* trailing, int keeps_first)
{
    const int id = ids[token] & IDS, before = leading[id];  // it may have been marked already
    Extent some = {places[token] - places[0], places[token + 1] - places[0]};
    some.begin += keeps_first && token == 0 && before == 1 ? 0 : before;
    if (some.begin > some.end) some.begin = some.end;
    some.end -= trailing[id];
    if (some.end < some.begin) some.end = some.begin;
    return some;
}

// The number of the token with the character of which byte `at` of a text is a part, counted from the text's first token;
// -1 if it has none, because it is outside of the text, or spaces that are trimmed from the offsets of their token.
//
// The text is data[0 : size], and has `count` tokens; the rest is as for without_spaces. Only spaces are trimmed, and a
// space is in one token, so no other token can have the character.
__device__ __forceinline__ i64 token_of(
    i64 at, const u8* data, i64 size, i64 count, const i64* places, const int* ids, const int* leading,
    const int* trailing, int keeps_first)
{
    if (at < 0 || at >= size) return -1;
    while (at > 0 && continues(data[at])) at--;
    const i64 token = text_at(places, count, at + places[0]);
    const Extent some = without_spaces(token, places, ids, leading, trailing, keeps_first);
    return at < some.begin || at >= some.end ? -1 : token;
}

// Marks the tokens of answers with their bits, in the texts for which match_tokens has left exact[r]. One warp per text;
// its lanes share the marking.
//
// The answers of text r are first[r] to first[r + 1] - 1, in order; they begin at start[i] and end before end[i], in bytes
// of the text; their tokens get bits[i], and those of two answers the bits of the first. Texts and tokens are as for
// match_tokens, trimmed spaces as for without_spaces. The rules are those of engines/host/spans.py. With `overlapping`, an
// answer has the tokens that begin before its end and end behind its start, without the spaces that are trimmed.
// Otherwise it has the tokens from that of its first character to that of its last one. If the first has none, this
// answer and all later ones of the text have no tokens; if the last has none, or token 0, the answer has all tokens to
// the end of the text. An answer that ends at byte 0 has none.
extern "C" __global__ void mark_answers(
    i64 texts, const i64* first, const i64* start, const i64* end, const int* bits, i64 begin, const i64* ids_offsets,
    const i64* places, const i64* offsets, const u8* data, const int* leading, const int* trailing, int keeps_first,
    int overlapping, const bool* exact, int* ids)
{
    EACH_WARP(text, texts) {
        const i64 size = offsets[text + 1] - offsets[text], count = ids_offsets[text + 1] - ids_offsets[text];
        const i64* place = places + (ids_offsets[text] - begin);
        if (!exact[text] || count == 0) continue;
        int* own = ids + ids_offsets[text];
        if (overlapping) {
            for (i64 token = lane; token < count; token += 32) {
                const Extent some = without_spaces(token, place, own, leading, trailing, keeps_first);
                i64 low = first[text], high = first[text + 1];  // the first answer that ends behind its beginning
                while (low < high) {
                    const i64 middle = (low + high) / 2;
                    if (end[middle] <= some.begin) low = middle + 1; else high = middle;
                }
                if (low < first[text + 1] && start[low] < some.end) own[token] |= bits[low];
            }
            continue;
        }
        i64 marked = 0;  // all tokens before have been marked, or have no loss
        for (i64 i = first[text]; i < first[text + 1]; i++) {
            if (end[i] == 0) continue;
            i64 edges[2];
            for (int side = 0; side < 2; side++)
                edges[side] = token_of(
                    side ? end[i] - 1 : start[i], data + offsets[text], size, count, place, own, leading, trailing,
                    keeps_first);
            if (edges[0] < 0) break;
            const i64 last = edges[1] > 0 ? edges[1] : count - 1;
            const i64 next = edges[0] < marked ? marked : edges[0];
            for (i64 token = next + lane; token <= last; token += 32) own[token] |= bits[i];
            marked = last < marked ? marked : last + 1;
        }
    }
}
