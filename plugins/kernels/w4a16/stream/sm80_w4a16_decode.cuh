// E2M1 weights to pairs of 16-bit floats, exactly, without a table: 10 (FP16) or 12 (BF16) integer operations for 8
// weights.
//
// The three magnitude bits of a code, put where the target's lowest exponent bits and highest mantissa bit are, read as
// code * 2^-(target's bias - 1), subnormal included; the sign goes to the top. Multiplying by the block scale then
// gives weight * 2^-kScaleShift, exact because an E2M1 by E4M3 product has at most 6 significant bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace trt_nvfp4::w4a16 {

// sm_100 converts two codes of one byte in one instruction. It has no such conversion to BF16.
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
constexpr bool kNativeE2m1 = true;
#else
constexpr bool kNativeE2m1 = false;
#endif

// Bits of `a` where the mask is set, of `b` elsewhere. Written as the one LOP3 that it is: from an expression the
// compiler makes two.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t selected;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(selected) : "r"(mask), "r"(a), "r"(b));
    return selected;
}

// word << kBits by the multiplier, whose pipe is idle where the shifter's also does the logic and is the bottleneck. A
// constant factor would be turned back into a shift: `one` is a 1 that the compiler cannot know.
template <int kBits>
__device__ __forceinline__ uint32_t shift_left(uint32_t word, uint32_t one) {
    return word * (one << kBits);
}

// Both halves of the result hold byte kByte of `word`.
template <int kByte>
__device__ __forceinline__ uint32_t splat_byte(uint32_t word) {
    return __byte_perm(word, 0u, 0x4040 | kByte << 8 | kByte);
}

template <typename T>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t multiply<__half>(uint32_t a, uint32_t b) {
    __half2 const product = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<uint32_t const*>(&product);
}
template <>
__device__ __forceinline__ uint32_t multiply<__nv_bfloat16>(uint32_t a, uint32_t b) {
    __nv_bfloat162 const product =
        __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<uint32_t const*>(&product);
}

// a * b + c of FP16 pairs.
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    __half2 const sum =
        __hfma2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b), *reinterpret_cast<__half2*>(&c));
    return *reinterpret_cast<uint32_t const*>(&sum);
}

// Both halves of `a` times the low (0) or the high (1) half of `pair`: written so, the multiplication picks it for
// free.
template <typename T, int kHalf>
__device__ __forceinline__ uint32_t multiply_by_half(uint32_t a, uint32_t pair) {
    uint32_t product;
    if constexpr (std::is_same_v<T, __half>) {
        asm("{\n.reg .b16 halves<2>;\n.reg .b32 both;\nmov.b32 {halves0, halves1}, %2;\n"
            "mov.b32 both, {halves%3, halves%3};\nmul.f16x2 %0, %1, both;\n}"
            : "=r"(product)
            : "r"(a), "r"(pair), "n"(kHalf));
    } else {  // what is added is -0: before sm_90 a product is one of these
        asm("{\n.reg .b16 halves<2>;\n.reg .b32 both;\nmov.b32 {halves0, halves1}, %2;\n"
            "mov.b32 both, {halves%4, halves%4};\nfma.rn.bf16x2 %0, %1, both, %3;\n}"
            : "=r"(product)
            : "r"(a), "r"(pair), "r"(0x80008000u), "n"(kHalf));
    }
    return product;
}

// The same of FP16, plus c.
template <int kHalf>
__device__ __forceinline__ uint32_t multiply_add_by_half(uint32_t a, uint32_t pair, uint32_t c) {
    uint32_t sum;
    asm("{\n.reg .b16 halves<2>;\n.reg .b32 both;\nmov.b32 {halves0, halves1}, %2;\n"
        "mov.b32 both, {halves%4, halves%4};\nfma.rn.f16x2 %0, %1, both, %3;\n}"
        : "=r"(sum)
        : "r"(a), "r"(pair), "r"(c), "n"(kHalf));
    return sum;
}

template <typename T>
struct Decoder;

template <>
struct Decoder<__half> {
    static constexpr int kScaleShift = kNativeE2m1 ? 8 : 7;
    static constexpr bool kNeighbours = kNativeE2m1;  // pairs are codes 2i, 2i + 1; otherwise i, i + 4

    // Where products of unscaled codes are summed before block scales multiply them (add_products), results are short
    // of 2^kSumShift. With kSumExponent as that of the greatest activation no sum of four blocks exceeds FP16's range.
    static constexpr int kSumShift = kNativeE2m1 ? 8 : 14, kSumExponent = kSumShift - 2;

    // Two block scales from the low two bytes, for codes
    static __device__ __forceinline__ uint32_t scales(uint32_t bytes, uint32_t one) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        return multiply<__half>(unpack(bytes), kNativeE2m1 ? 0x1c001c00u : 0x58005800u);  // 2^-8, 2^7
#else
        return widen(__byte_perm(bytes, 0u, 0x4140), one);
#endif
    }

    // and for such sums.
    static __device__ __forceinline__ uint32_t sum_scales(uint32_t bytes, uint32_t one) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        return kNativeE2m1 ? scales(bytes, one) : unpack(bytes);
