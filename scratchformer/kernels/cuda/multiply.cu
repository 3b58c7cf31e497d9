// Products of a few rows with a matrix, for one new token of each sequence: reading the matrix is what takes time.
// A block multiplies up to ROWS rows of the input x (B, K), from row blockIdx.y ROWS on. A thread reads V numbers of
// the matrix at once.
//
// What is multiplied is x itself, its norm, or with `gated` silu(x_k) x_{K + k} for x (B, 2 K). The norm is
// gamma (x - mean) / sigma + beta, or gamma x / rho without `centred`; its sums are in float64, which cannot overflow.
// The result gets a bias and an activation, or the `residual` is added to it.

#define THREADS 512
#define WARPS (THREADS / 32)
#define AHEAD (sizeof(REAL) == 4 ? 8 : 4)  // vectors that a thread reads before it needs them
#define SHARED (40960 / sizeof(REAL))      // numbers of the input of an output layer, in shared memory

#define INPUT const T *x, int gated, const T *gamma, const T *beta, int normed, int centred, REAL eps, int B, int K
#define GIVEN x, gated, gamma, beta, normed, centred, eps, B, K

enum { NONE, RELU, GELU, GELU_TANH, SILU };

__device__ inline REAL silu(REAL x) { return x / (1 + exp(-x)); }

__device__ inline REAL activated(REAL x, int activation) {
    if (activation == RELU) return greater(x, (REAL)0);
    if (activation == GELU) return x / 2 * (1 + erf(x * (REAL)0.70710678118654752));
    if (activation == GELU_TANH) return x / 2 * (1 + tanh((REAL)0.79788456080286536 * (x + (REAL)0.044715 * x * x * x)));
    if (activation == SILU) return silu(x);
    return x;
}

// The mean of each row of the block, and 1 / sigma or 1 / rho, in shared memory. All threads must call it.
__device__ inline void statistics(REAL* mean, REAL* inverse, int first, INPUT) {
#pragma unroll 1
    for (int r = 0; r < ROWS && normed && first + r < B; ++r) {
        const T* row = x + (Index)(first + r) * K;
        double centre = 0, squares = 0;
        if (centred) {
            for (int k = threadIdx.x; k < K; k += THREADS) centre += (double)wide(row[k]);
            centre = block_sum<THREADS>(centre) / K;
        }
        for (int k = threadIdx.x; k < K; k += THREADS) {
            double d = (double)wide(row[k]) - centre;
            squares += d * d;
        }
        squares = block_sum<THREADS>(squares) / K + eps;
        if (threadIdx.x == 0) mean[r] = (REAL)centre, inverse[r] = (REAL)(1 / sqrt(squares));
    }
    __syncthreads();
}

// Write what is multiplied, the numbers k0 ... k0 + count - 1 of each row of the block, to shared memory (ROWS, count);
// 0 where there is no row, or no such number.
__device__ inline void stage(REAL* inputs, int k0, int count, const REAL* mean, const REAL* inverse, int first, INPUT) {
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r) {
        const T* row = x + (Index)(first + r) * (gated ? 2 * K : K);
        for (int i = threadIdx.x; i < count; i += THREADS) {
            int k = k0 + i;
            REAL number = 0;
            if (k < K && first + r < B) {
                number = wide(row[k]);
                if (gated) number = silu(number) * wide(row[K + k]);
                if (normed) number = (number - mean[r]) * inverse[r] * wide(gamma[k]) + (centred ? wide(beta[k]) : 0);
            }
            inputs[r * count + i] = number;
        }
    }
    __syncthreads();
}

