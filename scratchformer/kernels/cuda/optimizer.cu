// sums: one for each block of 256 threads, of the squares of its numbers, in double. A thread reads V neighbours at once.
// x: for each row of blocks `size` numbers.
extern "C" __global__ void squares(const T* x, double* sums, Index size) {
    double sum = 0;
    x += blockIdx.y * size;
    sums += (Index)blockIdx.y * gridDim.x;
    Index step = (Index)gridDim.x * blockDim.x * V;
    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += step) {
        Vector<T, V> numbers = load<V>(x + i, size - i);
        for (int j = 0; j < V; ++j) sum += (double)numbers.at[j] * numbers.at[j];
    }
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Divides each matrix of x, of `size` numbers, by its norm, but at least by `smallest`. sums: `count` sums of squares for
// each. Each row of blocks has a matrix.
extern "C" __global__ void divide_by_norms(T* x, const double* sums, Index size, Index count, double smallest) {
    double sum = 0;
    for (Index i = 0; i < count; ++i) sum += sums[blockIdx.y * count + i];
    REAL share = 1 / greater(sqrt(sum), smallest);
    x += blockIdx.y * size;
    Index step = (Index)gridDim.x * blockDim.x * V;
    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += step) {
        Vector<T, V> numbers = load<V>(x + i, size - i);
        for (int j = 0; j < V; ++j) numbers.at[j] *= share;
        store<V>(numbers, x + i, size - i);
    }
}

// The number by which a gradient of this norm is multiplied: see `optim.optimizer.share_for`.
extern "C" __global__ void share(const double* norm, double* share, double max_norm) {
    *share = *norm > max_norm && *norm - *norm == 0 ? max_norm / *norm : 1;
}
