// The softmax of attention over rows of scores (heads, T, S), a warp for each row; p may be the same array as z. Row t of
// sequence b may see the keys begin ... end - 1; the tables (sequences, all_T) of begin and end have one row for all
// sequences if `shared`.
// The scores are those of the queries t0 ... t0 + T - 1 and the keys s0 ... s0 + S - 1.

struct Seen {
    int begin, end;
};

__device__ inline Seen seen(const int* begin, const int* end, int shared, int H, Index row, int T_, int all_T, int t0,
                            int s0, int S) {
    Index head = row / T_, at = (shared ? 0 : head / H) * all_T + t0 + row % T_;
    return {max(begin[at] - s0, 0), min(end[at] - s0, S)};
}

// The numbers of a row that a thread has: PER vectors of V neighbours.
__device__ inline int place(int i) { return (i * 32 + threadIdx.x % 32) * V; }

template <class Number> __device__ inline void load(const Number* row, int S, REAL* to) {
    for (int i = 0; i < PER; ++i) {
        if (place(i) >= S) continue;  // V divides S
        Vector<Number, V> numbers = *(const Vector<Number, V>*)(row + place(i));
        for (int j = 0; j < V; ++j) to[i * V + j] = (REAL)numbers.at[j];
    }
}

__device__ inline void store(const REAL* from, int S, T* row) {
    for (int i = 0; i < PER; ++i) {
        if (place(i) >= S) continue;
        Vector<T, V> numbers;
        for (int j = 0; j < V; ++j) numbers.at[j] = narrow(from[i * V + j]);
        *(Vector<T, V>*)(row + place(i)) = numbers;
    }
}

#define ROW                                                                  \
    Index row = (Index)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;    \
    if (row >= rows) return;                                                 \
    Seen keys = seen(begin, end, shared, H, row, T_, all_T, t0, s0, S);
#define SEES(i, j) (place(i) + j >= keys.begin && place(i) + j < keys.end)

extern "C" __global__ void softmax(const REAL* z, T* p, const int* begin, const int* end, int shared, int H, Index rows,
                                   int T_, int all_T, int t0, int s0, int S, REAL scale) {
    ROW
    REAL own[PER * V] = {0}, most = -infinity(), total = 0;
    load(z + row * S, S, own);
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V; ++j)
            if (SEES(i, j)) most = max(most, own[i * V + j] *= scale);
    most = warp_max(most);
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V; ++j) {
            own[i * V + j] = SEES(i, j) ? exp(own[i * V + j] - most) : 0;
            total += own[i * V + j];
        }
    total = warp_sum(total);
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V; ++j)
            if (SEES(i, j)) own[i * V + j] /= total;
    store(own, S, p + row * S);
}

// da = p (dp - sum of p dp) scale; da may be the same array as dp. Outside of what a row may see, p is 0.
extern "C" __global__ void softmax_backward(const REAL* dp, const T* p, T* da, const int* begin, const int* end,
                                            int shared, int H, Index rows, int T_, int all_T, int t0, int s0, int S,
                                            REAL scale) {
    ROW
    REAL own[PER * V] = {0}, d[PER * V] = {0}, sum = 0;
    load(p + row * S, S, own);
    load(dp + row * S, S, d);
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V; ++j)
            if (SEES(i, j)) sum += own[i * V + j] * d[i * V + j];
    sum = warp_sum(sum);
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < V; ++j)
            d[i * V + j] = SEES(i, j) ? own[i * V + j] * (d[i * V + j] - sum) * scale : 0;
    store(d, S, da + row * S);
}

// The same for rows that do not fit in the registers of a warp.
extern "C" __global__ void softmax_of_long_rows(const REAL* z, T* p, const int* begin, const int* end, int shared, int H,
                                                Index rows, int T_, int all_T, int t0, int s0, int S, REAL scale) {
    ROW
    int lane = threadIdx.x % 32;
    z += row * S, p += row * S;
    REAL most = -infinity(), total = 0;
    for (int s = keys.begin + lane; s < keys.end; s += 32) most = max(most, z[s] * scale);
    most = warp_max(most);
    for (int s = keys.begin + lane; s < keys.end; s += 32) total += exp(z[s] * scale - most);
    total = warp_sum(total);
    for (int s = lane; s < S; s += 32)
        p[s] = s >= keys.begin && s < keys.end ? narrow(exp(z[s] * scale - most) / total) : T(0.0f);
}

extern "C" __global__ void softmax_backward_of_long_rows(const REAL* dp, const T* p, T* da, const int* begin,
                                                         const int* end, int shared, int H, Index rows, int T_,
                                                         int all_T, int t0, int s0, int S, REAL scale) {
    ROW
    int lane = threadIdx.x % 32;
    dp += row * S, p += row * S, da += row * S;
    REAL sum = 0;
    for (int s = keys.begin + lane; s < keys.end; s += 32) sum += wide(p[s]) * dp[s];
    sum = warp_sum(sum);
    for (int s = lane; s < S; s += 32)
        da[s] = s >= keys.begin && s < keys.end ? narrow(wide(p[s]) * (dp[s] - sum) * scale) : T(0.0f);
}

// x = 0 for the sequences (size numbers each) of length 0. A block has a part of a sequence.
extern "C" __global__ void clear_empty(T* x, const int* lengths, Index size) {
    if (lengths[blockIdx.y] > 0) return;
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += (Index)gridDim.x * blockDim.x)
        x[blockIdx.y * size + i] = T(0.0f);
}

// y = x, for arrays (B, H, T, D) whose axes are these numbers of elements apart; D is contiguous, and V divides it.
extern "C" __global__ void move_heads(const T* x, Index x_B, Index x_H, Index x_T, T* y, Index y_B, Index y_H, Index y_T,
                                      Index rows, int H, int all_T, int D) {
    Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x, row = i / (D / V);
    if (row >= rows) return;
    int d = i % (D / V) * V;
    Index t = row % all_T, h = row / all_T % H, b = row / all_T / H;
    *(Vector<T, V>*)(y + b * y_B + h * y_H + t * y_T + d) =
        *(const Vector<T, V>*)(x + b * x_B + h * x_H + t * x_T + d);
}
