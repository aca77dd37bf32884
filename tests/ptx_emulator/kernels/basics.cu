// Small kernels that exercise the emulator's core; each host function launches one and returns the CUDA error.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define LAUNCH(call)                    \
    do {                                \
        call;                           \
        return cudaDeviceSynchronize(); \
    } while (0)

__global__ void SumKernel(float const* x, float* sum, int count) {
    __shared__ float partial[32];
    float value = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) value += x[i];
    for (int offset = 16; offset; offset >>= 1) value += __shfl_down_sync(~0u, value, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        value = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.f;
        for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
        if (threadIdx.x == 0) atomicAdd(sum, value);
    }
}
extern "C" int sum(float const* x, float* result, int count) { LAUNCH((SumKernel<<<3, 128>>>(x, result, count))); }

// Loops of different lengths, breaks, and a switch: lanes diverge and meet again.
__global__ void CollatzKernel(uint32_t const* x, uint32_t* steps, int count) {
    int const i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint32_t value = x[i], n = 0;
    while (value != 1) {
        value = value & 1 ? 3 * value + 1 : value / 2;
        if (++n > 60) break;
    }
    switch (value % 5) {
        case 0:
            n += 7;
            break;
        case 1:
            n ^= 3;
            break;
        case 2:
            n *= 2;
            break;
        case 3:
            n = __popc(n);
            break;
        default:
            n -= 1;
    }
    steps[i] = n;
}
extern "C" int collatz(uint32_t const* x, uint32_t* steps, int count) {
    LAUNCH((CollatzKernel<<<(count + 63) / 64, 64>>>(x, steps, count)));
}

__constant__ uint32_t kRound[4] = {0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u};

// A call that is not inlined, an indexed local array, and constant memory.
__noinline__ __device__ uint32_t Mix(uint32_t const* words, int count, uint32_t seed) {
    for (int i = 0; i < count; ++i) seed = (seed ^ words[i]) * kRound[i % 4] + (seed >> 7);
    return seed;
}
__global__ void MixKernel(uint32_t const* x, uint32_t* out) {
    uint32_t words[8];
    for (int i = 0; i < 8; ++i) words[(i * 5 + threadIdx.x) % 8] = x[threadIdx.x] + i;
    out[threadIdx.x] = Mix(words, 3 + threadIdx.x % 6, threadIdx.x) ^ Mix(words + 1, 2, 9);
}
extern "C" int mix(uint32_t const* x, uint32_t* out) { LAUNCH((MixKernel<<<1, 96>>>(x, out))); }

__global__ void IntegerKernel(int64_t const* a, int64_t const* b, int64_t* out) {
    int const i = threadIdx.x;
    int64_t const x = a[i], y = b[i];
    int32_t const u = int32_t(x), v = int32_t(y);
    int64_t* const row = out + 20 * i;
    row[0] = x * y;
    row[1] = y ? x / y : 0;
    row[2] = y ? x % y : 0;
    row[3] = __mul64hi(x, y);
    row[4] = int64_t(__umul64hi(uint64_t(x), uint64_t(y)));
    row[5] = __mulhi(u, v);
    row[6] = v ? u / v : 0;
    row[7] = int64_t(uint64_t(x) >> (y & 63));
    row[8] = x >> (y & 63);
    row[9] = __clz(u);
    row[10] = __brev(uint32_t(u));
    row[11] = __byte_perm(uint32_t(u), uint32_t(v), uint32_t(x >> 40) & 0x7777);
    row[12] = __funnelshift_l(uint32_t(u), uint32_t(v), uint32_t(y >> 48));
    row[13] = __dp4a(u, v, 5);
    row[14] = int64_t(double(x));
    row[15] = __ffsll(x) + __popcll(y) + max(u, v) - min(u, v);
    row[16] = __dp2a_lo(u, v, 7);
    row[17] = __dp2a_hi(u, v, 7);
    row[18] = __dp2a_hi(uint32_t(u), uint32_t(v), 7u);
    uint32_t picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(u), "r"(v), "r"(uint32_t(x >> 40)));
    row[19] = picked;
}
extern "C" int integers(int64_t const* a, int64_t const* b, int64_t* out) {
    LAUNCH((IntegerKernel<<<1, 256>>>(a, b, out)));
}

__global__ void VoteKernel(uint32_t const* x, uint32_t* out) {
    uint32_t const value = x[threadIdx.x];
    uint32_t result = __ballot_sync(~0u, value & 1);
    result += __match_any_sync(~0u, value % 5);
    result ^= __reduce_add_sync(~0u, value) ^ __reduce_max_sync(~0u, value);
    if (value & 2) result += __popc(__activemask()) + __shfl_sync(__activemask(), value, __ffs(__activemask()) - 1);
    __syncwarp();
    result += __syncthreads_count(value & 4);
    out[threadIdx.x] = result;
}
extern "C" int votes(uint32_t const* x, uint32_t* out) { LAUNCH((VoteKernel<<<1, 128>>>(x, out))); }

__global__ void AtomicKernel(uint32_t const* x, uint32_t* counts, uint32_t* extremes) {
    __shared__ uint32_t local[16];
    if (threadIdx.x < 16) local[threadIdx.x] = 0;
    __syncthreads();
    uint32_t const value = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&local[value % 16], 1);
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
    atomicMax(&extremes[0], value);
    atomicMin(&extremes[1], value);
    uint32_t old = extremes[2], seen;
    do {
        seen = old;
        old = atomicCAS(&extremes[2], seen, seen ^ value);
    } while (old != seen);
}
extern "C" int atomics(uint32_t const* x, uint32_t* counts, uint32_t* extremes) {
    LAUNCH((AtomicKernel<<<2, 64>>>(x, counts, extremes)));
}

