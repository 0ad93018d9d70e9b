// Writes prompts: first the address and length of every segment of every row, then all segments in one copy. (In this
// file a segment of one row is called a piece; segments are those of a path, shared by many rows.)

// Computes the address and the length of every piece. One thread per row.
//
// The pieces of row r are bounds[r] to bounds[r + 1] - 1. They are described by as many entries of `table`, beginning
// with entry segment[r]. An entry has four numbers:
//   a literal  { address of its bytes, its length, 0, 0 }
//   a text     { address of the column's bytes, message's index in its row, address of starts, address of lengths }
// starts and lengths are i64 arrays over all messages of all rows; the messages of row r begin at first[r].
extern "C" __global__ void lay_pieces(
    i64 rows, const i64* bounds, const i64* segment, const i64* first, const i64* table, i64* address, i64* length)
{
    EACH_THREAD(row, rows) {
        const i64* entry = table + 4 * segment[row];
        for (i64 piece = bounds[row]; piece < bounds[row + 1]; piece++, entry += 4) {
            if (entry[2] == 0) {
                address[piece] = entry[0];
                length[piece] = entry[1];
            } else {
                const i64 message = first[row] + entry[1];
                address[piece] = entry[0] + ((const i64*)entry[2])[message];
                length[piece] = ((const i64*)entry[3])[message];
            }
        }
    }
}

// Concatenates pieces: bytes `from` to `to` of their concatenation go to out[0 : to - from]. One thread per 16 bytes of
// output, wherever pieces begin and end, so the work per thread does not depend on the lengths of pieces.
//
// Piece p has offsets[p + 1] - offsets[p] bytes, at address[p]. `out` and the sources may have any alignment, so a
// thread cannot load 16 bytes at once. Inside a long piece it loads three aligned 8-byte words that cover its 16 bytes,
// and shifts them into place. Otherwise it copies byte by byte.
extern "C" __global__ void copy_pieces(
    i64 pieces, const i64* address, const i64* offsets, i64 from, i64 to, u8* out)
{
    EACH_THREAD(chunk, (to - from + 15) / 16) {
        i64 at = from + 16 * chunk;
        const int size = to - at < 16 ? (int)(to - at) : 16;
        // Binary search for the last piece with an offset of at most `at`. Of pieces with the same offset all but the
        // last are empty, so this one contains `at`.
        i64 piece = 0;
        for (i64 above = pieces; above - piece > 1;) {
            const i64 middle = piece + (above - piece) / 2;
            if (offsets[middle] <= at) piece = middle;
            else above = middle;
        }
        const u8* source = (const u8*)address[piece] + (at - offsets[piece]);
        i64 left = offsets[piece + 1] - at;  // bytes from here to the end of the piece
        u64 low = 0, high = 0;               // the 16 bytes, little-endian
        // The aligned words begin at most 7 bytes before the first byte and end at most 24 bytes after it. Both must be
        // inside the piece, because memory outside may not be readable.
        if (size == 16 && at - offsets[piece] >= 8 && left >= 24) {
            const int shift = (int)((u64)source % 8) * 8;
            const u64* word = (const u64*)(source - (u64)source % 8);
            low = word[0];
            high = word[1];
            if (shift) {  // a shift by 64 - 0 would be undefined
                low = low >> shift | high << (64 - shift);
                high = high >> shift | word[2] << (64 - shift);
            }
        } else {
            for (int k = 0; k < size; k++, left--) {
                while (left == 0) {  // the next piece that is not empty
                    piece++;
                    source = (const u8*)address[piece];
                    left = offsets[piece + 1] - offsets[piece];
                }
                const u64 byte = *source++;
                if (k < 8) low |= byte << (8 * k);
                else high |= byte << (8 * (k - 8));
            }
        }
        u8* target = out + 16 * chunk;
        if (size == 16 && (u64)target % 16 == 0) {
            ulonglong2 both;
            both.x = low;
            both.y = high;
            *(ulonglong2*)target = both;
        } else {
            for (int k = 0; k < size; k++) target[k] = (u8)((k < 8 ? low : high) >> (8 * (k % 8)));
        }
    }
}
