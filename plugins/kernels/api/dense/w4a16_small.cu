#include "api/dense/w4a16_small.h"
#include "device/w4a16_device.h"
#include "heuristics/in_flight.h"
#include "w4a16/stream/sm80_w4a16_small.cuh"

namespace trt_nvfp4::w4a16 {
namespace {

template <class Products, int kCluster>
struct Kernel {
    using T = typename Products::Element;
    static constexpr int kSentBytes = kCluster == 1 ? 0 : sizeof(SentSums<Products::kTokens>);

    static Footprint footprint(TrtNvfp4LinearArgs const& linear) {
        return {kWarps * kStageBytes, Products::chunk_bytes(static_cast<int>(linear.m)), kSmallFixedBytes + kSentBytes};
    }

    static bool takes(TrtNvfp4LinearArgs const& linear, Device const& device) {
        return fits_small(tiles(linear), linear.m * linear.k, shape(linear, device), device);
    }

    static TrtNvfp4Status launch(TrtNvfp4LinearArgs const& linear, Device const& device, cudaStream_t stream) {
        constexpr char const* kName = "sm80_w4a16_small";
        auto const kernel = sm80_w4a16_small<Products, kCluster>;
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
        args.shape = shape(linear, device);
        args.in_flight = choose_in_flight(kProducers * kStageBytes, device.sm_count, device.bandwidth, kSmallSeconds);
        args.one = 1;
        TRT_NVFP4_RETURN_IF_ERROR(allow_shared_memory(kernel, device.shared_bytes - kSmallFixedBytes, kName));
        return launch_allowed(kernel, static_cast<unsigned>(tiles(linear)), kCluster, kBlockThreads,
                              static_cast<size_t>(small_bytes(args.shape, footprint(linear)) + kSentBytes), true,
                              stream, kName, args);
    }

 private:
    static int tiles(TrtNvfp4LinearArgs const& linear) {
        return static_cast<int>((linear.n + 127) / 128) * kTilesPerGroup;
    }
    static int chunks(TrtNvfp4LinearArgs const& linear) { return static_cast<int>((linear.k + kChunk - 1) / kChunk); }
    static SmallLinear shape(TrtNvfp4LinearArgs const& linear, Device const& device) {
        int const most = Products::blocks_on_sm(device.major == 9);
        return small_linear(chunks(linear), kCluster, most, footprint(linear), device);
    }
};

template <class Products, typename F>
auto with_cluster(TrtNvfp4LinearArgs const& linear, Device const& device, F&& f) {
    if constexpr (kSmallClusters) {
        int const cluster = choose_small_cluster(device.major, static_cast<int>(linear.m), static_cast<int>(linear.k));
        if (cluster == 2) return f(Kernel<Products, 2>{});
    }
    return f(Kernel<Products, 1>{});
}

template <typename T, typename F>
auto with_products(TrtNvfp4LinearArgs const& linear, Device const& device, F&& f) {
    if (linear.m == 1) return f(Kernel<TokenProducts<T>, 1>{});
    if (linear.m <= 8) return with_cluster<ColumnProducts<T, 1>>(linear, device, f);
    return with_cluster<ColumnProducts<T, 2>>(linear, device, f);
}

// Calls f with the device's kernel of the linear.
template <typename F>
auto with_kernel(TrtNvfp4LinearArgs const& linear, Device const& device, F&& f) {
    if (linear.dtype == TRT_NVFP4_FLOAT16) return with_products<__half>(linear, device, f);
    return with_products<__nv_bfloat16>(linear, device, f);
}

// The device's limits that the choices above need; false without a GPU, which is not an error here.
bool find_room(Device& device) {
    int ordinal = 0;
    auto const read = [&](int& value, cudaDeviceAttr attribute) {
        return cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess;
    };
    return cudaGetDevice(&ordinal) == cudaSuccess && read(device.sm_count, cudaDevAttrMultiProcessorCount) &&
           read(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
           read(device.major, cudaDevAttrComputeCapabilityMajor);
}

}  // namespace

bool takes_small(TrtNvfp4LinearArgs const& linear) {
    Device device{};
    if (linear.m > kMostSmallTokens || !find_room(device)) return false;
    return with_kernel(linear, device, [&](auto kernel) { return kernel.takes(linear, device); });
}

TrtNvfp4Status launch_small(TrtNvfp4LinearArgs const& linear, TrtNvfp4Stream stream) {
    Device device{};
    TRT_NVFP4_RETURN_IF_ERROR(read_device(stream, device));
    return with_kernel(linear, device, [&](auto kernel) { return kernel.launch(linear, device, stream); });
}

}  // namespace trt_nvfp4::w4a16
