"""The functions of a pattern.py for `polygraphy plugin match|list|replace --plugin-dir`.

`python -m trt_nvfp4.polygraphy_patterns DIR` writes that folder. `match` finds what build-engine finds, and writes
config.yaml: instances name the tensors x and y, and as attributes the tensors of the weights. Instances for MLPs that
no pattern knows are written by hand in the same way; `replace` quantizes the weights and puts the nodes in.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.products import MlpSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.surgeon import SurgeonError, method
from trt_nvfp4.surgeon_weights import names_of

_PATTERN = """\
from trt_nvfp4.polygraphy_patterns import Pattern

_pattern = Pattern({op!r})
get_plugin_metadata = _pattern.get_plugin_metadata
get_matching_subgraphs = _pattern.get_matching_subgraphs
replace_with_plugin = _pattern.replace_with_plugin
"""
# Attributes of instances that are found that name tensors.
_WEIGHTS = ("weight", "bias", "gate", "gate_bias", "up", "up_bias", "down", "down_bias")


@dataclass(frozen=True)
class Pattern:
    """The functions of one op's pattern.py."""

    op: str

    def get_plugin_metadata(self) -> dict[str, str]:
        return {"name": self.op, "op": self.op}

    def get_matching_subgraphs(self, graph: Any) -> list[dict[str, Any]]:
        """Instances that Polygraphy can name: x, y and whole weights are tensors of the model as it is."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(gs.export_onnx(graph.copy()), path)
            subgraphs = find_subgraphs(load(path))
        tensors = graph.tensors()
        found = [_instance(subgraph) for subgraph in subgraphs if subgraph.op == self.op]
        return [each for each in found if each is not None and _names(each) <= tensors.keys()]

    def replace_with_plugin(
        self, graph: Any, input_tensors: Sequence[Any], output_tensors: Sequence[Any], attrs: Mapping[str, Any], op: str
    ) -> Any:
        tensors, named = graph.tensors(), names_of(OPS[self.op])
        given: dict[str, Any] = {}
        for key, value in (attrs or {}).items():
            if key in named and value not in tensors:
                raise SurgeonError(f"instance of {self.op}: {key} names {value!r}, which is not a tensor of the graph")
            given[key] = tensors[value] if key in named else value
        outputs = output_tensors[0] if len(output_tensors) == 1 else output_tensors
        return method(graph, f"replace_with_{op}")(input_tensors[0], outputs, **given)


def _instance(subgraph: Subgraph) -> dict[str, Any] | None:
    attributes: dict[str, Any] = {"name": subgraph.name, "recipe": "mse"}
    if len(subgraph.linears) == 1:
        linear = subgraph.linears[0]
        x, y, linears = linear.x, linear.y, {"": linear}
    elif isinstance(subgraph, MlpSubgraph) and subgraph.is_plain:
        mlp = subgraph.blocks[0].mlp
        if mlp.flattens:
            return None
        x, y = subgraph.blocks[0].x, subgraph.blocks[0].y
        linears = {"up": mlp.up, "down": mlp.down} | ({} if mlp.gate is None else {"gate": mlp.gate})
        attributes |= {"activation": mlp.activation, "alpha": mlp.alpha, "limit": mlp.limit}
        if subgraph.op == "NVFP4PersistentMLP":
            attributes |= {"norm": 0, "residual": 0}
    else:
        return None
    layouts = {linear.weight.stored_transposed for linear in linears.values()}
    if len(layouts) > 1 or not all(_is_whole(linear) for linear in linears.values()):
        return None
    for name, linear in linears.items():
        attributes[name or "weight"] = linear.weight.stored.name
        if linear.bias is not None:
            attributes[f"{name}_bias".lstrip("_")] = linear.bias.stored.name
    return {"inputs": [x.name], "outputs": [y.name], "attributes": attributes | {"transposed": layouts.pop()}}


def _is_whole(linear: Linear) -> bool:
    weight, bias = linear.weight, linear.bias
    plain = weight.scale == 1 and weight.rows == slice(None) and weight.expert is None
    return plain and (bias is None or (bias.scale == 1 and bias.rows == slice(None) and bias.expert is None))


def _names(instance: Mapping[str, Any]) -> set[str]:
    weights = {value for key, value in instance["attributes"].items() if key in _WEIGHTS}
    return weights | set(instance["inputs"]) | set(instance["outputs"])


def write_patterns(folder: Path) -> None:
    """A folder in `folder` for each op, as `--plugin-dir` takes them. Raises OSError where it cannot be written."""
    for op in OPS:
        (folder / op).mkdir(parents=True, exist_ok=True)
        (folder / op / "pattern.py").write_text(_PATTERN.format(op=op))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m trt_nvfp4.polygraphy_patterns DIR")
    try:
        write_patterns(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
