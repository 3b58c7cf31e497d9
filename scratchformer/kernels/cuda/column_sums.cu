// The sums of the columns of x (N, C), whose rows are `stride` apart: those of columns k width ... k width + width - 1 are
// at y + k apart, to which they are added if `add`. A block of 32 x 8 threads, each with V columns, adds up every
// gridDim.y-th eight rows; if there are several blocks for a column, y has a row of C sums for each of them.
extern "C" __global__ void column_sums(const T* x, Index stride, REAL* y, Index apart, int width, int N, int C, int add) {
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
        int column = blockIdx.x * 32 * V + i;
        if (column >= C) continue;
        REAL* to = y + (Index)blockIdx.y * C + column / width * apart + column % width;
        REAL total = add ? *to : 0;
        for (int row = 0; row < 8; ++row) total += sums[row][i];
        *to = total;
    }
}
