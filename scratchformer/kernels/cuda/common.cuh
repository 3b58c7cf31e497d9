// What all kernels share. `cupy_code` puts #define lines before this text: T, the type of arrays; REAL, the type in which
// sums run, float for __half, __nv_bfloat16 and float, and double for double; and the constants of a file.

typedef long long Index;

// Numbers that are read or written at once.
template <class Number, int COUNT> struct alignas(sizeof(Number) * COUNT) Vector {
    Number at[COUNT];
};

__device__ inline REAL infinity() { return (REAL)__longlong_as_double(0x7ff0000000000000ll); }
__device__ inline REAL wide(T x) { return (REAL)x; }
__device__ inline T narrow(REAL x) { return T(x); }

// The sum, or the greatest, of one number of each thread of a warp; every thread gets it.
__device__ inline REAL warp_sum(REAL x) {
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffff, x, apart);
    return x;
}

__device__ inline REAL warp_max(REAL x) {
    for (int apart = 16; apart; apart /= 2) x = max(x, __shfl_xor_sync(0xffffffff, x, apart));
    return x;
}

// The same for a block of SIZE threads, a multiple of 32. All of them must call it.
template <int SIZE> __device__ inline REAL block_sum(REAL x) {
    x = warp_sum(x);
    if (SIZE == 32) return x;
    __shared__ REAL sums[SIZE / 32];
    __syncthreads();  // the sums of an earlier call have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < SIZE / 32; ++warp) x += sums[warp];
    return x;
}

template <int SIZE> __device__ inline REAL block_max(REAL x) {
    x = warp_max(x);
    if (SIZE == 32) return x;
    __shared__ REAL greatest[SIZE / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = x;
    __syncthreads();
    x = greatest[0];
    for (int warp = 1; warp < SIZE / 32; ++warp) x = max(x, greatest[warp]);
    return x;
}
