"""Inputs whose values are a shape: found before anything is quantized, and their ranges taken from --min-shapes."""

import onnx_ir as ir
import pytest
from onnx import parser

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.inputs.shape_values import shape_values, value_profiles
from trt_nvfp4.builder.inputs.shapes import Profile, opt_shapes_of


def found(body: str, inputs: str = "int64 keep") -> dict[str, int]:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 8] x, {inputs}) => (float[n, m] y) {{ {body} }}'
    )
    return shape_values(ir.from_proto(model).graph)


def test_a_number_of_tokens_to_keep() -> None:
    body = """
        minus = Neg(keep)  axis = Constant<value_ints = [0]>()  start = Unsqueeze(minus, axis)
        end = Constant<value_ints = [9999]>()  y = Slice(x, start, end, axis)
    """
    assert found(body) == {"keep": 1}


def test_a_whole_shape_and_one_that_is_unknown() -> None:
    assert found("y = Reshape(x, shape)", "int64[2] shape") == {"shape": 2}
    assert found("y = Expand(x, shape)", "int64[k] shape") == {"shape": -1}


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(x)  y = Reshape(x, s)",  # of the tensor, not of its values
        "f = Cast<to = 1>(keep)  y = Mul(x, f)",
        "y = Gather(x, keep)",
    ],
)
def test_other_inputs(body: str) -> None:
    assert found(body) == {}


def test_ranges() -> None:
    (profile,) = value_profiles({"keep": 1}, ({"keep": (1,)}, {}, {"keep": (512,)})).values()
    assert profile == Profile((1,), (512,), (512,), is_values=True)
    assert opt_shapes_of({"keep": profile, "x": Profile((1,), (2,), (3,))}) == {"x": (2,)}, "they are no shape of it"
    (profile,) = value_profiles({"s": 2}, ({}, {"s": (3, 4)}, {})).values()
    assert profile == Profile((3, 4), (3, 4), (3, 4), is_values=True)


@pytest.mark.parametrize(
    ("count", "bounds", "code", "message"),
    [
        (1, ({}, {}, {}), USAGE, "add --min-shapes keep:8, --opt-shapes keep:8, --max-shapes keep:8"),
        (2, ({}, {}, {"keep": (1,)}), USAGE, "--max-shapes keep:1: expected 2 values"),
        (1, ({"keep": (2,)}, {}, {"keep": (1,)}), USAGE, "out of order"),
        (-1, ({}, {}, {}), MODEL_AT_FAULT, "its values are a shape of unknown rank"),
    ],
)
def test_refused(count: int, bounds: tuple[dict[str, tuple[int, ...]], ...], code: int, message: str) -> None:
    with pytest.raises(BuilderError, match=message) as failure:
        value_profiles({"keep": count}, bounds)
    assert failure.value.exit_code == code