// C[16 x 8] += A[16 x k] B[8 x k]^T with a two-stage cp.async pipeline, ldmatrix and mma.sync.
__global__ void GemmKernel(__nv_bfloat16 const* a, __nv_bfloat16 const* b, float* c, int k) {
    __shared__ alignas(128) __nv_bfloat16 tile_a[2][16][16];
    __shared__ alignas(128) __nv_bfloat16 tile_b[2][8][16];
    int const lane = threadIdx.x;
    auto load = [&](int stage, int start) {
        uint32_t target = uint32_t(__cvta_generic_to_shared(&tile_a[stage][lane / 2][lane % 2 * 8]));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
                     "l"(a + lane / 2 * k + start + lane % 2 * 8));
        if (lane < 16) {
            target = uint32_t(__cvta_generic_to_shared(&tile_b[stage][lane / 2][lane % 2 * 8]));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
                         "l"(b + lane / 2 * k + start + lane % 2 * 8));
        }
        asm volatile("cp.async.commit_group;");
    };
    float d[4] = {};
    load(0, 0);
    for (int start = 0; start < k; start += 16) {
        int const stage = start / 16 % 2;
        if (start + 16 < k) {
            load(stage ^ 1, start + 16);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        __syncwarp();
        uint32_t fragment_a[4], fragment_b[2];
        uint32_t const from_a = uint32_t(__cvta_generic_to_shared(&tile_a[stage][lane % 16][lane / 16 * 8]));
        uint32_t const from_b = uint32_t(__cvta_generic_to_shared(&tile_b[stage][lane % 8][lane / 8 % 2 * 8]));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment_a[0]), "=r"(fragment_a[1]), "=r"(fragment_a[2]), "=r"(fragment_a[3])
                     : "r"(from_a));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(fragment_b[0]), "=r"(fragment_b[1])
                     : "r"(from_b));
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(fragment_a[0]), "r"(fragment_a[1]), "r"(fragment_a[2]), "r"(fragment_a[3]), "r"(fragment_b[0]),
              "r"(fragment_b[1]));
        __syncwarp();
    }
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
extern "C" int gemm(__nv_bfloat16 const* a, __nv_bfloat16 const* b, float* c, int k) {
    LAUNCH((GemmKernel<<<1, 32>>>(a, b, c, k)));
}

__global__ void MathKernel(float const* x, float* out) {
    float const value = x[threadIdx.x];
    float* const row = out + 8 * threadIdx.x;
    row[0] = expf(value);
    row[1] = logf(fabsf(value) + 0.5f);
    row[2] = tanhf(value);
    row[3] = rsqrtf(value * value + 1);
    row[4] = erff(value);
    row[5] = fmaf(value, 3.0000002f, -value);
    row[6] = value / 3.1f;
    row[7] = __bfloat162float(__float2bfloat16(value));
}
extern "C" int maths(float const* x, float* out) { LAUNCH((MathKernel<<<1, 256>>>(x, out))); }

// Each CTA of a cluster sums its neighbour's shared memory.
__global__ void __cluster_dims__(4, 1, 1) NeighbourKernel(uint32_t const* x, uint32_t* out) {
    __shared__ uint32_t mine[64];
    mine[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    uint32_t const address = uint32_t(__cvta_generic_to_shared(mine + (threadIdx.x + 1) % 64));
    uint32_t remote, rank, value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"((rank + 1) % 4));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    out[blockIdx.x * 64 + threadIdx.x] = value + mine[threadIdx.x];
}
extern "C" int neighbours(uint32_t const* x, uint32_t* out) { LAUNCH((NeighbourKernel<<<8, 64>>>(x, out))); }

// A warp copies, a second awaits the copies and passes them on, a third awaits that in a loop whose branches differ.
__global__ void HandOverKernel(uint32_t const* x, uint32_t* flags, uint32_t* out) {
    __shared__ alignas(16) uint32_t copied[32];
    __shared__ alignas(8) uint64_t full;
    uint32_t const barrier = uint32_t(__cvta_generic_to_shared(&full));
    int const lane = threadIdx.x % 32;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(barrier));
    __syncthreads();
    if (threadIdx.x < 32) {
        if (lane < 8) {
            uint32_t const target = uint32_t(__cvta_generic_to_shared(copied + lane * 4));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(x + lane * 4));
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier));
    } else if (threadIdx.x < 64) {
        uint32_t done = 0;
        while (!done) {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(barrier)
                         : "memory");
        }
        atomicExch(flags + lane, copied[lane]);
    } else {
        uint32_t value = 0;
        for (bool absent = true; absent;) {
            absent = false;
            for (int part = 0; part < 2; ++part) {
                if (lane % 2 != part) continue;
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flags + lane) : "memory");
                if (value == 0) absent = true;
            }
        }
        out[lane] = value;
    }
}
extern "C" int hand_over(uint32_t const* x, uint32_t* flags, uint32_t* out) {
    LAUNCH((HandOverKernel<<<1, 96>>>(x, flags, out)));
}
