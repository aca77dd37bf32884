// Attention between two projections of a launch: as sm80_attention_decode.cuh, but queries, keys and values of new
// tokens come as words from other blocks, while the first old keys and the next projection's weights are under way.
//
// A job is up to 8 rows of a KV head by a part of one sequence's keys. Its block stages the new rows, appends keys and
// values (blocks that share a KV head write the same), and leaves sums that all blocks add up then.
#pragma once

#include "attention/head_row.cuh"
#include "decoder/decoder_args.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/prefetch.cuh"
#include "w4a16/stream/sm80_w4a16_token.cuh"

namespace trt_nvfp4::decoder {

template <typename T, bool kFp8, int kHeadDim>
struct Attend {
    // Warps that share a stream of keys, a part of a longer head's dimensions each: sums of all of them would not fit a
    // thread's registers. They add up their parts of the scores.
    static constexpr int kParts = kHeadDim > 128 ? 2 : 1;
    static constexpr int kDims = kHeadDim / kParts;
    static constexpr int kKeys = kFp8 ? 32 : 16;  // of a tile
    using Sizes = attention::Tile<kFp8, kDims, kKeys>;
    static constexpr int kWarpBytes = 2 * Sizes::kBytes;  // a tile of keys, one of values
    static constexpr int kLaneDims = kHeadDim / 32;
    static constexpr int kSumPitch = kDims + 4;  // of a warp's sums, in place of its tiles
    using Scores = float[kKeys / 16][4];
    static constexpr int kScoreBytes = kParts > 1 ? sizeof(Scores) * 32 : 0;  // of a warp's part of a tile's scores
    static constexpr int kQueryBytes = kRows * attention::kQueryPitch<kHeadDim>;
    static_assert(kWarpBytes >= kRows * kSumPitch * 4, "a warp's sums take the place of its tiles");

    // New rows, as they are given: of queries, and of `tokens` keys and values.
    static __host__ __device__ constexpr int given_bytes(int tokens) { return (kRows + 2 * tokens) * kHeadDim * 2; }
    static __host__ __device__ constexpr int shared_bytes(int tokens, int warps) {
        return kQueryBytes + given_bytes(tokens) + warps * (kWarpBytes + 2 * kScoreBytes);
    }
};

using Softmaxes = float2[w4a16::kWarps][kRows];

// What a block does: rows [row0, row0 + rows) of a KV head by keys [begin, end) of a sequence. It lies in shared
// memory, and is read there wherever it is needed, because registers are few.
struct Job {
    int index, layer;
    int pair, slot;
    int batch;   // below 0: nothing
    int splits;  // of the sequence
    int kv_head, row0, rows;
    int past;  // the sequence's length before the call
    int begin, end;
    int seen_by_all;            // the first key that not every row attends to, but for a window
    int first_new, new_tokens;  // positions of the call's in reach
    uint8_t const* keys;        // the sequence's, of the KV head

