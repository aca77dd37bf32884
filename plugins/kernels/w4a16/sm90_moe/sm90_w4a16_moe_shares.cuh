// Tiles of gate and up that blocks share: where there are hardly more tiles than blocks, some would have two and the
// others one.
#pragma once

#include "w4a16/sm90_moe/sm90_w4a16_moe_tasks.cuh"

namespace trt_nvfp4::sm90 {

// Chunks of all tiles of gate and up, one after another, in even shares, a ticket each. A share begins with its last
// tile, whose end is a later one's: who adds up has the tile's end, and the other parts have been there for long.
struct EvenShares {
    int tiles, chunks, count;  // chunks of a tile; shares
    int least, longer;         // chunks of a share, of which the first so many have one more

    template <typename T>
    __device__ __forceinline__ EvenShares(MixtureArgs<T> const& args, int routed_jobs) {
        tiles = args.shared_jobs * tiles_of(args.matrices[kUp][kShared].rows) +
                routed_jobs * tiles_of(args.matrices[kUp][kRouted].rows);
        chunks = chunks_of(args.matrices[kUp][kRouted].k);
        int const blocks = static_cast<int>(gridDim.x);
        count = min(blocks, tiles * chunks);
        least = max(args.blocks.of(tiles * chunks), 1);
        longer = max(tiles * chunks - least * blocks, 0);
    }

    __device__ __forceinline__ int begin(int share) const { return least * share + min(share, longer); }
    // By divisions: a share asks for one chunk at most.
    __device__ __forceinline__ int share_of(int chunk) const {
        return chunk < begin(longer) ? chunk / (least + 1) : (chunk - longer) / least;
    }

    // Calls f(task) for a share's tasks.
    template <typename T, typename F>
    __device__ __forceinline__ void each(MixtureArgs<T> const& args, int routed_jobs, int share, F&& f) const {
        int const first = begin(share);
#pragma unroll 1
        for (int end = begin(share + 1); end > first;) {
            int const tile = args.chunks.of(end - 1), start = tile * chunks;
            MixtureTask task(args, routed_jobs, kUp, tile);
            task.begin = max(first - start, 0);
            task.end = end - start;
            task.share = share;
            task.first_share = task.begin > 0 ? share_of(start) : share;
            f(task);
            end = start + task.begin;
        }
    }
};

// A lane's sums of a column on their way to the share that has the tile's end: absent until they are written, as hidden
// values are, because a fence and a count take longer. Of one token the first of a row's four lanes has them.
template <bool kOne>
struct PartSums {
    static constexpr int kLanes = 32 * kWarps / (kOne ? 4 : 1), kFours = kOne ? 1 : 2;
    static constexpr int kUnits = kLanes * kFours;  // of a share

    static __device__ __forceinline__ bool has_lane() { return !kOne || threadIdx.x % 4 == 0; }
    static __device__ __forceinline__ uint4* place(uint4* parts, int share, int four) {
        return parts + share * kUnits + four * kLanes + threadIdx.x / (kOne ? 4 : 1);
    }
    static __device__ __forceinline__ float& sum(float (&acc)[2][4], int four, int i) {
        return kOne ? acc[i / 2][i % 2 * 2] : acc[four][i];
    }

    static __device__ __forceinline__ void store(uint4* parts, int share, float (&acc)[2][4]) {
        if (!has_lane()) return;
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            auto const bits = [&](int i) { return __float_as_uint(sum(acc, four, i)); };
            w4a16::store_eight(place(parts, share, four), make_uint4(bits(0), bits(1), bits(2), bits(3)));
        }
    }

    // Of shares from `first` to `end`, in their order.
    static __device__ __forceinline__ void add(uint4* parts, int first, int end, float (&acc)[2][4]) {
        constexpr int kShares = 4 / kFours, kBatch = 4;  // as many trips to L2 at once
        if (!has_lane()) return;
#pragma unroll 1
        for (; first < end; first += kShares) {
            uint4 batch[kBatch];
            auto const load = [&](int i, bool wanted) {
                if (wanted) batch[i] = w4a16::load_eight(place(parts, first + i / kFours, i % kFours));
            };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                batch[i] = make_uint4(0u, 0u, 0u, 0u);
                load(i, first + i / kFours < end);
            }
            w4a16::await_all<kBatch>([&](int i) { return w4a16::has_absent(batch[i]); }, load);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                sum(acc, i % kFours, 0) += __uint_as_float(batch[i].x);
                sum(acc, i % kFours, 1) += __uint_as_float(batch[i].y);
                sum(acc, i % kFours, 2) += __uint_as_float(batch[i].z);
                sum(acc, i % kFours, 3) += __uint_as_float(batch[i].w);
            }
        }
    }
};

}  // namespace trt_nvfp4::sm90
