// A thread has V neighbours of each array of `size` numbers.

// dh = dy where y = max(h, 0) is positive, else 0.
extern "C" __global__ void relu_backward(const T* dy, const T* y, T* dh, Index size) {
    Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V;
    Vector<T, V> d = load<V>(dy + i, size - i), numbers = load<V>(y + i, size - i);
    for (int j = 0; j < V; ++j)
        if (!(wide(numbers.at[j]) > 0)) d.at[j] = T(0.0f);
    store<V>(d, dh + i, size - i);
}
