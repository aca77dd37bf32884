// A mixture of experts at any number of tokens: the chosen experts' weights stream once to the tensor cores for every
// 64 pairs, the pairs' tokens are the columns. Three phases of one launch: gate and up; down; the weighted sums. One
// block per SM; each takes an even, contiguous part of a phase's tasks, so that neighbours share their job's
// activations. Hidden activations and the experts' outputs are their own flags (sm80_w4a16_exchange.cuh).
#pragma once

#include "heuristics/moe.h"
#include "moe_plan.cuh"
#include "sm80_w4a16_mlp.cuh"

namespace trt_nvfp4::w4a16 {

enum MoePhase { kUpPhase = 0, kDownPhase = 1, kSumPhase = 2, kMoePhases = 3 };

// One projection of all routed experts, or of the shared one.
struct ExpertWeights {
    uint8_t const* codes;
    uint8_t const* scales;
    float const* tensor_scale;
    void const* bias;
    int rows, k;
    int tasks_per_job;

    __host__ __device__ int chunks() const { return (k + kChunk - 1) / kChunk; }
    __host__ __device__ int tiles() const { return (rows + 127) / 128 * kTilesPerGroup; }
};

constexpr int kRouted = 0, kShared = 1;  // what jobs come in: first all routed ones, then the shared expert's

template <typename T>
struct MoeArgs {
    ExpertWeights weights[2][2];  // [phase][kRouted, kShared]
    Split split[2];               // [phase]; up is not split over blocks
    int first_phase, last_phase;  // half open
    MoePlan plan;
    int m, top_k, job_tokens, shared_jobs;
    bool scale_input;
    TrtNvfp4Activation activation;
    bool gated;
    float alpha, limit;
    T const* x;
    T* y;
    T* hidden[2];       // [pairs in sorted order, k of down], [m, k of the shared down]
    float* outputs[2];  // [splits, pairs in sorted order, hidden], [splits, m, hidden]
    MoeMemory memory;
    uint32_t one;  // 1, see shift_left
};

// A warp's part of a block's task: some tiles of a job by one of `splits` parts of K.
struct ExpertTask {
    int segment, job;  // the job's number within its segment
    int tile, k_group, split;
    int begin, end;  // chunks

    template <typename T>
    __device__ __forceinline__ ExpertTask(MoeArgs<T> const& args, int phase, int routed_jobs, int task) {
        int const routed = routed_jobs * args.weights[phase][kRouted].tasks_per_job;
        segment = task < routed ? kRouted : kShared;
        ExpertWeights const& w = args.weights[phase][segment];
        Split const& way = args.split[phase];
        task -= segment == kRouted ? 0 : routed;
        job = task / w.tasks_per_job;
        int const part = task % w.tasks_per_job;
        int const warp = threadIdx.x / 32;
        split = part % way.splits;
        tile = part / way.splits * (kWarps / way.k_groups) + warp / way.k_groups;
        k_group = warp % way.k_groups;
        begin = split * w.chunks() / way.splits;
        end = (split + 1) * w.chunks() / way.splits;
    }
};

template <typename T>
__device__ __forceinline__ ExpertJob job_of(MoeArgs<T> const& args, ExpertTask const& task) {
    if (task.segment == kRouted) return args.plan.jobs[task.job];
    int const first = task.job * args.job_tokens;
    return {0, first, min(args.job_tokens, args.m - first), 0};
}

// A block's tasks of a phase.
struct TaskRange {
    int begin, end;

    template <typename T>
    __device__ __forceinline__ TaskRange(MoeArgs<T> const& args, int phase, int routed_jobs) {
        int const tasks = routed_jobs * args.weights[phase][kRouted].tasks_per_job +
                          args.shared_jobs * args.weights[phase][kShared].tasks_per_job;
        begin = static_cast<int>(static_cast<int64_t>(tasks) * blockIdx.x / gridDim.x);
        end = static_cast<int>(static_cast<int64_t>(tasks) * (blockIdx.x + 1) / gridDim.x);
    }
};

// As WeightStream: a warp's copies run ahead over tasks and phases. Stages are laid out as there.
template <typename T>
class ExpertStream {
 public:
    __device__ ExpertStream(MoeArgs<T> const& args, int routed_jobs, uint8_t* ring)
        : args_(args),
          routed_jobs_(routed_jobs),
          ring_(ptx::shared_address(ring)),
          stages_(args.memory.stages),
          phase_(args.first_phase - 1) {
        open_phase();
        for (int stage = 0; stage < stages_; ++stage) fetch(stage);
    }

