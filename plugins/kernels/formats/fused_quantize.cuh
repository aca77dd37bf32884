// Residual, RMSNorm and NVFP4 in one pass over x: a block keeps a row in shared memory. Same arithmetic in the same
// order as generic_rmsnorm and generic_quantize, so the same bits.
//
// Where the tensor scale has to be found, the pass leaves every row's amax instead, and a second one starts from r if
// there is one; where it is given, the second is not launched, or returns at once if only the device knows. Every block
// of the second reads all amaxes, so that rows share them where there are many.
#pragma once

#include <algorithm>

#include "generic/generic_quantize.cuh"
#include "generic/generic_rmsnorm.cuh"

namespace trt_nvfp4 {

constexpr int kFusedQuantizeThreads = 256;
constexpr int64_t kRowAmaxes = 2048;  // up to so many rows each have their own

// A row is held in what shared memory a block may have without asking for more.
inline bool fused_quantize_fits(int64_t k, int64_t element_size) { return k * element_size <= 47 * 1024; }

template <typename T>
struct FusedQuantizeArgs {
    int64_t m, k;
    T const* x;
    T const* residual;     // null: none
    T const* norm_weight;  // null: no norm
    float epsilon;
    T* r;  // null: not wanted
    float const* given_scale;
    Nvfp4Matrix out;
    bool second;
};

// Largest of a block's values; every thread gets it.
__device__ __forceinline__ uint32_t block_max(uint32_t x) {
    __shared__ uint32_t partial[kFusedQuantizeThreads / 32];
    x = ptx::warp_max(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    uint32_t largest = 0;
    for (uint32_t const part : partial) largest = max(largest, part);
    return largest;
}

template <typename T>
__device__ __forceinline__ void load_block(float (&values)[kBlock], T const* block) {
    constexpr int kWidth = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kBlock; i += kWidth) {
        uint4 const word = *reinterpret_cast<uint4 const*>(block + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[i + j] = ptx::to_float(reinterpret_cast<T const*>(&word)[j]);
    }
}

// x + residual, or in the second pass r, to shared memory; then the norm.
template <typename T>
__device__ __forceinline__ void load_row(FusedQuantizeArgs<T> const& args, int64_t row, T* values) {
    constexpr int kWidth = 16 / sizeof(T);
    bool const from_r = args.second && args.r != nullptr;
    T const* const source = (from_r ? args.r : args.x) + row * args.k;
    for (int64_t i = threadIdx.x * kWidth; i < args.k; i += kFusedQuantizeThreads * kWidth) {
        uint4 word = *reinterpret_cast<uint4 const*>(source + i);
        if (!from_r) {
            if (args.residual != nullptr) {
                uint4 const other = *reinterpret_cast<uint4 const*>(args.residual + row * args.k + i);
                T* const a = reinterpret_cast<T*>(&word);
                T const* const b = reinterpret_cast<T const*>(&other);
#pragma unroll
                for (int j = 0; j < kWidth; ++j) a[j] = ptx::from_float<T>(ptx::to_float(a[j]) + ptx::to_float(b[j]));
            }
            if (args.r != nullptr) *reinterpret_cast<uint4*>(args.r + row * args.k + i) = word;
        }
        *reinterpret_cast<uint4*>(values + i) = word;
    }
    __syncthreads();
    if (args.norm_weight == nullptr) return;
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
        squares += ptx::to_float(values[i]) * ptx::to_float(values[i]);
    }
    float const mean = ptx::block_sum<kFusedQuantizeThreads>(squares) / static_cast<float>(args.k);
    float const inverse_rms = __frcp_rn(__fsqrt_rn(mean + args.epsilon));
    for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
        values[i] = ptx::from_float<T>(ptx::to_float(values[i]) * inverse_rms * ptx::to_float(args.norm_weight[i]));
    }
    __syncthreads();
}

// The quantizer of the block that `load` writes into `sixteen`, which holds it afterwards. Values are loaded anew: few
// registers outlive the calls that divisions are.
template <bool kSearch, typename Load>
__device__ __forceinline__ BlockQuantizer quantize_loaded(float (&sixteen)[kBlock], Load const& load,
                                                          float tensor_scale, int32_t scale_search) {
    load();
    uint32_t block_amax = 0;
#pragma unroll
    for (float const value : sixteen) block_amax = max(block_amax, ptx::magnitude_bits(value));
    BlockQuantizer quantizer(block_amax, tensor_scale);
    if constexpr (kSearch) {
        ScaleCandidates const candidates(block_amax, tensor_scale, quantizer.block_scale, scale_search);
        asm volatile("" ::: "memory");
        load();
        quantizer.search<1, kBlock>(candidates, sixteen);
    } else {
        asm volatile("" ::: "memory");
        load();
    }
    return quantizer;
}

