// Builds a batch from the store of ids: ids, mask and positions of B rows, left-padded to `width`. They are the three
// planes of `out`, i64 (3, B, width), in this order.
//
// Row b of the batch is row r = rows[b] of the store: length[r] ids at address[r]. A row of more than `limit` ids (limit
// <= width) is truncated: its first `head` ids are kept, and the last limit - head. head = limit truncates on the right,
// 0 on the left, limit / 2 in the middle.
//
// One block per row, one thread per column, so that neighbouring threads write neighbouring ids. 24 bytes are written
// for 4 read: the kernel is bound by the bandwidth of these writes.
extern "C" __global__ void pad(
    const i64* address, const i64* length, i64 limit, i64 head, i64 pad_id, i64 batch, const i64* rows, i64 width,
    i64* out)
{
    const i64 plane = batch * width;
    EACH_BLOCK(b, batch) {
        const int* values = (const int*)address[rows[b]];
        const i64 all = length[rows[b]];
        const i64 kept = all < limit ? all : limit;
        for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
            const i64 token = column - (width - kept);  // index among the kept ids, negative in the padding
            const i64 cell = b * width + column;
            const bool at_front = kept == all || token < head;
            out[cell] = token < 0 ? pad_id : values[at_front ? token : all - (kept - token)];
            out[plane + cell] = token >= 0;
            out[2 * plane + cell] = token < 0 ? 0 : token;
        }
    }
}

// The same for rows with loss, padded on the right, with labels: `out` is i64 (4, B, width). A label is the id if it has
// the bit LOSS, which is removed everywhere, and NO_LABEL otherwise and in the padding. 32 bytes are written for 4 read.
extern "C" __global__ void pad_labelled(
    const i64* address, const i64* length, i64 limit, i64 head, i64 pad_id, i64 batch, const i64* rows, i64 width,
    i64* out)
{
    const i64 plane = batch * width;
    EACH_BLOCK(b, batch) {
        const int* values = (const int*)address[rows[b]];
        const i64 all = length[rows[b]];
        const i64 kept = all < limit ? all : limit;
        for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
            const bool inside = column < kept, at_front = kept == all || column < head;
            const int found = inside ? values[at_front ? column : all - (kept - column)] : 0;
            const i64 cell = b * width + column, id = found & IDS;
            out[cell] = inside ? id : pad_id;
            out[plane + cell] = inside;
            out[2 * plane + cell] = inside ? column : 0;
            out[3 * plane + cell] = found & LOSS ? id : NO_LABEL;
        }
    }
}
