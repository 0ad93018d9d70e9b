// From the pre-tokens to merge (tiles.cu) to the ids of all texts. Number i of them has length[i] bytes at
// data[start[i]].

#define NO_IDS (-2147483647 - 1)  // in known[j]: pre-token j is of a text that falls back
#define LISTED 4                  // pre-tokens per thread of write_ids

// Makes texts fall back that have a pre-token too long to merge: sets fallback[t], and NO_IDS for their pre-tokens. One
// warp per pre-token to merge.
extern "C" __global__ void drop_texts(
    i64 count, const int* start, const int* length, i64 texts, const i64* offsets, i64 base, const i64* first, int* known,
    bool* fallback)
{
    EACH_WARP(i, count) {
        if (length[i] <= LONGEST) continue;
        const i64 text = text_at(offsets, texts, start[i] + base);
        for (i64 j = first[text] + lane; j < first[text + 1]; j += 32) known[j] = NO_IDS;
        if (lane == 0) fallback[text] = true;
    }
}

// original[i]: the number of a pre-token with the same bytes as number i, the same one for all that are equal, so that
// only one of them is merged. Which one is left to chance. Adds the numbers of these to bins. One thread per pre-token.
//
// `table` has more slots than there are pre-tokens, filled with -1. The first pre-token at a free slot takes it for all
// that are equal; those that are not go on to the next slot.
extern "C" __global__ void find_equal(
    i64 count, const u8* data, const int* start, const int* length, u64 mask, int* table, int* original, int* bins)
{
    __shared__ int own[BINS];
    if (threadIdx.x < BINS) own[threadIdx.x] = 0;
    __syncthreads();
    EACH_THREAD(i, count) {
        const int size = length[i];
        if (size > LONGEST) continue;
        const u8* bytes = data + start[i];
        for (u64 slot = bytes_hash(bytes, size);; slot++) {
            int* at = table + (slot & mask);
            // Most slots are taken: read before trying to take one. `volatile`: other threads write it.
            int other = *(volatile int*)at;
            if (other < 0) other = atomicCAS(at, -1, (int)i);
            int same = 0;
            if (other >= 0 && length[other] == size)
                while (same < size && bytes[same] == data[start[other] + same]) same++;
            if (other >= 0 && same < size) continue;
            original[i] = other < 0 ? (int)i : other;
            if (other < 0) atomicAdd(own + bin_of(size), 1);
            break;
        }
    }
    __syncthreads();
    if (threadIdx.x < BINS && own[threadIdx.x]) atomicAdd(bins + threadIdx.x, own[threadIdx.x]);
}

// Lists the pre-tokens that are their own original in `number`, bin by bin, and gives each of them a place for an id per
// byte: to[i] is where it begins. `taken`, at first zeros, counts those that are listed in each bin, and *placed the
// bytes. One thread per pre-token; a block reserves places for all of its own at once.
extern "C" __global__ void sort_by_length(
    i64 count, const int* length, const int* original, const int* bins, int* taken, int* placed, int* number, int* to)
{
    __shared__ int own[BINS];
    __shared__ int places[BINS];
    __shared__ int sums[BLOCK / 32];
    __shared__ int place;
    for (i64 low = (i64)blockIdx.x * BLOCK; low < count; low += (i64)gridDim.x * BLOCK) {
        if (threadIdx.x < BINS) own[threadIdx.x] = 0;
        __syncthreads();
        const i64 i = low + threadIdx.x;
        const bool listed = i < count && length[i] <= LONGEST && original[i] == i;
        const int size = listed ? length[i] : 0, bin = bin_of(size), rank = listed ? atomicAdd(own + bin, 1) : 0;
        int total;
        const int before = sum_of_threads_before(size, sums, total);
        if (threadIdx.x < BINS && own[threadIdx.x])
            places[threadIdx.x] =
                count_in_bins(bins, 0, threadIdx.x) + atomicAdd(taken + threadIdx.x, own[threadIdx.x]);
        if (threadIdx.x == 0) place = atomicAdd(placed, total);
        __syncthreads();
        if (!listed) continue;
        number[places[bin] + rank] = (int)i;
        to[i] = place + before;
    }
}

// Writes the ids of all pre-tokens, and where those of each text begin: ids_offsets[t] is the number of ids of texts
// before, plus `more`. One block per tile of LISTED * BLOCK pre-tokens, and at least one.
//
// Pre-token j has the id known[j], no ids, or those of number ~known[j] of the pre-tokens to merge: the ids of original
// i begin at ids[to[i]]; there are made[i]. state and counts[0] are zeros; counts[1] becomes the number of all ids.
extern "C" __global__ void write_ids(
    i64 tiles, i64 pretokens, const int* known, const int* original, const int* to, const int* made, const int* ids,
    i64 texts, const i64* first, i64 more, i64* ids_offsets, u64* state, u64* counts, int* out)
{
    __shared__ int places[LISTED * BLOCK];  // of the first id of each pre-token in the tile
    __shared__ int sums[BLOCK / 32];
    __shared__ i64 current;
    __shared__ i64 first_text;  // the first text whose first pre-token is in the tile or after it
    __shared__ i64 before;      // the number of ids in tiles before
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) {
            current = (i64)atomicAdd(counts, 1);
            if (current < tiles) first_text = first_offset(first, texts, current * LISTED * BLOCK);
        }
        __syncthreads();
        const i64 tile = current, from = tile * LISTED * BLOCK, own = from + LISTED * threadIdx.x;
        if (tile >= tiles) break;
        int sum = 0;
        for (int k = 0; k < LISTED; k++) {
            const int id = own + k < pretokens ? known[own + k] : NO_IDS;
            sum += id >= 0 ? 1 : id == NO_IDS ? 0 : made[original[~id]];
        }
        int total;
        int place = sum_of_threads_before(sum, sums, total);
        if (threadIdx.x < 32) {
            const i64 found = (i64)sum_of_tiles_before(state, tile, (u64)total, threadIdx.x);
            if (threadIdx.x == 0) {
                before = found;
                if (tile == tiles - 1) counts[1] = (u64)(found + total);
            }
        }
        __syncthreads();
        for (int k = 0; k < LISTED; k++) {
            places[LISTED * threadIdx.x + k] = place;
            const int id = own + k < pretokens ? known[own + k] : NO_IDS;
            if (id == NO_IDS) continue;
            if (id >= 0) {
                out[before + place++] = id;
                continue;
            }
            const int i = original[~id], size = made[i];
            for (int part = 0; part < size; part++) out[before + place + part] = ids[to[i] + part];
            place += size;
        }
        __syncthreads();
        for (i64 t = first_text + threadIdx.x; t <= texts; t += BLOCK) {
            const i64 k = first[t] - from;
            if (k >= LISTED * BLOCK && tile < tiles - 1) break;
            ids_offsets[t] = more + before + (k < LISTED * BLOCK ? places[k] : total);
        }
    }
}
