// The second launch of linear attention by chunks: a block takes 32 columns of one state through all chunks, in order.
// With the chunk's running decays G, its first launch's corrections and scores, and the state S before it:
//     x = v - exp(G) (k S);   u = corrections x;   (u = v without the delta rule)
//     y = scale exp(G) (q S) + scores u;   S = exp(G[last]) S + k^T (exp(G[last] - G) u).
//
// Chunks follow one another, so a chunk's latency is what counts. Four warps have S, in float32, as sums of mma.sync;
// it is in shared memory in T as an operand. They find x and then the next S, while four others find q S and y. u is
// made by both. Four more warps only copy the chunks that come next.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduce.cuh"
#include "recurrent/chunk_tiles.cuh"
#include "recurrent/running_decays.cuh"

namespace trt_nvfp4::recurrent {

constexpr int kScanColumns = 32, kRoleThreads = 128, kRoleWarps = kRoleThreads / 32;
enum ScanRole { kStateRole, kOutputRole, kCopyRole, kScanRoles };
constexpr int kScanThreads = kScanRoles * kRoleThreads;
static_assert(kRoleWarps * 16 == kChunk, "a warp of a role has 16 rows of a chunk");

constexpr int kMostStages = 4;

template <int kKeyDim, bool kDelta>
struct ScanSizes {
    using Rows = Tile<kChunk, kKeyDim>;          // queries, keys
    using Columns = Tile<kChunk, kScanColumns>;  // values, x and u, u decayed
    using Square = Tile<kChunk, kChunk>;         // corrections, scores
    using State = Tile<kKeyDim, kScanColumns>;
    static constexpr int kQueries = 0, kKeys = Rows::kBytes, kValues = 2 * Rows::kBytes;
    static constexpr int kDecays = kValues + Columns::kBytes;
    static constexpr int kScores = kDecays + kChunk * 4, kCorrections = kScores + Square::kBytes;
    static constexpr int kStage = kCorrections + (kDelta ? Square::kBytes : 0);
    static constexpr int kOnce = State::kBytes + (kDelta ? 3 : 1) * Columns::kBytes;
    static constexpr int shared(int stages) { return kOnce + stages * kStage; }
    static constexpr int kOwnTiles = kKeyDim / 16 / kRoleWarps;  // of 16 rows of the state, that a warp has
};

// Barriers of pairs of roles.
__device__ __forceinline__ void sync_computing() { ptx::sync_roles_at<2 * kRoleThreads>(2); }
__device__ __forceinline__ void sync_state_and_copies() { ptx::sync_roles_at<2 * kRoleThreads>(3); }
__device__ __forceinline__ void sync_outputs_and_copies() { ptx::sync_roles_at<2 * kRoleThreads>(4); }

constexpr int kTiles = kScanColumns / 8;  // of 8 columns

template <typename T, int kKeyDim, bool kDelta>
struct Scan {
    using Sizes = ScanSizes<kKeyDim, kDelta>;
    using Rows = typename Sizes::Rows;
    using Columns = typename Sizes::Columns;
    using Square = typename Sizes::Square;
    using State = typename Sizes::State;

    Args<T> const& args;
    ChunkWorkspace const& workspace;
    int batch, head, column0, columns;                      // columns: of the value that the block has
    uint32_t state_tile, decayed, inputs, updates, stages;  // inputs and updates: of the delta rule
    int role = threadIdx.x / kRoleThreads, warp = threadIdx.x / 32 % kRoleWarps, lane = threadIdx.x % 32;

    __device__ Scan(Args<T> const& given, ChunkWorkspace const& space, uint32_t shared)
        : args(given),
          workspace(space),
          state_tile(shared),
          decayed(shared + State::kBytes),
          inputs(decayed + Columns::kBytes),
          updates(inputs + Columns::kBytes),
          stages(shared + Sizes::kOnce) {
        int const blocks = (args.value_dim + kScanColumns - 1) / kScanColumns;
        head = blockIdx.x / blocks;
        column0 = blockIdx.x % blocks * kScanColumns;
        batch = blockIdx.y;
        columns = min(kScanColumns, args.value_dim - column0);
    }

    __device__ int64_t slot(int chunk) const {
        return (int64_t{batch} * args.kv_heads + head) * workspace.chunks + chunk;
    }
    __device__ uint32_t stage(int chunk, int count) const { return stages + chunk % count * Sizes::kStage; }

    // The tokens of the sums of a role's warp.
    __device__ int token_of(int half) const { return warp * 16 + lane / 4 + 8 * half; }
    __device__ int column_of(int n) const { return n * 8 + lane % 4 * 2; }

