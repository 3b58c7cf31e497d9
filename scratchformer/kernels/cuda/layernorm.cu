// Layer norm. C: the width of a row. A row has THREADS threads, each of which holds PER vectors of V neighbouring
// numbers; a block has ROWS such teams, more than one only if a team is a single warp.

__device__ inline int column(int i) { return (i * THREADS + threadIdx.x) * V; }

__device__ inline void load(const T* row, REAL* to) {
    for (int i = 0; i < PER; ++i) {
        if (column(i) >= C) continue;
        Vector<T, V> numbers = *(const Vector<T, V>*)(row + column(i));
        for (int j = 0; j < V; ++j) to[i * V + j] = wide(numbers.at[j]);
    }
}

__device__ inline void load_each(const T* row, REAL* to) {  // gamma or beta, which need not be aligned
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V && column(i) < C; ++j) to[i * V + j] = wide(row[column(i) + j]);
}

__device__ inline void store(const REAL* from, T* row) {
    for (int i = 0; i < PER; ++i) {
        if (column(i) >= C) continue;
        Vector<T, V> numbers;
        for (int j = 0; j < V; ++j) numbers.at[j] = narrow(from[i * V + j]);
        *(Vector<T, V>*)(row + column(i)) = numbers;
    }
}

extern "C" __global__ void layernorm(const T* x, const T* gamma, const T* beta, REAL eps, T* y, REAL* mean, REAL* rstd,
                                     int N) {
    REAL g[PER * V] = {0}, b[PER * V] = {0};
    load_each(gamma, g);
    load_each(beta, b);
    for (int n = blockIdx.x * ROWS + threadIdx.y; n < N; n += gridDim.x * ROWS) {
        REAL row[PER * V] = {0}, sum = 0, squares = 0;
        load(x + (Index)n * C, row);
        for (int i = 0; i < PER * V; ++i) sum += row[i];
        REAL mu = block_sum<THREADS>(sum) / C;
        for (int i = 0; i < PER; ++i)
            for (int j = 0; j < V; ++j) {
                REAL centred = column(i) < C ? row[i * V + j] - mu : 0;
                squares += centred * centred;
            }
        REAL variance = block_sum<THREADS>(squares) / C, scale = 1;
        if (variance == infinity()) {  // the squares overflowed; all threads of the row see this
            scale = sizeof(REAL) == 4 ? 0x1p-96 : 0x1p-768, squares = 0;
            for (int i = 0; i < PER; ++i)
                for (int j = 0; j < V; ++j) {
                    REAL centred = column(i) < C ? (row[i * V + j] - mu) * scale : 0;
                    squares += centred * centred;
                }
            variance = block_sum<THREADS>(squares) / C;
        }
        REAL inverse = scale / sqrt(variance + eps * scale * scale);
        for (int i = 0; i < PER * V; ++i) row[i] = (row[i] - mu) * inverse * g[i] + b[i];
        store(row, y + (Index)n * C);
        if (threadIdx.x == 0) mean[n] = mu, rstd[n] = inverse;
    }
}

// sums: (blocks, 2 C), of dgamma and dbeta over the rows of each block.
extern "C" __global__ void layernorm_backward(const T* dy, const T* x, const T* gamma, const REAL* mean,
                                              const REAL* rstd, T* dx, REAL* sums, int N) {
    REAL weight[PER * V] = {0}, sum_gamma[PER * V] = {0}, sum_beta[PER * V] = {0};
    load_each(gamma, weight);
    for (int n = blockIdx.x * ROWS + threadIdx.y; n < N; n += gridDim.x * ROWS) {
        REAL xhat[PER * V] = {0}, g[PER * V] = {0}, sum_g = 0, sum_gx = 0;
        load(x + (Index)n * C, xhat);
        load(dy + (Index)n * C, g);
        REAL mu = mean[n], inverse = rstd[n];
        for (int i = 0; i < PER * V; ++i) {
            xhat[i] = (xhat[i] - mu) * inverse;
            sum_gamma[i] += g[i] * xhat[i];
            sum_beta[i] += g[i];
            g[i] *= weight[i];
            sum_g += g[i];
            sum_gx += g[i] * xhat[i];
        }
        REAL mean_g = block_sum<THREADS>(sum_g) / C, mean_gx = block_sum<THREADS>(sum_gx) / C;
        for (int i = 0; i < PER * V; ++i) g[i] = inverse * (g[i] - mean_g - xhat[i] * mean_gx);
        store(g, dx + (Index)n * C);
    }
    __shared__ REAL of_block[2][C];
    for (int team = 0; team < ROWS; ++team) {  // one after another, so that the order is always the same
        if (threadIdx.y == team)
            for (int i = 0; i < PER; ++i)
                for (int j = 0; j < V && column(i) < C; ++j) {
                    int c = column(i) + j;
                    of_block[0][c] = sum_gamma[i * V + j] + (team ? of_block[0][c] : 0);
                    of_block[1][c] = sum_beta[i * V + j] + (team ? of_block[1][c] : 0);
                }
        __syncthreads();
    }
    for (int i = threadIdx.y * THREADS + threadIdx.x; i < 2 * C; i += THREADS * ROWS)
        sums[(Index)blockIdx.x * 2 * C + i] = of_block[i / C][i % C];
}
