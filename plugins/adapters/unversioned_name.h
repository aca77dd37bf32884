// The name by which TensorRT-RTX's ONNX parser opens TensorRT-RTX.
#pragma once

namespace trt_nvfp4 {

// Makes dlopen("libtensorrt_rtx.so") find the TensorRT-RTX that this process has loaded, if any: the parser opens that
// name when it meets a plugin, packages only hold libtensorrt_rtx.so.1, and the parser then ends the process.
void offer_unversioned_name();

}  // namespace trt_nvfp4
