"""What a manifest says of a planned subgraph, as most tests of verification need it."""

from trt_nvfp4.builder.tensorrt.verify import PlannedNodes
from trt_nvfp4.graph_passes.lowerings.registry import FP8_PLUGIN, LOWERINGS

LAYERS = {
    lowering.layers.name: lowering.layers
    for lowering in (*LOWERINGS.values(), FP8_PLUGIN)
    if lowering.layers is not None
}


def planned_nodes(
    name: str, decision: str, *nodes: str, quantized: tuple[str, ...] = (), caches: tuple[str, ...] = ()
) -> PlannedNodes:
    """`nodes` carry the subgraph `name`, in the manifest's words for a decision."""
    layers = LAYERS[decision]
    return PlannedNodes(name, decision, layers.shown, layers.carrier, layers.datatypes, nodes, quantized, caches)
