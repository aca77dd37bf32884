"""The largest magnitudes of weights of which a model holds one rank's share: of the whole ones, in its metadata, so
that all ranks quantize with the tensor scale of the model that was split."""

import json
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.subgraphs.parts import WHOLE_AMAX
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, constant
from trt_nvfp4.graph_passes.weights.quantization import weight_readers

#: The entry in the metadata of an ONNX file.
KEY = "trt_nvfp4.whole_amax"
#: By weight; of stacked experts one for each.
Magnitudes = Mapping[str, Sequence[float]]


def magnitudes(graph: ir.Graph) -> dict[str, list[float]]:
    """Those of every weight that a linear of `graph` multiplies."""
    found = {}
    for stored in weight_readers(graph):
        weight = as_torch(constant(stored))
        experts = weight if weight.dim() > 2 else [weight]
        found[str(stored.name)] = [float(torch.stack(torch.aminmax(one)).abs().max()) for one in experts]
    return found


def text_of(found: Magnitudes) -> str:
    """The entry `KEY`."""
    return json.dumps(found)


def note_whole_amax(model: ir.Model) -> None:
    """Tell the weights of `model` what its metadata says of them; nothing where it says nothing. Raises ModelError for
    an invalid entry."""
    text = model.metadata_props.get(KEY)
    if text is None:
        return
    try:
        found = parse_json(text)
        for name, values in found.items():
            if not values or not all(type(value) is float and 0 <= value < math.inf for value in values):
                raise ValueError(f"{name}: {values!r}")
            if (stored := model.graph.initializers.get(name)) is not None:
                stored.meta[WHOLE_AMAX] = values
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"metadata entry {KEY}: was not written by this program ({error}); build the ranks again"
        ) from error
