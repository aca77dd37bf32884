// What the architectures that this library is compiled for have in common, for workspaces that are sized before the GPU
// is known.
#pragma once

namespace trt_nvfp4 {

// Whether `has`, of an architecture as in __CUDA_ARCH__, holds for all of them. True only of kernels for sm_90a and
// Blackwell: code for those runs on no other GPU, not even as PTX.
template <typename Has>
constexpr bool on_every_architecture(Has has) {
    for (int architecture : {__CUDA_ARCH_LIST__}) {
        if (!has(architecture)) return false;
    }
    return true;
}

}  // namespace trt_nvfp4
