"""Names of subgraphs come from module paths where the exporter left them; anything else there is passed over."""

from collections.abc import Callable

import onnx
import pytest

from onnx_models.graphs import mlp_model, spec
from onnx_models.passes import found_mlps
from trt_nvfp4.graph_passes.load.source import SourceModel

Load = Callable[[onnx.ModelProto], SourceModel]


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        ("['', 'model', 'model.mlp', 'linear']", "model.mlp"),
        ("['', 'linear']", "mlp_0"),
        ("['linear']", "mlp_0"),
        ("[]", "mlp_0"),
        ("[1, 2, 3]", "mlp_0"),
        ("'model.mlp'", "mlp_0"),
        ("model/mlp", "mlp_0"),
        ("", "mlp_0"),
    ],
)
def test_recorded_scopes(scopes: str, name: str, loaded: Load) -> None:
    model, _ = mlp_model(spec(gated=False))
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    assert [mlp.name for mlp in found_mlps(loaded(model))] == [name]
