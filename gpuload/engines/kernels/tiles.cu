// Splits texts into pre-tokens and looks them up, in one pass over the text.
//
// A block works on one tile of TILE bytes at a time, and on some bytes before and after it:
//   1. Bytes, marks and classes of code points are put into shared memory. The marks are given, or the block finds where
//      texts and added tokens begin.
//   2. Each thread splits a segment of the tile, from its first restart on (as `split` of split.cu).
//   3. The beginnings of pre-tokens are bits; counting them gives each pre-token its number in the tile. Tiles add up
//      their counts by decoupled look-back.
//   4. Each thread looks up pre-tokens. Those that are no vocabulary entries are listed, to be merged.
//
// What is beyond shared memory is read from `data`, so pre-tokens can have any length.

#ifndef SEGMENT
#define SEGMENT 16  // bytes per thread; at most 16. Tests choose 1, so that there are more borders
#endif
#define TILE (SEGMENT * BLOCK)
#define LEFT 128                    // bytes before a tile in shared memory
#define RIGHT 64                    // bytes after it
#define SEEN (LEFT + TILE + RIGHT)  // all bytes whose marks and classes are in shared memory
#define MOST_TOKEN 64               // maximum length of added tokens that a tile finds; half of LEFT

// Numbers in `counts`.
enum {
    TICKET,     // the next tile
    PRETOKENS,  // the number of pre-tokens
    REST,       // in the high half the number of those to merge, in the low half the number of their bytes
    FLAGS       // a sum of the following
};

#define NOT_NFC 1   // some text may not be in NFC
#define TOO_LONG 2  // some pre-token to merge has more than LONGEST bytes

// The number of the longest added token that is at data[at] and ends at `end` or before, or -1. The trie is that of
// tokenizer/added_tokens.py; see `longest_token` of added.cu.
__device__ __forceinline__ int token_between(
    const u8* data, int at, int end, const int* edges, const u8* byte, const int* token)
{
    int node = 0, found = -1;
    for (; at < end; at++) {
        int edge = edges[node];
        const int last = edges[node + 1];
        while (edge < last && byte[edge] < data[at]) edge++;
        if (edge == last || byte[edge] != data[at]) break;
        node = edge + 1;
        if (token[node] >= 0) found = token[node];
    }
    return found;
}

// What the functions below need: the texts, the trie, and a tile in shared memory.
struct Tile {
    int bytes, marked;
    const u8 *data, *all_marks;  // all_marks only if `marked`
    i64 texts;
    const i64* offsets;
    i64 base;
    const u8* begins;
    const int* edges;
    const u8* byte;
    const int* token;
    int origin;                         // the position in `data` of what follows
    const u8 *text, *marks, *class_at;  // in shared memory
};

// The number of the added token at `at`, or -1, if texts and tokens were not marked before. No token extends beyond its
// text.
__device__ __forceinline__ int find_token(const Tile& tile, int at)
{
    if (!tile.begins[tile.data[at]]) return -1;
    if (token_between(tile.data, at, tile.bytes, tile.edges, tile.byte, tile.token) < 0) return -1;
    const i64 text = text_at(tile.offsets, tile.texts, at + tile.base);
    return token_between(
        tile.data, at, (int)(tile.offsets[text + 1] - tile.base), tile.edges, tile.byte, tile.token);
}

// Whether a section ends at `at`, which is not in shared memory. `end` is the end of the text, or -1 as long as it is not
// known. `at` is behind a byte of the text.
__device__ __forceinline__ bool ends_beyond(const Tile& tile, int at, int& end)
{
    if (tile.marked) return at >= tile.bytes || tile.all_marks[at];
    if (end < 0) end = (int)(tile.offsets[text_at(tile.offsets, tile.texts, at - 1 + tile.base) + 1] - tile.base);
    return at >= end || find_token(tile, at) >= 0;
}

// Whether a search for matches begins at `at`, in shared memory, whatever text came before.
__device__ __forceinline__ bool restarts_at(const Tile& tile, int at, int classes, const u8* restarts)
{
    const int here = at - tile.origin;
    if (tile.marks[here]) return true;
    return restarts[tile.class_at[back(tile.text, here)] * classes + tile.class_at[here]];
}

