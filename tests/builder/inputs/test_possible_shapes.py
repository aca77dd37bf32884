"""Shapes that a model cannot have are told before anything is quantized."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.inputs.possible_shapes import check_possible
from trt_nvfp4.builder.inputs.shapes import Profile
from trt_nvfp4.graph_passes.load.source import SourceModel, load

Model = Callable[..., SourceModel]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    def make(body: str, **constants: list[int]) -> SourceModel:
        made = parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21]> g (float[patches, 8] x) => (float[a, b] y) {{ {body} }}'
        )
        constants = {"four": [-1, 32], **constants}
        made.graph.initializer.extend(numpy_helper.from_array(np.array(c), name) for name, c in constants.items())
        onnx.save(made, tmp_path / "m.onnx")
        return load(tmp_path / "m.onnx")

    return make


PACKED = "grouped = Reshape(x, four)  [act] y = Relu(grouped)"


def test_packed_patches(model: Model) -> None:
    source = model(PACKED)
    fits = Profile((4, 8), (8, 8), (64, 8))
    check_possible(source.path, source, [{"x": fits}])
    for profile, shown in ((Profile((1, 8), (8, 8), (64, 8)), "x:1x8"), (Profile((4, 8), (8, 8), (65, 8)), "x:65x8")):
        with pytest.raises(UsageError, match=rf"m\.onnx: .* at {shown}, node .*Reshape.*--min-shapes"):
            check_possible(source.path, source, [{"x": fits}, {"x": profile}])


def test_shapes_that_nothing_contradicts(model: Model) -> None:
    source = model("y = Relu(x)")
    check_possible(source.path, source, [{"x": Profile((1, 8), (1, 8), (3, 8))}])
    values = Profile((7,), (7,), (7,), is_values=True)
    check_possible(source.path, source, [{"x": values}])


@pytest.mark.parametrize("sizes", [[1, 4, 2], [1, 8]])
def test_a_number_of_values_that_a_reshape_fixes(sizes: list[int], model: Model) -> None:
    source = model("y = Reshape(x, fixed)", fixed=sizes)
    check_possible(source.path, source, [{"x": Profile((1, 8), (1, 8), (1, 8))}])
    with pytest.raises(UsageError, match=r"x:4x8, node .*\(Reshape\): \[4, 8\] do not fit"):
        check_possible(source.path, source, [{"x": Profile((1, 8), (1, 8), (4, 8))}])
