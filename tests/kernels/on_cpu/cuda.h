// CUDA on a CPU, for tests: the threads of a block take turns. Each runs until it needs the others: at __syncthreads, or
// for a shuffle within its warp. Slow, and blind to races between such points.

#pragma once
#include <math.h>  // its functions take float, too
#include <setjmp.h>
#include <stdio.h>
#include <ucontext.h>

#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __shared__ static  // there is one block at a time
#define __launch_bounds__(...)

// No templates of the standard library's containers, which would be compiled again for every kernel.
template <class Number> Number max(Number x, Number y) { return x < y ? y : x; }
template <class Number> Number min(Number x, Number y) { return y < x ? y : x; }
template <class Real> Real rsqrt(Real x) { return 1 / sqrt(x); }

struct __half {
    _Float16 number;
    __half() = default;
    __half(double x) : number(x) {}
    operator float() const { return number; }
};

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {  // to the nearest, or to the even one of two
        unsigned all;
        std::memcpy(&all, &x, sizeof all);
        bits = x == x ? (all + 0x7fff + (all >> 16 & 1)) >> 16 : 0x7fff;
    }
    operator float() const {
        float x;
        unsigned all = bits << 16;
        std::memcpy(&x, &all, sizeof x);
        return x;
    }
};

struct Place {
    unsigned x, y;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

enum State { RUNNING, AT_BARRIER, AT_SHUFFLE, DONE };

struct Thread {
    jmp_buf stopped;  // where it goes on
    char* stack;
    Place place;
    State state;
    int shuffles;  // so far; even and odd ones use different slots, so that nothing is overwritten before it is read
    double slots[2];
};

static Thread threads[1024];
static jmp_buf scheduler;
static int current;

static void wait(State why) {
    threads[current].state = why;
    if (!_setjmp(threads[current].stopped)) _longjmp(scheduler, 1);
}

static void __syncthreads() { wait(AT_BARRIER); }

template <class Number> Number __shfl_xor_sync(unsigned, Number number, int mask) {
    int own = current, slot = threads[own].shuffles++ % 2;
    threads[own].slots[slot] = number;
    wait(AT_SHUFFLE);
    return (Number)threads[own / 32 * 32 + ((own % 32) ^ mask)].slots[slot];
}

static int atomicAdd(int* to, int number) {
    int before = *to;
    *to += number;
    return before;
}

static double __longlong_as_double(long long bits) {
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

template <class To, class From> To with_bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
static int __float_as_int(float x) { return with_bits_of<int>(x); }
static float __int_as_float(int x) { return with_bits_of<float>(x); }

static void (*body)(const void*);
static const void* arguments;  // of the body

static void start() {
    for (;;) {
        wait(DONE);
        body(arguments);
    }
}

// Give a thread a stack. It goes on from one kernel to the next by jumps, which take no calls of the system.
static void create(Thread& thread) {
    const size_t size = 1 << 16;
    ucontext_t context;
    thread.stack = new char[size];
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack, context.uc_stack.ss_size = size;
    makecontext(&context, start, 0);
    if (!_setjmp(scheduler)) setcontext(&context);
}

static void go_on(Thread& thread) {
    if (!_setjmp(scheduler)) _longjmp(thread.stopped, 1);
}

// Let the threads first ... first + count - 1 go on if all that are not done wait for the same.
static bool release(int first, int count, State why) {
    for (int i = first; i < first + count; ++i)
        if (threads[i].state != why && threads[i].state != DONE) return false;
    bool any = false;
    for (int i = first; i < first + count; ++i)
        if (threads[i].state == why) threads[i].state = RUNNING, any = true;
    return any;
}

// Run a kernel, a block at a time. False if its threads wait for each other for ever.
static bool run(unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned block_y) {
    int count = block_x * block_y;
    gridDim = {grid_x, grid_y}, blockDim = {block_x, block_y};
    for (current = 0; current < count; ++current)
        if (!threads[current].stack) create(threads[current]);
    for (unsigned b = 0; b < grid_x * grid_y; ++b) {
        blockIdx = {b % grid_x, b / grid_x};
        for (int i = 0; i < count; ++i) {
            Thread& t = threads[i];
            t.place = {i % block_x, i / block_x}, t.state = RUNNING, t.shuffles = 0;
        }
        for (bool going = true; going;) {
            going = false;
            for (current = 0; current < count; ++current)
                if (threads[current].state == RUNNING) {
                    threadIdx = threads[current].place;
                    go_on(threads[current]);
                    going = true;
                }
            for (int warp = 0; warp < count; warp += 32) going |= release(warp, min(32, count - warp), AT_SHUFFLE);
            going |= release(0, count, AT_BARRIER);
        }
        for (int i = 0; i < count; ++i)
            if (threads[i].state != DONE) {
                for (Thread& t : threads) t.stack = nullptr;  // what is on the old stacks cannot go on
                return false;
            }
    }
    return true;
}

// A type as `emulator.py` writes it: the kind and the bytes of a number, after a * for each pointer.
template <class Type> void code(char*& to) {
    if constexpr (std::is_pointer_v<Type>) {
        *to++ = '*';
        code<std::remove_cv_t<std::remove_pointer_t<Type>>>(to);
    } else
        to += sprintf(to, "%c%zu ", !std::is_integral_v<Type> ? 'f' : std::is_signed_v<Type> ? 'i' : 'u', sizeof(Type));
}

template <class... Types> const char* codes(void (*)(Types...)) {
    static char all[6 * sizeof...(Types) + 1];
    char* to = all;
    (code<Types>(to), ...);
    return all;
}

// Run a kernel with arguments that are at these addresses.
template <class... Types, size_t... I>
bool launch(void (*kernel)(Types...), const int* sizes, void** at, std::index_sequence<I...>) {
    auto call = [=] { kernel(*(Types*)at[I]...); };
    body = [](const void* call_of) { (*(const decltype(call)*)call_of)(); };
    arguments = &call;
    return run(sizes[0], sizes[1], sizes[2], sizes[3]);
}

template <class... Types> bool launch(void (*kernel)(Types...), const int* sizes, void** at) {
    return launch(kernel, sizes, at, std::index_sequence_for<Types...>());
}