    // By the threads of one role.
    __device__ void copy_chunk(int chunk0, int chunk, uint32_t place) {
        int const token0 = (chunk0 + chunk) * kChunk, count = min(kChunk, args.tokens - token0);
        int64_t const key_stride = int64_t{args.kv_heads} * args.key_dim;
        int64_t const value_stride = int64_t{args.kv_heads} * args.value_dim;
        int64_t const key = args.row(batch, token0, head, args.key_dim);
        int64_t const value = args.row(batch, token0, head, args.value_dim) + column0;
        copy_tile<Rows, kChunk, kKeyDim, kRoleThreads>(place + Sizes::kKeys, args.key + key, key_stride, count,
                                                       args.key_dim);
        copy_tile<Rows, kChunk, kKeyDim, kRoleThreads>(place + Sizes::kQueries, args.query + key, key_stride, count,
                                                       args.key_dim);
        copy_tile<Columns, kChunk, kScanColumns, kRoleThreads>(place + Sizes::kValues, args.value + value, value_stride,
                                                               count, columns);
        int64_t const square = slot(chunk) * kChunk * kChunk;
        copy_tile<Square, kChunk, kChunk, kRoleThreads>(
            place + Sizes::kScores, static_cast<T const*>(workspace.scores) + square, kChunk, kChunk, kChunk);
        if constexpr (kDelta) {
            copy_tile<Square, kChunk, kChunk, kRoleThreads>(place + Sizes::kCorrections,
                                                            static_cast<T const*>(workspace.corrections) + square,
                                                            kChunk, kChunk, kChunk);
        }
        int const unit = threadIdx.x % kRoleThreads;
        if (unit < kChunk / 4) {
            ptx::cp_async_16(place + Sizes::kDecays + unit * 16, workspace.decays + slot(chunk) * kChunk + unit * 4);
        }
        ptx::cp_async_commit();
    }

