// Third phase: a block's warps go over their keys of the caches, with an online softmax.
#pragma once

#include "decoder/attention/finish.cuh"
#include "decoder/attention/new_rows.cuh"
#include "ptx/named_barrier.cuh"

namespace trt_nvfp4::decoder {

// Barrier of the warps of a stream of keys.
template <class Config>
__device__ __forceinline__ void sync_stream() {
    constexpr int kFirstBarrier = 2;
    ptx::sync_warps_at<32 * Config::kParts>(kFirstBarrier + threadIdx.x / 32 / Config::kParts);
}

// A tile's scores, of which each warp of a stream of keys has a part: the sum of the parts. `exchange` has room for two
// tiles of each warp, so that one barrier a tile is enough.
template <class Config>
__device__ __forceinline__ void add_parts(typename Config::Scores& scores, uint8_t* exchange, int odd) {
    static_assert(Config::kParts == 2, "a sum of two is the same in any order");
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto const part_of = [&](int of_warp) {
        return reinterpret_cast<float4*>(exchange + (2 * of_warp + odd) * Config::kScoreBytes) + lane;
    };
#pragma unroll
    for (int n = 0; n < Config::kKeys / 16; ++n) {
        part_of(warp)[n * 32] = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
    }
    sync_stream<Config>();
#pragma unroll
    for (int n = 0; n < Config::kKeys / 16; ++n) {
        float4 const other = part_of(warp ^ 1)[n * 32];
        scores[n][0] += other.x;
        scores[n][1] += other.y;
        scores[n][2] += other.z;
        scores[n][3] += other.w;
    }
}

template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void attend_item(DecoderArgs<T> const& args, AttentionItem const& item, uint8_t* shared,
                                            Softmaxes& softmaxes) {
    using Config = Attend<T, kFp8, kHeadDim>;
    constexpr int kKeys = Config::kKeys;
    constexpr int kCopied = 2;  // at once, so that few registers hold addresses
    attention::Args<T> const& call = args.attention;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const warps = args.attention_warps;
    int const stream = warp / Config::kParts;
    // Keys of all streams; and the first dimension of the warp's part of a head. Recomputed, to save registers.
    auto const stride = [&] { return args.attention_warps / Config::kParts * kKeys; };
    auto const first_dim = [] { return threadIdx.x / 32 % Config::kParts * Config::kDims; };
    uint8_t* const tiles = shared + Config::kQueryBytes + Config::given_bytes(call.tokens);
    uint32_t const tile = ptx::shared_address(tiles) + warp * Config::kWarpBytes;
    auto const load = [&](int key, bool values) {
        if (key < item.end && warp < warps) {
            // What follows from it is made anew for every tile, instead of being kept in registers.
            int of_tile = lane;
            asm volatile("" : "+r"(of_tile));
            int const row_bytes = call.head_dim * (kFp8 ? 1 : 2);
            int const skipped = first_dim() * (kFp8 ? 1 : 2);
            uint8_t const* const rows =
                item.keys + (values ? args.cache_bytes : 0) + int64_t{key} * row_bytes + skipped;
            attention::copy_tile<kFp8, Config::kDims, kKeys, 32, kCopied>(tile + (values ? Config::Sizes::kBytes : 0),
                                                                          rows, row_bytes, row_bytes - skipped,
                                                                          item.end - key, of_tile);
        }
        ptx::cp_async_commit();
    };
    int key0 = item.begin + stream * kKeys;
    // Keys that were cached before the call need not wait for those that the block appends.
    bool const early = key0 + kKeys <= item.past;
    // In the program once, for its size.
#pragma unroll 1
    for (int time = 0; time < 2; ++time) {
        if (early == (time == 0)) {
            load(key0, false);
            load(key0, true);
        }
        if (time == 1) break;
        prefetch_tables(args, item);
        prepare_item<T, kFp8, kHeadDim>(args, item, shared);
    }

    attention::ScoreScale const scale(args.attention_of(item.layer), item.kv_head, kFp8);
    // A lane's scores: rows row_of(0) and row_of(1), keys from first_key on.
    auto const row_of = [&](int i) { return lane % 4 * 2 + i; };
    int const first_key = lane / 4;
    attention::FewRowsSoftmax softmax;
    float sums[Config::kDims / 16][4] = {};
    [[maybe_unused]] int odd = 0;  // of tiles
#pragma unroll 1
    for (; key0 < item.end && warp < warps; key0 += stride()) {
        ptx::cp_async_wait<1>();
        __syncwarp();
        typename Config::Scores scores = {};
        attention::multiply_keys<T, kFp8, Config::kDims, kKeys>(scores, tile, [&](int step, uint32_t (&b)[2]) {
            attention::load_few_queries(b, ptx::shared_address(shared) + 2 * first_dim(),
                                        attention::kQueryPitch<kHeadDim>, step);
        });
        __syncwarp();
        load(key0 + stride(), false);
        if constexpr (Config::kParts > 1) add_parts<Config>(scores, tiles + warps * Config::kWarpBytes, odd ^= 1);
        bool const every = call.window == 0 && key0 + kKeys <= item.seen_by_all;
        // Each row sees the keys between these.
        int before[2] = {}, last[2] = {};
        if (!every) {
            for (int i = 0; i < 2; ++i) {
                int const position = item.past + item.token_of(args, row_of(i));
                before[i] = (call.window == 0 ? -1 : position - call.window) - key0 - first_key;
                last[i] = min(position, item.end - 1) - key0 - first_key;
            }
        }
        softmax.update(scores, sums, scale, every,
                       [&](int offset, int i) { return offset > before[i] && offset <= last[i]; });
        ptx::cp_async_wait<1>();
        __syncwarp();
        attention::multiply_values<T, kFp8, Config::kDims, kKeys>(sums, scores, tile + Config::Sizes::kBytes);
        __syncwarp();
        load(key0 + stride(), true);
    }
    if constexpr (Config::kParts > 1) {
        // Streams that have fewer tiles meet as often as the first one: of warps that met at other barriers more often
        // than others, compute-sanitizer's racecheck misses a barrier of all.
#pragma unroll 1
        for (key0 -= stream * kKeys; key0 < item.end; key0 += stride()) sync_stream<Config>();
    }
    ptx::cp_async_wait<0>();
    __syncwarp();

    if (warp < warps) {
        float* const own = reinterpret_cast<float*>(tiles + warp * Config::kWarpBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float const weight = attention::column_sum(softmax.weight[i]);
            if (lane < 4) softmaxes[stream][row_of(i)] = make_float2(softmax.top(i, scale), weight);
            if (row_of(i) >= item.rows) continue;
#pragma unroll
            for (int part = 0; part < Config::kDims / 16; ++part) {
                for (int second = 0; second < 2; ++second) {
                    own[row_of(i) * Config::kSumPitch + attention::few_rows_dimension<kFp8>(part, second)] =
                        sums[part][2 * second + i];
                }
            }
        }
    }
    w4a16::sync_warps();
    finish_item<T, kFp8, kHeadDim>(args, item, tiles, softmaxes);
}

}  // namespace trt_nvfp4::decoder