    template <typename T>
    __device__ int token_of(DecoderArgs<T> const& args, int row) const {  // of the sequence
        return args.by_group.of(row0 + row);
    }
    template <typename T>
    __device__ int head_of(DecoderArgs<T> const& args, int row) const {
        return kv_head * args.attention.group + row0 + row - token_of(args, row) * args.attention.group;
    }
};

// What is cached of a sequence, and its slots: the same for all layers (attention/shares.cuh).
struct SharedSequence {
    int past, first, length;
    int first_slot, splits;
};

struct AttentionShared {
    Softmaxes softmaxes;
    SharedSequence sequences[kMostTokens];
    Job job;
};

// By the first warp, once.
template <int kKeys, typename T>
__device__ __forceinline__ void share_slots(DecoderArgs<T> const& args, AttentionShared& own) {
    attention::Args<T> const& call = args.attention;
    int const batch = threadIdx.x;
    bool const inside = batch < call.batch;
    attention::Sequence const sequence(call, inside ? batch : 0);
    int const blocks = inside ? (sequence.keys() + kKeys - 1) / kKeys : 0;
    int total = blocks;
    for (int offset = 16; offset > 0; offset >>= 1) total += __shfl_xor_sync(0xffffffffu, total, offset);
    int const most = (blocks + attention::kLeastKeyBlocks - 1) / attention::kLeastKeyBlocks;
    int const given = total > 0 ? 1 + attention::share_of(args.slots - call.batch, blocks, total) : 1;
    int const splits = inside ? max(min(given, most), 1) : 0;
    int end = splits;
    for (int offset = 1; offset < 32; offset <<= 1) {
        int const before = __shfl_up_sync(0xffffffffu, end, offset);
        if (static_cast<int>(threadIdx.x) >= offset) end += before;
    }
    if (inside) own.sequences[batch] = {sequence.past, sequence.first, sequence.length, end - splits, splits};
    if (threadIdx.x == 0) own.job.index = -1;
}

// By one thread. A block's only job is the same for all layers.
template <int kKeys, int kBytes, typename T>
__device__ __forceinline__ void find_job(DecoderArgs<T> const& args, int index, int layer, AttentionShared& own) {
    attention::Args<T> const& call = args.attention;
    Job& job = own.job;
    if (job.index == index) {
        job.layer = layer;
        if (job.batch >= 0) job.keys += 2 * args.cache_bytes;
        return;
    }
    job.layer = layer;
    job.index = index;
    job.pair = index / args.slots;
    job.slot = index % args.slots;
    job.batch = -1;
    for (int batch = 0; batch < call.batch; ++batch) {
        int const split = job.slot - own.sequences[batch].first_slot;
        if (split >= 0 && split < own.sequences[batch].splits) job.batch = batch;
    }
    if (job.batch < 0) return;
    SharedSequence const sequence = own.sequences[job.batch];
    job.splits = sequence.splits;
    job.kv_head = job.pair / args.chunks();
    job.row0 = job.pair % args.chunks() * kRows;
    job.rows = min(call.rows() - job.row0, kRows);
    int const key_blocks = (max(sequence.length - sequence.first, 0) + kKeys - 1) / kKeys;
    auto const border = [&](int split) {
        int const block = attention::share_of(key_blocks, split, sequence.splits);
        return min(sequence.first + block * kKeys, sequence.length);
    };
    job.keys = args.keys_of(layer) + attention::cache_row(call, job.batch, job.kv_head, 0) * (call.head_dim * kBytes);
    job.past = sequence.past;
    job.begin = border(job.slot - sequence.first_slot);
    job.end = border(job.slot - sequence.first_slot + 1);
    job.seen_by_all = min(job.end, job.past + job.token_of(args, 0) + 1);
    job.first_new = max(job.begin, job.past);
    job.new_tokens = max(job.end - job.first_new, 0);
}

// To L2, while the new rows are awaited: what their norm and rotation take.
template <typename T>
__device__ __forceinline__ void prefetch_tables(DecoderArgs<T> const& args, Job const& job) {
    attention::Args<T> const& call = args.attention;
    int const half = call.rotary / 2, warp = threadIdx.x / 32, at = threadIdx.x % 32;
    if (warp < 2 && call.query_norm != nullptr && at * 64 < call.head_dim) {
        ptx::prefetch((warp == 0 ? call.query_norm : call.key_norm) + job.layer * call.head_dim + at * 64);
    }
    if (warp >= 2 && warp - 2 < call.tokens && at < 8 && at % 4 * 32 < half) {
        int64_t const row = int64_t{min(job.past + warp - 2, call.positions - 1)} * half;
        ptx::prefetch((at < 4 ? call.cosines : call.sines) + row + at % 4 * 32);
    }
}

// New rows come as words, queries, and keys and values of tokens in reach; these are appended.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void prepare_job(DecoderArgs<T> const& args, Job const& job, uint8_t* shared) {
    using Config = Attend<T, kFp8, kHeadDim>;
    attention::Args<T> const& call = args.attention;  // of layer 0: for its sizes
    T* const given = reinterpret_cast<T*>(shared + Config::kQueryBytes);
    T* const given_new = given + kRows * kHeadDim;
    // All queries, in jobs without keys too: what is handed over then is nobody's of the layer before. Keys and values
    // beside them, so that their trips to L2 do not follow one another.
    int const rows = job.rows + 2 * job.new_tokens, eights_of_row = call.head_dim / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * eights_of_row; i += w4a16::kThreads) {
        int const row = args.by_eights.of(i), of_new = row - job.rows;
        bool const is_query = of_new < 0;
        int const token = is_query ? job.token_of(args, row) : job.first_new - job.past + of_new / 2;
        int const head = is_query ? job.head_of(args, row) : call.heads + job.kv_head + of_new % 2 * call.kv_heads;
        int const all = call.heads + 2 * call.kv_heads, offset = (i - row * eights_of_row) * 8;
        uint32_t const* const words =
            args.qkv + ((job.batch * call.tokens + token) * all + head) * call.head_dim + offset;
        w4a16::TaggedEight eight;
        eight.load(words);
        while (!eight.is_of(job.layer)) {
            __nanosleep(w4a16::kPollPause);
            eight.load(words);
        }
        T* const out = is_query ? given + row * call.head_dim : given_new + of_new * call.head_dim;
        *reinterpret_cast<uint4*>(out + offset) = eight.values();
    }
    w4a16::meet();
    constexpr int kPitch = attention::kQueryPitch<kHeadDim>;
    for (int i = job.rows * (kPitch / 16) + threadIdx.x; i < kRows * (kPitch / 16); i += w4a16::kThreads) {
        reinterpret_cast<uint4*>(shared)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    // In the program once, for its size.
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < job.rows + 2 * job.new_tokens; i += w4a16::kWarps) {
        int const of_new = i - job.rows, kv_index = job.kv_head + of_new % 2 * call.kv_heads;
        bool const is_query = of_new < 0;
        int const head = is_query ? job.head_of(args, i) : call.heads + kv_index;
        int const position = is_query ? job.past + job.token_of(args, i) : job.first_new + of_new / 2;
        attention::Args<T> const own = args.attention_of(job.layer);
        float row[Config::kLaneDims] = {};
        attention::head_row(row, own, (is_query ? given + i * call.head_dim : given_new + of_new * call.head_dim), head,
                            position);
        if (is_query) {
            using Op = attention::Operand<T, kFp8>;
            attention::store_query<T, kFp8, true>(row, call.head_dim, reinterpret_cast<Op*>(shared + i * kPitch));
        } else {
            attention::store_row<Config::kLaneDims, kFp8>(own, row, job.batch, kv_index, position);
        }
    }
    w4a16::meet();
}

