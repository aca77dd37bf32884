// What the GPU and the host compiler both see.
#pragma once

#ifdef __CUDACC__
#define TRT_NVFP4_HOST_DEVICE __host__ __device__
#else
#define TRT_NVFP4_HOST_DEVICE
#endif
