// Launches that make the plan, and beside it what needs none.
#pragma once

#include <algorithm>
#include <type_traits>

#include "api/launch.h"
#include "moe/moe_routing.cuh"

namespace trt_nvfp4 {

// One block sorts the pairs; kSlots > 0: and routes all tokens.
template <int kSlots, class Helper>
TrtNvfp4Status launch_sort(RouteArgs const& args, Helper const& helper, int64_t helper_threads, cudaStream_t stream) {
    // A thread for each expert, and a warp for each token or a thread for each pair; and a warp that erases.
    constexpr int kFewestThreads = 128;
    int const workers = std::max(kFewestThreads, kSlots > 0 ? 32 * args.tokens : args.tokens * args.top_k);
    int const threads = std::min(kPlanBlock<kSlots>, (std::max(args.experts, workers) + 31) / 32 * 32 + 32);
    constexpr int64_t kMostHelperThreads = 128 * 1024;
    int64_t const helpers = (std::min(helper_threads, kMostHelperThreads) + threads - 1) / threads;
    return launch_kernel(moe_plan<kSlots, Helper>, static_cast<unsigned>(1 + helpers), threads, 0, true, stream,
                         "moe_plan", args, helper);
}

template <int kSlots, class Helper>
TrtNvfp4Status launch_slots(RouteArgs const& args, Helper const& helper, int64_t helper_threads, cudaStream_t stream) {
    if constexpr (kSlots <= kPlanSlots) {
        if (args.tokens <= kPlanBlock<kSlots> / 32) {
            return launch_sort<kSlots>(args, helper, helper_threads, stream);
        }
    }
    int const blocks = (args.tokens + kRouteThreads / 32 - 1) / (kRouteThreads / 32);
    TRT_NVFP4_RETURN_IF_ERROR(
        launch_kernel(moe_route<kSlots>, blocks, kRouteThreads, 0, true, stream, "moe_route", args));
    return launch_sort<0>(args, helper, helper_threads, stream);
}

// Helper, for about `helper_threads` threads, as moe_plan asks for it.
template <class Helper>
TrtNvfp4Status launch_plan_beside(RouteArgs const& args, Helper const& helper, int64_t helper_threads,
                                  cudaStream_t stream) {
    auto const launch = [&](auto slots) {
        return launch_slots<decltype(slots)::value>(args, helper, helper_threads, stream);
    };
    if (args.experts <= 4 * 32) return launch(std::integral_constant<int, 4>{});
    if (args.experts <= 8 * 32) return launch(std::integral_constant<int, 8>{});
    if (args.experts <= 16 * 32) return launch(std::integral_constant<int, 16>{});
    return launch(std::integral_constant<int, 32>{});
}

}  // namespace trt_nvfp4
