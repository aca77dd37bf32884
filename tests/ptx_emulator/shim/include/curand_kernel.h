// Stands in for cuRAND's device header, which the compiler packages lack and CUTLASS's random fills include: the few
// functions that they call, on a 64-bit linear congruential generator.
#pragma once

struct curandState_t {
    unsigned long long value;
};
using curandState = curandState_t;

__device__ inline unsigned curand(curandState_t* state) {
    state->value = state->value * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned(state->value >> 32);
}

__device__ inline void curand_init(unsigned long long seed, unsigned long long sequence, unsigned long long,
                                   curandState_t* state) {
    state->value = seed * 2654435761ull + sequence * 40503ull;
    for (int i = 0; i < 4; ++i) curand(state);
}

// In (0, 1].
__device__ inline float curand_uniform(curandState_t* state) { return ((curand(state) >> 8) + 1) * 0x1p-24f; }
__device__ inline double curand_uniform_double(curandState_t* state) { return curand_uniform(state); }

// Twelve uniforms have the variance of one normal.
__device__ inline float curand_normal(curandState_t* state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += curand_uniform(state);
    return sum;
}
__device__ inline double curand_normal_double(curandState_t* state) { return curand_normal(state); }
