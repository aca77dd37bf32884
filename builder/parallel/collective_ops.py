"""The sum over ranks as a Torch operator, which becomes one ONNX node."""

from collections.abc import Callable
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript import values

from trt_nvfp4.common.collectives import DOMAIN, NAME, attributes

_FORMALS = [OpSchema.FormalParameter(name, "T") for name in "xy"]
_SCHEMA = OpSchema(
    NAME,
    DOMAIN,
    1,
    inputs=_FORMALS[:1],
    outputs=_FORMALS[1:],
    type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
    attributes=[
        OpSchema.Attribute(name, OpSchema.AttrType.STRING if isinstance(value, str) else OpSchema.AttrType.INT)
        for name, value in attributes(1).items()
    ],
)
_collective = values.Op(values.Opset(DOMAIN, 1), NAME, _SCHEMA)


@torch.library.custom_op("trt_nvfp4::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sum of all ranks' `x`. Run here, with one rank, it is `x` itself."""
    return x.clone()


@all_reduce.register_fake
def _(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.empty_like(x)


def _dist_collective(x: Any, ranks: int) -> Any:
    return _collective(x, **attributes(ranks))


#: For torch.onnx.export's `custom_translation_table`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.trt_nvfp4.all_reduce.default: _dist_collective,
}
