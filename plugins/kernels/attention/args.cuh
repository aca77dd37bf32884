// One call of cached attention as the kernels see it, and what every one of them asks about a sequence.
//
// The caches are [batch, kv_heads, capacity, head_dim]. New token t of sequence b is at position past_length[b] + t;
// its key and value are row `position` of the caches. It attends to the keys at positions up to its own, with a window
// w to the latest w of them. What lies at and beyond `capacity` is neither written nor read.
#pragma once

#include <cstdint>

namespace trt_nvfp4::attention {

constexpr int kMaxHeadDim = 256;
constexpr int kLaneDims = kMaxHeadDim / 32;  // of a head, at most, for a lane of a warp

template <typename T>
struct Args {
    int batch, tokens, heads, kv_heads, head_dim, capacity;
    int group;        // heads / kv_heads
    int window;       // 0: none
    int rotary;       // leading dimensions of a head that are rotated; 0: none
    int interleaved;  // 1: pairs are (2i, 2i + 1); 0: (i, i + rotary / 2)
    int positions;    // rows of the tables
    int wide_lengths;
    float epsilon, scale, softcap;  // softcap 0: none
    T const* qkv;                   // [batch, tokens, heads + 2 kv_heads, head_dim]
    void* keys;                     // T or E4M3
    void* values;
    void const* past_length;  // [batch], int64 where wide_lengths, else int32
    float const* cosines;     // [positions, rotary / 2]
    float const* sines;
    T const* query_norm;  // [head_dim]; null: no norm
    T const* key_norm;
    float const* sinks;      // [heads]; null: none
    float const* key_scale;  // [kv_heads]; read where the caches are E4M3
    float const* value_scale;
    T* y;  // [batch, tokens, heads, head_dim]

    __host__ __device__ int rows() const { return tokens * group; }  // of one KV head, token by token
};

// What is cached of a sequence before and with the call, whatever past_length holds.
struct Sequence {
    int past, length;
    int first;  // the first key that any new token attends to

    template <typename T>
    __device__ Sequence(Args<T> const& args, int batch) {
        int64_t const given = args.wide_lengths ? static_cast<int64_t const*>(args.past_length)[batch]
                                                : static_cast<int32_t const*>(args.past_length)[batch];
        int64_t const capacity = args.capacity;
        past = static_cast<int>(given < 0 ? 0 : given > capacity ? capacity : given);
        int64_t const all = int64_t{past} + args.tokens;
        length = static_cast<int>(all < capacity ? all : capacity);
        first = args.window > 0 && past >= args.window ? past - args.window + 1 : 0;
    }

    __device__ int keys() const { return length > first ? length - first : 0; }
};

// Whether the token at `position` attends to `key`, which is cached.
__device__ __forceinline__ bool visible(int key, int position, int window) {
    return key <= position && (window == 0 || key > position - window);
}

template <typename T>
__device__ __forceinline__ int64_t cache_row(Args<T> const& args, int batch, int kv_head, int position) {
    return (int64_t{batch} * args.kv_heads + kv_head) * args.capacity + position;
}

// Row r of a KV head: head r % group of token r / group.
template <typename T>
__device__ __forceinline__ T* output_row(Args<T> const& args, int batch, int kv_head, int row) {
    int const token = row / args.group, head = kv_head * args.group + row % args.group;
    return args.y + ((int64_t{batch} * args.tokens + token) * args.heads + head) * args.head_dim;
}

}  // namespace trt_nvfp4::attention
