// TensorRT's plugin interface: from its own headers where the build found them, from this folder's declaration
// otherwise.
#pragma once

#ifdef TRT_NVFP4_TENSORRT_HEADERS
#include <NvInferRuntime.h>
#else
#include "NvInferPluginV3.h"
#endif
