"""A model with plugin nodes as one of only standard operators, for tools that have no plugin library."""

from pathlib import Path

import onnx_ir as ir

from trt_nvfp4.common.external_data import follow_links
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.local_functions import add_op_functions, inlined
from trt_nvfp4.common.onnx_process import changed_by_onnx
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.load.source import ModelError, checked


def inline_plugins(model: Path, destination: Path) -> None:
    """Writes `model`, in which the functions of plugins, and all others, are in the place of their nodes.

    Each node gets a name of its own: TensorRT's parser takes those of DequantizeLinear as they are, and refuses the
    second of a name, as the inlined function of a second plugin has.

    Raises ModelError for an invalid model, or one whose functions cannot be inlined; OSError.
    """
    proto = checked(model)
    folder = follow_links(proto, model.parent)
    try:
        add_op_functions(proto)
        standard = ir.from_proto(changed_by_onnx(inlined, proto))
    except (ValueError, LimitError) as error:
        raise ModelError(f"{model}: {error}") from error
    ir.external_data.set_base_dir(standard.graph, folder)
    standard.metadata_props.pop(REWRITTEN, None)
    _name_nodes(standard.graph)
    write(standard, destination)


def _name_nodes(graph: ir.Graph) -> None:
    """A name that no other node has, nor one that TensorRT's parser makes of another by "_" and a number."""
    taken: set[str] = set()
    for node in graph.all_nodes():
        name = node.name or ""
        if not name or name in taken:
            name = f"{node.outputs[0].name}/{node.op_type}"
        while name in taken:
            name += "'"
        node.name = name
        taken.add(name)
