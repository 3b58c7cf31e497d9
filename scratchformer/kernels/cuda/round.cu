// y = x, rounded from float to T. A thread has V neighbouring numbers.
extern "C" __global__ void round_into(const float* x, T* y, Index size) {
    Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (i + V <= size) {
        Vector<float, V> numbers = *(const Vector<float, V>*)(x + i);
        Vector<T, V> rounded;
        for (int j = 0; j < V; ++j) rounded.at[j] = T(numbers.at[j]);
        *(Vector<T, V>*)(y + i) = rounded;
    } else
        for (int j = 0; i + j < size; ++j) y[i + j] = T(x[i + j]);
}
