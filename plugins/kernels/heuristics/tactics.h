// Which kernels serve a call, and where one kind takes over from another: the single place where tactic AUTO is
// resolved and an explicit one is judged. The arithmetic is the op's: quantize_activations decides between W4A16 and
// W4A4.
//
// Crossovers, in tokens; docs/figures/roofline.md says more:
//     W4A16   Linears of up to 16 tokens whose blocks find room at once: a kernel without loops over tasks (w4a16.h;
//             measured on an H100). SM90: kernels of its own for other linears from 3 to 9 tokens on, for MLPs from 1
//             to 20, for mixtures with tiles enough (sm90_w4a16.h, sm90_moe.h; measured on an H200); below and
//             elsewhere every GPU's kernels that stream weights, by mma.sync. Linears and MLPs above 64 tokens in
//             blocks of 64 (32 by mma.sync), mixtures in blocks of 256 (512).
//     W4A4    block-scaled tensor cores from 1 token on (roofline: weights bind them like a decode kernel up to
//             hundreds of tokens); clusters of two CTAs from 129, where both have rows (roofline).
//     FP8     SM90, SM89, SM120: tensor cores from 1 token on; tiles in fp8.h (measured on an H200 only).
//     MoE     W4A16 at every count; blocks and splits in moe.h, SM90's in sm90_moe.h. W4A4 at every count (roofline: an
//             expert's weights bind it up to hundreds of its tokens). FP8 at every count; tiles in fp8.h.
#pragma once

#include <algorithm>

#include "api/dense/w4a16.h"
#include "api/dense/w4a16_small.h"
#include "api/moe/w4a16_moe.h"
#include "heuristics/fp8.h"
#include "heuristics/w4a16.h"
#include "heuristics/w4a4.h"

namespace trt_nvfp4 {

inline void add(TrtNvfp4Tactics& tactics, TrtNvfp4Tactic tactic, bool sensible) {
    TrtNvfp4Tactic* const place = tactics.list + (sensible ? tactics.sensible : tactics.count);
    std::copy_backward(place, tactics.list + tactics.count, tactics.list + tactics.count + 1);
    *place = tactic;
    tactics.sensible += sensible;
    ++tactics.count;
}

// The generic kernels serve every call, and are sensible where nothing else does.
inline TrtNvfp4Tactics with_generic(TrtNvfp4Tactics tactics) {
    add(tactics, TRT_NVFP4_TACTIC_GENERIC, tactics.sensible == 0);
    return tactics;
}

inline bool is_w4a16(TrtNvfp4Tactic tactic) {
    return tactic == TRT_NVFP4_TACTIC_W4A16 || tactic == TRT_NVFP4_TACTIC_W4A16_MMA_SYNC ||
           tactic == TRT_NVFP4_TACTIC_W4A16_SM90;
}

// Whether mma.sync's kernels may be ahead of SM90's where AUTO takes those: near the crossovers, other shapes than
// those that were measured may differ. More tokens read linears and MLPs again, up to four times as long.
template <typename Args>
bool may_be_ahead(Args const& args) {
    return args.m <= w4a16::kMaxMmaTokens;
}
inline bool may_be_ahead(TrtNvfp4MoeArgs const&) { return true; }

// True if W4A16 may serve the call.
template <typename Args>
void add_w4a16(TrtNvfp4Tactics& tactics, Args const& args) {
    if (!w4a16::is_arithmetic_of(args) || !w4a16::serves(args)) return;
    add(tactics, TRT_NVFP4_TACTIC_W4A16, true);
    bool const sm90 = w4a16::takes_sm90(args), small = w4a16::takes_small(args);
    if (sm90 || small) add(tactics, TRT_NVFP4_TACTIC_W4A16_MMA_SYNC, small || may_be_ahead(args));
    if (w4a16::serves_sm90(args)) add(tactics, TRT_NVFP4_TACTIC_W4A16_SM90, !sm90);
}

// Of NVFP4Linear and the MLPs.
template <typename Args>
TrtNvfp4Tactics tactics_of(Args const& args) {
    TrtNvfp4Tactics tactics{};
    add_w4a16(tactics, args);
    if (tactics.count == 0 && w4a4_fits(args)) {
        W4A4Kernels const single = w4a4_kernels(TRT_NVFP4_TACTIC_W4A4);
        if (w4a4_kernels(TRT_NVFP4_TACTIC_W4A4_PAIR).dense != nullptr) {
            // Two CTAs share the weights' tile and halve its traffic from L2, once there are rows for both.
            add(tactics, TRT_NVFP4_TACTIC_W4A4_PAIR, args.m > kW4a4Tile);
        }
        if (single.dense != nullptr) {
            add(tactics, TRT_NVFP4_TACTIC_W4A4, true);
            add(tactics, TRT_NVFP4_TACTIC_W4A4_UNSPLIT, w4a4_splits(args, single.sm_count) > 1);
        }
    }
    return with_generic(tactics);
}

// Of FP8GatedMLP and FP8MoE.
template <typename Args>
TrtNvfp4Tactics fp8_tactics_of(Args const& args) {
    TrtNvfp4Tactics tactics{};
    if (fp8::serves(args)) add(tactics, TRT_NVFP4_TACTIC_FP8, true);
    return with_generic(tactics);
}

inline TrtNvfp4Tactics tactics_of(TrtNvfp4Fp8MlpArgs const& args) { return fp8_tactics_of(args); }
inline TrtNvfp4Tactics tactics_of(TrtNvfp4Fp8MoeArgs const& args) { return fp8_tactics_of(args); }

inline TrtNvfp4Tactics tactics_of(TrtNvfp4MoeArgs const& args) {
    TrtNvfp4Tactics tactics{};
    add_w4a16(tactics, args);
    bool const experts = w4a4_fits(args) && w4a4_kernels(TRT_NVFP4_TACTIC_W4A4).experts != nullptr;
    if (experts) add(tactics, TRT_NVFP4_TACTIC_W4A4, true);
    return with_generic(tactics);
}

template <typename Args>
TrtNvfp4Tactic wanted_tactic(Args const& args) {
    return args.tactic;
}
inline TrtNvfp4Tactic wanted_tactic(TrtNvfp4Fp8MoeArgs const& args) { return args.moe.tactic; }

// The tactic to run; AUTO where the one that args name cannot serve the call.
template <typename Args>
TrtNvfp4Tactic resolve_tactic(Args const& args) {
    TrtNvfp4Tactics const tactics = tactics_of(args);
    TrtNvfp4Tactic const wanted = wanted_tactic(args);
    if (wanted == TRT_NVFP4_TACTIC_AUTO) return tactics.list[0];
    auto const* const end = tactics.list + tactics.count;
    return std::find(tactics.list, end, wanted) == end ? TRT_NVFP4_TACTIC_AUTO : wanted;
}

}  // namespace trt_nvfp4
