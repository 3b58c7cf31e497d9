// What happens to the flat arrays once in a step. A thread has V neighbouring numbers.

#define EACH_VECTOR(i) Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; if (i >= size) return;

// rest1, rest2, rate and root as in `kernels.cupy_adam`. T is float or double.
extern "C" __global__ void adam(T* w, const T* g, T* m, T* v, REAL beta1, REAL beta2, REAL rest1, REAL rest2, REAL eps,
                                REAL rate, REAL root, Index size) {
    EACH_VECTOR(i)
    typedef Vector<T, V> Numbers;
    bool whole = i + V <= size;
    Numbers wi, gi, mi, vi;
    if (whole) wi = *(Numbers*)(w + i), gi = *(const Numbers*)(g + i), mi = *(Numbers*)(m + i), vi = *(Numbers*)(v + i);
    for (int j = 0; j < V; ++j) {
        if (!whole) {
            if (i + j >= size) break;
            wi.at[j] = w[i + j], gi.at[j] = g[i + j], mi.at[j] = m[i + j], vi.at[j] = v[i + j];
        }
        mi.at[j] = beta1 * mi.at[j] + rest1 * gi.at[j];
        vi.at[j] = beta2 * vi.at[j] + rest2 * gi.at[j] * gi.at[j];
        wi.at[j] -= rate * mi.at[j] / (root * sqrt(vi.at[j]) + eps) + 0 * vi.at[j];  // NaN where v overflows
        if (!whole) w[i + j] = wi.at[j], m[i + j] = mi.at[j], v[i + j] = vi.at[j];
    }
    if (whole) *(Numbers*)(w + i) = wi, *(Numbers*)(m + i) = mi, *(Numbers*)(v + i) = vi;
}

// sums: one for each block, of the squares of its numbers, in double.
extern "C" __global__ void squares(const T* x, double* sums, Index size) {
    __shared__ double of_warps[32];
    double sum = 0;
    Index step = (Index)gridDim.x * blockDim.x * V;
    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += step) {
        Vector<T, V> numbers;
        if (i + V <= size) numbers = *(const Vector<T, V>*)(x + i);
        for (int j = 0; j < V && i + j < size; ++j) {
            double number = i + V <= size ? numbers.at[j] : x[i + j];
            sum += number * number;
        }
    }
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0;
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// x *= share, which is on the GPU. If it is 1, nothing is read or written.
extern "C" __global__ void scale(T* x, const double* share, Index size) {
    if (*share == 1) return;
    REAL factor = (REAL)*share;
    EACH_VECTOR(i)
    if (i + V <= size) {
        Vector<T, V> numbers = *(Vector<T, V>*)(x + i);
        for (int j = 0; j < V; ++j) numbers.at[j] *= factor;
        *(Vector<T, V>*)(x + i) = numbers;
    } else
        for (int j = 0; i + j < size; ++j) x[i + j] *= factor;
}
