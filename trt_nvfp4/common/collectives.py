"""The node that adds up a tensor over ranks, as TensorRT's parser takes it: `DistCollective`.

It is in a domain of its own and has a body that hands the tensor on, so that ONNX tools check the model and run it as
one rank of one. TensorRT goes by the operator's name and makes an `IDistCollectiveLayer` (seen with TensorRT-RTX 1.7).
"""

from typing import Any

import onnx
from onnx import helper

DOMAIN, NAME = "trt_nvfp4.ranks", "DistCollective"


def attributes(ranks: int) -> dict[str, Any]:
    """Attributes of the sum over all `ranks`."""
    reduce = {"collective_operation": "all_reduce", "reduce_op": "sum"}
    return {**reduce, "root": -1, "group_size": 0, "nb_rank": ranks}


def is_collective(node: Any) -> bool:
    """Whether a node, of ONNX or onnx-ir, is one, or a function is its body."""
    return bool((getattr(node, "op_type", None) or node.name) == NAME and node.domain == DOMAIN)


def function(opset: int) -> onnx.FunctionProto:
    """The body: the tensor itself."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return helper.make_function(
        DOMAIN, NAME, ["x"], ["y"], [node], [helper.make_opsetid("", opset)], list(attributes(1))
    )
