// Decoder layers by one persistent launch (see decoder/sm80_decoder.cuh).
#pragma once

#include <cstddef>

#include "api/trt_nvfp4.h"

namespace trt_nvfp4::decoder {

// Whether the launch serves a call of so many tokens; on the current GPU, or where there is none on some.
bool serves(TrtNvfp4DecoderArgs const& args);

// Of every call that serves() and has no more tokens and sequences than `args`.
size_t workspace_bytes(TrtNvfp4DecoderArgs const& args);

// Caches are at args.present.
TrtNvfp4Status launch(TrtNvfp4DecoderArgs const& args, void* workspace, TrtNvfp4Stream stream);

}  // namespace trt_nvfp4::decoder