// Adds up what the warps have, and hands it over: divided where no other job has keys of the sequence.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void finish_job(DecoderArgs<T> const& args, Job const& job, uint8_t const* tiles,
                                           Softmaxes& softmaxes) {
    using Config = Attend<T, kFp8, kHeadDim>;
    attention::Args<T> const& call = args.attention;
    int const warps = args.attention_warps / Config::kParts;  // each with its partners
    // A row's factor for each warp, and the row's maximum and weight.
    __shared__ float2 rows[kRows];
    if (threadIdx.x < kRows) {
        float largest = -INFINITY, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            if (w < warps) largest = fmaxf(largest, softmaxes[w][threadIdx.x].x);
        }
        float const base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            float2& softmax = softmaxes[w][threadIdx.x];
            if (w >= warps) continue;
            softmax.x = ptx::exp2(softmax.x - base);
            weight += softmax.y * softmax.x;
        }
        rows[threadIdx.x] = make_float2(largest, weight);
    }
    w4a16::meet();
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < job.rows * Config::kLaneDims; unit += w4a16::kWarps) {
        int const row = unit / Config::kLaneDims, i = unit % Config::kLaneDims * 32 + threadIdx.x % 32;
        float const* const values = reinterpret_cast<float const*>(tiles + i / Config::kDims * Config::kWarpBytes) +
                                    row * Config::kSumPitch + i % Config::kDims;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < w4a16::kWarps / Config::kParts; ++w) {
            if (w < warps) sum = fmaf(values[w * (Config::kParts * Config::kWarpBytes / 4)], softmaxes[w][row].x, sum);
        }
        if (i >= call.head_dim) continue;
        float2 const of_row = rows[row];
        if (job.splits == 1) {
            int const head = job.head_of(args, row);
            attention::Finish<T, kFp8> const finish(args.attention_of(job.layer), head, of_row.x, of_row.y);
            int const token = job.batch * call.tokens + job.token_of(args, row);
            w4a16::store_tagged(args.attended + (token * call.heads + head) * call.head_dim + i,
                                ptx::from_float<T>(sum * finish.factor), job.layer);
        } else {
            int64_t const place = args.place(job.pair, job.slot, row);
            w4a16::store_partial(args.sums + place * call.head_dim + i, sum, job.layer);
            if (i < 2) w4a16::store_partial(args.softmaxes + place * 2 + i, i == 0 ? of_row.x : of_row.y, job.layer);
        }
    }
}

// A meeting of the warps of a stream of keys, at a barrier of their own.
template <class Config>
__device__ __forceinline__ void meet_stream() {
    constexpr int kFirstBarrier = 2;
    ptx::meet_at<32 * Config::kParts>(kFirstBarrier + threadIdx.x / 32 / Config::kParts);
}