    __device__ __forceinline__ int acquire() {
        static_assert(kMaxStages == 5, "a case per number of stages");
        switch (stages_) {
            case 1:
                ptx::cp_async_wait<0>();
                break;
            case 2:
                ptx::cp_async_wait<1>();
                break;
            case 3:
                ptx::cp_async_wait<2>();
                break;
            case 4:
                ptx::cp_async_wait<3>();
                break;
            default:
                ptx::cp_async_wait<4>();
        }
        __syncwarp();
        return stage_;
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        fetch(stage_);
        stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
    }

 private:
    __device__ void open_phase() {
        while (++phase_ < min(args_.last_phase, static_cast<int>(kSumPhase))) {
            TaskRange const range(args_, phase_, routed_jobs_);
            task_ = range.begin;
            end_task_ = range.end;
            if (open_task()) return;
        }
        phase_ = kSumPhase;
    }

    __device__ bool open_task() {
        for (; task_ < end_task_; ++task_) {
            ExpertTask const task(args_, phase_, routed_jobs_, task_);
            ExpertWeights const& w = args_.weights[phase_][task.segment];
            step_ = args_.split[phase_].k_groups;
            chunk_ = task.begin + task.k_group;
            end_ = task.end;
            if (chunk_ >= end_ || task.tile >= w.tiles()) continue;
            int const lane = threadIdx.x % 32;
            int const group = task.tile / kTilesPerGroup;
            int const row = task.tile % kTilesPerGroup * 8;
            int64_t const expert = job_of(args_, task).expert;
            k_ = w.k;
            pitch_ = w.k / 2;
            whole_ = group * 128 + 128 <= w.rows && w.k % kChunk == 0;
            int const first_row = group * 128 + row + lane / 8;
            rows_left_ = w.rows - first_row;
            codes_ = w.codes + (expert * w.rows + first_row) * pitch_ + lane % 8 * 16 + chunk_ * (kChunk / 2);
            int const scale_tiles = static_cast<int>(padded_blocks(w.k) / 4);
            scales_ = w.scales + expert * scale_bytes(w.rows, w.k) +
                      (static_cast<int64_t>(group) * scale_tiles + chunk_ * 4 + lane / 8) * 512 + (row + lane % 8) * 16;
            return true;
        }
        return false;
    }

    __device__ __forceinline__ void fetch(int stage) {
        if (phase_ < kSumPhase) {
            int const lane = threadIdx.x % 32;
            uint32_t const destination = ring_ + stage * kStageBytes;
            uint32_t const row = destination + lane / 8 * (kChunk / 2) + ((lane % 8) ^ (lane / 8 & 1)) * 16;
            uint32_t const scale = destination + kCodeBytes + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 * 2)) * 16;
            if (whole_) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    ptx::cp_async_16(row + i * 4 * (kChunk / 2), codes_ + static_cast<int64_t>(pitch_) * offset(i));
                }
                ptx::cp_async_16(scale, scales_);
            } else {
                fetch_edge(row, scale);
            }
            codes_ += step_ * (kChunk / 2);
            scales_ += step_ * 2048;
            chunk_ += step_;
            if (chunk_ >= end_) {
                ++task_;
                if (!open_task()) open_phase();
            }
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void fetch_edge(uint32_t row, uint32_t scale) {
        int const lane = threadIdx.x % 32;
        bool const inside = chunk_ * kChunk + lane % 8 * 32 < k_;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            bool const valid = inside && offset(i) < rows_left_;
            ptx::cp_async_16(row + i * 4 * (kChunk / 2), codes_ + static_cast<int64_t>(valid ? pitch_ : 0) * offset(i),
                             valid);
        }
        ptx::cp_async_16(scale, scales_, (chunk_ * 4 + lane / 8) * 64 < k_);
    }

    static __device__ constexpr int offset(int i) { return i / 2 * 32 + i % 2 * 4; }

    MoeArgs<T> const& args_;
    int const routed_jobs_;
    uint32_t const ring_;
    int const stages_;
    int stage_ = 0;
    int phase_, task_, end_task_, chunk_, end_;
    int step_, k_, pitch_, rows_left_;
    bool whole_;
    uint8_t const* codes_;
    uint8_t const* scales_;
};

