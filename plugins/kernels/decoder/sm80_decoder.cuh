// Layers of a decoder of up to 16 tokens in one launch: RMSNorm, queries, keys and values, attention over the caches,
// output projection, residual, RMSNorm, gated MLP or a mixture of them, residual. One block per SM, all co-resident.
//
// Warps of every block keep weights in flight through all phases (sm80_w4a16_phases.cuh), so that while blocks wait
// for each other, and while they read caches, the next projections' weights come in.
#pragma once

#include "common/programmatic_launch.cuh"
#include "decoder/decoder_attention.cuh"
#include "decoder/decoder_projection.cuh"

namespace trt_nvfp4::decoder {

// The caller's x as words of layer 0.
template <typename T>
__device__ __forceinline__ void hand_over_input(DecoderArgs<T> const& args) {
    int const eights = args.m * args.program.projections[kQkv].k / 8;
    uint32_t const tag = w4a16::tag_of(0) << 16;
    for (int i = blockIdx.x * w4a16::kThreads + threadIdx.x; i < eights; i += gridDim.x * w4a16::kThreads) {
        uint4 const x = w4a16::load_eight(args.x + i * 8);
        uint32_t* const words = args.input + i * 8;
        auto const word = [&](uint32_t pair, uint32_t half) { return (half == 0 ? pair & 0xffffu : pair >> 16) | tag; };
        w4a16::store_eight(words, make_uint4(word(x.x, 0), word(x.x, 1), word(x.y, 0), word(x.y, 1)));
        w4a16::store_eight(words + 4, make_uint4(word(x.z, 0), word(x.z, 1), word(x.w, 0), word(x.w, 1)));
    }
}

// `Tile` multiplies for queries, keys, values and the output, `MlpTile` for what follows.
template <class Tile, class MlpTile, bool kFp8, int kHeadDim>
__global__ __launch_bounds__(w4a16::kBlockThreads,
                             1) void sm80_decoder(__grid_constant__ DecoderArgs<typename Tile::Element> const args) {
    using T = typename Tile::Element;
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t decoder_bytes[];
    __shared__ uint64_t ring_barriers[w4a16::Rings<kWarps>::kBarriers];
    __shared__ __align__(16) ProjectionShared<Tile, MlpTile> shared;
    __shared__ AttentionShared attention;
    __shared__ uint64_t chosen_barrier;  // of a layer's experts, by the block
    int const warp = threadIdx.x / 32;
    w4a16::Rings<kWarps> const rings(decoder_bytes, ring_barriers, args.shared.stages);
    if (threadIdx.x % 32 == 0 && warp < kWarps) rings.init(warp);
    uint32_t const chosen = ptx::shared_address(&chosen_barrier);
    if (MlpTile::kExperts && threadIdx.x == 0) ptx::mbarrier_init(chosen, choosers(args));
    auto const weights = [&] {
        if constexpr (MlpTile::kExperts) {
            return ExpertWeights<T>{args, shared.choices, chosen};
        } else {
            return w4a16::LayerWeights{};
        }
    };
    __syncthreads();
    if (warp >= kWarps) {
        w4a16::produce_phases(args, warp - kWarps, rings, weights());
        return;
    }
    hand_over_input(args);
    if (warp == 0) share_slots<Attend<T, kFp8, kHeadDim>::kKeys>(args, attention);
    if (threadIdx.x % 32 == 0) shared.positions[warp] = {};
    if (threadIdx.x < kMostTokens) shared.rms[threadIdx.x] = 0.0f;  // read, not used, where no norm is in front
    __syncwarp();
    // Places of tokens that the call does not have are multiplied, too.
    for (int i = threadIdx.x; i < args.shared.staged_tile_chunks * Tile::chunk_bytes(args.m) / 16;
         i += w4a16::kThreads) {
        reinterpret_cast<uint4*>(decoder_bytes + kWarps * args.shared.stages * w4a16::kStageBytes)[i] =
            make_uint4(0u, 0u, 0u, 0u);
    }
    w4a16::sync_warps();
#pragma unroll 1
    for (int phase = args.program.first_phase; phase < args.program.last_phase; ++phase) {
        // Activations, or what attention stages.
        uint8_t* const staged_tile = decoder_bytes + kWarps * args.shared.stages * w4a16::kStageBytes;
        w4a16::Step const step = weights().template step<kProjections>(phase);
        if (step.which == kOutput) attend<T, kFp8, kHeadDim>(args, step.layer, staged_tile, attention);
        // Made anew, so that attention has the registers.
        w4a16::Rings<kWarps> const own(decoder_bytes, ring_barriers, args.shared.stages);
        if (std::is_same_v<Tile, MlpTile> || step.which < kUp) {
            project<Tile>(args, phase, step, own, staged_tile, shared.sums, shared, chosen);
        } else {
            project<MlpTile>(args, phase, step, own, staged_tile, shared.mlp_sums, shared, chosen);
        }
    }
}

}  // namespace trt_nvfp4::decoder
