// What the adapters of NVFP4MoE and FP8MoE have in common: everything but the experts' weights.
#pragma once

#include "op.h"

namespace trt_nvfp4 {

// The first inputs of both ops; the weights follow.
enum MoeInput { kX, kRouterLogits, kCorrectionBias, kExperts };

std::vector<Port> moe_ports();
// `own`: the op's.
std::vector<Attribute> moe_attributes(std::vector<Attribute> const& own = {});
// But for weights, quantize_activations and the sizes that the weights have.
TrtNvfp4MoeArgs moe_arguments(Call const& call);
// `first`: of the inputs behind the weights, which are shared_gate and the two scales.
void read_behind_weights(Call const& call, int32_t first, TrtNvfp4MoeArgs& args);

}  // namespace trt_nvfp4
