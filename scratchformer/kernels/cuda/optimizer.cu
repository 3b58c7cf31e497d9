// What happens to a flat gradient once in a step. A thread has V neighbouring numbers at a time.

// sums: one for each block of 256 threads, of the squares of its numbers, in double.
extern "C" __global__ void squares(const T* x, double* sums, Index size) {
    double sum = 0;
    Index step = (Index)gridDim.x * blockDim.x * V;
    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += step) {
        Vector<T, V> numbers = load<V>(x + i, size - i);
        for (int j = 0; j < V; ++j) sum += (double)numbers.at[j] * numbers.at[j];
    }
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// x *= share, which is on the GPU. If it is 1, nothing is read or written.
extern "C" __global__ void scale(T* x, const double* share, Index size) {
    if (*share == 1) return;
    Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V;
    Vector<T, V> numbers = load<V>(x + i, size - i);
    for (int j = 0; j < V; ++j) numbers.at[j] *= (REAL)*share;
    store<V>(numbers, x + i, size - i);
}
