// Builds a packed batch from the store of ids: one flat row of `tokens` tokens, made of pieces of rows. `out` has
//   i64 (3, tokens)   ids, labels and positions
//   int (tokens)      the piece of each token
//   int (pieces + 1)  where each piece begins, and the end of the last one
//   float (tokens)    if `weighted`: the weight of each label's loss, from `weights` by its number; 0 for NO_LABEL
// one after the other, in this order.
//
// `piece` has three parts too: offset[pieces + 1], row[pieces] and first[pieces]. Piece p are the tokens offset[p] to
// offset[p + 1] - 1 of the batch, at least one. They come from row r = row[p] of the store, whose ids begin at address[r],
// beginning with its token first[p]. Positions count from the piece's first token. A label is the id if it has the bit
// LOSS, which is removed everywhere; it is NO_LABEL without the bit, and for the first token of a piece, which nothing
// predicts. A batch has fewer than 2^31 tokens.
//
// One thread per token, so that neighboring threads write neighboring tokens, however long the pieces are, and one for the
// last bound. 28 bytes are written for 4 read: the kernel is bound by the bandwidth of these writes. The threads of a
// warp are mostly in the same piece, so their binary searches read the same few offsets, from cache.
extern "C" __global__ void pack(
    const i64* address, int weighted, const float* weights, i64 pieces, const i64* piece, i64 tokens, i64* out)
{
    const i64* offset = piece;
    const i64* row = piece + pieces + 1;
    const i64* first = row + pieces;
    int* number = (int*)(out + 3 * tokens);
    int* bounds = number + tokens;
    float* weight = (float*)(bounds + pieces + 1);
    EACH_THREAD(at, tokens + 1) {
        if (at == tokens) {  // the end of the last piece
            bounds[pieces] = (int)at;
            continue;
        }
        // Binary search for the last piece that begins at `at` or before it.
        int p = 0;
#pragma unroll 1  // unrolled, the loop would need too many registers
        for (int above = (int)pieces; above - p > 1;) {
            const int middle = p + (above - p) / 2;
            if (offset[middle] <= at) p = middle;
            else above = middle;
        }
        const i64 position = at - offset[p];
        const int found = ((const int*)address[row[p]])[first[p] + position];
        const i64 id = found & IDS;
        out[at] = id;
        const bool learned = position > 0 && (found & LOSS);
        out[tokens + at] = learned ? id : NO_LABEL;
        if (weighted) weight[at] = learned ? weights[WEIGHT(found)] : 0;
        out[2 * tokens + at] = position;
        number[at] = p;
        if (position == 0) bounds[p] = (int)at;
    }
}
