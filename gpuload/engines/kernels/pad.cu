// Builds a batch from the ragged store: ids, mask and positions of B rows, left-padded to `width`; each is i64 (B,
// width).
//
// Row b of the batch is row rows[b] of the store, that is, values[offsets[rows[b]] : offsets[rows[b] + 1]]. A row of
// more than `limit` ids (limit <= width) is truncated: its first `head` ids are kept, and the last limit - head. head =
// limit truncates on the right, 0 on the left, limit / 2 in the middle.
//
// One block per row, one thread per column, so that neighbouring threads write neighbouring ids. 24 bytes are written
// for 4 read: the kernel is bound by the bandwidth of these writes.
extern "C" __global__ void pad(
    i64 batch, const i64* rows, const int* values, const i64* offsets, i64 width, i64 limit, i64 head, i64 pad_id,
    i64* ids, i64* mask, i64* positions)
{
    EACH_BLOCK(b, batch) {
        const i64 start = offsets[rows[b]], end = offsets[rows[b] + 1];
        const i64 kept = end - start < limit ? end - start : limit;
        for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
            const i64 token = column - (width - kept);  // index among the kept ids, negative in the padding
            const i64 cell = b * width + column;
            const bool at_front = kept == end - start || token < head;
            ids[cell] = token < 0 ? pad_id : values[at_front ? start + token : end - (kept - token)];
            mask[cell] = token >= 0;
            positions[cell] = token < 0 ? 0 : token;
        }
    }
}
