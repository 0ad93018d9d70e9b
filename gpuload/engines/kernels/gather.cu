// Writing prompts: for every row the pieces its path is made of, then all pieces of all rows in one copy.

// Where every piece lies and how long it is.
//
// A row is a run of segments in `table`, from number segment[row], as many as it has pieces. A segment is four numbers:
//   a literal  { address of its bytes, its length, 0, 0 }
//   a text     { address of the column's bytes, which message, address of the starts, address of the lengths }
// starts and lengths are i64 arrays over all messages, and first[row] is the row's first message.
// Row r's pieces are numbers bounds[r] to bounds[r + 1]. A thread per row.
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

// Bytes `from` to `to` of all pieces laid end to end, into out[0 : to - from].
//
// Piece p is offsets[p + 1] - offsets[p] bytes at address[p]. A thread writes 16 bytes, wherever pieces begin and end:
// one row of megabytes is as good as a million small ones. Inside a long piece it reads aligned words that lie wholly in
// that piece, and shifts.
extern "C" __global__ void copy_pieces(
    i64 pieces, const i64* address, const i64* offsets, i64 from, i64 to, u8* out)
{
    EACH_THREAD(chunk, (to - from + 15) / 16) {
        i64 at = from + 16 * chunk;
        const int size = to - at < 16 ? (int)(to - at) : 16;
        // The last piece that begins at or before `at`: the one that is not empty among those that begin there.
        i64 piece = 0;
        for (i64 above = pieces; above - piece > 1;) {
            const i64 middle = piece + (above - piece) / 2;
            if (offsets[middle] <= at) piece = middle;
            else above = middle;
        }
        const u8* source = (const u8*)address[piece] + (at - offsets[piece]);
        i64 left = offsets[piece + 1] - at;
        u64 low = 0, high = 0;
        if (size == 16 && at - offsets[piece] >= 8 && left >= 24) {
            const int shift = (int)((u64)source % 8) * 8;
            const u64* word = (const u64*)(source - (u64)source % 8);
            low = word[0];
            high = word[1];
            if (shift) {
                low = low >> shift | high << (64 - shift);
                high = high >> shift | word[2] << (64 - shift);
            }
        } else {
            for (int k = 0; k < size; k++, left--) {
                while (left == 0) {
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
