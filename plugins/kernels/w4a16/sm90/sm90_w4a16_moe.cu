#include "api/dense/sm90_w4a16.h"
#include "api/moe/moe_plan.h"
#include "heuristics/moe.h"
#include "heuristics/sm90_moe.h"
#include "moe/moe_plan_launch.cuh"
#include "moe/moe_sum.cuh"
#include "w4a16/sm90/common/launch.cuh"
#include "w4a16/sm90/common/weight_maps.h"
#include "w4a16/sm90/moe/staging_launches.cuh"
#include "w4a16/sm90/sm90_w4a16_moe.cuh"

namespace trt_nvfp4::sm90 {
namespace {

int64_t up_rows(TrtNvfp4MoeArgs const& args, int64_t intermediate) {
    return args.gated ? 2 * intermediate : intermediate;
}

uint8_t* take_items(Workspace& workspace, int64_t rows, int64_t items, int64_t k) {
    return workspace.take<uint8_t>(ItemImage::bytes(rows, items, static_cast<int>(k)));
}

uint8_t* take_rows(Workspace& workspace, int64_t rows, int64_t k) {
    return workspace.take<uint8_t>(rows * RowImage<__half>::row_bytes(static_cast<int>(k)));
}

double expected_experts(TrtNvfp4MoeArgs const& args, int64_t tokens) {
    return w4a16::expected_experts(static_cast<int>(args.experts), args.top_k, static_cast<int>(tokens));
}

// The most pairs of a work item.
int item_tokens(TrtNvfp4MoeArgs const& args, int64_t tokens) {
    return choose_item_tokens(static_cast<double>(tokens * args.top_k) / expected_experts(args, tokens));
}

// Units of a share where there are as many shares as SMs.
int part_units(int64_t tokens, int sms) {
    if (tokens > kEvenTokens) return 0;
    return sms * (tokens == 1 ? PartSums<true>::kUnits : PartSums<false>::kUnits);
}

// Workspace of a launch of `tokens` tokens, for the query and the launch.
struct Layout {
    MoePlan plan;
    uint32_t* ticket;
    uint32_t* done[2];
    int counters;
    uint8_t* images[2][2];  // [phase][segment]
    float* outputs[2];
    uint4* parts;
    uint32_t* greatest = nullptr;  // as `factors`, only for wide work items in BF16
    float* factors[2]{};
    int64_t items[2];  // the most
    size_t size;

