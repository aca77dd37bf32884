// Tiles of gate and up that blocks share: where there are hardly more tiles than blocks, some would have two and the
// others one.
#pragma once

#include "sm90_w4a16_moe_tasks.cuh"

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

// A lane's sums of a column: to others' shares,
__device__ __forceinline__ float4* part_of(float4* parts, int share, int i) {
    return parts + (share * 2 + i) * (32 * kWarps) + threadIdx.x;
}
template <typename T>
__device__ __forceinline__ void store_part(MixtureArgs<T> const& args, int share, float const (&acc)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        __stcg(part_of(args.parts, share, i), make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
    }
}
// and from them, in their order. By a warp.
template <typename T>
__device__ __forceinline__ void add_parts(MixtureArgs<T> const& args, MixtureTask const& task, float (&acc)[2][4]) {
    for (int share = task.first_share + threadIdx.x % 32; share < task.share; share += 32) {
        while (load_count(args.ready + share) == 0) continue;
    }
    __syncwarp();
#pragma unroll 1
    for (int share = task.first_share; share < task.share; ++share) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4 const part = __ldcg(part_of(args.parts, share, i));
            acc[i][0] += part.x;
            acc[i][1] += part.y;
            acc[i][2] += part.z;
            acc[i][3] += part.w;
        }
    }
}

}  // namespace trt_nvfp4::sm90
