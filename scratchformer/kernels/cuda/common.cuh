// What all kernels share. `cupy_code` puts #define lines before this text: T, the type of arrays; REAL, the type in which
// sums run, float for __half, __nv_bfloat16 and float, and double for double; and the constants of a file.

typedef long long Index;

// Numbers that are read or written at once, in steps of at most 16 bytes.
template <class Number, int COUNT>
struct alignas(sizeof(Number) * COUNT < 16 ? sizeof(Number) * COUNT : 16) Vector {
    Number at[COUNT];
};

// The first COUNT of the `left` numbers from x on; those that are missing are 0. ALL: whether either none are missing or
// all, and x is aligned.
template <int COUNT, bool ALL = false, class Number>
__device__ inline Vector<Number, COUNT> load(const Number* x, Index left) {
    Vector<Number, COUNT> numbers;
    if (left >= COUNT && (ALL || (unsigned long long)x % alignof(Vector<Number, COUNT>) == 0))
        return *(const Vector<Number, COUNT>*)x;
    if (ALL) return {};
    for (int j = 0; j < COUNT; ++j) numbers.at[j] = j < left ? x[j] : Number(0.0f);
    return numbers;
}

template <int COUNT, bool ALL = false, class Number>
__device__ inline void store(const Vector<Number, COUNT>& numbers, Number* x, Index left) {
    if (left >= COUNT && (ALL || (unsigned long long)x % alignof(Vector<Number, COUNT>) == 0))
        *(Vector<Number, COUNT>*)x = numbers;
    else if (!ALL)
        for (int j = 0; j < COUNT && j < left; ++j) x[j] = numbers.at[j];
}

__device__ inline REAL infinity() { return (REAL)__longlong_as_double(0x7ff0000000000000ll); }
__device__ inline REAL wide(T x) { return (REAL)x; }
__device__ inline T narrow(REAL x) { return T(x); }

// The greater and the lesser of two numbers, NaN if one is NaN. (CUDA's max and min would give the other.)
template <class Number> __device__ inline Number greater(Number a, Number b) { return a > b || a != a ? a : b; }
template <class Number> __device__ inline Number lesser(Number a, Number b) { return a < b || a != a ? a : b; }

// a modulo b, which has the sign of b. (CUDA's remainders have the sign of a.)
template <class A, class B> __device__ inline auto modulo(A a, B b) {
    if constexpr (A(1) / A(2) == A(0)) {
        auto r = a % b;
        return r && (r < 0) != (b < 0) ? r + b : r;
    } else {
        auto r = fmod(a, b);
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
}

// The sum, or the greatest, of one number of each thread of a warp; every thread gets it.
template <class Number> __device__ inline Number warp_sum(Number x) {
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffff, x, apart);
    return x;
}

template <class Number> __device__ inline Number warp_max(Number x) {
    for (int apart = 16; apart; apart /= 2) x = greater(x, __shfl_xor_sync(0xffffffff, x, apart));
    return x;
}

// The threads of a warp for which something is true, as bits.
__device__ inline unsigned which(bool is) { return warp_sum(is ? 1u << threadIdx.x % 32 : 0u); }

// The sum or the greatest of a block of SIZE threads, a multiple of 32. All of them must call it.
template <int SIZE, class Number> __device__ inline Number block_sum(Number x) {
    x = warp_sum(x);
    if (SIZE == 32) return x;
    __shared__ Number sums[SIZE / 32];
    __syncthreads();  // the sums of an earlier call have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < SIZE / 32; ++warp) x += sums[warp];
    return x;
}

template <int SIZE, class Number> __device__ inline Number block_max(Number x) {
    x = warp_max(x);
    if (SIZE == 32) return x;
    __shared__ Number greatest[SIZE / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = x;
    __syncthreads();
    x = greatest[0];
    for (int warp = 1; warp < SIZE / 32; ++warp) x = greater(x, greatest[warp]);
    return x;
}

// The sum of a vector of each of the TEAMS threads that have the same place in a row of SIZE. All threads of the block
// must call it.
template <int TEAMS, int SIZE, class Number, int COUNT>
__device__ inline Vector<Number, COUNT> rows_sum(Vector<Number, COUNT> x) {
    if (TEAMS == 1) return x;
    __shared__ Number numbers[TEAMS][COUNT][SIZE];
    __syncthreads();  // the numbers of an earlier call have been read
    for (int j = 0; j < COUNT; ++j) numbers[threadIdx.y][j][threadIdx.x] = x.at[j];
    __syncthreads();
    for (int j = 0; j < COUNT; ++j) {
        x.at[j] = 0;
        for (int row = 0; row < TEAMS; ++row) x.at[j] += numbers[row][j][threadIdx.x];
    }
    return x;
}

// The integer of `rng.random_uint16` at a place: word k, of SplitMix64, has those at 4 k ... 4 k + 3.
__device__ inline int random_16(Index place, unsigned long long start) {
    unsigned long long word = ((unsigned long long)place >> 2) * 0x9E3779B97F4A7C15ull + start;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    word ^= word >> 31;
    return word >> (16 * (place & 3)) & 0xffff;
}

// The same in a recorded step, which reads where the words start.
__device__ inline int random_16(Index place, const unsigned long long* start) { return random_16(place, *start); }