// What a job's columns read: the row of x or of the hidden activations, and what it is multiplied by.
struct ColumnSource {
    int row[kMoeJobTokens];
    float factor[kMoeJobTokens];
};

// Activations of chunks [begin, end) to the panel, as multiply_chunk reads them. What lies in the places of columns
// that the job does not have stays: it reaches no column that is kept.
template <typename T, int kColumns>
__device__ void stage_job(T const* rows, ColumnSource const& source, bool scaled, bool awaited, int count, int k,
                          int begin, int end, uint8_t* panel) {
    constexpr int kBatch = 8;
    int const lane = threadIdx.x % 32;
    int const t = lane / 2 % 4;
    int const word = lane / 8 * 2 + lane % 2;
    int const units = (end - begin) * count;
    for (int first = threadIdx.x / 32; first < units; first += kWarps * kBatch) {
        int chunks[kBatch], tokens[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            chunks[i] = (first + i * kWarps) / count;
            tokens[i] = (first + i * kWarps) % count;
        }
        auto const offset = [&](int i) { return (begin + chunks[i]) * kChunk + t * 64 + word * 8; };
        auto const from = [&](int i) { return rows + static_cast<int64_t>(source.row[tokens[i]]) * k + offset(i); };
        uint4 eights[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            eights[i] = make_uint4(0u, 0u, 0u, 0u);
            if (first + i * kWarps < units && offset(i) < k) eights[i] = load_eight(from(i));
        }
        for (bool absent = awaited; absent;) {
            absent = false;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (!has_absent(eights[i])) continue;
                eights[i] = load_eight(from(i));
                absent = true;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kWarps >= units) break;
            if (scaled) {
                T* const values = reinterpret_cast<T*>(&eights[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    values[j] = ptx::from_float<T>(ptx::to_float(values[j]) * source.factor[tokens[i]]);
                }
            }
            int const slot = (word * kColumns + tokens[i] / 8) * 32 + tokens[i] % 8 * 4 + t;
            *reinterpret_cast<uint4*>(panel + chunks[i] * kPanelBytesPerChunk<kColumns> + slot * 16) =
                pair_activations<T>(eights[i]);
        }
    }
}

// Eight rows of a tile for one token: scale and bias, then the activation in T, or the plain float32 output.
template <typename T>
__device__ __noinline__ void finish_rows(MoeArgs<T> const& args, int phase, int segment, int split, int row, int at,
                                         uint4 bias_eight, float scale, float const* turned, int pitch) {
    ExpertWeights const& w = args.weights[phase][segment];
    float values[8] = {};
    for (int group = 0; group < args.split[phase].k_groups; ++group) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] += turned[group * pitch + i];
    }
    T const* const bias = reinterpret_cast<T const*>(&bias_eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fmaf(values[i], scale, ptx::to_float(bias[i]));
    if (phase == kDownPhase) {
        int64_t const rows = segment == kRouted ? int64_t{args.m} * args.top_k : args.m;
        float4* const out = reinterpret_cast<float4*>(args.outputs[segment] + (split * rows + at) * w.rows + row);
        __stcg(out, make_float4(values[0], values[1], values[2], values[3]));
        __stcg(out + 1, make_float4(values[4], values[5], values[6], values[7]));
        return;
    }
    with_activation(args.activation, [&](auto constant) {
        constexpr TrtNvfp4Activation kActivation = decltype(constant)::value;
        if (args.gated) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[i] = gated_activate(kActivation, values[2 * i], values[2 * i + 1], args.alpha, args.limit);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = activate(kActivation, values[i]);
        }
    });
    T rounded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[i] = ptx::from_float<T>(values[i]);
    Four const* const fours = reinterpret_cast<Four const*>(rounded);
    int const width = args.gated ? w.rows / 2 : w.rows;
    T* const out = args.hidden[segment] + static_cast<int64_t>(at) * width + (args.gated ? row / 2 : row);
    store_four(out, fours[0]);
    if (!args.gated) store_four(out + 4, fours[1]);
}