    // sums += the warp's 16 rows of the tile times the state.
    __device__ __forceinline__ void multiply_state(float (&sums)[kTiles][4], uint32_t tile) {
#pragma unroll(kKeyDim <= 128 ? 8 : 4)
        for (int k = 0; k < kKeyDim; k += 16) {
            uint32_t a[4];
            load_a<Rows>(a, tile, warp * 16, k);
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                uint32_t b[4];
                load_b<State>(b, state_tile, k, n * 8);
                ptx::mma_m16n8k16<T>(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                ptx::mma_m16n8k16<T>(sums[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }

    // sums += the warp's 16 rows of the square times columns of `right` from `column` on.
    template <int kCount>
    __device__ __forceinline__ void multiply_square(float (&sums)[kCount][4], uint32_t square, uint32_t right,
                                                    int column) {
#pragma unroll
        for (int k = 0; k < kChunk; k += 16) {
            uint32_t a[4];
            load_a<Square>(a, square, warp * 16, k);
#pragma unroll
            for (int n = 0; n < kCount; n += 2) {
                uint32_t b[4];
                load_b<Columns>(b, right, k, column + n * 8);
                ptx::mma_m16n8k16<T>(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                ptx::mma_m16n8k16<T>(sums[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }

    // Half of u's columns, as it is and decayed up to the end of the chunk.
    __device__ __forceinline__ void find_updates(uint32_t place) {
        int const column = role * kScanColumns / 2;
        float sums[kTiles / 2][4] = {};
        multiply_square(sums, place + Sizes::kCorrections, inputs, column);
        float const last = running_decay(place, kChunk - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const token = token_of(half);
            float const factor = decay_between(last, running_decay(place, token));
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                float const low = sums[n][2 * half], high = sums[n][2 * half + 1];
                store_pair<Columns, T>(updates, token, column + column_of(n), low, high);
                store_pair<Columns, T>(decayed, token, column + column_of(n), low * factor, high * factor);
            }
        }
    }

    __device__ static float running_decay(uint32_t place, int token) {
        return ptx::load_shared(place + Sizes::kDecays + 4 * token);
    }
};

// The four warps that have the state.
template <typename T, int kKeyDim, bool kDelta>
struct StateWarps {
    using Kernel = Scan<T, kKeyDim, kDelta>;
    using Sizes = typename Kernel::Sizes;
    using Columns = typename Sizes::Columns;
    using State = typename Sizes::State;

    Kernel& scan;
    float (&unit)[kRoleWarps + 1];  // in shared memory: maxima of warps, then state over what is shared of it
    float state[Sizes::kOwnTiles][kTiles][4] = {};

    __device__ int row_of(int m, int half) const {
        return (scan.warp + m * kRoleWarps) * 16 + scan.lane / 4 + 8 * half;
    }

    // Calls f(first of two values that lie side by side, place) for what is inside of the state.
    template <typename F>
    __device__ __forceinline__ void each_pair(F f) {
        Args<T> const& args = scan.args;
        int64_t const base = args.state(scan.batch, scan.head) + scan.column0;
#pragma unroll
        for (int m = 0; m < Sizes::kOwnTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int const row = row_of(m, half), column = scan.column_of(n);
                    if (row < args.key_dim && column < scan.columns) {
                        f(&state[m][n][2 * half], base + int64_t{row} * args.value_dim + column);
                    }
                }
            }
        }
    }

    __device__ void load() {
        float const* const past = scan.args.past;
        if (past == nullptr) return;
        each_pair([&](float* pair, int64_t place) {
            float2 const two = *reinterpret_cast<float2 const*>(past + place);
            pair[0] = two.x;
            pair[1] = two.y;
        });
    }

    __device__ void store() {
        float* const present = scan.args.present;
        each_pair([&](float* pair, int64_t place) {
            *reinterpret_cast<float2*>(present + place) = make_float2(pair[0], pair[1]);
        });
    }

    // The power of two that a state of float16, whose range it may exceed, is divided by.
    __device__ float find_unit() {
        uint32_t bits = 0;
#pragma unroll
        for (int m = 0; m < Sizes::kOwnTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) bits = max(bits, ptx::magnitude_bits(state[m][n][i]));
            }
        }
        bits = ptx::warp_max(bits);
        if (scan.lane == 0) unit[scan.warp] = __uint_as_float(bits);
        sync_computing();  // with the other role, which waits for this anyway
        for (int w = 0; w < kRoleWarps; ++w) bits = max(bits, __float_as_uint(unit[w]));
        // Up to 2^14 as it is; an infinity or NaN stays what it is.
        int const exponent = min(max(static_cast<int>(bits >> 23) - 127 - 13, 0), 120);
        return __uint_as_float((127u + exponent) << 23);
    }

    // The state as an operand.
    __device__ void share() {
        float factor = 1.0f;
        if constexpr (std::is_same_v<T, __half>) {
            float const found = find_unit();
            factor = 1.0f / found;
            if (threadIdx.x == 0) unit[kRoleWarps] = found;
        }
#pragma unroll
        for (int m = 0; m < Sizes::kOwnTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    store_pair<State, T>(scan.state_tile, row_of(m, half), scan.column_of(n),
                                         state[m][n][2 * half] * factor, state[m][n][2 * half + 1] * factor);
                }
            }
        }
    }

    // x = v - exp(G) (k S).
    __device__ __forceinline__ void find_inputs(uint32_t place, float unit_now) {
        float sums[kTiles][4] = {}, factors[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            factors[half] = unit_now * __expf(Kernel::running_decay(place, scan.token_of(half)));
        scan.multiply_state(sums, place + Sizes::kKeys);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const token = scan.token_of(half);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                int const column = scan.column_of(n);
                float2 const value = load_pair<Columns, T>(place + Sizes::kValues, token, column);
                store_pair<Columns, T>(scan.inputs, token, column, value.x - factors[half] * sums[n][2 * half],
                                       value.y - factors[half] * sums[n][2 * half + 1]);
            }
        }
    }

    // Without the delta rule u is v.
    __device__ __forceinline__ void decay_values(uint32_t place) {
        float const last = Kernel::running_decay(place, kChunk - 1);
#pragma unroll 4
        for (int i = threadIdx.x; i < kChunk * kScanColumns / 2; i += kRoleThreads) {
            int const token = i / (kScanColumns / 2), column = i % (kScanColumns / 2) * 2;
            float const factor = decay_between(last, Kernel::running_decay(place, token));
            float2 const value = load_pair<Columns, T>(place + Sizes::kValues, token, column);
            store_pair<Columns, T>(scan.decayed, token, column, value.x * factor, value.y * factor);
        }
    }

    // S = exp(G[last]) S + k^T (u decayed).
    __device__ __forceinline__ void update(uint32_t place) {
        float const decay = __expf(Kernel::running_decay(place, kChunk - 1));
#pragma unroll
        for (int m = 0; m < Sizes::kOwnTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) state[m][n][i] *= decay;
            }
        }
#pragma unroll
        for (int k = 0; k < kChunk; k += 16) {
            uint32_t b[kTiles / 2][4];
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) load_b<Columns>(b[n], scan.decayed, k, n * 16);
#pragma unroll
            for (int m = 0; m < Sizes::kOwnTiles; ++m) {
                uint32_t a[4];
                load_a_transposed<typename Sizes::Rows>(a, place + Sizes::kKeys, (scan.warp + m * kRoleWarps) * 16, k);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    ptx::mma_m16n8k16<T>(state[m][n], a[0], a[1], a[2], a[3], b[n / 2][n % 2 * 2],
                                         b[n / 2][n % 2 * 2 + 1]);
                }
            }
        }
    }
};

