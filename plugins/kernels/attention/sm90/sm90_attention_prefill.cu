#include "attention/launch.h"
#include "attention/sm90/sm90_attention_prefill.cuh"
#include "device/tensor_map.h"

namespace trt_nvfp4::attention {

template <typename T>
TrtNvfp4Status launch_wide_prefill(Args<T> const& args, void const* queries, cudaStream_t stream) {
    using Config = WidePrefill;
    constexpr CUtensorMapDataType kType =
        std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    PrefillMaps maps{};
    auto const encode = [&](CUtensorMap& map, void const* data, int rows, int of_tile) {
        auto const width = static_cast<cuuint64_t>(args.head_dim), all = static_cast<cuuint64_t>(rows);
        cuuint64_t const sizes[] = {width, all, static_cast<cuuint64_t>(int64_t{args.batch} * args.kv_heads)};
        cuuint64_t const strides[] = {sizeof(T) * width, sizeof(T) * width * all};
        cuuint32_t const box[] = {Config::kHalfDims, static_cast<cuuint32_t>(of_tile), 1};
        return encode_tensor_map(map, kType, 3, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, "tactic GENERIC");
    };
    TRT_NVFP4_RETURN_IF_ERROR(encode(maps.queries, queries, args.rows(), Config::kBlockRows));
    TRT_NVFP4_RETURN_IF_ERROR(encode(maps.keys, args.keys, args.capacity, Config::kKeys));
    TRT_NVFP4_RETURN_IF_ERROR(encode(maps.values, args.values, args.capacity, Config::kKeys));
    unsigned const tiles = (args.rows() + Config::kBlockRows - 1) / Config::kBlockRows;
    dim3 const blocks(tiles, args.kv_heads, args.batch);
    return launch_kernel(sm90_attention_prefill<T>, blocks, Config::kThreads, Config::kSharedBytes, true, stream,
                         "sm90_attention_prefill", args, maps);
}

template TrtNvfp4Status launch_wide_prefill<__half>(Args<__half> const&, void const*, cudaStream_t);
template TrtNvfp4Status launch_wide_prefill<__nv_bfloat16>(Args<__nv_bfloat16> const&, void const*, cudaStream_t);

}  // namespace trt_nvfp4::attention
