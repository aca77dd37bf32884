"""What the definitions promise besides numbers: schemas, shapes, and one clear message for every misuse."""

import onnx
import pytest
import torch

from trt_nvfp4.plugins.ops import DOMAIN, OPS, VERSION, OpError

FLOAT16, INT8, FLOAT = "tensor(float16)", "tensor(int8)", "tensor(float)"
LINEAR_SHAPES = [("batch", None, 96), (40, 48), (128, 8), (), (40,), ()]
LINEAR_TYPES = [FLOAT16, INT8, INT8, FLOAT, FLOAT16, FLOAT]
GATED_SHAPES = [(2, 3, 32), (160, 16), (256, 4), (), (160,), (48, 40), (128, 8), (), (48,), (), ()]


def persistent_shapes(layers: int, k: int, n: int, h: int, i: int) -> list[tuple[int, ...]]:
    def tiled(rows: int, blocks: int) -> tuple[int, int]:
        return -(-rows // 128) * 128, -(-blocks // 4) * 4

    return [
        (5, k),
        (layers, k),
        (layers, n, k // 2),
        (layers, *tiled(n, k // 16)),
        (layers,),
        (layers, n),
        (layers, h, i // 2),
        (layers, *tiled(h, i // 16)),
        (layers,),
        (layers, h),
        (layers,),
        (layers,),
    ]


@pytest.mark.parametrize("op", OPS)
def test_schema_registers_and_matches_the_definition(op: str) -> None:
    schema = OPS[op].schema()
    onnx.defs.register_schema(schema)
    try:
        found = onnx.defs.get_schema(op, VERSION, DOMAIN)
        assert [i.name for i in found.inputs] == [f.name for f in OPS[op].inputs]
        assert [o.name for o in found.outputs] == [f.name for f in OPS[op].outputs]
        defaults = {n: onnx.helper.get_attribute_value(a.default_value) for n, a in found.attributes.items()}
        assert defaults == pytest.approx(dict(OPS[op].attributes))
    finally:
        onnx.defs.deregister_schema(op, VERSION, DOMAIN)


@pytest.mark.parametrize("op", OPS)
def test_function_has_the_inputs_outputs_and_attributes_of_the_definition(op: str) -> None:
    function = OPS[op].function(24)
    assert (function.domain, function.name) == (DOMAIN, op)
    assert list(function.input) == [f.name for f in OPS[op].inputs]
    assert list(function.output) == [f.name for f in OPS[op].outputs]
    assert {a.name for a in function.attribute_proto} == set(OPS[op].attributes)
    assert [(o.domain, o.version) for o in function.opset_import] == [("", 24)]


def test_function_refuses_opsets_that_it_does_not_serve() -> None:
    with pytest.raises(OpError, match="opset 17 or newer, found opset 16"):
        OPS["NVFP4Linear"].function(16)


def test_node_writes_every_attribute() -> None:
    node = OPS["NVFP4GatedMLP"].node([f"i{i}" for i in range(11)], ["y"], "mlp", alpha=2.0)
    assert {a.name for a in node.attribute} == set(OPS["NVFP4GatedMLP"].attributes)
    assert next(a.f for a in node.attribute if a.name == "alpha") == 2.0


def test_node_refuses_a_wrong_number_of_inputs() -> None:
    with pytest.raises(OpError, match="6 inputs and 1 outputs, found 2 and 1"):
        OPS["NVFP4Linear"].node(["x", "w"], ["y"])


def test_output_shapes_keep_symbolic_leading_dimensions() -> None:
    assert OPS["NVFP4Linear"].output_shapes(LINEAR_SHAPES) == [("batch", None, 40)]
    assert OPS["NVFP4GatedMLP"].output_shapes(GATED_SHAPES) == [(2, 3, 48)]
    assert OPS["NVFP4PersistentMLP"].output_shapes(persistent_shapes(3, 32, 160, 32, 80)) == [(5, 32)]
    assert OPS["NVFP4Quantize"].output_shapes([(2, 70, 80), (2, 70, 80), (80,), ()]) == [
        (2, 70, 40),
        (256, 8),
        (),
        (2, 70, 80),
    ]
    assert OPS["NVFP4Quantize"].output_shapes([("n", 80), ("n", 80), (80,), ()])[1] == (None, 8)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (4, 24), r"K of x must be a positive multiple of 16 .*found 24"),
        (0, (4, None), r"last dimension of x must be known, found shape \[4, \?\]"),
        (0, (), "last dimension of x"),
        (1, (40, 24), r"weight must have shape \[40, 48\], found \[40, 24\]"),
        (1, (40, 48, 1), r"weight must have shape \[N, 48\], found \[40, 48, 1\]"),
        (2, (40, 6), r"weight_scales must have shape \[128, 8\], found \[40, 6\]"),
        (3, (1,), r"weight_tensor_scale must have shape \[\], found \[1\]"),
        (4, (1,), r"bias must have shape \[40\], found \[1\]"),
    ],
)
def test_linear_shape_errors(position: int, shape: tuple[int | None, ...], message: str) -> None:
    shapes = list(LINEAR_SHAPES)
    shapes[position] = shape
    with pytest.raises(OpError, match=f"NVFP4Linear: .*{message}"):
        OPS["NVFP4Linear"].output_shapes(shapes)


@pytest.mark.parametrize(
    ("position", "type_", "message"),
    [
        (0, "tensor(double)", r"x must be tensor\(float16\) or tensor\(bfloat16\) or tensor\(float\)"),
        (1, "tensor(uint8)", r"weight must be tensor\(int8\), found tensor\(uint8\)"),
        (2, "tensor(float8e4m3fn)", r"weight_scales must be tensor\(int8\)"),
        (4, "tensor(float)", r"bias must be tensor\(float16\), found tensor\(float\)"),
        (5, None, r"input_tensor_scale must be tensor\(float\), found None"),
    ],
)
def test_type_errors(position: int, type_: str | None, message: str) -> None:
    types: list[str | None] = list(LINEAR_TYPES)
    OPS["NVFP4Linear"].check(LINEAR_SHAPES, types)
    types[position] = type_
    with pytest.raises(OpError, match=message):
        OPS["NVFP4Linear"].check(LINEAR_SHAPES, types)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activation": 9}, "activation must be one of 0 identity, .*found 9"),
        ({"activation": 7}, "swiglu_clamped needs a gate"),
        ({"activation": 8}, "silu_clamped needs a gate"),
        ({"quantize_activations": 2}, "quantize_activations must be 0 or 1, found 2"),
        ({"alpha": 1.0}, "no attribute alpha"),
    ],
)
def test_attribute_errors(attributes: dict[str, int], message: str) -> None:
    with pytest.raises(OpError, match=message):
        OPS["NVFP4Linear"].output_shapes(LINEAR_SHAPES, **attributes)


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf"), -1e-6])
def test_epsilon_must_be_a_finite_non_negative_number(epsilon: float) -> None:
    with pytest.raises(OpError, match="epsilon must be finite"):
        OPS["NVFP4Quantize"].output_shapes([(1, 16), (1, 16), (16,), ()], epsilon=epsilon)


def test_attributes_have_the_type_that_the_schema_declares() -> None:
    """TensorRT hands a plugin INT or FLOAT as the node has it, and a plugin takes its own alone."""
    definition = OPS["NVFP4GatedMLP"]
    names = [formal.name for formal in definition.inputs]
    node = definition.node(names, ["y"], limit=7, activation=3.0, quantize_activations=True)
    declared = {name: attribute.type for name, attribute in definition.schema().attributes.items()}
    assert {entry.name: int(entry.type) for entry in node.attribute} == {n: int(t.value) for n, t in declared.items()}


def test_gate_and_up_make_an_even_number_of_rows() -> None:
    shapes = list(GATED_SHAPES)
    shapes[1:5] = [(161, 16), (256, 4), (), (161,)]
    with pytest.raises(OpError, match=r"even number of rows .*found 161"):
        OPS["NVFP4GatedMLP"].output_shapes(shapes)


@pytest.mark.parametrize(("layers", "residual"), [(2, 0), (1, 1)])
def test_persistent_mlp_chains_only_equal_widths(layers: int, residual: int) -> None:
    shapes = persistent_shapes(layers, 32, 160, 48, 80)
    with pytest.raises(OpError, match="need H == K, found H = 48, K = 32"):
        OPS["NVFP4PersistentMLP"].output_shapes(shapes, residual=residual)
    assert OPS["NVFP4PersistentMLP"].output_shapes(persistent_shapes(1, 32, 160, 48, 80), residual=0) == [(5, 48)]


def test_persistent_mlp_needs_a_layer() -> None:
    with pytest.raises(OpError, match="L >= 1"):
        OPS["NVFP4PersistentMLP"].output_shapes(persistent_shapes(0, 32, 160, 32, 80))


def test_plain_persistent_mlp_takes_no_gated_activation() -> None:
    with pytest.raises(OpError, match="needs a gate"):
        OPS["NVFP4PersistentMLP"].output_shapes(persistent_shapes(1, 32, 80, 32, 80), gated=0, activation=7)


def test_reference_checks_its_tensors() -> None:
    with pytest.raises(OpError, match="takes 6 inputs, found 1"):
        OPS["NVFP4Linear"].reference(torch.ones(2, 16))