// A tile's scores, of which each warp of a stream of keys has a part: the sum of the parts. `exchange` has room for two
// tiles of each warp, so that one meeting a tile is enough.
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
    meet_stream<Config>();
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
__device__ __forceinline__ void attend_job(DecoderArgs<T> const& args, Job const& job, uint8_t* shared,
                                           Softmaxes& softmaxes) {
    using Config = Attend<T, kFp8, kHeadDim>;
    constexpr int kKeys = Config::kKeys;
    constexpr int kCopied = 2;  // at once, so that few registers hold addresses
    attention::Args<T> const& call = args.attention;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const warps = args.attention_warps;
    int const stream = warp / Config::kParts;
    // Of all streams; and the first dimension of the warp's part of a head. Made anew, not kept in registers.
    auto const stride = [&] { return args.attention_warps / Config::kParts * kKeys; };
    auto const first_dim = [] { return threadIdx.x / 32 % Config::kParts * Config::kDims; };
    uint8_t* const tiles = shared + Config::kQueryBytes + Config::given_bytes(call.tokens);
    uint32_t const tile = ptx::shared_address(tiles) + warp * Config::kWarpBytes;
    auto const load = [&](int key, bool values) {
        if (key < job.end && warp < warps) {
            // What follows from it is made anew for every tile, instead of being kept in registers.
            int of_tile = lane;
            asm volatile("" : "+r"(of_tile));
            int const row_bytes = call.head_dim * (kFp8 ? 1 : 2);
            int const skipped = first_dim() * (kFp8 ? 1 : 2);
            uint8_t const* const rows = job.keys + (values ? args.cache_bytes : 0) + int64_t{key} * row_bytes + skipped;
            attention::copy_tile<kFp8, Config::kDims, kKeys, 32, kCopied>(tile + (values ? Config::Sizes::kBytes : 0),
                                                                          rows, row_bytes, row_bytes - skipped,
                                                                          job.end - key, of_tile);
        }
        ptx::cp_async_commit();
    };
    int key0 = job.begin + stream * kKeys;
    // Keys that were cached before the call need not wait for those that the block appends.
    bool const early = key0 + kKeys <= job.past;
    // In the program once, for its size.
#pragma unroll 1
    for (int time = 0; time < 2; ++time) {
        if (early == (time == 0)) {
            load(key0, false);
            load(key0, true);
        }
        if (time == 1) break;
        prefetch_tables(args, job);
        prepare_job<T, kFp8, kHeadDim>(args, job, shared);
    }

    attention::ScoreScale const scale(args.attention_of(job.layer), job.kv_head, kFp8);
    // Of a lane: rows row_of(0) and row_of(1), keys from first_key on.
    auto const row_of = [&](int i) { return lane % 4 * 2 + i; };
    int const first_key = lane / 4;
    attention::FewRowsSoftmax softmax;
    float sums[Config::kDims / 16][4] = {};
    [[maybe_unused]] int odd = 0;  // of tiles
#pragma unroll 1
    for (; key0 < job.end && warp < warps; key0 += stride()) {
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
        bool const every = call.window == 0 && key0 + kKeys <= job.seen_by_all;
        // Of each row, the keys between these.
        int before[2] = {}, last[2] = {};
        if (!every) {
            for (int i = 0; i < 2; ++i) {
                int const position = job.past + job.token_of(args, row_of(i));
                before[i] = (call.window == 0 ? -1 : position - call.window) - key0 - first_key;
                last[i] = min(position, job.end - 1) - key0 - first_key;
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
        // than others, compute-sanitizer's racecheck misses a meeting of all.
#pragma unroll 1
        for (key0 -= stream * kKeys; key0 < job.end; key0 += stride()) meet_stream<Config>();
    }
    ptx::cp_async_wait<0>();
    __syncwarp();

    if (warp < warps) {
        float* const own = reinterpret_cast<float*>(tiles + warp * Config::kWarpBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float const weight = attention::column_sum(softmax.weight[i]);
            if (lane < 4) softmaxes[stream][row_of(i)] = make_float2(softmax.top(i, scale), weight);
            if (row_of(i) >= job.rows) continue;
#pragma unroll
            for (int part = 0; part < Config::kDims / 16; ++part) {
                for (int second = 0; second < 2; ++second) {
                    own[row_of(i) * Config::kSumPitch + attention::few_rows_dimension<kFp8>(part, second)] =
                        sums[part][2 * second + i];
                }
            }
        }
    }
    w4a16::meet();
    finish_job<T, kFp8, kHeadDim>(args, job, tiles, softmaxes);
}

// Adds what the jobs of split sequences left: eight dimensions of a row per warp. Of these, each of four groups of
// lanes takes every fourth split, so that few trips to L2 follow one another; then the groups' sums are added, in
// order.
template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void combine(DecoderArgs<T> const& args, int layer, AttentionShared const& own) {
    attention::Args<T> const& call = args.attention;  // of layer 0: for its sizes
    constexpr int kAtOnce = 4, kGroups = 4, kDims = 8;
    int const lane = threadIdx.x % 32, group = lane / kDims;
    int const of_row = call.head_dim / kDims;
    int const units = args.m * call.heads * of_row;
#pragma unroll 1
    for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < units; unit += w4a16::kWarps * gridDim.x) {
        int const query = args.by_eights.of(unit), i = (unit - query * of_row) * kDims + lane % kDims;
        int const token = args.by_heads.of(query), head = query - token * call.heads;
        int const batch = args.by_sequence.of(token);
        SharedSequence const& share = own.sequences[batch];
        if (share.splits == 1) continue;  // the block that had it handed over the output
        int const kv_head = args.by_group.of(head);
        int const row = (token - batch * call.tokens) * call.group + head - kv_head * call.group;
        int const pair = kv_head * args.chunks() + row / kRows;
        float largest = -INFINITY, weight = 0.0f, sum = 0.0f;
#pragma unroll 1
        for (int first = 0; first < share.splits; first += kGroups * kAtOnce) {
            w4a16::Partial parts[3 * kAtOnce];
            auto const load = [&](int j, bool wanted) {
                int const split = first + j / 3 * kGroups + group;
                int64_t const place = args.place(pair, share.first_slot + split, row % kRows);
                w4a16::load_partial_if(
                    wanted,
                    j % 3 == 0 ? args.sums + place * call.head_dim + i : args.softmaxes + place * 2 + (j % 3 - 1),
                    parts[j]);
            };
#pragma unroll
            for (int j = 0; j < 3 * kAtOnce; ++j) {
                parts[j] = {j % 3 == 1 ? -INFINITY : 0.0f, layer};
                load(j, first + j / 3 * kGroups + group < share.splits);
            }
            w4a16::await_all<3 * kAtOnce>([&](int j) { return parts[j].phase != layer; }, load);
            __syncwarp();
            float top = largest;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, parts[3 * j + 1].value);
            float const base = top == -INFINITY ? 0.0f : top;
            float const shrink = ptx::exp2(largest - base);
            largest = top;
            weight *= shrink;
            sum *= shrink;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                float const part = ptx::exp2(parts[3 * j + 1].value - base);
                weight += parts[3 * j + 2].value * part;
                sum += parts[3 * j].value * part;
            }
        }
#pragma unroll
        for (int bit = kDims; bit < 32; bit *= 2) {
            float const other = __shfl_xor_sync(0xffffffffu, largest, bit);
            float const top = fmaxf(largest, other), base = top == -INFINITY ? 0.0f : top;
            float const own_part = ptx::exp2(largest - base), others = ptx::exp2(other - base);
            weight = weight * own_part + __shfl_xor_sync(0xffffffffu, weight, bit) * others;
            sum = sum * own_part + __shfl_xor_sync(0xffffffffu, sum, bit) * others;
            largest = top;
        }
        if (group != 0) continue;
        attention::Finish<T, kFp8> const finish(args.attention_of(layer), head, largest, weight);
        w4a16::store_tagged(args.attended + query * call.head_dim + i, ptx::from_float<T>(sum * finish.factor), layer);
    }
}

template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void attend(DecoderArgs<T> const& args, int layer, uint8_t* shared, AttentionShared& own) {
    int const jobs = args.attention.kv_heads * args.chunks() * args.slots;
#pragma unroll 1
    for (int index = blockIdx.x; index < jobs;) {
        w4a16::meet();  // others may still read what is here
        if (threadIdx.x == 0) find_job<Attend<T, kFp8, kHeadDim>::kKeys, kFp8 ? 1 : 2>(args, index, layer, own);
        w4a16::meet();
        if (own.job.batch >= 0) attend_job<T, kFp8, kHeadDim>(args, own.job, shared, own.softmaxes);
        index = own.job.index + gridDim.x;
    }
    combine<T, kFp8, kHeadDim>(args, layer, own);
}

}  // namespace trt_nvfp4::decoder
