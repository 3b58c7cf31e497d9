// y_c = the sum of x_nc over n, for x (N, C) whose rows are `stride` apart. A block of 32 x 8 threads, each with V columns,
// adds up every gridDim.y-th eight rows; y: (gridDim.y, C), one sum for each of them.
extern "C" __global__ void column_sums(const T* x, Index stride, REAL* y, int N, int C) {
    __shared__ REAL sums[8][32 * V];
    int c = (blockIdx.x * 32 + threadIdx.x) * V;
    REAL sum[V] = {0};
    if (c < C)  // V divides C
#pragma unroll 4
        for (int n = blockIdx.y * 8 + threadIdx.y; n < N; n += gridDim.y * 8) {
            Vector<T, V> numbers = *(const Vector<T, V>*)(x + n * stride + c);
            for (int j = 0; j < V; ++j) sum[j] += wide(numbers.at[j]);
        }
    for (int j = 0; j < V; ++j) sums[threadIdx.y][threadIdx.x * V + j] = sum[j];
    __syncthreads();
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * V; i += 256) {
        REAL total = 0;
        for (int row = 0; row < 8; ++row) total += sums[row][i];
        if (blockIdx.x * 32 * V + i < C) y[(Index)blockIdx.y * C + blockIdx.x * 32 * V + i] = total;
    }
}
