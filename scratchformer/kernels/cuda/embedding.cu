// The gradient of a table, without atomic additions of floating-point numbers: the ids are sorted, and a block adds up all rows of dy
// that belong to one id.

// The place of each id in sorted order; equal ids keep their order. `place` starts at 0. A thread compares one id with a
// tile of 256 others.
extern "C" __global__ void places(const int* ids, int* place, int N) {
    __shared__ int tile[256];
    int n = blockIdx.x * 256 + threadIdx.x, other = blockIdx.y * 256 + threadIdx.x;
    tile[threadIdx.x] = other < N ? ids[other] : 0x7fffffff;
    __syncthreads();
    if (n >= N) return;
    int id = ids[n], before = 0;
    for (int i = 0; i < 256; ++i) {
        int m = blockIdx.y * 256 + i;
        before += tile[i] < id || (tile[i] == id && m < n);
    }
    atomicAdd(place + n, before);  // whole numbers: in any order the sum is the same
}

// order[i]: which n comes i-th. sorted[i]: its id.
extern "C" __global__ void order_by_place(const int* ids, const int* place, int* order, int* sorted, int N) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N) order[place[n]] = n, sorted[place[n]] = ids[n];
}

// table[v] += the sum of dy[n] over all n with ids[n] = v. The block of the first of them adds them up.
extern "C" __global__ void embedding_backward(const T* dy, const int* order, const int* sorted, REAL* table, int N,
                                              int C) {
    int first = blockIdx.x, v = sorted[first];
    if (first > 0 && sorted[first - 1] == v) return;
    int end = first + 1;
    while (end < N && sorted[end] == v) ++end;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        REAL sum = 0;
#pragma unroll 8
        for (int i = first; i < end; ++i) sum += wide(dy[(Index)order[i] * C + c]);
        table[(Index)v * C + c] += sum;
    }
}

// y[n, v] = 1 if ids[n] = v, else 0.
extern "C" __global__ void one_hot(const int* ids, T* y, int N, int size) {
    Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (Index)N * size) y[i] = narrow(ids[i / size] == i % size ? 1 : 0);
}
