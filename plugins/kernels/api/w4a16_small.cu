#include <type_traits>

#include "../heuristics/in_flight.h"
#include "../sm80_w4a16_small.cuh"
#include "w4a16_device.h"
#include "w4a16_small.h"

namespace trt_nvfp4::w4a16 {
namespace {

template <class Products>
Footprint footprint(TrtNvfp4LinearArgs const& linear) {
    return {kWarps * kStageBytes, Products::chunk_bytes(static_cast<int>(linear.m)), kSmallFixedBytes};
}

Shape shape_of(TrtNvfp4LinearArgs const& linear) {
    return {static_cast<int>((linear.n + 127) / 128) * kTilesPerGroup,
            static_cast<int>((linear.k + kChunk - 1) / kChunk)};
}

template <typename T, class Products>
TrtNvfp4Status launch(TrtNvfp4LinearArgs const& linear, Device const& device, cudaStream_t stream) {
    constexpr char const* kName = "sm80_w4a16_small";
    auto const kernel = sm80_w4a16_small<T, Products>;
    Footprint const bytes = footprint<Products>(linear);
    Shape const shape = shape_of(linear);
    SmallArgs<T> args{};
    args.codes = static_cast<uint8_t const*>(linear.weight.packed);
    args.scales = static_cast<uint8_t const*>(linear.weight.block_scales);
    args.tensor_scale = linear.weight.tensor_scale;
    args.bias = static_cast<T const*>(linear.weight.bias);
    args.x = static_cast<T const*>(linear.x);
    args.y = static_cast<T*>(linear.y);
    args.rows = static_cast<int>(linear.n);
    args.k = static_cast<int>(linear.k);
    args.m = static_cast<int>(linear.m);
    args.activation = linear.activation;
    args.shape = small_linear(shape.chunks);
    args.in_flight = choose_in_flight(kFillers * kStageBytes, device.sm_count, device.bandwidth);
    args.one = 1;
    TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, device.shared_bytes - bytes.fixed, kName));
    return launch_allowed(kernel, static_cast<unsigned>(shape.tiles), kBlockThreads,
                          static_cast<size_t>(small_bytes(args.shape, bytes)), device.dependent_launch, stream, kName,
                          args);
}

// Calls f with a null pointer to what multiplies the linear's tokens.
template <typename T, typename F>
auto with_products(TrtNvfp4LinearArgs const& linear, F&& f) {
    if (linear.m == 1) return f(static_cast<TokenProducts<T>*>(nullptr));
    if (linear.m <= 8) return f(static_cast<ColumnProducts<T, 1>*>(nullptr));
    return f(static_cast<ColumnProducts<T, 2>*>(nullptr));
}

template <typename F>
auto with_types(TrtNvfp4LinearArgs const& linear, F&& f) {
    if (linear.dtype == TRT_NVFP4_FLOAT16) {
        return with_products<__half>(linear, [&](auto* products) { return f(__half{}, products); });
    }
    return with_products<__nv_bfloat16>(linear, [&](auto* products) { return f(__nv_bfloat16{}, products); });
}

// What fits_small asks for; false where there is no GPU, which is no error here.
bool find_room(Device& device) {
    int ordinal = 0;
    auto const read = [&](int& value, cudaDeviceAttr attribute) {
        return cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess;
    };
    return cudaGetDevice(&ordinal) == cudaSuccess && read(device.sm_count, cudaDevAttrMultiProcessorCount) &&
           read(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

}  // namespace

bool takes_small(TrtNvfp4LinearArgs const& linear) {
    Device device{};
    if (linear.m > kMostSmallTokens || !find_room(device)) return false;
    return with_types(linear, [&](auto, auto* products) {
        using Products = std::remove_pointer_t<decltype(products)>;
        return fits_small(shape_of(linear), Products::kBlocksOnSm, footprint<Products>(linear), device);
    });
}

TrtNvfp4Status launch_small(TrtNvfp4LinearArgs const& linear, TrtNvfp4Stream stream) {
    Device device{};
    TRT_NVFP4_RETURN_IF_ERROR(read_device(device));
    return with_types(linear, [&](auto element, auto* products) {
        using Products = std::remove_pointer_t<decltype(products)>;
        return launch<decltype(element), Products>(linear, device, stream);
    });
}

}  // namespace trt_nvfp4::w4a16
