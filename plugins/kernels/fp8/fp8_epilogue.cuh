// What happens to a row's 16 neighbouring accumulators of an FP8 GEMM: scales and bias, then 16 values of T, or the
// gate and 8 hidden values in E4M3.
#pragma once

#include <cuda_fp8.h>

#include "common/activation.cuh"
#include "common/smooth_activation.cuh"
#include "fp8/fp8_gemm.h"
#include "ptx/element.cuh"
#include "ptx/reduce.cuh"

namespace trt_nvfp4 {

// Columns of a row that a thread turns into output at a time; the number of columns is a multiple of 8.
constexpr int kFp8Columns = 16;

// Two elements of T, float16 or bfloat16.
__device__ __forceinline__ float2 unpack_pair(bool is_half, uint32_t pair) {
    if (is_half) return __half22float2(reinterpret_cast<__half2 const&>(pair));
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint32_t pack_pair(bool is_half, float low, float high) {
    if (is_half) {
        __half2 const pair = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t const&>(pair);
    }
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
}

// A thread's channels: their scales, times the activations', and biases. Zeros beyond the last channel.
struct Fp8ChannelValues {
    float scale[kFp8Columns], bias[kFp8Columns];

    __device__ __forceinline__ Fp8ChannelValues(Fp8Gemm const& gemm, float a_scale, int column0) {
#pragma unroll
        for (int part = 0; part < kFp8Columns; part += 8) {
            float4 scales[2]{};
            uint4 biases{};
            if (column0 + part < static_cast<int>(gemm.n)) {
                scales[0] = __ldg(reinterpret_cast<float4 const*>(gemm.w.scales + column0 + part));
                scales[1] = __ldg(reinterpret_cast<float4 const*>(gemm.w.scales + column0 + part) + 1);
                biases =
                    __ldg(reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(gemm.bias) + column0 + part));
            }
            uint32_t const pairs[4] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                scale[part + i] = reinterpret_cast<float const*>(scales)[i] * a_scale;
                float2 const pair = unpack_pair(gemm.dtype == TRT_NVFP4_FLOAT16, pairs[i / 2]);
                bias[part + i] = i % 2 == 0 ? pair.x : pair.y;
            }
        }
    }
};

class Fp8DenseValues {
 public:
    explicit __device__ __forceinline__ Fp8DenseValues(Fp8Gemm const& gemm) : gemm_(gemm) {}

    // `row` is inside.
    __device__ __forceinline__ void store(float const (&values)[kFp8Columns], int row, int column0) {
        int const width = static_cast<int>(gemm_.n);
        uint16_t* const out = static_cast<uint16_t*>(gemm_.out) + int64_t{row} * width + column0;
        bool const is_half = gemm_.dtype == TRT_NVFP4_FLOAT16;
#pragma unroll
        for (int i = 0; i < kFp8Columns; i += 8) {
            if (column0 + i >= width) return;
            *reinterpret_cast<uint4*>(out + i) = make_uint4(
                pack_pair(is_half, values[i], values[i + 1]), pack_pair(is_half, values[i + 2], values[i + 3]),
                pack_pair(is_half, values[i + 4], values[i + 5]), pack_pair(is_half, values[i + 6], values[i + 7]));
        }
    }

    __device__ __forceinline__ void finish() {}

 private:
    Fp8Gemm const& gemm_;
};

// An output chooses, by what only the call knows, the class that stores values.
struct Fp8DenseOutput {
    static constexpr bool kSplits = true;  // of K

    template <class Finish>
    __device__ __forceinline__ static void choose(Fp8Gemm const& gemm, Finish const& finish) {
        finish(Fp8DenseValues(gemm));
    }
};

class Fp8SumsValues {
 public:
    explicit __device__ __forceinline__ Fp8SumsValues(Fp8Gemm const& gemm) : gemm_(gemm) {}

    // `row` is inside.
    __device__ __forceinline__ void store(float const (&values)[kFp8Columns], int row, int column0) {
        int const width = static_cast<int>(gemm_.n);
        float4* const out = reinterpret_cast<float4*>(static_cast<float*>(gemm_.out) + int64_t{row} * width + column0);
#pragma unroll
        for (int i = 0; i < kFp8Columns; i += 4) {
            if (column0 + i < width) out[i / 4] = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
    }

    __device__ __forceinline__ void finish() {}

 private:
    Fp8Gemm const& gemm_;
};

// The float32 sums of experts, without padding between them.
struct Fp8SumsOutput {
    static constexpr bool kPadded = false;

