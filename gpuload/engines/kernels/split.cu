// Sections split into pieces, and the list of all pieces.

// One stage of a splitter (tokenizer/splitter.py): the pieces that sections are split into begin in out_marks, which
// the caller has filled with GOES_ON. `keep` is 0 for all pieces, 1 for the matches, 2 for the gaps between them.
//
// A thread begins at the first place of its chunk where the search for a match begins anew whatever lies before
// (`restarts`, tokenizer/restarts.py, or a mark), and goes on to the first such place behind its chunk, where another
// thread began. A chunk without such a place is the work of the thread before.
extern "C" __global__ void split(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, const u16* pages, const u8* values, int classes,
    const u16* table, const u8* restarts, int keep, u8* out_marks)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        i64 place = chunk * step;
        int restart = 0;  // 0: none here, 1: a match ended here, or a section begins, 2: here a gap goes on
        // Bytes of an added token are gone through one by one; others belong to the code point before.
        while (place < end && marks[place] == GOES_ON && continues(data[place])) place++;
        int before = place < end && marks[place] == GOES_ON ? class_of(data + back(data, place), pages, values) : 0;
        while (place < end && !(restart = marks[place] != GOES_ON)) {
            const int here = class_of(data + place, pages, values);
            restart = restarts[before * classes + here];
            if (restart) break;
            before = here;
            place += width_of(data[place]);
        }
        if (place >= end) continue;

        bool in_gap = restart == 2;
        while (place < bytes) {
            const u8 mark = marks[place];
            if (place >= end) {
                if (mark) break;
                const int last = class_of(data + back(data, place), pages, values);
                if (restarts[last * classes + class_of(data + place, pages, values)]) break;
            }
            if (mark > BEGINS) {
                out_marks[place++] = mark;
                continue;
            }
            // The longest way that a match goes on, and where it last could have ended.
            i64 at = place, matched = -1;
            unsigned state = 1;
            do {
                const bool over = at >= bytes || (at > place && marks[at]);
                const unsigned next = table[state * (classes + 1) + (over ? classes : class_of(data + at, pages, values))];
                if (next & 0x8000) matched = at;
                state = next & 0x7fff;
                if (!over) at += width_of(data[at]);
            } while (state);
            const bool matches = matched >= 0;
            if (!matches) matched = place + width_of(data[place]);
            if (mark == BEGINS) in_gap = false;
            if (keep == (matches ? 2 : 1)) {
                for (i64 k = place; k < matched; k++) out_marks[k] = NOTHING;
            } else if (matches || !in_gap) {
                out_marks[place] = BEGINS;
            }
            in_gap = !matches;
            place = matched;
        }
    }
}

// Sections of a tokenizer that merges characters, cut in place where no two that a merge brings side by side are so
// (tokenizer/fallback.py). A thread per chunk.
extern "C" __global__ void cut_characters(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u64* adjacent, u64 mask, u8* marks)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++)
            if (marks[at] == GOES_ON && !continues(data[at])
                && !has_pair(adjacent, mask, code_point(data + back(data, at)), code_point(data + at)))
                marks[at] = BEGINS;
    }
}

__device__ __forceinline__ bool is_piece(u8 mark)
{
    return mark == BEGINS || mark == TOKEN;
}

// The first byte at `at` or behind it that is marked, or `end`. Eight are looked at at once.
__device__ __forceinline__ i64 next_mark(const u8* marks, i64 at, i64 end)
{
    for (;; at++) {
        if ((u64)(marks + at) % 8 == 0)
            while (at + 8 <= end && *(const u64*)(marks + at) == 0) at += 8;
        if (at >= end || marks[at]) return at;
    }
}

// How many pieces begin from byte `at` to byte `end`.
__device__ __forceinline__ int pieces_between(const u8* marks, i64 at, i64 end)
{
    int count = 0;
    while ((at = next_mark(marks, at, end)) < end) count += is_piece(marks[at++]);
    return count;
}

// counts[c]: how many pieces begin in chunk c. A thread per chunk.
extern "C" __global__ void count_pieces(i64 chunks, i64 bytes, i64 step, const u8* marks, int* counts)
{
    EACH_THREAD(chunk, chunks)
        counts[chunk] = pieces_between(marks, chunk * step, least((chunk + 1) * step, bytes));
}

// first[t]: the number of the first piece that begins at offsets[t] or behind it; chunk c's first is place[c].
extern "C" __global__ void first_pieces(
    i64 count, const i64* offsets, i64 step, const u8* marks, const i64* place, i64* first)
{
    EACH_THREAD(t, count) {
        const i64 chunk = offsets[t] / step;
        first[t] = place[chunk] + pieces_between(marks, chunk * step, offsets[t]);
    }
}

// Where pieces begin and how long they are; ~id for added tokens. A thread per chunk.
extern "C" __global__ void list_pieces(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, const i64* place, const int* edges,
    const u8* byte, const int* token, const int* ids, int* start, int* length)
{
    EACH_THREAD(chunk, chunks) {
        i64 at = chunk * step;
        for (i64 piece = place[chunk]; piece < place[chunk + 1];) {
            at = next_mark(marks, at, bytes);
            const i64 from = at++;
            if (!is_piece(marks[from])) continue;
            start[piece] = (int)from;
            if (marks[from] == BEGINS) {
                at = next_mark(marks, at, bytes);
                length[piece++] = (int)(at - from);
                continue;
            }
            int node = 0;
            i64 letter = from;
            do {
                int edge = edges[node];
                while (byte[edge] != data[letter]) edge++;
                node = edge + 1;
                letter++;
            } while (letter < bytes && marks[letter] == IN_TOKEN);
            length[piece++] = ~ids[token[node]];
        }
    }
}
