// A decoder's layers in one launch as its kernel sees them.
//
// Blocks exchange tagged words (exchange/tagged_words.cuh): nothing is erased and no fence keeps an order.
//
//     buffer           writer                 readers                       what must precede an overwrite
//     input            down of layer l - 1    kQkv, residual of kOutput     one layer's words are enough: a value of
//     qkv              kQkv                   attention                     the next layer's input needs every
//     attended         attention, combine     kOutput                       residual and hidden value of this one, all
//     middle           kOutput                kUp, residual of kDown        of attention's sums, every query, key and
//     hidden           kUp                    kDown                         value, and so the end of every task that
//     sums, softmaxes  attention, split       combine                       read what is then overwritten; tasks that
//     logits           experts' router        every block's choice          read nothing of it wait all the same
//     partials         tasks of a split       all blocks, same phase        the same
//     caches           attention's own block  the same block                each layer has its own
#pragma once

#include "attention/few_rows.cuh"
#include "attention/partials.cuh"
#include "w4a16/stream/sm80_w4a16_phases.cuh"

namespace trt_nvfp4::decoder {

constexpr int kMostTokens = 16;             // of a launch, whatever their sequences
constexpr int kMostHeads = 4096;            // as what Divisor divides allows
constexpr int kRows = attention::kFewRows;  // of a KV head that one of attention's work items takes
// Of a mixture of experts, and of what its router reads.
constexpr int kMostExperts = 256, kMostChosen = 32, kMostScored = 4096;

// A layer's projections; attention comes before kOutput.
enum Which { kQkv, kOutput, kUp, kDown, kProjections };

// A mixture in place of the MLP. A token's chosen experts are one MLP: their rows, one behind the other, are those of
// kUp, their hidden values the K of kDown; codes_per_layer and the like are of an expert.
template <typename T>
struct Experts {
    int count;  // 0: none
    int chosen, intermediate;
    TrtNvfp4Scoring scoring;
    bool renormalize;
    float scaling_factor;
    T const* router;         // [layers, count, hidden]
    w4a16::Partial* logits;  // [m, count]

    // Rows of an expert's gate and up, and of its hidden values.
    __device__ __forceinline__ int rows() const { return 2 * intermediate; }
    __device__ __forceinline__ int tiles() const { return rows() / w4a16::kTileRows; }
    __device__ __forceinline__ int chunks() const { return intermediate / w4a16::kChunk; }
};

template <typename T>
struct DecoderArgs : w4a16::PhasesArgs<T, kProjections> {
    // A word a value, of every token.
    uint32_t* input;     // of the layer, [m, hidden]
    uint32_t* qkv;       // [m, (heads + 2 kv_heads) head_dim]
    uint32_t* attended;  // [m, heads head_dim]
    uint32_t* middle;    // the layer's input plus attention, [m, hidden]
    uint32_t* hidden;    // [m, intermediate], of experts [m, chosen, intermediate]

    Experts<T> experts;
    // Phases of kUp in a layer, and of kDown: with experts, whose choice is each token's own, tokens take turns.
    int turns;
    Divisor by_phases;  // of a layer

    attention::Args<T> attention;  // of layer 0; its qkv and y are not read
    int64_t cache_bytes;           // of a layer's keys, which its values follow
    // Attention's work items: `slots` for every KV head and kRows of it, each of as many `item_rows` as the call has.
    int slots, item_rows, attention_warps;
    // Heads of a KV head, heads, tokens of a sequence, and eights of a head.
    Divisor by_group, by_heads, by_sequence, by_eights;
    w4a16::Partial* sums;       // [kv_heads * chunks, slots, item_rows, head_dim]
    w4a16::Partial* softmaxes;  // [kv_heads * chunks, slots, item_rows, 2]

    __device__ __forceinline__ w4a16::Step step(int phase) const {
        int const layer = by_phases.of(phase), at = phase - layer * (kUp + 2 * turns);
        if (at < kUp) return {at, layer, 0};
        int const turn = at - kUp;
        return turn < turns ? w4a16::Step{kUp, layer, turn} : w4a16::Step{kDown, layer, turn - turns};
    }
    __device__ __forceinline__ int chunks() const { return (attention.rows() + kRows - 1) / kRows; }
    __device__ __forceinline__ int64_t place(int pair, int slot, int row) const {
        return (int64_t{pair} * slots + slot) * item_rows + row;
    }
    // A layer's keys from their first row on.
    __device__ __forceinline__ uint8_t* keys_of(int layer) const {
        return static_cast<uint8_t*>(attention.keys) + 2 * layer * cache_bytes;
    }
    // Recomputed at each use: a layer's pointers kept in registers would spill.
    __device__ __forceinline__ attention::Args<T> attention_of(int layer) const {
        asm volatile("" : "+r"(layer));
        attention::Args<T> call = attention;
        call.keys = keys_of(layer);
        call.values = keys_of(layer) + cache_bytes;
        if (call.query_norm != nullptr) {
            call.query_norm += int64_t{layer} * call.head_dim;
            call.key_norm += int64_t{layer} * call.head_dim;
        }
        call.key_scale += int64_t{layer} * call.kv_heads;
        call.value_scale += int64_t{layer} * call.kv_heads;
        return call;
    }
};

}  // namespace trt_nvfp4::decoder
