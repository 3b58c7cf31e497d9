// Matrix products and sums with the bits of `scratchformer.portable`. SIDE: the rows, and columns, of a tile of a
// product. LEVELS: how many levels of the tree of a sum a thread adds.

// The threads of a block; those along a row, or a column, of a tile; the sums of each thread along it; how many columns
// of a, and rows of b, are in shared memory at once.
const int THREADS = 256, ACROSS = 16, EACH = SIDE / ACROSS, DEPTH = 16;

// c = a b for `count` pairs of matrices. a_stack, a_row, a_column: how far apart neighbouring matrices, rows and columns
// of a are; likewise for b. A block computes a tile of c, and a thread EACH x EACH elements of it, each by one chain of
// fused multiply-adds in the order of k.
extern "C" __global__ void __launch_bounds__(THREADS) product(const float* a, const float* b, float* c, Index count, Index M,
                                                          Index K, Index N, Index a_stack, Index a_row, Index a_column,
                                                          Index b_stack, Index b_row, Index b_column) {
    __shared__ float left[DEPTH][SIDE + 1], right[DEPTH][SIDE + 1];  // + 1: a column lies in several banks
    Index tiles = (N + SIDE - 1) / SIDE, top = blockIdx.x / tiles * SIDE, first = blockIdx.x % tiles * SIDE;
    int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS;
    for (Index s = blockIdx.y; s < count; s += gridDim.y) {
        float sums[EACH][EACH] = {};
        for (Index start = 0; start < K; start += DEPTH) {
            int depth = min(Index(DEPTH), K - start);
            __syncthreads();  // all threads have read the previous tiles
            for (int e = threadIdx.x; e < SIDE * DEPTH; e += THREADS) {  // neighbouring threads read neighbouring numbers
                int i = a_column == 1 ? e / DEPTH : e % SIDE, k = a_column == 1 ? e % DEPTH : e / SIDE;
                if (top + i < M && k < depth)
                    left[k][i] = a[s * a_stack + (top + i) * a_row + (start + k) * a_column];
                int j = b_column == 1 ? e % SIDE : e / DEPTH, l = b_column == 1 ? e / SIDE : e % DEPTH;
                if (first + j < N && l < depth)
                    right[l][j] = b[s * b_stack + (start + l) * b_row + (first + j) * b_column];
            }
            __syncthreads();
            for (int k = 0; k < depth; ++k)
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int j = 0; j < EACH; ++j)
                        sums[i][j] = ieee::fma(left[k][row + i * ACROSS], right[k][column + j * ACROSS], sums[i][j]);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                Index m = top + row + i * ACROSS, n = first + column + j * ACROSS;
                if (m < M && n < N) c[(s * M + m) * N + n] = sums[i][j];
            }
    }
}

// A sum has n terms, which are `step` apart. A halving adds the last half of the terms to the first. This is term i
// after HALVINGS halvings.
template <int HALVINGS> __device__ T term(const T* x, Index i, Index n, Index step) {
    if constexpr (HALVINGS == 0) {
        return x[i * step];
    } else {
        Index left = n;
        for (int level = 1; level < HALVINGS; ++level) left -= left / 2;
        T sum = term<HALVINGS - 1>(x, i, n, step);
        return i < left / 2 ? ieee::add(sum, term<HALVINGS - 1>(x, i + left - left / 2, n, step)) : sum;
    }
}

// y (before, m, after): what is left of x (before, n, after) after LEVELS halvings of its sums of n terms.
extern "C" __global__ void halve(const T* x, T* y, Index before, Index n, Index after, Index m) {
    Index at = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < before * m * after)
        y[at] = term<LEVELS>(x + at / (m * after) * n * after + at % after, at / after % m, n, after);
}

// table[v] += values[n] for all n with ids[n] = v, one after another. order, sorted: see embedding.cu. Of the blocks of
// one id, the first adds all its rows.
extern "C" __global__ void add_rows(const T* values, const int* order, const int* sorted, T* table, int N, int C) {
    int first = blockIdx.x, v = sorted[first];
    if (first > 0 && sorted[first - 1] == v) return;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        T sum = table[(Index)v * C + c];
        for (int i = first; i < N && sorted[i] == v; ++i) sum = ieee::add(sum, values[(Index)order[i] * C + c]);
        table[(Index)v * C + c] = sum;
    }
}
