// Elementwise operations on arrays of `size` numbers. A thread reads V neighbouring numbers at once.

#define EACH_VECTOR(i) Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * V; if (i >= size) return;
typedef Vector<T, V> Numbers;

__device__ inline Numbers read(const T* x, Index i, Index size) {
    Numbers numbers;
    if (i + V <= size) return *(const Numbers*)(x + i);
    for (int j = 0; j < V; ++j) numbers.at[j] = i + j < size ? x[i + j] : T(0.0f);
    return numbers;
}

__device__ inline void write(T* x, Index i, Index size, Numbers numbers) {
    if (i + V <= size) *(Numbers*)(x + i) = numbers;
    else
        for (int j = 0; i + j < size; ++j) x[i + j] = numbers.at[j];
}

extern "C" __global__ void add(const T* x, const T* f, T* y, Index size) {
    EACH_VECTOR(i)
    Numbers a = read(x, i, size), b = read(f, i, size);
    for (int j = 0; j < V; ++j) a.at[j] = narrow(wide(a.at[j]) + wide(b.at[j]));
    write(y, i, size, a);
}

// The activation y = h phi(h), and its slope dy/dh. The macro KIND chooses it.
enum { RELU, SILU, GELU, GELU_TANH };

__device__ inline REAL activated(REAL h) {
    if (KIND == RELU) return h > 0 ? h : h != h ? h : 0;  // NaN stays
    if (KIND == SILU) return h / (1 + exp(-h));
    if (KIND == GELU) return h * (REAL)0.5 * (1 + erf(h * (REAL)SQRT_HALF));
    REAL u = (REAL)SQRT_2_OVER_PI * (h + (REAL)CUBIC * h * h * h);
    return h / (1 + exp(-2 * u));  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
}

__device__ inline REAL slope(REAL h) {
    if (KIND == RELU) return h > 0 ? 1 : 0;
    if (KIND == SILU) {
        REAL s = 1 / (1 + exp(-h));
        return s * (1 + h * (1 - s));
    }
    if (KIND == GELU)
        return (REAL)0.5 * (1 + erf(h * (REAL)SQRT_HALF)) +
               h * exp(-(REAL)0.5 * h * h) * ((REAL)0.5 * (REAL)SQRT_2_OVER_PI);  // 1 / sqrt(2 pi)
    REAL root = (REAL)SQRT_2_OVER_PI, square = h * h;
    REAL s = 1 / (1 + exp(-2 * root * (h + (REAL)CUBIC * h * square)));
    return s + h * 2 * s * (1 - s) * root * (1 + 3 * (REAL)CUBIC * square);
}

extern "C" __global__ void activation(const T* h, T* y, Index size) {
    EACH_VECTOR(i)
    Numbers a = read(h, i, size);
    for (int j = 0; j < V; ++j) a.at[j] = narrow(activated(wide(a.at[j])));
    write(y, i, size, a);
}

extern "C" __global__ void activation_backward(const T* dy, const T* h, T* dh, Index size) {
    EACH_VECTOR(i)
    Numbers a = read(h, i, size), d = read(dy, i, size);
    for (int j = 0; j < V; ++j) d.at[j] = narrow(wide(d.at[j]) * slope(wide(a.at[j])));
    write(dh, i, size, d);
}

// As `rng.random_uint16`: word k, of SplitMix64, decides about the elements 4 k ... 4 k + 3.
__device__ inline unsigned long long random_word(unsigned long long k, unsigned long long start) {
    unsigned long long word = k * 0x9E3779B97F4A7C15ull + start;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

extern "C" __global__ void dropout(const T* x, T* y, unsigned long long start, int threshold, REAL scale, Index size) {
    EACH_VECTOR(i)
    Numbers a = read(x, i, size);
    unsigned long long word = 0;
    for (int j = 0; j < V; ++j) {
        if (j == 0 || (i + j) % 4 == 0) word = random_word((i + j) / 4, start);
        int number = (word >> (16 * ((i + j) % 4))) & 0xffff;
        a.at[j] = narrow(wide(a.at[j]) * (number >= threshold ? scale : 0));
    }
    write(y, i, size, a);
}