// Whether the code point at `at`, in shared memory and with the given NFC value, may be changed by NFC or make its text
// fall back. normal_form.cu does this exactly. Here, a mark must be sorted, follow at most one other mark, and if it composes
// with some characters, then not with the one before it, which is not a mark.
__device__ __forceinline__ bool may_change(const Tile& tile, const NfcText& tables, int at, int value)
{
    if (value >= DECOMPOSES) return true;
    int here = at - tile.origin;
    if (tile.marks[here]) return false;  // it follows nothing
    const int code = code_point(tile.text + here);
    here = (int)back(tile.text, here);
    const int before = code_point(tile.text + here), other = nfc_value(tables, before);
    if (other == 0) return value & COMPOSES && composed(tables, before, code) >= 0;
    if (value & COMPOSES || other >= DECOMPOSES || ((value & ORDER) && (other & ORDER) > (value & ORDER))) return true;
    return !tile.marks[here] && nfc_value(tables, code_point(tile.text + back(tile.text, here))) != 0;
}

// Lists the pre-tokens of texts. One block per tile.
//
//   data, bytes     text t is data[offsets[t] - base] to data[offsets[t + 1] - base - 1]
//   marked          1: all_marks says where sections begin (text.cuh). 0: sections are texts and what added tokens leave of
//                   them. Then no two tokens may overlap, and none has more than MOST_TOKEN bytes.
//   splits          1: sections are split by one stage (split.cu), every part of which is a match. 0: they are pre-tokens
//   normalizes      1: suspect[t] is set if text t may not be in NFC, and NOT_NFC for any. Tokens are searched for in text
//                   that is not normalized
//   known[j]        the id of pre-token j < room; or ~i if it is to be merged as number i
//   first[t]        the number of the first pre-token of text t, and of all pre-tokens for t = texts
//   start, length   of pre-token number i < rest_room to be merged
//   state, carries  (tiles,) zeros
//   counts          zeros; see above
//
// carries[k], if not 0, is 2 * place + 1. `place` is the first position from the end of tile k on at which a match
// begins. The next tile needs it if there is no restart shortly before its beginning.
extern "C" __global__ void list_pretokens(
    i64 tiles, i64 bytes, const u8* data, i64 texts, const i64* offsets, i64 base, int marked, const u8* all_marks,
    const u8* begins, const int* edges, const u8* byte, const int* token, const int* token_ids, int splits,
    const u16* pages, const u8* values, int classes, const u16* table, const u8* restarts, int normalizes,
    const u16* nfc_pages, const u8* nfc_values, const u64* compositions, u64 composition_mask, const u64* words,
    u64 mask, const u64* long_words, u64 long_mask, const u8* long_bytes, const int* long_offsets, const int* long_ids,
    int longest, i64 room, int* known, i64* first, i64 rest_room, int* start, int* length, bool* suspect, u64* state,
    u64* carries, u64* counts)
{
    __shared__ uint4 text_words[(SEEN + 16) / 16];
    __shared__ u8 class_at[SEEN];
    __shared__ u8 marks[SEEN];
    __shared__ u8 out[TILE];
    __shared__ u16 places[TILE];       // where the pre-tokens of the tile begin
    __shared__ u16 first_bits[BLOCK];  // where pre-tokens and added tokens begin in each segment
    __shared__ u16 mark_bits[BLOCK];   // where there are any marks
    __shared__ int ranks[BLOCK];       // the number of pre-tokens in the segments before
    __shared__ int sums[BLOCK / 32];
    __shared__ i64 current;            // the tile
    __shared__ i64 first_text;         // the first text that begins in shared memory or after it
    __shared__ i64 before;             // the number of pre-tokens in tiles before
    __shared__ int tail;               // `place` of carries
    __shared__ int flags;
    u8* const text = (u8*)text_words;
    const int lane = threadIdx.x % 32;
    const int shift = (int)((u64)data % 16);  // tiles begin at multiples of 16
    const NfcText nfc = {bytes, data, all_marks, nfc_pages, nfc_values, compositions, composition_mask};

    for (;;) {
        __syncthreads();  // shared memory of the tile before is free
        if (threadIdx.x == 0) current = (i64)atomicAdd(counts + TICKET, 1);
        __syncthreads();
        const i64 number = current;
        if (number >= tiles) break;
        const int from = (int)(number * TILE) - shift, behind = from + TILE, origin = from - LEFT;
        const Tile tile = {(int)bytes, marked, data,  all_marks, texts,  offsets, base,    begins,
                           edges,      byte,   token, origin,    text,   marks,   class_at};

        // Step 1. What lies around the texts has the mark NOTHING.
        for (int v = threadIdx.x; v < (SEEN + 16) / 16; v += BLOCK) {
            const int at = origin + 16 * v;
            if (at >= 0 && at + 16 <= bytes) text_words[v] = *(const uint4*)(data + at);
            else for (int k = 0; k < 16; k++) text[16 * v + k] = at + k >= 0 && at + k < bytes ? data[at + k] : 0;
        }
        const i64 low = offsets[0] - base, high = offsets[texts] - base;
        for (int i = threadIdx.x; i < SEEN; i += BLOCK) {
            const int at = origin + i;
            marks[i] = at < low || at >= high ? (u8)NOTHING : marked ? all_marks[at] : (u8)GOES_ON;
        }
        if (threadIdx.x == 0) {
            first_text = first_offset(offsets, texts, origin + base);
            flags = 0;
        }
        __syncthreads();
        if (!marked) {
            for (i64 t = first_text + threadIdx.x; t < texts && offsets[t] - base < origin + SEEN; t += BLOCK)
                if (offsets[t + 1] > offsets[t]) marks[offsets[t] - base - origin] = BEGINS;
            __syncthreads();
            // Tokens do not overlap, so none begins in another. First each thread marks where tokens begin among its own
            // bytes, then what follows these, which are bytes of other threads.
            unsigned mine = 0;  // bit n: a token begins at byte threadIdx.x + n * BLOCK
            for (int i = threadIdx.x, n = 0; i < SEEN; i += BLOCK, n++) {
                if (marks[i] > BEGINS || !begins[text[i]] || find_token(tile, origin + i) < 0) continue;
                marks[i] = TOKEN;
                mine |= 1u << n;
            }
            __syncthreads();
            for (; mine; mine &= mine - 1) {
                int k = (int)threadIdx.x + BLOCK * (__ffs((int)mine) - 1);
                const int found = find_token(tile, origin + k);
                for (int node = 0;; marks[k] = IN_TOKEN) {  // down the trie once more, to the end of the token
                    int edge = edges[node];
                    while (byte[edge] != data[origin + k]) edge++;
                    node = edge + 1;
                    if (++k == SEEN || token[node] == found) break;
                }
                if (k < SEEN && marks[k] == GOES_ON) marks[k] = BEGINS;  // a section begins after a token
            }
            __syncthreads();
        }
        if (splits || normalizes) {
            for (int i = threadIdx.x; i < SEEN; i += BLOCK) {
                if (marks[i] == NOTHING || continues(text[i])) continue;
                class_at[i] = (u8)class_of(text + i, pages, values);
                if (!normalizes || text[i] < 0xcc || marks[i] > BEGINS || i < LEFT || i >= LEFT + TILE) continue;
                const int value = nfc_value(nfc, code_point(text + i));
                if (value && may_change(tile, nfc, origin + i, value)) {
                    atomicOr(&flags, NOT_NFC);
                    suspect[text_at(offsets, texts, origin + i + base)] = true;
                }
            }
        }
        for (int i = threadIdx.x; i < TILE; i += BLOCK) out[i] = GOES_ON;
        __syncthreads();

        // Step 2. A thread goes on to the first restart behind its segment, where another thread has begun, or to the end
        // of the tile. Thread 0 begins at a restart at or before the beginning of the tile.
        if (splits) {
            int place = from + SEGMENT * threadIdx.x;
            const int end = place + SEGMENT;
            bool begun = false;
            if (threadIdx.x == 0) {
                do {
                    while (!marks[place - origin] && continues(text[place - origin])) place--;
                    begun = restarts_at(tile, place, classes, restarts);
                } while (!begun && --place - origin >= MOST_TOKEN);
                if (!begun) {
                    volatile u64* carry = carries + number - 1;
                    [[maybe_unused]] int rounds = 0;
                    while (!*carry) {
                        __nanosleep(100);
                        WAITED(rounds);
                    }
                    place = (int)(*carry >> 1);
                    begun = true;
                }
            } else {
                while (place < end && !marks[place - origin] && continues(text[place - origin])) place++;
                while (place < end && !(begun = restarts_at(tile, place, classes, restarts)))
                    place += width_of(text[place - origin]);
            }
            int text_end = -1;
            while (begun && place < behind) {
                const u8 mark = marks[place - origin];
                if (place >= end && restarts_at(tile, place, classes, restarts)) {
                    begun = false;
                    break;
                }
                if (place >= from && mark) out[place - from] = mark;
                if (mark > BEGINS) {
                    place++;
                    continue;
                }
                if (place >= from) out[place - from] = BEGINS;
                int at = place, matched = place;
                unsigned now = 1;
                do {
                    const int here = at - origin;
                    const bool seen = here < SEEN;
                    const bool over = at > place && (seen ? marks[here] != GOES_ON : ends_beyond(tile, at, text_end));
                    const int column = over ? classes : seen ? class_at[here] : class_of(data + at, pages, values);
                    const unsigned next = table[now * (classes + 1) + column];
                    if (next & 0x8000) matched = at;
                    now = next & 0x7fff;
                    if (!over) at += width_of(seen ? text[here] : data[at]);
                } while (now);
                place = matched;
            }
            if (begun) {  // one thread
                tail = place;
                atomicExch(carries + number, (u64)place << 1 | 1);
            }
        } else {
            for (int i = threadIdx.x; i < TILE; i += BLOCK) out[i] = marks[LEFT + i];
        }
        __syncthreads();

        // Step 3.
        unsigned firsts = 0, any = 0;
        for (int k = 0; k < SEGMENT; k++) {
            const u8 mark = out[SEGMENT * threadIdx.x + k];
            firsts |= (unsigned)is_first(mark) << k;
            any |= (unsigned)(mark != GOES_ON) << k;
        }
        first_bits[threadIdx.x] = (u16)firsts;
        mark_bits[threadIdx.x] = (u16)any;
        int count;
        int rank = sum_of_threads_before(__popc(firsts), sums, count);
        ranks[threadIdx.x] = rank;
        for (; firsts; firsts &= firsts - 1) places[rank++] = (u16)(SEGMENT * threadIdx.x + __ffs((int)firsts) - 1);
        if (threadIdx.x < 32) {
            const i64 sum = (i64)sum_of_tiles_before(state, number, (u64)count, lane);
            if (lane == 0) {
                before = sum;
                if (number == tiles - 1) counts[PRETOKENS] = (u64)(sum + count);
            }
        }
        __syncthreads();
        for (i64 t = first_text + threadIdx.x; t <= texts; t += BLOCK) {
            const i64 at = offsets[t] - base - from;
            if (at < 0) continue;
            if (at >= TILE && number < tiles - 1) break;
            const int segment = (int)least(at / SEGMENT, BLOCK - 1), bit = (int)(at - SEGMENT * segment);
            first[t] = before + (at >= TILE ? count : ranks[segment] + __popc(first_bits[segment] & ((1u << bit) - 1)));
        }

        // Step 4. All threads go through the loop equally often, because a warp reserves places for its pre-tokens to
        // merge.
        for (int i = threadIdx.x; i - (int)threadIdx.x < count; i += BLOCK) {
            int id = 0, size = 0, at = 0;
            if (i < count) {
                const int place = places[i];
                at = from + place;
                if (out[place] == TOKEN) {
                    int end = at + 1;
                    if (marked) while (end < bytes && all_marks[end] == IN_TOKEN) end++;
                    const int found = marked ? token_between(data, at, end, edges, byte, token) : find_token(tile, at);
                    id = token_ids[found];
                } else {
                    // It ends at the next mark.
                    int segment = place / SEGMENT;
                    unsigned bits = mark_bits[segment] & (~1u << place % SEGMENT);
                    while (!bits && ++segment < BLOCK) bits = mark_bits[segment];
                    if (bits) size = SEGMENT * segment + __ffs((int)bits) - 1 - place;
                    else size = (splits ? tail : (int)next_mark(all_marks, least(behind, bytes), bytes)) - at;
                    if (size <= SHORT_WORD) id = short_word(SEEN + 16, text, LEFT + place, size, words, mask);
                    else if (size > longest) id = TO_MERGE;
                    else id = long_word(data + at, size, long_words, long_mask, long_bytes, long_offsets, long_ids);
                }
            }
            const bool rest = id == TO_MERGE;
            const unsigned lanes = __ballot_sync(ALL_LANES, rest);
            if (lanes) {
                const int sum = sum_of_warp(rest && size <= LONGEST ? size : 0);
                u64 reserved = 0;
                if (lane == 0) reserved = atomicAdd(counts + REST, (u64)__popc(lanes) << 32 | (u64)sum);
                const i64 k = (i64)(__shfl_sync(ALL_LANES, reserved, 0) >> 32) + __popc(lanes & ((1u << lane) - 1));
                if (rest && k < rest_room) {
                    start[k] = at;
                    length[k] = size;
                }
                if (rest) id = (int)~k;
                if (size > LONGEST && rest) atomicOr(&flags, TOO_LONG);
            }
            if (i < count && before + i < room) known[before + i] = id;
        }
        __syncthreads();
        if (threadIdx.x == 0 && flags) atomicOr(counts + FLAGS, (u64)flags);
    }
}