// Without a search and without residual channels the kernel needs fewer registers.
template <typename T, bool kSearch, bool kResidual>
__global__ __launch_bounds__(kFusedQuantizeThreads) void fused_quantize(
    __grid_constant__ FusedQuantizeArgs<T> const args) {
    extern __shared__ __align__(16) uint8_t fused_quantize_row[];
    T* const values = reinterpret_cast<T*>(fused_quantize_row);
    int64_t const row = blockIdx.x;
    float const given = *args.given_scale;
    bool const found = given != 0.0f;
    if (args.second && found) return;
    if (row < args.m) load_row(args, row, values);
    int const residual_channels = kResidual ? args.out.residual_channels : 0;
    int64_t const stored = args.k + residual_channels;
    int const blocks = static_cast<int>(stored / kBlock);
    if (!args.second && !found) {
        if (row >= args.m) return;
        uint32_t amax = 0;
        for (int64_t i = threadIdx.x; i < args.k; i += kFusedQuantizeThreads) {
            amax = max(amax, ptx::magnitude_bits(ptx::to_float(values[i])));
        }
        amax = block_max(amax);
        if (threadIdx.x == 0) {
            if (args.m <= kRowAmaxes) {
                args.out.amax_bits[row] = amax;
            } else {
                atomicMax(args.out.amax_bits + row % kRowAmaxes, amax);
            }
        }
        return;
    }
    uint32_t amax = 0;
    if (!found) {
        int64_t const amaxes = min(args.m, kRowAmaxes);
        for (int64_t i = threadIdx.x; i < amaxes; i += kFusedQuantizeThreads) amax = max(amax, args.out.amax_bits[i]);
        amax = block_max(amax);
    }
    float const tensor_scale = resolve_tensor_scale(given, &amax, args.out.scale_search);
    if (row == 0 && threadIdx.x == 0) *args.out.tensor_scale = tensor_scale;
    if (row >= round_up(args.m, 128)) return;
    int const blocks_padded = static_cast<int>(padded_blocks(stored));
    for (int block = threadIdx.x; block < blocks_padded; block += kFusedQuantizeThreads) {
        uint8_t* const block_scale = args.out.block_scales + scale_offset(row, block, blocks_padded);
        if (row >= args.m || block >= blocks) {
            *block_scale = 0;
            continue;
        }
        float sixteen[kBlock];
        bool const is_residual = kResidual && block * kBlock >= args.k;
        T const* const source = values + block * kBlock - (is_residual ? residual_channels : 0);
        auto const load = [&] { load_block(sixteen, source); };
        BlockQuantizer quantizer = quantize_loaded<kSearch>(sixteen, load, tensor_scale, args.out.scale_search);
        if constexpr (kResidual) {
            if (is_residual) {
                BlockQuantizer const first = quantizer;
                auto const load_lost = [&] {
                    load();
#pragma unroll
                    for (float& value : sixteen) value = first.lost(value, tensor_scale);
                };
                quantizer = quantize_loaded<kSearch>(sixteen, load_lost, tensor_scale, args.out.scale_search);
            }
        }
        *block_scale = quantizer.block_scale;
        *reinterpret_cast<uint2*>(args.out.packed + (row * stored + block * kBlock) / 2) = quantizer.encode(sixteen);
    }
}

// `static_scale`: the given scale is known not to be 0.
template <typename T>
TrtNvfp4Status launch_fused_quantize(FusedQuantizeArgs<T> args, bool static_scale, cudaStream_t stream) {
    // At least one block: the tensor scale is an output of an empty matrix too.
    auto const rows = static_cast<unsigned>(std::max<int64_t>(round_up(args.m, 128), 1));
    bool const search = args.out.scale_search != 0, residual = args.out.residual_channels != 0;
    auto const kernel = search ? (residual ? fused_quantize<T, true, true> : fused_quantize<T, true, false>)
                               : (residual ? fused_quantize<T, false, true> : fused_quantize<T, false, false>);
    if (!static_scale && args.m > kRowAmaxes) {
        TRT_NVFP4_RETURN_IF_ERROR(
            check_cuda(cudaMemsetAsync(args.out.amax_bits, 0, kRowAmaxes * sizeof(uint32_t), stream), "clear amax"));
    }
    for (args.second = false;; args.second = true) {
        TRT_NVFP4_RETURN_IF_ERROR(launch_kernel(kernel, rows, kFusedQuantizeThreads,
                                                static_cast<size_t>(args.k) * sizeof(T), false, stream,
                                                "fused_quantize", args));
        if (static_scale || args.second) return TRT_NVFP4_SUCCESS;
    }
}

// The same by the generic kernels where a row does not fit; they keep n in `normalized`, T [m, k].
template <typename T>
TrtNvfp4Status launch_norm_quantize(FusedQuantizeArgs<T> const& args, void* normalized, bool static_scale,
                                    cudaStream_t stream) {
    if (fused_quantize_fits(args.k, sizeof(T))) return launch_fused_quantize(args, static_scale, stream);
    T const* n = args.x;
    if (args.r != nullptr || args.norm_weight != nullptr) {
        RmsNormArgs<T> norm{};
        norm.m = args.m;
        norm.k = args.k;
        norm.x = args.x;
        norm.residual = args.residual;
        norm.weight = args.norm_weight;
        norm.epsilon = args.epsilon;
        norm.r = args.r;
        norm.n = static_cast<T*>(normalized);
        TRT_NVFP4_RETURN_IF_ERROR(launch_rmsnorm(norm, stream));
        n = args.norm_weight != nullptr ? norm.n : args.r;
    }
    return launch_quantize(n, args.m, args.k, args.given_scale, static_scale, args.out, stream);
}

}  // namespace trt_nvfp4
