// Builds a batch from the store of tokens: B sequences, padded to `width`. Each of them consists of pieces of rows of the
// store: of a whole row, for example, or of its beginning and its end, or of a prompt and the completion of another row.
//
// Row r of the store begins at address[r]. `piece` is i64, four arrays one after the other: (pieces + 1,) offsets of the
// pieces in the tokens of all sequences; (pieces,) their rows; (pieces,) the first token of each in its row; and
// (batch + 1,) the first piece of each sequence. No sequence has more than `width` tokens.
//
// `out` is i64 (k, B, width): ids without bits, `pad_id` in the padding; mask; and those planes that are named: positions
// (1), 0 in the padding; labels (2), the id if it has the bit LOSS, and NO_LABEL otherwise; whether it has that bit (4).
// With 8, float (B, width) follows: the weight of the loss, from `weights` by its number, and 0 where there is no loss.
//
// One block per sequence, one thread per column, so that neighboring threads write neighboring ids. 8 * k bytes are
// written for 4 read: the kernel is bound by the bandwidth of these writes.
extern "C" __global__ void pad(
    const i64* address, i64 pad_id, int left, int planes, const float* weights, i64 batch, i64 pieces, const i64* piece,
    i64 width, i64* out)
{
    const i64 plane = batch * width;
    const i64* offset = piece;
    const i64* row = piece + pieces + 1;
    const i64* first = row + pieces;
    const i64* sequence = first + pieces;
    EACH_BLOCK(b, batch) {
        const i64 begin = offset[sequence[b]], kept = offset[sequence[b + 1]] - begin;
        for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
            const i64 token = left ? column - (width - kept) : column;  // its number in the sequence
            const bool inside = token >= 0 && token < kept;
            int found = 0;
            if (inside) {
                const i64 at = begin + token;
                i64 p = sequence[b];
                while (offset[p + 1] <= at) p++;
                found = ((const int*)address[row[p]])[first[p] + at - offset[p]];
            }
            const i64 id = found & IDS;
            i64* cell = out + b * width + column;
            cell[0] = inside ? id : pad_id;
            cell[plane] = inside;
            cell += 2 * plane;
            if (planes & 1) {
                *cell = inside ? token : 0;
                cell += plane;
            }
            if (planes & 2) {
                *cell = found & LOSS ? id : NO_LABEL;
                cell += plane;
            }
            if (planes & 4) {
                *cell = (found & LOSS) != 0;
                cell += plane;
            }
            if (planes & 8) {
                float* weight = (float*)(cell - (b * width + column)) + b * width + column;
                *weight = found & LOSS ? weights[WEIGHT(found)] : 0;
            }
        }
    }
}