// Which activations the panel holds: those of a job, from a chunk on.
struct Staged {
    int job, begin;
};

// One task with up to 8 * kColumns pairs.
template <typename T, int kColumns>
__device__ __forceinline__ void run_task(MoeArgs<T> const& args, ExpertTask const& task, ExpertJob const& job,
                                         int phase, ExpertStream<T>& stream, uint8_t const* ring, uint8_t* panel,
                                         ColumnSource& source, Turned* turned, Staged& staged) {
    ExpertWeights const& w = args.weights[phase][task.segment];
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const k_groups = args.split[phase].k_groups;
    bool const has_rows = task.tile < w.tiles();
    int const row = task.tile / kTilesPerGroup * 128 + lane % 4 * 32 + task.tile % kTilesPerGroup * 8;

    // Read long before it is needed.
    uint4 bias = make_uint4(0u, 0u, 0u, 0u);
    if (row < w.rows && task.split == 0) {
        bias = *reinterpret_cast<uint4 const*>(static_cast<T const*>(w.bias) +
                                               static_cast<int64_t>(job.expert) * w.rows + row);
    }
    float const scale = w.tensor_scale[job.expert] * static_cast<float>(1 << Decoder<T>::kScaleShift);

    int const capacity = args.memory.panel_bytes / kPanelBytesPerChunk<kColumns>;
    // A single token is every expert's.
    bool const scaled = phase == kUpPhase && args.scale_input && task.segment == kRouted;
    int const staged_job = phase == kUpPhase && args.m == 1 && !args.scale_input ? 0 : 2 * task.job + task.segment;
    int const chunks = task.end - task.begin;
    int const panels = (chunks + capacity - 1) / capacity;
    int const panel_chunks = (chunks + panels - 1) / panels;
    Accumulators<kColumns> acc = {};
    for (int begin = task.begin; begin < task.end; begin += panel_chunks) {
        int const end = min(begin + panel_chunks, task.end);
        if (staged.job != staged_job || staged.begin != begin) {
            __syncthreads();
            int const column = threadIdx.x;
            if (column < job.count) {
                int position = job.first + column;
                if (phase == kUpPhase && task.segment == kRouted) {
                    int const pair = args.plan.order[position];
                    position = pair / args.top_k;
                    if (scaled) source.factor[column] = args.plan.weights[pair];
                }
                source.row[column] = position;
            }
            __syncthreads();
            stage_job<T, kColumns>(phase == kUpPhase ? args.x : args.hidden[task.segment], source, scaled,
                                   phase == kDownPhase, job.count, w.k, begin, end, panel);
            __syncthreads();
            staged = {staged_job, begin};
        }
        if (!has_rows) continue;
        int const behind = (begin - task.begin) % k_groups;
        for (int chunk = begin + (task.k_group - behind + k_groups) % k_groups; chunk < end; chunk += k_groups) {
            int const stage = stream.acquire();
            multiply_chunk<T, kColumns>(ring + stage * kStageBytes,
                                        panel + (chunk - begin) * kPanelBytesPerChunk<kColumns>, args.one, acc);
            stream.release();
        }
    }

#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        if (column * 8 >= job.count) break;
        if (k_groups > 1) __syncthreads();
        __syncwarp();
        turn(acc[0][column], acc[1][column], turned[warp]);
        __syncwarp();
        if (k_groups > 1) __syncthreads();
        int const token = column * 8 + lane / 4;
        if (!has_rows || column % k_groups != task.k_group || token >= job.count || row >= w.rows) continue;
        finish_rows(args, phase, task.segment, task.split, row, job.first + token, bias, scale,
                    &turned[warp - task.k_group][lane / 4][lane % 4 * 8], static_cast<int>(sizeof(Turned) / 4));
    }
}

// Four neighbouring outputs, once they are there: no arithmetic yields the NaN that stands for absent.
__device__ __forceinline__ bool is_absent(uint4 four) {
    return (four.x == ~0u) | (four.y == ~0u) | (four.z == ~0u) | (four.w == ~0u);
}

