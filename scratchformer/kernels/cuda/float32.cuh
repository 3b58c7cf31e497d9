// Arithmetic of float as IEEE 754 defines it. CuPy compiles every kernel with -ftz=true; then a float below 2^-126 in
// magnitude (a subnormal one) counts as 0 wherever C++ computes with it, compares it or converts it. PTX instructions
// without .ftz keep such numbers, and those with .rn are not contracted: a product and a sum stay two operations.
namespace ieee {
__device__ inline float add(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float subtract(float a, float b) {
    float c;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float multiply(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float divide(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float fma(float a, float b, float plus) {
    float c;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(c) : "f"(a), "f"(b), "f"(plus));
    return c;
}

__device__ inline double widen(float a) {
    double c;
    asm("cvt.f64.f32 %0, %1;" : "=d"(c) : "f"(a));
    return c;
}

__device__ inline float round(double a) {
    float c;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(c) : "d"(a));
    return c;
}

__device__ inline double add(double a, double b) { return a + b; }
}  // namespace ieee
