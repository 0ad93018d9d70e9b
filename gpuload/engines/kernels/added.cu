// Added tokens: leftmost first, of those the longest; tables are those of tokenizer/trie.py.
//
// What may be found at a place does not depend on what is found elsewhere, so candidates are listed first, each the
// longest at its place, inside one section. Most do not overlap and are taken. Where some do, one thread takes them from
// left to right, beginning with one that no earlier candidate reaches: whatever lies before, the search comes by there.
// `pass` is 0 for tokens that are looked for in the text as it is, then 1 for those that are so in normalized text.

// The number of the longest token that begins at `at`, or -1.
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

// counts[c]: how many candidates begin in chunk c. A byte that begins no token costs one look. A thread per chunk.
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

// Where they begin, and the number of the token. Those of chunk c are candidates place[c] to place[c + 1].
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

// Marks the tokens that are taken, and what follows each as a section that begins. `longest` is the length of the
// longest token. A thread per candidate; those that an earlier one reaches leave the work to it.
extern "C" __global__ void take_added(
    i64 candidates, const int* start, const int* number, const int* lengths, i64 longest, i64 bytes, u8* marks)
{
    EACH_THREAD(k, candidates) {
        bool reached = false;
        for (i64 j = k - 1; !reached && j >= 0 && start[k] - start[j] < longest; j--)
            reached = start[j] + (i64)lengths[number[j]] > start[k];
        if (reached) continue;
        i64 free = 0;                         // from here on nothing is taken yet
        i64 reach = start[k] + (i64)1;        // no candidate so far goes further
        for (i64 j = k; j < candidates && start[j] < reach; j++) {
            const i64 end = start[j] + (i64)lengths[number[j]];
            if (end > reach) reach = end;
            if (start[j] < free) continue;
            free = end;
            marks[start[j]] = TOKEN;
            for (i64 at = start[j] + (i64)1; at < end; at++) marks[at] = IN_TOKEN;
            i64 next = j + 1;
            while (next < candidates && start[next] < end) next++;
            const bool token_follows = next < candidates && start[next] == end;
            if (!token_follows && end < bytes && marks[end] == GOES_ON) marks[end] = BEGINS;
        }
    }
}

__device__ __forceinline__ bool is_white_space(int code)
{
    return (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680
        || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f
        || code == 0x3000;
}

// White space of the same text that taken tokens swallow, before them or after them. A thread per candidate.
// Two tokens may swallow the same; a section begins behind it only where no token stands.
extern "C" __global__ void strip_added(
    i64 candidates, const int* start, const int* number, const int* lengths, const int* flags, i64 texts,
    const i64* offsets, const u8* data, u8* marks)
{
    EACH_THREAD(k, candidates) {
        const int sides = flags[number[k]];
        if (!(sides & 6) || marks[start[k]] != TOKEN) continue;
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
