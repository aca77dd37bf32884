// Decoder layers by one persistent launch (see decoder/sm80_decoder.cuh).
#pragma once

#include <cstddef>

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::decoder {

// Whether the library has its kernel of the call's types; float32 has none.
bool is_linked(TrtNvfp4DecoderArgs const& args);

// True if the launch serves a call of so many tokens on the current GPU; without a GPU, on any.
bool serves(TrtNvfp4DecoderArgs const& args);

// Enough for every call that serves() accepts with no more tokens and sequences than `args`.
size_t workspace_bytes(TrtNvfp4DecoderArgs const& args);

// Caches are at args.present.
TrtNvfp4Status launch(TrtNvfp4DecoderArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::decoder
