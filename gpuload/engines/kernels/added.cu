// Finds added tokens: the leftmost match first, and at the same position the longest one, as `tokenizers` does. The
// trie is that of tokenizer/added_tokens.py.
//
// A sequential search would skip the bytes of a match, so what it finds depends on the text before. In parallel:
//   1. Candidates are listed: the longest token at every position, within one section. This needs no text before it
//      (count_added, prefix sum, list_added).
//   2. Candidates are taken (take_added). Most do not overlap others. Of a group that overlap, one thread takes some
//      from left to right, as the sequential search would.
//   3. White space next to taken tokens is removed (strip_added).
//
// `pass` is 0 in the search for tokens that are not normalized, 1 in the second search for those that are.

// Marks where texts begin, and what lies before and after them as NOTHING. The caller has filled marks with GOES_ON. One
// thread per text, and per byte outside.
extern "C" __global__ void mark_texts(i64 texts, i64 bytes, const i64* offsets, u8* marks)
{
    const i64 low = offsets[0], high = offsets[texts];
    EACH_THREAD(t, texts) {
        if (offsets[t + 1] > offsets[t]) marks[offsets[t]] = BEGINS;
    }
    EACH_THREAD(at, low) marks[at] = NOTHING;
    EACH_THREAD(at, bytes - high) marks[high + at] = NOTHING;
}

// The number of the longest token that begins at `at`, or -1. Walks down the trie until no edge has the next byte or
// the section ends. Edges of a node are sorted by byte; edge e ends in node e + 1.
__device__ __forceinline__ int longest_token(
    i64 bytes, const u8* data, const u8* marks, i64 at, int pass, const int* first, const u8* byte, const int* token,
    const int* flags)
{
    int node = 0, found = -1;
    do {
        int edge = first[node];
        const int end = first[node + 1];
        while (edge < end && byte[edge] < data[at]) edge++;
        if (edge == end || byte[edge] != data[at]) break;
        node = edge + 1;
        if (token[node] >= 0 && (flags[token[node]] & 1) == pass) found = token[node];
        at++;
    } while (at < bytes && marks[at] == GOES_ON);
    return found;
}

// counts[c]: the number of candidates that begin in chunk c. One thread per chunk.
// Most bytes begin no token: `begins` rejects them with one load.
extern "C" __global__ void count_added(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int pass, const u8* begins, const int* first,
    const u8* byte, const int* token, const int* flags, int* counts)
{
    EACH_THREAD(chunk, chunks) {
        int count = 0;
        const i64 end = least((chunk + 1) * step, bytes);
        for (i64 at = chunk * step; at < end; at++)
            if (begins[data[at]] >> pass & 1 && marks[at] <= BEGINS)
                count += longest_token(bytes, data, marks, at, pass, first, byte, token, flags) >= 0;
        counts[chunk] = count;
    }
}

// Lists the candidates: where each begins in start, the number of its token in number. place is the prefix sum of
// counts: the candidates of chunk c are place[c] to place[c + 1] - 1. One thread per chunk.
extern "C" __global__ void list_added(
    i64 chunks, i64 bytes, i64 step, const u8* data, const u8* marks, int pass, const u8* begins, const int* first,
    const u8* byte, const int* token, const int* flags, const i64* place, int* start, int* number)
{
    EACH_THREAD(chunk, chunks) {
        i64 next = place[chunk];
        for (i64 at = chunk * step; next < place[chunk + 1]; at++) {
            if (!(begins[data[at]] >> pass & 1) || marks[at] > BEGINS) continue;
            const int found = longest_token(bytes, data, marks, at, pass, first, byte, token, flags);
            if (found < 0) continue;
            start[next] = (int)at;
            number[next++] = found;
        }
    }
}

// Marks the bytes of taken tokens, and the byte after each as the beginning of a section. One thread per candidate.
//
// Only candidates that no earlier one overlaps do work: the sequential search arrives at such a position in any case.
// The thread then goes through the group of overlapping candidates that follows, and takes each one that does not
// overlap the last one taken. No token is longer than `longest`, which bounds the search for an earlier overlap.
extern "C" __global__ void take_added(
    i64 candidates, const int* start, const int* number, const int* lengths, i64 longest, i64 bytes, u8* marks)
{
    EACH_THREAD(k, candidates) {
        bool reached = false;
        for (i64 j = k - 1; !reached && j >= 0 && start[k] - start[j] < longest; j--)
            reached = start[j] + (i64)lengths[number[j]] > start[k];
        if (reached) continue;
        i64 free = 0;                   // the end of the last token taken
        i64 reach = start[k] + (i64)1;  // the furthest end of any candidate so far; the group ends before the next gap
        for (i64 j = k; j < candidates && start[j] < reach; j++) {
            const i64 end = start[j] + (i64)lengths[number[j]];
            if (end > reach) reach = end;
            if (start[j] < free) continue;
            free = end;
            marks[start[j]] = TOKEN;
            for (i64 at = start[j] + (i64)1; at < end; at++) marks[at] = IN_TOKEN;
            // A section begins after the token, unless another token does, which this or another thread marks.
            i64 next = j + 1;
            while (next < candidates && start[next] < end) next++;
            const bool token_follows = next < candidates && start[next] == end;
            if (!token_follows && end < bytes && marks[end] == GOES_ON) marks[end] = BEGINS;
        }
    }
}

// Unicode's property White_Space; WHITE_SPACE of tokenizer/spec.py.
__device__ __forceinline__ bool is_white_space(int code)
{
    return (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680
        || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f
        || code == 0x3000;
}

// Removes white space before tokens with lstrip and after tokens with rstrip: marks it NOTHING. One thread per
// candidate; those that were not taken return. It stays within the text and stops at other tokens. Two tokens may
// remove the same white space; both write the same marks. After removed white space a section begins, unless there is a
// token.
extern "C" __global__ void strip_added(
    i64 candidates, const int* start, const int* number, const int* lengths, const int* flags, i64 texts,
    const i64* offsets, const u8* data, u8* marks)
{
    EACH_THREAD(k, candidates) {
        const int sides = flags[number[k]];
        if (!(sides & 6) || marks[start[k]] != TOKEN) continue;  // 2: LSTRIP, 4: RSTRIP
        const i64 text = text_at(offsets, texts, start[k]);
        for (i64 at = start[k]; sides & 2 && at > offsets[text];) {
            const i64 one = back(data, at);
            if (marks[one] >= TOKEN || !is_white_space(code_point(data + one))) break;
            while (at > one) marks[--at] = NOTHING;
        }
        i64 at = start[k] + (i64)lengths[number[k]];
        if (!(sides & 4)) continue;
        while (at < offsets[text + 1] && marks[at] < TOKEN && is_white_space(code_point(data + at)))
            for (i64 end = at + width_of(data[at]); at < end; at++) marks[at] = NOTHING;
        if (at < offsets[text + 1] && marks[at] == GOES_ON) marks[at] = BEGINS;
    }
}