    template <class Finish>
    __device__ __forceinline__ static void choose(Fp8Gemm const& gemm, Finish const& finish) {
        finish(Fp8SumsValues(gemm));
    }
};

// A SmoothActivation of a gate and its up, both clamped.
class SmoothGate {
 public:
    __device__ __forceinline__ explicit SmoothGate(Fp8Gemm const& gemm) : smooth_(gemm.activation, gemm.alpha) {
        limit_ = is_clamped(gemm.activation) ? gemm.limit : __uint_as_float(0x7f800000u);
        shift_ = shift_of(gemm.activation);
    }

    __device__ __forceinline__ float operator()(float gate, float up) const {
        clamp_gate(limit_, shift_, gate, up);
        return smooth_(gate) * up;
    }

 private:
    SmoothActivation const smooth_;
    float limit_, shift_;
};

// kSmooth: the activation is a SmoothActivation; the others' code stays out of its loop.
template <bool kSmooth>
class Fp8GatedValues {
 public:
    explicit __device__ __forceinline__ Fp8GatedValues(Fp8Gemm const& gemm) : gemm_(gemm), gate_(gemm) {
        inverse_ = gemm.amax_pass ? 1.0f : __fdividef(1.0f, gemm.hidden_scale.resolve());
    }

    // `row` is inside; a pair of values is a gate and its up.
    __device__ __forceinline__ void store(float const (&values)[kFp8Columns], int row, int column0) {
        constexpr int kHidden = kFp8Columns / 2;
        float hidden[kHidden];
        if constexpr (kSmooth) {
#pragma unroll
            for (int i = 0; i < kHidden; ++i) hidden[i] = gate_(values[2 * i], values[2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < kHidden; ++i) hidden[i] = plain_activate(values[2 * i]) * values[2 * i + 1];
        }
        int const width = static_cast<int>(gemm_.n) / 2;  // a multiple of 16
        if (column0 / 2 >= width) return;
        if (gemm_.amax_pass) {
#pragma unroll
            for (float const value : hidden) amax_bits_ = max(amax_bits_, ptx::magnitude_bits(value));
            return;
        }
        *reinterpret_cast<uint2*>(gemm_.hidden + int64_t{row} * width + column0 / 2) = make_uint2(
            pack(hidden[0], hidden[1], hidden[2], hidden[3]), pack(hidden[4], hidden[5], hidden[6], hidden[7]));
    }

    __device__ __forceinline__ void finish() {
        if (!gemm_.amax_pass) return;
        // A maximum is the same in any order.
        uint32_t const largest = ptx::warp_max(amax_bits_);
        if (threadIdx.x % 32 == 0) atomicMax(gemm_.hidden_amax, largest);
    }

 private:
    // What no sigmoid makes; the activation's name is a constant so that no division, a function call, comes along.
    __device__ __forceinline__ float plain_activate(float x) const {
        switch (gemm_.activation) {
            case TRT_NVFP4_RELU:
                return activate(TRT_NVFP4_RELU, x);
            case TRT_NVFP4_RELU2:
                return activate(TRT_NVFP4_RELU2, x);
            case TRT_NVFP4_GELU:
                return activate(TRT_NVFP4_GELU, x);
            default:
                return x;
        }
    }

    __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) const {
        uint32_t const low = __nv_cvt_float2_to_fp8x2({a * inverse_, b * inverse_}, __NV_SATFINITE, __NV_E4M3);
        uint32_t const high = __nv_cvt_float2_to_fp8x2({c * inverse_, d * inverse_}, __NV_SATFINITE, __NV_E4M3);
        return low | high << 16;
    }

    Fp8Gemm const& gemm_;
    SmoothGate gate_;
    float inverse_;
    uint32_t amax_bits_ = 0;
};

struct Fp8GatedOutput {
    static constexpr bool kSplits = false;
    static constexpr bool kPadded = true;  // of experts: written to the tiles that a work item's rows have

