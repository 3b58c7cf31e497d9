// sums: one for each block of 256 threads, of the squares of its numbers, in double. A thread reads V neighbours at once.
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