// y = input w + b, for up to three matrices w (K, N) whose results (B, N) are neighbours in the rows of y; those without
// columns are left out. Bit i of `biases` says whether matrix i has a bias. A block has LANES V columns of one matrix;
// LANES threads share a row of it, and the sums of all rows are added up.
extern "C" __global__ void __launch_bounds__(THREADS)
    multiply(INPUT, const T* w, const T* b, int N, const T* w1, const T* b1, int N1, const T* w2, const T* b2, int N2,
             int biases, int activation, const T* residual, int adds, OUT* y) {
    const int COLUMNS = LANES * V, TEAMS = THREADS / LANES, COUNT = AHEAD * TEAMS;
    __shared__ REAL mean[ROWS], inverse[ROWS], inputs[ROWS * COUNT], sums[WARPS][COLUMNS];
    int part = blockIdx.x, width = N + N1 + N2, before = 0, blocks = (N + COLUMNS - 1) / COLUMNS;
    if (part >= blocks) {
        part -= blocks, blocks = (N1 + COLUMNS - 1) / COLUMNS, before = N, biases >>= 1, w = w1, b = b1;
        if (part < blocks) N = N1;
        else part -= blocks, before += N1, biases >>= 1, w = w2, b = b2, N = N2;
    }
    int first = blockIdx.y * ROWS, lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    int n = (part * LANES + lane) * V, end = n < N ? K : 0;  // V divides N
    Vector<T, V> ahead[AHEAD] = {};
    REAL sum[ROWS][V] = {};
    for (int k0 = 0; k0 < K; k0 += COUNT) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // does not wait for the input
            int k = k0 + i * TEAMS + team;
            if (k < end) ahead[i] = *(const Vector<T, V>*)(w + (Index)k * N + n);
        }
        if (k0 == 0) statistics(mean, inverse, first, GIVEN);
        else __syncthreads();  // the inputs before have been read
        stage(inputs, k0, COUNT, mean, inverse, first, GIVEN);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                REAL number = inputs[r * COUNT + i * TEAMS + team];
#pragma unroll
                for (int j = 0; j < V; ++j) sum[r][j] += number * wide(ahead[i].at[j]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= B) break;
#pragma unroll
        for (int j = 0; j < V; ++j)
#pragma unroll
            for (int apart = 16; apart >= LANES; apart /= 2) sum[r][j] += __shfl_xor_sync(0xffffffff, sum[r][j], apart);
        __syncthreads();  // the sums of the row before have been read
        if (threadIdx.x % 32 < LANES)
#pragma unroll
            for (int j = 0; j < V; ++j) sums[threadIdx.x / 32][lane * V + j] = sum[r][j];
        __syncthreads();
        int column = part * COLUMNS + threadIdx.x;
        if (threadIdx.x >= COLUMNS || column >= N) continue;
        REAL total = biases & 1 ? wide(b[column]) : 0;
        for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][threadIdx.x];
        Index at = (Index)(first + r) * width + before + column;
        total = activated(total, activation);
        y[at] = OUT(adds ? total + wide(residual[at]) : total);
    }
}

// y = input wT + b, for a matrix w (N, K), a row to a warp. V divides K.
extern "C" __global__ void __launch_bounds__(THREADS)
    multiply_transposed(INPUT, const T* w, const T* b, int N, int biases, REAL* y) {
    __shared__ REAL mean[ROWS], inverse[ROWS], inputs[SHARED];  // inputs (ROWS, K); there is room
    int first = blockIdx.y * ROWS, lane = threadIdx.x % 32;
    statistics(mean, inverse, first, GIVEN);
    stage(inputs, 0, K, mean, inverse, first, GIVEN);
    for (int n = blockIdx.x * WARPS + threadIdx.x / 32; n < N; n += gridDim.x * WARPS) {
        REAL sum[ROWS] = {};
#pragma unroll 4
        for (int k = lane * V; k < K; k += 32 * V) {
            Vector<T, V> numbers = *(const Vector<T, V>*)(w + (Index)n * K + k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int j = 0; j < V; ++j) sum[r] += inputs[r * K + k + j] * wide(numbers.at[j]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            REAL total = warp_sum(sum[r]);
            if (lane == 0 && first + r < B) y[(Index)(first + r) * N + n] = biases ? total + wide(b[n]) : total;
        }
    }
}