    template <class Finish>
    __device__ __forceinline__ static void choose(Fp8Gemm const& gemm, Finish const& finish) {
        if (SmoothActivation(gemm.activation).fits) {
            finish(Fp8GatedValues<true>(gemm));
        } else {
            finish(Fp8GatedValues<false>(gemm));
        }
    }
};

// Whether this warp, number `part` of all the tiles', is the last of the splits of K to arrive; `sums` then holds the
// sum, added up in the splits' order. Warps need not wait for each other: each has its own part of a tile. `sums` are
// kCount float32 in registers.
template <int kCount, class Sums>
__device__ __forceinline__ bool add_up_splits(Fp8Gemm const& gemm, Sums& sums, int64_t part, int split) {
    constexpr int kVectors = kCount / 4;
    // That are loaded at a time: more would take the registers that the tile scheduler needs.
    constexpr int kLoads = kVectors < 16 ? kVectors : 16;
    float4* const first =
        reinterpret_cast<float4*>(gemm.partials) + part * gemm.splits * kVectors * 32 + threadIdx.x % 32;
    float4* const own = first + split * kVectors * 32;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        __stcg(own + i * 32, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    __threadfence();
    __syncwarp();
    uint32_t arrived = 0;
    if (threadIdx.x % 32 == 0) arrived = atomicAdd(gemm.arrivals + part, 1u);
    if (__shfl_sync(0xffffffffu, arrived, 0) != static_cast<uint32_t>(gemm.splits - 1)) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int vector = 0; vector < kVectors; vector += kLoads) {
#pragma unroll 1
        for (int other = 0; other < gemm.splits; ++other) {
#pragma unroll
            for (int i = vector; i < vector + kLoads; ++i) {
                float4 const four = __ldcg(first + (other * kVectors + i) * 32);
                sums[4 * i] += four.x;
                sums[4 * i + 1] += four.y;
                sums[4 * i + 2] += four.z;
                sums[4 * i + 3] += four.w;
            }
        }
    }
    return true;
}

// A warp's strips of 16 rows, kStep rows apart, by kColumns columns: `sums` are fragments of 16x8 as mma.sync and wgmma
// leave them, those of a strip one after another. A row is spread over a quad of threads; it passes through shared
// memory, a group of columns at a time, so that a thread has neighbouring columns of a row, and a short loop, rather
// than a long unrolled text, does what is to be done.
template <class Output, int kColumns, int kStrips, int kStep>
class Fp8Finish {
    static constexpr int kGroup = kColumns < 128 ? kColumns : 128;
    static constexpr int kThreadsAcross = kGroup / kFp8Columns;
    static constexpr int kRowsAtATime = 32 / kThreadsAcross;

 public:
    using Staged = float[16 * kGroup];  // of a warp

    template <class Sums>
    __device__ __forceinline__ static void run(Fp8Gemm const& gemm, Sums const& sums, Staged& staged, int row0,
                                               int column0) {
        Output::choose(gemm, [&](auto output) { store(gemm, sums, staged, row0, column0, output); });
    }

 private:
    // Where a column of a row lies, so that a quad's column pairs of 4 rows are in different banks, and so are the
    // vectors that threads read of 4 rows and 2 of their columns' groups.
    __device__ __forceinline__ static int place(int row, int column) {
        return column ^ (row % 4 * 8) ^ (column / kFp8Columns % 2 * 4);
    }

    template <class Sums, class Values>
    __device__ __forceinline__ static void store(Fp8Gemm const& gemm, Sums const& sums, Staged& staged, int row0,
                                                 int column0, Values& output) {
        int const lane = threadIdx.x % 32;
        int const first_column = lane / 4 % kThreadsAcross * kFp8Columns;
        int const first_row = lane % 4 + lane / (4 * kThreadsAcross) * 4;
        float const a_scale = gemm.a.scale.resolve();
#pragma unroll
        for (int group = 0; group < kColumns / kGroup; ++group) {
            int const column = column0 + group * kGroup + first_column;
            Fp8ChannelValues const channels(gemm, a_scale, column);
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
                for (int i = 0; i < kGroup / 8; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int const at = ((strip * kColumns + group * kGroup) / 8 + i) * 4 + 2 * half;
                        int const row = lane / 4 + 8 * half;
                        *reinterpret_cast<float2*>(staged + row * kGroup + place(row, 8 * i + 2 * (lane % 4))) =
                            make_float2(sums[at], sums[at + 1]);
                    }
                }
                __syncwarp();
#pragma unroll 1
                for (int i = first_row; i < 16; i += kRowsAtATime) {
                    float values[kFp8Columns];
#pragma unroll
                    for (int j = 0; j < kFp8Columns; j += 4) {
                        float4 const four =
                            *reinterpret_cast<float4 const*>(staged + i * kGroup + place(first_row, first_column + j));
                        values[j] = fmaf(four.x, channels.scale[j], channels.bias[j]);
                        values[j + 1] = fmaf(four.y, channels.scale[j + 1], channels.bias[j + 1]);
                        values[j + 2] = fmaf(four.z, channels.scale[j + 2], channels.bias[j + 2]);
                        values[j + 3] = fmaf(four.w, channels.scale[j + 3], channels.bias[j + 3]);
                    }
                    int const row = row0 + strip * kStep + i;
                    if (row < static_cast<int>(gemm.m)) output.store(values, row, column);
                }
                __syncwarp();
            }
        }
        output.finish();
    }
};

}  // namespace trt_nvfp4
