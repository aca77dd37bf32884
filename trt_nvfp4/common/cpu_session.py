"""ONNX Runtime on the CPU for models as large as memory: weights stay in their file, and no copy of them is made."""

from collections import Counter
from pathlib import Path

import onnx

from trt_nvfp4.common.nested_graphs import nested
from trt_nvfp4.common.onnx_runtime import onnxruntime, unsupported_operator
from trt_nvfp4.errors import TrtNvfp4Error

#: Optimizers of ONNX Runtime that are disabled. The first would hold a decoded copy of every weight; the next two fuse
#: quantization with the Relu or Clip in front of it, and know only integers: with FP8 one drops the Relu and one fails.
#: The last one moves Transposes through a cubic Resize, which then fails, as it takes no such layout.
DISABLED = ("ConstantFolding", "ReluQuantRewrite", "ClipQuantRewrite", "TransposeOptimizer_CPUExecutionProvider")


class TooOldError(TrtNvfp4Error):
    """This version of ONNX Runtime does not know the model's operators."""

    exit_code = 4


def cpu_session(model: onnx.ModelProto, folder: Path) -> onnxruntime.InferenceSession:
    """A session of `model`, widened (see `widen`), whose external data lies in `folder`; nodes of one name get others
    in `model`. Raises ONNX Runtime's own errors, which have no common base but Exception; TooOldError."""
    operators = {node.op_type for graph in nested(model.graph) for node in graph.node if not node.domain}
    for why in filter(None, map(unsupported_operator, sorted(operators))):
        raise TooOldError(why)
    _name_nodes_apart(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised as well; printed, they carry names as they are
    options.enable_cpu_mem_arena = False
    # The level above, new layouts, aborts on function bodies in ONNX Runtime 1.23, Python 3.10's last.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.disable_prepacking", "1")  # a packed copy of every weight
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # fuses FP8 into kernels for INT8
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=list(DISABLED),
    )


def _name_nodes_apart(model: onnx.ModelProto) -> None:
    """TensorRT takes nodes of one name, as merged exports have them, and ONNX Runtime does not."""
    for graph in nested(model.graph):
        taken = {node.name for node in graph.node}
        seen: Counter[str] = Counter()
        for node in graph.node:
            name = node.name
            seen[name] += 1
            while name and seen[name] > 1 and node.name in taken:
                node.name = f"{name}_{seen[name]}"
                seen[name] += node.name in taken
            taken.add(node.name)
