// Grouping rows by shape: row r has messages first[r] to first[r] + count[r], and code tells messages of one kind.

// hash[r]: a number that rows of one shape share. A thread per row.
extern "C" __global__ void hash_shapes(i64 rows, const i64* first, const i64* count, const i64* code, i64* hash)
{
    EACH_THREAD(r, rows) {
        u64 sum = (u64)count[r];
        for (i64 k = 0; k < count[r]; k++) sum = mixed(sum ^ (u64)code[first[r] + k]);
        hash[r] = (i64)sum;
    }
}

// same[r]: whether row r has the shape of row other[r]: equal hashes are only likely to be equal shapes.
extern "C" __global__ void same_shapes(
    i64 rows, const i64* first, const i64* count, const i64* code, const i64* other, bool* same)
{
    EACH_THREAD(r, rows) {
        const i64 o = other[r];
        bool alike = count[r] == count[o];
        for (i64 k = 0; alike && k < count[r]; k++) alike = code[first[r] + k] == code[first[o] + k];
        same[r] = alike;
    }
}