#else
        return multiply<__half>(scales(bytes, one), 0x20002000u);  // 2^-7
#endif
    }

    // A block scale, given as a byte in both halves.
    static __device__ __forceinline__ uint32_t widen(uint32_t splat, uint32_t one) {
        uint32_t const shifted = shift_left<7>(splat, one);  // scale * 2^-8
        return kNativeE2m1 ? shifted : multiply<__half>(shifted, 0x78007800u);
    }

    // Block scale number kByte of four, in both halves.
    template <int kByte>
    static __device__ __forceinline__ uint32_t scale(uint32_t four, uint32_t one) {
        return widen(splat_byte<kByte>(four), one);
    }

    // Two E4M3 values from the low two bytes.
    static __device__ __forceinline__ uint32_t unpack(uint32_t bytes) {
        uint32_t pair;
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
            : "=r"(pair)
            : "r"(bytes));
        return pair;
    }

    // The four pairs of a word of eight codes, unscaled.
    static __device__ __forceinline__ void codes(uint32_t word, uint32_t one, uint32_t (&pairs)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
        if constexpr (kNativeE2m1) {
            asm("{\n"
                ".reg .b8 byte<4>;\n"
                "mov.b32 {byte0, byte1, byte2, byte3}, %4;\n"
                "cvt.rn.f16x2.e2m1x2 %0, byte0;\n"
                "cvt.rn.f16x2.e2m1x2 %1, byte1;\n"
                "cvt.rn.f16x2.e2m1x2 %2, byte2;\n"
                "cvt.rn.f16x2.e2m1x2 %3, byte3;\n"
                "}"
                : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                : "r"(word));
            return;
        }
#endif
        uint32_t const high = select_bits(0x80808080u, word, word >> 3);
        // In every byte 000smmm0 + 01110000: the carry puts a set sign in place; the mask removes what an unset one
        // leaves.
        uint32_t const low = (word & 0x0f0f0f0fu) * (one << 1) + 0x70707070u;
        pairs[0] = shift_left<8>(low, one) & 0x8e008e00u;
        pairs[1] = shift_left<8>(high, one) & 0x8e008e00u;
        pairs[2] = low & 0x8e008e00u;
        pairs[3] = high & 0x8e008e00u;
    }
};

template <>
struct Decoder<__nv_bfloat16> {
    static constexpr int kScaleShift = 7;
    static constexpr bool kNeighbours = false;

    static __device__ __forceinline__ uint32_t scales(uint32_t bytes, uint32_t one) {
        return widen(__byte_perm(bytes, 0u, 0x4140), one);
    }

    static __device__ __forceinline__ uint32_t widen(uint32_t splat, uint32_t one) {
        uint32_t const shifted = shift_left<4>(splat, one);  // scale * 2^-120
        return multiply<__nv_bfloat16>(multiply<__nv_bfloat16>(shifted, 0x7b007b00u), 0x7b807b80u);
    }

    template <int kByte>
    static __device__ __forceinline__ uint32_t scale(uint32_t four, uint32_t one) {
        return widen(splat_byte<kByte>(four), one);
    }

    static __device__ __forceinline__ void codes(uint32_t word, uint32_t one, uint32_t (&pairs)[4]) {
        // The same carry, here in every half: 0000 00sm mmxx xx00 + 0111 1110 0000 0000. As many operations for the
        // multiplier's pipe as for the one that does logic.
        uint32_t const low = word & 0x00ff00ffu, high = __byte_perm(word, 0u, 0x4341);
        pairs[0] = ((word & 0x000f000fu) * (one << 6) + 0x7e007e00u) & 0x81c081c0u;
        pairs[1] = (low * (one << 2) + 0x7e007e00u) & 0x81c081c0u;
        pairs[2] = ((high & 0x000f000fu) * (one << 6) + 0x7e007e00u) & 0x81c081c0u;
        pairs[3] = (high * (one << 2) + 0x7e007e00u) & 0x81c081c0u;
    }
};

// sum + a word's unscaled codes times as many activations, in the pairs of codes(): FP16, in both halves.
__device__ __forceinline__ uint32_t add_products(uint32_t word, uint32_t one, uint4 x, uint32_t sum) {
    uint32_t pairs[4];
    Decoder<__half>::codes(word, one, pairs);
    sum = multiply_add(pairs[0], x.x, sum);
    sum = multiply_add(pairs[1], x.y, sum);
    sum = multiply_add(pairs[2], x.z, sum);
    return multiply_add(pairs[3], x.w, sum);
}

__device__ __forceinline__ float add_halves(uint32_t pair) {
    __half2 const halves = *reinterpret_cast<__half2 const*>(&pair);
    return __low2float(halves) + __high2float(halves);
}

// Eight neighbouring activations in the order in which codes() pairs eight neighbouring weights.
template <typename T>
__device__ __forceinline__ uint4 pair_activations(uint4 x) {
    if constexpr (Decoder<T>::kNeighbours) return x;
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
}

}  // namespace trt_nvfp4::w4a16
