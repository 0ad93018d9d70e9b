// Preference data. A pair is one row of ids: what both sequences begin with, then the rest of the chosen one, then the
// rest of the rejected one; the bits of common.cuh say so (core/marks.py).

// Finds how many leading ids two columns of rows have in common, whatever their bits. The caller sets common[r] to the
// length of the shorter of the two rows, length[r] and other_length[r] ids at address[r] and other[r]. One warp per row:
// its lanes race with atomicMin, and each of them stops at the first difference that it finds.
extern "C" __global__ void common_ids(
    i64 rows, const i64* address, const i64* length, const i64* other, const i64* other_length, i64* common)
{
    EACH_WARP(row, rows) {
        const int* one = (const int*)address[row];
        const int* two = (const int*)other[row];
        const i64 size = length[row] < other_length[row] ? length[row] : other_length[row];
        for (i64 k = lane; k < size; k += 32) {
            // If another lane has found an earlier difference, this one can only find later ones. `volatile`: read from
            // memory each time, because others write it.
            if (*(volatile const i64*)(common + row) < k) break;
            if ((one[k] ^ two[k]) & IDS) {
                atomicMin(common + row, k);
                break;
            }
        }
    }
}

// Finds how many leading bytes two columns of texts have in common. The caller sets common[r] to the length of the shorter
// text of row r, or to less; texts are those of `data` from start[r] on. One warp per row, as in common_ids.
extern "C" __global__ void common_bytes(
    i64 rows, const u8* data, const i64* start, const u8* other, const i64* other_start, i64* common)
{
    EACH_WARP(row, rows) {
        const u8* one = data + start[row];
        const u8* two = other + other_start[row];
        // Lanes that start later may read a smaller bound; they need not look beyond it.
        const i64 size = *(volatile const i64*)(common + row);
        for (i64 k = lane; k < size; k += 32) {
            if (*(volatile const i64*)(common + row) < k) break;
            if (one[k] != two[k]) {
                atomicMin(common + row, k);
                break;
            }
        }
    }
}

// Writes rows with their bits. Row r is out[offsets[r]] to out[offsets[r + 1] - 1]: the ids that the texts of
// the row share, without bits; those of the chosen sequence, with CHOSEN from its id shared[r] on; then those of the
// rejected one from its id shared[r] on, with REJECTED. The ids of either sequence have LOSS from its own `begin` on.
// A sequence is length[r] ids without bits at address[r]; `start` are those that are written first. Rows with one
// completion are written as pairs of equal sequences that share all of their ids.
//
// One warp per row, so that neighboring lanes write neighboring ids. 4 bytes are written for 4 read.
extern "C" __global__ void lay_pairs(
    i64 rows, const i64* offsets, const i64* start, const i64* start_length, const i64* shared, const i64* chosen,
    const i64* chosen_length, const i64* chosen_begin, const i64* rejected, const i64* rejected_begin, int* out)
{
    EACH_WARP(row, rows) {
        const int* head = (const int*)start[row];
        const int* one = (const int*)chosen[row];
        const int* two = (const int*)rejected[row];
        for (i64 k = lane; k < start_length[row]; k += 32) out[offsets[row] + k] = head[k];
        const i64 first = offsets[row] + start_length[row], size = offsets[row + 1] - first, own = chosen_length[row];
        for (i64 k = lane; k < size; k += 32) {
            const bool is_chosen = k < own;
            const i64 at = is_chosen ? k : shared[row] + (k - own);  // the number of the id in its sequence
            int id = is_chosen ? one[at] : two[at];
            if (at >= shared[row]) id |= is_chosen ? CHOSEN : REJECTED;
            if (at >= (is_chosen ? chosen_begin : rejected_begin)[row]) id |= LOSS;
            out[first + k] = id;
        }
    }
}
