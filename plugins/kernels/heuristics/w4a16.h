// Launch choices of the W4A16 decode kernel: how rows and K are spread over the SMs, and how shared memory is divided.
// What is known of the GPU is read from the device; the costs are fitted to an H200 (benchmarks/notes).
#pragma once

#include <algorithm>
#include <cstdint>

namespace trt_nvfp4::w4a16 {

constexpr int kMaxTokens = 64;     // of a launch
constexpr int kMaxMmaTokens = 32;  // of one by mma.sync: 64 took 1.9 times as long as 32
constexpr int kWarps = 8;
constexpr int kMaxStages = 5;
constexpr int kMaxSplits = 16;
// Tiles times splits of a split projection: bounds the workspace without knowing the GPU.
constexpr int kMaxSplitTiles = 2048;

struct Device {
    int sm_count;
    int shared_bytes;  // that a block may have
    float bandwidth;   // of memory, these SMs' share, bytes a second; 0: not known
    bool cooperative;  // can launch a grid that is co-resident as a whole
    int major;         // of its compute capability
};

// Bytes of shared memory: of a stage of the ring, of a chunk of activations, and of what has a fixed size.
struct Footprint {
    int stage, chunk, fixed;
};

struct Shape {
    int tiles, chunks;
};

struct Split {
    int groups = 1;  // of at most kWarps tiles, each of which is a block's at a time; some have a tile less
    int splits = 1;  // blocks that share a group's K
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Chunks of activations that fit beside two stages in at most a third of shared memory; 0 if not even one does with
// one.
inline int staged_tile_capacity(Footprint const& bytes, Device const& device) {
    int const beside_two = (device.shared_bytes - bytes.fixed - 2 * bytes.stage) / bytes.chunk;
    int const third = std::max(1, device.shared_bytes / 3 / bytes.chunk);
    if (beside_two >= 1) return std::min(beside_two, third);
    return device.shared_bytes >= bytes.fixed + bytes.stage + bytes.chunk ? 1 : 0;
}

// The split of least estimated microseconds: a warp's walk over its chunks, staging activations, and, if K is split
// over blocks, `split_cost` and the round trip of the partial sums. `m` tokens. Where `whole`, a warp may not have
// parts of two tiles.
inline Split choose_split(Shape const& shape, int m, int capacity, float split_cost, bool whole, Device const& device) {
    Split best;
    float best_cost = 1e30f;
    for (int splits = 1; splits <= std::min(shape.chunks, kMaxSplits); ++splits) {
        if (splits > 1 &&
            (!device.cooperative || shape.tiles * splits > std::min(kMaxSplitTiles, device.sm_count * kWarps))) {
            break;
        }
        int const task_chunks = ceil_div(shape.chunks, splits);
        int const staged_tiles = ceil_div(task_chunks, capacity);
        for (int most = 1; most <= kWarps; ++most) {
            if (whole && (kWarps % most != 0 || shape.tiles % most != 0)) continue;
            int const groups = ceil_div(shape.tiles, most);
            int const rounds = ceil_div(groups * splits, device.sm_count);
            int const stagings = staged_tiles == 1 ? 1 : rounds * staged_tiles;
            auto const chunks = static_cast<float>(std::min(task_chunks, capacity));
            float const staged = chunks * (0.01f + static_cast<float>(m) * 512.0f / 20e3f);
            float const finish = kWarps % most == 0 ? 1.0f : 1.3f;
            int const walk = staged_tiles * ceil_div(most * ceil_div(task_chunks, staged_tiles), kWarps);
            float const cost = static_cast<float>(rounds) * (static_cast<float>(walk) + finish) +
                               static_cast<float>(stagings) * (1.5f + staged) +
                               (splits > 1 ? split_cost + 0.25f * static_cast<float>(splits) : 0.0f);
            if (cost < best_cost) {
                best_cost = cost;
                // Where large groups do not fill the last round, all blocks have one, some of them with a tile less; of
                // small ones the difference would be felt.
                int const room = whole || most < 4 ? 0 : std::min(shape.tiles, rounds * device.sm_count / splits);
                best = {std::max(groups, room), splits};
            }
        }
    }
    return best;
}

// Whether few copies are to be in flight for a linear, of so many bytes of weights a block: a launch that is over soon
// waits for its activations behind them, a long one for the weights (benchmarks/notes).
inline bool keeps_few_in_flight(int64_t bytes) { return bytes <= 256 << 10; }

// The staged tile holds what a task needs if it can; the ring takes the rest.
struct SharedMemory {
    int staged_tile_chunks, stages, bytes;
};

inline SharedMemory divide_shared_memory(int needed_chunks, int capacity, Footprint const& bytes,
                                         Device const& device) {
    int const staged_tile = ceil_div(needed_chunks, ceil_div(needed_chunks, capacity));  // staged tiles alike
    int const stages =
        std::min(kMaxStages, (device.shared_bytes - bytes.fixed - staged_tile * bytes.chunk) / bytes.stage);
    return {staged_tile, stages, staged_tile * bytes.chunk + stages * bytes.stage};
}

// A linear by sm80_w4a16_small.cuh: a block for each tile of rows.
struct SmallLinear {
    int chunks;
    int cluster;             // blocks that share K of their tiles: 1 or 2
    int staged_tile_chunks;  // of K, that a block multiplies
    int steps;               // chunks that a warp multiplies
    int stages;              // of each warp, for these
    int blocks;              // that find room on an SM: 2, 1 or none
};

constexpr int kMostSmallTokens = 16;

// Whether the library, which may serve other GPUs too, has clusters of blocks that share K: for Hopper, and for B200
// and B300 by likeness. Thor's 20 SMs would gain nothing; on other GPUs they were not timed.
#if defined(TRT_NVFP4_SM90) || (defined(TRT_NVFP4_SM100) && !defined(TRT_NVFP4_WITHOUT_PAIRS))
constexpr bool kSmallClusters = true;
#else
constexpr bool kSmallClusters = false;
#endif

// 2 where it saves more time that each block reads half of x than their sums take from one to the other, as on an H100
// (benchmarks/notes). `major`: of the GPU's compute capability.
inline int choose_small_cluster(int major, int m, int k) {
    if (major != 9 && major != 10) return 1;
    int const from = m <= 4 ? 8448 : m <= 8 ? 2592 : 1536;
    return m >= 4 && k >= from ? 2 : 1;
}

inline int small_bytes(SmallLinear const& shape, Footprint const& bytes) {
    return shape.stages * bytes.stage + shape.staged_tile_chunks * bytes.chunk;
}

// At most `most` blocks on an SM. Two only where their rings hold all chunks, so that all weights of the next launch
// come meanwhile; a single block may fill its rings again.
inline SmallLinear small_linear(int chunks, int cluster, int most, Footprint const& bytes, Device const& device) {
    constexpr int kReserved = 1 << 10;  // of an SM's shared memory, for each block
    constexpr int kFewestStages = 3;
    SmallLinear small{chunks, cluster, ceil_div(chunks, cluster)};
    small.steps = ceil_div(small.staged_tile_chunks, kWarps / cluster);
    for (small.blocks = most; small.blocks > 0; --small.blocks) {
        int const room = (device.shared_bytes + kReserved) / small.blocks - kReserved - bytes.fixed;
        small.stages =
            std::min({small.steps, kMaxStages, (room - small.staged_tile_chunks * bytes.chunk) / bytes.stage});
        if (small.stages == small.steps || (small.blocks == 1 && small.stages >= kFewestStages)) break;
    }
    return small;
}

// Whether it takes less time than the other kernels (H100: by 3 to 51 %): all blocks find room at once, x of `values`
// is soon laid out, and long ones are on many SMs, since others divide K. In turns it takes up to 17 % more, on few SMs
// up to 60 (benchmarks/notes).
inline bool fits_small(int tiles, int64_t values, SmallLinear const& small, Device const& device) {
    constexpr int kMostSteps = 7;
    constexpr int64_t kMostValues = 90 << 10;
    bool const is_long = small.stages < small.steps;
    if (is_long && (small.steps > kMostSteps || 3 * tiles < 2 * device.sm_count)) return false;
    return values <= kMostValues && tiles <= small.blocks * device.sm_count;
}

}  // namespace trt_nvfp4::w4a16
