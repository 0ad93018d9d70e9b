// Groups rows by shape. Row r has the messages first[r] to first[r] + count[r] - 1; code[m] is a number for the role
// and the fields of message m, so two rows have the same shape if their sequences of codes are equal.

// hash[r]: a hash of the shape of row r. One thread per row: conversations are short.
extern "C" __global__ void hash_shapes(i64 rows, const i64* first, const i64* count, const i64* code, i64* hash)
{
    EACH_THREAD(r, rows) {
        u64 sum = (u64)count[r];
        for (i64 k = 0; k < count[r]; k++) sum = mixed(sum ^ (u64)code[first[r] + k]);
        hash[r] = (i64)sum;
    }
}

// same[r]: whether row r has the same shape as row other[r]. Equal hashes do not imply it. One thread per row.
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
