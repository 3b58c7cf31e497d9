// Softmax with cross-entropy: a block of THREADS threads for each row of logits. The rows are `stride` numbers apart,
// and V numbers are read at once; the last `size` mod V are read one by one.

// log_z: of z - z_max. losses: (N,).
extern "C" __global__ void cross_entropy(const T* logits, Index stride, const int* targets, REAL smoothing, int size,
                                         REAL* z_max, REAL* log_z, REAL* losses) {
    const T* z = logits + blockIdx.x * stride;
    REAL most = -infinity(), total = 0, sum = 0, first = wide(z[0]);
    REAL near = first - first == 0 ? first : 0;  // subtracted before the logits are summed, since they may all be large
    int whole = size / V * V;
    for (int v = threadIdx.x * V; v < whole; v += THREADS * V) {
        Vector<T, V> numbers = *(const Vector<T, V>*)(z + v);
        REAL greatest = most;
        for (int j = 0; j < V; ++j) greatest = max(greatest, wide(numbers.at[j]));
        REAL shift = greatest == -infinity() ? 0 : greatest;
        total *= exp(most - shift);
        most = greatest;
        for (int j = 0; j < V; ++j) {
            total += exp(wide(numbers.at[j]) - shift);
            sum += wide(numbers.at[j]) - near;
        }
    }
    for (int v = whole + threadIdx.x; v < size; v += THREADS) {
        REAL number = wide(z[v]), greatest = max(most, number), shift = greatest == -infinity() ? 0 : greatest;
        total = total * exp(most - shift) + exp(number - shift);
        most = greatest;
        sum += number - near;
    }
    REAL greatest = block_max<THREADS>(most);
    total = block_sum<THREADS>(total * exp(most - greatest));
    if (smoothing != 0) sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) {
        REAL log_total = log(total);
        z_max[blockIdx.x] = greatest;
        log_z[blockIdx.x] = log_total;
        REAL loss = log_total - (1 - smoothing) * (wide(z[targets[blockIdx.x]]) - greatest);
        if (smoothing != 0) loss -= smoothing * (sum / size - (greatest - near));
        losses[blockIdx.x] = loss;
    }
}

// share: (N,), the weight of each row in the loss, times dloss. The rows of dlogits are `dstride` numbers apart.
extern "C" __global__ void cross_entropy_backward(const T* logits, Index stride, const int* targets, const REAL* z_max,
                                                  const REAL* log_z, const REAL* share, REAL smoothing, int size,
                                                  T* dlogits, Index dstride) {
    const T* z = logits + blockIdx.x * stride;
    T* dz = dlogits + blockIdx.x * dstride;
    REAL most = z_max[blockIdx.x], log_total = log_z[blockIdx.x], weight = share[blockIdx.x], least = smoothing / size;
    int whole = size / V * V, target = targets[blockIdx.x];
    for (int v = threadIdx.x * V; v < whole; v += THREADS * V) {
        Vector<T, V> numbers = *(const Vector<T, V>*)(z + v);
        for (int j = 0; j < V; ++j) {
            REAL p = exp(wide(numbers.at[j]) - most - log_total);
            numbers.at[j] = narrow(weight * (p - least - (v + j == target ? 1 - smoothing : 0)));
        }
        *(Vector<T, V>*)(dz + v) = numbers;
    }
    for (int v = whole + threadIdx.x; v < size; v += THREADS) {
        REAL p = exp(wide(z[v]) - most - log_total);
        dz[v] = narrow(weight * (p - least - (v == target ? 1 - smoothing : 0)));
    }
}