// The four warps that make y, 16 rows of it each.
template <typename T, int kKeyDim, bool kDelta>
struct OutputWarps {
    using Kernel = Scan<T, kKeyDim, kDelta>;
    using Sizes = typename Kernel::Sizes;

    Kernel& scan;
    float sums[kTiles][4];

    // sums = scale exp(G) (q S).
    __device__ __forceinline__ void read_state(uint32_t place, float scale) {
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[half] = scale * __expf(Kernel::running_decay(place, scan.token_of(half)));
        }
#pragma unroll
        for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
        scan.multiply_state(sums, place + Sizes::kQueries);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] *= factors[i / 2];
        }
    }

    __device__ __forceinline__ void store(int chunk) const {
        Args<T> const& args = scan.args;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const token = chunk * kChunk + scan.token_of(half);
            if (token >= args.tokens) continue;
            T* const y = args.y + args.row(scan.batch, token, scan.head, args.value_dim) + scan.column0;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                int const column = scan.column_of(n);
                if (column < scan.columns) {
                    *reinterpret_cast<uint32_t*>(y + column) = pack<T>(sums[n][2 * half], sums[n][2 * half + 1]);
                }
            }
        }
    }
};

// Returns once at most `pending` of the latest copies are still in flight.
__device__ __forceinline__ void wait_for_copies(int pending) {
    static_assert(kMostStages == 4, "pending copies are 0, 1 or 2");
    if (pending == 0) ptx::cp_async_wait<0>();
    if (pending == 1) ptx::cp_async_wait<1>();
    if (pending == 2) ptx::cp_async_wait<2>();
}

// Each role that computes meets the copies' once a chunk is there; with one stage, again when it has been read. Then
// the two meet each other: the state is there; x is there, or v decayed, and the state has been read; of the delta
// rule, u is there; of float16, a state's maxima are there.
template <typename T, int kKeyDim, bool kDelta>
__global__ __launch_bounds__(kScanThreads) void sm80_linear_attention_scan(Args<T> args, ChunkWorkspace workspace,
                                                                           int chunk0, int chunks, int stages) {
    using Kernel = Scan<T, kKeyDim, kDelta>;
    constexpr bool kHalf = std::is_same_v<T, __half>;
    extern __shared__ uint4 shared_memory[];
    __shared__ float unit[kRoleWarps + 1];
    Kernel scan(args, workspace, ptx::shared_address(shared_memory));
    wait_for_kernels_before();

    if (scan.role == kCopyRole) {
        auto const copy = [&](int chunk) {
            if (chunk < chunks) {
                scan.copy_chunk(chunk0, chunk, scan.stage(chunk, stages));
            } else {
                ptx::cp_async_commit();  // of nothing, so that the count of what is in flight stays
            }
        };
        for (int chunk = 0; chunk < max(stages - 1, 1); ++chunk) copy(chunk);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            wait_for_copies(max(stages - 2, 0));
            sync_state_and_copies();
            sync_outputs_and_copies();
            if (stages == 1) {
                sync_state_and_copies();
                sync_outputs_and_copies();
            }
            copy(chunk + max(stages - 1, 1));
        }
        return;
    }
    if (scan.role == kStateRole) {
        StateWarps<T, kKeyDim, kDelta> warps{scan, unit};
        warps.load();
        warps.share();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            uint32_t const place = scan.stage(chunk, stages);
            sync_state_and_copies();
            sync_computing();
            if constexpr (kDelta) {
                warps.find_inputs(place, kHalf ? unit[kRoleWarps] : 1.0f);
                sync_computing();
                scan.find_updates(place);
            } else {
                warps.decay_values(place);
            }
            sync_computing();
            warps.update(place);
            warps.share();
            if (stages == 1) sync_state_and_copies();
        }
        warps.store();
        return;
    }
    OutputWarps<T, kKeyDim, kDelta> warps{scan};
    if constexpr (kHalf) sync_computing();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint32_t const place = scan.stage(chunk, stages);
        sync_outputs_and_copies();
        sync_computing();
        warps.read_state(place, args.scale * (kHalf ? unit[kRoleWarps] : 1.0f));
        sync_computing();
        if constexpr (kDelta) {
            scan.find_updates(place);
            sync_computing();
        }
        uint32_t const right = kDelta ? scan.updates : place + Kernel::Sizes::kValues;
        scan.multiply_square(warps.sums, place + Kernel::Sizes::kScores, right, 0);
        warps.store(chunk0 + chunk);
        if constexpr (kHalf) sync_computing();
        if (stages == 1) sync_outputs_and_copies();
    }
}

}  // namespace trt_nvfp4::recurrent
