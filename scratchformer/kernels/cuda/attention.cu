// The softmax of attention over rows of scores (heads, T, S), a warp for each row; p may be the same array as z. Row t of
// sequence b may see the keys begin ... end - 1; the tables (sequences, all_T) of begin and end have one row for all
// sequences if `shared`. The scores are those of the queries t0 ... t0 + T - 1 and the keys s0 ... s0 + S - 1.
// If MASKED, it may see only those of them that are `allowed` in a table (B, H, all_T, all_S), in which sequences are of_B
// rows apart and heads of_H rows, 0 if all have the same.
// A thread has PER vectors of V neighbours of its row in registers; PER is 0 for rows that do not fit in them.

#if MASKED
#define MASK , const bool *allowed, Index of_B, Index of_H, Index all_S
#define ALLOWED const bool* seen = allowed + (head / H * of_B + head % H * of_H + t0 + row % T_) * all_S + s0;
#define SEES(s) ((s) >= first && (s) < stop && seen[s])
#else
#define MASK
#define ALLOWED
#define SEES(s) ((s) >= first && (s) < stop)
#endif
#define TABLE                                                                                                          \
    const int *begin, const int *end, Index rows, int shared, int H, int T_, int all_T, int t0, int s0, int S,         \
        REAL scale MASK
#define ROW                                                                                                            \
    Index row = (Index)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;                                              \
    if (row >= rows) return;                                                                                           \
    Index head = row / T_, at = (shared ? 0 : head / H) * all_T + t0 + row % T_;                                       \
    int lane = threadIdx.x % 32, first = max(begin[at] - s0, 0), stop = min(end[at] - s0, S);                          \
    ALLOWED
#define EACH for (int i = 0; i < PER * V; ++i)
#define SEEN EACH if (SEES(place(i / V) + i % V))
#define SEEN_KEYS for (int s = first + lane; s < stop; s += 32) if (SEES(s))

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

extern "C" __global__ void softmax(const REAL* z, T* p, TABLE) {
    ROW
    z += row * S, p += row * S;
    REAL most = -infinity(), total = 0;
#if PER
    REAL own[PER * V] = {0};
    load(z, S, own);
    SEEN most = max(most, own[i] *= scale);
    most = warp_max(most);
    EACH total += own[i] = SEES(place(i / V) + i % V) ? exp(own[i] - most) : 0;
    total = warp_sum(total);
    SEEN own[i] /= total;
    store(own, S, p);
#else
    SEEN_KEYS most = max(most, z[s] * scale);
    most = warp_max(most);
    SEEN_KEYS total += exp(z[s] * scale - most);
    total = warp_sum(total);
    for (int s = lane; s < S; s += 32) p[s] = SEES(s) ? narrow(exp(z[s] * scale - most) / total) : T(0.0f);
#endif
}

// da = p (dp - sum of p dp) scale; da may be the same array as dp. Outside of what a row may see, p is 0.
extern "C" __global__ void softmax_backward(const REAL* dp, const T* p, T* da, TABLE) {
    ROW
    dp += row * S, p += row * S, da += row * S;
    REAL sum = 0;
#if PER
    REAL own[PER * V] = {0}, d[PER * V] = {0};
    load(p, S, own);
    load(dp, S, d);
    SEEN sum += own[i] * d[i];
    sum = warp_sum(sum);
    EACH d[i] = SEES(place(i / V) + i % V) ? own[i] * (d[i] - sum) * scale : 0;
    store(d, S, da);
#else
    SEEN_KEYS sum += wide(p[s]) * dp[s];
    sum = warp_sum(sum);
    for (int s = lane; s < S; s += 32) da[s] = SEES(s) ? narrow(wide(p[s]) * (dp[s] - sum) * scale) : T(0.0f);
#endif
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
