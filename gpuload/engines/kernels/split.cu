// Splits sections into pre-tokens, for splitters of several stages, and others that tiles.cu does not split.

// Applies one stage of a splitter (tokenizer/splitter.py). Marks the beginnings of pre-tokens in out_marks, which the
// caller has filled with GOES_ON. `keep` is 0 for all pre-tokens, 1 for the matches, 2 for the gaps between them.
//
// `table` has `classes` + 1 columns, the last one for the end of the text; here also for the end of a section. State 0
// is dead, 1 the start. Bit 0x8000 of a transition says that a match ends before the code point just read.
//
// One thread per chunk. A sequential search continues from match to match, so a thread cannot begin just anywhere. It
// begins at the first restart in its chunk: a marked byte, or a boundary between classes at which the search begins
// again whatever text came before (`restarts` of tokenizer/splitter.py). It goes on past the end of its chunk to the
// first restart there, where another thread has begun. A chunk without a restart is split by the thread of an earlier
// chunk.
extern "C" __global__ void split(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, const u16* pages, const u8* values, int classes,
    const u16* table, const u8* restarts, int keep, u8* out_marks)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        i64 place = chunk * step;
        int restart = 0;  // 0: none (NOWHERE); 1: a match ends here (CLOSED), or there is a mark; 2: in a gap (OPEN)
        // Skip the rest of a code point that began in the chunk before. (Bytes of added tokens have marks: no
        // skipping.)
        while (place < end && marks[place] == GOES_ON && continues(data[place])) place++;
        int before = place < end && marks[place] == GOES_ON ? class_of(data + back(data, place), pages, values) : 0;
        while (place < end && !(restart = marks[place] != GOES_ON)) {
            const int here = class_of(data + place, pages, values);
            restart = restarts[before * classes + here];
            if (restart) break;
            before = here;
            place += width_of(data[place]);
        }
        if (place >= end) continue;  // no restart in this chunk

        bool in_gap = restart == 2;
        while (place < bytes) {
            const u8 mark = marks[place];
            if (place >= end) {  // behind the chunk: stop at the first restart
                if (mark) break;
                const int last = class_of(data + back(data, place), pages, values);
                if (restarts[last * classes + class_of(data + place, pages, values)]) break;
            }
            if (mark > BEGINS) {  // not in a section: copy the mark
                out_marks[place++] = mark;
                continue;
            }
            // Run the DFA from here until it is dead. The last match it reports has the highest priority.
            i64 at = place, matched = -1;
            unsigned state = 1;
            do {
                const bool over = at >= bytes || (at > place && marks[at]);
                const int column = over ? classes : class_of(data + at, pages, values);
                const unsigned next = table[state * (classes + 1) + column];
                if (next & 0x8000) matched = at;
                state = next & 0x7fff;
                if (!over) at += width_of(data[at]);
            } while (state);
            // If no match begins here, this code point belongs to a gap. A gap begins with the first such code point
            // and does not continue across the beginning of a section.
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

// For tokenizers with byte fallback (tokenizer/fallback.py): cuts sections between two characters that are next to each
// other in no merged entry. One thread per chunk. It changes marks while other threads read them, which is safe: each
// thread reads and writes only marks of its own chunk.
extern "C" __global__ void cut_characters(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u64* adjacent, u64 mask, u8* marks)
{
    EACH_THREAD(chunk, chunks) {
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++)
            if (marks[at] == GOES_ON && !continues(data[at])
                && find_pair(adjacent, mask, code_point(data + back(data, at)), code_point(data + at), 0) == EMPTY)
                marks[at] = BEGINS;
    }
}

// Whether a pre-token or an added token begins at a byte with this mark.
__device__ __forceinline__ bool is_first(u8 mark)
{
    return mark == BEGINS || mark == TOKEN;
}

// The first marked byte from `at` on, or `end`. Most marks are GOES_ON, which is 0: once `at` is aligned, it tests
// eight at a time.
__device__ __forceinline__ i64 next_mark(const u8* marks, i64 at, i64 end)
{
    for (;; at++) {
        if ((u64)(marks + at) % 8 == 0)
            while (at + 8 <= end && *(const u64*)(marks + at) == 0) at += 8;
        if (at >= end || marks[at]) return at;
    }
}
