// One warpgroup's products of 64 x 16 and 16 x 128 (sm_90a), whose sums d[i][0..3] are mma_m16n8k16's d of columns 8 i
// to 8 i + 7. Operands in shared memory are lines of 128 bytes, swizzled, eight of which lie one behind the other.
#pragma once

#include "ptx/wgmma.cuh"

namespace trt_nvfp4::ptx {

// A warpgroup's registers from now on, of each thread: fewer, for others to take, or more.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of such lines at `address`, a multiple of 1024 and the offset of the first element in its line: groups of
// eight lines are `stride` bytes apart, and where lines run along the columns, the next 64 of these `leading` bytes.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address, int leading, int stride) {
    constexpr uint64_t kSwizzled = uint64_t{1} << 62;
    return kSwizzled | uniform_descriptor(address, leading, stride);
}

// d = A B, or d += A B: lines run along K.
template <typename T>
__device__ __forceinline__ void wgmma_of_shared(float (&d)[16][4], uint64_t a, uint64_t b, bool added);
// d += A B: A in registers, as mma_m16n8k16's; lines of B run along its columns.
template <typename T>
__device__ __forceinline__ void wgmma_of_rows(float (&d)[16][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint64_t b);

// TYPE is PTX's name of T.
#define TRT_NVFP4_WGMMA(T, TYPE)                                                                                       \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_of_shared<T>(float (&d)[16][4], uint64_t a, uint64_t b, bool added) {        \
        asm volatile(                                                                                                  \
            "{\n.reg .pred added;\nsetp.ne.s32 added, %66, 0;\n"                                                       \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                               \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "    \
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "     \
            "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "     \
            "%62, %63}, %64, %65, added, 1, 1, 0, 0;\n}"                                                               \
            : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
              "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
              "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), \
              "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
              "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), \
              "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]),               \
              "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),          \
              "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]),          \
              "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]),          \
              "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])                           \
            : "l"(a), "l"(b), "r"(static_cast<int>(added)));                                                           \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_of_rows<T>(float (&d)[16][4], uint32_t a0, uint32_t a1, uint32_t a2,         \
                                                     uint32_t a3, uint64_t b) {                                        \
        asm volatile(                                                                                                  \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                               \
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "    \
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "     \
            "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "     \
            "%62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                        \
            : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
              "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
              "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), \
              "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
              "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), \
              "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]),               \
              "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),          \
              "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]),          \
              "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]),          \
              "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])                           \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                             \
    }

TRT_NVFP4_WGMMA(__half, "f16")
TRT_NVFP4_WGMMA(__nv_bfloat16, "bf16")

#undef TRT_NVFP4_WGMMA

template <int kColumns>
__device__ __forceinline__ void wgmma_finished(float (&sums)[kColumns][4]) {
#pragma unroll
    for (float (&column)[4] : sums) wgmma_finished(column);
}

}  // namespace trt_nvfp4::ptx
