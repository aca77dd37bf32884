// Linear attention for every type and size, in float32: the yardstick of the fast kernels. A thread has columns of a
// state to itself, which lies in global memory.
#pragma once

#include "common/programmatic_launch.cuh"
#include "ptx/element.cuh"
#include "recurrent/args.cuh"

namespace trt_nvfp4::recurrent {

constexpr int kGenericThreads = 128;

template <typename T>
__global__ __launch_bounds__(kGenericThreads) void generic_linear_attention(Args<T> args) {
    wait_for_kernels_before();
    int const head = blockIdx.x, batch = blockIdx.y, columns = args.value_dim;
    float* const state = args.present + args.state(batch, head);
    for (int column = threadIdx.x; column < columns; column += kGenericThreads) {
        for (int i = 0; i < args.key_dim; ++i) {
            int64_t const place = int64_t{i} * columns + column;
            state[place] = args.past == nullptr ? 0.0f : args.past[args.state(batch, head) + place];
        }
        for (int token = 0; token < args.tokens; ++token) {
            T const* const key = args.key + args.row(batch, token, head, args.key_dim);
            float recalled = 0.0f;
            for (int i = 0; i < args.key_dim; ++i) {
                float& s = state[int64_t{i} * columns + column];
                if (args.decay_dim > 0) {
                    int64_t const row = args.row(batch, token, head, args.decay_dim);
                    s *= expf(ptx::to_float(args.decay[row + (args.decay_dim == 1 ? 0 : i)]));
                }
                recalled += s * ptx::to_float(key[i]);
            }
            float update = ptx::to_float(args.value[args.row(batch, token, head, columns) + column]);
            if (args.beta_heads > 0) update = ptx::to_float(args.beta_of(batch, token, head)) * (update - recalled);
            for (int i = 0; i < args.key_dim; ++i)
                state[int64_t{i} * columns + column] += ptx::to_float(key[i]) * update;
            for (int h = 0; h < args.group; ++h) {
                int64_t const row = (int64_t{batch} * args.tokens + token) * args.heads + head * args.group + h;
                float sum = 0.0f;
                for (int i = 0; i < args.key_dim; ++i) {
                    sum += ptx::to_float(args.query[row * args.key_dim + i]) * state[int64_t{i} * columns + column];
                }
                args.y[row * columns + column] = ptx::from_float<T>(sum * args.scale);
            }
        }
    }
}

template <typename T>
TrtNvfp4Status launch_generic(Args<T> const& args, cudaStream_t stream) {
    return launch_kernel(generic_linear_attention<T>, dim3(args.kv_heads, args.batch), kGenericThreads, 0, true, stream,
                         "generic_linear_attention", args);
}

}  // namespace trt_nvfp4::recurrent