    Layout(TrtNvfp4MoeArgs const& args, int64_t tokens, int splits, void* base) {
        Workspace workspace(base);
        int64_t const widths[2] = {args.intermediate, args.shared_intermediate};
        int64_t const rows[2] = {tokens * args.top_k, args.shared ? tokens : 0};
        int64_t const of_item = item_tokens(args, tokens);
        items[kRouted] = most_items(rows[kRouted], args.experts, of_item);
        items[kShared] = (rows[kShared] + of_item - 1) / of_item;
        plan = take_plan(workspace, tokens, args.top_k, args.experts);
        int64_t const counters_of[2] = {items[kRouted] * chunk_counters(static_cast<int>(args.intermediate)),
                                        items[kShared] * chunk_counters(static_cast<int>(args.shared_intermediate))};
        counters = static_cast<int>(counters_of[kRouted] + counters_of[kShared]);
        ticket = workspace.take<uint32_t>(1);
        done[kRouted] = workspace.take<uint32_t>(counters);
        done[kShared] = done[kRouted] + counters_of[kRouted];
        parts = workspace.take<uint4>(part_units(tokens, kMostSms));
        bool const wide = of_item > kItemTokens;
        if (wide) {
            bool const has_factors = args.dtype == TRT_NVFP4_BFLOAT16;
            if (has_factors) greatest = workspace.take<uint32_t>(tokens);
            for (int segment : {kRouted, kShared}) {
                int64_t const columns = columns_of_items(rows[segment], items[segment]);
                if (has_factors) factors[segment] = workspace.take<float>(8 * columns);
                images[kUp][segment] = take_items(workspace, rows[segment], items[segment], args.hidden);
            }
        } else {
            // Experts' and the shared one's x are the same rows, but where experts' take weights.
            images[kUp][kRouted] = take_rows(workspace, args.scale_input ? rows[kRouted] : tokens, args.hidden);
            images[kUp][kShared] =
                args.scale_input ? take_rows(workspace, rows[kShared], args.hidden) : images[kUp][kRouted];
        }
        for (int segment : {kRouted, kShared}) {
            images[kDown][segment] = wide ? take_items(workspace, rows[segment], items[segment], widths[segment])
                                          : take_rows(workspace, rows[segment], widths[segment]);
            outputs[segment] = workspace.take<float>(splits * rows[segment] * args.hidden);
        }
        size = workspace.size();
    }
};

// Tiles of `rows` of all work items, about.
double tiles_of_items(TrtNvfp4MoeArgs const& args, int64_t tokens, int64_t rows) {
    int64_t const of_item = item_tokens(args, tokens);
    int64_t const shared = args.shared ? (tokens + of_item - 1) / of_item : 0;
    double const routed = std::max(expected_experts(args, tokens), static_cast<double>(tokens * args.top_k) / of_item);
    return (routed + static_cast<double>(shared)) * tiles_of(static_cast<int>(rows));
}

bool has_even_shares(TrtNvfp4MoeArgs const& args, int64_t tokens, int sms) {
    return shares_evenly(tokens, tiles_of_items(args, tokens, up_rows(args, args.intermediate)), sms);
}

int chunks_of_down(TrtNvfp4MoeArgs const& args) {
    return chunks_of(
        static_cast<int>(args.shared ? std::min(args.intermediate, args.shared_intermediate) : args.intermediate));
}

int splits_of_down(TrtNvfp4MoeArgs const& args, int64_t tokens, int sms) {
    auto const choose = has_even_shares(args, tokens, sms) ? choose_even_splits : choose_mixture_splits;
    return choose(tiles_of_items(args, tokens, args.hidden), chunks_of_down(args), sms);
}

// On any GPU.
int most_splits_of_down(TrtNvfp4MoeArgs const& args, int64_t tokens) {
    if (tokens <= kEvenTokens) return most_mixture_splits(chunks_of_down(args));
    return choose_mixture_splits(tiles_of_items(args, tokens, args.hidden), chunks_of_down(args), kMostSms);
}

// Tickets are the greatest numbers that Divisors divide.
bool tickets_are_divisible(TrtNvfp4MoeArgs const& args) {
    int64_t const width = std::max(args.intermediate, args.shared ? args.shared_intermediate : 0);
    int64_t const of_item = std::max<int64_t>(tiles_of(static_cast<int>(up_rows(args, width))),
                                              tiles_of(static_cast<int>(args.hidden)) * kMixtureMaxSplits);
    return divides_tickets(most_items(kMixtureTokens * args.top_k, args.experts, kItemTokens), of_item);
}

template <typename T>
TrtNvfp4Status run(TrtNvfp4MoeArgs const& moe, void* workspace, cudaStream_t stream) {
    int sms = 0;
    TRT_NVFP4_RETURN_IF_ERROR(read_used_sms(stream, sms));
    int const splits = splits_of_down(moe, moe.m, sms);
    MixtureArgs<T> args{};
    args.m = static_cast<int>(moe.m);
    args.top_k = moe.top_k;
    TrtNvfp4Weight const* const weights[2][2] = {{&moe.up, &moe.shared_up}, {&moe.down, &moe.shared_down}};
    Layout const layout(moe, moe.m, splits, workspace);
    for (int segment : {kRouted, kShared}) {
        if (segment == kShared && !moe.shared) continue;
        int64_t const width = segment == kRouted ? moe.intermediate : moe.shared_intermediate;
        int64_t const layers = segment == kRouted ? moe.experts : 1;
        Projection<T>& up = args.matrices[kUp][segment];
        Projection<T>& down = args.matrices[kDown][segment];
        TRT_NVFP4_RETURN_IF_ERROR(
            make_projection(up, *weights[kUp][segment], layers, up_rows(moe, width), moe.hidden, kReadAhead));
        TRT_NVFP4_RETURN_IF_ERROR(
            make_projection(down, *weights[kDown][segment], layers, moe.hidden, width, kReadAhead));
        up.x = layout.images[kUp][segment];
        up.activation = moe.activation;
        up.gated = moe.gated != 0;
        up.alpha = moe.alpha;
        up.limit = moe.limit;
        up.padded_width = chunks_of(down.k) * kChunk;
        down.x = layout.images[kDown][segment];
        down.split = {1, splits};
        for (int phase : {kUp, kDown}) {
            Projection<T> const& matrix = args.matrices[phase][segment];
            args.tasks_of_item[phase][segment] = Divisor(tiles_of(matrix.rows) * matrix.split.splits);
        }
        args.outputs[segment] = layout.outputs[segment];
        args.done[segment] = layout.done[segment];
        args.factors[segment] = layout.factors[segment];
    }
    args.shared_items = static_cast<int>(layout.items[kShared]);
    args.plan = layout.plan;
    args.scale_input = moe.scale_input != 0;
    args.item_tokens = item_tokens(moe, moe.m);
    args.x = static_cast<T const*>(moe.x);
    args.ticket = layout.ticket;
    args.parts = layout.parts;
    args.greatest = layout.greatest;
    args.counters = layout.counters;
    args.one = 1;
    args.hidden_is_flags = has_even_shares(moe, moe.m, sms);
    args.part_units = args.hidden_is_flags ? part_units(moe.m, sms) : 0;
    args.splits[kUp] = Divisor(1);
    args.splits[kDown] = Divisor(splits);
    args.chunks = Divisor(chunks_of(static_cast<int>(moe.hidden)));
    args.blocks = Divisor(sms);

    RouteArgs route = route_args(moe, layout.plan, 0, moe.m, args.item_tokens);
    route.sentinel_items = static_cast<int>(layout.items[kRouted]);
    route.ticket = layout.ticket;
    ImageGroups const groups(args.m, args.top_k, args.scale_input, moe.shared != 0);
    int const eights = args.item_tokens > kItemTokens ? static_cast<int>(moe.m * moe.top_k / 8 + layout.items[kRouted])
                                                      : groups.pairs + groups.tokens;
    constexpr int kUnitsOfThread = 8;  // that it erases
    int const image_threads =
        std::max(eights * image_parts(static_cast<int>(moe.hidden)) * 32, args.part_units / kUnitsOfThread);
    if (moe.m <= kImagesBesidePlan && !args.scale_input) {
        GateAndMakeImages<T> const helper{args};
        TRT_NVFP4_RETURN_IF_ERROR(launch_plan_beside(route, helper, image_threads, stream));
    } else {
        auto const make_plan = [&] {
            if constexpr (kXBecomesHalf<T>) {
                GateAndFindGreatest<T> const helper{args};
                if (args.greatest != nullptr) return launch_plan_beside(route, helper, 32 * moe.m, stream);
            }
            return launch_plan<T>(route, stream);
        };
        TRT_NVFP4_RETURN_IF_ERROR(make_plan());
        TRT_NVFP4_RETURN_IF_ERROR(launch_kernel(
            sm90_w4a16_moe_images<T>, static_cast<unsigned>((image_threads + kImageThreads - 1) / kImageThreads),
            kImageThreads, 0, true, stream, "sm90_w4a16_moe_images", args));
    }
    std::true_type const yes;
    std::false_type const no;
    auto const launch_main = [&](auto evenly, auto one_token, auto of_item) {
        constexpr bool kEven = decltype(evenly)::value, kOne = decltype(one_token)::value;
        constexpr int kTokensOfItem = decltype(of_item)::value;
        return launch_kernel(sm90_w4a16_moe<T, kEven, kOne, kTokensOfItem>, sms, kTaskThreads,
                             sizeof(MixtureShared<T, kEven, kOne, kTokensOfItem>), true, stream, "sm90_w4a16_moe",
                             args);
    };
    auto const launch_for = [&](auto one_token) {
        std::integral_constant<int, kItemTokens> const of_item;
        return args.hidden_is_flags ? launch_main(yes, one_token, of_item) : launch_main(no, one_token, of_item);
    };
    std::integral_constant<int, kWideItemTokens> const wide;
    std::integral_constant<int, kWidestItemTokens> const widest;
    TRT_NVFP4_RETURN_IF_ERROR(args.item_tokens == kWidestItemTokens ? launch_main(no, no, widest)
                              : args.item_tokens == kWideItemTokens ? launch_main(no, no, wide)
                              : args.m == 1                         ? launch_for(yes)
                                                                    : launch_for(no));
    return launch_moe_sum(layout.outputs[kRouted], moe.shared ? layout.outputs[kShared] : nullptr, splits, moe.m,
                          moe.hidden, moe.top_k, args.scale_input, layout.plan, static_cast<T*>(moe.y),
                          SumStart::kEarlyWithPlan, stream);
}

}  // namespace

bool serves(TrtNvfp4MoeArgs const& args) {
    return args.m <= kMixtureTokens && tickets_are_divisible(args) && gpu_is_sm90();
}

bool takes(TrtNvfp4MoeArgs const& args) {
    int sms = 0;
    return serves(args) && read_sms(sms) == TRT_NVFP4_SUCCESS &&
           takes_mixture(tiles_of_items(args, args.m, up_rows(args, args.intermediate)), sms);
}

size_t workspace_bytes(TrtNvfp4MoeArgs const& args) {
    size_t most = 0;
    for (int64_t tokens = 1; tokens <= std::min(args.m, kMixtureTokens); ++tokens) {
        most = std::max(most, Layout(args, tokens, most_splits_of_down(args, tokens), nullptr).size);
    }
    return most;
}

TrtNvfp4Status launch(TrtNvfp4MoeArgs const& args, void* workspace, TrtNvfp4Stream stream) {
    return args.dtype == TRT_NVFP4_FLOAT16 ? run<__half>(args, workspace, stream)
                                           : run<__nv_bfloat16>(args, workspace, stream);
}

}  // namespace trt_nvfp4::sm90
