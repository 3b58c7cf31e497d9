// One new token of each of B sequences: its embedding, and the attention of its queries to stored keys and values.
// numbers (1 + B): how many positions are stored, then the ids of the tokens.

#define THREADS 512
#define LANES (D / V)           // threads that share the vector of a position
#define TEAMS (THREADS / LANES)
#define TILE (THREADS * KEYS)   // keys that are read together

// y = table[ids] + positions[past], (B, C); without `positioned` there is no second term.
extern "C" __global__ void embed(const Index* numbers, const T* table, const T* positions, int positioned, T* y, int C) {
    Index id = numbers[1 + blockIdx.y], past = numbers[0];
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    REAL number = wide(table[id * C + c]);
    y[(Index)blockIdx.y * C + c] = narrow(positioned ? number + wide(positions[past * C + c]) : number);
}

// Number d of a vector, rotated by the angles of its position.
__device__ inline REAL rotated(const T* x, int d, const REAL* cosines, const REAL* sines, Index past, int rotary) {
    if (!rotary) return wide(x[d]);
    int half = D / 2, i = d % half;
    REAL other = wide(x[d < half ? d + half : d - half]), sine = sines[past * half + i];
    return wide(x[d]) * cosines[past * half + i] + (d < half ? -other : other) * sine;
}

// A block is a query head h of sequence b. x: (B, (H + 2 G) D), its queries, keys and values, not yet rotated. The new
// key and value are stored at `past` in keys (B, G, D, S) and values (B, G, S, D), by the first of the heads that share
// them. The softmax goes over the keys tile by tile: when a greater score comes, what was summed is scaled down.
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const Index* numbers, const T* x, const REAL* cosines, const REAL* sines, int rotary, T* keys, T* values, T* y,
           int H, int G, int S, int window, REAL scale) {
    __shared__ REAL q[D], new_key[D], new_value[D], p[TILE], sums[TEAMS * D];
    Index past = numbers[0], first = window && past >= window ? past + 1 - window : 0;
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G), lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    x += (Index)b * (H + 2 * G) * D;
    keys += ((Index)b * G + g) * D * S, values += ((Index)b * G + g) * D * S;
    for (int d = threadIdx.x; d < D; d += THREADS) {
        q[d] = rotated(x + h * D, d, cosines, sines, past, rotary) * scale;
        T key = narrow(rotated(x + (H + g) * D, d, cosines, sines, past, rotary)), value = x[(H + G + g) * D + d];
        new_key[d] = wide(key), new_value[d] = wide(value);
        if (h % (H / G) == 0) keys[(Index)d * S + past] = key, values[past * D + d] = value;
    }
    __syncthreads();
    REAL newest = 0, most = -infinity(), total = 0, sum[V] = {};
    for (int d = threadIdx.x % 32; d < D; d += 32) newest += q[d] * new_key[d];
    newest = warp_sum(newest);
    for (Index start = first - first % KEYS; start <= past; start += TILE) {
        Index s = start + threadIdx.x * KEYS;
        REAL z[KEYS] = {}, greatest = -infinity();
        if (s <= past)  // KEYS divides S
#pragma unroll 16
            for (int d = 0; d < D; ++d) {
                Vector<T, KEYS> numbers = *(const Vector<T, KEYS>*)(keys + (Index)d * S + s);
                for (int j = 0; j < KEYS; ++j) z[j] += q[d] * wide(numbers.at[j]);
            }
        for (int j = 0; j < KEYS; ++j) {
            z[j] = s + j == past ? newest : s + j < first || s + j > past ? -infinity() : z[j];
            greatest = max(greatest, z[j]);
        }
        greatest = max(most, block_max<THREADS>(greatest));  // every tile has a key that may be seen
        REAL share = exp(most - greatest);
        most = greatest, total *= share;
        for (int j = 0; j < KEYS; ++j) total += p[threadIdx.x * KEYS + j] = exp(z[j] - most);
        __syncthreads();
        for (int j = 0; j < V; ++j) sum[j] *= share;
        Index end = min(start + TILE, past + 1);
        if (team < TEAMS)
#pragma unroll 4
            for (Index s = max(first, start) + team; s < end; s += TEAMS) {
                Vector<T, V> numbers = *(const Vector<T, V>*)(values + s * D + lane * V);
                for (int j = 0; j < V; ++j)
                    sum[j] += p[s - start] * (s == past ? new_value[lane * V + j] : wide(numbers.at[j]));
            }
        __syncthreads();  // p has been read
    }
    total = block_sum<THREADS>(total);
    if (team < TEAMS)
        for (int j = 0; j < V; ++j) sums[team * D + lane * V + j] = sum[j];
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += THREADS) {
        REAL number = 0;
        for (int i = 0; i < TEAMS; ++i) number += sums[i * D + d];
        y[((Index)b * H + h) * D + d] = narrow(number / total);
    }
}
