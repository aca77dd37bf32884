// One warpgroup's D += A B (sm_90a): A 64x16 in registers as four m16n8k16 fragments (see mma_sync.cuh), one per warp;
// B 16xN in shared memory; D 64xN in float32, d[4 i + 0..3] as mma_m16n8k16's d of columns 8 i to 8 i + 7.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace trt_nvfp4::ptx {

// B where a column's 8 neighbours in K are 16 bytes and 8 columns' are 128 bytes in a row; `leading` is the distance in
// bytes between such groups along K, `stride` along N.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int leading, int stride) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32;
}

// The same, known to be one for all lanes: wgmma takes it in uniform registers, which is where the result of a
// reduction is. Others are moved there before every multiplication.
__device__ __forceinline__ uint64_t uniform_descriptor(uint32_t address, int leading, int stride) {
    return matrix_descriptor(__reduce_max_sync(0xffffffffu, address), leading, stride);
}

// The same `bytes` further on: a multiple of 16. Below 2^18 the address does not reach what lies above it.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
    return descriptor & ~uint64_t{0xffffffffu} | static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
}

// Before a multiplication whose registers this thread has written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns once at most kPending of the latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Behind a wait: what is done with sums must not begin before it, which the compiler does not know.
template <int kSums>
__device__ __forceinline__ void wgmma_finished(float (&sums)[kSums]) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[8], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[12], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[24], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);

// TYPE is PTX's name of T.
#define TRT_NVFP4_WGMMA(T, TYPE)                                                                                       \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,        \
                                             uint64_t b) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE                                        \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"                                            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[8], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,        \
                                             uint64_t b) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"                         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])  \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[12], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                             uint64_t b) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32." TYPE "." TYPE                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, 1, 1, 1, 0;"     \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])                                                \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                             uint64_t b) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, " \
                     "%20, 1, 1, 1, 0;"                                                                                \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                       "+f"(d[15])                                                                                     \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[24], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                             uint64_t b) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
                     "%20, %21, %22, %23}, {%24, %25, %26, %27}, %28, 1, 1, 1, 0;"                                     \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
                       "+f"(d[22]), "+f"(d[23])                                                                        \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T>(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                             uint64_t b) {                                                             \
        asm volatile(                                                                                                  \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                \
            " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "   \
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),          \
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),    \
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),  \
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])   \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                             \
    }

TRT_NVFP4_WGMMA(__half, "f16")
TRT_NVFP4_WGMMA(__nv_bfloat16, "bf16")

#undef TRT_NVFP4_WGMMA

}  // namespace trt_nvfp4::ptx