// y, four values a lane: outputs by rank, then by part of K, then the shared expert's.
template <typename T>
__device__ void sum_outputs(MoeArgs<T> const& args) {
    int const width = args.weights[kDownPhase][kRouted].rows;
    int const splits = args.split[kDownPhase].splits;
    int const slices = (width + 127) / 128;
    int const routed_terms = args.top_k * splits;
    int const terms = routed_terms + (args.shared_jobs > 0 ? splits : 0);
    int64_t const pairs = int64_t{args.m} * args.top_k;
    int const lane = threadIdx.x % 32;
    for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < args.m * slices; unit += kWarps * gridDim.x) {
        int const token = unit / slices;
        int const column = unit % slices * 128 + lane * 4;
        if (column >= width) continue;
        float sums[4] = {};
        constexpr int kBatch = 8;
        for (int first = 0; first < terms; first += kBatch) {
            float const* from[kBatch];
            float factors[kBatch];
            uint4 fours[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                int const term = min(first + i, terms - 1);
                int const split = term % splits;
                if (term < routed_terms) {
                    int const pair = token * args.top_k + term / splits;
                    factors[i] = args.scale_input ? 1.0f : args.plan.weights[pair];
                    from[i] = args.outputs[kRouted] + (split * pairs + args.plan.position[pair]) * width + column;
                } else {
                    factors[i] = args.plan.shared_factor[token];
                    from[i] = args.outputs[kShared] + (int64_t{split} * args.m + token) * width + column;
                }
                fours[i] = load_eight(from[i]);
            }
            for (bool absent = true; absent;) {
                absent = false;
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (!is_absent(fours[i])) continue;
                    fours[i] = load_eight(from[i]);
                    absent = true;
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i >= terms) break;
                sums[0] = fmaf(factors[i], __uint_as_float(fours[i].x), sums[0]);
                sums[1] = fmaf(factors[i], __uint_as_float(fours[i].y), sums[1]);
                sums[2] = fmaf(factors[i], __uint_as_float(fours[i].z), sums[2]);
                sums[3] = fmaf(factors[i], __uint_as_float(fours[i].w), sums[3]);
            }
        }
        __align__(8) T rounded[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rounded[i] = ptx::from_float<T>(sums[i]);
        *reinterpret_cast<uint2*>(args.y + static_cast<int64_t>(token) * width + column) =
            *reinterpret_cast<uint2 const*>(rounded);
    }
}

template <typename T>
__global__ __launch_bounds__(kThreads, 1) void sm80_w4a16_moe(__grid_constant__ MoeArgs<T> const args) {
    static_assert(sizeof(T) == 2, "activations are FP16 or BF16");
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ColumnSource source;
    __shared__ __align__(16) Turned turned[kWarps];
    int const ring_bytes = args.memory.stages * kStageBytes;
    uint8_t* const ring = shared + threadIdx.x / 32 * ring_bytes;
    uint8_t* const panel = shared + kWarps * ring_bytes;
    int const routed_jobs = *args.plan.job_count;

    ExpertStream<T> stream(args, routed_jobs, ring);
    // While the first weights are on their way: no column may be uninitialised.
    for (int i = threadIdx.x; i < args.memory.panel_bytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(panel)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    for (int phase = args.first_phase; phase < min(args.last_phase, static_cast<int>(kSumPhase)); ++phase) {
        Staged staged{-1, -1};
        TaskRange const range(args, phase, routed_jobs);
        for (int index = range.begin; index < range.end; ++index) {
            ExpertTask const task(args, phase, routed_jobs, index);
            ExpertJob const job = job_of(args, task);
            auto const run = [&](auto columns) {
                run_task<T, decltype(columns)::value>(args, task, job, phase, stream, ring, panel, source, turned,
                                                      staged);
            };
            if (job.count <= 8) {
                run(std::integral_constant<int, 1>{});
            } else if (job.count <= 16) {
                run(std::integral_constant<int, 2>{});
            } else if (job.count <= 32) {
                run(std::integral_constant<int, 4>{});
            } else {
                run(std::integral_constant<int, 8>{});
            }
        }
    }
    if (args.last_phase > kSumPhase) sum_outputs(args);
}

}  // namespace trt_nvfp4::w4a16
