// A batch from the ragged store: ids, mask and positions of B rows, left-padded to `width`, each i64 (B, width).
//
// Row b of the batch is row number rows[b] of the store: ids values[offsets[rows[b]] : offsets[rows[b] + 1]], of which at
// most `limit` (<= width) are kept: the first `head` and, from the row's end, the rest.
// A block per row: its bounds are read once, and neighbouring threads write neighbouring ids. 24 bytes are written for
// each id read, so the writing is what it costs.
extern "C" __global__ void pad(
    i64 batch, const i64* rows, const int* values, const i64* offsets, i64 width, i64 limit, i64 head, i64 pad_id,
    i64* ids, i64* mask, i64* positions)
{
    EACH_BLOCK(b, batch) {
        const i64 start = offsets[rows[b]], end = offsets[rows[b] + 1];
        const i64 kept = end - start < limit ? end - start : limit;
        for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
            const i64 token = column - (width - kept);  // number among those kept, below 0 in the padding
            const i64 cell = b * width + column;
            ids[cell] = token < 0 ? pad_id : values[kept == end - start || token < head ? start + token : end - (kept - token)];
            mask[cell] = token >= 0;
            positions[cell] = token < 0 ? 0 : token;
        }
    }
}
